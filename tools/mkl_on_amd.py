"""Let MKL, torch's matrix library on x86, use AVX-512 on AMD processors, where matmuls can be twice as fast.

    LD_PRELOAD=$(python tools/mkl_on_amd.py) python leanrl/sac_continuous_action_torchcompile.py --compile

Two functions of MKL check whether the processor is from Intel. If it is not, MKL uses AVX2 kernels, even if the
processor has AVX-512. This program builds a shared library that overrides the two functions to return true, and prints
its path. A preloaded library takes precedence over MKL. Results are equal up to rounding. It has no effect on Intel
processors or if torch has no MKL. `./run.sh --mkl-on-amd` measures the gain on this machine.
"""

import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = """
int mkl_serv_intel_cpu_true(void) { return 1; }
int mkl_serv_intel_cpu(void) { return 1; }
"""


def library():
    """The path of the library, built if missing; exits with one line if that fails."""
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "leanrl" / "libmkl_on_amd.so"
    try:
        if not path.exists():
            build(path)
    except (OSError, subprocess.CalledProcessError) as error:
        remedy = "install a C compiler, such as g++, or name one in CXX; XDG_CACHE_HOME names another folder"
        print(f"error: {path} cannot be built ({error}): {remedy}", file=sys.stderr)
        raise SystemExit(2) from None
    return path


def build(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    compiler = os.environ.get("CXX", "g++")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        command = [compiler, "-x", "c", "-shared", "-fPIC", "-o", str(built), "-"]
        subprocess.run(command, input=SOURCE, encoding="utf-8", check=True, capture_output=True)
        os.replace(built, path)


def is_for_this_machine():
    """Whether torch uses MKL on this machine."""
    return platform.system() == "Linux" and platform.machine() == "x86_64"


def main():
    if not is_for_this_machine():
        print(f"error: {platform.system()} on {platform.machine()}: torch has MKL on x86 Linux only", file=sys.stderr)
        raise SystemExit(2)
    print(library())


if __name__ == "__main__":
    main()
