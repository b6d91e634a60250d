"""FastTD3 for simulators that step thousands of worlds as tensors, built for speed: Seo et al. 2025, arXiv:2505.22642.

The algorithm is `FastTD3` and `train`. Below the line of dashes is the run, the same text in all scripts.
The updates are those of the plain version, fast_td3.py. Why it is faster:

1. `--cudagraphs` makes an environment step two CUDA graphs: one chooses actions, the other stores the step and does all
   of its updates (`FastTD3.choose_actions`, `FastTD3.learn`). The host waits only to log.
2. `--compile` compiles each part of them, an update from sampling to AdamW, into one graph (`FastTD3.compiled`).
3. The critics run as one batched matmul per layer (`FastTD3.logits`).
4. Only the smaller target distribution is projected, in one sum without atomics (`FastTD3.target`, `FastTD3.project`).
5. A step of all environments is one row of one tensor (`DeviceNStepReplayBuffer`).

    PYTHONPATH=. python leanrl/fast_td3_torchcompile.py --env-id environments.mujoco_warp:warp/HalfCheetah-v5 \\
        --compile --cudagraphs
"""

import copy
import errno
import io
import json
import logging
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
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.vector import AutoresetMode
from tensordict.nn import CudaGraphModule
from torch import nn
from torch._inductor.cpu_vec_isa import VecISA
from torch.func import functional_call, stack_module_state, vmap
from torch.utils import collect_env
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

