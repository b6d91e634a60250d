"""Train a script, or an edited copy, on tiny environments with known answers. Each tests one part of the algorithm.

    python -m instruments probe leanrl/sac_continuous_action.py --threads 1

Flags are those of the script; the probe sets environment, discount factor and folder. Five environments are from Andy
Jones (https://andyljones.com/posts/rl-debugging.html); the sixth truncates its episodes. The exit code is 1 if any
fails. If more than one fails, start with the first.
"""

import dataclasses
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
import tyro

from common.arguments import note, stop
from common.scripts import refuse_population, takes_discrete_actions_alone, train

GAMMA = 0.5  # small, so that bootstrapped values converge soon
SETTINGS = {  # for scripts that have these flags
    "buffer_size": 10_000,
    "learning_starts": 50,
    "batch_size": 64,
    "tau": 0.1,
    "train_frequency": 1,
    "target_network_frequency": 1,
    "policy_lr": 1e-3,
    "autotune": False,
    "alpha": 0.0,  # entropy would be part of the values
    "num_steps": 16,
    "num_minibatches": 2,
    "update_epochs": 4,
}
OFF_POLICY = {"total_timesteps": 400, "learning_rate": 1e-3}
ON_POLICY = {"total_timesteps": 5120, "learning_rate": 3e-3, "num_envs": 4}
WITH_RADAM = ON_POLICY | {"learning_rate": 0.05}  # PQN: RAdam's first steps are short


@dataclass
class Probe:
    """An environment and the correct answers: the value of each state or the best action in it."""

    name: str
    states: tuple[float, ...]
    """observations: a random one in episodes of one step, otherwise in sequence"""
    reward: Callable[[float, float], float]
    """reward of a state and an action, both from -1 to 1"""
    asks: str
    """"value" or "action" """
    expected: tuple[float, ...]
    failure: str
    """the likely cause of a wrong answer"""
    steps: int = 1
    truncates: bool = False

    def env_id(self, discrete):
        return f"Probe-{self.name}{'-discrete' * discrete}-v0"


PROBES = [
    Probe(
        name="constant",
        states=(0,),
        reward=lambda state, action: 1,
        asks="value",
        expected=(1,),
        failure="no value is learned: check the value loss, its optimizer, and `terminated`",
    ),
    Probe(
        name="observation",
        states=(-1, 1),
        reward=lambda state, action: state,
        asks="value",
        expected=(-1, 1),
        failure="values ignore observations: check shapes in the value loss, and the batch's observations",
    ),
    Probe(
        name="delay",
        states=(0, 1),
        reward=lambda state, action: state,
        asks="value",
        expected=(GAMMA, 1),
        failure="the next value is missing or not discounted: check gamma and next observations",
        steps=2,
    ),
    Probe(
        name="action",
        states=(0,),
        reward=lambda state, action: action,
        asks="action",
        expected=(1,),
        failure="nothing is learned, or the opposite: check the sign of the policy loss, and its optimizer",
    ),
    Probe(
        name="both",
        states=(-1, 1),
        reward=lambda state, action: state * action,
        asks="action",
        expected=(-1, 1),
        failure="actions ignore observations: check that a batch's observations, actions and rewards match",
    ),
    Probe(
        name="truncation",
        states=(0,),
        reward=lambda state, action: 1,
        asks="value",
        expected=(1 / (1 - GAMMA),),
        failure="truncated episodes are not bootstrapped: check what is stored as `terminated`",
        steps=2,
        truncates=True,
    ),
]
TOLERANCE = {"value": 0.1, "action": 0.3}


