"""Proximal Policy Optimization (PPO) for Atari at full speed: Schulman et al. 2017, arXiv:1707.06347.

The updates are those of the plain twin, ppo_atari_envpool.py. What makes this file fast:

1. An environment step costs one copy in, of bytes, and one copy out: the rollout is on the device (`PPO.act`).
2. Actions are sampled without a wait, by the Gumbel-max trick, and stored where the update reads them (`PPO.decide`).
3. GAE is a linear recurrence, solved by doubling in log2(num_steps) rounds (`gae`).
4. The parameters of a network, and so their gradients, are one flat vector: clipping and Adam are a few operations
   (`FlatNetwork`, `PPO.update_minibatch`).
5. `--compile` makes one graph of acting and one of a minibatch, from its rows to Adam
   (`PPO.apply_compile_and_cudagraphs`).
6. `--cudagraphs` replays acting, and a whole iteration's updates, as CUDA graphs (`PPO.sample`, `PPO.learn`).
7. On a CPU the memory that an update frees is kept for the next one (`keep_freed_memory`).

    python leanrl/ppo_atari_envpool_torchcompile.py --env-id Breakout-v5 --compile --cudagraphs
"""

import copy
import ctypes
import difflib
import json
import logging
import math
import os
import platform
import shutil
import signal
import sys
import textwrap
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from tensordict.nn import CudaGraphModule
from torch import nn
from torch.func import functional_call, vmap
from torch.utils._pytree import keystr, tree_leaves, tree_leaves_with_path, tree_map
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

GRAPH_WARMUP = 3  # the call at which a CUDA graph is captured; compilation is over by then
DECISIONS = {"actions": (), "log_prob": (), "values": ()}  # columns of a step: what was decided,
OUTCOMES = {"rewards": (), "terminated": (), "ended": (), "valid": ()}  # what that led to,
BATCH = DECISIONS | {"advantages": (), "returns": (), "valid": ()}  # and what is learned from
CompileMode = Literal["default", "max-autotune-no-cudagraphs"]


@dataclass
class Args:
    env_id: str = "Breakout-v5"
    """Atari game in envpool"""
    total_timesteps: int = 10_000_000
    """environment steps of the whole run, over all environments; each takes four frames"""
    num_envs: int = 8
    """environments that step together"""
    num_steps: int = 128
    """steps of each environment per iteration"""
    learning_rate: float = 2.5e-4
    """learning rate of the first iteration"""
    anneal_lr: bool = True
    """lower the learning rate linearly to 0 at the end of the run"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation"""
    num_minibatches: int = 4
    """minibatches per epoch"""
    update_epochs: int = 4
    """passes over an iteration's transitions"""
    norm_adv: bool = True
    """normalize the advantages of each minibatch"""
    clip_coef: float = 0.1
    """largest change of the probability ratio from 1 (epsilon in the paper)"""
    clip_vloss: bool = True
    """clip the change of the values by --clip-coef too"""
    ent_coef: float = 0.01
    """coefficient of the entropy in the loss"""
    vf_coef: float = 0.5
    """coefficient of the value loss"""
    max_grad_norm: float = 0.5
    """largest norm of a gradient, which is scaled down to it"""
    target_kl: float | None = None
    """end an iteration after the epoch in which the approximate KL divergence exceeds this"""

    compile: bool = False
    """compile acting and the updates with torch.compile"""
    cudagraphs: bool = False
    """replay acting and learning as CUDA graphs"""
    compile_mode: CompileMode = "default"
    """torch.compile's mode"""

    exp_name: str = Path(__file__).stem
    """name of the experiment, part of the run's folder name"""
    seed: int = 1
    """seed of the environments, NumPy and torch"""
    run_dir: str = "runs"
    """parent folder of all runs"""
    resume: str | None = None
    """run to continue: its folder or its checkpoint.pt, whose flags become the defaults"""
    checkpoint_interval: int = 0
    """save a checkpoint every so many environment steps (0: only at the end)"""
    capture_video: bool = False
    """record videos of the first environment"""
    track: bool = False
    """also log to Weights & Biases"""
    wandb_project_name: str = "leanrl"
    """project on Weights & Biases"""
    wandb_entity: str | None = None
    """team on Weights & Biases"""
    cuda: bool = True
    """use a CUDA device if there is one"""
    threads: int = 0
    """CPU threads for torch (0: torch's default)"""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """precision of float32 matmuls and convolutions (high: TF32, medium: bfloat16)"""
    torch_deterministic: bool = True
    """use deterministic cuDNN kernels"""


AT_LEAST_1 = ("total_timesteps", "num_envs", "num_steps", "num_minibatches", "update_epochs")
AT_MOST_1 = ("gamma", "gae_lambda")
POSITIVE = ("learning_rate", "clip_coef", "max_grad_norm", "target_kl")  # others may be 0, none negative
FIXED = ("env_id",)  # what a resumed run cannot change
BETA1, BETA2, EPS = 0.9, 0.999, 1e-5  # Adam's
RUNNING_STATISTICS = (nn.modules.batchnorm._BatchNorm, nn.utils.parametrizations._SpectralNorm)


