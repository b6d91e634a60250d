"""Proximal Policy Optimization (PPO) for Atari on several GPUs: Schulman et al. 2017, arXiv:1707.06347.

The algorithm is `PPO` and `train`. Below the lines of dashes is the run, mostly the same text in all scripts.
A version of ppo_atari_envpool_torchcompile.py for torchrun, which starts one process per GPU, called a rank. An update
equals that of a single process on the joint minibatch of all ranks:

1. All ranks start an iteration with the weights of rank 0 (`JointRun.unfinished`). Each plays its share of the games.
2. A minibatch consists of rows that each rank draws from its own. Advantages are normalized with sums over all ranks,
   one all-reduce per epoch (`PPO.learn_epoch`, `PPO.loss`).
3. Gradient and losses are one vector, which takes one all-reduce per minibatch. The all-reduce runs outside of graphs,
   between the graph that computes the vector and the one with the step of Adam (`PPO.compute_gradient`, `PPO.step`).
4. All ranks count all games and decide from the same numbers when to end. Only rank 0 writes files (`JointRun`).

    torchrun --nproc-per-node 8 leanrl/ppo_atari_multigpu_torchcompile.py --num-envs 64 --compile --cudagraphs
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
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import envpool
import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import tyro
from gymnasium.vector import AutoresetMode
from tensordict.nn import CudaGraphModule
from torch import nn
from torch._inductor.cpu_vec_isa import VecISA
from torch.utils import collect_env
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

RANK = int(os.environ.get("RANK", 0))  # torchrun sets these; without torchrun, there is one rank
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
LOCAL_WORLD_SIZE = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
TIMEOUT = timedelta(minutes=10)  # for the slowest rank while it compiles or saves
LOSSES = ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac")  # follow the gradient in `PPO.sums`
CompileMode = Literal["default", "max-autotune-no-cudagraphs"]


@dataclass
class Args:
    env_id: str = "Breakout-v5"  # Atari game in envpool
    total_timesteps: int = 10_000_000  # total environment steps (four frames each), summed over all environments
    num_envs: int = 8  # number of environments over all ranks, divided evenly among them
    num_steps: int = 128  # steps of each environment per rollout
    learning_rate: float = 2.5e-4  # initial learning rate
    anneal_lr: bool = True  # decay the learning rate linearly to 0 over the run
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation (GAE)
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # passes over each rollout
    norm_adv: bool = True  # normalize advantages per minibatch
    clip_coef: float = 0.1  # clipping range of the probability ratio (epsilon in the paper)
    clip_vloss: bool = True  # also clip the change in value to --clip-coef
    ent_coef: float = 0.01  # coefficient of the entropy bonus
    vf_coef: float = 0.5  # coefficient of the value loss
    max_grad_norm: float = 0.5  # gradients, summed over all ranks, are clipped to this norm (0: no clipping)
    target_kl: float | None = None  # end an iteration's epochs once the approximate KL divergence exceeds this

    compile: bool = False  # compile acting and updates with torch.compile
    cudagraphs: bool = False  # replay acting and updates as CUDA graphs
    compile_mode: CompileMode = "default"  # torch.compile mode
    cuda: bool = True  # use a CUDA device if there is one
    threads: int = 0  # CPU threads for torch (0: torch's default)
    matmul_precision: Literal["highest", "high", "medium"] = "highest"  # of float32 matmuls (high: TF32, medium: bf16)
    torch_deterministic: bool = True  # use deterministic cuDNN kernels

    exp_name: str = Path(__file__).stem  # name of the experiment, used in the run's folder name
    seed: int = 1  # seed of the environments, NumPy and torch
    run_dir: str = "runs"  # parent folder of all runs
    resume: str | None = None  # folder of a run to resume; its flags become the defaults
    checkpoint_interval: int | None = None  # environment steps between checkpoints (0: only at the end; None: 20 times)
    capture_video: bool = False  # record videos of rank 0's first environment
    track: bool = False  # also log to Weights & Biases
    wandb_project_name: str = "leanrl"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases team


def orthogonal(layer, gain=2**0.5):
    """Initialize `layer` with orthogonal weights and zero bias, and return it."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """The convolutional network of Mnih et al. 2015 with two heads, for uint8 observations (batch, 4, 84, 84)."""

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
        """The deterministic policy, exported to policy.pt2: the most probable actions (batch,)."""
        logits, _ = self.logits_and_values(obs)
        return logits.argmax(-1)

    def logits_and_values(self, obs):
        """Logits of the actions (batch, num_actions) and values (batch,)."""
        features = self.features(obs / 255)
        return self.actor(features), self.critic(features).squeeze(-1)


class PPO:
    """The learner. CUDA graphs replay kernels but no Python: state that changes is in tensors, updated in place."""

    def __init__(self, args, envs, device):
        self.args = args
        self.device = device
        self.obs_shape = envs.single_observation_space.shape
        num_actions = int(envs.single_action_space.n)
        with device:
            self.agent = Agent(num_actions)
        self.optimizers = {"agent": ClippedAdam(self.agent.parameters(), args.learning_rate, args.max_grad_norm)}
        self.scalars = {name: torch.zeros((), device=device) for name in (*LOSSES, "explained_variance", "grad_norm")}
        self.generators = []  # states of all ranks' random number generators after the last iteration

        # the rollout: the host's part, which is copied to the device, and the agent's part there
        require_memory("num_steps", args.num_steps, envs.num_envs * math.prod(self.obs_shape), device)
        steps = (args.num_steps, envs.num_envs)
        on_cuda = device.type == "cuda"
        all_obs = (args.num_steps + 1, envs.num_envs, *self.obs_shape)
        self.host_obs = torch.zeros(all_obs, dtype=torch.uint8, pin_memory=on_cuda)
        outcomes = ("rewards", "terminated", "ended", "valid")
        self.host_outcomes = {name: torch.zeros(steps, pin_memory=on_cuda) for name in outcomes}
        self.rollout = {name: column.to(device) for name, column in self.host_outcomes.items()}  # the same on a CPU
        self.rollout["obs"] = self.host_obs.to(device)
        self.rollout["actions"] = torch.zeros(steps, dtype=torch.int64, device=device)
        self.rollout |= {name: torch.zeros(steps, device=device) for name in ("log_prob", "values")}

        # acting: its inputs besides observations, and the result that the host waits for
        self.t = torch.zeros(1, dtype=torch.int64, device=device)  # step of the rollout
        self.noise = torch.ones(envs.num_envs, num_actions, device=device)
        self.host_actions = torch.zeros(envs.num_envs, dtype=torch.int64, pin_memory=on_cuda)
        self.actions = self.host_actions.to(device)
        self.actions_arrived = torch.cuda.Event() if on_cuda else torch.cpu.Event()

        # learning: the rollout as one row per transition, and the data of a minibatch
        self.batch_size = math.prod(steps)
        names = ("obs", "actions", "log_prob", "values", "valid")
        self.batch = {name: self.rollout[name].flatten(0, 1) for name in names}
        self.batch |= {name: torch.zeros(self.batch_size, device=device) for name in ("advantages", "returns")}
        self.rows = torch.zeros(self.batch_size // args.num_minibatches, dtype=torch.int64, device=device)
        # layout of images: convolutions are faster on a CPU with the channels last
        self.memory_format = torch.channels_last if device.type == "cpu" else torch.contiguous_format
        self.moments = torch.zeros(3, dtype=torch.float64, device=device)  # count, sum and sum of squares of advantages
        self.num_weights = len(self.optimizers["agent"].m)
        self.sums = torch.zeros(self.num_weights + len(LOSSES), device=device)  # of gradients and losses, over ranks

        self.decide = self.fast(self.decide)  # replaces the method
        self.compute_gradient = self.fast(self.compute_gradient)
        self.step = self.fast(self.step)

    @torch.no_grad()
    def make_batch(self):
        """Estimate the advantages and returns of the rollout.

        The next row holds a step's next observation, even where the step ends an episode: only the following step
        starts a new one.
        """
        rollout = self.rollout

        # GAE (arXiv:1506.02438, eq. 16)
        _, last_values = self.agent.logits_and_values(rollout["obs"][-1])
        next_values = torch.cat((rollout["values"][1:], last_values[None])) * (1 - rollout["terminated"])
        deltas = rollout["rewards"] + self.args.gamma * next_values - rollout["values"]
        advantages = gae(deltas, self.args.gamma * self.args.gae_lambda * (1 - rollout["ended"]))

        self.batch["advantages"].copy_(advantages.flatten())
        self.batch["returns"].copy_((advantages + rollout["values"]).flatten())

    def loss(self, rows):
        """This rank's contributions to LOSSES for its rows of a minibatch, in order.

        `shares` (batch,) are the weights of the rows in a mean over the minibatch. They add up to 1 over all ranks, so
        sums over ranks are means.
        """
        clip = self.args.clip_coef
        count, total, squares = self.moments.unbind()
        shares = rows["valid"] / count.clamp(min=1)
        logits, values = self.agent.logits_and_values(rows["obs"])
        log_probs = logits.log_softmax(-1)
        log_prob = log_probs.gather(-1, rows["actions"][:, None]).squeeze(-1)

        # clipped policy loss (eq. 7)
        log_ratio = log_prob - rows["log_prob"]
        ratio = log_ratio.exp()
        advantages = rows["advantages"]
        if self.args.norm_adv:
            mean = total / count.clamp(min=1)
            variance = (squares - total * mean) / (count - 1).clamp(min=1)
            advantages = (advantages - mean) / (variance.clamp(min=0).sqrt() + 1e-8)
        gains = torch.min(advantages * ratio, advantages * ratio.clamp(1 - clip, 1 + clip))
        policy_loss = -(gains * shares).sum()

        # clipped value loss
        errors = (values - rows["returns"]).square()
        if self.args.clip_vloss:
            clipped_values = rows["values"] + (values - rows["values"]).clamp(-clip, clip)
            errors = torch.max(errors, (clipped_values - rows["returns"]).square())
        value_loss = 0.5 * (errors * shares).sum()

        entropy = (-(log_probs.exp() * log_probs).sum(-1) * shares).sum()
        approx_kl = ((ratio - 1 - log_ratio) * shares).sum()  # http://joschu.net/blog/kl-approx.html, k3
        clipfrac = (((ratio - 1).abs() > clip) * shares).sum()
        return policy_loss, value_loss, entropy, approx_kl, clipfrac

    def compute_gradient(self):
        """Fill `sums` with this rank's contributions to the gradient and LOSSES for its `rows` of a minibatch."""
        rows = {name: column[self.rows] for name, column in self.batch.items()}
        rows["obs"] = rows["obs"].contiguous(memory_format=self.memory_format)
        losses = self.loss(rows)
        policy_loss, value_loss, entropy, *_ = losses
        loss = policy_loss - self.args.ent_coef * entropy + self.args.vf_coef * value_loss
        gradient = self.optimizers["agent"].gradient(loss)
        self.sums.copy_(torch.cat((gradient, torch.stack(losses).detach())))

    def step(self):
        """One step of Adam with the gradient summed over all ranks."""
        gradient, losses = self.sums.split((self.num_weights, len(LOSSES)))
        grad_norm = self.optimizers["agent"].step(gradient)
        self.keep(**dict(zip(LOSSES, losses, strict=True)), grad_norm=grad_norm)

    def learn_epoch(self):
        """Pass over the batch in minibatches, which each rank draws from its own rows without replacement."""
        for scalar in self.scalars.values():
            scalar.zero_()
        order = torch.rand(self.batch_size, device=self.device).argsort().view(self.args.num_minibatches, -1)
        valid = self.batch["valid"][order].double()
        advantages = self.batch["advantages"][order].double()
        powers = torch.stack((valid, valid * advantages, valid * advantages.square()))
        moments = powers.sum(-1).T.contiguous()  # (num_minibatches, 3)
        add_up(moments)
        for rows, minibatch_moments in zip(order, moments, strict=True):
            self.rows.copy_(rows)
            self.moments.copy_(minibatch_moments)
            self.compute_gradient()
            add_up(self.sums)
            self.step()

    def update(self, learning_rate, last_obs):
        """Launch all updates of an iteration; `last_obs` (num_envs, 4, 84, 84) follow its last step."""
        self.optimizers["agent"].lr.fill_(learning_rate)
        self.write_obs(self.args.num_steps, last_obs)
        for name, column in self.host_outcomes.items():
            self.rollout[name].copy_(column, non_blocking=True)
        self.make_batch()
        for _ in range(self.args.update_epochs):
            self.learn_epoch()
            if self.args.target_kl is not None and self.losses()["approx_kl"] > self.args.target_kl:
                break
        errors = masked_variance(self.batch["advantages"], self.batch["valid"])  # returns minus values
        explained_variance = 1 - errors / masked_variance(self.batch["returns"], self.batch["valid"])
        self.scalars["explained_variance"].copy_(explained_variance)

    @torch.no_grad()
    def decide(self):
        """Sample actions for the observations of step `t` with the Gumbel-max trick.

        `noise` is exponential; the negative of its logarithm is Gumbel noise.
        """
        logits, values = self.agent.logits_and_values(self.rollout["obs"][self.t].squeeze(0))
        log_probs = logits.log_softmax(-1)
        self.actions.copy_((log_probs - self.noise.log()).argmax(-1))
        log_prob = log_probs.gather(-1, self.actions[:, None]).squeeze(-1)
        for name, column in {"actions": self.actions, "log_prob": log_prob, "values": values}.items():
            self.rollout[name].index_copy_(0, self.t, column[None])

    def act(self, t, obs):
        """Sampled actions (num_envs,) for step `t` of the rollout and `obs` (num_envs, 4, 84, 84), both NumPy."""
        self.write_obs(t, obs)
        self.t.fill_(t)
        self.noise.exponential_()
        self.decide()
        self.host_actions.copy_(self.actions, non_blocking=True)
        self.actions_arrived.record()
        self.actions_arrived.synchronize()
        return self.host_actions.numpy().copy()

    def write_obs(self, t, obs):
        """Copy `obs`, NumPy (num_envs, 4, 84, 84), to step `t` of the rollout."""
        self.host_obs.numpy()[t] = obs
        self.rollout["obs"][t].copy_(self.host_obs[t], non_blocking=True)

    def record(self, t, rewards, terminated, truncated, is_reset):
        """Note the outcome of step `t`; arguments are NumPy (num_envs,), as returned by `AtariEnvs.step`."""
        outcomes = {"rewards": rewards, "terminated": terminated, "ended": terminated | truncated, "valid": ~is_reset}
        for name, column in outcomes.items():
            self.host_outcomes[name].numpy()[t] = column

    def fast(self, function):
        """Compile and capture `function`, which takes and returns nothing, as the flags request."""
        if self.args.compile:
            torch._dynamo.reset()  # otherwise torch stops recompiling after some learners in one process
            torch._dynamo.config.trace_autograd_ops = True  # allows torch.autograd.grad in a compiled function
            torch.autograd.set_multithreading_enabled(False)  # keeps the backward pass in the traced thread
            VecISA._avx_code = ""  # the program that inductor tests g++ with; its own takes seconds
            options = torch._inductor.list_mode_options(self.args.compile_mode)
            if self.device.type == "cuda":
                options["combo_kernels"] = True  # fewer kernels
            function = torch.compile(function, fullgraph=True, options=options)
        if self.args.cudagraphs:
            logging.getLogger("tensordict").setLevel(logging.WARNING)  # it logs every capture
            function = CudaGraphModule(function, warmup=3)  # captures at the third call, after compilation
        return function

    def keep(self, **scalars):
        """Add scalars to the means over an epoch's minibatches, always in the same memory."""
        for name, value in scalars.items():
            self.scalars[name].add_(value.detach() / self.args.num_minibatches)

    def losses(self):
        """Mean losses and statistics of the last epoch, by name. Waits for its update."""
        return dict(zip(self.scalars, torch.stack(list(self.scalars.values())).tolist(), strict=True))

    def policy(self):
        """A copy of the deterministic policy on the CPU, and example inputs."""
        return copy.deepcopy(self.agent).cpu(), (torch.zeros(2, *self.obs_shape, dtype=torch.uint8),)

    def tensors(self):
        """All tensors that updates change. Tensors missing here are not saved."""
        optimizers = {name: optimizer.tensors() for name, optimizer in self.optimizers.items()}
        return {"networks": {"agent": self.agent.state_dict()}, "optimizers": optimizers}

    def state_dict(self):
        """All of the learner's state, with which it goes on bit for bit."""
        return self.tensors() | {
            "generators": self.generators,
        }

    def load_state_dict(self, state):
        """Restore a `state_dict`."""
        tensors = self.tensors()
        load_tensors(tensors, {name: state[name] for name in tensors})
        self.generators = state["generators"]
        if len(self.generators) != WORLD_SIZE:
            given = f"the checkpoint is of {len(self.generators)} ranks, and these are {WORLD_SIZE}"
            print(f"note: {given}: they draw other numbers", file=sys.stderr)
        if len(self.generators) > RANK:
            set_generators(self.generators[RANK])


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


