"""Soft Actor-Critic (SAC) for continuous actions, built for speed: Haarnoja et al. 2018, arXiv:1812.05905.

The algorithm is `SAC` and `train`. Below the line of dashes is the run, the same text in all scripts.
The updates are those of the plain version, sac_continuous_action.py, but each action comes from a policy that lacks
the newest update. Why it is faster:

1. `--compile` compiles each part of an update, from sampling to Adam, into one graph (`SAC.compiled`). `--cudagraphs`
   captures each part as a CUDA graph, which takes one launch (`SAC.captured`).
2. The critics run as one batched matmul per layer (`SAC.q_values`).
3. The replay buffer is on the device: an environment step takes one copy in and one copy out (`SAC.observe`).
4. Environments step while a CUDA device updates: the host waits only for its next actions (`train`).

    python leanrl/sac_continuous_action_torchcompile.py --env-id HalfCheetah-v5 --compile --cudagraphs
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
from torch.func import functional_call, stack_module_state, vmap
from torch.utils import collect_env
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

NUM_CRITICS = 2
LOG_STD_MIN = -5.0
LOG_STD_MAX = 2.0
LOG_INTERVAL = 100  # steps of the vector environment between logs of the losses
CompileMode = Literal["default", "max-autotune-no-cudagraphs"]


@dataclass
class Args:
    env_id: str = "HalfCheetah-v5"  # gymnasium environment
    total_timesteps: int = 1_000_000  # total environment steps, summed over all environments
    num_envs: int = 1  # number of environments, stepped together
    buffer_size: int = 1_000_000  # capacity of the replay buffer, in transitions
    gamma: float = 0.99  # discount factor
    tau: float = 0.005  # target smoothing coefficient
    batch_size: int = 256  # transitions per update
    learning_starts: int = 5_000  # environment steps with random actions before the first update
    policy_lr: float = 3e-4  # learning rate of the actor
    q_lr: float = 1e-3  # learning rate of the critics and the entropy coefficient
    policy_frequency: int = 2  # every N updates of the critics, update the actor N times
    target_network_frequency: int = 1  # update the target networks every N updates of the critics
    updates_per_step: int = 1  # updates per step of the vector environment
    alpha: float = 0.2  # entropy coefficient with --no-autotune
    autotune: bool = True  # tune the entropy coefficient

    compile: bool = False  # compile acting and updates with torch.compile
    cudagraphs: bool = False  # replay acting and updates as CUDA graphs
    compile_mode: CompileMode = "default"  # torch.compile mode
    critic_compile_mode: CompileMode | None = None  # torch.compile mode for the critics (None: that of --compile-mode)
    cuda: bool = True  # use a CUDA device if there is one
    threads: int = 0  # CPU threads for torch (0: torch's default)
    matmul_precision: Literal["highest", "high", "medium"] = "highest"  # of float32 matmuls (high: TF32, medium: bf16)

    exp_name: str = Path(__file__).stem  # name of the experiment, used in the run's folder name
    seed: int = 1  # seed of the environments, NumPy and torch
    run_dir: str = "runs"  # parent folder of all runs
    resume: str | None = None  # folder of a run to resume; its flags become the defaults
    checkpoint_interval: int = 0  # environment steps between checkpoints (0: only at the end)
    capture_video: bool = False  # record videos of the first environment
    track: bool = False  # also log to Weights & Biases
    wandb_project_name: str = "leanrl"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases team


class Critic(nn.Module):
    """Q(s, a): maps (batch, obs_dim) and (batch, act_dim) to (batch,)."""

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
    """A Gaussian policy, squashed by tanh to the bounds of the action space (appendix C)."""

    def __init__(self, obs_dim, action_space):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(obs_dim, 256),
            nn.ReLU(),
            nn.Linear(256, 256),
            nn.ReLU(),
            nn.Linear(256, 2 * action_space.shape[0]),
        )
        low = torch.tensor(action_space.low, dtype=torch.float32)
        high = torch.tensor(action_space.high, dtype=torch.float32)
        self.register_buffer("scale", (high - low) / 2)
        self.register_buffer("bias", (high + low) / 2)

    def forward(self, obs):
        """The deterministic policy, exported to policy.pt2: maps (batch, obs_dim) to (batch, act_dim)."""
        mean, _ = self.gaussian(obs)
        return mean.tanh() * self.scale + self.bias

    def gaussian(self, obs):
        """Mean and log standard deviation before squashing, each (batch, act_dim)."""
        mean, log_std = self.net(obs).chunk(2, -1)
        return mean, LOG_STD_MIN + (LOG_STD_MAX - LOG_STD_MIN) / 2 * (log_std.tanh() + 1)

    def sample(self, mean, log_std, noise):
        """Actions from -1 to 1 (batch, act_dim), their log-probabilities (batch,); `noise` is standard normal."""
        actions = (mean + log_std.exp() * noise).tanh()
        gaussian_log_prob = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        log_prob = gaussian_log_prob - (1 - actions.square() + 1e-6).log()
        return actions, (log_prob * (self.scale > 0)).sum(-1)  # 0 where both bounds are equal


class SAC:
    """The learner. CUDA graphs replay kernels but no Python: state that changes is in tensors, updated in place."""

    def __init__(self, args, envs, device):
        self.args = args
        self.device = device
        self.obs_dim = obs_dim = envs.single_observation_space.shape[0]
        act_dim = envs.single_action_space.shape[0]
        self.target_entropy = -np.count_nonzero(envs.single_action_space.low < envs.single_action_space.high)
        with device:
            self.actor = Actor(obs_dim, envs.single_action_space)
            critics = [Critic(obs_dim, act_dim) for _ in range(NUM_CRITICS)]
            self.log_alpha = torch.tensor(1.0 if args.autotune else max(args.alpha, 1e-30)).log().requires_grad_()
        self.critic_module = critics[0]  # for its `forward` only; the weights that learn are in `self.critics`
        weights, buffers = stack_module_state(critics)
        self.critics = weights | buffers  # by name, (NUM_CRITICS, ...)
        self.target_critics = {name: tensor.detach().clone() for name, tensor in self.critics.items()}
        self.tau = torch.tensor(args.tau, device=device)  # 0 in updates that leave the targets as they are
        self.optimizers = {
            "actor": Adam(self.actor.parameters(), args.policy_lr),
            "critics": Adam(self.critics.values(), args.q_lr),
            "alpha": Adam([self.log_alpha], args.q_lr),
        }
        names = ["q_values", "qf_loss", "actor_loss", "entropy", "alpha"]
        names += ["alpha_loss"] if args.autotune else []
        self.scalars = {name: torch.zeros((), device=device) for name in names}
        self.updates = 0

        self.widths = [obs_dim, obs_dim, act_dim, 1, 1]  # of obs, next_obs, actions, rewards, terminated
        self.replay = DeviceReplayBuffer(args.buffer_size, sum(self.widths), device)
        self.batch = torch.zeros(args.batch_size, sum(self.widths), device=device)
        # random numbers are drawn outside of compiled functions, so that all modes draw the same
        self.uniform = torch.zeros(args.batch_size, dtype=torch.float64, device=device)  # float32 is too coarse
        self.noise = torch.zeros(args.batch_size, act_dim, device=device)
        self.actor_noise = torch.zeros(args.policy_frequency, 2, args.batch_size, act_dim, device=device)
        self.acting_noise = torch.zeros(envs.num_envs, act_dim, device=device)

        # host-device copies: transitions and the next observations go in, actions come out
        on_cuda = device.type == "cuda"
        self.host_input = torch.zeros(envs.num_envs, sum(self.widths) + obs_dim, pin_memory=on_cuda)
        self.device_input = self.host_input.to(device)  # the same memory on a CPU
        self.host_actions = torch.zeros(envs.num_envs, act_dim, pin_memory=on_cuda)
        self.device_actions = self.host_actions.to(device)
        self.actions_arrived = torch.cuda.Event() if on_cuda else torch.cpu.Event()
        self.low, self.high = envs.single_action_space.low, envs.single_action_space.high
        self.update_critics = self.captured(self.compiled(self.update_critics, args.critic_compile_mode))
        self.update_actor = self.compiled(self.update_actor)  # replaces the method
        self.update_actor_repeatedly = self.captured(self.update_actor_repeatedly)
        self.store_and_act = self.captured(self.compiled(self.store_and_act))

    def update_critics(self):
        """Sample a new `batch`, also for `update_actor`, update the critics and move their targets by `tau`."""
        self.batch.copy_(self.replay.sample(self.uniform))
        obs, next_obs, actions, rewards, terminated = self.batch.split(self.widths, -1)
        actions = (actions - self.actor.bias) / self.actor.scale.clamp(min=1e-30)  # -1 to 1; equal bounds: 0

        # critic loss (eq. 5)
        with torch.no_grad():
            mean, log_std = self.actor.gaussian(next_obs)
            next_actions, next_log_prob = self.actor.sample(mean, log_std, self.noise)
            next_q = self.q_values(self.target_critics, next_obs, next_actions).amin(0)
            next_v = next_q - self.log_alpha.exp() * next_log_prob
            target = rewards.squeeze(-1) + (1 - terminated.squeeze(-1)) * self.args.gamma * next_v
        q = self.q_values(self.critics, obs, actions)
        qf_loss = (q - target).square().mean(-1).sum()
        self.keep(q_values=q.mean(-1).mean(), qf_loss=qf_loss)
        self.optimizers["critics"].step(qf_loss)

        # target networks
        with torch.no_grad():
            for target, learned in zip(self.target_critics.values(), self.critics.values(), strict=True):
                if target.is_floating_point():  # BatchNorm has a count, too
                    target.lerp_(learned, self.tau)

    def update_actor_repeatedly(self):
        """Update the actor `policy_frequency` times on `batch`, and the entropy coefficient after each time."""
        for noise, temperature_noise in self.actor_noise:
            self.update_actor(noise, temperature_noise)

    def update_actor(self, noise, temperature_noise):
        """Update the actor, then the entropy coefficient, on `batch`; noise is standard normal (batch, act_dim)."""
        obs, *_ = self.batch.split(self.widths, -1)
        critics = {name: tensor.detach() for name, tensor in self.critics.items()}

        # actor loss (eq. 7)
        mean, log_std = self.actor.gaussian(obs)
        actions, log_prob = self.actor.sample(mean, log_std, noise)
        q = self.q_values(critics, obs, actions).amin(0)
        actor_loss = (self.log_alpha.detach().exp() * log_prob - q).mean()
        self.keep(actor_loss=actor_loss, entropy=-log_prob.mean())
        self.optimizers["actor"].step(actor_loss)

        # temperature (eq. 18), with the new actor
        if self.args.autotune:
            with torch.no_grad():
                mean, log_std = self.actor.gaussian(obs)
                _, log_prob = self.actor.sample(mean, log_std, temperature_noise)
            alpha_loss = (-self.log_alpha.exp() * (log_prob + self.target_entropy)).mean()
            self.keep(alpha_loss=alpha_loss)
            self.optimizers["alpha"].step(alpha_loss)
        self.keep(alpha=self.log_alpha.exp())

    def q_values(self, critics, obs, actions):
        """Q(s, a) of all critics (NUM_CRITICS, batch)."""

        def q(critic):
            return functional_call(self.critic_module, critic, (obs, actions))

        return vmap(q, randomness="different")(critics)  # dropout draws a mask per critic

    def update(self):
        """Launch one update. On a CUDA device it may still be running when this returns."""
        self.uniform.uniform_()
        self.noise.normal_()
        if self.args.target_network_frequency > 1:
            self.tau.fill_(self.args.tau * (self.updates % self.args.target_network_frequency == 0))
        self.update_critics()
        if self.updates % self.args.policy_frequency == 0:
            self.actor_noise.normal_()
            self.update_actor_repeatedly()
        self.updates += 1

    @torch.no_grad()
    def store_and_act(self):
        """Store the transitions in `device_input` and sample actions for the next observations."""
        transitions, obs = self.device_input.split((sum(self.widths), self.obs_dim), -1)
        self.replay.store(transitions)
        mean, log_std = self.actor.gaussian(obs)
        actions, _ = self.actor.sample(mean, log_std, self.acting_noise)
        self.device_actions.copy_(actions * self.actor.scale + self.actor.bias)

    def observe(self, obs, next_obs, actions, rewards, terminated, act_on):
        """Store a transition per environment and start computing actions for the observations `act_on`.

        Arguments are NumPy (num_envs, ...). Call `next_actions` before the next `observe`.
        """
        columns = (obs, next_obs, actions, rewards[:, None], terminated[:, None], act_on)
        np.concatenate(columns, axis=1, out=self.host_input.numpy(), casting="unsafe")
        self.device_input.copy_(self.host_input, non_blocking=True)
        self.acting_noise.normal_()
        self.store_and_act()
        self.host_actions.copy_(self.device_actions, non_blocking=True)
        self.actions_arrived.record()

    def next_actions(self):
        """Wait for actions, NumPy (num_envs, act_dim), but not for updates."""
        self.actions_arrived.synchronize()
        return self.host_actions.numpy().clip(self.low, self.high)

    def compiled(self, function, compile_mode=None):
        """Compile `function` if --compile is set."""
        if not self.args.compile:
            return function
        torch._dynamo.reset()  # otherwise torch stops recompiling after some learners in one process
        torch._dynamo.config.trace_autograd_ops = True  # allows torch.autograd.grad in a compiled function
        torch.autograd.set_multithreading_enabled(False)  # keeps the backward pass in the traced thread
        VecISA._avx_code = ""  # the program that inductor tests g++ with; its own takes seconds
        options = torch._inductor.list_mode_options(compile_mode or self.args.compile_mode)
        if self.device.type == "cuda":
            options |= {"combo_kernels": True, "split_reductions": False}  # fewer kernels; every sum is short
            if torch.__version__ < "2.12":
                options["loop_ordering_after_fusion"] = False  # which fails in torch 2.11
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
        """Losses of the last update, by name. Waits for that update."""
        return dict(zip(self.scalars, torch.stack(list(self.scalars.values())).tolist(), strict=True))

    def policy(self):
        """A copy of the deterministic policy on the CPU, and example inputs."""
        return copy.deepcopy(self.actor).cpu().eval(), (torch.zeros(2, self.obs_dim),)

    def tensors(self):
        """All tensors that updates change, except the replay buffer. Tensors missing here are not saved."""
        networks = {"actor": self.actor.state_dict(), "critics": self.critics, "target_critics": self.target_critics}
        optimizers = {name: optimizer.tensors() for name, optimizer in self.optimizers.items()}
        return {"networks": networks, "optimizers": optimizers, "log_alpha": self.log_alpha}

    def state_dict(self):
        """All of the learner's state, with which it goes on bit for bit."""
        return self.tensors() | {
            "replay": self.replay.state_dict(),
            "updates": self.updates,
            "rng": torch.get_rng_state(),
            "cuda_rng": [torch.cuda.get_rng_state()] if self.device.type == "cuda" else [],
        }

    def load_state_dict(self, state):
        """Restore a `state_dict`, but keep the learning rates of this run's flags, and --alpha with --no-autotune."""
        tensors = self.tensors()
        if not self.args.autotune:
            del tensors["log_alpha"]
        load_tensors(tensors, {name: state[name] for name in tensors})
        self.replay.load_state_dict(state["replay"])
        self.updates = state["updates"]
        torch.set_rng_state(state["rng"])
        torch.cuda.set_rng_state_all(state["cuda_rng"])


