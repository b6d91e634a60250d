"""What a recurrent network does to torch.compile: a loop over time is unrolled into one graph, of as many steps.

    python doc/examples/compile/recurrent.py --lengths 1 8 32

prints, for sequences of these lengths, how many operations the graph has and how long the first call takes: of a loop
inside of what is compiled, and of a compiled cell in a loop outside.
"""

import time
from dataclasses import dataclass

import torch
import tyro
from torch import nn

BATCH, FEATURES = 64, 128


@dataclass
class Args:
    lengths: tuple[int, ...] = (1, 8, 32)
    """steps of the sequences"""


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
    return torch.randn(length, BATCH, FEATURES), torch.zeros(BATCH, FEATURES), torch.zeros(length, BATCH)


@torch.no_grad()
def loop_inside(length):
    """Operations in the graph, and seconds of the first call, of the whole loop compiled."""
    torch._dynamo.reset()
    counts = []
    network = torch.compile(Recurrent(), fullgraph=True, dynamic=False, backend=counting(counts))
    begin = time.perf_counter()
    network(*inputs(length))
    return sum(counts), time.perf_counter() - begin


@torch.no_grad()
def loop_outside(length):
    """The same of the step alone compiled, and called from a loop in Python."""
    torch._dynamo.reset()
    counts = []
    network = Recurrent()
    network.step = torch.compile(network.step, fullgraph=True, dynamic=False, backend=counting(counts))
    begin = time.perf_counter()
    network(*inputs(length))
    return sum(counts), time.perf_counter() - begin


def main(args):
    with torch._inductor.config.patch(force_disable_caches=True):
        loop_outside(1)  # what only the first compilation of a process has to do
        for length in args.lengths:
            for name, measure in (("inside", loop_inside), ("outside", loop_outside)):
                operations, seconds = measure(length)
                print(f"{length} steps, loop {name}: {operations} operations, first call {seconds:.1f} s")


if __name__ == "__main__":
    main(tyro.cli(Args))
