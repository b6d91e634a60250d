"""The examples of doc/graph_breaks.md: graph breaks, recompilations and waits, and none of them in fixed versions.

After an intended change, run `python doc/examples/graph_breaks/table.py --write` and review the diff.
"""

import ast
import json
import re
import runpy
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from emulated_cuda import emulated_cuda

FOLDER = Path(__file__).parents[2] / "doc" / "examples" / "graph_breaks"
sys.path.append(str(FOLDER))
import table  # noqa: E402

DATA = json.loads(table.DATA.read_text())
SIMPLIFIED = {"broken": "sac_atari_breaks_simplified.py", "fixed": "sac_atari_fixed_simplified.py"}
FULL = {"broken": "sac_atari_breaks_full.py", "fixed": "sac_atari_fixed_full.py"}
NO_LONGER_BREAK = {"sample", "return_alpha"}  # which the study of 2023 counted
COUNTED = ("graphs", "breaks", "recompilations")

each_example = pytest.mark.parametrize("name", ["broken", "fixed"])


@pytest.fixture(autouse=True)
def as_users_have_it():
    """With Dynamo's defaults, which conftest.py changes: the page counts recompilations."""
    with torch._dynamo.config.patch(automatic_dynamic_shapes=True, recompile_limit=8):
        yield


@pytest.fixture(autouse=True)
def same_torch():
    if not torch.__version__.startswith(DATA["torch"]):
        pytest.skip(f"counted with torch {DATA['torch']}")


def counts_printed(name, capsys):
    """Run a simplified example as a program; what it prints, counts by function."""
    with table.tracing(False):  # restores what the fixed example sets
        runpy.run_path(str(FOLDER / SIMPLIFIED[name]), run_name="__main__")
    lines = re.findall(r"^(\w+): (graphs .*)$", capsys.readouterr().out, re.MULTILINE)
    return {function: {part.split()[0]: int(part.split()[1]) for part in text.split(", ")} for function, text in lines}


@each_example
def test_the_example_prints_the_counts_of_the_page(name, capsys):
    printed = counts_printed(name, capsys)
    assert list(printed) == table.FUNCTIONS
    for function, counts in printed.items():
        of_page = {what: DATA["simplified"][function][name][what] for what in COUNTED}
        assert counts == of_page, f"{function}: if this is meant, table.py --write"
        broken = counts["breaks"] + counts["recompilations"] > 0
        assert broken == (name == "broken" and function not in NO_LONGER_BREAK), function
        assert name == "broken" or counts["graphs"] == 1, function


