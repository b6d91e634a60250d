"""Deep Q-learning (DQN) for N agents at once: seeds and hyper-parameters side by side in one program.

Each agent is a run of dqn_torchcompile.py with its seed and its flags: it draws the same random numbers and makes the
same updates. What makes N agents cheap:

1. The networks of all agents are rows of one matrix: a layer is one batched matmul, and one Adam step
   updates all agents in as many operations as one agent (`Networks`, `PopulationAdam`).
2. Actions are computed on the host, in NumPy (`on_host`), and only where they are not random (`DQNPopulation.act`).
3. Environments are stepped without gymnasium's vector environment, which can cost more than they do (`DirectEnvs`).
4. Transitions are collected on the host, and sent to the device's replay buffer once per update, all agents' in one
   copy (`DQNPopulation.send_block`).
5. `--compile` makes one graph of an update of all agents (`DQNPopulation.store_and_update`), and `--cudagraphs` replays
   it as one CUDA graph (`DQNPopulation.learn`). The host does not wait: it acts with the parameters of the update
   before (`DQNPopulation.update`).

    python leanrl/dqn_population_torchcompile.py --env-id CartPole-v1 --seeds 1 2 3 4 5 6 7 8 --compile --cudagraphs
    python leanrl/dqn_population_torchcompile.py --seeds 1 --learning-rate 1e-4 3e-4 1e-3 3e-3 --compile --cudagraphs

A flag takes one value per agent, or one for all. The run's folder holds a folder per agent, which the single-agent
script can resume.
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
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
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

LOG_INTERVAL = 100  # vector steps between two logs of the losses
GRAPH_WARMUP = 3  # the call at which a CUDA graph is captured; compilation is over by then
CompileMode = Literal["default", "max-autotune-no-cudagraphs"]


@dataclass
class Args:
    env_id: str = "CartPole-v1"
    """gymnasium environment"""
    seeds: tuple[int, ...] = (1, 2, 3, 4)
    """seed of each agent's environments, networks and noise"""
    total_timesteps: int = 500_000
    """environment steps of each agent, over all of its environments"""
    num_envs: int = 1
    """environments of each agent"""
    buffer_size: int = 10_000
    """transitions in each agent's replay buffer"""
    gamma: tuple[float, ...] = (0.99,)
    """discount factor"""
    tau: tuple[float, ...] = (1.0,)
    """target smoothing coefficient"""
    batch_size: int = 128
    """transitions per update"""
    learning_starts: int = 10_000
    """environment steps of each agent before the first update"""
    learning_rate: tuple[float, ...] = (2.5e-4,)
    """learning rate of the Q-network"""
    train_frequency: int = 10
    """environment steps of an agent between two updates"""
    target_network_frequency: int = 500
    """environment steps of an agent between two updates of its target network"""
    start_e: tuple[float, ...] = (1.0,)
    """probability of a random action at the first step"""
    end_e: tuple[float, ...] = (0.05,)
    """probability of a random action at the end of exploration"""
    exploration_fraction: tuple[float, ...] = (0.5,)
    """fraction of --total-timesteps over which this probability falls linearly"""

    compile: bool = False
    """compile the updates with torch.compile"""
    cudagraphs: bool = False
    """replay learning as a CUDA graph"""
    compile_mode: CompileMode = "default"
    """torch.compile's mode"""

    exp_name: str = Path(__file__).stem
    """name of the experiment, part of the run's folder name"""
    run_dir: str = "runs"
    """parent folder of all runs"""
    resume: str | None = None
    """population to continue: its folder, whose flags become the defaults"""
    checkpoint_interval: int = 0
    """save checkpoints every so many environment steps of an agent (0: only at the end)"""
    capture_video: bool = False
    """record videos of the first agent's first environment"""
    track: bool = False
    """also log to Weights & Biases"""
    wandb_project_name: str = "leanrl"
    """project on Weights & Biases"""
    wandb_entity: str | None = None
    """team on Weights & Biases"""
    cuda: bool = True
    """use a CUDA device if there is one"""
    threads: int = 1  # small matrices: a second thread gains little, and costs much on a busy machine
    """CPU threads for torch (0: torch's default)"""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """precision of float32 matmuls and convolutions (high: TF32, medium: bfloat16)"""
    torch_deterministic: bool = True
    """use deterministic cuDNN kernels"""


AT_LEAST_1 = ("total_timesteps", "num_envs", "buffer_size", "batch_size")
AT_LEAST_1 += ("train_frequency", "target_network_frequency")
AT_MOST_1 = ("gamma", "tau", "start_e", "end_e", "exploration_fraction")
POSITIVE = ("learning_rate", "exploration_fraction")  # others may be 0, none negative
FIXED = ("env_id", "buffer_size")  # what a resumed run cannot change
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8  # Adam's
RUNNING_STATISTICS = (nn.modules.batchnorm._BatchNorm, nn.utils.parametrizations._SpectralNorm)


class QNetwork(nn.Module):
    """Q(s, a) of all actions: (batch, obs_dim) to (batch, num_actions)."""

    def __init__(self, obs_dim, num_actions):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(obs_dim, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, num_actions),
        )

    def forward(self, obs):
        return self.net(obs)


