"""Measure the modes of one algorithm side by side and print their speeds as ratios to its plain script.

    python benchmark/run.py --algo sac_continuous_action --seeds 1 2 3 --total-timesteps 9000

Each seed is one round of all modes, each in a process of its own. Once warm they train in turns (turns.py), from log to
log for at least a sixtieth of the steps, so that a machine that slows down for a while slows all of them. Compiled
modes start with an empty compiler cache: warm-up is what a first run waits for. A mode that crashes leaves the others
alone. The summaries stay under --run-dir; --report-only prints their table again. matrix.py does this for all
algorithms and keeps the results as data.
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
import tyro
from monitor import Monitor

HERE = Path(__file__).resolve().parent
MODES = {
    "plain": ["turns.py", "{algo}"],
    "eager": ["turns.py", "{algo}_torchcompile"],
    "compile": ["turns.py", "{algo}_torchcompile", "--compile"],
    "cudagraphs": ["turns.py", "{algo}_torchcompile", "--cudagraphs"],
    "compile+cudagraphs": ["turns.py", "{algo}_torchcompile", "--compile", "--cudagraphs"],
}
PEERS = {  # only when asked for
    "sb3": ["peers.py", "sb3", "{algo}"],
    "sbx": ["peers.py", "sbx", "{algo}"],
}
PEER_MODULES = {"sb3": "stable_baselines3", "sbx": "sbx"}
WITHOUT_PEERS = ("sac_atari",)  # they have no SAC for discrete actions


class Task(NamedTuple):
    """What an algorithm is measured on. Steps are those of all environments together."""

    env_id: str
    steps: int  # warm-up and two minutes or so of steady training by the plain script on 2 cores
    quick_steps: int  # the same with 40 seconds
    budget: int  # of a learning run, as published
    speed: int  # steps per second of the plain script on 2 cores, only to tell how long a matrix takes
    flags: str = ""  # of the speed rounds, so that they soon come to steady state


FULL_SOON = "--learning-starts 1000 --buffer-size 100000"
DEFAULTS = {
    "sac_continuous_action": Task("HalfCheetah-v5", 15_000, 9_000, 1_000_000, 100),
    "td3_continuous_action": Task("HalfCheetah-v5", 45_000, 32_000, 1_000_000, 170),
    "ppo_continuous_action": Task("HalfCheetah-v5", 150_000, 60_000, 1_000_000, 1300),
    "ppo_atari_envpool": Task("Breakout-v5", 40_000, 16_000, 10_000_000, 350),
    "dqn": Task("CartPole-v1", 400_000, 150_000, 500_000, 3700),
    "dqn_atari": Task("Breakout-v5", 14_000, 6_000, 10_000_000, 120, FULL_SOON),
    "sac_atari": Task("BeamRider-v5", 4_000, 2_000, 5_000_000, 25, FULL_SOON),
}


@dataclass
class RunArgs:
    env_id: str | None = None
    """gymnasium environment (by default the algorithm's in DEFAULTS)"""
    num_envs: int | None = None
    """environments that step together (by default the script's)"""
    total_timesteps: int | None = None
    """environment steps of each run (by default the algorithm's in DEFAULTS)"""
    flags: str = ""
    """more flags for the scripts, in one word: --flags="--env-backend envpool" """
    monitor: bool = False
    """also record how busy processor and card are (a card needs nvidia-ml-py)"""


@dataclass
class Args(RunArgs):
    algo: str = "sac_continuous_action"
    """name of the plain script, without .py"""
    modes: tuple[str, ...] = tuple(MODES)
    """modes to run, and peers: sb3 and sbx (peers.py); without a CUDA device those with cudagraphs are left out"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """one round of all modes for each seed"""
    run_dir: Path = Path("runs/benchmark")
    """folder for the runs, one sub-folder per mode and seed, with log.txt and, if asked for, monitor.json"""
    report_only: bool = False
    """print the table of the runs that are already in --run-dir"""


def modes_of(algo):
    """The modes that an algorithm has, peers last."""
    return [*MODES, *(() if algo in WITHOUT_PEERS else PEERS)]


def needs_device(mode):
    """Whether a mode needs a CUDA device that is not there."""
    return "cudagraphs" in mode and not torch.cuda.is_available()


def possible(modes):
    """Those of `modes` that this machine can run; refused if there are none."""
    left = [mode for mode in modes if not needs_device(mode)]
    if not left:
        refuse_modes(modes)
    return left


def refuse_modes(modes):
    """End the program: this machine can run none of `modes`."""
    refuse("modes", " ".join(modes), "none of them can run here; add plain, eager or compile")


def command(args, mode, seed, folder):
    """The words of the command, from the program's path on, that trains one mode with one seed in turns."""
    task = DEFAULTS[args.algo]
    common = {"env-id": args.env_id or task.env_id, "total-timesteps": args.total_timesteps or task.steps}
    common |= {"seed": seed, "run-dir": folder}
    if args.num_envs:
        common["num-envs"] = args.num_envs
    program, *rest = (word.format(algo=args.algo) for word in (MODES | PEERS)[mode])
    common = [f"--{name}={value}" for name, value in common.items()]
    return [str(HERE / program), *rest, *common, *args.flags.split()]


def end_with_parent():
    """Have this process killed when its parent ends, even if that is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def start(words, folder, **pipes):
    """Start the Python program and arguments `words` in a session of its own; its stderr goes to log.txt in `folder`.

    Ctrl-C is for us alone, but the process ends with us.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "log.txt", "w") as log:
        settings = {"stderr": log, "text": True, "start_new_session": True, "preexec_fn": end_with_parent}
        return subprocess.Popen([sys.executable, *words], **settings, **pipes)


