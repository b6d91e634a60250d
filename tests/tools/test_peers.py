"""Stable-Baselines3 and SBX at our scripts' settings. Tests that use them need requirements/peers.txt."""

import importlib
import json
import sys
from functools import cache

import numpy as np
import pytest
from helpers import error_of, python

from benchmark.speed import checkouts, rounds
from common import scripts
from common.algorithms import ALGORITHMS
from common.curves import learning_curve

PROGRAM = ("-m", "benchmark.speed.peers")
DIFFERENT = {  # the settings that cannot be made equal
    ("ppo_continuous_action", "sbx"): {"learning rates", "clip of the values"},
    ("sac_continuous_action", "sb3"): {"matrices", "learning rates"},
    ("sac_continuous_action", "sbx"): {"matrices", "learning rates", "target_network_frequency"},
    ("dqn", "sbx"): {"matrices"},
    ("ppo_atari_envpool", "sbx"): {"matrices", "learning rates", "clip of the values"},
}
all_peers = pytest.mark.parametrize(
    ("algo", "peer"), [(algo, peer) for algo in ALGORITHMS for peer in ("sb3", "sbx") if peer in ALGORITHMS[algo].peers]
)


def small(algo):
    """Flags with which a run has two time slices or more: 400 steps, or five iterations."""
    entry, args = ALGORITHMS[algo], scripts.load(algo).Args()
    flags = ["--env-id", entry.tiny["env_id"]]
    if entry.off_policy:
        return [*flags, "--total-timesteps", "400", "--learning-starts", "100", "--buffer-size", "1000"]
    num_envs = min(args.num_envs, 4)
    return [*flags, "--num-envs", str(num_envs), "--total-timesteps", str(5 * num_envs * args.num_steps)]


@pytest.fixture
def peers(monkeypatch):
    pytest.importorskip("stable_baselines3")
    pytest.importorskip("sbx")
    monkeypatch.setenv("PJRT_NPROC", "1")  # `prepare` sets it
    return importlib.import_module("benchmark.speed.peers")


def test_modes_of_an_algorithm():
    unlocked = ["plain+mkl", "eager+mkl", "compile+mkl"]
    assert rounds.modes_of("dqn") == [*rounds.MODES, *rounds.PEERS, *unlocked, "sb3+mkl"]
    assert rounds.modes_of("ppo_lstm") == [*rounds.MODES, "sb3", *unlocked, "sb3+mkl"]
    assert rounds.modes_of("pqn") == [*rounds.MODES, "cleanrl", *unlocked]
    assert rounds.modes_of("sac_atari") == [*rounds.MODES, *unlocked]


def test_without_the_packages_one_line_says_what_to_install():
    code = "import sys; sys.modules['stable_baselines3'] = None; import benchmark.speed.peers"
    assert "requirements/peers.txt" in error_of(python("-c", code))


def test_all_algorithms_with_peers_are_offered_them(peers):
    for algo in ALGORITHMS:
        assert (algo in peers.CLASSES) == ("sb3" in rounds.modes_of(algo))
    assert [*peers.PEER_MODULES, *checkouts.VARIABLES] == [*rounds.PEERS]


@cache
def settings(algo):
    return importlib.import_module("benchmark.speed.peers").settings(algo)


@all_peers
def test_settings_are_ours_where_they_can_be(peers, algo, peer):
    ours, theirs = settings(algo)["ours"], settings(algo)[peer]
    assert ours.keys() == theirs.keys()
    assert {row for row in ours if ours[row] != theirs[row]} == DIFFERENT.get((algo, peer), set())


def steps(optimizers):
    """How many steps each of torch's optimisers has made."""
    return {name: int(optimizer.state_dict()["state"][0]["step"]) for name, optimizer in optimizers.items()}


