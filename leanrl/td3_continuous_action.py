"""Twin Delayed Deep Deterministic policy gradient, TD3 (Fujimoto et al. 2018, arXiv:1802.09477), in plain PyTorch.

This is the reading copy: `TD3.update` reads like the paper. The tests hold td3_continuous_action_torchcompile.py
against this file, and the speed tables measure it as their baseline. The algorithm, hyper-parameters and defaults are
CleanRL's.

    python leanrl/td3_continuous_action.py --env-id HalfCheetah-v5
"""

import copy
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
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT = Path(__file__).stem
THREADS = 0
LOG_INTERVAL = 100  # vector steps between two logs of the losses
NUM_CRITICS = 2


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
    total_timesteps: int = 1_000_000
    """environment steps (transitions) of the whole run"""
    num_envs: int = 1
    """environments that step together, one transition each"""


@dataclass
class AlgorithmArgs:
    buffer_size: int = 1_000_000
    """transitions in the replay buffer"""
    gamma: float = 0.99
    """discount factor"""
    tau: float = 0.005
    """how far an update of the target networks moves them towards the learned ones"""
    batch_size: int = 256
    """transitions in an update"""
    learning_starts: int = 25_000
    """environment steps with uniformly random actions, before the first update"""
    learning_rate: float = 3e-4
    """learning rate of the actor and of the critics"""
    policy_frequency: int = 2
    """updates of the critics from one update of the actor and the target networks to the next"""
    exploration_noise: float = 0.1
    """standard deviation of the noise on actions, where 1 is half the range of a dimension"""
    policy_noise: float = 0.2
    """standard deviation of the noise on the target policy's actions, in the same unit"""
    noise_clip: float = 0.5
    """largest noise on the target policy's actions, in the same unit"""


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
    "buffer_size": (1, 1e12),
    "gamma": (0, 1),
    "tau": (0, 1),
    "batch_size": (1, 1e12),
    "learning_starts": (0, 1e12),
    "learning_rate": (1e-12, 1),
    "policy_frequency": (1, 1e12),
    "exploration_noise": (0, 1e12),
    "policy_noise": (0, 1e12),
    "noise_clip": (0, 1e12),
}
STRUCTURAL = ("env_id", "buffer_size")  # flags that cannot change when a checkpoint is used


# ---------------------------------------------------------------------------------------------------------------------
# Networks
# ---------------------------------------------------------------------------------------------------------------------


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


class DeterministicActor(nn.Module):
    """The policy, (batch, obs_dim) to (batch, act_dim) in the environment's units, by tanh within the bounds.

    This without noise is also what `--evaluate` plays and policy.pt2 holds.
    """

    def __init__(self, obs_dim, action_space):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(obs_dim, 256),
            nn.ReLU(),
            nn.Linear(256, 256),
            nn.ReLU(),
            nn.Linear(256, action_space.shape[0]),
        )
        low, high = inner_bounds(action_space)
        self.register_buffer("low", torch.tensor(low))
        self.register_buffer("high", torch.tensor(high))
        self.register_buffer("scale", torch.tensor((high - low) / 2))
        self.register_buffer("bias", torch.tensor((high + low) / 2))

    def forward(self, obs):
        actions = self.net(obs).tanh() * self.scale + self.bias
        return actions.clamp(self.low, self.high)  # where tanh is 1, rounding can cross a bound

    def add_noise(self, actions, noise):
        """Actions plus `noise`, in units of half the range of each dimension, kept within the bounds."""
        return (actions + noise * self.scale).clamp(self.low, self.high)


def inner_bounds(action_space):
    """The bounds in float32; those in float64 may lie between two such numbers, and then the inner one counts."""
    low = action_space.low.astype(np.float32)
    high = action_space.high.astype(np.float32)
    inner_low = np.where(low < action_space.low, np.nextafter(low, high), low)
    inner_high = np.where(high > action_space.high, np.nextafter(high, low), high)
    return inner_low, inner_high


