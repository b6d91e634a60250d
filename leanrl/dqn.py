"""Deep Q-learning (DQN) for discrete actions, in plain PyTorch: Mnih et al. 2015, Nature 518, 529-533.

The algorithm and its defaults are CleanRL's, and so are its details:

1. The target comes from a target network, a copy that is renewed every 500 steps (`DQN.update_target`).
2. Actions are random with a probability that falls linearly, and else greedy (`epsilon`, `DQN.act`).
3. The TD error is squared, not clipped as in the paper (`DQN.update`).
4. A truncated episode is not a terminal state: its last value is bootstrapped (`train`).

dqn_torchcompile.py makes the same updates at full speed, and acts one update late.

    python leanrl/dqn.py --env-id CartPole-v1
"""

import copy
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
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

LOG_INTERVAL = 100  # vector steps between two logs of the losses


@dataclass
class Args:
    env_id: str = "CartPole-v1"
    """gymnasium environment"""
    total_timesteps: int = 500_000
    """environment steps of the whole run, over all environments"""
    num_envs: int = 1
    """environments that step together"""
    buffer_size: int = 10_000
    """transitions in the replay buffer"""
    gamma: float = 0.99
    """discount factor"""
    tau: float = 1.0
    """target smoothing coefficient"""
    batch_size: int = 128
    """transitions per update"""
    learning_starts: int = 10_000
    """environment steps before the first update"""
    learning_rate: float = 2.5e-4
    """learning rate of the Q-network"""
    train_frequency: int = 10
    """environment steps between two updates"""
    target_network_frequency: int = 500
    """environment steps between two updates of the target network"""
    start_e: float = 1.0
    """probability of a random action at the first step"""
    end_e: float = 0.05
    """probability of a random action at the end of exploration"""
    exploration_fraction: float = 0.5
    """fraction of --total-timesteps over which this probability falls linearly"""

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
    threads: int = 1  # small matrices: a second thread gains little, and costs much on a busy machine
    """CPU threads for torch (0: torch's default)"""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """precision of float32 matmuls and convolutions (high: TF32, medium: bfloat16)"""
    torch_deterministic: bool = True
    """use deterministic cuDNN kernels"""


AT_LEAST_1 = ("total_timesteps", "num_envs", "buffer_size", "batch_size")
AT_LEAST_1 += ("train_frequency", "target_network_frequency")
AT_MOST_1 = ("gamma", "tau", "start_e", "end_e", "exploration_fraction")
POSITIVE = ("learning_rate", "exploration_fraction")  # others may be 0, none negative
FIXED = ("env_id", "buffer_size")  # what a resumed run cannot change


class QNetwork(nn.Module):
    """Q(s, a) of all actions: (batch, obs_dim) to (batch, num_actions)."""

    def __init__(self, obs_dim, num_actions):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(obs_dim, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, num_actions),
        )

    def forward(self, obs):
        return self.net(obs)


class DQN:
    """The learner: networks, optimizer and replay buffer."""

    warmup_updates = 1  # until the speed is steady

    def __init__(self, args, envs, device):
        self.args = args
        self.device = device
        self.obs_dim = envs.single_observation_space.shape[0]
        self.num_actions = int(envs.single_action_space.n)
        with device:
            self.q = QNetwork(self.obs_dim, self.num_actions)
            self.target_q = copy.deepcopy(self.q)
        self.networks = {"q": self.q, "target_q": self.target_q}
        self.optimizers = {"q": torch.optim.Adam(self.q.parameters(), lr=args.learning_rate)}
        shapes = {"obs": (self.obs_dim,), "next_obs": (self.obs_dim,), "actions": (), "rewards": (), "terminated": ()}
        require_memory(args, "buffer_size", bytes_each=4 * sum(math.prod(shape) for shape in shapes.values()))
        self.replay = ReplayBuffer(args.buffer_size, shapes, device)
        self.rng = np.random.default_rng(args.seed)  # for random actions
        self.updates = 0
        self.last_losses = {}

    def update(self):
        """One step on the Q-network."""
        batch = self.replay.sample(self.args.batch_size)

        # TD loss
        with torch.no_grad():
            next_q = self.target_q(batch["next_obs"]).amax(-1)
            target = batch["rewards"] + (1 - batch["terminated"]) * self.args.gamma * next_q
        actions = batch["actions"].long()[:, None]
        q = self.q(batch["obs"]).gather(-1, actions).squeeze(-1)
        td_loss = (q - target).square().mean()
        self.optimizers["q"].zero_grad()
        td_loss.backward()
        self.optimizers["q"].step()
        self.last_losses = {"q_values": q.detach().mean(), "td_loss": td_loss.detach()}
        self.updates += 1

    def update_target(self):
        """Move the target network by `tau` toward the Q-network; 1 copies it."""
        for weights, target_weights in zip(self.q.parameters(), self.target_q.parameters(), strict=True):
            target_weights.data.lerp_(weights.data, self.args.tau)

    @torch.no_grad()
    def greedy(self, obs):
        """The actions of highest value, (num_envs,), for `obs`, (num_envs, obs_dim); both are NumPy."""
        values = self.q(torch.as_tensor(obs, dtype=torch.float32, device=self.device))
        return values.argmax(-1).cpu().numpy()

    def act(self, obs, exploration):
        """Actions for `obs`, each random with probability `exploration`, else greedy; both are NumPy."""
        explore = self.rng.random(len(obs)) < exploration
        count = np.count_nonzero(explore)
        actions = self.greedy(obs) if count < len(obs) else np.empty(count, np.int64)
        if count:
            actions[explore] = self.rng.integers(self.num_actions, size=count)
        return actions

    def losses(self):
        """The last update's losses by name."""
        return {name: value.item() for name, value in self.last_losses.items()}

    def policy(self):
        """A copy of the deterministic policy, on the CPU."""
        return Policy(copy.deepcopy(self.q).cpu())

    def state_dict(self):
        """What the learner needs to continue bit for bit, on the CPU or on the device."""
        return {
            "networks": {name: network.state_dict() for name, network in self.networks.items()},
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
            "replay": self.replay.state_dict(),
            "updates": self.updates,
            "numpy_rng": self.rng.bit_generator.state,
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all()[:1],  # of the device in use
        }

    def load_state_dict(self, state):
        """Continue from what `state_dict` returned, with the learning rate of this run's arguments."""
        for name, network in self.networks.items():
            network.load_state_dict(state["networks"][name])
        for name, optimizer in self.optimizers.items():
            own_rates = {"param_groups": optimizer.state_dict()["param_groups"]}
            optimizer.load_state_dict(state["optimizers"][name] | own_rates)
        self.replay.load_state_dict(state["replay"])
        self.updates = state["updates"]
        self.rng.bit_generator.state = state["numpy_rng"]
        torch.set_rng_state(state["rng"])
        torch.cuda.set_rng_state_all(state["cuda_rng"])


