"""A report as Markdown: speeds, memory, profiles and agreement."""

from benchmark import editions
from benchmark.gpu_report.cases import MODES, TF32
from common.algorithms import named
from common.machine import where
from common.tables import Table

SPEEDS = ("steps/s (ratio to plain)", *MODES)
MEMORY = ("peak memory, MiB", *MODES)
PROFILE = ("per step", "launches", "us", "us busy", "busy", "gaps over 1 us")
NOTHING = "No GPU has been measured yet."


def cell(result, plain):
    """Steps per second, and their ratio to plain's; `plain` is None where precisions differ."""
    if result is None:
        return "-"
    if "failed" in result:
        return "failed"
    own = result["steps_per_second"]
    ratio = f" ({own / plain['steps_per_second']:.2f})" if plain and "failed" not in plain else ""
    return f"{own:,.0f}{ratio}"


def speeds(report):
    rows = []
    for algo, own in report["speeds"].items():
        plain = own.get("plain")
        rows.append([named(algo), *(cell(own.get(mode), mode != TF32 and plain) for mode in MODES)])
    return Table("", SPEEDS, rows).markdown()


def memory(report):
    """The most memory that torch has reserved on the card, without that of the CUDA context."""
    cells = {
        algo: [f"{own[mode]['memory_mib']:,}" if "memory_mib" in own.get(mode, {}) else "-" for mode in MODES]
        for algo, own in report["speeds"].items()
    }
    return Table("", MEMORY, [[named(algo), *row] for algo, row in cells.items()]).markdown()


def profile_row(name, profile):
    if "failed" in profile:
        return [name, profile["failed"], "", "", "", ""]
    numbers = (profile["launches_per_step"], profile["us_per_step"], profile["busy_us_per_step"])
    cells = [f"{number:,.1f}" for number in numbers]
    return [name, *cells, f"{profile['busy_share']:.0%}", f"{profile['gaps_per_step']['over 1 us']:.1f}"]


def profiles(report):
    rows = [profile_row(name, profile) for name, profile in report["profiles"].items()]
    return Table("", PROFILE, rows).markdown() if rows else ""


def agreement(report):
    """What the tests say that compare captured and compiled code with eager code."""
    own = report["agreement"]
    return "\n".join([f"Agreement with eager code: {own['says']}.", *(f"- failed: {name}" for name in own["failed"])])


def markdown(report):
    """All tables of a report."""
    return "\n\n".join(filter(None, (speeds(report), memory(report), profiles(report), agreement(report))))


def page(reports):
    """What the pages show: the tables of each machine's report."""
    parts = []
    for report in reports:
        earlier = f"; {editions.EARLIER} of the scripts" if editions.changed(report) else ""
        parts += [f"{where(report['machine'])}; {report['date']}{earlier}.", markdown(report)]
    return "\n\n".join(parts) or NOTHING
