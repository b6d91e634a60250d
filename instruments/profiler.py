"""A profile of training in steady state."""

import sys

from torch.profiler import profile
from tqdm import tqdm

from common.steady import Clock
from instruments.instrument import Instrument

STEPS = 20
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::_local_scalar_dense")


class Profile(Instrument):
    """Records the last 20 steps of the vector environment before a log (all, if there are fewer) in steady state; for
    PPO and PQN, including the update that follows.

    Writes trace.json for chrome://tracing or ui.perfetto.dev, and prints the ten most expensive operators and, on CUDA,
    the number of times that the host waited.
    """

    profiler = None
    begun = False
    finished = False

    def prepare(self, script, args):
        super().prepare(script, args)
        interval = getattr(script, "LOG_INTERVAL", None) or args.num_steps  # steps of the vector environment
        self.steps = min(STEPS, interval)
        self.idle = interval - self.steps

    def start(self, run):
        super().start(run)
        self.clock = Clock(run)

    def log(self, losses):
        if self.profiler:
            self.finish()
        elif not self.begun and self.clock.begin:
            self.begun = True
            self.wait(self.idle)

    def wait(self, steps):
        """Start recording after this number of `steps`."""
        step = self.run.envs.step
        calls = 0

        def counting(actions):
            nonlocal calls
            calls += 1
            if calls > steps:
                self.run.envs.step = step
                self.begin()
            return step(actions)

        self.run.envs.step = counting

    def begin(self):
        on_cuda = self.run.learner.device.type == "cuda"
        self.order = "self_device_time_total" if on_cuda else "self_cpu_time_total"
        self.profiler = profile()  # of the host and, where there is one, the GPU
        self.profiler.__enter__()

    def finish(self):
        self.profiler.__exit__(None, None, None)
        path = self.run.folder / "trace.json"
        self.profiler.export_chrome_trace(str(path))
        operators = self.profiler.key_averages()
        table = operators.table(sort_by=self.order, row_limit=10, max_name_column_width=50)
        lines = [f"{path}: {self.steps} steps", table]
        if self.run.learner.device.type == "cuda":
            waits = {operator.key: operator.count for operator in operators if operator.key in WAITS}
            lines.append(f"host waits: {waits or 'none'}")
        tqdm.write("\n".join(lines), file=sys.stderr)
        self.profiler = None
        self.finished = True

    def end(self):
        if self.profiler:
            self.profiler.__exit__(None, None, None)
        if not self.finished:
            tqdm.write("warning: no profile: the run was over before it was steady for two logs", file=sys.stderr)
