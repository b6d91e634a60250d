"""FastTD3 for simulators that step thousands of worlds as tensors, in plain PyTorch: Seo et al. 2025, arXiv:2505.22642.

The algorithm is `FastTD3` and `train`. Below the line of dashes is the run, the same text in all scripts.
TD3 with many environments, large batches and distributional critics. The algorithm and its defaults are those of the
paper's code, https://github.com/younggyoseo/FastTD3 (tasks of HumanoidBench). These parts are not in TD3:

1. Critics are distributions of returns on fixed atoms (C51, Bellemare et al. 2017, arXiv:1707.06887). Of the two target
   distributions, the one with the smaller mean is the target of both critics (`FastTD3.update`, `project`).
2. Each environment explores with noise of its own size, drawn again at the end of an episode (`FastTD3.store`).
3. The replay buffer is on the device. Returns cover `num_steps` steps (`NStepReplayBuffer`).
4. Observations are normalized by running statistics (`ObsNormalizer`). The critics may see more than the policy.
5. There is no target actor, and the target critics move quickly (`FastTD3.update_targets`).
6. AdamW with strong weight decay. Learning rates follow a cosine, which is constant by default (`FastTD3.anneal`).

fast_td3_torchcompile.py makes the same updates faster.

    PYTHONPATH=. python leanrl/fast_td3.py --env-id environments.mujoco_warp:warp/HalfCheetah-v5
"""

import copy
import errno
import io
import json
import math
import os
import re
import shutil
import signal
import sys
import time
import zipfile
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.vector import AutoresetMode
from torch import nn
from torch.utils import collect_env
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

NUM_CRITICS = 2
LOG_INTERVAL = 100  # steps of the vector environment between logs of the losses


@dataclass
class Args:
    env_id: str = "environments.mujoco_warp:warp/HalfCheetah-v5"  # gymnasium environment, as module:id
    total_timesteps: int = 19_200_000  # total environment steps, summed over all environments
    num_envs: int = 128  # number of environments, stepped together
    buffer_size: int = 51_200  # steps of each environment that the replay buffer holds
    gamma: float = 0.99  # discount factor
    tau: float = 0.1  # target smoothing coefficient
    batch_size: int = 32_768  # transitions per update, equally many of each environment
    learning_starts: int = 10  # steps of each environment before the first update
    updates_per_step: int = 2  # updates per step of the vector environment
    policy_frequency: int = 2  # update the actor every N updates of the critics
    critic_learning_rate: float = 3e-4  # initial learning rate of the critics
    actor_learning_rate: float = 3e-4  # initial learning rate of the actor
    critic_learning_rate_end: float = 3e-4  # learning rate of the critics at the end of the run
    actor_learning_rate_end: float = 3e-4  # learning rate of the actor at the end of the run
    weight_decay: float = 0.1  # weight decay of AdamW
    num_steps: int = 1  # rewards in a return before the critics' value
    num_atoms: int = 101  # atoms of a critic's distribution
    v_max: float = 250.0  # the atoms cover returns from -v_max to v_max
    std_min: float = 0.001  # least standard deviation of exploration noise, in units of half the action range
    std_max: float = 0.4  # greatest standard deviation of exploration noise, in the same units
    policy_noise: float = 0.001  # standard deviation of target policy smoothing noise, in the same units
    noise_clip: float = 0.5  # bound at which smoothing noise is clipped, in the same units
    action_bound: float = 1.0  # actions are between -N and N where the environment sets no bounds
    critic_hidden_dim: int = 1024  # width of the critics' first hidden layer; each further layer has half of it
    actor_hidden_dim: int = 512  # width of the actor's first hidden layer; each further layer has half of it
    init_scale: float = 0.01  # standard deviation of the actor's last weights at the start
    bf16: bool = False  # compute the networks in bfloat16, by autocast
    cuda: bool = True  # use a CUDA device if there is one
    threads: int = 0  # CPU threads for torch (0: torch's default)
    matmul_precision: Literal["highest", "high", "medium"] = "highest"  # of float32 matmuls (high: TF32, medium: bf16)

    exp_name: str = Path(__file__).stem  # name of the experiment, used in the run's folder name
    seed: int = 1  # seed of the environments, NumPy and torch
    run_dir: str = "runs"  # parent folder of all runs
    resume: str | None = None  # folder of a run to resume; its flags become the defaults
    checkpoint_interval: int = 0  # environment steps between checkpoints (0: only at the end)
    track: bool = False  # also log to Weights & Biases
    wandb_project_name: str = "leanrl"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases team


