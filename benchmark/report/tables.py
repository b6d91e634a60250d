"""Tables and sentences of what was measured: speed, learning, machines, and those of README."""

import statistics
from math import inf

from benchmark import editions
from benchmark.report import data
from benchmark.report.data import COLUMNS, LEANRL, compared, done, grouped, with_curve
from benchmark.speed.rounds import MODES
from common.algorithms import ALGORITHMS, MEASURED, named
from common.curves import end_of
from common.machine import describe
from common.tables import Table, mean_and_deviation, spread

HEADLINE = ("ppo_continuous_action", "HalfCheetah-v5")
BESIDE = ("sac_continuous_action", "HalfCheetah-v5")  # in README's picture, where it is measured too
SHORT = tuple(algo for algo, algorithm in MEASURED.items() if "cleanrl" in algorithm.peers)  # README's rows
SPEED = ("", "mode", "steps/s", "ratio to plain", "warm-up, s", "pays off after, steps")
LEARNING = ("", "mode", "return", "of each seed", "steps", "minutes", "CleanRL's table")
MACHINES = ("machine", "driver", "packages", "peers")
NOT_MEASURED = "not measured"
BEFORE = "Measured before the script's algorithm last changed."

# ---------------------------------------------------------------------------------------------------------------------
# Speed
# ---------------------------------------------------------------------------------------------------------------------


def break_even(result):
    """Steps after which a slower start than plain's has paid off, or inf; None where plain or the speed is missing."""
    plain, own = result["plain"], result["summary"]
    known = (plain["steady_sps"], own["steady_sps"], plain["warmup_seconds"], own["warmup_seconds"])
    if result["mode"] in ("plain", "plain+mkl") or None in known:
        return None
    gain = 1 / plain["steady_sps"] - 1 / own["steady_sps"]  # seconds per step
    lost = own["warmup_seconds"] - plain["warmup_seconds"]
    return max(lost / gain, 0.0) if gain > 0 else inf


def speed_row(name, mode, results):
    """A row of the speed table: `results` are those of a mode."""
    if not results:
        return [name, mode, NOT_MEASURED, "", "", ""]
    measured = data.speeds(results)
    said = [f"seed {result['seed']} failed: {result['failed']}" for result in results if "failed" in result]
    if measured:
        said = [spread(measured, "{:.0f}"), *said]
    elif done(results):
        said = ["too short to measure", *said]
    warmups = [result["summary"]["warmup_seconds"] for result in done(results) if result["summary"]["warmup_seconds"]]
    payoffs = [steps for steps in map(break_even, done(results)) if steps is not None]
    columns = [(data.ratios_to_plain(results), "{:.2f}"), (warmups, "{:.1f}"), (payoffs, "{:.0f}")]
    ratio, warmup, payoff = (spread(values, form).replace("inf", "-") if values else "" for values, form in columns)
    payoff = payoff.replace("- (- to -)", "-")
    return [name, editions.marked(mode, results), "; ".join(said), ratio, with_cache(warmup, results), payoff]


def with_cache(seconds, results):
    """A cell of time, with the state of the compiler's cache where the mode compiles and it is known."""
    return ", ".join(filter(None, (seconds, data.cache(results))))


def speed_tables(results):
    """The speed tables, one for each machine; without any result one that says so."""
    machines = editions.with_algorithms(results["speed"].values(), MEASURED)
    return [Table(speed_caption(own) if own else "", SPEED, speed_rows(own, algos)) for own, algos in machines]


def speed_caption(results):
    text = caption(results)
    if data.says_no_cache(results):
        text += (
            " Where warm-up does not say cold, the cache of compiled code was empty, and torch's precompiled headers"
        )
        text += " may have been left by an earlier run."
    return text


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
    matmuls = sorted({result["summary"].get("matmul_precision", "highest") for result in done(results)})
    seeds = sorted({result["seed"] for result in results})
    kinds = {named(result["algo"], result["env_id"]): result["kind"] for result in results}
    text = f"{describe(machine)}; torch {', '.join(torch)}; precision of float32 matmuls: {', '.join(matmuls)}; "
    text += f"{'seeds' if len(seeds) > 1 else 'seed'} {', '.join(map(str, seeds))}"
    text += f"; {editions.dates(results)}." if editions.dates(results) else "."
    quick = [name for name, kind in kinds.items() if kind == "quick"]
    if quick:
        rows = "all rows" if len(quick) == len(kinds) else "; ".join(quick)
        text += f" Measured with fewer steps (--quick): {rows}."
    if editions.is_earlier(results):
        text += f" {editions.EARLIER.capitalize()}: measured before the script's algorithm last changed."
    return text