def orthogonal(layer, gain=2**0.5):
    """`layer`, which starts with orthogonal weights and without bias."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """The convolutional network of Mnih et al. 2015 with two heads: a categorical policy and a value function."""

    def __init__(self, num_actions):
        super().__init__()
        self.features = nn.Sequential(
            orthogonal(nn.Conv2d(4, 32, 8, stride=4)),
            nn.ReLU(),
            orthogonal(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(),
            orthogonal(nn.Conv2d(64, 64, 3)),
            nn.ReLU(),
            nn.Flatten(),
            orthogonal(nn.Linear(64 * 7 * 7, 512)),
            nn.ReLU(),
        )
        self.actor = orthogonal(nn.Linear(512, num_actions), gain=0.01)
        self.critic = orthogonal(nn.Linear(512, 1), gain=1.0)

    def forward(self, obs):
        """Logits of the actions, (batch, num_actions), and values, (batch,), for uint8 `obs`, (batch, 4, 84, 84)."""
        features = self.features(obs / 255)
        return self.actor(features), self.critic(features).squeeze(-1)


class PPO:
    """The learner. CUDA graphs replay kernels, not Python: what changes in training is a tensor, updated in place."""

    def __init__(self, args, envs, device):
        self.args = args
        self.device = device
        self.cudagraphs = args.cudagraphs and device.type == "cuda"
        self.num_envs = envs.num_envs
        self.num_actions = int(envs.single_action_space.n)
        with device:
            self.agent = FlatNetwork(Agent(self.num_actions))
        self.optimizers = {"agent": Adam(self.agent.weights, args.learning_rate)}
        self.scalars = Scalars(device)
        self.updates = 0
        self.warmup_updates = GRAPH_WARMUP if self.cudagraphs else 1

        obs_shape = envs.single_observation_space.shape
        width = len(DECISIONS) + len(OUTCOMES) + len(BATCH)
        require_memory(args, "num_steps", bytes_each=self.num_envs * (math.prod(obs_shape) + 4 * width))
        steps = (args.num_steps, self.num_envs)
        on_cuda = device.type == "cuda"
        all_obs = (args.num_steps + 1, self.num_envs, *obs_shape)
        self.host_obs = torch.zeros(all_obs, dtype=torch.uint8, pin_memory=on_cuda)
        self.obs = self.host_obs.to(device)  # on a CPU the same memory, as below
        self.host_outcomes = torch.zeros(*steps, len(OUTCOMES), pin_memory=on_cuda)
        self.outcomes = self.host_outcomes.to(device)
        self.host_actions = torch.zeros(self.num_envs, dtype=torch.int64, pin_memory=on_cuda)
        self.actions = self.host_actions.to(device)
        self.actions_arrived = torch.cuda.Event() if on_cuda else HostEvent()
        self.t = torch.zeros(1, dtype=torch.int64, device=device)  # the next step of the rollout
        self.decisions = torch.zeros(*steps, len(DECISIONS), device=device)
        self.noise = torch.empty(*steps, self.num_actions, device=device)  # for the choice of actions
        self.batch = torch.zeros(args.num_steps * self.num_envs, len(BATCH), device=device)
        slow = on_cuda and args.matmul_precision == "highest"  # CPUs and tensor cores like channels last
        self.layout = torch.contiguous_format if slow else torch.channels_last
        self.apply_compile_and_cudagraphs()

    def make_batch(self):
        """Make `batch`: a row per transition, with the columns in BATCH.

        A step leads to the observation of the next one, also where it ends an episode: only the next step starts a new
        episode.
        """
        columns = split_columns(self.decisions, DECISIONS) | split_columns(self.outcomes, OUTCOMES)
        values = columns["values"]
        _, last_values = self.agent(self.obs[-1])
        next_values = torch.cat((values[1:], last_values[None]))
        outcomes = (columns["rewards"], values, next_values, columns["terminated"], columns["ended"])
        columns["advantages"] = gae(*outcomes, self.args.gamma, self.args.gae_lambda)
        columns["returns"] = columns["advantages"] + values
        self.batch.copy_(torch.stack([columns[name] for name in BATCH], -1).flatten(0, 1))

        errors = masked_variance(columns["advantages"], columns["valid"])  # of returns minus values
        explained_variance = 1 - errors / masked_variance(columns["returns"], columns["valid"])
        self.scalars.store(explained_variance=explained_variance)

    def loss(self, weights, obs, columns):
        """Policy loss, value loss, entropy and the log of the probability ratio, (batch,).

        `obs`, (batch, 4, 84, 84), are uint8; `columns`, (batch,) each, are those in BATCH.
        """
        clip = self.args.clip_coef
        valid = columns["valid"]
        logits, values = self.agent(obs, weights=weights)
        log_probs = logits.log_softmax(-1)
        log_prob = log_probs.gather(-1, columns["actions"].long()[:, None]).squeeze(-1)

        # clipped policy loss (eq. 7)
        log_ratio = log_prob - columns["log_prob"]
        ratio = log_ratio.exp()
        advantages = columns["advantages"]
        if self.args.norm_adv:
            std = masked_variance(advantages, valid).sqrt()
            advantages = (advantages - masked_mean(advantages, valid)) / (std + 1e-8)
        gains = torch.min(advantages * ratio, advantages * ratio.clamp(1 - clip, 1 + clip))
        policy_loss = -masked_mean(gains, valid)

        # clipped value loss
        errors = (values - columns["returns"]).square()
        if self.args.clip_vloss:
            clipped_values = columns["values"] + (values - columns["values"]).clamp(-clip, clip)
            errors = torch.max(errors, (clipped_values - columns["returns"]).square())
        value_loss = 0.5 * masked_mean(errors, valid)

        entropy = masked_mean(-(log_probs.exp() * log_probs).sum(-1), valid)
        return policy_loss, value_loss, entropy, log_ratio

    def update_minibatch(self, rows):
        """One step of Adam on the transitions `rows`, (minibatch,); returns losses from before it, by name."""
        obs = self.obs.flatten(0, 1).index_select(0, rows).contiguous(memory_format=self.layout)
        columns = split_columns(self.batch.index_select(0, rows), BATCH)
        weights = self.agent.weights.detach().requires_grad_()
        policy_loss, value_loss, entropy, log_ratio = self.loss(weights, obs, columns)
        loss = policy_loss - self.args.ent_coef * entropy + self.args.vf_coef * value_loss
        (gradient,) = torch.autograd.grad(loss, weights)
        grad_norm = gradient.norm()
        scale = (self.args.max_grad_norm / (grad_norm + 1e-6)).clamp(max=1)
        self.optimizers["agent"].step(self.agent.weights, gradient * scale)

        log_ratio = log_ratio.detach()
        ratio = log_ratio.exp()
        clipped = ((ratio - 1).abs() > self.args.clip_coef).float()
        valid = columns["valid"]
        return {
            "policy_loss": policy_loss.detach(),
            "value_loss": value_loss.detach(),
            "entropy": entropy.detach(),
            "approx_kl": masked_mean(ratio - 1 - log_ratio, valid),  # http://joschu.net/blog/kl-approx.html, k3
            "clipfrac": masked_mean(clipped, valid),
            "grad_norm": grad_norm,
        }

    def learn_epoch(self):
        """All of `batch` once, in minibatches drawn without replacement; stores means of what they return."""
        order = torch.rand(len(self.batch), device=self.device).argsort()
        losses = [self.update_minibatch(rows) for rows in order.chunk(self.args.num_minibatches)]
        self.scalars.store(**{name: torch.stack([values[name] for values in losses]).mean() for name in losses[0]})

    def learn(self):
        """All epochs over the rollout, fewer if the KL divergence exceeds --target-kl."""
        self.make_batch()
        for _ in range(self.args.update_epochs):
            self.learn_epoch()
            if self.args.target_kl is not None and self.losses()["approx_kl"] > self.args.target_kl:
                break

    def update(self, learning_rate, last_obs):
        """Launch all updates of an iteration; `last_obs`, (num_envs, 4, 84, 84), are what its last step led to."""
        self.optimizers["agent"].lr = learning_rate
        self.write(self.args.num_steps, last_obs)
        self.outcomes.copy_(self.host_outcomes, non_blocking=True)
        self.learn()
        self.updates += 1

    def decide(self):
        """Sample actions for the observations of step `t`, with the Gumbel-max trick, and count the step.

        `noise` is exponential: the negative of its logarithm is Gumbel noise.
        """
        logits, values = self.agent(self.obs.index_select(0, self.t).squeeze(0))
        log_probs = logits.log_softmax(-1)
        noise = self.noise.index_select(0, self.t).squeeze(0)
        actions = (log_probs - noise.log()).argmax(-1)
        log_prob = log_probs.gather(-1, actions[:, None]).squeeze(-1)
        decisions = torch.stack((actions.float(), log_prob, values), -1)
        self.decisions.index_copy_(0, self.t, decisions[None])
        self.actions.copy_(actions)
        self.t.add_(1)

    def write(self, t, obs):
        """Copy `obs`, NumPy, (num_envs, 4, 84, 84), to step `t` of the rollout."""
        self.host_obs.numpy()[t] = obs
        self.obs[t].copy_(self.host_obs[t], non_blocking=True)

    def act(self, t, obs):
        """Sampled actions, (num_envs,), for step `t` of the rollout and `obs`, (num_envs, 4, 84, 84); both NumPy.

        Steps come in order from 0: the device counts along.
        """
        self.write(t, obs)
        if t == 0:
            self.t.zero_()
            self.noise.exponential_()  # of the whole rollout
        self.decide()
        self.host_actions.copy_(self.actions, non_blocking=True)
        self.actions_arrived.record()
        self.actions_arrived.synchronize()
        return self.host_actions.numpy().copy()

    def record(self, t, rewards, terminated, truncated, is_reset):
        """Store what step `t` led to; all are NumPy, (num_envs,), as `AtariEnvs.step` returns them."""
        outcomes = (rewards, terminated, terminated | truncated, ~is_reset)
        np.stack(outcomes, -1, self.host_outcomes[t].numpy(), casting="unsafe")

    def apply_compile_and_cudagraphs(self):
        """The one place where functions are compiled and captured."""
        if self.args.compile:
            mode = self.args.compile_mode
            options = ON_CUDA if self.device.type == "cuda" else {}
            self.decide = compiled(self.decide, mode, options)
            self.update_minibatch = compiled(self.update_minibatch, mode, options)
        if self.cudagraphs:
            self.decide = CudaGraphModule(self.decide, warmup=GRAPH_WARMUP)
            if self.args.target_kl is None:
                self.learn = CudaGraphModule(self.learn, warmup=GRAPH_WARMUP)
            else:  # the host looks at the KL divergence after each epoch
                self.make_batch = CudaGraphModule(self.make_batch, warmup=GRAPH_WARMUP)
                self.learn_epoch = CudaGraphModule(self.learn_epoch, warmup=GRAPH_WARMUP)

    def losses(self):
        """Losses and statistics of the last update's last epoch, by name; waits for that update."""
        return self.scalars.fetch()

    def policy(self):
        """A copy of the deterministic policy, on the CPU."""
        return Policy(self.agent.cpu_copy())

    def tensors(self):
        """Every tensor that updates change. What is missing here is not saved."""
        return {
            "networks": {"agent": self.agent.network.state_dict()},
            "optimizers": {"agent": self.optimizers["agent"].tensors()},
        }

    def state_dict(self):
        """Copies on the CPU of what the learner needs to continue bit for bit."""
        return tree_map(lambda tensor: tensor.detach().to("cpu", copy=True), self.tensors()) | {
            "updates": self.updates,
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all()[:1],  # of the device in use
        }

    def load_state_dict(self, state):
        """Continue from what `state_dict` returned."""
        tensors = self.tensors()
        load_tensors(tensors, {name: state[name] for name in tensors})
        self.updates = state["updates"]
        self.warmup_updates += self.updates
        torch.set_rng_state(state["rng"])
        torch.cuda.set_rng_state_all(state["cuda_rng"])


