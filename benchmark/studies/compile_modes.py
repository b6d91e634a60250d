"""Compile time and speed of the turbo scripts in each mode of torch.compile.

    python -m benchmark.studies.compile_modes  # all scripts; half an hour on 2 cores
    python -m benchmark.studies.compile_modes --algos dqn --seeds 1 2 3
    python -m benchmark.report                 # put the results into doc/torch_compile.md

A round trains a script eagerly and in each mode, interleaved (speed/rounds.py), from an empty compiler cache.
"""

from dataclasses import dataclass
from pathlib import Path

from benchmark import editions
from benchmark.results import stored
from benchmark.speed.rounds import INTERLEAVED, RunArgs, run_programs
from benchmark.studies import study
from common.algorithms import MEASURED, named
from common.arguments import parse
from common.tables import spread

MODES = {
    "eager": [],
    "default": ["--compile"],
    "max-autotune-no-cudagraphs": ["--compile", "--compile-mode=max-autotune-no-cudagraphs"],
}
HEADER = ("", "mode", "steps/s", "ratio to default", "until steady, s")


@dataclass
class Args(study.RoundsArgs):
    run_dir: Path = Path("runs/modes")


def measure(args, algo):
    """Speed and warm-up of each mode, as lists over seeds."""
    programs = {mode: [*INTERLEAVED, f"{algo}_torchcompile", *flags] for mode, flags in MODES.items()}
    speed = MEASURED[algo].speed
    settings = RunArgs(total_timesteps=speed.quick_steps, flags=speed.flags)
    summaries = run_programs(algo, programs, args.seeds, args.run_dir / algo, settings)
    columns = {"steps_per_second": "steady_sps", "warmup_seconds": "warmup_seconds"}
    return {"seeds": args.seeds} | {
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
    study.run("modes", args, MEASURED, measure, table)


if __name__ == "__main__":
    main(parse(Args, __doc__))
