"""Tasks that show what action masks are worth: Taxi without its masks, and a task whose best return is known.

PYTHONPATH=. python leanrl/ppo_torchcompile.py --env-id benchmark.masked_tasks:HighOrLow-v0 --compile
"""

import gymnasium as gym
import numpy as np


class WithoutMasks(gym.Wrapper):
    """Drops the action masks of an environment."""

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        info.pop("action_mask")
        return obs, info

    def step(self, action):
        *outcome, info = self.env.step(action)
        info.pop("action_mask")
        return *outcome, info


class HighOrLow(gym.Env):
    """Take the highest allowed choice for each part of an action where the observation is 1, the lowest where it is -1.

    The reward is the number of parts that are right: at most `length` times the number of parts in an episode. About
    half of the choices are allowed; others raise an error. Observations do not show which: only the mask does, an array
    for Discrete actions and a tuple of arrays for MultiDiscrete ones. An episode's last state allows nothing.
    """

    def __init__(self, action_space, length=10, terminates=False):
        self.action_space, self.length, self.terminates = action_space, length, terminates
        self.discrete = isinstance(action_space, gym.spaces.Discrete)
        self.sizes = [action_space.n] if self.discrete else action_space.nvec
        self.observation_space = gym.spaces.Box(-1, 1, (len(self.sizes),), np.float32)

    def state(self):
        """A new observation, and its info."""
        self.signs = 2 * self.np_random.integers(2, size=len(self.sizes)) - 1
        self.masks = [self.np_random.integers(2, size=size, dtype=np.int8) for size in self.sizes]
        for mask in self.masks:
            mask[self.np_random.integers(mask.size)] = 1
            if self.steps == self.length:
                mask[:] = 0
        info = {"action_mask": self.masks[0] if self.discrete else tuple(self.masks)}
        return self.signs.astype(np.float32), info

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.state()

    def step(self, action):
        assert self.action_space.contains(action), action
        choices = np.ravel(action - self.action_space.start)
        reward = 0.0
        for choice, mask, sign in zip(choices, self.masks, self.signs, strict=True):
            assert mask[choice], f"{action} is not allowed by {self.masks}"
            reward += choice == np.flatnonzero(mask)[-1 if sign == 1 else 0]
        self.steps += 1
        ended = self.steps == self.length
        obs, info = self.state()
        return obs, reward, ended and self.terminates, ended and not self.terminates, info


gym.register("TaxiWithoutMasks-v0", lambda: WithoutMasks(gym.make("Taxi-v4")))
gym.register("HighOrLow-v0", HighOrLow, kwargs={"action_space": gym.spaces.MultiDiscrete([2, 3, 4])})
