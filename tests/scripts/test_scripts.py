"""Properties of the scripts' text: single files, shared texts, common flags, no unused code."""

import ast
import re
import sys
from pathlib import Path

import conftest
import copies
import pytest

from common.algorithms import ALGORITHMS

SCRIPTS = sorted((copies.ROOT / "leanrl").glob("*.py"))
THIRD_PARTY = {"envpool", "gymnasium", "matplotlib", "numpy", "tensordict", "torch", "tqdm", "tyro", "wandb"}
CONTRACT = {"exp_name", "cuda", "track", "wandb_project_name", "wandb_entity"}
CONTRACT |= {"capture_video", "env_id", "total_timesteps", "num_envs", "run_dir", "checkpoint_interval", "resume"}
CONTRACT |= {"threads", "matmul_precision"}
TURBO_ONLY = {"compile", "cudagraphs", "compile_mode"}
VIDEO = {"capture_video"}

each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)


def test_copies_are_in_sync():
    assert not copies.drifted({script: script.read_text() for script in SCRIPTS})


def test_both_kinds_of_run_differ_only_where_they_count_episodes():
    kinds = []
    for script in ("dqn.py", "fast_td3.py"):
        run, *_ = copies.definitions((copies.ROOT / "leanrl" / script).read_text())["Run"]
        kinds.append({node.name: ast.unparse(node) for node in run.body if isinstance(node, ast.FunctionDef)})
    usual, on_device = kinds
    assert usual.keys() == on_device.keys()
    assert {name for name in usual if usual[name] != on_device[name]} == {"__init__", "advance", "log"}
    lines = usual["__init__"].splitlines()
    counters = [line for line in lines if line.startswith(("    self.returns = ", "    self.lengths = "))]
    assert [line for line in lines if line not in counters] == on_device["__init__"].splitlines()


ONE, TWO, THREE, TWIN = (Path(f"{name}.py") for name in ("one", "two", "three", "one_torchcompile"))
ON_DEVICE = "def make_device_envs():\n    pass\n"
SINGLE, SEVERAL = Path("ppo_atari_envpool.py"), Path("ppo_atari_multigpu_torchcompile.py")
FUNCTION = "def f():\n    # why\n    return 1\n"
OTHER = "def f():\n    return 2\n"
NETWORK = "class Net(nn.Module):\n    size = 1\n"


def test_drift_is_noticed_and_fixed():
    """In functions, decorated classes and comments; what is a script's own, and what it alone has, stays."""
    source = f"@dataclass\nclass Run:\n    a: int\n\n\n{FUNCTION}\n\ndef train():\n    f()\n"
    own = "def train():\n    f() + f()\n\n\ndef g():\n    return 3\n"
    target = f"{OTHER}\n\n{own}\n\n@dataclass\nclass Run:\n    b: int\n"
    assert copies.drifted({ONE: source, TWO: target}) == ["Run", "f"]
    fixed = copies.carry(ONE, source, TWO, target)
    assert not copies.drifted({ONE: source, TWO: fixed})
    assert fixed == f"{FUNCTION}\n\n{own}\n\n@dataclass\nclass Run:\n    a: int\n"
    assert copies.drifted({ONE: FUNCTION, TWO: FUNCTION.replace("why", "how")}) == ["f"]


@pytest.mark.parametrize("base", ["nn.Module", "nn.Sequential"])
def test_networks_are_shared_by_the_scripts_of_an_algorithm_alone(base):
    network = NETWORK.replace("nn.Module", base)
    other = network.replace("1", "2")
    assert copies.drifted({ONE: network, TWIN: other}) == ["Net"]
    assert copies.drifted({SINGLE: network, SEVERAL: other}) == ["Net"]
    assert not copies.drifted({ONE: network, TWO: other})
    assert copies.carry(ONE, network, TWIN, other) == network
    assert copies.carry(ONE, network, TWO, other) == other


