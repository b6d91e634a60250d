"""Soft Actor-Critic (SAC) for discrete actions on Atari, built for speed: Christodoulou 2019, arXiv:1910.07207.

The algorithm is `SAC` and `train`. Below the line of dashes is the run, the same text in all scripts.
The updates are those of the plain version, sac_atari.py, but each action comes from a policy that lacks the newest
update. Why it is faster:

1. `--compile` compiles an update, from sampling to Adam, into one graph, and storing and acting into another.
   `--cudagraphs` captures each as a CUDA graph, which takes one launch (`SAC.fast`).
2. Actions are sampled on the device with the Gumbel-max trick, without a wait (`SAC.store_and_act`).
3. Each frame is stored once, in bytes, on the device, where batches are put together (`FrameReplay`).
4. An environment step takes two copies in, of frames and of outcomes, and one copy out, of actions (`SAC.observe`).
5. Games step while a CUDA device updates: the host waits only for its next actions (`train`).

The critics run one after the other: with stacked weights, under vmap, convolutions take a quarter longer.

    python leanrl/sac_atari_torchcompile.py --env-id BeamRider-v5 --compile --cudagraphs
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

NUM_CRITICS = 2
ADAM_EPS = 1e-4
LOG_INTERVAL = 100  # steps of the vector environment between logs of the losses
CompileMode = Literal["default", "max-autotune-no-cudagraphs"]


@dataclass
class Args:
    env_id: str = "BeamRider-v5"  # Atari game in envpool
    total_timesteps: int = 5_000_000  # total environment steps (four frames each), summed over all environments
    num_envs: int = 1  # number of environments, stepped together
    buffer_size: int = 1_000_000  # capacity of the replay buffer, in transitions; a million take 7.1 GB on the device
    checkpoint_replay: bool = True  # save the replay buffer too; without it, resuming repeats --learning-starts steps
    gamma: float = 0.99  # discount factor
    tau: float = 1.0  # target smoothing coefficient
    batch_size: int = 64  # transitions per update
    learning_starts: int = 20_000  # environment steps with random actions before the first update
    policy_lr: float = 3e-4  # learning rate of the actor
    q_lr: float = 3e-4  # learning rate of the critics and the entropy coefficient
    update_frequency: int = 4  # environment steps between updates
    target_network_frequency: int = 8000  # environment steps between updates of the target networks
    alpha: float = 0.2  # entropy coefficient with --no-autotune
    autotune: bool = True  # tune the entropy coefficient
    target_entropy_scale: float = 0.89  # target entropy as a fraction of the maximum, log(number of actions)

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
    checkpoint_interval: int = 0  # environment steps between checkpoints (0: only at the end)
    capture_video: bool = False  # record videos of the first environment
    track: bool = False  # also log to Weights & Biases
    wandb_project_name: str = "leanrl"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases team


def kaiming(layer):
    """Initialize `layer` as in He et al. 2015, arXiv:1502.01852, with zero bias, and return it."""
    nn.init.kaiming_normal_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class AtariNetwork(nn.Module):
    """An actor's logits or a critic's values: maps uint8 (batch, 4, 84, 84) to (batch, num_actions)."""

    def __init__(self, num_actions):
        super().__init__()
        self.net = nn.Sequential(
            kaiming(nn.Conv2d(4, 32, 8, stride=4)),
            nn.ReLU(),
            kaiming(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(),
            kaiming(nn.Conv2d(64, 64, 3)),
            nn.ReLU(),
            nn.Flatten(),
            kaiming(nn.Linear(64 * 7 * 7, 512)),
            nn.ReLU(),
            kaiming(nn.Linear(512, num_actions)),
        )

    def forward(self, obs):
        return self.net(obs / 255)


class GreedyPolicy(nn.Module):
    """The policy exported to policy.pt2, most probable actions: maps uint8 (batch, 4, 84, 84) to (batch,)."""

    def __init__(self, actor):
        super().__init__()
        self.actor = actor

    def forward(self, obs):
        return self.actor(obs).argmax(-1)


class SAC:
    """The learner. CUDA graphs replay kernels but no Python: state that changes is in tensors, updated in place."""

    def __init__(self, args, envs, device):
        self.args = args
        self.device = device
        self.obs_shape = envs.single_observation_space.shape
        self.num_actions = int(envs.single_action_space.n)
        self.target_entropy = args.target_entropy_scale * math.log(self.num_actions)
        with device:
            self.actor = AtariNetwork(self.num_actions)
            self.critics = nn.ModuleList([AtariNetwork(self.num_actions) for _ in range(NUM_CRITICS)])
            self.target_critics = copy.deepcopy(self.critics)
            self.log_alpha = torch.tensor(1.0 if args.autotune else max(args.alpha, 1e-30)).log().requires_grad_()
        self.networks = {"actor": self.actor, "critics": self.critics, "target_critics": self.target_critics}
        self.optimizers = {
            "actor": Adam(self.actor.parameters(), args.policy_lr),
            "critics": Adam(self.critics.parameters(), args.q_lr),
            "alpha": Adam([self.log_alpha], args.q_lr),
        }
        for optimizer in self.optimizers.values():
            optimizer.eps = ADAM_EPS
        names = ["q_values", "qf_loss", "actor_loss", "entropy", "alpha"]
        names += ["alpha_loss"] if args.autotune else []
        self.scalars = {name: torch.zeros((), device=device) for name in names}
        self.replay = make_replay(args, self.obs_shape, device)
        self.updates = 0
        # random numbers are drawn outside of compiled functions, so that all modes draw the same
        self.uniform = torch.zeros(args.batch_size, dtype=torch.float64, device=device)  # float32 is too coarse
        self.noise = torch.ones(args.num_envs, self.num_actions, device=device)

        # host-device copies: observations and outcomes of steps go in, actions come out
        on_cuda = device.type == "cuda"
        self.host_obs = torch.zeros(args.num_envs, *self.obs_shape, dtype=torch.uint8, pin_memory=on_cuda)
        self.obs = self.host_obs.to(device)  # the same memory on a CPU
        self.host_outcomes = torch.zeros(args.num_envs, 4, pin_memory=on_cuda)
        self.outcomes = self.host_outcomes.to(device)  # action, reward, terminated, is_reset
        self.host_actions = torch.zeros(args.num_envs, dtype=torch.int64, pin_memory=on_cuda)
        self.actions = self.host_actions.to(device)
        self.actions_arrived = torch.cuda.Event() if on_cuda else torch.cpu.Event()
        self.learn = self.fast(self.learn)  # replaces the method
        self.store_and_act = self.fast(self.store_and_act)

    def learn(self):
        """Update the critics, the actor and the entropy coefficient."""
        obs, next_obs, actions, rewards, terminated = self.replay.sample(self.uniform)
        self.update_critics(obs, next_obs, actions, rewards, terminated)
        self.update_actor(obs)

    def update_critics(self, obs, next_obs, actions, rewards, terminated):
        """Update the critics."""
        # critic loss (eq. 4 with the soft state value of eq. 10)
        with torch.no_grad():
            next_log_probs = self.actor(next_obs).log_softmax(-1)
            next_q = torch.stack([critic(next_obs) for critic in self.target_critics]).amin(0)
            next_v = (next_log_probs.exp() * (next_q - self.log_alpha.exp() * next_log_probs)).sum(-1)
            target = rewards + (1 - terminated) * self.args.gamma * next_v
        q = torch.stack([critic(obs).gather(-1, actions[:, None]).squeeze(-1) for critic in self.critics])
        qf_loss = (q - target).square().mean(-1).sum()
        self.keep(q_values=q.mean(-1).mean(), qf_loss=qf_loss)
        self.optimizers["critics"].step(qf_loss)

    def update_actor(self, obs):
        """Update the actor, then the entropy coefficient."""
        # actor loss (eq. 12)
        with torch.no_grad():
            q = torch.stack([critic(obs) for critic in self.critics]).amin(0)
        log_probs = self.actor(obs).log_softmax(-1)
        probs = log_probs.exp()
        actor_loss = (probs * (self.log_alpha.exp().detach() * log_probs - q)).sum(-1).mean()
        entropies = -(probs * log_probs).sum(-1).detach()
        self.keep(actor_loss=actor_loss, entropy=entropies.mean())
        self.optimizers["actor"].step(actor_loss)

        # temperature (eq. 11)
        if self.args.autotune:
            alpha_loss = (self.log_alpha.exp() * (entropies - self.target_entropy)).mean()
            self.keep(alpha_loss=alpha_loss)
            self.optimizers["alpha"].step(alpha_loss)
        self.keep(alpha=self.log_alpha.exp())

    def update(self):
        """Launch one update. On a CUDA device it may still be running when this returns."""
        self.uniform.uniform_()
        self.learn()
        self.updates += 1

    @torch.no_grad()
    def update_target(self):
        """Move the target networks toward the critics by `tau`; 1 copies them."""
        targets = self.target_critics.state_dict()
        for name, tensor in self.critics.state_dict().items():
            if tensor.is_floating_point():  # BatchNorm has a count, too
                targets[name].lerp_(tensor, self.args.tau)

    @torch.no_grad()
    def store_and_act(self):
        """Store the step in `obs` and `outcomes`, and sample actions with the Gumbel-max trick.

        `noise` is exponential; the negative of its logarithm is Gumbel noise.
        """
        self.replay.store(self.obs, *self.outcomes.unbind(-1))
        log_probs = self.actor(self.obs).log_softmax(-1)
        self.actions.copy_((log_probs - self.noise.log()).argmax(-1))

    def observe(self, obs, actions, rewards, terminated, is_reset):
        """Store a step, like `FrameReplay.store`, and start computing actions for `obs`.

        Arguments are NumPy (num_envs, ...). Call `next_actions` before the next `observe`.
        """
        self.host_obs.numpy()[:] = obs
        np.stack((actions, rewards, terminated, is_reset), -1, self.host_outcomes.numpy(), casting="unsafe")
        self.obs.copy_(self.host_obs, non_blocking=True)
        self.outcomes.copy_(self.host_outcomes, non_blocking=True)
        self.noise.exponential_()
        self.store_and_act()
        self.host_actions.copy_(self.actions, non_blocking=True)
        self.actions_arrived.record()

    def next_actions(self):
        """Wait for actions, NumPy (num_envs,), but not for updates."""
        self.actions_arrived.synchronize()
        return self.host_actions.numpy().copy()  # `observe` overwrites them

    def fast(self, function):
        """Compile and capture `function`, which takes and returns nothing, as the flags request."""
        if self.args.compile:
            torch._dynamo.reset()  # otherwise torch stops recompiling after some learners in one process
            torch._dynamo.config.trace_autograd_ops = True  # allows torch.autograd.grad in a compiled function
            torch.autograd.set_multithreading_enabled(False)  # keeps the backward pass in the traced thread
            VecISA._avx_code = ""  # the program that inductor tests g++ with; its own takes seconds
            options = torch._inductor.list_mode_options(self.args.compile_mode)
            if self.device.type == "cuda":
                options |= {"combo_kernels": True, "split_reductions": False}  # fewer kernels; every sum is short
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
        """Losses of the last update, by name. Waits for that update."""
        return dict(zip(self.scalars, torch.stack(list(self.scalars.values())).tolist(), strict=True))

    def policy(self):
        """A copy of the deterministic policy on the CPU, and example inputs."""
        return GreedyPolicy(copy.deepcopy(self.actor).cpu()), (torch.zeros(2, *self.obs_shape, dtype=torch.uint8),)

    def tensors(self):
        """All tensors that updates change, except the replay buffer. Tensors missing here are not saved."""
        networks = {name: network.state_dict() for name, network in self.networks.items()}
        optimizers = {name: optimizer.tensors() for name, optimizer in self.optimizers.items()}
        return {"networks": networks, "optimizers": optimizers, "log_alpha": self.log_alpha}

    def state_dict(self):
        """All of the learner's state, with which it goes on bit for bit."""
        return self.tensors() | {
            "replay": self.replay.state_dict() if self.args.checkpoint_replay else {},
            "updates": self.updates,
            "rng": torch.get_rng_state(),
            "cuda_rng": [torch.cuda.get_rng_state()] if self.device.type == "cuda" else [],
        }

    def load_state_dict(self, state):
        """Restore a `state_dict`, but keep the learning rates of this run's flags."""
        tensors = self.tensors()
        if not self.args.autotune:
            del tensors["log_alpha"]
        load_tensors(tensors, {name: state[name] for name in tensors})
        if state["replay"]:
            self.replay.load_state_dict(state["replay"])
        self.updates = state["updates"]
        torch.set_rng_state(state["rng"])
        torch.cuda.set_rng_state_all(state["cuda_rng"])


