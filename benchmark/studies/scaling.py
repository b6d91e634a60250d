"""The speed of the turbo scripts with more environments and larger batches, compared with upper bounds.

    python -m benchmark.studies.scaling                # all scripts; an hour on 2 cores
    python -m benchmark.studies.scaling --algos dqn --no-compile --results /tmp/eager
    python -m benchmark.report                         # put the results into doc/tricks.md, and draw them

The bounds are measured in the same process: the environments alone, with random actions, and the matmuls and
convolutions of an update alone, in the same shapes and on tensors in the cache.

With more environments, PPO's and PQN's rollouts become shorter, so that an iteration keeps its number of transitions.
"""

import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from unittest.mock import patch

import torch
from gymnasium.vector import AutoresetMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from benchmark import editions
from benchmark.results import read, stored
from benchmark.studies import study
from benchmark.studies.timing import interleaved_times, seconds_per_call
from common.algorithms import ALGORITHMS
from common.arguments import from_low, parse, refuse
from common.machine import slug, where
from common.processes import call
from common.scripts import Enough, before_each_log, load, train_until_enough
from common.steady import Clock
from common.tables import Table

SCALED = {algo: entry.scaling for algo, entry in ALGORITHMS.items() if entry.scaling}
WINDOWS = 5  # of a run, of which the median is taken


@dataclass
class Args(study.Args):
    algos: tuple[str, ...] = tuple(SCALED)
    compile: bool = True
    """with --compile"""
    cudagraphs: bool = field(default_factory=torch.cuda.is_available)
    """with --cudagraphs"""
    num_envs: tuple[int, ...] | None = None
    """numbers of environments, with the default batch (default: the algorithm's)"""
    batches: tuple[int, ...] | None = None
    """transitions per batch (PPO, PQN: per minibatch), with the default number of environments (default: the
    algorithm's)"""
    seconds: float = 10
    """duration of training in steady state for each point"""


class Matmuls(TorchDispatchMode):
    """Records matmuls and convolutions: one call of each shape, and the number of its calls."""

    def __init__(self):
        super().__init__()
        self.calls = {}
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in flop_registry:
            layout = [(x.shape, x.stride()) if isinstance(x, torch.Tensor) else x for x in args]
            key = f"{func} {layout} {kwargs}"
            self.calls[key] = (func, args, kwargs or {})
            self.counts[key] += 1
        return func(*args, **(kwargs or {}))

    @torch.no_grad()
    def seconds(self):
        """The total time: the median time of each shape in a loop, times its count."""
        functions = {key: partial(func, *args, **kwargs) for key, (func, args, kwargs) in self.calls.items()}
        taken = interleaved_times(functions, rounds=5, seconds=0.02)
        return sum(count * statistics.median(taken[key]) for key, count in self.counts.items())


def matmuls_alone(script, flags, period):
    """Seconds and floating-point operations of all matmuls and convolutions of an update, from an eager run.

    Both are means over `period` updates.
    """
    matmuls = Matmuls()
    flops = []

    def on_start(run):
        original = run.learner.update

        def update(*inputs):
            with FlopCounterMode(display=False) as counter, matmuls:
                original(*inputs)
            flops.append(counter.get_total_flops())
            if len(flops) == period:
                raise Enough

        def on_log(losses):
            if clock.begin:
                run.learner.update = update

        clock = Clock(run)
        before_each_log(run, on_log)

    train_until_enough(script, flags, on_start)
    return {"matmul_seconds": matmuls.seconds() / period, "matmul_flops": sum(flops) / period}


