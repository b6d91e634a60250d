"""Make the tables of what was measured in README.md and doc/, a figure of the speeds, and doc/report.html.

    python -m benchmark.report
    python -m benchmark.report --check  # exit code 1 if a committed table is not what the data gives
    python -m benchmark.report --stale  # exit code 1 if a result is of an earlier edition of its script

Speeds (speed/) are medians over seeds with their range; ratios are to the plain script of the same round. Where there
is no result a table says "not measured". What the curves of doc/artifacts/*.csv (curves.py) end at is in the pages of
the algorithms, and what studies/ have measured mostly in doc/tricks.md.
"""

import base64
import html
import statistics
import sys
from dataclasses import dataclass
from math import inf

from benchmark import editions, published
from benchmark.algorithms import ALGORITHMS, named
from benchmark.report import curves, figures
from benchmark.results import read
from benchmark.speed.rounds import MKL, MODES, PEERS
from benchmark.studies import ablation, compile_modes, instrument_overhead, launches, population, scaling, tips
from common import ROOT
from common.curves import end_of, last_tenth
from common.machine import describe
from common.tables import Table, mean_and_deviation, spread, with_table

MEMORY = ("memory_RepeatPrevious", "memory_PositionOnlyCartPole", "memory_PositionOnlyPendulum")
CURVES = {  # of doc/artifacts, by the page that shows them
    "doc/sac.md": ("sac_halfcheetah", "sac_init_entropy", "sac_discrete_entropy"),
    "doc/td3.md": ("td3_halfcheetah",),
    "doc/ppo.md": ("ppo_halfcheetah", "ppo_init_entropy"),
    "doc/ppo_atari.md": ("ppo_pong", "ppo_breakout"),
    "doc/ppo_lstm.md": MEMORY,
    "doc/dqn.md": ("dqn_cartpole", "dqn_breakout"),
    "doc/many_runs.md": ("population_pendulum",),
}
CAPTIONS = {
    "sac_halfcheetah": "SAC, HalfCheetah-v5: plain and turbo",
    "sac_init_entropy": "SAC, HalfCheetah-v5: entropy of the policy at the start",
    "td3_halfcheetah": "TD3, HalfCheetah-v5: plain and turbo",
    "ppo_halfcheetah": "PPO, HalfCheetah-v5: plain, turbo, and without the values of truncated episodes",
    "ppo_init_entropy": "PPO, HalfCheetah-v5: entropy of the policy at the start",
    "ppo_pong": "PPO, Pong-v5: a million steps",
    "ppo_breakout": "PPO, Breakout-v5: the first steps",
    "memory_RepeatPrevious": "PPO, RepeatPreviousEasy: with and without memory",
    "memory_PositionOnlyCartPole": "PPO, PositionOnlyCartPoleEasy: with and without memory",
    "memory_PositionOnlyPendulum": "PPO, PositionOnlyPendulumEasy: with and without memory",
    "dqn_cartpole": "DQN, CartPole-v1: plain and turbo",
    "dqn_breakout": "DQN, Breakout-v5: the first steps",
    "population_pendulum": "SAC, Pendulum-v1: eight agents as one program and as single runs",
    "sac_discrete_entropy": "SAC-discrete, Breakout-v5: entropy of the policy",
}
HEADLINE = ("ppo_continuous_action", "HalfCheetah-v5")
SPEED = ("", "mode", "steps/s", "ratio to plain", "warm-up, s", "pays off after, steps")
LEARNING = ("", "mode", "return", "of each seed", "steps", "minutes, fastest seed", "CleanRL")
MACHINES = ("machine", "driver", "packages")
NOT_MEASURED = "not measured"
KEPT = ("speed", "learning")  # pictures that pages show, in doc/artifacts


@dataclass
class Args:
    check: bool = False
    """change nothing; name the tables that are not what the data gives"""
    stale: bool = False
    """change nothing; name the results whose scripts have changed since"""


def load(folder):
    """All results under `folder`: speed and learning, each a list by the machine's slug.

    Where an algorithm has no full rounds its speeds are those of the quick ones.
    """
    results = {"speed": {}, "learning": {}, "quick": {}}
    for path in sorted(folder.glob("*/*/*/*/*/*.json")):
        slug, kind, *_ = path.relative_to(folder).parts
        if kind in results:
            results[kind].setdefault(slug, []).append(read(path) | {"kind": kind})
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
    known = [name for mode in (*MODES, *PEERS) for name in (mode, mode + MKL)]
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
    return [name, editions.marked(mode, results), "; ".join(said), *cells]


