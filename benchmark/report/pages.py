"""Make the tables of what was measured in README.md and doc/, a figure of the speeds, and doc/report.html.

    python -m benchmark.report
    python -m benchmark.report --check  # exit code 1 if a committed table is not what the data gives

Speeds (speed/) are medians over seeds with their range; ratios are to the plain script of the same round. Where there
is no result a table says "not measured". What the curves of doc/artifacts/*.csv (curves.py) end at is in the pages of
the algorithms, and what studies/ have measured mostly in doc/speed.md.
"""

import base64
import json
import statistics
import sys
from dataclasses import dataclass
from math import inf

from benchmark import ROOT
from benchmark.algorithms import ALGORITHMS, named
from benchmark.report import curves, figures
from benchmark.report.machine import describe
from benchmark.report.tables import Table, spread, with_table
from benchmark.speed.rounds import MODES, PEERS
from benchmark.studies import ablation, compile_modes, instrument_overhead, launches, scaling
from benchmark.studies.tips import before_after

CURVES = {  # of doc/artifacts, by the page that shows them
    "doc/sac.md": ("sac_halfcheetah", "sac_init_entropy"),
    "doc/td3.md": ("td3_halfcheetah",),
    "doc/ppo.md": ("ppo_halfcheetah", "ppo_init_entropy", "ppo_pong", "ppo_breakout"),
    "doc/dqn.md": ("dqn_cartpole", "dqn_breakout"),
    "doc/sac_discrete.md": ("sac_discrete_entropy",),
}
SPEED = ("", "mode", "steps/s", "ratio to plain", "warm-up, s", "pays off after, steps")
LEARNING = ("", "mode", "seeds", "steps", "return at the end", "95% interval", "minutes")
MACHINES = ("machine", "driver", "packages")
NOT_MEASURED = "not measured"
BARS = "doc/artifacts/speed_{}.svg"


@dataclass
class Args:
    check: bool = False
    """change nothing; name the tables that are not what the data gives"""


def load(folder):
    """All results under `folder`: speed and learning, each a list by the machine's slug.

    Where an algorithm has no full rounds its speeds are those of the quick ones.
    """
    results = {"speed": {}, "learning": {}, "quick": {}}
    for path in sorted(folder.glob("*/*/*/*/*/*.json")):
        slug, kind, *_ = path.relative_to(folder).parts
        if kind in results:
            results[kind].setdefault(slug, []).append(json.loads(path.read_text()) | {"kind": kind})
    for slug, quick in results.pop("quick").items():
        full = results["speed"].setdefault(slug, [])
        measured = {(result["algo"], result["env_id"]) for result in full}
        full += [result for result in quick if (result["algo"], result["env_id"]) not in measured]
    return {kind: dict(sorted(by_machine.items())) for kind, by_machine in results.items()}


def grouped(results):
    """A machine's results as {(algo, env_id): {mode: [result of each seed]}}, in the order of the tables."""
    order = [*ALGORITHMS]
    groups = {}
    for result in sorted(results, key=lambda result: (order.index(result["algo"]), result["env_id"], result["seed"])):
        modes = groups.setdefault((result["algo"], result["env_id"]), {})
        modes.setdefault(result["mode"], []).append(result)
    known = [*MODES, *PEERS]
    return {key: dict(sorted(modes.items(), key=lambda item: known.index(item[0]))) for key, modes in groups.items()}


def break_even(result):
    """Steps after which a slower start than plain's has paid off, or inf; None where plain or the speed is missing."""
    plain, own = result["plain"], result["summary"]
    if result["mode"] == "plain" or not plain["steady_sps"] or not own["steady_sps"]:
        return None
    gain = 1 / plain["steady_sps"] - 1 / own["steady_sps"]  # seconds per step
    lost = own["warmup_seconds"] - plain["warmup_seconds"]
    return max(lost / gain, 0.0) if gain > 0 else inf