def masked_mean(values, valid):
    """The mean of `values` (batch,) where `valid` (batch,) is 1; 0 if it is 1 nowhere."""
    return (values * valid).sum() / valid.sum().clamp(min=1)


def masked_variance(values, valid):
    """The unbiased variance of `values` (batch,) where `valid` is 1; 0 if there are fewer than two of these."""
    squares = (values - masked_mean(values, valid)).square()
    return (squares * valid).sum() / (valid.sum() - 1).clamp(min=1)


def train(args):
    """Train an agent."""
    with process_group(args), TemporaryDirectory() as scratch:
        share = args.num_envs // WORLD_SIZE
        args = replace(args, seed=args.seed + RANK * share)  # envpool adds the number of the game
        if RANK > 0:
            args = replace(args, run_dir=scratch, track=False, capture_video=False)
        device, folder = prepare(args)
        torch.backends.cudnn.deterministic = args.torch_deterministic
        torch.backends.cudnn.allow_tf32 = args.matmul_precision != "highest"
        if args.cudagraphs and device.type == "cpu":
            print("warning: --cudagraphs needs a CUDA device; running without", file=sys.stderr)
            args.cudagraphs = False
        check_shares(args)
        envs = make_games(replace(args, num_envs=share), folder)
        learner = PPO(args, envs, device)
        with JointRun(args, folder, envs, learner) as run:
            obs, _ = envs.reset()
            while run.unfinished():
                learning_rate = args.learning_rate
                if args.anneal_lr:
                    learning_rate *= 1 - run.step / args.total_timesteps
                played = []
                for t in range(args.num_steps):
                    actions = learner.act(t, obs)
                    obs, rewards, terminated, truncated, infos = envs.step(actions)
                    learner.record(t, rewards, terminated, truncated, infos["is_reset"])
                    played.append((infos["raw_rewards"], infos["game_ended"]))
                run.advance_together(np.array(played))
                learner.update(learning_rate, obs)
                run.log(learner.losses())