def train(args, on_start=lambda run: None):
    """Train an agent. `on_start` is for tools: it is called with the `Run` before the first step."""
    keep_freed_memory()
    with Run(args) as run:
        check_compile(args, run.device)
        check_batch(args)
        envs = make_games(args, run.folder)
        learner = PPO(args, envs, run.device)
        run.start(envs, learner)
        obs, _ = envs.reset()
        on_start(run)
        while run.unfinished():
            learning_rate = args.learning_rate
            if args.anneal_lr:
                learning_rate *= 1 - run.step / args.total_timesteps
            for t in range(args.num_steps):
                actions = learner.act(t, obs)
                obs, rewards, terminated, truncated, infos = envs.step(actions)
                learner.record(t, rewards, terminated, truncated, infos["is_reset"])
                run.advance(infos["raw_rewards"], infos["game_ended"])
            learner.update(learning_rate, obs)
            run.log(learner.losses())


class Policy(nn.Module):
    """What policy.pt2 holds, the most probable actions: uint8 observations, (batch, 4, 84, 84), to (batch,)."""

    def __init__(self, agent):
        super().__init__()
        self.agent = agent

    def forward(self, obs):
        logits, _ = self.agent(obs)
        return logits.argmax(-1)


# ---------------------------------------------------------------------------------------------------------------------
# What makes it fast: GAE by doubling, flat networks, Adam, compilation, games
# ---------------------------------------------------------------------------------------------------------------------