def hidden_layers(inputs, width):
    """Three layers of ReLUs, each of half the width of the layer before, and the width of the last."""
    layers = []
    for outputs in (width, width // 2, width // 4):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        inputs = outputs
    return layers, inputs


class Critic(nn.Module):
    """The distribution of returns: maps (batch, critic_dim) and (batch, act_dim) to logits (batch, num_atoms)."""

    def __init__(self, critic_dim, act_dim, num_atoms, hidden_dim):
        super().__init__()
        layers, width = hidden_layers(critic_dim + act_dim, hidden_dim)
        self.net = nn.Sequential(*layers, nn.Linear(width, num_atoms))

    def forward(self, obs, actions):
        return self.net(torch.cat((obs, actions), -1)).float()


class ObsNormalizer(nn.Module):
    """Scales observations to mean 0 and variance 1 and clips them to [-10, 10].

    All environments share the statistics, which are float64 (Chan, Golub and LeVeque 1983).
    """

    def __init__(self, width):
        super().__init__()
        self.register_buffer("count", torch.zeros(1, dtype=torch.float64))  # not (): compiled code may lose its changes
        self.register_buffer("mean", torch.zeros(width, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(width, dtype=torch.float64))

    def forward(self, obs):
        """Scaled observations; `obs` (batch, ...) may lack the last columns."""
        mean, variance = self.mean[: obs.shape[-1]], self.variance[: obs.shape[-1]]
        return ((obs - mean) / (variance + 1e-8).sqrt()).clamp(-10, 10).float()

    def update(self, obs):
        """Include the observations of all environments (num_envs, width) in the statistics."""
        obs = obs.double()
        mean = obs.mean(0)
        weight = len(obs) / (self.count + len(obs))
        difference = mean - self.mean
        variance = (obs - mean).square().mean(0) + (1 - weight) * difference.square()
        self.variance.lerp_(variance, weight)
        self.mean.lerp_(mean, weight)
        self.count.add_(len(obs))


class Actor(nn.Module):
    """A deterministic policy. The learner calls `squashed` with normalized observations."""

    def __init__(self, actor_dim, width, low, high, hidden_dim, init_scale):
        super().__init__()
        layers, last_width = hidden_layers(actor_dim, hidden_dim)
        last = nn.Linear(last_width, len(low))
        nn.init.normal_(last.weight, 0, init_scale)
        nn.init.zeros_(last.bias)
        self.net = nn.Sequential(*layers, last)
        self.normalizer = ObsNormalizer(width)
        self.register_buffer("scale", (high - low) / 2)
        self.register_buffer("bias", (high + low) / 2)

    def squashed(self, obs):
        """Actions in [-1, 1]; `obs` (batch, ...) may have more columns than the policy's."""
        return self.net(obs[:, : self.net[0].in_features]).float().tanh()

    def in_units(self, actions):
        """Scale actions from [-1, 1] to the bounds of the action space."""
        return actions * self.scale + self.bias

    def forward(self, obs):
        """The policy exported to policy.pt2: maps raw (batch, actor_dim) to actions in the environment's units."""
        return self.in_units(self.squashed(self.normalizer(obs)))


class FastTD3:
    """The learner: networks, optimizers, replay buffer and episode statistics."""

    def __init__(self, args, envs, device):
        self.args = args
        self.device = device
        self.actor_dim, self.critic_dim = envs.actor_dim, envs.critic_dim
        act_dim = envs.single_action_space.shape[0]
        low, high = (bound.to(device) for bound in action_bounds(args, envs))
        with device:
            self.actor = Actor(self.actor_dim, envs.width, low, high, args.actor_hidden_dim, args.init_scale)
            sizes = (self.critic_dim, act_dim, args.num_atoms, args.critic_hidden_dim)
            self.critics = nn.ModuleList([Critic(*sizes) for _ in range(NUM_CRITICS)])
        self.target_critics = copy.deepcopy(self.critics)
        self.networks = {"actor": self.actor, "critics": self.critics, "target_critics": self.target_critics}
        decay = {"weight_decay": args.weight_decay}
        self.optimizers = {
            "actor": torch.optim.AdamW(self.actor.parameters(), lr=args.actor_learning_rate, **decay),
            "critics": torch.optim.AdamW(self.critics.parameters(), lr=args.critic_learning_rate, **decay),
        }
        self.atoms = torch.linspace(-args.v_max, args.v_max, args.num_atoms, device=device)
        self.stds = self.draw_stds()
        shapes = {"obs": (envs.width,), "next_obs": (envs.width,), "actions": (act_dim,)}
        shapes |= dict.fromkeys(("rewards", "terminated", "ended", "valid"), ())
        self.replay = NStepReplayBuffer(args.buffer_size, args.num_envs, shapes, device)
        self.episodes = EpisodeCounter(args.num_envs, device)
        self.updates = 0
        self.last_losses = {}

    def draw_stds(self):
        """Standard deviations of exploration noise (num_envs, 1), each drawn uniformly between two bounds."""
        low, high = self.args.std_min, self.args.std_max
        return low + (high - low) * torch.rand(self.args.num_envs, 1, device=self.device)

    def autocast(self):
        """A context that computes matmuls in bfloat16 if --bf16 is set."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.args.bf16)

    @torch.no_grad()
    def act(self, obs):
        """Actions with exploration noise, in the environment's units, for `obs` (num_envs, width)."""
        self.actor.normalizer.update(obs)
        with self.autocast():
            actions = self.actor.squashed(self.actor.normalizer(obs))
        noise = self.stds * torch.randn_like(actions)
        self.obs, self.actions = obs, (actions + noise).clamp(-1, 1)
        return self.actor.in_units(self.actions)

    def store(self, next_obs, rewards, terminated, ended, valid):
        """Store the outcome of the last actions, as returned by `DeviceEnvs.step`."""
        outcome = {"next_obs": next_obs, "rewards": rewards, "terminated": terminated, "ended": ended, "valid": valid}
        self.replay.store(obs=self.obs, actions=self.actions, **outcome)
        self.episodes.count(rewards, ended, valid)
        self.stds = torch.where(ended[:, None], self.draw_stds(), self.stds)

    def update(self):
        """Update the critics and their targets, and when it is its turn, the actor."""
        per_env = self.args.batch_size // self.args.num_envs
        batch = self.replay.sample(per_env, self.args.num_steps, self.args.gamma)
        obs, next_obs = self.actor.normalizer(batch["obs"]), self.actor.normalizer(batch["next_obs"])

        # critic loss: cross-entropy to the projected target distribution
        with torch.no_grad(), self.autocast():
            noise = self.args.policy_noise * torch.randn_like(batch["actions"])
            noise = noise.clamp(-self.args.noise_clip, self.args.noise_clip)
            next_actions = (self.actor.squashed(next_obs) + noise).clamp(-1, 1)  # target policy smoothing
            next_logits = self.logits(self.target_critics, next_obs, next_actions)
        returns = batch["rewards"][:, None] + batch["discounts"][:, None] * self.atoms
        targets = torch.stack([self.project(logits.softmax(-1), returns) for logits in next_logits])
        smaller = self.mean(targets).argmin(0)  # clipped double Q-learning
        target = targets[smaller, torch.arange(len(smaller), device=self.device)]
        with self.autocast():
            logits = self.logits(self.critics, obs, batch["actions"])
        cross_entropy = -(target * logits.log_softmax(-1)).sum(-1)  # (NUM_CRITICS, batch)
        qf_loss = masked_mean(cross_entropy.sum(0), batch["valid"])
        self.optimizers["critics"].zero_grad()
        qf_loss.backward()
        self.optimizers["critics"].step()
        q_values = masked_mean(self.mean(logits.detach().softmax(-1)).mean(0), batch["valid"])
        self.last_losses |= {"q_values": q_values, "qf_loss": qf_loss.detach()}
        self.update_targets()

        self.updates += 1
        if self.updates % self.args.policy_frequency == 0:
            self.update_actor(obs, batch["valid"])

    def logits(self, critics, obs, actions):
        """The distributions of both critics, as logits (NUM_CRITICS, batch, num_atoms)."""
        return torch.stack([critic(obs[:, -self.critic_dim :], actions) for critic in critics])

    def mean(self, probabilities):
        """The mean return of distributions (..., num_atoms)."""
        return (probabilities * self.atoms).sum(-1)

    def project(self, probabilities, returns):
        """Share `probabilities` of `returns`, both (batch, num_atoms), between the two atoms around each return."""
        last = self.args.num_atoms - 1
        position = (returns / self.args.v_max).clamp(-1, 1).add(1).mul(last / 2)  # 0 at the first atom, 1 at the next
        lower = position.floor().long().clamp(0, last - 1)  # valid even for NaN, which the loss will show
        upper_share = position - lower
        projected = torch.zeros_like(probabilities)
        projected.scatter_add_(-1, lower, probabilities * (1 - upper_share))
        return projected.scatter_add_(-1, lower + 1, probabilities * upper_share)

    def update_actor(self, obs, valid):
        """Update the actor."""
        # actor loss: the smaller mean of both critics
        with self.autocast():
            logits = self.logits(self.critics, obs, self.actor.squashed(obs))
        actor_loss = -masked_mean(self.mean(logits.softmax(-1)).amin(0), valid)
        self.optimizers["actor"].zero_grad()
        actor_loss.backward()
        self.optimizers["actor"].step()
        self.last_losses["actor_loss"] = actor_loss.detach()

    @torch.no_grad()
    def update_targets(self):
        """Move the target critics toward the critics."""
        targets = self.target_critics.state_dict()
        for name, tensor in self.critics.state_dict().items():
            if tensor.is_floating_point():  # BatchNorm has a count, too
                targets[name].lerp_(tensor, self.args.tau)

    def anneal(self, progress):
        """Set the learning rates, which follow a cosine; `progress` grows from 0 to 1 over the run."""
        for name, optimizer in self.optimizers.items():
            optimizer.param_groups[0]["lr"] = learning_rate(self.args, name, progress)

    def losses(self):
        """Losses of the last update, and statistics of the episodes since the last call, by name."""
        values = self.last_losses | self.episodes.read()
        return {name: value.item() for name, value in values.items()}

    def policy(self):
        """A copy of the deterministic policy on the CPU, and example inputs."""
        return copy.deepcopy(self.actor).cpu().eval(), (torch.zeros(2, self.actor_dim),)

    def state_dict(self):
        """All state needed to resume; tensors may be on the device."""
        return {
            "flags": {name: getattr(self.args, name) for name in FIXED},
            "networks": {name: network.state_dict() for name, network in self.networks.items()},
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
            "replay": self.replay.state_dict(),
            "stds": self.stds,
            "updates": self.updates,
            "rng": torch.get_rng_state(),
            "cuda_rng": [torch.cuda.get_rng_state()] if self.device.type == "cuda" else [],
        }

    def load_state_dict(self, state):
        """Restore a `state_dict`."""
        for name, value in state["flags"].items():
            if getattr(self.args, name) != value:
                refuse(name, getattr(self.args, name), f"the checkpoint has {value}")
        for name, network in self.networks.items():
            network.load_state_dict(state["networks"][name])
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        self.replay.load_state_dict(state["replay"])
        self.stds = state["stds"].to(self.device)
        self.updates = state["updates"]
        torch.set_rng_state(state["rng"])
        torch.cuda.set_rng_state_all(state["cuda_rng"])


class NStepReplayBuffer:
    """Steps of all environments on the device, a tensor (size, num_envs, ...) per column.

    The newest steps overwrite the oldest.
    """

    def __init__(self, size, num_envs, shapes, device):
        """`shapes` are those of a step's columns in one environment, by name."""
        self.size = size
        self.envs = torch.arange(num_envs, device=device)
        bytes_each = 4 * num_envs * sum(map(math.prod, shapes.values()))
        require_memory("buffer_size", size, bytes_each, device)
        self.columns = {name: torch.empty(size, num_envs, *shape, device=device) for name, shape in shapes.items()}
        self.stored = 0  # steps of each environment stored so far, including overwritten ones

    def store(self, **columns):
        """Store a step of all environments; columns are (num_envs, ...)."""
        for name, column in self.columns.items():
            column[self.stored % self.size] = columns[name]
        self.stored += 1

    def sample(self, per_env, num_steps, gamma):
        """Draw `per_env` steps of each environment, with returns over `num_steps` steps or to the episode's end.

        Returns columns (per_env * num_envs, ...) by name. "discounts" multiply the value of "next_obs".
        """
        envs = self.envs.repeat(per_env)
        oldest = max(self.stored - self.size, 0)
        starts = torch.randint(oldest, self.stored - num_steps + 1, envs.shape, device=envs.device)
        batch = {name: column[starts % self.size, envs] for name, column in self.columns.items()}
        discounts = torch.full_like(batch["rewards"], gamma)
        for step in range(1, num_steps):
            later = {name: column[(starts + step) % self.size, envs] for name, column in self.columns.items()}
            goes_on = batch["ended"] == 0
            batch["rewards"] += goes_on * discounts * later["rewards"]
            discounts = torch.where(goes_on, gamma * discounts, discounts)
            batch["next_obs"] = torch.where(goes_on[:, None], later["next_obs"], batch["next_obs"])
            for name in ("terminated", "ended"):
                batch[name] = torch.where(goes_on, later[name], batch[name])
        batch["discounts"] = discounts * (1 - batch["terminated"])
        return batch

    def state_dict(self):
        """Copies of the filled part of each column, and the count."""
        return {name: column[: self.stored].clone() for name, column in self.columns.items()} | {"stored": self.stored}

    def load_state_dict(self, state):
        """Restore a `state_dict`."""
        for name, column in self.columns.items():
            column[: len(state[name])] = state[name]
        self.stored = state["stored"]
        self.columns["ended"][(self.stored - 1) % self.size] = 1  # a resumed run begins new episodes


class EpisodeCounter:
    """Counts returns and lengths of episodes on the device."""

    def __init__(self, num_envs, device):
        self.current = torch.zeros(num_envs, 2, device=device)  # return and length of the episodes in progress
        self.totals = torch.zeros(3, device=device)  # number, returns and lengths of those that ended since `read`

    def count(self, rewards, ended, valid):
        """Count a step; arguments are (num_envs,), and steps where `valid` is 0 do not count."""
        self.current.add_(torch.stack((rewards * valid, valid), -1))
        over = torch.cat((ended[:, None], self.current * ended[:, None]), -1)
        self.totals.add_(over.sum(0))
        self.current.sub_(over[:, 1:])

    def read(self):
        """The number of episodes that ended since the last call, and their mean return and length, by name."""
        number, returns, lengths = self.totals.clone()
        self.totals.zero_()
        at_least_1 = number.clamp(min=1)
        return {"episodes": number, "episodic_return": returns / at_least_1, "episodic_length": lengths / at_least_1}


def masked_mean(values, valid):
    """The mean of `values` (batch,) where `valid` (batch,) is 1; 0 if it is 1 nowhere."""
    return (values * valid).sum() / valid.sum().clamp(min=1)


def learning_rate(args, name, progress):
    """The learning rate of "actor" or "critics", on half a cosine over the run."""
    bounds = {
        "actor": (args.actor_learning_rate, args.actor_learning_rate_end),
        "critics": (args.critic_learning_rate, args.critic_learning_rate_end),
    }
    start, end = bounds[name]
    return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2


def require_memory(name, value, bytes_each, device):
    """Refuse an argument if `value` items of `bytes_each` do not fit in the memory of `device`."""
    if device.type == "cuda":
        memory, _ = torch.cuda.mem_get_info()
    elif hasattr(os, "sysconf"):  # not on Windows
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        return
    room = memory - 2 * 2**30  # leaves 2 GiB for networks, batches and libraries
    if value * bytes_each > room:
        refuse(name, value, f"give at most {room // bytes_each}, which takes {room / 1e9:.0f} GB")


def train(args):
    """Train an agent."""
    device, folder = prepare(args)
    check_sizes(args)
    envs = make_device_envs(args, device)
    learner = FastTD3(args, envs, device)
    with Run(args, folder, envs, learner) as run:
        obs = envs.reset(args.seed + run.step)
        learner.anneal(run.step / args.total_timesteps)
        while run.unfinished():
            actions = learner.act(obs)
            obs, *outcome = envs.step(actions)
            learner.store(*outcome)
            run.advance()
            if run.step > args.learning_starts * args.num_envs:
                for _ in range(args.updates_per_step):
                    learner.update()
                if run.step // args.num_envs % LOG_INTERVAL == 0:
                    learner.anneal(run.step / args.total_timesteps)
                    run.log(learner.losses())


def check_sizes(args):
    """Refuse sizes with which the critics cannot learn."""
    if args.num_atoms < 2:
        refuse("num_atoms", args.num_atoms, "give at least 2")
    if not 0 < args.v_max < 1e30:  # float32 overflows near 3e38
        refuse("v_max", args.v_max, "give the largest return that the critics should represent")
    if args.batch_size % args.num_envs:
        refuse("batch_size", args.batch_size, f"give a multiple of --num-envs, {args.num_envs}")
    for name in ("critic_hidden_dim", "actor_hidden_dim"):
        if getattr(args, name) < 4:
            refuse(name, getattr(args, name), "give at least 4: the last hidden layer has a quarter of it")
    if args.resume is None and args.total_timesteps <= args.learning_starts * args.num_envs:
        refuse("total_timesteps", args.total_timesteps, "give more than --learning-starts * --num-envs")
    longest = min(args.learning_starts + 1, args.buffer_size)
    if args.num_steps > longest:
        refuse("num_steps", args.num_steps, f"give at most {longest}, or raise --learning-starts and --buffer-size")


def action_bounds(args, envs):
    """The bounds of actions, each (act_dim,); `action_bound` where the environment sets none."""
    space = envs.single_action_space
    low, high = torch.tensor(space.low, dtype=torch.float32), torch.tensor(space.high, dtype=torch.float32)
    low[low < -1e30] = -args.action_bound  # float32 overflows near 3e38
    high[high > 1e30] = args.action_bound
    if not (low < high).all():
        refuse("action_bound", args.action_bound, f"give one inside of the environment's bounds, {space}")
    return low, high


class DeviceEnvs(gym.vector.VectorWrapper):
    """Environments of tensors on one device, or of NumPy arrays. Hides their autoreset mode.

    A row of observations holds the policy's, followed by the critic's if it has its own.
    """

    def __init__(self, envs, spaces, num_envs, device, in_numpy):
        super().__init__(envs)
        self.widths = {name: space.shape[0] for name, space in spaces.items()}  # of "policy", perhaps of "critic"
        self.shape, self.device, self.in_numpy = (num_envs,), device, in_numpy
        self.mode = AutoresetMode(envs.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))  # gymnasium's default
        dims = list(self.widths.values())
        self.actor_dim, self.critic_dim, self.width = dims[0], dims[-1], sum(dims)

    def column(self, name, values, *width):
        """What the environment returned, as a tensor (num_envs, *width) without a graph."""
        values = torch.as_tensor(values, device=self.device).detach()
        if values.shape != self.shape + width:
            raise ValueError(f"the environment's {name} have shape {tuple(values.shape)}, not {self.shape + width}")
        return values

    def rows(self, obs):
        """Observations as a tensor (num_envs, width), copied: an environment may reuse its memory."""
        if isinstance(obs, np.ndarray) and obs.dtype == object:  # gymnasium's `final_obs`, None where no episode ended
            example = next(each for each in obs if each is not None)
            obs = tree_map(lambda *parts: np.stack(parts), *(example if each is None else each for each in obs))
        groups = obs if isinstance(obs, dict) else {"policy": obs}
        columns = [self.column("observations", groups[name], width) for name, width in self.widths.items()]
        return torch.cat(columns, -1).float()

    def reset(self, seed):
        """Start all episodes; returns observations."""
        obs, _ = self.env.reset(seed=seed)
        self.obs = self.rows(obs)
        self.valid = torch.ones(self.shape, dtype=torch.bool, device=self.device)
        return self.obs

    def step(self, actions):
        """Returns `obs` to act on, and columns of transitions: next_obs, rewards, terminated, ended, valid.

        Where an episode ends, next_obs is its last observation, and obs the first of the next episode. The value of
        next_obs is bootstrapped at a truncation. Where `valid` is false, there is no transition.
        """
        actions = actions.cpu().numpy() if self.in_numpy else actions
        obs, rewards, terminated, truncated, infos = self.env.step(actions)
        next_obs = obs = self.rows(obs)
        rewards = self.column("rewards", rewards).float()
        terminated = self.column("terminated", terminated).bool()
        ended = terminated | self.column("truncated", truncated).bool()
        valid = self.valid
        if self.mode == AutoresetMode.SAME_STEP:
            # without `final_obs`, the observation before the step is the last one known
            final_obs = self.rows(infos["final_obs"]) if "final_obs" in infos else self.obs
            next_obs = torch.where(ended[:, None], final_obs, obs)
        elif self.mode == AutoresetMode.NEXT_STEP:
            self.valid = ~ended  # the next step only resets
        elif not self.in_numpy or ended.any():  # gymnasium's own environments refuse to reset none
            rewards, terminated = rewards.clone(), terminated.clone()  # a reset may reuse their memory
            obs, _ = self.env.reset(options={"reset_mask": ended.cpu().numpy() if self.in_numpy else ended})
            obs = self.rows(obs)
        self.obs = obs
        return obs, next_obs, rewards, terminated, ended, valid


def make_device_envs(args, device):
    """Make `num_envs` environments of tensors, NumPy arrays or JAX arrays."""
    try:
        envs = gym.make_vec(args.env_id, num_envs=args.num_envs)
        obs, _ = envs.reset(seed=args.seed)
        example = obs.get("policy") if isinstance(obs, dict) else obs
        if type(example).__module__.startswith("jax"):
            envs = gym.wrappers.vector.JaxToTorch(envs, device)
        elif torch.is_tensor(example) and example.device.type != device.type:
            refuse("cuda", args.cuda, f"{args.env_id} is on {example.device}, the learner would be on {device}")
    except (gym.error.Error, ImportError) as error:
        refuse("env_id", args.env_id, error)
    space = envs.single_observation_space
    groups = space.spaces if isinstance(space, gym.spaces.Dict) else {"policy": space}
    spaces = {name: groups[name] for name in ("policy", "critic") if name in groups}
    if "policy" not in spaces or not all(isinstance(s, gym.spaces.Box) and len(s.shape) == 1 for s in spaces.values()):
        refuse("env_id", args.env_id, f"observations must be vectors or a dictionary with policy, not {space}")
    actions = envs.single_action_space
    if not isinstance(actions, gym.spaces.Box) or actions.dtype.kind != "f" or len(actions.shape) != 1:
        refuse("env_id", args.env_id, f"actions must be vectors of floats, not {actions}")
    return DeviceEnvs(envs, spaces, args.num_envs, device, in_numpy=isinstance(example, np.ndarray))


# ---------------------------------------------------------------------------------------------------------------------
# The run: command line, folder, logs, checkpoints. Only the limits of flags depend on the algorithm.
# ---------------------------------------------------------------------------------------------------------------------


def parse_args():
    """Parse the command line. With --resume, the checkpoint's flags are the defaults."""
    args = tyro.cli(Args, description=__doc__)
    if args.resume is not None:
        saved = load_checkpoint(args.resume).get("args", {})
        defaults = {name: value for name, value in saved.items() if name in vars(args)}
        args = tyro.cli(Args, default=Args(**defaults), description=__doc__)
    return args


def refuse(name, value, remedy):
    """Exit with code 2 and one line that names the argument, its value and the remedy."""
    remedy = " ".join(str(remedy).split())
    print(f"error: --{name.replace('_', '-')} {value}: {remedy}", file=sys.stderr)
    raise SystemExit(2)


AT_LEAST_1 = ("total_timesteps", "num_envs", "buffer_size", "batch_size", "updates_per_step", "policy_frequency")
AT_LEAST_1 += ("num_steps", "num_atoms", "critic_hidden_dim", "actor_hidden_dim")
AT_MOST = {"gamma": 1, "tau": 1, "seed": 2**32 - 1, "threads": os.cpu_count()}
FIXED = ("num_envs", "buffer_size", "critic_hidden_dim", "actor_hidden_dim", "num_atoms", "v_max")  # when resuming


def prepare(args):
    """Check the arguments, configure and seed the libraries; returns the device and the path of the run's folder."""
    if "://" in args.run_dir:
        refuse("run_dir", args.run_dir, "give a local folder, or one where remote storage is mounted")
    for name, value in vars(args).items():
        low, high = int(name in AT_LEAST_1), AT_MOST.get(name, math.inf)
        if isinstance(value, (int, float)) and not low <= value <= high:
            refuse(name, value, f"give a number from {low} to {high}")
    torch.set_float32_matmul_precision(args.matmul_precision)
    if args.threads:
        torch.set_num_threads(args.threads)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    name = f"{args.env_id}__{args.exp_name}__{args.seed}__{datetime.now():%Y-%m-%d_%H-%M-%S.%f}"
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    return device, Path(args.run_dir).expanduser().absolute() / name.replace("/", "_").replace(":", "_")


def load_checkpoint(resume, check=False):
    """Load a checkpoint to the CPU, with or without a check of its checksum; `resume` is its file or its folder."""
    path = Path(resume).expanduser()
    path = path / "checkpoint.pt" if path.is_dir() else path
    try:
        if check and zipfile.ZipFile(path).testzip() is not None:
            raise ValueError("its checksum is wrong")  # torch.load does not check it
        with suppress(RuntimeError):  # not every file system in user space can map files
            return dict(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:
        refuse("resume", resume, f"give the folder of a run with an intact checkpoint.pt ({error})")


def all_finite(state):
    """Whether all floats in nested dictionaries and lists of tensors are finite; in parts, to save memory."""
    floats = [leaf for leaf in tree_leaves(state) if torch.is_tensor(leaf) and leaf.is_floating_point()]
    return all(part.isfinite().all() for leaf in floats for part in leaf.reshape(-1).split(2**24))


def replace_file(path, write):
    """Write the file at `path` with `write(file)`; a crash leaves either the old or the new file."""
    path.parent.mkdir(parents=True, exist_ok=True)  # it may have been deleted
    temporary = path.with_suffix(".tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            try:
                os.fsync(file.fileno())
            except OSError as error:
                if error.errno != errno.EINVAL:  # not every file system in user space can sync
                    raise
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        raise OSError(f"could not write {path}: is the disk full? ({error})") from error
    finally:
        temporary.unlink(missing_ok=True)


class ProgressBar(tqdm):
    """A progress bar that tolerates a closed stderr."""

    def display(self, *args, **kwargs):
        with suppress(OSError):
            super().display(*args, **kwargs)


class Run:
    """Context manager of the training loop: the run's folder, logs, checkpoints and orderly end.

    Ctrl-C, SIGTERM and SIGHUP end the loop after the step in progress. Policy, checkpoint and summary are then written,
    as after an error. Episodes are counted on the device (`EpisodeCounter`) and logged as means, with the losses.
    """

    def __init__(self, args, folder, envs, learner):
        self.args = args
        self.folder = folder
        self.envs = envs
        self.learner = learner
        self.step = self.episodes = 0
        self.recent_returns = deque(maxlen=20)
        self.signal = None
        self.diverged = False
        self.pid = os.getpid()
        if args.resume is not None:
            self.restore(load_checkpoint(args.resume, check=True))
        self.log_step = self.saved_step = self.step
        self.config = {"script": Path(__file__).stem, "compile": False, "cudagraphs": False} | vars(args)
        self.config["device"] = torch.cuda.get_device_name() if learner.device.type == "cuda" else "cpu"
        names = ("torch", "tensordict", "gymnasium", "envpool", "numpy", "mujoco", "mujoco-warp", "warp-lang", "popgym")
        installed = [package for name in names for package in distributions(name=name)]
        self.config["versions"] = {"python": sys.version} | {package.name: package.version for package in installed}
        cpu = " ".join(re.findall("Model name: +(.*)", collect_env.get_cpu_info(collect_env.run)))
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0  # Windows
        self.config["machine"] = {"cpu": cpu, "cores": os.cpu_count(), "memory_gib": round(memory / 2**30)}
        policy, inputs = learner.policy()
        shapes = tuple({0: torch.export.Dim("batch")} for _ in inputs)
        self.program = torch.export.export(policy, inputs, dynamic_shapes=shapes)  # the forward pass for policy.pt2
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / "config.json", "x") as file:  # no other run's
                json.dump(self.config, file, indent=2)
            shutil.copy(__file__, folder)
        except OSError as error:
            refuse("run_dir", args.run_dir, f"give a folder that can be written ({error})")
        if args.track:
            import wandb

            labels = {"project": args.wandb_project_name, "entity": args.wandb_entity, "name": folder.name}
            self.wandb = wandb.init(**labels, dir=folder, config=self.config, sync_tensorboard=True)
        self.writer = SummaryWriter(folder)
        size = {"total": args.total_timesteps, "initial": self.step, "unit": "step", "dynamic_ncols": True}
        self.bar = ProgressBar(**size, disable=sys.stderr is None)
        self.start_time = self.log_time = time.perf_counter()

    def restore(self, checkpoint):
        """Restore the run from a checkpoint."""
        try:
            self.learner.load_state_dict(checkpoint["learner"])
            self.step = checkpoint["global_step"]
            self.episodes = checkpoint["episodes"]
            self.recent_returns.extend(checkpoint["returns"])
        except Exception as error:
            refuse("resume", self.args.resume, f"this checkpoint does not fit the script: {error!r}")
        if self.step >= self.args.total_timesteps:
            refuse("total_timesteps", self.args.total_timesteps, f"give more than {self.step}, the checkpoint's step")

    def __enter__(self):
        signals = [sig for sig in signal.Signals if sig.name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGXCPU")]
        caught = [sig for sig in signals if signal.getsignal(sig) != signal.SIG_IGN]  # nohup ignores SIGHUP
        self.handlers = {sig: signal.signal(sig, self.on_signal) for sig in caught}
        return self

    def on_signal(self, number, frame):
        """End the loop in `advance`. A second Ctrl-C interrupts at once, except within a second: wrappers send two."""
        if os.getpid() != self.pid:
            os._exit(128 + number)  # a subprocess of the environment, which inherited this handler
        if self.signal is None:
            self.signal, self.signal_time = number, time.perf_counter()
        elif number == signal.SIGINT and time.perf_counter() > self.signal_time + 1:
            raise KeyboardInterrupt

    def unfinished(self):
        """Whether to continue. Saves a checkpoint first if one is due."""
        if self.step >= self.args.total_timesteps:
            return False  # `__exit__` saves the last checkpoint
        interval = self.args.checkpoint_interval
        if interval is None:
            interval = self.args.total_timesteps // 20
        if interval and self.step // interval > self.saved_step // interval:
            try:
                self.save()
            except OSError as error:
                print(f"error: {error}; the run goes on, and its last checkpoint is kept", file=sys.stderr)
        return True

    def advance(self):
        """Count a step of all environments."""
        self.step += self.args.num_envs
        self.bar.update(self.args.num_envs)
        if self.signal is not None:
            raise SystemExit(128 + self.signal)  # through `__exit__`, which saves

    def log(self, losses):
        """Log losses, the speed, and the episodes among `losses` by name. End the run if a loss is not finite."""
        now = time.perf_counter()
        self.writer.add_scalar("charts/SPS", (self.step - self.log_step) / (now - self.log_time), self.step)
        self.log_step, self.log_time = self.step, now
        losses = dict(losses)
        episodes, mean_return, length = (
            losses.pop(name) for name in ("episodes", "episodic_return", "episodic_length")
        )
        if episodes:
            self.writer.add_scalar("charts/episodic_return", mean_return, self.step)
            self.writer.add_scalar("charts/episodic_length", length, self.step)
            self.recent_returns.append(mean_return)
            self.bar.set_postfix({"return": f"{mean_return:.1f}"}, refresh=False)
            self.episodes += int(episodes)
        for name, value in losses.items():
            self.writer.add_scalar(f"losses/{name}", value, self.step)
            if "loss" in name and not math.isfinite(value):
                self.end_at_nan(f"{name} is {value}")

    def end_at_nan(self, what):
        """End the run with exit code 1. The last checkpoint, if there is one, is kept."""
        self.diverged = True
        causes = "NaN in observations or rewards, or too high a learning rate"
        raise SystemExit(f"error: step {self.step}: {what}; usual causes: {causes}")

    def save(self):
        """Write policy.pt2 and checkpoint.pt, which is never the newer one."""
        self.saved_step = self.step
        state = self.learner.state_dict()
        if not all_finite(state):
            self.end_at_nan("the checkpoint would hold NaN or inf")
        policy, _ = self.learner.policy()
        self.program.state_dict.update(policy.state_dict(keep_vars=True))
        program = io.BytesIO()  # torch.export.save would abort the process at a full disk
        torch.export.save(self.program, program)
        replace_file(self.folder / "policy.pt2", lambda file: file.write(program.getbuffer()))
        checkpoint = {"args": vars(self.args), "global_step": self.step, "episodes": self.episodes}
        checkpoint |= {"returns": list(self.recent_returns), "learner": state}
        replace_file(self.folder / "checkpoint.pt", lambda file: torch.save(checkpoint, file))

    def close(self):
        """Write summary.json; close environments and logs."""
        results = {"global_step": self.step, "episodes": self.episodes}
        results["wall_seconds"] = time.perf_counter() - self.start_time
        finite = [value for value in self.recent_returns if math.isfinite(value)]
        results["episodic_return"] = float(np.mean(finite)) if finite else None
        summary = json.dumps(self.config | results, indent=2)
        with suppress(OSError):  # stderr may be closed
            self.bar.close()
        with suppress(Exception, SystemExit):  # an environment that fails to close must not fail the run
            self.envs.close()
        replace_file(self.folder / "summary.json", lambda file: file.write(summary.encode()))
        self.writer.close()
        if self.args.track:
            self.wandb.finish()

    def __exit__(self, kind, error, traceback):
        """Save and close. An error here does not hide the one that ended the run. A signal may break pipes, too."""
        try:
            if not self.diverged and (kind is not KeyboardInterrupt or self.signal is None):  # no second Ctrl-C
                self.save()
        except SystemExit as not_finite:
            if error is None:
                raise
            print(not_finite, file=sys.stderr)
        finally:
            self.close()
            for number, handler in self.handlers.items():
                signal.signal(number, handler)
        if self.signal is not None and isinstance(error, (type(None), KeyboardInterrupt, EOFError, ConnectionError)):
            raise SystemExit(128 + self.signal)


if __name__ == "__main__":
    train(parse_args())

# `uv run` reads and installs these requirements (PEP 723).
# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#     "torch>=2.11,<2.16", "gymnasium>=1.1,<2", "numpy>=1.26,<3", "tyro>=1.0,<2", "tqdm>=4.66",
#     "tensorboard>=2.18", "wandb>=0.20", "array-api-compat>=1.12",
# ]
# ///
