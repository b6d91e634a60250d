"""Build the C++ program policy.cpp and what it loads: a policy.pt2, compiled with AOTInductor.

    python doc/examples/cpp/build.py runs/RUN/policy.pt2 build
    build/policy build/compiled.pt2 0.1 0.2 0.3

The numbers are an observation; the program prints the actions.
"""

import subprocess
import sys
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths


def compile_policy(policy, package):
    """Compile the exported program in the file `policy`, and write the file `package`."""
    options = {"aot_inductor.check_lowerbound": False}  # lets a batch of one pass the check of its shape
    program = torch.export.load(policy)
    torch._inductor.aoti_compile_and_package(program, package_path=str(package), inductor_configs=options)


def compile_program(executable):
    """Compile policy.cpp."""
    command = ["g++", "-std=c++20", "-O2", Path(__file__).with_name("policy.cpp"), "-o", executable]
    command += [f"-I{path}" for path in include_paths()]
    for path in library_paths():
        command += [f"-L{path}", f"-Wl,-rpath,{path}"]
    command += ["-ltorch_cpu", "-lc10"]
    print(*command)
    subprocess.run(command, check=True)


def main(policy, folder):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    compile_policy(policy, folder / "compiled.pt2")
    compile_program(folder / "policy")


if __name__ == "__main__":
    main(*sys.argv[1:])