@pytest.mark.parametrize("algo", ["ppo_continuous_action", "sac_continuous_action", "td3_continuous_action", "dqn"])
def test_optimisers_make_as_many_steps_as_ours(peers, algo, tmp_path):
    name = peers.CLASSES[algo]
    env_id = "CartPole-v1" if name == "DQN" else "Pendulum-v1"
    length = {"total_timesteps": 2048} if name == "PPO" else {"total_timesteps": 300, "learning_starts": 100}
    script = importlib.import_module(f"leanrl.{algo}")
    args = script.Args(env_id=env_id, run_dir=str(tmp_path), **length)
    learners = []
    scripts.train(script, args, lambda run: learners.append(run.learner))
    ours = steps(scripts.optimizers_of(learners[0]))

    models = {}
    for peer in peers.PEER_MODULES:
        device = peers.prepare(script, args)
        models[peer] = peers.make_model(peer, algo, script, args, device).learn(args.total_timesteps)
    assert steps(peers.optimizers_of_sb3(name, models["sb3"])) == ours
    policy = models["sbx"].policy
    states = {
        "PPO": lambda: {"agent": policy.actor_state},
        "SAC": lambda: {"actor": policy.actor_state, "critics": policy.qf_state, "alpha": models["sbx"].ent_coef_state},
        "TD3": lambda: {"actor": policy.actor_state, "critics": policy.qf_state},
        "DQN": lambda: {"q": policy.qf_state},
    }[name]()
    assert {name: int(state.step) for name, state in states.items()} == ours


def test_games_are_those_of_our_script(peers):
    """The peers see what our script sees, but for the steps in which an episode starts: they have no such steps."""
    script = importlib.import_module("leanrl.dqn_atari")
    args = script.Args(num_envs=1)
    ours, theirs = script.AtariEnvs(args, args.seed), peers.Games(script, args)
    assert np.array_equal(ours.reset()[0], theirs.reset())
    rng = np.random.default_rng(0)
    ends = games = 0
    while games < 2:
        action = rng.integers(4, size=1)
        obs, rewards, terminated, truncated, infos = ours.step(action)
        new_obs, their_rewards, dones, [report] = theirs.step(action)
        assert np.array_equal(rewards, their_rewards) and dones[0] == (terminated | truncated)[0]
        if dones[0]:
            assert np.array_equal(report["terminal_observation"], obs[0])
            assert ("episode" in report) == infos["game_ended"][0]
            obs, *_, infos = ours.step(action)
            assert infos["is_reset"][0]
            ends += 1
            games += "episode" in report
        assert np.array_equal(obs, new_obs)
    assert ends == 10  # five lives


@all_peers
def test_a_run_has_time_slices_and_writes_a_summary(peers, algo, peer, tmp_path):
    done = python(*PROGRAM, peer, algo, *small(algo), "--run-dir", tmp_path, "--slices", input="\n" * 1000)
    assert done.returncode == 0, done.stderr
    [path] = tmp_path.glob("*/summary.json")
    summary = json.loads(path.read_text())
    slices = [[float(number) for number in line.split()] for line in done.stdout.splitlines()]
    assert slices[0] == [0, 0] and len(slices) > 2 and all(steps > 0 and seconds > 0 for steps, seconds in slices[1:])
    assert summary["steady_sps"] > 0 and summary["warmup_seconds"] > 0 and summary["device"] == "cpu"
    assert summary["global_step"] >= int(small(algo)[small(algo).index("--total-timesteps") + 1])
    if algo not in ("ppo_lstm", "dqn_atari"):  # whose episodes may all be longer
        assert len(learning_curve([path.parent])) > 1


def test_a_round_with_peers(peers, tmp_path):
    flags = ["--algos", "dqn", "--modes", "plain", "sb3", "sbx", "--seeds", "1", "--total-timesteps", "1000"]
    folders = ["--out", str(tmp_path / "results"), "--run-dir", str(tmp_path / "runs")]
    done = python("-m", "benchmark.speed", *flags, *folders, "--flags=--learning-starts 100")
    assert done.returncode == 0, done.stderr
    results = [json.loads(path.read_text()) for path in tmp_path.glob("results/*/speed/dqn/CartPole-v1/*/1.json")]
    assert len(results) == 3 and all(result["summary"]["steady_sps"] for result in results)


