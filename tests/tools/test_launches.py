"""The counts in results/launches.json hold: launches, copies and waits of `train` in steady state.

After an intended change of these counts, run `python -m benchmark.studies.launches --write` and review the diff.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import MULTI, SIMULATORS, TURBO, entry_of, script_params, stem
from emulated_cuda import emulated_cuda
from gymnasium.spaces import Box, Discrete

from benchmark.studies import launches
from common import ROOT
from common.algorithms import ALGORITHMS
from common.scripts import learner_class

DATA = json.loads(launches.DATA.read_text())
IN_CI = ("sac_continuous_action", "td3_continuous_action", "dqn")  # graphs of the others have up to 100,000 nodes
COUNTED = [
    pytest.param(algo, mode, marks=[] if algo in IN_CI else [pytest.mark.finding])
    for algo in ALGORITHMS
    for mode in launches.modes_of(algo)
]


@pytest.mark.parametrize("algo, mode", COUNTED)
def test_counts_are_those_in_the_file(algo, mode):
    if not torch.__version__.startswith(DATA["torch"]):
        pytest.skip(f"counted with torch {DATA['torch']}")
    if "compile" in mode:
        pytest.importorskip("triton")
    counts = launches.count(algo, mode, *ALGORITHMS[algo].counted)
    assert counts == DATA["scripts"][algo][mode], "if this is meant: python -m benchmark.studies.launches --write"


@pytest.mark.parametrize("script", script_params(TURBO.values(), SIMULATORS))
def test_graphs_hold_all_operators_and_change_no_copy_and_no_wait(script):
    """Of scripts with environments on the device only compiled code is counted."""
    algo = entry_of(script).script
    assert algo in DATA["scripts"], f"count {algo}: python -m benchmark.studies.launches --write"
    eager, captured = (DATA["scripts"][algo][mode] for mode in ("eager", "cudagraphs"))
    batched = hasattr(learner_class(script), "q_values")  # eager critics run one after the other
    for part, counts in captured.items():
        launched = counts.get("operators", 0) + counts.get("nodes", 0)
        if batched:
            assert launched <= eager[part].get("operators", 0), part
        else:
            assert launched == eager[part].get("operators", 0), part
        for name in ("calls per step", "h2d", "h2d bytes", "d2h", "d2h bytes", "waits"):
            assert counts.get(name) == eager[part].get(name), (part, name)


@pytest.mark.finding
@pytest.mark.parametrize("algo", launches.POPULATIONS)
def test_counts_of_populations_are_those_in_the_file(algo):
    if not torch.__version__.startswith(DATA["torch"]):
        pytest.skip(f"counted with torch {DATA['torch']}")
    pytest.importorskip("triton")
    assert launches.count_agents(algo, 2) == DATA["populations"][algo]["2"]


@pytest.mark.parametrize("algo", launches.POPULATIONS)
def test_more_agents_launch_no_more_in_their_graphs(algo):
    counted = DATA["populations"][algo]
    for name in ("nodes", "kernels", "fills", "replays", "calls per step", "waits"):
        for part in counted["2"]:
            launched = [counted[str(agents)][part].get(name, 0) for agents in (2, 4, 8, 16)]
            assert launched == sorted(launched, reverse=True), (part, name)


MANY = 32_768  # numbers that one thread block reduces; FastTD3 and PPO for GPU environments have batches of this size
LONGEST = {algo: [modes["compile + cudagraphs"]] for algo, modes in DATA["scripts"].items()}
LONGEST |= {launches.POPULATIONS[algo]: counted.values() for algo, counted in DATA["populations"].items()}


@pytest.mark.parametrize("name", LONGEST)
def test_no_block_reduces_many_numbers(name):
    """One block has 1 of 132 multiprocessors to itself, so long reductions need `split_reductions`."""
    for counts in LONGEST[name]:
        assert counts["longest reduction"]["numbers"] < MANY, "leave out `split_reductions=False`"


def test_no_block_of_a_rank_reduces_many_numbers():
    pytest.importorskip("triton")
    from generated_cuda import compiled_for_cuda, longest_reduction

    spaces = {"single_observation_space": Box(0, 255, (4, 84, 84)), "single_action_space": Discrete(4)}
    args = MULTI.Args(compile=True)
    with emulated_cuda(), compiled_for_cuda(execute=False) as programs:
        learner = MULTI.PPO(args, SimpleNamespace(num_envs=args.num_envs, **spaces), torch.device("cuda"))
        for function in (learner.decide, learner.compute_gradient, learner.step):
            function()
    assert {name for name, _ in programs.codes} == {"decide", "compute_gradient", "step"}
    assert max(longest_reduction(code) for _, code in programs.codes)[0] < MANY


def test_reductions_of_all_scripts_are_counted():
    counted = {f"{name}_torchcompile" for name in LONGEST} | {stem(MULTI)}
    assert counted == {path.stem for path in (ROOT / "leanrl").glob("*_torchcompile.py")}
