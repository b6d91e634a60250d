"""Soft Actor-Critic (SAC) for discrete actions on Atari, in plain PyTorch: Christodoulou 2019, arXiv:1910.07207.

The algorithm and its defaults are CleanRL's, and so are its details:

1. Expectations over actions are exact sums, not samples (`SAC.update_critics`, `SAC.update_actor`).
2. Two critics; the target and the actor take the smaller value (`SAC.update_critics`, `SAC.update_actor`).
3. The entropy coefficient is tuned toward a share of the largest entropy (`SAC.update_actor`).
4. An observation is four gray frames; each frame is stored once, in bytes (`FrameReplay`).
5. The end of a life is a terminal state, rewards are clipped to -1, 0 or 1 (`AtariEnvs`).
6. A truncated game does not end in a terminal state: its last value is bootstrapped (`AtariEnvs.step`).

sac_atari_torchcompile.py makes the same updates at full speed, and acts one update late.

    python leanrl/sac_atari.py --env-id BeamRider-v5
"""

import copy
import difflib
import json
import math
import os
import platform
import shutil
import signal
import sys
import textwrap
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

NUM_CRITICS = 2
EPS = 1e-4  # Adam's
LOG_INTERVAL = 100  # vector steps between two logs of the losses


@dataclass
class Args:
    env_id: str = "BeamRider-v5"
    """Atari game, by envpool's name"""
    total_timesteps: int = 5_000_000
    """environment steps of the whole run, over all environments, each of four frames"""
    num_envs: int = 1
    """games that step together"""
    buffer_size: int = 1_000_000
    """transitions in the replay buffer, 7.1 GB for a million: on the device if it fits, else in the host's memory"""
    checkpoint_replay: bool = True
    """save the replay buffer in checkpoints; a run that is resumed without it fills it again before it learns"""
    gamma: float = 0.99
    """discount factor"""
    tau: float = 1.0
    """target smoothing coefficient (1: copy)"""
    batch_size: int = 64
    """transitions per update"""
    learning_starts: int = 20_000
    """environment steps with random actions before the first update"""
    policy_lr: float = 3e-4
    """learning rate of the actor"""
    q_lr: float = 3e-4
    """learning rate of the critics and of the entropy coefficient"""
    update_frequency: int = 4
    """environment steps between two updates"""
    target_network_frequency: int = 8000
    """environment steps between two updates of the target networks"""
    alpha: float = 0.2
    """entropy coefficient with --no-autotune"""
    autotune: bool = True
    """tune the entropy coefficient"""
    target_entropy_scale: float = 0.89
    """entropy to tune toward, as a share of the largest, log(number of actions)"""

    exp_name: str = Path(__file__).stem
    """name of the experiment, part of the run's folder name"""
    seed: int = 1
    """seed of the environments, NumPy and torch"""
    run_dir: str = "runs"
    """parent folder of all runs"""
    resume: str | None = None
    """run to continue: its folder or its checkpoint.pt, whose flags become the defaults"""
    checkpoint_interval: int = 0
    """save a checkpoint every so many environment steps (0: only at the end)"""
    capture_video: bool = False
    """record videos of the first environment"""
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
AT_LEAST_1 += ("update_frequency", "target_network_frequency")
AT_MOST_1 = ("gamma", "tau", "target_entropy_scale")
POSITIVE = ("policy_lr", "q_lr")  # others may be 0, none negative
FIXED = ("env_id", "num_envs", "buffer_size")  # what a resumed run cannot change


def kaiming(layer):
    """The layer with weights as drawn by He et al. 2015, arXiv:1502.01852, and biases of 0."""
    nn.init.kaiming_normal_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class AtariNetwork(nn.Module):
    """An actor's logits or a critic's values: (batch, 4, 84, 84), bytes, to (batch, num_actions)."""

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


