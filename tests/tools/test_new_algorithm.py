"""A new algorithm needs two scripts, a page and an entry of common/algorithms.py; all tools then know it."""

import ast
import re
import shutil
import subprocess
import sys

import pytest
from conftest import WITH_PYTHON

from common import ROOT
from common.algorithms import ALGORITHMS


def entry_source(name):
    """The text of an entry of common/algorithms.py."""
    source = (ROOT / "common" / "algorithms.py").read_text()
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and node.args]
    return next(
        ast.get_source_segment(source, call)
        for call in calls
        if ast.unparse(call.func) == "Algorithm" and ast.unparse(call.args[0]) == f"'{name}'"
    )


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of this repository with a toy algorithm: DQN under another name."""
    folder = tmp_path_factory.mktemp("checkout") / "leanrl"
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in files.splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for kind in ("", "_torchcompile"):
        source = (ROOT / "leanrl" / f"dqn{kind}.py").read_text()
        source = re.sub(r"\bDQN\b", "Toy", source)
        (folder / "leanrl" / f"toy{kind}.py").write_text(source)
    (folder / "doc" / "toy.md").write_text("# Toy\n")
    own = entry_source("dqn")
    toy = own.replace('"dqn",', '"toy",').replace('"DQN",', '"Toy",').replace("doc/dqn.md", "doc/toy.md")
    toy = re.sub(r"curves=.*\n", "", toy)
    table = folder / "common" / "algorithms.py"
    table.write_text(table.read_text().replace(own, f"{own},\n    {toy}"))
    return folder


def test_each_script_has_an_entry_that_is_complete():
    """Its page and its curves exist, and what it is left out of has a reason, which still holds."""
    scripts = {name for entry in ALGORITHMS.values() for name in (entry.script, entry.turbo, *entry.variants)}
    assert scripts == {path.stem for path in (ROOT / "leanrl").glob("*.py")}
    for entry in ALGORITHMS.values():
        assert (ROOT / entry.page).exists(), entry.page
        for name in entry.curves:
            assert (ROOT / "doc" / "artifacts" / f"{name}.csv").exists(), name
        missing = {name for name in ("speed", "scaling", "gpu_report") if getattr(entry, name) is None}
        assert missing == entry.left_out.keys(), entry.script
        assert bool(entry.speed) == bool(entry.env_ids and entry.budget), entry.script
        assert bool(entry.peer_flags) == bool({"sb3", "sbx"} & set(entry.peers)), entry.script
    places = [entry.gpu_report.place for entry in ALGORITHMS.values() if entry.gpu_report]
    assert sorted(places) == list(range(1, len(places) + 1))


def output(checkout, *words):
    """What a command prints that is run in the checkout."""
    done = subprocess.run(words, cwd=checkout, env=WITH_PYTHON, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_shared_text_is_checked(checkout):
    output(checkout, sys.executable, "tools/copies.py")
    path = checkout / "leanrl" / "toy.py"
    right = path.read_text()
    path.write_text(right.replace("def all_finite(state):", "def all_finite(states):"))
    with pytest.raises(AssertionError, match="these differ between scripts: all_finite"):
        output(checkout, sys.executable, "tools/copies.py")
    path.write_text(right)


def test_it_is_measured(checkout):
    lines = output(checkout, "./run.sh", "--quick", "--dry-run").splitlines()
    assert {word for line in lines for word in line.split() if word.startswith("toy")} == {"toy", "toy_torchcompile"}


@pytest.mark.thorough
def test_the_report_knows_it(checkout):
    output(checkout, sys.executable, "-m", "benchmark.report")
    for page in ("README.md", "doc/speed.md"):
        assert "| Toy, CartPole-v1 |" in (checkout / page).read_text()


@pytest.mark.thorough
def test_the_tests_run_on_it(checkout):
    """Those of runs, faults, schedules, the command line, text, the emulated device, instruments, probes, counts."""
    names = output(checkout, sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", "tests")
    files = {line.split("::")[0] for line in names.splitlines() if re.search(r"\btoy(_torchcompile)?\b", line)}
    assert {path.removeprefix("tests/") for path in files} >= {
        "cuda/test_generated_code.py",
        "cuda/test_training_on_cuda.py",
        "scripts/test_cli.py",
        "scripts/test_environments.py",
        "scripts/test_faults.py",
        "scripts/test_runs.py",
        "scripts/test_schedules.py",
        "scripts/test_scripts.py",
        "tools/test_instruments.py",
        "tools/test_launches.py",
        "tools/test_probe.py",
    }
