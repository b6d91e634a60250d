"""A pendulum whose worlds are stepped as tensors, like those of a simulator on the GPU: `TorchPendulum-v0`.

`--env-id tests.torch_pendulum:TorchPendulum-v0` makes it. A step has fixed shapes and no host wait, and changes the
state in place, so that a CUDA graph can capture it.
"""

import math

import gymnasium as gym
import torch
from gymnasium.spaces import Box, Dict
from gymnasium.vector import AutoresetMode
from torch.utils._pytree import tree_map


class TorchPendulum(gym.vector.VectorEnv):
    """gymnasium's Pendulum: cosine and sine of the angle, and the angular velocity. Episodes start anywhere.

    An episode is truncated after `length` steps, and terminates at a speed above `max_speed`. With `asymmetric`,
    observations are a dictionary: the critic also sees the fraction of the episode that is over. With `gives_final`,
    SAME_STEP has `infos["final_obs"]`; rows without an end are not meant to be read and hold NaN.
    """

    def __init__(self, num_envs, length=200, mode="SAME_STEP", asymmetric=False, gives_final=True, max_speed=math.inf):
        self.num_envs, self.length, self.max_speed = num_envs, length, max_speed
        self.mode, self.asymmetric, self.gives_final = AutoresetMode[mode], asymmetric, gives_final
        self.metadata = {"autoreset_mode": self.mode}
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.single_observation_space = Box(-math.inf, math.inf, (3,))
        if asymmetric:
            policy, critic = self.single_observation_space, Box(-math.inf, math.inf, (4,))
            self.single_observation_space = Dict(policy=policy, critic=critic)
        self.single_action_space = Box(-2.0, 2.0, (1,))
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self.angle, self.velocity, self.index = torch.zeros(3, num_envs, device=self.device).unbind()
        self.steps, self.episode = torch.zeros(2, num_envs, dtype=torch.int64, device=self.device).unbind()
        self.ended = torch.zeros(num_envs, dtype=torch.bool, device=self.device)
        self.index.copy_(torch.arange(num_envs))

    def observation(self):
        obs = torch.stack((self.angle.cos(), self.angle.sin(), self.velocity), -1)
        if not self.asymmetric:
            return obs
        return {"policy": obs, "critic": torch.cat((obs, (self.steps / self.length)[:, None]), -1)}

    def restart(self, where):
        """Start an episode in the worlds `where` (num_envs,) is true. The fractions spread evenly, without noise."""
        self.episode.add_(where)
        steps = ((0.618034, 0.414214), (0.7549, 0.5698))
        fractions = [(self.index * a + self.episode * b) % 1 * 2 - 1 for a, b in steps]
        self.angle.copy_(torch.where(where, fractions[0] * math.pi, self.angle))
        self.velocity.copy_(torch.where(where, fractions[1], self.velocity))
        self.steps.mul_(~where)
        self.ended.logical_and_(~where)

    def reset(self, *, seed=None, options=None):
        """Reset the worlds of `options["reset_mask"]`, by default all."""
        if seed is not None:
            self.episode.fill_(seed)
        everywhere = torch.ones_like(self.ended)
        self.restart((options or {}).get("reset_mask", everywhere))
        return self.observation(), {}

    def step(self, actions):
        force = actions[:, 0].clamp(-2, 2)
        angle = (self.angle + math.pi) % (2 * math.pi) - math.pi
        rewards = -(angle.square() + 0.1 * self.velocity.square() + 0.001 * force.square())
        idle = self.ended.clone() if self.mode == AutoresetMode.NEXT_STEP else torch.zeros_like(self.ended)
        self.velocity.add_(0.05 * (15 * self.angle.sin() + 3 * force)).clamp_(-8, 8)
        self.angle.add_(0.05 * self.velocity)
        self.steps.add_(1)
        self.restart(idle)
        terminated = (self.velocity.abs() > self.max_speed) & ~idle
        truncated = (self.steps >= self.length) & ~idle & ~terminated
        self.ended.copy_(terminated | truncated)
        obs, infos = self.observation(), {}
        if self.mode == AutoresetMode.SAME_STEP:
            if self.gives_final:
                hidden = ~self.ended[:, None]
                final = {name: x.masked_fill(hidden, math.nan) for name, x in obs.items()} if self.asymmetric else None
                infos["final_obs"] = final or obs.masked_fill(hidden, math.nan)
            self.restart(self.ended.clone())
            obs = self.observation()
        return obs, rewards.masked_fill(idle, 0), terminated, truncated, infos


class InPlace(TorchPendulum):
    """Shows all steps in the same memory, and writes over the actions."""

    def show(self, name, result):
        """`result`, tensors in dictionaries, in the memory of this name."""
        memory = vars(self).setdefault(f"shown_{name}", tree_map(torch.clone, result))
        tree_map(lambda shown, tensor: shown.copy_(tensor), memory, result)
        return memory

    def reset(self, **kwargs):
        obs, infos = super().reset(**kwargs)
        return self.show("obs", obs), infos

    def step(self, actions):
        obs, *rest = super().step(actions)
        actions.fill_(math.nan)
        return self.show("obs", obs), *self.show("rest", rest)


VARIANTS = {
    "": {},
    "Asymmetric": {"asymmetric": True},
    "NextStep": {"mode": "NEXT_STEP"},
    "Disabled": {"mode": "DISABLED"},
    "WithoutFinal": {"gives_final": False},
}
for name, kwargs in VARIANTS.items():
    gym.register(f"TorchPendulum{name}-v0", vector_entry_point=TorchPendulum, kwargs=kwargs)
    # most episodes terminate before they would be truncated
    for prefix, world in (("Short", TorchPendulum), ("ShortInPlace", InPlace)):
        gym.register(f"{prefix}{name}-v0", vector_entry_point=world, kwargs=kwargs | {"length": 7, "max_speed": 3.0})
