"""Count the launches, copies and waits of an environment step and an update: costs that a busy machine cannot hide.

    python -m benchmark.studies.launches          # count, and print the table
    python -m benchmark.studies.launches --write  # ten minutes; also rewrite results/launches.json for the report

Counts are of `train` in steady state with the scripts' defaults, except for a small replay buffer, an early start of
learning, no random actions (DQN; PQN for Atari), and early updates of the target networks (DQN and SAC for Atari). All
modes run on the emulated CUDA device of tools/emulated_cuda.py. Compiled code is the code that inductor generates for
an H100 (tools/generated_cuda.py, which needs triton); its kernels are counted but not executed. Scripts whose
environments are on the device are counted with the pendulum of the tests, and only compiled: a CPU would compute their
eager operators, on 32,768 rows, for minutes. The operators of the pendulum are a part of their own.

"leanrl_2024" in results/launches.json has the counts of the LeanRL of 2024 and their method; --write keeps it.
"""

import contextlib
import json
import sys
from collections import Counter
from dataclasses import dataclass

import torch

from benchmark.results import RESULTS, read, replace
from benchmark.studies import population
from common import ROOT
from common.algorithms import ALGORITHMS
from common.arguments import parse
from common.scripts import Enough, before_each_log, load, train_until_enough
from common.steady import Clock
from common.tables import Table

sys.path.insert(0, str(ROOT / "tools"))  # its files can be copied, so they import each other by name
from emulated_cuda import emulated_cuda

DATA = RESULTS / "launches.json"
MODES = {
    "eager": {},
    "cudagraphs": {"cudagraphs": True},
    "compile + cudagraphs": {"compile": True, "cudagraphs": True},
}
PARTS = ("update", "update_target", "losses")  # methods counted separately; the rest is the step
POPULATIONS = {algo: name.removesuffix("_torchcompile") for algo, name in population.POPULATIONS.items()}
AGENTS = (1, 2, 4, 8, 16)


@dataclass
class Args:
    write: bool = False
    """rewrite results/launches.json"""


class Steady:
    """An `on_start` that counts `steps` steps of a run from the first log after warm-up, then ends the run.

    A step is a step of the vector environment.
    """

    def __init__(self, counts, steps):
        self.counts = counts
        self.steps = steps
        self.begin = None
        self.parts = {}
        self.calls = Counter(step=steps)

    def __call__(self, run):
        clock = Clock(run)
        before_each_log(run, lambda losses: clock.begin and self.on_log(run))

    def on_log(self, run):
        step = run.step // run.args.num_envs  # from transitions to steps
        if self.begin is None:
            self.begin = step
            for name in PARTS:
                if hasattr(run.learner, name):
                    setattr(run.learner, name, self.counting(name, getattr(run.learner, name)))
            envs = getattr(run, "envs", None)  # a population has many
            if type(envs).__name__ == "DeviceEnvs":
                envs.env.step = self.counting("environment", envs.env.step)
            self.before = self.counts.copy()
        elif step == self.begin + self.steps:
            self.parts["step"] = self.counts - self.before - sum(self.parts.values(), Counter())
            raise Enough

    def counting(self, part, function):
        """Wrap `function` to add its costs to those of `part`."""
        self.parts[part] = Counter()

        def call(*args, **kwargs):
            before = self.counts.copy()
            result = function(*args, **kwargs)
            self.parts[part] += self.counts - before
            self.calls[part] += 1
            return result

        return call

    def per_call(self):
        """Counts of one call of each part, by part, with the number of calls per step."""
        return {
            part: {"calls per step": per(self.calls[part], self.steps)}
            | {name: per(counts[name], self.calls[part]) for name in sorted(counts) if counts[name]}
            for part, counts in self.parts.items()
        }


def per(count, calls):
    """An average; whole numbers stay integers."""
    return count // calls if count % calls == 0 else count / calls


def count(name, mode, flags, steps):
    """The counts of a turbo script's `train` in steady state, by part, as in `Steady.per_call`.

    For compiled code, "longest reduction" is that of one thread block, as in `generated_cuda.longest_reduction`.
    """
    script = load(f"{name}_torchcompile")
    with contextlib.ExitStack() as stack:
        device = stack.enter_context(emulated_cuda())
        if MODES[mode].get("compile"):
            from generated_cuda import compiled_for_cuda, longest_reduction  # needs triton

            programs = stack.enter_context(compiled_for_cuda(execute=False))
        steady = Steady(device.counts, steps)
        train_until_enough(script, flags | MODES[mode], steady, script.Args.total_timesteps)
    counts = steady.per_call()
    if MODES[mode].get("compile"):
        numbers, results = max(longest_reduction(code) for _, code in programs.codes)
        counts["longest reduction"] = {"numbers": numbers, "results": results}
    return counts


