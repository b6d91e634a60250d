"""Programs of the report: an algorithm in one mode each. They train only when asked to (turns.py)."""

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import threading
import time

from benchmark.gpu_report.cases import CASES, MODES, NICENESS
from common import ROOT
from common.algorithms import ALGORITHMS
from common.processes import end, start

TURNS = ("-m", "benchmark.gpu_report.turns")
SEED = 1


class Program:
    """A process that trains an algorithm in one mode. `ended` says why it is over, in words."""

    def __init__(self, algo, mode, folder, emulated, variables):
        self.algo, self.mode, self.name = algo, mode, f"{algo}, {mode}"
        self.log = folder / algo / mode / "log.txt"
        self.warm = None  # seconds until it was
        self.slices = []  # steps and seconds of each
        self.memory_mib = None
        self.ended = None
        case = CASES[algo]
        suffix, *own = MODES[mode]
        common = ["--seed", SEED, "--env-id", ALGORITHMS[algo].env_id, "--run-dir", self.log.parent]
        common += ["--checkpoint-interval", "0"]
        flags = (case.small if emulated else case.flags).split()
        words = [*TURNS, f"{algo}{suffix}", *own, *flags, *common]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.begin = time.monotonic()
        self.process = start_low(NICENESS[mode], words, self.log, variables, **pipes)

    @property
    def starting(self):
        return self.warm is None and not self.ended

    @property
    def ready(self):
        """Whether it waits to be measured."""
        return self.warm is not None and not self.ended and not self.slices

    def order(self, **order):
        with contextlib.suppress(OSError):  # it has died, which its last answer says
            print(json.dumps(order), file=self.process.stdin, flush=True)

    def lines(self, count):
        """The last lines of its output, without progress bars."""
        text = self.log.read_text(errors="replace", encoding="utf-8") if self.log.exists() else ""
        return re.sub(r"[^\n]*\r", "", text).strip().splitlines()[-count:]

    def end(self, why=None):
        """Kill it; `why` is in words."""
        self.ended = self.ended or why or f"not {'warm' if self.warm is None else 'measured'} in time"
        end(self.process)

    def result(self):
        """What was measured, for the file."""
        if not self.slices:
            return {"failed": self.ended}
        counted = self.slices[1:] or self.slices  # the first is not counted, unless there was no time for another
        steps, seconds = (sum(column) for column in zip(*counted, strict=True))
        speeds = [round(steps / seconds, 1) for steps, seconds in self.slices]
        result = {"steps_per_second": round(steps / seconds, 1), "seconds": round(seconds, 2), "slices": len(counted)}
        return result | {"slice_speeds": speeds, "memory_mib": self.memory_mib, "warm_after_seconds": self.warm}


class Programs:
    """All programs, and the answers of all."""

    def __init__(self):
        self.all = {}  # by algorithm and mode
        self.answers = queue.Queue()

    def __iter__(self):
        return iter(self.all.values())

    def add(self, program):
        self.all[program.algo, program.mode] = program
        threading.Thread(target=self.listen, args=(program,), daemon=True).start()

    def listen(self, program):
        for line in program.process.stdout:
            with contextlib.suppress(ValueError):  # not an answer, but a library's message
                self.answers.put((program, json.loads(line)))
        self.answers.put((program, None))

    def next_answer(self, seconds):
        """Wait for an answer of any program; returns it and its answer, which is None if it has ended by itself.

        Without an answer, both are None.
        """
        try:
            program, values = self.answers.get(timeout=max(seconds, 0.01))
        except queue.Empty:
            return None, None
        if values is None:
            if program.ended:
                return None, None
            code = program.process.wait()
            program.ended = f"exit code {code}: {' '.join(program.lines(1))[-300:]}"
        elif "warm" in values:
            program.warm = round(time.monotonic() - program.begin, 1)
        return program, values


@contextlib.contextmanager
def paused(processes):
    """Context manager in which `processes` and their children stand still."""
    groups = [process.pid for process in processes if process.poll() is None]
    try:
        send(groups, signal.SIGSTOP)
        yield
    finally:
        send(groups, signal.SIGCONT)


def send(groups, number):
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)


def start_low(niceness, words, log, variables, **settings):
    """Start Python with the arguments `words` at a low priority, as `processes.start` does."""
    process = start(words, log, cwd=ROOT, env=os.environ | variables, **settings)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, 0) + niceness)
    return process
