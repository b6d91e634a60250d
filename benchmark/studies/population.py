"""The speed of N agents in one program, compared with N processes on the same cores.

    python -m benchmark.studies.population  # a quarter of an hour on 2 cores
    python -m benchmark.report              # put the results into doc/many_runs.md

Both sides exist at the same time and take turns in training: one is stopped while the other has the machine. The
population uses the script's default number of threads. Each single-agent process uses its share of the cores, but no
more threads than that default.
"""

import contextlib
import os
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from benchmark import editions
from benchmark.results import stored
from benchmark.speed.rounds import TURBO_FLAGS, possible
from benchmark.studies import study
from common import scripts
from common.algorithms import ALGORITHMS
from common.arguments import from_low, parse
from common.processes import end, start
from common.steady import Clock

POPULATIONS = {
    algo: script for algo, entry in ALGORITHMS.items() for script in entry.variants if "_population" in script
}
SETTINGS = ["--learning-starts=1000", "--buffer-size=20000"]
WARMING = -1  # the count of a process that is still warming up
HEADER = ("", "mode", "agents", "one program, steps/s", "processes, steps/s", "ratio")


@dataclass
class Args(study.Args):
    algos: tuple[str, ...] = tuple(POPULATIONS)
    agents: tuple[int, ...] = (1, 2, 4, 8, 16)
    """numbers of agents"""
    rounds: int = 3
    """turns of each side"""
    seconds: float = 6
    """duration of a turn"""


def train(name, counter, *flags):
    """Train until killed, and keep the number of environment steps in the file `counter`."""
    script = scripts.load(name)
    steps = np.memmap(counter, np.int64, "r+")

    def count(run):
        clock = Clock(run)
        advance = run.advance

        def counted(rewards, ended):
            advance(rewards, ended)
            if clock.begin:
                steps[0] = run.step

        run.advance = counted

    scripts.train(script, tyro.cli(script.Args, args=flags), count)


class Side:
    """Processes that train simultaneously."""

    def __init__(self, folder, programs):
        self.processes = []
        self.counters = []
        for i, (script, *flags) in enumerate(programs):
            own = folder / str(i)
            own.mkdir(parents=True)
            counter = np.memmap(own / "steps", np.int64, "w+", shape=1)
            counter[0] = WARMING
            words = ["-m", "benchmark.studies.population", "train", script, own / "steps", *flags, f"--run-dir={own}"]
            self.processes.append(start(words, own / "log.txt"))
            self.counters.append(counter)

    def send(self, number):
        for process in self.processes:
            os.killpg(process.pid, number)

    def wait_until_warm(self):
        while any(counter[0] == WARMING for counter in self.counters):
            if any(process.poll() is not None for process in self.processes):
                raise SystemExit(f"error: {self.processes[0].args}: a process has ended; see log.txt beside it")
            time.sleep(0.2)

    def turn(self, seconds):
        """Train for `seconds`; returns environment steps per second, summed over all processes."""
        before = sum(counter[0] for counter in self.counters)
        begin = time.perf_counter()
        self.send(signal.SIGCONT)
        time.sleep(seconds)
        self.send(signal.SIGSTOP)
        return float(sum(counter[0] for counter in self.counters) - before) / (time.perf_counter() - begin)


def measure(args, algo):
    """The speeds of each number of agents in all modes that this machine can run."""
    modes = {mode: {} for mode in possible(TURBO_FLAGS)}
    for mode, speeds in modes.items():
        for agents in args.agents:
            with tempfile.TemporaryDirectory() as folder:
                speeds[agents] = measure_agents(args, algo, mode, agents, Path(folder))
            print(f"{algo}, {mode}, {agents} agents: {speeds[agents]}", file=sys.stderr, flush=True)
    return {"modes": modes}


def measure_agents(args, algo, mode, agents, folder):
    """Steps per second of all agents by side, as lists over rounds."""
    flags = ["--total-timesteps=1000000000", *SETTINGS, *TURBO_FLAGS[mode]]
    default = scripts.load(f"{algo}_torchcompile").Args().threads  # 0: all cores
    threads = min(max(1, os.cpu_count() // agents), default or os.cpu_count())
    seeds = [str(seed + 1) for seed in range(agents)]
    programs = {
        "population": [(POPULATIONS[algo], "--seeds", *seeds, *flags)],
        "processes": [(f"{algo}_torchcompile", f"--seed={seed}", f"--threads={threads}", *flags) for seed in seeds],
    }
    with contextlib.ExitStack() as stack:
        sides = {}
        for name, own in programs.items():
            sides[name] = Side(folder / name, own)
            for process in sides[name].processes:
                stack.callback(end, process)
            sides[name].wait_until_warm()
            sides[name].send(signal.SIGSTOP)
        speeds = {name: [] for name in sides}
        for _ in range(args.rounds):
            for name, side in sides.items():
                speeds[name].append(side.turn(args.seconds))
    return {"population": [agents * speed for speed in speeds["population"]], "processes": speeds["processes"]}


def rows(data):
    """The table rows of one algorithm's results."""
    lines = []
    for mode, by_agents in data["modes"].items():
        for agents, speeds in by_agents.items():
            one, many = (statistics.median(speeds[name]) for name in ("population", "processes"))
            cells = [f"{one:.0f}", f"{many:.0f}", f"{one / many:.2f}"]
            lines.append([ALGORITHMS[data["algo"]].title, mode, agents, *cells])
    return lines


def table(results):
    """A Markdown table for each measured machine."""
    nothing = ["all", "all", "", "not measured", "not measured", ""]
    return editions.tables(stored(results, "population", POPULATIONS), HEADER, rows, nothing, "Steps of all agents, ")


def main(args):
    from_low(1, args, "agents", "rounds")
    from_low(0, args, "seconds")
    study.run("population", args, POPULATIONS, measure, table, lambda algo: (POPULATIONS[algo], *study.turbo(algo)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(*sys.argv[2:])
    else:
        main(parse(Args, __doc__))