class SAC:
    """The learner: networks, optimizers and replay buffer."""

    warmup_updates = 1  # until the speed is steady

    def __init__(self, args, envs, device):
        self.args = args
        self.device = device
        num_actions = int(envs.single_action_space.n)
        self.target_entropy = args.target_entropy_scale * math.log(num_actions)
        with device:
            self.actor = AtariNetwork(num_actions)
            self.critics = nn.ModuleList([AtariNetwork(num_actions) for _ in range(NUM_CRITICS)])
            self.target_critics = copy.deepcopy(self.critics)
            self.log_alpha = torch.tensor(1.0 if args.autotune else args.alpha).log().requires_grad_()
        self.networks = {"actor": self.actor, "critics": self.critics, "target_critics": self.target_critics}
        self.optimizers = {
            "actor": torch.optim.Adam(self.actor.parameters(), lr=args.policy_lr, eps=EPS),
            "critics": torch.optim.Adam(self.critics.parameters(), lr=args.q_lr, eps=EPS),
            "alpha": torch.optim.Adam([self.log_alpha], lr=args.q_lr, eps=EPS),
        }
        self.replay = make_replay(args, envs, device)
        self.updates = 0
        self.last_losses = {}

    @torch.no_grad()
    def act(self, obs):
        """Sampled actions, NumPy, (num_envs,)."""
        probs = self.actor(torch.as_tensor(obs, device=self.device)).softmax(-1)
        return probs.multinomial(1).squeeze(-1).cpu().numpy()

    def update(self):
        """One update of the critics, the actor and the entropy coefficient."""
        # float32 would skip rows
        uniform = torch.rand(self.args.batch_size, dtype=torch.float64, device=self.replay.storage)
        batch = self.replay.sample(uniform)
        self.update_critics(batch)
        self.update_actor(batch["obs"])
        self.updates += 1

    def update_critics(self, batch):
        """One step on the critics."""
        obs, next_obs = batch["obs"], batch["next_obs"]

        # critic loss (eq. 4 with the soft state value of eq. 10)
        with torch.no_grad():
            next_log_probs = self.actor(next_obs).log_softmax(-1)
            next_q = torch.stack([critic(next_obs) for critic in self.target_critics]).amin(0)
            next_v = (next_log_probs.exp() * (next_q - self.log_alpha.exp() * next_log_probs)).sum(-1)
            target = batch["rewards"] + (1 - batch["terminated"]) * self.args.gamma * next_v
        actions = batch["actions"][:, None]
        q = torch.stack([critic(obs).gather(-1, actions).squeeze(-1) for critic in self.critics])
        qf_loss = (q - target).square().mean(-1).sum()
        self.optimizers["critics"].zero_grad()
        qf_loss.backward()
        self.optimizers["critics"].step()
        self.last_losses |= {f"qf{i + 1}_values": values for i, values in enumerate(q.detach().mean(-1))}
        self.last_losses["qf_loss"] = qf_loss.detach()

    def update_actor(self, obs):
        """One step on the actor, then one on the entropy coefficient."""
        # actor loss (eq. 12)
        with torch.no_grad():
            q = torch.stack([critic(obs) for critic in self.critics]).amin(0)
        log_probs = self.actor(obs).log_softmax(-1)
        probs = log_probs.exp()
        actor_loss = (probs * (self.log_alpha.exp().detach() * log_probs - q)).sum(-1).mean()
        self.optimizers["actor"].zero_grad()
        actor_loss.backward()
        self.optimizers["actor"].step()
        entropy = -(probs * log_probs).sum(-1).mean().detach()
        self.last_losses |= {"actor_loss": actor_loss.detach(), "entropy": entropy}

        # temperature (eq. 11)
        if self.args.autotune:
            alpha_loss = self.log_alpha.exp() * (entropy - self.target_entropy)
            self.optimizers["alpha"].zero_grad()
            alpha_loss.backward()
            self.optimizers["alpha"].step()
            self.last_losses["alpha_loss"] = alpha_loss.detach()
        self.last_losses["alpha"] = self.log_alpha.exp().detach()

    def update_target(self):
        """Move the target networks by `tau` toward the critics: with 1, copy them."""
        pairs = zip(self.critics.parameters(), self.target_critics.parameters(), strict=True)
        for weights, target_weights in pairs:
            target_weights.data.lerp_(weights.data, self.args.tau)

    def losses(self):
        """The last update's losses by name."""
        return {name: value.item() for name, value in self.last_losses.items()}

    def policy(self):
        """A copy of the deterministic policy, on the CPU."""
        return Policy(copy.deepcopy(self.actor).cpu())

    def state_dict(self):
        """What the learner needs to continue bit for bit, on the CPU or on the device."""
        return {
            "networks": {name: network.state_dict() for name, network in self.networks.items()},
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
            "log_alpha": self.log_alpha.detach(),
            "replay": self.replay.state_dict() if self.args.checkpoint_replay else {},
            "updates": self.updates,
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all()[:1],  # of the device in use
        }

    def load_state_dict(self, state):
        """Continue from what `state_dict` returned, with the learning rates of this run's arguments."""
        for name, network in self.networks.items():
            network.load_state_dict(state["networks"][name])
        for name, optimizer in self.optimizers.items():
            own_rates = {"param_groups": optimizer.state_dict()["param_groups"]}
            optimizer.load_state_dict(state["optimizers"][name] | own_rates)
        if self.args.autotune:
            self.log_alpha.data.copy_(state["log_alpha"])
        if state["replay"]:
            self.replay.load_state_dict(state["replay"])
        else:
            note("the checkpoint has no replay buffer: --learning-starts steps fill it before learning goes on")
        self.updates = state["updates"]
        torch.set_rng_state(state["rng"])
        torch.cuda.set_rng_state_all(state["cuda_rng"])