def speed_tables(results):
    """The speed tables, one for each machine; without any result one that says so."""
    machines = editions.with_algorithms(results["speed"].values(), ALGORITHMS)
    return [Table(caption(own) if own else "", SPEED, speed_rows(own, algos)) for own, algos in machines]


def speed_rows(results, algos):
    """The rows of a machine: for each algorithm all modes that the machine can run, and all others that were."""
    cuda = any(result["machine"]["gpu"] for result in results)
    modes = [mode for mode in MODES if cuda or "cudagraphs" not in mode]
    groups = grouped(results)
    rows = []
    for algo in algos:
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
    text += f"{'seeds' if len(seeds) > 1 else 'seed'} {', '.join(map(str, seeds))}"
    text += f"; {editions.dates(results)}." if editions.dates(results) else "."
    quick = [name for name, kind in kinds.items() if kind == "quick"]
    if quick:
        rows = "all rows" if len(quick) == len(kinds) else "; ".join(quick)
        text += f" Measured with fewer steps (--quick): {rows}."
    if any(editions.changed(result) != [] for result in figures.done(results)):
        text += f" {editions.EARLIER.capitalize()}: measured before the script last changed."
    return text if machine["gpu"] else f"{text} Without a CUDA device modes with CUDA graphs are {NOT_MEASURED}."


def learning_tables(results):
    """What the learning runs came to, one table for each machine."""
    tables = []
    for own in results["learning"].values():
        groups = grouped(own)
        rows = [
            learning_row(algo, env_id, mode, runs)
            for (algo, env_id), modes in groups.items()
            for mode, runs in modes.items()
        ]
        tables.append(Table(caption(own), LEARNING, rows))
    return tables or [Table("", LEARNING, [["all", "all", NOT_MEASURED, "", "", "", ""]])]


def fastest_minutes(runs):
    """How long the fastest of `runs` took: the others shared the machine with more."""
    return min(run["summary"]["wall_seconds"] / 60 for run in runs)


