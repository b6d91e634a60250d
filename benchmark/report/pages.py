"""Make the tables of what was measured in README.md and doc/, the figures beside them, and doc/report.html.

    python -m benchmark.report
    python -m benchmark.report --check  # exit code 1 if a committed table is not what the data gives
    python -m benchmark.report --stale  # exit code 1 if a result is of an earlier edition of its script

Speeds (speed/) are medians over seeds with their range; ratios are to the plain script of the same round. Where there
is no result a table says "not measured". What the curves of doc/artifacts/*.csv (curves.py) end at is in the pages of
the algorithms, and what studies/ have measured in those of PAGES.
"""

import base64
import html
import statistics
import sys
from dataclasses import dataclass

from benchmark import editions
from benchmark.gpu_report import tables as gpu_report
from benchmark.report import curves, figures, tables
from benchmark.report.data import grouped, load, with_curve
from benchmark.report.tables import learning_tables, speed_tables
from benchmark.results import read
from benchmark.studies import ablation, compile_modes, instrument_overhead, launches, population, scaling, start, tips
from common import ROOT
from common.algorithms import ALGORITHMS, named
from common.curves import end_of, last_tenth
from common.tables import Table, mean_and_deviation, with_table

MASKED_TASKS = {  # best returns: Taxi's is that of the shortest ways, a mean over its starts
    "Taxi-v4": "7.9",
    "benchmark.masked_tasks:TaxiWithoutMasks-v0": "7.9",
    "benchmark.masked_tasks:HighOrLow-v0": "30",
}
MEMORY = ("memory_RepeatPrevious", "memory_PositionOnlyCartPole", "memory_PositionOnlyPendulum")
PAGES = {  # tables by page, beside those of README.md, of doc/report.html and of learning curves
    "doc/ppo_discrete.md": ("masks",),
    "doc/ppo_lstm.md": ("memory",),
    "doc/many_runs.md": ("curve population_pendulum", "population", "agents"),
    "doc/results.md": ("learning",),
    "doc/speed.md": ("speed", "start"),
    "doc/tricks.md": (*(f"tricks of {algo}" for algo in ablation.TRICKS), "scaling", "tips"),
    "doc/counted_costs.md": ("launches", "reductions"),
    "doc/on_a_gpu.md": ("gpu",),
    "doc/torch_compile.md": ("modes",),
    "doc/debugging.md": ("overhead",),
}
CAPTIONS = {name: caption for entry in ALGORITHMS.values() for name, caption in entry.curves.items()}
CURVE = "curve "  # and the name of a file of doc/artifacts
for entry in ALGORITHMS.values():
    PAGES[entry.page] = (*PAGES.get(entry.page, ()), *(f"{CURVE}{name}" for name in entry.curves))


@dataclass
class Args:
    check: bool = False
    """change nothing; name the tables that are not what the data gives"""
    stale: bool = False
    """change nothing; name the results whose scripts have changed since"""


def curve_names():
    """Names of the curves whose ends the pages have as tables."""
    return [name.removeprefix(CURVE) for names in PAGES.values() for name in names if name.startswith(CURVE)]


def texts(results):
    """The tables as text, by page and name."""
    ends = {name: curves.table(artifact(f"{name}.csv")) for name in curve_names()}
    speed, learning = speed_tables(results), learning_tables(results)
    measured, counted = ROOT / "results", read(launches.DATA)
    known = {f"{CURVE}{name}": table.markdown() for name, table in ends.items()}
    known |= {f"tricks of {algo}": ablation.text(algo, measured) for algo in ablation.TRICKS}
    known |= {
        "speed": with_pictures(speed, [(f"Speed on {slug}", f"speed_{slug}") for slug in results["speed"]]),
        "learning": with_pictures(learning, learning_pictures(results)),
        "masks": masks_table(results).markdown(),
        "memory": memory_table().markdown(),
        "scaling": scaling.table(measured),
        "tips": tips.table(measured),
        "modes": compile_modes.table(measured),
        "start": start.table(measured),
        "overhead": instrument_overhead.table(measured),
        "population": population.table(measured),
        "launches": launches.table(counted),
        "reductions": launches.reduction_table(counted),
        "agents": launches.population_table(counted),
        "gpu": gpu_report.page([read(path) for path in sorted(measured.glob("*/gpu_report.json"))]),
    }
    pages = {page: {name: known[name] for name in names} for page, names in PAGES.items()}
    headline = tables.sentence(results)
    picture = f"![Return against minutes](doc/artifacts/{figures.MINUTES}.svg)\n\n" * bool(tables.panels(results))
    pages["README.md"] = {"headline": picture + headline, "speed": tables.short_table(results)}
    shown = {"speed": speed, "learning": learning, "curves": ends.values(), "machines": [tables.machine_table(results)]}
    pages["doc/report.html"] = {name: "\n".join(table.html() for table in some) for name, some in shown.items()}
    pages["doc/report.html"]["headline"] = f"<p>{html.escape(headline)}</p>"
    return pages


