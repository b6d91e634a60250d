"""When a run is warm, measured from outside, and how fast it is from then on."""

import math
import time

CAPTURE = 3  # calls until a function is compiled and captured


def updates_to_warm(args):
    """Updates until nothing is compiled or captured any more. One of PPO is an iteration."""
    if hasattr(args, "num_steps"):
        return CAPTURE if getattr(args, "cudagraphs", False) else 1
    if not hasattr(args, "policy_frequency"):
        return CAPTURE
    return CAPTURE * math.lcm(args.policy_frequency, getattr(args, "target_network_frequency", 1))


class Clock:
    """The step and the time at which a run was warm, `begin`; None before."""

    begin = None

    def __init__(self, run):
        self.run = run
        self.start = time.perf_counter()
        self.updates = run.learner.updates + updates_to_warm(run.args)
        self.advance = run.advance
        run.advance = self.watch

    def watch(self, *inputs):
        self.advance(*inputs)
        if self.begin is None and self.run.learner.updates >= self.updates:
            self.begin = (self.run.step, time.perf_counter())
            if self.run.advance == self.watch:  # and nobody watches in front of it
                self.run.advance = self.advance

    @property
    def warmup_seconds(self):
        return self.begin[1] - self.start if self.begin else None
