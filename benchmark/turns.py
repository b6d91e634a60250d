"""Train with one script, in turns with other processes, so that all of them see the same machine at the same time.

    python benchmark/turns.py sac_continuous_action_torchcompile --compile

is what run.py starts once for each mode. A line on standard output says that a turn is over, a line on standard input
(by hand: Enter) begins the next one.
"""

import importlib.util
import json
import os
import sys
import time
from pathlib import Path

import tyro


class Turns:
    """Divides a run into turns of at least a sixtieth of its steps, and counts steps and seconds within them."""

    def __init__(self, total_timesteps):
        self.steps = total_timesteps // 60
        self.begin = None
        self.done = []  # steps and seconds of each turn
        self.waited = 0.0
        self.channel = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what others print goes to the log

    def __call__(self, step):
        """To be called between environment steps, `step` so far: the first call, and the end of a turn, wait."""
        now = time.perf_counter()
        if self.begin:
            if step - self.begin[0] < self.steps:
                return
            self.done.append((step - self.begin[0], now - self.begin[1]))
        print("over", file=self.channel, flush=True)
        if not sys.stdin.readline():
            raise SystemExit("nobody is there any more to begin the next turn")
        self.begin = (step, time.perf_counter())
        self.waited += self.begin[1] - now

    @property
    def steps_per_second(self):
        if not self.done:
            return None
        steps, seconds = zip(*self.done, strict=True)
        return sum(steps) / sum(seconds)


def load(name):
    """The module of the script of this name in leanrl/, or of a copy of one, by its path."""
    folder = Path(__file__).resolve().parent.parent / "leanrl"
    path = Path(name) if name.endswith(".py") else folder / f"{name}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(name, *flags, attach=lambda script: None):
    """Train the script `name` in turns; `attach` may change its module before."""
    script = load(name)
    attach(script)
    args = tyro.cli(script.Args, args=flags)
    args.measure_burnin = 0  # warm-up ends where the first turn begins
    turns, steady_logs = Turns(args.total_timesteps), []

    def on_log(learner, losses, step):
        if getattr(learner, "stage", "training") == "training":  # plain learners have no stage
            steady_logs.append(step)
            if len(steady_logs) > 1:  # at the first one, the script's own clock may still count warm-up
                turns(step)

    script.train(args, on_log)
    path = max(Path(args.run_dir).glob("*/summary.json"), key=lambda path: path.stat().st_mtime)
    summary = json.loads(path.read_text())  # which has counted the others' turns too
    summary |= {"steady_sps": turns.steps_per_second, "wall_seconds": summary["wall_seconds"] - turns.waited}
    summary["turn_speeds"] = [steps / seconds for steps, seconds in turns.done]
    path.write_text(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main(*sys.argv[1:])
