"""What all instruments share."""

import time

import numpy as np
import torch

SHARE = 0.001  # of a run's time, for each thing that an instrument does again and again


class Instrument:
    """Something that watches a run. `script` is the script's module, `run` its Run, or None before it has started."""

    run = None

    def prepare(self, script, args):
        """Before anything of the run is made, and before its seeds are set."""
        self.script = script

    def start(self, run):
        """When everything is made, before the first step."""
        self.run = run

    def log(self, losses):
        """At each logging interval, before `losses`, floats by name, are logged."""

    def end(self):
        """When a run that had started is over, however it has ended."""


class Pace:
    """Lets something happen as often as it stays below a share of the run's time.

    `with pace:` measures what it costs; then `due` is False until that is at most SHARE of the time gone by. Time is
    that in which the thread works: while others have the processor a run gets nowhere.
    """

    def __init__(self):
        self.next = 0.0

    @property
    def due(self):
        return time.thread_time() >= self.next

    def __enter__(self):
        self.begin = time.thread_time()

    def __exit__(self, *error):
        now = time.thread_time()
        self.next = now + (now - self.begin) / SHARE


def policy_of(script, run):
    """The deterministic policy as it is now, a module on the CPU."""
    learner = run.learner
    if hasattr(learner, "tensors"):  # of a turbo script, without the replay buffer
        state = script.to_cpu(learner.tensors())
    else:
        state = {"networks": {name: network.state_dict() for name, network in learner.networks().items()}}
        if hasattr(learner, "normalizer"):
            state["normalizer"] = learner.normalizer.state_dict()
    with torch.random.fork_rng(devices=[]):  # new networks draw weights: the run's random numbers stay what they were
        return script.make_policy(run.envs, state)


def play(envs, act, episodes, seed):
    """Play whole episodes in `envs`, which has one environment; `act` gives actions for obs, both numpy, (1, ...).

    Returns the episodes' returns.
    """
    obs, _ = envs.reset(seed=seed)
    returns = []
    total = 0.0
    while len(returns) < episodes:
        obs, rewards, terminated, truncated, _ = envs.step(act(obs))
        total += float(rewards[0])
        if terminated[0] or truncated[0]:
            returns.append(total)
            total = 0.0
    return np.array(returns)


def acting(script, policy):
    """What `play` takes for a policy."""

    def act(obs):
        with torch.no_grad():
            return policy(script.policy_input(obs)).numpy()

    return act
