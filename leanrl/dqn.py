"""Deep Q-learning (Mnih et al. 2015, Nature 518, 529-533) in plain PyTorch: the reading copy.

`DQN.update` reads like the paper. The tests hold dqn_torchcompile.py against this file, and the speed tables measure it
as their baseline. The algorithm, hyper-parameters and defaults are CleanRL's.

    python leanrl/dqn.py --env-id CartPole-v1
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
    env_id: str = "CartPole-v1"
    """gymnasium environment"""
    total_timesteps: int = 500_000
    """environment steps (transitions) of the whole run"""
    num_envs: int = 1
    """environments that step together, one transition each"""
    buffer_size: int = 10_000
    """transitions in the replay buffer"""
    gamma: float = 0.99
    """discount factor"""
    tau: float = 1.0
    """how far a target network update moves towards the Q-network"""
    batch_size: int = 128
    """transitions in an update"""
    learning_starts: int = 10_000
    """environment steps before the first update"""
    learning_rate: float = 2.5e-4
    """learning rate of the Q-network"""
    train_frequency: int = 10
    """environment steps from one update to the next"""
    target_network_frequency: int = 500
    """environment steps from one target network update to the next"""
    start_e: float = 1.0
    """probability of a random action at the first step"""
    end_e: float = 0.05
    """probability of a random action once exploration has ended"""
    exploration_fraction: float = 0.5
    """fraction of --total-timesteps over which the probability of a random action falls linearly"""


def check_args(args):
    """Refuse values with which no run can work."""
    limits = dict.fromkeys(("learning_starts", "checkpoint_interval", "measure_burnin"), (0, 1e12))
    limits |= dict.fromkeys(("total_timesteps", "num_envs", "batch_size", "train_frequency"), (1, 1e12))
    limits |= dict.fromkeys(("gamma", "tau", "start_e", "end_e"), (0, 1))
    limits |= dict.fromkeys(("learning_rate", "exploration_fraction"), (1e-12, 1))
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


def require_discrete(args, envs):
    """Refuse environments whose observations are not vectors or whose actions are not the numbers 0, 1, 2, ..."""
    observations, actions = envs.single_observation_space, envs.single_action_space
    vectors = isinstance(observations, gym.spaces.Box) and len(observations.shape) == 1
    if not vectors or not isinstance(actions, gym.spaces.Discrete) or actions.start != 0:
        refuse("env_id", args.env_id, "choose an environment with vector observations and discrete actions from 0 on")


def epsilon(step, args):
    """Probability of a random action at environment step `step`: from start_e down to end_e, then constant."""
    progress = min(step / (args.exploration_fraction * args.total_timesteps), 1.0)
    return args.start_e + progress * (args.end_e - args.start_e)


def turns(frequency, step, num_envs):
    """How many multiples of `frequency` the last vector step has reached: those in (step - num_envs, step]."""
    return step // frequency - (step - num_envs) // frequency


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


class QNetwork(nn.Module):
    """Q(s, a) of every action: (batch, obs_dim) to (batch, num_actions)."""

    def __init__(self, obs_dim, num_actions):
        super().__init__()
        self.fc1 = nn.Linear(obs_dim, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, num_actions)

    def forward(self, obs):
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(obs)))))


class DQN:
    """The learner: networks, optimiser and replay buffer."""

    def __init__(self, args, envs, device):
        self.args, self.device, self.compile, self.cudagraphs = args, device, False, False
        obs_dim, self.num_actions = envs.single_observation_space.shape[0], int(envs.single_action_space.n)
        with device:
            self.q, self.q_target = QNetwork(obs_dim, self.num_actions), QNetwork(obs_dim, self.num_actions)
        self.q_target.load_state_dict(self.q.state_dict())
        self.optimizer = torch.optim.Adam(self.q.parameters(), lr=args.learning_rate)
        self.buffer = {name: np.empty((args.buffer_size, obs_dim), np.float32) for name in ("obs", "next_obs")}
        self.buffer |= {name: np.empty(args.buffer_size, np.float32) for name in ("rewards", "terminated")}
        self.buffer["actions"] = np.empty(args.buffer_size, np.int64)
        self.rng = np.random.default_rng(args.seed)
        self.stored = self.updates = 0
        self.losses = {}

    def store(self, **transitions):
        """Write one transition per environment, each column (num_envs, ...), over the oldest ones."""
        rows = (self.stored + np.arange(len(transitions["obs"]))) % self.args.buffer_size
        for name, column in transitions.items():
            self.buffer[name][rows] = column
        self.stored += len(rows)

    def sample(self):
        """A batch drawn uniformly from the buffer, on the device."""
        rows = self.rng.integers(min(self.stored, self.args.buffer_size), size=self.args.batch_size)
        return {name: torch.from_numpy(column[rows]).to(self.device) for name, column in self.buffer.items()}

    @torch.no_grad()
    def greedy(self, obs):
        """The actions of highest value for `obs`; both numpy, (num_envs, ...)."""
        return self.q(torch.as_tensor(obs, dtype=torch.float32, device=self.device)).argmax(1).cpu().numpy()

    def act(self, obs, exploration):
        """Actions for `obs`, each random with probability `exploration`, else greedy; both numpy, (num_envs, ...)."""
        explore = self.rng.random(len(obs)) < exploration
        count = np.count_nonzero(explore)
        actions = self.greedy(obs) if count < len(obs) else np.empty(count, np.int64)
        if count:
            actions[explore] = self.rng.integers(self.num_actions, size=count)
        return actions

    def update(self):
        """One step on the Q-network (equation 2)."""
        batch = self.sample()
        with torch.no_grad():
            next_q = self.q_target(batch["next_obs"]).amax(1)
            target = batch["rewards"] + self.args.gamma * (1 - batch["terminated"]) * next_q
        q = self.q(batch["obs"]).gather(1, batch["actions"][:, None]).squeeze(1)
        loss = F.mse_loss(q, target)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses = {"q_values": q.detach(), "td_loss": loss}
        self.updates += 1

    def update_target(self):
        """Move the target network by `tau` towards the Q-network: with 1, copy it."""
        for parameter, target_parameter in zip(self.q.parameters(), self.q_target.parameters(), strict=True):
            target_parameter.data.lerp_(parameter.data, self.args.tau)

    def state_dict(self):
        """All that `load_state_dict` needs to continue bit by bit, random numbers included."""
        state = {name: getattr(self, name).state_dict() for name in ("q", "q_target", "optimizer")}
        state |= {name: torch.from_numpy(column[: self.stored].copy()) for name, column in self.buffer.items()}
        state |= {"buffer_size": self.args.buffer_size, "stored": self.stored, "updates": self.updates}
        return state | {"rng": self.rng.bit_generator.state}

    def load_state_dict(self, state):
        """Become the learner that `state` was taken from."""
        for name in ("q", "q_target", "optimizer"):
            getattr(self, name).load_state_dict(state[name])
        for name, column in self.buffer.items():
            column[: len(state[name])] = state[name].numpy()
        self.stored, self.updates, self.rng.bit_generator.state = state["stored"], state["updates"], state["rng"]
        self.optimizer.param_groups[0]["lr"] = self.args.learning_rate


def train(args, on_log=lambda learner, losses, step: None):
    """Train; raise SystemExit(2) on bad arguments, (130) on Ctrl-C. `on_log(learner, losses, step)` sees the logs."""
    check_args(args)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.set_num_threads(1)  # on a CPU these matrices are too small to share
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
    require_discrete(args, envs)
    obs, _ = envs.reset(seed=args.seed + step)
    learner = DQN(args, envs, device)
    if checkpoint:
        learner.load_state_dict(checkpoint["learner"])
    run = Run(args, folder, device, envs, checkpoint)
    while step < args.total_timesteps and not run.stop:
        actions = learner.act(obs, epsilon(step, args))
        next_obs, rewards, terminated, truncated, infos = envs.step(actions)
        last_obs = final_observations(next_obs, infos)
        learner.store(obs=obs, next_obs=last_obs, actions=actions, rewards=rewards, terminated=terminated)
        obs, step = next_obs, step + args.num_envs
        learning = step > args.learning_starts
        run.advance(step, rewards, terminated | truncated, "training" if learning else "exploring")
        if learning:
            for _ in range(turns(args.train_frequency, step, args.num_envs)):
                learner.update()
            if turns(args.target_network_frequency, step, args.num_envs):
                learner.update_target()
        if learner.losses and step // args.num_envs % LOG_INTERVAL == 0:
            losses = {name: value.mean().item() for name, value in learner.losses.items()}
            run.log(losses, step)
            on_log(learner, losses, step)
        if args.checkpoint_interval and step % args.checkpoint_interval < args.num_envs:
            run.save(learner, step)
    run.finish(learner, step)
    if run.stop:
        raise SystemExit(130)


if __name__ == "__main__":
    train(tyro.cli(Args))
