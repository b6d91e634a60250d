"""Rounds: the modes of one algorithm train with one seed, each in a process of its own, in interleaved time slices.

Once warm they train from log to log for at least a sixtieth of the steps at a time (interleaved.py), so that a machine
that slows down for a while slows all of them. Every mode starts with empty caches, so warm-up is that
of a first run. A mode that crashes leaves the others alone.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmark.algorithms import ALGORITHMS
from benchmark.results import read
from benchmark.speed.monitor import Monitor
from common.arguments import refuse
from common.processes import end, start
from common.slices import SLICES
from tools import mkl_on_amd

INTERLEAVED = ("-m", "benchmark.speed.interleaved")
TURBO_FLAGS = {  # of the turbo script, by mode
    "eager": (),
    "compile": ("--compile",),
    "cudagraphs": ("--cudagraphs",),
    "compile+cudagraphs": ("--compile", "--cudagraphs"),
}
MODES = {"plain": (*INTERLEAVED, "{algo}")}
MODES |= {mode: (*INTERLEAVED, "{algo}_torchcompile", *flags) for mode, flags in TURBO_FLAGS.items()}
PEERS = {  # measured where they are installed
    "sb3": ("-m", "benchmark.speed.peers", "sb3", "{algo}"),
    "sbx": ("-m", "benchmark.speed.peers", "sbx", "{algo}"),
    "cleanrl": ("-m", "benchmark.speed.checkouts", "cleanrl", "{algo}"),
    "leanrl-2024": ("-m", "benchmark.speed.checkouts", "leanrl-2024", "{algo}"),
}
PEER_MODULES = {"sb3": "stable_baselines3", "sbx": "sbx"}
MKL = "+mkl"  # the end of a mode's name: the same with the library of tools/mkl_on_amd.py preloaded
MKL_MODES = ("plain+mkl", "eager+mkl", "compile+mkl", "sb3+mkl")


@dataclass
class RunArgs:
    num_envs: int | None = None
    """environments that step together (by default the script's)"""
    total_timesteps: int | None = None
    """environment steps of each run (by default the algorithm's in algorithms.py)"""
    flags: str = ""
    """more flags for the scripts, in one word: --flags="--num-envs 4" """
    monitor: bool = False
    """also record how busy processor and card are (a card needs nvidia-ml-py)"""


@dataclass
class RoundArgs(RunArgs):
    algo: str = "sac_continuous_action"
    """name of the plain script, without .py"""
    env_id: str | None = None
    """gymnasium environment (by default the algorithm's in algorithms.py)"""
    run_dir: Path = Path("runs/benchmark")
    """folder for the runs, one sub-folder per mode and seed, with log.txt and, with --monitor, monitor.json"""


def modes_of(algo):
    """The modes that an algorithm has: its own, peers, those with MKL unlocked."""
    modes = [*MODES, *ALGORITHMS[algo].peers]
    return [*modes, *(mode for mode in MKL_MODES if mode.removesuffix(MKL) in modes)]


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


def alternating(modes, i):
    """The modes in the order of round `i`: every second one begins with the last."""
    return list(modes) if i % 2 == 0 else list(modes)[::-1]


def programs_of(algo, modes):
    """Programs by mode: the words behind `python`, flags that all modes share left out."""
    programs = MODES | {name: (*program, SLICES) for name, program in PEERS.items()}
    return {mode: [word.format(algo=algo) for word in programs[mode.removesuffix(MKL)]] for mode in modes}


def environment(mode):
    """What a mode adds to the environment variables."""
    return {"LD_PRELOAD": str(mkl_on_amd.library())} if mode.endswith(MKL) else {}


def cold(folder):
    """Environment variables with which nothing that was compiled before is found: caches and home are in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    return dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "TMPDIR", "HOME", "XDG_CACHE_HOME"), str(folder))


def command(args, program, seed, folder):
    """The words behind `python` that run a program with one seed; its run will be in `folder`."""
    algorithm = ALGORITHMS[args.algo]
    common = {"env-id": args.env_id or algorithm.env_id, "total-timesteps": args.total_timesteps or algorithm.steps}
    common |= {"seed": seed, "run-dir": folder}
    if args.num_envs:
        common["num-envs"] = args.num_envs
    common = [f"--{name}={value}" for name, value in common.items()]
    return [*program, *common, *args.flags.split()]


def run_round(args, programs, seed, on_slice=lambda name: None):
    """Train `programs`, by name, with one seed: warm up one after the other, then in interleaved time slices.

    Returns exit codes by name: that of a program that has crashed is not 0. `on_slice` is called when a slice begins.
    """
    statuses = {}
    processes = {}
    folders = {name: args.run_dir / name / str(seed) for name in programs}
    monitor = Monitor(args.monitor)

    def wait(name):
        on_slice(name)
        with monitor.watching(name, processes[name].pid):
            over = processes[name].stdout.readline()
        if not over:
            statuses[name] = processes.pop(name).wait()

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as caches:
        try:
            for name, program in programs.items():
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
                variables = os.environ | cold(Path(caches, name)) | environment(name)
                words = command(args, program, seed, folders[name])
                processes[name] = start(words, folders[name] / "log.txt", env=variables, **pipes)
                wait(name)
            while processes:
                for name in list(processes):
                    with contextlib.suppress(BrokenPipeError):  # it has died, as `wait` will see
                        print(file=processes[name].stdin, flush=True)
                    wait(name)
        finally:
            for process in processes.values():
                end(process)
    for name, folder in folders.items():
        monitor.save(name, folder)
    return statuses


def run_programs(algo, programs, seeds, folder, settings):
    """Train `programs`, by name, side by side, a round for each seed: lists of summaries by name.

    Their runs are in `folder`, which is emptied. SystemExit if one crashes or ends before it is measured. `settings`
    are RunArgs.
    """
    shutil.rmtree(folder, ignore_errors=True)
    args = RoundArgs(algo=algo, run_dir=folder, **vars(settings))
    summaries = {name: [] for name in programs}
    for i, seed in enumerate(seeds):
        statuses = run_round(args, {name: programs[name] for name in alternating(programs, i)}, seed)
        for name, own in summaries.items():
            runs = folder / name / str(seed)
            if statuses[name]:
                raise SystemExit(f"error: {algo}, {name}: a run has crashed; see {runs}/log.txt")
            (path,) = runs.glob("*/summary.json")
            own.append(read(path))
            if not own[-1]["steady_sps"]:
                raise SystemExit(f"error: {algo}, {name}: {args.total_timesteps} steps are too few to be measured")
    return summaries
