"""Time slices, in which one process trains while others wait, so that all run under equal conditions.

This file imports only the standard library, since programs in other environments use it too.
"""

import os
import sys
import time

SLICES = "--slices"  # the flag of a peer that takes turns


class TimeSlices:
    """Divides a run into slices of at least a sixtieth of its steps, and counts steps and seconds of each.

    A line on standard output reports the end of a slice, with its steps and seconds (first 0 and 0: the run is warm). A
    line on standard input starts the next one.
    """

    def __init__(self, total_timesteps):
        self.steps = total_timesteps // 60
        self.begin = None
        self.done = []  # steps and seconds of each slice
        self.waited = 0.0
        self.channel = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # other output goes to the log

    def __call__(self, step):
        """Call between environment steps, with the current `step`. The first call and the end of a slice wait."""
        now = time.perf_counter()
        ended = (0, 0.0)
        if self.begin:
            ended = (step - self.begin[0], now - self.begin[1])
            if ended[0] < self.steps:
                return
            self.done.append(ended)
        print(*ended, file=self.channel, flush=True)
        if not sys.stdin.readline():
            raise SystemExit("the process that starts the slices has ended")
        self.begin = (step, time.perf_counter())
        self.waited += self.begin[1] - now

    @property
    def steps_per_second(self):
        if not self.done:
            return None
        steps, seconds = zip(*self.done, strict=True)
        return sum(steps) / sum(seconds)
