"""Proximal Policy Optimization (PPO) for N agents at once: seeds and hyper-parameters side by side in one program.

Each agent is a run of ppo_continuous_action_torchcompile.py with its seed and its flags: it draws the same random
numbers and makes the same updates. What makes N agents cheap:

1. The networks of all agents are rows of one matrix: a layer is one batched matmul, and one Adam step
   updates all agents in as many operations as one agent (`Networks`, `AdamByAgent`).
2. The policies act in NumPy (`PPOPopulation.act`, `on_host`), observations of all agents are normalized together
   (`PopulationNormalizer`), and environments are stepped without gymnasium's vector environment (`DirectEnvs`).
3. The rollouts of all agents are one block of host memory, and one copy takes it to the device
   (`PPOPopulation.record`, `PPOPopulation.update`).
4. Values, log-probabilities and advantages of all rollouts are computed at once (`PPOPopulation.make_batch`, `gae`).
5. `--compile` makes one graph of a minibatch's forward, backward, clipping and Adam, of all agents
   (`PPOPopulation.update_minibatch`), and `--cudagraphs` replays all epochs of an iteration as one CUDA graph, or one
   each with --target-kl (`PPOPopulation.iterate`, `PPOPopulation.iterate_to_kl`).

    python leanrl/ppo_population_torchcompile.py --env-id HalfCheetah-v5 --seeds 1 2 3 4 5 6 7 8 --compile --cudagraphs
    python leanrl/ppo_population_torchcompile.py --seeds 1 --learning-rate 1e-4 3e-4 1e-3 --compile --cudagraphs

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

GRAPH_WARMUP = 3  # the call at which a CUDA graph is captured; compilation is over by then
CompileMode = Literal["default", "max-autotune-no-cudagraphs"]


@dataclass
class Args:
    env_id: str = "HalfCheetah-v5"
    """gymnasium environment"""
    seeds: tuple[int, ...] = (1, 2, 3, 4)
    """seed of each agent's environments, networks and noise"""
    total_timesteps: int = 1_000_000
    """environment steps of each agent, over all of its environments"""
    num_envs: int = 1
    """environments of each agent"""
    num_steps: int = 2048
    """steps of each environment per iteration"""
    learning_rate: tuple[float, ...] = (3e-4,)
    """learning rate of the first iteration"""
    anneal_lr: bool = True
    """lower the learning rate linearly to 0 at the end of the run"""
    gamma: tuple[float, ...] = (0.99,)
    """discount factor"""
    gae_lambda: tuple[float, ...] = (0.95,)
    """lambda of generalized advantage estimation"""
    num_minibatches: int = 32
    """minibatches per epoch"""
    update_epochs: int = 10
    """passes over an iteration's transitions"""
    norm_adv: bool = True
    """normalize the advantages of each minibatch"""
    clip_coef: tuple[float, ...] = (0.2,)
    """largest change of the probability ratio from 1 (epsilon in the paper)"""
    clip_vloss: bool = True
    """clip the change of the values by --clip-coef too"""
    ent_coef: tuple[float, ...] = (0.0,)
    """coefficient of the entropy in the loss"""
    vf_coef: tuple[float, ...] = (0.5,)
    """coefficient of the value loss"""
    max_grad_norm: tuple[float, ...] = (0.5,)
    """largest norm of an agent's gradient, which is scaled down to it"""
    target_kl: tuple[float | None, ...] = (None,)
    """end an agent's iteration after the epoch in which its approximate KL divergence exceeds this"""
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


