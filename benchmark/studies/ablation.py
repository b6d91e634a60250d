"""The value of each trick: it is removed from a copy of its script, which then trains next to the original.

    python -m benchmark.studies.ablation --verify  # the copies learn the same, up to rounding; a minute
    python -m benchmark.studies.ablation           # measure; an hour and a half on 2 cores
    python -m benchmark.studies.ablation --algos dqn --modes compile
    python -m benchmark.report                     # put the results into doc/tricks.md

A trick is removed by editing the script's text, since the scripts have no switches. A round trains the script and all
of its copies, interleaved (speed/rounds.py). The value of a trick is the speed of the script over that of the copy
without the trick, within a round: above 1 if the trick pays.
"""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmark import editions
from benchmark.results import path_here, read, store
from benchmark.speed.rounds import INTERLEAVED, TURBO_FLAGS, RunArgs, possible, run_programs
from benchmark.studies import study
from benchmark.studies.tricks import TRICKS, without
from common.algorithms import ALGORITHMS
from common.arguments import check, from_low, parse
from common.machine import machine
from common.scripts import before_each_log, load, path_of, train_until_enough
from common.tables import Table, spread

MODES = tuple(TURBO_FLAGS)
UNTOUCHED = "untouched"
TOLERANCE = 2e-5  # of the distance that the parameters move
VERIFIED = 250  # steps of the runs that --verify compares


@dataclass
class Args(study.RoundsArgs):
    algos: tuple[str, ...] = tuple(TRICKS)
    modes: tuple[str, ...] = MODES
    """modes to measure; without a CUDA device, those with cudagraphs are skipped"""
    seeds: tuple[int, ...] = (1, 2, 3)
    total_timesteps: int | None = None
    """environment steps of each run (default: the algorithm's of --quick)"""
    run_dir: Path = Path("runs/ablation")
    verify: bool = False
    """only compare the learned parameters of the script and its copies in short runs"""


def write_copy(algo, trick, folder):
    """Write the turbo script without `trick`, or unchanged (None), to its own folder under `folder`."""
    script = path_of(f"{algo}_torchcompile")
    path = folder / (trick.name if trick else UNTOUCHED) / script.name
    path.parent.mkdir(parents=True)
    path.write_text(without(algo, trick) if trick else script.read_text(encoding="utf-8"), encoding="utf-8")
    return path


def tricks_of(algo, mode):
    return [trick for trick in TRICKS[algo] if mode in trick.modes]


def learned(path, algo, mode):
    """All parameters at the first and the last log of a short run of the script at `path`, two vectors."""
    script = load(str(path))
    script.LOG_INTERVAL = 10
    logs = []

    def on_start(run):
        def on_log(losses):
            networks = run.learner.state_dict()["networks"].values()
            tensors = [tensor.detach() for network in networks for tensor in network.values()]
            logs.append(torch.cat([tensor.double().flatten() for tensor in tensors]))

        before_each_log(run, on_log)

    flags = ALGORITHMS[algo].tiny | {"compile": "compile" in mode, "cudagraphs": "cudagraphs" in mode, "threads": 1}
    flags |= {} if ALGORITHMS[algo].off_policy else {"num_steps": 60}  # episodes of 200 steps end within a rollout
    train_until_enough(script, flags, on_start, VERIFIED)
    return logs[0], logs[-1]


def difference(path, algo, mode, wanted):
    """The distance of the copy's final parameters from the script's, relative to the change in `wanted` (`learned`)."""
    before, after = wanted
    _, got = learned(path, algo, mode)
    return float((got - after).norm() / (after - before).norm())


def verify(algo, mode):
    """Print the distance of each copy from the script after a short run; SystemExit(1) if it exceeds rounding."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = learned(write_copy(algo, None, Path(folder)), algo, mode)
        for trick in tricks_of(algo, mode):
            far = difference(write_copy(algo, trick, Path(folder)), algo, mode, wanted)
            print(f"{algo}, {mode}, without {trick.name}: {far:.1e} of the way", flush=True)
            if not far < TOLERANCE:
                raise SystemExit(f"error: without {trick.name}, {algo} learns something else")


def measure(args, algo, mode):
    """Steps per second of the original script and of each copy, one per seed, by name."""
    folder = args.run_dir / algo / mode
    shutil.rmtree(folder, ignore_errors=True)
    paths = {UNTOUCHED: write_copy(algo, None, folder)}
    paths |= {trick.name: write_copy(algo, trick, folder) for trick in tricks_of(algo, mode)}
    programs = {name: [*INTERLEAVED, str(path.resolve()), *TURBO_FLAGS[mode]] for name, path in paths.items()}
    settings = RunArgs(total_timesteps=args.total_timesteps or ALGORITHMS[algo].speed.quick_steps)
    summaries = run_programs(algo, programs, args.seeds, folder / "runs", settings)
    return {name: [summary["steady_sps"] for summary in own] for name, own in summaries.items()}


def record(args, algo, mode, speeds):
    """Add the speeds of one mode to the results of this machine."""
    path = path_here(args.results, "ablation", algo)
    data = read(path) if path.exists() else {"algo": algo, "modes": {}}
    entry = ALGORITHMS[algo]
    about = {"env_id": entry.env_id, "total_timesteps": args.total_timesteps or entry.speed.quick_steps}
    about |= {"seeds": args.seeds, "machine": machine()}
    about |= editions.today(editions.script(f"{algo}_torchcompile"))
    data["modes"][mode] = about | {"steps_per_second": speeds}
    store(path, data)


def table(algo, data):
    """A Markdown table of an algorithm's tricks, with the ratios in `data` (one machine's results, or nothing)."""
    known = data["modes"] if data else {}
    modes = [mode for mode in MODES if mode in known or "cudagraphs" not in mode]
    rows = []
    for trick in TRICKS[algo]:
        cells = []
        for mode in modes:
            speeds = known[mode]["steps_per_second"] if mode in known else {}
            if trick.name in speeds and mode in trick.modes:
                pairs = zip(speeds[UNTOUCHED], speeds[trick.name], strict=True)
                cells.append(spread([speed / slower for speed, slower in pairs], "{:.2f}"))
            else:
                cells.append("not measured" if mode in trick.modes else "")
        rows.append([trick.what, f"`{trick.where}`", *cells])
    return Table("", ("what the script does", "where", *modes), rows).markdown()


def text(algo, results):
    """The tables of one algorithm, one for each measured machine."""
    parts = []
    for path in sorted(results.glob(f"*/ablation/{algo}.json")):
        data = read(path)
        about = next(iter(data["modes"].values()))
        parts.append(f"{about['env_id']}, {editions.about([about | {'algo': algo}])}:")
        parts.append(table(algo, data))
    return "\n\n".join(parts or [table(algo, None)])


def main(args):
    check("modes", args.modes, MODES)
    from_low(1, args, "total_timesteps")
    with study.checked(args, TRICKS):
        for algo in args.algos:
            for mode in possible(args.modes):
                verify(algo, mode) if args.verify else record(args, algo, mode, measure(args, algo, mode))
            if not args.verify:
                print(text(algo, args.results), flush=True)


if __name__ == "__main__":
    main(parse(Args, __doc__))