def gae(rewards, values, next_values, terminated, ended, gamma, gae_lambda):
    """Generalized advantage estimation (arXiv:1506.02438, eq. 16); all tensors are (num_steps, num_envs).

    It solves the recurrence A_t = delta_t + decay_t A_{t+1} by doubling: after k rounds A_t covers 2**k steps.
    """
    advantages = rewards + gamma * (1 - terminated) * next_values - values
    decay = gamma * gae_lambda * (1 - ended)
    covered = 1
    while covered < len(rewards):
        following = decay[: len(rewards) - covered] * advantages[covered:]
        advantages = torch.cat((advantages[:-covered] + following, advantages[-covered:]))
        decay = decay[:-covered] * decay[covered:]
        covered *= 2
    return advantages


class FlatNetwork:
    """A network whose parameters are views of one flat vector, `weights`, which requires no gradient.

    `flat(*inputs)` calls the network. To learn, call `flat(*inputs, weights=w)` with
    `w = flat.weights.detach().requires_grad_()`: calls without `w` give no gradient. The members of an
    nn.ModuleList are called together: outputs get a leading dimension.

    Each parameter starts on a 64-byte boundary, for fast loads. Matrices are stored transposed: the gradient of a
    batched matmul then needs no copy.
    """

    def __init__(self, network, batched=True, pin_memory=False):
        """`batched` calls the members of an nn.ModuleList as one network: faster if compiled or captured."""
        self.network = network
        self.several = isinstance(network, nn.ModuleList)
        self.batched = batched and self.several
        self.members = list(network) if self.several else [network]
        first = self.members[0]
        for layer in first.modules():
            if isinstance(layer, RUNNING_STATISTICS) or hasattr(layer, "weight_u"):  # of the old spectral_norm
                raise ValueError("flat networks cannot hold statistics (BatchNorm, spectral norm): use LayerNorm")
        if any(repr(member) != repr(first) for member in self.members):
            raise ValueError("the members of a ModuleList must have the same layers")
        for buffers in zip(*(member.buffers() for member in self.members), strict=True):
            if any(not torch.equal(buffer, buffers[0]) for buffer in buffers):
                raise ValueError("the members of a ModuleList share the first one's buffers: these must be equal")
        if len({parameter.requires_grad for parameter in first.parameters()}) > 1:
            raise ValueError("flat networks learn all of their parameters: register frozen ones as buffers")
        self.shapes = {name: parameter.shape for name, parameter in first.named_parameters()}
        self.tied = len(self.shapes) < len(list(first.named_parameters(remove_duplicate=False)))
        self.sizes = []  # of each parameter, and of the padding behind it
        for shape in self.shapes.values():
            size = len(self.members) * shape.numel()
            self.sizes += [size, -size % 16]
        device = next(first.parameters()).device
        self._weights = torch.zeros(sum(self.sizes), device=device, pin_memory=pin_memory)
        for name, view in self.views(self.weights).items():
            for member, value in zip(self.members, view if self.several else [view], strict=True):
                parameter = member.get_parameter(name)
                value.copy_(parameter.detach())
                parameter.requires_grad_(False)
                parameter.data = value

    @property
    def weights(self):
        """The flat vector. Change it in place: the network's parameters, and CUDA graphs, stay where they are."""
        return self._weights

    def views(self, weights):
        """Parameters by name as views of a flat vector; those of several members have a leading dimension."""
        lead = (len(self.members),) if self.several else ()
        parameters = weights.split(self.sizes)[::2]  # every other piece is padding
        views = {}
        for (name, shape), parameter in zip(self.shapes.items(), parameters, strict=True):
            if len(shape) == 2:
                views[name] = parameter.view(*lead, *reversed(shape)).mT
            else:
                views[name] = parameter.view(*lead, *shape)
        return views

    def unbind(self, view):
        """The members' parts of a parameter; matrices as they are stored, so that their gradients need no copies."""
        return [part.mT for part in view.mT.unbind()] if view.ndim == 3 else view.unbind()

    def call(self, parameters, *inputs):
        return functional_call(self.members[0], parameters, inputs, tie_weights=self.tied)

    def __call__(self, *inputs, weights=None):
        """The network's outputs, (batch, ...), or those of all members, (members, batch, ...)."""
        if weights is None and not self.batched and not torch.compiler.is_compiling():
            return self.stack([member(*inputs) for member in self.members])  # eager functional_call costs time
        views = self.views(self.weights if weights is None else weights)
        if not self.several:
            return self.call(views, *inputs)
        if self.batched:
            inputs = [x.expand(len(self.members), *x.shape) for x in inputs]  # else vmap adds transposes
            return vmap(self.call, randomness="different")(views, *inputs)
        members = zip(*map(self.unbind, views.values()), strict=True)
        return self.stack([self.call(dict(zip(views, member, strict=True)), *inputs) for member in members])

    def stack(self, outputs):
        """The members' outputs with a leading dimension; a single network's as they are."""
        return tree_map(lambda *tensors: torch.stack(tensors), *outputs) if self.several else outputs[0]

    def cpu_copy(self):
        """A copy of the network on the CPU, with parameters that are contiguous as torch.export likes them."""
        network = copy.deepcopy(self.network).cpu()
        for parameter in network.parameters():
            parameter.data = parameter.data.contiguous()
        return network