def in_process(function, *inputs):
    """Call a function in a process of its own: Dynamo remembers where it has found a `.grad` that is None."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *inputs).result()


def test_the_flag_removes_the_break_at_either_way_to_a_gradient():
    counts = in_process(table.count_backward)
    assert counts == DATA["backward"], "if this is meant, table.py --write"
    for both in counts.values():
        assert both["off"]["breaks"] == 1
        assert both["on"]["breaks"] == 0


@pytest.mark.parametrize("clear", [False, True])
def test_traced_backward_adds_to_grad(clear):
    """Setting `.grad` to None within the graph also avoids the recompilation."""
    assert in_process(graphs_of_traced_backward, clear) == (1 if clear else 2)


def graphs_of_traced_backward(clear):
    """How many graphs are compiled; `clear` sets `.grad` to None first."""
    network, batch = torch.nn.Linear(4, 2), torch.randn(8, 4)
    wanted = torch.autograd.grad(network(batch).square().mean(), network.weight)[0]
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def update():
        if clear:
            network.weight.grad = None
            network.bias.grad = None
        network(batch).square().mean().backward()

    with table.tracing(True):
        compiled = torch.compile(update, fullgraph=True, backend=backend)
        for call in (1, 2, 3):
            compiled()
            torch.testing.assert_close(network.weight.grad, wanted if clear else call * wanted)
    return len(graphs)


def test_the_flag_loses_the_gradient_after_a_break():
    """If the weights move with the flag, PyTorch has fixed it: remove the warning from the page."""
    done = subprocess.run([sys.executable, FOLDER / "lost_gradient.py"], capture_output=True, text=True, check=True)
    assert done.stdout in table.PAGE.read_text()


@each_example
def test_waits(name):
    for function in table.FUNCTIONS:
        waits = table.count_waits(name, function)
        assert waits == DATA["simplified"][function][name]["waits"], function
        assert name == "broken" or waits == 0, function
    waiting = {function for function in table.FUNCTIONS if DATA["simplified"][function]["broken"]["waits"]}
    assert waiting >= {"validate", "item", "branch", "log", "mask"}


@pytest.mark.parametrize("function", ["validate", "item", "branch", "log", "mask"])
def test_sync_debug_mode_refuses_the_broken_form_alone(function):
    for name, example in table.examples().items():
        with emulated_cuda():
            agent, batch = example.Agent("cuda"), example.make_batch("cuda")
            torch.cuda.set_sync_debug_mode("error")
            if name == "fixed":
                getattr(example, function)(agent, batch)
            else:
                with pytest.raises(RuntimeError, match="synchronizing"):
                    getattr(example, function)(agent, batch)


def agents():
    """A broken and a fixed agent with the same networks."""
    broken, fixed = (example.Agent() for example in table.examples().values())
    for part in ("actor", "critics", "target_critics"):
        getattr(fixed, part).load_state_dict(getattr(broken, part).state_dict())
    return broken, fixed


def state(agent):
    """All parameters, one after the other."""
    modules = [parameter.flatten() for part in (agent.actor, agent.critics) for parameter in part.parameters()]
    return torch.cat([*modules, agent.log_alpha]).detach()


def test_fixed_updates_are_the_broken_ones():
    broken, fixed = agents()
    first = state(broken)
    for _ in range(20):
        batch = table.broken.make_batch()
        for function in table.broken.UPDATES:
            for agent, example in zip((broken, fixed), table.examples().values(), strict=True):
                result = getattr(example, function.__name__)(agent, batch)
                assert example is table.broken or not result.requires_grad
    moved = (state(broken) - first).norm()
    assert (state(fixed) - state(broken)).norm() < 1e-3 * moved


@pytest.mark.parametrize("function", ["branch", "log", "mask", "item", "validate", "temperature", "count"])
def test_a_fixed_habit_computes_the_same(function):
    broken, fixed = agents()
    example = table.examples()["fixed"]
    batch = example.make_batch()
    for scale in (1, 10):  # of the second batch the loss is larger than the branch's limit
        scaled = batch._replace(rewards=batch.rewards * scale)
        wanted = getattr(table.broken, function)(broken, scaled)
        torch.testing.assert_close(getattr(example, function)(fixed, scaled), wanted)


def distance(tensors):
    return sum((tensor - 1).square().sum() for tensor in tensors)


def test_fixed_adam_is_torchs():
    example = table.examples()["fixed"]
    parameters = [torch.randn(3, 2, requires_grad=True), torch.randn(2, requires_grad=True)]
    copies = deepcopy(parameters)
    fixed = example.Adam(parameters, lr=1e-2)
    wanted = torch.optim.Adam(copies, lr=1e-2, eps=1e-4)
    for _ in range(30):
        fixed.minimize(distance(parameters))
        wanted.zero_grad()
        distance(copies).backward()
        wanted.step()
    for parameter, copy in zip(parameters, copies, strict=True):
        torch.testing.assert_close(parameter, copy)


@each_example
def test_the_whole_script(name):
    """It trains; breaks, recompilations and waits are those of the page."""
    counts = table.count_script(name)
    assert counts == DATA["full"][name], "if this is meant, table.py --write"
    broken = name == "broken"
    assert (counts["breaks"] > 0) == broken
    assert (counts["recompilations"] > 0) == broken
    assert broken or counts["graphs"] == 2  # acting and the update


def test_the_fixed_script_learns_the_same():
    broken, fixed = (table.run_script(name, 10, compile=False) for name in FULL)
    untrained = table.run_script("broken", 0, compile=False)
    moved = (state(broken) - state(untrained)).norm()
    assert (state(fixed) - state(broken)).norm() < 1e-2 * moved
    assert fixed.log_alpha.item() == pytest.approx(broken.log_alpha.item(), rel=1e-4)


def test_page_has_the_figures_of_the_file():
    page = table.PAGE.read_text()
    assert table.with_figures(page, DATA) == page
    shown = set(re.findall(r"<!-- table.py writes (\w+) -->", page))
    assert shown >= {"table", "full", *table.FUNCTIONS[len(table.broken.UPDATES) :]}


@pytest.mark.parametrize("script", [*SIMPLIFIED.values(), *FULL.values(), "lost_gradient.py", "measure.py"])
def test_an_example_needs_little(script):
    """torch alone and, for whole scripts, what steps games and logs."""
    modules = set()
    for node in ast.walk(ast.parse((FOLDER / script).read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module.split(".")[0])
    allowed = {"torch", "measure"} if script not in FULL.values() else {"torch", "numpy", "envpool", "tyro"}
    assert modules <= allowed | set(sys.stdlib_module_names)
