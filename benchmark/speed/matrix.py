"""Measure every algorithm in every mode with every seed, and store the results under results/<machine>/.

    python -m benchmark.speed --dry-run  # print the commands
    python -m benchmark.speed            # speed: rounds in which the modes are interleaved (rounds.py)
    python -m benchmark.speed --quick    # the same in less time
    python -m benchmark.speed --learn    # learning curves, at the published budgets

There are many learning runs: select some with --algos, --env-ids, --modes and --seeds, and run multiple at once with
--parallel. Their expected time is printed first.

A result is the JSON file of a run: speed/<algo>/<env_id>/<mode>/<seed>.json, quick/... or learning/... . For a run that
crashed, it names the log ("failed"). Run the same command again to continue: rounds with all results from the same
commands are skipped. Delete results to repeat a round. If the command is interrupted (Ctrl-C, SIGTERM, SIGHUP),
learning runs save a checkpoint, from which they resume. At the end, tables and figures are made from results/, as by
`python -m benchmark.report`.
"""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import torch
from tqdm import tqdm

from benchmark import editions
from benchmark.results import RESULTS, plain_name, read, store
from benchmark.speed import checkouts, rounds
from benchmark.speed.monitor import Monitor
from common import ROOT
from common.algorithms import MEASURED
from common.arguments import check, check_seeds, distinct, from_low, refuse, stop
from common.curves import learning_curve
from common.folders import locked, writable
from common.machine import machine, slug
from common.processes import SECONDS_TO_STOP, end, start, undisturbed
from common.slices import SLICES
from tools import mkl_on_amd

try:
    from benchmark.report import pages
except ImportError as error:  # now instead of after hours
    stop(f"python -m benchmark.speed: pip install -r requirements/test.txt ({error})")

SPANS = {"an hour": 1, "a night": 10}  # hours
LEFT_OUT = ("slice_speeds", "run_dir", "resume")  # of a run's summary and config; the latter two are paths
START_SECONDS = {True: 50, False: 10}  # of a mode with and without --compile, to estimate the time of a matrix


@dataclass
class Args(rounds.RunArgs):
    algos: tuple[str, ...] = tuple(MEASURED)
    """names of the plain scripts, without .py"""
    env_ids: tuple[str, ...] | None = None
    """environments for all algorithms (default: each algorithm's in algorithms.py)"""
    modes: tuple[str, ...] | None = None
    """modes to run, and peers: sb3, sbx, cleanrl, leanrl-2024 (default: all; with --quick no peers; with --learn plain
    and the fastest); modes that need a missing CUDA device or package are skipped"""
    mkl_on_amd: bool = False
    """also measure modes with tools/mkl_on_amd.py, which speeds up matmuls on AMD processors"""
    seeds: tuple[int, ...] | None = None
    """seeds, with one round of all modes for each (default: 21 31 41)"""
    quick: bool = False
    """fewer steps, only seed 21, no peers: half an hour on 2 cores"""
    learn: bool = False
    """learning curves instead of speed: separate runs at the published budget"""
    parallel: int = 1
    """number of simultaneous learning runs, which share the cores equally"""
    out: Path = RESULTS
    """folder for the results; use a separate one for other flags, such as another precision"""
    run_dir: Path = Path("runs/matrix")
    """folder for the runs and their logs, used by one command at a time"""
    dry_run: bool = False
    """print the commands without running them"""


