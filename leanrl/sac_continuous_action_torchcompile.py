"""Soft Actor-Critic (Haarnoja et al. 2018, arXiv:1812.05905) at full speed, in one file.

The algorithm and its defaults are CleanRL's, as in the plain twin, sac_continuous_action.py. What makes this file fast:

1. Parameters, and so gradients, are one flat vector for each kind of network (`Apply`): Adam is a few operations.
2. The critics run together, as one batched matmul per layer (`Apply.__call__`), without gradients in the actor's loss.
3. The replay buffer is on the device; an environment step costs one copy in and one copy out (`SAC.observe`).
4. `--compile` makes a graph each of `store_and_act`, `update_critics` and `update_actor`, from replay to target update.
5. `--cudagraphs` replays `respond` and `learn` as CUDA graphs, one launch each per environment step.
6. The environment steps while the device updates (`train`): the host waits for actions, never for updates.

    python leanrl/sac_continuous_action_torchcompile.py --env-id HalfCheetah-v5 --compile --cudagraphs
"""

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
from tensordict.nn import CudaGraphModule
from torch import nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT = Path(__file__).stem
THREADS = 0
LOG_INTERVAL = 100  # vector steps between two logs of the losses
GRAPH_WARMUP = 3  # the call that captures a CUDA graph; compilation is over by then
NUM_CRITICS = 2
LOG_STD_MIN = -5.0
LOG_STD_MAX = 2.0
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8  # Adam's
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
    critic_compile_mode: CompileMode | None = None
    """torch.compile's mode for the critics' update (by default --compile-mode)"""


@dataclass
class AlgorithmArgs:
    updates_per_step: int = 1
    """updates after each step of all environments"""
    buffer_size: int = 1_000_000
    """transitions in the replay buffer"""
    gamma: float = 0.99
    """discount factor"""
    tau: float = 0.005
    """how far a target network update moves towards the critics"""
    batch_size: int = 256
    """transitions in an update"""
    learning_starts: int = 5_000
    """environment steps with uniformly random actions, before the first update"""
    policy_lr: float = 3e-4
    """learning rate of the actor"""
    q_lr: float = 1e-3
    """learning rate of the critics and of the entropy coefficient"""
    policy_frequency: int = 2
    """updates from one actor turn to the next; a turn makes up for the delay with as many actor updates"""
    target_network_frequency: int = 1
    """updates from one target network update to the next"""
    alpha: float = 0.2
    """entropy coefficient with --no-autotune"""
    autotune: bool = True
    """tune the entropy coefficient, towards an entropy of minus the number of action dimensions"""
    init_entropy: Literal["default", "max"] = "default"
    """max: begin with a policy whose actions have the entropy of uniformly random ones"""


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
    "updates_per_step": (1, 1e12),
    "buffer_size": (1, 1e12),
    "gamma": (0, 1),
    "tau": (0, 1),
    "batch_size": (1, 1e12),
    "learning_starts": (0, 1e12),
    "policy_lr": (1e-12, 1),
    "q_lr": (1e-12, 1),
    "policy_frequency": (1, 1e12),
    "target_network_frequency": (1, 1e12),
    "alpha": (0, 1e12),
}
STRUCTURAL = ("env_id", "buffer_size")  # flags that cannot change when a checkpoint is used


# ---------------------------------------------------------------------------------------------------------------------
# Networks
# ---------------------------------------------------------------------------------------------------------------------


class Critic(nn.Module):
    """Q(s, a): (batch, obs_dim) and (batch, act_dim) to (batch,)."""

    def __init__(self, obs_dim, act_dim):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(obs_dim + act_dim, 256),
            nn.ReLU(),
            nn.Linear(256, 256),
            nn.ReLU(),
            nn.Linear(256, 1),
        )

    def forward(self, obs, actions):
        return self.net(torch.cat((obs, actions), -1)).squeeze(-1)


