"""What tools/mkl_on_amd.py gains on this machine: updates of SAC and TD3, compiled, and their matmuls alone.

    python -m benchmark.studies.mkl  # a quarter of an hour on 2 cores
    python -m benchmark.report       # put the results into doc/speed.md

Each run is a process of its own, one with the library preloaded and one without, in turn.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from unittest.mock import patch

from benchmark import editions
from benchmark.algorithms import ALGORITHMS
from benchmark.arguments import check, parse, refuse
from benchmark.report.machine import machine
from benchmark.report.tables import spread
from benchmark.results import RESULTS, path_here, store, stored
from benchmark.studies.scaling import in_process
from tools import mkl_on_amd

ALGOS = ("sac_continuous_action", "td3_continuous_action")
HEADER = ("", "threads", "ms per update", "with the library", "ratio", "its matmuls, GFLOP/s", "with the library")
COLUMNS = ("update_seconds", "matmul_seconds", "matmul_flops")


@dataclass
class Args:
    algos: tuple[str, ...] = ALGOS
    """names of the plain scripts"""
    rounds: int = 3
    """runs with and without"""
    seconds: float = 5
    """of training in steady state, in each run"""
    results: Path = RESULTS
    """folder that receives <machine>/mkl/<algo>.json"""


def measure(args, algo):
    """By number of threads and with or without the library: a list, over rounds, of what a run has measured."""
    environments = {"without": {"LD_PRELOAD": ""}, "with": {"LD_PRELOAD": str(mkl_on_amd.library())}}
    measured = {}
    for threads in sorted({1, os.cpu_count()}):
        runs = {name: [] for name in environments}
        for _ in range(args.rounds):
            for name, environment in environments.items():
                with patch.dict(os.environ, environment):
                    point = in_process(algo, {"threads": threads}, {"compile": True}, args.seconds)
                runs[name].append({column: point[column] for column in COLUMNS})
        measured[threads] = runs
    return measured


def update_milliseconds(run):
    """The median of a run's updates."""
    return 1e3 * median(run["update_seconds"])


def rows(data):
    """The rows of one algorithm's results."""
    lines = []
    for threads, runs in data["threads"].items():
        times = {name: [update_milliseconds(run) for run in own] for name, own in runs.items()}
        rates = {name: [run["matmul_flops"] / run["matmul_seconds"] / 1e9 for run in own] for name, own in runs.items()}
        ratios = [slow / fast for slow, fast in zip(times["without"], times["with"], strict=True)]
        cells = [spread(times[name], "{:.2f}") for name in times] + [spread(ratios, "{:.2f}")]
        cells += [spread(rates[name], "{:.0f}") for name in rates]
        lines.append([ALGORITHMS[data["algo"]].title, threads, *cells])
    return lines


def table(results):
    """A Markdown table for each machine that has been measured."""
    nothing = ["all", "", "not measured", "", "", "", ""]
    return editions.tables(stored(results, "mkl", ALGOS), HEADER, rows, nothing)


def main(args):
    check("algos", args.algos, ALGOS)
    if args.rounds < 1:
        refuse("rounds", args.rounds, "give at least 1")
    for algo in args.algos:
        data = {"algo": algo, "machine": machine(), "threads": measure(args, algo)}
        data |= editions.today(editions.script(f"{algo}_torchcompile"))
        store(path_here(args.results, "mkl", algo), data)
    print(table(args.results))


if __name__ == "__main__":
    main(parse(Args, __doc__))