def epsilon(step, args):
    """The probability of a random action at environment step `step`: from start_e down to end_e, then constant."""
    progress = min(step / (args.exploration_fraction * args.total_timesteps), 1.0)
    return args.start_e + progress * (args.end_e - args.start_e)


def times_due(frequency, step, num_envs):
    """How many multiples of `frequency` the last step of all environments reached: those in (step - num_envs, step]."""
    return step // frequency - (step - num_envs) // frequency


def train(args, on_start=lambda run: None):
    """Train an agent. `on_start` is for tools: it is called with the `Run` before the first step."""
    with Run(args) as run:
        check_replay(args)
        envs = make_envs(args, run.folder)
        require_discrete_actions(args, envs)
        learner = DQN(args, envs, run.device)
        run.start(envs, learner)
        obs, _ = envs.reset(seed=args.seed + run.step)
        on_start(run)
        while run.unfinished():
            actions = learner.act(obs, epsilon(run.step, args))
            next_obs, rewards, terminated, truncated, infos = envs.step(actions)
            learner.replay.store(
                obs=obs,
                next_obs=final_observations(next_obs, infos),
                actions=actions,
                rewards=rewards,
                terminated=terminated,
            )
            obs = next_obs
            run.advance(rewards, terminated | truncated)
            if run.step > args.learning_starts:
                for _ in range(times_due(args.train_frequency, run.step, args.num_envs)):
                    learner.update()
                if times_due(args.target_network_frequency, run.step, args.num_envs):
                    learner.update_target()
            if learner.updates and run.step // args.num_envs % LOG_INTERVAL == 0:
                run.log(learner.losses())


class Policy(nn.Module):
    """What policy.pt2 holds, the greedy policy: (batch, obs_dim) to (batch,)."""

    def __init__(self, q):
        super().__init__()
        self.q = q

    def forward(self, obs):
        return self.q(obs).argmax(-1)


# ---------------------------------------------------------------------------------------------------------------------
# What the algorithm stands on: replay buffer, environments
# ---------------------------------------------------------------------------------------------------------------------


class ReplayBuffer:
    """Transitions on the CPU, column by column; the newest overwrite the oldest."""

    def __init__(self, size, shapes, device):
        """`shapes` are those of a transition's columns, by name; batches are sampled for `device`."""
        self.size = size
        self.device = device
        self.columns = {name: torch.empty(size, *shape) for name, shape in shapes.items()}
        self.stored = 0  # transitions so far, overwritten ones included

    def store(self, **columns):
        """Write a transition per environment; columns are NumPy, (num_envs, ...)."""
        rows = (self.stored + np.arange(len(columns["rewards"]))) % self.size
        for name, column in self.columns.items():
            column.numpy()[rows] = columns[name]  # a quarter of the time of indexing a torch tensor
        self.stored += len(rows)

    def sample(self, batch_size):
        """Columns by name, (batch_size, ...), of transitions drawn uniformly."""
        rows = torch.randint(min(self.stored, self.size), (batch_size,))
        return {name: column[rows].to(self.device) for name, column in self.columns.items()}

    def state_dict(self):
        """Copies of the filled part of the columns, and the count."""
        return {name: column[: self.stored].clone() for name, column in self.columns.items()} | {"stored": self.stored}

    def load_state_dict(self, state):
        """Continue from what `state_dict` returned."""
        for name, column in self.columns.items():
            column[: len(state[name])] = state[name]
        self.stored = state["stored"]


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


def require_discrete_actions(args, envs):
    """Refuse environments whose actions are not numbers that count from 0."""
    space = envs.single_action_space
    if not isinstance(space, gym.spaces.Discrete) or space.start != 0:
        refuse("env_id", args.env_id, f"choose an environment with discrete actions that count from 0, not {space}")


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
# ]
# ///
