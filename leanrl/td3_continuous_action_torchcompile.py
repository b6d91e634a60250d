"""Twin Delayed DDPG (TD3) for continuous actions at full speed: Fujimoto et al. 2018, arXiv:1802.09477.

The updates are those of the plain twin, td3_continuous_action.py; actions come from a policy that lacks the newest
update. What makes this file fast:

1. The parameters of a network, and so their gradients, are one flat vector: Adam is a few operations (`FlatNetwork`).
2. The critics run as one batched matmul per layer (`FlatNetwork.__call__`).
3. The actor's loss calls the first critic only, without gradients for its weights (`TD3.update_actor`).
4. The replay buffer is on the device; an environment step costs one copy in and one copy out (`TD3.observe`).
5. `--compile` makes one graph of each part of an update, from sampling to Adam and target networks, and
   `--cudagraphs` replays acting and learning as CUDA graphs, one launch each (`TD3.apply_compile_and_cudagraphs`).
6. The environments step while the device updates: the host waits only for its next actions (`train`).

    python leanrl/td3_continuous_action_torchcompile.py --env-id HalfCheetah-v5 --compile --cudagraphs
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

NUM_CRITICS = 2
LOG_INTERVAL = 100  # vector steps between two logs of the losses
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
    buffer_size: int = 1_000_000
    """transitions in the replay buffer"""
    gamma: float = 0.99
    """discount factor"""
    tau: float = 0.005
    """target smoothing coefficient"""
    batch_size: int = 256
    """transitions per update"""
    learning_starts: int = 25_000
    """environment steps with random actions before the first update"""
    learning_rate: float = 3e-4
    """learning rate of the actor and of the critics"""
    policy_frequency: int = 2
    """update the actor and the target networks every so many updates"""
    updates_per_step: int = 1
    """updates after each step of all environments"""
    exploration_noise: float = 0.1
    """standard deviation of the noise on actions, in units of half the action range"""
    policy_noise: float = 0.2
    """standard deviation of the noise on the target actor's actions, in the same units"""
    noise_clip: float = 0.5
    """largest noise on the target actor's actions, in the same units"""

    compile: bool = False
    """compile the updates with torch.compile"""
    cudagraphs: bool = False
    """replay acting and learning as CUDA graphs"""
    compile_mode: CompileMode = "default"
    """torch.compile's mode"""
    critic_compile_mode: CompileMode | None = None
    """torch.compile's mode for the critics' update (default: --compile-mode)"""

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


AT_LEAST_1 = ("total_timesteps", "num_envs", "buffer_size", "batch_size")
AT_LEAST_1 += ("policy_frequency", "updates_per_step")
AT_MOST_1 = ("gamma", "tau")
POSITIVE = ("learning_rate",)  # others may be 0, none negative
FIXED = ("env_id", "buffer_size")  # what a resumed run cannot change
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8  # Adam's
RUNNING_STATISTICS = (nn.modules.batchnorm._BatchNorm, nn.utils.parametrizations._SpectralNorm)


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
    """A deterministic policy, squashed by tanh into the bounds of the action space."""

    def __init__(self, obs_dim, action_space):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(obs_dim, 256),
            nn.ReLU(),
            nn.Linear(256, 256),
            nn.ReLU(),
            nn.Linear(256, action_space.shape[0]),
        )
        low = torch.tensor(action_space.low, dtype=torch.float32)
        high = torch.tensor(action_space.high, dtype=torch.float32)
        self.register_buffer("scale", (high - low) / 2)
        self.register_buffer("bias", (high + low) / 2)

    def forward(self, obs, noise=0.0):
        """Actions, (batch, act_dim); `noise` is added in units of half the range of each dimension."""
        squashed = (self.net(obs).tanh() + noise).clamp(-1, 1)
        return squashed * self.scale + self.bias