def check_shares(args):
    """Refuse sizes that do not fit together or that cannot be divided evenly among the ranks."""
    if args.num_envs % WORLD_SIZE:
        refuse("num_envs", args.num_envs, f"give a multiple of {WORLD_SIZE}, the number of ranks that share them")
    rows = args.num_envs // WORLD_SIZE * args.num_steps
    if rows % args.num_minibatches or rows == args.num_minibatches:
        refuse("num_minibatches", args.num_minibatches, f"give a divisor of each rank's {rows} steps, below it")


class AtariEnvs(gym.vector.VectorEnv):
    """Atari games. Observations are the last four frames, uint8 (num_envs, 4, 84, 84).

    An episode is one life, with rewards of -1, 0 or 1. The step after its end ignores its action and starts the next
    episode, so nothing can be learned from that step.
    """

    def __init__(self, args, seed):
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_fps": 15}
        self.render_mode = "rgb_array"
        self.num_envs = args.num_envs
        self.pool = make_pool(args, seed)
        self.single_observation_space = self.pool.observation_space
        self.single_action_space = self.pool.action_space
        self.ended = np.zeros(self.num_envs, bool)

    def reset(self, *, seed=None, options=None):
        """The first observations and empty infos; envpool's seed is set in `__init__`."""
        obs, _ = self.pool.reset()
        return obs, {}

    def step(self, actions):
        """Like any vector environment's step. Infos are arrays (num_envs,):

        `raw_rewards` of the game; `game_ended`, true where a game is over or at its time limit; `is_reset`, true where
        the step ignored its action and started an episode.
        """
        obs, rewards, terminated, truncated, infos = self.pool.step(actions.astype(np.int32))
        game_over = infos["terminated"].astype(bool)
        infos = {"raw_rewards": infos["reward"], "game_ended": game_over | truncated, "is_reset": self.ended}
        terminated = terminated | game_over  # envpool reports a game over in its last allowed step as truncated
        truncated = truncated & ~terminated
        self.ended = terminated | truncated
        return obs, rewards, terminated, truncated, infos

    def render(self):
        """The screen of each game, in color."""
        return list(self.pool.render(env_ids=np.arange(self.num_envs)))


