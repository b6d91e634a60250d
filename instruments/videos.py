"""A look at the agent in the middle of a run."""

import sys

from tqdm import tqdm

from instruments.instrument import Instrument, acting, play, policy_of


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
            self.record(self.run.folder / "videos" / f"step-{self.run.step}")
        except SystemExit:
            tqdm.write("warning: no video, for the reason above; training goes on", file=sys.stderr)
        except Exception as error:  # whatever renderers raise
            tqdm.write(f"warning: no video: {error}; training goes on", file=sys.stderr)

    def record(self, folder):
        envs = self.script.evaluation_envs(self.run.args, folder)
        try:
            act = acting(self.script, policy_of(self.script, self.run))
            (episode_return,) = play(envs, act, 1, self.run.args.seed)
        finally:
            envs.close()
        for path in folder.glob("*-episode-1.mp4"):  # which has only begun
            path.unlink()
        tqdm.write(f"{folder}: an episode of return {episode_return:.2f}", file=sys.stderr)