class DQNPopulation:
    """The learners of all agents. CUDA graphs replay kernels, not Python: what changes in training is a tensor.

    Tensors have a leading dimension of agents. No operation mixes agents: a diverging agent does not affect the others.
    """

    warmup_updates = GRAPH_WARMUP  # until the update is compiled and captured

    def __init__(self, args, agents, envs, device):
        """`agents` holds each agent's arguments; `envs` the first agent's environments, the second's, and so on."""
        self.args = args
        self.agents = agents
        self.device = device
        self.cudagraphs = args.cudagraphs and device.type == "cuda"
        self.obs_dim = envs.single_observation_space.shape[0]
        self.num_actions = int(envs.single_action_space.n)
        qs, self.generators = [], []
        for agent in agents:
            torch.manual_seed(agent.seed)
            with device:
                qs.append(QNetwork(self.obs_dim, self.num_actions))
            self.generators.append(Generators(device))
        batched = args.compile or self.cudagraphs
        self.q = Networks(qs, batched)
        self.target_q = Networks(copy.deepcopy(qs), batched)
        self.gamma = torch.tensor([[agent.gamma] for agent in agents], device=device)
        self.tau = torch.tensor([[agent.tau] for agent in agents], device=device)
        self.optimizers = {"q": PopulationAdam(self.q.weights, [[agent.learning_rate] for agent in agents])}
        self.scalars = PopulationScalars(len(agents), device)
        self.rngs = [np.random.default_rng(agent.seed) for agent in agents]  # for random actions
        # numbers from [0, 1) that pick a batch, in float64, since float32 is uneven over a million rows
        self.uniform = torch.empty(len(agents), args.batch_size, dtype=torch.float64, device=device)
        self.updates = 0

        on_cuda = device.type == "cuda"
        self.acting_q = Networks([copy.deepcopy(q).cpu() for q in qs], batched=False)
        self.acting_values = [on_host(q, "net", self.obs_dim) for q in self.acting_q.networks]
        self.arriving_weights = torch.zeros_like(self.acting_q.weights, pin_memory=on_cuda)
        self.arriving_weights.copy_(self.q.weights)
        self.weights_arrived = torch.cuda.Event() if on_cuda else HostEvent()
        pairs = zip(self.acting_q.networks, self.q.networks, strict=True)
        self.buffers = [pair for one, other in pairs for pair in zip(one.buffers(), other.buffers(), strict=True)]

        shapes = {"obs": (self.obs_dim,), "next_obs": (self.obs_dim,), "actions": (), "rewards": (), "terminated": ()}
        row_bytes = 4 * sum(math.prod(shape) for shape in shapes.values())
        require_memory_of_agents(args, len(agents), "buffer_size", row_bytes)
        steps = min(math.ceil(args.train_frequency / args.num_envs), args.buffer_size // args.num_envs)
        self.block_size = steps * args.num_envs  # transitions of an agent that are collected before they are sent
        self.replay = PopulationReplay(len(agents), args.buffer_size, shapes, device, spare=self.block_size)
        self.host_block = torch.zeros(len(agents), self.block_size + 1, self.replay.width, pin_memory=on_cuda)
        self.host_rows = self.host_block.numpy()
        self.block = self.host_block.to(device)  # on a CPU the same memory
        self.block_sent = torch.cuda.Event() if on_cuda else HostEvent()
        self.collected = 0  # of each agent
        self.apply_compile_and_cudagraphs()

    def store_and_update(self, uniform):
        """Store the block, then make one step on the Q-networks; returns losses by name, (agents,).

        `uniform`, (agents, batch), from [0, 1), picks the transitions.
        """
        self.store_block()
        batch = self.replay.sample(uniform)

        # TD loss
        with torch.no_grad():
            next_q = self.target_q(batch["next_obs"]).amax(-1)
            target = batch["rewards"] + (1 - batch["terminated"]) * self.gamma * next_q
        weights = self.q.weights.detach().requires_grad_()
        actions = batch["actions"].long().unsqueeze(-1)
        q = self.q(batch["obs"], weights=weights).gather(-1, actions).squeeze(-1)  # (agents, batch)
        td_loss = (q - target).square().mean(-1)
        (gradient,) = torch.autograd.grad(td_loss.sum(), weights)
        self.optimizers["q"].step(self.q.weights, gradient)
        return {"q_values": q.detach().mean(-1), "td_loss": td_loss.detach()}

    def learn(self):
        """One update, with the random numbers in `uniform`."""
        self.scalars.store(**self.store_and_update(self.uniform))

    def update(self):
        """Launch one update: on a CUDA device it may still run when this returns.

        From here on the host acts with the parameters of the update before, which have arrived while it was acting.

        Random numbers are drawn here: outside compiled functions, so that all modes draw the same ones, and outside
        CUDA graphs, so that a replay need not set the generators' seeds and offsets first.
        """
        self.weights_arrived.synchronize()
        self.acting_q.weights.copy_(self.arriving_weights)
        for acting_buffer, buffer in self.buffers:  # forward may have changed it
            acting_buffer.copy_(buffer)
        self.send_block()
        for uniform, generators in zip(self.uniform, self.generators, strict=True):
            uniform.uniform_(generator=generators.device)
        self.learn()
        self.arriving_weights.copy_(self.q.weights, non_blocking=True)
        self.weights_arrived.record()
        self.updates += 1

    def update_target(self):
        """Move the target networks by `tau` toward the Q-networks; 1 copies them."""
        self.target_q.weights.lerp_(self.q.weights, self.tau)

    def act(self, obs, step):
        """Actions at an environment step for `obs`, (agents * num_envs, obs_dim); both are NumPy."""
        parts = np.split(obs, len(self.agents))
        return np.concatenate([self.act_alone(i, part, epsilon(step, self.agents[i])) for i, part in enumerate(parts)])

    def act_alone(self, i, obs, exploration):
        """An agent's actions for `obs`, each random with probability `exploration`, else greedy; both are NumPy."""
        rng = self.rngs[i]
        explore = rng.random(len(obs)) < exploration
        count = np.count_nonzero(explore)
        actions = self.acting_values[i](obs).argmax(-1) if count < len(obs) else np.empty(count, np.int64)
        if count:
            actions[explore] = rng.integers(self.num_actions, size=count)
        return actions

    def store(self, **transitions):
        """Collect a transition per environment on the host; columns are NumPy, (agents * num_envs, ...)."""
        if self.collected == self.block_size:
            self.send_block()
            self.store_block()
        if self.collected == 0:
            self.block_sent.synchronize()
        rows = self.host_rows[:, self.collected : self.collected + self.args.num_envs]
        self.replay.pack(transitions, rows)
        self.collected += self.args.num_envs

    def send_block(self):
        """Send the collected transitions to the device, and, in the last row, their number."""
        self.host_rows[:, -1, 0] = self.collected  # the last copy is over: `store` or `update` has waited for it
        self.block.copy_(self.host_block, non_blocking=True)
        self.block_sent.record()
        self.collected = 0

    def store_block(self):
        """Write the transitions that were sent to the replay buffers."""
        self.replay.write(self.block[:, :-1], count=self.block[0, -1, 0].long())

    def apply_compile_and_cudagraphs(self):
        """The one place where functions are compiled and captured."""
        if self.args.compile:
            # on a CPU, kernels are called from C++
            options = ON_CUDA if self.device.type == "cuda" else {"cpp_wrapper": True}
            self.store_and_update = compiled(self.store_and_update, self.args.compile_mode, options)
        if self.cudagraphs:
            self.learn = CudaGraphModule(self.learn, warmup=GRAPH_WARMUP)

    def losses(self):
        """The last update's losses by name, a dictionary per agent; waits for that update."""
        return self.scalars.fetch()

    def policy(self, i):
        """A copy of an agent's deterministic policy, on the CPU."""
        return Policy(self.q.cpu_copy(i))

    def tensors(self, i):
        """Every tensor of an agent that updates change, but the replay buffer. What is missing here is not saved."""
        return {
            "networks": {
                "q": self.q.networks[i].state_dict(),
                "target_q": self.target_q.networks[i].state_dict(),
                "acting_q": self.acting_q.networks[i].state_dict(),
            },
            "optimizers": {name: optimizer.tensors(i) for name, optimizer in self.optimizers.items()},
        }

    def state_dict(self, i):
        """Copies on the CPU of what an agent needs to continue bit for bit, as the single-agent script's."""
        if self.collected:
            self.send_block()
            self.store_block()
        return tree_map(lambda tensor: tensor.detach().to("cpu", copy=True), self.tensors(i)) | {
            "replay": self.replay.state_dict(i),
            "updates": self.updates,
            "numpy_rng": self.rngs[i].bit_generator.state,
            "rng": self.generators[i].host.get_state(),
            "cuda_rng": [self.generators[i].device.get_state()] if self.device.type == "cuda" else [],
        }

    def load_state_dict(self, i, state):
        """Restore an agent from what `state_dict` returned, with the learning rate of this run's arguments."""
        tensors = self.tensors(i)
        load_tensors(tensors, {name: state[name] for name in tensors})
        self.arriving_weights[i].copy_(self.q.weights[i])
        self.replay.load_state_dict(i, state["replay"])
        self.updates = state["updates"]
        self.rngs[i].bit_generator.state = state["numpy_rng"]
        self.generators[i].load(state["rng"], state["cuda_rng"])


def epsilon(step, args):
    """The probability of a random action at environment step `step`: from start_e down to end_e, then constant."""
    progress = min(step / (args.exploration_fraction * args.total_timesteps), 1.0)
    return args.start_e + progress * (args.end_e - args.start_e)


def times_due(frequency, step, num_envs):
    """How many multiples of `frequency` the last step of all environments reached: those in (step - num_envs, step]."""
    return step // frequency - (step - num_envs) // frequency


def train(args, on_start=lambda population: None):
    """Train all agents. `on_start` is for tools: it is called with the `Population` before the first step."""
    with Population(args) as population:
        check_replay(args)
        check_compile(args, population.device)
        agents = population.agents
        require_memory_of_agents(args, len(agents), "num_envs", bytes_each=20_000)  # as in make_envs
        envs = DirectEnvs(make_envs(replace(args, num_envs=len(agents) * args.num_envs), population.folder))
        require_discrete_actions(args, envs)
        learner = DQNPopulation(args, agents, envs, population.device)
        population.start(envs, learner)
        seeds = [agent.seed + population.step for agent in agents]
        obs, _ = envs.reset(seed=[seed + i for seed in seeds for i in range(args.num_envs)])
        on_start(population)
        while population.unfinished():
            actions = learner.act(obs, population.step)
            next_obs, last_obs, rewards, terminated, truncated = envs.step(actions)  # while CUDA runs the last update
            learner.store(obs=obs, next_obs=last_obs, actions=actions, rewards=rewards, terminated=terminated)
            obs = next_obs
            population.advance(rewards, terminated | truncated)
            if population.step > args.learning_starts:
                for _ in range(times_due(args.train_frequency, population.step, args.num_envs)):
                    learner.update()
                if times_due(args.target_network_frequency, population.step, args.num_envs):
                    learner.update_target()
            if learner.updates and population.step // args.num_envs % LOG_INTERVAL == 0:
                population.log(learner.losses())


class Policy(nn.Module):
    """What policy.pt2 holds, the greedy policy: (batch, obs_dim) to (batch,)."""

    def __init__(self, q):
        super().__init__()
        self.q = q

    def forward(self, obs):
        return self.q(obs).argmax(-1)


# ---------------------------------------------------------------------------------------------------------------------
# What makes it fast: all networks as one, Adam, acting in NumPy, replay buffer on the device, compilation, environments
# ---------------------------------------------------------------------------------------------------------------------


class Networks:
    """The networks of all agents. The parameters of each are views of a row of `weights`, (agents, size).

    `networks(*inputs)` calls them with inputs of shape (agents, batch, ...). To learn, call
    `networks(*inputs, weights=w)` with `w = networks.weights.detach().requires_grad_()`: calls without `w` give no
    gradient. If agents have an nn.ModuleList its members are called together: outputs are (agents, members, ...).

    Each parameter starts on a 64-byte boundary, for fast loads. Matrices are stored transposed: the gradient of a
    batched matmul then needs no copy.
    """

    def __init__(self, networks, batched):
        """`networks` has one of each agent; `batched` calls them as one, which is faster if compiled or captured."""
        self.networks = networks
        self.several = isinstance(networks[0], nn.ModuleList)
        self.members = [member for network in networks for member in (network if self.several else [network])]
        self.batched = batched and len(self.members) > 1
        self.first = self.members[0]
        for layer in self.first.modules():
            if isinstance(layer, RUNNING_STATISTICS) or hasattr(layer, "weight_u"):  # of the old spectral_norm
                raise ValueError("flat networks cannot hold statistics (BatchNorm, spectral norm): use LayerNorm")
        for buffers in zip(*(member.buffers() for member in self.members), strict=True):
            if any(not torch.equal(buffer, buffers[0]) for buffer in buffers):
                raise ValueError("agents share the first one's buffers: these must be equal")
        if len({parameter.requires_grad for parameter in self.first.parameters()}) > 1:
            raise ValueError("flat networks learn all of their parameters: register frozen ones as buffers")
        self.shapes = {name: parameter.shape for name, parameter in self.first.named_parameters()}
        self.tied = len(self.shapes) < len(list(self.first.named_parameters(remove_duplicate=False)))
        self.sizes = [size for shape in self.shapes.values() for size in padded(shape.numel())]
        self.each = len(self.members) // len(networks)  # members of an agent
        device = next(self.first.parameters()).device
        self._weights = torch.zeros(len(networks), self.each * sum(self.sizes), device=device)
        for name, view in self.views(self.weights).items():
            for member, value in zip(self.members, view, strict=True):
                parameter = member.get_parameter(name)
                value.copy_(parameter.detach())
                parameter.requires_grad_(False)
                parameter.data = value

    @property
    def weights(self):
        """Change it in place: the networks' parameters, and CUDA graphs, stay where they are."""
        return self._weights

    def views(self, weights):
        """Parameters by name as views of `weights`, with a leading dimension of members, the first agent's first."""
        parameters = weights.view(len(self.members), -1).split(self.sizes, -1)[::2]  # every other piece is padding
        views = {}
        for (name, shape), parameter in zip(self.shapes.items(), parameters, strict=True):
            if len(shape) == 2:
                views[name] = parameter.unflatten(-1, (shape[1], shape[0])).mT
            else:
                views[name] = parameter.unflatten(-1, shape)
        return views

    def unbind(self, view):
        """The members' parts of a parameter; matrices as they are stored, so that their gradients need no copies."""
        return [part.mT for part in view.mT.unbind()] if view.ndim == 3 else view.unbind()

    def call(self, parameters, *inputs):
        return functional_call(self.first, parameters, inputs, tie_weights=self.tied)

    def __call__(self, *inputs, weights=None):
        """The networks' outputs, (agents, batch, ...) or (agents, members, batch, ...)."""
        if self.several:
            inputs = [x.unsqueeze(1).expand(-1, self.each, *x.shape[1:]).flatten(0, 1) for x in inputs]
        outputs = self.call_members(inputs, weights)
        if not self.several:
            return outputs
        return tree_map(lambda x: x.unflatten(0, (len(self.networks), -1)), outputs)

    def call_members(self, inputs, weights):
        """The members' outputs; inputs and outputs have a leading dimension of members."""
        if weights is None and not self.batched and not torch.compiler.is_compiling():
            outputs = [member(*own) for member, *own in zip(self.members, *inputs, strict=True)]
        else:
            views = self.views(self.weights if weights is None else weights)
            if self.batched:
                return vmap(self.call, randomness="different")(views, *inputs)
            members = zip(zip(*map(self.unbind, views.values()), strict=True), *inputs, strict=True)
            outputs = [self.call(dict(zip(views, member, strict=True)), *own) for member, *own in members]
        return tree_map(lambda *tensors: torch.stack(tensors), *outputs)

    def cpu_copy(self, i):
        """A copy of an agent's network on the CPU, with parameters that are contiguous as torch.export likes them."""
        network = copy.deepcopy(self.networks[i]).cpu()
        for parameter in network.parameters():
            parameter.data = parameter.data.contiguous()
        return network


def padded(size):
    """The size of a parameter, and of the padding that lets the next one start on a 64-byte boundary."""
    return size, -size % 16


class PopulationAdam:
    """Adam (Kingma and Ba 2015, arXiv:1412.6980) for the flat vectors of all agents.

    `optimizer.lr = 1e-4` works at any time: attributes are tensors, which assignment fills in place, so that CUDA
    graphs and checkpoints see the change.
    """

    def __init__(self, weights, lr):
        """`weights` is (agents, size) and `lr` (agents, 1), or both are (agents,)."""
        self.lr = torch.tensor(lr, dtype=torch.float64, device=weights.device)
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
        scale = correction1 / (self.lr * root)
        if weights.ndim > 1:  # scalars are computed in float64, as in the single-agent script
            scale = scale.to(weights.dtype)
        denominator = self.v.sqrt().add_(EPS * root).mul_(scale)
        weights.addcdiv_(self.m, denominator, value=-1)

    def tensors(self, i):
        """What an agent needs to resume, by name, as the single-agent script's."""
        return {"m": self.m[i], "v": self.v[i], "decay": self.decay}


class PopulationScalars:
    """Numbers to log, which stay on the device until they are fetched."""

    def __init__(self, agents, device):
        self.agents = agents
        self.device = device
        self.groups = {}  # names of scalars that are stored together, and their memory

    def store(self, **scalars):
        """Store detached tensors by name, (agents,), always in the same memory."""
        names = tuple(scalars)
        if names not in self.groups:
            self.groups[names] = torch.zeros(len(names), self.agents, device=self.device)
        torch.stack(list(scalars.values()), out=self.groups[names])

    def fetch(self):
        """The newest values by name, a dictionary per agent; waits for the device."""
        names = [name for group in self.groups for name in group]
        columns = torch.cat(list(self.groups.values())).T.tolist()
        return [dict(zip(names, column, strict=True)) for column in columns]


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


class PopulationReplay:
    """Transitions of all agents on the device; the newest overwrite the oldest. Nothing here waits for the device."""

    def __init__(self, agents, size, shapes, device, spare):
        """`size` is each agent's; `shapes` are those of a transition's columns, by name.

        At most `spare` rows of an agent are written at once.
        """
        self.size = size
        self.shapes = shapes
        self.width = sum(math.prod(shape) for shape in shapes.values())
        self.rows = torch.empty(agents, size + spare, self.width, device=device)
        self.agent = torch.arange(agents, device=device).unsqueeze(-1)
        self.stored = torch.zeros((), dtype=torch.int64, device=device)  # transitions of each agent so far

    def pack(self, columns, rows):
        """Write NumPy columns by name, (agents * n, ...), side by side into NumPy `rows`, (agents, n, width)."""
        ordered = [columns[name].reshape(*rows.shape[:2], -1) for name in self.shapes]
        np.concatenate(ordered, -1, rows, casting="unsafe")

    def write(self, rows, count):
        """Store the first `count` of each agent's `rows`, (agents, n, width); the others go to the spare rows."""
        i = torch.arange(rows.shape[1], device=rows.device)
        place = torch.where(i < count, (self.stored + i) % self.size, self.size + i)
        self.rows.index_copy_(1, place, rows)
        self.stored.add_(count)

    def sample(self, uniform):
        """Columns by name, (agents, batch, ...), of stored transitions, one for each number in `uniform`, [0, 1)."""
        place = (uniform * self.stored.clamp(max=self.size)).long()
        return split_columns(self.rows[self.agent, place], self.shapes)

    def state_dict(self, i):
        """Copies on the CPU of an agent's stored transitions and their number."""
        filled = min(int(self.stored), self.size)
        return {"rows": self.rows[i, :filled].to("cpu", copy=True), "stored": self.stored.to("cpu", copy=True)}

    def load_state_dict(self, i, state):
        """Restore an agent from what `state_dict` returned."""
        self.rows[i, : len(state["rows"])] = state["rows"].to(self.rows.device)
        self.stored.copy_(state["stored"])


class Generators:
    """An agent's random number generators, on the device and on the host, which are one and the same on a CPU.

    They continue where torch's own are.
    """

    def __init__(self, device):
        self.host = self.device = torch.Generator()
        if device.type == "cuda":
            self.device = torch.Generator(device)
        self.load(torch.get_rng_state(), torch.cuda.get_rng_state_all()[:1])

    def load(self, host, devices):
        """Continue from states: `devices` has that of the device, if the states are from one."""
        self.host.set_state(host)
        if self.device is not self.host and devices:
            self.device.set_state(devices[0])


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
}


