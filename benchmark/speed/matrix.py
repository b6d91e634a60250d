"""Measure every algorithm in every mode with every seed, and keep the results as data under results/<machine>/.

    python -m benchmark.speed --dry-run  # print the commands
    python -m benchmark.speed            # speed: rounds in which the modes are interleaved (rounds.py)
    python -m benchmark.speed --quick    # the same in less time
    python -m benchmark.speed --learn    # learning curves: one run after the other, at the published budgets

A result is the JSON file of a run: speed/<algo>/<env_id>/<mode>/<seed>.json, or quick/... or learning/... . Where the
run crashed it names the log ("failed"). The same command goes on where it was interrupted: a round is not run again if
all its results are there, and of the same commands. To repeat it delete them. At the end tables and figures are made of
all that is in results/, as by `python -m benchmark.report`.
"""

import contextlib
import json
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from statistics import mean

import torch
from tqdm import tqdm

from benchmark import ROOT
from benchmark.algorithms import ALGORITHMS
from benchmark.arguments import check, refuse, stop
from benchmark.report.machine import machine, slug
from benchmark.results import RESULTS, store
from benchmark.speed import rounds
from benchmark.speed.monitor import Monitor

try:
    from benchmark.report import pages
except ImportError as error:  # not after hours
    stop(f"python -m benchmark.speed: pip install -r requirements/test.txt ({error})")

POINTS = 200  # of a learning curve
START_SECONDS = {True: 50, False: 10}  # of a mode with and without --compile, to tell how long a matrix takes


@dataclass
class Args(rounds.RunArgs):
    algos: tuple[str, ...] = tuple(ALGORITHMS)
    """names of the plain scripts, without .py"""
    modes: tuple[str, ...] | None = None
    """modes to run, and peers: sb3 and sbx (by default all; --quick and --learn without peers); what this machine has
    no CUDA device or no packages for is left out"""
    seeds: tuple[int, ...] | None = None
    """one round of all modes for each (by default 21 31 41)"""
    quick: bool = False
    """half an hour on 2 cores: fewer steps, seed 21 alone, no peers"""
    learn: bool = False
    """learning curves instead of speed: each run by itself, at the published budget"""
    out: Path = RESULTS
    """folder for the results; those of other flags, such as another precision, need one of their own"""
    run_dir: Path = Path("runs/matrix")
    """folder for the runs and their logs"""
    dry_run: bool = False
    """print the commands and run nothing"""


class Job:
    """What runs at a time: a speed round of an algorithm's modes with one seed, or a single learning run."""

    def __init__(self, args, algo, modes, seed):
        algorithm = ALGORITHMS[algo]
        self.learn = args.learn
        self.algo = algo
        self.modes = modes
        self.programs = rounds.programs_of(algo, modes)
        self.seed = seed
        self.env_id = args.env_id or algorithm.env_id
        steps = args.total_timesteps
        steps = steps or (algorithm.budget if args.learn else algorithm.quick_steps if args.quick else algorithm.steps)
        self.kind = "learning" if args.learn else "quick" if args.quick else "speed"
        self.args = rounds.RoundArgs(
            algo=algo,
            env_id=self.env_id,
            num_envs=args.num_envs,
            total_timesteps=steps,
            flags=args.flags if args.learn else f"{algorithm.flags} {args.flags}",
            monitor=args.monitor,
            run_dir=args.run_dir / self.kind / algo / plain_name(self.env_id),
        )
        self.starting = {mode: START_SECONDS["compile" in mode] for mode in modes}
        training = len(modes) * steps / algorithm.speed  # if every mode were as fast as plain
        self.slice = training / (60 * len(modes))  # or longer, and fewer of them
        self.seconds = sum(self.starting.values()) + training

    def folder(self, mode):
        return self.args.run_dir / mode / str(self.seed)

    def command(self, mode):
        """The words behind `python`."""
        program = self.programs[mode]
        if self.learn:  # the script itself, not interleaved
            script, *flags = program[len(rounds.INTERLEAVED) :]
            program = [f"leanrl/{script}.py", *flags]
        return rounds.command(self.args, program, self.seed, self.folder(mode))

    def result_path(self, out, mode):
        return out / self.kind / self.algo / plain_name(self.env_id) / mode / f"{self.seed}.json"

    def finished(self, out):
        """Whether all modes have results of these commands."""
        for mode in self.modes:
            path = self.result_path(out, mode)
            if not path.exists():
                return False
            result = json.loads(path.read_text())
            if result["command"] != shown(self.command(mode)) or (self.args.monitor and "monitor" not in result):
                return False
        return True

    def run(self, on_slice):
        """Train; the modes' exit codes."""
        for mode in self.modes:
            shutil.rmtree(self.folder(mode), ignore_errors=True)  # of a round that was interrupted
        if self.learn:
            return self.run_alone(on_slice)
        return rounds.run_round(self.args, self.programs, self.seed, on_slice)

    def run_alone(self, on_slice):
        """Train the one mode of a learning run by itself."""
        (mode,) = self.modes
        monitor = Monitor(self.args.monitor)
        script, *flags = self.command(mode)
        nowhere = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        process = rounds.start([str(ROOT / script), *flags], self.folder(mode), **nowhere)
        try:
            with monitor.watching(mode, process.pid):
                while (status := process.poll()) is None:
                    on_slice(mode)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(timeout=self.slice)
        finally:
            rounds.end(process)
        monitor.save(mode, self.folder(mode))
        return {mode: status}

    def results(self, statuses, machine):
        """The modes' results, after `run`."""
        results = {mode: self.result(mode, statuses[mode]) | {"machine": machine} for mode in self.modes}
        plain = results.get("plain", {}).get("summary", {})
        for result in results.values():  # of the same round: speeds of other rounds are no baseline
            result["plain"] = {name: plain.get(name) for name in ("steady_sps", "warmup_seconds")}
        return results

    def result(self, mode, status):
        folder = self.folder(mode)
        result = {"algo": self.algo, "env_id": self.env_id, "mode": mode, "seed": self.seed}
        result["command"] = shown(self.command(mode))
        summaries = list(folder.glob("*/summary.json"))
        if status or not summaries:
            return result | {"failed": str(folder / "log.txt"), "exit_code": status}
        (path,) = summaries
        result["summary"] = json.loads(path.read_text())
        result["summary"].pop("slice_speeds", None)
        config = path.with_name("config.json")
        if config.exists():  # peers have none
            result["config"] = json.loads(config.read_text())
            del result["config"]["run_dir"]
        if self.args.monitor:
            result["monitor"] = json.loads((folder / "monitor.json").read_text())
        if self.learn:
            result["curve"] = curve(path.parent)
        return result


