"""Parallel Q-network (PQN) for Atari, built for speed: Gallici et al. 2024, arXiv:2407.04811.

The algorithm is `PQN` and `train`. Below the line of dashes is the run, the same text in all scripts.
The updates are those of the plain version, pqn_atari_envpool.py. Why it is faster:

1. `--compile` compiles acting into one graph, and a minibatch's update, from its rows to RAdam, into another.
   `--cudagraphs` captures each as a CUDA graph, which takes one launch (`PQN.fast`).
2. The rollout is on the device: an environment step takes one copy in, of bytes, and one copy out (`PQN.send`,
   `PQN.act`).
3. The host draws random actions while the device computes the greedy ones (`PQN.act`).
4. Q(lambda), a linear recurrence, is solved by doubling in log2(num_steps) rounds (`discounted`).
5. On a CPU, convolutions and LayerNorm work on images that are stored channels-last (`ImageLayerNorm`).

    python leanrl/pqn_atari_envpool_torchcompile.py --env-id Breakout-v5 --compile --cudagraphs
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
from importlib.metadata import distributions
from pathlib import Path
from typing import Literal

import envpool
import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.vector import AutoresetMode
from tensordict.nn import CudaGraphModule
from torch import nn
from torch._inductor.cpu_vec_isa import VecISA
from torch.utils import collect_env
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

CompileMode = Literal["default", "max-autotune-no-cudagraphs"]


@dataclass
class Args:
    env_id: str = "Breakout-v5"  # Atari game in envpool
    total_timesteps: int = 10_000_000  # total environment steps (four frames each), summed over all environments
    num_envs: int = 8  # number of environments, stepped together
    num_steps: int = 128  # steps of each environment per rollout
    learning_rate: float = 2.5e-4  # initial learning rate
    anneal_lr: bool = True  # decay the learning rate linearly to 0 over the run
    gamma: float = 0.99  # discount factor
    q_lambda: float = 0.65  # lambda of the Q(lambda) targets
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # passes over each rollout
    max_grad_norm: float = 10.0  # gradients are clipped to this norm (0: no clipping)
    start_e: float = 1.0  # epsilon, the probability of a random action, at the first step
    end_e: float = 0.01  # epsilon after its decay
    exploration_fraction: float = 0.1  # fraction of --total-timesteps over which epsilon decays linearly

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
    capture_video: bool = False  # record videos of the first environment
    track: bool = False  # also log to Weights & Biases
    wandb_project_name: str = "leanrl"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases team


def orthogonal(layer, gain=2**0.5):
    """Initialize `layer` with orthogonal weights and zero bias, and return it."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class ImageLayerNorm(nn.LayerNorm):
    """LayerNorm of images (batch, channels, rows, columns). On a CPU it works channels-last, as convolutions do."""

    def __init__(self, shape):
        super().__init__(shape)
        self.channels_last = self.weight.device.type == "cpu"

    def forward(self, x):
        if not self.channels_last:
            return super().forward(x)
        weight = self.weight.permute(1, 2, 0)
        bias = self.bias.permute(1, 2, 0)
        x = nn.functional.layer_norm(x.permute(0, 2, 3, 1), weight.shape, weight, bias, self.eps)
        return x.permute(0, 3, 1, 2)


class QNetwork(nn.Module):
    """Q(s, a) of all actions: maps uint8 (batch, 4, 84, 84) to (batch, num_actions)."""

    def __init__(self, num_actions):
        super().__init__()
        self.net = nn.Sequential(
            orthogonal(nn.Conv2d(4, 32, 8, stride=4)),
            ImageLayerNorm((32, 20, 20)),
            nn.ReLU(),
            orthogonal(nn.Conv2d(32, 64, 4, stride=2)),
            ImageLayerNorm((64, 9, 9)),
            nn.ReLU(),
            orthogonal(nn.Conv2d(64, 64, 3)),
            ImageLayerNorm((64, 7, 7)),
            nn.ReLU(),
            nn.Flatten(),
            orthogonal(nn.Linear(64 * 7 * 7, 512)),
            nn.LayerNorm(512),
            nn.ReLU(),
            orthogonal(nn.Linear(512, num_actions)),
        )

    def forward(self, obs):
        return self.net(obs / 255)


