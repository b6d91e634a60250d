"""A policy that inductor compiles to wrong code: a fault for doc/torch_compile.md to find.

The fault is one that inductor has for its own tests: its C++ computes relu(x) + 1. Exits with 1 if the compiled policy
does not choose the eager one's actions.

    python doc/examples/compile/fault.py            # inductor
    python doc/examples/compile/fault.py aot_eager  # another backend
"""

import sys

import torch
from torch import nn

torch._inductor.config.cpp.inject_relu_bug_TESTING_ONLY = "accuracy"

if __name__ == "__main__":
    backend = sys.argv[1] if len(sys.argv) > 1 else "inductor"
    torch.manual_seed(0)
    actor = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2), nn.Tanh())
    compiled = torch.compile(actor, backend=backend, fullgraph=True)
    obs = torch.randn(16, 8)
    with torch.no_grad():
        difference = (compiled(obs) - actor(obs)).abs().max().item()
    print(f"largest difference of an action: {difference:.3g}")
    raise SystemExit(difference > 1e-5)