class Adam:
    """Adam (Kingma and Ba 2015, arXiv:1412.6980) for use in compiled functions, where torch.optim's breaks the graph.

    To change the learning rate, call `lr.fill_(value)`.
    """

    beta1, beta2, eps = 0.9, 0.999, 1e-8

    def __init__(self, weights, lr):
        self.weights = [w for w in weights if w.requires_grad]
        self.m = [torch.zeros_like(w) for w in self.weights]
        self.v = [torch.zeros_like(w) for w in self.weights]
        device = self.weights[0].device
        self.lr = torch.tensor(lr, device=device)
        self.rates = torch.tensor((1 - self.beta1, 1 - self.beta2), device=device)
        self.corrections = torch.zeros_like(self.rates)  # for bias, 1 - beta**t: moving averages of ones

    @torch.no_grad()
    def step(self, loss):
        """Update the weights in place by the gradient of `loss`."""
        gradients = torch.autograd.grad(loss, self.weights, materialize_grads=True)  # 0 for weights not in the loss
        self.corrections.add_(self.rates * (1 - self.corrections))
        torch._foreach_lerp_(self.m, gradients, 1 - self.beta1)
        torch._foreach_mul_(self.v, self.beta2)
        torch._foreach_addcmul_(self.v, gradients, gradients, 1 - self.beta2)

        # weights -= lr * (m / correction1) / (sqrt(v / correction2) + eps), with all scalars in the denominator
        correction1, correction2 = self.corrections.unbind()
        root = correction2.sqrt()
        denominator = torch._foreach_sqrt(self.v)
        torch._foreach_add_(denominator, self.eps * root, alpha=1)  # without `alpha`, the host would wait
        torch._foreach_mul_(denominator, correction1 / (self.lr * root))
        torch._foreach_addcdiv_(self.weights, self.m, denominator, -1)

    def tensors(self):
        """The state that a resumed run needs."""
        return {"m": self.m, "v": self.v, "corrections": self.corrections}


