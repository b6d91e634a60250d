"""Run an example of doc/cuda_graphs.md on a CUDA device, or on an emulated one (tools/emulated_cuda.py).

    python doc/examples/cuda_graphs/run.py by_hand

With a CUDA device, `python doc/examples/cuda_graphs/by_hand.py` does the same.
"""

import runpy
import sys
from contextlib import nullcontext
from pathlib import Path

import torch

EXAMPLES = ("by_hand", "module", "frozen")
HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[2] / "tools"))
from emulated_cuda import emulated_cuda  # noqa: E402


def main(name, **options):
    """Run an example; `options` are those of the emulated device."""
    with nullcontext() if torch.cuda.is_available() else emulated_cuda(**options):
        runpy.run_path(str(HERE / f"{name}.py"))


if __name__ == "__main__":
    (name,) = sys.argv[1:] or [""]
    if name not in EXAMPLES:
        raise SystemExit(f"error: {name}: choose from {', '.join(EXAMPLES)}")
    main(name)
