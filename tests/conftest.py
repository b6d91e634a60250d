"""Environments and helpers that the tests share."""

import importlib

import gymnasium as gym
import numpy as np
import pytest
import torch

PLAIN = importlib.import_module("leanrl.sac_continuous_action")
TURBO = importlib.import_module("leanrl.sac_continuous_action_torchcompile")


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


@pytest.fixture(params=[PLAIN, TURBO], ids=["plain", "turbo"])
def script(request):
    return request.param


def make_learner(module, seed=1, device="cpu", **kwargs):
    """A SAC learner of `module` for Args(**kwargs), by default small and on Pendulum."""
    args = module.Args(**{"env_id": "Pendulum-v1", "batch_size": 32, "buffer_size": 64} | kwargs)
    torch.manual_seed(seed)
    return module.SAC(args, module.make_envs(args, args.num_envs), torch.device(device))


def transitions(learner, generator):
    """Random columns for `SAC.observe`, that is obs, next_obs, actions, rewards, terminated and the obs to act on."""
    n, obs_dim, act_dim = learner.num_envs, learner.obs_dim, learner.act_dim
    normal = generator.standard_normal
    terminated = generator.random(n) < 0.1
    return normal((n, obs_dim)), normal((n, obs_dim)), normal((n, act_dim)), normal(n), terminated, normal((n, obs_dim))