def compiled(function, mode, options):
    """`function` compiled into one graph; `options` are inductor's, besides those of `mode`."""
    torch._dynamo.config.trace_autograd_ops = True  # allows torch.autograd.grad in a compiled function
    torch.autograd.set_multithreading_enabled(False)  # the backward pass then runs in the thread that is traced
    options = options | torch._inductor.list_mode_options(mode) | {"guard_filter_fn": needed_guards}
    return torch.compile(function, fullgraph=True, options=options)


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


def require_discrete_actions(args, envs):
    """Refuse environments whose actions are not numbers that count from 0."""
    space = envs.single_action_space
    if not isinstance(space, gym.spaces.Discrete) or space.start != 0:
        refuse("env_id", args.env_id, f"choose an environment with discrete actions that count from 0, not {space}")


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


class AgentRun:
    """What an agent's run leaves behind, as the single-agent script: folder, logs, checkpoint, policy, summary."""

    def __init__(self, args, folder):
        self.args = args
        self.folder = folder
        self.episodes = 0
        self.recent_returns = []  # of the last 20 episodes
        self.curve = []  # step and return of each episode
        self.failed = None  # why the agent is frozen
        self.failed_step = None  # and since when
        self.summary = {}

    def start(self, step, config):
        """Begin to log."""
        self.folder.mkdir()
        self.config = {"compile": False, "cudagraphs": False} | vars(self.args) | config
        (self.folder / "config.json").write_text(json.dumps(self.config, indent=2))
        shutil.copy(__file__, self.folder)
        self.writer = SummaryWriter(self.folder)
        self.returns = np.zeros(self.args.num_envs)  # of the current episodes
        self.first_steps = np.full(self.args.num_envs, step)

    def restore(self, checkpoint):
        if not self.failed:
            self.episodes = checkpoint["episodes"]
            self.recent_returns = checkpoint["returns"]

    def advance(self, step, rewards, ended):
        """Count a step of the agent's environments; both are NumPy, (num_envs,), `ended` where an episode is over."""
        self.returns += rewards
        for i in ended.nonzero()[0]:
            self.end_episode(step, i)

    def end_episode(self, step, i):
        """Log the episode that is over in environment `i`."""
        self.writer.add_scalar("charts/episodic_return", self.returns[i], step)
        length = (step - self.first_steps[i]) // self.args.num_envs
        self.writer.add_scalar("charts/episodic_length", length, step)
        self.recent_returns = [*self.recent_returns[-19:], float(self.returns[i])]
        self.curve.append((step, float(self.returns[i])))
        self.episodes += 1
        self.returns[i] = 0
        self.first_steps[i] = step

    def log(self, step, speed, losses):
        """Log losses by name, and the speed since the last log; freeze the agent if a loss is not finite."""
        self.folder.mkdir(parents=True, exist_ok=True)  # somebody may have deleted it
        self.writer.add_scalar("charts/SPS", speed, step)
        for name, value in losses.items():
            self.writer.add_scalar(f"losses/{name}", value, step)
        non_finite = [name for name, value in losses.items() if "loss" in name and not math.isfinite(value)]
        if non_finite:
            self.freeze(step, f"{non_finite[0]} is {losses[non_finite[0]]}")

    def freeze(self, step, what):
        """Stop logging and saving this agent; the others continue."""
        kept = "checkpoint.pt is from before" if (self.folder / "checkpoint.pt").exists() else "there is no checkpoint"
        self.failed = f"step {step}: {what}; {kept}"
        self.failed_step = step
        note(f"{self.folder.name} is frozen: {self.failed}")

    def write_checkpoint(self, step, state):
        """Write checkpoint.next, from which the single-agent script can resume once it is checkpoint.pt."""
        checkpoint = {"args": vars(self.args), "global_step": step, "episodes": self.episodes}
        checkpoint |= {"returns": self.recent_returns, "learner": state}
        replace_file(self.folder / "checkpoint.next", lambda file: torch.save(checkpoint, file))

    def finish(self, results):
        """Write summary.json: the configuration, and what came of it."""
        mean_return = float(np.mean(self.recent_returns)) if self.recent_returns else math.nan
        mean_return = mean_return if math.isfinite(mean_return) else None
        self.summary = {"episodes": self.episodes, "episodic_return": mean_return, **results}
        if self.failed:
            self.summary |= {"global_step": self.failed_step, "failed": self.failed}
        (self.folder / "summary.json").write_text(json.dumps(self.config | self.summary, indent=2))
        self.writer.close()


