"""What a recurrent network does to torch.compile: a loop over time is unrolled into one graph, of as many steps.

    python benchmark/recurrent.py
    python benchmark/report.py      # put the results into doc/torch_compile.md

counts, for sequences of some lengths, the operations of the graph, and times the first call: of a loop inside of what
is compiled, and of a compiled cell in a loop outside.
"""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import tyro
from machine import machine, slug, store, where
from tables import Table
from timing import DEVICE, seconds_per_call
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
BATCH, FEATURES = 64, 128
HEADER = ("steps", "loop inside: operations", "first call, s", "loop outside: operations", "first call, s")


@dataclass
class Args:
    lengths: tuple[int, ...] = (1, 8, 32)
    """steps of the sequences"""
    results: Path = ROOT / "results"
    """folder that receives <machine>/recurrent.json"""


class Recurrent(nn.Module):
    """A GRU cell that forgets where an episode has ended, as recurrent PPO needs it."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(FEATURES, FEATURES)

    def step(self, x, hidden, ended):
        """One step for x and hidden, (batch, features); `ended`, (batch,), are the episodes over before it."""
        return self.cell(x, hidden * (1 - ended)[:, None])

    def forward(self, inputs, hidden, ended):
        """The hidden states, (steps, batch, features), of inputs, (steps, batch, features)."""
        outputs = []
        for x, over in zip(inputs, ended, strict=True):
            hidden = self.step(x, hidden, over)
            outputs.append(hidden)
        return torch.stack(outputs)


def counting(counts):
    """A backend for torch.compile that adds the number of operations of each graph to a list, and compiles it."""

    def backend(graph, example_inputs):
        counts.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return torch._inductor.compile(graph, example_inputs)

    return backend


def inputs(length):
    shapes = (length, BATCH, FEATURES), (BATCH, FEATURES), (length, BATCH)
    return [torch.zeros(shape, device=DEVICE) for shape in shapes]


def first_call(network, length):
    """Its seconds."""
    return seconds_per_call(partial(network, *inputs(length)), 1)


@torch.no_grad()
def loop_inside(length):
    """Operations in the graph, and seconds of the first call, of the whole loop compiled."""
    torch._dynamo.reset()
    counts = []
    network = torch.compile(Recurrent().to(DEVICE), fullgraph=True, dynamic=False, backend=counting(counts))
    seconds = first_call(network, length)
    return sum(counts), seconds


@torch.no_grad()
def loop_outside(length):
    """The same of the step alone compiled, and called from a loop in Python."""
    torch._dynamo.reset()
    counts = []
    network = Recurrent().to(DEVICE)
    network.step = torch.compile(network.step, fullgraph=True, dynamic=False, backend=counting(counts))
    seconds = first_call(network, length)
    return sum(counts), seconds


def table(results):
    """A Markdown table for each machine that has been measured."""
    parts = []
    for path in sorted(results.glob("*/recurrent.json")):
        data = json.loads(path.read_text())
        rows = []
        for length, (inside, outside) in data["lengths"].items():
            cells = [f"{inside[0]}", f"{inside[1]:.1f}", f"{outside[0]}", f"{outside[1]:.1f}"]
            rows.append([length, *cells])
        parts.append(Table(f"{where(data['machine'])}:", HEADER, rows).markdown())
    return "\n\n".join(parts) or Table("", HEADER, [["all", *["not measured"] * 4]]).markdown()


def main(args):
    measured = {}
    with torch._inductor.config.patch(force_disable_caches=True):
        loop_outside(1)  # what only the first compilation of a process has to do
        for length in args.lengths:
            measured[length] = [loop_inside(length), loop_outside(length)]
    this = machine()
    store(args.results / slug(this) / "recurrent.json", {"machine": this, "lengths": measured})
    print(table(args.results))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
