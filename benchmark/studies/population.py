"""The speed of N agents in one program, compared with N processes on the same cores.

    python -m benchmark.studies.population  # a quarter of an hour on 2 cores
    python -m benchmark.report              # put the results into doc/many_runs.md

Both sides exist at the same time and take turns in training: one waits while the other has the machine. The
population uses the script's default number of threads. Each single-agent process uses its share of the cores, but no
more threads than that default.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmark import editions
from benchmark.gpu_report.programs import TURNS
from benchmark.results import stored
from benchmark.speed.rounds import TURBO_FLAGS, possible
from benchmark.studies import study
from common import scripts
from common.algorithms import ALGORITHMS
from common.arguments import from_low, parse
from common.processes import end, start

POPULATIONS = {
    algo: script for algo, entry in ALGORITHMS.items() for script in entry.variants if "_population" in script
}
SETTINGS = ["--learning-starts=1000", "--buffer-size=20000"]
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


class Side:
    """Processes that train simultaneously when it is their turn (gpu_report/turns.py)."""

    def __init__(self, folder, programs):
        self.processes = []
        for i, words in enumerate(programs):
            own = folder / str(i)
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self.processes.append(start([*TURNS, *words, f"--run-dir={own}"], own / "log.txt", **pipes))

    def answers(self):
        """The next answer of each process; the first one says that it is warm."""
        lines = [process.stdout.readline() for process in self.processes]
        if not all(lines):
            raise SystemExit(f"error: {self.processes[0].args}: a process has ended; see log.txt in its --run-dir")
        return [json.loads(line) for line in lines]

    def turn(self, seconds):
        """Train for `seconds`; returns environment steps per second, summed over all processes."""
        for process in self.processes:
            print(json.dumps({"seconds": seconds}), file=process.stdin, flush=True)
        return sum(answer["steps"] / answer["seconds"] for answer in self.answers())


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
            sides[name].answers()
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
    main(parse(Args, __doc__))