def speed_row(name, mode, results):
    """A row of the speed table: `results` are those of a mode."""
    if not results:
        return [name, mode, NOT_MEASURED, "", "", ""]
    done = figures.done(results)
    speeds = [result["summary"]["steady_sps"] for result in done if result["summary"]["steady_sps"]]
    warmups = [result["summary"]["warmup_seconds"] for result in done if result["summary"]["warmup_seconds"]]
    payoffs = [steps for steps in map(break_even, done) if steps is not None]
    said = [f"seed {result['seed']} failed: {result['failed']}" for result in results if "failed" in result]
    if speeds:
        said = [spread(speeds, "{:.0f}"), *said]
    elif done:
        said = ["too short to measure", *said]
    columns = [(figures.speed_ratios(done), "{:.2f}"), (warmups, "{:.1f}"), (payoffs, "{:.0f}")]
    cells = [spread(values, form).replace("inf", "-") if values else "" for values, form in columns]
    return [name, mode, "; ".join(said), *cells]


def speed_tables(results):
    """The speed tables, one for each machine; without any result one that says so."""
    tables = [Table(caption(own), SPEED, speed_rows(own)) for own in results["speed"].values()]
    return tables or [Table("", SPEED, speed_rows([]))]


def speed_rows(results):
    """The rows of a machine: for each algorithm all modes that the machine can run, and all others that were."""
    cuda = any(result["machine"]["gpu"] for result in results)
    modes = [mode for mode in MODES if cuda or "cudagraphs" not in mode]
    groups = grouped(results)
    rows = []
    for algo in ALGORITHMS:
        measured = {env_id: group for (name, env_id), group in groups.items() if name == algo}
        for env_id, group in measured.items():
            every = dict.fromkeys([*modes, *group])
            rows += [speed_row(named(algo, env_id), mode, group.get(mode, [])) for mode in every]
        if not measured:
            rows.append(speed_row(named(algo), "all", []))
    return rows


def caption(results):
    """What the results of a machine have in common."""
    machine = results[0]["machine"]
    torch = sorted({result["machine"]["packages"]["torch"].split("+")[0] for result in results})
    matmuls = sorted({result["summary"]["matmul_precision"] for result in figures.done(results)})
    seeds = sorted({result["seed"] for result in results})
    kinds = {named(result["algo"], result["env_id"]): result["kind"] for result in results}
    text = f"{describe(machine)}; torch {', '.join(torch)}; precision of float32 matmuls: {', '.join(matmuls)}; "
    text += f"seeds {', '.join(map(str, seeds))}."
    quick = [name for name, kind in kinds.items() if kind == "quick"]
    if quick:
        text += f" One seed and fewer steps (--quick): {'all' if len(quick) == len(kinds) else '; '.join(quick)}."
    return text if machine["gpu"] else f"{text} Without a CUDA device modes with CUDA graphs are {NOT_MEASURED}."


def learning_tables(results):
    """What the learning runs came to, one table for each machine."""
    tables = []
    for own in results["learning"].values():
        groups = grouped(own)
        rows = [
            learning_row(named(algo, env_id), mode, runs)
            for (algo, env_id), modes in groups.items()
            for mode, runs in modes.items()
        ]
        tables.append(Table(caption(own), LEARNING, rows))
    return tables or [Table("", LEARNING, [["all", "all", NOT_MEASURED, "", "", "", ""]])]


def learning_row(name, mode, runs):
    """A row of the learning table: `runs` are those of a mode."""
    done = [run for run in runs if run.get("curve")]
    seeds = [str(run["seed"]) for run in done]
    said = [f"seed {run['seed']} failed: {run['failed']}" for run in runs if "failed" in run]
    if not done:
        return [name, mode, "; ".join(said) or "no episode has ended", "", "", "", ""]
    ends = []
    for run in done:
        steps, _, returns = zip(*run["curve"], strict=True)
        ends.append([curves.last_tenth(steps, returns)])
    middle, low, high = figures.middle_and_interval(ends)
    interval = f"{low[0]:.1f} to {high[0]:.1f}" if len(done) > 1 else ""
    steps = min(run["summary"]["global_step"] for run in done)
    minutes = statistics.median(run["summary"]["wall_seconds"] / 60 for run in done)
    return [
        name,
        mode,
        "; ".join([", ".join(seeds), *said]),
        f"{steps}",
        f"{middle[0]:.1f}",
        interval,
        f"{minutes:.0f}",
    ]