class PPOPopulation:
    """The learners of all agents. CUDA graphs replay kernels, not Python: what changes in training is a tensor.

    Tensors have a leading dimension of agents. No operation mixes agents: a diverging agent does not affect the others.
    """

    def __init__(self, args, agents, envs, device):
        """`agents` holds each agent's arguments; `envs` the first agent's environments, the second's, and so on."""
        self.args = args
        self.agents = agents
        self.device = device
        self.cudagraphs = args.cudagraphs and device.type == "cuda"
        self.obs_dim = envs.single_observation_space.shape[0]
        self.act_dim = envs.single_action_space.shape[0]
        self.low = envs.single_action_space.low
        self.high = envs.single_action_space.high
        networks, self.generators = [], []
        for agent in agents:
            torch.manual_seed(agent.seed)
            with device:
                networks.append(Agent(self.obs_dim, self.act_dim))
            self.generators.append(Generators(device))
        self.batched = args.compile or self.cudagraphs
        self.networks = Networks(networks, self.batched)
        # float64 as the single-agent script's numbers are, so that what is computed from them rounds the same
        float64 = partial(torch.tensor, dtype=torch.float64, device=device)
        self.learning_rates = float64([[agent.learning_rate] for agent in agents])
        self.gamma = float64([agent.gamma for agent in agents])
        self.gae_lambda = float64([agent.gae_lambda for agent in agents])
        clip = float64([[agent.clip_coef] for agent in agents])
        self.clip, self.clip_low, self.clip_high = clip.float(), (1 - clip).float(), (1 + clip).float()
        self.ent_coef = torch.tensor([agent.ent_coef for agent in agents], device=device)
        self.vf_coef = torch.tensor([agent.vf_coef for agent in agents], device=device)
        self.max_grad_norm = torch.tensor([agent.max_grad_norm for agent in agents], device=device)
        self.target_kls = [math.inf if agent.target_kl is None else agent.target_kl for agent in agents]
        self.optimizers = {"agent": AdamByAgent(self.networks.weights, self.learning_rates)}
        self.normalizer = PopulationNormalizer(args.num_envs, self.obs_dim, [agent.gamma for agent in agents])
        self.grad_norm = torch.zeros(len(agents), device=device)  # of the last minibatch, before clipping
        self.scalars = PopulationScalars(len(agents), device)
        self.updates = 0
        self.warmup_updates = GRAPH_WARMUP if self.cudagraphs else 1

        on_cuda = device.type == "cuda"
        copies = [copy.deepcopy(network).cpu() for network in networks] if on_cuda else []
        self.host_networks = Networks(copies, batched=False) if on_cuda else self.networks
        check_agent(self.host_networks.first, self.obs_dim, self.act_dim)
        acting = partial(on_host, layers="actor", obs_dim=self.obs_dim, forward=lambda agent, obs: agent(obs)[0])
        self.mean_actions = [acting(network) for network in self.host_networks.networks]

        self.step_shapes = {"obs": (self.obs_dim,), "next_obs": (self.obs_dim,), "actions": (self.act_dim,)}
        self.step_shapes |= {"rewards": (), "terminated": (), "ended": ()}
        self.batch_shapes = {"obs": (self.obs_dim,), "actions": (self.act_dim,)}
        self.batch_shapes |= {"log_prob": (), "values": (), "advantages": (), "returns": ()}
        step_width = sum(math.prod(shape) for shape in self.step_shapes.values())
        batch_width = sum(math.prod(shape) for shape in self.batch_shapes.values())
        numbers = args.num_envs * (step_width + batch_width + self.act_dim + args.update_epochs)
        require_memory_of_agents(args, len(agents), "num_steps", bytes_each=4 * numbers)
        sizes = len(agents), args.num_steps, args.num_envs
        self.host_rollout = torch.zeros(*sizes, step_width, pin_memory=on_cuda)
        self.rollout = self.host_rollout.to(device)  # on a CPU the same memory
        self.steps = {name: x.numpy() for name, x in split_columns(self.host_rollout, self.step_shapes).items()}
        self.host_noise = torch.empty(*sizes, self.act_dim)
        self.noise = self.host_noise.numpy()
        batch_size = args.num_steps * args.num_envs
        self.batch = torch.zeros(len(agents), batch_size, batch_width, device=device)
        self.agent = torch.arange(len(agents), device=device).unsqueeze(-1)
        # numbers whose order is that of an epoch's transitions
        self.uniform = torch.empty(args.update_epochs, len(agents), batch_size, device=device)
        self.apply_compile_and_cudagraphs()

    def make_batch(self):
        """Fill `batch`, whose rows are the rollouts' transitions with their advantages and returns."""
        steps = split_columns(self.rollout.flatten(1, 2), self.step_shapes)
        mean, log_std, values = self.networks(steps["obs"])
        _, _, next_values = self.networks(steps["next_obs"])

        # GAE (arXiv:1506.02438, eq. 16)
        columns = (steps["rewards"], values, next_values, steps["terminated"], steps["ended"])
        in_time = [column.unflatten(1, (self.args.num_steps, self.args.num_envs)) for column in columns]
        advantages = vmap(gae)(*in_time, self.gamma, self.gae_lambda).flatten(1)

        batch = split_columns(self.batch, self.batch_shapes)
        batch["obs"].copy_(steps["obs"])
        batch["actions"].copy_(steps["actions"])
        batch["log_prob"].copy_(gaussian_log_prob(mean, log_std, steps["actions"]))
        batch["values"].copy_(values)
        batch["advantages"].copy_(advantages)
        batch["returns"].copy_(advantages + values)

    def loss(self, rows, weights=None):
        """Policy loss, value loss and entropy, (agents,), and the log of the probability ratio, (agents, batch).

        `rows` are of `batch`, (agents, batch, width).
        """
        rows = split_columns(rows, self.batch_shapes)
        mean, log_std, values = self.networks(rows["obs"], weights=weights)

        # clipped policy loss (eq. 7)
        log_ratio = gaussian_log_prob(mean, log_std, rows["actions"]) - rows["log_prob"]
        ratio = log_ratio.exp()
        advantages = rows["advantages"]
        if self.args.norm_adv:
            std = self.by_agent(torch.std, advantages).unsqueeze(-1)
            advantages = (advantages - advantages.mean(-1, keepdim=True)) / (std + 1e-8)
        clipped_ratio = ratio.clamp(self.clip_low, self.clip_high)
        policy_loss = -torch.min(advantages * ratio, advantages * clipped_ratio).mean(-1)

        # clipped value loss
        errors = (values - rows["returns"]).square()
        if self.args.clip_vloss:
            clipped_values = rows["values"] + (values - rows["values"]).clamp(-self.clip, self.clip)
            errors = torch.max(errors, (clipped_values - rows["returns"]).square())
        value_loss = 0.5 * errors.mean(-1)

        entropy = (log_std + 0.5 * (1 + math.log(2 * math.pi))).expand_as(mean).sum(-1).mean(-1)
        return policy_loss, value_loss, entropy, log_ratio

    def update_minibatch(self, rows):
        """One step of Adam on the losses of `rows`, (agents, minibatch, width)."""
        weights = self.networks.weights.detach().requires_grad_()
        policy_loss, value_loss, entropy, _ = self.loss(rows, weights)
        loss = policy_loss - self.ent_coef * entropy + self.vf_coef * value_loss
        (gradient,) = torch.autograd.grad(loss.sum(), weights)
        self.grad_norm.copy_(self.by_agent(torch.norm, gradient))
        scale = ((self.grad_norm + 1e-6).reciprocal() * self.max_grad_norm).clamp(max=1)
        self.optimizers["agent"].step(self.networks.weights, gradient * scale.unsqueeze(-1))

    def by_agent(self, function, rows):
        """`function` of each agent's row; one after the other it rounds as in the single-agent script."""
        return vmap(function)(rows) if self.batched else torch.stack([function(row) for row in rows])

    def learn_epoch(self, uniform):
        """One pass over the batch, in minibatches drawn without replacement, by `uniform`, (agents, transitions)."""
        for rows in self.batch[self.agent, uniform.argsort(-1)].chunk(self.args.num_minibatches, 1):
            self.update_minibatch(rows)

    def measure(self):
        """Store losses and statistics of the whole batch."""
        policy_loss, value_loss, entropy, log_ratio = self.loss(self.batch)
        ratio = log_ratio.exp()
        batch = split_columns(self.batch, self.batch_shapes)
        errors = batch["returns"] - batch["values"]
        self.scalars.store(
            policy_loss=policy_loss,
            value_loss=value_loss,
            entropy=entropy,
            approx_kl=(ratio - 1 - log_ratio).mean(-1),  # http://joschu.net/blog/kl-approx.html, k3
            clipfrac=((ratio - 1).abs() > self.clip).float().mean(-1),
            grad_norm=self.grad_norm,
            explained_variance=1 - self.by_agent(torch.var, errors) / self.by_agent(torch.var, batch["returns"]),
        )

    def iterate(self):
        """All epochs over the rollouts."""
        self.make_batch()
        for uniform in self.uniform:
            self.learn_epoch(uniform)
        self.measure()

    def iterate_to_kl(self):
        """As `iterate`, but each agent keeps what it had learned when its KL divergence exceeded --target-kl."""
        self.make_batch()
        learned = [self.networks.weights, *self.optimizers["agent"].changing(), self.grad_norm]
        ended = {}
        for uniform in self.uniform:
            self.draw_order(uniform, [i for i in range(len(self.agents)) if i not in ended])
            self.learn_epoch(uniform)
            self.measure()
            for i, losses in enumerate(self.losses()):
                if i not in ended and losses["approx_kl"] > self.target_kls[i]:
                    ended[i] = [tensor[i].clone() for tensor in learned]
            if len(ended) == len(self.agents):
                break
        for i, values in ended.items():
            for tensor, value in zip(learned, values, strict=True):
                tensor[i].copy_(value)
        self.measure()

    def draw_order(self, uniform, agents):
        """Draw an epoch's order of the transitions of some agents, each from its own generator.

        Outside CUDA graphs, so that a replay need not set the generators' seeds and offsets first.
        """
        for i in agents:
            uniform[i].uniform_(generator=self.generators[i].device)

    def update(self, remaining):
        """Learn from the rollouts, with `remaining` of the learning rates, and send the new parameters to the host."""
        self.optimizers["agent"].lr = self.learning_rates * remaining
        self.rollout.copy_(self.host_rollout, non_blocking=True)
        if min(self.target_kls) < math.inf:
            self.iterate_to_kl()
        else:
            for uniform in self.uniform:
                self.draw_order(uniform, range(len(self.agents)))
            self.iterate()
        self.host_networks.weights.copy_(self.networks.weights)
        self.updates += 1

    def act(self, t, obs):
        """Sampled actions for step `t` of the rollouts, (agents * num_envs, act_dim), NumPy.

        `obs` are NumPy, (agents, num_envs, obs_dim), normalized. A diverged policy's NaN becomes the middle of the
        action space, so that no environment sees a NaN: they all run in one process.
        """
        if t == 0:
            self.draw_noise()
        self.steps["obs"][:, t] = obs
        actions = self.steps["actions"][:, t]
        for i, mean_actions in enumerate(self.mean_actions):
            actions[i] = mean_actions(obs[i])
        actions += self.noise[:, t]
        actions = actions.reshape(-1, self.act_dim).clip(self.low, self.high)
        return np.where(np.isnan(actions), (self.low + self.high) / 2, actions)

    def draw_noise(self):
        """Draw the noise of whole rollouts, as the standard deviations do not depend on observations."""
        for i, network in enumerate(self.host_networks.networks):
            _, log_std, _ = network(torch.zeros(1, self.obs_dim))
            self.host_noise[i].normal_(generator=self.generators[i].host).mul_(log_std.exp())

    def record(self, t, next_obs, last_obs, rewards, terminated, ended):
        """Store what step `t` led to; all are NumPy, (agents * num_envs, ...). Returns `next_obs` normalized,
        (agents, num_envs, obs_dim).

        `last_obs` is `next_obs`, but the last observation where an episode ended, as `ended` says.
        """
        rows = len(self.agents), self.args.num_envs
        rewards, terminated, ended = (column.reshape(rows) for column in (rewards, terminated, ended))
        obs, rewards = self.normalizer.normalize(next_obs.reshape(*rows, -1), rewards, ended)
        last = obs if last_obs is next_obs else self.normalizer.scale_obs(last_obs.reshape(*rows, -1))
        self.steps["next_obs"][:, t] = last
        self.steps["rewards"][:, t] = rewards
        self.steps["terminated"][:, t] = terminated if self.args.bootstrap_truncation else ended
        self.steps["ended"][:, t] = ended
        return obs

    def apply_compile_and_cudagraphs(self):
        """The one place where functions are compiled and captured."""
        if self.args.compile:
            # on a CPU, kernels are called from C++
            options = ON_CUDA if self.device.type == "cuda" else {"cpp_wrapper": True}
            self.update_minibatch = compiled(self.update_minibatch, self.args.compile_mode, options)
        if self.cudagraphs:
            if min(self.target_kls) == math.inf:
                self.iterate = CudaGraphModule(self.iterate, warmup=GRAPH_WARMUP)
            else:  # the host looks at the KL divergence between epochs
                self.make_batch = CudaGraphModule(self.make_batch, warmup=GRAPH_WARMUP)
                self.learn_epoch = CudaGraphModule(self.learn_epoch, warmup=GRAPH_WARMUP)
                self.measure = CudaGraphModule(self.measure, warmup=GRAPH_WARMUP)

    def losses(self):
        """The last update's losses and statistics by name, a dictionary per agent; waits for that update."""
        return self.scalars.fetch()

    def policy(self, i):
        """A copy of an agent's deterministic policy, on the CPU."""
        return Policy(self.networks.cpu_copy(i), self.normalizer.tensors(i), self.low, self.high).eval()

    def tensors(self, i):
        """Every tensor of an agent that updates change. What is missing here is not saved."""
        return {
            "networks": {"agent": self.networks.networks[i].state_dict()},
            "optimizers": {name: optimizer.tensors(i) for name, optimizer in self.optimizers.items()},
            "normalizer": self.normalizer.tensors(i),
        }

    def state_dict(self, i):
        """Copies on the CPU of what an agent needs to continue bit for bit, as the single-agent script's."""
        return tree_map(lambda tensor: tensor.detach().to("cpu", copy=True), self.tensors(i)) | {
            "updates": self.updates,
            "rng": self.generators[i].host.get_state(),
            "cuda_rng": [self.generators[i].device.get_state()] if self.device.type == "cuda" else [],
        }

    def load_state_dict(self, i, state):
        """Restore an agent from what `state_dict` returned."""
        tensors = self.tensors(i)
        load_tensors(tensors, {name: state[name] for name in tensors})
        self.host_networks.weights[i].copy_(self.networks.weights[i])
        self.updates = state["updates"]
        self.generators[i].load(state["rng"], state["cuda_rng"])


