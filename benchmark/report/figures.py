"""Draw results for the report: speeds, learning curves and load.

Colors are those of Okabe and Ito (2008), which the color-blind tell apart; line styles and hatches say the same in
black and white.
"""

import io
from typing import NamedTuple

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.ticker import EngFormatter
from scipy.stats import bootstrap

from benchmark.algorithms import named
from benchmark.published import cleanrl

POINTS = 100
STYLES = {  # color, line style, hatch
    "plain": ("#000000", "-", ""),
    "eager": ("#E69F00", "--", "//"),
    "compile": ("#0072B2", "-.", "\\\\"),
    "cudagraphs": ("#009E73", ":", "xx"),
    "compile+cudagraphs": ("#D55E00", (0, (5, 1)), "--"),
    "sb3": ("#56B4E9", (0, (1, 1)), "||"),
    "sbx": ("#CC79A7", (0, (3, 1, 1, 1)), "++"),
}
STYLES |= {  # with MKL unlocked
    "plain+mkl": ("#666666", "--", ""),
    "eager+mkl": ("#E69F00", "-", ""),
    "compile+mkl": ("#0072B2", "-", ""),
    "sb3+mkl": ("#56B4E9", "-", ""),
}
LEGEND = {"loc": "outside lower center", "ncols": 5, "fontsize": 9, "handlelength": 3}
SETTINGS = {
    "svg.hashsalt": "leanrl",  # the same file each time
    "svg.fonttype": "none",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "hatch.linewidth": 0.5,
}


class Picture(NamedTuple):
    kind: str  # "speed", "learning" or "load"
    caption: str
    svg: bytes


def interquartile_mean(values, axis=-1):
    """The mean of the middle half; values at its edges count in part (Agarwal et al. 2021, arXiv:2108.13264)."""
    values = np.moveaxis(np.sort(values, axis), axis, -1)
    count = values.shape[-1]
    places = np.arange(count)
    weights = np.clip(np.minimum(places + 1, 0.75 * count) - np.maximum(places, 0.25 * count), 0, None)
    return values @ weights / weights.sum()


def middle_and_interval(curves):
    """Interquartile mean over `curves`, (seeds, points), and a 95% bootstrap interval: its ends, each (points,)."""
    curves = np.asarray(curves, float)
    middle = interquartile_mean(curves, axis=0)
    if len(curves) == 1:
        return middle, middle, middle
    settings = {"axis": 0, "vectorized": True, "method": "percentile", "n_resamples": 2000}
    interval = bootstrap((curves,), interquartile_mean, rng=np.random.default_rng(0), **settings).confidence_interval
    return middle, interval.low, interval.high


def speed_ratios(results):
    """Speed over plain's of the same round, of each result that has both."""
    pairs = [(result["summary"]["steady_sps"], result["plain"]["steady_sps"]) for result in results]
    return [fast / base for fast, base in pairs if fast and base]


