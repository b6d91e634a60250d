"""Proximal Policy Optimisation (Schulman et al. 2017, arXiv:1707.06347) for Atari at full speed, in one file.

The algorithm and its defaults are CleanRL's, as in the plain twin, ppo_atari_envpool.py. What makes this file fast:

1. Games are stepped by envpool, in threads (`AtariEnvs`).
2. An environment step costs one copy in, of bytes, and one copy out: the rollout is on the device (`PPO.act`).
3. Sampling is an argmax; actions, log-probabilities and values are written where the update reads them (`PPO.decide`).
4. Generalised advantage estimation is a linear recurrence, solved by doubling in log2(num_steps) rounds (`gae`).
5. Parameters, and so gradients, are one flat vector (`Apply`): clipping and Adam are a few operations.
6. `--compile` makes a graph each of `decide` and of `update_minibatch`: forward, backward, clipping and Adam.
7. `--cudagraphs` replays acting, and all epochs of an iteration, as one CUDA graph each (`respond`, `iterate`).
8. Memory that an update has freed is kept for the next one (`keep_freed_memory`).

    python leanrl/ppo_atari_envpool_torchcompile.py --env-id Breakout-v5 --compile --cudagraphs
"""

import ctypes
import difflib
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
THREADS = 0
GRAPH_WARMUP = 3  # the call that captures a CUDA graph; compilation is over by then
BETA1, BETA2, EPS = 0.9, 0.999, 1e-5  # Adam's
DECISIONS = {"actions": (), "log_prob": (), "values": ()}  # columns and their shapes: of each step, what was decided,
OUTCOMES = {"rewards": (), "terminated": (), "ended": (), "valid": ()}  # what that led to,
BATCH = DECISIONS | {"advantages": (), "returns": (), "valid": ()}  # and what is learnt from
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
    env_id: str = "Breakout-v5"
    """Atari game, by envpool's name"""
    total_timesteps: int = 10_000_000
    """environment steps (transitions) of the whole run, each of four frames"""
    num_envs: int = 8
    """games that step together, one transition each"""
    double_buffer: bool = False
    """step half of the games while the actions of the other half are computed"""


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
    learning_rate: float = 2.5e-4
    """learning rate of the first iteration"""
    num_steps: int = 128
    """steps of each environment in an iteration"""
    anneal_lr: bool = True
    """lower the learning rate linearly, towards 0 at the end of the run"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of generalised advantage estimation"""
    num_minibatches: int = 4
    """minibatches in an epoch"""
    update_epochs: int = 4
    """passes over an iteration's transitions"""
    norm_adv: bool = True
    """normalise advantages to mean 0 and variance 1 in each minibatch"""
    clip_coef: float = 0.1
    """how far the probability ratio may be from 1 (epsilon in the paper)"""
    clip_vloss: bool = True
    """clip the change of the values by --clip-coef too"""
    ent_coef: float = 0.01
    """coefficient of the entropy in the loss"""
    init_entropy: Literal["default", "max"] = "default"
    """max: begin with a policy whose actions have the entropy of uniformly random ones"""
    vf_coef: float = 0.5
    """coefficient of the value loss"""
    max_grad_norm: float = 0.5
    """largest norm of a gradient, which is scaled down to it"""
    target_kl: float | None = None
    """end an iteration's updates after the epoch in which the approximate KL divergence exceeds this"""


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
    "num_envs": (1, 256),
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


def orthogonal(layer, gain=2**0.5):
    """The layer, with orthogonal weights and no bias at first."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class AtariAgent(nn.Module):
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
        """Logits of the actions, (batch, num_actions), and values, (batch,), of obs, (batch, 4, 84, 84), in bytes."""
        features = self.features(obs / 255)
        return self.actor(features), self.critic(features).squeeze(-1)


class Policy(nn.Module):
    """What `--evaluate` plays and policy.pt2 holds: the greedy policy, (batch, 4, 84, 84), bytes, to (batch,)."""

    def __init__(self, agent):
        super().__init__()
        self.agent = agent

    def forward(self, obs):
        logits, _ = self.agent(obs)
        return logits.argmax(-1)


def make_policy(envs, state):
    """The deterministic policy of a learner's `state_dict`, on the CPU."""
    agent = AtariAgent(int(envs.single_action_space.n))
    agent.load_state_dict(state["networks"]["agent"])
    return Policy(agent).eval()