class Environment(gym.Env):
    """A probe's environment. The discrete actions 0 and 1 stand for -1 and 1."""

    def __init__(self, probe, discrete):
        self.probe = probe
        self.discrete = discrete
        self.observation_space = gym.spaces.Box(-1, 1, (1,))
        self.action_space = gym.spaces.Discrete(2) if discrete else gym.spaces.Box(-1, 1, (1,))

    def observe(self):
        states = self.probe.states
        if self.probe.steps == 1:
            self.state = self.np_random.choice(states)
        else:
            self.state = states[min(self.step_count, len(states) - 1)]
        return np.array([self.state], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.step_count = 0
        return self.observe(), {}

    def step(self, action):
        reward = self.probe.reward(self.state, 2 * action - 1 if self.discrete else action[0])
        self.step_count += 1
        ended = self.step_count == self.probe.steps
        return self.observe(), float(reward), ended and not self.probe.truncates, ended and self.probe.truncates, {}


for probe in PROBES:
    for discrete in (False, True):
        kwargs = {"probe": probe, "discrete": discrete}
        gym.register(probe.env_id(discrete), entry_point=Environment, kwargs=kwargs)


@torch.no_grad()
def answers(learner, probe, discrete):
    """The learner's answers."""
    obs = torch.tensor(probe.states, dtype=torch.float32)[:, None]
    policy, (_, *state) = learner.policy()  # the initial state of a memory, if there is one, is 0
    actions = policy(obs, *(torch.zeros(len(obs), *tensor.shape[1:]) for tensor in state))
    if isinstance(actions, tuple):
        actions, _ = actions
    if probe.asks == "action":
        found = 2 * actions - 1 if discrete else actions
    else:
        found = values(learner, obs, actions.to(learner.device), probe.steps)
    return found.flatten().tolist()


def values(learner, obs, actions, steps):
    """Values of the states in units of the environment's rewards; critics are evaluated at the policy's actions.

    In an episode of multiple `steps`, a policy with memory has seen the previous states.
    """
    if hasattr(learner, "normalizer"):
        scaled = torch.as_tensor(learner.normalizer.scale_obs(obs.numpy()), device=learner.device)
        if hasattr(learner.agent, "remember"):
            found = values_with_memory(learner, scaled, steps)
        else:
            found = learner.agent.critic(scaled)
        return found * max(learner.normalizer.std[-1], 0.1)  # scaled rewards are clipped at 10
    obs = obs.to(learner.device)
    if hasattr(learner, "agent"):
        if hasattr(learner.agent, "normalizer"):
            return learner.agent.value(learner.agent.normalizer(obs)) / learner.args.reward_scaler
        return learner.agent.critic(obs)
    if hasattr(learner, "q"):
        found = learner.q(obs)
        return (found[0] if isinstance(found, tuple) else found).amax(-1)  # of a network with a second head
    if hasattr(learner, "q_values"):
        return learner.q_values(learner.critics, obs, actions).amin(0)
    return torch.stack([critic(obs, actions) for critic in learner.critics]).amin(0)


def values_with_memory(learner, scaled, steps):
    """Values of normalized states by an agent with memory, starting from a recurrent state of 0."""
    state = torch.zeros(1, learner.agent.state_dim, device=scaled.device)
    found = []
    for row in scaled.split(1):
        next_state = learner.agent.remember(row, state)
        found.append(learner.agent.value(next_state))
        if steps > 1:
            state = next_state
    return torch.cat(found)


def find(script, args, probe, discrete):
    """Train on the probe's environment and return the learner's answers."""
    learners = []

    def start(run):
        learners.append(run.learner)
        run.save = lambda: None  # would take longer than the run
        run.bar.leave = False

    if getattr(args, "compile", False):
        torch.compiler.reset()  # compiled code has no guards against another learner
    try:
        train(script, args, start)
    except SystemExit as stop:
        if not str(stop.code).startswith("error: step"):
            raise
        note(stop.code)
        return [math.nan] * len(probe.expected)
    return answers(*learners, probe, discrete)


def line(probe, found):
    """Whether the answers are right, and the line to print."""
    good = np.allclose(found, probe.expected, rtol=0.05, atol=TOLERANCE[probe.asks])
    expected, found = (" ".join(f"{x:5.2f}" for x in numbers) for numbers in (probe.expected, found))
    verdict = "ok" if good else f"failed: {probe.failure}"
    return good, f"{probe.name:<12} {probe.asks:<7} expected {expected:<12} found {found:<12} {verdict}"


def main(path, script, words):
    """Probe the module `script`, loaded from `path`, with the flags `words`."""
    if hasattr(script, "make_games"):
        stop(f"probe {path}: it plays Atari games, which have no known answers; give a script for vectors")
    refuse_population(f"probe {path}", script)
    discrete = takes_discrete_actions_alone(script)
    flags = {field.name for field in dataclasses.fields(script.Args)}
    if "num_atoms" in flags:
        stop(f"probe {path}: its critics give distributions, of which the probe reads no values; give another script")
    settings = SETTINGS | (WITH_RADAM if "q_lambda" in flags else ON_POLICY if "num_steps" in flags else OFF_POLICY)
    defaults = script.Args(**{name: value for name, value in settings.items() if name in flags})
    given = tyro.cli(script.Args, args=words, default=defaults, prog=f"python -m instruments probe {path}")
    failed = False
    for probe in PROBES:
        with tempfile.TemporaryDirectory() as folder:
            args = dataclasses.replace(given, env_id=probe.env_id(discrete), gamma=GAMMA, run_dir=folder)
            good, said = line(probe, find(script, args, probe, discrete))
        print(said, flush=True)
        failed |= not good
    sys.exit(int(failed))
