"""Agents of a population are runs of the single script: the same numbers, and none sees another."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import TURBO, leaves, load_copy, scalars, wait_for
from copies import ROOT
from emulated_cuda import emulated_cuda

from leanrl import sac_population_torchcompile

SEEDS = (1, 5, 9)
SAC = SimpleNamespace(
    script=sac_population_torchcompile,
    single=TURBO["sac"],
    flags={"env_id": "Pendulum-v1", "learning_starts": 360, "buffer_size": 300, "batch_size": 32},
    fifty_updates={"learning_starts": 310},
    obs_dim=3,
    lists={
        "policy_lr": (3e-4, 1e-3, 1e-4),
        "q_lr": (1e-3, 3e-3, 2e-3),
        "gamma": (0.99, 0.95, 0.9),
        "tau": (0.005, 0.01, 1.0),
        "alpha": (0.2, 0.1, 0.3),
    },
    tags=("losses/qf_loss", "losses/alpha"),
    rates=("policy_lr", "q_lr"),
    frozen_at=400,
)


def train(script, folder, flags):
    """The folder of a run, which trains in `folder`."""
    common = {"total_timesteps": 420, "num_envs": 2, "threads": 1, "run_dir": str(folder)}
    script.train(script.Args(**common | SAC.flags | flags))
    (run,) = folder.iterdir()
    return run


def train_population(folder, agents=(0, 1, 2), script=None, **flags):
    lists = {"seeds": SEEDS} | SAC.lists
    lists = {name: tuple(values[i] for i in agents) for name, values in lists.items()}
    return train(script or SAC.script, folder, lists | flags)


def train_single(folder, i, **flags):
    own = {"seed": SEEDS[i]} | {name: values[i] for name, values in SAC.lists.items()}
    return train(SAC.single, folder, own | flags)


@pytest.fixture(scope="module")
def single_checkpoint(tmp_path_factory):
    """A function: the checkpoint of the single run of an agent."""
    runs = {}

    def of(i):
        if i not in runs:
            runs[i] = checkpoint(train_single(tmp_path_factory.mktemp("single"), i))
        return runs[i]

    return of


def checkpoint(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def assert_same_numbers(got, wanted, tolerance=0.0):
    """All that two checkpoints have: to the last bit, or tensors to `tolerance` of their norm."""
    got, wanted = (dict(leaves(state["learner"])) | {"returns": state["returns"]} for state in (got, wanted))
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        if not torch.is_tensor(value) or not value.is_floating_point():
            same = torch.equal(got[name], value) if torch.is_tensor(value) else got[name] == value
            assert same or tolerance, name
        elif tolerance:
            assert got[name].shape == value.shape
            assert (got[name] - value).norm() <= tolerance * value.norm().clamp(min=1e-2), name
        else:
            assert torch.equal(got[name], value), name


def steps_of_adam(folder):
    """How many steps each optimizer of an agent has made, by name."""
    optimizers = checkpoint(folder)["learner"]["optimizers"]
    return {name: round(math.log(own["decay"].flatten()[0], 0.9)) for name, own in optimizers.items()}


def initial_networks(script, flags):
    """The learner before its first step, and its networks' parameters by name, of each agent."""
    found = []

    def remember(run):
        numbers = [()] if script is SAC.single else [(i,) for i in range(len(run.args.seeds))]
        for number in numbers:
            networks = dict(leaves(run.learner.tensors(*number)["networks"]))
            found.append({name: value.clone() for name, value in networks.items()})

    script.train(script.Args(**SAC.flags | {"num_envs": 2, "threads": 1, "total_timesteps": 2} | flags), remember)
    return found


def test_agents_begin_with_the_weights_of_single_runs(tmp_path):
    agents = initial_networks(SAC.script, {"seeds": SEEDS, "run_dir": str(tmp_path)})
    for seed, agent in zip(SEEDS, agents, strict=True):
        (single,) = initial_networks(SAC.single, {"seed": seed, "run_dir": str(tmp_path)})
        assert agent.keys() == single.keys()
        assert all(torch.equal(agent[name], value) for name, value in single.items())
    assert not any(torch.equal(agents[0][name], agents[1][name]) for name in agents[0] if "0.weight" in name)


