"""Detects from outside when a run is warm, and measures its speed from then on."""

import math
import time

CAPTURE = 3  # calls until a function is compiled and captured


def updates_to_warm(args):
    """The number of updates until everything is compiled and captured; an update of PPO or PQN is an iteration."""
    if not hasattr(args, "policy_frequency"):
        on_policy = hasattr(args, "num_steps")
        return 1 if on_policy and not getattr(args, "cudagraphs", False) else CAPTURE
    period = math.lcm(args.policy_frequency, getattr(args, "target_network_frequency", 1))
    return CAPTURE * period * getattr(args, "updates_per_step", 1)


class Clock:
    """Sets `begin` to the step and time at which a run is warm; None before."""

    begin = None

    def __init__(self, run):
        self.run = run
        self.start = time.perf_counter()
        self.first_step = run.step
        self.first_update = getattr(run.learner, "updates", None)
        self.advance = run.advance
        run.advance = self.watch

    def updates(self):
        """Updates so far; those of PPO and PQN are iterations, which end when the next one begins."""
        if self.first_update is not None:
            return self.run.learner.updates - self.first_update
        return (self.run.step - self.first_step - 1) // (self.run.args.num_steps * self.run.args.num_envs)

    def watch(self, *inputs):
        self.advance(*inputs)
        if self.begin is None and self.updates() >= updates_to_warm(self.run.args):
            self.begin = (self.run.step, time.perf_counter())
            if self.run.advance == self.watch:  # and no other watcher wraps it
                self.run.advance = self.advance

    @property
    def warmup_seconds(self):
        return self.begin[1] - self.start if self.begin else None