class Job:
    """A unit of work: a speed round of an algorithm's modes with one seed."""

    learn = False

    def __init__(self, args, algo, env_id, modes, seed):
        algorithm = MEASURED[algo]
        speed = algorithm.speed
        self.algo = algo
        self.modes = modes
        self.programs = rounds.programs_of(algo, modes)
        self.seed = seed
        self.env_id = env_id
        steps = args.total_timesteps
        steps = steps or (algorithm.budget if args.learn else speed.quick_steps if args.quick else speed.steps)
        self.kind = "learning" if args.learn else "quick" if args.quick else "speed"
        self.args = rounds.RoundArgs(
            algo=algo,
            env_id=self.env_id,
            num_envs=args.num_envs,
            total_timesteps=steps,
            flags=args.flags if args.learn else f"{speed.flags} {args.flags}",
            monitor=args.monitor,
            run_dir=args.run_dir / self.kind / algo / plain_name(self.env_id),
        )
        if args.parallel > 1:
            self.args.flags += f" --threads={max(1, os.cpu_count() // args.parallel)}"
        self.starting = {mode: START_SECONDS["compile" in mode] for mode in modes}
        self.slice = steps / speed.plain / 60  # or longer and fewer
        speeds = [speed.compiled if self.learn and "compile" in mode else speed.plain for mode in modes]
        self.seconds = sum(self.starting.values()) + sum(steps / speed for speed in speeds)

    def folder(self, mode):
        return self.args.run_dir / mode / str(self.seed)

    def command(self, mode):
        """The arguments of `python`."""
        return rounds.command(self.args, self.programs[mode], self.seed, self.folder(mode))

    def result_path(self, out, mode):
        return out / self.kind / self.algo / plain_name(self.env_id) / mode / f"{self.seed}.json"

    def finished(self, out):
        """Whether all modes have results from these commands."""
        for mode in self.modes:
            path = self.result_path(out, mode)
            if not path.exists():
                return False
            result = read(path)
            if result["command"] != shown(self.command(mode)) or (self.args.monitor and "monitor" not in result):
                return False
        return True

    def clear(self):
        """Remove the files of an interrupted run."""
        for mode in self.modes:
            shutil.rmtree(self.folder(mode), ignore_errors=True)

    def run(self, on_slice):
        """Train; returns the exit codes of the modes."""
        self.clear()
        return rounds.run_round(self.args, self.programs, self.seed, on_slice)

    def results(self, statuses, machine):
        """The results of the modes, after `run`."""
        results = {mode: self.result(mode, statuses[mode]) | {"machine": machine} for mode in self.modes}
        plain = results.get("plain", {}).get("summary", {})
        for result in results.values():  # of the same round: speeds of other rounds are no baseline
            result["plain"] = {name: plain.get(name) for name in ("steady_sps", "warmup_seconds")}
        return results

    def result(self, mode, status):
        folder = self.folder(mode)
        result = {"algo": self.algo, "env_id": self.env_id, "mode": mode, "seed": self.seed}
        result["command"] = shown(self.command(mode))
        summary = self.summary(mode)
        if status or not summary:
            return result | {"failed": str(folder / "log.txt"), "exit_code": status}
        result |= editions.today(*summary.parent.glob("*.py"))  # the run's copy of the script; peers have none
        result["summary"] = read(summary)
        result["cache"] = "cold"
        config = summary.with_name("config.json")
        if config.exists():  # peers have none
            result["config"] = read(config)
        for name in LEFT_OUT:
            result["summary"].pop(name, None)
            result.get("config", {}).pop(name, None)
        if self.args.monitor:
            result["monitor"] = read(folder / "monitor.json")
        return result

    def summary(self, mode):
        """The run's summary, or None if it has none."""
        return next(self.folder(mode).glob("*/summary.json"), None)


class LearningRun(Job):
    """A run of one mode, without interleaving. A run that was interrupted and resumed has parts."""

    learn = True

    def command(self, mode):
        if mode.removesuffix(rounds.MKL) in rounds.PEERS:
            program = [word for word in self.programs[mode] if word != SLICES]
        else:
            script, *flags = self.programs[mode][len(rounds.INTERLEAVED) :]
            program = [f"leanrl/{script}.py", *flags]
        return rounds.command(self.args, program, self.seed, self.folder(mode))

    def start(self):
        """Start training with empty caches, or resume an interrupted script of ours."""
        (self.mode,) = self.modes
        self.monitor = Monitor(self.args.monitor)
        words = self.command(self.mode)
        summary = self.summary(self.mode)
        ours = words[0].startswith("leanrl/")
        if ours:
            words[0] = ROOT / words[0]
        if ours and summary and steps_of(summary) < self.args.total_timesteps:
            words.append(f"--resume={summary.parent}")
        else:
            self.clear()
        self.watching = contextlib.ExitStack()
        caches = self.watching.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        variables = os.environ | rounds.searched() | rounds.cold(Path(caches)) | rounds.environment(self.mode)
        self.process = start(words, self.folder(self.mode) / "log.txt", env=variables)
        self.watching.enter_context(self.monitor.watching(self.mode, self.process.pid))

    def statuses(self):
        """The exit code of the mode; None while it trains."""
        status = self.process.poll()
        return None if status is None else {self.mode: status}

    def stop(self):
        """Have the script save a checkpoint and end."""
        if self.process.poll() is None:
            self.process.terminate()

    def end(self):
        """Save the monitor's samples; kill the process if it still trains."""
        end(self.process)
        self.watching.close()
        self.monitor.save(self.mode, self.folder(self.mode))

    def parts(self, mode):
        """The summaries of a run and of the runs it resumed, in order."""
        return sorted(self.folder(mode).glob("*/summary.json"), key=steps_of)

    def summary(self, mode):
        parts = self.parts(mode)
        return parts[-1] if parts else None

    def result(self, mode, status):
        result = super().result(mode, status)
        if "failed" not in result:
            parts = self.parts(mode)
            seconds = [read(part)["wall_seconds"] for part in parts]
            result["summary"]["wall_seconds"] = sum(seconds)
            result["curve"] = learning_curve([part.parent for part in parts])
        return result


