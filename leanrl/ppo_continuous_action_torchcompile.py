"""Proximal Policy Optimisation (Schulman et al. 2017, arXiv:1707.06347) at full speed, in one file.

The algorithm and its defaults are CleanRL's, as in the plain twin, ppo_continuous_action.py. What makes this file fast:

1. Acting is a few NumPy calls on a host copy of the policy, without values and log-probabilities (`PPO.act`); they are
   made from the layers of `Agent.actor` (`on_host`).
2. Environments are stepped without gymnasium's vector environment, which can cost more than they do (`DirectEnvs`).
3. The rollout is one block of host memory, and one copy takes it to the device (`PPO.record`, `PPO.update`).
4. Values, log-probabilities and advantages of a rollout are computed at once; generalised advantage estimation is
   a linear recurrence, solved by doubling in log2(num_steps) rounds, not by a loop over steps (`make_batch`, `gae`).
5. Parameters, and so gradients, are one flat vector (`Apply`): clipping and Adam are a few operations.
6. `--compile` makes one graph of `update_minibatch`: forward, backward, clipping and Adam.
7. `--cudagraphs` replays all epochs of an iteration as one CUDA graph, with --target-kl as one each (`PPO.iterate`).

    python leanrl/ppo_continuous_action_torchcompile.py --env-id HalfCheetah-v5 --compile --cudagraphs
"""

import copy
import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import batch_space
from tensordict.nn import CudaGraphModule
from torch import nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT = Path(__file__).stem
THREADS = 1  # small matrices: two threads are hardly faster than one, and on a busy machine much slower
GRAPH_WARMUP = 3  # the call that captures a CUDA graph; compilation is over by then
BETA1, BETA2, EPS = 0.9, 0.999, 1e-5  # Adam's
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


@dataclass
class RunArgs:
    exp_name: str = SCRIPT
    """name of the experiment, part of the run's folder name"""
    seed: int = 1
    """seed of the environments, the action space, numpy and torch"""
    run_dir: str = "runs"
    """folder that receives one folder per run"""
    checkpoint_interval: int = 0
    """environment steps between two checkpoints (0: only the one that ends every run)"""
    resume: str | None = None
    """checkpoint, or folder of a run, to continue up to --total-timesteps; its flags are the defaults"""
    evaluate: str | None = None
    """checkpoint, or folder of a run, whose deterministic policy to evaluate instead of training"""
    eval_episodes: int = 10
    """episodes of an evaluation"""
    export: str | None = None
    """checkpoint, or folder of a run, beside which to write policy.pt2 instead of training"""
    capture_video: bool = False
    """record mp4 videos of the first environment into the run's folder"""
    track: bool = False
    """also log to Weights & Biases"""
    wandb_project_name: str = "leanrl"
    """wandb project"""
    wandb_entity: str | None = None
    """wandb team"""
    cuda: bool = True
    """use a CUDA device if there is one"""
    threads: int = THREADS
    """threads for computing on the CPU (0: torch's choice)"""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """precision of float32 matmuls: high allows TF32, in convolutions too, medium bfloat16"""
    torch_deterministic: bool = True
    """ask cuDNN for deterministic kernels"""
    measure_burnin: int = 100
    """environment steps between the end of warm-up and the start of the speed measurement"""


@dataclass
class EnvironmentArgs:
    env_id: str = "HalfCheetah-v5"
    """gymnasium environment"""
    env_backend: Literal["gymnasium", "envpool"] = "gymnasium"
    """gymnasium's vector environments, one after the other, or envpool's, in threads: for many environments"""
    total_timesteps: int = 1_000_000
    """environment steps (transitions) of the whole run"""
    num_envs: int = 1
    """environments that step together, one transition each"""


@dataclass
class SpeedArgs:
    compile: bool = False
    """compile the updates with torch.compile"""
    cudagraphs: bool = False
    """replay what the GPU does as CUDA graphs"""
    compile_mode: CompileMode = "default"
    """what torch.compile takes its time for; reduce-overhead and max-autotune make CUDA graphs of their own"""


@dataclass
class AlgorithmArgs:
    learning_rate: float = 3e-4
    """learning rate of the first iteration"""
    num_steps: int = 2048
    """steps of each environment in an iteration"""
    anneal_lr: bool = True
    """lower the learning rate linearly, towards 0 at the end of the run"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of generalised advantage estimation"""
    num_minibatches: int = 32
    """minibatches in an epoch"""
    update_epochs: int = 10
    """passes over an iteration's transitions"""
    norm_adv: bool = True
    """normalise advantages to mean 0 and variance 1 in each minibatch"""
    clip_coef: float = 0.2
    """how far the probability ratio may be from 1 (epsilon in the paper)"""
    clip_vloss: bool = True
    """clip the change of the values by --clip-coef too"""
    ent_coef: float = 0.0
    """coefficient of the entropy in the loss"""
    init_entropy: Literal["default", "max"] = "default"
    """max: begin with a policy whose actions have the entropy of uniformly random ones"""
    vf_coef: float = 0.5
    """coefficient of the value loss"""
    max_grad_norm: float = 0.5
    """largest norm of a gradient, which is scaled down to it"""
    target_kl: float | None = None
    """end an iteration's updates after the epoch in which the approximate KL divergence exceeds this"""
    bootstrap_truncation: bool = True
    """value what would have followed a truncated episode by the critic; without, count truncation as terminal"""


@dataclass
class Args(AlgorithmArgs, SpeedArgs, EnvironmentArgs, RunArgs):
    """All flags of this script; a new one goes into a class above, and its range into LIMITS."""


LIMITS = {  # the numbers with which a run can work, from smallest to largest
    "seed": (0, 2**32 - 1),
    "checkpoint_interval": (0, 1e12),
    "eval_episodes": (1, 1e12),
    "threads": (0, 1024),
    "measure_burnin": (0, 1e12),
    "total_timesteps": (1, 1e12),
    "num_envs": (1, 1e12),
    "learning_rate": (1e-12, 1),
    "num_steps": (1, 1e12),
    "gamma": (0, 1),
    "gae_lambda": (0, 1),
    "num_minibatches": (1, 1e12),
    "update_epochs": (1, 1e12),
    "clip_coef": (1e-12, 1e12),
    "ent_coef": (0, 1e12),
    "vf_coef": (0, 1e12),
    "max_grad_norm": (1e-12, 1e12),
    "target_kl": (1e-12, 1e12),
}
STRUCTURAL = ("env_id",)  # flags that cannot change when a checkpoint is used


# ---------------------------------------------------------------------------------------------------------------------
# Networks
# ---------------------------------------------------------------------------------------------------------------------


def linear(inputs, outputs, gain=2**0.5):
    """A linear layer with orthogonal weights and no bias at first."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """A Gaussian policy, whose log standard deviation does not depend on the observation, and a value function."""

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

        `obs`, (batch, obs_dim), are normalised.
        """
        return self.actor(obs), self.log_std, self.critic(obs).squeeze(-1)

    def become_uniform(self, action_space):
        """Give actions the entropy that uniformly random ones have, from the lower to the upper bound."""
        deviations = (action_space.high - action_space.low) / math.sqrt(2 * math.pi * math.e)
        self.log_std.data.copy_(torch.as_tensor(deviations).log())