# ---------------------------------------------------------------------------------------------------------------------
# The learner
# ---------------------------------------------------------------------------------------------------------------------


def make_pool(args, num_envs, seed, **settings):
    """envpool's games --env-id, stepped in threads; `settings` are envpool's."""
    try:
        import envpool
        from envpool.registration import registry
    except ImportError as error:
        refuse("env_id", args.env_id, f"pip install envpool, which has the games ({error})")
    games = [game for game, (module, *_) in registry.specs.items() if module == "envpool.atari"]
    if args.env_id not in games:
        nearest = difflib.get_close_matches(args.env_id, games, cutoff=0.0)
        refuse("env_id", args.env_id, f"name a game that envpool has, such as {', '.join(nearest)}")
    seed %= 2**31  # envpool's limit
    return envpool.make(args.env_id, env_type="gymnasium", num_envs=num_envs, seed=seed, **settings)


class AtariEnvs(gym.vector.VectorEnv):
    """Atari games in envpool. Observations are the newest four frames, (num_envs, 4, 84, 84), in bytes.

    An episode is a life, with rewards of -1, 0 or 1, or with `whole_games` a game with the game's rewards. It starts in
    the step after the end of the one before: that step ignores its action, so nothing can be learnt from it.
    """

    def __init__(self, args, num_envs, seed, video_dir=None, whole_games=False):
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_fps": 15}
        self.num_envs = num_envs
        settings = {"episodic_life": not whole_games, "reward_clip": not whole_games}
        self.render_mode = "rgb_array" if video_dir else None
        self.pool = make_pool(args, num_envs, seed, render_mode=self.render_mode, **settings)
        self.single_observation_space = self.pool.observation_space
        self.single_action_space = self.pool.action_space
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.ended = np.zeros(num_envs, bool)

    def reset(self, *, seed=None, options=None):
        """First observations and no infos; the seed was given when this was made."""
        obs, _ = self.pool.reset()
        return obs, {}

    def send(self, actions):
        """Begin a step, which envpool's threads make."""
        self.pool.send(actions.astype(np.int32))

    def step(self, actions):
        """As any vector environment, for actions (num_envs,), or None in a step that `send` has begun.

        Infos, each (num_envs,), are raw_rewards: the game's; game_ended: by a game over or its time limit; is_reset:
        the step has ignored the action and has started an episode.
        """
        if actions is not None:
            self.send(actions)
        obs, rewards, terminated, truncated, infos = self.pool.recv()
        game_over = infos["terminated"].astype(bool)
        game_ended = game_over | truncated
        terminated = terminated | game_over  # a game over in the last step that is allowed is called truncated
        truncated = truncated & ~terminated
        is_reset = self.ended
        self.ended = terminated | truncated
        infos = {"raw_rewards": infos["reward"], "game_ended": game_ended, "is_reset": is_reset}
        return obs, rewards, terminated, truncated, infos

    def render(self):
        """A frame of each game in colour, as it is on the screen."""
        return list(self.pool.render(env_ids=np.arange(self.num_envs)))


def make_games(args, num_envs, seed, video_dir=None, **settings):
    """AtariEnvs; `video_dir` receives mp4s of episodes of the first one."""
    envs = AtariEnvs(args, num_envs, seed, video_dir, **settings)
    if not video_dir:
        return envs
    try:
        return gym.wrappers.vector.RecordVideo(envs, str(video_dir), record_first_only=True)
    except OSError as error:
        refuse("run_dir", args.run_dir, f"name a folder that can be written ({error.strerror})")
    except gym.error.Error as error:
        refuse("capture_video", args.capture_video, f"install what is missing: {error}")


def masked_mean(values, valid):
    """The mean of those of `values`, (batch,), for which `valid`, (batch,), is 1; 0 if there is none."""
    return (values * valid).sum() / valid.sum().clamp(min=1)