class TD3:
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
            actor = Actor(self.obs_dim, envs.single_action_space)
            critics = nn.ModuleList([Critic(self.obs_dim, self.act_dim) for _ in range(NUM_CRITICS)])
        batched = args.compile or self.cudagraphs
        self.actor = FlatNetwork(actor)
        self.critics = FlatNetwork(critics, batched)
        self.target_actor = FlatNetwork(copy.deepcopy(actor))
        self.target_critics = FlatNetwork(copy.deepcopy(critics), batched)
        self.optimizers = {
            "actor": Adam(self.actor.weights, args.learning_rate),
            "critics": Adam(self.critics.weights, args.learning_rate),
        }
        self.scalars = Scalars(device)
        # numbers from [0, 1) that pick a batch, in float64, since float32 is uneven over a million rows
        self.uniform = torch.empty(args.batch_size, dtype=torch.float64, device=device)
        self.noise = torch.empty(args.batch_size, self.act_dim, device=device)
        self.updates = 0
        # warm-up ends when each kind of update has been compiled and captured
        self.warmup_updates = GRAPH_WARMUP * args.policy_frequency

        shapes = {"obs": (self.obs_dim,), "next_obs": (self.obs_dim,), "actions": (self.act_dim,)}
        shapes |= {"rewards": (), "terminated": ()}
        require_memory(args, "buffer_size", bytes_each=4 * sum(math.prod(shape) for shape in shapes.values()))
        self.replay = DeviceReplayBuffer(args.buffer_size, shapes, device, spare=self.num_envs)
        on_cuda = device.type == "cuda"
        self.input_sizes = (self.replay.width, self.obs_dim, self.act_dim)  # of transitions, observations, and noise
        self.host_input = torch.zeros(self.num_envs, sum(self.input_sizes), pin_memory=on_cuda)
        self.input = self.host_input.to(device)  # on a CPU the same memory
        self.host_actions = torch.zeros(self.num_envs, self.act_dim, pin_memory=on_cuda)
        self.actions = self.host_actions.to(device)
        self.actions_arrived = torch.cuda.Event() if on_cuda else HostEvent()
        self.apply_compile_and_cudagraphs()

    def update_critics(self, uniform, noise):
        """One step on the critics. `uniform`, (batch,), from [0, 1), picks the transitions; `noise`, (batch, act_dim),
        is standard normal. Returns the transitions' observations, (batch, obs_dim), and losses by name.
        """
        batch = self.replay.sample(uniform)
        obs, next_obs = batch["obs"], batch["next_obs"]

        # critic loss
        with torch.no_grad():
            noise = (self.args.policy_noise * noise).clamp(-self.args.noise_clip, self.args.noise_clip)
            next_actions = self.target_actor(next_obs, noise)  # target policy smoothing
            next_q = self.target_critics(next_obs, next_actions).amin(0)
            target = batch["rewards"] + (1 - batch["terminated"]) * self.args.gamma * next_q
        weights = self.critics.weights.detach().requires_grad_()
        q = self.critics(obs, batch["actions"], weights=weights)  # (NUM_CRITICS, batch)
        qf_loss = (q - target).square().mean(-1).sum()
        (gradient,) = torch.autograd.grad(qf_loss, weights)
        self.optimizers["critics"].step(self.critics.weights, gradient)
        losses = {f"qf{i + 1}_values": values for i, values in enumerate(q.detach().mean(-1))}
        return obs, losses | {"qf_loss": qf_loss.detach()}

    def update_actor(self, obs):
        """One step on the actor for `obs`, (batch, obs_dim), then one on the target networks; returns losses."""
        # actor loss, by the first critic only
        weights = self.actor.weights.detach().requires_grad_()
        actions = self.actor(obs, weights=weights)
        actor_loss = -self.critics.members[0](obs, actions).mean()
        (gradient,) = torch.autograd.grad(actor_loss, weights)
        self.optimizers["actor"].step(self.actor.weights, gradient)

        # target networks
        self.target_actor.weights.lerp_(self.actor.weights, self.args.tau)
        self.target_critics.weights.lerp_(self.critics.weights, self.args.tau)
        return {"actor_loss": actor_loss.detach()}

    def learn(self, actor_too):
        """One update, with the random numbers in `uniform` and `noise`."""
        obs, losses = self.update_critics(self.uniform, self.noise)
        self.scalars.store(**losses)
        if actor_too:
            self.scalars.store(**self.update_actor(obs))

    def update(self):
        """Launch one update: on a CUDA device it may still run when this returns.

        Random numbers are drawn here: outside compiled functions, so that all modes draw the same ones, and outside
        CUDA graphs, so that a replay need not set the generator's seed and offset first.
        """
        actor_too = self.updates % self.args.policy_frequency == 0
        self.uniform.uniform_()
        self.noise.normal_()
        self.learn_by_kind[actor_too]()
        self.updates += 1

    def store_and_act(self):
        """Store the transitions in `input`, and choose actions for the observations that follow them."""
        rows, obs, noise = self.input.split(self.input_sizes, -1)
        self.replay.write(rows, self.num_envs)
        self.actions.copy_(self.actor(obs, self.args.exploration_noise * noise))

    def observe(self, *, act_on, **transitions):
        """Store a transition per environment and launch the choice of actions for the observations `act_on`.

        All are NumPy, (num_envs, ...). `next_actions` has to be called before the next call of this.
        """
        rows, obs, noise = self.host_input.split(self.input_sizes, -1)
        self.replay.pack(transitions, rows.numpy())
        obs.numpy()[:] = act_on
        noise.normal_()
        self.input.copy_(self.host_input, non_blocking=True)
        self.store_and_act()
        self.host_actions.copy_(self.actions, non_blocking=True)
        self.actions_arrived.record()

    def next_actions(self):
        """Wait for the actions, but for no update; NumPy, (num_envs, act_dim)."""
        self.actions_arrived.synchronize()
        return self.host_actions.numpy().clip(self.low, self.high)

    def apply_compile_and_cudagraphs(self):
        """The one place where functions are compiled and captured."""
        self.learn_by_kind = {actor_too: partial(self.learn, actor_too) for actor_too in (False, True)}
        if self.args.compile:
            mode = self.args.compile_mode
            options = ON_CUDA if self.device.type == "cuda" else {}
            self.store_and_act = compiled(self.store_and_act, mode, options)
            self.update_critics = compiled(self.update_critics, self.args.critic_compile_mode or mode, options)
            self.update_actor = compiled(self.update_actor, mode, options)
        if self.cudagraphs:
            self.store_and_act = CudaGraphModule(self.store_and_act, warmup=GRAPH_WARMUP)
            for kind, learn in self.learn_by_kind.items():
                self.learn_by_kind[kind] = CudaGraphModule(learn, warmup=GRAPH_WARMUP)

    def losses(self):
        """The last update's losses by name; waits for that update."""
        return self.scalars.fetch()

    def policy(self):
        """A copy of the policy without noise, on the CPU: what policy.pt2 holds."""
        return self.actor.cpu_copy().eval()

    def tensors(self):
        """Every tensor that updates change, but the replay buffer. What is missing here is not saved."""
        return {
            "networks": {
                "actor": self.actor.network.state_dict(),
                "critics": self.critics.network.state_dict(),
                "target_actor": self.target_actor.network.state_dict(),
                "target_critics": self.target_critics.network.state_dict(),
            },
            "optimizers": {name: optimizer.tensors() for name, optimizer in self.optimizers.items()},
        }

    def state_dict(self):
        """Copies on the CPU of what the learner needs to continue bit for bit."""
        return tree_map(lambda tensor: tensor.detach().to("cpu", copy=True), self.tensors()) | {
            "replay": self.replay.state_dict(),
            "updates": self.updates,
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all()[:1],  # of the device in use
        }

    def load_state_dict(self, state):
        """Continue from what `state_dict` returned, with the learning rates of this run's arguments."""
        tensors = self.tensors()
        load_tensors(tensors, {name: state[name] for name in tensors})
        self.replay.load_state_dict(state["replay"])
        self.updates = state["updates"]
        self.warmup_updates += self.updates
        torch.set_rng_state(state["rng"])
        torch.cuda.set_rng_state_all(state["cuda_rng"])