class Policy(nn.Module):
    """What `--evaluate` plays and policy.pt2 holds: the mode of the policy, (batch, obs_dim) to (batch, act_dim).

    It normalises observations by the statistics of the run's end and clips actions to their bounds.
    """

    def __init__(self, agent, normalizer, action_space):
        super().__init__()
        self.agent = agent
        self.register_buffer("mean", normalizer["mean"][:-1].clone())  # the last one is that of the returns
        self.register_buffer("std", normalizer["std"][:-1].clone())
        self.register_buffer("low", torch.tensor(action_space.low))
        self.register_buffer("high", torch.tensor(action_space.high))

    def forward(self, obs):
        scaled = ((obs - self.mean) / self.std).clamp(-10, 10).float()
        mean, _, _ = self.agent(scaled)
        return mean.clamp(self.low, self.high)


def make_policy(envs, state):
    """The deterministic policy of a learner's `state_dict`, on the CPU."""
    agent = Agent(envs.single_observation_space.shape[0], envs.single_action_space.shape[0])
    agent.load_state_dict(state["networks"]["agent"])
    return Policy(agent, state["normalizer"], envs.single_action_space).eval()


# ---------------------------------------------------------------------------------------------------------------------
# The learner
# ---------------------------------------------------------------------------------------------------------------------


class EnvPool(gym.vector.VectorEnv):
    """envpool's environments as a gymnasium vector environment that resets within the step that ends an episode."""

    def __init__(self, args, seed):
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.num_envs = args.num_envs
        try:
            import envpool

            seed %= 2**31  # envpool's limit
            self.pool = envpool.make(args.env_id, env_type="gymnasium", num_envs=args.num_envs, seed=seed)
        except (ImportError, AssertionError) as error:
            refuse("env_id", args.env_id, f"install envpool, or name one of its environments: {error}".splitlines()[0])
        self.single_observation_space = self.pool.observation_space
        self.single_action_space = self.pool.action_space
        self.action_space = batch_space(self.single_action_space, args.num_envs)

    def reset(self, *, seed=None, options=None):
        """First observations, (num_envs, obs_dim), and no infos; the seed was given when it was made."""
        obs, _ = self.pool.reset()
        return obs, {}

    def step(self, actions):
        """As any vector environment in SAME_STEP mode, for actions (num_envs, act_dim)."""
        obs, rewards, terminated, truncated, _ = self.pool.step(actions.astype(self.single_action_space.dtype))
        ended = terminated | truncated
        infos = {}
        if ended.any():  # by itself envpool would reset in the next step, and ignore that step's action
            infos = {"final_obs": obs, "_final_obs": ended}
            obs = obs.copy()
            obs[ended], _ = self.pool.reset(np.flatnonzero(ended))
        return obs, rewards, terminated, truncated, infos


class Normalizer:
    """Scales observations to mean 0 and variance 1, and rewards so that discounted returns have variance 1.

    All environments share the statistics, kept in float64 (Chan, Golub and LeVeque 1983); results are in [-10, 10].
    """

    def __init__(self, num_envs, obs_dim, gamma):
        self.gamma = gamma
        self.rows = np.zeros((num_envs, obs_dim + 1))  # observation and discounted return so far
        self.returns = self.rows[:, -1]
        self.count = np.zeros(1)
        self.mean = np.zeros(obs_dim + 1)
        self.squares = np.zeros(obs_dim + 1)  # sum of squared differences from the mean
        self.std = np.zeros(obs_dim + 1)

    def normalize(self, obs, rewards=0.0, ended=False):
        """Take in a step's observations, (num_envs, obs_dim), rewards, episode ends; returns the first two scaled."""
        self.rows[:, :-1] = obs
        self.returns[:] = self.gamma * self.returns + rewards
        errors = self.rows - self.mean
        self.count += len(errors)
        self.mean += np.add.reduce(errors) / self.count
        centred = self.rows - self.mean
        self.squares += np.add.reduce(errors * centred)
        np.sqrt(self.squares / self.count + 1e-8, out=self.std)
        self.returns[ended] = 0
        centred[:, -1] = rewards
        scaled = (centred / self.std).clip(-10, 10).astype(np.float32)
        return scaled[:, :-1], scaled[:, -1]

    def scale_obs(self, obs):
        """Normalise observations, (n, obs_dim), and leave the statistics as they are."""
        return ((obs - self.mean[:-1]) / self.std[:-1]).clip(-10, 10).astype(np.float32)

    def state_dict(self):
        """The statistics, as tensors that share their memory."""
        return {name: torch.from_numpy(getattr(self, name)) for name in ("count", "mean", "squares", "std")}


class Apply:
    """Runs a network on parameters that are handed to it in one flat vector, `apply(weights, *inputs)`, as in JAX.

    Several networks, in an nn.ModuleList, are run together: `weights` holds the parameters of all of them, and outputs
    get a leading dimension, one entry per network. Buffers are those of the first one. Parameters begin on 64-byte
    boundaries, as a GPU's loads and cuBLAS like it. Matrices are stored transposed: so the gradient of a batched matmul
    lands in the vector without a copy.

    In a loss call this and not `network`, whose own parameters are constants: views of the flat vector, for reading.
    """

    def __init__(self, network):
        self.several = isinstance(network, nn.ModuleList)
        self.networks = list(network) if self.several else [network]
        self.network = self.networks[0]
        if any(repr(other) != repr(self.network) for other in self.networks):
            raise ValueError("networks that run together have to have the same layers")
        if any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in self.network.modules()):
            raise ValueError("BatchNorm learns statistics that are no parameters; take another normalisation")
        parameters = list(self.network.parameters())
        if len({parameter.requires_grad for parameter in parameters}) > 1:
            raise ValueError("all parameters of a network are learnt; keep frozen ones as buffers")
        if any(parameter.dtype != torch.float32 for parameter in parameters):
            raise ValueError("parameters have to be float32")
        self.shapes = {name: parameter.shape for name, parameter in self.network.named_parameters()}
        self.sizes = []  # of the pieces of the flat vector: each parameter and the padding behind it
        for shape in self.shapes.values():
            size = len(self.networks) * shape.numel()
            self.sizes += [size, -size % 16]
        names = [name for name, _ in self.network.named_parameters(remove_duplicate=False)]
        self.tied = len(names) > len(self.shapes)

    def flatten(self, pin_memory=False):
        """A new flat vector with the networks' parameters, which become views of it and never require a gradient."""
        device = next(self.network.parameters()).device
        weights = torch.zeros(sum(self.sizes), device=device, pin_memory=pin_memory)
        for name, view in self.unflatten(weights).items():
            for i, network in enumerate(self.networks):
                parameter = network.get_parameter(name)
                own = view[i] if self.several else view
                own.copy_(parameter.detach())
                parameter.requires_grad_(False)
                parameter.data = own
        return weights

    def unflatten(self, weights):
        """Views of a flat vector by the parameters' names, those of several networks with a leading dimension."""
        views = {}
        lead = (len(self.networks),) if self.several else ()
        parameters_alone = weights.split(self.sizes)[::2]  # without the padding behind each
        for (name, shape), piece in zip(self.shapes.items(), parameters_alone, strict=True):
            views[name] = piece.view((*lead, *reversed(shape))).mT if len(shape) == 2 else piece.view((*lead, *shape))
        return views

    def call(self, views, *inputs):
        """One network's outputs for its parameters by name."""
        return functional_call(self.network, views, inputs, tie_weights=self.tied)

    def __call__(self, weights, *inputs):
        """The networks' outputs for `inputs`, (batch, ...), which all of them get: (batch, ...) or (n, batch, ...)."""
        if not self.several:
            return self.call(self.unflatten(weights), *inputs)
        inputs = [x.expand(len(self.networks), *x.shape) for x in inputs]  # else vmap makes wide matmuls and transposes
        return vmap(self.call, randomness="different")(self.unflatten(weights), *inputs)

    def member(self, weights, i, *inputs):
        """The outputs of network `i` of several."""
        return self.call({name: view[i] for name, view in self.unflatten(weights).items()}, *inputs)

    def state_dict(self, weights):
        """The network's state dict, or that of an nn.ModuleList of several; its tensors are views of `weights`."""
        views = self.unflatten(weights)
        if not self.several:
            return self.network.state_dict() | views
        state = {}
        for i, network in enumerate(self.networks):
            own = network.state_dict() | {name: view[i] for name, view in views.items()}
            state |= {f"{i}.{name}": tensor for name, tensor in own.items()}
        return state


