"""Agents of a population are runs of the single script: the same numbers, and none sees another."""

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import TURBO, leaves, load_copy, scalars, wait_for
from copies import ROOT
from emulated_cuda import emulated_cuda

from leanrl import dqn_population_torchcompile, sac_population_torchcompile

SEEDS = (1, 5, 9)
SAC = SimpleNamespace(
    script=sac_population_torchcompile,
    single=TURBO["sac"],
    flags={"env_id": "Pendulum-v1", "learning_starts": 360, "buffer_size": 300},
    lists={
        "policy_lr": (3e-4, 1e-3, 1e-4),
        "q_lr": (1e-3, 3e-3, 2e-3),
        "gamma": (0.99, 0.95, 0.9),
        "tau": (0.005, 0.01, 1.0),
        "alpha": (0.2, 0.1, 0.3),
    },
    tags=("losses/qf_loss", "losses/alpha"),
)
DQN = SimpleNamespace(
    script=dqn_population_torchcompile,
    single=TURBO["dqn"],
    flags={"env_id": "CartPole-v1", "learning_starts": 150, "buffer_size": 100}
    | {"train_frequency": 7, "target_network_frequency": 50},
    lists={
        "learning_rate": (2.5e-4, 1e-3, 1e-4),
        "gamma": (0.99, 0.95, 0.9),
        "tau": (1.0, 0.5, 0.1),
        "start_e": (1.0, 0.5, 0.9),
        "end_e": (0.05, 0.1, 0.2),
        "exploration_fraction": (0.5, 0.9, 0.3),
    },
    tags=("losses/td_loss", "losses/q_values"),
)
KINDS = [pytest.param(SAC, id="sac"), pytest.param(DQN, id="dqn")]
each_kind = pytest.mark.parametrize("kind", KINDS)


def train(kind, script, folder, flags):
    """The folder of a run, which trains in `folder`."""
    common = {"total_timesteps": 420, "batch_size": 32, "num_envs": 2, "threads": 1, "run_dir": str(folder)}
    script.train(script.Args(**common | kind.flags | flags))
    (run,) = folder.iterdir()
    return run


def train_population(kind, folder, agents=(0, 1, 2), script=None, **flags):
    lists = {"seeds": SEEDS} | kind.lists
    lists = {name: tuple(values[i] for i in agents) for name, values in lists.items()}
    return train(kind, script or kind.script, folder, lists | flags)


def train_single(kind, folder, i, **flags):
    own = {"seed": SEEDS[i]} | {name: values[i] for name, values in kind.lists.items()}
    return train(kind, kind.single, folder, own | flags)


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
            assert (got[name] - value).norm() <= tolerance * value.norm().clamp(min=1e-6), name
        else:
            assert torch.equal(got[name], value), name


@each_kind
def test_agents_are_single_runs_to_the_last_bit(kind, tmp_path):
    """Whole runs, with every flag that is a list: checkpoints, logs, summaries and policies."""
    args = vars(kind.script.Args())
    assert {name for name, value in args.items() if isinstance(value, tuple)} == {"seeds", *kind.lists}
    folder = train_population(kind, tmp_path / "all")
    for i in range(3):
        single, agent = train_single(kind, tmp_path / str(i), i), folder / f"agent_{i}"
        assert_same_numbers(checkpoint(agent), checkpoint(single))
        for tag in ("charts/episodic_return", "charts/episodic_length", *kind.tags):
            assert scalars(agent, tag) == scalars(single, tag)
        assert {"config.json", "checkpoint.pt", "policy.pt2"} <= {path.name for path in agent.iterdir()}
        one, other = (json.loads((path / "summary.json").read_text()) for path in (agent, single))
        assert one.keys() >= other.keys()
        assert one["episodic_return"] == other["episodic_return"] and one["seed"] == SEEDS[i]
        obs = torch.randn(5, 3 if kind is SAC else 4)
        one, other = (torch.export.load(path / "policy.pt2").module() for path in (agent, single))
        assert torch.equal(one(obs), other(obs))


def test_without_autotune_alphas_are_the_agents_own(tmp_path):
    folder = train_population(SAC, tmp_path / "all", autotune=False)
    assert_same_numbers(
        checkpoint(folder / "agent_2"), checkpoint(train_single(SAC, tmp_path / "2", 2, autotune=False))
    )


@pytest.mark.thorough
@each_kind
@pytest.mark.parametrize(("agents", "tolerance"), [((1,), 0.0), ((0, 2), 1e-4)])
def test_compiled_agents_are_single_runs(kind, agents, tolerance, tmp_path):
    """To the last bit if there is one, else up to rounding."""
    folder = train_population(kind, tmp_path / "all", agents, compile=True)
    for number, i in enumerate(agents):
        single = train_single(kind, tmp_path / str(i), i, compile=True)
        assert_same_numbers(checkpoint(folder / f"agent_{number}"), checkpoint(single), tolerance)


