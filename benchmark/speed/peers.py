"""Train other libraries' agents at the settings of our plain scripts, for their speed (requirements/peers.txt).

    ./run.sh --algos sac_continuous_action --modes plain eager compile sb3 sbx
    python -m benchmark.speed.peers --settings

The peers are sb3 (Stable-Baselines3 with sb3-contrib, in PyTorch) and sbx (the same algorithms in JAX), measured
interleaved with the modes of this repository. checkouts.py runs CleanRL. --settings prints the settings of each
algorithm in one table: ours, and those that the peers' models report.
"""

import copy
import dataclasses
import importlib
import importlib.metadata
import inspect
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from benchmark.speed.rounds import PEER_MODULES
from common.algorithms import ALGORITHMS
from common.arguments import refuse, stop
from common.curves import RETURN
from common.scripts import load, optimizers_of
from common.slices import SLICES, TimeSlices
from common.tables import Table
from instruments.playing import flat_mask

try:
    from sb3_contrib import MaskablePPO, RecurrentPPO
    from sb3_contrib.common.wrappers import ActionMasker
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.noise import NormalActionNoise
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
    from stable_baselines3.common.utils import LinearSchedule
    from stable_baselines3.common.vec_env import VecEnv, VecNormalize
except ImportError as error:
    stop(f"peers.py: pip install -r requirements/peers.txt ({error})")

PACKAGES = {"sb3": ("stable-baselines3", "sb3-contrib", "torch"), "sbx": ("sbx-rl", "jax")}
CLASSES = {algo: entry.name.split()[0] for algo, entry in ALGORITHMS.items() if entry.peer_flags}  # of learners
FLAGS = (
    "env_id",
    "total_timesteps",
    "num_envs",
    "seed",
    "run_dir",
    "threads",
    "cuda",
    "learning_starts",
    "buffer_size",
)
BURNIN = 100  # environment steps from the first update to the first slice, for remaining compilation


class Games(VecEnv):
    """A script's AtariEnvs for the peers, which expect an episode to start in the step that ends the previous one."""

    def __init__(self, script, args):
        self.envs = script.AtariEnvs(args, args.seed)
        self.returns = np.zeros(args.num_envs)
        super().__init__(args.num_envs, self.envs.single_observation_space, self.envs.single_action_space)

    def reset(self):
        return self.envs.reset()[0]

    def step_async(self, actions):
        self.actions = actions

    def step_wait(self):
        obs, rewards, terminated, truncated, infos = self.envs.step(self.actions)
        ended = terminated | truncated
        self.returns += infos["raw_rewards"]
        reports = [{} for _ in ended]
        for i in ended.nonzero()[0]:
            reports[i] = {"terminal_observation": obs[i], "TimeLimit.truncated": truncated[i]}
            if infos["game_ended"][i]:
                reports[i]["episode"] = {"r": self.returns[i]}
                self.returns[i] = 0
        if ended.any():
            obs = obs.copy()
            ids = np.flatnonzero(ended)
            obs[ended], *_ = self.envs.pool.step(np.zeros(ids.size, np.int32), ids)  # the action is ignored
            self.envs.ended[:] = False
        return obs, rewards, ended, reports

    def close(self):
        self.envs.close()

    def get_attr(self, attr_name, indices=None):
        return [getattr(self.envs, attr_name)] * self.num_envs

    def set_attr(self, attr_name, value, indices=None):
        raise NotImplementedError

    def env_method(self, method_name, *method_args, indices=None, **method_kwargs):
        raise NotImplementedError

    def env_is_wrapped(self, wrapper_class, indices=None):
        return [False] * self.num_envs


class Encoder(BaseFeaturesExtractor):
    """A copy of the layers before our recurrent cell, for sb3-contrib's."""

    def __init__(self, space, encoder):
        super().__init__(space, encoder[0].out_features)
        self.encoder = copy.deepcopy(encoder)

    def forward(self, obs):
        return self.encoder(obs)