class Population:
    """A population's folder, with its agents' runs, and its shutdown: the context manager of the training loop.

    Ctrl-C and SIGTERM end the loop before its next step; then, and after an error, checkpoints, policies, summaries and
    a plot are written. A population that ends before `start` leaves nothing behind.
    """

    def __init__(self, args):
        self.args = args
        self.agents = agents_of(args)
        for agent in self.agents:
            self.device = prepare(agent)
        name = f"{args.env_id}__{args.exp_name}__{len(self.agents)}__{datetime.now():%Y-%m-%d_%H-%M-%S.%f}"
        self.folder = Path(args.run_dir) / name.replace("/", "_")
        try:
            self.folder.mkdir(parents=True)
        except OSError as error:
            refuse("run_dir", args.run_dir, f"give a folder that can be written ({one_line(error)})")
        self.runs = []
        for i, agent in enumerate(self.agents):
            self.runs.append(AgentRun(agent, self.folder / agent_folder(i)))
        self.step = 0  # of each agent
        self.steady = None  # step and time when warm-up ended
        self.signal = None
        self.started = False

    def start(self, envs, learner):
        """Restore the agents if the population is resumed, and begin to log."""
        self.envs = envs
        self.learner = learner
        if self.args.resume is not None:
            self.restore()
        self.log_step = self.saved_step = self.step
        space = envs.single_observation_space
        is_image = space.dtype == np.uint8 and len(space.shape) > 1
        self.example = torch.zeros(2, *space.shape, dtype=torch.uint8 if is_image else torch.float32)
        with torch.no_grad():
            learner.policy(0).eval()(self.example)  # what does not match an edited network fails now
        packages = ("torch", "tensordict", "gymnasium", "envpool", "mujoco", "numpy")
        versions = {name: sys.modules[name].__version__ for name in packages if name in sys.modules}
        machine = {
            "script": Path(__file__).stem,
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            "cores": os.cpu_count(),
            "versions": versions | {"python": platform.python_version()},
        }
        self.config = vars(self.args) | machine
        (self.folder / "population.json").write_text(json.dumps(self.config, indent=2))
        if self.args.track:
            self.track()
        for run in self.runs:
            run.start(self.step, machine | {"agents": len(self.agents)})
        size = {"total": self.args.total_timesteps, "initial": self.step, "unit": "step", "dynamic_ncols": True}
        self.bar = ProgressBar(**size, disable=sys.stderr is None)
        self.bar.set_description("compiling" if self.args.compile else "warming up")
        self.start_time = self.log_time = time.perf_counter()
        self.started = True

    def restore(self):
        """Continue from the checkpoints of the population in --resume; an agent that was frozen there stays frozen."""
        folder = Path(self.args.resume)
        saved = [load_if_there(folder / agent_folder(i) / "checkpoint.pt") for i in range(len(self.agents))]
        if not any(saved):
            refuse("resume", self.args.resume, "give the folder of a population that has saved checkpoints")
        self.step = max(checkpoint["global_step"] for checkpoint in saved if checkpoint)
        # if `save` was killed while it replaced old checkpoints by new ones, some still have the new ones' first name
        new = [load_if_there(folder / agent_folder(i) / "checkpoint.next") for i in range(len(self.agents))]
        checkpoints = [
            next((one for one in pair if one and one["global_step"] == self.step), None)
            for pair in zip(saved, new, strict=True)
        ]
        valid = next(filter(None, checkpoints))
        try:
            for i, (run, checkpoint) in enumerate(zip(self.runs, checkpoints, strict=True)):
                if not checkpoint:
                    run.failed_step = self.step
                    run.failed = f"step {self.step}: {folder / agent_folder(i)} has no checkpoint of that step"
                    note(f"{agent_folder(i)} is frozen: {run.failed}")
                    checkpoint = valid  # another agent's, so that it computes on a replay buffer that is filled
                for name in FIXED:
                    value, saved = getattr(self.args, name), checkpoint["args"][name]
                    if value != saved:
                        refuse(name, value, f"leave it out: the checkpoint has {saved}")
                self.learner.load_state_dict(i, checkpoint["learner"])
                run.restore(checkpoint)
        except (KeyError, RuntimeError, ValueError) as error:
            refuse("resume", self.args.resume, f"the checkpoints do not fit this script: {one_line(error)}")
        self.learner.warmup_updates += self.learner.updates
        if self.step >= self.args.total_timesteps:
            refuse("total_timesteps", self.args.total_timesteps, f"give more than {self.step}, the checkpoints' step")

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

    def running(self):
        """The agents that are not frozen: their numbers and runs."""
        return [(i, run) for i, run in enumerate(self.runs) if not run.failed]

    def unfinished(self):
        """Whether to go on; writes checkpoints first if they are due."""
        interval = self.args.checkpoint_interval
        if interval and self.step // interval > self.saved_step // interval:
            self.save()
        return self.step < self.args.total_timesteps and self.signal is None and bool(self.running())

    def advance(self, rewards, ended):
        """Count a step of all environments; both are NumPy, (agents * num_envs,), `ended` where an episode is over."""
        self.step += self.args.num_envs
        rewards = rewards.reshape(len(self.runs), -1)
        ended = ended.reshape(len(self.runs), -1)
        for i, run in self.running():
            run.advance(self.step, rewards[i], ended[i])
        if ended.any() and (returns := self.returns()):
            self.bar.set_postfix({"return": f"{np.mean(returns):.1f}"}, refresh=False)
        if self.steady is None and self.learner.updates >= self.learner.warmup_updates:
            self.steady = (self.step, time.perf_counter())
            self.bar.set_description("training", refresh=False)
        self.bar.update(self.args.num_envs)

    def returns(self):
        """The mean return of each running agent's last episodes."""
        return [np.mean(run.recent_returns) for _, run in self.running() if run.recent_returns]

    def log(self, losses):
        """Log each agent's losses, a dictionary by name."""
        now = time.perf_counter()
        speed = (self.step - self.log_step) / (now - self.log_time)
        self.log_step = self.step
        self.log_time = now
        for i, run in self.running():
            run.log(self.step, speed, losses[i])

    def save(self):
        """Write each running agent's checkpoint.pt and policy.pt2; freeze those with a NaN in what is to be saved.

        The old checkpoints are replaced when all new ones are there, so that the agents can resume together.
        """
        for i, run in self.running():
            state = self.learner.state_dict(i)
            if has_nan(state):
                run.freeze(self.step, "the checkpoint would hold a NaN")
            else:
                run.write_checkpoint(self.step, state)
        checkpoint = {"args": vars(self.args), "global_step": self.step}
        replace_file(self.folder / "checkpoint.pt", lambda file: torch.save(checkpoint, file))
        for _, run in self.running():
            os.replace(run.folder / "checkpoint.next", run.folder / "checkpoint.pt")
        self.saved_step = self.step
        self.save_policies()

    def save_policies(self):
        """Write the policy.pt2 of each running agent: one program with different weights."""
        program = None
        for i, run in self.running():
            policy = self.learner.policy(i).eval()
            try:
                if program is None:
                    batch = torch.export.Dim("batch")
                    program = torch.export.export(policy, (self.example,), dynamic_shapes=({0: batch},))
            except Exception as error:  # of an edited policy
                return note(f"no policy.pt2: {one_line(error)}")
            load_tensors(dict(program.state_dict), dict(policy.state_dict()))
            replace_file(run.folder / "policy.pt2", partial(torch.export.save, program))

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
        if error is None and len(self.running()) < len(self.runs):
            frozen = [run.folder.name for run in self.runs if run.failed]
            raise SystemExit(f"error: {len(frozen)} of {len(self.runs)} agents are frozen: {', '.join(frozen)}")

    def finish(self, error):
        """Write what a started population leaves behind; `error` is what ended it, or None."""
        end_time = time.perf_counter()
        try:
            if error is None or isinstance(error, Exception):
                self.save()
        except BaseException as saving_error:
            if error is None:
                raise
            note(f"no checkpoint: {one_line(saving_error)}")
        finally:
            self.write_summaries(end_time)
            self.envs.close()
            with suppress(OSError):
                self.bar.close()

    def write_summaries(self, end_time):
        """Write each agent's summary.json, and population.json and returns.png for all.

        Steps and steps per second are those of each agent.
        """
        steady_step, steady_time = self.steady or (self.step, end_time)
        results = {
            "cudagraphs": getattr(self.learner, "cudagraphs", False),  # active
            "global_step": self.step,
            "steady_sps": (self.step - steady_step) / (end_time - steady_time) if self.step > steady_step else None,
            "warmup_seconds": steady_time - self.start_time if self.steady else None,
            "wall_seconds": end_time - self.start_time,
        }
        for run in self.runs:
            run.finish(results)
        returns = [run.summary["episodic_return"] for _, run in self.running()]
        returns = [value for value in returns if value is not None]
        results["episodic_return"] = float(np.mean(returns)) if returns else None
        results["episodic_return_std"] = float(np.std(returns, ddof=1)) if len(returns) > 1 else None
        results["agents"] = {run.folder.name: run.summary for run in self.runs}
        (self.folder / "population.json").write_text(json.dumps(self.config | results, indent=2))
        draw_returns(self.folder / "returns.png", self.runs, self.args.env_id)