def test_agents_are_single_runs_to_the_last_bit(tmp_path):
    """Whole runs of 50 updates and more, with every flag that is a list: checkpoints, logs, summaries and policies."""
    args = vars(SAC.script.Args())
    assert {name for name, value in args.items() if isinstance(value, tuple)} == {"seeds", *SAC.lists}
    assert not any(isinstance(value, float) for value in args.values())
    folder = train_population(tmp_path / "all", **SAC.fifty_updates)
    for i in range(3):
        single, agent = train_single(tmp_path / str(i), i, **SAC.fifty_updates), folder / f"agent_{i}"
        assert min(steps_of_adam(agent).values()) >= 50
        assert_same_numbers(checkpoint(agent), checkpoint(single))
        for tag in ("charts/episodic_return", "charts/episodic_length", *SAC.tags):
            assert scalars(agent, tag) == scalars(single, tag)
        assert {"config.json", "checkpoint.pt", "policy.pt2"} <= {path.name for path in agent.iterdir()}
        one, other = (json.loads((path / "summary.json").read_text()) for path in (agent, single))
        assert one.keys() >= other.keys()
        assert one["episodic_return"] == other["episodic_return"] and one["seed"] == SEEDS[i]
        obs = torch.randn(5, SAC.obs_dim)
        one, other = (torch.export.load(path / "policy.pt2").module() for path in (agent, single))
        assert torch.equal(one(obs), other(obs))


def test_without_autotune_alphas_are_the_agents_own(tmp_path):
    folder = train_population(tmp_path / "all", autotune=False)
    assert_same_numbers(checkpoint(folder / "agent_2"), checkpoint(train_single(tmp_path / "2", 2, autotune=False)))


@pytest.mark.thorough
@pytest.mark.parametrize(("agents", "tolerance"), [((1,), 0.0), ((0, 2), 1e-4)])
def test_compiled_agents_are_single_runs(agents, tolerance, tmp_path):
    """To the last bit if there is one, else up to rounding."""
    folder = train_population(tmp_path / "all", agents, compile=True)
    for number, i in enumerate(agents):
        torch._dynamo.reset()  # as in a process of its own
        single = train_single(tmp_path / str(i), i, compile=True)
        assert_same_numbers(checkpoint(folder / f"agent_{number}"), checkpoint(single), tolerance)


def test_populations_and_single_runs_resume(tmp_path):
    """A population continues as its agents do alone, by the single script, which finds what a single run leaves."""
    folder = train_population(tmp_path / "all")
    longer = {"total_timesteps": 520}
    wanted = [train_single(tmp_path / f"{i}", i, resume=str(folder / f"agent_{i}"), **longer) for i in range(3)]
    alone = train_single(tmp_path / "alone", 1)
    assert_same_numbers(
        checkpoint(train_single(tmp_path / "on", 1, resume=str(alone), **longer)), checkpoint(wanted[1])
    )
    saved = SAC.script.load_checkpoint(SAC.script.Args(resume=str(folder)))
    assert saved["args"]["seeds"] == SEEDS
    again = train_population(tmp_path / "again", resume=str(folder), **longer)
    for i in range(3):
        assert_same_numbers(checkpoint(again / f"agent_{i}"), checkpoint(wanted[i]))


def diverged(folder, **flags):
    """A population whose second agent has diverged."""
    with pytest.raises(SystemExit, match="1 of 3 agents are frozen: agent_1"):
        rates = dict.fromkeys(SAC.rates, (3e-4, 1e12, 1e-4))
        train_population(folder, **{"total_timesteps": 500} | rates | flags)
    (run,) = folder.iterdir()
    return run


def strict(path):
    """What a JSON file has; an error if it has a NaN."""
    return json.loads(path.read_text(), parse_constant=pytest.fail)


def garbage(tensor):
    return tensor.fill_(-1e9) if tensor.is_floating_point() else tensor


def test_a_population_with_a_frozen_agent_resumes(tmp_path, capsys):
    """The frozen one stays so, whatever its memory held before, and the others continue as they do alone."""
    folder = diverged(tmp_path / "all")
    population = strict(folder / "population.json")
    assert population["agents"]["agent_1"]["global_step"] == SAC.frozen_at
    assert population["agents"]["agent_0"]["global_step"] == population["global_step"] > SAC.frozen_at
    empty, torch.empty = torch.empty, lambda *size, **kwargs: garbage(empty(*size, **kwargs))
    try:
        again = diverged(tmp_path / "again", resume=str(folder), total_timesteps=600)
    finally:
        torch.empty = empty
    assert "agent_1 is frozen: step " in capsys.readouterr().err
    assert not (again / "agent_1" / "checkpoint.pt").exists()
    saved = checkpoint(folder / "agent_2")["args"]
    assert saved["run_dir"] == str(tmp_path / "all")
    flags = {name: saved[name] for name in SAC.rates}
    alone = train_single(tmp_path / "alone", 2, resume=str(folder / "agent_2"), total_timesteps=600, **flags)
    assert_same_numbers(checkpoint(again / "agent_2"), checkpoint(alone))


