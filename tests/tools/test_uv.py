"""`uv run` needs only a script: a comment at its end lists the packages to install (PEP 723)."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from copies import ROOT
from helpers import error_of

from common.algorithms import ALGORITHMS

SCRIPTS = sorted((ROOT / "leanrl").glob("*.py"))
BLOCK = re.compile(r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$")  # PEP 723's own
UV = [sys.executable, "-m", "uv"]
UV_NAMES = {"index-url": "UV_DEFAULT_INDEX", "find-links": "UV_FIND_LINKS"}
TINY_RUN = ["--total-timesteps=300", "--learning-starts=100", "--batch-size=32", "--buffer-size=1000", "--no-cuda"]


def metadata(source):
    """What a script's only block says."""
    (block,) = BLOCK.finditer(source)
    assert block["type"] == "script"
    return tomllib.loads("".join(line[2:] for line in block["content"].splitlines(keepends=True)))


def required(path):
    """The packages of a requirements file and of those that it includes."""
    packages = []
    for line in path.read_text().splitlines():
        packages += required(path.parent / line[3:]) if line.startswith("-r ") else [line]
    return packages


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_names_the_required_packages(script):
    entry = next(e for e in ALGORITHMS.values() if script.stem in (e.script, e.turbo, *e.variants))
    kind = "atari" if entry.atari else "mujoco" if entry.env_id == "HalfCheetah-v5" else "requirements"
    packages = required(ROOT / "requirements" / f"{kind}.txt")
    if entry.on_device:  # arrays of NumPy or JAX become tensors
        packages += [package for package in required(ROOT / "requirements" / "warp.txt") if "array-api" in package]
    if not script.stem.endswith("_torchcompile"):
        packages = [package for package in packages if not package.startswith("tensordict")]
    assert metadata(script.read_text()) == {"requires-python": ">=3.11,<3.15", "dependencies": packages}


def versions(*words):
    """tools/versions.sh where there is no uv, so that it cannot install anything."""
    words = [ROOT / "tools" / "versions.sh", *words]
    return subprocess.run(words, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)


def test_other_versions_have_help():
    done = versions("--help")
    assert done.returncode == 0 and not done.stderr
    assert done.stdout.startswith("Tests the scripts with other") and done.stdout.endswith("kept in .versions/.\n")


@pytest.mark.parametrize("words", [["--typo"], ["2.13", "newest"]])
def test_other_versions_are_numbers(words):
    assert error_of(versions(*words)) == f"{words[-1]}: give versions of torch, such as 2.13, or --help"


def uv_settings():
    """Environment variables that give uv the package index and the folders of wheels that pip uses."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], stdout=subprocess.PIPE, text=True).stdout
    settings = dict(re.findall(r"\.([\w-]+)='(.+)'$", listed, re.M))
    return {UV_NAMES[key]: ",".join(value.split()) for key, value in settings.items() if key in UV_NAMES}


@pytest.fixture
def copied_alone(tmp_path):
    """A copy of a script in an empty folder; the environment that uv caches for it goes with the test.

    Its torch is that of constraints.txt, of which there may be a build for the CPU.
    """
    (torch,) = re.findall(r"^torch==.*$", (ROOT / "requirements" / "constraints.txt").read_text(), re.M)
    source = (ROOT / "leanrl" / "dqn_torchcompile.py").read_text()
    script = tmp_path / "copied_alone.py"
    script.write_text(source.replace("# ]\n# ///", f'# ]\n# [tool.uv]\n# constraint-dependencies = ["{torch}"]\n# ///'))
    yield script
    cache = subprocess.run([*UV, "cache", "dir"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    for environment in Path(cache).glob("environments-*/copied-alone-*"):
        shutil.rmtree(environment)


@pytest.mark.thorough
def test_a_script_alone_runs_with_uv(copied_alone):
    env = os.environ | uv_settings()
    resolve = [*UV, "pip", "compile", "--quiet", "--python", sys.executable, copied_alone]
    resolved = subprocess.run(resolve, env=env, capture_output=True, text=True)
    if "Failed to fetch" in resolved.stderr:
        pytest.skip(f"uv reaches no package index: {resolved.stderr}")
    assert resolved.returncode == 0, resolved.stderr
    if "nvidia-" in resolved.stdout:
        pytest.skip("uv would download torch for CUDA, gigabytes, not a build for the CPU")

    run = [*UV, "run", "--python", sys.executable, copied_alone, *TINY_RUN]
    done = subprocess.run(run, cwd=copied_alone.parent, env=env, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
    (summary,) = copied_alone.parent.glob("runs/*/summary.json")
    results = json.loads(summary.read_text())
    assert results["global_step"] == 300
    assert "mujoco" not in results["versions"], "packages of this environment, not of the script's own"