def end(process):
    """Kill a process and its compiler, if they are still there."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_round(args, modes, seed, on_turn=lambda mode: None):
    """Train all modes with one seed: warm up one after the other, then take turns until all are done.

    Returns exit codes by mode: that of a mode that has crashed is not 0. `on_turn` is called when a turn begins.
    """
    statuses = {}
    processes = {}
    folders = {mode: args.run_dir / mode / str(seed) for mode in modes}
    monitor = Monitor(args.monitor)

    def wait(mode):
        on_turn(mode)
        with monitor.watching(mode, processes[mode].pid):
            over = processes[mode].stdout.readline()
        if not over:
            statuses[mode] = processes.pop(mode).wait()

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as caches:
        try:
            for mode in modes:
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
                environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/{mode}"}
                words = command(args, mode, seed, folders[mode])
                processes[mode] = start(words, folders[mode], env=environment, **pipes)
                wait(mode)
            while processes:
                for mode in list(processes):
                    with contextlib.suppress(BrokenPipeError):  # it has died, as `wait` will see
                        print(file=processes[mode].stdin, flush=True)
                    wait(mode)
        finally:
            for process in processes.values():
                end(process)
    if args.monitor:
        for mode, folder in folders.items():
            (folder / "monitor.json").write_text(json.dumps(monitor.table(mode)))
    return statuses


def run_programs(algo, programs, seeds, folder, settings):
    """Train `programs`, words of commands by name, side by side, a round for each seed: lists of summaries by name.

    Their runs are in `folder`, which is emptied. SystemExit if one crashes or ends before it is measured. `settings`
    are RunArgs.
    """
    shutil.rmtree(folder, ignore_errors=True)
    args = Args(algo=algo, run_dir=folder, **vars(settings))
    summaries = {name: [] for name in programs}
    with patch.dict(MODES, programs):
        for round_, seed in enumerate(seeds):
            statuses = run_round(args, list(programs) if round_ % 2 == 0 else list(programs)[::-1], seed)
            for name, own in summaries.items():
                runs = folder / name / str(seed)
                if statuses[name]:
                    raise SystemExit(f"error: {algo}, {name}: a run has crashed; see {runs}/log.txt")
                (path,) = runs.glob("*/summary.json")
                own.append(json.loads(path.read_text()))
                if not own[-1]["steady_sps"]:
                    raise SystemExit(f"error: {algo}, {name}: {args.total_timesteps} steps are too few to be measured")
    return summaries


def load(run_dir):
    """The newest summary of each mode and seed under `run_dir`, as {mode: {seed: summary}}."""
    summaries = {}
    for path in sorted(Path(run_dir).glob("*/*/*/summary.json"), key=lambda path: path.stat().st_mtime):
        mode, seed = path.parts[-4], int(path.parts[-3])
        summaries.setdefault(mode, {})[seed] = json.loads(path.read_text())
    return summaries


def spread(values, form):
    """Median and range, as "2.1 (2.0 to 2.3)"; a single value has no range."""
    values = [value for value in values if value is not None]
    if not values:
        return "none"
    low, middle, high = (form.format(value) for value in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low} to {high})" if len(values) > 1 else middle


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


def check(name, given, choices):
    """Refuse what is not among the choices of the argument `name`."""
    for value in given:
        if value not in choices:
            refuse(name, value, f"choose from {', '.join(choices)}")


def refuse(name, value, remedy):
    """End the program with exit code 2 and one line that names the argument, its value and the remedy."""
    print(f"error: --{name} {value}: {remedy}", file=sys.stderr)
    raise SystemExit(2)


def main(args):
    check("algo", [args.algo], DEFAULTS)
    check("modes", args.modes, modes_of(args.algo))
    args.flags = f"{DEFAULTS[args.algo].flags} {args.flags}"
    crashed = []
    if not args.report_only:
        if load(args.run_dir):
            refuse("run-dir", args.run_dir, "it holds runs; choose another, or --report-only")
        modes = possible(args.modes)
        for round_, seed in enumerate(args.seeds):
            print(f"seed {seed}", file=sys.stderr, flush=True)
            statuses = run_round(args, modes if round_ % 2 == 0 else modes[::-1], seed)
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
    main(tyro.cli(Args))
