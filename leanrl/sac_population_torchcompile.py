"""Soft Actor-Critic for N agents at once: seeds and hyper-parameters side by side in one program.

Each agent is a run of sac_continuous_action_torchcompile.py with its seed and its flags: it draws the same random
numbers and makes the same updates. What makes N agents cheap:

1. The networks of all agents are rows of one matrix: a layer is one batched matmul, and one Adam step
   updates all agents in as many operations as one agent (`Networks`, `PopulationAdam`).
2. The replay buffer has a leading dimension; a step of all environments costs one copy in and one copy out
   (`SACPopulation.observe`).
3. `--compile` makes one graph of each part of an update, and `--cudagraphs` replays acting and learning as CUDA graphs,
   for all agents at once (`SACPopulation.apply_compile_and_cudagraphs`).
4. The environments step while the device updates: the host waits only for its next actions (`train`).

    python leanrl/sac_population_torchcompile.py --env-id HalfCheetah-v5 --seeds 1 2 3 4 5 6 7 8 --compile --cudagraphs
    python leanrl/sac_population_torchcompile.py --seeds 1 --policy-lr 1e-4 3e-4 1e-3 3e-3 --compile --cudagraphs

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
from gymnasium.vector.utils import batch_space
from tensordict.nn import CudaGraphModule
from torch import nn
from torch.func import functional_call, vmap
from torch.utils._pytree import keystr, tree_leaves, tree_leaves_with_path, tree_map
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

NUM_CRITICS = 2
LOG_STD_MIN = -5.0
LOG_STD_MAX = 2.0
LOG_INTERVAL = 100  # vector steps between two logs of the losses
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
    buffer_size: int = 1_000_000
    """transitions in each agent's replay buffer"""
    gamma: tuple[float, ...] = (0.99,)
    """discount factor"""
    tau: tuple[float, ...] = (0.005,)
    """target smoothing coefficient"""
    batch_size: int = 256
    """transitions per update"""
    learning_starts: int = 5_000
    """environment steps of each agent with random actions before the first update"""
    policy_lr: tuple[float, ...] = (3e-4,)
    """learning rate of the actor"""
    q_lr: tuple[float, ...] = (1e-3,)
    """learning rate of the critics and of the entropy coefficient"""
    policy_frequency: int = 2
    """update the actor every so many updates, with as many steps"""
    target_network_frequency: int = 1
    """update the target networks every so many updates"""
    updates_per_step: int = 1
    """updates after each step of all environments"""
    alpha: tuple[float, ...] = (0.2,)
    """entropy coefficient with --no-autotune"""
    autotune: bool = True
    """tune the entropy coefficient"""

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
    threads: int = 0
    """CPU threads for torch (0: torch's default)"""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """precision of float32 matmuls and convolutions (high: TF32, medium: bfloat16)"""
    torch_deterministic: bool = True
    """use deterministic cuDNN kernels"""


AT_LEAST_1 = ("total_timesteps", "num_envs", "buffer_size", "batch_size")
AT_LEAST_1 += ("policy_frequency", "target_network_frequency", "updates_per_step")
AT_MOST_1 = ("gamma", "tau")
POSITIVE = ("policy_lr", "q_lr")  # others may be 0, none negative
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
    """A Gaussian policy, before it is squashed: (batch, obs_dim) to mean and log standard deviation."""

    def __init__(self, obs_dim, act_dim):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(obs_dim, 256),
            nn.ReLU(),
            nn.Linear(256, 256),
            nn.ReLU(),
            nn.Linear(256, 2 * act_dim),
        )

    def forward(self, obs):
        mean, log_std = self.net(obs).chunk(2, -1)
        return mean, LOG_STD_MIN + (LOG_STD_MAX - LOG_STD_MIN) / 2 * (log_std.tanh() + 1)