def make_policy(envs, state):
    """The deterministic policy of a learner's `state_dict`, on the CPU."""
    actor = DeterministicActor(envs.single_observation_space.shape[0], envs.single_action_space)
    actor.load_state_dict(state["networks"]["actor"])
    return actor.eval()


# ---------------------------------------------------------------------------------------------------------------------
# The learner
# ---------------------------------------------------------------------------------------------------------------------


class ReplayBuffer:
    """Transitions on the CPU, column by column; the newest overwrite the oldest."""

    def __init__(self, size, widths, device):
        """`widths` are the columns' shapes by name; batches are sampled for `device`."""
        self.size = size
        self.device = device
        self.columns = {name: torch.empty(size, *width) for name, width in widths.items()}
        self.stored = 0  # transitions ever

    def store(self, **transitions):
        """Write one transition per environment, each column numpy and (num_envs, ...)."""
        rows = (self.stored + np.arange(len(transitions["rewards"]))) % self.size
        for name, column in transitions.items():
            self.columns[name].numpy()[rows] = column  # a quarter of the time of indexing a torch tensor
        self.stored += len(rows)

    def sample(self, batch_size):
        """The columns, each (batch_size, ...), of rows drawn uniformly from those filled."""
        rows = torch.randint(min(self.stored, self.size), (batch_size,))
        return {name: column[rows].to(self.device) for name, column in self.columns.items()}

    def state_dict(self):
        """Copies of what is filled, and the count."""
        return {name: column[: self.stored].clone() for name, column in self.columns.items()} | {"stored": self.stored}

    def load_state_dict(self, state):
        """Take over `state_dict`'s transitions."""
        for name, column in self.columns.items():
            column[: len(state[name])] = state[name]
        self.stored = state["stored"]


def load_optimizer(optimizer, state):
    """Load an optimiser's state dict, but keep its learning rates: those of the arguments."""
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


