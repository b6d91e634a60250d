"""Videos of the agent during a run."""

import sys

from tqdm import tqdm

from common.arguments import one_line
from instruments.instrument import Instrument
from instruments.playing import acting, make_env, play, record


class VideoOnDemand(Instrument):
    """Records one episode of the deterministic policy when the file `watch` appears in the run's folder."""

    def start(self, run):
        super().start(run)
        self.request = run.folder / "watch"
        print(f"to see the agent: touch {self.request}", file=sys.stderr)

    def log(self, losses):
        if not self.request.exists():
            return
        self.request.unlink()
        try:
            self.record(f"step-{self.run.step}")
        except Exception as error:  # renderers may raise anything
            tqdm.write(f"warning: no video: {one_line(error)}; training goes on", file=sys.stderr)

    def record(self, name):
        args = self.run.args
        folder = self.run.folder / "videos"
        env = record(make_env(args.env_id, args.seed, "rgb_array"), folder, name)
        try:
            policy, inputs = self.run.learner.policy()
            act = acting(policy, env.action_space, inputs)
            episode = next(play(env, act, args.seed))
        finally:
            env.close()
        path = folder / f"{name}-episode-0.mp4"
        tqdm.write(f"{path}: an episode of return {episode.total:.2f}", file=sys.stderr)
