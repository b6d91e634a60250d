"""Proximal Policy Optimisation (Schulman et al. 2017, arXiv:1707.06347) at full speed, in one file.

The algorithm and its defaults are CleanRL's, as in the plain twin, ppo_continuous_action.py. What makes this file fast:

1. Acting is a few NumPy calls on a host copy of the policy, without values and log-probabilities (`PPO.act`).
2. The rollout is one block of host memory, and one copy takes it to the device (`PPO.record`, `PPO.update`).
3. Values, log-probabilities and advantages of a rollout are computed at once; generalised advantage estimation is
   a linear recurrence, solved by doubling in log2(num_steps) rounds, not by a loop over steps (`PPO.prepare`, `gae`).
4. Parameters, and so gradients, are one flat vector (`unflatten`): clipping and Adam are a few operations.
5. `--compile` makes one graph of `update_minibatch`: forward, backward, clipping and Adam.
6. `--cudagraphs` replays all epochs of an iteration as one CUDA graph, with --target-kl as one each (`PPO.iterate`).

    python leanrl/ppo_continuous_action_torchcompile.py --env-id HalfCheetah-v5 --compile --cudagraphs
"""

import json
import math
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
from tensordict.nn import CudaGraphModule
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT = Path(__file__).stem
GRAPH_WARMUP = 3  # the call that captures a CUDA graph; compilation is over by then
HIDDEN = 64
BETA1, BETA2, EPS = 0.9, 0.999, 1e-5  # Adam's


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
    evaluate: str | None = None
    """checkpoint.pt of a run whose deterministic policy to evaluate, instead of training"""
    eval_episodes: int = 10
    """episodes of an evaluation"""
    measure_burnin: int = 100
    """environment steps between the end of warm-up and the start of the speed measurement"""
    compile: bool = False
    """compile the update of a minibatch with torch.compile"""
    cudagraphs: bool = False
    """replay each iteration's updates as a CUDA graph"""
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
    counts = "total_timesteps num_envs num_steps num_minibatches update_epochs eval_episodes"
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


def unflatten(flat, shapes):
    """Views of a flat parameter vector, one of each shape."""
    return [x.view(shape) for x, shape in zip(flat.split([math.prod(s) for s in shapes]), shapes, strict=True)]


class Adam:
    """Adam (Kingma and Ba 2015, arXiv:1412.6980) for one flat vector, with all its state on the device."""

    def __init__(self, parameters, lr):
        self.lr, self.m, self.v = lr, torch.zeros_like(parameters), torch.zeros_like(parameters)
        self.betas = torch.tensor((BETA1, BETA2), dtype=torch.float64, device=parameters.device)
        self.decay = torch.ones_like(self.betas)  # beta1**t and beta2**t after t steps

    def step(self, parameters, gradient):
        """Move `parameters`, in place, one step against `gradient`, whose memory is used up; both are flat."""
        self.decay.mul_(self.betas)
        self.m.lerp_(gradient, 1 - BETA1)
        self.v.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        correction1, correction2 = (1 - self.decay).unbind()
        scale = correction1 / self.lr  # in lr * m_hat / (sqrt(v_hat) + eps), moved into the denominator
        denominator = torch.sqrt(self.v, out=gradient).mul_(scale / correction2.sqrt()).add_(EPS * scale)
        parameters.addcdiv_(self.m, denominator, value=-1)


def gae(rewards, values, next_values, terminated, ended, gamma, gae_lambda):
    """Generalised advantage estimation (arXiv:1506.02438, equation 16); all tensors are (num_steps, num_envs).

    The recurrence A_t = delta_t + decay_t A_{t+1} by doubling: after k rounds A_t covers 2**k steps.
    """
    advantages = rewards + gamma * (1 - terminated) * next_values - values
    decay, covered = gamma * gae_lambda * (1 - ended), 1
    while covered < len(rewards):
        following = decay[: len(rewards) - covered] * advantages[covered:]
        advantages = torch.cat((advantages[:-covered] + following, advantages[-covered:]))
        decay, covered = decay[:-covered] * decay[covered:], 2 * covered
    return advantages


