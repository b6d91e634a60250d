"""Proximal Policy Optimisation (Schulman et al. 2017, arXiv:1707.06347) in plain PyTorch: the reading copy.

`PPO.update` and `PPO.loss` read like the paper. The tests hold ppo_continuous_action_torchcompile.py against this file,
and the speed tables measure it as their baseline. The details are those of "The 37 implementation details of PPO"
(Huang et al. 2022), hyper-parameters and defaults CleanRL's.

    python leanrl/ppo_continuous_action.py --env-id HalfCheetah-v5
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
from gymnasium.vector.utils import batch_space
from torch import nn
from torch.distributions import Normal
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT = Path(__file__).stem
THREADS = 1  # small matrices: two threads are hardly faster than one, and on a busy machine much slower


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
class Args(AlgorithmArgs, EnvironmentArgs, RunArgs):
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


class PPO:
    """The learner: networks, optimiser, normaliser and the storage of one iteration."""

    def __init__(self, args, envs, device):
        self.args = args
        self.device = device
        self.compile = False
        self.cudagraphs = False
        obs_dim = envs.single_observation_space.shape[0]
        action_space = envs.single_action_space
        self.low = action_space.low
        self.high = action_space.high
        self.normalizer = Normalizer(envs.num_envs, obs_dim, args.gamma)
        with device:
            self.agent = Agent(obs_dim, action_space.shape[0])
        if args.init_entropy == "max":
            self.agent.become_uniform(action_space)
        self.optimizers = {"agent": torch.optim.Adam(self.agent.parameters(), lr=args.learning_rate, eps=1e-5)}
        self.grad_norm = torch.zeros((), device=device)  # of the last minibatch, before clipping
        widths = {
            "obs": (obs_dim,),
            "next_obs": (obs_dim,),
            "actions": action_space.shape,
            "log_prob": (),
            "values": (),
            "rewards": (),
            "terminated": (),
            "ended": (),
        }
        steps = (args.num_steps, envs.num_envs)
        self.storage = {name: torch.zeros(*steps, *width, device=device) for name, width in widths.items()}
        self.updates = 0
        self.last_losses = {}

    def store(self, t, **columns):
        """Write one row per environment, each column numpy or torch and (num_envs, ...), as step `t`."""
        for name, column in columns.items():
            self.storage[name][t] = torch.as_tensor(column, device=self.device)

    @torch.no_grad()
    def act(self, t, obs):
        """Sample actions for normalised `obs` in step `t`; both numpy, (num_envs, ...), the actions within bounds."""
        obs = torch.as_tensor(obs, device=self.device)
        mean, log_std, values = self.agent(obs)
        policy = Normal(mean, log_std.exp(), validate_args=False)
        actions = policy.sample()
        self.store(t, obs=obs, actions=actions, log_prob=policy.log_prob(actions).sum(-1), values=values)
        return np.clip(actions.cpu().numpy(), self.low, self.high)

    def record(self, t, next_obs, last_obs, rewards, terminated, ended):
        """Store what step `t` led to; returns `next_obs` normalised. `last_obs` is from `final_observations`."""
        obs, rewards = self.normalizer.normalize(next_obs, rewards, ended)
        last_obs = obs if last_obs is next_obs else self.normalizer.scale_obs(last_obs)
        terminated = terminated if self.args.bootstrap_truncation else ended
        self.store(t, next_obs=last_obs, rewards=rewards, terminated=terminated, ended=ended)
        return obs

    @torch.no_grad()
    def advantages(self):
        """Generalised advantage estimation (arXiv:1506.02438, equation 16), (num_steps, num_envs)."""
        steps = self.storage
        _, _, next_values = self.agent(steps["next_obs"].flatten(0, 1))
        next_values = next_values.view_as(steps["values"]) * (1 - steps["terminated"])
        targets = steps["rewards"] + self.args.gamma * next_values
        errors = targets - steps["values"]
        decay = self.args.gamma * self.args.gae_lambda * (1 - steps["ended"])
        advantages = torch.zeros_like(errors)
        following = 0
        for t in reversed(range(self.args.num_steps)):
            following = errors[t] + decay[t] * following
            advantages[t] = following
        return advantages

    def loss(self, rows):
        """Policy loss (equation 7), value loss, entropy, and the log of the probability ratio, (batch,), of `rows`.

        These are columns by name, (batch, ...): obs, actions, log_prob, values, advantages, returns.
        """
        clip = self.args.clip_coef
        mean, log_std, values = self.agent(rows["obs"])
        policy = Normal(mean, log_std.exp(), validate_args=False)
        log_ratio = policy.log_prob(rows["actions"]).sum(-1) - rows["log_prob"]
        ratio = log_ratio.exp()
        advantages = rows["advantages"]
        if self.args.norm_adv:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        policy_loss = -torch.min(advantages * ratio, advantages * ratio.clamp(1 - clip, 1 + clip)).mean()
        errors = (values - rows["returns"]).square()
        if self.args.clip_vloss:
            clipped = rows["values"] + (values - rows["values"]).clamp(-clip, clip)
            errors = torch.max(errors, (clipped - rows["returns"]).square())
        value_loss = 0.5 * errors.mean()
        entropy = policy.entropy().sum(-1).mean()
        return policy_loss, value_loss, entropy, log_ratio

    def update_minibatch(self, rows):
        """One step of Adam on the loss of `rows`."""
        policy_loss, value_loss, entropy, _ = self.loss(rows)
        loss = policy_loss - self.args.ent_coef * entropy + self.args.vf_coef * value_loss
        self.optimizers["agent"].zero_grad()
        loss.backward()
        self.grad_norm = nn.utils.clip_grad_norm_(self.agent.parameters(), self.args.max_grad_norm)
        self.optimizers["agent"].step()

    @torch.no_grad()
    def measure(self, batch):
        """Losses and statistics of the whole `batch`, by name; the KL divergence is estimated by E[r - 1 - log r]."""
        policy_loss, value_loss, entropy, log_ratio = self.loss(batch)
        ratio = log_ratio.exp()
        errors = batch["returns"] - batch["values"]
        return {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "approx_kl": (ratio - 1 - log_ratio).mean(),
            "clipfrac": ((ratio - 1).abs() > self.args.clip_coef).float().mean(),
            "grad_norm": self.grad_norm,
            "explained_variance": 1 - errors.var() / batch["returns"].var(),
        }

    def update(self, learning_rate):
        """All epochs over the stored iteration, each in minibatches drawn without replacement."""
        self.optimizers["agent"].param_groups[0]["lr"] = learning_rate
        advantages = self.advantages()
        batch = {name: self.storage[name] for name in ("obs", "actions", "log_prob", "values")}
        batch |= {"advantages": advantages, "returns": advantages + self.storage["values"]}
        batch = {name: column.flatten(0, 1) for name, column in batch.items()}
        size = advantages.numel()
        for _ in range(self.args.update_epochs):
            for rows in torch.randperm(size, device=self.device).split(size // self.args.num_minibatches):
                self.update_minibatch({name: column[rows] for name, column in batch.items()})
            if self.args.target_kl is not None and self.measure(batch)["approx_kl"] > self.args.target_kl:
                break
        self.last_losses = self.measure(batch)
        self.updates += 1

    def losses(self):
        """The last update's losses and statistics by name."""
        return {name: value.item() for name, value in self.last_losses.items()}

    def networks(self):
        """The networks by name."""
        return {"agent": self.agent}

    def state_dict(self):
        """All that `load_state_dict` needs to continue bit by bit, random numbers included."""
        return {
            "networks": {name: network.state_dict() for name, network in self.networks().items()},
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
            "normalizer": self.normalizer.state_dict(),
            "updates": self.updates,
        } | rng_state(self.device)

    def load_state_dict(self, state):
        """Become the learner that `state` was taken from."""
        for name, network in self.networks().items():
            network.load_state_dict(state["networks"][name])
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])  # with its learning rate, which every update sets
        for name, tensor in self.normalizer.state_dict().items():
            tensor.copy_(state["normalizer"][name])
        self.updates = state["updates"]
        set_rng_state(state, self.device)


# ---------------------------------------------------------------------------------------------------------------------
# Training and evaluation
# ---------------------------------------------------------------------------------------------------------------------


def final_observations(next_obs, infos):
    """What the actions led to, (num_envs, obs_dim): `next_obs`, but the true last one where an episode ended."""
    if "_final_obs" in infos:
        ended = infos["_final_obs"]
        next_obs = next_obs.copy()
        next_obs[ended] = np.stack(infos["final_obs"][ended])
    return next_obs


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
        envs = EnvPool(args, args.seed + step)
    else:
        envs = make_envs(args, args.num_envs, folder / "videos" if args.capture_video else None)
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
                next_obs, rewards, terminated, truncated, infos = envs.step(learner.act(t, obs))
                last_obs = final_observations(next_obs, infos)
                ended = terminated | truncated
                obs = learner.record(t, next_obs, last_obs, rewards, terminated, ended)
                step += args.num_envs
                run.advance(step, rewards, ended, "training" if learner.updates else "warming up")
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
