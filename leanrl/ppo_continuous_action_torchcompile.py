"""Proximal Policy Optimization (PPO) for continuous actions at full speed: Schulman et al. 2017, arXiv:1707.06347.

The updates are those of the plain twin, ppo_continuous_action.py. What makes this file fast:

1. The policy acts in NumPy, without values and log-probabilities (`PPO.act`, `on_host`).
2. The environments are stepped without the work of gymnasium's vector environment (`DirectEnvs`).
3. The rollout is one block of host memory, and one copy takes it to the device (`PPO.record`, `PPO.update`).
4. Values, log-probabilities and advantages of a rollout are computed at once (`PPO.make_batch`), the advantages not in
   num_steps steps, but by doubling in log2(num_steps) (`gae`).
5. The parameters, and so their gradients, are one flat vector: clipping and Adam are a few operations (`FlatNetwork`).
6. `--compile` makes one graph of a minibatch's forward, backward, clipping and Adam (`PPO.update_minibatch`).
7. `--cudagraphs` replays all epochs of an iteration as one CUDA graph, or one each with --target-kl (`PPO.iterate`).

    python leanrl/ppo_continuous_action_torchcompile.py --env-id HalfCheetah-v5 --compile --cudagraphs
"""

import copy
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
from functools import partial
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict.nn import CudaGraphModule
from torch import nn
from torch.func import functional_call, vmap
from torch.utils._pytree import keystr, tree_leaves, tree_leaves_with_path, tree_map
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

GRAPH_WARMUP = 3  # the call at which a CUDA graph is captured; compilation is over by then
CompileMode = Literal["default", "max-autotune-no-cudagraphs"]


@dataclass
class Args:
    env_id: str = "HalfCheetah-v5"
    """gymnasium environment"""
    total_timesteps: int = 1_000_000
    """environment steps of the whole run, over all environments"""
    num_envs: int = 1
    """environments that step together"""
    num_steps: int = 2048
    """steps of each environment per iteration"""
    learning_rate: float = 3e-4
    """learning rate of the first iteration"""
    anneal_lr: bool = True
    """lower the learning rate linearly to 0 at the end of the run"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation"""
    num_minibatches: int = 32
    """minibatches per epoch"""
    update_epochs: int = 10
    """passes over an iteration's transitions"""
    norm_adv: bool = True
    """normalize the advantages of each minibatch"""
    clip_coef: float = 0.2
    """largest change of the probability ratio from 1 (epsilon in the paper)"""
    clip_vloss: bool = True
    """clip the change of the values by --clip-coef too"""
    ent_coef: float = 0.0
    """coefficient of the entropy in the loss"""
    vf_coef: float = 0.5
    """coefficient of the value loss"""
    max_grad_norm: float = 0.5
    """largest norm of a gradient, which is scaled down to it"""
    target_kl: float | None = None
    """end an iteration after the epoch in which the approximate KL divergence exceeds this"""
    bootstrap_truncation: bool = True
    """bootstrap the value behind a truncated episode; without, a truncation counts as a terminal state"""

    compile: bool = False
    """compile the updates with torch.compile"""
    cudagraphs: bool = False
    """replay the updates as CUDA graphs"""
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
    threads: int = 1
    """CPU threads for torch (0: torch's default, which is slower for networks this small)"""
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