class Adam:
    """Adam (Kingma and Ba 2015, arXiv:1412.6980) for one flat vector, with all its state on the device.

    torch.optim's functional form compiles too, but takes powers of the betas, for each piece of the vector again: in
    float32 these are wrong in the fifth digit, in float64 they slow a compiled update by 6%. Here are running products.
    """

    def __init__(self, weights, lr):
        self.lr = lr
        self.m = torch.zeros_like(weights)
        self.v = torch.zeros_like(weights)
        self.betas = torch.tensor((BETA1, BETA2), dtype=torch.float64, device=weights.device)
        self.decay = torch.ones_like(self.betas)  # beta1**t and beta2**t after t steps; float64 for 1 - 0.999**t

    def step(self, weights, gradient):
        """Move `weights`, in place, one step against `gradient`; both are flat."""
        self.decay.mul_(self.betas).clamp_(min=1e-30)  # denormal numbers, after 7000 steps, would be slow
        self.m.lerp_(gradient, 1 - BETA1)
        self.v.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        correction1, correction2 = (1 - self.decay).unbind()
        # lr * m_hat / (sqrt(v_hat) + eps), with both corrections and lr moved into the denominator
        scale = correction1 / self.lr
        denominator = self.v.sqrt().mul_(scale / correction2.sqrt()).add_(EPS * scale)
        weights.addcdiv_(self.m, denominator, value=-1)

    def tensors(self):
        """By name, what a resumed run needs: every tensor here but the learning rate."""
        return {name: value for name, value in vars(self).items() if torch.is_tensor(value) and name != "lr"}


class Scalars:
    """Numbers to log, which stay on the device until somebody asks for them."""

    def __init__(self, device):
        self.device = device
        self.kept = {}

    def keep(self, **scalars):
        """Keep these 0-dimensional detached tensors by name; the same names always share the same memory."""
        names = tuple(scalars)
        if names not in self.kept:
            known = {name for kept in self.kept for name in kept}
            if known & set(names):
                raise ValueError(f"{known & set(names)} is kept elsewhere already; give it another name")
            self.kept[names] = torch.zeros(len(names), device=self.device)
        torch.stack(list(scalars.values()), out=self.kept[names])

    def fetch(self):
        """The newest values by name; waits for the device."""
        return {n: v for names, values in self.kept.items() for n, v in zip(names, values.tolist(), strict=True)}


def fill(tensors, saved, path=""):
    """Copy nested dictionaries of tensors into others of the same layout, in place, so that CUDA graphs stay valid."""
    for name in sorted(tensors.keys() ^ saved.keys()):
        raise ValueError(f"{path}{name} is only in the {'checkpoint' if name in saved else 'script'}")
    for name, value in tensors.items():
        if isinstance(value, dict):
            fill(value, saved[name], f"{path}{name}.")
        elif value.shape != saved[name].shape:
            raise ValueError(f"{path}{name} is {tuple(saved[name].shape)} and not {tuple(value.shape)}")
        else:
            value.copy_(saved[name])


def to_cpu(tensors):
    """Copies, on the CPU, of nested dictionaries of tensors."""
    if isinstance(tensors, dict):
        return {name: to_cpu(value) for name, value in tensors.items()}
    return tensors.detach().to("cpu", copy=True)


def numpy_linear(layer):
    """nn.Linear on NumPy views of its parameters' memory."""
    weight = layer.weight.detach().numpy().T
    if layer.bias is None:
        return lambda x: x.dot(weight)
    bias = layer.bias.detach().numpy()[None]
    return lambda x: x.dot(weight) + bias  # with `dot` and a 2-dimensional bias a single row is fastest


NUMPY_LAYERS = {  # what makes a function of a numpy array from a layer of exactly this class
    nn.Linear: numpy_linear,
    nn.ReLU: lambda layer: partial(np.maximum, np.zeros((), np.float32)),  # a Python 0 would be converted each time
    nn.LeakyReLU: lambda layer: lambda x: np.where(x > 0, x, layer.negative_slope * x),
    nn.SiLU: lambda layer: lambda x: x * (0.5 + 0.5 * np.tanh(0.5 * x)),
    nn.Tanh: lambda layer: np.tanh,
    nn.Identity: lambda layer: lambda x: x,
}


def numpy_function(network):
    """All layers of `network` in a row as a function of a numpy array, (batch, inputs), or None if one is not known.

    It reads the parameters where they are, so that it always computes with their newest values.
    """
    parts = [part for _, part in network.named_modules(remove_duplicate=False)]
    layers = [part for part in parts if next(part.children(), None) is None]
    if any(type(layer) not in NUMPY_LAYERS for layer in layers):
        return None
    steps = [NUMPY_LAYERS[type(layer)](layer) for layer in layers]

    def function(x):
        x = x.astype(np.float32, copy=False)
        for step in steps:
            x = step(x)
        return x

    return function


def torch_function(network, forward):
    """`forward(network, obs)` as a function of a numpy array."""

    @torch.no_grad()
    def function(obs):
        return forward(network, torch.as_tensor(obs, dtype=torch.float32)).numpy()

    return function


def on_host(network, obs_dim, forward=nn.Module.__call__, layers=""):
    """`forward(network, obs)` on the CPU as a function of a numpy array, (batch, obs_dim), with the newest weights.

    For a single row NumPy takes a fraction of torch's time. It runs the layers of the submodule `layers`, by default of
    the whole network, one after the other, and only if that gives what torch gives for random weights and inputs.
    """
    trial = copy.deepcopy(network)
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(-2, 3, 16)[:, None]  # small ones, and large ones that reach limits, such as a clamp
    obs = (scales * torch.randn(16, obs_dim, generator=generator)).numpy()
    agreed = True
    for scale in (1, 100):
        for tensor in (*trial.parameters(), *trial.buffers()):  # initial zeros could hide a difference
            tensor.data.copy_(scale * (torch.rand(tensor.shape, generator=generator) - 0.5))
        function = numpy_function(trial.get_submodule(layers))
        agreed &= equal_outputs(function, torch_function(trial, forward), obs / scale)
    if agreed:
        return numpy_function(network.get_submodule(layers))
    name = type(network).__name__
    print(f"note: {name} acts by torch: it is more than a row of the layers that NUMPY_LAYERS has", file=sys.stderr)
    return torch_function(network, forward)


def equal_outputs(function, wanted_function, obs):
    """Whether both functions give the same for `obs`, (batch, obs_dim), save for rounding."""
    if function is None:
        return False
    try:
        wanted = wanted_function(obs)
        got = function(obs)
    except (ValueError, RuntimeError, IndexError):  # layers that do not fit, or inputs that a network cannot take
        return False
    if got.shape != wanted.shape:
        return False
    error = np.abs(got - wanted).reshape(len(obs), -1).max(1)
    return bool((error <= 1e-4 * np.abs(wanted).reshape(len(obs), -1).max(1)).all())


def split_columns(rows, shapes):
    """Views by name of `rows`, (..., width), each row of which holds one entry of each of `shapes`, side by side."""
    pieces = rows.split([math.prod(shape) for shape in shapes.values()], -1)
    return {name: x.view(*x.shape[:-1], *shapes[name]) for name, x in zip(shapes, pieces, strict=True)}