class Actor(nn.Module):
    """A Gaussian, squashed by tanh into the bounds of the action space (appendix C)."""

    def __init__(self, obs_dim, action_space):
        super().__init__()
        act_dim = action_space.shape[0]
        self.net = nn.Sequential(
            nn.Linear(obs_dim, 256),
            nn.ReLU(),
            nn.Linear(256, 256),
            nn.ReLU(),
            nn.Linear(256, 2 * act_dim),
        )
        low, high = inner_bounds(action_space)
        self.register_buffer("low", torch.tensor(low))
        self.register_buffer("high", torch.tensor(high))
        self.register_buffer("scale", torch.tensor((high - low) / 2))
        self.register_buffer("bias", torch.tensor((high + low) / 2))

    def forward(self, obs):
        """Mean and log standard deviation of the Gaussian before tanh, each (batch, act_dim)."""
        mean, log_std = self.net(obs).chunk(2, -1)
        return mean, LOG_STD_MIN + (LOG_STD_MAX - LOG_STD_MIN) / 2 * (log_std.tanh() + 1)

    def squash(self, mean, log_std, noise):
        """Actions in the environment's units, (batch, act_dim), and their log-probabilities, (batch,)."""
        squashed = (mean + log_std.exp() * noise).tanh()
        log_prob = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        log_prob = log_prob - (self.scale * (1 - squashed.square()) + 1e-6).log()
        actions = squashed * self.scale + self.bias
        return actions.clamp(self.low, self.high), log_prob.sum(-1)  # where tanh is 1, rounding can cross a bound

    def become_uniform(self):
        """Ignore observations at first, and spread actions: to an entropy per dimension 0.01 below the largest."""
        head = self.net[-1]
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        head.bias.data[len(self.scale) :] = 0.412  # of all Gaussians that of deviation 0.87 is flattest after tanh


def inner_bounds(action_space):
    """The bounds in float32; those in float64 may lie between two such numbers, and then the inner one counts."""
    low = action_space.low.astype(np.float32)
    high = action_space.high.astype(np.float32)
    inner_low = np.where(low < action_space.low, np.nextafter(low, high), low)
    inner_high = np.where(high > action_space.high, np.nextafter(high, low), high)
    return inner_low, inner_high


class Policy(nn.Module):
    """What `--evaluate` plays and policy.pt2 holds: the mode of the policy, (batch, obs_dim) to (batch, act_dim)."""

    def __init__(self, actor):
        super().__init__()
        self.actor = actor

    def forward(self, obs):
        mean, _ = self.actor(obs)
        actions, _ = self.actor.squash(mean, torch.zeros_like(mean), torch.zeros_like(mean))
        return actions


def make_policy(envs, state):
    """The deterministic policy of a learner's `state_dict`, on the CPU."""
    actor = Actor(envs.single_observation_space.shape[0], envs.single_action_space)
    actor.load_state_dict(state["networks"]["actor"])
    return Policy(actor).eval()


# ---------------------------------------------------------------------------------------------------------------------
# The learner
# ---------------------------------------------------------------------------------------------------------------------


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


def split_columns(rows, shapes):
    """Views by name of `rows`, (..., width), each row of which holds one entry of each of `shapes`, side by side."""
    pieces = rows.split([math.prod(shape) for shape in shapes.values()], -1)
    return {name: x.view(*x.shape[:-1], *shapes[name]) for name, x in zip(shapes, pieces, strict=True)}


class DeviceReplayBuffer:
    """Transitions on the device, one row each; the newest overwrite the oldest. Writing and sampling never wait."""

    def __init__(self, size, shapes, device, spare):
        """`shapes` are those of a transition's columns by name; as many as `spare` rows can be written at once."""
        self.size = size
        self.shapes = shapes
        self.width = sum(math.prod(shape) for shape in shapes.values())
        self.rows = torch.empty(size + spare, self.width, device=device)
        self.stored = torch.zeros((), dtype=torch.int64, device=device)  # transitions ever

    def pack(self, columns, rows):
        """Write columns by name, numpy, (n, ...), side by side into `rows`, numpy, (n, width)."""
        ordered = [columns[name].reshape(len(rows), -1) for name in self.shapes]
        np.concatenate(ordered, 1, rows, casting="unsafe")

    def write(self, rows, count):
        """Store the first `count` of `rows`, (n, width); the others land behind the ring, where nobody reads."""
        i = torch.arange(len(rows), device=rows.device)
        place = torch.where(i < count, (self.stored + i) % self.size, self.size + i)
        self.rows.index_copy_(0, place, rows)
        self.stored.add_(count)

    def sample(self, uniform):
        """Columns by name, (batch, ...), of the rows that `uniform`, (batch,) from [0, 1), draws from those filled."""
        rows = self.rows.index_select(0, (uniform * self.stored.clamp(max=self.size)).long())
        return split_columns(rows, self.shapes)

    def state_dict(self):
        """Copies, on the CPU, of what is filled and of the count."""
        filled = min(int(self.stored), self.size)
        return {"rows": self.rows[:filled].to("cpu", copy=True), "stored": self.stored.to("cpu", copy=True)}

    def load_state_dict(self, state):
        """Take over `state_dict`'s transitions."""
        self.rows[: len(state["rows"])] = state["rows"].to(self.rows.device)
        self.stored.copy_(state["stored"])


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


