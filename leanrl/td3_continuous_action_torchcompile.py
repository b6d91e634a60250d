"""Twin Delayed Deep Deterministic policy gradient, TD3 (Fujimoto et al. 2018, arXiv:1802.09477), at full speed.

The algorithm and its defaults are CleanRL's, as in the plain twin, td3_continuous_action.py. What makes this file fast:

1. Parameters, and so gradients, are one flat vector (`unflatten`): Adam is a few operations (`Adam.step`).
2. The twin critics are one batched matmul per layer (`q_values`); the actor's loss computes the first one alone, and
   no gradient for its weights (`TD3.update_actor`).
3. The replay buffer is on the device; an environment step costs one copy in and one copy out (`TD3.observe`).
4. `--compile` makes a graph each of `store_and_act`, `update_critics` and `update_actor`, from replay to target update.
5. `--cudagraphs` replays `respond` and `learn` as CUDA graphs, one launch each per environment step.
6. The environment steps while the device updates (`train`): the host waits for actions, never for updates.

    python leanrl/td3_continuous_action_torchcompile.py --env-id HalfCheetah-v5 --compile --cudagraphs
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
HIDDEN = 256
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
    """checkpoint.pt of a run whose deterministic policy to evaluate, instead of training"""
    eval_episodes: int = 10
    """episodes of an evaluation"""
    measure_burnin: int = 100
    """environment steps between the end of warm-up and the start of the speed measurement"""
    compile: bool = False
    """compile the updates with torch.compile"""
    cudagraphs: bool = False
    """replay acting and learning as CUDA graphs"""
    env_id: str = "HalfCheetah-v5"
    """gymnasium environment"""
    total_timesteps: int = 1_000_000
    """environment steps (transitions) of the whole run"""
    num_envs: int = 1
    """environments that step together, one transition each"""
    updates_per_step: int = 1
    """updates after each step of all environments"""
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
    limits |= dict.fromkeys(("updates_per_step", "eval_episodes"), (1, 1e12)) | {"learning_rate": (1e-12, 1)}
    limits |= {"seed": (0, 2**32 - 1), "buffer_size": (args.num_envs, 1e12), "gamma": (0, 1), "tau": (0, 1)}
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


def layer_shapes(inputs, outputs, *ensemble):
    """Shapes of w1, b1, w2, b2, w3, b3 of a perceptron with two hidden layers, or of an ensemble of them."""
    layers = ((inputs, HIDDEN), (1, HIDDEN), (HIDDEN, HIDDEN), (1, HIDDEN), (HIDDEN, outputs), (1, outputs))
    return [(*ensemble, *layer) for layer in layers]


def init_parameters(shapes, device):
    """One flat vector of weights and biases, drawn as torch.nn.Linear does: U(-1/sqrt(fan_in), 1/sqrt(fan_in))."""
    draws = [2 * torch.rand(math.prod(shape), device=device) - 1 for shape in shapes]
    return torch.cat([draw / shapes[i - i % 2][-2] ** 0.5 for i, draw in enumerate(draws)])


def unflatten(flat, shapes):
    """Views of a flat parameter vector, one of each shape."""
    return [x.view(shape) for x, shape in zip(flat.split([math.prod(s) for s in shapes]), shapes, strict=True)]


def hidden_layers(x, w1, b1, w2, b2):
    """Two layers of ReLUs: (..., batch, inputs) to (..., batch, HIDDEN)."""
    return ((x @ w1).add_(b1).relu_() @ w2).add_(b2).relu_()


def q_values(critic, obs, actions):
    """Q(s, a), (batch,), of the critic with these layers, or (2, batch) of an ensemble of two."""
    *hidden, w3, b3 = critic
    x = torch.cat((obs, actions), -1).expand(*w3.shape[:-2], -1, -1)
    return (hidden_layers(x, *hidden) * w3.mT).sum(-1) + b3.squeeze(-1)  # faster than a matmul with one column


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


class TD3:
    """The learner. All that changes is a tensor updated in place, because a CUDA graph replays kernels, not Python."""

    def __init__(self, args, envs, device):
        self.args, self.device, self.num_envs = args, device, envs.num_envs
        space, cuda = envs.single_action_space, device.type == "cuda"
        self.compile, self.cudagraphs = args.compile, args.cudagraphs and cuda
        self.obs_dim, self.act_dim = envs.single_observation_space.shape[0], space.shape[0]
        self.action_low = torch.tensor(space.low, dtype=torch.float32, device=device)
        self.action_high = torch.tensor(space.high, dtype=torch.float32, device=device)
        self.action_scale = torch.tensor((space.high - space.low) / 2, dtype=torch.float32, device=device)
        self.action_bias = torch.tensor((space.high + space.low) / 2, dtype=torch.float32, device=device)
        self.actor_shapes = layer_shapes(self.obs_dim, self.act_dim)
        self.critic_shapes = layer_shapes(self.obs_dim + self.act_dim, 1, 2)
        self.actor = init_parameters(self.actor_shapes, device)
        self.critics = init_parameters(self.critic_shapes, device)
        self.target_actor, self.target_critics = self.actor.clone(), self.critics.clone()
        self.actor_adam = Adam(self.actor, args.learning_rate)
        self.critic_adam = Adam(self.critics, args.learning_rate)
        self.critic_losses, self.actor_loss = torch.zeros(3, device=device), torch.zeros(1, device=device)
        self.uniform = partial(torch.rand, args.batch_size, dtype=torch.float64, device=device)  # float32 skips rows
        self.noise = partial(torch.randn, args.batch_size, self.act_dim, device=device)
        self.updates, self.warmup_updates = 0, GRAPH_WARMUP * args.policy_frequency
        self.columns = (self.obs_dim, self.obs_dim, self.act_dim, 1, 1)  # obs, next_obs, action, reward, terminated
        self.buffer = torch.empty(args.buffer_size, sum(self.columns), device=device)
        self.stored = torch.zeros((), dtype=torch.int64, device=device)  # transitions ever: the ring's cursor and size
        self.host_inbox = torch.zeros(self.num_envs, sum(self.columns) + self.obs_dim, pin_memory=cuda)
        self.host_actions = torch.zeros(self.num_envs, self.act_dim, pin_memory=cuda)
        self.inbox, self.actions = self.host_inbox.to(device), self.host_actions.to(device)  # on a CPU the same memory
        self.actions_ready = torch.cuda.Event() if cuda else None  # so truthy on CUDA alone
        self.apply_compile_and_cudagraphs()

    def apply_compile_and_cudagraphs(self):
        """The one place where functions are compiled and graphed."""
        self.learn_on = {actor_turn: partial(self.learn, actor_turn) for actor_turn in (False, True)}
        if self.compile:
            torch._dynamo.config.trace_autograd_ops = True  # allows torch.autograd.grad in a compiled function
            self.store_and_act = torch.compile(self.store_and_act, fullgraph=True)
            self.update_critics = torch.compile(self.update_critics, fullgraph=True)
            self.update_actor = torch.compile(self.update_actor, fullgraph=True)
        if self.cudagraphs:
            self.respond = CudaGraphModule(self.respond, warmup=GRAPH_WARMUP)
            self.learn_on = {turn: CudaGraphModule(f, warmup=GRAPH_WARMUP) for turn, f in self.learn_on.items()}

    def policy(self, actor, obs):
        """Actions in the environment's units, (batch, act_dim)."""
        *hidden, w3, b3 = unflatten(actor, self.actor_shapes)
        return (hidden_layers(obs, *hidden) @ w3 + b3).tanh() * self.action_scale + self.action_bias

    def policy_with_noise(self, actor, obs, noise):
        """Actions plus `noise`, in units of half the range of each dimension, kept within the bounds."""
        return (self.policy(actor, obs) + noise * self.action_scale).clamp(self.action_low, self.action_high)

    def replay(self, uniform):
        """Rows of the filled part of the buffer, (batch, sum(columns)), drawn by `uniform`, (batch,) from [0, 1)."""
        return self.buffer.index_select(0, (uniform * self.stored.clamp(max=self.args.buffer_size)).long())

    def update_critics(self, uniform, noise):
        """Clipped double Q-learning for rows from `replay` and normal noise, (batch, act_dim); returns their obs."""
        obs, next_obs, actions, rewards, terminated = self.replay(uniform).split(self.columns, -1)
        noise = (self.args.policy_noise * noise).clamp(-self.args.noise_clip, self.args.noise_clip)
        next_actions = self.policy_with_noise(self.target_actor, next_obs, noise)  # target policy smoothing
        next_q = q_values(unflatten(self.target_critics, self.critic_shapes), next_obs, next_actions).amin(0)
        target = rewards.squeeze(-1) + (1 - terminated.squeeze(-1)) * self.args.gamma * next_q
        critics = self.critics.detach().requires_grad_()
        q = q_values(unflatten(critics, self.critic_shapes), obs, actions)
        loss = (q - target).square().mean(-1).sum()
        self.critic_adam.step(self.critics, *torch.autograd.grad(loss, critics))
        self.critic_losses.copy_(torch.stack((*q.detach().mean(-1), loss.detach())))
        return obs

    def update_actor(self, obs):
        """The deterministic policy gradient, by the first critic alone, for obs (batch, obs_dim); then the targets."""
        actor = self.actor.detach().requires_grad_()
        first_critic = [ensemble[0] for ensemble in unflatten(self.critics, self.critic_shapes)]
        loss = -q_values(first_critic, obs, self.policy(actor, obs)).mean()
        self.actor_adam.step(self.actor, *torch.autograd.grad(loss, actor))
        self.actor_loss.copy_(loss.detach())
        self.target_actor.lerp_(self.actor, self.args.tau)
        self.target_critics.lerp_(self.critics, self.args.tau)

    def learn(self, actor_turn):
        """One update, on the device from beginning to end."""
        obs = self.update_critics(self.uniform(), self.noise())
        if actor_turn:
            self.update_actor(obs)

    def update(self):
        """Launch one update; on CUDA it still runs when this returns."""
        self.learn_on[self.updates % self.args.policy_frequency == 0]()
        self.updates += 1

    def store_and_act(self, noise):
        """Write the transitions in `inbox` to the ring buffer; act, with noise, on the observations behind them."""
        rows, obs = self.inbox.split((sum(self.columns), self.obs_dim), -1)
        cursor = self.stored + torch.arange(self.num_envs, device=self.device)
        self.buffer.index_copy_(0, cursor % self.args.buffer_size, rows)
        self.stored.add_(self.num_envs)
        self.actions.copy_(self.policy_with_noise(self.actor, obs, self.args.exploration_noise * noise))

    def respond(self):  # what a CUDA graph replays: the noise has to be drawn inside
        self.store_and_act(torch.randn_like(self.actions))

    def observe(self, *columns):
        """Send obs, next_obs, actions, rewards, terminated and the next obs to the device; then call `next_actions`."""
        np.concatenate([c.reshape(len(c), -1) for c in columns], 1, self.host_inbox.numpy(), casting="unsafe")
        self.inbox.copy_(self.host_inbox, non_blocking=True)
        self.respond()
        self.host_actions.copy_(self.actions, non_blocking=True)
        if self.actions_ready:
            self.actions_ready.record()

    def next_actions(self):
        """Wait for the actions that `observe` asked for, but for no update: numpy, (num_envs, act_dim)."""
        if self.actions_ready:
            self.actions_ready.synchronize()
        return self.host_actions.numpy().copy()  # environments may keep it, and `observe` writes the next ones there

    @property
    def stage(self):
        """What the next update does, in a word or two: "training" once each kind of update is compiled and captured."""
        if self.updates >= self.warmup_updates:
            return "training"
        return " and ".join(["compiling"] * self.compile + ["capturing"] * self.cudagraphs) or "warming up"

    def losses(self):
        """The last update's losses by name; waits for that update."""
        names = ("qf1_values", "qf2_values", "qf_loss", "actor_loss")
        return dict(zip(names, torch.cat((self.critic_losses, self.actor_loss)).tolist(), strict=True))

    def tensors(self):
        """By name, the tensors that make up the learner, save the replay buffer."""
        names = ("actor", "critics", "target_actor", "target_critics", "critic_losses", "actor_loss", "stored")
        adams = [(name, getattr(self, name)) for name in ("actor_adam", "critic_adam")]
        moments = {f"{name}.{part}": getattr(adam, part) for name, adam in adams for part in ("m", "v", "decay")}
        return {name: getattr(self, name) for name in names} | moments

    def state_dict(self):
        """Copies, on the CPU, of all that `load_state_dict` needs to continue bit by bit, random numbers included."""
        tensors = self.tensors() | {"buffer": self.buffer[: int(self.stored)]}
        state = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
        state |= {"buffer_size": self.args.buffer_size, "updates": self.updates, "rng": torch.get_rng_state()}
        return state | {"cuda_rng": torch.cuda.get_rng_state(self.device) if self.actions_ready else None}

    def load_state_dict(self, state):
        """Become the learner that `state` was taken from; tensors are filled in place, so that graphs stay valid."""
        for name, tensor in self.tensors().items():
            tensor.copy_(state[name])
        self.buffer[: len(state["buffer"])] = state["buffer"].to(self.device)
        self.updates, self.warmup_updates = state["updates"], state["updates"] + self.warmup_updates
        torch.set_rng_state(state["rng"])
        if self.actions_ready and state["cuda_rng"] is not None:
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
        step, buffer_size = checkpoint["global_step"], checkpoint["learner"]["buffer_size"]
        if step >= args.total_timesteps:
            refuse("total_timesteps", args.total_timesteps, f"the checkpoint is at step {step}; give more than that")
        if buffer_size != args.buffer_size:
            refuse("buffer_size", args.buffer_size, f"the checkpoint has a buffer of {buffer_size}; give that")
    envs = make_envs(args, args.num_envs, video_dir)
    require_continuous(args, envs)
    envs.action_space.seed(args.seed + step)
    obs, _ = envs.reset(seed=args.seed + step)
    learner = TD3(args, envs, device)
    if checkpoint:
        learner.load_state_dict(checkpoint["learner"])
    run = Run(args, folder, device, envs, checkpoint)
    actions = envs.action_space.sample()
    try:
        while step < args.total_timesteps and not run.stop:
            if step < args.learning_starts:
                actions = envs.action_space.sample()
            next_obs, rewards, terminated, truncated, infos = envs.step(actions)  # while, on CUDA, the last update runs
            learner.observe(obs, final_observations(next_obs, infos), actions, rewards, terminated, next_obs)
            obs, step = next_obs, step + args.num_envs
            learning = step > args.learning_starts
            run.advance(step, rewards, terminated | truncated, learner.stage if learning else "exploring")
            if learning:
                for _ in range(args.updates_per_step):
                    learner.update()
            actions = learner.next_actions()
            if learning and step // args.num_envs % LOG_INTERVAL == 0:
                losses = learner.losses()
                run.log(losses, step)
                on_log(learner, losses, step)
            if args.checkpoint_interval and step % args.checkpoint_interval < args.num_envs:
                run.save(learner, step)
    except Exception:  # Ctrl-C reaches the C++ compiler too, which fails; the first update may lack its actor's part
        if not run.stop:
            raise
    run.finish(learner, step)
    if run.stop:
        raise SystemExit(130)


def evaluate(args, device, video_dir):
    """Print mean and standard deviation of the return of a checkpoint's deterministic policy over whole episodes."""
    checkpoint = load_checkpoint("evaluate", args)
    envs = make_envs(args, 1, video_dir)
    learner = TD3(args, envs, device)
    learner.actor.copy_(checkpoint["learner"]["actor"])
    returns, total, (obs, _) = [], 0.0, envs.reset(seed=args.seed)
    while len(returns) < args.eval_episodes:
        actions = learner.policy(learner.actor, torch.as_tensor(obs, dtype=torch.float32, device=device))
        obs, rewards, terminated, truncated, _ = envs.step(actions.cpu().numpy())
        total += rewards[0]
        if terminated[0] or truncated[0]:
            returns, total = [*returns, total], 0.0
    envs.close()
    print(f"{len(returns)} episodes: mean return {np.mean(returns):.2f}, standard deviation {np.std(returns):.2f}")


if __name__ == "__main__":
    train(tyro.cli(Args))
