"""Train with one script, in turns with other processes, so that all of them see the same machine at the same time.

    python benchmark/turns.py sac_continuous_action_torchcompile --compile

is what run.py starts once for each mode. A line on standard output says that a turn is over, a line on standard input
begins the next one.
"""

import importlib
import json
import sys
import time
from pathlib import Path

import tyro


class Turns:
    """Divides a run into turns of at least `steps` environment steps, and counts steps and seconds within them."""

    def __init__(self, steps):
        self.steps, self.steps_taken, self.seconds, self.begin = steps, 0, 0.0, None

    def __call__(self, step):
        """To be called between environment steps, `step` so far: the first call, and the end of a turn, wait."""
        if self.begin:
            steps, seconds = step - self.begin[0], time.perf_counter() - self.begin[1]
            if steps < self.steps:
                return
            self.steps_taken, self.seconds = self.steps_taken + steps, self.seconds + seconds
        print("over", flush=True)
        sys.stdin.readline()
        self.begin = (step, time.perf_counter())

    @property
    def steps_per_second(self):
        return self.steps_taken / self.seconds if self.seconds else None


def main(name, *flags):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    script = importlib.import_module(f"leanrl.{name}")
    args = tyro.cli(script.Args, args=flags)
    args.measure_burnin = 0  # warm-up ends where the first turn begins
    turns, steady_logs = Turns(args.total_timesteps // 60), []

    def on_log(learner, losses, step):
        if getattr(learner, "stage", "training") == "training":  # plain learners have no stage
            steady_logs.append(step)
            if len(steady_logs) > 1:  # at the first one, the script's own clock may still count warm-up
                turns(step)

    script.train(args, on_log)
    path = next(Path(args.run_dir).glob("*/summary.json"))
    summary = json.loads(path.read_text()) | {"steady_sps": turns.steps_per_second}  # without the time of waiting
    path.write_text(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main(*sys.argv[1:])
