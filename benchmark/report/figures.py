"""Draw results for the report: speeds, learning curves and load. Hatches tell modes apart in black and white."""

from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from benchmark.algorithms import named
from benchmark.published import cleanrl
from common import curves

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


class Picture(NamedTuple):
    kind: str  # "speed", "learning" or "load"
    caption: str
    svg: bytes


def speed_ratios(results):
    """Speed over plain's of the same round, of each result that has both."""
    pairs = [(result["summary"]["steady_sps"], result["plain"]["steady_sps"]) for result in results]
    return [fast / base for fast, base in pairs if fast and base]


def speed_bars(groups):
    """Ratios to plain by algorithm and mode, with their range over seeds."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
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
    figure.legend(**curves.LEGEND)
    return figure


def load_curves(title, tables):
    """How busy processor and card were over a run: `tables` are the monitor's by mode."""
    names = {"cores": "processor, cores", "gpu_percent": "card, % of time"}
    columns = [name for name in names if any(name in table["columns"] for table in tables.values())]
    figure = Figure(figsize=(8, 3 * len(columns)), layout="constrained")
    rows = figure.subplots(len(columns), squeeze=False)
    for axes, column in zip(rows[:, 0], columns, strict=True):
        for mode, table in tables.items():
            color, style, _ = STYLES[mode]
            samples = np.array(table["rows"])
            axes.plot(samples[:, 0], samples[:, table["columns"].index(column)], color=color, ls=style, label=mode)
        axes.set(xlabel="seconds of the mode's own slices", ylabel=names[column], ylim=(0, None))
    figure.legend(*rows[0, 0].get_legend_handles_labels(), **curves.LEGEND)
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
    with curves.settings():
        for slug, own in groups["speed"].items():
            drawn[f"speed_{slug}"] = Picture(
                "speed", "Speed of all modes, as a ratio to plain", curves.svg(speed_bars(own))
            )
        for kind, by_machine in groups.items():
            for slug, own in by_machine.items():
                for (algo, env_id), modes in own.items():
                    title = named(algo, env_id)
                    if kind == "learning" and any(has_curve(runs) for runs in modes.values()):
                        picture = curves.svg(curves.learning_figure(title, modes, cleanrl(algo, env_id), STYLES))
                        caption = f"{title}: return against steps and time"
                        drawn[picture_name(kind, slug, algo, env_id)] = Picture(kind, caption, picture)
                    tables = {mode: done(runs)[0].get("monitor") for mode, runs in modes.items() if done(runs)}
                    tables = {mode: table for mode, table in tables.items() if table and table["rows"]}
                    if tables:
                        load = curves.svg(load_curves(f"{title}, {kind}", tables))
                        caption = f"{title}: load of the machine"
                        drawn[picture_name(f"load_{kind}", slug, algo, env_id)] = Picture("load", caption, load)
    return drawn