def times_due(frequency, step, num_envs):
    """The number of multiples of `frequency` in (step - num_envs, step], the last step of all environments."""
    return step // frequency - (step - num_envs) // frequency


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


class FrameReplay:
    """A replay buffer for observations that are stacks of frames. It stores each frame once, in bytes.

    The n-th step of environment i has the number n * num_envs + i. This number modulo `rows` is the step's row in
    `columns`. `transitions` holds the numbers of all steps except resets, which ignore their action.

    `sample` draws from the newest `size // num_envs` steps. Columns are longer by one stack, so that no frame of these
    steps is overwritten. `store` and `sample` do not wait for the device and have fixed shapes, as CUDA graphs require.
    """

    def __init__(self, size, num_envs, obs_shape, device):
        """`obs_shape` is (stack, *frame)."""
        self.size = size
        self.num_envs = num_envs
        self.device = device
        self.stack, *frame = obs_shape
        self.steps = size // num_envs + self.stack
        self.rows = self.steps * num_envs
        with device:
            self.columns = {
                "frames": torch.empty(self.rows, *frame, dtype=torch.uint8),  # the newest frame after the step
                "first": torch.empty(self.rows, dtype=torch.int64),  # the number of the first frame of its game
                "actions": torch.empty(self.rows, dtype=torch.int64),
                "rewards": torch.empty(self.rows),
                "terminated": torch.empty(self.rows),
            }
            self.transitions = torch.zeros(size + num_envs, dtype=torch.int64)  # a ring, followed by room for resets
            self.first = torch.arange(num_envs)  # the numbers of the first frames of the current games
            self.stepped = torch.zeros(1, dtype=torch.int64)  # steps of all environments so far
            self.stored = torch.zeros(1, dtype=torch.int64)  # transitions stored so far
            self.stored_before = torch.zeros(self.steps, dtype=torch.int64)  # the same, before each step

    def store(self, obs, actions, rewards, terminated, is_reset):
        """Store a step of all environments; arguments are NumPy or torch (num_envs, ...).

        `obs` (num_envs, stack, ...) are the observations after the step: where an episode ended, its last one.
        `is_reset` is true where the step reset an environment and ignored the action.
        """
        obs = torch.as_tensor(obs, device=self.device)
        is_reset = torch.as_tensor(is_reset, device=self.device).bool()
        env = torch.arange(self.num_envs, device=self.device)
        number = self.stepped * self.num_envs + env

        # a game's first frame fills its stack; after a lost life, the stack continues
        starts_game = is_reset & (obs[:, :-1] == obs[:, -1:]).flatten(1).all(1)
        self.first.copy_(torch.where(starts_game, number, self.first))

        step = {"frames": obs[:, -1], "first": self.first}
        step |= {"actions": actions, "rewards": rewards, "terminated": terminated}
        for name, column in self.columns.items():
            values = torch.as_tensor(step[name], device=self.device).to(column.dtype)
            column.index_copy_(0, number % self.rows, values)

        count = (~is_reset).cumsum(0)  # transitions of this step, up to each environment
        place = torch.where(is_reset, self.size + env, (self.stored + count - 1) % self.size)
        self.transitions.index_copy_(0, place, number)
        self.stored_before.index_copy_(0, self.stepped % self.steps, self.stored)
        self.stored.add_(count[-1])
        self.stepped.add_(1)

    def sample(self, uniform):
        """Pick transitions by the random numbers `uniform` (batch,), float64 in [0, 1).

        Returns uint8 obs and next_obs (batch, stack, ...), which share memory; actions, rewards, terminated (batch,).
        """
        oldest = self.stored_before[(self.stepped + self.stack) % self.steps]
        drawn = oldest + (uniform * (self.stored - oldest)).long()
        number = self.transitions[drawn % self.size]
        row = number % self.rows

        steps_back = torch.arange(self.stack, -1, -1, device=self.device)
        numbers = torch.maximum(number[:, None] - steps_back * self.num_envs, self.columns["first"][row][:, None])
        rows = numbers % self.rows
        frames = self.columns["frames"].index_select(0, rows.flatten()).unflatten(0, rows.shape)  # faster than [rows]
        outcomes = [self.columns[name][row] for name in ("actions", "rewards", "terminated")]
        return frames[:, :-1], frames[:, 1:], *outcomes

    def tensors(self, stepped):
        """All tensors by name; large ones are cut to the part filled after `stepped` steps."""
        large = self.columns | {"transitions": self.transitions}
        filled = {name: column[: stepped * self.num_envs] for name, column in large.items()}
        counts = {"stepped": self.stepped, "stored": self.stored, "stored_before": self.stored_before}
        return filled | counts | {"first_now": self.first}

    def state_dict(self):
        """The stored data without a copy, which would take gigabytes.

        `from_dlpack` gives each slice a storage of its own; otherwise torch.save would write the whole tensor.
        """
        tensors = {name: torch.from_dlpack(tensor) for name, tensor in self.tensors(int(self.stepped)).items()}
        return tensors | {"size": self.size, "num_envs": self.num_envs}

    def load_state_dict(self, state):
        """Restore a `state_dict`."""
        if state["num_envs"] != self.num_envs:
            refuse("num_envs", self.num_envs, f"the checkpoint has {state['num_envs']}")
        if state["size"] != self.size:
            refuse("buffer_size", self.size, f"the checkpoint has {state['size']}")
        for name, tensor in self.tensors(int(state["stepped"])).items():
            tensor.copy_(state[name])


