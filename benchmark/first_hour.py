"""Run, in order, the measurements that need a real GPU; each runs once.

    ./run.sh --gpu-first-hour            # an hour at most; the same command resumes where it stopped
    ./run.sh --gpu-first-hour --dry-run  # print the commands

What each step decides, and what is expected, is in doc/gpu_checklist.md. What a step prints is in
runs/first_hour/<step>.txt, its exit code in results/<machine>/first_hour/<step>.json. A step that has succeeded at this
commit is not run again. At the end tables and figures are made of all that is in results/, as by
`python -m benchmark.report`.
"""

import json
import shlex
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
from benchmark.speed import rounds
from launch.worker import end_with_parent

SPEED = "-m benchmark.speed --quick"
FASTEST = f"{SPEED} --modes plain compile+cudagraphs"
OFF_POLICY = "sac_continuous_action td3_continuous_action"
ATARI = "ppo_atari_envpool dqn_atari sac_atari"
PROFILED = "leanrl/sac_continuous_action_torchcompile.py --compile --cudagraphs --total-timesteps 6000"
AUTOTUNE = "--compile-mode max-autotune-no-cudagraphs"
STEPS = {  # the words behind `python`, and those that make a trial of it
    "tests": ("-m pytest -m gpu -k real", "--collect-only"),
    "profile": (f"-m instruments --profile -- {PROFILED} --run-dir {{runs}}/profile", "--learning-starts 100"),
    "speed": (SPEED, "--out {runs}/speed"),
    "autotune": (
        f'{FASTEST} --algos {OFF_POLICY} --flags="{AUTOTUNE}" --out {{runs}}/autotune',
        "--flags=",  # an emulated device cannot autotune
    ),
    "tf32": (f'{FASTEST} --algos {OFF_POLICY} {ATARI} --flags="--matmul-precision high" --out {{runs}}/tf32', ""),
    "threads": (f'{FASTEST} --algos {OFF_POLICY} {ATARI} --flags="--threads 1" --out {{runs}}/threads', ""),
    "learning": (
        "-m benchmark.speed --learn --modes plain compile+cudagraphs --seeds 1 2 --total-timesteps 100000 "
        f"--algos {OFF_POLICY} --env-ids HalfCheetah-v5 --out {{runs}}/learning",
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


def commit():
    """The commit that is checked out, None outside of git; the report changes files, so these do not count."""
    result = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return result.stdout.strip() or None


def finished(path, step):
    """Whether this step, a dictionary of its command and so on, has succeeded on this machine."""
    result = json.loads(path.read_text()) if path.exists() else {}
    return result.get("exit_code") == 0 and all(result.get(name) == value for name, value in step.items())


def run(words, log, seconds):
    """Run a command with its output in a file; its exit code, or None if it did not end in time."""
    log.parent.mkdir(parents=True, exist_ok=True)
    own_session = {"start_new_session": True, "preexec_fn": end_with_parent}
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, **own_session
        )
        try:
            return process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            rounds.end(process)


def run_steps(args):
    """The names of the steps that failed."""
    end = time.monotonic() + 60 * args.minutes
    failed = []
    for name in [name for name in STEPS if name in args.steps]:
        words = words_of(args, name)
        step = {"command": shlex.join(["python", *words]), "commit": commit()}
        path, log = path_here(args.results, "first_hour", name), args.run_dir / f"{name}.txt"
        begin = time.monotonic()
        if finished(path, step):
            print(f"{name}: done before")
        elif begin >= end:
            print(f"{name}: left for the next time")
        else:
            print(f"{name}: {step['command']} > {log}", flush=True)
            code = run(words, log, end - begin)
            seconds = round(time.monotonic() - begin)
            if code is None:
                print(f"{name}: not finished after {seconds} s, left for the next time")
                continue
            store(path, step | {"exit_code": code, "seconds": seconds, "machine": machine()})
            print(f"{name}: {'done' if code == 0 else f'failed, see {log}'}, {seconds} s", flush=True)
            failed += [name] * (code != 0)
    return failed


def main(args):
    check("steps", args.steps, STEPS)
    if args.dry_run:
        print("\n".join(shlex.join(["python", *words_of(args, name)]) for name in STEPS if name in args.steps))
        return
    if not torch.cuda.is_available():
        stop("--gpu-first-hour needs a CUDA device, and there is none; --dry-run prints what it does")
    try:
        failed = run_steps(args)
    except KeyboardInterrupt:
        print("\ninterrupted; the same command resumes", file=sys.stderr)
        raise SystemExit(130) from None
    if subprocess.run([sys.executable, "-m", "benchmark.report"], cwd=ROOT).returncode:
        failed.append("report")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main(parse(Args, __doc__))
