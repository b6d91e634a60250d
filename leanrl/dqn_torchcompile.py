"""Deep Q-learning (Mnih et al. 2015, Nature 518, 529-533) at full speed, in one file.

The algorithm and its defaults are CleanRL's, as in the plain twin, dqn.py. What makes this file fast:

1. Parameters, and so gradients, are one flat vector (`unflatten`): Adam is a few operations (`Adam.step`).
2. Actions are computed on the host, from a host copy of that vector, and only where they are greedy (`DQN.greedy`).
3. Transitions are collected on the host and cross to the device's replay buffer once per update (`DQN.ship`).
4. Batches run through the network as columns, not rows, which makes the narrow matmuls cheap (`action_values`).
5. `--compile` makes one graph of storing, sampling, forward, backward and Adam (`DQN.store_and_update`).
6. `--cudagraphs` replays that as one CUDA graph (`DQN.learn`), while the host goes on until it needs the new weights.

    python leanrl/dqn_torchcompile.py --env-id CartPole-v1 --compile --cudagraphs
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

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict.nn import CudaGraphModule
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT = Path(__file__).stem
LOG_INTERVAL = 100  # vector steps between two logs of the losses
GRAPH_WARMUP = 3  # the call that captures a CUDA graph; compilation is over by then
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8  # Adam's


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
    """checkpoint.pt of a run whose greedy policy to evaluate, instead of training"""
    eval_episodes: int = 10
    """episodes of an evaluation"""
    measure_burnin: int = 100
    """environment steps between the end of warm-up and the start of the speed measurement"""
    compile: bool = False
    """compile the update with torch.compile"""
    cudagraphs: bool = False
    """replay the update as a CUDA graph"""
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
    limits |= dict.fromkeys(("target_network_frequency", "eval_episodes"), (1, 1e12))
    limits |= {"seed": (0, 2**32 - 1), "buffer_size": (args.num_envs, 1e12)}
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


def network_shapes(obs_dim, num_actions):
    """Shapes of w1, b1, w2, b2, w3, b3 of the Q-network."""
    return [(obs_dim, 120), (1, 120), (120, 84), (1, 84), (84, num_actions), (1, num_actions)]


def init_parameters(shapes, device):
    """One flat vector of weights and biases, drawn as torch.nn.Linear does: U(-1/sqrt(fan_in), 1/sqrt(fan_in))."""
    draws = [2 * torch.rand(math.prod(shape), device=device) - 1 for shape in shapes]
    return torch.cat([draw / shapes[i - i % 2][-2] ** 0.5 for i, draw in enumerate(draws)])


def unflatten(flat, shapes):
    """Views of a flat parameter vector, one of each shape."""
    return [x.view(shape) for x, shape in zip(flat.split([math.prod(s) for s in shapes]), shapes, strict=True)]


def action_values(layers, obs):
    """Q(s, a) of every action for `layers`, that is w1, b1, ..., b3: (obs_dim, batch) to (num_actions, batch)."""
    w1, b1, w2, b2, w3, b3 = layers
    x = torch.addmm(b1.T, w1.T, obs).relu_()
    return torch.addmm(b3.T, w3.T, torch.addmm(b2.T, w2.T, x).relu_())


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


class HostEvent:
    """What a torch.cuda.Event is on a CPU, which has done everything when a call returns."""

    def record(self):
        pass

    def synchronize(self):
        pass


class DQN:
    """The learner. All that changes is a tensor updated in place, because a CUDA graph replays kernels, not Python."""

    def __init__(self, args, envs, device):
        self.args, self.device, self.num_envs = args, device, envs.num_envs
        cuda = device.type == "cuda"
        self.compile, self.cudagraphs = args.compile, args.cudagraphs and cuda
        self.obs_dim, self.num_actions = envs.single_observation_space.shape[0], int(envs.single_action_space.n)
        self.shapes = network_shapes(self.obs_dim, self.num_actions)
        self.q = init_parameters(self.shapes, device)
        self.q_target = self.q.clone()
        self.adam = Adam(self.q, args.learning_rate)
        self.last_losses = torch.zeros(2, device=device)
        self.uniform = partial(torch.rand, args.batch_size, dtype=torch.float64, device=device)  # float32 skips rows
        self.rng = np.random.default_rng(args.seed)
        self.updates, self.warmup_updates = 0, GRAPH_WARMUP
        steps = min(math.ceil(args.train_frequency / self.num_envs), args.buffer_size // self.num_envs)
        self.columns, self.block = (self.obs_dim, self.obs_dim, 1, 1, 1), steps * self.num_envs
        self.buffer = torch.empty(args.buffer_size + self.block, sum(self.columns), device=device)
        self.stored = torch.zeros((), dtype=torch.int64, device=device)  # transitions ever: the ring's cursor and size
        self.host_inbox = torch.zeros(self.block + 1, sum(self.columns), pin_memory=cuda)
        self.inbox = self.host_inbox.to(device)  # on a CPU the same memory
        obs, next_obs, *scalars = self.host_inbox.split(self.columns, 1)
        names = ("obs", "next_obs", "actions", "rewards", "terminated")
        columns = (obs, next_obs, *(column[:, 0] for column in scalars))
        self.host_columns = {name: column.numpy() for name, column in zip(names, columns, strict=True)}
        self.filled = 0
        self.host_q = torch.empty_like(self.q, device="cpu", pin_memory=True) if cuda else self.q
        self.host_layers = [layer.numpy() for layer in unflatten(self.host_q, self.shapes)]
        self.host_q.copy_(self.q)
        self.inbox_read, self.weights_ready = (torch.cuda.Event() if cuda else HostEvent() for _ in range(2))
        self.apply_compile_and_cudagraphs()

    def apply_compile_and_cudagraphs(self):
        """The one place where functions are compiled and graphed."""
        if self.compile:
            torch._dynamo.config.trace_autograd_ops = True  # allows torch.autograd.grad in a compiled function
            options = {"cpp_wrapper": self.device.type == "cpu"}  # calls the kernels from C++; a CUDA graph does better
            self.store_and_update = torch.compile(self.store_and_update, fullgraph=True, options=options)
        if self.cudagraphs:
            self.learn = CudaGraphModule(self.learn, warmup=GRAPH_WARMUP)

    def greedy(self, obs):
        """The actions of highest value for `obs`; both numpy, (num_envs, ...)."""
        self.weights_ready.synchronize()
        w1, b1, w2, b2, w3, b3 = self.host_layers
        x = np.maximum(obs.dot(w1) + b1, 0)  # for a single row `dot` is faster than `@`
        return (np.maximum(x.dot(w2) + b2, 0).dot(w3) + b3).argmax(1)

    def act(self, obs, exploration):
        """Actions for `obs`, each random with probability `exploration`, else greedy; both numpy, (num_envs, ...)."""
        explore = self.rng.random(len(obs)) < exploration
        count = np.count_nonzero(explore)
        actions = self.greedy(obs) if count < len(obs) else np.empty(count, np.int64)
        if count:
            actions[explore] = self.rng.integers(self.num_actions, size=count)
        return actions

    def store(self, **transitions):
        """Collect one transition per environment, each column (num_envs, ...), on the host until the block is full."""
        if self.filled == self.block:
            self.ship()
            self.store_inbox()
        if self.filled == 0:
            self.inbox_read.synchronize()
        rows = slice(self.filled, self.filled + self.num_envs)
        for name, column in transitions.items():
            self.host_columns[name][rows] = column
        self.filled += self.num_envs

    def ship(self):
        """Send the transitions collected so far to the device's inbox, and behind them, as a reward, their number."""
        self.inbox_read.synchronize()  # an update may follow another at once
        self.host_columns["rewards"][self.block] = self.filled
        self.inbox.copy_(self.host_inbox, non_blocking=True)
        self.filled = 0
        self.inbox_read.record()

    def store_inbox(self):
        """Write the transitions in `inbox` to the ring buffer, and its other rows behind the ring."""
        row = torch.arange(self.block, device=self.device)
        count = self.inbox[-1, -2].long()
        place = torch.where(row < count, (self.stored + row) % self.args.buffer_size, self.args.buffer_size + row)
        self.buffer.index_copy_(0, place, self.inbox[:-1])
        self.stored.add_(count)

    def store_and_update(self, uniform):
        """Store the inbox, then equation 2 for rows drawn from the filled part of the ring by `uniform`, (batch,)."""
        self.store_inbox()
        rows = self.buffer.index_select(0, (uniform * self.stored.clamp(max=self.args.buffer_size)).long())
        obs, next_obs, actions, rewards, terminated = rows.T.split(self.columns)
        next_q = action_values(unflatten(self.q_target, self.shapes), next_obs).amax(0, keepdim=True)
        target = rewards + self.args.gamma * (1 - terminated) * next_q
        parameters = self.q.detach().requires_grad_()
        q = action_values(unflatten(parameters, self.shapes), obs).gather(0, actions.long())
        loss = (q - target).square().mean()
        self.adam.step(self.q, *torch.autograd.grad(loss, parameters))
        self.last_losses.copy_(torch.stack((q.detach().mean(), loss.detach())))

    def learn(self):  # what a CUDA graph replays: the random numbers have to be drawn inside
        self.store_and_update(self.uniform())

    def update(self):
        """Launch one update; on CUDA it still runs when this returns."""
        self.ship()
        self.learn()
        self.host_q.copy_(self.q, non_blocking=True)
        self.weights_ready.record()
        self.updates += 1

    def update_target(self):
        """Move the target network by `tau` towards the Q-network: with 1, copy it."""
        self.q_target.lerp_(self.q, self.args.tau)

    @property
    def stage(self):
        """What the next update does, in a word or two: "training" once it is compiled and captured."""
        if self.updates >= self.warmup_updates:
            return "training"
        return " and ".join(["compiling"] * self.compile + ["capturing"] * self.cudagraphs) or "warming up"

    def losses(self):
        """The last update's losses by name; waits for that update."""
        return dict(zip(("q_values", "td_loss"), self.last_losses.tolist(), strict=True))

    def tensors(self):
        """By name, the tensors that make up the learner, save the replay buffer."""
        tensors = {name: getattr(self, name) for name in ("q", "q_target", "last_losses", "stored")}
        return tensors | {f"adam.{part}": getattr(self.adam, part) for part in ("m", "v", "decay")}

    def state_dict(self):
        """Copies, on the CPU, of all that `load_state_dict` needs to continue bit by bit, random numbers included."""
        if self.filled:
            self.ship()
            self.store_inbox()
        tensors = self.tensors() | {"buffer": self.buffer[: min(int(self.stored), self.args.buffer_size)]}
        state = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
        state |= {"buffer_size": self.args.buffer_size, "updates": self.updates, "rng": torch.get_rng_state()}
        state |= {"numpy_rng": self.rng.bit_generator.state}
        return state | {"cuda_rng": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None}

    def load_state_dict(self, state):
        """Become the learner that `state` was taken from; tensors are filled in place, so that graphs stay valid."""
        for name, tensor in self.tensors().items():
            tensor.copy_(state[name])
        self.buffer[: len(state["buffer"])] = state["buffer"].to(self.device)
        self.host_q.copy_(self.q)
        self.filled, self.rng.bit_generator.state = 0, state["numpy_rng"]
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
    torch.set_num_threads(1)  # on a CPU these matrices are too small to share
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    folder = Path(args.run_dir) / f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time_ns()}".replace("/", "_")
    video_dir = folder / "videos" if args.capture_video else None
    if args.evaluate:
        return evaluate(args, device, video_dir)
    step, checkpoint = 0, None
    if args.resume:
        checkpoint = load_checkpoint("resume", args)
        step, buffer_size = checkpoint["global_step"], checkpoint["learner"]["buffer_size"]
        if step >= args.total_timesteps:
            refuse("total_timesteps", args.total_timesteps, f"the checkpoint is at step {step}; give more than that")
        if buffer_size != args.buffer_size:
            refuse("buffer_size", args.buffer_size, f"the checkpoint has a buffer of {buffer_size}; give that")
    envs = make_envs(args, args.num_envs, video_dir)
    require_discrete(args, envs)
    obs, _ = envs.reset(seed=args.seed + step)
    learner = DQN(args, envs, device)
    if checkpoint:
        learner.load_state_dict(checkpoint["learner"])
    run = Run(args, folder, device, envs, checkpoint)
    try:
        while step < args.total_timesteps and not run.stop:
            actions = learner.act(obs, epsilon(step, args))
            next_obs, rewards, terminated, truncated, infos = envs.step(actions)
            last_obs = final_observations(next_obs, infos)
            learner.store(obs=obs, next_obs=last_obs, actions=actions, rewards=rewards, terminated=terminated)
            obs, step = next_obs, step + args.num_envs
            learning = step > args.learning_starts
            run.advance(step, rewards, terminated | truncated, learner.stage if learning else "exploring")
            if learning:
                for _ in range(turns(args.train_frequency, step, args.num_envs)):
                    learner.update()
                if turns(args.target_network_frequency, step, args.num_envs):
                    learner.update_target()
            if learner.updates and step // args.num_envs % LOG_INTERVAL == 0:
                losses = learner.losses()
                run.log(losses, step)
                on_log(learner, losses, step)
            if args.checkpoint_interval and step % args.checkpoint_interval < args.num_envs:
                run.save(learner, step)
    except Exception:  # Ctrl-C reaches the C++ compiler too, which fails; the first update may be missing
        if not run.stop:
            raise
    run.finish(learner, step)
    if run.stop:
        raise SystemExit(130)


def evaluate(args, device, video_dir):
    """Print mean and standard deviation of the return of a checkpoint's greedy policy over whole episodes."""
    checkpoint = load_checkpoint("evaluate", args)
    envs = make_envs(args, 1, video_dir)
    learner = DQN(args, envs, device)
    learner.host_q.copy_(checkpoint["learner"]["q"])
    returns, total, (obs, _) = [], 0.0, envs.reset(seed=args.seed)
    while len(returns) < args.eval_episodes:
        obs, rewards, terminated, truncated, _ = envs.step(learner.greedy(obs))
        total += rewards[0]
        if terminated[0] or truncated[0]:
            returns, total = [*returns, total], 0.0
    envs.close()
    print(f"{len(returns)} episodes: mean return {np.mean(returns):.2f}, standard deviation {np.std(returns):.2f}")


if __name__ == "__main__":
    train(tyro.cli(Args))