class Adam:
    """Adam (Kingma and Ba 2015, arXiv:1412.6980) for one flat vector.

    `optimizer.lr = 1e-4` works at any time: attributes are tensors, which assignment fills in place, so that CUDA
    graphs and checkpoints see the change.

    torch.optim's Adam compiles too, but computes powers of the betas once per parameter: in float32 they are wrong in
    the fifth digit, in float64 they take 6% of a compiled update. Running products do without.
    """

    def __init__(self, weights, lr):
        self.lr = torch.as_tensor(lr, dtype=torch.float64, device=weights.device)
        self.m = torch.zeros_like(weights)
        self.v = torch.zeros_like(weights)
        self._betas = torch.tensor((BETA1, BETA2), dtype=torch.float64, device=weights.device)
        self.decay = torch.ones_like(self._betas)  # beta1**t and beta2**t after t steps

    def __setattr__(self, name, value):
        if name in vars(self) and torch.is_tensor(value):
            vars(self)[name].copy_(value)
        elif name in vars(self):
            vars(self)[name].fill_(value)  # unlike a copy from the CPU this does not wait for the device
        elif torch.is_tensor(value):
            super().__setattr__(name, value)
        else:
            raise TypeError(f"Adam.{name} must be a tensor: CUDA graphs freeze Python values, checkpoints lack them")

    def step(self, weights, gradient):
        """Move `weights` one step against `gradient`, in place."""
        self.decay.mul_(self._betas).clamp_(min=1e-30)  # denormal numbers, after 7000 steps, would be slow
        self.m.lerp_(gradient, 1 - BETA1)
        self.v.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        correction1, correction2 = (1 - self.decay).unbind()
        root = correction2.sqrt()
        # lr * m_hat / (sqrt(v_hat) + eps): the corrections and lr are in the denominator, also right for lr = 0
        denominator = self.v.sqrt().add_(EPS * root).mul_(correction1 / (self.lr * root))
        weights.addcdiv_(self.m, denominator, value=-1)

    def tensors(self):
        """What a resumed run needs, by name: all but the learning rate and the betas, which are the script's."""
        return {name: tensor for name, tensor in vars(self).items() if name not in ("lr", "_betas")}


class Scalars:
    """Numbers to log, which stay on the device until they are fetched."""

    def __init__(self, device):
        self.device = device
        self.groups = {}  # names of scalars that are stored together, and their memory

    def store(self, **scalars):
        """Store detached 0-dimensional tensors by name, always in the same memory."""
        names = tuple(scalars)
        if names not in self.groups:
            self.groups[names] = torch.zeros(len(names), device=self.device)
        torch.stack(list(scalars.values()), out=self.groups[names])

    def fetch(self):
        """The newest values by name; waits for the device."""
        return {n: v for names, values in self.groups.items() for n, v in zip(names, values.tolist(), strict=True)}


def split_columns(rows, shapes):
    """Views of `rows`, (..., width), by column name; `shapes` are those of the columns, which lie side by side."""
    columns = rows.split([math.prod(shape) for shape in shapes.values()], -1)
    return {name: x.view(*x.shape[:-1], *shapes[name]) for name, x in zip(shapes, columns, strict=True)}


class HostEvent:
    """A torch.cuda.Event for the CPU, where nothing has to be waited for."""

    def record(self):
        pass

    def synchronize(self):
        pass


def load_tensors(tensors, saved):
    """Copy nested dictionaries of tensors into others of the same structure, in place: CUDA graphs stay valid."""
    places, values = dict(tree_leaves_with_path(tensors)), dict(tree_leaves_with_path(saved))
    unmatched = places.keys() ^ values.keys()
    if unmatched:
        raise ValueError(f"only one of them has {min(map(keystr, unmatched))}")
    for path, tensor in places.items():
        if tensor.shape != values[path].shape:
            raise ValueError(f"{keystr(path)} is {tuple(values[path].shape)} and not {tuple(tensor.shape)}")
        tensor.copy_(values[path])


def keep_freed_memory():
    """Let glibc keep the memory of freed tensors for the next ones: Linux would clear every page that is given back.

    In a compiled update of SAC on a CPU that takes a third of the time.
    """
    glibc = ctypes.CDLL(None)
    trim_threshold, mmap_threshold = -1, -3  # of malloc.h
    if hasattr(glibc, "mallopt"):
        glibc.mallopt(trim_threshold, -1)
        glibc.mallopt(mmap_threshold, 2**25)  # the largest that it takes


def check_compile(args, device):
    """Refuse --compile without a compiler, and say so if --cudagraphs cannot be used."""
    if args.cudagraphs and device.type != "cuda":
        note("--cudagraphs needs a CUDA device; running without")
    for name, value in vars(args).items():
        if name.endswith("compile_mode") and value not in (None, "default") and not args.compile:
            refuse(name, value, "give --compile too")
    logging.getLogger("tensordict").setLevel(logging.WARNING)  # it announces every CUDA graph
    compiler = os.environ.get("CXX", "g++") if device.type == "cpu" else os.environ.get("CC", "gcc")
    if args.compile and not shutil.which(compiler):
        refuse("compile", True, f"install {compiler}, which torch.compile needs, or leave it out")


def needed_guards(guards):
    """Which guards a compiled function checks at each call: not those on layers, builtins and imported modules.

    Checking these takes 3 to 4% of a compiled run on a CPU. So a layer's attribute that changes after the first call,
    `training` included, is not noticed.
    """
    needed = torch.compiler.skip_guard_on_all_nn_modules_unsafe(guards)
    stable = ("__import_", "__builtins_")
    return [keep and not any(word in guard.name for word in stable) for keep, guard in zip(needed, guards, strict=True)]


ON_CUDA = {  # inductor's options, mostly for fewer kernels
    "combo_kernels": True,  # independent small kernels are merged
    "force_pointwise_cat": True,  # gradients go into the flat vector where they are used
    "layout_optimization": False,  # the layout of images is the learner's
}