def masked_variance(values, valid):
    """The unbiased variance of those of `values`, (batch,), for which `valid` is 1; 0 if there are fewer than two."""
    squares = (values - masked_mean(values, valid)).square()
    return (squares * valid).sum() / (valid.sum() - 1).clamp(min=1)


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


def keep_freed_memory():
    """Let glibc keep the memory of tensors that are freed, for the next ones, so that Linux need not clear it again.

    It returns large pieces at once otherwise: on a CPU a third of a compiled update of SAC's goes into clearing pages.
    """
    glibc = ctypes.CDLL(None)
    trim_threshold, mmap_threshold = -1, -3  # as malloc.h numbers these settings
    if hasattr(glibc, "mallopt"):
        glibc.mallopt(trim_threshold, -1)
        glibc.mallopt(mmap_threshold, 2**25)  # the most that it takes, more than a tensor of an update needs


class HostEvent:
    """What a torch.cuda.Event is on a CPU, which has done everything when a call returns."""

    def record(self):
        pass

    def synchronize(self):
        pass


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
    """The learner. What its graphs read or change are tensors, updated in place: they replay kernels, not Python.

    `envs` are one group of games: all of them, or with --double-buffer half.
    """

    def __init__(self, args, envs, device):
        self.args = args
        self.device = device
        self.on_cuda = device.type == "cuda"
        self.compile = args.compile
        self.cudagraphs = args.cudagraphs and self.on_cuda
        self.group_size = envs.num_envs
        self.num_groups = args.num_envs // self.group_size
        self.num_actions = int(envs.single_action_space.n)

        with device:
            self.agent = Apply(AtariAgent(self.num_actions))
        if args.init_entropy == "max":
            nn.init.zeros_(self.agent.network.actor.weight)
        self.weights = self.agent.flatten()
        self.learning_rate = torch.tensor(args.learning_rate, device=device)
        self.optimizers = {"agent": Adam(self.weights, self.learning_rate)}
        self.scalars = Scalars(device)
        self.updates = 0
        self.warmup_updates = GRAPH_WARMUP if self.cudagraphs else 1

        # slot t * num_groups + g is step t of group g: so (slots, group_size) can be read as (num_steps, num_envs)
        slots = args.num_steps * self.num_groups
        obs_shape = (slots + self.num_groups, self.group_size, *envs.single_observation_space.shape)
        self.host_obs = torch.zeros(obs_shape, dtype=torch.uint8, pin_memory=self.on_cuda)
        self.obs = self.host_obs.to(device)  # on a CPU the same memory
        self.host_outcomes = torch.zeros(slots, self.group_size, len(OUTCOMES), pin_memory=self.on_cuda)
        self.outcomes = self.host_outcomes.to(device)  # on a CPU the same memory
        self.host_actions = torch.zeros(self.group_size, dtype=torch.int64, pin_memory=self.on_cuda)
        self.actions = self.host_actions.to(device)  # on a CPU the same memory
        self.actions_ready = torch.cuda.Event() if self.on_cuda else HostEvent()
        self.slot = torch.zeros(1, dtype=torch.int64, device=device)  # in which to decide
        self.decisions = torch.zeros(slots, self.group_size, len(DECISIONS), device=device)
        self.batch = torch.zeros(args.num_steps * args.num_envs, len(BATCH), device=device)
        self.layout = torch.contiguous_format if self.on_cuda else torch.channels_last  # as is faster on a CPU
        self.apply_compile_and_cudagraphs()

    def apply_compile_and_cudagraphs(self):
        """The one place where functions are compiled and graphed."""
        if self.compile:
            stay_in_place(self, *self.optimizers.values())
            for name in ("decide", "update_minibatch"):
                setattr(self, name, compiled(getattr(self, name), self.args.compile_mode))
        if self.cudagraphs:  # with --target-kl the host looks at the KL divergence between epochs
            updates = ("iterate",) if self.args.target_kl is None else ("make_batch", "learn_epoch")
            for name in ("respond", *updates):
                setattr(self, name, CudaGraphModule(getattr(self, name), warmup=GRAPH_WARMUP))

    def decide(self, clocks):
        """Sample actions for the observations in slot `slot`, and go on to the next one.

        `clocks`, (group_size, num_actions), are exponential: of independent ones with rates p, the i-th is the first to
        ring with probability p_i.
        """
        obs = self.obs.index_select(0, self.slot).squeeze(0)
        logits, values = self.agent(self.weights, obs)
        log_probs = logits.log_softmax(-1)
        actions = (log_probs - clocks.log()).argmax(-1)
        log_prob = log_probs.gather(-1, actions[:, None]).squeeze(-1)
        decisions = torch.stack((actions.float(), log_prob, values), -1)
        self.decisions.index_copy_(0, self.slot, decisions[None])
        self.actions.copy_(actions)
        self.slot.add_(1)

    def respond(self):
        """What a CUDA graph replays for `act`: random numbers have to be drawn inside."""
        self.decide(torch.empty(self.group_size, self.num_actions, device=self.device).exponential_())

    def loss(self, weights, obs, columns):
        """Policy loss (equation 7), value loss, entropy, and the log of the probability ratio, (batch,).

        `obs`, (batch, 4, 84, 84), are bytes, `columns`, each (batch,), those that BATCH names.
        """
        clip = self.args.clip_coef
        valid = columns["valid"]
        logits, values = self.agent(weights, obs)
        log_probs = logits.log_softmax(-1)
        log_prob = log_probs.gather(-1, columns["actions"].long()[:, None]).squeeze(-1)
        log_ratio = log_prob - columns["log_prob"]
        ratio = log_ratio.exp()
        advantages = columns["advantages"]
        if self.args.norm_adv:
            deviation = masked_variance(advantages, valid).sqrt()
            advantages = (advantages - masked_mean(advantages, valid)) / (deviation + 1e-8)
        gains = torch.min(advantages * ratio, advantages * ratio.clamp(1 - clip, 1 + clip))
        errors = (values - columns["returns"]).square()
        if self.args.clip_vloss:
            clipped = columns["values"] + (values - columns["values"]).clamp(-clip, clip)
            errors = torch.max(errors, (clipped - columns["returns"]).square())
        policy_loss = -masked_mean(gains, valid)
        value_loss = 0.5 * masked_mean(errors, valid)
        entropy = masked_mean(-(log_probs.exp() * log_probs).sum(-1), valid)
        return policy_loss, value_loss, entropy, log_ratio

    def update_minibatch(self, rows):
        """One step of Adam on the loss of the transitions `rows`, (minibatch,); returns losses from before, by name."""
        obs = self.obs.flatten(0, 1).index_select(0, rows).contiguous(memory_format=self.layout)
        columns = split_columns(self.batch.index_select(0, rows), BATCH)
        weights = self.weights.detach().requires_grad_()
        policy_loss, value_loss, entropy, log_ratio = self.loss(weights, obs, columns)
        loss = policy_loss - self.args.ent_coef * entropy + self.args.vf_coef * value_loss
        (gradient,) = torch.autograd.grad(loss, weights)
        grad_norm = gradient.norm()
        scale = (self.args.max_grad_norm / (grad_norm + 1e-6)).clamp(max=1)
        self.optimizers["agent"].step(self.weights, gradient * scale)
        log_ratio = log_ratio.detach()
        ratio = log_ratio.exp()
        return {
            "policy_loss": policy_loss.detach(),
            "value_loss": value_loss.detach(),
            "entropy": entropy.detach(),
            "approx_kl": masked_mean(ratio - 1 - log_ratio, columns["valid"]),
            "clipfrac": masked_mean(((ratio - 1).abs() > self.args.clip_coef).float(), columns["valid"]),
            "grad_norm": grad_norm,
        }

    def make_batch(self):
        """Make `batch`, one row per transition of the rollout: the columns that BATCH names.

        A step leads to the observation of the next step, also at an episode's end: only that step starts the next one.
        """
        steps = (self.args.num_steps, self.args.num_envs, -1)
        columns = split_columns(self.decisions.view(steps), DECISIONS)
        columns |= split_columns(self.outcomes.view(steps), OUTCOMES)
        values = columns["values"]
        _, last_values = self.agent(self.weights, self.obs[-self.num_groups :].flatten(0, 1))
        next_values = torch.cat((values[1:], last_values[None]))
        outcomes = (columns["rewards"], values, next_values, columns["terminated"], columns["ended"])
        columns["advantages"] = gae(*outcomes, self.args.gamma, self.args.gae_lambda)
        columns["returns"] = columns["advantages"] + values
        batch = torch.stack([columns[name] for name in BATCH], -1)
        self.batch.copy_(batch.flatten(0, 1))

    def learn_epoch(self):
        """All of `batch` once, in minibatches drawn without replacement."""
        order = torch.rand(len(self.batch), device=self.device).argsort()
        losses = [self.update_minibatch(rows) for rows in order.chunk(self.args.num_minibatches)]
        self.scalars.keep(**{name: torch.stack([values[name] for values in losses]).mean() for name in losses[0]})

    def measure(self):
        """How much of the returns' variance the values explained, with which the actions were chosen."""
        columns = split_columns(self.batch, BATCH)
        errors = masked_variance(columns["advantages"], columns["valid"])  # of returns less values
        self.scalars.keep(explained_variance=1 - errors / masked_variance(columns["returns"], columns["valid"]))

    def iterate(self):
        """All epochs over a rollout, fewer if the KL divergence exceeds --target-kl."""
        self.make_batch()
        self.measure()
        for _ in range(self.args.update_epochs):
            self.learn_epoch()
            if self.args.target_kl is not None and self.losses()["approx_kl"] > self.args.target_kl:
                break

    def write(self, slot, obs):
        """Copy `obs`, numpy, (group_size, 4, 84, 84), to a slot of the rollout."""
        self.host_obs.numpy()[slot] = obs
        self.obs[slot].copy_(self.host_obs[slot], non_blocking=True)

    def act(self, slot, obs):
        """Sample actions for `obs`, (group_size, 4, 84, 84), the next slot's: (group_size,); both numpy.

        Slots come in order from 0, and the device counts along.
        """
        self.write(slot, obs)
        if slot == 0:
            self.slot.zero_()
        self.respond()
        self.host_actions.copy_(self.actions, non_blocking=True)
        self.actions_ready.record()
        self.actions_ready.synchronize()
        return self.host_actions.numpy().copy()  # envs may keep it, and the next ones are written there

    def record(self, slot, rewards, terminated, truncated, is_reset):
        """Store what a slot's actions led to, all (group_size,), as `AtariEnvs.step` returns it."""
        outcomes = (rewards, terminated, terminated | truncated, ~is_reset)
        np.stack(outcomes, -1, self.host_outcomes[slot].numpy(), casting="unsafe")

    def update(self, learning_rate, last_obs):
        """Learn from the rollout; `last_obs`, (num_envs, 4, 84, 84), are those to which its last step led."""
        self.learning_rate.fill_(learning_rate)
        for slot, obs in enumerate(np.split(last_obs, self.num_groups), start=len(self.decisions)):
            self.write(slot, obs)
        self.outcomes.copy_(self.host_outcomes, non_blocking=True)
        self.iterate()
        self.updates += 1

    @property
    def stage(self):
        """What the next update does, in a word or two: "training" once compiled and captured."""
        if self.updates >= self.warmup_updates:
            return "training"
        return " and ".join(["compiling"] * self.compile + ["capturing"] * self.cudagraphs) or "warming up"

    def losses(self):
        """Losses and statistics of the last update's last epoch, by name; waits for that update."""
        return self.scalars.fetch()

    def tensors(self):
        """All that learning changes: the tensors themselves."""
        return {
            "networks": {"agent": self.agent.state_dict(self.weights)},
            "optimizers": {name: optimizer.tensors() for name, optimizer in self.optimizers.items()},
        }

    def state_dict(self):
        """Copies, on the CPU, of all that `load_state_dict` needs to continue bit by bit, random numbers included."""
        return to_cpu(self.tensors()) | {"updates": self.updates} | rng_state(self.device)

    def load_state_dict(self, state):
        """Become the learner that `state` was taken from."""
        tensors = self.tensors()
        fill(tensors, {name: state[name] for name in tensors})
        self.updates = state["updates"]
        self.warmup_updates += self.updates
        set_rng_state(state, self.device)


