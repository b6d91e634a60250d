"""Agents of a population equal runs of the single-agent script: the same numbers, and no effect on each other."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from functools import cache
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from _pytest.outcomes import Failed
from conftest import POPULATION, TURBO, assert_same_state, leaves, scalars, wait_for
from copies import ROOT
from emulated_cuda import emulated_cuda
from formulas import assert_noticed, make_learner

SINGLE = TURBO["sac"]
SEEDS = (1, 5, 9)
FLAGS = {"env_id": "Pendulum-v1", "learning_starts": 360, "buffer_size": 300, "batch_size": 32}
FLAGS |= {"total_timesteps": 420, "num_envs": 2, "threads": 1}
LISTS = {
    "policy_lr": (3e-4, 1e-3, 1e-4),
    "q_lr": (1e-3, 3e-3, 2e-3),
    "gamma": (0.99, 0.95, 0.9),
    "tau": (0.005, 0.01, 1.0),
    "alpha": (0.2, 0.1, 0.3),
}
RATES = ("policy_lr", "q_lr")
DIVERGING = (3e-4, 1e12, 1e-4)  # learning rates
FIFTY_UPDATES = {"learning_starts": 310}
LONGER = {"total_timesteps": 520}


def train(script, folder, flags):
    """The folder of a run, which trains in `folder`."""
    script.train(script.Args(**FLAGS | {"run_dir": str(folder)} | flags))
    (run,) = folder.iterdir()
    return run


def train_population(folder, agents=(0, 1, 2), script=POPULATION, **flags):
    lists = {"seeds": SEEDS} | LISTS
    lists = {name: tuple(values[i] for i in agents) for name, values in lists.items()}
    return train(script, folder, lists | flags)


def train_single(folder, i, **flags):
    own = {"seed": SEEDS[i]} | {name: values[i] for name, values in LISTS.items()}
    return train(SINGLE, folder, own | flags)


@pytest.fixture(scope="module")
def single_checkpoint(tmp_path_factory):
    """A function: the checkpoint of the single run of an agent."""
    return cache(lambda i: checkpoint(train_single(tmp_path_factory.mktemp("single"), i)))


@pytest.fixture(autouse=True)
def no_policies(monkeypatch):
    """To save time: to export a policy takes longer than these runs."""
    monkeypatch.setattr(torch.export, "export", Mock())
    monkeypatch.setattr(torch.export, "save", Mock())


def checkpoint(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def strict(path):
    """What a JSON file has; an error if it has a NaN."""
    return json.loads(path.read_text(), parse_constant=pytest.fail)


def numbers(checkpoint):
    """All that two runs have to agree on, by path: torch's generator on the host gives none to a run on CUDA."""
    found = dict(leaves(checkpoint["learner"])) | {"returns": checkpoint["returns"]}
    if checkpoint["learner"]["cuda_rng"]:
        del found[".rng"]
    return found


def assert_same_numbers(got, wanted, tolerance=0.0):
    """All that two checkpoints have: to the last bit, or tensors to `tolerance` of their norm."""
    got, wanted = numbers(got), numbers(wanted)
    if not tolerance:
        return assert_same_state(got, wanted)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        if torch.is_tensor(value) and value.is_floating_point():
            assert got[name].shape == value.shape
            assert (got[name] - value).norm() <= tolerance * value.norm().clamp(min=1e-2), name


def steps_of_adam(folder):
    """How many steps each optimizer of an agent has made, by name."""
    optimizers = checkpoint(folder)["learner"]["optimizers"]
    return {name: round(math.log(1 - own["corrections"][0], 0.9)) for name, own in optimizers.items()}