class SAC:
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

        with device:
            self.actor = Apply(Actor(self.obs_dim, envs.single_action_space))
            self.critics = Apply(nn.ModuleList([Critic(self.obs_dim, self.act_dim) for _ in range(NUM_CRITICS)]))
        if args.init_entropy == "max":
            self.actor.network.become_uniform()
        self.squash = self.actor.network.squash  # outside of `Apply`: a parameter in it would get no gradient
        self.actor_weights = self.actor.flatten()
        self.critic_weights = self.critics.flatten()
        self.target_weights = self.critic_weights.clone()
        self.log_alpha = torch.tensor(1.0 if args.autotune else args.alpha, device=device).log()
        self.optimizers = {
            "actor": Adam(self.actor_weights, args.policy_lr),
            "critics": Adam(self.critic_weights, args.q_lr),
            "alpha": Adam(self.log_alpha, args.q_lr),
        }
        self.scalars = Scalars(device)
        self.updates = 0
        # a CUDA graph for each kind of update: every kind has to come up as often as warm-up and capture need it
        self.warmup_updates = GRAPH_WARMUP * math.lcm(args.policy_frequency, args.target_network_frequency)

        shapes = {"obs": (self.obs_dim,), "next_obs": (self.obs_dim,), "actions": (self.act_dim,)}
        shapes |= {"rewards": (), "terminated": ()}
        self.replay = DeviceReplayBuffer(args.buffer_size, shapes, device, spare=self.num_envs)
        self.host_inbox = torch.zeros(self.num_envs, self.replay.width + self.obs_dim, pin_memory=self.on_cuda)
        self.host_actions = torch.zeros(self.num_envs, self.act_dim, pin_memory=self.on_cuda)
        self.inbox = self.host_inbox.to(device)  # on a CPU the same memory
        self.actions = self.host_actions.to(device)  # so are these
        self.actions_ready = torch.cuda.Event() if self.on_cuda else HostEvent()
        self.apply_compile_and_cudagraphs()

    def apply_compile_and_cudagraphs(self):
        """The one place where functions are compiled and graphed."""
        kinds = [(actor_turn, target_turn) for actor_turn in (False, True) for target_turn in (False, True)]
        self.learn_on = {kind: partial(self.learn, *kind) for kind in kinds}
        if self.compile:
            stay_in_place(self, self.replay, *self.optimizers.values())
            self.store_and_act = compiled(self.store_and_act, self.args.compile_mode)
            self.update_critics = compiled(self.update_critics, self.args.critic_compile_mode or self.args.compile_mode)
            self.update_actor = compiled(self.update_actor, self.args.compile_mode)
        if self.cudagraphs:
            self.respond = CudaGraphModule(self.respond, warmup=GRAPH_WARMUP)
            self.learn_on = {turns: CudaGraphModule(f, warmup=GRAPH_WARMUP) for turns, f in self.learn_on.items()}

    def noise(self, *leading):
        """Standard normal noise for batches of actions: (*leading, batch, act_dim)."""
        return torch.randn(*leading, self.args.batch_size, self.act_dim, device=self.device)

    def uniform(self):
        """Numbers from [0, 1) that choose a batch's rows; in float64, since float32 would skip some of a million."""
        return torch.rand(self.args.batch_size, dtype=torch.float64, device=self.device)

    def update_critics(self, target_turn, uniform, noise):
        """Equation 5 for the rows that `uniform`, (batch,), draws, with next actions by `noise`, (batch, act_dim).

        Returns the rows' observations, (batch, obs_dim), and losses.
        """
        batch = self.replay.sample(uniform)
        obs, next_obs = batch["obs"], batch["next_obs"]
        with torch.no_grad():
            next_actions, next_log_prob = self.squash(*self.actor(self.actor_weights, next_obs), noise)
            next_q = self.critics(self.target_weights, next_obs, next_actions).amin(0)
            next_v = next_q - self.log_alpha.exp() * next_log_prob
            target = batch["rewards"] + (1 - batch["terminated"]) * self.args.gamma * next_v

        weights = self.critic_weights.detach().requires_grad_()
        q = self.critics(weights, obs, batch["actions"])
        loss = (q - target).square().mean(-1).sum()
        (gradient,) = torch.autograd.grad(loss, weights)
        self.optimizers["critics"].step(self.critic_weights, gradient)
        if target_turn:
            self.target_weights.lerp_(self.critic_weights, self.args.tau)
        losses = {f"qf{i + 1}_values": values for i, values in enumerate(q.detach().mean(-1))}
        return obs, losses | {"qf_loss": loss.detach()}

    def update_actor(self, obs, noises):
        """Equation 7, then equation 18 with the new actor, for obs (batch, obs_dim); returns losses.

        `noises`, (turns, 2, batch, act_dim), are for the actor and for the temperature.
        """
        weights = self.actor_weights.detach().requires_grad_()
        mean, log_std = self.actor(weights, obs)
        for noise, alpha_noise in noises:
            alpha = self.log_alpha.exp()
            actions, log_prob = self.squash(mean, log_std, noise)
            loss = (alpha * log_prob - self.critics(self.critic_weights, obs, actions).amin(0)).mean()
            (gradient,) = torch.autograd.grad(loss, weights)
            self.optimizers["actor"].step(self.actor_weights, gradient)
            weights = self.actor_weights.detach().requires_grad_()
            mean, log_std = self.actor(weights, obs)  # for the temperature and for the next actor step
            losses = {"actor_loss": loss.detach(), "entropy": -log_prob.detach().mean()}
            if self.args.autotune:
                _, log_prob = self.squash(mean.detach(), log_std.detach(), alpha_noise)
                alpha_loss = -alpha * (log_prob - self.act_dim).mean()
                self.optimizers["alpha"].step(self.log_alpha, alpha_loss)  # d exp(x) / dx = exp(x): its own gradient
                losses["alpha_loss"] = alpha_loss
        return losses | {"alpha": self.log_alpha.exp()}

    def learn(self, actor_turn, target_turn):
        """One update, on the device from beginning to end. Random numbers are drawn here, outside of what is compiled,
        so that all modes see the same ones, and inside of what a CUDA graph replays, so that they are fresh each time.
        """
        obs, losses = self.update_critics(target_turn, self.uniform(), self.noise())
        self.scalars.keep(**losses)
        if actor_turn:
            noises = self.noise(self.args.policy_frequency, 2)
            self.scalars.keep(**self.update_actor(obs, noises))

    def update(self):
        """Launch one update; on CUDA it still runs when this returns."""
        actor_turn = self.updates % self.args.policy_frequency == 0
        target_turn = self.updates % self.args.target_network_frequency == 0
        self.learn_on[actor_turn, target_turn]()
        self.updates += 1

    def store_and_act(self, noise):
        """Store the transitions in `inbox`; sample actions for the obs behind them by `noise`, (num_envs, act_dim)."""
        rows, obs = self.inbox.split((self.replay.width, self.obs_dim), -1)
        self.replay.write(rows, self.num_envs)
        actions, _ = self.squash(*self.actor(self.actor_weights, obs), noise)
        self.actions.copy_(actions)

    def respond(self):
        """What a CUDA graph replays for `observe`: the noise has to be drawn inside."""
        self.store_and_act(torch.randn_like(self.actions))

    def observe(self, *, act_on, **transitions):
        """Store a transition per environment, columns by name, (num_envs, ...), and ask for actions for obs `act_on`.

        Call `next_actions` before the next `observe`, which writes to the same pinned memory.
        """
        inbox = self.host_inbox.numpy()
        self.replay.pack(transitions, inbox[:, : self.replay.width])
        inbox[:, self.replay.width :] = act_on
        self.inbox.copy_(self.host_inbox, non_blocking=True)
        self.respond()
        self.host_actions.copy_(self.actions, non_blocking=True)
        self.actions_ready.record()

    def next_actions(self):
        """Wait for the actions that `observe` asked for, but for no update: numpy, (num_envs, act_dim)."""
        self.actions_ready.synchronize()
        return self.host_actions.numpy().copy()  # environments may keep it, and `observe` writes the next ones there

    @property
    def stage(self):
        """What the next update does, in a word or two: "training" once each kind of update is compiled and captured."""
        if self.updates >= self.warmup_updates:
            return "training"
        return " and ".join(["compiling"] * self.compile + ["capturing"] * self.cudagraphs) or "warming up"

    def losses(self):
        """The last update's losses by name; waits for that update."""
        return self.scalars.fetch()

    def tensors(self):
        """All that learning changes, save the replay buffer: the tensors themselves."""
        return {
            "networks": {
                "actor": self.actor.state_dict(self.actor_weights),
                "critics": self.critics.state_dict(self.critic_weights),
                "target_critics": self.critics.state_dict(self.target_weights),
            },
            "log_alpha": self.log_alpha,
            "optimizers": {name: optimizer.tensors() for name, optimizer in self.optimizers.items()},
        }

    def state_dict(self):
        """Copies, on the CPU, of all that `load_state_dict` needs to continue bit by bit, random numbers included."""
        state = to_cpu(self.tensors()) | {"replay": self.replay.state_dict(), "updates": self.updates}
        return state | rng_state(self.device)

    def load_state_dict(self, state):
        """Become the learner that `state` was taken from."""
        tensors = self.tensors()
        saved = {name: state[name] for name in tensors}
        if not self.args.autotune:
            saved["log_alpha"] = self.log_alpha.clone()  # that of --alpha
        fill(tensors, saved)
        self.replay.load_state_dict(state["replay"])
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


