"""Results as the report reads them: by machine, algorithm and mode, and how they compare within a round."""

import statistics

from benchmark.results import read
from benchmark.speed.rounds import MKL, MODES, PEERS
from common.algorithms import ALGORITHMS

PEER_TITLES = {"cleanrl": "CleanRL", "sb3": "SB3", "sbx": "SBX"}
LEANRL, LEANRL_2024 = "LeanRL", "leanrl-2024"
COLUMNS = (*PEER_TITLES.values(), "plain", LEANRL)  # what README compares
ORDER = [name for mode in (*MODES, *PEERS) for name in (mode, mode + MKL)]
NO_SPEED = {"steady_sps": None, "warmup_seconds": None}


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
    for own in results["speed"].values():
        give_baselines(own)
    return {kind: dict(sorted(by_machine.items())) for kind, by_machine in results.items()}


def give_baselines(results):
    """Replace `plain` of results with MKL's AVX-512 code by plain's with it, of the same round."""
    with_mkl = {round_of(result): result["summary"] for result in done(results) if result["mode"] == "plain" + MKL}
    for result in results:
        if result["mode"].endswith(MKL):
            summary = with_mkl.get(round_of(result), NO_SPEED)
            result["plain"] = {name: summary[name] for name in NO_SPEED}


def round_of(result):
    """What the results of a round have in common: what was measured, and the speed of the plain script in it."""
    return result["algo"], result["env_id"], result["seed"], result["plain"]["steady_sps"]


def grouped(results):
    """A machine's results as {(algo, env_id): {mode: [result of each seed]}}, in the order of the tables."""
    algos = [*ALGORITHMS]
    groups = {}
    for result in sorted(results, key=lambda result: (algos.index(result["algo"]), result["env_id"], result["seed"])):
        modes = groups.setdefault((result["algo"], result["env_id"]), {})
        modes.setdefault(result["mode"], []).append(result)
    return {key: dict(sorted(modes.items(), key=lambda item: ORDER.index(item[0]))) for key, modes in groups.items()}


def compared(modes):
    """Those of an algorithm's modes that README compares, {column: results}: LeanRL is the fastest of its flags."""
    gpu = any(result["machine"]["gpu"] for results in modes.values() for result in results)
    names = PEER_TITLES | {"plain": "plain", "compile+cudagraphs" if gpu else "compile": LEANRL}
    found = {title: modes[mode] for mode, title in names.items() if mode in modes}
    return {title: found[title] for title in COLUMNS if title in found}


def done(results):
    """Those of `results` that did not fail."""
    return [result for result in results if "summary" in result]


def with_curve(results):
    """Those of `results` in which an episode has ended."""
    return [result for result in results if result.get("curve")]


def speeds(results):
    """Steps per second of those results that have some."""
    return [result["summary"]["steady_sps"] for result in done(results) if result["summary"]["steady_sps"]]


def speed(results):
    """Median steps per second, or None."""
    measured = speeds(results)
    return statistics.median(measured) if measured else None


def ratios_to_plain(results):
    """Speed over plain's of the same round, of each result that has both."""
    pairs = [(result["summary"]["steady_sps"], result["plain"]["steady_sps"]) for result in done(results)]
    return [fast / base for fast, base in pairs if fast and base]


def ratios(results, others):
    """Speed over that of `others`, of each pair of the same round."""
    base = {round_of(other): other["summary"]["steady_sps"] for other in done(others)}
    pairs = [(result["summary"]["steady_sps"], base.get(round_of(result))) for result in done(results)]
    return [own / other for own, other in pairs if own and other]


def minutes(results):
    """Minutes that each of learning runs took."""
    return [result["summary"]["wall_seconds"] / 60 for result in results]


def cache(results):
    """The state in which compiled runs found the compiler's cache: "cold", "warm", both, or "" if none says."""
    return " and ".join(sorted({result["cache"] for result in compiled(results) if "cache" in result}))


def says_no_cache(results):
    """Whether any of `results` was compiled and does not say with which cache."""
    return any("cache" not in result for result in compiled(results))


def compiled(results):
    """Those of `results` that torch.compile had a part in."""
    return [result for result in done(results) if "compile" in result["mode"] or result["mode"] == LEANRL_2024]