# ---------------------------------------------------------------------------------------------------------------------
# Training and evaluation
# ---------------------------------------------------------------------------------------------------------------------


def check_minibatches(args):
    """Refuse minibatches of unequal size, and advantages normalised over a single one."""
    batch = args.num_envs * args.num_steps
    if batch % args.num_minibatches or (args.norm_adv and batch == args.num_minibatches):
        refuse("num_minibatches", args.num_minibatches, f"give a divisor of num_envs * num_steps, {batch}, below it")


def check_double_buffer(args):
    """Refuse halves of an odd number of games."""
    if args.double_buffer and args.num_envs % 2:
        refuse("num_envs", args.num_envs, "give an even number, or leave out --double-buffer")


def make_groups(args, seed, video_dir=None):
    """A list of all games, or with --double-buffer of two halves of the same games; `video_dir` is for the first."""
    if not args.double_buffer:
        return [make_games(args, args.num_envs, seed, video_dir)]
    half = args.num_envs // 2
    return [make_games(args, half, seed, video_dir), make_games(args, half, seed + half)]  # envpool counts seeds up


def roll_out(learner, groups, obs):
    """Play a rollout from `obs`, a list of each group's observations, which is updated in place.

    Yields, after each step, the games' own rewards and which games have ended, (num_envs,) both. The games of one group
    are stepped while the host is busy with the other group, or with what the step has brought.
    """
    for t in range(learner.args.num_steps + 1):
        rewards, ended = [], []
        for group, envs in enumerate(groups):
            slot = t * len(groups) + group
            if t > 0:
                obs[group], *outcomes, infos = envs.step(None)
                learner.record(slot - len(groups), *outcomes, infos["is_reset"])
                rewards.append(infos["raw_rewards"])
                ended.append(infos["game_ended"])
            if t < learner.args.num_steps:
                # a wrapper that records videos has no `send`
                envs.unwrapped.send(learner.act(slot, obs[group]))
        if t > 0:
            yield np.concatenate(rewards), np.concatenate(ended)