def require_memory(name, value, bytes_each, device):
    """Refuse an argument if `value` items of `bytes_each` do not fit in the memory of `device`."""
    if device.type == "cuda":
        memory, _ = torch.cuda.mem_get_info()
    elif hasattr(os, "sysconf"):  # not on Windows
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        return
    room = memory - 2 * 2**30  # leaves 2 GiB for networks, batches and libraries
    if value * bytes_each > room:
        refuse(name, value, f"give at most {room // bytes_each}, which takes {room / 1e9:.0f} GB")


def make_pool(args, seed):
    """Make `num_envs` games in envpool, which steps them in threads."""
    require_memory("num_envs", args.num_envs, 1_300_000, torch.device("cpu"))
    try:
        return envpool.make(
            args.env_id,
            env_type="gymnasium",
            num_envs=args.num_envs,
            seed=seed % 2**31,  # envpool's limit
            episodic_life=True,
            reward_clip=True,
            render_mode="rgb_array" if args.capture_video else None,
        )
    except (AssertionError, TypeError) as error:
        refuse("env_id", args.env_id, f"name an Atari game of envpool, such as Breakout-v5 ({error})")


def make_games(args, folder):
    """Make `num_envs` games, stepped together; videos of the first are written to `folder`."""
    seed = args.seed
    if args.resume is not None:
        seed += load_checkpoint(args.resume).get("global_step", 0)  # a resumed run plays other games
    envs = AtariEnvs(args, seed)
    if args.capture_video:
        envs = gym.wrappers.vector.RecordVideo(envs, str(folder / "videos"), record_first_only=True)
    return envs


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


