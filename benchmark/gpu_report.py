"""First numbers from a GPU, in about five minutes (./run.sh --gpu-report).

It checks that CUDA graphs and compiled code compute the same as eager code on this card. Then it trains SAC, PPO and
PPO for Atari in all five modes, which take turns of a second or so, prints the speeds, and writes a JSON file of a few
kB with everything that a comparison needs. Paste that file into an issue, or commit it. A failure is reported, and the
rest goes on.
"""

import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmark import editions
from benchmark.algorithms import FULL_SOON, named
from benchmark.results import RESULTS, store
from benchmark.speed import rounds
from common import ROOT
from common.arguments import from_low, parse, stop
from common.folders import writable
from common.machine import describe, machine, slug
from common.processes import end_as_at_ctrl_c
from common.tables import Table

ALGOS = ("sac_continuous_action", "ppo_continuous_action", "ppo_atari_envpool")
MODES = tuple(rounds.MODES)
FLAGS = {"sac_continuous_action": FULL_SOON}
SLICES = {"sac_continuous_action": 1000, "ppo_continuous_action": 8192, "ppo_atari_envpool": 4096}  # steps
AGREEMENT = "-m pytest -q -m gpu -k 'test_modes_agree and real and not 1e9' tests/algorithms/test_sac.py "
AGREEMENT += "tests/algorithms/test_ppo.py"
CARD = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "memory.total")
SEED = 1


@dataclass
class Args:
    seconds: float = 8.0
    """seconds of training of each script in each mode, once it is warm"""
    minutes: float = 2.0
    """time limit of the check, and of each script's round"""
    out: Path = RESULTS
    """folder for the result, <machine>/gpu_report.json"""


def agreement(minutes):
    """The last line of the check's output, and whether it passed."""
    words = [sys.executable, *shlex.split(AGREEMENT)]
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60 * minutes)
    except subprocess.TimeoutExpired:
        return {"passed": False, "says": f"not finished after {minutes:g} minutes"}
    lines = (done.stdout + done.stderr).strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"passed": done.returncode == 0, "says": lines[-1] if lines else "", "failed": failed}


def card():
    """What nvidia-smi says of the card, by name; None where it is missing."""
    command = ["nvidia-smi", f"--query-gpu={','.join(CARD)}", "--format=csv,noheader"]
    try:
        line = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None
    return dict(zip(CARD, map(str.strip, line.split(",")), strict=True))


def measure(algo, args, folder):
    """Train in all modes in turn, for `args.seconds` each; {mode: steps per second, or how it failed}."""
    taken = defaultdict(list)  # steps and seconds of each slice
    deadline = time.monotonic() + 60 * args.minutes

    def after_slice(mode, steps, seconds):
        taken[mode].append((steps, seconds))
        if time.monotonic() > deadline or all(sum(s for _, s in own) >= args.seconds for own in taken.values()):
            raise rounds.Enough

    settings = rounds.RoundArgs(algo=algo, total_timesteps=60 * SLICES[algo], flags=FLAGS.get(algo, ""), run_dir=folder)
    statuses = rounds.run_round(settings, rounds.programs_of(algo, MODES), SEED, after_slice=after_slice, together=True)
    return {mode: speed(taken[mode][1:], statuses.get(mode), folder / mode / str(SEED) / "log.txt") for mode in MODES}


def speed(slices, status, log):
    """Steps per second over `slices`; without any, the last line of the log, and the exit code."""
    if slices:
        steps, seconds = (sum(column) for column in zip(*slices, strict=True))
        return {"steps_per_second": round(steps / seconds, 1), "seconds": round(seconds, 2), "slices": len(slices)}
    lines = log.read_text().strip().splitlines() if log.exists() else []
    return {"failed": lines[-1][-300:] if lines else "no output", "exit_code": status}


def cell(result, plain):
    """A cell of the table: steps per second, and their ratio to plain."""
    if "failed" in result:
        return "failed"
    own = result["steps_per_second"]
    ratio = f" ({own / plain['steps_per_second']:.2f})" if "failed" not in plain else ""
    return f"{own:,.0f}{ratio}"


def table(speeds):
    """The speeds of all scripts as a Markdown table."""
    rows = [[named(algo), *(cell(own[mode], own["plain"]) for mode in MODES)] for algo, own in speeds.items()]
    return Table("", ("steps/s (ratio to plain)", *MODES), rows).markdown()


def main(args):
    if not torch.cuda.is_available():
        stop("--gpu-report needs a CUDA device, and there is none; ./run.sh --quick measures a CPU")
    from_low(0.1, args, "seconds", "minutes")
    writable("out", args.out)
    here = machine()
    print(f"{describe(here)}\nchecks that all modes agree on this card ...", flush=True)
    report = {"machine": here, "card": card(), "agreement": agreement(args.minutes), "speeds": {}}
    print(report["agreement"]["says"], flush=True)
    scripts = [editions.script(name) for algo in ALGOS for name in (algo, f"{algo}_torchcompile")]
    report |= editions.today(*scripts)
    path = args.out / slug(here) / "gpu_report.json"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for algo in ALGOS:
            print(f"measures {named(algo)} ...", flush=True)
            report["speeds"][algo] = measure(algo, args, Path(folder, algo))
            store(path, report)
    print(f"\n{table(report['speeds'])}\n")
    for algo, own in report["speeds"].items():
        for mode, result in own.items():
            if "failed" in result:
                print(f"error: {named(algo)}, {mode}: {result['failed']}", file=sys.stderr)
    failed = not report["agreement"]["passed"] or "failed" in json.dumps(report["speeds"])
    print(f"{path}: please paste this file into an issue", flush=True)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    end_as_at_ctrl_c()
    try:
        main(parse(Args, __doc__))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
