"""Environments and helpers that the tests share."""

import importlib
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: processes that share cores wait for threads

import gymnasium as gym
import numpy as np

ALGORITHMS = {name: f"{name}_continuous_action" for name in ("sac", "td3", "ppo")} | {"dqn": "dqn"}
PLAIN = {name: importlib.import_module(f"leanrl.{script}") for name, script in ALGORITHMS.items()}
TURBO = {name: importlib.import_module(f"leanrl.{script}_torchcompile") for name, script in ALGORITHMS.items()}


class Countdown(gym.Env):
    """Shows the steps since reset and the episode; rewards each step with 1; terminates or truncates after `length`."""

    def __init__(self, length=3, terminates=False, low=(-1.0,), high=(1.0,), blind=False, dtype=np.float32):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = gym.spaces.Box(np.array(low, dtype), np.array(high, dtype), dtype=dtype)
        self.length, self.terminates, self.blind, self.episode = length, terminates, blind, -1

    def observation(self):
        return np.array([self.steps, self.episode / 1000], np.float32) * (not self.blind)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.episode = 0, self.episode + 1
        return self.observation(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.steps += 1
        ended = self.steps == self.length
        return self.observation(), 1.0, ended and self.terminates, ended and not self.terminates, {}


UNEQUAL = {"low": [-1.0, -10.0, 0.0], "high": [3.0, -8.0, 0.5]}
ENVIRONMENTS = {
    "Truncates-v0": {},
    "Terminates-v0": {"terminates": True},
    "BlindTruncates-v0": {"blind": True},
    "BlindTerminates-v0": {"blind": True, "terminates": True},
    "Unequal-v0": {"length": 20, **UNEQUAL},
    "DoublePrecision-v0": {"dtype": np.float64},
    "Unbounded-v0": {"low": [-np.inf], "high": [np.inf]},
}
for name, kwargs in ENVIRONMENTS.items():
    gym.register(name, entry_point=Countdown, kwargs=kwargs)


def leaves(state, path=""):
    """All that is in nested dictionaries and lists, each with its path."""
    if not isinstance(state, (dict, list)):
        return [(path, state)]
    items = state.items() if isinstance(state, dict) else enumerate(state)
    return [leaf for name, value in items for leaf in leaves(value, f"{path}.{name}")]