def save(figure):
    """A figure as the bytes of an SVG file without a date."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def speed_bars(groups):
    """Ratios to plain by algorithm and mode, with their range over seeds."""
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    all_ratios = [{mode: speed_ratios(done(results)) for mode, results in group.items()} for group in groups.values()]
    measured = [[mode for mode in STYLES if ratios.get(mode)] for ratios in all_ratios]
    width = 0.8 / max(1, *map(len, measured))
    for mode, (color, _, hatch) in STYLES.items():
        own = [i for i, modes in enumerate(measured) if mode in modes]
        if not own:
            continue
        places = [i + (measured[i].index(mode) + 0.5 - len(measured[i]) / 2) * width for i in own]
        ratios = [all_ratios[i][mode] for i in own]
        middle = np.array([np.median(some) for some in ratios])
        error = [middle - [min(some) for some in ratios], [max(some) for some in ratios] - middle]
        look = {"facecolor": "white" if hatch else color, "edgecolor": color, "hatch": hatch, "label": mode}
        axes.bar(places, middle, width, yerr=error, capsize=2, **look)
    names = [named(*group).replace(", ", "\n") for group in groups]
    axes.set_xticks(range(len(groups)), names, fontsize=8)
    axes.set(ylabel="speed, ratio to plain")
    axes.grid(axis="x", visible=False)
    figure.legend(**LEGEND)
    return figure


def learning_curves(title, groups, published="", styles=STYLES):
    """Interquartile means over seeds and their intervals, against steps and against wall-clock minutes.

    Minutes are those that the fastest seed took for as many steps: the others shared the machine with more.
    `groups` are results by name, such as a mode's, with an entry in `styles` each. `published` is CleanRL's return,
    such as "1442.64 ± 46.03", or "".
    """
    figure, both = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for name, results in groups.items():
        curves = [np.array(result["curve"]).T for result in results if result.get("curve")]  # steps, seconds, returns
        if not curves:
            continue
        begin = max(steps[0] for steps, _, _ in curves)
        end = min(steps[-1] for steps, _, _ in curves)
        grid = np.linspace(begin, end, POINTS)
        middle, low, high = middle_and_interval([np.interp(grid, steps, returns) for steps, _, returns in curves])
        steps, seconds, _ = min(curves, key=lambda curve: curve[1][-1])
        color, style, _ = styles[name]
        seeds = "1 seed" if len(curves) == 1 else f"{len(curves)} seeds"
        for axes, places in zip(both, (grid, np.interp(grid, steps, seconds) / 60), strict=True):
            axes.plot(places, middle, color=color, linestyle=style, label=f"{name}, {seeds}")
            axes.fill_between(places, low, high, color=color, alpha=0.15, linewidth=0)
    if published:
        level = float(published.split(" ")[0])
        for axes in both:
            axes.axhline(level, color="#999999", linestyle=":", label=f"CleanRL at the end: {published}")
    both[0].xaxis.set_major_formatter(EngFormatter(sep=""))  # 200k, 1M
    both[0].set(xlabel="environment steps", ylabel="episodic return")
    both[1].set(xlabel="wall-clock of the fastest seed, minutes")
    figure.legend(*both[0].get_legend_handles_labels(), **LEGEND)
    figure.suptitle(title)
    return figure


def load_curves(title, tables):
    """How busy processor and card were over a run: `tables` are the monitor's by mode."""
    names = {"cores": "processor, cores", "gpu_percent": "card, % of time"}
    columns = [name for name in names if any(name in table["columns"] for table in tables.values())]
    figure, rows = plt.subplots(len(columns), figsize=(8, 3 * len(columns)), squeeze=False, layout="constrained")
    for axes, column in zip(rows[:, 0], columns, strict=True):
        for mode, table in tables.items():
            color, style, _ = STYLES[mode]
            samples = np.array(table["rows"])
            axes.plot(samples[:, 0], samples[:, table["columns"].index(column)], color=color, ls=style, label=mode)
        axes.set(xlabel="seconds of the mode's own slices", ylabel=names[column], ylim=(0, None))
    figure.legend(*rows[0, 0].get_legend_handles_labels(), **LEGEND)
    figure.suptitle(title)
    return figure


def done(results):
    """Those of `results` that did not fail."""
    return [result for result in results if "summary" in result]


def has_curve(runs):
    """Whether any of `runs` has ended an episode."""
    return any(run.get("curve") for run in runs)


def picture_name(kind, slug, algo, env_id):
    """The name of a picture of one algorithm on one machine."""
    return f"{kind}_{slug}_{algo}_{env_id}".replace("/", "-")


def draw(groups):
    """Pictures by name. `groups` has results as {kind: {machine: {(algo, env_id): {mode: [results]}}}}."""
    drawn = {}
    with plt.rc_context(SETTINGS):
        for slug, own in groups["speed"].items():
            drawn[f"speed_{slug}"] = Picture("speed", "Speed of all modes, as a ratio to plain", save(speed_bars(own)))
        for kind, by_machine in groups.items():
            for slug, own in by_machine.items():
                for (algo, env_id), modes in own.items():
                    title = named(algo, env_id)
                    if kind == "learning" and any(has_curve(runs) for runs in modes.values()):
                        curves = save(learning_curves(title, modes, cleanrl(algo, env_id)))
                        caption = f"{title}: return against steps and time"
                        drawn[picture_name(kind, slug, algo, env_id)] = Picture(kind, caption, curves)
                    tables = {mode: done(runs)[0].get("monitor") for mode, runs in modes.items() if done(runs)}
                    tables = {mode: table for mode, table in tables.items() if table and table["rows"]}
                    if tables:
                        load = save(load_curves(f"{title}, {kind}", tables))
                        caption = f"{title}: load of the machine"
                        drawn[picture_name(f"load_{kind}", slug, algo, env_id)] = Picture("load", caption, load)
        plt.close("all")
    return drawn
