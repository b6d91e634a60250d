"""Rounds: the modes of one algorithm train with one seed, each in its own process, in interleaved time slices.

Once warm, they take turns training for at least a sixtieth of the steps, from log to log (interleaved.py), so that a
temporary slowdown of the machine affects all of them. Every mode starts with empty caches: its warm-up is that of a
first run. If a mode crashes, the others continue.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmark.results import read
from benchmark.speed.monitor import Monitor
from common import ROOT
from common.algorithms import ALGORITHMS
from common.arguments import refuse
from common.processes import end, start
from common.slices import SLICES
from tools import mkl_on_amd

INTERLEAVED = ("-m", "benchmark.speed.interleaved")
TURBO_FLAGS = {  # flags of the turbo script, by mode
    "eager": (),
    "compile": ("--compile",),
    "cudagraphs": ("--cudagraphs",),
    "compile+cudagraphs": ("--compile", "--cudagraphs"),
}
NO_CHECKPOINTS = "--checkpoint-interval=0"  # but the last
MODES = {"plain": (*INTERLEAVED, "{algo}", NO_CHECKPOINTS)}
MODES |= {mode: (*INTERLEAVED, "{algo}_torchcompile", NO_CHECKPOINTS, *flags) for mode, flags in TURBO_FLAGS.items()}
PEERS = {  # measured if installed
    "sb3": ("-m", "benchmark.speed.peers", "sb3", "{algo}"),
    "sbx": ("-m", "benchmark.speed.peers", "sbx", "{algo}"),
    "cleanrl": ("-m", "benchmark.speed.checkouts", "cleanrl", "{algo}"),
    "leanrl-2024": ("-m", "benchmark.speed.checkouts", "leanrl-2024", "{algo}"),
}
PEER_MODULES = {"sb3": "stable_baselines3", "sbx": "sbx"}
MKL = "+mkl"  # suffix of a mode with the library of tools/mkl_on_amd.py preloaded
MKL_MODES = ("plain+mkl", "eager+mkl", "compile+mkl", "sb3+mkl")


@dataclass
class RunArgs:
    num_envs: int | None = None
    """number of environments (default: the script's)"""
    total_timesteps: int | None = None
    """environment steps of each run (default: the algorithm's in algorithms.py)"""
    flags: str = ""
    """more flags for the scripts, as one argument: --flags="--num-envs 4" """
    monitor: bool = False
    """also record the load of CPU and GPU (GPU: needs nvidia-ml-py)"""


@dataclass
class RoundArgs(RunArgs):
    algo: str = "sac_continuous_action"
    """name of the plain script, without .py"""
    env_id: str | None = None
    """gymnasium environment (default: the algorithm's in algorithms.py)"""
    run_dir: Path = Path("runs/benchmark")
    """folder for the runs: a subfolder per mode and seed with log.txt and, with --monitor, monitor.json"""


def modes_of(algo):
    """The modes of an algorithm: its own, peers, and those with MKL unlocked."""
    modes = [*MODES, *ALGORITHMS[algo].peers]
    return [*modes, *(mode for mode in MKL_MODES if mode.removesuffix(MKL) in modes)]


def needs_device(mode):
    """Whether a mode needs a CUDA device and there is none."""
    return "cudagraphs" in mode and not torch.cuda.is_available()


def possible(modes):
    """The `modes` that this machine can run; exits if there are none."""
    left = [mode for mode in modes if not needs_device(mode)]
    if not left:
        refuse_modes(modes)
    return left


def refuse_modes(modes):
    """Exit: this machine can run none of `modes`."""
    refuse("modes", " ".join(modes), "none of them can run here; add plain, eager or compile")


def alternating(modes, i):
    """The modes in the order of round `i`, which is reversed in every second round."""
    return list(modes) if i % 2 == 0 else list(modes)[::-1]


def searched():
    """The environment variable with which a run finds tasks of this repository, such as benchmark.masked_tasks."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}


def programs_of(algo, modes):
    """Programs by mode: the arguments of `python`, without flags that all modes share."""
    programs = MODES | {name: (*program, SLICES) for name, program in PEERS.items()}
    return {mode: [word.format(algo=algo) for word in programs[mode.removesuffix(MKL)]] for mode in modes}


def environment(mode):
    """The additional environment variables of a mode."""
    return {"LD_PRELOAD": str(mkl_on_amd.library())} if mode.endswith(MKL) else {}


def cold(folder):
    """Environment variables that hide earlier compilation results: caches and home are in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    return dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "TMPDIR", "HOME", "XDG_CACHE_HOME"), str(folder))


def command(args, program, seed, folder):
    """The arguments of `python` to run a program with one seed, in `folder`."""
    algorithm = ALGORITHMS[args.algo]
    steps = args.total_timesteps or algorithm.speed.steps
    common = {"env-id": args.env_id or algorithm.env_id, "total-timesteps": steps, "seed": seed, "run-dir": folder}
    if args.num_envs:
        common["num-envs"] = args.num_envs
    common = [f"--{name}={value}" for name, value in common.items()]
    return [*program, *common, *args.flags.split()]


def run_round(args, programs, seed, on_slice=lambda name: None):
    """Train `programs`, by name, with one seed: warm up one after another, then take turns in slices.

    Returns exit codes by name, which are not 0 for programs that crashed. `on_slice` is called with a name at the start
    of a slice.
    """
    statuses = {}
    processes = {}
    folders = {name: args.run_dir / name / str(seed) for name in programs}
    monitor = Monitor(args.monitor)

    def wait(name):
        on_slice(name)
        with monitor.watching(name, processes[name].pid):
            ended = processes[name].stdout.readline() == ""
        if ended:
            statuses[name] = processes.pop(name).wait()

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as caches:
        try:
            for name, program in programs.items():
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
                variables = os.environ | searched() | cold(Path(caches, name)) | environment(name)
                words = command(args, program, seed, folders[name])
                processes[name] = start(words, folders[name] / "log.txt", env=variables, **pipes)
                wait(name)
            while processes:
                for name in list(processes):
                    with contextlib.suppress(BrokenPipeError):  # it has died, which `wait` will report
                        print(file=processes[name].stdin, flush=True)
                    wait(name)
        finally:
            for process in processes.values():
                end(process)
    for name, folder in folders.items():
        monitor.save(name, folder)
    return statuses


def run_programs(algo, programs, seeds, folder, settings):
    """Train `programs`, by name, in a round for each seed; returns lists of summaries by name.

    Runs are in `folder`, which is emptied first. SystemExit if a run crashes or ends before it is measured. `settings`
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