def test_a_kill_while_checkpoints_are_replaced_freezes_nobody(tmp_path, capsys):
    early = train_population(tmp_path / "early", total_timesteps=300)
    late = train_population(tmp_path / "late")
    wanted = train_population(tmp_path / "wanted", resume=str(late), total_timesteps=520)
    (late / "agent_1" / "checkpoint.pt").rename(late / "agent_1" / "checkpoint.next")
    (early / "agent_1" / "checkpoint.pt").rename(late / "agent_1" / "checkpoint.pt")
    (late / "agent_2" / "checkpoint.pt").rename(late / "agent_2" / "checkpoint.next")  # its first one
    again = train_population(tmp_path / "again", resume=str(late), total_timesteps=520)
    assert "frozen" not in capsys.readouterr().err
    for i in range(3):
        assert_same_numbers(checkpoint(again / f"agent_{i}"), checkpoint(wanted / f"agent_{i}"))


def test_a_population_leaves_its_summary_and_a_plot(tmp_path):
    """Of all agents, which have ended 20 episodes and more."""
    pytest.importorskip("matplotlib")
    flags = {"num_envs": 22, "total_timesteps": 22 * 210, "learning_starts": 10**4}
    folder = train_population(tmp_path, **flags)
    assert (folder / "returns.png").read_bytes().startswith(b"\x89PNG")
    population = strict(folder / "population.json")
    summaries = {f"agent_{i}": strict(folder / f"agent_{i}" / "summary.json") for i in range(3)}
    assert population["agents"].keys() == summaries.keys()
    assert all(population["agents"][name].items() <= summary.items() for name, summary in summaries.items())
    returns = [summary["episodic_return"] for summary in summaries.values()]
    assert population["episodic_return"] == np.mean(returns)
    assert population["episodic_return_std"] == np.std(returns, ddof=1)
    assert tuple(population["seeds"]) == SEEDS and population["global_step"] == 22 * 210


def drawn(monkeypatch, tmp_path, *runs):
    """The lines that draw_returns draws, by label, for runs (curve, failed)."""
    figure = pytest.importorskip("matplotlib.figure")
    lines = {}

    class Figure(figure.Figure):
        def savefig(self, *args, **kwargs):
            lines.update({line.get_label(): line.get_xydata() for line in self.axes[0].get_lines()})
            super().savefig(*args, **kwargs)

    monkeypatch.setattr(figure, "Figure", Figure)
    runs = [
        SimpleNamespace(curve=curve, failed=failed, args=SimpleNamespace(seed=i))
        for i, (curve, failed) in enumerate(runs)
    ]
    sac_population_torchcompile.draw_returns(tmp_path / "returns.png", runs, "a title")
    return lines


def test_returns_are_drawn_with_the_mean_of_agents_that_are_not_frozen(monkeypatch, tmp_path, capsys):
    one, two, frozen = (
        [(step, value) for step in range(10, end, 10)] for value, end in ((1, 500), (3, 400), (99, 260))
    )
    lines = drawn(monkeypatch, tmp_path, (one, None), (two, None), (frozen, "NaN"))
    assert lines.keys() == {"seed 0", "seed 1", "seed 2", "mean"}
    assert np.allclose(lines["mean"][:, 1], 2) and lines["mean"][-1, 0] == 390
    assert "mean" not in drawn(monkeypatch, tmp_path, (one, None), (two[:19], None))
    assert not capsys.readouterr().err
    assert not drawn(monkeypatch, tmp_path, (one[:19], None))
    assert capsys.readouterr().err == "note: no returns.png: no agent has ended 20 episodes\n"