def shown(command):
    """A command as text, without the folder of its run."""
    return shlex.join(["python", *(word for word in command if not word.startswith("--run-dir="))])


def steps_of(summary):
    """The steps of the run of a summary.json."""
    return read(summary)["global_step"]


def jobs(args):
    """All jobs, ordered by seed, so that a first table is available early."""
    for i, seed in enumerate(args.seeds):
        for algo in args.algos:
            modes = [mode for mode in args.modes if mode in rounds.modes_of(algo)]
            if not modes:
                continue
            modes = rounds.alternating(modes, i)
            algorithm = MEASURED[algo]
            for env_id in args.env_ids or (algorithm.env_ids if args.learn else (algorithm.env_id,)):
                if args.learn:
                    yield from (LearningRun(args, algo, env_id, [mode], seed) for mode in modes)
                else:
                    yield Job(args, algo, env_id, modes, seed)


def progress(todo, left):
    """A progress bar that counts the expected seconds of jobs; jobs that are not in `left` are finished."""
    bar_format = "{l_bar}{bar}| {elapsed}, {remaining} left{postfix}"
    total = sum(job.seconds for job in todo)
    initial = total - sum(job.seconds for job in left)
    return tqdm(total=total, initial=initial, bar_format=bar_format, smoothing=0)


def measure(todo, out, here):
    """Run all unfinished rounds."""
    left = [job for job in todo if not job.finished(out)]
    with progress(todo, left) as bar:
        for job in left:
            end = bar.n + job.seconds

            def on_slice(mode, job=job, end=end):
                bar.set_postfix_str(f"{job.algo} {mode} seed {job.seed}", refresh=False)
                bar.update(min(job.starting.pop(mode, job.slice), end - bar.n))

            keep(job, job.results(job.run(on_slice), here), out)
            bar.update(end - bar.n)


def learn(todo, out, here, parallel):
    """Run all unfinished learning runs, `parallel` at a time."""
    left = [job for job in todo if not job.finished(out)]
    with progress(todo, left) as bar:
        running = []
        try:
            while left or running:
                while left and len(running) < parallel:
                    job = left.pop(0)
                    job.start()
                    running.append(job)
                time.sleep(0.1)
                for job in running[:]:
                    statuses = job.statuses()
                    if statuses:
                        running.remove(job)
                        job.end()
                        keep(job, job.results(statuses, here), out)
                        bar.update(job.seconds)
        finally:
            with undisturbed():
                stop_all(running)


def stop_all(running):
    """Have learning runs save their checkpoints and end."""
    for job in running:
        job.stop()
    for job in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.process.wait(SECONDS_TO_STOP)
        job.end()


def keep(job, results, out):
    """Store the results of a job's modes."""
    for mode, result in results.items():
        store(job.result_path(out, mode), result)


def what_fits(todo):
    """Text on the time of learning runs, and on those that fit into an hour and a night, the shortest first."""
    groups = {}
    for job in todo:
        name = f"{job.algo} {job.env_id} {job.modes[0]}"
        groups[name] = groups.get(name, 0) + job.seconds / 3600
    seeds = len({job.seed for job in todo})
    yield f"{len(todo)} learning runs, about {sum(groups.values()):.1f} hours on 2 cores"
    for span, limit in SPANS.items():
        fitting, hours = [], 0.0
        for name in sorted(groups, key=groups.get):
            if hours + groups[name] <= limit:
                fitting.append(name)
                hours += groups[name]
        yield f"into {span} fit {len(fitting) * seeds} ({hours:.1f} hours): {'; '.join(fitting) or 'none'}"


