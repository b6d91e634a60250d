"""Proximal Policy Optimization (PPO) with memory, built for speed: Schulman et al. 2017, arXiv:1707.06347.

The algorithm is `PPO` and `train`. Below the line of dashes is the run, the same text in all scripts.
The updates are those of the plain version, ppo_lstm.py. Why it is faster:

1. Only the recurrent product is computed step by step. The contribution of observations to the gates is one matmul for
   all steps, and so is the gradient of each weight (`PPO.unroll`, `RecurrentBias`).
2. `--compile` compiles a few steps as one function, called in a loop over time: more steps take no longer to compile
   (`PPO.unroll_chunk`).
3. Values and log-probabilities of a rollout or a minibatch are computed at once, and advantages in log2(num_steps)
   rounds (`PPO.make_batch`, `PPO.loss`, `gae`).
4. `--cudagraphs` replays acting as one CUDA graph, and all epochs of an iteration as another, or each epoch with
   --target-kl (`PPO.decide`, `PPO.learn`).
5. The state of the recurrent cell stays on the device: an environment step takes one copy in and one copy out
   (`PPO.act`). The rollout is one block of host memory, copied at once (`PPO.update`).
6. Environments are stepped without the overhead of gymnasium's vector environment (`DirectEnvs`).

    python leanrl/ppo_lstm_torchcompile.py --env-id CartPole-v1 --compile --cudagraphs
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
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict.nn import CudaGraphModule
from torch import nn
from torch._inductor.cpu_vec_isa import VecISA
from torch.distributions import Categorical, Independent, Normal
from torch.utils import collect_env
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

HIDDEN = 128  # units of the recurrent cell
CHUNK = 8  # steps in a compiled function (if it divides --num-steps, else their greatest common divisor)
CELLS = {"lstm": nn.LSTMCell, "gru": nn.GRUCell}
CompileMode = Literal["default", "max-autotune-no-cudagraphs"]


@dataclass
class Args:
    env_id: str = "CartPole-v1"  # gymnasium environment
    cell: Literal["lstm", "gru"] = "lstm"  # recurrent cell
    total_timesteps: int = 500_000  # total environment steps, summed over all environments
    num_envs: int = 16  # number of environments, stepped together
    num_steps: int = 128  # steps of each environment per rollout, the length of a sequence
    learning_rate: float = 1e-3  # initial learning rate
    anneal_lr: bool = True  # decay the learning rate linearly to 0 over the run
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation (GAE)
    num_minibatches: int = 4  # minibatches per epoch, each the sequences of num_envs / num_minibatches environments
    update_epochs: int = 4  # passes over each rollout
    norm_adv: bool = True  # normalize advantages per minibatch
    clip_coef: float = 0.2  # clipping range of the probability ratio (epsilon in the paper)
    clip_vloss: bool = True  # also clip the change in value to --clip-coef
    ent_coef: float = 0.01  # coefficient of the entropy bonus
    vf_coef: float = 0.5  # coefficient of the value loss
    max_grad_norm: float = 0.5  # gradients are clipped to this norm (0: no clipping)
    target_kl: float | None = None  # end an iteration's epochs once the approximate KL divergence exceeds this
    bootstrap_truncation: bool = True  # bootstrap the value at a truncation; otherwise it counts as terminal

    compile: bool = False  # compile acting and updates with torch.compile
    cudagraphs: bool = False  # replay acting and updates as CUDA graphs
    compile_mode: CompileMode = "default"  # torch.compile mode
    cuda: bool = True  # use a CUDA device if there is one
    threads: int = 1  # CPU threads for torch (0: torch's default, slower for networks this small)
    matmul_precision: Literal["highest", "high", "medium"] = "highest"  # of float32 matmuls (high: TF32, medium: bf16)

    exp_name: str = Path(__file__).stem  # name of the experiment, used in the run's folder name
    seed: int = 1  # seed of the environments, NumPy and torch
    run_dir: str = "runs"  # parent folder of all runs
    resume: str | None = None  # folder of a run to resume; its flags become the defaults
    checkpoint_interval: int | None = None  # environment steps between checkpoints (0: only at the end; None: 20 times)
    capture_video: bool = False  # record videos of the first environment
    track: bool = False  # also log to Weights & Biases
    wandb_project_name: str = "leanrl"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases team


def linear(inputs, outputs, gain=2**0.5):
    """A linear layer, initialized with orthogonal weights and zero bias."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def recurrent(cell):
    """Initialize `cell` with orthogonal weights and zero biases, and return it."""
    for name, parameter in cell.named_parameters():
        if name.startswith("weight"):
            nn.init.orthogonal_(parameter)
        else:
            nn.init.zeros_(parameter)
    return cell


