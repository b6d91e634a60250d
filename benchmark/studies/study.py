"""What studies share: the arguments, and a result of each algorithm in results/<machine>/<kind of study>/."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from benchmark import editions
from benchmark.results import RESULTS, path_here, store
from common.algorithms import MEASURED
from common.arguments import check, check_seeds, distinct
from common.folders import locked, writable
from common.machine import machine


@dataclass
class Args:
    algos: tuple[str, ...] = tuple(MEASURED)
    """names of the plain scripts"""
    results: Path = RESULTS
    """folder that receives <machine>/<kind of study>/<algo>.json"""


@dataclass
class RoundsArgs(Args):
    """Of studies that train in rounds (speed/rounds.py)."""

    seeds: tuple[int, ...] = (1,)
    """one round of each mode for each seed"""
    run_dir: Path = Path("runs/study")
    """folder for the runs; an earlier one of the same algorithm and mode is deleted"""


@contextlib.contextmanager
def checked(args, algos):
    """Context manager: check the arguments, whose algorithms are among `algos`, and lock the folder of the runs."""
    check("algos", args.algos, algos)
    distinct(args, *(name for name, value in vars(args).items() if isinstance(value, tuple)))
    writable("results", args.results)
    if not isinstance(args, RoundsArgs):
        yield
        return
    check_seeds(args, "seeds")
    with locked("run-dir", args.run_dir):
        yield


def turbo(algo):
    return (f"{algo}_torchcompile",)


def run(kind, args, algos, measure, table, scripts=turbo):
    """Store what `measure` returns for each algorithm, with the editions of its `scripts`; print the table."""
    with checked(args, algos):
        for algo in args.algos:
            data = {"algo": algo, "machine": machine()} | measure(args, algo)
            data |= editions.today(*map(editions.script, scripts(algo)))
            store(path_here(args.results, kind, algo), data)
    print(table(args.results))
