"""Learning curves: read from the events of runs, averaged over seeds, and drawn.

Colors are from the color-blind safe palette of Okabe and Ito (2008); line styles distinguish curves in black and white.
"""

import io
import json
from collections import defaultdict

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.arguments import refuse

RETURN = "charts/episodic_return"
SPEED = "charts/SPS"
POINTS = 200  # of a learning curve
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", "-.", ":")
LEGEND = {"loc": "outside lower center", "ncols": 5, "fontsize": 9}
SETTINGS = {
    "svg.hashsalt": "leanrl",  # makes files reproducible
    "svg.fonttype": "none",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "hatch.linewidth": 0.5,
}

# ---------------------------------------------------------------------------------------------------------------------
# Runs
# ---------------------------------------------------------------------------------------------------------------------


def read_events(folder):
    """The TensorBoard events of a run."""
    return EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()


def scalars(events, tag):
    """The logged values of a tag, in order: entries with `step`, `value` and `wall_time`."""
    return events.Scalars(tag) if tag in events.Tags()["scalars"] else []


def series(events, tag):
    """Steps and values of a tag, as arrays."""
    logged = scalars(events, tag)
    return np.array([entry.step for entry in logged]), np.array([entry.value for entry in logged])


def learning_curve(folders):
    """Episodic returns of a run, as [step, seconds of training, mean return] for at most POINTS equal parts.

    An interrupted run has multiple folders, in order. If a part was killed, its episodes after the first episode end
    of the next part are ignored.
    """
    episodes = []
    before = 0.0
    for folder in folders:
        events = read_events(folder)
        returns = scalars(events, RETURN)
        if returns:
            begin = events.FirstEventTimestamp()
            episodes = [episode for episode in episodes if episode[0] < returns[0].step]
            episodes += [(entry.step, before + entry.wall_time - begin, entry.value) for entry in returns]
        summary = folder / "summary.json"
        if summary.exists():
            before += json.loads(summary.read_text(encoding="utf-8"))["wall_seconds"]
        elif returns:
            before = episodes[-1][1]
    if not episodes:
        return []
    width = max(episodes[-1][0] / POINTS, 1)
    parts = defaultdict(list)
    for episode in episodes:
        parts[int((episode[0] - 1) / width)].append(episode)
    rows = []
    for part in parts.values():
        step, seconds, _ = part[-1]
        rows.append([step, round(seconds, 2), round(float(np.mean([value for _, _, value in part])), 3)])
    return rows


def last_tenth(steps, values):
    """The mean of `values` over the last tenth of the steps."""
    return np.mean(np.array(values)[np.array(steps) > 0.9 * steps[-1]])


def end_of(curve):
    """The mean return of a learning curve over the last tenth of its steps."""
    steps, _, returns = zip(*curve, strict=True)
    return last_tenth(steps, returns)


def late_speed(folder):
    """Steps per second of a run, the median over the last half of its logs; None if it has logged nothing."""
    _, speeds = series(read_events(folder), SPEED)
    return float(np.median(speeds[len(speeds) // 2 :])) if len(speeds) else None


# ---------------------------------------------------------------------------------------------------------------------
# Multiple seeds
# ---------------------------------------------------------------------------------------------------------------------


def moving_mean(values, window):
    """Moving means over the last `window` values, fewer at the beginning."""
    sums = np.cumsum(values, dtype=float)
    sums[window:] -= sums[:-window].copy()
    return sums / np.minimum(np.arange(len(values)) + 1, window)


def mean_curve(runs):
    """Steps and means of `runs`, each (steps, values), up to the shortest run; a single run is unchanged."""
    if len(runs) == 1:
        return runs[0]
    grid = np.linspace(max(steps[0] for steps, _ in runs), min(steps[-1] for steps, _ in runs), POINTS)
    return grid, np.mean([np.interp(grid, steps, values) for steps, values in runs], axis=0)


# ---------------------------------------------------------------------------------------------------------------------
# Figures
# ---------------------------------------------------------------------------------------------------------------------


def plot(axes, runs, label, color, line="-"):
    """Draw runs of one setting, each (steps, values), as thin lines, and their mean."""
    if len(runs) > 1:
        for run in runs:
            axes.plot(*run, color=color, linestyle=line, linewidth=0.7, alpha=0.5)
    axes.plot(*mean_curve(runs), color=color, linestyle=line, label=label)


def seeds(number):
    return "1 seed" if number == 1 else f"{number} seeds"


def learning_figure(title, groups, published, styles, size=(7, 4.5)):
    """Draw returns against steps.

    `groups` maps names, such as modes, to results; `styles` has an entry for each. `published` is CleanRL's return,
    such as "1442.64 ± 46.03", or "".
    """
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    for name, results in groups.items():
        runs = [np.array(result["curve"]).T for result in results if result.get("curve")]  # steps, seconds, returns
        if runs:
            plot(axes, [(steps, returns) for steps, _, returns in runs], f"{name}, {seeds(len(runs))}", *styles[name])
    if published:
        level = float(published.split(" ")[0])
        axes.axhline(level, color="#666666", linestyle=":", label=f"CleanRL's table: {level:.0f}")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 200k, 1M
    axes.set(xlabel="environment steps", ylabel="episodic return")
    figure.suptitle(title, fontsize=10)
    longest = max((len(label) for label in axes.get_legend_handles_labels()[1]), default=0)
    figure.legend(**LEGEND | {"ncols": 2 if longest < 30 else 1})
    return figure


def require_picture(path):
    """Exit if the argument `output` is not a picture file that can be written."""
    if path.suffix not in (".png", ".svg") or not path.parent.is_dir():
        refuse("output", path, "give a PNG or SVG file in a folder that exists")


def svg(figure):
    """A figure as bytes of an SVG file, without a date."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def settings():
    """Context manager with the style of all figures."""
    return matplotlib.rc_context(SETTINGS)