def train(args, on_start=lambda population: None):
    """Train all agents. `on_start` is for tools: it is called with the `Population` before the first step."""
    with Population(args) as population:
        check_batch(args)
        check_compile(args, population.device)
        agents = population.agents
        require_memory_of_agents(args, len(agents), "num_envs", bytes_each=20_000)  # as in make_envs
        envs = DirectEnvs(make_envs(replace(args, num_envs=len(agents) * args.num_envs), population.folder))
        require_bounded_actions(args, envs)
        learner = PPOPopulation(args, agents, envs, population.device)
        population.start(envs, learner)
        seeds = [agent.seed + population.step for agent in agents]
        obs, _ = envs.reset(seed=[seed + i for seed in seeds for i in range(args.num_envs)])
        obs, _ = learner.normalizer.normalize(obs.reshape(len(agents), args.num_envs, -1))
        on_start(population)
        while population.unfinished():
            remaining = 1 - population.step / args.total_timesteps if args.anneal_lr else 1.0
            for t in range(args.num_steps):
                actions = learner.act(t, obs)
                next_obs, last_obs, rewards, terminated, truncated = envs.step(actions)
                ended = terminated | truncated
                obs = learner.record(t, next_obs, last_obs, rewards, terminated, ended)
                population.advance(rewards, ended)
            learner.update(remaining)
            population.log(learner.losses())


