"""The return of uniformly random actions, a lower bound for a run that learns."""

import json
import sys
from functools import partial

import numpy as np

from common.arguments import one_line, stop
from instruments.instrument import Instrument
from instruments.playing import random_returns


class RandomBaseline(Instrument):
    """Plays `episodes` at random before training. The mean return is printed, stored as random_baseline.json in the
    run's folder, and logged as `charts/random_return`, which plots.py draws as a dashed line.
    """

    def __init__(self, episodes):
        self.episodes = episodes

    def prepare(self, script, args):
        super().prepare(script, args)
        try:
            returns = random_returns(args.env_id, args.seed, self.episodes)
        except Exception as error:  # environments may raise anything
            remedy = "leave it out, or correct the error"
            stop(f"--random-baseline {self.episodes}: cannot play {args.env_id} ({one_line(error)}); {remedy}")
        self.mean = float(np.mean(returns))
        self.deviation = float(np.std(returns))
        print(f"random policy: mean return {self.mean:.2f} over {self.episodes} episodes", file=sys.stderr)

    def start(self, run):
        super().start(run)
        baseline = {"episodes": self.episodes, "mean_return": self.mean, "standard_deviation": self.deviation}
        (run.folder / "random_baseline.json").write_text(json.dumps(baseline, indent=2), encoding="utf-8")
        run.bar.set_postfix = partial(run.bar.set_postfix, random=f"{self.mean:.1f}")
        self.log({})

    def log(self, losses):
        self.run.writer.add_scalar("charts/random_return", self.mean, self.run.step)