class SquashedGaussian:
    """Samples a Gaussian and squashes it by tanh into the bounds of the action space (appendix C). No parameters."""

    def __init__(self, action_space, device):
        low = torch.tensor(action_space.low, dtype=torch.float32, device=device)
        high = torch.tensor(action_space.high, dtype=torch.float32, device=device)
        self.scale = (high - low) / 2
        self.bias = (high + low) / 2

    def sample(self, mean, log_std, noise):
        """Actions, (batch, act_dim), and their log-probabilities, (batch,); `noise` is standard normal."""
        squashed = (mean + log_std.exp() * noise).tanh()
        gaussian_log_prob = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        log_prob = gaussian_log_prob - (self.scale * (1 - squashed.square()) + 1e-6).log()
        return squashed * self.scale + self.bias, log_prob.sum(-1)


class SACPopulation:
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
        actors, critics, self.generators = [], [], []
        for agent in agents:
            torch.manual_seed(agent.seed)
            with device:
                actors.append(Actor(self.obs_dim, self.act_dim))
                critics.append(nn.ModuleList([Critic(self.obs_dim, self.act_dim) for _ in range(NUM_CRITICS)]))
            self.generators.append(Generators(device))
        batched = args.compile or self.cudagraphs
        self.actors = Networks(actors, batched)
        self.critics = Networks(critics, batched)
        self.target_critics = Networks(copy.deepcopy(critics), batched)
        self.gaussian = SquashedGaussian(envs.single_action_space, device)
        self.gamma = torch.tensor([[agent.gamma] for agent in agents], device=device)
        self.tau = torch.tensor([[agent.tau] for agent in agents], device=device)
        alphas = [1.0 if args.autotune else agent.alpha for agent in agents]
        self.log_alpha = torch.tensor(alphas, device=device).log()
        policy_lrs = [[agent.policy_lr] for agent in agents]
        q_lrs = [[agent.q_lr] for agent in agents]
        self.optimizers = {
            "actor": PopulationAdam(self.actors.weights, policy_lrs),
            "critics": PopulationAdam(self.critics.weights, q_lrs),
            "alpha": PopulationAdam(self.log_alpha, [agent.q_lr for agent in agents]),
        }
        self.scalars = PopulationScalars(len(agents), device)
        # numbers from [0, 1) that pick a batch, in float64, since float32 is uneven over a million rows
        self.uniform = torch.empty(len(agents), args.batch_size, dtype=torch.float64, device=device)
        draws = 1 + 2 * args.policy_frequency
        self.noise = torch.empty(len(agents), draws, args.batch_size, self.act_dim, device=device)
        self.updates = 0
        # warm-up ends when each kind of update has been compiled and captured
        self.warmup_updates = GRAPH_WARMUP * math.lcm(args.policy_frequency, args.target_network_frequency)

        shapes = {"obs": (self.obs_dim,), "next_obs": (self.obs_dim,), "actions": (self.act_dim,)}
        shapes |= {"rewards": (), "terminated": ()}
        row_bytes = 4 * sum(math.prod(shape) for shape in shapes.values())
        require_memory_of_agents(args, len(agents), "buffer_size", row_bytes)
        self.replay = PopulationReplay(len(agents), args.buffer_size, shapes, device, spare=args.num_envs)
        on_cuda = device.type == "cuda"
        self.input_sizes = (self.replay.width, self.obs_dim, self.act_dim)  # of transitions, observations, and noise
        rows = len(agents), args.num_envs
        self.host_input = torch.zeros(*rows, sum(self.input_sizes), pin_memory=on_cuda)
        self.input = self.host_input.to(device)  # on a CPU the same memory
        self.host_actions = torch.zeros(*rows, self.act_dim, pin_memory=on_cuda)
        self.actions = self.host_actions.to(device)
        self.actions_arrived = torch.cuda.Event() if on_cuda else HostEvent()
        self.apply_compile_and_cudagraphs()

    def update_critics(self, targets_too, uniform, noise):
        """One step on the critics and, with `targets_too`, on the target critics.

        `uniform`, (agents, batch), from [0, 1), picks the transitions; `noise`, (agents, batch, act_dim), is for the
        next actions. Returns the transitions' observations, (agents, batch, obs_dim), and losses by name, (agents,).
        """
        batch = self.replay.sample(uniform)
        obs, next_obs = batch["obs"], batch["next_obs"]

        # critic loss (eq. 5)
        with torch.no_grad():
            next_actions, next_log_prob = self.gaussian.sample(*self.actors(next_obs), noise)
            next_q = self.target_critics(next_obs, next_actions).amin(1)
            next_v = next_q - self.log_alpha.exp().unsqueeze(-1) * next_log_prob
            target = batch["rewards"] + (1 - batch["terminated"]) * self.gamma * next_v
        weights = self.critics.weights.detach().requires_grad_()
        q = self.critics(obs, batch["actions"], weights=weights)  # (agents, NUM_CRITICS, batch)
        qf_loss = (q - target.unsqueeze(1)).square().mean(-1).sum(-1)
        (gradient,) = torch.autograd.grad(qf_loss.sum(), weights)
        self.optimizers["critics"].step(self.critics.weights, gradient)

        # target networks
        if targets_too:
            self.target_critics.weights.lerp_(self.critics.weights, self.tau)
        losses = {f"qf{i + 1}_values": values for i, values in enumerate(q.detach().mean(-1).unbind(1))}
        return obs, losses | {"qf_loss": qf_loss.detach()}

    def update_actor(self, obs, noises):
        """Steps on the actors for `obs`, (agents, batch, obs_dim), each followed by one on the entropy coefficients.

        There are as many steps as in `noises`, (agents, steps, 2, batch, act_dim); each has the noise for the actor's
        loss and for the temperature's. Returns losses by name, (agents,).
        """
        weights = self.actors.weights.detach().requires_grad_()
        mean, log_std = self.actors(obs, weights=weights)
        for pair in noises.unbind(1):
            noise, temperature_noise = pair.unbind(1)
            # actor loss (eq. 7)
            alpha = self.log_alpha.exp().unsqueeze(-1)
            actions, log_prob = self.gaussian.sample(mean, log_std, noise)
            q = self.critics(obs, actions).amin(1)
            actor_loss = (alpha * log_prob - q).mean(-1)
            (gradient,) = torch.autograd.grad(actor_loss.sum(), weights)
            self.optimizers["actor"].step(self.actors.weights, gradient)
            losses = {"actor_loss": actor_loss.detach(), "entropy": -log_prob.detach().mean(-1)}
            weights = self.actors.weights.detach().requires_grad_()
            mean, log_std = self.actors(obs, weights=weights)  # for the temperature and for the next step

            # temperature (eq. 18), with the new actor
            if self.args.autotune:
                _, log_prob = self.gaussian.sample(mean.detach(), log_std.detach(), temperature_noise)
                target_entropy = -self.act_dim
                alpha_loss = (-alpha * (log_prob + target_entropy)).mean(-1)
                # d exp(x) / dx = exp(x), so the gradient with respect to log_alpha is the loss itself
                self.optimizers["alpha"].step(self.log_alpha, gradient=alpha_loss)
                losses["alpha_loss"] = alpha_loss
        return losses | {"alpha": self.log_alpha.exp()}

    def learn(self, actor_too, targets_too):
        """One update, with the random numbers in `uniform` and `noise`."""
        obs, losses = self.update_critics(targets_too, self.uniform, self.noise[:, 0])
        self.scalars.store(**losses)
        if actor_too:
            noises = self.noise[:, 1:].unflatten(1, (-1, 2))  # for as many steps as were left out
            self.scalars.store(**self.update_actor(obs, noises))

    def update(self):
        """Launch one update: on a CUDA device it may still run when this returns.

        Random numbers are drawn here: outside compiled functions, so that all modes draw the same ones, and outside
        CUDA graphs, so that a replay need not set the generators' seeds and offsets first.
        """
        actor_too = self.updates % self.args.policy_frequency == 0
        targets_too = self.updates % self.args.target_network_frequency == 0
        for uniform, noise, generators in zip(self.uniform, self.noise, self.generators, strict=True):
            uniform.uniform_(generator=generators.device)
            noise = noise if actor_too else noise[:1]
            noise.normal_(generator=generators.device)
        self.learn_by_kind[actor_too, targets_too]()
        self.updates += 1

    def store_and_act(self):
        """Store the transitions in `input`, and sample actions for the observations that follow them."""
        rows, obs, noise = self.input.split(self.input_sizes, -1)
        self.replay.write(rows, self.args.num_envs)
        actions, _ = self.gaussian.sample(*self.actors(obs), noise)
        self.actions.copy_(actions)

    def observe(self, *, act_on, **transitions):
        """Store a transition per environment and launch the choice of actions for the observations `act_on`.

        All are NumPy, (agents * num_envs, ...). `next_actions` has to be called before the next call of this.
        """
        rows, obs, noises = self.host_input.split(self.input_sizes, -1)
        self.replay.pack(transitions, rows.numpy())
        obs.numpy()[:] = act_on.reshape(obs.shape)
        for noise, generators in zip(noises, self.generators, strict=True):
            noise.normal_(generator=generators.host)
        self.input.copy_(self.host_input, non_blocking=True)
        self.store_and_act()
        self.host_actions.copy_(self.actions, non_blocking=True)
        self.actions_arrived.record()

    def next_actions(self):
        """Wait for the actions, but for no update; NumPy, (agents * num_envs, act_dim).

        A diverged policy's NaN becomes the middle of the action space, so that no environment sees a NaN: they all run
        in one process.
        """
        self.actions_arrived.synchronize()
        actions = self.host_actions.flatten(0, 1).numpy().clip(self.low, self.high)
        return np.where(np.isnan(actions), (self.low + self.high) / 2, actions)

    def apply_compile_and_cudagraphs(self):
        """The one place where functions are compiled and captured."""
        kinds = [(actor_too, targets_too) for actor_too in (False, True) for targets_too in (False, True)]
        self.learn_by_kind = {kind: partial(self.learn, *kind) for kind in kinds}
        if self.args.compile:
            mode = self.args.compile_mode
            options = ON_CUDA if self.device.type == "cuda" else {}
            self.store_and_act = compiled(self.store_and_act, mode, options)
            self.update_critics = compiled(self.update_critics, self.args.critic_compile_mode or mode, options)
            self.update_actor = compiled(self.update_actor, mode, options)
        if self.cudagraphs:
            self.store_and_act = CudaGraphModule(self.store_and_act, warmup=GRAPH_WARMUP)
            for kind in kinds:
                self.learn_by_kind[kind] = CudaGraphModule(self.learn_by_kind[kind], warmup=GRAPH_WARMUP)

    def losses(self):
        """The last update's losses by name, a dictionary per agent; waits for that update."""
        return self.scalars.fetch()

    def policy(self, i):
        """A copy of an agent's deterministic policy, on the CPU."""
        return Policy(self.actors.cpu_copy(i), self.gaussian)

    def tensors(self, i):
        """Every tensor of an agent that updates change, but the replay buffer. What is missing here is not saved."""
        return {
            "networks": {
                "actor": self.actors.networks[i].state_dict(),
                "critics": self.critics.networks[i].state_dict(),
                "target_critics": self.target_critics.networks[i].state_dict(),
            },
            "optimizers": {name: optimizer.tensors(i) for name, optimizer in self.optimizers.items()},
            "log_alpha": self.log_alpha[i],
        }

    def state_dict(self, i):
        """Copies on the CPU of what an agent needs to continue bit for bit, as the single-agent script's."""
        tensors = self.tensors(i)
        moments = tensors["optimizers"]["critics"]
        moments |= {name: to_single(self.critics, moments[name]) for name in ("m", "v")}
        return tree_map(lambda tensor: tensor.detach().to("cpu", copy=True), tensors) | {
            "replay": self.replay.state_dict(i),
            "updates": self.updates,
            "rng": self.generators[i].host.get_state(),
            "cuda_rng": [self.generators[i].device.get_state()] if self.device.type == "cuda" else [],
        }

    def load_state_dict(self, i, state):
        """Restore an agent from what `state_dict` returned, with the learning rates of this run's arguments."""
        tensors = self.tensors(i)
        if not self.args.autotune:
            del tensors["log_alpha"]
        moments = state["optimizers"]["critics"]
        moments = moments | {name: from_single(self.critics, moments[name]) for name in ("m", "v")}
        state = state | {"optimizers": state["optimizers"] | {"critics": moments}}
        load_tensors(tensors, {name: state[name] for name in tensors})
        self.replay.load_state_dict(i, state["replay"])
        self.updates = state["updates"]
        self.generators[i].load(state["rng"], state["cuda_rng"])