class Agent(nn.Module):
    """An encoder and a recurrent cell; policy and value function are linear in the cell's hidden state.

    The policy is categorical, or Gaussian with a state-independent standard deviation. A `state` (..., state_dim) is
    the cell's hidden state, for an LSTM concatenated with its cell state.
    """

    def __init__(self, obs_dim, action_space, cell):
        super().__init__()
        self.discrete = isinstance(action_space, gym.spaces.Discrete)
        self.act_dim = 1 if self.discrete else action_space.shape[0]
        self.state_dim = 2 * HIDDEN if cell == "lstm" else HIDDEN
        self.outputs = int(action_space.n) if self.discrete else self.act_dim  # logits or means
        self.encoder = nn.Sequential(linear(obs_dim, 64), nn.Tanh())
        self.cell = recurrent(CELLS[cell](64, HIDDEN))
        self.actor = linear(HIDDEN, self.outputs, gain=0.01)
        self.critic = linear(HIDDEN, 1, gain=1.0)
        self.register_buffer("obs_mean", torch.zeros(obs_dim, dtype=torch.float64))
        self.register_buffer("obs_std", torch.ones(obs_dim, dtype=torch.float64))
        if not self.discrete:
            self.log_std = nn.Parameter(torch.zeros(1, self.outputs))
            self.register_buffer("low", torch.tensor(action_space.low, dtype=torch.float32))
            self.register_buffer("high", torch.tensor(action_space.high, dtype=torch.float32))

    def forward(self, obs, state):
        """The deterministic policy, exported to policy.pt2: maps observations and states to actions and next states.

        Observations (batch, obs_dim) are raw. States (batch, state_dim) must be 0 where an episode begins.
        """
        normalized = ((obs - self.obs_mean) / self.obs_std).clamp(-10, 10).float()
        state = self.remember(normalized, state)
        outputs = self.actor(state[..., :HIDDEN])
        actions = outputs.argmax(-1) if self.discrete else outputs.clamp(self.low, self.high)
        return actions, state

    def remember(self, obs, state):
        """The next states (batch, state_dim) after normalized observations (batch, obs_dim)."""
        features = self.encoder(obs)
        if isinstance(self.cell, nn.LSTMCell):
            return torch.cat(self.cell(features, state.chunk(2, -1)), -1)
        return self.cell(features, state)

    def sample(self, state, noise):
        """Actions (..., act_dim); `noise` (..., outputs) is exponential for discrete actions, else normal."""
        outputs = self.actor(state[..., :HIDDEN])
        if self.discrete:
            return (outputs - noise.log()).argmax(-1, keepdim=True)  # -log of exponential noise is Gumbel noise
        return outputs + self.log_std.exp() * noise

    def evaluate(self, state, actions):
        """Log-probabilities of `actions` (..., act_dim), entropies and values, each (...,)."""
        outputs = self.actor(state[..., :HIDDEN])
        if self.discrete:
            policy = Categorical(logits=outputs, validate_args=False)
            actions = actions.squeeze(-1)
        else:
            gaussian = Normal(outputs, self.log_std.exp(), validate_args=False)
            policy = Independent(gaussian, 1, validate_args=False)
        return policy.log_prob(actions), policy.entropy(), self.value(state)

    def value(self, state):
        """Values (...,)."""
        return self.critic(state[..., :HIDDEN]).squeeze(-1)


