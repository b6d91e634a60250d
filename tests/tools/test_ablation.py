"""Tricks, scaling and tips: compared versions compute the same, and tables follow from their data."""

import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import RUN, refused

from benchmark.studies import ablation, scaling, tips, tricks
from common.scripts import load
from common.tables import spread

EAGER = [(algo, trick) for algo in tricks.TRICKS for trick in ablation.tricks_of(algo, "eager")]
COMPILED_ALONE = [(a, trick) for a in tricks.TRICKS for trick in tricks.TRICKS[a] if "eager" not in trick.modes]
MACHINE = {"cpu": "processor", "cores": 2, "memory_gib": 8, "gpu": None, "packages": {"torch": "2"}}
WRONG = [  # edits that are no tricks
    ("sac_continuous_action", "next_obs, next_actions).amin(0)", "next_obs, next_actions).amax(0)"),
    ("td3_continuous_action", "target.lerp_(tensor", "target.lerp(tensor"),
    ("ppo_continuous_action", 'gae_lambda * (1 - batch["ended"])', 'gae_lambda * (1 - batch["terminated"])'),
    ("dqn", "self.args.gamma * next_q", "0.98 * next_q"),
    ("pqn", "self.args.gamma * weights)", "0.98 * weights)"),
]


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    """What each script learns in a short run."""
    known = {}

    def learned(algo):
        if algo not in known:
            path = ablation.write_copy(algo, None, tmp_path_factory.mktemp(algo))
            known[algo] = ablation.learned(path, algo, "eager")
        return known[algo]

    return learned


def names(cases):
    return [f"{algo}, {trick.name}" for algo, trick in cases]


@pytest.mark.parametrize(("algo", "trick"), EAGER, ids=names(EAGER))
def test_without_a_trick_a_script_learns_the_same(algo, trick, untouched, tmp_path):
    path = ablation.write_copy(algo, trick, tmp_path)
    assert ablation.difference(path, algo, "eager", untouched(algo)) < ablation.TOLERANCE


@pytest.mark.parametrize(("algo", "trick"), COMPILED_ALONE, ids=names(COMPILED_ALONE))
def test_edits_of_compiled_code_fit_the_script(algo, trick):
    """Whether it learns the same is what `ablation.py --verify` shows, in minutes."""
    compile(tricks.without(algo, trick), trick.name, "exec")


@pytest.mark.parametrize(("algo", "old", "new"), WRONG)
def test_another_algorithm_is_noticed(algo, old, new, untouched, tmp_path):
    path = ablation.write_copy(algo, tricks.Trick("wrong", "", "", (), f"-{old}\n+{new}"), tmp_path)
    assert ablation.difference(path, algo, "eager", untouched(algo)) > 4 * ablation.TOLERANCE


@pytest.mark.parametrize(("old", "places"), [("no such text", 0), ("import ", None)])
def test_a_text_that_is_not_there_once_is_named(old, places):
    with pytest.raises(ValueError, match=rf"dqn, name: {places or '[0-9]+'} places, not one, with this text: {old}"):
        tricks.without("dqn", tricks.Trick("name", "", "", (), f"-{old}"))


STAND_IN = """
def train(args):
    with Run(args) as run:
        while run.step < args.total_timesteps:
            time.sleep({seconds})
            run.learner.updates += 3
            run.step += 9
            run.advance(0, False)
            run.log({{}})
"""


def test_measuring(tmp_path, monkeypatch):
    """A stand-in for the script, and one for its copies that takes twice as long."""

    def write_copy(algo, trick, folder):
        path = folder / f"{trick.name if trick else None}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(RUN + STAND_IN.format(seconds=0.04 if trick else 0.02))
        return path

    monkeypatch.setattr(ablation, "write_copy", write_copy)
    monkeypatch.setitem(ablation.TRICKS, "dqn", ablation.TRICKS["dqn"][:1])
    flags = {"algos": ("dqn",), "modes": ("eager",), "seeds": (1, 2), "total_timesteps": 600}
    ablation.main(ablation.Args(**flags, run_dir=tmp_path / "runs", results=tmp_path / "results"))
    (path,) = tmp_path.glob("results/*/ablation/dqn.json")
    speeds = json.loads(path.read_text())["modes"]["eager"]["steps_per_second"]
    ratios = [with_it / without for with_it, without in zip(speeds["untouched"], speeds["numpy_acting"], strict=True)]
    assert len(ratios) == 2 and min(ratios) > 1.3
    assert f"| `numpy_function` | {spread(ratios, '{:.2f}')} |" in ablation.text("dqn", tmp_path / "results")


def write(path, data):
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(data))


