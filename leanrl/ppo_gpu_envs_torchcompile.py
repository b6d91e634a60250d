"""Proximal Policy Optimization (PPO) for simulators on the GPU, made fast: Schulman et al. 2017, arXiv:1707.06347.

The algorithm is `PPO` and `train`. Below the line of dashes is the run, the same text in all scripts.
The updates are those of the plain version, ppo_gpu_envs.py. Why it is faster:

1. An environment step replays two graphs, which act and record (`PPO.decide`, `PPO.note`).
2. Values and log-probabilities of a rollout are computed at once, and advantages in log2(num_steps) rounds
   (`PPO.make_batch`, `gae`).
3. `--compile` compiles acting, recording, and a minibatch's forward, backward, clipping and Adam into one graph each.
4. `--cudagraphs` replays an iteration, from advantages to the last minibatch, as one CUDA graph (`PPO.learn`).
5. The host reads once per iteration: losses and episodes. The learning rate is adapted on the device.

    PYTHONPATH=. python leanrl/ppo_gpu_envs_torchcompile.py --compile --cudagraphs \\
        --env-id environments.mujoco_warp:warp/HalfCheetah-v5
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
from torch.utils import collect_env
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

CompileMode = Literal["default", "max-autotune-no-cudagraphs"]


@dataclass
class Args:
    env_id: str = "environments.mujoco_warp:warp/HalfCheetah-v5"  # gymnasium environment, as module:id
    total_timesteps: int = 30_000_000  # total environment steps, summed over all environments
    num_envs: int = 4096  # number of environments, stepped together
    num_steps: int = 16  # steps of each environment per rollout
    learning_rate: float = 1e-3  # initial learning rate
    desired_kl: float | None = 0.01  # adapt the learning rate to this KL divergence per update (None: constant rate)
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation (GAE)
    num_minibatches: int = 2  # minibatches per epoch
    update_epochs: int = 4  # passes over each rollout
    clip_coef: float = 0.2  # clipping range of the probability ratio (epsilon in the paper)
    ent_coef: float = 0.0  # coefficient of the entropy bonus
    vf_coef: float = 2.0  # coefficient of the value loss
    max_grad_norm: float = 1.0  # gradients are clipped to this norm (0: no clipping)
    reward_scaler: float = 1.0  # rewards are multiplied by this for learning

    compile: bool = False  # compile updates with torch.compile
    cudagraphs: bool = False  # replay updates as CUDA graphs
    compile_mode: CompileMode = "default"  # torch.compile mode
    cuda: bool = True  # use a CUDA device if there is one
    threads: int = 1  # CPU threads for torch (0: torch's default, slower for networks this small)
    matmul_precision: Literal["highest", "high", "medium"] = "highest"  # of float32 matmuls (high: TF32, medium: bf16)

    exp_name: str = Path(__file__).stem  # name of the experiment, used in the run's folder name
    seed: int = 1  # seed of the environments, NumPy and torch
    run_dir: str = "runs"  # parent folder of all runs
    resume: str | None = None  # folder of a run to resume; its flags become the defaults
    checkpoint_interval: int | None = None  # environment steps between checkpoints (0: only at the end; None: 20 times)
    track: bool = False  # also log to Weights & Biases
    wandb_project_name: str = "leanrl"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases team


def linear(inputs, outputs, gain=2**0.5):
    """A linear layer, initialized with orthogonal weights and zero bias."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


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


class Agent(nn.Module):
    """A Gaussian policy with a state-independent standard deviation, and a value function.

    A row of observations holds the policy's, followed by the critic's if it has its own. The learner calls `mean` and
    `value` with normalized rows.
    """

    def __init__(self, actor_dim, critic_dim, width, action_space):
        super().__init__()
        act_dim = action_space.shape[0]
        self.actor_dim, self.critic_dim = actor_dim, critic_dim
        self.actor = nn.Sequential(
            linear(actor_dim, 256),
            nn.Tanh(),
            linear(256, 256),
            nn.Tanh(),
            linear(256, act_dim, gain=0.01),
        )
        self.critic = nn.Sequential(
            linear(critic_dim, 256),
            nn.Tanh(),
            linear(256, 256),
            nn.Tanh(),
            linear(256, 1, gain=1.0),
        )
        self.log_std = nn.Parameter(torch.zeros(1, act_dim))
        self.normalizer = ObsNormalizer(width)
        self.register_buffer("low", torch.tensor(action_space.low, dtype=torch.float32), persistent=False)
        self.register_buffer("high", torch.tensor(action_space.high, dtype=torch.float32), persistent=False)

    def mean(self, obs):
        return self.actor(obs[..., : self.actor_dim])

    def value(self, obs):
        return self.critic(obs[..., -self.critic_dim :]).squeeze(-1)

    def forward(self, obs):
        """The deterministic policy, exported to policy.pt2: maps raw (batch, actor_dim) to (batch, act_dim)."""
        return self.actor(self.normalizer(obs)).clamp(self.low, self.high)


