"""Plot runs together: episodic return, with a random policy's as a dashed line, and any other logged values.

    python -m instruments.plots runs/ONE runs/OTHER --tags losses/entropy "gradients/actor.*" --output runs.png

The random policy is that of --random-baseline. Returns are moving means over 20 episodes.
"""

import contextlib
import fnmatch
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from common.arguments import parse, refuse, stop

try:
    from matplotlib.figure import Figure

    from common.curves import COLORS, LINES, RETURN, moving_mean, plot, read_events, require_picture, series
except ImportError:
    stop("instruments.plots: pip install matplotlib")

RANDOM = "charts/random_return"
EPISODES = 20


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[Path, ...]]
    """folders of runs"""
    tags: tuple[str, ...] = ()
    """TensorBoard tags, with * as a wildcard; each gets a panel"""
    labels: tuple[str, ...] = ()
    """names of the runs in the legend (default: their folders)"""
    output: Path = Path("runs.png")
    """PNG or SVG file to write"""


def draw_run(all_axes, events, tags, label, color):
    """Plot one run in all panels."""
    known = events.Tags()["scalars"]
    if RETURN in known:
        steps, returns = series(events, RETURN)
        plot(all_axes[0], [(steps, moving_mean(returns, EPISODES))], label, color)
    if RANDOM in known:
        _, (baseline, *_) = series(events, RANDOM)
        all_axes[0].axhline(baseline, color=color, linestyle="--", linewidth=1, label=f"{label}: random policy")
    for axes, pattern in zip(all_axes[1:], tags, strict=True):
        for i, tag in enumerate(fnmatch.filter(known, pattern)):
            name = label if tag == pattern else f"{label}: {tag.partition('/')[2]}"
            plot(axes, [series(events, tag)], name, color, LINES[i % len(LINES)])


def with_seed(folder, label):
    """A run's name in the legend, with its seed."""
    with contextlib.suppress(OSError, ValueError, KeyError):  # config.json is missing or damaged
        label = f"{label}, seed {json.loads((folder / 'config.json').read_text(encoding='utf-8'))['seed']}"
    return label


def draw(args):
    """Write the figure."""
    tags = args.tags
    figure = Figure(figsize=(5 * (1 + len(tags)), 4), layout="constrained")
    all_axes = figure.subplots(1, 1 + len(tags), squeeze=False)[0]
    for axes, name in zip(all_axes, (f"episodic return, mean over {EPISODES} episodes", *tags), strict=True):
        axes.set(xlabel="environment steps", ylabel=name)
        axes.grid(alpha=0.3)
    labels = args.labels or [folder.name for folder in args.runs]
    for i, (folder, label) in enumerate(zip(args.runs, labels, strict=True)):
        events = read_events(folder)
        if not events.Tags()["scalars"]:
            stop(f"runs {folder}: its TensorBoard events are empty or damaged; leave it out")
        draw_run(all_axes, events, tags, with_seed(folder, label), COLORS[i % len(COLORS)])
    entries = {}
    for axes in all_axes:
        for line, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, line)
    if entries:
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=4, fontsize=8)
    for axes, tag in zip(all_axes[1:], tags, strict=True):
        if not axes.lines:
            print(f"warning: --tags {tag}: no run has it", file=sys.stderr)
    if not any(axes.lines for axes in all_axes):
        stop(
            f"runs {' '.join(map(str, args.runs))}: no episode has ended; name what to draw by --tags, or train longer"
        )
    figure.savefig(args.output, dpi=120)


def main(args):
    for folder in args.runs:
        if not list(folder.glob("events.out.*")):
            stop(f"runs {folder}: no TensorBoard events in there; give folders of runs")
    require_picture(args.output)
    if args.labels and len(args.labels) != len(args.runs):
        refuse("labels", " ".join(args.labels), f"give one for each of {len(args.runs)} runs")
    draw(args)


if __name__ == "__main__":
    main(parse(Args, __doc__))
