"""Proximal Policy Optimisation (Schulman et al. 2017, arXiv:1707.06347) in plain PyTorch: the reading copy.

`PPO.update` and `PPO.loss` read like the paper. The tests hold ppo_continuous_action_torchcompile.py against this file,
and the speed tables measure it as their baseline. The details are those of "The 37 implementation details of PPO"
(Huang et al. 2022), hyper-parameters and defaults CleanRL's.

    python leanrl/ppo_continuous_action.py --env-id HalfCheetah-v5
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import batch_space
from torch import nn
from torch.distributions import Normal
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT = Path(__file__).stem


@dataclass
class Args:
    exp_name: str = SCRIPT
    """name of the experiment, part of the run's folder name"""
    seed: int = 1
    """seed of the environments, the action space, numpy and torch"""
    torch_deterministic: bool = True
    """ask cuDNN for deterministic kernels"""
    cuda: bool = True
    """use a CUDA device if there is one"""
    track: bool = False
    """also log to Weights & Biases"""
    wandb_project_name: str = "leanrl"
    """wandb project"""
    wandb_entity: str | None = None
    """wandb team"""
    capture_video: bool = False
    """record mp4 videos of the first environment into the run's folder"""
    run_dir: str = "runs"
    """folder that receives one folder per run"""
    checkpoint_interval: int = 0
    """environment steps between two checkpoints (0: only the one that ends every run)"""
    resume: str | None = None
    """checkpoint.pt of a run to continue, up to --total-timesteps"""
    measure_burnin: int = 100
    """environment steps between the end of warm-up and the start of the speed measurement"""
    env_id: str = "HalfCheetah-v5"
    """gymnasium environment"""
    env_backend: Literal["gymnasium", "envpool"] = "gymnasium"
    """gymnasium's vector environments, one after the other, or envpool's, in threads: for many environments"""
    total_timesteps: int = 1_000_000
    """environment steps (transitions) of the whole run"""
    num_envs: int = 1
    """environments that step together, one transition each"""
    learning_rate: float = 3e-4
    """learning rate of the first iteration"""
    num_steps: int = 2048
    """steps of each environment in an iteration"""
    anneal_lr: bool = True
    """lower the learning rate linearly, towards 0 at the end of the run"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of generalised advantage estimation"""
    num_minibatches: int = 32
    """minibatches in an epoch"""
    update_epochs: int = 10
    """passes over an iteration's transitions"""
    norm_adv: bool = True
    """normalise advantages to mean 0 and variance 1 in each minibatch"""
    clip_coef: float = 0.2
    """how far the probability ratio may be from 1 (epsilon in the paper)"""
    clip_vloss: bool = True
    """clip the change of the values by --clip-coef too"""
    ent_coef: float = 0.0
    """coefficient of the entropy in the loss"""
    vf_coef: float = 0.5
    """coefficient of the value loss"""
    max_grad_norm: float = 0.5
    """largest norm of a gradient, which is scaled down to it"""
    target_kl: float | None = None
    """end an iteration's updates after the epoch in which the approximate KL divergence exceeds this"""
    bootstrap_truncation: bool = True
    """value what would have followed a truncated episode by the critic; without, count truncation as terminal"""


def check_args(args):
    """Refuse values with which no run can work."""
    counts = "total_timesteps num_envs num_steps num_minibatches update_epochs"
    limits = dict.fromkeys(counts.split(), (1, 1e12)) | dict.fromkeys(("gamma", "gae_lambda"), (0, 1))
    limits |= dict.fromkeys(("checkpoint_interval", "measure_burnin", "ent_coef", "vf_coef"), (0, 1e12))
    limits |= dict.fromkeys(("clip_coef", "max_grad_norm", "target_kl"), (1e-12, 1e12))
    limits |= {"seed": (0, 2**32 - 1), "learning_rate": (1e-12, 1)}
    for name, (low, high) in limits.items():
        if getattr(args, name) is not None and not low <= getattr(args, name) <= high:
            refuse(name, getattr(args, name), f"give a number from {low} to {high:g}")
    batch = args.num_envs * args.num_steps
    if batch % args.num_minibatches or (args.norm_adv and batch == args.num_minibatches):
        refuse("num_minibatches", args.num_minibatches, f"give a divisor of num_envs * num_steps, {batch}, below it")
    if args.capture_video and args.env_backend == "envpool":
        refuse("env_backend", args.env_backend, "envpool records no video; leave out --capture-video")


