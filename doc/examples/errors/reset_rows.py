"""A vector environment with NEXT_STEP autoreset gives a row after each episode in which nobody acted."""

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv


def rollout(keep):
    """The rewards that are stored in 200 steps of CartPole, which pays 1 in each step; `keep` chooses the rows."""
    envs = SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2, autoreset_mode=AutoresetMode.NEXT_STEP)
    envs.reset(seed=1)
    envs.action_space.seed(1)
    ended = np.zeros(2, bool)
    stored = []
    for _ in range(200):
        _, rewards, terminated, truncated, _ = envs.step(envs.action_space.sample())
        stored += list(rewards[keep(ended)])
        ended = terminated | truncated
    envs.close()
    return stored


def broken():
    """The rewards stored."""
    return rollout(lambda ended: np.ones(2, bool))


def fixed():
    return rollout(lambda ended: ~ended)  # the row after an end has no action: it leads from one episode into the next


def is_right(rewards):
    return set(rewards) == {1.0}