class TD3:
    """The learner: networks, optimisers and replay buffer."""

    def __init__(self, args, envs, device):
        self.args = args
        self.device = device
        self.compile = False
        self.cudagraphs = False
        obs_dim = envs.single_observation_space.shape[0]
        act_dim = envs.single_action_space.shape[0]
        with device:
            self.actor = DeterministicActor(obs_dim, envs.single_action_space)
            self.critics = nn.ModuleList([Critic(obs_dim, act_dim) for _ in range(NUM_CRITICS)])
            self.target_actor = copy.deepcopy(self.actor)
            self.target_critics = copy.deepcopy(self.critics)
        self.optimizers = {
            "actor": torch.optim.Adam(self.actor.parameters(), lr=args.learning_rate),
            "critics": torch.optim.Adam(self.critics.parameters(), lr=args.learning_rate),
        }
        widths = {
            "obs": (obs_dim,),
            "next_obs": (obs_dim,),
            "actions": (act_dim,),
            "rewards": (),
            "terminated": (),
        }
        self.replay = ReplayBuffer(args.buffer_size, widths, device)
        self.updates = 0
        self.last_losses = {}

    @torch.no_grad()
    def act(self, obs):
        """Actions for `obs`, with exploration noise; both numpy, (num_envs, ...)."""
        actions = self.actor(torch.as_tensor(obs, dtype=torch.float32, device=self.device))
        noise = self.args.exploration_noise * torch.randn_like(actions)
        return self.actor.add_noise(actions, noise).cpu().numpy()

    def update(self):
        """Algorithm 1 of the paper: one step on the critics and, on its turn, on the actor and the target networks."""
        batch = self.replay.sample(self.args.batch_size)
        obs, next_obs = batch["obs"], batch["next_obs"]
        with torch.no_grad():
            noise = self.args.policy_noise * torch.randn_like(batch["actions"])
            noise = noise.clamp(-self.args.noise_clip, self.args.noise_clip)
            next_actions = self.actor.add_noise(self.target_actor(next_obs), noise)  # target policy smoothing
            next_q = torch.stack([critic(next_obs, next_actions) for critic in self.target_critics]).amin(0)
            target = batch["rewards"] + (1 - batch["terminated"]) * self.args.gamma * next_q
        q = torch.stack([critic(obs, batch["actions"]) for critic in self.critics])
        loss = (q - target).square().mean(-1).sum()
        self.optimizers["critics"].zero_grad()
        loss.backward()
        self.optimizers["critics"].step()
        self.last_losses |= {f"qf{i + 1}_values": values for i, values in enumerate(q.detach().mean(-1))}
        self.last_losses |= {"qf_loss": loss.detach()}

        if self.updates % self.args.policy_frequency == 0:
            self.update_actor(obs)
            self.update_target(self.actor, self.target_actor)
            self.update_target(self.critics, self.target_critics)
        self.updates += 1

    def update_actor(self, obs):
        """One step on the actor by the deterministic policy gradient, which takes the first critic alone."""
        loss = -self.critics[0](obs, self.actor(obs)).mean()
        self.optimizers["actor"].zero_grad()
        loss.backward()
        self.optimizers["actor"].step()
        self.last_losses["actor_loss"] = loss.detach()

    def update_target(self, network, target_network):
        """Move a target network towards the learned one, by tau of their distance."""
        for weights, target in zip(network.parameters(), target_network.parameters(), strict=True):
            target.data.lerp_(weights.data, self.args.tau)

    def losses(self):
        """The last update's losses by name."""
        return {name: value.item() for name, value in self.last_losses.items()}

    def networks(self):
        """The networks by name."""
        return {
            "actor": self.actor,
            "critics": self.critics,
            "target_actor": self.target_actor,
            "target_critics": self.target_critics,
        }

    def state_dict(self):
        """All that `load_state_dict` needs to continue bit by bit, random numbers included."""
        return {
            "networks": {name: network.state_dict() for name, network in self.networks().items()},
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
            "replay": self.replay.state_dict(),
            "updates": self.updates,
        } | rng_state(self.device)

    def load_state_dict(self, state):
        """Become the learner that `state` was taken from, with this one's learning rates."""
        for name, network in self.networks().items():
            network.load_state_dict(state["networks"][name])
        for name, optimizer in self.optimizers.items():
            load_optimizer(optimizer, state["optimizers"][name])
        self.replay.load_state_dict(state["replay"])
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


def train(args, on_log=lambda learner, losses, step: None, on_start=lambda run: None):
    """Train; SystemExit(2) on bad arguments, (130) on Ctrl-C.

    For tools: `on_start(run)` is called once, `on_log(learner, losses, step)` before each log.
    """
    device = prepare(args)
    checkpoint = load_resumed(args)
    step = checkpoint["global_step"]
    folder = run_folder(args)
    envs = make_envs(args, args.num_envs, folder / "videos" if args.capture_video else None)
    require_spaces(args, envs, gym.spaces.Box)
    require_memory(args, device, envs)
    envs.action_space.seed(args.seed + step)
    obs, _ = envs.reset(seed=args.seed + step)
    learner = TD3(args, envs, device)
    restore(args, learner, checkpoint)
    with Run(args, learner, envs, folder, checkpoint) as run:
        on_start(run)
        while step < args.total_timesteps and not run.stop:
            actions = envs.action_space.sample() if step < args.learning_starts else learner.act(obs)
            next_obs, rewards, terminated, truncated, infos = envs.step(actions)
            last_obs = final_observations(next_obs, infos)
            learner.replay.store(obs=obs, next_obs=last_obs, actions=actions, rewards=rewards, terminated=terminated)
            obs = next_obs
            step += args.num_envs
            learning = step > args.learning_starts
            run.advance(step, rewards, terminated | truncated, "training" if learning else "exploring")
            if learning:
                learner.update()
            if learning and step // args.num_envs % LOG_INTERVAL == 0:
                losses = learner.losses()
                on_log(learner, losses, step)
                run.log(losses)
            if args.checkpoint_interval and step % args.checkpoint_interval < args.num_envs:
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