def refuse(name, value, remedy):
    """End the program with exit code 2 and one line that names the argument, its value and the remedy."""
    print(f"error: --{name.replace('_', '-')} {value}: {remedy}", file=sys.stderr)
    raise SystemExit(2)


def make_envs(args, num_envs, video_dir=None):
    """Make `num_envs` copies of the environment that step together; `video_dir` receives mp4s of the first one."""

    def make_env(video):
        env = gym.make(args.env_id, **{"render_mode": "rgb_array"} if video else {})
        return gym.wrappers.RecordVideo(env, str(video_dir), disable_logger=True) if video else env

    try:
        thunks = [partial(make_env, video_dir is not None and i == 0) for i in range(num_envs)]
        return SyncVectorEnv(thunks, autoreset_mode=AutoresetMode.SAME_STEP)  # true last obs in infos["final_obs"]
    except (gym.error.Error, ImportError, OSError) as error:
        name = "capture_video" if video_dir is not None and args.env_id in gym.registry else "env_id"
        name = "run_dir" if isinstance(error, OSError) else name
        refuse(name, getattr(args, name), f"correct the name or install what is missing: {error}".splitlines()[0])


def require_continuous(args, envs):
    """Refuse environments whose observations and bounded actions are not vectors."""
    spaces = (envs.single_observation_space, envs.single_action_space)
    vectors = all(isinstance(space, gym.spaces.Box) and len(space.shape) == 1 for space in spaces)
    if not vectors or not envs.single_action_space.is_bounded():
        refuse("env_id", args.env_id, "choose an environment whose observations and bounded actions are vectors")


def final_observations(next_obs, infos):
    """What the actions led to, (num_envs, obs_dim): `next_obs`, but the true last one where an episode ended."""
    if "_final_obs" in infos:
        ended, next_obs = infos["_final_obs"], next_obs.copy()
        next_obs[ended] = np.stack(infos["final_obs"][ended])
    return next_obs


class EnvPool(gym.vector.VectorEnv):
    """envpool's environments as a gymnasium vector environment that resets within the step that ends an episode."""

    def __init__(self, args, seed):
        self.metadata, self.num_envs = {"autoreset_mode": AutoresetMode.SAME_STEP}, args.num_envs
        try:
            import envpool

            seed %= 2**31  # envpool's limit
            self.pool = envpool.make(args.env_id, env_type="gymnasium", num_envs=args.num_envs, seed=seed)
        except (ImportError, AssertionError) as error:
            refuse("env_id", args.env_id, f"install envpool, or name one of its environments: {error}".splitlines()[0])
        self.single_observation_space, self.single_action_space = self.pool.observation_space, self.pool.action_space
        self.action_space = batch_space(self.single_action_space, args.num_envs)

    def reset(self, *, seed=None, options=None):
        """First observations, (num_envs, obs_dim), and no infos; the seed was given when it was made."""
        return self.pool.reset()[0], {}

    def step(self, actions):
        """As any vector environment in SAME_STEP mode, for actions (num_envs, act_dim)."""
        obs, rewards, terminated, truncated, _ = self.pool.step(actions.astype(self.single_action_space.dtype))
        ended, infos = terminated | truncated, {}
        if ended.any():  # by itself envpool would reset in the next step, and ignore that step's action
            obs, infos = obs.copy(), {"final_obs": obs, "_final_obs": ended}
            obs[ended] = self.pool.reset(np.flatnonzero(ended))[0]
        return obs, rewards, terminated, truncated, infos


def load_checkpoint(name, args):
    """Read what `Run.save` wrote, onto the CPU, from the path in argument `name`; refuse what this run cannot use."""
    path, wanted = getattr(args, name), {"script": SCRIPT, "env_id": args.env_id}
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        found = {key: checkpoint[key] for key in wanted}
    except Exception as error:
        refuse(name, path, f"give the intact checkpoint.pt of a run ({type(error).__name__} on reading this)")
    if found != wanted:
        refuse(name, path, f"it is from {found['script']}.py and {found['env_id']}; use it with these")
    return checkpoint