def times_due(frequency, step, num_envs):
    """How many multiples of `frequency` the last step of all environments reached: those in (step - num_envs, step]."""
    return step // frequency - (step - num_envs) // frequency


def train(args, on_start=lambda run: None):
    """Train an agent. `on_start` is for tools: it is called with the `Run` before the first step."""
    with Run(args) as run:
        check_replay(args)
        envs = make_games(args, run.folder)
        learner = SAC(args, envs, run.device)
        run.start(envs, learner)
        learning_starts = args.learning_starts if learner.replay.stored else run.step + args.learning_starts
        envs.action_space.seed(args.seed + run.step)
        obs, _ = envs.reset()
        learner.replay.begin(obs)
        on_start(run)
        while run.unfinished():
            actions = envs.action_space.sample() if run.step < args.learning_starts else learner.act(obs)
            obs, rewards, terminated, _, infos = envs.step(actions)
            learner.replay.store(obs, actions, rewards, terminated, infos["is_reset"])
            run.advance(infos["raw_rewards"], infos["game_ended"])
            if run.step > learning_starts:
                for _ in range(times_due(args.update_frequency, run.step, args.num_envs)):
                    learner.update()
                if times_due(args.target_network_frequency, run.step, args.num_envs):
                    learner.update_target()
            if learner.updates and run.step // args.num_envs % LOG_INTERVAL == 0:
                run.log(learner.losses())


class Policy(nn.Module):
    """What policy.pt2 holds, the deterministic policy: (batch, 4, 84, 84), bytes, to (batch,)."""

    def __init__(self, actor):
        super().__init__()
        self.actor = actor

    def forward(self, obs):
        return self.actor(obs).argmax(-1)


# ---------------------------------------------------------------------------------------------------------------------
# What the algorithm stands on: replay buffer, games
# ---------------------------------------------------------------------------------------------------------------------


