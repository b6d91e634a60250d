"""What all scripts promise by their text: one file each, copies in sync, the contract's flags, a docstring for each."""

import ast
import re
import sys

import copies
import pytest

SCRIPTS = sorted((copies.ROOT / "leanrl").glob("*.py"))
PARTS = ["Networks", "The learner", "Training and evaluation", "The shell: "]
THIRD_PARTY = {"envpool", "gymnasium", "numpy", "tensordict", "torch", "tqdm", "tyro", "wandb"}
CONTRACT = {"exp_name", "seed", "torch_deterministic", "cuda", "track", "wandb_project_name", "wandb_entity"}
CONTRACT |= {"capture_video", "env_id", "total_timesteps", "num_envs", "run_dir", "checkpoint_interval", "resume"}
CONTRACT |= {"measure_burnin", "evaluate", "export", "threads", "matmul_precision"}

each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)


def test_copies_are_in_sync():
    assert not copies.drifted([script.read_text() for script in SCRIPTS])


BANNER = f"\n\n# ---{copies.SHELL}the same everywhere.\n# ---\n\n"


def small_script(body, shell="def main():\n    pass\n"):
    return f'"""A script."""\n\n\n{body}{BANNER}{shell}'


def test_drift_is_noticed_and_mended():
    """A function, a decorated class and the shell; what is a script's own stays."""
    function = "def f():\n    # why\n    return 1\n\n\n"
    flags = "@dataclass\nclass RunArgs:\n    a: int\n\n\n"
    one = small_script(f"{flags}{function}def train():\n    f()\n")
    own = "def train():\n    f() + f()\n"
    two = small_script(f"def f():\n    return 2\n\n\n{own}", shell="def main():\n    train()\n")
    other = "def g():\n    return 3\n"
    three = small_script(f"{flags.replace('a: int', 'b: int')}{other}", shell="")
    assert copies.drifted([one, two, three]) == ["RunArgs", "f", "the shell"]
    mended = [copies.carry(one, other) for other in (two, three)]
    assert not copies.drifted([one, *mended])
    assert mended[0] == small_script(function + own)
    assert mended[1] == small_script(flags + other)


def test_a_comment_that_drifts_is_noticed():
    texts = [small_script(f"def f():\n    # {comment}\n    return 1\n") for comment in ("one", "two")]
    assert copies.drifted(texts) == ["f"]


@each_script
def test_a_script_needs_nothing_else_of_this_repository(script):
    modules = set()
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            modules.add(node.module.split(".")[0])
    assert modules <= THIRD_PARTY | set(sys.stdlib_module_names)


@each_script
def test_the_algorithm_comes_first(script):
    learner = script.stem.split("_")[0].upper()
    marks = ["class Args(", *(f"# {part}" for part in PARTS[:2]), f"class {learner}:", f"# {PARTS[2]}", "def train("]
    marks += ["def evaluate(", f"# {PARTS[3]}", "def main("]
    places = [script.read_text().index(f"\n{mark}") for mark in marks]
    assert places == sorted(places)


@each_script
def test_flags(script):
    """The contract's flags, each documented, each used."""
    source = script.read_text()
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    groups = [base.id for base in classes["Args"].bases]
    assert ("SpeedArgs" in groups) == script.stem.endswith("_torchcompile")
    names = []
    for group in groups:
        fields, docs = classes[group].body[::2], classes[group].body[1::2]
        assert len(fields) == len(docs)
        assert all(isinstance(doc.value, ast.Constant) and doc.value.value for doc in docs)
        names += [field.target.id for field in fields]
    assert set(names) >= CONTRACT
    assert ({"compile", "cudagraphs"} <= set(names)) == script.stem.endswith("_torchcompile")
    for name in names:
        assert re.search(rf"args\.{name}\b", source), f"--{name} has no effect"