def modes_of(algo):
    """The modes in which a script is counted."""
    return ["compile + cudagraphs"] if ALGORITHMS[algo].on_device else list(MODES)


def total(data):
    """All counts of all scripts, counted anew."""
    scripts = {}
    for algo in ALGORITHMS:
        for mode in modes_of(algo):
            print(f"counting {algo}, {mode}", file=sys.stderr)
            scripts.setdefault(algo, {})[mode] = count(algo, mode, *ALGORITHMS[algo].counted)
    populations = {algo: {agents: count_agents(algo, agents) for agents in AGENTS} for algo in POPULATIONS}
    return data | {"torch": torch.__version__.split("+")[0], "scripts": scripts, "populations": populations}


def count_agents(algo, agents):
    """The counts of the population script with this number of agents, compiled and captured."""
    print(f"counting {POPULATIONS[algo]}, {agents} agents", file=sys.stderr)
    flags, steps = ALGORITHMS[algo].counted
    return count(POPULATIONS[algo], "compile + cudagraphs", flags | {"seeds": tuple(range(1, agents + 1))}, steps)


def number(count):
    return f"{count:,.1f}".removesuffix(".0").replace(",", " ")


def cell(parts, name, nbytes=None, unit=1):
    """Costs of an update + costs of a step, with bytes if there are any; empty if both are zero."""
    texts = []
    for part in ("update", "step"):
        text = number(parts[part].get(name, 0) / unit)
        if nbytes in parts[part]:
            text += f" ({number(parts[part][nbytes])} B)"
        texts.append(text)
    return " + ".join(texts) if any(name in parts[part] for part in ("update", "step")) else ""


def row(name, mode, parts):
    """A row of the table."""
    cells = [cell(parts, column) for column in ("operators", "replays", "nodes", "kernels", "fills", "matmuls")]
    cells += [cell(parts, "bytes", unit=1e6), cell(parts, "h2d", "h2d bytes"), cell(parts, "d2h", "d2h bytes")]
    return [name, mode, *cells, cell(parts, "waits")]


def table(data):
    """A Markdown table with the costs of an update + an environment step in each cell."""
    header = ("update + step", "mode", "operators", "graph replays", "operators in graphs", "fused kernels in graphs")
    header += ("fills", "matmuls and convolutions among all", "MB read and written", "copies in", "copies out", "waits")
    rows = []
    for algo, modes in data["scripts"].items():
        rows += [row(ALGORITHMS[algo].title, mode, parts) for mode, parts in modes.items()]
        earlier = data["leanrl_2024"]["scripts"].get(algo, {})  # it had no DQN and no SAC for Atari
        rows += [row("LeanRL of 2024", mode, parts) for mode, parts in earlier.items()]
    return Table("", header, rows).markdown()


def population_table(data):
    """A Markdown table with the costs of a step of N agents, including its updates."""
    names = ("script", "agents", "nodes of graphs", "MB read and written", "operators outside of graphs")
    rows = []
    for algo, by_agents in data["populations"].items():
        for agents, parts in by_agents.items():
            calls = {part: parts[part]["calls per step"] for part in ("update", "step")}
            sums = {
                name: sum(parts[part].get(name, 0) * calls[part] for part in calls)
                for name in ("nodes", "kernels", "fills", "operators", "bytes")
            }
            in_graphs = sums["nodes"] + sums["kernels"] + sums["fills"]
            cells = [ALGORITHMS[algo].title, agents, number(in_graphs), number(sums["bytes"] / 1e6)]
            rows.append([*cells, number(sums["operators"])])
    return Table("", names, rows).markdown()


def reduction_table(data):
    """A Markdown table with the longest reduction of one thread block in each script's generated code."""
    counted = {ALGORITHMS[algo].title: modes["compile + cudagraphs"] for algo, modes in data["scripts"].items()}
    for algo, by_agents in data["populations"].items():
        agents, parts = list(by_agents.items())[-1]
        counted[f"{ALGORITHMS[algo].title}, {agents} agents"] = parts
    rows = []
    for name, parts in sorted(counted.items(), key=lambda item: -item[1]["longest reduction"]["numbers"]):
        numbers, results = parts["longest reduction"].values()
        rows.append([name, cell(parts, "kernels"), number(numbers), number(results)])
    names = ("script", "fused kernels, update + step", "numbers in the longest reduction", "such reductions")
    return Table("", names, rows).markdown()


def main(args):
    data = total(read(DATA))
    print(f"{table(data)}\n\n{reduction_table(data)}\n\n{population_table(data)}")
    if args.write:
        replace(DATA, json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main(parse(Args, __doc__))
