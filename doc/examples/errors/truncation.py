"""A time limit is taken for the end of the world: the value after it is called 0."""

import gymnasium as gym
import numpy as np

GAMMA = 0.9
TRUE_VALUE = 1 / (1 - GAMMA)


class Forever(gym.Env):
    """Pays 1 in each step, forever; nothing is to be seen."""

    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 1.0, False, False, {}


def value(is_the_end):
    """The value of the one state, by TD(0) over 300 episodes; `is_the_end` says after which steps there is nothing."""
    env = gym.wrappers.TimeLimit(Forever(), 10)
    estimate = 0.0
    for _ in range(300):
        env.reset()
        terminated = truncated = False
        while not (terminated or truncated):
            _, reward, terminated, truncated, _ = env.step(0)
            target = reward + GAMMA * (not is_the_end(terminated, truncated)) * estimate
            estimate += 0.05 * (target - estimate)
    return estimate


def broken():
    """The value that is learned; in truth it is 10."""
    return value(lambda terminated, truncated: terminated or truncated)


def fixed():
    return value(lambda terminated, truncated: terminated)


def is_right(estimate):
    return abs(estimate - TRUE_VALUE) < 0.1