def linear(inputs, outputs, gain=2**0.5):
    """A linear layer that starts with orthogonal weights and without bias."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """A Gaussian policy, whose standard deviation does not depend on the observation, and a value function."""

    def __init__(self, obs_dim, act_dim):
        super().__init__()
        self.actor = nn.Sequential(
            linear(obs_dim, 64),
            nn.Tanh(),
            linear(64, 64),
            nn.Tanh(),
            linear(64, act_dim, gain=0.01),
        )
        self.critic = nn.Sequential(
            linear(obs_dim, 64),
            nn.Tanh(),
            linear(64, 64),
            nn.Tanh(),
            linear(64, 1, gain=1.0),
        )
        self.log_std = nn.Parameter(torch.zeros(1, act_dim))

    def forward(self, obs):
        """Mean, (batch, act_dim), and log standard deviation, (1, act_dim), of the actions, and values, (batch,).

        `obs`, (batch, obs_dim), are normalized.
        """
        return self.actor(obs), self.log_std, self.critic(obs).squeeze(-1)


class PPO:
    """The learner. CUDA graphs replay kernels, not Python: what changes in training is a tensor, updated in place."""

    def __init__(self, args, envs, device):
        self.args = args
        self.device = device
        self.cudagraphs = args.cudagraphs and device.type == "cuda"
        self.num_envs = envs.num_envs
        self.obs_dim = envs.single_observation_space.shape[0]
        self.act_dim = envs.single_action_space.shape[0]
        self.low = envs.single_action_space.low
        self.high = envs.single_action_space.high
        with device:
            self.agent = FlatNetwork(Agent(self.obs_dim, self.act_dim))
        self.optimizers = {"agent": Adam(self.agent.weights, args.learning_rate)}
        self.normalizer = Normalizer(self.num_envs, self.obs_dim, args.gamma)
        self.grad_norm = torch.zeros((), device=device)  # of the last minibatch, before clipping
        self.scalars = Scalars(device)
        self.updates = 0
        self.warmup_updates = GRAPH_WARMUP if self.cudagraphs else 1

        on_cuda = device.type == "cuda"
        self.host_agent = FlatNetwork(self.agent.cpu_copy(), pin_memory=True) if on_cuda else self.agent
        check_agent(self.host_agent, self.obs_dim, self.act_dim)
        self.mean_actions = on_host(self.host_agent.network, "actor", self.obs_dim, lambda agent, obs: agent(obs)[0])

        self.step_shapes = {"obs": (self.obs_dim,), "next_obs": (self.obs_dim,), "actions": (self.act_dim,)}
        self.step_shapes |= {"rewards": (), "terminated": (), "ended": ()}
        self.batch_shapes = {"obs": (self.obs_dim,), "actions": (self.act_dim,)}
        self.batch_shapes |= {"log_prob": (), "values": (), "advantages": (), "returns": ()}
        step_width = sum(math.prod(shape) for shape in self.step_shapes.values())
        batch_width = sum(math.prod(shape) for shape in self.batch_shapes.values())
        numbers = self.num_envs * (step_width + batch_width + self.act_dim)
        require_memory(args, "num_steps", bytes_each=4 * numbers)
        self.host_rollout = torch.zeros(args.num_steps, self.num_envs, step_width, pin_memory=on_cuda)
        self.rollout = self.host_rollout.to(device)  # on a CPU the same memory
        self.steps = {name: x.numpy() for name, x in split_columns(self.host_rollout, self.step_shapes).items()}
        self.host_noise = torch.empty(args.num_steps, self.num_envs, self.act_dim)
        self.noise = self.host_noise.numpy()
        self.batch = torch.zeros(args.num_steps * self.num_envs, batch_width, device=device)
        self.apply_compile_and_cudagraphs()

    def make_batch(self):
        """Fill `batch`, whose rows are the rollout's transitions with their advantages and returns."""
        steps = split_columns(self.rollout.flatten(0, 1), self.step_shapes)
        mean, log_std, values = self.agent(steps["obs"])
        _, _, next_values = self.agent(steps["next_obs"])

        # GAE (arXiv:1506.02438, eq. 16)
        columns = (steps["rewards"], values, next_values, steps["terminated"], steps["ended"])
        in_time = [column.view(self.args.num_steps, self.num_envs) for column in columns]
        advantages = gae(*in_time, self.args.gamma, self.args.gae_lambda).flatten()

        batch = split_columns(self.batch, self.batch_shapes)
        batch["obs"].copy_(steps["obs"])
        batch["actions"].copy_(steps["actions"])
        batch["log_prob"].copy_(gaussian_log_prob(mean, log_std, steps["actions"]))
        batch["values"].copy_(values)
        batch["advantages"].copy_(advantages)
        batch["returns"].copy_(advantages + values)

    def loss(self, rows, weights=None):
        """Policy loss, value loss, entropy and the log of the probability ratio, (batch,), for rows of `batch`."""
        rows = split_columns(rows, self.batch_shapes)
        clip = self.args.clip_coef
        mean, log_std, values = self.agent(rows["obs"], weights=weights)

        # clipped policy loss (eq. 7)
        log_ratio = gaussian_log_prob(mean, log_std, rows["actions"]) - rows["log_prob"]
        ratio = log_ratio.exp()
        advantages = rows["advantages"]
        if self.args.norm_adv:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        policy_loss = -torch.min(advantages * ratio, advantages * ratio.clamp(1 - clip, 1 + clip)).mean()

        # clipped value loss
        errors = (values - rows["returns"]).square()
        if self.args.clip_vloss:
            clipped_values = rows["values"] + (values - rows["values"]).clamp(-clip, clip)
            errors = torch.max(errors, (clipped_values - rows["returns"]).square())
        value_loss = 0.5 * errors.mean()

        entropy = (log_std + 0.5 * (1 + math.log(2 * math.pi))).expand_as(mean).sum(-1).mean()
        return policy_loss, value_loss, entropy, log_ratio

    def update_minibatch(self, rows):
        """One step of Adam on the loss of `rows`, (minibatch, width)."""
        weights = self.agent.weights.detach().requires_grad_()
        policy_loss, value_loss, entropy, _ = self.loss(rows, weights)
        loss = policy_loss - self.args.ent_coef * entropy + self.args.vf_coef * value_loss
        (gradient,) = torch.autograd.grad(loss, weights)
        self.grad_norm.copy_(gradient.norm())
        scale = (self.args.max_grad_norm / (self.grad_norm + 1e-6)).clamp(max=1)
        self.optimizers["agent"].step(self.agent.weights, gradient * scale)

    def learn_epoch(self):
        """One pass over the batch, in minibatches drawn without replacement."""
        order = torch.rand(len(self.batch), device=self.device).argsort()
        for rows in self.batch[order].chunk(self.args.num_minibatches):
            self.update_minibatch(rows)

    def measure(self):
        """Store losses and statistics of the whole batch."""
        policy_loss, value_loss, entropy, log_ratio = self.loss(self.batch)
        ratio = log_ratio.exp()
        batch = split_columns(self.batch, self.batch_shapes)
        self.scalars.store(
            policy_loss=policy_loss,
            value_loss=value_loss,
            entropy=entropy,
            approx_kl=(ratio - 1 - log_ratio).mean(),  # http://joschu.net/blog/kl-approx.html, k3
            clipfrac=((ratio - 1).abs() > self.args.clip_coef).float().mean(),
            grad_norm=self.grad_norm,
            explained_variance=1 - (batch["returns"] - batch["values"]).var() / batch["returns"].var(),
        )

    def iterate(self):
        """All epochs over the rollout."""
        self.make_batch()
        for _ in range(self.args.update_epochs):
            self.learn_epoch()
            if self.args.target_kl is not None:
                self.measure()
                if self.losses()["approx_kl"] > self.args.target_kl:
                    break
        self.measure()

    def update(self, learning_rate):
        """Learn from the rollout, and send the new parameters to the host."""
        self.optimizers["agent"].lr = learning_rate
        self.rollout.copy_(self.host_rollout, non_blocking=True)
        self.iterate()
        self.host_agent.weights.copy_(self.agent.weights)
        self.updates += 1

    def act(self, t, obs):
        """Sampled actions for step `t` of the rollout; both are NumPy, (num_envs, ...), `obs` normalized."""
        if t == 0:
            self.draw_noise()
        actions = self.mean_actions(obs) + self.noise[t]
        self.steps["obs"][t] = obs
        self.steps["actions"][t] = actions
        return actions.clip(self.low, self.high)

    def draw_noise(self):
        """Draw the noise of a whole rollout, as the standard deviation does not depend on observations."""
        _, log_std, _ = self.host_agent(torch.zeros(1, self.obs_dim))
        self.host_noise.normal_().mul_(log_std.exp())

    def record(self, t, next_obs, last_obs, rewards, terminated, ended):
        """Store what step `t` led to; all are NumPy, (num_envs, ...). Returns `next_obs` normalized.

        `last_obs` is `next_obs`, but the last observation where an episode ended, as `ended` says.
        """
        obs, rewards = self.normalizer.normalize(next_obs, rewards, ended)
        self.steps["next_obs"][t] = obs if last_obs is next_obs else self.normalizer.scale_obs(last_obs)
        self.steps["rewards"][t] = rewards
        self.steps["terminated"][t] = terminated if self.args.bootstrap_truncation else ended
        self.steps["ended"][t] = ended
        return obs

    def apply_compile_and_cudagraphs(self):
        """The one place where functions are compiled and captured."""
        if self.args.compile:
            # on a CPU, kernels are called from C++
            options = ON_CUDA if self.device.type == "cuda" else {"cpp_wrapper": True}
            self.update_minibatch = compiled(self.update_minibatch, self.args.compile_mode, options)
        if self.cudagraphs and self.args.target_kl is None:
            self.iterate = CudaGraphModule(self.iterate, warmup=GRAPH_WARMUP)
        elif self.cudagraphs:  # the host looks at the KL divergence between epochs
            self.make_batch = CudaGraphModule(self.make_batch, warmup=GRAPH_WARMUP)
            self.learn_epoch = CudaGraphModule(self.learn_epoch, warmup=GRAPH_WARMUP)
            self.measure = CudaGraphModule(self.measure, warmup=GRAPH_WARMUP)

    def losses(self):
        """The last update's losses and statistics by name; waits for that update."""
        return self.scalars.fetch()

    def policy(self):
        """A copy of the deterministic policy, on the CPU."""
        return Policy(self.agent.cpu_copy(), self.normalizer, self.low, self.high).eval()

    def tensors(self):
        """Every tensor that updates change. What is missing here is not saved."""
        return {
            "networks": {"agent": self.agent.network.state_dict()},
            "optimizers": {name: optimizer.tensors() for name, optimizer in self.optimizers.items()},
            "normalizer": self.normalizer.tensors(),
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
        self.host_agent.weights.copy_(self.agent.weights)
        self.updates = state["updates"]
        self.warmup_updates += self.updates
        torch.set_rng_state(state["rng"])
        torch.cuda.set_rng_state_all(state["cuda_rng"])


def train(args, on_start=lambda run: None):
    """Train an agent. `on_start` is for tools: it is called with the `Run` before the first step."""
    with Run(args) as run:
        check_batch(args)
        check_compile(args, run.device)
        envs = DirectEnvs(make_envs(args, run.folder))
        require_bounded_actions(args, envs)
        learner = PPO(args, envs, run.device)
        run.start(envs, learner)
        obs, _ = envs.reset(seed=args.seed + run.step)
        obs, _ = learner.normalizer.normalize(obs)
        on_start(run)
        while run.unfinished():
            learning_rate = args.learning_rate
            if args.anneal_lr:
                learning_rate *= 1 - run.step / args.total_timesteps
            for t in range(args.num_steps):
                actions = learner.act(t, obs)
                next_obs, last_obs, rewards, terminated, truncated = envs.step(actions)
                ended = terminated | truncated
                obs = learner.record(t, next_obs, last_obs, rewards, terminated, ended)
                run.advance(rewards, ended)
            learner.update(learning_rate)
            run.log(learner.losses())


class Policy(nn.Module):
    """What policy.pt2 holds, the deterministic policy: (batch, obs_dim) to (batch, act_dim).

    It normalizes observations by the statistics of its time and clips actions to their bounds.
    """

    def __init__(self, agent, normalizer, low, high):
        super().__init__()
        self.agent = agent
        self.register_buffer("mean", torch.tensor(normalizer.mean[:-1]))
        self.register_buffer("std", torch.tensor(normalizer.std[:-1]))
        self.register_buffer("low", torch.tensor(low))
        self.register_buffer("high", torch.tensor(high))

    def forward(self, obs):
        scaled = ((obs - self.mean) / self.std).clamp(-10, 10).float()
        mean, _, _ = self.agent(scaled)
        return mean.clamp(self.low, self.high)


# ---------------------------------------------------------------------------------------------------------------------
# What makes it fast: flat networks, Adam, acting in NumPy, environments' steps, advantages, compilation
# ---------------------------------------------------------------------------------------------------------------------


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


def numpy_linear(layer):
    """nn.Linear on NumPy views of its parameters."""
    weight = layer.weight.detach().numpy().T
    bias = np.zeros(1, np.float32) if layer.bias is None else layer.bias.detach().numpy()
    bias = bias[None]  # with `dot` and a 2-dimensional bias a single row is fastest
    return lambda x: x.dot(weight) + bias


NUMPY_LAYERS = {  # makes a function of a NumPy array from a layer of exactly this class
    nn.Linear: numpy_linear,
    nn.ReLU: lambda layer: partial(np.maximum, np.zeros((), np.float32)),  # a Python 0 would be converted each time
    nn.LeakyReLU: lambda layer: lambda x: np.where(x > 0, x, layer.negative_slope * x),
    nn.SiLU: lambda layer: lambda x: x * (0.5 + 0.5 * np.tanh(0.5 * x)),
    nn.Tanh: lambda layer: np.tanh,
    nn.Identity: lambda layer: lambda x: x,
}


def numpy_function(sequential):
    """An nn.Sequential as a function of a NumPy array, (batch, inputs), that reads the parameters where they are."""
    functions = [NUMPY_LAYERS[type(layer)](layer) for layer in sequential]

    def function(x):
        x = x.astype(np.float32, copy=False)
        for layer in functions:
            x = layer(x)
        return x

    return function


def on_host(network, layers, obs_dim, forward=lambda network, obs: network(obs)):
    """`forward(network, obs)` on the CPU as a function of a NumPy array, (batch, obs_dim), with the newest parameters.

    For a few rows NumPy takes a fraction of torch's time. It calls `layers`, the name of an nn.Sequential in `network`,
    if this gives what torch gives for random parameters; otherwise torch is called.
    """

    @torch.no_grad()
    def by_torch(network, obs):
        return forward(network, torch.as_tensor(obs, dtype=torch.float32)).numpy()

    trial = copy.deepcopy(network)
    generator = torch.Generator().manual_seed(0)
    for tensor in trial.state_dict().values():  # zeros could hide a difference
        tensor.copy_(3 * torch.randn(tensor.shape, generator=generator))
    scales = torch.logspace(-2, 3, 16)[:, None]  # large ones reach limits, such as a clamp
    obs = (scales * torch.randn(16, obs_dim, generator=generator)).numpy()
    try:
        wanted = by_torch(trial, obs)
        error = numpy_function(trial.get_submodule(layers))(obs) - wanted
        if not (np.linalg.norm(error, axis=-1) <= 1e-4 * np.linalg.norm(wanted, axis=-1)).all():
            raise ValueError(f"its outputs are not those of {layers} alone")
    except Exception as error:
        note(f"{type(network).__name__} acts in torch, which is slower than NumPy: {one_line(error)}")
        return partial(by_torch, network)
    return numpy_function(network.get_submodule(layers))


def check_agent(agent, obs_dim, act_dim):
    """Refuse agents that would act otherwise than `make_batch` and `draw_noise` take for granted."""
    obs = torch.ones(2, obs_dim)
    mean, log_std, _ = agent(obs)
    mean_again, _, _ = agent(obs)
    if log_std.shape not in ((1, act_dim), (1, 1)):
        raise ValueError(f"log_std must be (1, {act_dim}), for all observations, not {tuple(log_std.shape)}")
    if not torch.equal(mean, mean_again):
        raise ValueError("the actor must give the same mean in each call: no dropout, no running statistics")


class DirectEnvs(gym.vector.VectorWrapper):
    """Steps the environments of a SyncVectorEnv without the vector environment's own work, which can cost more.

    `step` returns something else than gymnasium's: no wrapper can go around this one.
    """

    def step(self, actions):
        """Step each environment, and reset it where an episode ends; `actions` are NumPy, (num_envs, ...).

        Returns the next observations and what the actions led to, the same array unless an episode ended, both
        (num_envs, obs_dim); rewards, terminated, truncated, (num_envs,). All arrays are new.
        """
        space = self.env.observation_space
        last_obs = np.empty(space.shape, space.dtype)
        rewards = np.empty(len(last_obs))
        terminated = np.empty(len(last_obs), bool)
        truncated = np.empty(len(last_obs), bool)
        first_obs = {}  # of the episodes that begin, by environment
        for i, env in enumerate(self.env.envs):
            last_obs[i], rewards[i], terminated[i], truncated[i], _ = env.step(actions[i])
            if terminated[i] or truncated[i]:
                first_obs[i], _ = env.reset()
        next_obs = last_obs
        if first_obs:
            next_obs = last_obs.copy()
            next_obs[list(first_obs)] = list(first_obs.values())
        return next_obs, last_obs, rewards, terminated, truncated


class Normalizer:
    """Scales observations to mean 0 and variance 1, and rewards so that discounted returns have variance 1.

    All environments share the statistics, which are float64 (Chan, Golub and LeVeque 1983). Results are in [-10, 10].
    """

    def __init__(self, num_envs, obs_dim, gamma):
        self.gamma = gamma
        self.rows = np.zeros((num_envs, obs_dim + 1))  # observation, and the discounted return so far
        self.returns = self.rows[:, -1]
        self.count = np.zeros(1)
        self.mean = np.zeros(obs_dim + 1)
        self.squares = np.zeros(obs_dim + 1)  # sum of squared differences from the mean
        self.std = np.ones(obs_dim + 1)

    def normalize(self, obs, rewards=0.0, ended=False):
        """Observations, (num_envs, obs_dim), and rewards, (num_envs,), scaled by statistics that include them."""
        self.rows[:, :-1] = obs
        self.returns[:] = self.gamma * self.returns + rewards
        errors = self.rows - self.mean
        self.count += len(errors)
        self.mean += np.add.reduce(errors) / self.count
        centered = self.rows - self.mean
        self.squares += np.add.reduce(errors * centered)
        np.sqrt(self.squares / self.count + 1e-8, out=self.std)
        self.returns[ended] = 0
        centered[:, -1] = rewards
        scaled = (centered / self.std).clip(-10, 10).astype(np.float32)
        return scaled[:, :-1], scaled[:, -1]

    def scale_obs(self, obs):
        """Observations, (n, obs_dim), scaled by the statistics as they are."""
        return ((obs - self.mean[:-1]) / self.std[:-1]).clip(-10, 10).astype(np.float32)

    def tensors(self):
        """The statistics by name, as tensors that share their memory."""
        return {name: torch.from_numpy(getattr(self, name)) for name in ("count", "mean", "squares", "std")}


def gaussian_log_prob(mean, log_std, actions):
    """Log-probabilities, (batch,), of `actions`, (batch, act_dim)."""
    squares = ((actions - mean) * (-log_std).exp()).square()
    return -(0.5 * squares + log_std + 0.5 * math.log(2 * math.pi)).sum(-1)


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


def split_columns(rows, shapes):
    """Views of `rows`, (..., width), by column name; `shapes` are those of the columns, which lie side by side."""
    columns = rows.split([math.prod(shape) for shape in shapes.values()], -1)
    return {name: x.view(*x.shape[:-1], *shapes[name]) for name, x in zip(shapes, columns, strict=True)}


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
}


