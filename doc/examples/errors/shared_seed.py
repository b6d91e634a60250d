"""All environments get the same seed."""

import gymnasium as gym
import numpy as np


def broken():
    """How many of four environments differ in their first observation."""
    envs = [gym.make("CartPole-v1") for _ in range(4)]
    obs = [env.reset(seed=1)[0] for env in envs]
    return len(np.unique(obs, axis=0))


def fixed():
    envs = [gym.make("CartPole-v1") for _ in range(4)]
    obs = [env.reset(seed=1 + i)[0] for i, env in enumerate(envs)]
    return len(np.unique(obs, axis=0))


def is_right(different):
    return different == 4
