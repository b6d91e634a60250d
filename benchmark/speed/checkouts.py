"""Run scripts of CleanRL or of the LeanRL of 2024 unchanged: peers from a checkout instead of a package.

    git clone https://github.com/vwxyzjn/cleanrl && python3 -m venv cleanrl/.venv
    cleanrl/.venv/bin/pip install -r requirements/cleanrl.txt
    CLEANRL=cleanrl ./run.sh --modes plain compile cleanrl

For the LeanRL of 2024, clone https://github.com/pytorch-labs/LeanRL, install requirements/leanrl-2024.txt and set
LEANRL_2024. Both were written for the gymnasium of 2023, so each has its own environment in .venv, with v4 of MuJoCo's
tasks. A script logs its speed during training. From the second log on, each log may end a time slice.
"""

import json
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from common import ROOT
from common.arguments import stop
from common.slices import SLICES, TimeSlices

VARIABLES = {"cleanrl": "CLEANRL", "leanrl-2024": "LEANRL_2024"}  # variables with the folders of the checkouts


def python(peer):
    """The Python of the environment in a peer's checkout; None if there is none."""
    folder = os.environ.get(VARIABLES[peer])
    path = Path(folder or ".").absolute() / ".venv/bin/python"
    return path if folder and path.exists() else None


def start(peer="", *words):
    """Replace this process by the checkout's Python, which calls `train` with the same words."""
    if peer not in VARIABLES:
        stop(f"checkouts.py {peer}: choose {' or '.join(VARIABLES)}")
    path = python(peer)
    if not path:
        folder = os.environ.get(VARIABLES[peer], "")
        stop(f"{VARIABLES[peer]} {folder}: give the folder of a checkout with its packages in .venv")
    checkout = path.parents[2]
    code = "import sys; from benchmark.speed import checkouts; checkouts.train(*sys.argv[1:])"
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{checkout}"
    os.execv(path, [str(path), "-c", code, peer, str(checkout), *words])


def train(peer, checkout, algo, *words):
    """Run a script with the flags of ours, and write summary.json like our scripts."""
    import torch

    from common.machine import versions

    flags = dict(word.removeprefix("--").split("=") for word in words if word != SLICES)
    folder = Path(flags.pop("run-dir")).absolute() / f"{flags['env-id']}__{peer}__{flags['seed']}__{time.time_ns()}"
    folder.mkdir(parents=True)
    torch.set_num_threads(int(flags.pop("threads", 0)) or torch.get_num_threads())
    slices = TimeSlices(int(flags["total-timesteps"])) if SLICES in words else None
    start = time.perf_counter()
    logs = []  # steps and seconds

    def on_log(step):
        logs.append((step, time.perf_counter() - start))
        if slices and len(logs) > 1:
            slices(step)

    flags["env-id"] = flags["env-id"] if "envpool" in algo else flags["env-id"].replace("-v5", "-v4")
    script, more = (watch_cleanrl if peer == "cleanrl" else watch_leanrl)(algo, folder, on_log)
    sys.argv = [algo, *(f"--{name}={value}" for name, value in flags.items()), *more]
    runpy.run_path(f"{checkout}/{script}", run_name="__main__")
    summary = {
        "script": f"{peer}.{algo}",
        "env_id": flags["env-id"],
        "seed": int(flags["seed"]),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "matmul_precision": torch.get_float32_matmul_precision(),
        "global_step": logs[-1][0],
        "steady_sps": slices.steps_per_second if slices else None,
        "warmup_seconds": logs[1][1],
        "wall_seconds": time.perf_counter() - start - (slices.waited if slices else 0),
        "versions": versions() | {peer: commit(checkout)},
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2), encoding="utf-8")


def watch_cleanrl(algo, folder, on_log):
    """CleanRL's script and flags; the script writes its events to `folder`."""
    from torch.utils import tensorboard

    class Writer(tensorboard.SummaryWriter):
        def __init__(self, log_dir):
            super().__init__(str(folder))

        def add_scalar(self, tag, value, step):
            super().add_scalar(tag, value, step)
            if tag == "charts/SPS":
                on_log(step)

    tensorboard.SummaryWriter = Writer
    return f"cleanrl/{algo}.py", []


def watch_leanrl(algo, folder, on_log):
    """The script of the LeanRL of 2024 and its flags. It logs only to W&B, which is replaced here."""
    import torch

    sys.modules["wandb"] = SimpleNamespace(init=lambda **settings: None, log=lambda values, step: on_log(step))
    more = ["--compile", "--cudagraphs"] if torch.cuda.is_available() else ["--compile"]
    return f"leanrl/{algo}_torchcompile.py", more


def commit(checkout):
    """The checked-out commit, or None."""
    command = ["git", "-C", checkout, "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, encoding="utf-8").stdout.strip() or None


if __name__ == "__main__":
    start(*sys.argv[1:])
