"""Deep Q-learning (DQN) for discrete actions, built for speed: Mnih et al. 2015, Nature 518, 529-533.

The algorithm is `DQN` and `train`. Below the line of dashes is the run, the same text in all scripts.
The updates are those of the plain version, dqn.py, but each action comes from a network that lacks the newest update.
Why it is faster:

1. `--compile` compiles an update, from storing and sampling to Adam, into one graph. `--cudagraphs` captures it as a
   CUDA graph, which takes one launch (`DQN.fast`).
2. Actions are computed on the host, in NumPy, and not at all when they are random (`HostNetwork`, `DQN.act`).
3. Transitions are collected on the host and sent to the device once per update (`BlockReplayBuffer`).
4. Environments are stepped without the overhead of gymnasium's vector environment (`DirectEnvs`).
5. The host does not wait for a CUDA device: it acts while the device updates (`DQN.update`).

    python leanrl/dqn_torchcompile.py --env-id CartPole-v1 --compile --cudagraphs
"""

import copy
import errno
import io
import json
import logging
import math
import os
import re
import shutil
import signal
import sys
import time
import zipfile
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict.nn import CudaGraphModule
from torch import nn
from torch._inductor.cpu_vec_isa import VecISA
from torch.utils import collect_env
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

LOG_INTERVAL = 100  # steps of the vector environment between logs of the losses
CompileMode = Literal["default", "max-autotune-no-cudagraphs"]


@dataclass
class Args:
    env_id: str = "CartPole-v1"  # gymnasium environment
    total_timesteps: int = 500_000  # total environment steps, summed over all environments
    num_envs: int = 1  # number of environments, stepped together
    buffer_size: int = 10_000  # capacity of the replay buffer, in transitions
    gamma: float = 0.99  # discount factor
    tau: float = 1.0  # target smoothing coefficient
    batch_size: int = 128  # transitions per update
    learning_starts: int = 10_000  # environment steps before the first update
    learning_rate: float = 2.5e-4  # learning rate of the Q-network
    train_frequency: int = 10  # environment steps between updates
    target_network_frequency: int = 500  # environment steps between updates of the target network
    start_e: float = 1.0  # epsilon, the probability of a random action, at the first step
    end_e: float = 0.05  # epsilon after its decay
    exploration_fraction: float = 0.5  # fraction of --total-timesteps over which epsilon decays linearly

    compile: bool = False  # compile the update with torch.compile
    cudagraphs: bool = False  # replay the update as a CUDA graph
    compile_mode: CompileMode = "default"  # torch.compile mode
    cuda: bool = True  # use a CUDA device if there is one
    threads: int = 1  # CPU threads for torch (0: torch's default, slower for networks this small)
    matmul_precision: Literal["highest", "high", "medium"] = "highest"  # of float32 matmuls (high: TF32, medium: bf16)

    exp_name: str = Path(__file__).stem  # name of the experiment, used in the run's folder name
    seed: int = 1  # seed of the environments, NumPy and torch
    run_dir: str = "runs"  # parent folder of all runs
    resume: str | None = None  # folder of a run to resume; its flags become the defaults
    checkpoint_interval: int = 0  # environment steps between checkpoints (0: only at the end)
    capture_video: bool = False  # record videos of the first environment
    track: bool = False  # also log to Weights & Biases
    wandb_project_name: str = "leanrl"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases team


class QNetwork(nn.Sequential):
    """Q(s, a) of all actions: maps (batch, obs_dim) to (batch, num_actions)."""

    def __init__(self, obs_dim, num_actions):
        super().__init__(
            nn.Linear(obs_dim, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, num_actions),
        )


class GreedyPolicy(nn.Module):
    """The policy exported to policy.pt2, actions of highest value: maps (batch, obs_dim) to (batch,)."""

    def __init__(self, q):
        super().__init__()
        self.q = q

    def forward(self, obs):
        return self.q(obs).argmax(-1)


