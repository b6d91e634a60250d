"""A program for TORCH_LOGS to talk about: it is compiled again, has a graph break, or neither.

TORCH_LOGS=recompiles python doc/examples/compile/logs.py recompile
TORCH_LOGS=graph_breaks python doc/examples/compile/logs.py break
TORCH_LOGS=recompiles,graph_breaks python doc/examples/compile/logs.py neither
"""

import sys

import torch


def recompile():
    """A Python number in the arguments, other in each call."""

    @torch.compile(backend="eager")
    def update(weights, learning_rate):
        return weights - learning_rate * weights.sin()

    for learning_rate in (0.1, 0.2, 0.3):
        update(torch.ones(4), learning_rate)


def graph_break():
    """A branch on a tensor."""

    @torch.compile(backend="eager")
    def clip(gradient):
        if gradient.norm() > 1:
            gradient = gradient / gradient.norm()
        return gradient * 2

    clip(torch.ones(4))


def neither():
    """The number is a tensor, the branch a `where`."""

    @torch.compile(backend="eager", fullgraph=True)
    def update(weights, learning_rate):
        norm = weights.norm()
        return weights - learning_rate * torch.where(norm > 1, weights / norm, weights)

    for learning_rate in (0.1, 0.2, 0.3):
        update(torch.ones(4), torch.tensor(learning_rate))


PROGRAMS = {"recompile": recompile, "break": graph_break, "neither": neither}

if __name__ == "__main__":
    name = (sys.argv[1:] or [""])[0]
    if name not in PROGRAMS:
        print(f"error: {name or 'no name'}: choose from {', '.join(PROGRAMS)}", file=sys.stderr)
        raise SystemExit(2)
    PROGRAMS[name]()