def train(args, on_log=lambda learner, losses, step: None, on_start=lambda run: None):
    """Train; SystemExit(2) on bad arguments, (130) on Ctrl-C.

    For tools: `on_start(run)` is called once, `on_log(learner, losses, step)` before each log.
    """
    device = prepare(args)
    checkpoint = load_resumed(args)
    step = checkpoint["global_step"]
    folder = run_folder(args)
    envs = DirectEnvs(make_envs(args, args.num_envs, folder / "videos" if args.capture_video else None))
    require_spaces(args, envs, gym.spaces.Box)
    require_memory(args, device, envs)
    envs.action_space.seed(args.seed + step)
    obs, _ = envs.reset(seed=args.seed + step)
    learner = SAC(args, envs, device)
    restore(args, learner, checkpoint)
    actions = envs.action_space.sample()  # of a resumed run too: nothing has been observed yet
    with Run(args, learner, envs, folder, checkpoint) as run:
        on_start(run)
        while step < args.total_timesteps and not run.stop:
            if step < args.learning_starts:
                actions = envs.action_space.sample()
            next_obs, last_obs, rewards, terminated, truncated = envs.step(actions)  # while CUDA runs the last update
            learner.observe(
                obs=obs,
                next_obs=last_obs,
                actions=actions,
                rewards=rewards,
                terminated=terminated,
                act_on=next_obs,
            )
            obs = next_obs
            step += args.num_envs
            learning = step > args.learning_starts
            run.advance(step, rewards, terminated | truncated, learner.stage if learning else "exploring")
            if learning:
                for _ in range(args.updates_per_step):
                    learner.update()
            actions = learner.next_actions()
            if learning and step // args.num_envs % LOG_INTERVAL == 0:
                losses = learner.losses()
                on_log(learner, losses, step)
                run.log(losses)
            if args.checkpoint_interval and step % args.checkpoint_interval < args.num_envs:
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