def train(args, on_start=lambda run: None):
    """Train an agent. `on_start` is for tools: it is called with the `Run` before the first step."""
    with Run(args) as run:
        check_replay(args)
        check_compile(args, run.device)
        envs = make_envs(args, run.folder)
        require_bounded_actions(args, envs)
        learner = TD3(args, envs, run.device)
        run.start(envs, learner)
        envs.action_space.seed(args.seed + run.step)
        obs, _ = envs.reset(seed=args.seed + run.step)
        on_start(run)
        actions = envs.action_space.sample()
        while run.unfinished():
            if run.step < args.learning_starts:
                actions = envs.action_space.sample()
            next_obs, rewards, terminated, truncated, infos = envs.step(actions)  # while CUDA runs the last update
            learner.observe(
                obs=obs,
                next_obs=final_observations(next_obs, infos),
                actions=actions,
                rewards=rewards,
                terminated=terminated,
                act_on=next_obs,
            )
            obs = next_obs
            run.advance(rewards, terminated | truncated)
            learning = run.step > args.learning_starts
            if learning:
                for _ in range(args.updates_per_step):
                    learner.update()
            actions = learner.next_actions()
            if learning and run.step // args.num_envs % LOG_INTERVAL == 0:
                run.log(learner.losses())


# ---------------------------------------------------------------------------------------------------------------------
# What makes it fast: flat networks, Adam, replay buffer on the device, compilation
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


