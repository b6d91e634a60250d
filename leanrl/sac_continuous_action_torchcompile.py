"""Soft Actor-Critic (Haarnoja et al. 2018, arXiv:1812.05905) at full speed, in one file.

The algorithm and its defaults are CleanRL's, as in the plain twin, sac_continuous_action.py. What makes this file fast:

1. Parameters, and so gradients, are one flat vector (`unflatten`): Adam is a few operations (`Adam.step`).
2. The twin critics are one batched matmul per layer (`SAC.q_values`), without gradients in the actor's loss.
3. The replay buffer is on the device; an environment step costs one copy in and one copy out (`SAC.observe`).
4. `--compile` makes a graph each of `store_and_act`, `update_critics` and `update_actor`, from replay to target update.
5. `--cudagraphs` replays `respond` and `learn` as CUDA graphs, one launch each per environment step.
6. The environment steps while the device updates (`train`): the host waits for actions, never for updates.

    python leanrl/sac_continuous_action_torchcompile.py --env-id HalfCheetah-v5 --compile --cudagraphs
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
HIDDEN, LOG_STD_MIN, LOG_STD_MAX = 256, -5.0, 2.0
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
    limits |= dict.fromkeys(("target_network_frequency", "updates_per_step", "eval_episodes"), (1, 1e12))
    limits |= {"seed": (0, 2**32 - 1), "buffer_size": (args.num_envs, 1e12), "gamma": (0, 1), "tau": (0, 1)}
    limits |= {"policy_lr": (1e-12, 1), "q_lr": (1e-12, 1)}
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


class SAC:
    """The learner. All that changes is a tensor updated in place, because a CUDA graph replays kernels, not Python."""

    def __init__(self, args, envs, device):
        self.args, self.device, self.num_envs, self.updates = args, device, envs.num_envs, 0
        space, cuda = envs.single_action_space, device.type == "cuda"
        self.compile, self.cudagraphs = args.compile, args.cudagraphs and cuda
        self.obs_dim, self.act_dim = envs.single_observation_space.shape[0], space.shape[0]
        self.action_scale = torch.tensor((space.high - space.low) / 2, dtype=torch.float32, device=device)
        self.action_bias = torch.tensor((space.high + space.low) / 2, dtype=torch.float32, device=device)
        self.actor_shapes = layer_shapes(self.obs_dim, 2 * self.act_dim)
        self.critic_shapes = layer_shapes(self.obs_dim + self.act_dim, 1, 2)
        self.actor = init_parameters(self.actor_shapes, device)
        self.critics = init_parameters(self.critic_shapes, device)
        self.target_critics = self.critics.clone()
        self.log_alpha = torch.tensor([1.0 if args.autotune else args.alpha], device=device).log()
        self.actor_adam = Adam(self.actor, args.policy_lr)
        self.critic_adam = Adam(self.critics, args.q_lr)
        self.alpha_adam = Adam(self.log_alpha, args.q_lr)
        self.critic_losses, self.actor_losses = torch.zeros(3, device=device), torch.zeros(3, device=device)
        self.uniform = partial(torch.rand, args.batch_size, dtype=torch.float64, device=device)  # float32 skips rows
        self.noise = partial(torch.randn, args.batch_size, self.act_dim, device=device)
        self.warmup_updates = GRAPH_WARMUP * math.lcm(args.policy_frequency, args.target_network_frequency)
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
        self.learn_on = {(a, t): partial(self.learn, a, t) for a in (False, True) for t in (False, True)}
        if self.compile:
            torch._dynamo.config.trace_autograd_ops = True  # allows torch.autograd.grad in a compiled function
            self.store_and_act = torch.compile(self.store_and_act, fullgraph=True)
            self.update_critics = torch.compile(self.update_critics, fullgraph=True)
            self.update_actor = torch.compile(self.update_actor, fullgraph=True)
        if self.cudagraphs:
            self.respond = CudaGraphModule(self.respond, warmup=GRAPH_WARMUP)
            self.learn_on = {turns: CudaGraphModule(f, warmup=GRAPH_WARMUP) for turns, f in self.learn_on.items()}

    def policy(self, actor, obs):
        """Mean and log standard deviation of the Gaussian before tanh, each (batch, act_dim)."""
        *hidden, w3, b3 = unflatten(actor, self.actor_shapes)
        mean, log_std = (hidden_layers(obs, *hidden) @ w3 + b3).chunk(2, -1)
        return mean, LOG_STD_MIN + (LOG_STD_MAX - LOG_STD_MIN) / 2 * (log_std.tanh() + 1)

    def squash(self, mean, log_std, noise):
        """Actions in the environment's units, (batch, act_dim), and their log-probabilities, (batch,): appendix C."""
        squashed = (mean + log_std.exp() * noise).tanh()
        log_prob = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        log_prob = log_prob - (self.action_scale * (1 - squashed.square()) + 1e-6).log()
        return squashed * self.action_scale + self.action_bias, log_prob.sum(-1)

    def q_values(self, critics, obs, actions):
        """Both critics' values, (2, batch)."""
        *hidden, w3, b3 = unflatten(critics, self.critic_shapes)
        x = hidden_layers(torch.cat((obs, actions), -1).expand(2, -1, -1), *hidden)
        return (x * w3.mT).sum(-1) + b3.squeeze(-1)  # faster than a matmul with one column

    def replay(self, uniform):
        """Rows of the filled part of the buffer, (batch, sum(columns)), drawn by `uniform`, (batch,) from [0, 1)."""
        return self.buffer.index_select(0, (uniform * self.stored.clamp(max=self.args.buffer_size)).long())

    def update_critics(self, target_turn, uniform, noise):
        """Equation 5 for rows from `replay`, next actions by noise (batch, act_dim); returns the rows' observations."""
        obs, next_obs, actions, rewards, terminated = self.replay(uniform).split(self.columns, -1)
        next_actions, next_log_prob = self.squash(*self.policy(self.actor, next_obs), noise)
        next_q = self.q_values(self.target_critics, next_obs, next_actions).amin(0)
        next_v = next_q - self.log_alpha.exp() * next_log_prob
        target = rewards.squeeze(-1) + (1 - terminated.squeeze(-1)) * self.args.gamma * next_v
        critics = self.critics.detach().requires_grad_()
        q = self.q_values(critics, obs, actions)
        loss = (q - target).square().mean(-1).sum()
        self.critic_adam.step(self.critics, *torch.autograd.grad(loss, critics))
        self.critic_losses.copy_(torch.stack((*q.detach().mean(-1), loss.detach())))
        if target_turn:
            self.target_critics.lerp_(self.critics, self.args.tau)
        return obs

    def update_actor(self, obs, noises):
        """Equation 7, then equation 18 with the new actor, for obs (batch, obs_dim) and each pair of noises."""
        actor = self.actor.detach().requires_grad_()
        mean, log_std = self.policy(actor, obs)
        for noise, alpha_noise in noises:
            alpha = self.log_alpha.exp()
            actions, log_prob = self.squash(mean, log_std, noise)
            loss = (alpha * log_prob - self.q_values(self.critics, obs, actions).amin(0)).mean()
            self.actor_adam.step(self.actor, *torch.autograd.grad(loss, actor))
            actor = self.actor.detach().requires_grad_()
            mean, log_std = self.policy(actor, obs)  # for the temperature and for the next actor step
            alpha_loss = torch.zeros_like(alpha)
            if self.args.autotune:
                _, log_prob = self.squash(mean.detach(), log_std.detach(), alpha_noise)
                alpha_loss = -alpha * (log_prob - self.act_dim).mean()  # and its own derivative by log_alpha
                self.alpha_adam.step(self.log_alpha, alpha_loss.clone())
        self.actor_losses.copy_(torch.cat((loss.detach().view(1), self.log_alpha.exp(), alpha_loss)))

    def learn(self, actor_turn, target_turn):
        """One update, on the device from beginning to end."""
        obs = self.update_critics(target_turn, self.uniform(), self.noise())
        if actor_turn:
            noises = [(self.noise(), self.noise()) for _ in range(self.args.policy_frequency)]
            self.update_actor(obs, noises)

    def update(self):
        """Launch one update; on CUDA it still runs when this returns."""
        turns = (self.updates % self.args.policy_frequency == 0, self.updates % self.args.target_network_frequency == 0)
        self.learn_on[turns]()
        self.updates += 1

    def store_and_act(self, noise):
        """Write the transitions in `inbox` to the ring buffer and sample actions for the observations behind them."""
        rows, obs = self.inbox.split((sum(self.columns), self.obs_dim), -1)
        cursor = self.stored + torch.arange(self.num_envs, device=self.device)
        self.buffer.index_copy_(0, cursor % self.args.buffer_size, rows)
        self.stored.add_(self.num_envs)
        self.actions.copy_(self.squash(*self.policy(self.actor, obs), noise)[0])

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
        names = ("qf1_values", "qf2_values", "qf_loss", "actor_loss", "alpha", "alpha_loss")
        return dict(zip(names, torch.cat((self.critic_losses, self.actor_losses)).tolist(), strict=True))

    def tensors(self):
        """By name, the tensors that make up the learner, save the replay buffer."""
        names = ("actor", "critics", "target_critics", "log_alpha", "critic_losses", "actor_losses", "stored")
        adams = [(name, getattr(self, name)) for name in ("actor_adam", "critic_adam", "alpha_adam")]
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
    learner = SAC(args, envs, device)
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
    learner = SAC(args, envs, device)
    learner.actor.copy_(checkpoint["learner"]["actor"])
    returns, total, (obs, _) = [], 0.0, envs.reset(seed=args.seed)
    while len(returns) < args.eval_episodes:
        gaussian = learner.policy(learner.actor, torch.as_tensor(obs, dtype=torch.float32, device=device))
        actions, _ = learner.squash(*gaussian, noise=torch.zeros_like(gaussian[0]))
        obs, rewards, terminated, truncated, _ = envs.step(actions.cpu().numpy())
        total += rewards[0]
        if terminated[0] or truncated[0]:
            returns, total = [*returns, total], 0.0
    envs.close()
    print(f"{len(returns)} episodes: mean return {np.mean(returns):.2f}, standard deviation {np.std(returns):.2f}")


if __name__ == "__main__":
    train(tyro.cli(Args))