class Watch(BaseCallback):
    """Logs returns like our scripts. With `slices`, ends time slices when a rollout starts, once the agent learns."""

    def __init__(self, folder, slices=None):
        super().__init__()
        self.writer = SummaryWriter(str(folder))
        self.slices = slices
        self.start = time.perf_counter()
        self.learned_step = self.warmup_seconds = None

    def _on_step(self):
        for info in self.locals["infos"]:
            if "episode" in info:
                self.writer.add_scalar(RETURN, float(info["episode"]["r"]), self.num_timesteps)
        return True

    def _on_rollout_start(self):
        if not self.model._n_updates:
            return
        if self.learned_step is None:
            self.learned_step = self.num_timesteps
        if self.num_timesteps < self.learned_step + BURNIN:
            return
        if self.warmup_seconds is None:
            self.warmup_seconds = time.perf_counter() - self.start
        if self.slices:
            self.slices(self.num_timesteps)


def check_args(peer, script, args):
    """Refuse flags that have a different meaning or none for the peer."""
    defaults = script.Args()
    for name, value in vars(args).items():
        if name not in FLAGS and value != getattr(defaults, name):
            refuse(name.replace("_", "-"), value, f"leave it out: {peer} runs at the script's defaults")
    if getattr(args, "train_frequency", args.num_envs) % args.num_envs:
        refuse("num-envs", args.num_envs, f"{peer} needs a divisor of --train-frequency {args.train_frequency}")


def prepare(script, args):
    """Like the script's `prepare`; also set JAX, not imported yet, to torch's threads and float32 precision."""
    device, _ = script.prepare(args)
    os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = args.matmul_precision
    os.environ["PJRT_NPROC"] = str(torch.get_num_threads())
    return device


def is_atari(script):
    return hasattr(script, "AtariEnvs")


def make_ours(algo, script, args):
    """Our learner with a minimal replay buffer."""
    make_envs = script.make_games if is_atari(script) else script.make_envs
    envs = make_envs(args, folder=None)
    if hasattr(args, "buffer_size"):
        args = dataclasses.replace(args, buffer_size=2 * args.num_envs)
    learner = getattr(script, CLASSES[algo])(args, envs, torch.device("cpu"))
    envs.close()
    return learner


def networks_of(learner):
    """Our learner's networks by name."""
    return {name: value for name, value in vars(learner).items() if isinstance(value, nn.Module)}


def hidden_layers(peer, algo, learner):
    """Widths of the hidden layers of our first network, except for those in the peer's convolutional network."""
    network = next(iter(networks_of(learner).values()))
    network = getattr(network, "actor", network)
    widths = [layer.out_features for layer in network.modules() if isinstance(layer, nn.Linear)][:-1]
    return [] if (peer, algo) == ("sb3", "dqn_atari") else widths


def libraries(algo):
    """The peers from packages that have an algorithm."""
    return [peer for peer in PACKAGES if peer in ALGORITHMS[algo].peers]


def has_memory(algo):
    return algo == "ppo_lstm"


def library_class(peer, algo, masked=False):
    """The peer's class for an algorithm."""
    if masked:
        return MaskablePPO
    return RecurrentPPO if has_memory(algo) else getattr(importlib.import_module(PEER_MODULES[peer]), CLASSES[algo])


def gives_masks(script, env_id):
    """Whether a script reads action masks and the environment gives them."""
    if not hasattr(script, "ActionMasks"):
        return False
    env = gym.make(env_id)
    _, info = env.reset()
    env.close()
    return "action_mask" in info


def with_masks(env, script):
    """`env` with the method `action_masks` that sb3-contrib calls."""
    return ActionMasker(script.LastInfo(env), lambda env: flat_mask(env.info["action_mask"]))