class FrameReplay:
    """A replay buffer for observations that are stacks of the newest frames. It stores each frame once, in bytes.

    There are two rings. `frames` has a row for each step of all environments: the newest frame of each observation.
    `transitions` leaves out the steps that reset an environment and ignored the action. `sample` draws from the newest
    `size // num_envs` steps; `frames` is longer by a stack, so that none of theirs is overwritten.

    A game's first frame fills its stack. After a lost life the stack goes on, as in envpool: `sample` returns the very
    observations that `store` was given.

    Nothing here waits for the device, and all shapes are fixed: CUDA graphs can replay it.
    """

    PIECE = 2**15  # rows of a checkpoint's pieces: 231 MB of Atari's frames

    def __init__(self, size, num_envs, obs_shape, device, storage):
        """`obs_shape` is (stack, *frame). The buffer is on the device `storage`; batches are for `device`."""
        self.num_envs = num_envs
        self.stack, *frame = obs_shape
        self.device = device
        self.storage = storage
        steps = size // num_envs
        self.size = steps * num_envs
        self.rows = steps + self.stack
        room = self.size + num_envs  # rows behind the ring take what is not to be stored
        with storage:
            self.frames = torch.empty(self.rows * num_envs, *frame, dtype=torch.uint8)
            self.transitions = {
                "newest": torch.empty(room, dtype=torch.int64),  # place in `frames` of the next observation's last one
                "depth": torch.empty(room, dtype=torch.int64),  # number of earlier frames of its game, at most a stack
                "actions": torch.empty(room, dtype=torch.int64),
                "rewards": torch.empty(room),
                "terminated": torch.empty(room),
            }
            self.depth = torch.zeros(num_envs, dtype=torch.int64)  # of the newest frames
            self.written = torch.zeros(1, dtype=torch.int64)  # steps of all environments so far
            self.stored = torch.zeros(1, dtype=torch.int64)  # transitions so far
            self.stored_before = torch.zeros(self.rows, dtype=torch.int64)  # the same, before each row of `frames`

    def begin(self, obs):
        """Store the first observations, (num_envs, stack, ...)."""
        nothing = np.zeros(self.num_envs)
        self.store(obs, nothing, nothing, nothing, is_reset=np.ones(self.num_envs, bool))

    def store(self, obs, actions, rewards, terminated, is_reset):
        """Store a step of all environments; NumPy or torch, (num_envs, ...).

        `obs`, (num_envs, stack, ...), are the observations after the step, where an episode ended its last one.
        `is_reset` is true where the step reset an environment and ignored the action.
        """
        obs = torch.as_tensor(obs, device=self.storage)
        is_reset = torch.as_tensor(is_reset, device=self.storage)
        starts_game = is_reset & (obs[:, :-1] == obs[:, -1:]).flatten(1).all(1)
        self.depth.add_(1).clamp_(max=self.stack).masked_fill_(starts_game, 0)

        env = torch.arange(self.num_envs, device=self.storage)
        row = self.written % self.rows
        newest = row * self.num_envs + env
        self.frames.index_copy_(0, newest, obs[:, -1])
        self.stored_before.index_copy_(0, row, self.stored)

        count = (~is_reset).cumsum(0)
        place = torch.where(is_reset, self.size + env, (self.stored + count - 1) % self.size)
        values = {"newest": newest, "depth": self.depth}
        values |= {"actions": actions, "rewards": rewards, "terminated": terminated}
        for name, column in self.transitions.items():
            column.index_copy_(0, place, torch.as_tensor(values[name], device=self.storage).to(column.dtype))
        self.stored.add_(count[-1])
        self.written.add_(1)

    def sample(self, uniform):
        """Columns by name, (batch, ...), of transitions, one for each number in `uniform`, (batch,), [0, 1), float64.

        obs and next_obs, (batch, stack, ...), are bytes that share memory.
        """
        oldest = self.stored_before.index_select(0, (self.written + self.stack) % self.rows)
        place = (oldest + (uniform * (self.stored - oldest)).long()) % self.size
        columns = {name: column.index_select(0, place) for name, column in self.transitions.items()}
        back = torch.arange(self.stack, -1, -1, device=self.storage)
        steps_back = torch.minimum(back, columns.pop("depth")[:, None])
        places = (columns.pop("newest")[:, None] - steps_back * self.num_envs) % len(self.frames)
        columns["frames"] = self.frames.index_select(0, places.flatten()).unflatten(0, places.shape)
        columns = {name: column.to(self.device) for name, column in columns.items()}
        frames = columns.pop("frames")
        return columns | {"obs": frames[:, :-1], "next_obs": frames[:, 1:]}

    def filled(self, written, stored):
        """The tensors by name, as far as they are filled after so many steps and transitions."""
        rows = min(written, self.rows)
        tensors = {name: column[: min(stored, self.size)] for name, column in self.transitions.items()}
        tensors |= {"frames": self.frames[: rows * self.num_envs], "stored_before": self.stored_before[:rows]}
        return tensors | {"newest_depth": self.depth, "written": self.written, "stored": self.stored}

    def state_dict(self):
        """What is stored, by name, in pieces that share its memory: a checkpoint needs no copy of it all.

        `from_dlpack` gives each piece a storage of its own: of a view torch.save would write the whole tensor.
        """
        tensors = self.filled(int(self.written), int(self.stored))
        return {name: [torch.from_dlpack(x) for x in tensor.split(self.PIECE)] for name, tensor in tensors.items()}

    def load_state_dict(self, state):
        """Continue from what `state_dict` returned."""
        tensors = self.filled(int(state["written"][0]), int(state["stored"][0]))
        for name, tensor in tensors.items():
            for target, piece in zip(tensor.split(self.PIECE), state[name], strict=True):
                target.copy_(piece)