def missing(mode):
    """A mode's requirement that this machine does not meet, or None."""
    if rounds.needs_device(mode):
        return "a CUDA device"
    if mode in rounds.MKL_MODES and torch.cuda.is_available():
        return "a run on the CPU"
    if mode in rounds.MKL_MODES and not mkl_on_amd.is_for_this_machine():
        return "Linux on x86"
    mode = mode.removesuffix(rounds.MKL)
    if mode in checkouts.VARIABLES:
        variable = checkouts.VARIABLES[mode]
        return (
            None if checkouts.python(mode) else f"{variable}, the folder of a checkout (benchmark/speed/checkouts.py)"
        )
    if mode in rounds.PEERS and not find_spec(rounds.PEER_MODULES[mode]):
        return "requirements/peers.txt"
    if mode == "sbx" and torch.cuda.is_available() and not entry_points(group="jax_plugins"):
        return "a JAX for CUDA"
    return None


def is_published(out):
    """Whether the documentation is made from the results in the folder `out`."""
    return out.resolve() == RESULTS


def check_names(env_ids):
    """Refuse two environments whose results would have the same names."""
    known = {}
    for env_id in env_ids:
        other = known.setdefault(plain_name(env_id), env_id)
        if other != env_id:
            refuse("env-ids", env_id, f"its results would have the names of {other}'s; give one of them another --out")


def complete(args):
    """Check the arguments and fill in defaults."""
    check("algos", args.algos, MEASURED)
    distinct(args, "algos", "env_ids", "modes", "seeds")
    from_low(1, args, "total_timesteps", "num_envs")
    check_seeds(args, "seeds")
    check_names(args.env_ids or ())
    known = dict.fromkeys(rounds.MODES | rounds.PEERS)
    with_mkl = dict.fromkeys(mode for mode in rounds.MKL_MODES if mode.removesuffix(rounds.MKL) in known)
    check("modes", args.modes or (), known | with_mkl)
    for name in ("flags", "num_envs"):
        if getattr(args, name) and is_published(args.out):
            remedy = "results/ is for the settings of the tables; give --out another folder"
            refuse(name.replace("_", "-"), getattr(args, name), remedy)
    fastest = "compile+cudagraphs" if torch.cuda.is_available() else "compile"
    modes = args.modes or (("plain", fastest) if args.learn else tuple(rounds.MODES if args.quick else known))
    if args.mkl_on_amd:
        modes += tuple(name for mode in modes if (name := mode + rounds.MKL) in with_mkl and name not in modes)
    needs = {mode: missing(mode) for mode in modes}
    for mode, need in needs.items():
        if need:
            print(f"skipped: {mode} needs {need}", file=sys.stderr)
    args.modes = tuple(mode for mode, need in needs.items() if not need)
    if not args.modes:
        rounds.refuse_modes(modes)
    args.seeds = args.seeds or ((21,) if args.quick else (21, 31, 41))
    if not 1 <= args.parallel <= (os.cpu_count() if args.learn else 1):
        remedy = f"give 1 to {os.cpu_count()}, the cores of this machine" if args.learn else "it is for --learn"
        refuse("parallel", args.parallel, remedy)


def main(args):
    complete(args)
    todo = list(jobs(args))
    if args.dry_run:
        for job in todo:
            for mode in job.modes:
                print(shlex.join(["python", *job.command(mode)]))
        if not args.learn:
            print(f"about {sum(job.seconds for job in todo) / 3600:.1f} hours on 2 cores", file=sys.stderr)
    if args.learn:
        print("\n".join(what_fits(todo)), file=sys.stderr)
    if args.dry_run:
        return
    here = machine()
    out = args.out / slug(here)
    writable("out", args.out)
    try:
        with locked("run-dir", args.run_dir):
            if args.learn:
                learn(todo, out, here, args.parallel)
            else:
                measure(todo, out, here)
    except KeyboardInterrupt:
        print("\ninterrupted; run the same command again to continue", file=sys.stderr)
        raise SystemExit(130) from None
    measured = pages.load(args.out)
    tables = pages.learning_tables(measured) if args.learn else pages.speed_tables(measured)
    print("\n\n".join(table.markdown() for table in tables))
    if is_published(args.out):
        pages.write(measured)
    paths = [job.result_path(out, mode) for job in todo for mode in job.modes]
    logs = [read(path).get("failed") for path in paths if path.exists()]
    failed = [log for log in logs if log]
    for log in failed:
        print(f"error: a run failed; see {log}", file=sys.stderr)
    raise SystemExit(1 if failed else 0)