def compiled(function, mode, options):
    """`function` compiled into one graph; `options` are inductor's, besides those of `mode`."""
    torch._dynamo.config.trace_autograd_ops = True  # allows torch.autograd.grad in a compiled function
    torch.autograd.set_multithreading_enabled(False)  # the backward pass then runs in the thread that is traced
    options = options | torch._inductor.list_mode_options(mode) | {"guard_filter_fn": needed_guards}
    return torch.compile(function, fullgraph=True, options=options)


def make_envs(args, folder):
    """`num_envs` copies of the environment, which step one after the other; the first one's videos go to `folder`."""
    if ":" in args.env_id:
        note(f"--env-id imports the module {args.env_id.partition(':')[0]}")

    def make_env():
        options = {"render_mode": "rgb_array"} if args.capture_video else {}
        env = gym.make(args.env_id, **options)
        return env if isinstance(env.observation_space, gym.spaces.Box) else gym.wrappers.FlattenObservation(env)

    require_memory(args, "num_envs", bytes_each=20_000)  # an environment in Python takes more
    try:
        # SAME_STEP: where an episode ends, the last observation is in infos["final_obs"]
        envs = SyncVectorEnv([make_env] * args.num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    except (gym.error.Error, ImportError, TypeError, ValueError) as error:
        remedy = "correct the name, install what is missing, or do without video"
        refuse("env_id", args.env_id, f"{remedy}: {one_line(error)}")
    space = envs.single_observation_space
    if len(space.shape) != 1:
        refuse("env_id", args.env_id, f"choose an environment whose observations are vectors, not {space}")
    if not isinstance(envs.envs[0].unwrapped.observation_space, gym.spaces.Box):
        note(f"observations are flattened to vectors of {space.shape[0]} numbers")
    if args.capture_video:
        try:
            envs.envs[0].reset()
            envs.envs[0].render()
            envs.envs[0] = gym.wrappers.RecordVideo(envs.envs[0], str(folder / "videos"), disable_logger=True)
        except Exception as error:
            refuse("capture_video", True, f"this environment cannot be recorded here: {one_line(error)}")
    return envs


def require_bounded_actions(args, envs):
    """Refuse environments whose actions are not vectors with bounds."""
    space = envs.single_action_space
    if not (isinstance(space, gym.spaces.Box) and len(space.shape) == 1 and space.is_bounded()):
        refuse("env_id", args.env_id, f"choose an environment whose actions are bounded vectors, not {space}")


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
#     "mujoco==4.0.0",
#     "imageio==2.38.1",
#     "moviepy==2.2.1",
# ]
# ///