@pytest.mark.parametrize(
    "words, message",
    [
        ("sb3 a2c", "peers.py sb3 a2c: choose sb3 or sbx, and one of"),
        ("rllib dqn", "peers.py rllib dqn: choose sb3 or sbx, and one of"),
        ("sbx ppo_lstm", "peers.py sbx ppo_lstm: choose sb3 or sbx, and one of"),
        ("sb3 dqn --gamma 0.9", "--gamma 0.9: leave it out"),
        ("sbx ppo_continuous_action --no-anneal-lr", "--anneal-lr False: leave it out"),
        ("sb3 dqn --num-envs 3", "--num-envs 3: sb3 needs a divisor of --train-frequency 10"),
    ],
)
def test_bad_input(peers, words, message):
    assert error_of(python(*PROGRAM, *words.split())).startswith(message)


# ---------------------------------------------------------------------------------------------------------------------
# Peers from a checkout: here scripts that log as CleanRL's and those of the LeanRL of 2024 do, and learn nothing
# ---------------------------------------------------------------------------------------------------------------------

CLEANRL = """
import sys, time
from torch.utils.tensorboard import SummaryWriter
import cleanrl_utils

flags = dict(word[2:].split("=") for word in sys.argv[1:])
writer = SummaryWriter("runs/anything")
for step in range(0, int(flags["total-timesteps"]), 100):
    writer.add_scalar("charts/episodic_return", float(flags["seed"]), step)
    writer.add_scalar("charts/SPS", 0, step)
    time.sleep(0.001)
"""
LEANRL = """
import sys, time
import wandb

assert sys.argv[-1] == "--compile"
flags = dict(word[2:].split("=") for word in sys.argv[1:-1])
wandb.init(project="anything")
for step in range(0, int(flags["total-timesteps"]), 100):
    wandb.log({"speed": 0}, step=step)
    time.sleep(0.001)
"""


@pytest.fixture
def both_checkouts(tmp_path, monkeypatch):
    """Checkouts of both, whose environment is that of the tests."""
    for peer, script, text in (
        ("cleanrl", "cleanrl/dqn.py", CLEANRL),
        ("leanrl-2024", "leanrl/dqn_torchcompile.py", LEANRL),
    ):
        checkout = tmp_path / peer
        (checkout / script).parent.mkdir(parents=True)
        (checkout / script).write_text(text)
        (checkout / "cleanrl_utils.py").touch()
        python = checkout / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        monkeypatch.setenv(checkouts.VARIABLES[peer], str(checkout))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def test_a_round_with_both_checkouts(both_checkouts):
    """Two programs take turns, and each is measured from its second log on."""
    args = rounds.RoundArgs(algo="dqn", total_timesteps=2000, run_dir=both_checkouts / "runs")
    programs = rounds.programs_of("dqn", ["cleanrl", "leanrl-2024"])
    turns = []
    assert rounds.run_round(args, programs, 7, turns.append) == {"cleanrl": 0, "leanrl-2024": 0}
    assert turns[:6] == ["cleanrl", "leanrl-2024"] * 3
    for peer in programs:
        (path,) = args.run_dir.glob(f"{peer}/7/*/summary.json")
        summary = json.loads(path.read_text())
        assert summary["script"] == f"{peer}.dqn" and summary["global_step"] == 1900
        assert 0 < summary["steady_sps"] < 100 / 0.001 and 0 < summary["warmup_seconds"] < summary["wall_seconds"]


def test_a_checkout_by_itself_leaves_a_curve(both_checkouts):
    flags = ["--env-id=CartPole-v1", "--total-timesteps=1000", "--seed=7", f"--run-dir={both_checkouts}/runs"]
    words = ["cleanrl", "dqn", *flags, "--threads=1"]
    python("-m", "benchmark.speed.checkouts", *words, check=True, timeout=100)
    (path,) = both_checkouts.glob("runs/*/summary.json")
    curve = learning_curve([path.parent])
    assert [step for step, _, _ in curve] == [*range(0, 1000, 100)] and {value for *_, value in curve} == {7.0}


@pytest.mark.parametrize(
    "words, message", [("cleanrl dqn", "CLEANRL /nowhere: "), ("rllib dqn", "checkouts.py rllib: ")]
)
def test_bad_checkouts(words, message, monkeypatch):
    monkeypatch.setenv("CLEANRL", "/nowhere")
    assert error_of(python("-m", "benchmark.speed.checkouts", *words.split())).startswith(message)