# ---------------------------------------------------------------------------------------------------------------------
# The ranks: collectives and their joint run
# ---------------------------------------------------------------------------------------------------------------------


class LostRank(RuntimeError):
    """Another rank has ended or hangs."""


def collective(function, *args):
    """Call `function` of torch.distributed with `args`. All ranks must make the same calls in the same order."""
    try:
        function(*args)
    except RuntimeError as error:
        what = " ".join(str(error).split())
        raise LostRank(f"rank {RANK} cannot reach the other ranks: {what}") from error


def add_up(tensor):
    """Replace `tensor` on each rank by the sum over ranks, bit-equal on all."""
    collective(dist.all_reduce, tensor)


def gathered(thing):
    """A list of the `thing` of each rank, in rank order; the host waits for it."""
    things = [None] * WORLD_SIZE
    collective(dist.all_gather_object, things, thing)
    return things


def get_generators():
    """The states of this rank's random number generators."""
    on_cuda = torch.cuda.is_initialized()
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state() if on_cuda else None}


def set_generators(states):
    """Restore the states that `get_generators` returned."""
    torch.set_rng_state(states["cpu"])
    if states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"])


@contextmanager
def process_group(args):
    """Join the process group of the ranks. Inside, only rank 0 and a rank that fails write to stderr."""
    store = dist.HashStore() if WORLD_SIZE == 1 else None
    common = {"store": store, "rank": RANK, "world_size": WORLD_SIZE, "timeout": TIMEOUT}
    if args.cuda and torch.cuda.is_available():
        gpus = torch.cuda.device_count()
        if gpus < LOCAL_WORLD_SIZE:
            refuse("cuda", True, f"give torchrun --nproc-per-node {gpus}, a rank per GPU, or --no-cuda")
        torch.cuda.set_device(LOCAL_RANK)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", LOCAL_RANK), **common)
    else:
        dist.init_process_group("gloo", **common)
    stderr = sys.stderr
    if RANK > 0:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    try:
        yield
    except LostRank as error:
        raise SystemExit(f"error: {error}") from error
    except Exception:
        sys.stderr = stderr
        raise
    finally:
        dist.destroy_process_group()