class Run:
    """A run from outside: folder (config, events, checkpoint, summary), episodes, progress bar, clock, and Ctrl-C."""

    def __init__(self, args, folder, device, envs, checkpoint):
        self.args, self.folder, self.device, self.envs, checkpoint = args, folder, device, envs, checkpoint or {}
        self.first_step, self.episodes = checkpoint.get("global_step", 0), checkpoint.get("episodes", 0)
        self.last_returns = checkpoint.get("returns", [])  # of the last 20 episodes
        self.returns, self.begins = np.zeros(args.num_envs), [self.first_step] * args.num_envs  # of those under way
        self.start, self.stop, self.warm_step, self.steady = time.perf_counter(), False, None, None
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            refuse("run_dir", args.run_dir, f"name a folder that can be written ({error.strerror})")
        packages = [p for p in ("torch", "tensordict", "gymnasium", "envpool", "mujoco", "numpy") if p in sys.modules]
        self.versions = {"python": sys.version.split()[0]} | {p: sys.modules[p].__version__ for p in packages}
        self.device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        command, here = "git rev-parse HEAD", Path(__file__).parent
        git = subprocess.run(command, shell=True, cwd=here, capture_output=True, text=True)
        machine = {"device": self.device_name, "cores": os.cpu_count(), "git_commit": git.stdout.strip() or None}
        (folder / "config.json").write_text(json.dumps(vars(args) | {"versions": self.versions} | machine, indent=2))
        if args.track:
            import wandb

            names = {"project": args.wandb_project_name, "entity": args.wandb_entity, "name": folder.name}
            wandb.init(**names, config=vars(args), dir=folder, sync_tensorboard=True)
        self.writer = SummaryWriter(folder)
        self.bar = tqdm(total=args.total_timesteps, initial=self.first_step, unit="step", dynamic_ncols=True)
        self.previous_handler = signal.signal(signal.SIGINT, self.on_interrupt)

    def on_interrupt(self, signum, frame):
        self.stop = True  # once the step in flight is done; a second Ctrl-C interrupts at once
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def advance(self, step, rewards, ended, stage):
        """Count one vector step: move the bar, log the episodes that ended, and time the stage "training"."""
        self.bar.update(step - self.bar.n)
        if self.bar.desc != f"{stage}: ":
            self.bar.set_description(stage)
        self.returns += rewards
        for i in ended.nonzero()[0]:  # cheaper than np.flatnonzero
            self.writer.add_scalar("charts/episodic_return", self.returns[i], step)
            self.writer.add_scalar("charts/episodic_length", (step - self.begins[i]) // self.args.num_envs, step)
            self.last_returns = [*self.last_returns[-19:], float(self.returns[i])]
            self.episodes, self.returns[i], self.begins[i] = self.episodes + 1, 0, step
            self.bar.set_postfix({"return": f"{np.mean(self.last_returns):.1f}"}, refresh=False)
        if stage == "training" and self.steady is None:
            self.warm_step = self.warm_step or step
            if step >= self.warm_step + self.args.measure_burnin:
                self.steady = (step, time.perf_counter())

    def log(self, losses, step):
        """Write one row of losses, and the average speed so far."""
        for name, value in losses.items():
            self.writer.add_scalar(f"losses/{name}", value, step)
        self.writer.add_scalar("charts/SPS", (step - self.first_step) / (time.perf_counter() - self.start), step)

    def save(self, learner, step):
        """Write checkpoint.pt, which is at every moment either the old one or the new one, whole."""
        checkpoint = {"script": SCRIPT, "env_id": self.args.env_id, "global_step": step, "episodes": self.episodes}
        temporary = self.folder / "checkpoint.pt.tmp"
        with open(temporary, "wb") as file:
            torch.save(checkpoint | {"returns": self.last_returns, "learner": learner.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.folder / "checkpoint.pt")

    def finish(self, learner, step):
        """End the run, however it came to its end, with a checkpoint and a summary."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        end = time.perf_counter()
        self.save(learner, step)
        steady_step, steady_time = self.steady or (step, end)
        summary = {"script": SCRIPT, "env_id": self.args.env_id, "seed": self.args.seed, "num_envs": self.args.num_envs}
        summary |= {"device": self.device_name, "compile": learner.compile, "cudagraphs": learner.cudagraphs}
        summary |= {"global_step": step, "episodes": self.episodes, "wall_seconds": end - self.start}
        summary |= {"episodic_return": float(np.mean(self.last_returns)) if self.last_returns else None}
        summary |= {"steady_sps": (step - steady_step) / (end - steady_time) if step > steady_step else None}
        summary |= {"warmup_seconds": steady_time - self.start if self.steady else None, "versions": self.versions}
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=2))
        for closing in (self.envs, self.writer, self.bar):
            closing.close()
        signal.signal(signal.SIGINT, self.previous_handler)


class Normalizer:
    """Scales observations to mean 0 and variance 1, and rewards so that discounted returns have variance 1.

    All environments share the statistics, kept in float64 (Chan, Golub and LeVeque 1983); results are in [-10, 10].
    """

    def __init__(self, num_envs, obs_dim, gamma):
        self.gamma, self.rows = gamma, np.zeros((num_envs, obs_dim + 1))  # observation and discounted return so far
        self.count, self.mean, self.squares, self.std = np.zeros(1), *np.zeros((3, obs_dim + 1))

    def normalize(self, obs, rewards=0.0, ended=False):
        """Take in a step's observations, (num_envs, obs_dim), rewards, episode ends; returns the first two scaled."""
        self.rows[:, :-1] = obs
        self.rows[:, -1] = self.gamma * self.rows[:, -1] + rewards
        errors = self.rows - self.mean
        self.count += len(errors)
        self.mean += np.add.reduce(errors) / self.count
        centred = self.rows - self.mean
        self.squares += np.add.reduce(errors * centred)
        np.sqrt(self.squares / self.count + 1e-8, out=self.std)
        self.rows[ended, -1] = 0
        centred[:, -1] = rewards
        scaled = (centred / self.std).clip(-10, 10).astype(np.float32)
        return scaled[:, :-1], scaled[:, -1]

    def scale_obs(self, obs):
        """Normalise observations, (n, obs_dim), and leave the statistics as they are."""
        return ((obs - self.mean[:-1]) / self.std[:-1]).clip(-10, 10).astype(np.float32)

    def state_dict(self):
        """The statistics, as tensors that share their memory."""
        return {name: torch.from_numpy(getattr(self, name)) for name in ("count", "mean", "squares", "std")}


def linear(inputs, outputs, gain=2**0.5):
    """A linear layer with orthogonal weights and no bias at first."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """A Gaussian policy, whose log standard deviation does not depend on the observation, and a value function."""

    def __init__(self, obs_dim, act_dim):
        super().__init__()
        self.actor = nn.Sequential(linear(obs_dim, 64), nn.Tanh(), linear(64, 64), nn.Tanh(), linear(64, act_dim, 0.01))
        self.log_std = nn.Parameter(torch.zeros(1, act_dim))
        self.critic = nn.Sequential(linear(obs_dim, 64), nn.Tanh(), linear(64, 64), nn.Tanh(), linear(64, 1, 1.0))

    def policy(self, obs):
        """Distribution of the actions, (..., act_dim), for observations, (..., obs_dim)."""
        mean = self.actor(obs)
        return Normal(mean, self.log_std.exp().expand_as(mean), validate_args=False)

    def value(self, obs):
        """Values of observations, (..., obs_dim) to (...)."""
        return self.critic(obs).squeeze(-1)


class PPO:
    """The learner: networks, optimiser, normaliser and the storage of one iteration."""

    def __init__(self, args, envs, device):
        self.args, self.device, self.compile, self.cudagraphs = args, device, False, False
        obs_dim, action_space = envs.single_observation_space.shape[0], envs.single_action_space
        self.low, self.high = action_space.low, action_space.high
        self.normalizer = Normalizer(envs.num_envs, obs_dim, args.gamma)
        with device:
            self.agent = Agent(obs_dim, action_space.shape[0])
        self.optimizer = torch.optim.Adam(self.agent.parameters(), lr=args.learning_rate, eps=1e-5)
        widths = {"obs": (obs_dim,), "next_obs": (obs_dim,), "actions": action_space.shape}
        widths |= dict.fromkeys(("log_prob", "values", "rewards", "terminated", "ended"), ())
        steps = (args.num_steps, envs.num_envs)
        self.storage = {name: torch.zeros(*steps, *width, device=device) for name, width in widths.items()}
        self.updates, self.losses = 0, {}

    def store(self, t, **columns):
        """Write one row per environment, each column numpy or torch and (num_envs, ...), as step `t`."""
        for name, column in columns.items():
            self.storage[name][t] = torch.as_tensor(column, device=self.device)

    @torch.no_grad()
    def act(self, t, obs):
        """Sample actions for normalised `obs` in step `t`; both numpy, (num_envs, ...), the actions within bounds."""
        obs = torch.as_tensor(obs, device=self.device)
        policy = self.agent.policy(obs)
        actions = policy.sample()
        self.store(t, obs=obs, actions=actions, log_prob=policy.log_prob(actions).sum(-1), values=self.agent.value(obs))
        return np.clip(actions.cpu().numpy(), self.low, self.high)

    def record(self, t, next_obs, last_obs, rewards, terminated, ended):
        """Store what step `t` led to; returns `next_obs` normalised. `last_obs` is from `final_observations`."""
        obs, rewards = self.normalizer.normalize(next_obs, rewards, ended)
        terminated = terminated if self.args.bootstrap_truncation else ended
        last_obs = obs if last_obs is next_obs else self.normalizer.scale_obs(last_obs)
        self.store(t, next_obs=last_obs, rewards=rewards, terminated=terminated, ended=ended)
        return obs

    @torch.no_grad()
    def advantages(self):
        """Generalised advantage estimation (arXiv:1506.02438, equation 16), (num_steps, num_envs)."""
        steps, gamma = self.storage, self.args.gamma
        next_values = self.agent.value(steps["next_obs"]) * (1 - steps["terminated"])
        errors = steps["rewards"] + gamma * next_values - steps["values"]
        advantages, following = torch.zeros_like(errors), 0
        for t in reversed(range(self.args.num_steps)):
            following = errors[t] + gamma * self.args.gae_lambda * (1 - steps["ended"][t]) * following
            advantages[t] = following
        return advantages

    def loss(self, rows):
        """Policy loss (equation 7), value loss, entropy, and the log of the probability ratio, (batch,), of `rows`.

        These are columns by name, (batch, ...): obs, actions, log_prob, values, advantages, returns.
        """
        policy, clip = self.agent.policy(rows["obs"]), self.args.clip_coef
        log_ratio = policy.log_prob(rows["actions"]).sum(-1) - rows["log_prob"]
        ratio, advantages = log_ratio.exp(), rows["advantages"]
        if self.args.norm_adv:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        policy_loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip, 1 + clip)).mean()
        values = self.agent.value(rows["obs"])
        errors = (values - rows["returns"]) ** 2
        if self.args.clip_vloss:
            clipped = rows["values"] + (values - rows["values"]).clamp(-clip, clip)
            errors = torch.max(errors, (clipped - rows["returns"]) ** 2)
        return policy_loss, 0.5 * errors.mean(), policy.entropy().sum(-1).mean(), log_ratio

    def update_minibatch(self, rows):
        """One step of Adam on the loss of `rows`."""
        policy_loss, value_loss, entropy, _ = self.loss(rows)
        loss = policy_loss - self.args.ent_coef * entropy + self.args.vf_coef * value_loss
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.agent.parameters(), self.args.max_grad_norm)
        self.optimizer.step()

    @torch.no_grad()
    def measure(self, batch):
        """Losses and statistics of the whole `batch`, by name; the KL divergence is estimated by E[r - 1 - log r]."""
        policy_loss, value_loss, entropy, log_ratio = self.loss(batch)
        ratio, errors = log_ratio.exp(), batch["returns"] - batch["values"]
        losses = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        losses |= {"approx_kl": (ratio - 1 - log_ratio).mean()}
        losses |= {"clipfrac": ((ratio - 1).abs() > self.args.clip_coef).float().mean()}
        return losses | {"explained_variance": 1 - errors.var() / batch["returns"].var()}

    def update(self, learning_rate):
        """All epochs over the stored iteration, each in minibatches drawn without replacement."""
        self.optimizer.param_groups[0]["lr"] = learning_rate
        advantages = self.advantages()
        batch = {name: self.storage[name] for name in ("obs", "actions", "log_prob", "values")}
        batch |= {"advantages": advantages, "returns": advantages + self.storage["values"]}
        batch = {name: column.flatten(0, 1) for name, column in batch.items()}
        size = advantages.numel()
        for _ in range(self.args.update_epochs):
            for rows in torch.randperm(size, device=self.device).split(size // self.args.num_minibatches):
                self.update_minibatch({name: column[rows] for name, column in batch.items()})
            if self.args.target_kl is not None and self.measure(batch)["approx_kl"] > self.args.target_kl:
                break
        self.losses = self.measure(batch)
        self.updates += 1

    def state_dict(self):
        """All that `load_state_dict` needs to continue bit by bit, random numbers included."""
        state = {name: getattr(self, name).state_dict() for name in ("agent", "optimizer", "normalizer")}
        state |= {"updates": self.updates, "rng": torch.get_rng_state()}
        return state | {"cuda_rng": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None}

    def load_state_dict(self, state):
        """Become the learner that `state` was taken from."""
        self.agent.load_state_dict(state["agent"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name, tensor in self.normalizer.state_dict().items():
            tensor.copy_(state["normalizer"][name])
        self.updates = state["updates"]
        torch.set_rng_state(state["rng"])
        if self.device.type == "cuda" and state["cuda_rng"] is not None:
            torch.cuda.set_rng_state(state["cuda_rng"], self.device)


def train(args, on_log=lambda learner, losses, step: None):
    """Train; raise SystemExit(2) on bad arguments, (130) on Ctrl-C. `on_log(learner, losses, step)` sees the logs."""
    check_args(args)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    folder = Path(args.run_dir) / f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time_ns()}".replace("/", "_")

    step, checkpoint = 0, None
    if args.resume:
        checkpoint = load_checkpoint("resume", args)
        step = checkpoint["global_step"]
        if step >= args.total_timesteps:
            refuse("total_timesteps", args.total_timesteps, f"the checkpoint is at step {step}; give more than that")
    if args.env_backend == "envpool":
        envs = EnvPool(args, args.seed + step)
    else:
        envs = make_envs(args, args.num_envs, folder / "videos" if args.capture_video else None)
    require_continuous(args, envs)
    obs, _ = envs.reset(seed=args.seed + step)
    learner = PPO(args, envs, device)
    if checkpoint:
        learner.load_state_dict(checkpoint["learner"])
    run = Run(args, folder, device, envs, checkpoint)
    obs, _ = learner.normalizer.normalize(obs)
    while step < args.total_timesteps and not run.stop:
        learning_rate = args.learning_rate * (1 - step / args.total_timesteps if args.anneal_lr else 1)
        for t in range(args.num_steps):
            next_obs, rewards, terminated, truncated, infos = envs.step(learner.act(t, obs))
            ended = terminated | truncated
            obs = learner.record(t, next_obs, final_observations(next_obs, infos), rewards, terminated, ended)
            step += args.num_envs
            run.advance(step, rewards, ended, "training" if learner.updates else "warming up")
            if run.stop:
                break
        else:
            learner.update(learning_rate)
            losses = {name: value.item() for name, value in learner.losses.items()}
            run.log(losses, step)
            on_log(learner, losses, step)
            if args.checkpoint_interval and step % args.checkpoint_interval < args.num_envs * args.num_steps:
                run.save(learner, step)
    run.finish(learner, step)
    if run.stop:
        raise SystemExit(130)


if __name__ == "__main__":
    train(tyro.cli(Args))