class PPO:
    """The learner. CUDA graphs replay kernels but no Python: state that changes is in tensors, updated in place."""

    def __init__(self, args, envs, device):
        self.args = args
        self.device = device
        self.actor_dim, width = envs.actor_dim, envs.width
        act_dim = envs.single_action_space.shape[0]
        with device:
            self.agent = Agent(envs.actor_dim, envs.critic_dim, width, envs.single_action_space)
        self.optimizers = {"agent": ClippedAdam(self.agent.parameters(), args.learning_rate, args.max_grad_norm)}
        self.episodes = EpisodeCounter(args.num_envs, device)
        names = ["policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac", "grad_norm", "explained_variance"]
        names += ["learning_rate", "episodes", "episodic_return", "episodic_length"]
        self.scalars = {name: torch.zeros((), device=device) for name in names}

        # the rollout: obs and actions, then the outcome of a step, which is next_obs, rewards, terminated, ended, valid
        self.widths = [width, act_dim, width, 1, 1, 1, 1]
        self.rollout = torch.zeros(args.num_steps, args.num_envs, sum(self.widths), device=device)
        self.t = torch.zeros(1, dtype=torch.int64, device=device)  # step of the rollout
        self.obs = torch.zeros(args.num_envs, width, device=device)  # to act on, normalized
        self.actions = torch.zeros(args.num_envs, act_dim, device=device)
        self.noise = torch.zeros(args.num_steps, args.num_envs, act_dim, device=device)
        self.outcome = torch.zeros(args.num_envs, width + sum(self.widths[2:]), device=device)  # obs, and an outcome

        # all transitions, and a minibatch: obs, actions, log_prob, advantages, returns, valid
        self.batch_widths = [width, act_dim, 1, 1, 1, 1]
        batch_size = args.num_steps * args.num_envs
        self.batch = torch.zeros(batch_size, sum(self.batch_widths), device=device)
        self.minibatch = torch.zeros(batch_size // args.num_minibatches, sum(self.batch_widths), device=device)
        self.orders = torch.zeros(args.update_epochs, batch_size, dtype=torch.int64, device=device)

        self.decide = self.captured(self.compiled(self.decide))  # replaces the method
        self.note = self.captured(self.compiled(self.note))
        self.update_minibatch = self.compiled(self.update_minibatch)
        self.learn = self.captured(self.learn)

    @torch.no_grad()
    def make_batch(self):
        """Fill `batch` with the rollout's transitions, their advantages and returns."""
        obs, actions, next_obs, rewards, terminated, ended, valid = self.rollout.split(self.widths, -1)
        log_prob = gaussian_log_prob(self.agent.mean(obs), self.agent.log_std, actions)
        values = self.agent.value(obs)[..., None]
        next_values = self.agent.value(next_obs)[..., None]

        # GAE (arXiv:1506.02438, eq. 16)
        deltas = rewards + self.args.gamma * (1 - terminated) * next_values - values
        advantages = gae(deltas, self.args.gamma * self.args.gae_lambda * (1 - ended))

        returns = advantages + values
        self.batch.copy_(torch.cat((obs, actions, log_prob, advantages, returns, valid), -1).flatten(0, 1))
        errors = masked_variance(advantages, valid)  # returns minus values
        self.keep(explained_variance=1 - errors / masked_variance(returns, valid))

    def loss(self, rows):
        """Policy loss, value loss, entropy, and the log of the probability ratio (n, 1) for n rows of `batch`."""
        obs, actions, old_log_prob, advantages, returns, valid = rows.split(self.batch_widths, -1)
        clip = self.args.clip_coef

        # clipped policy loss (eq. 7)
        log_std = self.agent.log_std
        log_ratio = gaussian_log_prob(self.agent.mean(obs), log_std, actions) - old_log_prob
        ratio = log_ratio.exp()
        std = masked_variance(advantages, valid).sqrt()
        advantages = (advantages - masked_mean(advantages, valid)) / (std + 1e-8)
        gains = torch.min(advantages * ratio, advantages * ratio.clamp(1 - clip, 1 + clip))
        policy_loss = -masked_mean(gains, valid)

        # value loss
        errors = (self.agent.value(obs)[..., None] - returns).square()
        value_loss = 0.5 * masked_mean(errors, valid)

        entropy = (log_std + 0.5 * (1 + math.log(2 * math.pi))).expand_as(actions).sum(-1).mean()
        return policy_loss, value_loss, entropy, log_ratio

    def update_minibatch(self):
        """One step of Adam on the loss of `minibatch`."""
        policy_loss, value_loss, entropy, log_ratio = self.loss(self.minibatch)
        loss = policy_loss - self.args.ent_coef * entropy + self.args.vf_coef * value_loss
        ratio = log_ratio.detach().exp()
        clipped = ((ratio - 1).abs() > self.args.clip_coef).float()
        valid = self.minibatch[:, -1:]
        divergences = ratio - 1 - log_ratio.detach()  # http://joschu.net/blog/kl-approx.html, k3
        approx_kl = masked_mean(divergences, valid)
        self.keep(
            policy_loss=policy_loss,
            value_loss=value_loss,
            entropy=entropy,
            approx_kl=approx_kl,
            clipfrac=masked_mean(clipped, valid),
        )
        gradient = self.optimizers["agent"].gradient(loss)
        grad_norm = self.optimizers["agent"].step(gradient)
        self.keep(grad_norm=grad_norm)
        self.adapt_learning_rate(approx_kl)  # after the step, with which inductor's CUDA code would race

    @torch.no_grad()
    def adapt_learning_rate(self, kl):
        """Adapt the next minibatch's rate to keep the KL divergence between half and twice --desired-kl."""
        if self.args.desired_kl is None:
            return
        direction = (kl < self.args.desired_kl / 2).float() - (kl > 2 * self.args.desired_kl).float()
        self.optimizers["agent"].lr.mul_(1.5**direction).clamp_(1e-5, 1e-2)

    def learn(self):
        """Make the batch of the rollout, then pass over it in minibatches, once for each of `orders`."""
        self.make_batch()
        for order in self.orders:
            for rows in order.chunk(self.args.num_minibatches):
                torch.index_select(self.batch, 0, rows, out=self.minibatch)
                self.update_minibatch()
        self.keep(learning_rate=self.optimizers["agent"].lr, **self.episodes.read())

    def update(self):
        """Learn from the rollout. A CUDA device may still be computing when this returns."""
        # random numbers are drawn outside of graphs, so that all modes draw the same
        self.orders.copy_(torch.rand(self.orders.shape, device=self.device).argsort(-1))
        self.learn()

    @torch.no_grad()
    def observe(self, obs):
        """Update the statistics with observations (num_envs, width), and normalize these for the next action."""
        self.agent.normalizer.update(obs)
        self.obs.copy_(self.agent.normalizer(obs))

    def start_rollout(self):
        """Draw the noise for all actions of the rollout."""
        self.noise.normal_()

    @torch.no_grad()
    def decide(self):
        """Sample `actions` for `obs`, and store both in step `t` of the rollout."""
        noise = self.noise.index_select(0, self.t).squeeze(0)
        actions = self.agent.mean(self.obs) + self.agent.log_std.exp() * noise
        self.rollout[..., : sum(self.widths[:2])].index_copy_(0, self.t, torch.cat((self.obs, actions), -1)[None])
        self.actions.copy_(actions.clamp(self.agent.low, self.agent.high))

    def act(self):
        """Sampled actions (num_envs, act_dim); a copy, since an environment may keep them."""
        self.decide()
        return self.actions.clone()

    def note(self):
        """Store `outcome` in step `t` of the rollout, and go on to the next."""
        obs, next_obs, rewards, terminated, ended, valid = self.outcome.split((self.widths[0], *self.widths[2:]), -1)
        self.episodes.count(*(column.squeeze(-1) for column in (rewards, ended, valid)))
        self.observe(obs)
        next_obs = self.agent.normalizer(next_obs)
        row = torch.cat((next_obs, self.args.reward_scaler * rewards, terminated, ended, valid), -1)
        self.rollout[..., sum(self.widths[:2]) :].index_copy_(0, self.t, row[None])
        self.t.copy_((self.t + 1) % self.args.num_steps)

    def record(self, obs, next_obs, *columns):
        """Store the outcome of a step, as returned by `DeviceEnvs.step`."""
        torch.cat((obs, next_obs, *(column[:, None] for column in columns)), -1, out=self.outcome)
        self.note()

    def compiled(self, function):
        """Compile `function`, which takes and returns nothing, if --compile is set."""
        if not self.args.compile:
            return function
        torch._dynamo.reset()  # otherwise torch stops recompiling after some learners in one process
        torch._dynamo.config.trace_autograd_ops = True  # allows torch.autograd.grad in a compiled function
        torch.autograd.set_multithreading_enabled(False)  # keeps the backward pass in the traced thread
        VecISA._avx_code = ""  # the program that inductor tests g++ with; its own takes seconds
        options = torch._inductor.list_mode_options(self.args.compile_mode)
        if self.device.type == "cuda":
            options["combo_kernels"] = True  # fewer kernels
        else:
            options["cpp_wrapper"] = True  # calls kernels from C++
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
        """Losses of the last minibatch, and statistics of the iteration, by name. Waits for the last update."""
        return dict(zip(self.scalars, torch.stack(list(self.scalars.values())).tolist(), strict=True))

    def policy(self):
        """A copy of the deterministic policy on the CPU, and example inputs."""
        return copy.deepcopy(self.agent).cpu().eval(), (torch.zeros(2, self.actor_dim),)

    def tensors(self):
        """All tensors that updates change. Tensors missing here are not saved."""
        optimizers = {name: optimizer.tensors() for name, optimizer in self.optimizers.items()}
        optimizers["agent"]["lr"] = self.optimizers["agent"].lr
        return {"networks": {"agent": self.agent.state_dict()}, "optimizers": optimizers}

    def state_dict(self):
        """All state needed to resume."""
        return self.tensors() | {
            "rng": torch.get_rng_state(),
            "cuda_rng": [torch.cuda.get_rng_state()] if self.device.type == "cuda" else [],
        }

    def load_state_dict(self, state):
        """Restore a `state_dict`."""
        tensors = self.tensors()
        load_tensors(tensors, {name: state[name] for name in tensors})
        if self.args.desired_kl is None:
            self.optimizers["agent"].lr.fill_(self.args.learning_rate)
        torch.set_rng_state(state["rng"])
        torch.cuda.set_rng_state_all(state["cuda_rng"])


def gaussian_log_prob(mean, log_std, actions):
    """Log-probabilities (..., 1) of `actions` (..., act_dim)."""
    squares = ((actions - mean) * (-log_std).exp()).square()
    return -(0.5 * squares + log_std + 0.5 * math.log(2 * math.pi)).sum(-1, keepdim=True)


def gae(deltas, decay):
    """Advantages A_t = delta_t + decay_t A_{t+1}; all tensors are (num_steps, ...).

    Computed by doubling: if A_t and A_{t+n} cover n steps each, A_t + decay_t ... decay_{t+n-1} A_{t+n} covers 2n.
    """
    advantages = deltas
    covered = 1
    while covered < len(deltas):
        following = decay[: len(deltas) - covered] * advantages[covered:]
        advantages = torch.cat((advantages[:-covered] + following, advantages[-covered:]))
        decay = decay[:-covered] * decay[covered:]
        covered *= 2
    return advantages


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


def masked_variance(values, valid):
    """The unbiased variance of `values` (batch,) where `valid` is 1; 0 if there are fewer than two of these."""
    squares = (values - masked_mean(values, valid)).square()
    return (squares * valid).sum() / (valid.sum() - 1).clamp(min=1)


class ClippedAdam:
    """Adam (Kingma and Ba 2015, arXiv:1412.6980) with gradient clipping, for use in compiled functions.

    torch.optim.Adam breaks the graph there. The gradients of all weights are one vector, with one norm and one Adam. To
    change the learning rate, call `lr.fill_(value)`.
    """

    beta1, beta2, eps = 0.9, 0.999, 1e-5  # CleanRL's eps for PPO; torch's default is 1e-8

    def __init__(self, weights, lr, max_grad_norm):
        self.weights = [w for w in weights if w.requires_grad]
        self.max_grad_norm = max_grad_norm or math.inf
        device = self.weights[0].device
        self.m = torch.zeros(sum(w.numel() for w in self.weights), device=device)
        self.v = torch.zeros_like(self.m)
        self.lr = torch.tensor(lr, device=device)
        self.rates = torch.tensor((1 - self.beta1, 1 - self.beta2), device=device)
        self.corrections = self.rates.clone()  # for bias in the next step, 1 - beta**t: moving averages of ones

    def gradient(self, loss):
        """The gradient of `loss` as one vector."""
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, self.weights, materialize_grads=True)])

    @torch.no_grad()
    def step(self, gradient):
        """Update the weights in place by `gradient`; returns its norm before clipping."""
        norm = gradient.norm()
        gradient = gradient * (self.max_grad_norm / (norm + 1e-6)).clamp(max=1)
        self.m.lerp_(gradient, 1 - self.beta1)
        self.v.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)

        # weights -= lr * (m / correction1) / (sqrt(v / correction2) + eps), with all scalars in the denominator
        correction1, correction2 = self.corrections.unbind()
        root = correction2.sqrt()
        denominator = self.v.sqrt().add_(self.eps * root).mul_(correction1 / (self.lr * root))
        torch._foreach_addcdiv_(self.weights, self.parts(self.m), self.parts(denominator), -1)
        self.corrections.add_(self.rates * (1 - self.corrections))  # last: torch 2.11's CUDA code had a race
        return norm

    def parts(self, vector):
        """Views of `vector` in the shapes of the weights."""
        parts = vector.split([w.numel() for w in self.weights])
        return [part.view_as(w) for part, w in zip(parts, self.weights, strict=True)]

    def tensors(self):
        """The state that a resumed run needs."""
        return {"m": self.m, "v": self.v, "corrections": self.corrections}