def gae(rewards, values, next_values, terminated, ended, gamma, gae_lambda):
    """Generalised advantage estimation (arXiv:1506.02438, equation 16); all tensors are (num_steps, num_envs).

    The recurrence A_t = delta_t + decay_t A_{t+1} by doubling: after k rounds A_t covers 2**k steps.
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


def cheap_guards(guards):
    """Which of a compiled method's guards are checked in each call: those on what the learner holds, and on shapes.

    The others, such as hooks of each layer and globals of torch, would take 4% of SAC's time on a CPU, 10% of DQN's. So
    keep what changes in tensors or in the learner's attributes: another value of a global would not be noticed.
    """
    kinds = ("TENSOR_MATCH", "CONSTANT_MATCH", "TYPE_MATCH", "SEQUENCE_LENGTH", "DICT_KEYS_MATCH", "SHAPE_ENV")
    return [guard.guard_type in kinds and not guard.is_global for guard in guards]


def stay_in_place(*holders):
    """Promise torch.compile that the tensors in the attributes of `holders` keep their memory.

    Only such tensors may change in the CUDA graphs that a --compile-mode makes.
    """
    for tensor in tree_leaves([vars(holder) for holder in holders]):
        if torch.is_tensor(tensor):
            torch._dynamo.mark_static_address(tensor, guard=False)


def compiled(function, mode, **options):
    """`function` by torch.compile as one graph; `options` are inductor's, beside those that `mode` stands for.

    In modes that make CUDA graphs a call overwrites what earlier calls of all compiled functions returned: that is
    cloned.
    """
    torch._dynamo.config.trace_autograd_ops = True  # allows torch.autograd.grad in a compiled function
    options |= torch._inductor.list_mode_options(mode)
    guards = {"guard_filter_fn": cheap_guards}  # torch.compile takes this out of the dictionary
    graph = torch.compile(function, fullgraph=True, options=options | guards)
    if not options.get("triton.cudagraphs"):
        return graph
    return lambda *inputs: tree_map_only(torch.Tensor, torch.clone, graph(*inputs))


class PPO:
    """The learner. What its graphs read or change are tensors, updated in place: they replay kernels, not Python."""

    def __init__(self, args, envs, device):
        self.args = args
        self.device = device
        self.on_cuda = device.type == "cuda"
        self.compile = args.compile
        self.cudagraphs = args.cudagraphs and self.on_cuda
        self.num_envs = envs.num_envs
        self.obs_dim = envs.single_observation_space.shape[0]
        self.act_dim = envs.single_action_space.shape[0]
        self.low = envs.single_action_space.low
        self.high = envs.single_action_space.high
        self.normalizer = Normalizer(self.num_envs, self.obs_dim, args.gamma)

        with device:
            self.agent = Apply(Agent(self.obs_dim, self.act_dim))
        if args.init_entropy == "max":
            self.agent.network.become_uniform(envs.single_action_space)
        self.weights = self.agent.flatten()
        self.learning_rate = torch.tensor(args.learning_rate, device=device)
        self.optimizers = {"agent": Adam(self.weights, self.learning_rate)}
        self.grad_norm = torch.zeros((), device=device)  # of the last minibatch, before clipping
        self.scalars = Scalars(device)
        self.updates = 0
        self.warmup_updates = GRAPH_WARMUP if self.cudagraphs else 1

        self.host_agent = self.agent.network  # on a CPU the same memory
        self.host_weights = self.weights
        if self.on_cuda:
            self.host_agent = copy.deepcopy(self.agent.network).cpu()
            self.host_weights = Apply(self.host_agent).flatten(pin_memory=True)
        self.mean_actions = on_host(self.host_agent, self.obs_dim, lambda agent, obs: agent(obs)[0], layers="actor")
        self.host_noise = torch.empty(args.num_steps, self.num_envs, self.act_dim)
        self.noise = self.host_noise.numpy()

        self.step_shapes = {"obs": (self.obs_dim,), "next_obs": (self.obs_dim,), "actions": (self.act_dim,)}
        self.step_shapes |= {"rewards": (), "terminated": (), "ended": ()}
        width = sum(math.prod(shape) for shape in self.step_shapes.values())
        self.host_rollout = torch.zeros(args.num_steps, self.num_envs, width, pin_memory=self.on_cuda)
        self.rollout = self.host_rollout.to(device)  # on a CPU the same memory
        self.steps = {name: x.numpy() for name, x in split_columns(self.host_rollout, self.step_shapes).items()}
        self.batch_shapes = {"obs": (self.obs_dim,), "actions": (self.act_dim,)}
        self.batch_shapes |= {"log_prob": (), "values": (), "advantages": (), "returns": ()}
        width = sum(math.prod(shape) for shape in self.batch_shapes.values())
        self.batch = torch.zeros(args.num_steps * self.num_envs, width, device=device)
        self.apply_compile_and_cudagraphs()

    def apply_compile_and_cudagraphs(self):
        """The one place where functions are compiled and graphed."""
        if self.compile:
            stay_in_place(self, *self.optimizers.values())
            cpp_wrapper = not self.on_cuda  # calls the kernels from C++; a CUDA graph does better
            self.update_minibatch = compiled(self.update_minibatch, self.args.compile_mode, cpp_wrapper=cpp_wrapper)
        if self.cudagraphs:  # with --target-kl the host looks at the KL divergence between epochs
            for name in ("iterate",) if self.args.target_kl is None else ("make_batch", "learn_epoch", "measure"):
                setattr(self, name, CudaGraphModule(getattr(self, name), warmup=GRAPH_WARMUP))

    def log_prob(self, mean, log_std, actions):
        """Log-probabilities of `actions`, (batch, act_dim), under independent Gaussians: (batch,)."""
        squares = ((actions - mean) * (-log_std).exp()).square()
        return -(0.5 * squares + log_std + 0.5 * math.log(2 * math.pi)).sum(-1)

    def loss(self, weights, rows):
        """Policy loss (equation 7), value loss, entropy, and the log of the probability ratio, (batch,).

        `rows`, (batch, width), are some of `batch`, as `make_batch` makes them.
        """
        columns = split_columns(rows, self.batch_shapes)
        clip = self.args.clip_coef
        mean, log_std, values = self.agent(weights, columns["obs"])
        log_ratio = self.log_prob(mean, log_std, columns["actions"]) - columns["log_prob"]
        ratio = log_ratio.exp()
        advantages = columns["advantages"]
        if self.args.norm_adv:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        policy_loss = -torch.min(advantages * ratio, advantages * ratio.clamp(1 - clip, 1 + clip)).mean()
        errors = (values - columns["returns"]).square()
        if self.args.clip_vloss:
            clipped = columns["values"] + (values - columns["values"]).clamp(-clip, clip)
            errors = torch.max(errors, (clipped - columns["returns"]).square())
        value_loss = 0.5 * errors.mean()
        entropy = (log_std + 0.5 * (1 + math.log(2 * math.pi))).expand_as(mean).sum(-1).mean()
        return policy_loss, value_loss, entropy, log_ratio

    def update_minibatch(self, rows):
        """One step of Adam on the loss of `rows`, (minibatch, width)."""
        weights = self.weights.detach().requires_grad_()
        policy_loss, value_loss, entropy, _ = self.loss(weights, rows)
        loss = policy_loss - self.args.ent_coef * entropy + self.args.vf_coef * value_loss
        (gradient,) = torch.autograd.grad(loss, weights)
        self.grad_norm.copy_(gradient.norm())
        scale = (self.args.max_grad_norm / (self.grad_norm + 1e-6)).clamp(max=1)
        self.optimizers["agent"].step(self.weights, gradient * scale)

    def make_batch(self):
        """Make `batch`, one row per transition of the rollout: columns of the shapes `batch_shapes`."""
        steps = split_columns(self.rollout.flatten(0, 1), self.step_shapes)
        mean, log_std, values = self.agent(self.weights, steps["obs"])
        _, _, next_values = self.agent(self.weights, steps["next_obs"])
        columns = (steps["rewards"], values, next_values, steps["terminated"], steps["ended"])
        in_time = [column.view(self.args.num_steps, self.num_envs) for column in columns]
        advantages = gae(*in_time, self.args.gamma, self.args.gae_lambda).flatten()
        batch = split_columns(self.batch, self.batch_shapes)
        batch["obs"].copy_(steps["obs"])
        batch["actions"].copy_(steps["actions"])
        batch["log_prob"].copy_(self.log_prob(mean, log_std, steps["actions"]))
        batch["values"].copy_(values)
        batch["advantages"].copy_(advantages)
        batch["returns"].copy_(advantages + values)

    def learn_epoch(self):
        """All of `batch` once, in minibatches drawn without replacement."""
        order = torch.rand(len(self.batch), device=self.device).argsort()
        for rows in self.batch[order].chunk(self.args.num_minibatches):
            self.update_minibatch(rows)

    def measure(self):
        """Losses and statistics of the whole `batch`; the KL divergence is estimated by E[r - 1 - log r]."""
        policy_loss, value_loss, entropy, log_ratio = self.loss(self.weights, self.batch)
        ratio = log_ratio.exp()
        columns = split_columns(self.batch, self.batch_shapes)
        losses = {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "approx_kl": (ratio - 1 - log_ratio).mean(),
            "clipfrac": ((ratio - 1).abs() > self.args.clip_coef).float().mean(),
            "grad_norm": self.grad_norm,
            "explained_variance": 1 - (columns["returns"] - columns["values"]).var() / columns["returns"].var(),
        }
        self.scalars.keep(**losses)

    def iterate(self):
        """All epochs over a rollout, fewer if the KL divergence exceeds --target-kl."""
        self.make_batch()
        for _ in range(self.args.update_epochs):
            self.learn_epoch()
            if self.args.target_kl is not None:
                self.measure()
                if self.losses()["approx_kl"] > self.args.target_kl:
                    break
        if self.args.target_kl is None:
            self.measure()

    def update(self, learning_rate):
        """Learn from the rollout, and send the new policy to the host."""
        self.learning_rate.fill_(learning_rate)
        self.rollout.copy_(self.host_rollout, non_blocking=True)
        self.iterate()
        self.host_weights.copy_(self.weights)
        self.updates += 1

    def draw_noise(self):
        """All of a rollout's noise at once, as the policy's standard deviation does not depend on the observation."""
        _, log_std, _ = self.host_agent(torch.zeros(2, self.obs_dim))
        if log_std.shape not in ((1, self.act_dim), (1, 1)):
            raise ValueError(f"log_std has to be (1, {self.act_dim}), for all observations, not {tuple(log_std.shape)}")
        self.host_noise.normal_().mul_(log_std.exp())

    def act(self, t, obs):
        """Sample actions for normalised `obs` in step `t`; both numpy, (num_envs, ...), the actions within bounds."""
        if t == 0:
            self.draw_noise()
        actions = self.mean_actions(obs) + self.noise[t]
        self.steps["obs"][t] = obs
        self.steps["actions"][t] = actions
        return actions.clip(self.low, self.high)

    def record(self, t, next_obs, last_obs, rewards, terminated, ended):
        """Store what step `t` led to; returns `next_obs` normalised. Both are those of `DirectEnvs.step`."""
        obs, rewards = self.normalizer.normalize(next_obs, rewards, ended)
        self.steps["next_obs"][t] = obs if last_obs is next_obs else self.normalizer.scale_obs(last_obs)
        self.steps["rewards"][t] = rewards
        self.steps["terminated"][t] = terminated if self.args.bootstrap_truncation else ended
        self.steps["ended"][t] = ended
        return obs

    @property
    def stage(self):
        """What the next update does, in a word or two: "training" once compiled and captured."""
        if self.updates >= self.warmup_updates:
            return "training"
        return " and ".join(["compiling"] * self.compile + ["capturing"] * self.cudagraphs) or "warming up"

    def losses(self):
        """The last update's losses and statistics by name; waits for that update."""
        return self.scalars.fetch()

    def tensors(self):
        """All that learning changes: the tensors themselves."""
        return {
            "networks": {"agent": self.agent.state_dict(self.weights)},
            "optimizers": {name: optimizer.tensors() for name, optimizer in self.optimizers.items()},
            "normalizer": self.normalizer.state_dict(),
        }

    def state_dict(self):
        """Copies, on the CPU, of all that `load_state_dict` needs to continue bit by bit, random numbers included."""
        return to_cpu(self.tensors()) | {"updates": self.updates} | rng_state(self.device)

    def load_state_dict(self, state):
        """Become the learner that `state` was taken from."""
        tensors = self.tensors()
        fill(tensors, {name: state[name] for name in tensors})
        self.host_agent.load_state_dict(self.agent.state_dict(self.weights))
        self.updates = state["updates"]
        self.warmup_updates += self.updates
        set_rng_state(state, self.device)