class DeviceReplayBuffer:
    """Transitions on the device, one per row. The newest overwrite the oldest. Storing and sampling never wait."""

    def __init__(self, size, width, device):
        require_memory("buffer_size", size, 4 * width, device)
        self.rows = torch.empty(size, width, device=device)
        self.stored = torch.zeros((), dtype=torch.int64, device=device)  # transitions stored so far

    def store(self, rows):
        """Store `rows` (n, width)."""
        places = (self.stored + torch.arange(len(rows), device=rows.device)) % len(self.rows)
        self.rows.index_copy_(0, places, rows)
        self.stored.add_(len(rows))

    def sample(self, uniform):
        """Pick stored rows (batch, width) by the random numbers `uniform` (batch,) in [0, 1)."""
        count = self.stored.clamp(max=len(self.rows))
        places = (uniform * count).long()
        return self.rows.index_select(0, places)

    def state_dict(self):
        rows = self.rows[: self.stored].to("cpu", copy=True)  # without the part that is not filled
        return {"rows": rows, "stored": self.stored, "size": len(self.rows)}

    def load_state_dict(self, state):
        if state["size"] != len(self.rows):
            refuse("buffer_size", len(self.rows), f"the checkpoint has {state['size']}")
        self.rows[: len(state["rows"])] = state["rows"]
        self.stored.copy_(state["stored"])