def learning_row(algo, env_id, mode, runs):
    """A row of the learning table: `runs` are those of a mode."""
    name = named(algo, env_id)
    done = [run for run in runs if run.get("curve")]
    said = [f"seed {run['seed']} failed: {run['failed']}" for run in runs if "failed" in run]
    if not done:
        return [name, mode, "; ".join(said) or "no episode has ended", "", "", "", ""]
    ends = [end_of(run["curve"]) for run in done]
    each = [f"{run['seed']}: {end:.1f}" for run, end in zip(done, ends, strict=True)]
    steps = min(run["summary"]["global_step"] for run in done)
    return [
        name,
        editions.marked(mode, runs),
        mean_and_deviation(ends),
        "; ".join([*each, *said]),
        f"{steps}",
        f"{fastest_minutes(done):.1f}",
        published.cleanrl(algo, env_id),
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
    parts += [f"![Speed](artifacts/speed_{slug}.svg)" for slug in results["speed"]]
    markdown = "\n\n".join(parts)
    learned = [table.markdown() for table in tables["learning"]]
    learned += [f"![{caption}](artifacts/{name}.svg)" for name, caption in learning_pictures(results)]
    ends = {page: {name: curves.table(artifact(f"{name}.csv")) for name in names} for page, names in CURVES.items()}
    tables["curves"] = [table for shown in ends.values() for table in shown.values()]
    pages = {"README.md": {"headline": headline(results)}, "doc/speed.md": {"speed": markdown}}
    pages["doc/results.md"] = {"learning": "\n\n".join(learned)}
    pages["doc/report.html"] = {name: "\n".join(table.html() for table in some) for name, some in tables.items()}
    pages["doc/report.html"]["headline"] = f"<p>{html.escape(headline(results))}</p>"
    for page, shown in ends.items():
        pages[page] = {f"curve {name}": table.markdown() for name, table in shown.items()}
    measured = ROOT / "results"
    pages["doc/tricks.md"] = {f"tricks of {algo}": ablation.text(algo, measured) for algo in ablation.TRICKS}
    pages["doc/tricks.md"] |= {
        "scaling": scaling.table(measured),
        "tips": tips.table(measured),
    }
    pages["doc/ppo_lstm.md"] |= {"memory": memory_table().markdown()}
    pages["doc/torch_compile.md"] = {"modes": compile_modes.table(measured)}
    pages["doc/debugging.md"] = {"overhead": instrument_overhead.table(measured)}
    pages["doc/many_runs.md"] |= {"population": population.table(measured)}
    counted = read(launches.DATA)
    pages["doc/many_runs.md"]["agents"] = launches.population_table(counted)
    pages["doc/counted_costs.md"] = {"launches": launches.table(counted)}
    return pages


def memory_table():
    """What PPO's curves with and without memory end at: mean and standard deviation over seeds."""
    rows = []
    for name in MEMORY:
        runs, random, env_id, _ = curves.read(artifact(f"{name}.csv"))
        row = [env_id.split("-")[1]]
        for exp_name in ("ppo_lstm_torchcompile", "without_memory"):
            ends = [last_tenth(*run) for (own_name, _), run in runs.items() if own_name == exp_name]
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
    for names in CURVES.values():
        for data in (artifact(f"{name}.csv") for name in names):
            about = curves.measured(data)
            changed = editions.changed(about)
            if changed != []:
                yield f"{data.relative_to(ROOT)}: {why_stale(changed, about)}"


def why_stale(names, result):
    return f"{', '.join(names)} changed after {result['date']}" if names else "does not say what it measured"


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
    embedded = {kind: [] for kind in ("learning", "speed", "load", "curve")}
    for picture in pictures.values():
        embedded[picture.kind].append(image(picture.caption, picture.svg, "svg+xml"))
    for names in CURVES.values():
        for name in names:
            embedded["curve"].append(image(CAPTIONS[name], artifact(f"{name}.png").read_bytes(), "png"))
    for kind, images in embedded.items():
        tables["doc/report.html"][f"{kind} figures"] = "\n".join(images) or f"<p>{NOT_MEASURED}</p>"
    for page, parts in tables.items():
        text = (ROOT / page).read_text()
        for name, part in parts.items():
            text = with_table(text, name, part)
        (ROOT / page).write_text(text)
    for name, picture in pictures.items():
        if picture.kind in KEPT:
            artifact(f"{name}.svg").write_bytes(picture.svg)


def learning_pictures(results):
    """Names and captions of the learning curves that there are."""
    for slug, own in results["learning"].items():
        for (algo, env_id), modes in grouped(own).items():
            if any(figures.has_curve(runs) for runs in modes.values()):
                yield figures.picture_name("learning", slug, algo, env_id), named(algo, env_id)


def headline(results):
    """How fast the fastest mode learns to run as a cheetah, in a sentence for each machine."""
    sentences = []
    for own in results["learning"].values():
        modes = grouped(run for run in own if run.get("curve")).get(HEADLINE)
        if not modes:
            continue
        runs = min(modes.values(), key=fastest_minutes)
        minutes = fastest_minutes(runs)
        threads = runs[0]["config"]["threads"]
        cores = {0: "all cores", 1: "one core"}.get(threads, f"{threads} cores")
        mean = statistics.mean(end_of(run["curve"]) for run in runs)
        sentences.append(
            f"PPO trains for a million steps on HalfCheetah-v5 in {minutes:.1f} minutes on {cores} "
            f"({describe(runs[0]['machine'])}; {runs[0]['mode']}, fastest seed) and reaches a return of {mean:.0f} "
            f"(mean of {len(runs)} seeds). CleanRL's table has {published.cleanrl(*HEADLINE)}, on v4 and without "
            "bootstrapping truncated episodes."
        )
    return " ".join(sentences) or f"Learning at the published budgets: {NOT_MEASURED}."


def artifact(name):
    """The path of a file in doc/artifacts."""
    return ROOT / "doc" / "artifacts" / name


def image(caption, data, kind):
    """A figure as part of a page that needs no other file."""
    data = base64.b64encode(data).decode()
    caption = html.escape(caption)
    picture = f'<img alt="{caption}" src="data:image/{kind};base64,{data}">'
    return f"<figure>{picture}<figcaption>{caption}</figcaption></figure>"


def main(args):
    results = load(ROOT / "results")
    if not args.check and not args.stale:
        write(results)
        return
    lines = stale(results) if args.check else list(dict.fromkeys(earlier_editions(ROOT / "results")))
    for line in lines:
        print(line, file=sys.stderr)
    raise SystemExit(1 if lines else 0)