def test_scripts_with_environments_on_the_device_share_a_run_of_their_own():
    usual, run, other = (f"class Run:\n    a = {number}\n" for number in (1, 2, 3))
    run, other = run + ON_DEVICE, other + ON_DEVICE
    assert copies.drifted({ONE: usual, TWO: run, THREE: run}) == []
    assert copies.drifted({TWO: run, THREE: other}) == ["Run"]
    assert copies.carry(ONE, usual, TWO, run) == run
    assert copies.carry(THREE, other, TWO, run) == other


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
    """Flags, networks, learner, loop; then, under a banner, the run."""
    source = script.read_text()
    (learner,) = (node.name for node, *_ in copies.definitions(source).values() if copies.is_learner(node))
    marks = ["class Args:", f"class {learner}:", "def train(", "# The run: ", "class Run:"]
    places = [source.index(f"\n{mark}") for mark in marks]
    assert places == sorted(places)
    assert re.search(r"# (critic|clipped policy|TD) loss", source[: places[2]]), "the loss has no landmark"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_loop_is_in_the_run_that_tools_replace(name):
    """`launch` stops a run early by another `Run` in the script."""
    for script in (name, f"{name}_torchcompile"):
        source = (copies.ROOT / "leanrl" / f"{script}.py").read_text()
        assert "\n    with Run(args, folder, envs, learner) as run:\n" in source


@each_script
def test_flags(script):
    """The contract's flags, each documented on its line, each used; the sets of limits name flags."""
    source = script.read_text()
    tree = ast.parse(source)
    (args,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args"]
    lines = source.splitlines()
    assert all("  # " in lines[flag.end_lineno - 1] for flag in args.body)
    names = {flag.target.id for flag in args.body}
    turbo = script.stem.endswith("_torchcompile")
    seed = {"seeds" if "population" in script.stem else "seed"}
    left_out = VIDEO if "\ndef make_device_envs" in source else set()  # simulators on the GPU render in their own ways
    assert names >= CONTRACT - left_out | seed | (TURBO_ONLY if turbo else set())
    assert turbo or not names & TURBO_ONLY
    for name in names:
        assert re.search(rf"(args|agent)\.{name}\b", source), f"--{name} has no effect"
    assert ("torch_deterministic" in names) == ("cudnn" in source)
    limits = {"AT_LEAST_1", "AT_MOST"}
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and target.id in limits:
                limited = node.value.keys if isinstance(node.value, ast.Dict) else node.value.elts
                assert set(map(ast.literal_eval, limited)) <= names | {"seed"}, target.id  # each agent has one
                limits -= {target.id} if isinstance(node, ast.Assign) else set()
    assert not limits, "a script needs all of these sets"


def unused(source):
    """Functions, classes, methods, constants and imports that a script defines and does not name again."""
    tree = ast.parse(source)
    defined = []
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined.append(node.name)
        if isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base) for base in node.bases}
            methods = [child.name for child in node.body if isinstance(child, ast.FunctionDef)]
            defined += [name for name in methods if name not in CALLED_BY_OTHERS and not (bases & FRAMEWORK)]
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            defined += [alias.asname or alias.name.split(".")[0] for alias in node.names]
        if isinstance(node, ast.Assign):
            defined += [target.id for target in node.targets if isinstance(target, ast.Name)]
    names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    names += [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return [name for name in defined if name not in names]


CALLED_BY_OTHERS = {"__init__", "__call__", "__enter__", "__exit__", "__setattr__", "forward"}
FRAMEWORK = {
    "gym.vector.VectorEnv",
    "gym.vector.VectorWrapper",
    "torch.autograd.Function",
    "tqdm",
}  # whose methods others call


@each_script
def test_nothing_is_unused(script):
    assert not unused(script.read_text())


def test_what_is_unused_is_noticed():
    source = "import math\nimport os\nA = 1\nB = 2\n\n\ndef f():\n    return A + os.cpu_count()\n\n\n"
    source += (
        "class C:\n    def __init__(self):\n        self.m()\n\n    def m(self):\n        f()\n\n    def n(self):\n"
    )
    source += "        pass\n"
    assert unused(source) == ["math", "B", "C", "n"]


@pytest.mark.parametrize("beginning", conftest.THOROUGH + conftest.QUICK_TOO)
def test_names_in_the_lists_of_tests_are_names_of_tests(beginning):
    path, _, name = beginning.partition("::")
    source = (copies.ROOT / "tests" / path).read_text()
    assert re.search(rf"^(def|class) {name.partition('[')[0]}", source, re.M)
