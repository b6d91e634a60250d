"""Draw results: speeds, learning curves, and return against minutes for README."""

from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from benchmark.report.data import LEANRL, compared, speed, with_curve
from benchmark.results import plain_name
from common import curves
from common.algorithms import ALGORITHMS, named
from common.machine import describe

COLORS = {  # of learning curves, by mode
    "plain": "#000000",
    "plain+mkl": "#888888",
    "eager": "#E69F00",
    "cudagraphs": "#8C564B",
    "compile": "#D55E00",
    "compile+cudagraphs": "#D55E00",
    "compile+mkl": "#0072B2",
    "sb3": "#56B4E9",
    "sbx": "#CC79A7",
    "cleanrl": "#009E73",
    "leanrl-2024": "#F0E442",
    "eager+mkl": "#8C6D1F",
    "sb3+mkl": "#1F77B4",
}
LOOKS = {  # color and hatch by column: hatches tell bars apart in black and white
    "plain": ("#000000", ""),
    LEANRL: ("#D55E00", ""),
    "SB3": ("#56B4E9", "//"),
    "SBX": ("#CC79A7", "\\\\"),
    "CleanRL": ("#009E73", ".."),
}
PLACES = [(6, 0, "left")]  # of a name, in points from the end of its line: the nearest first
PLACES += [
    (dx, dy, side) for dy in (14, -14, 28, -28, 42, -42, 56, -56, 70, -70) for dx, side in ((6, "left"), (-6, "right"))
]
SMALL = (4.2, 3.3)  # inches of a learning curve: two stand side by side on a page
MINUTES = "return_against_minutes"


class Picture(NamedTuple):
    kind: str  # "speed", "learning" or "minutes"
    caption: str
    svg: bytes


def speed_bars(title, groups):
    """Steps per second: a panel for each algorithm, a bar for each of those that README compares."""
    measured = {key: {name: speed(own) for name, own in compared(modes).items()} for key, modes in groups.items()}
    measured = {key: own for key, own in measured.items() if any(own.values())}
    rows = -(-len(measured) // 2) or 1
    figure = Figure(figsize=(4.2, 1.75 * rows + 0.6), layout="constrained")
    panels = list(figure.subplots(rows, 2, squeeze=False).flat)
    bars = {}
    for axes, (key, own) in zip(panels, measured.items(), strict=False):
        names = [name for name in LOOKS if own.get(name)]
        for i, name in enumerate(names):
            color, hatch = LOOKS[name]
            bars[name] = axes.bar(i, own[name], 0.85, color="white" if hatch else color, edgecolor=color, hatch=hatch)
            axes.bar_label(bars[name], [f"{own[name]:,.0f}"], fontsize=7, padding=1)
        axes.set_title(named(*key), fontsize=9)
        axes.set(xticks=[], yticks=[], xlim=(-0.6, len(LOOKS) - 0.4), ylim=(0, 1.15 * max(own[name] for name in names)))
        axes.spines["left"].set_visible(False)
        axes.grid(visible=False)
    for axes in panels[len(measured) :]:
        axes.set_axis_off()
    known = [name for name in LOOKS if name in bars]
    figure.legend([bars[name] for name in known], known, **curves.LEGEND | {"handlelength": 1, "columnspacing": 1})
    figure.suptitle(title, fontsize=10)
    return figure


def minutes_figure(title, panels):
    """Return against minutes: `panels` are learning runs by column, {panel's title: {column: runs}}.

    Thin lines are seeds. Thick ones are means over seeds of return and minutes at equal steps.
    """
    figure = Figure(figsize=(4.3 * max(len(panels), 1.4), 3.5), layout="constrained")
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    figure.suptitle(title, fontsize=11)
    all_axes[0].set_ylabel("episodic return")
    for axes, (name, columns) in zip(all_axes, panels.items(), strict=True):
        means = {}
        for column, runs in columns.items():
            color, _ = LOOKS[column]
            own = [np.array(run["curve"]).T for run in runs]  # steps, seconds, returns
            for _, seconds, returns in own:
                axes.plot(seconds / 60, returns, color=color, linewidth=0.7, alpha=0.45)
            _, seconds = curves.mean_curve([(steps, seconds) for steps, seconds, _ in own])
            _, returns = curves.mean_curve([(steps, returns) for steps, _, returns in own])
            (means[column],) = axes.plot(seconds / 60, returns, color=color, linewidth=2.2, zorder=3)
        axes.set_title(name, fontsize=11)
        axes.set(xlabel="minutes", xlim=(0, 1.2 * max(line.get_xdata()[-1] for line in means.values())))
        low, high = axes.get_ylim()
        axes.set_ylim(low, high + 0.12 * (high - low))
        label_ends(figure, axes, means)
    return figure


def label_ends(figure, axes, lines):
    """Name lines where they end: beside the end, or as near as neither a name nor a line is. `lines` are by name."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    paths = [axes.transData.transform(line.get_xydata()) for line in lines.values()]
    inside = axes.get_window_extent()
    taken = []

    def is_free(box):
        own = inside.y0 < box.y0 and box.y1 < inside.y1 and not any(other.overlaps(box) for other in taken)
        return own and not any(box.count_contains(path) for path in paths)

    for name, line in sorted(lines.items(), key=lambda item: item[1].get_xdata()[-1]):
        for dx, dy, side in (*PLACES, PLACES[0]):
            leader = {"arrowstyle": "-", "color": line.get_color(), "linewidth": 0.7} if dy else None
            look = {"color": line.get_color(), "fontweight": "bold", "ha": side, "va": "center", "arrowprops": leader}
            end = line.get_xydata()[-1]
            text = axes.annotate(name, end, (dx, dy), textcoords="offset points", zorder=4, **look)
            text.set_in_layout(False)
            text.update_positions(renderer)
            box = Text.get_window_extent(text, renderer)  # without the leader
            if is_free(box):
                break
            text.remove()
        else:
            axes.add_artist(text)
        taken.append(box)


def picture_name(kind, slug, algo, env_id):
    """The name of a picture of one algorithm on one machine."""
    return f"{kind}_{slug}_{algo}_{plain_name(env_id)}"


def draw(groups):
    """Pictures by name. `groups` has results as {kind: {machine: {(algo, env_id): {mode: [results]}}}}."""
    drawn = {}
    with curves.settings():
        for slug, own in groups["speed"].items():
            title = f"Steps per second, {machine_of(own)}"
            drawn[f"speed_{slug}"] = Picture("speed", title, curves.svg(speed_bars(title, own)))
        for slug, own in groups["learning"].items():
            for (algo, env_id), modes in own.items():
                modes = {mode: with_curve(runs) for mode, runs in modes.items() if with_curve(runs)}
                if modes:
                    styles = {mode: (COLORS[mode],) for mode in modes}
                    title = f"{named(algo, env_id)}; {machine_of(own)}"
                    published = ALGORITHMS[algo].cleanrl(env_id)
                    picture = curves.svg(curves.learning_figure(title, modes, published, styles, SMALL))
                    drawn[picture_name("learning", slug, algo, env_id)] = Picture("learning", title, picture)
    return drawn


def machine_of(groups):
    """The machine of results by algorithm and mode, in words."""
    return describe(next(result for modes in groups.values() for own in modes.values() for result in own)["machine"])


def draw_minutes(title, panels):
    """README's picture, whose letters are drawn, since their widths decide where they are."""
    with curves.settings(), matplotlib.rc_context({"svg.fonttype": "path"}):
        return Picture("minutes", f"Return against minutes, {title}", curves.svg(minutes_figure(title, panels)))