def short_table(results):
    """README's table: what it compares, and LeanRL's ratio to CleanRL. A row of another machine has a mark."""
    keys = [(algo, ALGORITHMS[algo].env_id) for algo in SHORT]
    machines = {}
    for slug, own in results["speed"].items():
        groups = {key: compared(modes) for key, modes in grouped(own).items()}
        machines[slug] = {key: groups[key] for key in keys if data.speed(groups.get(key, {}).get(LEANRL, []))}
    order = sorted(machines, key=lambda slug: -len(machines[slug]))
    found = {key: next((slug for slug in order if key in machines[slug]), None) for key in keys}
    if not any(found.values()):
        return f"Speed: {NOT_MEASURED}."
    rows, groups, elsewhere = [], [], []
    for key, slug in found.items():
        columns = machines[slug][key] if slug else {}
        name = named(*key)
        if slug and slug != order[0]:
            name += " ‡"
            elsewhere.append(describe(columns[LEANRL][0]["machine"]))
        groups += [done(own) for own in columns.values() if data.speed(own)]
        ratios = data.ratios(columns.get(LEANRL, []), columns.get("CleanRL", []))
        cells = [short_cell(columns.get(column, [])) for column in COLUMNS]
        rows.append([name, *cells, f"{statistics.median(ratios):.1f}" if ratios else "-"])
    machine = next(iter(machines[order[0]].values()))[LEANRL][0]["machine"]
    text = f"Environment steps per second on a {describe(machine)}, medians over {count_seeds(groups)}. "
    text += f"LeanRL is the turbo script with `--compile{' --cudagraphs' if machine['gpu'] else ''}`."
    theirs = [one["summary"].get("versions", {}) for own in groups for one in own if one["mode"] == "cleanrl"]
    if theirs:
        text += f" CleanRL's scripts run with {versions(theirs, ('torch', 'gymnasium'))}, and with MuJoCo's v4 tasks."
    text += " All programs of a row took turns on the same cores with the same hyper-parameters and precision."
    text += " The machine is shared: compare within a row. [All results](doc/speed.md), [all tricks](doc/tricks.md)."
    table = Table(text, ("", *COLUMNS, f"{LEANRL} / CleanRL"), rows).markdown()
    notes = [f"† {BEFORE}"] if any("†" in cell for row in rows for cell in row) else []
    notes += [f"‡ On a {', '.join(dict.fromkeys(elsewhere))}."] if elsewhere else []
    return "\n\n".join(filter(None, (table, " ".join(notes))))


def short_cell(results):
    """Median speed of a mode, in README."""
    measured = data.speed(results)
    if not measured:
        return "failed" if any("failed" in result for result in results) else "-"
    return f"{measured:,.0f}{' †' if editions.is_earlier(results) else ''}"


# ---------------------------------------------------------------------------------------------------------------------
# Learning
# ---------------------------------------------------------------------------------------------------------------------


def learning_tables(results):
    """What the learning runs came to, one table for each machine."""
    tables = []
    for own in results["learning"].values():
        text = caption(own)
        if data.says_no_cache(own):
            text += " Where minutes do not say cold or warm, the state of the compiler's cache was not recorded."
        groups = grouped(own).items()
        rows = [learning_row(*key, mode, runs) for key, modes in groups for mode, runs in modes.items()]
        tables.append(Table(text, LEARNING, rows))
    return tables or [Table("", LEARNING, [["all", "all", NOT_MEASURED, "", "", "", ""]])]