def test_agents_are_single_runs_to_the_last_bit(tmp_path, monkeypatch):
    """Whole runs of 50 updates and more, with every flag that is a list: checkpoints, logs, summaries and policies."""
    monkeypatch.undo()  # policies are exported
    args = vars(POPULATION.Args())
    assert {name for name, value in args.items() if isinstance(value, tuple)} == {"seeds", *LISTS}
    assert not any(isinstance(value, float) for value in args.values())
    folder = train_population(tmp_path / "all", **FIFTY_UPDATES)
    population = strict(folder / "population.json")
    assert tuple(population["seeds"]) == SEEDS and population["global_step"] == 420
    for i in range(3):
        single, agent = train_single(tmp_path / str(i), i, **FIFTY_UPDATES), folder / f"agent_{i}"
        assert min(steps_of_adam(agent).values()) >= 50
        assert_same_numbers(checkpoint(agent), checkpoint(single))
        for tag in ("charts/episodic_return", "charts/episodic_length", "losses/qf_loss", "losses/alpha"):
            assert scalars(agent, tag) == scalars(single, tag)
        assert {"config.json", "checkpoint.pt", "policy.pt2"} <= {path.name for path in agent.iterdir()}
        size, other_size = ((path / "checkpoint.pt").stat().st_size for path in (agent, single))
        assert size < 1.01 * other_size, "it holds other agents too"
        one, other = (strict(path / "summary.json") for path in (agent, single))
        assert one.keys() == other.keys()
        assert one["episodic_return"] == other["episodic_return"] == population["episodic_return"][f"agent_{i}"]
        assert one["seed"] == SEEDS[i]
        obs = torch.randn(5, 3)
        one, other = (torch.export.load(path / "policy.pt2").module() for path in (agent, single))
        assert torch.equal(one(obs), other(obs))


def test_without_autotune_alphas_are_the_agents_own(tmp_path):
    folder = train_population(tmp_path / "all", autotune=False)
    assert_same_numbers(checkpoint(folder / "agent_2"), checkpoint(train_single(tmp_path / "2", 2, autotune=False)))


@pytest.mark.thorough
def test_compiled_agents_are_single_runs(tmp_path, single_checkpoint):
    """Up to rounding, those of eager code too."""
    folder = train_population(tmp_path, (0, 2), compile=True)
    for number, i in enumerate((0, 2)):
        assert_same_numbers(checkpoint(folder / f"agent_{number}"), single_checkpoint(i), 1e-4)


def test_populations_and_single_runs_resume(tmp_path):
    """A population continues as its agents do alone, by the single script, which finds what a single run leaves."""
    folder = train_population(tmp_path / "all")
    wanted = [train_single(tmp_path / f"{i}", i, resume=str(folder / f"agent_{i}"), **LONGER) for i in range(3)]
    alone = train_single(tmp_path / "alone", 1)
    again = train_single(tmp_path / "on", 1, resume=str(alone), **LONGER)
    assert_same_numbers(checkpoint(again), checkpoint(wanted[1]))
    assert checkpoint(folder)["args"]["seeds"] == SEEDS
    again = train_population(tmp_path / "again", resume=str(folder), **LONGER)
    for i in range(3):
        assert_same_numbers(checkpoint(again / f"agent_{i}"), checkpoint(wanted[i]))


def diverged(folder, **flags):
    """A population whose second agent has diverged."""
    with pytest.raises(SystemExit, match="1 of 3 agents have ended at NaN"):
        train_population(folder, **{"total_timesteps": 500} | dict.fromkeys(RATES, DIVERGING) | flags)
    (run,) = folder.iterdir()
    return run


def garbage(*size, empty=torch.empty, **kwargs):
    tensor = empty(*size, **kwargs)
    return tensor.fill_(-1e9) if tensor.is_floating_point() else tensor


def check_divergence(folder, capsys, **flags):
    """An agent that diverges ends, and the others continue as they do alone."""
    population = diverged(folder / "all", **flags)
    assert re.search(r"agent_1: error: step 400: \w+_loss is nan", capsys.readouterr().err)
    assert strict(population / "agent_1" / "summary.json")["global_step"] == 400
    assert list(strict(population / "population.json")["ended"]) == ["agent_1"]
    assert not (population / "agent_1" / "checkpoint.pt").exists()
    for i in (0, 2):
        rates = dict.fromkeys(RATES, DIVERGING[i])
        single = train_single(folder / str(i), i, total_timesteps=500, **rates)
        assert_same_numbers(checkpoint(population / f"agent_{i}"), checkpoint(single))
    return population