def make_replay(args, envs, device):
    """A FrameReplay on `device` if it fits there, else in the host's memory."""
    if args.buffer_size < 2 * args.num_envs:  # every second step may be a reset
        refuse("buffer_size", args.buffer_size, f"give at least 2 * --num-envs, {2 * args.num_envs}")
    obs_shape = envs.single_observation_space.shape
    bytes_each = math.prod(obs_shape[1:]) + 40  # a frame, and a row of the other tensors
    storage = device
    room = 2 * 2**30  # for networks, batches, libraries and graphs
    if device.type == "cuda" and args.buffer_size * bytes_each > torch.cuda.mem_get_info(device)[0] - room:
        note("the replay buffer is in the host's memory, since the device has too little")
        storage = torch.device("cpu")
    if storage.type == "cpu":
        require_memory(args, "buffer_size", bytes_each)
    return FrameReplay(args.buffer_size, args.num_envs, obs_shape, device, storage)


class AtariEnvs(gym.vector.VectorEnv):
    """Atari games. Observations are the last four frames, (num_envs, 4, 84, 84), uint8.

    An episode is a life, with rewards of -1, 0 or 1. It starts in the step after the end of the one before: that step
    ignores its action, so nothing can be learned from it.
    """

    def __init__(self, args, seed):
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_fps": 15}
        self.render_mode = "rgb_array"
        self.num_envs = args.num_envs
        self.pool = make_pool(args, seed)
        self.single_observation_space = self.pool.observation_space
        self.single_action_space = self.pool.action_space
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.ended = np.zeros(self.num_envs, bool)

    def reset(self, *, seed=None, options=None):
        """The first observations and no infos; envpool takes its seed in `__init__`."""
        obs, _ = self.pool.reset()
        return obs, {}

    def step(self, actions):
        """Like any vector environment. Infos, (num_envs,) each, are:

        `raw_rewards`, those of the game; `game_ended`, where a game is over or at its time limit; `is_reset`, where the
        step ignored its action and started an episode.
        """
        obs, rewards, terminated, truncated, infos = self.pool.step(actions.astype(np.int32))
        game_over = infos["terminated"].astype(bool)
        game_ended = game_over | truncated
        terminated = terminated | game_over  # envpool calls a game over in the last step before the limit truncated
        truncated = truncated & ~terminated
        is_reset = self.ended
        self.ended = terminated | truncated
        infos = {"raw_rewards": infos["reward"], "game_ended": game_ended, "is_reset": is_reset}
        return obs, rewards, terminated, truncated, infos

    def render(self):
        """The screen of each game, in color."""
        return list(self.pool.render(env_ids=np.arange(self.num_envs)))


def make_pool(args, seed):
    """`num_envs` games in envpool, which steps them in threads."""
    try:
        import envpool
        from envpool.registration import registry
    except ImportError as error:
        refuse("env_id", args.env_id, f"pip install envpool, which has the games ({one_line(error)})")
    games = [game for game, (module, *_) in registry.specs.items() if module == "envpool.atari"]
    if args.env_id not in games:
        nearest = difflib.get_close_matches(args.env_id, games, cutoff=0.0)
        refuse("env_id", args.env_id, f"name a game that envpool has, such as {', '.join(nearest)}")
    require_memory(args, "num_envs", bytes_each=1_300_000)
    return envpool.make(
        args.env_id,
        env_type="gymnasium",
        num_envs=args.num_envs,
        seed=seed % 2**31,  # envpool's limit
        episodic_life=True,
        reward_clip=True,
        render_mode="rgb_array" if args.capture_video else None,
    )


def make_games(args, folder):
    """`num_envs` games that step together; videos of the first one go to `folder`."""
    seed = args.seed
    if args.resume is not None:
        seed += load_checkpoint(args).get("global_step", 0)
    envs = AtariEnvs(args, seed)
    if args.capture_video:
        try:
            return gym.wrappers.vector.RecordVideo(envs, str(folder / "videos"), record_first_only=True)
        except Exception as error:
            refuse("capture_video", True, f"games cannot be recorded here: {one_line(error)}")
    return envs


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


