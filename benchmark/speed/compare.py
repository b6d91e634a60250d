"""Measure the modes of one algorithm side by side and print their speeds as ratios to its plain script.

    python -m benchmark.speed.compare --algo sac_continuous_action --seeds 1 2 3 --total-timesteps 9000

Each seed is one round of all modes (rounds.py). The summaries stay under --run-dir; --report-only prints their table
again. `python -m benchmark.speed` does this for all algorithms and keeps the results as data.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmark.algorithms import ALGORITHMS
from benchmark.arguments import check, parse, refuse
from benchmark.report.tables import spread
from benchmark.speed.rounds import MODES, PEERS, RoundArgs, alternating, modes_of, possible, programs_of, run_round


@dataclass
class Args(RoundArgs):
    modes: tuple[str, ...] = tuple(MODES)
    """modes to run, and peers: sb3 and sbx (peers.py); without a CUDA device those with cudagraphs are left out"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """one round of all modes for each seed"""
    report_only: bool = False
    """print the table of the runs that are already in --run-dir"""


def load(run_dir):
    """The newest summary of each mode and seed under `run_dir`, as {mode: {seed: summary}}."""
    summaries = {}
    for path in sorted(Path(run_dir).glob("*/*/*/summary.json"), key=lambda path: path.stat().st_mtime):
        mode, seed = path.parts[-4], int(path.parts[-3])
        summaries.setdefault(mode, {})[seed] = json.loads(path.read_text())
    return summaries


def table(summaries):
    """A Markdown table of `load`'s summaries: medians over seeds, ranges in parentheses."""
    lines = [
        "| mode | matmuls | steps/s | ratio to plain | warm-up, s | return |",
        "|---|---|---|---|---|---|",
    ]
    for mode in [*MODES, *(summaries.keys() & PEERS.keys())]:
        if mode not in summaries:
            lines.append(f"| {mode} | | not measured | | | |")
            continue
        runs, plain = summaries[mode], summaries.get("plain", {})
        pairs = [(runs[seed]["steady_sps"], plain[seed]["steady_sps"]) for seed in runs.keys() & plain.keys()]
        ratios = [fast / base for fast, base in pairs if fast and base]  # a run too short to measure has none
        matmuls = ", ".join(sorted({run["matmul_precision"] for run in runs.values()}))
        columns = [("steady_sps", "{:.1f}"), ("warmup_seconds", "{:.1f}"), ("episodic_return", "{:.0f}")]
        speed, warmup, episodic_return = (spread([r[name] for r in runs.values()], form) for name, form in columns)
        lines.append(f"| {mode} | {matmuls} | {speed} | {spread(ratios, '{:.2f}')} | {warmup} | {episodic_return} |")
    return "\n".join(lines)


def main(args):
    check("algo", [args.algo], ALGORITHMS)
    check("modes", args.modes, modes_of(args.algo))
    args.flags = f"{ALGORITHMS[args.algo].flags} {args.flags}"
    crashed = []
    if not args.report_only:
        if load(args.run_dir):
            refuse("run-dir", args.run_dir, "it holds runs; choose another, or --report-only")
        modes = possible(args.modes)
        for i, seed in enumerate(args.seeds):
            print(f"seed {seed}", file=sys.stderr, flush=True)
            statuses = run_round(args, programs_of(args.algo, alternating(modes, i)), seed)
            crashed += [args.run_dir / mode / str(seed) / "log.txt" for mode, status in statuses.items() if status]
    summaries = load(args.run_dir)
    for summary in list(summaries.values())[:1]:
        first = next(iter(summary.values()))
        where = first["device"] if first["device"] != "cpu" else f"CPU, {os.cpu_count()} cores"
        versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
        print(f"{args.algo} on {first['env_id']}, {first['num_envs']} environment(s), {where}; {versions}\n")
    print(table(summaries))
    for log in crashed:
        print(f"error: a run has crashed; see {log}", file=sys.stderr)
    raise SystemExit(1 if crashed else 0)


if __name__ == "__main__":
    main(parse(Args, __doc__))