NUM_CRITICS = 2
LOG_INTERVAL = 100  # steps of the vector environment between logs of the losses
CompileMode = Literal["default", "max-autotune-no-cudagraphs"]


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

    compile: bool = False  # compile acting and updates with torch.compile
    cudagraphs: bool = False  # replay acting and updates as CUDA graphs
    compile_mode: CompileMode = "default"  # torch.compile mode
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
    """The learner. CUDA graphs replay kernels but no Python: state that changes is in tensors, updated in place."""

    def __init__(self, args, envs, device):
        self.args = args
        self.device = device
        self.actor_dim, self.critic_dim = envs.actor_dim, envs.critic_dim
        act_dim = envs.single_action_space.shape[0]
        low, high = (bound.to(device) for bound in action_bounds(args, envs))
        with device:
            self.actor = Actor(self.actor_dim, envs.width, low, high, args.actor_hidden_dim, args.init_scale)
            sizes = (self.critic_dim, act_dim, args.num_atoms, args.critic_hidden_dim)
            critics = [Critic(*sizes) for _ in range(NUM_CRITICS)]
        self.critic_module = critics[0]  # for its `forward` only; the weights that learn are in `self.critics`
        weights, buffers = stack_module_state(critics)
        self.critics = weights | buffers  # by name, (NUM_CRITICS, ...)
        self.target_critics = {name: tensor.detach().clone() for name, tensor in self.critics.items()}
        self.optimizers = {
            "actor": AdamW(self.actor.parameters(), args.actor_learning_rate, args.weight_decay),
            "critics": AdamW(self.critics.values(), args.critic_learning_rate, args.weight_decay),
        }
        self.scalars = {name: torch.zeros((), device=device) for name in ("q_values", "qf_loss", "actor_loss")}
        self.atoms = torch.linspace(-args.v_max, args.v_max, args.num_atoms, device=device)
        self.episodes = EpisodeCounter(args.num_envs, device)
        self.updates = 0

        # acting
        self.obs = torch.zeros(args.num_envs, envs.width, device=device)
        self.actions = torch.zeros(args.num_envs, act_dim, device=device)
        self.actions_in_units = torch.zeros_like(self.actions)
        self.acting_noise = torch.zeros_like(self.actions)
        self.stds = torch.zeros(args.num_envs, 1, device=device).uniform_(args.std_min, args.std_max)
        self.new_stds = torch.zeros_like(self.stds)

        # a step of the environments
        flags = ("rewards", "terminated", "ended", "valid")
        self.outcome = {"next_obs": torch.zeros_like(self.obs)}
        self.outcome |= {name: torch.zeros(args.num_envs, device=device) for name in flags}
        widths = {"obs": envs.width, "actions": act_dim, "next_obs": envs.width} | dict.fromkeys(flags, 1)
        self.replay = DeviceNStepReplayBuffer(args.buffer_size, args.num_envs, widths, device)

        # an update. Random numbers are drawn outside of compiled functions, so that all modes draw the same
        self.uniform = torch.zeros(args.batch_size, dtype=torch.float64, device=device)  # float32 is too coarse
        self.noise = torch.zeros(args.batch_size, act_dim, device=device)
        self.batch_obs = torch.zeros(args.batch_size, envs.width, device=device)
        self.batch_valid = torch.zeros(args.batch_size, device=device)

        self.compute_actions = self.compiled(self.compute_actions)  # replaces the method
        self.store_step = self.compiled(self.store_step)
        self.update_critics = self.compiled(self.update_critics)
        self.update_actor = self.compiled(self.update_actor)
        self.choose_actions = self.captured(self.choose_actions)
        self.store = self.captured(self.store)
        phases = range(args.policy_frequency)  # updates since the actor's last one
        self.learn_in_phase = [self.captured(partial(self.learn, phase)) for phase in phases]

    @torch.no_grad()
    def compute_actions(self):
        """Compute actions with exploration noise for `obs`."""
        self.actor.normalizer.update(self.obs)
        with self.autocast():
            actions = self.actor.squashed(self.actor.normalizer(self.obs))
        self.actions.copy_((actions + self.stds * self.acting_noise).clamp(-1, 1))
        self.actions_in_units.copy_(self.actor.in_units(self.actions))

    def choose_actions(self):
        """Draw noise and compute actions: one CUDA graph."""
        self.acting_noise.normal_()
        self.compute_actions()

    def store_step(self):
        """Store a step: `obs`, `actions` and their `outcome`."""
        next_obs, *flags = self.outcome.values()
        self.replay.store(torch.cat((self.obs, self.actions, next_obs, torch.stack(flags, -1)), -1))
        rewards, _, ended, valid = flags
        self.episodes.count(rewards, ended, valid)
        self.stds.copy_(torch.where(ended[:, None] == 1, self.new_stds, self.stds))

    def store(self):
        """Store a step and draw the noise of new episodes: one CUDA graph."""
        self.new_stds.uniform_(self.args.std_min, self.args.std_max)
        self.store_step()

    def update_critics(self):
        """Sample a batch, update the critics, and move the target critics toward them."""
        batch = self.replay.sample(self.uniform, self.args.num_steps, self.args.gamma)
        obs, next_obs = self.actor.normalizer(batch["obs"]), self.actor.normalizer(batch["next_obs"])
        self.batch_obs.copy_(obs)
        self.batch_valid.copy_(batch["valid"])

        # critic loss: cross-entropy to the projected target distribution
        with torch.no_grad(), self.autocast():
            noise = (self.args.policy_noise * self.noise).clamp(-self.args.noise_clip, self.args.noise_clip)
            next_actions = (self.actor.squashed(next_obs) + noise).clamp(-1, 1)  # target policy smoothing
            next_logits = self.logits(self.target_critics, next_obs, next_actions)
        with torch.no_grad():
            target = self.target(next_logits.softmax(-1), batch["rewards"], batch["discounts"])
        with self.autocast():
            logits = self.logits(self.critics, obs, batch["actions"])
        cross_entropy = -(target * logits.log_softmax(-1)).sum(-1)  # (NUM_CRITICS, batch)
        qf_loss = masked_mean(cross_entropy.sum(0), batch["valid"])
        q_values = masked_mean(self.mean(logits.softmax(-1)).mean(0), batch["valid"])
        self.keep(q_values=q_values, qf_loss=qf_loss)
        self.optimizers["critics"].step(qf_loss)
        with torch.no_grad():
            for target, learned in zip(self.target_critics.values(), self.critics.values(), strict=True):
                if target.is_floating_point():  # BatchNorm has a count, too
                    target.lerp_(learned, self.args.tau)

    def target(self, probabilities, rewards, discounts):
        """The target distribution (batch, num_atoms), from those of the next values (NUM_CRITICS, batch, num_atoms)."""
        returns = (rewards[:, None] + discounts[:, None] * self.atoms).clamp(-self.args.v_max, self.args.v_max)
        first, second = (probabilities * returns).sum(-1)  # the means, which projection does not change
        smaller = torch.where((first <= second)[:, None], *probabilities)  # clipped double Q-learning
        return self.project(smaller, returns)

    def project(self, probabilities, returns):
        """Share `probabilities` of `returns`, both (batch, num_atoms), between the two atoms around each return.

        An atom's share falls linearly with its distance. As a sum over returns it takes no atomics, which would make
        results random on a GPU. In compiled code the (batch, num_atoms, num_atoms) shares need no memory.
        """
        spacing = 2 * self.args.v_max / (self.args.num_atoms - 1)
        distances = (returns[:, None, :] - self.atoms[:, None]).abs() / spacing
        return ((1 - distances).clamp(min=0) * probabilities[:, None, :]).sum(-1)

    def mean(self, probabilities):
        """The mean return of distributions (..., num_atoms)."""
        return (probabilities * self.atoms).sum(-1)

    def logits(self, critics, obs, actions):
        """The distributions of both critics, as logits (NUM_CRITICS, batch, num_atoms)."""
        inputs = (obs[:, -self.critic_dim :], actions)

        def logits(critic):
            return functional_call(self.critic_module, critic, inputs)

        return vmap(logits, randomness="different")(critics)

    def update_actor(self):
        """Update the actor on the batch of the last update of the critics."""
        # actor loss: the smaller mean of both critics
        critics = {name: tensor.detach() for name, tensor in self.critics.items()}
        with self.autocast():
            logits = self.logits(critics, self.batch_obs, self.actor.squashed(self.batch_obs))
        actor_loss = -masked_mean(self.mean(logits.softmax(-1)).amin(0), self.batch_valid)
        self.keep(actor_loss=actor_loss)
        self.optimizers["actor"].step(actor_loss)

    def learn(self, phase):
        """Store a step and make all of its updates: one CUDA graph. The actor's last update was `phase` updates ago."""
        self.new_stds.uniform_(self.args.std_min, self.args.std_max)
        self.store_step()
        for update in range(phase + 1, phase + 1 + self.args.updates_per_step):
            self.uniform.uniform_()
            self.noise.normal_()
            self.update_critics()
            if update % self.args.policy_frequency == 0:
                self.update_actor()

    def act(self, obs):
        """Actions with exploration noise, in the environment's units, for `obs` (num_envs, width)."""
        self.obs.copy_(obs)
        self.choose_actions()
        return self.actions_in_units.clone()

    def observe(self, *columns):
        """Take the outcome of the last actions, as returned by `DeviceEnvs.step`. Call `store` or `update` next."""
        for buffer, column in zip(self.outcome.values(), columns, strict=True):
            buffer.copy_(column)

    def update(self):
        """Store the last step, and launch its updates. On a CUDA device they may still be running when this returns."""
        self.learn_in_phase[self.updates % self.args.policy_frequency]()
        self.updates += self.args.updates_per_step

    def anneal(self, progress):
        """Set the learning rates, which follow a cosine; `progress` grows from 0 to 1 over the run."""
        for name, optimizer in self.optimizers.items():
            optimizer.lr.fill_(learning_rate(self.args, name, progress))

    def autocast(self):
        """A context that computes matmuls in bfloat16 if --bf16 is set."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.args.bf16)

    def compiled(self, function):
        """Compile `function`, which takes and returns nothing, if --compile is set."""
        if not self.args.compile:
            return function
        torch._dynamo.reset()  # otherwise torch stops recompiling after some learners in one process
        torch._dynamo.config.trace_autograd_ops = True  # allows torch.autograd.grad in a compiled function
        torch.autograd.set_multithreading_enabled(False)  # keeps the backward pass in the traced thread
        VecISA._avx_code = ""  # the program that inductor tests g++ with; its own takes seconds
        options = torch._inductor.list_mode_options(self.args.compile_mode)
        if torch.__version__ < "2.12":
            options["reorder_for_peak_memory"] = False  # it lets gradients read weights that are already updated
        if self.device.type == "cuda":
            options["combo_kernels"] = True  # fewer kernels
        return torch.compile(function, fullgraph=True, options=options)

    def captured(self, function):
        """Capture `function`, which takes and returns nothing, as a CUDA graph if --cudagraphs is set."""
        if not self.args.cudagraphs:
            return function
        logging.getLogger("tensordict").setLevel(logging.WARNING)  # it logs every capture
        return CudaGraphModule(function, warmup=3)  # captures at the third call, after all compilation

    def keep(self, **scalars):
        """Keep scalars for the log, always in the same memory.

        Keep values before the optimizer changes weights that they depend on: compiled code may compute them late.
        """
        for name, value in scalars.items():
            self.scalars[name].copy_(value.detach())

    def losses(self):
        """Losses of the last update, and statistics of the episodes since the last call, by name. Waits for both."""
        values = self.scalars | self.episodes.read()
        return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))

    def policy(self):
        """A copy of the deterministic policy on the CPU, and example inputs."""
        return copy.deepcopy(self.actor).cpu().eval(), (torch.zeros(2, self.actor_dim),)

    def tensors(self):
        """All tensors that updates change, except the replay buffer. Tensors missing here are not saved."""
        networks = {"actor": self.actor.state_dict(), "critics": self.critics, "target_critics": self.target_critics}
        optimizers = {name: optimizer.tensors() for name, optimizer in self.optimizers.items()}
        return {"networks": networks, "optimizers": optimizers, "stds": self.stds}

    def state_dict(self):
        """All state needed to resume."""
        return self.tensors() | {
            "flags": {name: getattr(self.args, name) for name in FIXED},
            "replay": self.replay.state_dict(),
            "updates": self.updates,
            "rng": torch.get_rng_state(),
            "cuda_rng": [torch.cuda.get_rng_state()] if self.device.type == "cuda" else [],
        }

    def load_state_dict(self, state):
        """Restore a `state_dict`."""
        for name, value in state["flags"].items():
            if getattr(self.args, name) != value:
                refuse(name, getattr(self.args, name), f"the checkpoint has {value}")
        tensors = self.tensors()
        load_tensors(tensors, {name: state[name] for name in tensors})
        self.replay.load_state_dict(state["replay"])
        self.updates = state["updates"]
        torch.set_rng_state(state["rng"])
        torch.cuda.set_rng_state_all(state["cuda_rng"])


class AdamW:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) for use in compiled functions, as in `Adam` of SAC and TD3.

    To change the learning rate, call `lr.fill_(value)`.
    """

    beta1, beta2, eps = 0.9, 0.999, 1e-8

    def __init__(self, weights, lr, weight_decay):
        self.weights = [w for w in weights if w.requires_grad]
        self.m = [torch.zeros_like(w) for w in self.weights]
        self.v = [torch.zeros_like(w) for w in self.weights]
        device = self.weights[0].device
        self.lr = torch.tensor(lr, device=device)
        self.weight_decay = weight_decay
        self.rates = torch.tensor((1 - self.beta1, 1 - self.beta2), device=device)
        self.corrections = torch.zeros_like(self.rates)  # for bias, 1 - beta**t: moving averages of ones

    @torch.no_grad()
    def step(self, loss):
        """Update the weights in place by the gradient of `loss`, and shrink them."""
        gradients = torch.autograd.grad(loss, self.weights, materialize_grads=True)  # 0 for weights not in the loss
        self.corrections.add_(self.rates * (1 - self.corrections))
        torch._foreach_lerp_(self.m, gradients, 1 - self.beta1)
        torch._foreach_mul_(self.v, self.beta2)
        torch._foreach_addcmul_(self.v, gradients, gradients, 1 - self.beta2)
        torch._foreach_mul_(self.weights, 1 - self.lr * self.weight_decay)

        # weights -= lr * (m / correction1) / (sqrt(v / correction2) + eps), with all scalars in the denominator
        correction1, correction2 = self.corrections.unbind()
        root = correction2.sqrt()
        denominator = torch._foreach_sqrt(self.v)
        torch._foreach_add_(denominator, self.eps * root, alpha=1)  # without `alpha`, the host would wait
        torch._foreach_mul_(denominator, correction1 / (self.lr * root))
        torch._foreach_addcdiv_(self.weights, self.m, denominator, -1)

    def tensors(self):
        """The state that a resumed run needs."""
        return {"m": self.m, "v": self.v, "corrections": self.corrections}


