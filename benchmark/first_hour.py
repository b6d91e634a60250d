"""The first hour on a GPU: what only a card can tell, in order, each step once.

    ./run.sh --gpu-first-hour            # an hour at most; the same command goes on where it ended
    ./run.sh --gpu-first-hour --dry-run  # print the commands

What each step decides, and what is expected, is in doc/gpu_checklist.md. What a step prints is in
runs/first_hour/<step>.txt, its exit code in results/<machine>/first_hour/<step>.json; one that has succeeded is not run
again. At the end tables and figures are made of all that is in results/, as by `python -m benchmark.report`.
"""

import contextlib
import json
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmark import ROOT
from benchmark.arguments import check, parse, stop
from benchmark.report.machine import machine
from benchmark.results import RESULTS, path_here, store

BOTH = "--modes plain compile+cudagraphs"
PROFILED = "leanrl/sac_continuous_action_torchcompile.py --compile --cudagraphs --total-timesteps 6000"
STEPS = {  # the words behind `python`, and those that make a trial of it
    "tests": ("-m pytest -m gpu", "--collect-only"),
    "model": ("-m benchmark.studies.gpu_model", "--repeat 2"),
    "speed": ("-m benchmark.speed --quick", "--out {runs}/speed"),
    "profile": (f"-m instruments --profile -- {PROFILED} --run-dir {{runs}}/profile", "--learning-starts 100"),
    "tf32": (f'-m benchmark.speed --quick {BOTH} --flags="--matmul-precision high" --out {{runs}}/tf32', ""),
    "autotune": (
        f"-m benchmark.speed --quick {BOTH} --algos sac_continuous_action td3_continuous_action "
        '--flags="--compile-mode max-autotune-no-cudagraphs" --out {runs}/autotune',
        "--flags=",  # autotuning is nothing for an emulated device
    ),
    "threads": (f'-m benchmark.speed --quick {BOTH} --flags="--threads 1" --out {{runs}}/threads', ""),
    "learning": (
        "-m benchmark.speed --learn --modes compile+cudagraphs --seeds 1 --total-timesteps 200000 "
        "--algos sac_continuous_action ppo_continuous_action --out {runs}/learning",
        "",
    ),
}
TRIAL = {"-m benchmark.speed": "--algos dqn --total-timesteps 20000", "-m instruments": "--total-timesteps 400"}


@dataclass
class Args:
    minutes: float = 60.0
    """then the step that runs is ended, and the others are left for the next time"""
    steps: tuple[str, ...] = tuple(STEPS)
    """steps to run"""
    trial: bool = False
    """small numbers, to see that every step works"""
    results: Path = RESULTS
    """folder that receives <machine>/first_hour/<step>.json"""
    run_dir: Path = Path("runs/first_hour")
    """folder for what the steps print, train and measure with other flags"""
    dry_run: bool = False
    """print the commands and run nothing"""


def words_of(args, step):
    """What follows `python` in a step's command."""
    words, small = STEPS[step]
    if args.trial:
        words = " ".join([words, small, *(extra for program, extra in TRIAL.items() if words.startswith(program))])
    return shlex.split(words.format(runs=args.run_dir))


def finished(path, command):
    """Whether this command has succeeded on this machine."""
    result = json.loads(path.read_text()) if path.exists() else {}
    return result.get("command") == command and result.get("exit_code") == 0


def run(words, log, seconds):
    """Run a command with its output in a file; its exit code, or None if it did not end in time."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            return process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:  # out of time, or interrupted: runs save what they have
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=30)
                process.kill()


def main(args):
    check("steps", args.steps, STEPS)
    if not args.dry_run and not torch.cuda.is_available():
        stop("--gpu-first-hour needs a CUDA device, and there is none; --dry-run prints what it does")
    end = time.monotonic() + 60 * args.minutes
    failed = []
    for step in [step for step in STEPS if step in args.steps]:
        words = words_of(args, step)
        command = shlex.join(["python", *words])
        path, log = path_here(args.results, "first_hour", step), args.run_dir / f"{step}.txt"
        if args.dry_run or finished(path, command):
            print(command if args.dry_run else f"{step}: done before")
            continue
        begin = time.monotonic()
        if begin >= end:
            print(f"{step}: left for the next time")
            continue
        print(f"{step}: {command} > {log}", flush=True)
        code = run(words, log, end - begin)
        seconds = round(time.monotonic() - begin)
        if code is None:
            print(f"{step}: not finished after {seconds} s, left for the next time")
            continue
        store(path, {"command": command, "exit_code": code, "seconds": seconds, "machine": machine()})
        print(f"{step}: {'done' if code == 0 else f'failed, see {log}'}, {seconds} s", flush=True)
        failed += [step] * (code != 0)
    if not args.dry_run:
        subprocess.run([sys.executable, "-m", "benchmark.report"], cwd=ROOT, check=True)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main(parse(Args, __doc__))