def make_model(peer, algo, script, args, device):
    """The peer's agent with its environments, at the settings of `args`."""
    name = CLASSES[algo]
    ours = make_ours(algo, script, args)
    masked = peer == "sb3" and gives_masks(script, args.env_id)
    wrapping = {"wrapper_class": with_masks, "wrapper_kwargs": {"script": script}} if masked else {}
    envs = Games(script, args) if is_atari(script) else make_vec_env(args.env_id, args.num_envs, **wrapping)
    optimizer = next(iter(optimizers_of(ours).values()))
    policy = {"net_arch": hidden_layers(peer, algo, ours), "optimizer_kwargs": {"eps": optimizer.defaults["eps"]}}
    settings = {theirs: getattr(args, flag) for flag, theirs in ALGORITHMS[algo].peer_flags.items()}
    if name == "PPO":
        if hasattr(ours, "normalizer"):
            envs = VecNormalize(envs, gamma=args.gamma)
        policy |= {"ortho_init": True}
        settings |= {"batch_size": args.num_envs * args.num_steps // args.num_minibatches}
        settings |= {"learning_rate": LinearSchedule(args.learning_rate, 0.0, 1.0)}
        settings |= {"vf_coef": args.vf_coef / 2}  # the peer's error is not halved
        settings |= {"clip_range_vf": args.clip_coef if peer == "sb3" else None}
    if has_memory(algo):
        policy |= {"lstm_hidden_size": script.HIDDEN, "shared_lstm": True, "enable_critic_lstm": False}
        policy |= {"features_extractor_class": Encoder, "features_extractor_kwargs": {"encoder": ours.agent.encoder}}
    if name == "SAC":
        settings |= {"learning_rate": args.policy_lr, "qf_learning_rate": args.q_lr}
    if name == "TD3":
        shape = envs.action_space.shape
        noise = NormalActionNoise(np.zeros(shape), np.full(shape, args.exploration_noise))
        settings |= {"learning_rate": args.learning_rate, "action_noise": noise}
    if name == "DQN":
        settings |= {"learning_rate": args.learning_rate, "train_freq": args.train_frequency // args.num_envs}
        settings |= {"max_grad_norm": float("inf")}
    library = library_class(peer, algo, masked)
    known = inspect.signature(library).parameters
    settings = {name: value for name, value in settings.items() if name in known}
    kind = "CnnPolicy" if is_atari(script) else "MlpLstmPolicy" if has_memory(algo) else "MlpPolicy"
    return library(kind, envs, **settings, policy_kwargs=policy, seed=args.seed, device=device)


def train(peer, algo, *flags):
    """Train one peer with `flags` of our script `algo`, and write summary.json as the scripts do.

    With the flag --slices it takes turns with other processes.
    """
    if algo not in CLASSES or peer not in libraries(algo):
        choices = f"{' or '.join(PACKAGES)}, and one of {', '.join(CLASSES)}"
        stop(f"peers.py {peer} {algo}: choose {choices}")
    script = load(algo)
    args = tyro.cli(script.Args, args=[flag for flag in flags if flag != SLICES])
    check_args(peer, script, args)
    device = prepare(script, args)
    folder = Path(args.run_dir) / f"{args.env_id}__{peer}__{args.seed}__{time.time_ns()}"
    slices = TimeSlices(args.total_timesteps) if SLICES in flags else None
    watch = Watch(folder, slices)
    model = make_model(peer, algo, script, args, device)
    model.learn(args.total_timesteps, callback=watch, log_interval=None)
    watch.writer.close()
    returns = [episode["r"] for episode in model.ep_info_buffer][-20:]
    summary = {
        "script": f"{type(model).__module__.split('.')[0]}.{type(model).__name__}",
        "env_id": args.env_id,
        "seed": args.seed,
        "num_envs": args.num_envs,
        "device": device_name(peer, device),
        "matmul_precision": args.matmul_precision,
        "global_step": model.num_timesteps,
        "episodic_return": float(np.mean(returns)) if returns else None,
        "steady_sps": slices.steps_per_second if slices else None,
        "warmup_seconds": watch.warmup_seconds,
        "wall_seconds": time.perf_counter() - watch.start - (slices.waited if slices else 0),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES[peer]},
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2), encoding="utf-8")


def device_name(peer, device):
    """A peer's device, named as in the scripts."""
    if peer == "sbx":
        return importlib.import_module("jax").devices()[0].device_kind
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


# ---------------------------------------------------------------------------------------------------------------------
# Table of settings
# ---------------------------------------------------------------------------------------------------------------------

