"""Proximal Policy Optimization (PPO) for continuous actions, in plain PyTorch: Schulman et al. 2017, arXiv:1707.06347.

The algorithm and its defaults are CleanRL's, and so are its details, see Huang et al. 2022, "The 37 implementation
details of PPO":

1. Advantages are estimated by GAE; a truncated episode is not a terminal state (`PPO.make_batch`).
2. Not only the probability ratio is clipped, but also the change of the values (`PPO.loss`).
3. Each minibatch normalizes its advantages and clips its gradient (`PPO.loss`, `PPO.update_minibatch`).
4. Observations and rewards are scaled by running statistics (`Normalizer`).
5. Layers start orthogonal, and the policy's last one almost at 0 (`linear`, `Agent`).
6. The learning rate decays linearly to 0 (`train`).

ppo_continuous_action_torchcompile.py makes the same updates at full speed.

    python leanrl/ppo_continuous_action.py --env-id HalfCheetah-v5
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
from torch.distributions import Normal
from torch.utils._pytree import tree_leaves
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass
class Args:
    env_id: str = "HalfCheetah-v5"
    """gymnasium environment"""
    total_timesteps: int = 1_000_000
    """environment steps of the whole run, over all environments"""
    num_envs: int = 1
    """environments that step together"""
    num_steps: int = 2048
    """steps of each environment per iteration"""
    learning_rate: float = 3e-4
    """learning rate of the first iteration"""
    anneal_lr: bool = True
    """lower the learning rate linearly to 0 at the end of the run"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation"""
    num_minibatches: int = 32
    """minibatches per epoch"""
    update_epochs: int = 10
    """passes over an iteration's transitions"""
    norm_adv: bool = True
    """normalize the advantages of each minibatch"""
    clip_coef: float = 0.2
    """largest change of the probability ratio from 1 (epsilon in the paper)"""
    clip_vloss: bool = True
    """clip the change of the values by --clip-coef too"""
    ent_coef: float = 0.0
    """coefficient of the entropy in the loss"""
    vf_coef: float = 0.5
    """coefficient of the value loss"""
    max_grad_norm: float = 0.5
    """largest norm of a gradient, which is scaled down to it"""
    target_kl: float | None = None
    """end an iteration after the epoch in which the approximate KL divergence exceeds this"""
    bootstrap_truncation: bool = True
    """bootstrap the value behind a truncated episode; without, a truncation counts as a terminal state"""

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
    threads: int = 1
    """CPU threads for torch (0: torch's default, which is slower for networks this small)"""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """precision of float32 matmuls and convolutions (high: TF32, medium: bfloat16)"""
    torch_deterministic: bool = True
    """use deterministic cuDNN kernels"""


AT_LEAST_1 = ("total_timesteps", "num_envs", "num_steps", "num_minibatches", "update_epochs")
AT_MOST_1 = ("gamma", "gae_lambda")
POSITIVE = ("learning_rate", "clip_coef", "max_grad_norm", "target_kl")  # others may be 0, none negative
FIXED = ("env_id",)  # what a resumed run cannot change


def linear(inputs, outputs, gain=2**0.5):
    """A linear layer that starts with orthogonal weights and without bias."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """A Gaussian policy, whose standard deviation does not depend on the observation, and a value function."""

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

        `obs`, (batch, obs_dim), are normalized.
        """
        return self.actor(obs), self.log_std, self.critic(obs).squeeze(-1)