def train(args, on_log=lambda learner, losses, step: None, on_start=lambda run: None):
    """Train; SystemExit(2) on bad arguments, (130) on Ctrl-C.

    For tools: `on_start(run)` is called once, `on_log(learner, losses, step)` before each log.
    """
    keep_freed_memory()
    device = prepare(args)
    check_minibatches(args)
    check_double_buffer(args)
    checkpoint = load_resumed(args)
    step = checkpoint["global_step"]
    folder = run_folder(args)
    groups = make_groups(args, args.seed + step, folder / "videos" if args.capture_video else None)
    obs = [envs.reset()[0] for envs in groups]
    learner = PPO(args, groups[0], device)
    restore(args, learner, checkpoint)
    with Run(args, learner, groups[0], folder, checkpoint) as run:
        on_start(run)
        while step < args.total_timesteps and not run.stop:
            learning_rate = args.learning_rate
            if args.anneal_lr:
                learning_rate *= 1 - step / args.total_timesteps
            for rewards, ended in roll_out(learner, groups, obs):
                step += args.num_envs
                run.advance(step, rewards, ended, learner.stage)
                if run.stop:
                    break
            else:  # the rollout is complete
                learner.update(learning_rate, np.concatenate(obs))
                losses = learner.losses()
                on_log(learner, losses, step)
                run.log(losses)
                if args.checkpoint_interval and step % args.checkpoint_interval < args.num_envs * args.num_steps:
                    run.save()


def evaluation_envs(args, video_dir=None):
    """One game to play to its end, for its own rewards; `video_dir` receives mp4s."""
    return make_games(args, 1, args.seed, video_dir, whole_games=True)


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
