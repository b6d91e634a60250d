"""Proximal Policy Optimization (PPO) for discrete actions, built for speed: Schulman et al. 2017, arXiv:1707.06347.

The algorithm is `PPO` and `train`. Below the line of dashes is the run, the same text in all scripts.
The updates are those of the plain version, ppo.py. Why it is faster:

1. The policy acts in NumPy, without computing values and log-probabilities (`numpy_function`, `PPO.act`).
2. Environments are stepped without the overhead of gymnasium's vector environment (`DirectEnvs`).
3. The rollout is one block of host memory, copied to the device at once (`PPO.record`, `PPO.update`).
4. Values and log-probabilities of a rollout are computed at once, and advantages in log2(num_steps) rounds
   (`PPO.make_batch`, `gae`).
5. `--compile` compiles a minibatch's forward, backward, clipping and Adam into one graph (`PPO.update_minibatch`).
6. `--cudagraphs` replays all epochs of an iteration as one CUDA graph, or each epoch with --target-kl (`PPO.learn`).

    python leanrl/ppo_torchcompile.py --env-id CartPole-v1 --compile --cudagraphs
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
from torch.utils import collect_env
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

MASKED = -1e9  # logit of a choice that is not allowed: its probability is exactly 0, and no product is NaN
CompileMode = Literal["default", "max-autotune-no-cudagraphs"]


@dataclass
class Args:
    env_id: str = "CartPole-v1"  # gymnasium environment
    total_timesteps: int = 500_000  # total environment steps, summed over all environments
    num_envs: int = 4  # number of environments, stepped together
    num_steps: int = 128  # steps of each environment per rollout
    learning_rate: float = 2.5e-4  # initial learning rate
    anneal_lr: bool = True  # decay the learning rate linearly to 0 over the run
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation (GAE)
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # passes over each rollout
    norm_adv: bool = True  # normalize advantages per minibatch
    clip_coef: float = 0.2  # clipping range of the probability ratio (epsilon in the paper)
    clip_vloss: bool = True  # also clip the change in value to --clip-coef
    ent_coef: float = 0.01  # coefficient of the entropy bonus
    vf_coef: float = 0.5  # coefficient of the value loss
    max_grad_norm: float = 0.5  # gradients are clipped to this norm (0: no clipping)
    target_kl: float | None = None  # end an iteration's epochs once the approximate KL divergence exceeds this
    bootstrap_truncation: bool = True  # bootstrap the value at a truncation; otherwise it counts as terminal

    compile: bool = False  # compile updates with torch.compile
    cudagraphs: bool = False  # replay updates as CUDA graphs
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


def action_parts(space):
    """The columns of each part of an action among all choices, side by side. A Discrete action has one part."""
    sizes = [int(space.n)] if isinstance(space, gym.spaces.Discrete) else space.nvec.tolist()
    return [slice(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]


class Agent(nn.Module):
    """A policy with a categorical distribution for each part of an action, and a value function.

    A mask (..., num_choices) is 0 where a choice is not allowed.
    """

    def __init__(self, obs_dim, action_space):
        super().__init__()
        self.parts = action_parts(action_space)
        self.num_choices = self.parts[-1].stop
        self.actor = nn.Sequential(
            linear(obs_dim, 64),
            nn.Tanh(),
            linear(64, 64),
            nn.Tanh(),
            linear(64, self.num_choices, gain=0.01),
        )
        self.critic = nn.Sequential(
            linear(obs_dim, 64),
            nn.Tanh(),
            linear(64, 64),
            nn.Tanh(),
            linear(64, 1, gain=1.0),
        )
        self.register_buffer("start", torch.tensor(action_space.start))  # actions are choices counted from here

    def forward(self, obs, mask=None):
        """The deterministic policy, exported to policy.pt2: maps (batch, obs_dim) to the most probable actions."""
        log_probs = self.log_probs(obs, mask)
        choices = torch.stack([log_probs[:, part].argmax(-1) for part in self.parts], -1)
        return choices.reshape(-1, *self.start.shape) + self.start

    def log_probs(self, obs, mask=None):
        """Log-probabilities (..., num_choices) of all choices."""
        logits = self.actor(obs)
        if mask is not None:
            logits = logits.masked_fill(mask == 0, MASKED)
        return torch.cat([logits[..., part].log_softmax(-1) for part in self.parts], -1)


class PPO:
    """The learner. CUDA graphs replay kernels but no Python: state that changes is in tensors, updated in place."""

    def __init__(self, args, envs, device, masked=False):
        self.args = args
        self.device = device
        self.masked = masked
        self.action_space = envs.action_space
        self.start = envs.single_action_space.start
        self.obs_dim = obs_dim = envs.single_observation_space.shape[0]
        with device:
            self.agent = Agent(obs_dim, envs.single_action_space)
        self.optimizers = {"agent": ClippedAdam(self.agent.parameters(), args.learning_rate, args.max_grad_norm)}
        names = ["policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac", "explained_variance", "grad_norm"]
        self.scalars = {name: torch.zeros((), device=device) for name in names}

        # acting, on the host
        self.host_agent = copy.deepcopy(self.agent).cpu()
        self.logits = numpy_function(self.host_agent.actor)
        self.begins = np.array([part.start for part in self.agent.parts])
        self.noise = np.zeros((args.num_steps, envs.num_envs, self.agent.num_choices), np.float32)

        # the rollout, in host memory, with a NumPy view of each column, and on the device
        inputs = dict(obs=obs_dim, actions=len(self.begins))
        if masked:
            inputs["mask"] = self.agent.num_choices
        self.rollout_widths = inputs | dict(next_obs=obs_dim, rewards=1, terminated=1, ended=1)
        shape = (args.num_steps, envs.num_envs, sum(self.rollout_widths.values()))
        self.host_rollout = torch.zeros(shape, pin_memory=device.type == "cuda")
        self.rollout = self.host_rollout.to(device)  # the same memory on a CPU
        self.host_columns = tree_map(torch.Tensor.numpy, columns(self.host_rollout, self.rollout_widths))

        # all transitions, and a minibatch
        self.batch_widths = inputs | dict(log_prob=1, values=1, advantages=1, returns=1)
        batch_size = args.num_steps * envs.num_envs
        self.batch = torch.zeros(batch_size, sum(self.batch_widths.values()), device=device)
        self.minibatch = self.batch[: batch_size // args.num_minibatches].clone()
        # with --target-kl, the host checks the divergence after each epoch
        self.epochs_at_once = args.update_epochs if args.target_kl is None else 1
        self.orders = torch.zeros(self.epochs_at_once, batch_size, dtype=torch.int64, device=device)

        self.update_minibatch = self.compiled(self.update_minibatch)  # replaces the method
        self.make_batch = self.captured(self.make_batch)
        self.learn = self.captured(self.learn)

    @torch.no_grad()
    def make_batch(self):
        """Fill `batch` with the rollout's transitions, their advantages and returns."""
        batch = columns(self.rollout, self.rollout_widths)
        batch["log_prob"], _ = self.log_prob_and_entropy(batch)
        batch["values"] = values = self.agent.critic(batch["obs"])
        next_values = self.agent.critic(batch["next_obs"])

        # GAE (arXiv:1506.02438, eq. 16)
        deltas = batch["rewards"] + self.args.gamma * (1 - batch["terminated"]) * next_values - values
        batch["advantages"] = gae(deltas, self.args.gamma * self.args.gae_lambda * (1 - batch["ended"]))
        batch["returns"] = batch["advantages"] + values
        self.batch.copy_(torch.cat([batch[name] for name in self.batch_widths], -1).flatten(0, 1))

    def log_prob_and_entropy(self, batch):
        """Log-probabilities of the actions of a `batch` by the current policy, and its entropies, both (..., 1)."""
        log_probs = self.agent.log_probs(batch["obs"], batch.get("mask"))
        log_prob = log_probs.gather(-1, batch["actions"].long()).sum(-1, keepdim=True)
        entropy = -(log_probs.exp() * log_probs).sum(-1, keepdim=True)
        return log_prob, entropy

    def loss(self, batch):
        """Policy loss, value loss, entropy, and the log of the probability ratio (n, 1) for the columns of n rows."""
        clip = self.args.clip_coef

        # clipped policy loss (eq. 7)
        log_prob, entropy = self.log_prob_and_entropy(batch)
        log_ratio = log_prob - batch["log_prob"]
        ratio = log_ratio.exp()
        advantages = batch["advantages"]
        if self.args.norm_adv:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        policy_loss = -torch.min(advantages * ratio, advantages * ratio.clamp(1 - clip, 1 + clip)).mean()

        # clipped value loss
        values = self.agent.critic(batch["obs"])
        errors = (values - batch["returns"]).square()
        if self.args.clip_vloss:
            old_values = batch["values"]
            clipped_values = old_values + (values - old_values).clamp(-clip, clip)
            errors = torch.max(errors, (clipped_values - batch["returns"]).square())
        value_loss = 0.5 * errors.mean()

        return policy_loss, value_loss, entropy.mean(), log_ratio

    def update_minibatch(self):
        """One step of Adam on the loss of `minibatch`."""
        policy_loss, value_loss, entropy, _ = self.loss(columns(self.minibatch, self.batch_widths))
        loss = policy_loss - self.args.ent_coef * entropy + self.args.vf_coef * value_loss
        gradient = self.optimizers["agent"].gradient(loss)
        grad_norm = self.optimizers["agent"].step(gradient)
        self.keep(grad_norm=grad_norm)

    def learn(self):
        """Pass over the batch in minibatches, once for each of `orders`; then measure."""
        for order in self.orders:
            for rows in order.chunk(self.args.num_minibatches):
                torch.index_select(self.batch, 0, rows, out=self.minibatch)
                self.update_minibatch()
        self.measure()

    @torch.no_grad()
    def measure(self):
        """Store losses and statistics of the whole batch."""
        batch = columns(self.batch, self.batch_widths)
        policy_loss, value_loss, entropy, log_ratio = self.loss(batch)
        ratio = log_ratio.exp()
        self.keep(
            policy_loss=policy_loss,
            value_loss=value_loss,
            entropy=entropy,
            approx_kl=(ratio - 1 - log_ratio).mean(),  # http://joschu.net/blog/kl-approx.html, k3
            clipfrac=((ratio - 1).abs() > self.args.clip_coef).float().mean(),
            explained_variance=1 - (batch["returns"] - batch["values"]).var() / batch["returns"].var(),
        )

    def update(self, learning_rate):
        """Learn from the rollout. A CUDA device may still be computing when this returns."""
        self.optimizers["agent"].lr.fill_(learning_rate)
        self.rollout.copy_(self.host_rollout)
        self.make_batch()
        for _ in range(self.args.update_epochs // self.epochs_at_once):
            # random numbers are drawn outside of graphs, so that all modes draw the same
            self.orders.copy_(torch.rand(self.orders.shape, device=self.device).argsort(-1))
            self.learn()
            if self.args.target_kl is not None and self.losses()["approx_kl"] > self.args.target_kl:
                break

    def start_rollout(self):
        """Wait for the newest weights, and draw Gumbel noise for all actions of the rollout."""
        self.host_agent.load_state_dict(self.agent.state_dict())
        self.noise[:] = -torch.empty(self.noise.shape).exponential_().log()

    def act(self, t, obs, mask=None):
        """Sampled actions for step `t` of the rollout, `obs` and, if there are masks, `mask`: NumPy (num_envs, ...).

        With Gumbel noise, the choice of highest score is a sample (Gumbel-max trick).
        """
        obs = obs.astype(np.float32, copy=False)
        scores = self.logits(obs) + self.noise[t]
        if self.masked:
            scores[~mask] = -np.inf
            self.host_columns["mask"][t] = mask
        choices = np.array([scores[:, part].argmax(-1) for part in self.agent.parts]).T
        self.host_columns["obs"][t] = obs
        self.host_columns["actions"][t] = self.begins + choices  # columns of the log-probabilities
        return choices.reshape(self.action_space.shape) + self.start

    def record(self, t, next_obs, rewards, terminated, ended):
        """Store the outcome of step `t`. Arguments are NumPy (num_envs, ...)."""
        self.host_columns["next_obs"][t] = next_obs
        self.host_columns["rewards"][t, :, 0] = rewards
        self.host_columns["terminated"][t, :, 0] = terminated if self.args.bootstrap_truncation else ended
        self.host_columns["ended"][t, :, 0] = ended

    def compiled(self, function):
        """Compile `function`, which takes and returns nothing, if --compile is set."""
        if not self.args.compile:
            return function
        torch._dynamo.reset()  # otherwise torch stops recompiling after some learners in one process
        torch._dynamo.config.trace_autograd_ops = True  # allows torch.autograd.grad in a compiled function
        torch.autograd.set_multithreading_enabled(False)  # keeps the backward pass in the traced thread
        VecISA._avx_code = ""  # the program that inductor tests g++ with; its own takes seconds
        options = torch._inductor.list_mode_options(self.args.compile_mode)
        if self.device.type == "cuda":
            options |= {"combo_kernels": True, "split_reductions": False}  # fewer kernels; every sum is short
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
        """A copy of the deterministic policy on the CPU, and example inputs: observations, and masks if there are."""
        inputs = [torch.zeros(2, self.obs_dim)]
        if self.masked:
            inputs.append(torch.ones(2, self.agent.num_choices, dtype=torch.bool))
        return copy.deepcopy(self.agent).cpu().eval(), tuple(inputs)

    def tensors(self):
        """All tensors that updates change. Tensors missing here are not saved."""
        optimizers = {name: optimizer.tensors() for name, optimizer in self.optimizers.items()}
        return {"networks": {"agent": self.agent.state_dict()}, "optimizers": optimizers}

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


def columns(tensor, widths):
    """Views of `tensor` (..., sum of widths), by name: the columns whose names and widths are `widths`, in order."""
    return dict(zip(widths, tensor.split(list(widths.values()), -1), strict=True))


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


def numpy_function(module):
    """A CPU `module` as a function of a NumPy array (batch, inputs).

    A small network takes a few microseconds in NumPy and tens of them in torch. The function shares the memory of the
    weights: it sees in-place changes, but no replaced parameters. Layers not listed here are called in torch.
    """
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        functions = [numpy_function(layer) for layer in module]

        def sequence(x):
            for function in functions:
                x = function(x)
            return x

        return sequence
    if type(module) is nn.Linear and module.bias is not None:
        weight, bias = module.weight.detach().numpy().T, module.bias.detach().numpy()[None]
        return lambda x: x.dot(weight) + bias
    if type(module) is nn.Tanh:
        return np.tanh
    if type(module) is nn.ReLU:
        return partial(np.maximum, np.zeros((), np.float32))  # a Python 0 would be converted at each call
    return lambda x: module(torch.from_numpy(x)).detach().numpy()


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


class LastInfo(gym.Wrapper):
    """Keeps the newest `info` of an environment."""

    def reset(self, **kwargs):
        obs, self.info = self.env.reset(**kwargs)
        return obs, self.info

    def step(self, action):
        outcome = self.env.step(action)
        self.info = outcome[-1]
        return outcome


class ActionMasks:
    """Reads the choices that environments allow in their newest states from `info["action_mask"]`.

    A mask is an array, or a tuple with an array for each part of an action. It is 0 where a choice is not allowed.
    """

    def __init__(self, envs):
        self.envs = envs.unwrapped.envs
        self.envs[:] = map(LastInfo, self.envs)
        parts = action_parts(envs.single_action_space)
        self.begins = [part.start for part in parts]
        self.num_choices = parts[-1].stop
        self.given = None  # whether there are masks, as the first infos show

    def read(self, step):
        """The choices (num_envs, num_choices), bool, that are allowed at `step` of the run, or None without masks."""
        masks = [env.info.get("action_mask") for env in self.envs]
        if self.given is None:
            self.given = masks[0] is not None
        if not self.given and all(mask is None for mask in masks):
            return None
        rows = np.zeros((len(masks), self.num_choices), bool)
        for row, mask in zip(rows, masks, strict=True):
            choices = np.concatenate(mask) if isinstance(mask, tuple) else np.asarray(mask)
            if self.given and choices.shape == row.shape:
                row[:] = choices
        parts_allowed = np.logical_or.reduceat(rows, self.begins, axis=1)
        if not parts_allowed.all():
            index = parts_allowed.all(1).argmin()
            remedy = f"give {self.num_choices} numbers in every state, not all 0 for any part of an action"
            raise ValueError(f"step {step}, environment {index}: its action_mask is {masks[index]}; {remedy}")
        return rows


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
    check_minibatches(args)
    envs = DirectEnvs(make_envs(args, folder))
    require_categorical_actions(args, envs)
    masks = ActionMasks(envs)
    obs, _ = envs.reset(seed=args.seed)
    learner = PPO(args, envs, device, masked=masks.read(0) is not None)
    with Run(args, folder, envs, learner) as run:
        if run.step:
            obs, _ = envs.reset(seed=args.seed + run.step)
        while run.unfinished():
            learning_rate = args.learning_rate
            if args.anneal_lr:
                learning_rate *= 1 - run.step / args.total_timesteps
            learner.start_rollout()
            for t in range(args.num_steps):
                actions = learner.act(t, obs, masks.read(run.step))
                next_obs, rewards, terminated, truncated, _ = envs.step(actions)
                ended = terminated | truncated
                obs = next_obs
                if ended.any():
                    obs = envs.restart(ended)
                learner.record(t, next_obs, rewards, terminated, ended)
                run.advance(rewards, ended)
            learner.update(learning_rate)
            run.log(learner.losses())


def check_minibatches(args):
    """Refuse sizes that do not fit together."""
    batch_size = args.num_envs * args.num_steps
    if batch_size % args.num_minibatches or (args.norm_adv and batch_size == args.num_minibatches):
        refuse("num_minibatches", args.num_minibatches, f"give a proper divisor of num_envs * num_steps, {batch_size}")


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


def require_categorical_actions(args, envs):
    """Refuse action spaces other than Discrete, and MultiDiscrete with a vector of sizes."""
    space = envs.single_action_space
    vector = isinstance(space, gym.spaces.MultiDiscrete) and space.nvec.ndim == 1
    if not (vector or isinstance(space, gym.spaces.Discrete)):
        refuse("env_id", args.env_id, f"actions must be Discrete or MultiDiscrete, not {space}")


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