NOTES = (  # differences that no setting removes and no attribute shows: algorithm or script, peers, sentence
    (
        "PPO",
        "sb3",
        "the loss of a value is that of its clipped one; ours the larger of both",
    ),
    (
        "ppo_lstm",
        "sb3",
        "a minibatch is a range of transitions in order, of several environments; ours are whole sequences of some",
    ),
    ("PPO", "sb3, sbx", "an update has the learning rate of the next iteration, and so the last one 0"),
    ("PPO", "sbx", "actor and critic have an optimizer each, and gradients that are clipped separately"),
    ("ppo_atari_envpool", "sbx", "actor and critic have a convolutional network each, made equal after every step"),
    ("SAC", "sb3, sbx", "actor and temperature step after each step of the critics; ours twice after every second one"),
    ("SAC", "sb3, sbx", "the temperature learns from the actor's sample; ours from one more, by the new actor"),
    ("SAC", "sb3, sbx", "the log standard deviation is clipped to [-20, 2]; ours is bounded by tanh to [-5, 2]"),
    ("TD3", "sbx", "target networks move after every step of the critics; ours on the actor's turns"),
    ("TD3", "sbx", "the actor follows the smaller one of both critics; ours the first"),
    ("DQN", "sb3, sbx", "the loss is Huber's; ours the squared error, by which CartPole-v1 is learned sooner"),
    ("DQN", "sb3, sbx", "actions before learning starts are random; ours with the probability of exploration"),
    ("DQN", "sb3", "gradients are clipped, to a norm that is infinite here; ours are not"),
    ("dqn_atari", "sb3, sbx", "the replay buffer holds each frame eight times, 56 GB for a million; ours once"),
    ("ppo_atari_envpool", "sb3, sbx", "an episode starts within the step before; ours in a step that is counted"),
    ("dqn_atari", "sb3, sbx", "an episode starts within the step before; ours in a step that is counted"),
)


def networks_in_torch(network):
    """Matrices, activation and precision of a module's networks, without target networks."""
    modules = [module for name, module in network.named_modules() if "target" not in name]
    own = [pair for module in modules for pair in module.named_parameters(recurse=False)]
    weights = [parameter for name, parameter in own if name.startswith("weight")]
    shapes = [(inputs, outputs, *kernel) for outputs, inputs, *kernel in (weight.shape for weight in weights)]
    activations = Counter(type(module).__name__ for module in modules if isinstance(module, (nn.ReLU, nn.Tanh)))
    [(activation, _)] = activations.most_common(1)  # of hidden layers; a last layer may have another
    return rows_of_networks(shapes, activation, {str(weight.dtype) for weight in weights})


def networks_in_jax(policy):
    """The same for a policy in sbx; both critics of a pair are in one array."""
    import jax

    states = [getattr(policy, name) for name in ("actor_state", "vf_state", "qf_state") if hasattr(policy, name)]
    leaves = jax.tree_util.tree_leaves_with_path([state.params for state in states])
    weights = [leaf for path, leaf in leaves if path[-1].key == "kernel"]
    shapes = []
    for weight in weights:
        *kernel, inputs, outputs = weight.shape
        if len(kernel) == 1:
            shapes += kernel[0] * [(inputs, outputs)]
        else:
            shapes.append((inputs, outputs, *kernel))
    return rows_of_networks(shapes, policy.activation_fn.__name__, {str(weight.dtype) for weight in weights})


def rows_of_networks(shapes, activation, dtypes):
    counts = sorted(Counter("x".join(map(str, shape)) for shape in shapes).items())
    matrices = ", ".join(f"{count} of {shape}" if count > 1 else shape for shape, count in counts)
    precision = ", ".join(sorted(dtype.removeprefix("torch.") for dtype in dtypes))
    return {"matrices": matrices, "activation": activation.lower(), "precision": precision}


def rows_of_optimizers(eps, rates, annealed):
    rates = ", ".join(f"{name} {rate:g}" for name, rate in rates.items())
    return {"Adam's eps": f"{eps:g}", "learning rates": rates + (", falling to 0" if annealed else "")}


def optimizers_in_torch(optimizers, annealed):
    """Rows of torch's optimizers, by the name of the optimized part."""
    groups = {name: optimizer.param_groups[0] for name, optimizer in optimizers.items()}
    [eps] = {group["eps"] for group in groups.values()}
    return rows_of_optimizers(eps, {name: group["lr"] for name, group in groups.items()}, annealed)


def optimizers_of_sb3(name, model):
    """The optimizers of a model in sb3, by our names."""
    if name in ("PPO", "DQN"):
        return {"agent" if name == "PPO" else "q": model.policy.optimizer}
    optimizers = {"actor": model.actor.optimizer, "critics": model.critic.optimizer}
    return optimizers | ({"alpha": model.ent_coef_optimizer} if name == "SAC" else {})


