"""Measure the modes of one algorithm side by side and print their speeds as ratios to its plain script.

    python benchmark/run.py --algo sac_continuous_action --seeds 1 2 3 --total-timesteps 9000

Each seed is one round of all modes, each in a process of its own. Once warm they train in turns (turns.py), from log to
log for at least a sixtieth of the steps, so that a machine that slows down for a while slows all of them. Compiled
modes start with an empty compiler cache: warm-up is what a first run waits for. The summaries stay under --run-dir;
--report-only prints their table again.
"""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

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
WITHOUT_PEERS = ("sac_atari",)  # they have no SAC for discrete actions
DEFAULTS = {  # environment and steps: warm-up and a minute or so of steady training
    "sac_continuous_action": ("HalfCheetah-v5", 9_000),
    "td3_continuous_action": ("HalfCheetah-v5", 30_000),
    "ppo_continuous_action": ("HalfCheetah-v5", 60_000),
    "ppo_atari_envpool": ("Breakout-v5", 20_000),
    "dqn": ("CartPole-v1", 100_000),
}


@dataclass
class Args:
    algo: str = "sac_continuous_action"
    """name of the plain script, without .py"""
    modes: tuple[str, ...] = tuple(MODES)
    """modes to run, and peers: sb3 and sbx (peers.py); without a CUDA device those with cudagraphs are left out"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """one round of all modes for each seed"""
    env_id: str | None = None
    """gymnasium environment (by default the algorithm's in DEFAULTS)"""
    num_envs: int | None = None
    """environments that step together (by default the script's)"""
    total_timesteps: int | None = None
    """environment steps of each run (by default the algorithm's in DEFAULTS)"""
    flags: str = ""
    """more flags for the scripts, in one word: --flags="--env-backend envpool" """
    run_dir: Path = Path("runs/benchmark")
    """folder for the runs, one sub-folder per mode and seed"""
    report_only: bool = False
    """print the table of the runs that are already in --run-dir"""


def modes_of(algo):
    """The modes that an algorithm has, peers last."""
    return [*MODES, *(() if algo in WITHOUT_PEERS else PEERS)]


def start(args, mode, seed, folder, cache):
    """Start one mode with one seed in a process of its own, whose progress goes to log.txt in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    env_id, total_timesteps = DEFAULTS[args.algo]
    common = {"env-id": args.env_id or env_id, "total-timesteps": args.total_timesteps or total_timesteps}
    common |= {"seed": seed, "run-dir": folder}
    if args.num_envs:
        common["num-envs"] = args.num_envs
    program, *rest = (word.format(algo=args.algo) for word in (MODES | PEERS)[mode])
    flags = [*rest, *(f"--{name}={value}" for name, value in common.items()), *args.flags.split()]
    with open(folder / "log.txt", "w") as log:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
        command = [sys.executable, str(HERE / program), *flags]
        return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)  # Ctrl-C is for us alone


def run_round(args, modes, seed):
    """Train all modes with one seed: warm up one after the other, then take turns until all are done."""
    processes, folders = {}, {mode: args.run_dir / mode / str(seed) for mode in modes}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as caches:
        try:
            for mode in modes:
                print(f"seed {seed}: {mode}", file=sys.stderr, flush=True)
                processes[mode] = start(args, mode, seed, folders[mode], f"{caches}/{mode}")
                wait(processes, mode, folders[mode])
            while processes:
                for mode in list(processes):
                    with contextlib.suppress(BrokenPipeError):  # it has died, as `wait` will see
                        print(file=processes[mode].stdin, flush=True)
                    wait(processes, mode, folders[mode])
        finally:
            for process in processes.values():
                os.killpg(process.pid, signal.SIGKILL)  # its compiler too
                process.wait()


def wait(processes, mode, folder):
    """Wait until the turn of `mode` is over; if its process has ended, take it out of `processes`."""
    if not processes[mode].stdout.readline():
        status = processes.pop(mode).wait()
        if status != 0:
            raise SystemExit(f"error: {mode} ended with exit code {status}; see {folder / 'log.txt'}")


def load(run_dir):
    """The newest summary of each mode and seed under `run_dir`, as {mode: {seed: summary}}."""
    summaries = {}
    for path in sorted(Path(run_dir).glob("*/*/*/summary.json"), key=lambda path: path.stat().st_mtime):
        mode, seed = path.parts[-4], int(path.parts[-3])
        summaries.setdefault(mode, {})[seed] = json.loads(path.read_text())
    return summaries


def spread(values, form):
    """Median and range, as "2.1 (2.0 to 2.3)"."""
    values = [value for value in values if value is not None]
    if not values:
        return "none"
    low, middle, high = (form.format(value) for value in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low} to {high})"


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
    modes = modes_of(args.algo)
    unknown = set(args.modes) - set(modes)
    if unknown or args.algo not in DEFAULTS:
        name, value = ("modes", " ".join(sorted(unknown))) if unknown else ("algo", args.algo)
        print(f"error: --{name} {value}: choose from {', '.join(modes if unknown else DEFAULTS)}", file=sys.stderr)
        raise SystemExit(2)
    if not args.report_only:
        if load(args.run_dir):
            print(f"error: --run-dir {args.run_dir}: it holds runs; choose another, or --report-only", file=sys.stderr)
            raise SystemExit(2)
        modes = [mode for mode in args.modes if torch.cuda.is_available() or "cudagraphs" not in mode]
        for round_, seed in enumerate(args.seeds):
            run_round(args, modes if round_ % 2 == 0 else modes[::-1], seed)
    summaries = load(args.run_dir)
    for summary in list(summaries.values())[:1]:
        first = next(iter(summary.values()))
        where = first["device"] if first["device"] != "cpu" else f"CPU, {os.cpu_count()} cores"
        versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
        print(f"{args.algo} on {first['env_id']}, {first['num_envs']} environment(s), {where}; {versions}\n")
    print(table(summaries))


if __name__ == "__main__":
    main(tyro.cli(Args))