# ---------------------------------------------------------------------------------------------------------------------
# Training and evaluation
# ---------------------------------------------------------------------------------------------------------------------


class DirectEnvs(gym.vector.VectorWrapper):
    """Steps the environments of a SyncVectorEnv itself, to the same numbers, without a cost that can exceed theirs.

    `step` returns other things than gymnasium's, so that this has to be the outermost wrapper.
    """

    def step(self, actions):
        """Step each environment, and reset those whose episode ends; `actions` are numpy, (num_envs, ...).

        Returns what to act on next and what the actions led to, the same array unless an episode has ended, both
        (num_envs, obs_dim); rewards, terminated, truncated, (num_envs,). All are the caller's to keep.
        """
        space = self.env.observation_space
        last_obs = np.empty(space.shape, space.dtype)
        rewards = np.empty(len(last_obs))
        terminated = np.empty(len(last_obs), bool)
        truncated = np.empty(len(last_obs), bool)
        first_obs = {}
        for i, env in enumerate(self.env.envs):
            last_obs[i], rewards[i], terminated[i], truncated[i], _ = env.step(actions[i])
            if terminated[i] or truncated[i]:
                first_obs[i], _ = env.reset()
        next_obs = last_obs
        if first_obs:
            next_obs = last_obs.copy()
            next_obs[list(first_obs)] = list(first_obs.values())
        return next_obs, last_obs, rewards, terminated, truncated


class DirectEnvPool(gym.vector.VectorWrapper):
    """Steps an EnvPool as DirectEnvs steps its environments."""

    def step(self, actions):
        next_obs, rewards, terminated, truncated, infos = self.env.step(actions)
        return next_obs, infos.get("final_obs", next_obs), rewards, terminated, truncated


def check_batch(args):
    """Refuse what does not go together: sizes of batch and minibatches, and envpool with videos."""
    batch = args.num_envs * args.num_steps
    if batch % args.num_minibatches or (args.norm_adv and batch == args.num_minibatches):
        refuse("num_minibatches", args.num_minibatches, f"give a divisor of num_envs * num_steps, {batch}, below it")
    if args.capture_video and args.env_backend == "envpool":
        refuse("env_backend", args.env_backend, "envpool records no video; leave out --capture-video")


