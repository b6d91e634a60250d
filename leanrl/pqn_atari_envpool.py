"""Parallel Q-network (PQN) for Atari, in plain PyTorch: Gallici et al. 2024, arXiv:2407.04811.

The algorithm is `PQN` and `train`. Below the line of dashes is the run, the same text in all scripts.
Q-learning without replay buffer and target network. The algorithm and its defaults are CleanRL's, but item 3 is not,
and truncation is not termination here:

1. LayerNorm keeps the Q-network from diverging (`QNetwork`).
2. The loss of a life ends an episode, and rewards are clipped to -1, 0 or 1 (`make_pool`).
3. The step that starts an episode ignores its action, and the loss leaves it out (`AtariEnvs.step`, `masked_mean`).
4. Targets are Q(lambda) of a rollout of all environments; at its end and at a truncation they bootstrap the value of
   the true last observation (`PQN.make_batch`).
5. Exploration is epsilon-greedy with a linearly decaying epsilon (`epsilon`, `PQN.act`).
6. A rollout is learned in epochs of minibatches by RAdam, with clipped gradients (`PQN.update`).
7. The learning rate decays linearly to 0 (`train`).

pqn_atari_envpool_torchcompile.py makes the same updates faster.

    python leanrl/pqn_atari_envpool.py --env-id Breakout-v5
"""

import copy
import errno
import io
import json
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
from torch import nn
from torch.utils import collect_env
from torch.utils._pytree import tree_leaves
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


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