def compiled(function, mode, options):
    """`function` compiled into one graph; `options` are inductor's, besides those of `mode`."""
    torch._dynamo.config.trace_autograd_ops = True  # allows torch.autograd.grad in a compiled function
    torch.autograd.set_multithreading_enabled(False)  # the backward pass then runs in the thread that is traced
    options = options | torch._inductor.list_mode_options(mode) | {"guard_filter_fn": needed_guards}
    return torch.compile(function, fullgraph=True, options=options)


def masked_mean(values, valid):
    """The mean of those of `values`, (batch,), for which `valid`, (batch,), is 1; 0 if there is none."""
    return (values * valid).sum() / valid.sum().clamp(min=1)


def masked_variance(values, valid):
    """The unbiased variance of those of `values`, (batch,), for which `valid` is 1; 0 if there are fewer than two."""
    squares = (values - masked_mean(values, valid)).square()
    return (squares * valid).sum() / (valid.sum() - 1).clamp(min=1)


class AtariEnvs(gym.vector.VectorEnv):
    """Atari games. Observations are the last four frames, (num_envs, 4, 84, 84), uint8.

    An episode is a life, with rewards of -1, 0 or 1. It starts in the step after the end of the one before: that step
    ignores its action, so nothing can be learned from it.
    """

    def __init__(self, args, seed):
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_fps": 15}
        self.render_mode = "rgb_array"
        self.num_envs = args.num_envs
        self.pool = make_pool(args, seed)
        self.single_observation_space = self.pool.observation_space
        self.single_action_space = self.pool.action_space
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.ended = np.zeros(self.num_envs, bool)

    def reset(self, *, seed=None, options=None):
        """The first observations and no infos; envpool takes its seed in `__init__`."""
        obs, _ = self.pool.reset()
        return obs, {}

    def step(self, actions):
        """Like any vector environment. Infos, (num_envs,) each, are:

        `raw_rewards`, those of the game; `game_ended`, where a game is over or at its time limit; `is_reset`, where the
        step ignored its action and started an episode.
        """
        obs, rewards, terminated, truncated, infos = self.pool.step(actions.astype(np.int32))
        game_over = infos["terminated"].astype(bool)
        game_ended = game_over | truncated
        terminated = terminated | game_over  # envpool calls a game over in the last step before the limit truncated
        truncated = truncated & ~terminated
        is_reset = self.ended
        self.ended = terminated | truncated
        infos = {"raw_rewards": infos["reward"], "game_ended": game_ended, "is_reset": is_reset}
        return obs, rewards, terminated, truncated, infos

    def render(self):
        """The screen of each game, in color."""
        return list(self.pool.render(env_ids=np.arange(self.num_envs)))


def make_pool(args, seed):
    """`num_envs` games in envpool, which steps them in threads."""
    try:
        import envpool
        from envpool.registration import registry
    except ImportError as error:
        refuse("env_id", args.env_id, f"pip install envpool, which has the games ({one_line(error)})")
    games = [game for game, (module, *_) in registry.specs.items() if module == "envpool.atari"]
    if args.env_id not in games:
        nearest = difflib.get_close_matches(args.env_id, games, cutoff=0.0)
        refuse("env_id", args.env_id, f"name a game that envpool has, such as {', '.join(nearest)}")
    require_memory(args, "num_envs", bytes_each=1_300_000)
    return envpool.make(
        args.env_id,
        env_type="gymnasium",
        num_envs=args.num_envs,
        seed=seed % 2**31,  # envpool's limit
        episodic_life=True,
        reward_clip=True,
        render_mode="rgb_array" if args.capture_video else None,
    )


def make_games(args, folder):
    """`num_envs` games that step together; videos of the first one go to `folder`."""
    seed = args.seed
    if args.resume is not None:
        seed += load_checkpoint(args).get("global_step", 0)
    envs = AtariEnvs(args, seed)
    if args.capture_video:
        try:
            return gym.wrappers.vector.RecordVideo(envs, str(folder / "videos"), record_first_only=True)
        except Exception as error:
            refuse("capture_video", True, f"games cannot be recorded here: {one_line(error)}")
    return envs


def check_batch(args):
    """Refuse sizes that do not fit together."""
    batch = args.num_envs * args.num_steps
    if batch % args.num_minibatches or (args.norm_adv and batch == args.num_minibatches):
        refuse("num_minibatches", args.num_minibatches, f"give a divisor of num_envs * num_steps, {batch}, below it")
    if batch > args.total_timesteps:
        note(f"one iteration takes {batch} steps, more than --total-timesteps {args.total_timesteps}")


# ---------------------------------------------------------------------------------------------------------------------
# The run: command line, folder, logs, checkpoints. Nothing here knows the algorithm.
# ---------------------------------------------------------------------------------------------------------------------


def parse_args():
    """The command line; with --resume, the checkpoint's flags are the defaults."""
    args = tyro.cli(Args, description=__doc__)
    if args.resume is None:
        return args
    saved = load_checkpoint(args).get("args", {})
    defaults = {name: value for name, value in saved.items() if name in vars(args)}
    if len(defaults) < len(saved):
        note(f"ignoring flags of the checkpoint that this script lacks: {', '.join(saved.keys() - defaults.keys())}")
    return tyro.cli(Args, default=Args(**defaults), description=__doc__)


def note(text):
    """Tell the user, if anybody reads stderr."""
    with suppress(OSError):
        print(f"note: {text}", file=sys.stderr)


def refuse(name, value, remedy):
    """End the program with exit code 2 and one line that names the argument, its value and the remedy."""
    print(f"error: --{name.replace('_', '-')} {value}: {remedy}", file=sys.stderr)
    raise SystemExit(2)