def train(args, on_log=lambda learner, losses, step: None, on_start=lambda run: None):
    """Train; SystemExit(2) on bad arguments, (130) on Ctrl-C.

    For tools: `on_start(run)` is called once, `on_log(learner, losses, step)` before each log.
    """
    device = prepare(args)
    check_batch(args)
    checkpoint = load_resumed(args)
    step = checkpoint["global_step"]
    folder = run_folder(args)
    if args.env_backend == "envpool":
        envs = DirectEnvPool(EnvPool(args, args.seed + step))
    else:
        envs = DirectEnvs(make_envs(args, args.num_envs, folder / "videos" if args.capture_video else None))
    require_spaces(args, envs, gym.spaces.Box)
    obs, _ = envs.reset(seed=args.seed + step)
    learner = PPO(args, envs, device)
    restore(args, learner, checkpoint)
    obs, _ = learner.normalizer.normalize(obs)
    with Run(args, learner, envs, folder, checkpoint) as run:
        on_start(run)
        while step < args.total_timesteps and not run.stop:
            learning_rate = args.learning_rate
            if args.anneal_lr:
                learning_rate *= 1 - step / args.total_timesteps
            for t in range(args.num_steps):
                next_obs, last_obs, rewards, terminated, truncated = envs.step(learner.act(t, obs))
                ended = terminated | truncated
                obs = learner.record(t, next_obs, last_obs, rewards, terminated, ended)
                step += args.num_envs
                run.advance(step, rewards, ended, learner.stage)
                if run.stop:
                    break
            else:  # the rollout is complete
                learner.update(learning_rate)
                losses = learner.losses()
                on_log(learner, losses, step)
                run.log(losses)
                if args.checkpoint_interval and step % args.checkpoint_interval < args.num_envs * args.num_steps:
                    run.save()


def evaluation_envs(args, video_dir=None):
    """One environment in which to play whole episodes; `video_dir` receives mp4s."""
    return make_envs(args, 1, video_dir)


def evaluate(args):
    """Print mean and standard deviation of the return of a checkpoint's deterministic policy over whole episodes."""
    check_args(args)
    checkpoint = load_checkpoint("evaluate", args)
    require_structure("evaluate", args, checkpoint)
    envs = evaluation_envs(args, run_folder(args) / "videos" if args.capture_video else None)
    policy = load_fitting("evaluate", args, make_policy, envs, checkpoint["learner"])
    obs, _ = envs.reset(seed=args.seed)
    returns = []
    total = 0.0
    while len(returns) < args.eval_episodes:
        with torch.no_grad():
            actions = policy(policy_input(obs)).numpy()
        obs, rewards, terminated, truncated, _ = envs.step(actions)
        total += rewards[0]
        if terminated[0] or truncated[0]:
            returns.append(total)
            total = 0.0
    envs.close()
    print(f"{len(returns)} episodes: mean return {np.mean(returns):.2f}, standard deviation {np.std(returns):.2f}")


# ---------------------------------------------------------------------------------------------------------------------
# The shell: command line, environments, checkpoints, the run's folder. From here on every script has the same text,
# also where one has no use for a part of it.
# ---------------------------------------------------------------------------------------------------------------------


def main():
    """Do what the command line says; with --resume, --evaluate or --export, a checkpoint's flags are the defaults."""
    args = parse_args(Args())
    given = [name for name in ("resume", "evaluate", "export") if getattr(args, name)]
    if len(given) > 1:
        refuse(given[0], getattr(args, given[0]), f"leave out --{given[1]}")
    for name in given:
        saved = load_checkpoint(name, args)["args"]
        known = {flag: value for flag, value in saved.items() if flag in vars(args)}
        not_saved = {"resume": None, "evaluate": None, "export": None, "capture_video": False}
        args = parse_args(Args(**known | not_saved))
    if args.evaluate:
        evaluate(args)
    elif args.export:
        export_checkpoint(args)
    else:
        train(args)


def parse_args(default):
    """Args from the command line, by `default` where it is silent; -h lists the flags under the classes of Args."""
    groups = []
    for group in reversed(Args.__bases__):
        values = group(**{flag.name: getattr(default, flag.name) for flag in fields(group)})
        title = group.__name__.removesuffix("Args").lower()
        groups.append((title, group, field(default_factory=partial(replace, values))))
    flags = tyro.cli(make_dataclass("Flags", groups), description=__doc__, config=(tyro.conf.OmitArgPrefixes,))
    return Args(**{name: value for group in vars(flags).values() for name, value in vars(group).items()})


def refuse(name, value, remedy):
    """End the program with exit code 2 and one line that names the argument, its value and the remedy."""
    print(f"error: --{name.replace('_', '-')} {value}: {remedy}", file=sys.stderr)
    raise SystemExit(2)


def check_args(args):
    """Refuse numbers outside of LIMITS."""
    for name, (low, high) in LIMITS.items():
        value = getattr(args, name)
        if value is not None and not low <= value <= high:
            refuse(name, value, f"give a number from {low} to {high:g}")
    if getattr(args, "buffer_size", args.num_envs) < args.num_envs:
        refuse("buffer_size", args.buffer_size, f"give at least --num-envs, {args.num_envs}")
    for name in ("compile_mode", "critic_compile_mode"):
        check_compile_mode(args, name, getattr(args, name, None) or "default")


GRAPH_MODES = ("reduce-overhead", "max-autotune")  # they make CUDA graphs of their own


def check_compile_mode(args, name, mode):
    """Refuse a mode without --compile, and one with CUDA graphs of its own inside of --cudagraphs."""
    if mode != "default" and not args.compile:
        refuse(name, mode, f"give --compile too, or --{name.replace('_', '-')} default")
    if mode in GRAPH_MODES and args.cudagraphs:
        refuse(name, mode, "it makes CUDA graphs of its own; leave out --cudagraphs, or give another mode")


def prepare(args):
    """Check the arguments of a run, seed numpy and torch, and return the device to compute on."""
    check_args(args)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    if getattr(args, "cudagraphs", False) and device.type != "cuda":
        print("warning: --cudagraphs needs a CUDA device; running without", file=sys.stderr)
    for name in ("compile_mode", "critic_compile_mode"):
        mode = getattr(args, name, None)
        if mode in GRAPH_MODES and device.type != "cuda":
            flag = f"--{name.replace('_', '-')} {mode}"
            print(f"warning: CUDA graphs of {flag} need a CUDA device; running without", file=sys.stderr)
    compiler = os.environ.get("CXX", "g++") if device.type == "cpu" else os.environ.get("CC", "gcc")
    if getattr(args, "compile", False) and not shutil.which(compiler):
        refuse("compile", args.compile, f"install {compiler}, which torch.compile calls, or give --no-compile")
    if args.track:
        require_wandb(args)
    logging.getLogger("tensordict").setLevel(logging.WARNING)  # it announces every CUDA graph
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.backends.cudnn.allow_tf32 = args.matmul_precision != "highest"
    torch.set_float32_matmul_precision(args.matmul_precision)
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    return device


def require_wandb(args):
    """Refuse --track where wandb is missing or would ask for a login in the middle of a run."""
    try:
        import wandb
    except ImportError:
        refuse("track", args.track, "pip install wandb, or give --no-track")
    offline = os.environ.get("WANDB_MODE", "online") != "online"
    if not offline and not wandb.login(prompt=False, timeout=10):
        refuse("track", args.track, "run `wandb login` first, or set WANDB_MODE=offline")


def require_memory(args, device, envs):
    """Refuse a replay buffer that does not fit the device, or whose copy in a checkpoint would not fit the host."""
    spaces = (envs.single_observation_space, envs.single_observation_space, envs.single_action_space)
    row_bytes = 4 * (sum(math.prod(space.shape) for space in spaces) + 2)
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    room = host // 2  # for the buffer and its copy
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        room = min(free, host)
    if args.buffer_size * row_bytes > room:
        remedy = f"give at most {room // row_bytes}: a transition takes {row_bytes} bytes of {room / 1e9:.0f} GB"
        refuse("buffer_size", args.buffer_size, remedy)