class DeviceReplayBuffer:
    """Transitions on the device, one row each; the newest overwrite the oldest. Nothing here waits for the device."""

    def __init__(self, size, shapes, device, spare):
        """`shapes` are those of a transition's columns, by name; at most `spare` rows are written at once."""
        self.size = size
        self.shapes = shapes
        self.width = sum(math.prod(shape) for shape in shapes.values())
        self.rows = torch.empty(size + spare, self.width, device=device)
        self.stored = torch.zeros((), dtype=torch.int64, device=device)  # transitions so far

    def pack(self, columns, rows):
        """Write NumPy columns by name, (n, ...), side by side into NumPy `rows`, (n, width)."""
        ordered = [columns[name].reshape(len(rows), -1) for name in self.shapes]
        np.concatenate(ordered, 1, rows, casting="unsafe")

    def write(self, rows, count):
        """Store the first `count` of `rows`, (n, width); the others go to the spare rows, which are never sampled."""
        i = torch.arange(len(rows), device=rows.device)
        place = torch.where(i < count, (self.stored + i) % self.size, self.size + i)
        self.rows.index_copy_(0, place, rows)
        self.stored.add_(count)

    def sample(self, uniform):
        """Columns by name, (batch, ...), of stored transitions, one for each number in `uniform`, (batch,), [0, 1)."""
        rows = self.rows.index_select(0, (uniform * self.stored.clamp(max=self.size)).long())
        return split_columns(rows, self.shapes)

    def state_dict(self):
        """Copies on the CPU of the stored transitions and their number."""
        filled = min(int(self.stored), self.size)
        return {"rows": self.rows[:filled].to("cpu", copy=True), "stored": self.stored.to("cpu", copy=True)}

    def load_state_dict(self, state):
        """Continue from what `state_dict` returned."""
        self.rows[: len(state["rows"])] = state["rows"].to(self.rows.device)
        self.stored.copy_(state["stored"])


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
    "split_reductions": False,  # one kernel sums over a batch
}


def compiled(function, mode, options):
    """`function` compiled into one graph; `options` are inductor's, besides those of `mode`."""
    torch._dynamo.config.trace_autograd_ops = True  # allows torch.autograd.grad in a compiled function
    torch.autograd.set_multithreading_enabled(False)  # the backward pass then runs in the thread that is traced
    options = options | torch._inductor.list_mode_options(mode) | {"guard_filter_fn": needed_guards}
    return torch.compile(function, fullgraph=True, options=options)


def final_observations(next_obs, infos):
    """What the actions led to, (num_envs, obs_dim): `next_obs`, but the last observation where an episode ended."""
    if "_final_obs" in infos:
        ended = infos["_final_obs"]
        next_obs = next_obs.copy()
        next_obs[ended] = np.stack(infos["final_obs"][ended])
    return next_obs


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


def check_replay(args):
    """Refuse sizes that do not fit together."""
    if args.buffer_size < args.num_envs:
        refuse("buffer_size", args.buffer_size, f"give at least --num-envs, {args.num_envs}")
    if args.batch_size > args.buffer_size:
        refuse("batch_size", args.batch_size, f"give at most --buffer-size, {args.buffer_size}")
    if args.learning_starts >= args.total_timesteps:
        note(f"--learning-starts {args.learning_starts} is not before the end of the run: nothing will be learned")


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