class QNetwork(nn.Module):
    """Q(s, a) of all actions: maps uint8 (batch, 4, 84, 84) to (batch, num_actions)."""

    def __init__(self, num_actions):
        super().__init__()
        self.net = nn.Sequential(
            orthogonal(nn.Conv2d(4, 32, 8, stride=4)),
            nn.LayerNorm((32, 20, 20)),
            nn.ReLU(),
            orthogonal(nn.Conv2d(32, 64, 4, stride=2)),
            nn.LayerNorm((64, 9, 9)),
            nn.ReLU(),
            orthogonal(nn.Conv2d(64, 64, 3)),
            nn.LayerNorm((64, 7, 7)),
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
    """The learner: network, optimizer and the rollout of an iteration."""

    def __init__(self, args, envs, device):
        self.args = args
        self.device = device
        self.obs_shape = envs.single_observation_space.shape
        self.num_actions = int(envs.single_action_space.n)
        with device:
            self.q = QNetwork(self.num_actions)
        self.networks = {"q": self.q}
        self.optimizers = {"q": torch.optim.RAdam(self.q.parameters(), lr=args.learning_rate)}
        self.rng = np.random.default_rng(args.seed)  # for random actions
        self.last_losses = {}

        require_memory("num_steps", args.num_steps, envs.num_envs * math.prod(self.obs_shape), device)
        steps = (args.num_steps, envs.num_envs)
        names = ("values", "actions", "rewards", "terminated", "ended", "valid")
        self.rollout = {name: torch.zeros(steps, device=device) for name in names}
        self.rollout["obs"] = torch.zeros(*steps, *self.obs_shape, dtype=torch.uint8, device=device)

    @torch.no_grad()
    def make_batch(self, last_obs):
        """The rollout's transitions (num_steps * num_envs, ...) by name, with their Q(lambda) targets.

        The next row holds a step's next observation, even where the step ends an episode: only the following step
        starts a new one. The next observations of the last step are `last_obs`, NumPy (num_envs, 4, 84, 84).
        """
        rollout = self.rollout

        # Q(lambda): a mean of one-step and longer returns, which end with the episode or the rollout
        last_values = self.q(torch.as_tensor(last_obs, device=self.device)).amax(-1)
        next_values = torch.cat((rollout["values"][1:], last_values[None])) * (1 - rollout["terminated"])
        targets = torch.zeros_like(next_values)
        target = next_values[-1]
        for t in reversed(range(self.args.num_steps)):
            weight = self.args.q_lambda * (1 - rollout["ended"][t])
            target = rollout["rewards"][t] + self.args.gamma * next_values[t].lerp(target, weight)
            targets[t] = target

        batch = {name: rollout[name] for name in ("obs", "actions", "valid")} | {"targets": targets}
        return {name: column.flatten(0, 1) for name, column in batch.items()}

    def update_minibatch(self, rows):
        """One step of RAdam on rows of a batch."""
        # TD loss
        actions = rows["actions"].long()[:, None]
        q = self.q(rows["obs"]).gather(-1, actions).squeeze(-1)
        td_loss = masked_mean((q - rows["targets"]).square(), rows["valid"])
        self.optimizers["q"].zero_grad()
        td_loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(self.q.parameters(), self.args.max_grad_norm or math.inf)
        self.optimizers["q"].step()
        q_values = masked_mean(q.detach(), rows["valid"])
        self.last_losses = {"q_values": q_values, "td_loss": td_loss.detach(), "grad_norm": grad_norm}

    def update(self, learning_rate, last_obs):
        """Run all epochs over the rollout, each in minibatches drawn without replacement.

        `last_obs`, NumPy (num_envs, 4, 84, 84), follow its last step.
        """
        self.optimizers["q"].param_groups[0]["lr"] = learning_rate
        batch = self.make_batch(last_obs)
        for _ in range(self.args.update_epochs):
            order = torch.randperm(len(batch["obs"]), device=self.device)
            for rows in order.chunk(self.args.num_minibatches):
                self.update_minibatch({name: column[rows] for name, column in batch.items()})

    @torch.no_grad()
    def act(self, t, obs, exploration):
        """Actions for step `t` of the rollout and `obs`, both NumPy (num_envs, ...).

        Each is random with probability `exploration`, else greedy.
        """
        obs = torch.as_tensor(obs, device=self.device)
        values, greedy = self.q(obs).max(-1)
        explore = self.rng.random(len(obs)) < exploration
        random_actions = self.rng.integers(self.num_actions, size=len(obs))
        actions = np.where(explore, random_actions, greedy.cpu().numpy())
        self.store(t, obs=obs, values=values, actions=actions)
        return actions

    def record(self, t, rewards, terminated, truncated, is_reset):
        """Store the outcome of step `t`; arguments are NumPy (num_envs,), as returned by `AtariEnvs.step`."""
        self.store(t, rewards=rewards, terminated=terminated, ended=terminated | truncated, valid=~is_reset)

    def store(self, t, **columns):
        """Write columns (num_envs, ...) to step `t` of the rollout."""
        for name, column in columns.items():
            self.rollout[name][t] = torch.as_tensor(column, device=self.device)

    def losses(self):
        """Losses of the last minibatch, by name."""
        return {name: value.item() for name, value in self.last_losses.items()}

    def policy(self):
        """A copy of the deterministic policy on the CPU, and example inputs."""
        return GreedyPolicy(copy.deepcopy(self.q).cpu()), (torch.zeros(2, *self.obs_shape, dtype=torch.uint8),)

    def state_dict(self):
        """All state needed to resume bit for bit; tensors may be on the device."""
        return {
            "networks": {name: network.state_dict() for name, network in self.networks.items()},
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
            "numpy_rng": self.rng.bit_generator.state,
            "rng": torch.get_rng_state(),
            "cuda_rng": [torch.cuda.get_rng_state()] if self.device.type == "cuda" else [],
        }

    def load_state_dict(self, state):
        """Restore a `state_dict`."""
        for name, network in self.networks.items():
            network.load_state_dict(state["networks"][name])
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        self.rng.bit_generator.state = state["numpy_rng"]
        torch.set_rng_state(state["rng"])
        torch.cuda.set_rng_state_all(state["cuda_rng"])


def epsilon(step, args):
    """The probability of a random action at environment step `step`: linear from start_e to end_e, then constant."""
    progress = min(step / max(args.exploration_fraction * args.total_timesteps, 1), 1)
    return args.start_e + progress * (args.end_e - args.start_e)


def masked_mean(values, valid):
    """The mean of `values` (batch,) where `valid` (batch,) is 1; 0 if it is 1 nowhere."""
    return (values * valid).sum() / valid.sum().clamp(min=1)


def train(args):
    """Train an agent."""
    device, folder = prepare(args)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.backends.cudnn.allow_tf32 = args.matmul_precision != "highest"
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
#     "torch>=2.11,<2.16", "gymnasium>=1.1,<2", "numpy>=1.26,<3", "tyro>=1.0,<2", "tqdm>=4.66",
#     "tensorboard>=2.18", "wandb>=0.20", "envpool>=1.2,<2",
# ]
# ///