def test_an_agent_that_diverges_ends_and_the_others_continue(tmp_path, capsys, monkeypatch):
    """Also if the population is resumed, whatever the memory of the one that has ended held before."""
    population = check_divergence(tmp_path, capsys)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", garbage)
        again = diverged(tmp_path / "again", resume=str(population), total_timesteps=600)
    assert not (again / "agent_1").exists()
    rates = dict.fromkeys(RATES, DIVERGING[2])
    alone = train_single(tmp_path / "alone", 2, resume=str(population / "agent_2"), total_timesteps=600, **rates)
    assert_same_numbers(checkpoint(again / "agent_2"), checkpoint(alone))


def test_an_agent_that_diverges_keeps_its_last_checkpoint(tmp_path):
    """Which is from before the first update."""
    population = diverged(tmp_path, checkpoint_interval=200, total_timesteps=600)
    steps = {path.parent.name: checkpoint(path.parent)["global_step"] for path in population.glob("*/checkpoint.*")}
    assert steps == {"agent_0": 600, "agent_1": 200, "agent_2": 600}


@pytest.mark.parametrize("written", [1, 3], ids=["after the first agent's", "after all agents'"])
def test_a_crash_while_checkpoints_are_written_loses_none(written, tmp_path, monkeypatch):
    """The population resumes from the step of which all agents have a checkpoint."""
    folder = train_population(tmp_path / "all")
    wanted = train_population(tmp_path / "wanted", resume=str(folder), **LONGER)
    replace_file = POPULATION.replace_file
    paths = []

    def crash(path, write):
        paths.append(path)
        if len([path for path in paths if path.name == "checkpoint.pt"]) > 4 + written:  # 4 of the first time
            raise KeyboardInterrupt
        replace_file(path, write)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(POPULATION, "replace_file", crash)
        train_population(tmp_path / "crashed", checkpoint_interval=420, total_timesteps=1000)
    (crashed,) = (tmp_path / "crashed").iterdir()
    again = train_population(tmp_path / "again", resume=str(crashed), **LONGER)
    for i in range(3):
        assert_same_numbers(checkpoint(again / f"agent_{i}"), checkpoint(wanted / f"agent_{i}"))


STORED = "columns = (obs, next_obs, actions, rewards[..., None], terminated[..., None], act_on"
GENERATOR = "self.generators.append(generator)"
ONE_GENERATOR = "self.generators.append(self.generators[0] if self.generators else generator)"
RATES_OF_ALL = ("self.lr = torch.tensor(lr,", "self.lr = torch.tensor([lr[0]] * len(lr),")
DISCOUNTS = ("[[agent.gamma] for agent in agents]", "[[agents[0].gamma] for _ in agents]")
MOMENTS = '{"m": optimizer.m, "v": optimizer.v}'
LAST_MOMENTS = '{"m": [m.flip(0) for m in optimizer.m], "v": optimizer.v}'
BUGS = {
    "agents mixed by a reshape": (f"{STORED})", f"{STORED}[::-1])"),
    "one generator for all": (GENERATOR, ONE_GENERATOR),
    "the first agent's learning rate for all": RATES_OF_ALL,
    "the first agent's discount for all": DISCOUNTS,
    "the first agent's batches for all": ("self.rows[self.agents, ", "self.rows[0 * self.agents, "),
    "the last agent's moments for all": (MOMENTS, LAST_MOMENTS),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_noticed(bug, tmp_path, single_checkpoint):
    def check(edited):
        folder = train_population(tmp_path / "all", script=edited)
        for i in range(3):
            assert_same_numbers(checkpoint(folder / f"agent_{i}"), single_checkpoint(i), 1e-4)

    assert_noticed(POPULATION, *BUGS[bug], check, tmp_path)


ACTIONS = "np.nan_to_num(self.host_actions.numpy())"
MEANS = "np.full_like(self.host_actions.numpy(), self.host_actions.mean())"
SPREADING = [("step(qf_loss.sum())", "step(qf_loss.sum() + 0 * qf_loss.prod())"), (ACTIONS, MEANS)]


@pytest.mark.parametrize(("right", "wrong"), SPREADING, ids=["loss", "actions"])
def test_a_nan_that_spreads_is_noticed(right, wrong, tmp_path, capsys):
    check = lambda edited: check_divergence(tmp_path / "runs", capsys, script=edited)  # noqa: E731
    assert_noticed(POPULATION, right, wrong, check, tmp_path, (AssertionError, Failed))


def test_environments_see_no_nan():
    """The action of a diverged policy is 0, or the bound that is nearest to 0."""
    learner = make_learner(POPULATION, seeds=(1, 2))
    learner.host_actions[0] = torch.tensor([1.5, -2.0, 0.4])
    learner.host_actions[1] = float("nan")
    assert np.array_equal(learner.next_actions(), np.float32([[[1.5, -2.0, 0.4]], [[0.0, -1.0, 0.0]]]))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"policy_lr": (1e-3, 1e-4)}, "--policy-lr 0.001 0.0001: give one value, or 3, as many as there are agents"),
        ({"seeds": (1, -2, 3)}, "--seed -2: give a number from 0"),
        ({"gamma": (0.9, 0.9, 1.9)}, "--gamma 1.9: give a number from 0 to 1"),
        ({"tau": ()}, "--tau : give one value, or 3, as many as there are agents"),
        ({"resume": "/nowhere"}, "--resume /nowhere: give the folder of a run with an intact checkpoint.pt"),
    ],
)
def test_bad_lists_are_refused(flags, message, tmp_path, capsys):
    assert_refused(tmp_path / "runs", message, capsys, flags)