def environments_alone(script, flags, seconds):
    """Steps per second of the environments with random actions."""
    speeds = []

    def on_start(run):
        envs = run.envs
        by_hand = getattr(envs, "metadata", {}).get("autoreset_mode") is AutoresetMode.DISABLED  # not in Atari
        actions = [envs.action_space.sample() for _ in range(16)]
        envs.reset()
        steps, begin = 0, time.perf_counter()
        while time.perf_counter() < begin + seconds:
            _, _, terminated, truncated, _ = envs.step(actions[steps % len(actions)])
            if by_hand and (ended := terminated | truncated).any():
                envs.restart(ended) if hasattr(envs, "restart") else envs.reset(options={"reset_mask": ended})
            steps += 1
        speeds.append(steps * run.args.num_envs / (time.perf_counter() - begin))
        raise Enough

    train_until_enough(script, flags, on_start)
    return speeds[0]


class Meter:
    """An `on_start` that measures a run's steps per second in time windows, times single updates, and ends the run.

    Each measurement has WINDOWS values. To be passed to `train_until_enough`.
    """

    def __init__(self, seconds):
        self.window = seconds / WINDOWS
        self.begin = None
        self.steps_per_second = []
        self.timed = []
        self.update_seconds = []

    def __call__(self, run):
        self.clock = Clock(run)
        before_each_log(run, lambda losses: self.clock.begin and self.on_log(run.learner, run.step))

    def on_log(self, learner, step):
        if len(self.steps_per_second) == WINDOWS:
            return
        now = time.perf_counter()
        if self.begin is None:
            self.begin = self.first = (step, now, self.clock.updates())
        elif now >= self.begin[1] + self.window:
            self.steps_per_second.append((step - self.begin[0]) / (now - self.begin[1]))
            self.begin = (step, now, self.clock.updates())
        if len(self.steps_per_second) == WINDOWS:
            self.updates_per_step = (self.clock.updates() - self.first[2]) / (step - self.first[0])
            self.original = learner.update
            learner.update = self.update

    def update(self, *inputs):
        """One update, timed until the device has finished."""
        self.timed.append(seconds_per_call(lambda: self.original(*inputs), 1))
        if sum(self.timed) >= self.window / 10:  # many updates of all kinds, or one iteration of PPO or PQN
            self.update_seconds.append(statistics.mean(self.timed))
            self.timed = []
        if len(self.update_seconds) == WINDOWS:
            raise Enough