def make_envs(args, num_envs, video_dir=None):
    """Make `num_envs` copies of the environment that step together; `video_dir` receives mp4s of the first one."""

    def make_env(video):
        env = gym.make(args.env_id, **{"render_mode": "rgb_array"} if video else {})
        if not isinstance(env.observation_space, gym.spaces.Box) and can_be_a_vector(env.observation_space):
            env = gym.wrappers.FlattenObservation(env)
        return gym.wrappers.RecordVideo(env, str(video_dir), disable_logger=True) if video else env

    try:
        thunks = [partial(make_env, video_dir is not None and i == 0) for i in range(num_envs)]
        envs = SyncVectorEnv(thunks, autoreset_mode=AutoresetMode.SAME_STEP)  # true last obs in infos["final_obs"]
    except OSError as error:
        refuse("run_dir", args.run_dir, f"name a folder that can be written ({error.strerror})")
    except (gym.error.Error, ImportError) as error:
        name = "capture_video" if video_dir is not None and args.env_id in gym.registry else "env_id"
        refuse(name, getattr(args, name), f"correct the name or install what is missing: {error}".splitlines()[0])
    original = envs.envs[0].unwrapped.observation_space
    if not isinstance(original, gym.spaces.Box) and isinstance(envs.single_observation_space, gym.spaces.Box):
        width = envs.single_observation_space.shape[0]
        print(f"note: observations are flattened to vectors of {width} numbers from {original}", file=sys.stderr)
    return envs


def can_be_a_vector(space):
    """Whether a space of observations can be flattened without taking an image or a matrix apart."""
    if isinstance(space, gym.spaces.Dict):
        return all(can_be_a_vector(part) for part in space.values())
    if isinstance(space, gym.spaces.Tuple):
        return all(can_be_a_vector(part) for part in space)
    if isinstance(space, gym.spaces.Box):
        return len(space.shape) <= 1
    return isinstance(space, (gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary))


def require_spaces(args, envs, action_kind):
    """Refuse environments without vector observations, or whose actions are not `action_kind`, Box or Discrete."""
    observations, actions = envs.single_observation_space, envs.single_action_space
    if not isinstance(observations, gym.spaces.Box) or len(observations.shape) != 1:
        refuse("env_id", args.env_id, f"choose an environment whose observations are vectors, not {observations}")
    if not isinstance(actions, action_kind):
        refuse("env_id", args.env_id, f"choose an environment with {action_kind.__name__} actions, not {actions}")
    if isinstance(actions, gym.spaces.Discrete) and actions.start != 0:
        refuse("env_id", args.env_id, f"choose an environment whose actions count from 0, not {actions}")
    if isinstance(actions, gym.spaces.Box) and not (len(actions.shape) == 1 and actions.is_bounded()):
        refuse("env_id", args.env_id, f"choose an environment whose actions are bounded vectors, not {actions}")


def checkpoint_path(path):
    """The checkpoint in a run's folder, or the file itself."""
    return Path(path) / "checkpoint.pt" if Path(path).is_dir() else Path(path)


def load_checkpoint(name, args):
    """Read what `Run.save` wrote, onto the CPU, from the file or folder in argument `name`; refuse another script's."""
    given = getattr(args, name)
    try:
        checkpoint = torch.load(checkpoint_path(given), map_location="cpu", weights_only=True, mmap=True)
        script = checkpoint["script"]
    except Exception as error:
        refuse(name, given, f"give the intact checkpoint.pt of a run ({type(error).__name__} on reading this)")
    if script != SCRIPT:
        refuse(name, given, f"it is from {script}.py; use it with that")
    return checkpoint


def require_structure(name, args, checkpoint):
    """Refuse flags that differ from those of the checkpoint in argument `name` where it could not be used."""
    for flag in STRUCTURAL:
        value, saved = getattr(args, flag), checkpoint["args"][flag]
        if value != saved:
            refuse(flag, value, f"the checkpoint in --{name} has {saved}, which cannot be changed; leave this out")


def load_resumed(args):
    """The checkpoint in --resume, or what stands for one in a new run."""
    if not args.resume:
        return {"global_step": 0, "episodes": 0, "returns": [], "learner": None}
    checkpoint = load_checkpoint("resume", args)
    require_structure("resume", args, checkpoint)
    step = checkpoint["global_step"]
    if step >= args.total_timesteps:
        refuse("total_timesteps", args.total_timesteps, f"the checkpoint is at step {step}; give more than that")
    return checkpoint


def restore(args, learner, checkpoint):
    """Give the learner the state in the checkpoint of --resume, if there is one."""
    if checkpoint["learner"]:
        load_fitting("resume", args, learner.load_state_dict, checkpoint.pop("learner"))


def load_fitting(name, args, load, *inputs):
    """`load(*inputs)`, with one line where the checkpoint in argument `name` has other networks than this script."""
    try:
        return load(*inputs)
    except (KeyError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        refuse(name, getattr(args, name), f"it does not fit the networks of this script: {reason}")


def rng_state(device):
    """The states of torch's random number generators."""
    cuda_rng = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {"rng": torch.get_rng_state(), "cuda_rng": cuda_rng}


def set_rng_state(state, device):
    """Put torch's random number generators into states that `rng_state` returned."""
    torch.set_rng_state(state["rng"])
    if device.type == "cuda" and state["cuda_rng"] is not None:
        torch.cuda.set_rng_state(state["cuda_rng"], device)


def policy_input(obs):
    """Observations, numpy, (batch, ...), as policies take them: images in bytes, vectors in float32."""
    return torch.as_tensor(obs, dtype=torch.uint8 if obs.ndim > 2 else torch.float32)


def example_input(envs):
    """Two observations, all zeros, as policies take them."""
    return policy_input(np.zeros((2, *envs.single_observation_space.shape)))


def export_policy(policy, envs, path):
    """Write a policy as a torch.export program, (batch, ...) to actions in the environment's units."""
    batch = torch.export.Dim("batch")
    program = torch.export.export(policy, (example_input(envs),), dynamic_shapes=({0: batch},))
    torch.export.save(program, path)


def export_checkpoint(args):
    """Write policy.pt2 beside the checkpoint in --export."""
    checkpoint = load_checkpoint("export", args)
    require_structure("export", args, checkpoint)
    envs = evaluation_envs(args)
    path = checkpoint_path(args.export).with_name("policy.pt2")
    policy = load_fitting("export", args, make_policy, envs, checkpoint["learner"])
    export_policy(policy, envs, path)
    envs.close()
    print(path)


def run_folder(args):
    """The name of a new run's folder, which does not exist yet."""
    return Path(args.run_dir) / f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time_ns()}".replace("/", "_")


class NotFinite(FloatingPointError):
    """A loss is infinite or NaN, or a network holds a NaN."""