def load_tensors(tensors, saved):
    """Copy `saved` into `tensors`, nested dictionaries of one structure, in place: CUDA graphs stay valid."""

    def load(tensor, value):
        if (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
            raise ValueError(f"{value.dtype} {tuple(value.shape)} instead of {tensor.dtype} {tuple(tensor.shape)}")
        tensor.detach().copy_(value)

    tree_map(load, tensors, saved)


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


def train(args):
    """Train an agent."""
    device, folder = prepare(args)
    if args.cudagraphs and device.type == "cpu":
        print("warning: --cudagraphs needs a CUDA device; running without", file=sys.stderr)
        args.cudagraphs = False
    if args.resume is None and args.total_timesteps <= args.learning_starts:
        refuse("total_timesteps", args.total_timesteps, f"give more than --learning-starts, {args.learning_starts}")
    envs = make_envs(args, folder)
    require_bounded_actions(args, envs)
    learner = SAC(args, envs, device)
    with Run(args, folder, envs, learner) as run:
        envs.action_space.seed(args.seed + run.step)
        obs, _ = envs.reset(seed=args.seed + run.step)
        actions = envs.action_space.sample()
        while run.unfinished():
            next_obs, rewards, terminated, truncated, _ = envs.step(actions.copy())  # while CUDA runs the last update
            ended = terminated | truncated
            act_on = next_obs
            if ended.any():
                act_on, _ = envs.reset(options={"reset_mask": ended})
            learner.observe(obs, next_obs, actions, rewards, terminated, act_on)
            obs = act_on
            run.advance(rewards, ended)
            if run.step > args.learning_starts:
                for _ in range(args.updates_per_step):
                    learner.update()
                if run.step // args.num_envs % LOG_INTERVAL == 0:
                    run.log(learner.losses())
            actions = learner.next_actions()
            if run.step < args.learning_starts:
                actions = envs.action_space.sample()


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


def require_bounded_actions(args, envs):
    """Refuse action spaces that are not bounded vectors of floats."""
    space = envs.single_action_space
    floats = isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.floating) and len(space.shape) == 1
    if not floats or np.abs((space.low, space.high)).max() >= 1e30:  # float32 overflows near 3e38
        refuse("env_id", args.env_id, f"actions must be bounded vectors of floats, not {space}")


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


AT_LEAST_1 = ("total_timesteps", "num_envs", "buffer_size", "batch_size", "policy_frequency")
AT_LEAST_1 += ("target_network_frequency", "updates_per_step")
AT_MOST = {"gamma": 1, "tau": 1, "seed": 2**32 - 1, "threads": os.cpu_count()}


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
#     "tyro>=1.0,<2", "tqdm>=4.66", "tensorboard>=2.18", "wandb>=0.20", "mujoco>=3.3,<5",
#     "imageio>=2.37", "moviepy>=2.0",
# ]
# ///
