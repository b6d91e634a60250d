"""What all tips share: they time two ways to do the same.

    python -m benchmark.studies.tips.no_item          # one tip
    python -m benchmark.studies.tips.no_item --write  # also store it in results/
    python -m benchmark.studies.tips                  # store all of them; two minutes
    python -m benchmark.report                        # put them into doc/speed.md

A tip is a file with two functions, `before` and `after`, that take nothing and return the same numbers.
"""

import ast
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmark import editions
from benchmark.arguments import parse
from benchmark.report.machine import machine
from benchmark.report.tables import spread
from benchmark.results import RESULTS, path_here, store
from benchmark.studies.timing import DEVICE, interleaved_times, ratios

HERE = Path(__file__).resolve().parent
TIPS = ("device_creation", "pinned_memory", "no_item", "train_eval", "kept_parameters", "in_place")
TIPS += ("channels_last",)


@dataclass
class TipArgs:
    write: bool = False
    """store the figures in results/<machine>/tips/<name>.json"""
    rounds: int = 9
    """of both, of which the median counts"""
    seconds: float = 0.2
    """of each in a round, about"""
    results: Path = RESULTS
    """folder with the results"""


@dataclass
class Args:
    results: Path = RESULTS
    """folder with the results"""


def time_both(before, after, needs_cuda=False):
    """The command line of a tip."""
    args = parse(TipArgs, sys.modules["__main__"].__doc__)
    name = Path(sys.argv[0]).stem
    if needs_cuda and DEVICE.type != "cuda":
        print(f"{name}: not measured, it needs a CUDA device")
        return
    torch.set_num_threads(1)
    taken = interleaved_times({"before": before, "after": after}, args.rounds, args.seconds)
    micros = {way: spread([1e6 * value for value in values], "{:.1f}") for way, values in taken.items()}
    ratio = spread(ratios(taken), "{:.2f}")
    print(f"{name} on {DEVICE.type}: before {micros['before']} us, after {micros['after']} us, ratio {ratio}")
    if args.write:
        data = {"device": DEVICE.type, "seconds": taken, "machine": machine()} | editions.today(Path(sys.argv[0]))
        store(path_here(args.results, "tips", name), data)


def worth(path):
    """The ratio in one result, as text."""
    return spread(ratios(json.loads(path.read_text())["seconds"]), "{:.2f}") if path.exists() else "not measured"


def table(results):
    """A Markdown table of all tips, with a column for each machine that has been measured."""
    folders = sorted(results.glob("*/tips"))
    lines = [
        f"| tip | {' | '.join(folder.parent.name for folder in folders) or 'worth'} |",
        f"|---|{'---|' * max(1, len(folders))}",
    ]
    for name in TIPS:
        title = ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text())).splitlines()[0]
        cells = [worth(folder / f"{name}.json") for folder in folders] or ["not measured"]
        lines.append(f"| [{title}](../benchmark/studies/tips/{name}.py) | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(args):
    """Measure and store all tips."""
    for name in TIPS:
        module = f"benchmark.studies.tips.{name}"
        subprocess.run([sys.executable, "-m", module, "--write", f"--results={args.results}"], check=True)
