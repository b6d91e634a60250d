"""Train with one script in time slices, interleaved with other processes, so that all run under equal conditions.

    python -m benchmark.speed.interleaved sac_continuous_action_torchcompile --compile

rounds.py starts this program once for each mode. When started by hand, Enter begins the next slice.
"""

import json
import sys

import tyro

from common import scripts
from common.slices import TimeSlices
from common.steady import Clock


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
    summary = json.loads(path.read_text(encoding="utf-8"))  # its times include the slices of other processes
    summary |= {"steady_sps": slices.steps_per_second, "warmup_seconds": clock.warmup_seconds}
    summary |= {"wall_seconds": summary["wall_seconds"] - slices.waited}
    summary["slice_speeds"] = [steps / seconds for steps, seconds in slices.done]
    path.write_text(json.dumps(summary, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