def plain_name(env_id):
    """An environment's name as a folder's."""
    return env_id.replace("/", "-")


def shown(command):
    """A command as text, without the folder of its run."""
    return shlex.join(["python", *(word for word in command if not word.startswith("--run-dir="))])


def curve(folder):
    """Episodic returns of a run, as [step, seconds since its start, mean return] of at most POINTS equal parts."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    if "charts/episodic_return" not in events.Tags()["scalars"]:  # no episode has ended
        return []
    episodes = events.Scalars("charts/episodic_return")
    width = max(episodes[-1].step / POINTS, 1)
    parts = {}
    for episode in episodes:
        parts.setdefault(int((episode.step - 1) / width), []).append(episode)
    begin = events.FirstEventTimestamp()
    rows = []
    for part in parts.values():
        seconds = part[-1].wall_time - begin
        rows.append([part[-1].step, round(seconds, 2), round(mean(episode.value for episode in part), 3)])
    return rows


def jobs(args):
    """All that is to be run: seed by seed, so that the first table is there soon."""
    for i, seed in enumerate(args.seeds):
        for algo in args.algos:
            modes = [mode for mode in args.modes if mode in rounds.modes_of(algo)]
            if not modes:
                continue
            modes = rounds.alternating(modes, i)
            for group in [[mode] for mode in modes] if args.learn else [modes]:
                yield Job(args, algo, group, seed)


def measure(todo, out, here):
    """Run all jobs that are not finished, with a progress bar that counts their expected seconds."""
    done = [job for job in todo if job.finished(out)]
    bar_format = "{l_bar}{bar}| {elapsed}, {remaining} left{postfix}"
    total = sum(job.seconds for job in todo)
    initial = sum(job.seconds for job in done)
    with tqdm(total=total, initial=initial, bar_format=bar_format, smoothing=0) as bar:
        for job in todo:
            if job in done:
                continue
            end = bar.n + job.seconds

            def on_slice(mode, job=job, end=end):
                bar.set_postfix_str(f"{job.algo} {mode} seed {job.seed}", refresh=False)
                bar.update(min(job.starting.pop(mode, job.slice), end - bar.n))

            results = job.results(job.run(on_slice), here)
            for mode, result in results.items():
                store(job.result_path(out, mode), result)
            bar.update(end - bar.n)


def missing(mode):
    """What a mode needs and this machine has not, or None."""
    if rounds.needs_device(mode):
        return "a CUDA device"
    if mode in rounds.PEERS and not find_spec(rounds.PEER_MODULES[mode]):
        return "requirements/peers.txt"
    if mode == "sbx" and torch.cuda.is_available() and not entry_points(group="jax_plugins"):
        return "a JAX for CUDA"
    return None


def is_published(out):
    """Whether the documentation is made of the results in folder `out`."""
    return out.resolve() == RESULTS


def complete(args):
    """Check the arguments and give those that were left out their values."""
    check("algos", args.algos, ALGORITHMS)
    known = rounds.MODES if args.learn else rounds.MODES | rounds.PEERS
    check("modes", args.modes or (), known)
    for name in ("flags", "num_envs"):
        if getattr(args, name) and is_published(args.out):
            remedy = "results/ is for the settings of the tables; give --out another folder"
            refuse(name.replace("_", "-"), getattr(args, name), remedy)
    modes = args.modes or tuple(rounds.MODES if args.quick else known)
    needs = {mode: missing(mode) for mode in modes}
    for mode, need in needs.items():
        if need:
            print(f"skipped: {mode} needs {need}", file=sys.stderr)
    args.modes = tuple(mode for mode, need in needs.items() if not need)
    if not args.modes:
        rounds.refuse_modes(modes)
    args.seeds = args.seeds or ((21,) if args.quick else (21, 31, 41))


def main(args):
    complete(args)
    todo = list(jobs(args))
    if args.dry_run:
        for job in todo:
            for mode in job.modes:
                print(shlex.join(["python", *job.command(mode)]))
        print(f"about {sum(job.seconds for job in todo) / 3600:.1f} hours on 2 cores", file=sys.stderr)
        return
    here = machine()
    out = args.out / slug(here)
    try:
        measure(todo, out, here)
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from here", file=sys.stderr)
        raise SystemExit(130) from None
    measured = pages.load(args.out)
    tables = pages.learning_tables(measured) if args.learn else pages.speed_tables(measured)
    print("\n\n".join(table.markdown() for table in tables))
    if is_published(args.out):
        pages.write(measured)
    failed = [job.result_path(out, mode) for job in todo for mode in job.modes]
    failed = [path for path in failed if "failed" in json.loads(path.read_text())]
    for path in failed:
        print(f"error: a run failed; see {json.loads(path.read_text())['failed']}", file=sys.stderr)
    raise SystemExit(1 if failed else 0)
