"""Environments are seeded, random actions are not: two runs with the same seed differ."""

import gymnasium as gym


def broken():
    """The first random actions of two runs with the same seed."""
    runs = []
    for _ in range(2):
        env = gym.make("Pendulum-v1")
        env.reset(seed=1)
        runs.append([float(env.action_space.sample()[0]) for _ in range(3)])
    return runs


def fixed():
    runs = []
    for _ in range(2):
        env = gym.make("Pendulum-v1")
        env.reset(seed=1)
        env.action_space.seed(1)
        runs.append([float(env.action_space.sample()[0]) for _ in range(3)])
    return runs


def is_right(runs):
    return runs[0] == runs[1]
