"""First numbers from a GPU, in minutes (./run.sh --gpu-report).

    ./run.sh --gpu-report               # SAC, PPO, PPO for Atari and TD3 in five minutes
    ./run.sh --gpu-report --everything  # and SAC-discrete, DQN, PQN and FastTD3, in nine minutes on 8 cores or more

All programs, five modes of each algorithm, warm up at once, while tests check that captured and compiled code compute
the same as eager code on this card. Then one program at a time trains in slices of two seconds, and the others stand
still. SAC, PPO for Atari and TD3 are profiled. Programs that are warm late are measured late. A failure is reported,
and the rest goes on.

In the folder --out, complete at every moment: report.json, a few kB to paste into an issue; table.txt; profile.json and
trace.json.gz, steady steps of SAC; log.txt, tests.log and failures.log. The environment variables NINE_ALGOS,
NINE_SECONDS, NINE_WARM and NINE_EMULATED set the defaults of flags.
"""

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmark.gpu_report import tables
from benchmark.gpu_report.cases import CASES, FOUR
from benchmark.gpu_report.measure import Measurement
from benchmark.gpu_report.turns import EMULATED
from common.arguments import check, distinct, from_low, note, parse, stop
from common.folders import locked
from common.machine import describe, machine
from common.processes import end_as_at_ctrl_c, undisturbed

CORES = 8  # for --everything
WRITTEN = ("report.json", "table.txt", "profile.json", "trace.json.gz", "tests.log", "failures.log")
SECONDS = {False: 300, True: 520}  # without and with --everything
WARM = 0.37  # of the time, at most, until the first speed is measured


def variable(name, kind, default):
    """A flag whose default is that of the environment variable `name`, if it is set."""
    return field(default_factory=lambda: kind(os.environ[name]) if os.environ.get(name) else default)


@dataclass
class Args:
    everything: bool = False
    """eight algorithms in nine minutes; on fewer than 8 cores four in five all the same"""
    algos: tuple[str, ...] = variable("NINE_ALGOS", lambda names: tuple(names.split()), ())
    """only these algorithms, by the names of their plain scripts"""
    seconds: float | None = variable("NINE_SECONDS", float, None)
    """until the table is printed (default: 300; 520 with --everything)"""
    warm: float | None = variable("NINE_WARM", float, None)
    """seconds until the first speed is measured, at the latest (default: 37% of all)"""
    emulated: bool = variable(EMULATED, lambda text: text == "1", False)
    """rehearse on the emulated CUDA device of tools/emulated_cuda.py, which compiles nothing"""
    out: Path = Path("runs/gpu_report")
    """folder for the files"""


def main(args):
    if not args.emulated and not torch.cuda.is_available():
        stop("--gpu-report needs a CUDA device, and there is none; ./run.sh --quick measures a CPU")
    check("algos", args.algos, CASES)
    if args.algos:
        distinct(args, "algos")
    from_low(1, args, "seconds", "warm")
    everything = args.everything and os.cpu_count() >= CORES
    if args.everything and not everything and not args.algos:
        note(f"--everything needs {CORES} cores to warm up in time; measures {', '.join(FOUR)}")
    algos = [algo for algo in CASES if algo in (args.algos or (CASES if everything else FOUR))]
    seconds = args.seconds or SECONDS[everything]
    with locked("out", args.out) as out, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        for name in WRITTEN:
            (out / name).unlink(missing_ok=True)
        print(f"{describe(machine())}; {seconds:g} seconds", flush=True)
        measurement = Measurement(algos, seconds, args.warm or WARM * seconds, args.emulated, out, Path(work))
        try:
            measurement.run()
        finally:
            with undisturbed():
                measurement.finish()
                print(f"\n{tables.markdown(measurement.report)}\n", flush=True)
        print(f"{out / 'report.json'}: please paste this file into an issue")
    raise SystemExit(1 if measurement.failed else 0)


if __name__ == "__main__":
    end_as_at_ctrl_c()
    try:
        main(parse(Args, __doc__))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