def agents_of(args):
    """The single-agent script's arguments of each agent; a flag with one value has it for all agents."""
    lists = {name: value for name, value in vars(args).items() if isinstance(value, tuple)}
    count = max(map(len, lists.values()))
    for name, values in lists.items():
        if len(values) not in (1, count):
            refuse(name, " ".join(map(str, values)), f"give one value, or {count}, as many as there are agents")
    if min(args.seeds) < 0:
        refuse("seeds", min(args.seeds), "give a number from 0")
    agents = []
    for i in range(count):
        own = vars(args) | {name: values[i % len(values)] for name, values in lists.items()}
        own["seed"] = own.pop("seeds")
        agents.append(SimpleNamespace(**own))
    return agents


def load_if_there(path):
    """The checkpoint at `path`, or None."""
    return load_checkpoint(SimpleNamespace(resume=path)) if path.exists() else None


def require_memory_of_agents(args, count, name, bytes_each):
    """Refuse a number, argument `name`, of things of each of `count` agents that do not fit into memory together."""
    if not hasattr(os, "sysconf"):  # on Windows
        return
    value = getattr(args, name)
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2  # the other half is for checkpoints' copies
    if count * value * bytes_each > limit:
        fewer = limit // (value * bytes_each)
        remedy = f"train at most {fewer}, or give at most" if fewer else "give at most"
        words = f"{count} agents do not fit into {limit / 1e9:.0f} GB: {remedy} {limit // (count * bytes_each)}"
        refuse(name, value, words)


