"""With NEXT_STEP autoreset, the step after the end of an episode only resets, and must not be stored."""

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv


def setting():
    """Two CartPoles, which pay 1 in each step."""
    envs = SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2, autoreset_mode=AutoresetMode.NEXT_STEP)
    envs.action_space.seed(1)
    envs.reset(seed=1)
    return envs


def broken():
    """All different rewards that are stored."""
    envs = setting()
    stored = []
    for _ in range(200):
        _, rewards, _, _, _ = envs.step(envs.action_space.sample())
        stored.extend(rewards)
    return np.unique(stored).tolist()


def fixed():
    envs = setting()
    stored = []
    ended = np.zeros(envs.num_envs, bool)
    for _ in range(200):
        _, rewards, terminated, truncated, _ = envs.step(envs.action_space.sample())
        stored.extend(rewards[~ended])
        ended = terminated | truncated
    return np.unique(stored).tolist()


def is_right(rewards):
    return rewards == [1.0]