class PPO:
    """The learner. All that changes is a tensor updated in place, because a CUDA graph replays kernels, not Python."""

    def __init__(self, args, envs, device):
        self.args, self.device, space, cuda = args, device, envs.single_action_space, device.type == "cuda"
        self.compile, self.cudagraphs = args.compile, args.cudagraphs and cuda
        self.low, self.high = space.low, space.high
        self.obs_dim, self.act_dim = envs.single_observation_space.shape[0], space.shape[0]
        self.normalizer = Normalizer(envs.num_envs, self.obs_dim, args.gamma)
        hidden = [(2, self.obs_dim, HIDDEN), (2, 1, HIDDEN), (2, HIDDEN, HIDDEN), (2, 1, HIDDEN)]  # actor's, critic's
        heads = [(HIDDEN, self.act_dim), (1, self.act_dim), (HIDDEN, 1), (1, 1)]
        self.shapes = [*hidden, *heads, (1, self.act_dim)]  # the log standard deviation comes last
        self.parameters = self.init_parameters().to(device)
        self.learning_rate = torch.tensor(args.learning_rate, device=device)
        self.adam = Adam(self.parameters, self.learning_rate)
        self.columns = (self.obs_dim, self.obs_dim, self.act_dim, 3)  # obs, next_obs, action, reward and two flags
        self.host_rollout = torch.zeros(args.num_steps, envs.num_envs, sum(self.columns), pin_memory=cuda)
        self.rollout = self.host_rollout.to(device)  # on a CPU the same memory, as host_parameters
        self.host_parameters = self.parameters.cpu().pin_memory() if cuda else self.parameters
        self.host_layers = [x.numpy() for x in unflatten(self.host_parameters, self.shapes)]
        views = self.host_rollout.split(self.columns, -1)
        self.host_obs, self.host_next_obs, self.host_actions, scalars = (x.numpy() for x in views)
        self.host_rewards, self.host_terminated, self.host_ended = np.moveaxis(scalars, -1, 0)
        self.host_noise = np.empty((args.num_steps, envs.num_envs, self.act_dim), np.float32)
        self.batch = torch.zeros(args.num_steps * envs.num_envs, self.obs_dim + self.act_dim + 4, device=device)
        self.measures = torch.zeros(6, device=device)
        self.updates, self.warmup_updates = 0, GRAPH_WARMUP if self.cudagraphs else 1
        self.apply_compile_and_cudagraphs()

    def apply_compile_and_cudagraphs(self):
        """The one place where functions are compiled and graphed."""
        if self.compile:
            torch._dynamo.config.trace_autograd_ops = True  # allows torch.autograd.grad in a compiled function
            options = {"cpp_wrapper": self.device.type == "cpu"}  # calls the kernels from C++; a CUDA graph does better
            self.update_minibatch = torch.compile(self.update_minibatch, fullgraph=True, options=options)
        if self.cudagraphs:  # with --target-kl the host looks at the KL divergence between epochs
            for name in ("iterate",) if self.args.target_kl is None else ("prepare", "learn_epoch", "measure"):
                setattr(self, name, CudaGraphModule(getattr(self, name), warmup=GRAPH_WARMUP))

    def init_parameters(self):
        """One flat vector: orthogonal weights, biases of 0, and log standard deviations of 0."""
        parameters = torch.zeros(sum(math.prod(shape) for shape in self.shapes))
        for weights, gain in zip(unflatten(parameters, self.shapes)[:8:2], (2**0.5, 2**0.5, 0.01, 1.0), strict=True):
            for weight in weights.view(-1, *weights.shape[-2:]):
                nn.init.orthogonal_(weight, gain)
        return parameters

    def networks(self, parameters, obs):
        """Means of the actions, (batch, act_dim), their log standard deviation, (1, act_dim), and values, (batch,)."""
        w1, b1, w2, b2, mean_w, mean_b, value_w, value_b, log_std = unflatten(parameters, self.shapes)
        x = torch.baddbmm(b1, obs.expand(2, -1, -1), w1).tanh()
        actor, critic = torch.baddbmm(b2, x, w2).tanh().unbind()
        values = (critic * value_w.T).sum(-1) + value_b.squeeze()  # faster than a matmul with one column
        return torch.addmm(mean_b, actor, mean_w), log_std, values

    def log_prob(self, mean, log_std, actions):
        """Log-probabilities of `actions`, (batch, act_dim), under independent Gaussians: (batch,)."""
        constant = log_std.sum() + 0.5 * self.act_dim * math.log(2 * math.pi)
        return -0.5 * ((actions - mean) * (-log_std).exp()).square().sum(-1) - constant

    def loss(self, parameters, rows):
        """Policy loss (equation 7), value loss, entropy, and the log of the probability ratio, (batch,).

        `rows`, (batch, obs_dim + act_dim + 4), are as `prepare` makes them.
        """
        obs, actions, scalars = rows.split((self.obs_dim, self.act_dim, 4), -1)
        old_log_prob, old_values, advantages, returns = scalars.unbind(-1)
        mean, log_std, values = self.networks(parameters, obs)
        log_ratio, clip = self.log_prob(mean, log_std, actions) - old_log_prob, self.args.clip_coef
        ratio = log_ratio.exp()
        if self.args.norm_adv:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        policy_loss = -torch.min(advantages * ratio, advantages * ratio.clamp(1 - clip, 1 + clip)).mean()
        errors = (values - returns).square()
        if self.args.clip_vloss:
            clipped = old_values + (values - old_values).clamp(-clip, clip)
            errors = torch.max(errors, (clipped - returns).square())
        entropy = log_std.sum() + 0.5 * self.act_dim * (1 + math.log(2 * math.pi))
        return policy_loss, 0.5 * errors.mean(), entropy, log_ratio

    def update_minibatch(self, rows):
        """One step of Adam on the loss of `rows`, (minibatch, obs_dim + act_dim + 4)."""
        parameters = self.parameters.detach().requires_grad_()
        policy_loss, value_loss, entropy, _ = self.loss(parameters, rows)
        loss = policy_loss - self.args.ent_coef * entropy + self.args.vf_coef * value_loss
        (gradient,) = torch.autograd.grad(loss, parameters)
        gradient.mul_((self.args.max_grad_norm / (gradient.norm() + 1e-6)).clamp(max=1))
        self.adam.step(self.parameters, gradient)

    def prepare(self):
        """Make `batch`, (num_steps * num_envs, ...): obs, actions, log-probability, value, advantage, return."""
        obs, next_obs, actions, scalars = self.rollout.flatten(0, 1).split(self.columns, -1)
        rewards, terminated, ended = scalars.view(*self.rollout.shape[:2], 3).unbind(-1)
        mean, log_std, values = self.networks(self.parameters, obs)
        _, _, next_values = self.networks(self.parameters, next_obs)
        steps = (rewards, values.view_as(rewards), next_values.view_as(rewards), terminated, ended)
        advantages = gae(*steps, self.args.gamma, self.args.gae_lambda).flatten()
        columns = (self.log_prob(mean, log_std, actions), values, advantages, advantages + values)
        self.batch.copy_(torch.cat((obs, actions, torch.stack(columns, -1)), -1))

    def learn_epoch(self):
        """All of `batch` once, in minibatches drawn without replacement."""
        order = torch.rand(len(self.batch), device=self.device).argsort()  # randperm cannot be captured
        for rows in self.batch[order].chunk(self.args.num_minibatches):
            self.update_minibatch(rows)

    def measure(self):
        """Losses and statistics of the whole `batch`; the KL divergence is estimated by E[r - 1 - log r]."""
        policy_loss, value_loss, entropy, log_ratio = self.loss(self.parameters, self.batch)
        ratio, (advantages, returns) = log_ratio.exp(), self.batch[:, -2:].unbind(-1)
        clipfrac = ((ratio - 1).abs() > self.args.clip_coef).float().mean()
        measures = (policy_loss, value_loss, entropy, (ratio - 1 - log_ratio).mean(), clipfrac)
        self.measures.copy_(torch.stack((*measures, 1 - advantages.var() / returns.var())))

    def iterate(self):
        """All epochs over a rollout, fewer if the KL divergence exceeds --target-kl."""
        self.prepare()
        for _ in range(self.args.update_epochs):
            self.learn_epoch()
            if self.args.target_kl is not None:
                self.measure()
                if self.losses()["approx_kl"] > self.args.target_kl:
                    return
        self.measure()

    def update(self, learning_rate):
        """Learn from the rollout, and send the new policy to the host."""
        self.learning_rate.fill_(learning_rate)
        self.rollout.copy_(self.host_rollout, non_blocking=True)
        self.iterate()
        self.host_parameters.copy_(self.parameters)
        self.updates += 1

    def mean_actions(self, obs):
        """Means of the policy for normalised `obs`, on the host: numpy, (batch, obs_dim) to (batch, act_dim)."""
        w1, b1, w2, b2, mean_w, mean_b, *_ = self.host_layers
        x = np.tanh(np.tanh(obs.dot(w1[0]) + b1[0]).dot(w2[0]) + b2[0])  # for a single row faster than `@`
        return x.dot(mean_w) + mean_b

    def act(self, t, obs):
        """Sample actions for normalised `obs` in step `t`; both numpy, (num_envs, ...), the actions within bounds."""
        if t == 0:
            torch.from_numpy(self.host_noise).normal_()
            self.host_noise *= np.exp(self.host_layers[-1])
        actions = self.mean_actions(obs) + self.host_noise[t]
        self.host_obs[t], self.host_actions[t] = obs, actions
        return actions.clip(self.low, self.high)

    def record(self, t, next_obs, last_obs, rewards, terminated, ended):
        """Store what step `t` led to; returns `next_obs` normalised. `last_obs` is from `final_observations`."""
        obs, self.host_rewards[t] = self.normalizer.normalize(next_obs, rewards, ended)
        self.host_next_obs[t] = obs if last_obs is next_obs else self.normalizer.scale_obs(last_obs)
        self.host_terminated[t] = terminated if self.args.bootstrap_truncation else ended
        self.host_ended[t] = ended
        return obs

    @property
    def stage(self):
        """What the next update does, in a word or two: "training" once compiled and captured."""
        if self.updates >= self.warmup_updates:
            return "training"
        return " and ".join(["compiling"] * self.compile + ["capturing"] * self.cudagraphs) or "warming up"

    def losses(self):
        """The last update's losses and statistics by name; waits for that update."""
        names = ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac", "explained_variance")
        return dict(zip(names, self.measures.tolist(), strict=True))

    def tensors(self):
        """By name, the tensors that make up the learner."""
        moments = {f"adam.{part}": getattr(self.adam, part) for part in ("m", "v", "decay")}
        moments |= {f"normalizer.{name}": tensor for name, tensor in self.normalizer.state_dict().items()}
        return {"parameters": self.parameters, "measures": self.measures} | moments

    def state_dict(self):
        """Copies, on the CPU, of all that `load_state_dict` needs to continue bit by bit, random numbers included."""
        state = {name: tensor.to("cpu", copy=True) for name, tensor in self.tensors().items()}
        state |= {"updates": self.updates, "rng": torch.get_rng_state()}
        return state | {"cuda_rng": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None}

    def load_state_dict(self, state):
        """Become the learner that `state` was taken from; tensors are filled in place, so that graphs stay valid."""
        for name, tensor in self.tensors().items():
            tensor.copy_(state[name])
        self.host_parameters.copy_(self.parameters)
        self.updates, self.warmup_updates = state["updates"], state["updates"] + self.warmup_updates
        torch.set_rng_state(state["rng"])
        if self.device.type == "cuda" and state["cuda_rng"] is not None:
            torch.cuda.set_rng_state(state["cuda_rng"], self.device)