def agent_folder(i):
    return f"agent_{i}"


def draw_returns(path, runs, title):
    """Draw each agent's returns, moving means over 20 episodes, with mean and spread of those that are not frozen."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return note("no returns.png: pip install matplotlib")
    drawn = [run for run in runs if len(run.curve) >= 20]
    if not drawn:
        return note("no returns.png: no agent has ended 20 episodes")
    axes = Figure(figsize=(8, 5), layout="constrained").subplots()
    varied = [name for name in vars(runs[0].args) if len({vars(run.args)[name] for run in runs}) > 1]
    curves = []  # of the agents that are not frozen
    for run in drawn:
        steps, returns = np.array(run.curve).T
        smooth = np.convolve(returns, np.full(20, 1 / 20), "valid")
        label = ", ".join(f"{name} {vars(run.args)[name]}" for name in varied)
        axes.plot(steps[19:], smooth, linewidth=1, alpha=0.6, label=label)
        if not run.failed:
            curves.append((steps[19:], smooth))
    begin = max((steps[0] for steps, _ in curves), default=0)
    end = min((steps[-1] for steps, _ in curves), default=0)
    if len(curves) > 1 and len(curves) == len([run for run in runs if not run.failed]) and begin < end:
        grid = np.linspace(begin, end, 200)  # where all of them have a value
        rows = [np.interp(grid, *curve) for curve in curves]
        mean, deviation = np.mean(rows, 0), np.std(rows, 0, ddof=1)
        axes.plot(grid, mean, color="black", linewidth=2, label="mean")
        low, high = mean - deviation, mean + deviation
        axes.fill_between(grid, low, high, color="black", alpha=0.15, label="standard deviation")
    axes.set(title=title, xlabel="environment steps of each agent", ylabel="return, mean of 20 episodes")
    if varied:
        axes.legend(fontsize="small")
    replace_file(path, lambda file: axes.figure.savefig(file, dpi=120))


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
#     "matplotlib==3.11.2",
# ]
# ///
