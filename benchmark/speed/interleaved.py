"""Train with one script in time slices, interleaved with other processes, so that all run under equal conditions.

    python -m benchmark.speed.interleaved sac_continuous_action_torchcompile --compile

rounds.py starts this once for each mode. A line on standard output reports the end of a slice. A line on standard input
(by hand: Enter) starts the next one.
"""

import json
import os
import sys
import time

import tyro

from common import scripts
from common.steady import Clock


class TimeSlices:
    """Divides a run into slices of at least a sixtieth of its steps, and counts steps and seconds of each."""

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
        if self.begin:
            if step - self.begin[0] < self.steps:
                return
            self.done.append((step - self.begin[0], now - self.begin[1]))
        print("over", file=self.channel, flush=True)
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


def main(name, *flags, train=scripts.train):
    """Train with the script `name` in time slices. These begin and end at logs, once the run is warm."""
    script = scripts.load(name)
    args = tyro.cli(script.Args, args=flags)
    slices = TimeSlices(args.total_timesteps)
    clocks = []

    def on_start(run):
        clock = Clock(run)
        clocks.append(clock)
        scripts.before_each_log(run, lambda losses: clock.begin and slices(run.step))

    train(script, args, on_start=on_start)
    (clock,) = clocks
    path = clock.run.folder / "summary.json"
    summary = json.loads(path.read_text())  # its times include the slices of other processes
    summary |= {"steady_sps": slices.steps_per_second, "warmup_seconds": clock.warmup_seconds}
    summary |= {"wall_seconds": summary["wall_seconds"] - slices.waited}
    summary["slice_speeds"] = [steps / seconds for steps, seconds in slices.done]
    path.write_text(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main(*sys.argv[1:])