def test_a_frozen_agents_episode_that_ends_first_is_no_return_of_the_population(tmp_path, recwarn):
    """Of the only one that has ended: there is no mean of nothing, and no NaN in JSON."""

    def freeze(population):
        population.runs[1].freeze(0, "by hand")
        step = population.envs.step
        population.envs.step = lambda actions: (*step(actions)[:4], np.arange(6) == 2)

    args = SAC.script.Args(**SAC.flags, seeds=SEEDS, num_envs=2, total_timesteps=8, threads=1, run_dir=str(tmp_path))
    with pytest.raises(SystemExit, match="1 of 3 agents are frozen: agent_1"):
        SAC.script.train(args, freeze)
    (folder,) = tmp_path.iterdir()
    assert strict(folder / "population.json")["episodic_return"] is None
    assert not [warning for warning in recwarn if "empty" in str(warning.message)]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"num_envs": 10**9}, r"--num-envs 1000000000: 3 agents do not fit into \d+ GB: give at most \d+"),
        ({"buffer_size": 10**11}, r"--buffer-size 100000000000: 3 agents do not fit into \d+ GB: give at most \d+"),
        (
            {"seeds": tuple(range(10**4)), "buffer_size": 10**7},
            r"--buffer-size 10000000: 10000 agents do not fit into \d+ GB: train at most \d+, or give at most \d+",
        ),
    ],
)
def test_agents_that_do_not_fit_into_memory_are_refused(flags, message, capsys):
    args = SAC.script.Args(**{"seeds": SEEDS} | flags)
    name, each = ("num_envs", 20_000) if "num_envs" in flags else ("buffer_size", 36)
    with pytest.raises(SystemExit) as end:
        SAC.script.require_memory_of_agents(args, len(args.seeds), name, each)
    assert end.value.code == 2
    assert re.fullmatch(f"error: {message}\n", capsys.readouterr().err)


def test_an_agent_that_diverges_is_frozen_and_the_others_continue(tmp_path, capsys, script=None):
    lrs = (3e-4, 1e12, 1e-4)
    with pytest.raises(SystemExit, match="1 of 3 agents are frozen: agent_1"):
        rates = dict.fromkeys(SAC.rates, lrs)
        train_population(tmp_path / "all", script=script, total_timesteps=500, **rates)
    (folder,) = (tmp_path / "all").iterdir()
    assert f"note: agent_1 is frozen: step {SAC.frozen_at}: " in capsys.readouterr().err
    assert f"step {SAC.frozen_at}" in json.loads((folder / "agent_1" / "summary.json").read_text())["failed"]
    assert not (folder / "agent_1" / "checkpoint.pt").exists()
    for i in (0, 2):
        single = train_single(tmp_path / str(i), i, total_timesteps=500, **dict.fromkeys(SAC.rates, lrs[i]))
        assert_same_numbers(checkpoint(folder / f"agent_{i}"), checkpoint(single))


BUGS = {
    "agents mixed by a reshape": (
        "obs.numpy()[:] = act_on.reshape(obs.shape)",
        "obs.numpy()[:] = act_on.reshape(obs.shape[1], obs.shape[0], -1).swapaxes(0, 1)",
    ),
    "one generator for all": (
        "self.generators.append(Generators(device))",
        "self.generators.append(self.generators[0] if self.generators else Generators(device))",
    ),
    "the first agent's learning rate for all": (
        "torch.tensor(lr, dtype",
        "torch.tensor([lr[0]] * len(lr), dtype",
    ),
    "the first agent's discount for all": (
        "[[agent.gamma] for agent in agents]",
        "[[agents[0].gamma] for _ in agents]",
    ),
    "the first agent's batches for all": ("self.rows[self.agent, place]", "self.rows[0 * self.agent, place]"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_noticed(bug, tmp_path, single_checkpoint):
    folder = train_population(tmp_path / "all", script=planted(*BUGS[bug], tmp_path))
    with pytest.raises(AssertionError):
        for i in range(3):
            assert_same_numbers(checkpoint(folder / f"agent_{i}"), single_checkpoint(i), 1e-4)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (
            "torch.autograd.grad(qf_loss.sum(), weights)",
            "torch.autograd.grad(qf_loss.sum() + 0 * qf_loss.prod(), weights)",
        ),
        (
            "return np.where(np.isnan(actions), (self.low + self.high) / 2, actions)",
            "return np.full_like(actions, actions.mean())",
        ),
    ],
    ids=["loss", "actions"],
)
def test_a_nan_that_spreads_is_noticed(right, wrong, tmp_path, capsys):
    script = planted(right, wrong, tmp_path)
    with pytest.raises(AssertionError):
        test_an_agent_that_diverges_is_frozen_and_the_others_continue(tmp_path, capsys, script)


def planted(right, wrong, folder):
    """The script with a bug."""
    source = Path(SAC.script.__file__).read_text()
    assert source.count(right) == 1
    return load_copy("planted", source.replace(right, wrong), folder)