def make_replay(args, obs_shape, device):
    """Make a FrameReplay on `device`; refuse sizes that do not fit."""
    if args.buffer_size < 2 * args.num_envs:  # up to every second step is a reset
        refuse("buffer_size", args.buffer_size, f"give at least 2 * --num-envs, {2 * args.num_envs}")
    bytes_each = math.prod(obs_shape[1:]) + 40  # a frame, and a row of the other tensors
    require_memory("buffer_size", args.buffer_size, bytes_each, device)
    return FrameReplay(args.buffer_size, args.num_envs, obs_shape, device)


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
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.backends.cudnn.allow_tf32 = args.matmul_precision != "highest"
    if args.cudagraphs and device.type == "cpu":
        print("warning: --cudagraphs needs a CUDA device; running without", file=sys.stderr)
        args.cudagraphs = False
    if args.resume is None and args.total_timesteps <= args.learning_starts:
        refuse("total_timesteps", args.total_timesteps, f"give more than --learning-starts, {args.learning_starts}")
    envs = make_games(args, folder)
    learner = SAC(args, envs, device)
    with Run(args, folder, envs, learner) as run:
        learning_starts = args.learning_starts
        if not learner.replay.stored:  # a new run, or one resumed without its replay buffer
            learning_starts += run.step
        obs, _ = envs.reset()
        nothing = np.zeros(args.num_envs)  # no step led to the first observations
        learner.observe(obs, nothing, nothing, nothing, np.ones(args.num_envs, bool))
        while run.unfinished():
            actions = learner.next_actions()
            if run.step < args.learning_starts:
                actions = torch.randint(learner.num_actions, (args.num_envs,)).numpy()
            obs, rewards, terminated, _, infos = envs.step(actions)  # while CUDA runs the last update
            learner.observe(obs, actions, rewards, terminated, infos["is_reset"])
            run.advance(infos["raw_rewards"], infos["game_ended"])
            if run.step > learning_starts:
                for _ in range(times_due(args.update_frequency, run.step, args.num_envs)):
                    learner.update()
                if times_due(args.target_network_frequency, run.step, args.num_envs):
                    learner.update_target()
            if learner.updates and run.step // args.num_envs % LOG_INTERVAL == 0:
                run.log(learner.losses())


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


AT_LEAST_1 = ("total_timesteps", "num_envs", "buffer_size", "batch_size")
AT_LEAST_1 += ("update_frequency", "target_network_frequency")
AT_MOST = {"gamma": 1, "tau": 1, "target_entropy_scale": 1, "seed": 2**32 - 1, "threads": os.cpu_count()}


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