def with_pictures(parts, pictures):
    """Tables `parts` for a page of doc/, and below them pictures in one paragraph, so that two stand side by side."""
    shown = "\n".join(f"![{caption}](artifacts/{name}.svg)" for caption, name in pictures)
    return "\n\n".join([*(table.markdown() for table in parts), shown]).strip()


def learning_pictures(results):
    """Captions and names of the learning curves that there are."""
    for slug, own in results["learning"].items():
        for (algo, env_id), modes in grouped(own).items():
            if any(run.get("curve") for runs in modes.values() for run in runs):
                yield named(algo, env_id), figures.picture_name("learning", slug, algo, env_id)


def masks_table(results):
    """What PPO's learning runs came to with and without masks, on each machine: mean and deviation over seeds."""
    modes = ("plain", "compile")
    rows = []
    for own in results["learning"].values():
        groups = grouped(own)
        for env_id, best in MASKED_TASKS.items():
            runs = [with_curve(groups.get(("ppo", env_id), {}).get(mode, [])) for mode in modes]
            if any(runs):
                ends = [[end_of(run["curve"]) for run in some] for some in runs]
                rows.append([env_id.split(":")[-1], *(mean_and_deviation(some) if some else "" for some in ends), best])
    return Table("", ("", *modes, "best"), rows or [["all", *(tables.NOT_MEASURED for _ in modes), ""]])


def memory_table():
    """What PPO's curves with and without memory end at: mean and standard deviation over seeds."""
    rows = []
    for name in MEMORY:
        runs, random, env_id, _ = curves.read(artifact(f"{name}.csv"))
        row = [env_id.split("-")[1]]
        for exp_name in ("ppo_lstm_torchcompile", "without_memory"):
            own = [run for (own_name, _), run in runs.items() if own_name == exp_name]
            ends = [last_tenth(run.steps, run.values) for run in own]
            row.append(f"{statistics.mean(ends):.2f} ± {statistics.stdev(ends):.2f}")
        rows.append([*row, f"{statistics.mean(random):.2f}"])
    return Table("", ("", "PPO with memory", "without memory", "random policy"), rows)


def earlier_editions(folder):
    """Results under `folder` whose scripts have changed since, or that do not say what they measured, a line each."""
    for path in sorted(folder.glob("*/*/**/*.json")):
        result = read(path)
        for part in result["modes"].values() if "ablation" in path.parts else [result]:
            names = editions.changed(part)
            if names or (names is None and "failed" not in part):
                yield f"{path.relative_to(folder)}: {why_stale(names, part)}"
    for data in (artifact(f"{name}.csv") for name in curve_names()):
        about = curves.measured(data)
        changed = editions.changed(about)
        if changed != []:
            yield f"{data.relative_to(ROOT)}: {why_stale(changed, about)}"


def why_stale(names, result):
    return f"{', '.join(names)} changed after {result['date']}" if names else "does not say what it measured"


def stale(results):
    """What is wrong with the committed tables, a line each."""
    lines = []
    for page, parts in texts(results).items():
        committed = (ROOT / page).read_text(encoding="utf-8")
        for name, text in parts.items():
            if with_table(committed, name, text) != committed:
                lines.append(f"error: {page}: table {name} is not what its data gives; run python -m benchmark.report")
    return lines


def write(results):
    """Write all tables and figures; `results` are those of `load`."""
    groups = {kind: {slug: grouped(own) for slug, own in by_machine.items()} for kind, by_machine in results.items()}
    pictures = figures.draw(groups)
    if panels := tables.panels(results):
        pictures[figures.MINUTES] = figures.draw_minutes(*panels)
    for name, picture in pictures.items():
        artifact(f"{name}.svg").write_bytes(picture.svg)
    scaling.draw_all(ROOT / "results")
    embedded = {kind: [] for kind in ("minutes", "learning", "speed", "curve")}
    for picture in pictures.values():
        embedded[picture.kind].append(image(picture.caption, picture.svg, "svg+xml"))  # its title is in it
    for name, caption in CAPTIONS.items():
        embedded["curve"].append(image(caption, artifact(f"{name}.png").read_bytes(), "png", caption))
    written = texts(results)
    for kind, images in embedded.items():
        written["doc/report.html"][f"{kind} figures"] = "\n".join(images)
    for page, parts in written.items():
        text = (ROOT / page).read_text(encoding="utf-8")
        for name, part in parts.items():
            text = with_table(text, name, part)
        (ROOT / page).write_text(text, encoding="utf-8")


def artifact(name):
    """The path of a file in doc/artifacts."""
    return ROOT / "doc" / "artifacts" / name


def image(title, data, kind, caption=""):
    """A figure as part of a page that needs no other file."""
    data = base64.b64encode(data).decode()
    below = f"<figcaption>{html.escape(caption)}</figcaption>" * bool(caption)
    return f'<figure><img alt="{html.escape(title)}" src="data:image/{kind};base64,{data}">{below}</figure>'


def main(args):
    results = load(ROOT / "results")
    if not args.check and not args.stale:
        write(results)
        return
    lines = stale(results) if args.check else list(dict.fromkeys(earlier_editions(ROOT / "results")))
    for line in lines:
        print(line, file=sys.stderr)
    raise SystemExit(1 if lines else 0)
