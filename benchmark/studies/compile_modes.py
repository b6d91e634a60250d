"""Compile time and speed of the turbo scripts in each mode of torch.compile.

    python -m benchmark.studies.compile_modes  # all scripts; half an hour on 2 cores
    python -m benchmark.studies.compile_modes --algos dqn --seeds 1 2 3
    python -m benchmark.report                 # put the results into doc/torch_compile.md

A round trains a script eagerly and in each mode, interleaved (speed/rounds.py), from an empty compiler cache.
"""

from dataclasses import dataclass
from pathlib import Path

from benchmark import editions
from benchmark.results import RESULTS, path_here, store, stored
from benchmark.speed.rounds import INTERLEAVED, RunArgs, run_programs
from common.algorithms import MEASURED, named
from common.arguments import check, distinct, from_low, parse
from common.folders import locked, writable
from common.machine import machine
from common.tables import spread

MODES = {
    "eager": [],
    "default": ["--compile"],
    "max-autotune-no-cudagraphs": ["--compile", "--compile-mode=max-autotune-no-cudagraphs"],
}
HEADER = ("", "mode", "steps/s", "ratio to default", "until steady, s")


@dataclass
class Args:
    algos: tuple[str, ...] = tuple(MEASURED)
    """names of the plain scripts"""
    seeds: tuple[int, ...] = (1,)
    """one round for each seed"""
    run_dir: Path = Path("runs/modes")
    """folder for the runs; an earlier one of the same algorithm is deleted"""
    results: Path = RESULTS
    """folder that receives <machine>/modes/<algo>.json"""


def measure(args, algo):
    """Speed and warm-up of each mode, as lists over seeds."""
    programs = {mode: [*INTERLEAVED, f"{algo}_torchcompile", *flags] for mode, flags in MODES.items()}
    speed = MEASURED[algo].speed
    settings = RunArgs(total_timesteps=speed.quick_steps, flags=speed.flags)
    summaries = run_programs(algo, programs, args.seeds, args.run_dir / algo, settings)
    columns = {"steps_per_second": "steady_sps", "warmup_seconds": "warmup_seconds"}
    return {
        name: {mode: [summary[key] for summary in own] for mode, own in summaries.items()}
        for name, key in columns.items()
    }


def rows(data):
    """The table rows of one algorithm's results."""
    name = named(data["algo"])
    speeds, warmups = data["steps_per_second"], data["warmup_seconds"]
    lines = []
    for mode in MODES:
        ratios = [own / other for own, other in zip(speeds[mode], speeds["default"], strict=True)]
        columns = [(speeds[mode], "{:.0f}"), (ratios, "{:.2f}"), (warmups[mode], "{:.0f}")]
        lines.append([name, mode, *(spread(values, form) for values, form in columns)])
    return lines


def table(results):
    """A Markdown table for each measured machine."""
    nothing = ["all", "all", "not measured", "", ""]
    return editions.tables(stored(results, "modes", MEASURED), HEADER, rows, nothing)


def main(args):
    check("algos", args.algos, MEASURED)
    distinct(args, "algos", "seeds")
    from_low(0, args, "seeds")
    writable("results", args.results)
    with locked("run-dir", args.run_dir):
        for algo in args.algos:
            data = {"algo": algo, "seeds": args.seeds, "machine": machine()} | measure(args, algo)
            data |= editions.today(editions.script(f"{algo}_torchcompile"))
            store(path_here(args.results, "modes", algo), data)
    print(table(args.results))


if __name__ == "__main__":
    main(parse(Args, __doc__))