def load_tensors(tensors, saved):
    """Copy `saved` into `tensors`, nested dictionaries of one structure, in place: CUDA graphs stay valid."""

    def load(tensor, value):
        if (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
            raise ValueError(f"{value.dtype} {tuple(value.shape)} instead of {tensor.dtype} {tuple(tensor.shape)}")
        tensor.detach().copy_(value)

    tree_map(load, tensors, saved)


def train(args):
    """Train an agent."""
    device, folder = prepare(args)
    if args.cudagraphs and device.type == "cpu":
        print("warning: --cudagraphs needs a CUDA device; running without", file=sys.stderr)
        args.cudagraphs = False
    require_minibatches(args)
    envs = make_device_envs(args, device)
    learner = PPO(args, envs, device)
    with Run(args, folder, envs, learner) as run:
        learner.observe(envs.reset(args.seed + run.step))
        while run.unfinished():
            learner.start_rollout()
            for _ in range(args.num_steps):
                actions = learner.act()
                learner.record(*envs.step(actions))
                run.advance()
            learner.update()
            run.log(learner.losses())


def require_minibatches(args):
    """Refuse a batch that cannot be divided evenly into minibatches of several steps."""
    batch_size = args.num_envs * args.num_steps
    if batch_size % args.num_minibatches or batch_size == args.num_minibatches:
        refuse("num_minibatches", args.num_minibatches, f"give a proper divisor of num_envs * num_steps, {batch_size}")


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


AT_LEAST_1 = ("total_timesteps", "num_envs", "num_steps", "num_minibatches", "update_epochs")
AT_MOST = {"gamma": 1, "gae_lambda": 1, "seed": 2**32 - 1, "threads": os.cpu_count()}


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