def one_line(error):
    """What an error says, in one line."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 400)


def require_memory(args, name, bytes_each):
    """Refuse a count, argument `name`, of things that do not fit into memory, `bytes_each` each."""
    if not hasattr(os, "sysconf"):  # on Windows
        return
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2  # the other half is for a checkpoint's copy
    if getattr(args, name) * bytes_each > limit:
        refuse(name, getattr(args, name), f"give at most {limit // bytes_each}, which takes {limit / 1e9:.0f} GB")


def prepare(args):
    """Check the arguments, seed NumPy and torch, and return the device."""
    for name, value in vars(args).items():
        low = 1 if name in AT_LEAST_1 else 1e-12 if name in POSITIVE else 0
        high = 1 if name in AT_MOST_1 else 1e12
        if isinstance(value, (int, float)) and not low <= value <= high:
            refuse(name, value, f"give a number from {low} to {high}")
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.backends.cudnn.allow_tf32 = args.matmul_precision != "highest"
    torch.set_float32_matmul_precision(args.matmul_precision)
    if args.threads:
        torch.set_num_threads(args.threads)
    np.random.seed(args.seed % 2**32)
    torch.manual_seed(args.seed)
    return torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")


def load_checkpoint(args):
    """What a run's `save` wrote to the folder or file in --resume, on the CPU."""
    path = Path(args.resume)
    if path.is_dir():
        path = path / "checkpoint.pt"
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        refuse("resume", args.resume, f"give the folder of a run with an intact checkpoint.pt ({one_line(error)})")