class GreedyPolicy(nn.Module):
    """The policy exported to policy.pt2, actions of highest value: maps uint8 (batch, 4, 84, 84) to (batch,)."""

    def __init__(self, q):
        super().__init__()
        self.q = q

    def forward(self, obs):
        return self.q(obs).argmax(-1)


class PQN:
    """The learner. CUDA graphs replay kernels but no Python: state that changes is in tensors, updated in place."""

    def __init__(self, args, envs, device):
        self.args = args
        self.device = device
        self.obs_shape = envs.single_observation_space.shape
        self.num_actions = int(envs.single_action_space.n)
        with device:
            self.q = QNetwork(self.num_actions)
        self.optimizers = {"q": ClippedRAdam(self.q.parameters(), args.learning_rate, args.max_grad_norm)}
        self.scalars = {name: torch.zeros((), device=device) for name in ("q_values", "td_loss", "grad_norm")}
        self.rng = np.random.default_rng(args.seed)  # for random actions

        # the rollout: the host's part, which is copied to the device, and the device's own
        require_memory("num_steps", args.num_steps, envs.num_envs * math.prod(self.obs_shape), device)
        steps = (args.num_steps, envs.num_envs)
        on_cuda = device.type == "cuda"
        all_obs = (args.num_steps + 1, envs.num_envs, *self.obs_shape)
        self.host_obs = torch.zeros(all_obs, dtype=torch.uint8, pin_memory=on_cuda)
        names = ("actions", "rewards", "terminated", "ended", "valid")
        self.host_columns = {name: torch.zeros(steps, pin_memory=on_cuda) for name in names}
        self.rollout = {name: column.to(device) for name, column in self.host_columns.items()}  # the same on a CPU
        self.rollout["obs"] = self.host_obs.to(device)
        self.rollout["values"] = torch.zeros(all_obs[:2], device=device)

        # acting: the step of the rollout, and the greedy actions that the host waits for
        self.t = torch.zeros(1, dtype=torch.int64, device=device)
        self.host_actions = torch.zeros(envs.num_envs, dtype=torch.int64, pin_memory=on_cuda)
        self.actions = self.host_actions.to(device)
        self.actions_arrived = torch.cuda.Event() if on_cuda else torch.cpu.Event()

        # learning: the rollout as one row per transition, and the rows of a minibatch
        self.batch_size = math.prod(steps)
        self.batch = {name: self.rollout[name].flatten(0, 1) for name in ("obs", "actions", "valid")}
        self.batch["targets"] = torch.zeros(self.batch_size, device=device)
        self.rows = torch.zeros(self.batch_size // args.num_minibatches, dtype=torch.int64, device=device)
        # layout of images: convolutions and LayerNorm are faster on a CPU with the channels last
        self.memory_format = torch.channels_last if device.type == "cpu" else torch.contiguous_format

        self.decide = self.fast(self.decide)  # replaces the method
        self.update_minibatch = self.fast(self.update_minibatch)

    @torch.no_grad()
    def make_batch(self):
        """Compute the Q(lambda) targets of the rollout.

        The next row holds a step's next observation, even where the step ends an episode: only the following step
        starts a new one.
        """
        rollout = self.rollout

        # Q(lambda): a mean of one-step and longer returns, which end with the episode or the rollout
        next_values = rollout["values"][1:] * (1 - rollout["terminated"])
        weights = self.args.q_lambda * (1 - rollout["ended"])
        weights[-1] = 0
        one_step = rollout["rewards"] + self.args.gamma * (1 - weights) * next_values
        self.batch["targets"].copy_(discounted(one_step, self.args.gamma * weights).flatten())

    def update_minibatch(self):
        """One step of RAdam on the transitions `rows` of the batch."""
        rows = {name: column[self.rows] for name, column in self.batch.items()}
        rows["obs"] = rows["obs"].contiguous(memory_format=self.memory_format)

        # TD loss
        actions = rows["actions"].long()[:, None]
        q = self.q(rows["obs"]).gather(-1, actions).squeeze(-1)
        td_loss = masked_mean((q - rows["targets"]).square(), rows["valid"])
        self.keep(q_values=masked_mean(q, rows["valid"]), td_loss=td_loss)
        gradient = self.optimizers["q"].gradient(td_loss)
        grad_norm = self.optimizers["q"].step(gradient)
        self.keep(grad_norm=grad_norm)

    def update(self, learning_rate, last_obs):
        """Launch all updates of an iteration; `last_obs` (num_envs, 4, 84, 84) follow its last step."""
        self.optimizers["q"].lr.fill_(learning_rate)
        self.send(self.args.num_steps, last_obs)
        for name, column in self.host_columns.items():
            self.rollout[name].copy_(column, non_blocking=True)
        self.make_batch()
        for _ in range(self.args.update_epochs):
            order = torch.rand(self.batch_size, device=self.device).argsort()
            for rows in order.chunk(self.args.num_minibatches):
                self.rows.copy_(rows)
                self.update_minibatch()

    @torch.no_grad()
    def decide(self):
        """Compute the values and greedy actions of the observations of step `t`."""
        values, greedy = self.q(self.rollout["obs"][self.t].squeeze(0)).max(-1)
        self.rollout["values"].index_copy_(0, self.t, values[None])
        self.actions.copy_(greedy)

    def send(self, t, obs):
        """Copy `obs`, NumPy (num_envs, 4, 84, 84), to step `t` of the rollout, and start computing their values."""
        self.host_obs.numpy()[t] = obs
        self.rollout["obs"][t].copy_(self.host_obs[t], non_blocking=True)
        self.t.fill_(t)
        self.decide()

    def act(self, t, obs, exploration):
        """Actions for step `t` of the rollout and `obs`, both NumPy (num_envs, ...).

        Each is random with probability `exploration`, else greedy.
        """
        self.send(t, obs)
        self.host_actions.copy_(self.actions, non_blocking=True)
        self.actions_arrived.record()
        explore = self.rng.random(len(obs)) < exploration
        random_actions = self.rng.integers(self.num_actions, size=len(obs))
        self.actions_arrived.synchronize()
        actions = np.where(explore, random_actions, self.host_actions.numpy())
        self.host_columns["actions"].numpy()[t] = actions
        return actions

    def record(self, t, rewards, terminated, truncated, is_reset):
        """Note the outcome of step `t`; arguments are NumPy (num_envs,), as returned by `AtariEnvs.step`."""
        outcomes = {"rewards": rewards, "terminated": terminated, "ended": terminated | truncated, "valid": ~is_reset}
        for name, column in outcomes.items():
            self.host_columns[name].numpy()[t] = column

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
        """Keep scalars for the log, always in the same memory.

        Keep values before the optimizer changes weights that they depend on: compiled code may compute them late.
        """
        for name, value in scalars.items():
            self.scalars[name].copy_(value.detach())

    def losses(self):
        """Losses of the last minibatch, by name. Waits for the last update."""
        return dict(zip(self.scalars, torch.stack(list(self.scalars.values())).tolist(), strict=True))

    def policy(self):
        """A copy of the deterministic policy on the CPU, and example inputs."""
        return GreedyPolicy(copy.deepcopy(self.q).cpu()), (torch.zeros(2, *self.obs_shape, dtype=torch.uint8),)

    def tensors(self):
        """All tensors that updates change. Tensors missing here are not saved."""
        optimizers = {name: optimizer.tensors() for name, optimizer in self.optimizers.items()}
        return {"networks": {"q": self.q.state_dict()}, "optimizers": optimizers}

    def state_dict(self):
        """All of the learner's state, with which it goes on bit for bit."""
        return self.tensors() | {
            "numpy_rng": self.rng.bit_generator.state,
            "rng": torch.get_rng_state(),
            "cuda_rng": [torch.cuda.get_rng_state()] if self.device.type == "cuda" else [],
        }

    def load_state_dict(self, state):
        """Restore a `state_dict`."""
        tensors = self.tensors()
        load_tensors(tensors, {name: state[name] for name in tensors})
        self.rng.bit_generator.state = state["numpy_rng"]
        torch.set_rng_state(state["rng"])
        torch.cuda.set_rng_state_all(state["cuda_rng"])


def discounted(terms, decay):
    """Sums x_t = terms_t + decay_t x_{t+1}; all tensors are (num_steps, ...).

    Computed by doubling: after k rounds, x_t covers 2**k steps.
    """
    sums = terms
    covered = 1
    while covered < len(terms):
        following = decay[: len(terms) - covered] * sums[covered:]
        sums = torch.cat((sums[:-covered] + following, sums[-covered:]))
        decay = decay[:-covered] * decay[covered:]
        covered *= 2
    return sums


def epsilon(step, args):
    """The probability of a random action at environment step `step`: linear from start_e to end_e, then constant."""
    progress = min(step / max(args.exploration_fraction * args.total_timesteps, 1), 1)
    return args.start_e + progress * (args.end_e - args.start_e)


class ClippedRAdam:
    """RAdam (Liu et al. 2019, arXiv:1908.03265) with gradient clipping, for use in compiled functions.

    torch.optim.RAdam breaks the graph there. The gradients of all weights are one vector. To change the learning rate,
    call `lr.fill_(value)`.
    """

    beta1, beta2, eps = 0.9, 0.999, 1e-8

    def __init__(self, weights, lr, max_grad_norm):
        self.weights = [w for w in weights if w.requires_grad]
        self.max_grad_norm = max_grad_norm or math.inf
        device = self.weights[0].device
        self.m = torch.zeros(sum(w.numel() for w in self.weights), device=device)
        self.v = torch.zeros_like(self.m)
        self.lr = torch.tensor(lr, device=device)
        self.sizes = self.step_sizes().to(device)
        self.steps = torch.zeros(1, dtype=torch.int64, device=device)  # so far

    def step_sizes(self):
        """Sizes of the first steps, (20_000, 2), with rectification and without it (algorithm 2): one of them is 0.

        Later sizes are equal to the last, to float32's precision. The table is computed once: a compiled step would
        compute the formula again for every weight.
        """
        t = torch.arange(1, 20_001, dtype=torch.float64)
        correction1 = 1 - self.beta1**t
        correction2 = 1 - self.beta2**t
        longest = 2 / (1 - self.beta2) - 1
        length = longest - 2 * t * self.beta2**t / correction2  # of the moving average of squares
        rectification = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        rectified = (rectification.clamp(min=0) * correction2).sqrt() / correction1
        momentum = 1 / correction1
        long = length > 5  # torch's threshold: the paper has 4
        return torch.stack((torch.where(long, rectified, 0), torch.where(long, 0, momentum)), -1).float()

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

        # until the moving average of squares is long enough, the step is that of momentum alone
        rectified, momentum = self.sizes[self.steps.clamp(max=len(self.sizes) - 1)].unbind(-1)
        self.steps.add_(1)
        scale = self.lr * (rectified / (self.v.sqrt() + self.eps) + momentum)
        torch._foreach_sub_(self.weights, self.parts(self.m * scale))
        return norm

    def parts(self, vector):
        """Views of `vector` in the shapes of the weights."""
        parts = vector.split([w.numel() for w in self.weights])
        return [part.view_as(w) for part, w in zip(parts, self.weights, strict=True)]

    def tensors(self):
        """The state that a resumed run needs."""
        return {"m": self.m, "v": self.v, "steps": self.steps}


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


def train(args):
    """Train an agent."""
    device, folder = prepare(args)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.backends.cudnn.allow_tf32 = args.matmul_precision != "highest"
    if args.cudagraphs and device.type == "cpu":
        print("warning: --cudagraphs needs a CUDA device; running without", file=sys.stderr)
        args.cudagraphs = False
    check_batch_size(args)
    envs = make_games(args, folder)
    learner = PQN(args, envs, device)
    with Run(args, folder, envs, learner) as run:
        obs, _ = envs.reset()
        while run.unfinished():
            learning_rate = args.learning_rate
            if args.anneal_lr:
                learning_rate *= 1 - run.step / args.total_timesteps
            for t in range(args.num_steps):
                actions = learner.act(t, obs, epsilon(run.step, args))
                obs, rewards, terminated, truncated, infos = envs.step(actions)
                learner.record(t, rewards, terminated, truncated, infos["is_reset"])
                run.advance(infos["raw_rewards"], infos["game_ended"])
            learner.update(learning_rate, obs)
            run.log(learner.losses())


def check_batch_size(args):
    """Refuse a batch that cannot be divided evenly into minibatches."""
    batch_size = args.num_envs * args.num_steps
    if batch_size % args.num_minibatches:
        refuse("num_minibatches", args.num_minibatches, f"give a divisor of num_envs * num_steps, {batch_size}")


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
AT_MOST = {"gamma": 1, "q_lambda": 1, "start_e": 1, "end_e": 1, "exploration_fraction": 1}
AT_MOST |= {"seed": 2**32 - 1, "threads": os.cpu_count()}


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
#     "tyro>=1.0,<2", "tqdm>=4.66", "tensorboard>=2.18", "wandb>=0.20", "envpool>=1.2,<2",
# ]
# ///