def train(args, on_start=lambda population: None):
    """Train all agents. `on_start` is for tools: it is called with the `Population` before the first step."""
    with Population(args) as population:
        check_replay(args)
        check_compile(args, population.device)
        agents = population.agents
        require_memory_of_agents(args, len(agents), "num_envs", bytes_each=20_000)  # as in make_envs
        envs = make_envs(replace(args, num_envs=len(agents) * args.num_envs), population.folder)
        require_bounded_actions(args, envs)
        learner = SACPopulation(args, agents, envs, population.device)
        population.start(envs, learner)
        seeds = [agent.seed + population.step for agent in agents]
        action_spaces = [batch_space(envs.single_action_space, args.num_envs) for _ in agents]
        for space, seed in zip(action_spaces, seeds, strict=True):
            space.seed(seed)
        obs, _ = envs.reset(seed=[seed + i for seed in seeds for i in range(args.num_envs)])
        on_start(population)
        actions = np.concatenate([space.sample() for space in action_spaces])
        while population.unfinished():
            if population.step < args.learning_starts:
                actions = np.concatenate([space.sample() for space in action_spaces])
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
            population.advance(rewards, terminated | truncated)
            learning = population.step > args.learning_starts
            if learning:
                for _ in range(args.updates_per_step):
                    learner.update()
            actions = learner.next_actions()
            if learning and population.step // args.num_envs % LOG_INTERVAL == 0:
                population.log(learner.losses())