def test_table_of_tricks(tmp_path):
    speeds = {"untouched": [100, 120, 110], "numpy_acting": [50, 40, 100], "one_crossing": [100, 100, 100]}
    mode = {"env_id": "Env-v0", "machine": MACHINE, "steps_per_second": speeds, "editions": {}}
    write(tmp_path / "results" / "a-machine" / "ablation" / "dqn.json", {"modes": {"eager": mode}})
    lines = ablation.text("dqn", tmp_path / "results").splitlines()
    assert any("2.00 (1.10 to 3.00)" in line for line in lines)
    assert "Env-v0, 2-core processor, 8 GiB, torch 2:" in lines
    assert any(line.endswith("| `DirectEnvs.step` | not measured | not measured |") for line in lines)


def test_table_and_plot_of_scaling(tmp_path):
    point = {"steps_per_second": [90, 110, 100], "update_seconds": [0.002, 0.001], "updates_per_step": 0.1}
    point |= {"environment_steps_per_second": 5000.0, "matmul_seconds": 0.0005, "matmul_flops": 1e7}
    modes = {"compile": True, "cudagraphs": False}
    data = {"algo": "dqn", "modes": modes, "machine": MACHINE, "num_envs": {"1": point}, "batch": {"64": point}}
    data["editions"] = {}
    path = tmp_path / "results" / "a-machine" / "scaling" / "dqn.json"
    write(path, data)
    table = scaling.table(tmp_path / "results")
    assert "| DQN, compile | 1 | 100 | 64 | 1.5 | 0.5 | 20 |" in table
    assert table.startswith("2-core processor, 8 GiB, torch 2:")
    assert "| PPO | 1, 16, 256 | not measured |" in table
    write(
        tmp_path / "results" / "b-machine" / "scaling" / "ppo_continuous_action.json",
        data | {"algo": "ppo_continuous_action"},
    )
    first, second = re.split(r"\n\n(?=2-core)", scaling.table(tmp_path / "results"))
    assert "| DQN, compile |" in first and "| PPO |" not in first and "| SAC | 1, 16, 256 | not measured |" in first
    assert "| PPO, compile |" in second and "| DQN |" not in second
    scaling.draw_all(tmp_path / "results")
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_table_of_tips(tmp_path):
    data = {"seconds": {"before": [3.0, 2.0, 4.0], "after": [1.0, 1.0, 1.0]}}
    write(tmp_path / "results" / "a-machine" / "tips" / "in_place.json", data)
    table = tips.table(tmp_path / "results")
    assert "3.00 (2.00 to 4.00)" in table
    assert table.count("not measured") == len(tips.TIPS) - 1


@pytest.mark.parametrize("name", tips.TIPS)
def test_both_ways_of_a_tip_do_the_same(name):
    before, after = tips.TIPS[name]()
    torch.testing.assert_close(before(), after(), rtol=1e-4, atol=1e-6)


def test_a_tip_is_timed_and_stored(tmp_path, capsys):
    tips.main(tips.Args(tips=("in_place", "no_item"), rounds=2, seconds=0.01, results=tmp_path))
    (path,) = tmp_path.glob("*/tips/*.json")
    data = json.loads(path.read_text())
    assert path.stem == "in_place" and len(data["seconds"]["before"]) == len(data["seconds"]["after"]) == 2
    assert list(data["editions"]) == ["tips"] and "no_item: not measured" in capsys.readouterr().out


def test_scaling_repeats_why_a_run_has_ended(capsys):
    def train(args):
        print("error: --compile True: install g++", file=sys.stderr)
        raise SystemExit(2)

    script = SimpleNamespace(Args=SimpleNamespace, Run=object, train=train)
    assert refused(capsys, scaling.train_until_enough, script, {}, on_start=None) == "--compile True: install g++"


def test_a_point_of_scaling_counts_what_an_update_computes():
    """DQN's 4-120-84-2 network: two forward passes; gradients of the parameters, and of all inputs but the first."""
    point = scaling.measure("dqn", {"batch_size": 32, "num_envs": 2}, {"compile": False}, seconds=0.1)
    layers = (4 * 120, 120 * 84, 84 * 2)
    assert point["matmul_flops"] == 2 * 32 * (3 * sum(layers) + sum(layers[1:]))
    again = scaling.matmuls_alone(load("dqn_torchcompile"), point["flags"], period=2)
    assert again["matmul_flops"] == point["matmul_flops"]
    assert point["updates_per_step"] == pytest.approx(0.1, rel=0.1)
    assert len(point["steps_per_second"]) == len(point["update_seconds"]) == scaling.WINDOWS
    assert min(point["matmul_seconds"], point["environment_steps_per_second"]) > 0


@pytest.mark.parametrize("program", [ablation.main, scaling.main])
def test_bad_input(program, capsys):
    args = sys.modules[program.__module__].Args(algos=("a2c",))
    assert refused(capsys, program, args).startswith("--algos a2c: choose from sac_")
