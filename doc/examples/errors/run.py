"""Run an example of doc/common_errors.md: what is broken, then what is fixed.

    python doc/examples/errors/run.py backward_twice

Where there is no CUDA device, an emulated one (tests/cuda/emulated_cuda.py) runs what needs one.
"""

import importlib
import sys
from contextlib import nullcontext
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[2] / "tests" / "cuda"))
from emulated_cuda import emulated_cuda  # noqa: E402


def names():
    """All examples."""
    return sorted(path.stem for path in HERE.glob("*.py") if path.stem != "run")


def load(name):
    sys.path.insert(0, str(HERE))  # other processes import it by its name
    return importlib.import_module(name)


def device_for(example):
    """The context in which an example runs."""
    needs_cuda = getattr(example, "NEEDS_CUDA", False)
    return emulated_cuda() if needs_cuda and not torch.cuda.is_available() else nullcontext()


def main(name):
    if name not in names():
        print(f"error: {name}: choose from {', '.join(names())}", file=sys.stderr)
        raise SystemExit(2)
    example = load(name)
    print(example.__doc__)
    with device_for(example):
        print("fixed:", example.fixed())
        print("broken:", example.broken())


if __name__ == "__main__":
    main(*sys.argv[1:] or [""])