class JointRun(Run):
    """The joint run of all ranks. All count and decide the same, and only rank 0's files are kept."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.config["ranks"] = WORLD_SIZE  # for summary.json

    def unfinished(self):
        """Whether all ranks continue. A signal to any rank ends all of them after the same iteration.

        All take the weights and moments of rank 0, as their kernels may round differently. Checkpoints hold these.
        """
        reports = gathered((self.signal, get_generators()))
        self.learner.generators = [states for _, states in reports]
        for tensor in tree_leaves(self.learner.tensors()):
            collective(dist.broadcast, tensor.detach(), 0)
        signals = [number for number, _ in reports if number is not None]
        if signals and self.signal is None:
            self.on_signal(signals[0], None)
        super().unfinished()  # saves a checkpoint if one is due
        return self.step < self.args.total_timesteps and not signals

    def advance_together(self, played):
        """Count an iteration. `played` (num_steps, 2, this rank's num_envs) are raw rewards and ends of games."""
        for rewards, ended in np.concatenate(gathered(played), -1):
            with suppress(SystemExit):  # at a signal all ranks end together, in `unfinished`
                self.advance(rewards, ended)

    def __exit__(self, kind, error, traceback):
        """Wait for all ranks to save if they end together: torchrun terminates the others once one has ended."""
        try:
            super().__exit__(kind, error, traceback)
        finally:
            if kind is None or self.diverged:
                gathered(None)


if __name__ == "__main__":
    train(parse_args())

# `uv run` reads and installs these requirements (PEP 723).
# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#     "torch>=2.11,<2.16", "tensordict>=0.12,<0.16", "gymnasium>=1.1,<2", "numpy>=1.26,<3",
#     "tyro>=1.0,<2", "tqdm>=4.66", "tensorboard>=2.18", "wandb>=0.20", "envpool>=1.2,<2",
# ]
# ///
