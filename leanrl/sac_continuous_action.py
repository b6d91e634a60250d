"""Soft Actor-Critic (SAC) for continuous actions, in plain PyTorch: Haarnoja et al. 2018, arXiv:1812.05905.

The algorithm and its defaults are CleanRL's, and so are its details:

1. Two critics; the target takes the smaller value (`SAC.update`).
2. The entropy coefficient is tuned toward an entropy of minus the number of action dimensions (`SAC.update_actor`).
3. Every `policy_frequency` updates of the critics the actor makes as many steps (`SAC.update`).
4. Actions are squashed by tanh into the bounds of the action space (`SquashedGaussian`).
5. A truncated episode is not a terminal state: its last value is bootstrapped (`train`).

sac_continuous_action_torchcompile.py makes the same updates at full speed, and acts one update late.

    python leanrl/sac_continuous_action.py --env-id HalfCheetah-v5
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

NUM_CRITICS = 2
LOG_STD_MIN = -5.0
LOG_STD_MAX = 2.0
LOG_INTERVAL = 100  # vector steps between two logs of the losses


@dataclass
class Args:
    env_id: str = "HalfCheetah-v5"
    """gymnasium environment"""
    total_timesteps: int = 1_000_000
    """environment steps of the whole run, over all environments"""
    num_envs: int = 1
    """environments that step together"""
    buffer_size: int = 1_000_000
    """transitions in the replay buffer"""
    gamma: float = 0.99
    """discount factor"""
    tau: float = 0.005
    """target smoothing coefficient"""
    batch_size: int = 256
    """transitions per update"""
    learning_starts: int = 5_000
    """environment steps with random actions before the first update"""
    policy_lr: float = 3e-4
    """learning rate of the actor"""
    q_lr: float = 1e-3
    """learning rate of the critics and of the entropy coefficient"""
    policy_frequency: int = 2
    """update the actor every so many updates, with as many steps"""
    target_network_frequency: int = 1
    """update the target networks every so many updates"""
    alpha: float = 0.2
    """entropy coefficient with --no-autotune"""
    autotune: bool = True
    """tune the entropy coefficient"""

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
AT_LEAST_1 += ("policy_frequency", "target_network_frequency")
AT_MOST_1 = ("gamma", "tau")
POSITIVE = ("policy_lr", "q_lr")  # others may be 0, none negative
FIXED = ("env_id", "buffer_size")  # what a resumed run cannot change


class Critic(nn.Module):
    """Q(s, a): (batch, obs_dim) and (batch, act_dim) to (batch,)."""

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
    """A Gaussian policy, before it is squashed: (batch, obs_dim) to mean and log standard deviation."""

    def __init__(self, obs_dim, act_dim):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(obs_dim, 256),
            nn.ReLU(),
            nn.Linear(256, 256),
            nn.ReLU(),
            nn.Linear(256, 2 * act_dim),
        )

    def forward(self, obs):
        mean, log_std = self.net(obs).chunk(2, -1)
        return mean, LOG_STD_MIN + (LOG_STD_MAX - LOG_STD_MIN) / 2 * (log_std.tanh() + 1)


class SquashedGaussian:
    """Samples a Gaussian and squashes it by tanh into the bounds of the action space (appendix C). No parameters."""

    def __init__(self, action_space, device):
        low = torch.tensor(action_space.low, dtype=torch.float32, device=device)
        high = torch.tensor(action_space.high, dtype=torch.float32, device=device)
        self.scale = (high - low) / 2
        self.bias = (high + low) / 2

    def sample(self, mean, log_std, noise):
        """Actions, (batch, act_dim), and their log-probabilities, (batch,); `noise` is standard normal."""
        squashed = (mean + log_std.exp() * noise).tanh()
        gaussian_log_prob = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        log_prob = gaussian_log_prob - (self.scale * (1 - squashed.square()) + 1e-6).log()
        return squashed * self.scale + self.bias, log_prob.sum(-1)


class SAC:
    """The learner: networks, optimizers and replay buffer."""

    warmup_updates = 1  # until the speed is steady

    def __init__(self, args, envs, device):
        self.args = args
        self.device = device
        self.obs_dim = envs.single_observation_space.shape[0]
        self.act_dim = envs.single_action_space.shape[0]
        self.low = envs.single_action_space.low
        self.high = envs.single_action_space.high
        with device:
            self.actor = Actor(self.obs_dim, self.act_dim)
            self.critics = nn.ModuleList([Critic(self.obs_dim, self.act_dim) for _ in range(NUM_CRITICS)])
            self.target_critics = copy.deepcopy(self.critics)
            self.log_alpha = torch.tensor(1.0 if args.autotune else args.alpha).log().requires_grad_()
        self.gaussian = SquashedGaussian(envs.single_action_space, device)
        self.networks = {"actor": self.actor, "critics": self.critics, "target_critics": self.target_critics}
        self.optimizers = {
            "actor": torch.optim.Adam(self.actor.parameters(), lr=args.policy_lr),
            "critics": torch.optim.Adam(self.critics.parameters(), lr=args.q_lr),
            "alpha": torch.optim.Adam([self.log_alpha], lr=args.q_lr),
        }
        shapes = {"obs": (self.obs_dim,), "next_obs": (self.obs_dim,), "actions": (self.act_dim,)}
        shapes |= {"rewards": (), "terminated": ()}
        require_memory(args, "buffer_size", bytes_each=4 * sum(math.prod(shape) for shape in shapes.values()))
        self.replay = ReplayBuffer(args.buffer_size, shapes, device)
        self.updates = 0
        self.last_losses = {}

    def sample_actions(self, obs):
        """Actions, (batch, act_dim), and their log-probabilities, (batch,)."""
        mean, log_std = self.actor(obs)
        return self.gaussian.sample(mean, log_std, torch.randn_like(mean))

    @torch.no_grad()
    def act(self, obs):
        """Sampled actions, NumPy, (num_envs, act_dim)."""
        actions, _ = self.sample_actions(torch.as_tensor(obs, dtype=torch.float32, device=self.device))
        return actions.cpu().numpy().clip(self.low, self.high)

    def update(self):
        """One update of the critics and, as often as their frequencies say, of the actor and the target networks."""
        batch = self.replay.sample(self.args.batch_size)
        obs, next_obs = batch["obs"], batch["next_obs"]

        # critic loss (eq. 5)
        with torch.no_grad():
            next_actions, next_log_prob = self.sample_actions(next_obs)
            next_q = torch.stack([critic(next_obs, next_actions) for critic in self.target_critics]).amin(0)
            next_v = next_q - self.log_alpha.exp() * next_log_prob
            target = batch["rewards"] + (1 - batch["terminated"]) * self.args.gamma * next_v
        q = torch.stack([critic(obs, batch["actions"]) for critic in self.critics])  # (NUM_CRITICS, batch)
        qf_loss = (q - target).square().mean(-1).sum()
        self.optimizers["critics"].zero_grad()
        qf_loss.backward()
        self.optimizers["critics"].step()
        self.last_losses |= {f"qf{i + 1}_values": values for i, values in enumerate(q.detach().mean(-1))}
        self.last_losses["qf_loss"] = qf_loss.detach()

        if self.updates % self.args.policy_frequency == 0:
            for _ in range(self.args.policy_frequency):  # makes up for the delay
                self.update_actor(obs)

        # target networks
        if self.updates % self.args.target_network_frequency == 0:
            pairs = zip(self.critics.parameters(), self.target_critics.parameters(), strict=True)
            for weights, target_weights in pairs:
                target_weights.data.lerp_(weights.data, self.args.tau)
        self.updates += 1

    def update_actor(self, obs):
        """One update of the actor, then one of the entropy coefficient."""
        # actor loss (eq. 7)
        alpha = self.log_alpha.exp().detach()
        actions, log_prob = self.sample_actions(obs)
        q = torch.stack([critic(obs, actions) for critic in self.critics]).amin(0)
        actor_loss = (alpha * log_prob - q).mean()
        self.optimizers["actor"].zero_grad()
        actor_loss.backward()
        self.optimizers["actor"].step()
        self.last_losses |= {"actor_loss": actor_loss.detach(), "entropy": -log_prob.detach().mean()}

        # temperature (eq. 18), with the new actor
        if self.args.autotune:
            with torch.no_grad():
                _, log_prob = self.sample_actions(obs)
            target_entropy = -self.act_dim
            alpha_loss = (-self.log_alpha.exp() * (log_prob + target_entropy)).mean()
            self.optimizers["alpha"].zero_grad()
            alpha_loss.backward()
            self.optimizers["alpha"].step()
            self.last_losses["alpha_loss"] = alpha_loss.detach()
        self.last_losses["alpha"] = self.log_alpha.exp().detach()

    def losses(self):
        """The last update's losses by name."""
        return {name: value.item() for name, value in self.last_losses.items()}

    def policy(self):
        """A copy of the deterministic policy, on the CPU."""
        return Policy(copy.deepcopy(self.actor).cpu(), self.gaussian)

    def state_dict(self):
        """What the learner needs to continue bit for bit, on the CPU or on the device."""
        return {
            "networks": {name: network.state_dict() for name, network in self.networks.items()},
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
            "log_alpha": self.log_alpha.detach(),
            "replay": self.replay.state_dict(),
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
        self.replay.load_state_dict(state["replay"])
        self.updates = state["updates"]
        torch.set_rng_state(state["rng"])
        torch.cuda.set_rng_state_all(state["cuda_rng"])


def train(args, on_start=lambda run: None):
    """Train an agent. `on_start` is for tools: it is called with the `Run` before the first step."""
    with Run(args) as run:
        check_replay(args)
        envs = make_envs(args, run.folder)
        require_bounded_actions(args, envs)
        learner = SAC(args, envs, run.device)
        run.start(envs, learner)
        envs.action_space.seed(args.seed + run.step)
        obs, _ = envs.reset(seed=args.seed + run.step)
        on_start(run)
        while run.unfinished():
            actions = envs.action_space.sample() if run.step < args.learning_starts else learner.act(obs)
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
                learner.update()
                if run.step // args.num_envs % LOG_INTERVAL == 0:
                    run.log(learner.losses())


class Policy(nn.Module):
    """What policy.pt2 holds, the deterministic policy: (batch, obs_dim) to (batch, act_dim)."""

    def __init__(self, actor, squashed):
        super().__init__()
        self.actor = actor
        self.register_buffer("scale", squashed.scale.cpu())
        self.register_buffer("bias", squashed.bias.cpu())

    def forward(self, obs):
        mean, _ = self.actor(obs)
        return mean.tanh() * self.scale + self.bias


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


def require_bounded_actions(args, envs):
    """Refuse environments whose actions are not vectors with bounds."""
    space = envs.single_action_space
    if not (isinstance(space, gym.spaces.Box) and len(space.shape) == 1 and space.is_bounded()):
        refuse("env_id", args.env_id, f"choose an environment whose actions are bounded vectors, not {space}")


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
#     "mujoco==4.0.0",
#     "imageio==2.38.1",
#     "moviepy==2.2.1",
# ]
# ///