class Run:
    """A run from outside: folder (config, events, checkpoint, policy, summary), episodes, progress bar, clock, Ctrl-C.

    Used as a context. At its end all is closed; checkpoint, policy and summary are written unless an error was the end.
    """

    def __init__(self, args, learner, envs, folder, checkpoint):
        self.args = args
        self.learner = learner
        self.envs = envs
        self.folder = folder
        self.step = self.first_step = checkpoint["global_step"]
        self.episodes = checkpoint["episodes"]
        self.last_returns = checkpoint["returns"]  # of the last 20 episodes
        self.facts = {}  # what tools add to the progress bar and to the summary
        self.returns = np.zeros(args.num_envs)  # so far, of the episodes under way
        self.begins = [self.first_step] * args.num_envs
        self.stop = False
        self.stage = None
        self.start = time.perf_counter()
        self.warm_step = None
        self.steady = None  # step and time at which the speed measurement begins
        with torch.random.fork_rng(devices=[]), torch.no_grad():  # an edit that the policy lacks fails now
            make_policy(envs, learner.state_dict())(example_input(envs))
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            refuse("run_dir", args.run_dir, f"name a folder that can be written ({error.strerror})")
        packages = [p for p in ("torch", "tensordict", "gymnasium", "envpool", "mujoco", "numpy") if p in sys.modules]
        self.versions = {"python": sys.version.split()[0]} | {p: sys.modules[p].__version__ for p in packages}
        on_cuda = learner.device.type == "cuda"
        self.device_name = torch.cuda.get_device_name(learner.device) if on_cuda else "cpu"
        self.write_config()
        if args.track:
            self.track()
        self.writer = SummaryWriter(folder)
        self.bar = tqdm(total=args.total_timesteps, initial=self.first_step, unit="step", dynamic_ncols=True)

    def write_config(self):
        """Write config.json: every argument, versions, machine, commit."""
        command, here = "git rev-parse HEAD", Path(__file__).parent
        git = subprocess.run(command, shell=True, cwd=here, capture_output=True, text=True)
        machine = {"device": self.device_name, "cores": os.cpu_count(), "git_commit": git.stdout.strip() or None}
        config = vars(self.args) | {"versions": self.versions} | machine
        (self.folder / "config.json").write_text(json.dumps(config, indent=2))

    def track(self):
        """Begin a wandb run that copies the TensorBoard events."""
        import wandb

        names = {"project": self.args.wandb_project_name, "entity": self.args.wandb_entity, "name": self.folder.name}
        try:
            wandb.init(**names, config=vars(self.args), dir=self.folder, sync_tensorboard=True)
        except wandb.errors.Error as error:
            shutil.rmtree(self.folder)
            refuse("track", self.args.track, f"set WANDB_MODE=offline, or mend this: {error}".splitlines()[0])

    def __enter__(self):
        self.previous_handler = signal.signal(signal.SIGINT, self.on_interrupt)
        return self

    def on_interrupt(self, signum, frame):
        self.stop = True  # once the step in flight is done; a second Ctrl-C interrupts at once
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, kind, error, traceback):
        """End the run; SystemExit(130) after Ctrl-C, (1) where numbers were no longer finite. Other errors go on."""
        compiling = self.learner.compile and (self.stage is None or "compiling" in self.stage)
        killed_compiler = self.stop and compiling and isinstance(error, Exception)
        try:
            if killed_compiler:  # Ctrl-C reaches the C++ compiler too
                print(f"note: stopped while compiling: {type(error).__name__}", file=sys.stderr)
                error = None
            if error is None:
                self.finish()
        except NotFinite as not_finite:
            error = not_finite
        finally:
            for closing in (self.envs, self.writer, self.bar):
                closing.close()
            signal.signal(signal.SIGINT, self.previous_handler)
        if isinstance(error, NotFinite):
            print(f"error: {error}", file=sys.stderr)
            self.write_summary(time.perf_counter())
            raise SystemExit(1)
        if self.stop and error is None:
            raise SystemExit(130)

    def advance(self, step, rewards, ended, stage):
        """Count one vector step: move the bar, log the episodes that ended, and time the stage "training"."""
        self.step = step
        self.bar.update(step - self.bar.n)
        if self.stage != stage:
            self.stage = stage
            self.bar.set_description(stage)
        self.returns += rewards
        for i in ended.nonzero()[0]:  # cheaper than np.flatnonzero
            self.end_episode(i)
        if stage == "training" and self.steady is None:
            self.warm_step = self.warm_step or step
            if step >= self.warm_step + self.args.measure_burnin:
                self.steady = (step, time.perf_counter())

    def end_episode(self, i):
        """Log the episode that has ended in environment `i`."""
        self.writer.add_scalar("charts/episodic_return", self.returns[i], self.step)
        self.writer.add_scalar("charts/episodic_length", (self.step - self.begins[i]) // self.args.num_envs, self.step)
        self.last_returns = [*self.last_returns[-19:], float(self.returns[i])]
        self.episodes += 1
        self.returns[i] = 0
        self.begins[i] = self.step
        self.bar.set_postfix({"return": f"{np.mean(self.last_returns):.1f}"} | self.facts, refresh=False)

    def log(self, losses):
        """Write one row of losses, and the average speed so far; NotFinite if a loss is infinite or NaN."""
        for name, value in losses.items():
            self.writer.add_scalar(f"losses/{name}", value, self.step)
        speed = (self.step - self.first_step) / (time.perf_counter() - self.start)
        self.writer.add_scalar("charts/SPS", speed, self.step)
        for name, value in losses.items():
            if name != "explained_variance" and not math.isfinite(value):  # undefined where all returns are equal
                self.refuse_to_go_on(f"{name} is {value}")

    def refuse_to_go_on(self, what):
        """Raise NotFinite that says what is not finite and what is left."""
        checkpoint = self.folder / "checkpoint.pt"
        left = f"{checkpoint} is from before" if checkpoint.exists() else "there is no earlier checkpoint"
        raise NotFinite(f"step {self.step}: {what}; {left}. A lower learning rate may help")

    def save(self):
        """Write checkpoint.pt, which is at every moment either the old one or the new one, whole; returns the state."""
        state = self.learner.state_dict()
        for part, tensors in (state["networks"] | {"normalizer": state.get("normalizer", {})}).items():
            for name, tensor in tensors.items():
                if tensor.isnan().any():
                    self.refuse_to_go_on(f"{part}.{name} holds a NaN")
        checkpoint = {"script": SCRIPT, "args": vars(self.args), "global_step": self.step, "episodes": self.episodes}
        temporary = self.folder / "checkpoint.pt.tmp"
        with open(temporary, "wb") as file:
            torch.save(checkpoint | {"returns": self.last_returns, "learner": state}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.folder / "checkpoint.pt")
        return state

    def finish(self):
        """Write checkpoint, policy and summary of a run that has come to its end in order."""
        if self.learner.device.type == "cuda":
            torch.cuda.synchronize(self.learner.device)
        end = time.perf_counter()
        state = self.save()
        self.write_summary(end)
        try:
            export_policy(make_policy(self.envs, state), self.envs, self.folder / "policy.pt2")
        except Exception as error:  # the run is worth more than its export
            print(f"\nwarning: no policy.pt2, torch.export failed: {error}".split("\n\n")[0], file=sys.stderr)

    def write_summary(self, end):
        """Write summary.json; `end` is when training ended."""
        steady_step, steady_time = self.steady or (self.step, end)
        measured = self.step > steady_step
        summary = {
            "script": SCRIPT,
            "env_id": self.args.env_id,
            "seed": self.args.seed,
            "num_envs": self.args.num_envs,
            "device": self.device_name,
            "compile": self.learner.compile,
            "cudagraphs": self.learner.cudagraphs,
            "matmul_precision": self.args.matmul_precision,
            "global_step": self.step,
            "episodic_return": float(np.mean(self.last_returns)) if self.last_returns else None,
            "episodes": self.episodes,
            "steady_sps": (self.step - steady_step) / (end - steady_time) if measured else None,
            "warmup_seconds": steady_time - self.start if self.steady else None,
            "wall_seconds": end - self.start,
            "versions": self.versions,
        }
        (self.folder / "summary.json").write_text(json.dumps(summary | self.facts, indent=2))


if __name__ == "__main__":
    main()