@each_kind
def test_populations_and_single_runs_resume(kind, tmp_path):
    """A population continues as its agents do alone, by the single script, which finds what a single run leaves."""
    folder = train_population(kind, tmp_path / "all")
    longer = {"total_timesteps": 520}
    wanted = [train_single(kind, tmp_path / f"{i}", i, resume=str(folder / f"agent_{i}"), **longer) for i in range(3)]
    alone = train_single(kind, tmp_path / "alone", 1)
    assert_same_numbers(
        checkpoint(train_single(kind, tmp_path / "on", 1, resume=str(alone), **longer)), checkpoint(wanted[1])
    )
    saved = kind.script.load_checkpoint(kind.script.Args(resume=str(folder)))
    assert saved["args"]["seeds"] == SEEDS
    again = train_population(kind, tmp_path / "again", resume=str(folder), **longer)
    for i in range(3):
        assert_same_numbers(checkpoint(again / f"agent_{i}"), checkpoint(wanted[i]))


def test_an_agent_that_diverges_is_frozen_and_the_others_go_on(tmp_path, capsys, script=None):
    lrs = (3e-4, 1e12, 1e-4)
    with pytest.raises(SystemExit, match="1 of 3 agents are frozen"):
        train_population(SAC, tmp_path / "all", script=script, policy_lr=lrs, q_lr=lrs, total_timesteps=500)
    (folder,) = (tmp_path / "all").iterdir()
    assert "note: agent_1 is frozen: step 400: " in capsys.readouterr().err
    assert "step 400" in json.loads((folder / "agent_1" / "summary.json").read_text())["failed"]
    assert not (folder / "agent_1" / "checkpoint.pt").exists()
    for i in (0, 2):
        flags = {"policy_lr": lrs[i], "q_lr": lrs[i], "total_timesteps": 500}
        single = train_single(SAC, tmp_path / str(i), i, **flags)
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
    "the first agent's learning rate for all": ("torch.tensor(lr, dtype", "torch.tensor([lr[0]] * len(lr), dtype"),
    "the first agent's discount for all": (
        "[[agent.gamma] for agent in agents]",
        "[[agents[0].gamma] for _ in agents]",
    ),
    "the first agent's batches for all": ("self.rows[self.agent, place]", "self.rows[0 * self.agent, place]"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_noticed(bug, tmp_path):
    script = planted(*BUGS[bug], tmp_path)
    folder = train_population(SAC, tmp_path / "all", script=script)
    with pytest.raises(AssertionError):
        for i in range(3):
            single = train_single(SAC, tmp_path / f"{i}", i)
            assert_same_numbers(checkpoint(folder / f"agent_{i}"), checkpoint(single), 1e-4)


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
)
def test_a_nan_that_spreads_is_noticed(right, wrong, tmp_path, capsys):
    script = planted(right, wrong, tmp_path)
    with pytest.raises(AssertionError):
        test_an_agent_that_diverges_is_frozen_and_the_others_go_on(tmp_path, capsys, script)


def planted(right, wrong, folder):
    """The script with a bug."""
    source = (ROOT / "leanrl" / "sac_population_torchcompile.py").read_text()
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
        train_population(SAC, tmp_path, **flags)
    assert end.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@each_kind
@pytest.mark.parametrize("cudagraphs", [False, True])
def test_a_gpu_may_take_its_time(kind, cudagraphs, tmp_path):
    """On the emulated CUDA device: the same bits whether it runs at once or late, and those of single runs."""
    short = {"total_timesteps": 384, "cudagraphs": cudagraphs}
    folders = {}
    for late in (False, True):
        with emulated_cuda(late=late):
            folders[late] = train_population(kind, tmp_path / f"{late}", **short)
            single = train_single(kind, tmp_path / f"single {late}", 1, **short)
        tolerance = 1e-4 if cudagraphs else 0.0  # with graphs all agents' matmuls are batched
        assert_same_numbers(checkpoint(folders[late] / "agent_1"), checkpoint(single), tolerance)
    for i in range(3):
        assert_same_numbers(*(checkpoint(folders[late] / f"agent_{i}") for late in (False, True)))


def test_an_interrupted_population_leaves_agents_that_can_be_tracked_played_and_resumed(tmp_path):
    """As a process: Ctrl-C, a run on Weights & Biases for all, and an evaluation of one."""
    script = ROOT / "leanrl" / "dqn_population_torchcompile.py"
    words = [sys.executable, script, "--seeds", "1", "2", "--threads", "1", f"--run-dir={tmp_path}"]
    settings = {"env": os.environ | {"WANDB_MODE": "offline"}, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    process = subprocess.Popen([*words, "--track", "--learning-starts=200", "--checkpoint-interval=300"], **settings)
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
        [*words[:1], ROOT / "leanrl" / "dqn_torchcompile.py", f"--resume={agents[1]}"],
    ):
        done = subprocess.run([*resumed, f"--total-timesteps={step + 50}"], **settings)
        assert done.returncode == 0, done.stderr