def machine_table(results):
    machines = {}
    for kind in results.values():
        machines |= {slug: machine_results[0]["machine"] for slug, machine_results in kind.items()}
    rows = []
    for machine in machines.values():
        packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
        rows.append([describe(machine), machine["driver"] or "", packages])
    return Table("", MACHINES, rows or [["none", "", ""]])


def texts(results):
    """The tables as text, by page and name."""
    tables = {"speed": speed_tables(results), "learning": learning_tables(results)}
    tables["machines"] = [machine_table(results)]
    parts = [table.markdown() for table in tables["speed"]]
    parts += [f"![Speed]({BARS.format(slug)})" for slug in results["speed"]]
    markdown = "\n\n".join(parts)
    ends = {page: {name: curves.table(artifact(f"{name}.csv")) for name in names} for page, names in CURVES.items()}
    tables["curves"] = [table for shown in ends.values() for table in shown.values()]
    pages = {"README.md": {"speed": markdown}}
    pages["doc/report.html"] = {name: "\n".join(table.html() for table in some) for name, some in tables.items()}
    for page, shown in ends.items():
        pages[page] = {f"curve {name}": table.markdown() for name, table in shown.items()}
    measured = ROOT / "results"
    pages["doc/speed.md"] = {f"tricks of {algo}": ablation.text(algo, measured) for algo in ablation.TRICKS}
    pages["doc/speed.md"] |= {"scaling": scaling.table(measured), "tips": before_after.table(measured)}
    pages["doc/torch_compile.md"] = {"modes": compile_modes.table(measured)}
    pages["doc/debugging.md"] = {"overhead": instrument_overhead.table(measured)}
    counted = json.loads(launches.DATA.read_text())
    pages["doc/speed.md"]["launches"] = launches.table(counted)
    pages["doc/speed.md"]["leanrl"] = launches.comparison(counted)
    return pages


def stale(results):
    """What is wrong with the committed tables, a line each."""
    lines = []
    for page, tables in texts(results).items():
        committed = (ROOT / page).read_text()
        for name, text in tables.items():
            if with_table(committed, name, text) != committed:
                lines.append(f"error: {page}: table {name} is not what its data gives; run python -m benchmark.report")
    return lines


def write(results):
    """Write all tables and figures; `results` are those of `load`."""
    groups = {kind: {slug: grouped(own) for slug, own in by_machine.items()} for kind, by_machine in results.items()}
    pictures = figures.draw(groups)
    scaling.draw_all(ROOT / "results")
    tables = texts(results)
    embedded = [image(name, svg, "svg+xml") for name, svg in pictures.items()]
    names = [name for names in CURVES.values() for name in names]
    embedded += [image(name, artifact(f"{name}.png").read_bytes(), "png") for name in names]
    tables["doc/report.html"]["figures"] = "\n".join(embedded)
    for page, parts in tables.items():
        text = (ROOT / page).read_text()
        for name, part in parts.items():
            text = with_table(text, name, part)
        (ROOT / page).write_text(text)
    for slug in results["speed"]:
        (ROOT / BARS.format(slug)).write_bytes(pictures[f"speed_{slug}"])


def artifact(name):
    """The path of a file in doc/artifacts."""
    return ROOT / "doc" / "artifacts" / name


def image(name, data, kind):
    """A figure as part of a page that needs no other file."""
    data = base64.b64encode(data).decode()
    picture = f'<img alt="{name}" src="data:image/{kind};base64,{data}">'
    return f"<figure>{picture}<figcaption>{name.replace('_', ' ')}</figcaption></figure>"


def main(args):
    results = load(ROOT / "results")
    if not args.check:
        write(results)
        return
    lines = stale(results)
    for line in lines:
        print(line, file=sys.stderr)
    raise SystemExit(1 if lines else 0)
