"""The cost of each instrument, as a share of a run's steady speed.

    python -m benchmark.studies.instrument_overhead  # SAC and PPO for Atari; 20 minutes on 2 cores
    python -m benchmark.report                       # put the results into doc/debugging.md

A round trains a script alone and with each instrument that works during training, interleaved (speed/rounds.py).
Without a CUDA device, it does without CUDA graphs.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.stats import bootstrap

from benchmark import editions
from benchmark.results import stored
from benchmark.speed.rounds import TURBO_FLAGS, RunArgs, possible, run_programs
from benchmark.studies import study
from common.algorithms import FULL_SOON, named
from common.arguments import parse

INSTRUMENTED = ("-m", "benchmark.studies.instrumented")
ALONE = "none"
INSTRUMENTS = {
    ALONE: "",
    "--watch-gradients": "--watch-gradients",
    "--dump-frames": "--dump-frames 10000",
    "--watch": "--watch",
}
ATARI_ONLY = ("--dump-frames",)
TASKS = {"sac_continuous_action": (5_000, FULL_SOON), "ppo_atari_envpool": (16_000, "")}  # steps, flags
MODES = tuple(TURBO_FLAGS)
HEADER = ("", "instrument", *MODES)


@dataclass
class Args(study.RoundsArgs):
    algos: tuple[str, ...] = tuple(TASKS)
    seeds: tuple[int, ...] = (1, 2)
    run_dir: Path = Path("runs/overhead")


def measure(args, algo):
    """The speeds in all modes that this machine can run."""
    return {"seeds": args.seeds, "modes": {mode: measure_mode(args, algo, mode) for mode in possible(MODES)}}


def measure_mode(args, algo, mode):
    """Steps per second with each instrument, as lists over the time slices of all seeds."""
    steps, flags = TASKS[algo]
    kinds = [name for name in INSTRUMENTS if "atari" in algo or name not in ATARI_ONLY]
    words = [f"{algo}_torchcompile", *TURBO_FLAGS[mode]]
    programs = {name: [*INSTRUMENTED, INSTRUMENTS[name], *words] for name in kinds}
    settings = RunArgs(total_timesteps=steps, flags=flags)
    summaries = run_programs(algo, programs, args.seeds, args.run_dir / algo / mode, settings)
    return {name: [speed for summary in own for speed in summary["slice_speeds"]] for name, own in summaries.items()}


def ratio(watched, alone, axis=-1):
    """Speed with an instrument over speed without, over all time slices. Slices have equal numbers of steps."""
    return np.sum(1 / np.asarray(alone), axis) / np.sum(1 / np.asarray(watched), axis)


def cell(speeds, name):
    """The ratio and its 95% bootstrap interval over time slices; `speeds` are those of one mode."""
    if name not in speeds:
        return "not measured"
    pairs = (speeds[name], speeds[ALONE])
    settings = {"paired": True, "method": "percentile", "n_resamples": 2000, "rng": np.random.default_rng(0)}
    interval = bootstrap(pairs, ratio, **settings).confidence_interval
    return f"{ratio(*pairs):.3f} ({interval.low:.3f} to {interval.high:.3f})"


def rows(data):
    """The table rows of one algorithm's results: the share of speed that remains with each instrument."""
    lines = []
    for name in INSTRUMENTS:
        if name == ALONE or not any(name in speeds for speeds in data["modes"].values()):
            continue
        cells = [cell(data["modes"].get(mode, {}), name) for mode in MODES]
        lines.append([named(data["algo"]), f"`{name}`", *cells])
    return lines


def table(results):
    """A Markdown table for each measured machine."""
    nothing = ["all", "all", *["not measured"] * len(MODES)]
    about = "Speed with an instrument over speed without, and its 95% interval, "
    return editions.tables(stored(results, "overhead", TASKS), HEADER, rows, nothing, about)


def main(args):
    study.run("overhead", args, TASKS, measure, table)


if __name__ == "__main__":
    main(parse(Args, __doc__))
