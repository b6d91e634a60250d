"""Twin Delayed Deep Deterministic policy gradient, TD3 (Fujimoto et al. 2018, arXiv:1802.09477), in plain PyTorch.

This is the reading copy: `TD3.update` reads like the paper. The tests hold td3_continuous_action_torchcompile.py
against this file, and the speed tables measure it as their baseline. The algorithm, hyper-parameters and defaults are
CleanRL's.

    python leanrl/td3_continuous_action.py --env-id HalfCheetah-v5
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

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT = Path(__file__).stem
LOG_INTERVAL = 100  # vector steps between two logs of the losses


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
    total_timesteps: int = 1_000_000
    """environment steps (transitions) of the whole run"""
    num_envs: int = 1
    """environments that step together, one transition each"""
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


def check_args(args):
    """Refuse values with which no run can work."""
    limits = dict.fromkeys(("learning_starts", "checkpoint_interval", "measure_burnin"), (0, 1e12))
    limits |= dict.fromkeys(("exploration_noise", "policy_noise", "noise_clip"), (0, 1e12))
    limits |= dict.fromkeys(("total_timesteps", "num_envs", "batch_size", "policy_frequency"), (1, 1e12))
    limits |= {"seed": (0, 2**32 - 1), "buffer_size": (args.num_envs, 1e12), "gamma": (0, 1), "tau": (0, 1)}
    limits |= {"learning_rate": (1e-12, 1)}
    for name, (low, high) in limits.items():
        if not low <= getattr(args, name) <= high:
            refuse(name, getattr(args, name), f"give a number from {low} to {high:g}")


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


class Critic(nn.Module):
    """Q(s, a): (batch, obs_dim) and (batch, act_dim) to (batch,)."""

    def __init__(self, obs_dim, act_dim):
        super().__init__()
        self.fc1 = nn.Linear(obs_dim + act_dim, 256)
        self.fc2 = nn.Linear(256, 256)
        self.fc3 = nn.Linear(256, 1)

    def forward(self, obs, actions):
        x = F.relu(self.fc1(torch.cat((obs, actions), 1)))
        return self.fc3(F.relu(self.fc2(x))).squeeze(-1)


class DeterministicActor(nn.Module):
    """The policy, (batch, obs_dim) to (batch, act_dim), squashed by tanh into the bounds of the action space."""

    def __init__(self, obs_dim, action_space):
        super().__init__()
        self.fc1 = nn.Linear(obs_dim, 256)
        self.fc2 = nn.Linear(256, 256)
        self.fc3 = nn.Linear(256, action_space.shape[0])
        for name, bound in (("low", action_space.low), ("high", action_space.high)):
            self.register_buffer(name, torch.tensor(bound, dtype=torch.float32))
        self.register_buffer("scale", torch.tensor((action_space.high - action_space.low) / 2, dtype=torch.float32))
        self.register_buffer("bias", torch.tensor((action_space.high + action_space.low) / 2, dtype=torch.float32))

    def forward(self, obs):
        x = F.relu(self.fc2(F.relu(self.fc1(obs))))
        return torch.tanh(self.fc3(x)) * self.scale + self.bias

    def with_noise(self, obs, noise):
        """Actions plus `noise`, in units of half the range of each dimension, kept within the bounds."""
        return torch.clamp(self(obs) + noise * self.scale, self.low, self.high)


class TD3:
    """The learner: networks, optimisers and replay buffer."""

    def __init__(self, args, envs, device):
        self.args, self.device, self.compile, self.cudagraphs = args, device, False, False
        obs_dim, act_dim = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
        with device:
            self.actor, self.actor_target = (DeterministicActor(obs_dim, envs.single_action_space) for _ in range(2))
            self.qf1, self.qf2 = Critic(obs_dim, act_dim), Critic(obs_dim, act_dim)
            self.qf1_target, self.qf2_target = Critic(obs_dim, act_dim), Critic(obs_dim, act_dim)
        self.learned_and_target = (
            (self.actor, self.actor_target),
            (self.qf1, self.qf1_target),
            (self.qf2, self.qf2_target),
        )
        for learned, target in self.learned_and_target:
            target.load_state_dict(learned.state_dict())
        self.q_optimizer = torch.optim.Adam([*self.qf1.parameters(), *self.qf2.parameters()], lr=args.learning_rate)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=args.learning_rate)
        widths = {"obs": (obs_dim,), "next_obs": (obs_dim,), "actions": (act_dim,), "rewards": (), "terminated": ()}
        self.buffer = {name: torch.empty(args.buffer_size, *width) for name, width in widths.items()}
        self.stored = self.updates = 0
        self.losses = {}

    def store(self, **transitions):
        """Write one transition per environment, each column numpy and (num_envs, ...), over the oldest ones."""
        for name, column in transitions.items():
            rows = (self.stored + np.arange(len(column))) % self.args.buffer_size
            self.buffer[name][rows] = torch.as_tensor(column, dtype=torch.float32)
        self.stored += len(column)

    def sample(self):
        """A batch drawn uniformly from the buffer, on the device."""
        rows = torch.randint(min(self.stored, self.args.buffer_size), (self.args.batch_size,))
        return {name: column[rows].to(self.device) for name, column in self.buffer.items()}

    @torch.no_grad()
    def act(self, obs):
        """Actions for `obs`, with exploration noise; both numpy, (num_envs, ...)."""
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.device)
        noise = self.args.exploration_noise * torch.randn(len(obs), len(self.actor.scale), device=self.device)
        return self.actor.with_noise(obs, noise).cpu().numpy()

    def update(self):
        """Algorithm 1 of the paper: one step on the critics and, on its turn, on the actor and the target networks."""
        batch, clip = self.sample(), self.args.noise_clip
        obs, next_obs = batch["obs"], batch["next_obs"]
        with torch.no_grad():
            noise = (self.args.policy_noise * torch.randn_like(batch["actions"])).clamp(-clip, clip)
            next_actions = self.actor_target.with_noise(next_obs, noise)  # target policy smoothing
            next_q = torch.min(self.qf1_target(next_obs, next_actions), self.qf2_target(next_obs, next_actions))
            target = batch["rewards"] + (1 - batch["terminated"]) * self.args.gamma * next_q
        qf1, qf2 = self.qf1(obs, batch["actions"]), self.qf2(obs, batch["actions"])
        qf_loss = F.mse_loss(qf1, target) + F.mse_loss(qf2, target)
        self.q_optimizer.zero_grad()
        qf_loss.backward()
        self.q_optimizer.step()
        self.losses |= {"qf1_values": qf1.mean(), "qf2_values": qf2.mean(), "qf_loss": qf_loss}

        if self.updates % self.args.policy_frequency == 0:
            actor_loss = -self.qf1(obs, self.actor(obs)).mean()
            self.actor_optimizer.zero_grad()
            actor_loss.backward()
            self.actor_optimizer.step()
            self.losses["actor_loss"] = actor_loss
            for learned, target in self.learned_and_target:
                for parameter, target_parameter in zip(learned.parameters(), target.parameters(), strict=True):
                    target_parameter.data.lerp_(parameter.data, self.args.tau)
        self.updates += 1

    def parts(self):
        """By name, what has a state of its own."""
        networks = ("actor", "qf1", "qf2", "actor_target", "qf1_target", "qf2_target")
        return {name: getattr(self, name) for name in (*networks, "q_optimizer", "actor_optimizer")}

    def state_dict(self):
        """All that `load_state_dict` needs to continue bit by bit, random numbers included."""
        state = {name: part.state_dict() for name, part in self.parts().items()}
        state |= {name: column[: self.stored].clone() for name, column in self.buffer.items()}
        state |= {"buffer_size": self.args.buffer_size, "stored": self.stored, "updates": self.updates}
        state |= {"rng": torch.get_rng_state()}
        return state | {"cuda_rng": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None}

    def load_state_dict(self, state):
        """Become the learner that `state` was taken from."""
        for name, part in self.parts().items():
            part.load_state_dict(state[name])
        for name, column in self.buffer.items():
            column[: len(state[name])] = state[name]
        self.stored, self.updates = state["stored"], state["updates"]
        for optimizer in (self.q_optimizer, self.actor_optimizer):
            optimizer.param_groups[0]["lr"] = self.args.learning_rate
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
        step, buffer_size = checkpoint["global_step"], checkpoint["learner"]["buffer_size"]
        if step >= args.total_timesteps:
            refuse("total_timesteps", args.total_timesteps, f"the checkpoint is at step {step}; give more than that")
        if buffer_size != args.buffer_size:
            refuse("buffer_size", args.buffer_size, f"the checkpoint has a buffer of {buffer_size}; give that")
    envs = make_envs(args, args.num_envs, folder / "videos" if args.capture_video else None)
    require_continuous(args, envs)
    envs.action_space.seed(args.seed + step)
    obs, _ = envs.reset(seed=args.seed + step)
    learner = TD3(args, envs, device)
    if checkpoint:
        learner.load_state_dict(checkpoint["learner"])
    run = Run(args, folder, device, envs, checkpoint)
    while step < args.total_timesteps and not run.stop:
        actions = envs.action_space.sample() if step < args.learning_starts else learner.act(obs)
        next_obs, rewards, terminated, truncated, infos = envs.step(actions)
        last_obs = final_observations(next_obs, infos)
        learner.store(obs=obs, next_obs=last_obs, actions=actions, rewards=rewards, terminated=terminated)
        obs, step = next_obs, step + args.num_envs
        learning = step > args.learning_starts
        run.advance(step, rewards, terminated | truncated, "training" if learning else "exploring")
        if learning:
            learner.update()
        if learning and step // args.num_envs % LOG_INTERVAL == 0:
            losses = {name: torch.as_tensor(value).item() for name, value in learner.losses.items()}
            run.log(losses, step)
            on_log(learner, losses, step)
        if args.checkpoint_interval and step % args.checkpoint_interval < args.num_envs:
            run.save(learner, step)
    run.finish(learner, step)
    if run.stop:
        raise SystemExit(130)


if __name__ == "__main__":
    train(tyro.cli(Args))