class DeviceNStepReplayBuffer:
    """Steps of all environments on the device, (size, num_envs, width). The newest overwrite the oldest."""

    def __init__(self, size, num_envs, widths, device):
        """`widths` are those of a step's columns, by name."""
        require_memory("buffer_size", size, 4 * num_envs * sum(widths.values()), device)
        self.rows = torch.empty(size, num_envs, sum(widths.values()), device=device)
        columns = self.rows.flatten(0, 1).split(list(widths.values()), -1)  # the same memory
        self.columns = dict(zip(widths, columns, strict=True))
        self.stored = torch.zeros((), dtype=torch.int64, device=device)  # steps of each environment stored so far

    def store(self, row):
        """Store a step of all environments, (num_envs, width)."""
        self.rows.index_copy_(0, (self.stored % len(self.rows))[None], row[None])
        self.stored.add_(1)

    def sample(self, uniform, num_steps, gamma):
        """Pick steps by the random numbers `uniform` (batch,) in [0, 1), equally many of each environment.

        Returns columns (batch, ...) by name, with returns over `num_steps` steps or to the episode's end. "discounts"
        multiply the value of "next_obs".
        """
        size, num_envs, _ = self.rows.shape
        count = self.stored.clamp(max=size) - num_steps + 1
        starts = (self.stored - size).clamp(min=0) + (uniform * count).long()
        envs = torch.arange(len(uniform), device=uniform.device) % num_envs
        offsets = torch.arange(num_steps, device=uniform.device)
        places = (starts[:, None] + offsets) % size * num_envs + envs[:, None]  # (batch, num_steps)

        rewards, ended = (self.columns[name].squeeze(-1)[places] for name in ("rewards", "ended"))
        reached = ((ended.cumsum(-1) - ended) == 0).float()  # no earlier step has ended the episode
        steps = reached.sum(-1)
        first, last = places[:, 0], places.gather(1, steps.long()[:, None] - 1).squeeze(-1)
        obs, actions, valid = (self.columns[name][first] for name in ("obs", "actions", "valid"))
        next_obs, terminated = (self.columns[name][last] for name in ("next_obs", "terminated"))
        return {
            "obs": obs,
            "actions": actions,
            "next_obs": next_obs,
            "rewards": (reached * gamma**offsets * rewards).sum(-1),
            "discounts": gamma**steps * (1 - terminated.squeeze(-1)),
            "valid": valid.squeeze(-1),
        }

    def state_dict(self):
        """A copy of the filled part, and the count."""
        return {"rows": self.rows[: self.stored].to("cpu", copy=True), "stored": self.stored}

    def load_state_dict(self, state):
        """Restore a `state_dict`."""
        self.rows[: len(state["rows"])] = state["rows"]
        self.stored.copy_(state["stored"])
        ended = self.columns["ended"].unflatten(0, self.rows.shape[:2])
        ended[(self.stored - 1) % len(self.rows)] = 1  # a resumed run begins new episodes