def learning_row(algo, env_id, mode, runs):
    """A row of the learning table: `runs` are those of a mode."""
    name = named(algo, env_id)
    curves = with_curve(runs)
    said = [f"seed {run['seed']} failed: {run['failed']}" for run in runs if "failed" in run]
    said += [f"seed {run['seed']} has ended no episode" for run in data.done(runs) if run not in curves]
    if not curves:
        return [name, mode, "; ".join(said), "", "", "", ""]
    ends = [end_of(run["curve"]) for run in curves]
    each = [f"{run['seed']}: {end:.1f}" for run, end in zip(curves, ends, strict=True)]
    return [
        name,
        editions.marked(mode, runs),
        mean_and_deviation(ends),
        "; ".join([*each, *said]),
        f"{min(run['summary']['global_step'] for run in curves)}",
        with_cache(spread(data.minutes(curves), "{:.1f}"), curves),
        ALGORITHMS[algo].cleanrl(env_id),
    ]


def headline(results):
    """Of the machine with most of what README's picture compares: its slug, and learning runs by column."""
    machines = {}
    for slug, own in results["learning"].items():
        columns = compared(grouped(with_curve(own)).get(HEADLINE, {}))
        if columns:
            machines[slug] = columns
    return max(machines.items(), key=lambda item: len(item[1]), default=(None, {}))


def panels(results):
    """Title and panels of README's picture, as `figures.draw_minutes` wants them, or None where nothing is measured."""
    slug, columns = headline(results)
    if not slug:
        return None
    groups = grouped(with_curve(results["learning"][slug]))
    shown = {named(*key): compared(groups[key]) for key in (HEADLINE, BESIDE) if compared(groups.get(key, {}))}
    return describe(next(iter(columns.values()))[0]["machine"]), shown


def sentence(results):
    """How long PPO takes on the cheetah and what it reaches, for each column of README's picture."""
    _, columns = headline(results)
    if not columns:
        return f"Minutes of training, compiled and plain: {NOT_MEASURED}."
    runs = [run for own in columns.values() for run in own]
    steps = min(run["summary"]["global_step"] for run in runs)
    threads = " with one thread" if all("--threads=1" in run.get("command", "") for run in runs) else ""
    parts = [f"PPO, {steps:,} steps of HalfCheetah-v5 on a {describe(runs[0]['machine'])}{threads}."]
    for name, own in reversed(columns.items()):
        cache = f", {data.cache(own) or 'unrecorded'} compiler cache," if name == LEANRL else ""
        minutes = spread(data.minutes(own), "{:.1f}")
        end = spread([end_of(run["curve"]) for run in own], "{:.0f}")
        parts.append(f"{name[0].upper()}{name[1:]}: {minutes} minutes{cache} to a return of {end}.")
    over = count_seeds(columns.values())
    parts.append("One seed." if over == "1 seed" else f"All are medians with their range over {over}.")
    parts += ["CleanRL runs HalfCheetah-v4."] if "CleanRL" in columns else []
    parts += [BEFORE] if editions.is_earlier(runs) else []
    return " ".join(parts)


def count_seeds(groups):
    """How many seeds results have, in words, such as "3 seeds" or "1 to 3 seeds"."""
    counts = sorted(map(len, groups))
    numbers = dict.fromkeys((counts[0], counts[-1]))
    return f"{' to '.join(map(str, numbers))} seed{'s' if counts[-1] > 1 else ''}"


# ---------------------------------------------------------------------------------------------------------------------
# Machines
# ---------------------------------------------------------------------------------------------------------------------


def machine_table(results):
    """Machines with the versions of what was installed: those of a peer that runs by itself are its own."""
    machines = {}
    for by_machine in results.values():
        for slug, own in by_machine.items():
            machines.setdefault(slug, []).extend(own)
    rows = []
    for own in machines.values():
        machine = own[0]["machine"]
        packages = versions(result["machine"]["packages"] for result in own)
        peers = []
        for mode, title in (data.PEER_TITLES | {data.LEANRL_2024: "LeanRL of 2024"}).items():
            text = versions(result["summary"].get("versions", {}) for result in done(own) if result["mode"] == mode)
            peers += [f"{title}: {text}"] if text else []
        rows.append([describe(machine), machine["driver"] or "", packages, "; ".join(peers)])
    return Table("", MACHINES, rows or [["none", "", "", ""]])


def versions(installed, names=None):
    """Names and versions of packages, all of them where they differ; `names` choose some."""
    known = {}
    for packages in installed:
        for name, version in packages.items():
            known.setdefault(name, {})[str(version)] = True
    shown = [f"{name} {' and '.join(sorted(own))}" for name, own in known.items() if name in (names or known)]
    return ", ".join(shown)
