"""Train with one script in turns, while other programs wait.

    python -m benchmark.gpu_report.turns sac_continuous_action_torchcompile --compile --cudagraphs

Orders come in on standard input and answers go out on standard output, each a line of JSON. The first answer says that
the run is warm. The order {"seconds": 2} trains for two seconds and answers with the steps; {"profile": true} traces
steady steps, keeps the trace under the path "keep", if there is one, and answers with its summary. Turns begin and end
at logs.
"""

import contextlib
import gzip
import json
import os
import sys
import time
from pathlib import Path

import torch
import tyro

from common import ROOT, scripts
from common.steady import Clock
from instruments import traces
from instruments.profiler import Profile

EMULATED = "NINE_EMULATED"  # the environment variable that, set to 1, replaces the card by the emulated device


class Turns:
    """Answers orders at the logs of a warm run."""

    def __init__(self, run, script, args, channel):
        self.run, self.script, self.args, self.channel = run, script, args, channel

    def answer(self, **values):
        print(json.dumps(values), file=self.channel, flush=True)

    def take(self):
        """A generator that goes on at each log."""
        self.answer(warm=True)
        for line in sys.stdin:
            order = json.loads(line)
            yield from self.profile(order.get("keep")) if "profile" in order else self.train(order["seconds"])
        raise SystemExit("the process that gives the orders has ended")

    def train(self, seconds):
        step, begin = self.run.step, time.perf_counter()
        while time.perf_counter() < begin + seconds:
            yield
        seconds = time.perf_counter() - begin
        memory = round(torch.cuda.max_memory_reserved() / 2**20)
        self.answer(steps=self.run.step - step, seconds=seconds, memory_mib=memory)

    def profile(self, keep):
        profile = Profile()
        profile.prepare(self.script, self.args)
        profile.start(self.run)
        while not profile.finished:
            yield
            profile.log(None)
        trace = self.run.folder / "trace.json"
        summary = traces.summary(trace, profile.steps)
        if keep:
            Path(keep).write_bytes(gzip.compress(trace.read_bytes()))
        trace.unlink()
        self.answer(profile=summary)


def main(name, *flags):
    """Train with the script `name` of leanrl/ in turns."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output goes to the log
    script = scripts.load(name)
    args = tyro.cli(script.Args, args=flags)

    def on_start(run):
        clock = Clock(run)
        turns = Turns(run, script, args, channel).take()
        scripts.before_each_log(run, lambda losses: clock.begin and next(turns))

    with device(args):
        scripts.train(script, args, on_start)


def device(args):
    """A context: the emulated device if EMULATED is set, else nothing."""
    if os.environ.get(EMULATED) != "1":
        return contextlib.nullcontext()
    if getattr(args, "compile", False):
        raise SystemExit("error: the emulated device compiles nothing")
    sys.path.insert(0, str(ROOT / "tools"))  # its files can be copied, so they import each other by name
    from emulated_cuda import emulated_cuda

    return emulated_cuda()


if __name__ == "__main__":
    main(*sys.argv[1:])