def load_tensors(tensors, saved):
    """Copy `saved` into `tensors`, nested dictionaries of one structure, in place: CUDA graphs stay valid."""

    def load(tensor, value):
        if (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
            raise ValueError(f"{value.dtype} {tuple(value.shape)} instead of {tensor.dtype} {tuple(tensor.shape)}")
        tensor.detach().copy_(value)

    tree_map(load, tensors, saved)


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
    if args.cudagraphs and device.type == "cpu":
        print("warning: --cudagraphs needs a CUDA device; running without", file=sys.stderr)
        args.cudagraphs = False
    check_sizes(args)
    envs = make_device_envs(args, device)
    learner = FastTD3(args, envs, device)
    with Run(args, folder, envs, learner) as run:
        obs = envs.reset(args.seed + run.step)
        learner.anneal(run.step / args.total_timesteps)
        while run.unfinished():
            actions = learner.act(obs)
            obs, *outcome = envs.step(actions)
            learner.observe(*outcome)
            run.advance()
            if run.step <= args.learning_starts * args.num_envs:
                learner.store()
            else:
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
#     "torch>=2.11,<2.16", "tensordict>=0.12,<0.16", "gymnasium>=1.1,<2", "numpy>=1.26,<3",
#     "tyro>=1.0,<2", "tqdm>=4.66", "tensorboard>=2.18", "wandb>=0.20", "array-api-compat>=1.12",
# ]
# ///