def measure(algo, flags, modes, seconds):
    """One point: the speeds of a run with these flags, and its bounds."""
    script = load(f"{algo}_torchcompile")
    case = SCALED[algo]
    flags = case.flags | flags
    meter = Meter(seconds)
    interval = max(1, 100 // script.Args(**flags).num_envs)  # steps of the vector environment; on-policy: unused
    with patch.object(script, "LOG_INTERVAL", interval, create=True):
        train_until_enough(script, flags | modes, meter)
    return {
        "flags": flags,
        "steps_per_second": meter.steps_per_second,
        "update_seconds": meter.update_seconds,
        "updates_per_step": meter.updates_per_step,
        "environment_steps_per_second": environments_alone(script, flags, seconds / WINDOWS),
    } | matmuls_alone(script, flags, case.period)


def measure_all(args, algo):
    """All points of a script."""
    case = SCALED[algo]
    modes = {"compile": args.compile, "cudagraphs": args.cudagraphs}
    data = {"modes": modes, "num_envs": {}, "batch": {}}
    points = [("num_envs", n, case.with_envs(n)) for n in args.num_envs or case.num_envs]
    points += [("batch", batch, case.with_batch(batch)) for batch in args.batches or case.batches]
    for name, value, flags in points:
        print(f"{algo}: {name} {value}", file=sys.stderr, flush=True)
        data[name][value] = call(measure, algo, flags, modes, args.seconds)
    return data


def draw_all(results):
    """Draw the results of each script on each machine, next to their data."""
    for path in results.glob("*/scaling/*.json"):
        draw(read(path), path.with_suffix(".png"))


def draw(data, path):
    """Draw both curves with their bounds, distinguished by color, brightness and marker."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    training, environments, matmuls = ("#0072B2", "o-"), ("#D55E00", "s--"), ("black", "^:")
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")

    def plot(axes, x, values, style, label):
        middle = [statistics.median(point) for point in values]
        spans = [[m - min(v) for m, v in zip(middle, values, strict=True)]]
        spans += [[max(v) - m for m, v in zip(middle, values, strict=True)]]
        axes.errorbar(x, middle, spans, color=style[0], fmt=style[1], capsize=3, label=label)

    points = data["num_envs"].values()
    x = [int(n) for n in data["num_envs"]]
    plot(left, x, [[p["environment_steps_per_second"]] for p in points], environments, "environments alone")
    plot(left, x, [[1 / (p["updates_per_step"] * p["matmul_seconds"])] for p in points], matmuls, "matmuls alone")
    plot(left, x, [p["steps_per_second"] for p in points], training, "training")
    left.set(xlabel="environments", ylabel="environment steps per second", xscale="log", yscale="log", xticks=x)
    points = data["batch"].values()
    x = [int(n) for n in data["batch"]]
    plot(right, x, [[1e3 * s for s in p["update_seconds"]] for p in points], training, "update")
    plot(right, x, [[1e3 * p["matmul_seconds"]] for p in points], matmuls, "matmuls alone")
    right.set(xlabel="transitions in a batch", ylabel="ms per update", xscale="log", yscale="log", xticks=x)
    for axes in (left, right):
        axes.xaxis.set_major_formatter(matplotlib.ticker.ScalarFormatter())
        axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5), numticks=20))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"{ALGORITHMS[data['algo']].title}, {modes_of(data)}, {where(data['machine'])}")
    figure.savefig(path, dpi=150)


def modes_of(data):
    """The name of the measured mode."""
    return "+".join(name for name, active in data["modes"].items() if active) or "eager"


def row(algo, data):
    """The row of one script in `table`; `data` has its results or nothing."""
    cells = ["not measured"] * 4
    if data:
        batches = data["batch"].values()
        curves = [
            [statistics.median(point["steps_per_second"]) for point in data["num_envs"].values()],
            [1e3 * statistics.median(point["update_seconds"]) for point in batches],
            [1e3 * point["matmul_seconds"] for point in batches],
            [point["matmul_flops"] / point["matmul_seconds"] / 1e9 for point in batches],
        ]
        cells = [", ".join(f"{value:.3g}" if value < 1000 else f"{value:.0f}" for value in curve) for curve in curves]
    environments = ", ".join(map(str, data["num_envs"] if data else SCALED[algo].num_envs))
    batches = ", ".join(map(str, data["batch"] if data else SCALED[algo].batches))
    title = f"{ALGORITHMS[algo].title}, {modes_of(data)}" if data else ALGORITHMS[algo].title
    return [title, environments, cells[0], batches, *cells[1:]]


def table(results):
    """A Markdown table and plots for each measured machine, without scripts measured only on others."""
    header = ("", "environments", "steps/s", "transitions of a batch", "ms per update")
    header += ("ms of its matmuls alone", "these, GFLOP/s")
    parts = []
    for measured, algos in editions.with_algorithms(stored(results, "scaling", SCALED), SCALED):
        data = {one["algo"]: one for one in measured}
        if measured:
            parts.append(f"{editions.about(measured)}:")
        parts.append(Table("", header, [row(algo, data.get(algo)) for algo in algos]).markdown())
        pictures = [
            f"![{ALGORITHMS[algo].title}](../results/{slug(one['machine'])}/scaling/{algo}.png)"
            for algo, one in data.items()
        ]
        parts += ["\n".join(pictures)] * bool(pictures)
    return "\n\n".join(parts)


def main(args):
    if args.cudagraphs and not torch.cuda.is_available():
        refuse("cudagraphs", args.cudagraphs, "there is no CUDA device; give --no-cudagraphs")
    from_low(1, args, "num_envs", "batches")
    from_low(0, args, "seconds")
    study.run("scaling", args, SCALED, measure_all, table)


if __name__ == "__main__":
    main(parse(Args, __doc__))