class Policy(nn.Module):
    """What policy.pt2 holds, the deterministic policy: (batch, obs_dim) to (batch, act_dim)."""

    def __init__(self, actor, squashed):
        super().__init__()
        self.actor = actor
        self.register_buffer("scale", squashed.scale.cpu())
        self.register_buffer("bias", squashed.bias.cpu())

    def forward(self, obs):
        mean, _ = self.actor(obs)
        return mean.tanh() * self.scale + self.bias


# ---------------------------------------------------------------------------------------------------------------------
# What makes it fast: flat networks, Adam, replay buffer on the device, compilation
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


def to_single(networks, row):
    """A row of the weights of `networks` as the single-agent script's flat vector: by parameter, then by member."""
    parts = [part.flatten() for part in row.unflatten(0, (networks.each, -1)).split(networks.sizes, -1)[::2]]
    return torch.cat([nn.functional.pad(part, (0, -len(part) % 16)) for part in parts])


def from_single(networks, vector):
    """The single-agent script's flat vector as a row of the weights of `networks`."""
    sizes = [size for shape in networks.shapes.values() for size in padded(networks.each * shape.numel())]
    parts = [part.unflatten(0, (networks.each, -1)) for part in vector.split(sizes)[::2]]
    return torch.cat([nn.functional.pad(part, (0, -part.shape[1] % 16)) for part in parts], 1).flatten()


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
