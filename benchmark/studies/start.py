"""Seconds from the start of a compiled run until its updates are compiled, with a cold and with a warm cache.

    python -m benchmark.studies.start   # all scripts, three times each; half an hour on 2 cores
    python -m benchmark.report          # put the results into doc/speed.md

A cold start has empty caches of compiled code, an empty temporary folder and an empty home. A warm start has those that
the cold start before it has filled. Both include Python's imports.
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

HEADER = ("", "cold start, s", "warm start, s")


@dataclass
class Args(study.Args):
    times: int = 3
    """number of cold starts, each with a warm one after it"""


def seconds_to_updates(algo, folder):
    """Start a compiled run whose caches are in `folder`; the seconds until all of its updates are compiled."""
    flags = FULL_SOON if MEASURED[algo].off_policy else ""
    settings = RoundArgs(algo=algo, total_timesteps=MEASURED[algo].speed.quick_steps, flags=flags)
    words = command(settings, [*INTERLEAVED, f"{algo}_torchcompile", "--compile"], 1, folder / "runs")
    begin = time.perf_counter()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = start(words, folder / "log.txt", env=os.environ | cold(folder / "caches"), **pipes)
    try:
        if not process.stdout.readline():  # the first slice could begin
            stop(f"{algo}: the run failed:\n{(folder / 'log.txt').read_text(encoding='utf-8')[-1000:]}")
        return time.perf_counter() - begin
    finally:
        end(process)


def measure(args, algo):
    """Seconds of each cold and each warm start."""
    found = {"cold": [], "warm": []}
    for _ in range(args.times):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            for seconds in found.values():
                seconds.append(seconds_to_updates(algo, Path(folder)))
    medians = {cache: round(statistics.median(seconds), 1) for cache, seconds in found.items()}
    print(named(algo), medians, file=sys.stderr)
    return {"seconds": found}


def rows(data):
    """The table row of one algorithm's results."""
    return [[named(data["algo"]), *(spread(data["seconds"][cache], "{:.0f}") for cache in ("cold", "warm"))]]


def table(results):
    """A Markdown table for each measured machine."""
    return editions.tables(stored(results, "start", MEASURED), HEADER, rows, ["all", "not measured", "not measured"])


def main(args):
    from_low(1, args, "times")
    study.run("start", args, MEASURED, measure, table)


if __name__ == "__main__":
    main(parse(Args, __doc__))
