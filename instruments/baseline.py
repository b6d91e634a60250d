"""What a uniform random policy gets: a run that learns has to leave it behind."""

import sys

from instruments.instrument import Instrument, play


class RandomBaseline(Instrument):
    """Plays `episodes` at random before training. The mean return goes to the progress bar and to summary.json, and as
    `charts/random_return` to the events, from where plots.py draws it as a dashed line.
    """

    def __init__(self, episodes):
        self.episodes = episodes

    def prepare(self, script, args):
        super().prepare(script, args)
        envs = script.evaluation_envs(args)
        envs.action_space.seed(args.seed)
        returns = play(envs, lambda obs: envs.action_space.sample(), self.episodes, args.seed)
        envs.close()
        self.mean = float(returns.mean())
        print(f"random policy: mean return {self.mean:.2f} over {self.episodes} episodes", file=sys.stderr)

    def start(self, run):
        super().start(run)
        run.facts["random_return"] = self.mean
        run.writer.add_scalar("charts/random_return", self.mean, run.step)

    def log(self, losses):
        self.run.writer.add_scalar("charts/random_return", self.mean, self.run.step)