class PPO:
    """The learner. CUDA graphs replay kernels but no Python: state that changes is in tensors, updated in place.

    Acting steps the cell with `Agent.remember`; learning computes the same steps in `unroll`, with `GATES`. Change both
    together: the logged `first_log_ratio`, the largest in the first minibatch, must be 0 but for rounding.
    """

    def __init__(self, args, envs, device):
        self.args = args
        self.device = device
        obs_dim = envs.single_observation_space.shape[0]
        self.example = torch.from_numpy(np.zeros((2, obs_dim), envs.single_observation_space.dtype))  # raw observations
        self.action_space = envs.single_action_space
        with device:
            self.agent = Agent(obs_dim, self.action_space, args.cell)
        act_dim, state_dim = self.agent.act_dim, self.agent.state_dim
        self.gates = GATES[args.cell]
        if args.compile:  # the backward pass recomputes the gates: each step keeps one tensor instead of five
            self.gates = partial(recompute, self.gates, use_reentrant=False)
        self.optimizers = {"agent": ClippedAdam(self.agent.parameters(), args.learning_rate, args.max_grad_norm)}
        self.normalizer = Normalizer(envs.num_envs, obs_dim, args.gamma)
        names = ["policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac", "explained_variance", "grad_norm"]
        names.append("first_log_ratio")
        self.scalars = {name: torch.zeros((), device=device) for name in names}

        # the rollout, in host memory and on the device: obs, starts, noise, next_obs, actions, and three scalars
        on_cuda = device.type == "cuda"
        steps = (args.num_steps, envs.num_envs)
        self.rollout_widths = [obs_dim, 1, self.agent.outputs, obs_dim, act_dim, 3]
        self.host_rollout = torch.zeros(*steps, sum(self.rollout_widths), pin_memory=on_cuda)
        self.rollout = self.host_rollout.to(device)  # the same memory on a CPU
        columns = [column.numpy() for column in self.host_rollout.split(self.rollout_widths, -1)]
        self.obs, self.starts, self.noise, self.next_obs, self.actions, numbers = columns
        self.rewards, self.terminated, self.ended = np.moveaxis(numbers, -1, 0)
        self.states = torch.zeros(1 + args.num_steps, envs.num_envs, state_dim, device=device)  # before and after steps

        # acting, on the device: a row of the rollout goes in, actions come out
        self.start = np.ones((envs.num_envs, 1), bool)  # where the next step begins an episode
        self.row = self.rollout[0].clone()
        self.state = torch.zeros(envs.num_envs, state_dim, device=device)  # after the newest step
        self.host_chosen = torch.zeros(envs.num_envs, act_dim, pin_memory=on_cuda)
        self.chosen = self.host_chosen.to(device)

        # learning: obs, actions, and starts, log_prob, values, advantages, returns
        self.batch_widths = [obs_dim, act_dim, 5]
        self.batch = torch.zeros(*steps, sum(self.batch_widths), device=device)
        # with --target-kl, the host checks the divergence after each epoch
        self.epochs_at_once = args.update_epochs if args.target_kl is None else 1
        self.orders = torch.zeros(self.epochs_at_once, envs.num_envs, dtype=torch.int64, device=device)
        self.from_obs = self.compiled(self.from_obs)  # replaces the method
        self.unroll_chunk = self.compiled(self.unroll_chunk)
        self.loss = self.compiled(self.loss)
        self.step_adam = self.compiled(self.optimizers["agent"].step)
        self.decide = self.captured(self.compiled(self.decide))
        self.make_batch = self.captured(self.make_batch)
        self.learn = self.captured(self.learn)

    @torch.no_grad()
    def make_batch(self):
        """Fill `batch` with the rollout's transitions, their advantages and returns."""
        obs, starts, _, next_obs, actions, numbers = self.rollout.split(self.rollout_widths, -1)
        rewards, terminated, ended = numbers.unbind(-1)
        states = self.states[1:]
        log_prob, _, values = self.agent.evaluate(states, actions)
        next_states = self.agent.remember(next_obs.flatten(0, 1), states.flatten(0, 1))
        next_values = self.agent.value(next_states).view_as(values)

        # GAE (arXiv:1506.02438, eq. 16)
        deltas = rewards + self.args.gamma * (1 - terminated) * next_values - values
        advantages = gae(deltas, self.args.gamma * self.args.gae_lambda * (1 - ended))

        returns = advantages + values
        numbers = torch.stack((starts.squeeze(-1), log_prob, values, advantages, returns), -1)
        self.batch.copy_(torch.cat((obs, actions, numbers), -1))
        self.keep(explained_variance=1 - advantages.var() / returns.var())

    def from_obs(self, obs):
        """The input term of the cell's gates (num_steps, sequences, gates)."""
        cell = self.agent.cell
        return nn.functional.linear(self.agent.encoder(obs), cell.weight_ih, cell.bias_ih)

    def unroll(self, obs, starts, state):
        """The states (num_steps, sequences, state_dim) after each step of sequences with the initial state `state`.

        First come the terms of the gates that need no state, for all steps; then the steps, `chunk` at a time.
        """
        cell = self.agent.cell
        chunk = math.gcd(self.args.num_steps, CHUNK)
        goes_on = 1 - starts.unsqueeze(-1)
        hidden = torch.empty(*obs.shape[:2], HIDDEN, device=self.device)  # for the backward pass alone, filled below
        bias = RecurrentBias.apply(cell.weight_hh, cell.bias_hh, hidden)
        states = [state[None]]
        state = state.requires_grad_()  # like the states between chunks, so that all chunks share one compiled function
        for inputs in zip(self.from_obs(obs).split(chunk), bias.split(chunk), goes_on.split(chunk), strict=True):
            chunk_states, state = self.unroll_chunk(state, *inputs)
            states.append(chunk_states)
        states = torch.cat(states)
        hidden.copy_((goes_on * states[:-1, :, :HIDDEN]).detach())
        return states[1:]

    def unroll_chunk(self, state, from_obs, bias, goes_on):
        """The states after each of a few steps, and the last state; other inputs are (steps, sequences, ...)."""
        weight = self.agent.cell.weight_hh.detach()
        states = []
        for t in range(len(from_obs)):
            state = goes_on[t] * state
            from_state = nn.functional.linear(state[:, :HIDDEN], weight) + bias[t]
            state = self.gates(from_obs[t], from_state, state)
            states.append(state)
        return torch.stack(states), state

    def loss(self, states, actions, old_log_prob, old_values, advantages, returns):
        """The loss, and its parts and statistics by name; arguments are (num_steps, sequences, ...)."""
        clip = self.args.clip_coef
        log_prob, entropy, values = self.agent.evaluate(states, actions)

        # clipped policy loss (eq. 7)
        log_ratio = log_prob - old_log_prob
        ratio = log_ratio.exp()
        if self.args.norm_adv:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        policy_loss = -torch.min(advantages * ratio, advantages * ratio.clamp(1 - clip, 1 + clip)).mean()

        # clipped value loss
        errors = (values - returns).square()
        if self.args.clip_vloss:
            clipped_values = old_values + (values - old_values).clamp(-clip, clip)
            errors = torch.max(errors, (clipped_values - returns).square())
        value_loss = 0.5 * errors.mean()

        entropy = entropy.mean()
        losses = {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "approx_kl": (ratio - 1 - log_ratio).mean(),  # http://joschu.net/blog/kl-approx.html, k3
            "clipfrac": ((ratio - 1).abs() > clip).float().mean(),
            "first_log_ratio": log_ratio.abs().max(),
        }
        loss = policy_loss - self.args.ent_coef * entropy + self.args.vf_coef * value_loss
        return loss, {name: value.detach() for name, value in losses.items()}

    def update_minibatch(self, env_ids):
        """One step of Adam on the sequences of the environments `env_ids`; returns values to log, by name."""
        obs, actions, numbers = self.batch.index_select(1, env_ids).split(self.batch_widths, -1)
        starts, *columns = numbers.unbind(-1)
        states = self.unroll(obs, starts, self.states[0].index_select(0, env_ids))
        loss, losses = self.loss(states, actions, *columns)
        gradient = self.optimizers["agent"].gradient(loss)
        return losses | {"grad_norm": self.step_adam(gradient)}

    def learn(self):
        """Pass over the batch in minibatches, once for each of `orders`; keep the mean losses of the last pass."""
        first = None
        for order in self.orders:
            losses = [self.update_minibatch(env_ids) for env_ids in order.chunk(self.args.num_minibatches)]
            first = first or losses[0]
        self.keep(**{name: torch.stack([values[name] for values in losses]).mean() for name in losses[0]})
        self.keep(first_log_ratio=first["first_log_ratio"])  # 0 but for rounding if acting and learning agree

    def update(self, learning_rate):
        """Learn from the rollout. A CUDA device may still be computing when this returns."""
        self.optimizers["agent"].lr.fill_(learning_rate)
        self.agent.obs_mean.copy_(torch.from_numpy(self.normalizer.obs_mean))
        self.agent.obs_std.copy_(torch.from_numpy(self.normalizer.obs_std))
        self.rollout.copy_(self.host_rollout)
        self.make_batch()
        for epoch in range(self.args.update_epochs // self.epochs_at_once):
            # random numbers are drawn outside of graphs, so that all modes draw the same
            self.orders.copy_(torch.rand(self.orders.shape, device=self.device).argsort(-1))
            self.learn()
            if epoch == 0:
                first_log_ratio = self.scalars["first_log_ratio"].clone()
            if self.args.target_kl is not None and self.losses()["approx_kl"] > self.args.target_kl:
                break
        self.keep(first_log_ratio=first_log_ratio)

    @torch.no_grad()
    def decide(self):
        """Compute the next `state` and the `chosen` actions for the observations in `row`."""
        obs, starts, noise, *_ = self.row.split(self.rollout_widths, -1)
        state = self.agent.remember(obs, (1 - starts) * self.state)
        self.state.copy_(state)
        self.chosen.copy_(self.agent.sample(state, noise))

    def start_rollout(self):
        """Keep the initial state of the rollout, and draw the noise for all of its actions."""
        self.states[0].copy_(self.state)
        noise = torch.empty(self.noise.shape)
        self.noise[:] = noise.exponential_() if self.agent.discrete else noise.normal_()

    def act(self, t, obs):
        """Sampled actions for step `t` of the rollout and normalized `obs`, both NumPy (num_envs, ...)."""
        self.obs[t] = obs
        self.starts[t] = self.start
        self.row.copy_(self.host_rollout[t], non_blocking=True)
        self.decide()
        self.states[t + 1].copy_(self.state)
        self.host_chosen.copy_(self.chosen)  # waits for the actions
        self.actions[t] = actions = self.host_chosen.numpy()
        if self.agent.discrete:
            return actions[:, 0].astype(np.int64)
        return actions.clip(self.action_space.low, self.action_space.high)

    def record(self, t, next_obs, rewards, terminated, ended, act_on):
        """Store the outcome of step `t` and return `act_on`, normalized. Arguments are NumPy (num_envs, ...).

        `act_on` equals `next_obs`, except where an episode has ended: there it is the first observation of the next.
        """
        obs, rewards = self.normalizer.normalize(act_on, rewards, ended)
        self.next_obs[t] = self.normalizer.scale_obs(next_obs) if ended.any() else obs
        self.rewards[t] = rewards
        self.terminated[t] = terminated if self.args.bootstrap_truncation else ended
        self.ended[t] = self.start[:, 0] = ended
        return obs

    def compiled(self, function):
        """Compile `function` if --compile is set."""
        if not self.args.compile:
            return function
        torch._dynamo.reset()  # otherwise torch stops recompiling after some learners in one process
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
        """Losses and statistics of the last update, by name. Waits for that update."""
        return dict(zip(self.scalars, torch.stack(list(self.scalars.values())).tolist(), strict=True))

    def policy(self):
        """A copy of the deterministic policy on the CPU, and example inputs."""
        return copy.deepcopy(self.agent).cpu().eval(), (self.example, torch.zeros(2, self.agent.state_dim))

    def tensors(self):
        """All tensors that updates change. Tensors missing here are not saved."""
        optimizers = {name: optimizer.tensors() for name, optimizer in self.optimizers.items()}
        networks = {"agent": self.agent.state_dict()}
        return {"networks": networks, "optimizers": optimizers, "normalizer": self.normalizer.tensors()}

    def state_dict(self):
        """All of the learner's state, with which it goes on bit for bit."""
        return self.tensors() | {
            "rng": torch.get_rng_state(),
            "cuda_rng": [torch.cuda.get_rng_state()] if self.device.type == "cuda" else [],
        }

    def load_state_dict(self, state):
        """Restore a `state_dict`."""
        tensors = self.tensors()
        load_tensors(tensors, {name: state[name] for name in tensors})
        torch.set_rng_state(state["rng"])
        torch.cuda.set_rng_state_all(state["cuda_rng"])


class RecurrentBias(torch.autograd.Function):
    """The bias of the recurrent product, repeated for each step. The backward pass also computes the weight's gradient.

    The loop over steps uses the weight detached. Otherwise autograd would sum its gradient with a matmul per step, and
    a minibatch would take 1.28 times as long. The gradient of a step's bias equals that of the product hidden @
    weight.T, so one matmul over all steps gives the weight's gradient, if `hidden` holds the product's inputs.
    """

    @staticmethod
    def forward(ctx, weight, bias, hidden):
        """`hidden` (num_steps, sequences, HIDDEN) must be filled before the backward pass."""
        ctx.hidden = hidden
        return bias.repeat(*hidden.shape[:2], 1)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.flatten(0, 1)
        return gradient.T @ ctx.hidden.flatten(0, 1), gradient.sum(0), None


def lstm(from_obs, from_state, state):
    """The next state of an LSTM, as nn.LSTMCell computes it: hidden state and cell state, concatenated."""
    _, memory = state.chunk(2, -1)
    input_gate, forget_gate, candidate, output_gate = (from_obs + from_state).chunk(4, -1)
    memory = forget_gate.sigmoid() * memory + input_gate.sigmoid() * candidate.tanh()
    return torch.cat((output_gate.sigmoid() * memory.tanh(), memory), -1)


def gru(from_obs, from_state, state):
    """The next state of a GRU, as nn.GRUCell computes it."""
    reset, update, new = from_obs.chunk(3, -1)
    own_reset, own_update, own_new = from_state.chunk(3, -1)
    candidate = (new + (reset + own_reset).sigmoid() * own_new).tanh()
    return candidate + (update + own_update).sigmoid() * (state - candidate)


GATES = {"lstm": lstm, "gru": gru}


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


class DirectEnvs(gym.vector.VectorWrapper):
    """Steps the environments of a SyncVectorEnv without its overhead, which can exceed their own time."""

    def __init__(self, envs):
        super().__init__(envs)
        self.shape = envs.observation_space.shape

    def step(self, actions):
        """Like gymnasium's `step`, without infos. Call `restart` where an episode has ended."""
        self.obs = [None] * len(actions)
        rewards = np.empty(len(actions))
        terminated = np.empty(len(actions), bool)
        truncated = np.empty(len(actions), bool)
        for i, env in enumerate(self.env.envs):
            self.obs[i], rewards[i], terminated[i], truncated[i], _ = env.step(actions[i])
        return np.array(self.obs).reshape(self.shape), rewards, terminated, truncated, {}

    def restart(self, ended):
        """Reset the environments where `ended` (num_envs,) is true; returns the observations of all."""
        for i in ended.nonzero()[0]:
            self.obs[i], _ = self.env.envs[i].reset()
        return np.array(self.obs).reshape(self.shape)


class Normalizer:
    """Scales observations to mean 0 and variance 1, and rewards so that discounted returns have variance 1.

    All environments share the statistics, which are float64 (Chan, Golub and LeVeque 1983). Those of observations and
    returns are in one array, updated in one pass. Results are clipped to [-10, 10].
    """

    def __init__(self, num_envs, obs_dim, gamma):
        self.gamma = gamma
        self.rows = np.zeros((num_envs, obs_dim + 1))  # the newest; returns are in the last column
        self.count = np.zeros(1)
        self.mean = np.zeros(obs_dim + 1)
        self.squares = np.zeros(obs_dim + 1)  # sum of squared differences from the mean
        self.std = np.ones(obs_dim + 1)
        self.obs, self.returns = self.rows[:, :-1], self.rows[:, -1]
        self.obs_mean, self.obs_std = self.mean[:-1], self.std[:-1]

    def normalize(self, obs, rewards=0.0, ended=False):
        """Update the statistics with observations (num_envs, obs_dim) and rewards (num_envs,); return both scaled."""
        self.obs[:] = obs
        self.returns[:] = self.gamma * self.returns + rewards
        errors = self.rows - self.mean
        self.count += len(errors)
        self.mean += np.add.reduce(errors) / self.count
        centered = self.rows - self.mean
        self.squares += np.add.reduce(errors * centered)
        np.sqrt(self.squares / self.count + 1e-8, out=self.std)
        self.returns[ended] = 0
        centered[:, -1] = rewards  # scaled like returns, but not centered
        scaled = (centered / self.std).clip(-10, 10).astype(np.float32)
        return scaled[:, :-1], scaled[:, -1]

    def scale_obs(self, obs):
        """Observations (n, obs_dim), scaled without an update of the statistics."""
        return ((obs - self.obs_mean) / self.obs_std).clip(-10, 10).astype(np.float32)

    def tensors(self):
        """The statistics by name, as tensors that share their memory."""
        return {name: torch.from_numpy(getattr(self, name)) for name in ("count", "mean", "squares", "std")}


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
    check_sequences(args)
    envs = DirectEnvs(make_envs(args, folder))
    require_actions(args, envs)
    learner = PPO(args, envs, device)
    with Run(args, folder, envs, learner) as run:
        obs, _ = envs.reset(seed=args.seed + run.step)
        obs, _ = learner.normalizer.normalize(obs)
        while run.unfinished():
            learning_rate = args.learning_rate
            if args.anneal_lr:
                learning_rate *= 1 - run.step / args.total_timesteps
            learner.start_rollout()
            for t in range(args.num_steps):
                actions = learner.act(t, obs)
                next_obs, rewards, terminated, truncated, _ = envs.step(actions)
                ended = terminated | truncated
                act_on = next_obs
                if ended.any():
                    act_on = envs.restart(ended)
                obs = learner.record(t, next_obs, rewards, terminated, ended, act_on)
                run.advance(rewards, ended)
            learner.update(learning_rate)
            run.log(learner.losses())


def check_sequences(args):
    """Refuse sizes that do not fit together."""
    if args.num_envs % args.num_minibatches:
        refuse("num_minibatches", args.num_minibatches, f"give a divisor of num_envs, {args.num_envs}")
    if args.num_envs * args.num_steps == args.num_minibatches:
        refuse("num_steps", args.num_steps, "give at least 2, so that minibatches have more than one transition")


def make_envs(args, folder):
    """Make `num_envs` environments, stepped one after another; videos of the first are written to `folder`."""

    def make_env(index):
        if args.capture_video and index == 0:
            env = gym.make(args.env_id, render_mode="rgb_array")
            env = gym.wrappers.RecordVideo(env, str(folder / "videos"), disable_logger=True)
        else:
            env = gym.make(args.env_id)
        return env if isinstance(env.observation_space, gym.spaces.Box) else gym.wrappers.FlattenObservation(env)

    try:
        functions = [partial(make_env, index) for index in range(args.num_envs)]
        envs = SyncVectorEnv(functions, autoreset_mode=AutoresetMode.DISABLED)
    except (gym.error.Error, ImportError, NotImplementedError) as error:
        refuse("env_id", args.env_id, error)
    envs._add_info = lambda infos, info, index: infos  # infos are not collected: nothing reads them
    space = envs.single_observation_space
    if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
        refuse("env_id", args.env_id, f"observations must be vectors, not {space}")
    return envs


def require_actions(args, envs):
    """Refuse action spaces that are neither discrete from 0 up nor bounded vectors of floats."""
    space = envs.single_action_space
    discrete = isinstance(space, gym.spaces.Discrete) and space.start == 0
    floats = isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.floating) and len(space.shape) == 1
    bounded = floats and np.abs((space.low, space.high)).max() < 1e30  # float32 overflows near 3e38
    if not discrete and not bounded:
        refuse("env_id", args.env_id, f"actions must be bounded vectors of floats or discrete from 0 on, not {space}")


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
    """Context manager of the training loop: logs, and files that are also written after a signal or an error."""

    def __init__(self, args, folder, envs, learner):
        self.args = args
        self.folder = folder
        self.envs = envs
        self.learner = learner
        self.step = self.episodes = 0
        self.recent_returns = deque(maxlen=20)
        self.returns = np.zeros(args.num_envs)  # of the episodes in progress
        self.lengths = np.zeros(args.num_envs, int)
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

    def advance(self, rewards, ended):
        """Count a step of all environments. NumPy (num_envs,): `rewards`, `ended` where an episode is over."""
        self.step += self.args.num_envs
        self.returns += rewards
        self.lengths += 1
        for i in ended.nonzero()[0]:
            self.writer.add_scalar("charts/episodic_return", self.returns[i], self.step)
            self.writer.add_scalar("charts/episodic_length", self.lengths[i], self.step)
            self.recent_returns.append(float(self.returns[i]))
            self.bar.set_postfix({"return": f"{np.mean(self.recent_returns):.1f}"}, refresh=False)
            self.episodes += 1
            self.returns[i] = self.lengths[i] = 0
        self.bar.update(self.args.num_envs)
        if self.signal is not None:
            raise SystemExit(128 + self.signal)  # through `__exit__`, which saves

    def log(self, losses):
        """Log losses by name and the speed since the last log. End the run if a loss is not finite."""
        now = time.perf_counter()
        self.writer.add_scalar("charts/SPS", (self.step - self.log_step) / (now - self.log_time), self.step)
        self.log_step, self.log_time = self.step, now
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
#     "tyro>=1.0,<2", "tqdm>=4.66", "tensorboard>=2.18", "wandb>=0.20",
# ]
# ///
