"""Run a script with every combination of environments, seeds and flags, on this machine or on a Ray cluster.

    python -m launch run leanrl/td3_continuous_action_torchcompile.py --env-ids HalfCheetah-v5 Hopper-v5 \\
        --seeds 1 2 3 --grid learning-rate 3e-4 1e-3 -- --compile --total-timesteps 200000

Arguments after the two dashes go to the script. Run the same command again to continue: finished runs are skipped,
others resume from their last checkpoint. Results are in <out>/<script>: results.html, and a folder per run.
"""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from common import arguments
from common.arguments import check_seeds, distinct, from_low
from launch import orders, report
from launch.board import Board
from launch.cluster import Cluster, folder_of
from launch.worker import done_step


@dataclass
class Resources:
    address: str | None = None
    """Ray cluster, such as HOST:6379 (default: RAY_ADDRESS, or this machine alone)"""
    cpus_per_run: float = 1.0
    """CPU cores, and threads, of each run"""
    gpus_per_run: float | None = None
    """GPUs of each run; 0.25 puts four runs on one GPU (default: 1 if there are any, else 0)"""
    mkl_on_amd: bool = False
    """run with tools/mkl_on_amd.py, which speeds up matmuls on AMD processors"""
    out: Path = Path("runs/launch")
    """folder for the runs, shared by all machines"""

    @property
    def threads(self):
        return max(1, int(self.cpus_per_run))

    def cluster(self, folder):
        """The machines for the runs of a folder."""
        return Cluster(self.address, self.cpus_per_run, self.gpus_per_run, self.mkl_on_amd, folder)


@dataclass
class Args(Resources):
    script: tyro.conf.Positional[Path] = tyro.MISSING
    """script of leanrl/, or an edited copy of one"""
    env_ids: tuple[str, ...] = ()
    """environments (default: the script's)"""
    seeds: tuple[int, ...] = (1,)
    """seeds of each environment and setting"""
    grid: Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction] = ()
    """a flag of the script and its values; all combinations of multiple --grid are run"""


def parse(words, kind, name, description):
    """Parse the arguments before the two dashes; returns them and the script's flags after the dashes."""
    at = words.index("--") if "--" in words else len(words)
    args = arguments.parse(kind, description, words[:at], f"launch {name}")
    distinct(args, "seeds")
    check_seeds(args, "seeds")
    from_low(0, args, "cpus_per_run", "gpus_per_run")
    return args, words[at + 1 :]


def main(words):
    args, flags = parse(words, Args, "run", __doc__)
    orders.refuse_empty("env-ids", args.env_ids)
    script = orders.Script(args.script)
    todo = list(orders.orders(script, args.env_ids, args.grid, args.seeds, flags, args.out, args.threads))
    with folder_of(args.out, script) as folder:
        outcomes = run_all(args.cluster(folder), todo)
        command = shlex.join(["python", "-m", "launch", "run", *words])
        print(report.write(todo, folder, script.path.stem, command))
        print(f"\n{folder / 'results.html'}")
    end(outcomes)


def end(outcomes):
    """Exit with code 1 if runs have failed."""
    failed = [name for name, own in outcomes.items() if own["status"] == "failed"]
    if failed:
        count = f"{len(failed)} of {len(outcomes)} runs failed"
        print(f"error: {count}; run the same command to try them again", file=sys.stderr)
        raise SystemExit(1)


def run_all(cluster, todo):
    """Execute and show all runs; returns the outcome of each (`worker.train`), by the name of the order."""
    for order in todo:
        order.place()
    with Board(cluster.session) as board:
        try:
            for order in todo:
                begin(order, cluster, board)
            while cluster.tasks:
                for order, outcome in cluster.finished():
                    board.end(order, outcome)
                board.refresh()
        except KeyboardInterrupt:
            interrupted(cluster, board)
    return board.outcomes


def begin(order, cluster, board):
    """Queue a run; returns True if it has already finished."""
    board.add(order)
    if done_step(order.folder) >= order.steps:
        board.end(order, {"status": "done"})
        return True
    cluster.submit(order)
    return False


def interrupted(cluster, board):
    """End all runs, then exit with code 130."""
    board.live.stop()
    print("interrupted: waiting for the runs' checkpoints", file=sys.stderr)
    cluster.stop()
    print("run the same command again to continue", file=sys.stderr)
    raise SystemExit(130)