def test_environments_see_no_nan(tmp_path):
    """The action of a diverged policy is the middle of the action space."""
    script = SAC.script
    args = script.Args(**SAC.flags, num_envs=2, seeds=(1, 2))
    envs = script.make_envs(script.replace(args, num_envs=4), tmp_path)
    learner = script.SACPopulation(args, script.agents_of(args), envs, torch.device("cpu"))
    learner.host_actions[1] = float("nan")
    learner.host_actions[0] = 1.5
    assert np.array_equal(learner.next_actions(), [[1.5], [1.5], [0], [0]])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"policy_lr": (1e-3, 1e-4)}, "--policy-lr 0.001 0.0001: give one value, or 3, as many as there are agents"),
        ({"seeds": (1, -2, 3)}, "--seeds -2: give a number from 0"),
        ({"gamma": (0.9, 0.9, 1.9)}, "--gamma 1.9: give a number from 0 to 1"),
        ({"tau": ()}, "--tau : give one value, or 3, as many as there are agents"),
        ({"resume": "/nowhere"}, "--resume /nowhere: give the folder of a population that has saved checkpoints"),
    ],
)
def test_bad_lists_are_refused(flags, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        train_population(tmp_path, **flags)
    assert end.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("cudagraphs", [False, True], ids=["eager", "cudagraphs"])
def test_a_gpu_may_take_its_time(cudagraphs, tmp_path):
    """On the emulated CUDA device: the same bits whether it runs at once or late, and those of single runs."""
    short = {"total_timesteps": 384, "cudagraphs": cudagraphs}
    folders = {}
    for late in (False, True):
        with emulated_cuda(late=late):
            folders[late] = train_population(tmp_path / f"{late}", **short)
            single = train_single(tmp_path / f"single {late}", 1, **short)
        tolerance = 1e-4 if cudagraphs else 0.0  # with graphs all agents' matmuls are batched
        assert_same_numbers(checkpoint(folders[late] / "agent_1"), checkpoint(single), tolerance)
    for i in range(3):
        assert_same_numbers(*(checkpoint(folders[late] / f"agent_{i}") for late in (False, True)))


def test_one_agent_with_cuda_graphs_is_the_single_run_to_the_last_bit(tmp_path):
    """Where several agents' matmuls are batched, and round differently, one agent's are not. On the emulated device."""
    with emulated_cuda():
        folder = train_population(tmp_path / "all", (1,), cudagraphs=True)
        single = train_single(tmp_path / "single", 1, cudagraphs=True)
    assert json.loads((folder / "population.json").read_text())["cudagraphs"]
    assert_same_numbers(checkpoint(folder / "agent_0"), checkpoint(single))


@pytest.mark.thorough
def test_an_interrupted_population_leaves_agents_that_can_be_tracked_played_and_resumed(tmp_path):
    """As a process: Ctrl-C, a run on Weights & Biases for all, and an evaluation of one."""
    script = ROOT / "leanrl" / "sac_population_torchcompile.py"
    words = [sys.executable, script, "--seeds", "1", "2", "--threads", "1", f"--run-dir={tmp_path}"]
    small = ["--env-id=Pendulum-v1", "--learning-starts=200", "--buffer-size=1000"]
    settings = {"env": os.environ | {"WANDB_MODE": "offline"}, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    process = subprocess.Popen([*words, *small, "--track", "--checkpoint-interval=300"], **settings)
    wait_for(lambda: len(list(tmp_path.glob("*/agent_*/checkpoint.pt"))) == 2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT and "Traceback" not in errors, errors
    (folder,) = tmp_path.iterdir()
    assert list(folder.glob("wandb/offline-run-*"))
    agents = [folder / f"agent_{i}" for i in range(2)]
    steps = {json.loads((agent / "summary.json").read_text())["global_step"] for agent in agents}
    steps |= {checkpoint(agent)["global_step"] for agent in agents}
    assert len(steps) == 1
    evaluation = [sys.executable, "-m", "instruments", "evaluate", agents[1], "--episodes", "2"]
    done = subprocess.run(evaluation, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.startswith("2 episodes: mean return "), done.stderr
    (step,) = steps
    for resumed in (
        [*words, f"--resume={folder}"],
        [*words[:1], ROOT / "leanrl" / "sac_continuous_action_torchcompile.py", f"--resume={agents[1]}"],
    ):
        done = subprocess.run([*resumed, f"--total-timesteps={step + 50}"], **settings)
        assert done.returncode == 0, done.stderr