class PPO:
    """The learner: network, optimizer, normalizer and the rollout of an iteration."""

    warmup_updates = 1  # until the speed is steady

    def __init__(self, args, envs, device):
        self.args = args
        self.device = device
        obs_dim = envs.single_observation_space.shape[0]
        act_dim = envs.single_action_space.shape[0]
        self.low = envs.single_action_space.low
        self.high = envs.single_action_space.high
        with device:
            self.agent = Agent(obs_dim, act_dim)
        self.networks = {"agent": self.agent}
        self.optimizers = {"agent": torch.optim.Adam(self.agent.parameters(), lr=args.learning_rate, eps=1e-5)}
        self.normalizer = Normalizer(envs.num_envs, obs_dim, args.gamma)
        shapes = {"obs": (obs_dim,), "next_obs": (obs_dim,), "actions": (act_dim,), "log_prob": (), "values": ()}
        shapes |= {"rewards": (), "terminated": (), "ended": ()}
        width = sum(math.prod(shape) for shape in shapes.values())
        require_memory(args, "num_steps", bytes_each=4 * envs.num_envs * width)
        steps = (args.num_steps, envs.num_envs)
        self.rollout = {name: torch.zeros(*steps, *shape, device=device) for name, shape in shapes.items()}
        self.grad_norm = torch.zeros((), device=device)  # of the last minibatch, before clipping
        self.updates = 0
        self.last_losses = {}

    @torch.no_grad()
    def make_batch(self):
        """The rollout's transitions with their advantages and returns, by name, (num_steps * num_envs, ...)."""
        rollout = self.rollout

        # GAE (arXiv:1506.02438, eq. 16)
        _, _, next_values = self.agent(rollout["next_obs"].flatten(0, 1))
        next_values = next_values.view_as(rollout["values"]) * (1 - rollout["terminated"])
        errors = rollout["rewards"] + self.args.gamma * next_values - rollout["values"]
        decay = self.args.gamma * self.args.gae_lambda * (1 - rollout["ended"])
        advantages = torch.zeros_like(errors)
        advantage = 0
        for t in reversed(range(self.args.num_steps)):
            advantage = errors[t] + decay[t] * advantage
            advantages[t] = advantage

        batch = {name: rollout[name] for name in ("obs", "actions", "log_prob", "values")}
        batch |= {"advantages": advantages, "returns": advantages + rollout["values"]}
        return {name: column.flatten(0, 1) for name, column in batch.items()}

    def loss(self, rows):
        """Policy loss, value loss, entropy and the log of the probability ratio, (batch,), for rows of a batch."""
        clip = self.args.clip_coef
        mean, log_std, values = self.agent(rows["obs"])
        policy = Normal(mean, log_std.exp(), validate_args=False)

        # clipped policy loss (eq. 7)
        log_ratio = policy.log_prob(rows["actions"]).sum(-1) - rows["log_prob"]
        ratio = log_ratio.exp()
        advantages = rows["advantages"]
        if self.args.norm_adv:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        policy_loss = -torch.min(advantages * ratio, advantages * ratio.clamp(1 - clip, 1 + clip)).mean()

        # clipped value loss
        errors = (values - rows["returns"]).square()
        if self.args.clip_vloss:
            clipped_values = rows["values"] + (values - rows["values"]).clamp(-clip, clip)
            errors = torch.max(errors, (clipped_values - rows["returns"]).square())
        value_loss = 0.5 * errors.mean()

        entropy = policy.entropy().sum(-1).mean()
        return policy_loss, value_loss, entropy, log_ratio

    def update_minibatch(self, rows):
        """One step of Adam."""
        policy_loss, value_loss, entropy, _ = self.loss(rows)
        loss = policy_loss - self.args.ent_coef * entropy + self.args.vf_coef * value_loss
        self.optimizers["agent"].zero_grad()
        loss.backward()
        self.grad_norm = nn.utils.clip_grad_norm_(self.agent.parameters(), self.args.max_grad_norm)
        self.optimizers["agent"].step()

    @torch.no_grad()
    def measure(self, batch):
        """Losses and statistics of the whole batch, by name."""
        policy_loss, value_loss, entropy, log_ratio = self.loss(batch)
        ratio = log_ratio.exp()
        return {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "approx_kl": (ratio - 1 - log_ratio).mean(),  # http://joschu.net/blog/kl-approx.html, k3
            "clipfrac": ((ratio - 1).abs() > self.args.clip_coef).float().mean(),
            "grad_norm": self.grad_norm,
            "explained_variance": 1 - (batch["returns"] - batch["values"]).var() / batch["returns"].var(),
        }

    def update(self, learning_rate):
        """All epochs over the rollout, each in minibatches drawn without replacement."""
        self.optimizers["agent"].param_groups[0]["lr"] = learning_rate
        batch = self.make_batch()
        size = len(batch["obs"])
        for _ in range(self.args.update_epochs):
            for rows in torch.randperm(size, device=self.device).split(size // self.args.num_minibatches):
                self.update_minibatch({name: column[rows] for name, column in batch.items()})
            if self.args.target_kl is not None and self.measure(batch)["approx_kl"] > self.args.target_kl:
                break
        self.last_losses = self.measure(batch)
        self.updates += 1

    @torch.no_grad()
    def act(self, t, obs):
        """Sampled actions for step `t` of the rollout; both are NumPy, (num_envs, ...), `obs` normalized."""
        obs = torch.as_tensor(obs, device=self.device)
        mean, log_std, values = self.agent(obs)
        policy = Normal(mean, log_std.exp(), validate_args=False)
        actions = policy.sample()
        self.store(t, obs=obs, actions=actions, log_prob=policy.log_prob(actions).sum(-1), values=values)
        return actions.cpu().numpy().clip(self.low, self.high)

    def record(self, t, next_obs, last_obs, rewards, terminated, ended):
        """Store what step `t` led to; all are NumPy, (num_envs, ...). Returns `next_obs` normalized.

        `last_obs` is `next_obs`, but the last observation where an episode ended, as `ended` says.
        """
        obs, rewards = self.normalizer.normalize(next_obs, rewards, ended)
        last_obs = obs if last_obs is next_obs else self.normalizer.scale_obs(last_obs)
        terminated = terminated if self.args.bootstrap_truncation else ended
        self.store(t, next_obs=last_obs, rewards=rewards, terminated=terminated, ended=ended)
        return obs

    def store(self, t, **columns):
        """Write columns, (num_envs, ...), as step `t` of the rollout."""
        for name, column in columns.items():
            self.rollout[name][t] = torch.as_tensor(column, device=self.device)

    def losses(self):
        """The last update's losses and statistics by name."""
        return {name: value.item() for name, value in self.last_losses.items()}

    def policy(self):
        """A copy of the deterministic policy, on the CPU."""
        return Policy(copy.deepcopy(self.agent).cpu(), self.normalizer, self.low, self.high).eval()

    def state_dict(self):
        """What the learner needs to continue bit for bit, on the CPU or on the device."""
        return {
            "networks": {name: network.state_dict() for name, network in self.networks.items()},
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
            "normalizer": self.normalizer.tensors(),
            "updates": self.updates,
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all()[:1],  # of the device in use
        }

    def load_state_dict(self, state):
        """Continue from what `state_dict` returned."""
        for name, network in self.networks.items():
            network.load_state_dict(state["networks"][name])
        for name, optimizer in self.optimizers.items():
            own_rates = {"param_groups": optimizer.state_dict()["param_groups"]}
            optimizer.load_state_dict(state["optimizers"][name] | own_rates)
        for name, tensor in self.normalizer.tensors().items():
            tensor.copy_(state["normalizer"][name])
        self.updates = state["updates"]
        torch.set_rng_state(state["rng"])
        torch.cuda.set_rng_state_all(state["cuda_rng"])


def train(args, on_start=lambda run: None):
    """Train an agent. `on_start` is for tools: it is called with the `Run` before the first step."""
    with Run(args) as run:
        check_batch(args)
        envs = make_envs(args, run.folder)
        require_bounded_actions(args, envs)
        learner = PPO(args, envs, run.device)
        run.start(envs, learner)
        obs, _ = envs.reset(seed=args.seed + run.step)
        obs, _ = learner.normalizer.normalize(obs)
        on_start(run)
        while run.unfinished():
            learning_rate = args.learning_rate
            if args.anneal_lr:
                learning_rate *= 1 - run.step / args.total_timesteps
            for t in range(args.num_steps):
                actions = learner.act(t, obs)
                next_obs, rewards, terminated, truncated, infos = envs.step(actions)
                last_obs = final_observations(next_obs, infos)
                ended = terminated | truncated
                obs = learner.record(t, next_obs, last_obs, rewards, terminated, ended)
                run.advance(rewards, ended)
            learner.update(learning_rate)
            run.log(learner.losses())


class Policy(nn.Module):
    """What policy.pt2 holds, the deterministic policy: (batch, obs_dim) to (batch, act_dim).

    It normalizes observations by the statistics of its time and clips actions to their bounds.
    """

    def __init__(self, agent, normalizer, low, high):
        super().__init__()
        self.agent = agent
        self.register_buffer("mean", torch.tensor(normalizer.mean[:-1]))
        self.register_buffer("std", torch.tensor(normalizer.std[:-1]))
        self.register_buffer("low", torch.tensor(low))
        self.register_buffer("high", torch.tensor(high))

    def forward(self, obs):
        scaled = ((obs - self.mean) / self.std).clamp(-10, 10).float()
        mean, _, _ = self.agent(scaled)
        return mean.clamp(self.low, self.high)


# ---------------------------------------------------------------------------------------------------------------------
# What the algorithm stands on: normalization, environments
# ---------------------------------------------------------------------------------------------------------------------


class Normalizer:
    """Scales observations to mean 0 and variance 1, and rewards so that discounted returns have variance 1.

    All environments share the statistics, which are float64 (Chan, Golub and LeVeque 1983). Results are in [-10, 10].
    """

    def __init__(self, num_envs, obs_dim, gamma):
        self.gamma = gamma
        self.rows = np.zeros((num_envs, obs_dim + 1))  # observation, and the discounted return so far
        self.returns = self.rows[:, -1]
        self.count = np.zeros(1)
        self.mean = np.zeros(obs_dim + 1)
        self.squares = np.zeros(obs_dim + 1)  # sum of squared differences from the mean
        self.std = np.ones(obs_dim + 1)

    def normalize(self, obs, rewards=0.0, ended=False):
        """Observations, (num_envs, obs_dim), and rewards, (num_envs,), scaled by statistics that include them."""
        self.rows[:, :-1] = obs
        self.returns[:] = self.gamma * self.returns + rewards
        errors = self.rows - self.mean
        self.count += len(errors)
        self.mean += np.add.reduce(errors) / self.count
        centered = self.rows - self.mean
        self.squares += np.add.reduce(errors * centered)
        np.sqrt(self.squares / self.count + 1e-8, out=self.std)
        self.returns[ended] = 0
        centered[:, -1] = rewards
        scaled = (centered / self.std).clip(-10, 10).astype(np.float32)
        return scaled[:, :-1], scaled[:, -1]

    def scale_obs(self, obs):
        """Observations, (n, obs_dim), scaled by the statistics as they are."""
        return ((obs - self.mean[:-1]) / self.std[:-1]).clip(-10, 10).astype(np.float32)

    def tensors(self):
        """The statistics by name, as tensors that share their memory."""
        return {name: torch.from_numpy(getattr(self, name)) for name in ("count", "mean", "squares", "std")}


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


def check_batch(args):
    """Refuse sizes that do not fit together."""
    batch = args.num_envs * args.num_steps
    if batch % args.num_minibatches or (args.norm_adv and batch == args.num_minibatches):
        refuse("num_minibatches", args.num_minibatches, f"give a divisor of num_envs * num_steps, {batch}, below it")
    if batch > args.total_timesteps:
        note(f"one iteration takes {batch} steps, more than --total-timesteps {args.total_timesteps}")


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