class Run:
    """A run's folder, logs, checkpoints and end: the context of a training loop.

    Ctrl-C and SIGTERM end the loop before its next step; then, and after an error, checkpoint, policy and summary are
    written. A run that ends before `start` leaves nothing behind.
    """

    def __init__(self, args):
        self.args = args
        self.device = prepare(args)
        name = f"{args.env_id}__{args.exp_name}__{args.seed}__{datetime.now():%Y-%m-%d_%H-%M-%S.%f}"
        self.folder = Path(args.run_dir) / name.replace("/", "_")
        try:
            self.folder.mkdir(parents=True)
        except OSError as error:
            refuse("run_dir", args.run_dir, f"give a folder that can be written ({one_line(error)})")
        self.step = 0
        self.episodes = 0
        self.recent_returns = []  # of the last 20 episodes
        self.steady = None  # step and time when warm-up ended
        self.signal = None
        self.started = False

    def start(self, envs, learner):
        """Restore the learner if the run is resumed, and begin to log."""
        self.envs = envs
        self.learner = learner
        if self.args.resume is not None:
            self.restore()
        self.log_step = self.saved_step = self.step
        self.returns = np.zeros(self.args.num_envs)  # of the current episodes
        self.first_steps = np.full(self.args.num_envs, self.step)
        space = envs.single_observation_space
        is_image = space.dtype == np.uint8 and len(space.shape) > 1
        self.example = torch.zeros(2, *space.shape, dtype=torch.uint8 if is_image else torch.float32)
        with torch.no_grad():
            learner.policy().eval()(self.example)  # what does not match an edited network fails now
        packages = ("torch", "tensordict", "gymnasium", "envpool", "mujoco", "numpy")
        versions = {name: sys.modules[name].__version__ for name in packages if name in sys.modules}
        self.config = {"compile": False, "cudagraphs": False} | vars(self.args)
        self.config |= {
            "script": Path(__file__).stem,
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            "cores": os.cpu_count(),
            "versions": versions | {"python": platform.python_version()},
        }
        (self.folder / "config.json").write_text(json.dumps(self.config, indent=2))
        shutil.copy(__file__, self.folder)
        if self.args.track:
            self.track()
        self.writer = SummaryWriter(self.folder)
        size = {"total": self.args.total_timesteps, "initial": self.step, "unit": "step", "dynamic_ncols": True}
        self.bar = ProgressBar(**size, disable=sys.stderr is None)
        self.bar.set_description("compiling" if self.config["compile"] else "warming up")
        self.start_time = self.log_time = time.perf_counter()
        self.started = True

    def restore(self):
        """Continue from the checkpoint in --resume."""
        checkpoint = load_checkpoint(self.args)
        try:
            for name in FIXED:
                value, saved = getattr(self.args, name), checkpoint["args"][name]
                if value != saved:
                    refuse(name, value, f"leave it out: the checkpoint has {saved}")
            self.learner.load_state_dict(checkpoint["learner"])
            self.step = checkpoint["global_step"]
            self.episodes = checkpoint["episodes"]
            self.recent_returns = checkpoint["returns"]
        except (KeyError, RuntimeError, ValueError) as error:
            refuse("resume", self.args.resume, f"the checkpoint does not fit this script: {one_line(error)}")
        if self.step >= self.args.total_timesteps:
            refuse("total_timesteps", self.args.total_timesteps, f"give more than {self.step}, the checkpoint's step")

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

    def unfinished(self):
        """Whether to go on; writes a checkpoint first if one is due."""
        interval = self.args.checkpoint_interval
        if interval and self.step // interval > self.saved_step // interval:
            self.save()
        return self.step < self.args.total_timesteps and self.signal is None

    def advance(self, rewards, ended):
        """Count a step of all environments; both are NumPy, (num_envs,), `ended` where an episode is over."""
        self.step += self.args.num_envs
        self.returns += rewards
        for i in ended.nonzero()[0]:
            self.end_episode(i)
        if self.steady is None and self.learner.updates >= self.learner.warmup_updates:
            self.steady = (self.step, time.perf_counter())
            self.bar.set_description("training", refresh=False)
        self.bar.update(self.args.num_envs)

    def end_episode(self, i):
        """Log the episode that is over in environment `i`."""
        self.writer.add_scalar("charts/episodic_return", self.returns[i], self.step)
        length = (self.step - self.first_steps[i]) // self.args.num_envs
        self.writer.add_scalar("charts/episodic_length", length, self.step)
        self.recent_returns = [*self.recent_returns[-19:], float(self.returns[i])]
        self.bar.set_postfix({"return": f"{np.mean(self.recent_returns):.1f}"}, refresh=False)
        self.episodes += 1
        self.returns[i] = 0
        self.first_steps[i] = self.step

    def log(self, losses):
        """Log losses by name, and the speed since the last log; end the run if a loss is not finite."""
        self.folder.mkdir(parents=True, exist_ok=True)  # somebody may have deleted it
        now = time.perf_counter()
        self.writer.add_scalar("charts/SPS", (self.step - self.log_step) / (now - self.log_time), self.step)
        self.log_step = self.step
        self.log_time = now
        for name, value in losses.items():
            self.writer.add_scalar(f"losses/{name}", value, self.step)
        non_finite = [name for name, value in losses.items() if "loss" in name and not math.isfinite(value)]
        if non_finite:
            self.end_at_nan(f"{non_finite[0]} is {losses[non_finite[0]]}", self.learner.state_dict())

    def end_at_nan(self, what, state):
        """End the run with exit code 1 and a line that names the cause."""
        cause = "a lower learning rate may help"
        if has_nan([state.get("replay"), state.get("normalizer")]):
            cause = "the environment returned a NaN, unless a diverged policy sent it one"
        kept = "checkpoint.pt is from before" if (self.folder / "checkpoint.pt").exists() else "there is no checkpoint"
        raise SystemExit(f"error: step {self.step}: {what}; {cause}; {kept}")

    def save(self):
        """Write checkpoint.pt and policy.pt2; end the run if there is a NaN in what is to be saved."""
        state = self.learner.state_dict()
        if has_nan(state):
            self.end_at_nan("the checkpoint would hold a NaN", state)
        checkpoint = {"args": vars(self.args), "global_step": self.step, "episodes": self.episodes}
        checkpoint |= {"returns": self.recent_returns, "learner": state}
        replace_file(self.folder / "checkpoint.pt", lambda file: torch.save(checkpoint, file))
        self.saved_step = self.step
        try:
            batch = torch.export.Dim("batch")
            program = torch.export.export(self.learner.policy().eval(), (self.example,), dynamic_shapes=({0: batch},))
        except Exception as error:  # of an edited policy
            return note(f"no policy.pt2: {one_line(error)}")
        replace_file(self.folder / "policy.pt2", lambda file: torch.export.save(program, file))

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

    def finish(self, error):
        """Write what a started run leaves behind; `error` is what ended it, or None."""
        end_time = time.perf_counter()
        try:
            if error is None or isinstance(error, Exception):
                self.save()
        except BaseException as saving_error:
            if error is None:
                raise
            note(f"no checkpoint: {one_line(saving_error)}")
        finally:
            self.write_summary(end_time)
            self.envs.close()
            self.writer.close()
            with suppress(OSError):
                self.bar.close()

    def write_summary(self, end_time):
        """Write summary.json: the configuration, and what came of it."""
        steady_step, steady_time = self.steady or (self.step, end_time)
        mean_return = float(np.mean(self.recent_returns)) if self.recent_returns else math.nan
        results = {
            "cudagraphs": getattr(self.learner, "cudagraphs", False),  # active
            "global_step": self.step,
            "episodes": self.episodes,
            "episodic_return": mean_return if math.isfinite(mean_return) else None,
            "steady_sps": (self.step - steady_step) / (end_time - steady_time) if self.step > steady_step else None,
            "warmup_seconds": steady_time - self.start_time if self.steady else None,
            "wall_seconds": end_time - self.start_time,
        }
        (self.folder / "summary.json").write_text(json.dumps(self.config | results, indent=2))


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
#     "envpool==1.2.5",
# ]
# ///