def our_settings(algo, script, args):
    """The settings of our script, from its learner and flags."""
    name = CLASSES[algo]
    learner = make_ours(algo, script, args)
    rows = networks_in_torch(nn.ModuleDict(networks_of(learner)))
    rows |= optimizers_in_torch(optimizers_of(learner), getattr(args, "anneal_lr", False))
    rows |= {flag: getattr(args, flag) for flag in ALGORITHMS[algo].peer_flags}
    if name == "PPO":
        rows["minibatch"] = args.num_envs * args.num_steps // args.num_minibatches
        rows["vf_coef, of half the squared error"] = args.vf_coef
        rows["clip of the values"] = args.clip_coef if args.clip_vloss else None
        rows["normalized by running statistics"] = "observations, rewards" if hasattr(learner, "normalizer") else None
    else:
        rows["updates in a step"] = 1 / getattr(args, "train_frequency", 1)
    if name == "SAC":
        rows["steps of the actor in an update"] = 1
        rows["target entropy"] = learner.target_entropy
    if name == "TD3":
        rows["exploration_noise"] = args.exploration_noise
    return rows | {"threads": torch.get_num_threads()}


def peer_settings(peer, algo, script, args):
    """The same rows for a peer, read from its model."""
    name = CLASSES[algo]
    model = make_model(peer, algo, script, args, torch.device("cpu"))
    annealed = model.lr_schedule(0) == 0
    if peer == "sb3":
        rows = networks_in_torch(model.policy) | optimizers_in_torch(optimizers_of_sb3(name, model), annealed)
    else:
        rate = model.lr_schedule(1)
        rates = {
            "PPO": {"actor": rate, "critic": rate},
            "SAC": {"actor": rate, "critics": getattr(model, "qf_learning_rate", None), "alpha": rate},
            "TD3": {"actor": rate, "critics": getattr(model, "qf_learning_rate", None)},
            "DQN": {"q": rate},
        }[name]
        rows = networks_in_jax(model.policy)
        rows |= rows_of_optimizers(model.policy.optimizer_kwargs["eps"], rates, annealed)
    rows |= {flag: getattr(model, theirs, "-") for flag, theirs in ALGORITHMS[algo].peer_flags.items()}
    if name == "PPO":
        normalizer = model.get_vec_normalize_env()
        normalized = normalizer and normalizer.norm_obs and normalizer.norm_reward
        rows["minibatch"] = model.batch_size
        rows["vf_coef, of half the squared error"] = 2 * model.vf_coef
        rows["clip of the values"] = model.clip_range_vf
        rows["normalized by running statistics"] = "observations, rewards" if normalized else None
    else:
        rows["updates in a step"] = model.gradient_steps / model.train_freq.frequency
    if name == "SAC":
        rows["steps of the actor in an update"] = 1 / getattr(model, "policy_delay", 1)
        rows["target entropy"] = model.target_entropy
    if name == "TD3":
        rows["exploration_noise"] = model.action_noise._sigma[0]
    model.env.close()
    return rows | {"threads": torch.get_num_threads() if peer == "sb3" else os.environ["PJRT_NPROC"]}


def shown(value):
    """A setting as text; the peers have schedules for some."""
    value = value(1) if callable(value) else value
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    return value if isinstance(value, str) else f"{value:g}"


def settings(algo):
    """The settings of our script, and of the peers at them: {"ours": {row: text}, "sb3": ..., "sbx": ...}."""
    script = load(algo)
    args = script.Args()
    small_buffer = is_atari(script) and hasattr(args, "buffer_size")
    if small_buffer:
        args.buffer_size = 1000  # the peers allocate all of it
    prepare(script, args)
    columns = {"ours": our_settings(algo, script, args)}
    columns |= {peer: peer_settings(peer, algo, script, args) for peer in libraries(algo)}
    if small_buffer:
        for rows in columns.values():
            del rows["buffer_size"]
    return {column: {row: shown(value) for row, value in rows.items()} for column, rows in columns.items()}


def tables():
    """A Markdown table of `settings` for each algorithm, with NOTES below."""
    pages = ["Bold: it differs from ours. -: the peer has no such setting."]
    for algo, name in CLASSES.items():
        columns = settings(algo)
        rows = []
        for row, ours in columns["ours"].items():
            theirs = [columns[peer][row] for peer in libraries(algo)]
            rows.append([row, ours, *(setting if setting == ours else f"**{setting}**" for setting in theirs)])
        notes = [f"- {peers}: {note}" for key, peers, note in NOTES if key in (algo, name)]
        pages.append("\n".join([f"### {algo}\n", Table("", ("", *columns), rows).markdown(), "", *notes]))
    return "\n\n".join(pages)


if __name__ == "__main__":
    if sys.argv[1:] == ["--settings"]:
        print(tables())
    else:
        train(*sys.argv[1:])
