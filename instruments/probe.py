"""Train a script, or an edited copy of one, on tiny environments with known answers. Each tests one part of it.

    python -m instruments probe leanrl/sac_continuous_action.py --threads 1

The flags are the script's; environment, discount factor and folder are the probe's. Five environments are those of
Andy Jones (https://andyljones.com/posts/rl-debugging.html), the sixth truncates its episodes. If several fail, start
with the first. The exit code is then 1.
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
from common.scripts import refuse_population, train

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


@dataclass
class Probe:
    """An environment, and what a learner should find: the value of each state, or the best action in it."""

    name: str
    states: tuple[float, ...]
    """observations: in an episode of one step a random one, else one after the other"""
    reward: Callable[[float, float], float]
    """of the state and the action, both from -1 to 1"""
    asks: str
    """"value" or "action" """
    expected: tuple[float, ...]
    failure: str
    """what a wrong answer points to"""
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
    """What the learner has found."""
    obs = torch.tensor(probe.states, dtype=torch.float32)[:, None]
    policy, (_, *state) = learner.policy()  # the state of a memory, if it has one, is 0 before
    actions = policy(obs, *(torch.zeros(len(obs), *tensor.shape[1:]) for tensor in state))
    if isinstance(actions, tuple):
        actions, _ = actions
    if probe.asks == "action":
        found = 2 * actions - 1 if discrete else actions
    else:
        found = values(learner, obs, actions.to(learner.device), probe.steps)
    return found.flatten().tolist()


def values(learner, obs, actions, steps):
    """The states' values in units of the environment's rewards; those of critics are for the policy's actions.

    In an episode of several `steps` a policy with memory has seen the states before.
    """
    if hasattr(learner, "normalizer"):
        scaled = torch.as_tensor(learner.normalizer.scale_obs(obs.numpy()), device=learner.device)
        if hasattr(learner.agent, "remember"):
            found = values_with_memory(learner, scaled, steps)
        else:
            found = learner.agent.critic(scaled)
        return found * max(learner.normalizer.std[-1], 0.1)  # scaled rewards are clipped at 10
    obs = obs.to(learner.device)
    if hasattr(learner, "q"):
        found = learner.q(obs)
        return (found[0] if isinstance(found, tuple) else found).amax(-1)  # of a network with another head
    if hasattr(learner, "q_values"):
        return learner.q_values(learner.critics, obs, actions).amin(0)
    return torch.stack([critic(obs, actions) for critic in learner.critics]).amin(0)


def values_with_memory(learner, scaled, steps):
    """The values of normalized states by an agent with memory, whose state is 0 where an episode begins."""
    state = torch.zeros(1, learner.agent.state_dim, device=scaled.device)
    found = []
    for row in scaled.split(1):
        next_state = learner.agent.remember(row, state)
        found.append(learner.agent.value(next_state))
        if steps > 1:
            state = next_state
    return torch.cat(found)


def find(script, args, probe, discrete):
    """Train on the probe's environment, and return what the learner has found."""
    learners = []

    def start(run):
        learners.append(run.learner)
        run.save = lambda: None  # takes longer than such a run
        run.bar.leave = False

    if getattr(args, "compile", False):
        torch.compiler.reset()  # what is compiled is not guarded against another learner
    try:
        train(script, args, start)
    except SystemExit as stop:
        if not str(stop.code).startswith("error: step"):
            raise
        note(stop.code)
        return [math.nan] * len(probe.expected)
    return answers(*learners, probe, discrete)


def line(probe, found):
    """Whether the answers are right, and what is printed about them."""
    good = np.allclose(found, probe.expected, rtol=0.05, atol=TOLERANCE[probe.asks])
    expected, found = (" ".join(f"{x:5.2f}" for x in numbers) for numbers in (probe.expected, found))
    verdict = "ok" if good else f"failed: {probe.failure}"
    return good, f"{probe.name:<12} {probe.asks:<7} expected {expected:<12} found {found:<12} {verdict}"


def main(path, script, words):
    """Probe a script, the module loaded from `path`, with the flags `words`."""
    if hasattr(script, "make_games"):
        stop(f"probe {path}: it plays Atari games, which have no known answers; give a script for vectors")
    refuse_population(f"probe {path}", script)
    discrete = hasattr(script, "require_discrete_actions")
    flags = {field.name for field in dataclasses.fields(script.Args)}
    settings = SETTINGS | (ON_POLICY if "num_steps" in flags else OFF_POLICY)
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
