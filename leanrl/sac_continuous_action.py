"""Soft Actor-Critic (Haarnoja et al. 2018, arXiv:1812.05905) in plain PyTorch: the reading copy.

`SAC.update` reads like the paper. The tests hold sac_continuous_action_torchcompile.py against this file, and the speed
tables measure it as their baseline. The algorithm, hyper-parameters and defaults are CleanRL's.

    python leanrl/sac_continuous_action.py --env-id HalfCheetah-v5
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
from torch.distributions import Normal
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT = Path(__file__).stem
LOG_INTERVAL = 100  # vector steps between two logs of the losses
LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0


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
    """how far a target network update moves towards the critics"""
    batch_size: int = 256
    """transitions in an update"""
    learning_starts: int = 5_000
    """environment steps with uniformly random actions, before the first update"""
    policy_lr: float = 3e-4
    """learning rate of the actor"""
    q_lr: float = 1e-3
    """learning rate of the critics and of the entropy coefficient"""
    policy_frequency: int = 2
    """updates from one actor turn to the next; a turn makes up for the delay with as many actor updates"""
    target_network_frequency: int = 1
    """updates from one target network update to the next"""
    alpha: float = 0.2
    """entropy coefficient with --no-autotune"""
    autotune: bool = True
    """tune the entropy coefficient, towards an entropy of minus the number of action dimensions"""


def check_args(args):
    """Refuse values with which no run can work."""
    limits = dict.fromkeys(("learning_starts", "checkpoint_interval", "measure_burnin", "alpha"), (0, 1e12))
    limits |= dict.fromkeys(("total_timesteps", "num_envs", "batch_size", "policy_frequency"), (1, 1e12))
    limits |= dict.fromkeys(("gamma", "tau"), (0, 1)) | dict.fromkeys(("policy_lr", "q_lr"), (1e-12, 1))
    limits |= {"target_network_frequency": (1, 1e12), "seed": (0, 2**32 - 1), "buffer_size": (args.num_envs, 1e12)}
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


class Actor(nn.Module):
    """A Gaussian squashed by tanh into the bounds of the action space (appendix C)."""

    def __init__(self, obs_dim, action_space):
        super().__init__()
        self.fc1 = nn.Linear(obs_dim, 256)
        self.fc2 = nn.Linear(256, 256)
        self.fc_mean = nn.Linear(256, action_space.shape[0])
        self.fc_log_std = nn.Linear(256, action_space.shape[0])
        self.register_buffer("scale", torch.tensor((action_space.high - action_space.low) / 2, dtype=torch.float32))
        self.register_buffer("bias", torch.tensor((action_space.high + action_space.low) / 2, dtype=torch.float32))

    def forward(self, obs):
        """Sample actions, (batch, act_dim), and return them with their log-probabilities, (batch,)."""
        x = F.relu(self.fc2(F.relu(self.fc1(obs))))
        log_std = LOG_STD_MIN + (LOG_STD_MAX - LOG_STD_MIN) / 2 * (torch.tanh(self.fc_log_std(x)) + 1)
        gaussian = Normal(self.fc_mean(x), log_std.exp(), validate_args=False)
        unsquashed = gaussian.rsample()
        squashed = torch.tanh(unsquashed)
        log_prob = gaussian.log_prob(unsquashed) - torch.log(self.scale * (1 - squashed.pow(2)) + 1e-6)
        return squashed * self.scale + self.bias, log_prob.sum(1)


class SAC:
    """The learner: networks, optimisers and replay buffer."""

    def __init__(self, args, envs, device):
        self.args, self.device, self.compile, self.cudagraphs = args, device, False, False
        obs_dim, self.act_dim = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
        with device:
            self.actor = Actor(obs_dim, envs.single_action_space)
            self.qf1, self.qf2 = Critic(obs_dim, self.act_dim), Critic(obs_dim, self.act_dim)
            self.qf1_target, self.qf2_target = Critic(obs_dim, self.act_dim), Critic(obs_dim, self.act_dim)
            self.log_alpha = torch.zeros(1, requires_grad=True)
        self.qf1_target.load_state_dict(self.qf1.state_dict())
        self.qf2_target.load_state_dict(self.qf2.state_dict())
        self.q_optimizer = torch.optim.Adam([*self.qf1.parameters(), *self.qf2.parameters()], lr=args.q_lr)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=args.policy_lr)
        self.alpha_optimizer = torch.optim.Adam([self.log_alpha], lr=args.q_lr)
        self.alpha = 1.0 if args.autotune else args.alpha
        widths = {
            "obs": (obs_dim,),
            "next_obs": (obs_dim,),
            "actions": (self.act_dim,),
            "rewards": (),
            "terminated": (),
        }
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
        """Sampled actions for `obs`; both numpy, (num_envs, ...)."""
        return self.actor(torch.as_tensor(obs, dtype=torch.float32, device=self.device))[0].cpu().numpy()

    def update(self):
        """One step on the critics and, on their turns, actor and temperature, and target networks."""
        batch, gamma = self.sample(), self.args.gamma
        obs, next_obs = batch["obs"], batch["next_obs"]
        with torch.no_grad():
            next_actions, next_log_prob = self.actor(next_obs)
            next_q = torch.min(self.qf1_target(next_obs, next_actions), self.qf2_target(next_obs, next_actions))
            target = batch["rewards"] + (1 - batch["terminated"]) * gamma * (next_q - self.alpha * next_log_prob)
        qf1, qf2 = self.qf1(obs, batch["actions"]), self.qf2(obs, batch["actions"])
        qf_loss = F.mse_loss(qf1, target) + F.mse_loss(qf2, target)  # equation 5
        self.q_optimizer.zero_grad()
        qf_loss.backward()
        self.q_optimizer.step()
        self.losses |= {"qf1_values": qf1.mean(), "qf2_values": qf2.mean(), "qf_loss": qf_loss}

        if self.updates % self.args.policy_frequency == 0:
            for _ in range(self.args.policy_frequency):  # makes up for the delay
                actions, log_prob = self.actor(obs)
                actor_loss = (self.alpha * log_prob - torch.min(self.qf1(obs, actions), self.qf2(obs, actions))).mean()
                self.actor_optimizer.zero_grad()
                actor_loss.backward()  # equation 7
                self.actor_optimizer.step()
                self.losses["actor_loss"] = actor_loss
                if self.args.autotune:
                    with torch.no_grad():
                        _, log_prob = self.actor(obs)
                    alpha_loss = (-self.log_alpha.exp() * (log_prob - self.act_dim)).mean()  # equation 18
                    self.alpha_optimizer.zero_grad()
                    alpha_loss.backward()
                    self.alpha_optimizer.step()
                    self.alpha = self.log_alpha.exp().item()
                    self.losses["alpha_loss"] = alpha_loss
            self.losses["alpha"] = self.alpha

        if self.updates % self.args.target_network_frequency == 0:
            for critic, target in ((self.qf1, self.qf1_target), (self.qf2, self.qf2_target)):
                for parameter, target_parameter in zip(critic.parameters(), target.parameters(), strict=True):
                    target_parameter.data.lerp_(parameter.data, self.args.tau)
        self.updates += 1

    def parts(self):
        """By name, what has a state of its own."""
        names = ("actor", "qf1", "qf2", "qf1_target", "qf2_target", "q_optimizer", "actor_optimizer", "alpha_optimizer")
        return {name: getattr(self, name) for name in names}

    def state_dict(self):
        """All that `load_state_dict` needs to continue bit by bit, random numbers included."""
        state = {name: part.state_dict() for name, part in self.parts().items()}
        state |= {name: column[: self.stored].clone() for name, column in self.buffer.items()}
        state |= {"buffer_size": self.args.buffer_size, "stored": self.stored, "updates": self.updates}
        state |= {"log_alpha": self.log_alpha.detach(), "alpha": self.alpha, "rng": torch.get_rng_state()}
        return state | {"cuda_rng": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None}

    def load_state_dict(self, state):
        """Become the learner that `state` was taken from."""
        for name, part in self.parts().items():
            part.load_state_dict(state[name])
        for name, column in self.buffer.items():
            column[: len(state[name])] = state[name]
        self.stored, self.updates, self.alpha = state["stored"], state["updates"], state["alpha"]
        self.log_alpha.data.copy_(state["log_alpha"])
        self.actor_optimizer.param_groups[0]["lr"] = self.args.policy_lr
        self.q_optimizer.param_groups[0]["lr"] = self.alpha_optimizer.param_groups[0]["lr"] = self.args.q_lr
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
    learner = SAC(args, envs, device)
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
