"""doc/using_a_policy.md: a C++ program gives the actions of policy.pt2."""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import TURBO, tiny

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "doc" / "examples" / "cpp"
PAGE = ROOT / "doc" / "using_a_policy.md"
OBSERVATIONS = {"sac": [0.8, -0.6, 2.0], "ppo": [0.8, -0.6, 2.0], "dqn": [0.1, -0.2, 0.05, 1.0]}
spec = importlib.util.spec_from_file_location("build_cpp", FOLDER / "build.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)


def test_the_page_shows_lines_of_the_program():
    (shown,) = re.findall(r"^```cpp\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S)
    lines = [line.strip() for line in (FOLDER / "policy.cpp").read_text().splitlines()]
    assert all(line.strip() in lines for line in shown.splitlines())


@pytest.fixture(scope="module")
def executable(tmp_path_factory):
    path = tmp_path_factory.mktemp("cpp") / "policy"
    build.compile_program(path)
    return path


def trained_policy(algorithm, folder):
    """The policy.pt2 of a run of a second."""
    script = TURBO[algorithm]
    script.train(script.Args(run_dir=str(folder), total_timesteps=200, **tiny(script)))
    (path,) = folder.glob("*/policy.pt2")
    return path


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", OBSERVATIONS)
def test_the_program_acts_as_the_policy_does(algorithm, executable, tmp_path):
    policy = trained_policy(algorithm, tmp_path)
    package = tmp_path / "compiled.pt2"
    build.compile_policy(policy, package)
    python = torch.export.load(policy).module()

    def act(numbers):
        return subprocess.run([executable, package, *map(str, numbers)], capture_output=True, text=True)

    numbers = OBSERVATIONS[algorithm]
    actions = [float(line) for line in act(numbers).stdout.splitlines()]
    assert actions == pytest.approx(python(torch.tensor([numbers])).flatten().tolist(), abs=1e-6)
    too_few = act(numbers[:-1])
    assert too_few.returncode == 1 and "unmatched dim value at 1" in too_few.stderr
