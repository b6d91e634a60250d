"""Seconds from the start of a compiled run until its updates are compiled, with empty and with filled caches.

    python -m benchmark.studies.start   # all scripts, three times each; 25 minutes on 2 cores
    python -m benchmark.report          # put the results into doc/speed.md

The first start on a machine has an empty home, an empty temporary folder and an empty cache of compiled code. A cold
start has the temporary folder of the first, where torch keeps its precompiled headers. A warm start has the cache of
the cold start before it, too. All include Python's imports.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmark import editions
from benchmark.results import stored
from benchmark.speed.rounds import INTERLEAVED, RoundArgs, cold, command
from benchmark.studies import study
from common.algorithms import FULL_SOON, MEASURED, named
from common.arguments import from_low, parse, stop
from common.processes import end, start
from common.tables import spread

STARTS = ("first", "cold", "warm")
HEADER = ("", "first start on a machine, s", "cold start, s", "warm start, s")


@dataclass
class Args(study.Args):
    times: int = 3
    """number of cold starts after the first start, each with a warm one after it"""


def seconds_to_updates(algo, folder, cache):
    """Start a compiled run whose temporary folder and `cache` are in `folder`; the seconds until it is compiled."""
    flags = FULL_SOON if MEASURED[algo].off_policy else ""
    settings = RoundArgs(algo=algo, total_timesteps=MEASURED[algo].speed.quick_steps, flags=flags)
    words = command(settings, [*INTERLEAVED, f"{algo}_torchcompile", "--compile"], 1, folder / "runs")
    begin = time.perf_counter()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    environment = os.environ | cold(folder / "home") | {"TORCHINDUCTOR_CACHE_DIR": str(folder / cache)}
    process = start(words, folder / "log.txt", env=environment, **pipes)
    try:
        if not process.stdout.readline():  # the first slice could begin
            stop(f"{algo}: the run failed:\n{(folder / 'log.txt').read_text(encoding='utf-8')[-1000:]}")
        return time.perf_counter() - begin
    finally:
        end(process)


def measure(args, algo):
    """Seconds of each start, in lists by the names in `STARTS`."""
    found = {name: [] for name in STARTS}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        found["first"].append(seconds_to_updates(algo, Path(folder), "first"))
        for cache in map(str, range(args.times)):
            for name in ("cold", "warm"):
                found[name].append(seconds_to_updates(algo, Path(folder), cache))
    medians = {name: round(statistics.median(seconds), 1) for name, seconds in found.items()}
    print(named(algo), medians, file=sys.stderr)
    return {"seconds": found}


def rows(data):
    """The table row of one algorithm's results."""
    seconds = data["seconds"]  # older results lack the cold starts
    return [[named(data["algo"]), *(spread(seconds[name], "{:.0f}") if name in seconds else "" for name in STARTS)]]


def table(results):
    """A Markdown table for each measured machine."""
    return editions.tables(stored(results, "start", MEASURED), HEADER, rows, ["all", *["not measured"] * 3])


def main(args):
    from_low(1, args, "times")
    study.run("start", args, MEASURED, measure, table)


if __name__ == "__main__":
    main(parse(Args, __doc__))
