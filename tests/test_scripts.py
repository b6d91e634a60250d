"""What all scripts promise by their text: one file each, in sync, the contract's flags, a docstring for every one."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "leanrl").glob("*.py"))
OWN = {"Args", "check_args", "train", "evaluate"}  # differ by script; what else shares a name is a copy
OWN |= {"SAC", "TD3", "PPO", "DQN"}  # plain and turbo
THIRD_PARTY = {"envpool", "gymnasium", "numpy", "tensordict", "torch", "tqdm", "tyro", "wandb"}
LINES = {"ppo_continuous_action_torchcompile": 640}  # 12 flags more than SAC, envpool and the normaliser
CONTRACT = {"exp_name", "seed", "torch_deterministic", "cuda", "track", "wandb_project_name", "wandb_entity"}
CONTRACT |= {"capture_video", "env_id", "total_timesteps", "num_envs", "run_dir", "checkpoint_interval", "resume"}
CONTRACT |= {"measure_burnin"}


def definitions(tree):
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name: node for node in tree.body if isinstance(node, kinds)}


def out_of_sync(sources):
    """Names of functions and classes, beside OWN, that stand in several sources with different syntax trees."""
    texts = {}
    for source in sources:
        for name, node in definitions(ast.parse(source)).items():
            texts.setdefault(name, set()).add(ast.dump(node))
    return {name for name, versions in texts.items() if len(versions) > 1} - OWN


def test_shared_functions_are_the_same_in_every_script():
    assert not out_of_sync([script.read_text() for script in SCRIPTS])


def test_a_drifted_copy_is_noticed():
    assert out_of_sync(["def f(x):\n    return x", "def f(x):\n    # a comment\n    return x + 1"]) == {"f"}
    assert not out_of_sync(["def f(x):\n    return x", "def f(x):\n    # a comment\n    return x"])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_needs_nothing_else_of_this_repository(script):
    modules = set()
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            modules.add(node.module.split(".")[0])
    assert modules <= THIRD_PARTY | set(sys.stdlib_module_names)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_flags(script):
    """The contract's flags, each documented, each used."""
    source = script.read_text()
    body = definitions(ast.parse(source))["Args"].body
    fields, docs = body[::2], body[1::2]
    names = [field.target.id for field in fields]
    assert len(fields) == len(docs) and all(isinstance(doc.value, ast.Constant) and doc.value.value for doc in docs)
    assert set(names) >= CONTRACT
    assert ({"compile", "cudagraphs"} <= set(names)) == script.stem.endswith("_torchcompile")
    for name in names:
        assert re.search(rf"args\.{name}\b", source), f"--{name} has no effect"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_stays_short(script):
    assert len(script.read_text().splitlines()) <= LINES.get(script.stem, 550)