def train(args, on_log=lambda learner, losses, step: None):
    """Train or evaluate; SystemExit(2) on bad arguments, (130) on Ctrl-C. `on_log(learner, losses, step)` sees logs."""
    check_args(args)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    if args.cudagraphs and device.type != "cuda":
        print("warning: --cudagraphs needs a CUDA device; running without", file=sys.stderr)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    folder = Path(args.run_dir) / f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time_ns()}".replace("/", "_")
    video_dir = folder / "videos" if args.capture_video else None
    if args.evaluate:
        return evaluate(args, device, video_dir)
    step, checkpoint = 0, None
    if args.resume:
        checkpoint = load_checkpoint("resume", args)
        step = checkpoint["global_step"]
        if step >= args.total_timesteps:
            refuse("total_timesteps", args.total_timesteps, f"the checkpoint is at step {step}; give more than that")
    if args.env_backend == "envpool":
        envs = EnvPool(args, args.seed + step)
    else:
        envs = make_envs(args, args.num_envs, video_dir)
    require_continuous(args, envs)
    obs, _ = envs.reset(seed=args.seed + step)
    learner = PPO(args, envs, device)
    if checkpoint:
        learner.load_state_dict(checkpoint["learner"])
    run = Run(args, folder, device, envs, checkpoint)
    obs, _ = learner.normalizer.normalize(obs)
    try:
        while step < args.total_timesteps and not run.stop:
            learning_rate = args.learning_rate * (1 - step / args.total_timesteps if args.anneal_lr else 1)
            for t in range(args.num_steps):
                next_obs, rewards, terminated, truncated, infos = envs.step(learner.act(t, obs))
                ended = terminated | truncated
                obs = learner.record(t, next_obs, final_observations(next_obs, infos), rewards, terminated, ended)
                step += args.num_envs
                run.advance(step, rewards, ended, learner.stage)
                if run.stop:
                    break
            else:
                learner.update(learning_rate)
                losses = learner.losses()
                run.log(losses, step)
                on_log(learner, losses, step)
                if args.checkpoint_interval and step % args.checkpoint_interval < args.num_envs * args.num_steps:
                    run.save(learner, step)
    except Exception:  # Ctrl-C reaches the C++ compiler too, which fails before the first update
        if not run.stop:
            raise
    run.finish(learner, step)
    if run.stop:
        raise SystemExit(130)


def evaluate(args, device, video_dir):
    """Print mean and standard deviation of the return of a checkpoint's deterministic policy over whole episodes."""
    checkpoint = load_checkpoint("evaluate", args)
    envs = make_envs(args, 1, video_dir)
    learner = PPO(args, envs, device)
    learner.load_state_dict(checkpoint["learner"])
    returns, total, (obs, _) = [], 0.0, envs.reset(seed=args.seed)
    while len(returns) < args.eval_episodes:
        actions = learner.mean_actions(learner.normalizer.scale_obs(obs))
        obs, rewards, terminated, truncated, _ = envs.step(np.clip(actions, learner.low, learner.high))
        total += rewards[0]
        if terminated[0] or truncated[0]:
            returns, total = [*returns, total], 0.0
    envs.close()
    print(f"{len(returns)} episodes: mean return {np.mean(returns):.2f}, standard deviation {np.std(returns):.2f}")


if __name__ == "__main__":
    train(tyro.cli(Args))