def replace_file(path, write):
    """Replace the file at `path` atomically by what `write(file)` writes: a crash leaves the old or the new file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        raise OSError(f"could not write {path}: is the disk full?") from error


def has_nan(state):
    """Whether any tensor in nested dictionaries holds a NaN."""
    tensors = [leaf for leaf in tree_leaves(state) if torch.is_tensor(leaf) and leaf.is_floating_point()]
    return any(tensor.isnan().any() for tensor in tensors)


class ProgressBar(tqdm):
    """A progress bar that keeps working when stderr is closed or full."""

    def display(self, *args, **kwargs):
        with suppress(OSError):
            super().display(*args, **kwargs)


class Run:
    """A run's folder, logs, checkpoints and end: the context of a training loop.

    Ctrl-C and SIGTERM end the loop before its next step; then, and after an error, checkpoint, policy and summary are
    written. A run that ends before `start` leaves nothing behind.
    """

    def __init__(self, args):
        self.args = args
        self.device = prepare(args)
        name = f"{args.env_id}__{args.exp_name}__{args.seed}__{datetime.now():%Y-%m-%d_%H-%M-%S.%f}"
        self.folder = Path(args.run_dir) / name.replace("/", "_")
        try:
            self.folder.mkdir(parents=True)
        except OSError as error:
            refuse("run_dir", args.run_dir, f"give a folder that can be written ({one_line(error)})")
        self.step = 0
        self.episodes = 0
        self.recent_returns = []  # of the last 20 episodes
        self.steady = None  # step and time when warm-up ended
        self.signal = None
        self.started = False

    def start(self, envs, learner):
        """Restore the learner if the run is resumed, and begin to log."""
        self.envs = envs
        self.learner = learner
        if self.args.resume is not None:
            self.restore()
        self.log_step = self.saved_step = self.step
        self.returns = np.zeros(self.args.num_envs)  # of the current episodes
        self.first_steps = np.full(self.args.num_envs, self.step)
        space = envs.single_observation_space
        is_image = space.dtype == np.uint8 and len(space.shape) > 1
        self.example = torch.zeros(2, *space.shape, dtype=torch.uint8 if is_image else torch.float32)
        with torch.no_grad():
            learner.policy().eval()(self.example)  # what does not match an edited network fails now
        packages = ("torch", "tensordict", "gymnasium", "envpool", "mujoco", "numpy")
        versions = {name: sys.modules[name].__version__ for name in packages if name in sys.modules}
        self.config = {"compile": False, "cudagraphs": False} | vars(self.args)
        self.config |= {
            "script": Path(__file__).stem,
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            "cores": os.cpu_count(),
            "versions": versions | {"python": platform.python_version()},
        }
        (self.folder / "config.json").write_text(json.dumps(self.config, indent=2))
        shutil.copy(__file__, self.folder)
        if self.args.track:
            self.track()
        self.writer = SummaryWriter(self.folder)
        size = {"total": self.args.total_timesteps, "initial": self.step, "unit": "step", "dynamic_ncols": True}
        self.bar = ProgressBar(**size, disable=sys.stderr is None)
        self.bar.set_description("compiling" if self.config["compile"] else "warming up")
        self.start_time = self.log_time = time.perf_counter()
        self.started = True

    def restore(self):
        """Continue from the checkpoint in --resume."""
        checkpoint = load_checkpoint(self.args)
        try:
            for name in FIXED:
                value, saved = getattr(self.args, name), checkpoint["args"][name]
                if value != saved:
                    refuse(name, value, f"leave it out: the checkpoint has {saved}")
            self.learner.load_state_dict(checkpoint["learner"])
            self.step = checkpoint["global_step"]
            self.episodes = checkpoint["episodes"]
            self.recent_returns = checkpoint["returns"]
        except (KeyError, RuntimeError, ValueError) as error:
            refuse("resume", self.args.resume, f"the checkpoint does not fit this script: {one_line(error)}")
        if self.step >= self.args.total_timesteps:
            refuse("total_timesteps", self.args.total_timesteps, f"give more than {self.step}, the checkpoint's step")

    def track(self):
        """Copy the TensorBoard events to Weights & Biases."""
        try:
            import wandb

            names = {"project": self.args.wandb_project_name, "entity": self.args.wandb_entity}
            wandb.init(**names, name=self.folder.name, dir=self.folder, config=self.config, sync_tensorboard=True)
        except Exception as error:
            refuse("track", True, f"pip install wandb and `wandb login`, or WANDB_MODE=offline ({one_line(error)})")

    def __enter__(self):
        signals = {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}  # Windows has no SIGHUP
        handled = [number for number in signals if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP
        self.handlers = {number: signal.signal(number, self.on_signal) for number in handled}
        return self

    def on_signal(self, number, frame):
        """End the loop. A second signal interrupts at once, unless it comes within a second, as wrappers send it."""
        if self.signal is None:
            self.signal = number
            self.signal_time = time.perf_counter()
        elif time.perf_counter() > self.signal_time + 1:
            raise KeyboardInterrupt

    def unfinished(self):
        """Whether to go on; writes a checkpoint first if one is due."""
        interval = self.args.checkpoint_interval
        if interval and self.step // interval > self.saved_step // interval:
            self.save()
        return self.step < self.args.total_timesteps and self.signal is None

    def advance(self, rewards, ended):
        """Count a step of all environments; both are NumPy, (num_envs,), `ended` where an episode is over."""
        self.step += self.args.num_envs
        self.returns += rewards
        for i in ended.nonzero()[0]:
            self.end_episode(i)
        if self.steady is None and self.learner.updates >= self.learner.warmup_updates:
            self.steady = (self.step, time.perf_counter())
            self.bar.set_description("training", refresh=False)
        self.bar.update(self.args.num_envs)

    def end_episode(self, i):
        """Log the episode that is over in environment `i`."""
        self.writer.add_scalar("charts/episodic_return", self.returns[i], self.step)
        length = (self.step - self.first_steps[i]) // self.args.num_envs
        self.writer.add_scalar("charts/episodic_length", length, self.step)
        self.recent_returns = [*self.recent_returns[-19:], float(self.returns[i])]
        self.bar.set_postfix({"return": f"{np.mean(self.recent_returns):.1f}"}, refresh=False)
        self.episodes += 1
        self.returns[i] = 0
        self.first_steps[i] = self.step

    def log(self, losses):
        """Log losses by name, and the speed since the last log; end the run if a loss is not finite."""
        self.folder.mkdir(parents=True, exist_ok=True)  # somebody may have deleted it
        now = time.perf_counter()
        self.writer.add_scalar("charts/SPS", (self.step - self.log_step) / (now - self.log_time), self.step)
        self.log_step = self.step
        self.log_time = now
        for name, value in losses.items():
            self.writer.add_scalar(f"losses/{name}", value, self.step)
        non_finite = [name for name, value in losses.items() if "loss" in name and not math.isfinite(value)]
        if non_finite:
            self.end_at_nan(f"{non_finite[0]} is {losses[non_finite[0]]}", self.learner.state_dict())

    def end_at_nan(self, what, state):
        """End the run with exit code 1 and a line that names the cause."""
        cause = "a lower learning rate may help"
        if has_nan([state.get("replay"), state.get("normalizer")]):
            cause = "the environment returned a NaN, unless a diverged policy sent it one"
        kept = "checkpoint.pt is from before" if (self.folder / "checkpoint.pt").exists() else "there is no checkpoint"
        raise SystemExit(f"error: step {self.step}: {what}; {cause}; {kept}")

    def save(self):
        """Write checkpoint.pt and policy.pt2; end the run if there is a NaN in what is to be saved."""
        state = self.learner.state_dict()
        if has_nan(state):
            self.end_at_nan("the checkpoint would hold a NaN", state)
        checkpoint = {"args": vars(self.args), "global_step": self.step, "episodes": self.episodes}
        checkpoint |= {"returns": self.recent_returns, "learner": state}
        replace_file(self.folder / "checkpoint.pt", lambda file: torch.save(checkpoint, file))
        self.saved_step = self.step
        try:
            batch = torch.export.Dim("batch")
            program = torch.export.export(self.learner.policy().eval(), (self.example,), dynamic_shapes=({0: batch},))
        except Exception as error:  # of an edited policy
            return note(f"no policy.pt2: {one_line(error)}")
        replace_file(self.folder / "policy.pt2", lambda file: torch.export.save(program, file))

    def __exit__(self, kind, error, traceback):
        try:
            if self.started:
                self.finish(error)
            else:
                shutil.rmtree(self.folder, ignore_errors=True)
        finally:
            for number, handler in self.handlers.items():
                signal.signal(number, handler)
        if self.signal is not None and not isinstance(error, SystemExit):
            if isinstance(error, Exception):
                note(f"after the signal: {one_line(error)}")
            raise SystemExit(128 + self.signal)

    def finish(self, error):
        """Write what a started run leaves behind; `error` is what ended it, or None."""
        end_time = time.perf_counter()
        try:
            if error is None or isinstance(error, Exception):
                self.save()
        except BaseException as saving_error:
            if error is None:
                raise
            note(f"no checkpoint: {one_line(saving_error)}")
        finally:
            self.write_summary(end_time)
            self.envs.close()
            self.writer.close()
            with suppress(OSError):
                self.bar.close()

    def write_summary(self, end_time):
        """Write summary.json: the configuration, and what came of it."""
        steady_step, steady_time = self.steady or (self.step, end_time)
        mean_return = float(np.mean(self.recent_returns)) if self.recent_returns else math.nan
        results = {
            "cudagraphs": getattr(self.learner, "cudagraphs", False),  # active
            "global_step": self.step,
            "episodes": self.episodes,
            "episodic_return": mean_return if math.isfinite(mean_return) else None,
            "steady_sps": (self.step - steady_step) / (end_time - steady_time) if self.step > steady_step else None,
            "warmup_seconds": steady_time - self.start_time if self.steady else None,
            "wall_seconds": end_time - self.start_time,
        }
        (self.folder / "summary.json").write_text(json.dumps(self.config | results, indent=2))


if __name__ == "__main__":
    train(parse_args())

# `uv run` reads this and installs what the script needs (PEP 723).
# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#     "torch==2.13.0",
#     "tensordict==0.15.3",
#     "gymnasium==1.4.0",
#     "numpy==2.4.6",
#     "tyro==1.0.17",
#     "tqdm==4.70.1",
#     "tensorboard==2.21.0",
#     "wandb==0.31.0",
#     "envpool==1.2.5",
# ]
# ///