class Policy(nn.Module):
    """What policy.pt2 holds, the deterministic policy: (batch, obs_dim) to (batch, act_dim).

    It normalizes observations by the statistics of its time and clips actions to their bounds.
    """

    def __init__(self, agent, statistics, low, high):
        super().__init__()
        self.agent = agent
        self.register_buffer("mean", statistics["mean"][:-1].clone())
        self.register_buffer("std", statistics["std"][:-1].clone())
        self.register_buffer("low", torch.tensor(low))
        self.register_buffer("high", torch.tensor(high))

    def forward(self, obs):
        scaled = ((obs - self.mean) / self.std).clamp(-10, 10).float()
        mean, _, _ = self.agent(scaled)
        return mean.clamp(self.low, self.high)


# ---------------------------------------------------------------------------------------------------------------------
# What makes it fast: all networks as one, Adam, acting in NumPy, environments' steps, advantages, compilation
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


class AdamByAgent:
    """Adam (Kingma and Ba 2015, arXiv:1412.6980) for the flat vectors of all agents, each with its own count of steps.

    `optimizer.lr = ...` works at any time: attributes are tensors, which assignment fills in place, so that CUDA
    graphs and checkpoints see the change.
    """

    def __init__(self, weights, lr):
        """`weights` is (agents, size), and `lr`, float64, is (agents, 1)."""
        self.lr = lr.clone()
        self.m = torch.zeros_like(weights)
        self.v = torch.zeros_like(weights)
        self._betas = torch.tensor((BETA1, BETA2), dtype=torch.float64, device=weights.device)
        self.decay = self._betas.new_ones(len(weights), 2)  # beta1**t and beta2**t after t steps

    def __setattr__(self, name, value):
        if not torch.is_tensor(value):
            raise TypeError(f"Adam.{name} must be a tensor: CUDA graphs freeze Python values, checkpoints lack them")
        if name in vars(self):
            vars(self)[name].copy_(value)
        else:
            super().__setattr__(name, value)

    def step(self, weights, gradient):
        """Move `weights` one step against `gradient`, in place."""
        self.decay.mul_(self._betas).clamp_(min=1e-30)  # denormal numbers, after 7000 steps, would be slow
        self.m.lerp_(gradient, 1 - BETA1)
        self.v.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        correction1, correction2 = (1 - self.decay).split(1, -1)
        root = correction2.sqrt()
        # lr * m_hat / (sqrt(v_hat) + eps): the corrections and lr are in the denominator, also right for lr = 0
        scale = correction1 / (self.lr * root)
        denominator = self.v.sqrt().add_((EPS * root).to(weights.dtype)).mul_(scale.to(weights.dtype))
        weights.addcdiv_(self.m, denominator, value=-1)

    def changing(self):
        """What steps change, tensors with a leading dimension of agents."""
        return self.m, self.v, self.decay

    def tensors(self, i):
        """What an agent needs to resume, by name, as the single-agent script's."""
        return {"m": self.m[i], "v": self.v[i], "decay": self.decay[i]}


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


