"""A time limit is treated as a terminal state: the value of what would come after it is taken to be 0."""

import gymnasium as gym
import numpy as np

GAMMA = 0.9
TRUE_VALUE = 1 / (1 - GAMMA)


class Forever(gym.Env):
    """Pays 1 in each step and never ends; there is only one state."""

    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 1.0, False, False, {}


def broken():
    """The value of the one state, by TD(0)."""
    env = gym.wrappers.TimeLimit(Forever(), 10)
    value = 0.0
    for _ in range(300):
        env.reset()
        done = False
        while not done:
            _, reward, terminated, truncated, _ = env.step(0)
            done = terminated or truncated
            target = reward + GAMMA * (1 - done) * value
            value += 0.05 * (target - value)
    return value


def fixed():
    env = gym.wrappers.TimeLimit(Forever(), 10)
    value = 0.0
    for _ in range(300):
        env.reset()
        done = False
        while not done:
            _, reward, terminated, truncated, _ = env.step(0)
            done = terminated or truncated
            target = reward + GAMMA * (1 - terminated) * value
            value += 0.05 * (target - value)
    return value


def is_right(value):
    return abs(value - TRUE_VALUE) < 0.1
