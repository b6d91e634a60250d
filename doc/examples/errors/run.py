"""Run an example of doc/common_errors.md: the fixed function, then the broken one.

    python doc/examples/errors/run.py backward_twice

Without a CUDA device, examples that need one run on an emulated one (tools/emulated_cuda.py).
"""

import importlib
import os
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import torch

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[2] / "tools"))
from emulated_cuda import emulated_cuda  # noqa: E402


def names():
    """All examples."""
    return sorted(path.stem for path in HERE.glob("*.py") if path.stem != "run")


def load(name):
    sys.path.insert(0, str(HERE))  # other processes import it by its name
    return importlib.import_module(name)


@contextmanager
def surroundings(example):
    """The environment variables and the device that an example needs."""
    needs_cuda = getattr(example, "NEEDS_CUDA", False)
    device = emulated_cuda() if needs_cuda and not torch.cuda.is_available() else nullcontext()
    with device, patch.dict(os.environ, getattr(example, "ENVIRONMENT", {})):
        yield


def main(name):
    if name not in names():
        print(f"error: {name}: choose from {', '.join(names())}", file=sys.stderr)
        raise SystemExit(2)
    example = load(name)
    print(example.__doc__)
    with surroundings(example):
        print("fixed:", example.fixed())
        print("broken:", example.broken())


if __name__ == "__main__":
    main(*sys.argv[1:] or [""])