def check_agent(agent, obs_dim, act_dim):
    """Refuse agents that would act otherwise than `make_batch` and `draw_noise` take for granted."""
    obs = torch.ones(2, obs_dim)
    mean, log_std, _ = agent(obs)
    mean_again, _, _ = agent(obs)
    if log_std.shape not in ((1, act_dim), (1, 1)):
        raise ValueError(f"log_std must be (1, {act_dim}), for all observations, not {tuple(log_std.shape)}")
    if not torch.equal(mean, mean_again):
        raise ValueError("the actor must give the same mean in each call: no dropout, no running statistics")


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


class PopulationNormalizer:
    """Scales observations to mean 0 and variance 1, and rewards so that discounted returns have variance 1.

    The environments of an agent share its statistics, which are float64 (Chan, Golub and LeVeque 1983). Results are in
    [-10, 10].
    """

    def __init__(self, num_envs, obs_dim, gamma):
        """`gamma` has each agent's discount factor."""
        self.gamma = np.array(gamma)[:, None]
        self.rows = np.zeros((len(gamma), num_envs, obs_dim + 1))  # observation, and the discounted return so far
        self.returns = self.rows[..., -1]
        self.count = np.zeros((len(gamma), 1))
        self.mean = np.zeros((len(gamma), obs_dim + 1))
        self.squares = np.zeros((len(gamma), obs_dim + 1))  # sum of squared differences from the mean
        self.std = np.ones((len(gamma), obs_dim + 1))

    def normalize(self, obs, rewards=0.0, ended=False):
        """Observations and rewards, scaled by statistics that include them.

        They are (agents, num_envs, obs_dim) and (agents, num_envs).
        """
        self.rows[..., :-1] = obs
        self.returns[:] = self.gamma * self.returns + rewards
        errors = self.rows - self.mean[:, None]
        self.count += errors.shape[1]
        self.mean += np.add.reduce(errors, 1) / self.count
        centered = self.rows - self.mean[:, None]
        self.squares += np.add.reduce(errors * centered, 1)
        np.sqrt(self.squares / self.count + 1e-8, out=self.std)
        self.returns[ended] = 0
        centered[..., -1] = rewards
        scaled = (centered / self.std[:, None]).clip(-10, 10).astype(np.float32)
        return scaled[..., :-1], scaled[..., -1]

    def scale_obs(self, obs):
        """Observations, (agents, n, obs_dim), scaled by the statistics as they are."""
        return ((obs - self.mean[:, None, :-1]) / self.std[:, None, :-1]).clip(-10, 10).astype(np.float32)

    def tensors(self, i):
        """An agent's statistics by name, as tensors that share their memory."""
        return {name: torch.from_numpy(getattr(self, name)[i]) for name in ("count", "mean", "squares", "std")}


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
#     "mujoco==4.0.0",
#     "imageio==2.38.1",
#     "moviepy==2.2.1",
#     "matplotlib==3.11.2",
# ]
# ///