def assert_refused(folder, message, capsys, flags):
    """One line, and nothing left behind."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        train_population(folder, **flags)
    assert end.value.code == 2
    assert re.fullmatch(f"error: {re.escape(message)}.*\n", capsys.readouterr().err)
    assert not folder.exists()


def test_a_population_that_does_not_fit_is_refused(tmp_path, capsys):
    """Other seeds or agents, another buffer, a checkpoint that is gone, and no population at all."""
    folder = train_population(tmp_path / "all", total_timesteps=20, learning_starts=10)
    flags = {"resume": str(folder), "total_timesteps": 40}

    def refused(message, **changes):
        assert_refused(tmp_path / "again", message, capsys, flags | changes)

    refused("--seeds 1 5 8: the checkpoint has 1 5 9", seeds=(1, 5, 8))
    refused("--seeds 1 5: the checkpoint has 1 5 9", agents=(0, 1))
    refused("--buffer-size 99: the checkpoint has 300", buffer_size=99)
    refused("--total-timesteps 20: give more than 20, the checkpoint's step", total_timesteps=20)
    refused(f"--resume {folder / 'agent_1'}: give the folder of a population", resume=str(folder / "agent_1"))
    (folder / "agent_1" / "checkpoint.pt").unlink()
    refused(f"--resume {folder / 'agent_1'}: it has no checkpoint of step 20, the population's")


@pytest.mark.parametrize("cudagraphs", [False, True], ids=["eager", "cudagraphs"])
def test_a_gpu_may_take_its_time(cudagraphs, tmp_path):
    """On the emulated CUDA device: the same bits whether it runs at once or late, and those of single runs."""
    short = {"total_timesteps": 384, "cudagraphs": cudagraphs}
    folders = {}
    for late in (False, True):
        with emulated_cuda(late=late):
            folders[late] = train_population(tmp_path / f"{late}", **short)
    with emulated_cuda():
        single = train_single(tmp_path / "single", 1, **short)
    tolerance = 1e-4 if cudagraphs else 0.0  # with graphs all agents' matmuls are batched
    assert_same_numbers(checkpoint(folders[True] / "agent_1"), checkpoint(single), tolerance)
    for i in range(3):
        assert_same_numbers(*(checkpoint(folders[late] / f"agent_{i}") for late in (False, True)))


def test_one_agent_with_cuda_graphs_is_the_single_run_to_the_last_bit(tmp_path):
    """Where several agents' matmuls are batched, and round differently, one agent's are not. On the emulated device."""
    with emulated_cuda():
        folder = train_population(tmp_path / "all", (1,), cudagraphs=True)
        single = train_single(tmp_path / "single", 1, cudagraphs=True)
    assert strict(folder / "population.json")["cudagraphs"]
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
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGINT and "Traceback" not in errors, errors
    (folder,) = tmp_path.iterdir()
    assert list(folder.glob("wandb/offline-run-*"))
    agents = [folder / f"agent_{i}" for i in range(2)]
    steps = {strict(agent / "summary.json")["global_step"] for agent in agents}
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