class DQN:
    """The learner. CUDA graphs replay kernels but no Python: state that changes is in tensors, updated in place."""

    def __init__(self, args, envs, device):
        self.args = args
        self.device = device
        self.obs_dim = envs.single_observation_space.shape[0]
        self.num_actions = int(envs.single_action_space.n)
        with device:
            self.q = QNetwork(self.obs_dim, self.num_actions)
            self.target_q = copy.deepcopy(self.q)
        self.host_q = HostNetwork(self.q)
        self.optimizers = {"q": Adam(self.q.parameters(), args.learning_rate)}
        self.scalars = {name: torch.zeros((), device=device) for name in ("q_values", "td_loss")}
        self.rng = np.random.default_rng(args.seed)  # for random actions
        self.updates = 0

        self.widths = [self.obs_dim, self.obs_dim, 1, 1, 1]  # of obs, next_obs, actions, rewards, terminated
        # random numbers are drawn outside of compiled functions, so that all modes draw the same
        self.uniform = torch.zeros(args.batch_size, dtype=torch.float64, device=device)  # float32 is too coarse

        # a block holds the transitions between two updates, but no more than the buffer
        steps_between = math.ceil(args.train_frequency / args.num_envs)
        steps_in_buffer = max(1, args.buffer_size // args.num_envs)
        block_size = min(steps_between, steps_in_buffer) * args.num_envs
        self.replay = BlockReplayBuffer(args.buffer_size, block_size, sum(self.widths), device)
        self.store_and_learn = self.fast(self.store_and_learn)  # replaces the method

    def store_and_learn(self):
        """Store the newest transitions, then update the Q-network."""
        self.replay.store()
        batch = self.replay.sample(self.uniform)
        obs, next_obs, actions, rewards, terminated = batch.split(self.widths, -1)

        # TD loss
        with torch.no_grad():
            next_q = self.target_q(next_obs).amax(-1, keepdim=True)
            target = rewards + (1 - terminated) * self.args.gamma * next_q
        q = self.q(obs).gather(-1, actions.long())
        td_loss = (q - target).square().mean()
        self.keep(q_values=q.mean(), td_loss=td_loss)
        self.optimizers["q"].step(td_loss)

    def update(self):
        """Launch one update. On a CUDA device it may still be running when this returns.

        Until the next update, the host acts with the weights from before this one.
        """
        self.host_q.receive()
        self.replay.upload()
        self.uniform.uniform_()
        self.store_and_learn()
        self.host_q.send()
        self.updates += 1

    @torch.no_grad()
    def update_target(self):
        """Move the target network toward the Q-network by `tau`; 1 copies it."""
        for target, learned in zip(self.target_q.state_dict().values(), self.q.state_dict().values(), strict=True):
            if target.is_floating_point():  # BatchNorm has a count, too
                target.lerp_(learned, self.args.tau)

    def greedy(self, obs):
        """Actions of highest value (num_envs,) for `obs` (num_envs, obs_dim), both NumPy."""
        return self.host_q.forward(obs.astype(np.float32, copy=False)).argmax(-1)

    def act(self, obs, exploration):
        """Actions for `obs`, both NumPy: each is random with probability `exploration`, else greedy."""
        explore = self.rng.random(len(obs)) < exploration
        count = np.count_nonzero(explore)
        actions = self.greedy(obs) if count < len(obs) else np.empty(count, np.int64)
        if count:
            actions[explore] = self.rng.integers(self.num_actions, size=count)
        return actions

    def fast(self, function):
        """Compile and capture `function`, which takes and returns nothing, as the flags request."""
        if self.args.compile:
            torch._dynamo.reset()  # otherwise torch stops recompiling after some learners in one process
            torch._dynamo.config.trace_autograd_ops = True  # allows torch.autograd.grad in a compiled function
            torch.autograd.set_multithreading_enabled(False)  # keeps the backward pass in the traced thread
            VecISA._avx_code = ""  # the program that inductor tests g++ with; its own takes seconds
            options = torch._inductor.list_mode_options(self.args.compile_mode)
            if self.device.type == "cuda":
                options["combo_kernels"] = True  # fewer kernels
                if torch.__version__ < "2.12":
                    options["loop_ordering_after_fusion"] = False  # which fails in torch 2.11
            else:
                options["cpp_wrapper"] = True  # calls kernels from C++, which saves a seventh of this small update
            function = torch.compile(function, fullgraph=True, options=options)
        if self.args.cudagraphs:
            logging.getLogger("tensordict").setLevel(logging.WARNING)  # it logs every capture
            function = CudaGraphModule(function, warmup=3)  # captures at the third call, after compilation
        return function

    def keep(self, **scalars):
        """Keep scalars for the log, always in the same memory.

        Keep values before the optimizer changes weights that they depend on: compiled code may compute them late.
        """
        for name, value in scalars.items():
            self.scalars[name].copy_(value.detach())

    def losses(self):
        """Losses of the last update, by name. Waits for that update."""
        return dict(zip(self.scalars, torch.stack(list(self.scalars.values())).tolist(), strict=True))

    def policy(self):
        """A copy of the deterministic policy on the CPU, and example inputs."""
        return GreedyPolicy(copy.deepcopy(self.q).cpu()).eval(), (torch.zeros(2, self.obs_dim),)

    def tensors(self):
        """All tensors that updates change, except the replay buffer. Tensors missing here are not saved."""
        networks = {"q": self.q, "target_q": self.target_q, "host_q": self.host_q.network}
        return {
            "networks": {name: network.state_dict() for name, network in networks.items()},
            "optimizers": {name: optimizer.tensors() for name, optimizer in self.optimizers.items()},
        }

    def state_dict(self):
        """All of the learner's state, with which it goes on bit for bit."""
        return self.tensors() | {
            "replay": self.replay.state_dict(),
            "updates": self.updates,
            "numpy_rng": self.rng.bit_generator.state,
            "rng": torch.get_rng_state(),
            "cuda_rng": [torch.cuda.get_rng_state()] if self.device.type == "cuda" else [],
        }

    def load_state_dict(self, state):
        """Restore a `state_dict`, but keep the learning rate of this run's flags."""
        tensors = self.tensors()
        load_tensors(tensors, {name: state[name] for name in tensors})
        self.host_q.send()
        self.replay.load_state_dict(state["replay"])
        self.updates = state["updates"]
        self.rng.bit_generator.state = state["numpy_rng"]
        torch.set_rng_state(state["rng"])
        torch.cuda.set_rng_state_all(state["cuda_rng"])


def epsilon(step, args):
    """The probability of a random action at environment step `step`: linear from start_e to end_e, then constant."""
    progress = min(step / max(args.exploration_fraction * args.total_timesteps, 1), 1)
    return args.start_e + progress * (args.end_e - args.start_e)


def times_due(frequency, step, num_envs):
    """The number of multiples of `frequency` in (step - num_envs, step], the last step of all environments."""
    return step // frequency - (step - num_envs) // frequency


class HostNetwork:
    """A copy of `network` that acts on the host, in NumPy, without a round trip to the device.

    `send` starts copying the newest weights. `receive` waits for that copy and puts the weights to use.
    """

    def __init__(self, network):
        self.network = copy.deepcopy(network).cpu().requires_grad_(False)
        self.forward = numpy_function(self.network)
        self.newest = flat_views(network)
        self.in_use = flat_views(self.network)
        sizes = [len(weights) for weights in self.in_use]
        on_cuda = self.newest[0].is_cuda
        self.arriving = torch.zeros(sum(sizes), pin_memory=on_cuda)
        self.arriving_parts = self.arriving.split(sizes)
        self.arrived = torch.cuda.Event() if on_cuda else torch.cpu.Event()
        self.send()

    def send(self):
        self.arriving.copy_(torch.cat(self.newest), non_blocking=True)  # one copy instead of one per tensor
        self.arrived.record()

    def receive(self):
        self.arrived.synchronize()
        torch._foreach_copy_(self.in_use, self.arriving_parts)


def flat_views(network):
    """A network's parameters and buffers, viewed as vectors."""
    return [tensor.detach().view(-1) for tensor in (*network.parameters(), *network.buffers())]


def numpy_function(module):
    """A CPU `module` as a function of a NumPy array (batch, inputs).

    A small network takes a few microseconds in NumPy and tens of them in torch. The function shares the memory of the
    weights: it sees in-place changes, but no replaced parameters. Layers not listed here are called in torch.
    """
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        functions = [numpy_function(layer) for layer in module]

        def sequence(x):
            for function in functions:
                x = function(x)
            return x

        return sequence
    if type(module) is nn.Linear and module.bias is not None:
        weight, bias = module.weight.detach().numpy().T, module.bias.detach().numpy()[None]
        return lambda x: x.dot(weight) + bias
    if type(module) is nn.Tanh:
        return np.tanh
    if type(module) is nn.ReLU:
        return partial(np.maximum, np.zeros((), np.float32))  # a Python 0 would be converted at each call
    return lambda x: module(torch.from_numpy(x)).detach().numpy()


class Adam:
    """Adam (Kingma and Ba 2015, arXiv:1412.6980) for use in compiled functions, where torch.optim's breaks the graph.

    To change the learning rate, call `lr.fill_(value)`.
    """

    beta1, beta2, eps = 0.9, 0.999, 1e-8

    def __init__(self, weights, lr):
        self.weights = [w for w in weights if w.requires_grad]
        self.m = [torch.zeros_like(w) for w in self.weights]
        self.v = [torch.zeros_like(w) for w in self.weights]
        device = self.weights[0].device
        self.lr = torch.tensor(lr, device=device)
        self.rates = torch.tensor((1 - self.beta1, 1 - self.beta2), device=device)
        self.corrections = torch.zeros_like(self.rates)  # for bias, 1 - beta**t: moving averages of ones

    @torch.no_grad()
    def step(self, loss):
        """Update the weights in place by the gradient of `loss`."""
        gradients = torch.autograd.grad(loss, self.weights, materialize_grads=True)  # 0 for weights not in the loss
        self.corrections.add_(self.rates * (1 - self.corrections))
        torch._foreach_lerp_(self.m, gradients, 1 - self.beta1)
        torch._foreach_mul_(self.v, self.beta2)
        torch._foreach_addcmul_(self.v, gradients, gradients, 1 - self.beta2)

        # weights -= lr * (m / correction1) / (sqrt(v / correction2) + eps), with all scalars in the denominator
        correction1, correction2 = self.corrections.unbind()
        root = correction2.sqrt()
        denominator = torch._foreach_sqrt(self.v)
        torch._foreach_add_(denominator, self.eps * root, alpha=1)  # without `alpha`, the host would wait
        torch._foreach_mul_(denominator, correction1 / (self.lr * root))
        torch._foreach_addcdiv_(self.weights, self.m, denominator, -1)

    def tensors(self):
        """The state that a resumed run needs."""
        return {"m": self.m, "v": self.v, "corrections": self.corrections}


class BlockReplayBuffer:
    """Transitions on the device, one per row. The newest overwrite the oldest.

    Transitions are collected in a block of host memory. `upload` starts its copy to the device, and `store` writes the
    block to the buffer there. In training, the host waits only for the end of the last copy.
    """

    def __init__(self, size, block_size, width, device):
        require_memory("buffer_size", size, 4 * width, device)
        on_cuda = device.type == "cuda"
        self.host_block = torch.zeros(block_size, width, pin_memory=on_cuda)
        self.host_rows = self.host_block.numpy()
        self.collected = 0  # transitions in `host_block`
        self.block = self.host_block.to(device)  # the same memory on a CPU
        self.uploaded = torch.zeros((), dtype=torch.int64, device=device)  # transitions in `block`
        self.block_uploaded = torch.cuda.Event() if on_cuda else torch.cpu.Event()

        self.size = size
        self.rows = torch.empty(size + 1, width, device=device)  # the last row takes rows that are not to be stored
        self.stored = torch.zeros((), dtype=torch.int64, device=device)  # transitions stored so far

    def collect(self, obs, next_obs, actions, rewards, terminated):
        """Add a transition per environment to the block; arguments are NumPy (num_envs, ...)."""
        if self.collected == len(self.host_rows):
            self.upload()
            self.store()
        if self.collected == 0:
            self.block_uploaded.synchronize()
        rows = self.host_rows[self.collected : self.collected + len(obs)]
        columns = (obs, next_obs, actions[:, None], rewards[:, None], terminated[:, None])
        np.concatenate(columns, 1, rows, casting="unsafe")
        self.collected += len(obs)

    def upload(self):
        """Start copying the block to the device, and begin a new one."""
        self.block.copy_(self.host_block, non_blocking=True)
        self.block_uploaded.record()
        self.uploaded.fill_(self.collected)
        self.collected = 0

    def store(self):
        """Write the transitions uploaded to the device to the buffer."""
        i = torch.arange(len(self.block), device=self.block.device)
        places = torch.where(i < self.uploaded, (self.stored + i) % self.size, self.size)
        self.rows.index_copy_(0, places, self.block)
        self.stored.add_(self.uploaded)

    def sample(self, uniform):
        """Pick stored rows (batch, width) by the random numbers `uniform` (batch,) in [0, 1)."""
        return self.rows.index_select(0, (uniform * self.stored.clamp(max=self.size)).long())

    def state_dict(self):
        self.upload()
        self.store()
        rows = self.rows[: self.stored.clamp(max=self.size)].to("cpu", copy=True)
        return {"rows": rows, "stored": self.stored, "size": self.size}

    def load_state_dict(self, state):
        if state["size"] != self.size:
            refuse("buffer_size", self.size, f"the checkpoint has {state['size']}")
        self.rows[: len(state["rows"])] = state["rows"]
        self.stored.copy_(state["stored"])
        self.collected = 0


def load_tensors(tensors, saved):
    """Copy `saved` into `tensors`, nested dictionaries of one structure, in place: CUDA graphs stay valid."""

    def load(tensor, value):
        if (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
            raise ValueError(f"{value.dtype} {tuple(value.shape)} instead of {tensor.dtype} {tuple(tensor.shape)}")
        tensor.detach().copy_(value)

    tree_map(load, tensors, saved)


def require_memory(name, value, bytes_each, device):
    """Refuse an argument if `value` items of `bytes_each` do not fit in the memory of `device`."""
    if device.type == "cuda":
        memory, _ = torch.cuda.mem_get_info()
    elif hasattr(os, "sysconf"):  # not on Windows
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        return
    room = memory - 2 * 2**30  # leaves 2 GiB for networks, batches and libraries
    if value * bytes_each > room:
        refuse(name, value, f"give at most {room // bytes_each}, which takes {room / 1e9:.0f} GB")


def train(args):
    """Train an agent."""
    device, folder = prepare(args)
    if args.cudagraphs and device.type == "cpu":
        print("warning: --cudagraphs needs a CUDA device; running without", file=sys.stderr)
        args.cudagraphs = False
    if args.resume is None and args.total_timesteps <= args.learning_starts:
        refuse("total_timesteps", args.total_timesteps, f"give more than --learning-starts, {args.learning_starts}")
    envs = DirectEnvs(make_envs(args, folder))
    require_discrete_actions(args, envs)
    learner = DQN(args, envs, device)
    with Run(args, folder, envs, learner) as run:
        obs, _ = envs.reset(seed=args.seed + run.step)
        while run.unfinished():
            actions = learner.act(obs, epsilon(run.step, args))
            next_obs, rewards, terminated, truncated, _ = envs.step(actions)  # while CUDA runs the last update
            learner.replay.collect(obs, next_obs, actions, rewards, terminated)
            ended = terminated | truncated
            obs = next_obs
            if any(ended):
                obs = envs.restart(ended)
            run.advance(rewards, ended)
            if run.step > args.learning_starts:
                for _ in range(times_due(args.train_frequency, run.step, args.num_envs)):
                    learner.update()
                if times_due(args.target_network_frequency, run.step, args.num_envs):
                    learner.update_target()
            if learner.updates and run.step // args.num_envs % LOG_INTERVAL == 0:
                run.log(learner.losses())


class DirectEnvs(gym.vector.VectorWrapper):
    """Steps the environments of a SyncVectorEnv without its overhead, which can exceed their own time."""

    def __init__(self, envs):
        super().__init__(envs)
        self.shape = envs.observation_space.shape

    def step(self, actions):
        """Like gymnasium's `step`, without infos. Call `restart` where an episode has ended."""
        self.obs = [None] * len(actions)
        rewards = np.empty(len(actions))
        terminated = np.empty(len(actions), bool)
        truncated = np.empty(len(actions), bool)
        for i, env in enumerate(self.env.envs):
            self.obs[i], rewards[i], terminated[i], truncated[i], _ = env.step(actions[i])
        return np.array(self.obs).reshape(self.shape), rewards, terminated, truncated, {}

    def restart(self, ended):
        """Reset the environments where `ended` (num_envs,) is true; returns the observations of all."""
        for i in ended.nonzero()[0]:
            self.obs[i], _ = self.env.envs[i].reset()
        return np.array(self.obs).reshape(self.shape)


def make_envs(args, folder):
    """Make `num_envs` environments, stepped one after another; videos of the first are written to `folder`."""

    def make_env(index):
        if args.capture_video and index == 0:
            env = gym.make(args.env_id, render_mode="rgb_array")
            env = gym.wrappers.RecordVideo(env, str(folder / "videos"), disable_logger=True)
        else:
            env = gym.make(args.env_id)
        return env if isinstance(env.observation_space, gym.spaces.Box) else gym.wrappers.FlattenObservation(env)

    try:
        functions = [partial(make_env, index) for index in range(args.num_envs)]
        envs = SyncVectorEnv(functions, autoreset_mode=AutoresetMode.DISABLED)
    except (gym.error.Error, ImportError, NotImplementedError) as error:
        refuse("env_id", args.env_id, error)
    envs._add_info = lambda infos, info, index: infos  # infos are not collected: nothing reads them
    space = envs.single_observation_space
    if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
        refuse("env_id", args.env_id, f"observations must be vectors, not {space}")
    return envs


def require_discrete_actions(args, envs):
    """Refuse action spaces that are not discrete from 0 up."""
    space = envs.single_action_space
    if not isinstance(space, gym.spaces.Discrete) or space.start != 0:
        refuse("env_id", args.env_id, f"actions must be discrete and count from 0, not {space}")


# ---------------------------------------------------------------------------------------------------------------------
# The run: command line, folder, logs, checkpoints. Only the limits of flags depend on the algorithm.
# ---------------------------------------------------------------------------------------------------------------------


def parse_args():
    """Parse the command line. With --resume, the checkpoint's flags are the defaults."""
    args = tyro.cli(Args, description=__doc__)
    if args.resume is not None:
        saved = load_checkpoint(args.resume).get("args", {})
        defaults = {name: value for name, value in saved.items() if name in vars(args)}
        args = tyro.cli(Args, default=Args(**defaults), description=__doc__)
    return args


def refuse(name, value, remedy):
    """Exit with code 2 and one line that names the argument, its value and the remedy."""
    remedy = " ".join(str(remedy).split())
    print(f"error: --{name.replace('_', '-')} {value}: {remedy}", file=sys.stderr)
    raise SystemExit(2)


AT_LEAST_1 = ("total_timesteps", "num_envs", "buffer_size", "batch_size", "train_frequency", "target_network_frequency")
AT_MOST = {"gamma": 1, "tau": 1, "start_e": 1, "end_e": 1, "exploration_fraction": 1}
AT_MOST |= {"seed": 2**32 - 1, "threads": os.cpu_count()}


def prepare(args):
    """Check the arguments, configure and seed the libraries; returns the device and the path of the run's folder."""
    if "://" in args.run_dir:
        refuse("run_dir", args.run_dir, "give a local folder, or one where remote storage is mounted")
    for name, value in vars(args).items():
        low, high = int(name in AT_LEAST_1), AT_MOST.get(name, math.inf)
        if isinstance(value, (int, float)) and not low <= value <= high:
            refuse(name, value, f"give a number from {low} to {high}")
    torch.set_float32_matmul_precision(args.matmul_precision)
    if args.threads:
        torch.set_num_threads(args.threads)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    name = f"{args.env_id}__{args.exp_name}__{args.seed}__{datetime.now():%Y-%m-%d_%H-%M-%S.%f}"
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    return device, Path(args.run_dir).expanduser().absolute() / name.replace("/", "_").replace(":", "_")


def load_checkpoint(resume, check=False):
    """Load a checkpoint to the CPU, with or without a check of its checksum; `resume` is its file or its folder."""
    path = Path(resume).expanduser()
    path = path / "checkpoint.pt" if path.is_dir() else path
    try:
        if check and zipfile.ZipFile(path).testzip() is not None:
            raise ValueError("its checksum is wrong")  # torch.load does not check it
        with suppress(RuntimeError):  # not every file system in user space can map files
            return dict(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:
        refuse("resume", resume, f"give the folder of a run with an intact checkpoint.pt ({error})")


def all_finite(state):
    """Whether all floats in nested dictionaries and lists of tensors are finite; in parts, to save memory."""
    floats = [leaf for leaf in tree_leaves(state) if torch.is_tensor(leaf) and leaf.is_floating_point()]
    return all(part.isfinite().all() for leaf in floats for part in leaf.reshape(-1).split(2**24))


def replace_file(path, write):
    """Write the file at `path` with `write(file)`; a crash leaves either the old or the new file."""
    path.parent.mkdir(parents=True, exist_ok=True)  # it may have been deleted
    temporary = path.with_suffix(".tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            try:
                os.fsync(file.fileno())
            except OSError as error:
                if error.errno != errno.EINVAL:  # not every file system in user space can sync
                    raise
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        raise OSError(f"could not write {path}: is the disk full? ({error})") from error
    finally:
        temporary.unlink(missing_ok=True)


class ProgressBar(tqdm):
    """A progress bar that tolerates a closed stderr."""

    def display(self, *args, **kwargs):
        with suppress(OSError):
            super().display(*args, **kwargs)


class Run:
    """Context manager of the training loop: logs, and files that are also written after a signal or an error."""

    def __init__(self, args, folder, envs, learner):
        self.args = args
        self.folder = folder
        self.envs = envs
        self.learner = learner
        self.step = self.episodes = 0
        self.recent_returns = deque(maxlen=20)
        self.returns = np.zeros(args.num_envs)  # of the episodes in progress
        self.lengths = np.zeros(args.num_envs, int)
        self.signal = None
        self.diverged = False
        self.pid = os.getpid()
        if args.resume is not None:
            self.restore(load_checkpoint(args.resume, check=True))
        self.log_step = self.saved_step = self.step
        self.config = {"script": Path(__file__).stem, "compile": False, "cudagraphs": False} | vars(args)
        self.config["device"] = torch.cuda.get_device_name() if learner.device.type == "cuda" else "cpu"
        names = ("torch", "tensordict", "gymnasium", "envpool", "numpy", "mujoco", "mujoco-warp", "warp-lang", "popgym")
        installed = [package for name in names for package in distributions(name=name)]
        self.config["versions"] = {"python": sys.version} | {package.name: package.version for package in installed}
        cpu = " ".join(re.findall("Model name: +(.*)", collect_env.get_cpu_info(collect_env.run)))
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0  # Windows
        self.config["machine"] = {"cpu": cpu, "cores": os.cpu_count(), "memory_gib": round(memory / 2**30)}
        policy, inputs = learner.policy()
        shapes = tuple({0: torch.export.Dim("batch")} for _ in inputs)
        self.program = torch.export.export(policy, inputs, dynamic_shapes=shapes)  # the forward pass for policy.pt2
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / "config.json", "x") as file:  # no other run's
                json.dump(self.config, file, indent=2)
            shutil.copy(__file__, folder)
        except OSError as error:
            refuse("run_dir", args.run_dir, f"give a folder that can be written ({error})")
        if args.track:
            import wandb

            labels = {"project": args.wandb_project_name, "entity": args.wandb_entity, "name": folder.name}
            self.wandb = wandb.init(**labels, dir=folder, config=self.config, sync_tensorboard=True)
        self.writer = SummaryWriter(folder)
        size = {"total": args.total_timesteps, "initial": self.step, "unit": "step", "dynamic_ncols": True}
        self.bar = ProgressBar(**size, disable=sys.stderr is None)
        self.start_time = self.log_time = time.perf_counter()

    def restore(self, checkpoint):
        """Restore the run from a checkpoint."""
        try:
            self.learner.load_state_dict(checkpoint["learner"])
            self.step = checkpoint["global_step"]
            self.episodes = checkpoint["episodes"]
            self.recent_returns.extend(checkpoint["returns"])
        except Exception as error:
            refuse("resume", self.args.resume, f"this checkpoint does not fit the script: {error!r}")
        if self.step >= self.args.total_timesteps:
            refuse("total_timesteps", self.args.total_timesteps, f"give more than {self.step}, the checkpoint's step")

    def __enter__(self):
        signals = [sig for sig in signal.Signals if sig.name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGXCPU")]
        caught = [sig for sig in signals if signal.getsignal(sig) != signal.SIG_IGN]  # nohup ignores SIGHUP
        self.handlers = {sig: signal.signal(sig, self.on_signal) for sig in caught}
        return self

    def on_signal(self, number, frame):
        """End the loop in `advance`. A second Ctrl-C interrupts at once, except within a second: wrappers send two."""
        if os.getpid() != self.pid:
            os._exit(128 + number)  # a subprocess of the environment, which inherited this handler
        if self.signal is None:
            self.signal, self.signal_time = number, time.perf_counter()
        elif number == signal.SIGINT and time.perf_counter() > self.signal_time + 1:
            raise KeyboardInterrupt

    def unfinished(self):
        """Whether to continue. Saves a checkpoint first if one is due."""
        if self.step >= self.args.total_timesteps:
            return False  # `__exit__` saves the last checkpoint
        interval = self.args.checkpoint_interval
        if interval is None:
            interval = self.args.total_timesteps // 20
        if interval and self.step // interval > self.saved_step // interval:
            try:
                self.save()
            except OSError as error:
                print(f"error: {error}; the run goes on, and its last checkpoint is kept", file=sys.stderr)
        return True

    def advance(self, rewards, ended):
        """Count a step of all environments. NumPy (num_envs,): `rewards`, `ended` where an episode is over."""
        self.step += self.args.num_envs
        self.returns += rewards
        self.lengths += 1
        for i in ended.nonzero()[0]:
            self.writer.add_scalar("charts/episodic_return", self.returns[i], self.step)
            self.writer.add_scalar("charts/episodic_length", self.lengths[i], self.step)
            self.recent_returns.append(float(self.returns[i]))
            self.bar.set_postfix({"return": f"{np.mean(self.recent_returns):.1f}"}, refresh=False)
            self.episodes += 1
            self.returns[i] = self.lengths[i] = 0
        self.bar.update(self.args.num_envs)
        if self.signal is not None:
            raise SystemExit(128 + self.signal)  # through `__exit__`, which saves

    def log(self, losses):
        """Log losses by name and the speed since the last log. End the run if a loss is not finite."""
        now = time.perf_counter()
        self.writer.add_scalar("charts/SPS", (self.step - self.log_step) / (now - self.log_time), self.step)
        self.log_step, self.log_time = self.step, now
        for name, value in losses.items():
            self.writer.add_scalar(f"losses/{name}", value, self.step)
            if "loss" in name and not math.isfinite(value):
                self.end_at_nan(f"{name} is {value}")

    def end_at_nan(self, what):
        """End the run with exit code 1. The last checkpoint, if there is one, is kept."""
        self.diverged = True
        causes = "NaN in observations or rewards, or too high a learning rate"
        raise SystemExit(f"error: step {self.step}: {what}; usual causes: {causes}")

    def save(self):
        """Write policy.pt2 and checkpoint.pt, which is never the newer one."""
        self.saved_step = self.step
        state = self.learner.state_dict()
        if not all_finite(state):
            self.end_at_nan("the checkpoint would hold NaN or inf")
        policy, _ = self.learner.policy()
        self.program.state_dict.update(policy.state_dict(keep_vars=True))
        program = io.BytesIO()  # torch.export.save would abort the process at a full disk
        torch.export.save(self.program, program)
        replace_file(self.folder / "policy.pt2", lambda file: file.write(program.getbuffer()))
        checkpoint = {"args": vars(self.args), "global_step": self.step, "episodes": self.episodes}
        checkpoint |= {"returns": list(self.recent_returns), "learner": state}
        replace_file(self.folder / "checkpoint.pt", lambda file: torch.save(checkpoint, file))

    def close(self):
        """Write summary.json; close environments and logs."""
        results = {"global_step": self.step, "episodes": self.episodes}
        results["wall_seconds"] = time.perf_counter() - self.start_time
        finite = [value for value in self.recent_returns if math.isfinite(value)]
        results["episodic_return"] = float(np.mean(finite)) if finite else None
        summary = json.dumps(self.config | results, indent=2)
        with suppress(OSError):  # stderr may be closed
            self.bar.close()
        with suppress(Exception, SystemExit):  # an environment that fails to close must not fail the run
            self.envs.close()
        replace_file(self.folder / "summary.json", lambda file: file.write(summary.encode()))
        self.writer.close()
        if self.args.track:
            self.wandb.finish()

    def __exit__(self, kind, error, traceback):
        """Save and close. An error here does not hide the one that ended the run. A signal may break pipes, too."""
        try:
            if not self.diverged and (kind is not KeyboardInterrupt or self.signal is None):  # no second Ctrl-C
                self.save()
        except SystemExit as not_finite:
            if error is None:
                raise
            print(not_finite, file=sys.stderr)
        finally:
            self.close()
            for number, handler in self.handlers.items():
                signal.signal(number, handler)
        if self.signal is not None and isinstance(error, (type(None), KeyboardInterrupt, EOFError, ConnectionError)):
            raise SystemExit(128 + self.signal)


if __name__ == "__main__":
    train(parse_args())

# `uv run` reads and installs these requirements (PEP 723).
# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#     "torch>=2.11,<2.16", "tensordict>=0.12,<0.16", "gymnasium>=1.1,<2", "numpy>=1.26,<3",
#     "tyro>=1.0,<2", "tqdm>=4.66", "tensorboard>=2.18", "wandb>=0.20",
# ]
# ///
