"""A policy that inductor compiles to wrong code: a fault for doc/torch_compile.md to find.

The fault is one that inductor has for its own tests: its C++ computes relu(x) + 1. Exits with 1 if the compiled policy
does not choose the actions of the eager one.

    python doc/examples/compile/fault.py            # inductor
    python doc/examples/compile/fault.py aot_eager  # another backend
    python doc/examples/compile/fault.py bisect     # torch searches for the fault
"""

import sys

import torch
from torch import nn
from torch._inductor.compiler_bisector import CompilerBisector

torch._inductor.config.cpp.inject_relu_bug_TESTING_ONLY = "accuracy"


def check(backend="inductor"):
    """Whether the compiled policy chooses the actions of the eager one."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    actor = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2), nn.Tanh())
    compiled = torch.compile(actor, backend=backend, fullgraph=True)
    obs = torch.randn(16, 8)
    with torch.no_grad():
        difference = (compiled(obs) - actor(obs)).abs().max().item()
    print(f"largest difference of an action: {difference:.3g}")
    return difference < 1e-5


if __name__ == "__main__":
    if sys.argv[1:] == ["bisect"]:
        print(CompilerBisector.do_bisect(check))
    elif not check(*sys.argv[1:]):
        raise SystemExit(1)
