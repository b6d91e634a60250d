"""Run the longer measurements that need a real GPU, one after another; each runs once.

    ./run.sh --gpu-first-hour            # an hour at most; the same command resumes where it stopped
    ./run.sh --gpu-first-hour --dry-run  # print the commands

doc/on_a_gpu.md explains the purpose and the expected result of each step. The output of a step is in
runs/first_hour/<step>.txt. A step that has succeeded leaves <step>.done there and is not run again until that file is
deleted. The exit code is 1 until all steps have succeeded. At the end, tables and figures are made from results/, as by
`python -m benchmark.report`.
"""

import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from common import ROOT, processes
from common.arguments import from_low, parse, stop
from common.folders import locked

SPEED = "-m benchmark.speed --quick"
OFF_POLICY = "sac_continuous_action td3_continuous_action"
AUTOTUNE = "--compile-mode max-autotune-no-cudagraphs"
STEPS = {  # the arguments of `python`
    "tests": "-m pytest -m gpu -k real",
    "speed": SPEED,
    "autotune": f"{SPEED} --modes compile+cudagraphs --algos {OFF_POLICY} --flags='{AUTOTUNE}' --out {{runs}}/autotune",
    "threads": f"{SPEED} --modes plain compile+cudagraphs --algos {OFF_POLICY} ppo_atari_envpool dqn_atari sac_atari "
    "--flags='--threads 1' --out {runs}/threads",
    "learning": "-m benchmark.speed --learn --modes plain compile+cudagraphs --seeds 1 2 --total-timesteps 100000 "
    f"--algos {OFF_POLICY} --env-ids HalfCheetah-v5 --out {{runs}}/learning",
}


@dataclass
class Args:
    minutes: float = 60.0
    """time limit: the current step is then ended, and the remaining ones are left for the next time"""
    run_dir: Path = Path("runs/first_hour")
    """folder for the output of steps, their runs, and results with other flags"""
    dry_run: bool = False
    """print the commands without running them"""


def commands(args):
    """The arguments of `python` in each step's command, by name."""
    steps = {name: shlex.split(words) for name, words in STEPS.items()}
    return {name: [word.format(runs=args.run_dir) for word in words] for name, words in steps.items()}


def finish(words, log, seconds):
    """Run a command with its output in the file `log`; returns how it failed in words, or None if it succeeded."""
    if seconds <= 0:
        return "left for the next time"
    log.unlink(missing_ok=True)
    process = processes.start(words, log, cwd=ROOT)
    try:
        code = process.wait(timeout=seconds)
        return f"failed, see {log}" if code else None
    except subprocess.TimeoutExpired:
        return "not finished, left for the next time"
    finally:
        processes.interrupt(process, processes.SECONDS_TO_STOP)


def run_all(args):
    """Run the steps that are not done; returns how each failed in words, or None if it succeeded."""
    end = time.monotonic() + 60 * args.minutes
    ended = {}
    for name, words in commands(args).items():
        done = args.run_dir / f"{name}.done"
        if done.exists():
            print(f"{name}: done before")
            continue
        print(shlex.join(["python", *words]), flush=True)
        ended[name] = finish(words, args.run_dir / f"{name}.txt", end - time.monotonic())
        print(f"{name}: {ended[name] or 'done'}", flush=True)
        if ended[name] is None:
            done.touch()
    return ended


def main(args):
    if args.dry_run:
        print("\n".join(shlex.join(["python", *words]) for words in commands(args).values()))
        return
    if not torch.cuda.is_available():
        stop("--gpu-first-hour needs a CUDA device, and there is none; --dry-run prints the commands")
    from_low(0, args, "minutes")
    with locked("run-dir", args.run_dir):
        ended = run_all(args)
    report = subprocess.run([sys.executable, "-m", "benchmark.report"], cwd=ROOT)
    raise SystemExit(1 if report.returncode or any(ended.values()) else 0)


if __name__ == "__main__":
    processes.end_as_at_ctrl_c()
    try:
        main(parse(Args, __doc__))
    except KeyboardInterrupt:
        print("\ninterrupted; the same command resumes", file=sys.stderr)
        raise SystemExit(130) from None
