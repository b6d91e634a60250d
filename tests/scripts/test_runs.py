"""A run's folder, logs, episode counts, seeds, resuming and videos."""

import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch
import wandb
from conftest import (
    AGENTS,
    ATARI,
    DISCRETE,
    GAMES,
    ON_DEVICE,
    POPULATION,
    SIMULATORS,
    TURBO,
    VARIANTS,
    algorithm,
    entry_of,
    equal,
    leaves,
    make_envs,
    on_gymnasium,
    scalars,
    script_params,
    stem,
    tiny,
    train,
)
from gymnasium.wrappers import RecordEpisodeStatistics
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_cli import call, run_tiny, start, summary


@pytest.fixture(params=script_params())
def script(request):
    return request.param


def test_a_run_and_its_continuation(script, tmp_path, monkeypatch):
    """What a run writes, and that --resume, which needs no other flag, counts on from its last step."""
    sizes = {"total_timesteps": 500, "num_envs": 2, "checkpoint_interval": 200}
    first = run_tiny(script, tmp_path, **sizes)
    check_folder(script, first, sizes)
    before = torch.load(first / "checkpoint.pt", weights_only=True)
    words = ["--resume", first, "--total-timesteps", 1000, "--run-dir", tmp_path / "second", "--seed", 5]
    call(script, monkeypatch, *words)
    (second,) = (tmp_path / "second").iterdir()
    config = json.loads((second / "config.json").read_text())
    wanted = sizes | {"total_timesteps": 1000, "seed": 5, "run_dir": str(tmp_path / "second"), "resume": str(first)}
    assert (tiny(script) | wanted).items() <= config.items()
    after = torch.load(second / "checkpoint.pt", weights_only=True)
    assert (before["global_step"], after["global_step"]) == (500, 1000)
    assert after["episodes"] > before["episodes"]
    if after["episodes"] <= 20:  # the returns of the last 20 are kept
        assert after["returns"][: len(before["returns"])] == before["returns"]
    assert sum(scalars(second, "charts/episodic_length")) <= 500  # steps of the second run
    if entry_of(script).off_policy:
        updates, more = before["learner"]["updates"], after["learner"]["updates"]
        assert updates > 0 and more > updates
        random = tiny(script).get("learning_starts", 20)  # FastTD3: 10 steps of both environments
        assert updates == pytest.approx((more - updates) * (500 - random) / 500, abs=2)
    else:
        assert len(scalars(first, "charts/SPS")) == len(scalars(second, "charts/SPS")) == 5
    if entry_of(script).off_policy and not entry_of(script).atari:
        rows = 2 if entry_of(script).on_device else 1  # of a step of both environments
        assert int(after["learner"]["replay"]["stored"]) * rows == 1000


def check_folder(script, folder, sizes):
    """Configuration, copy of the script, summary, events, and a checkpoint that holds no more than is stored."""
    config, report = json.loads((folder / "config.json").read_text()), summary(folder)
    args = script.Args(**tiny(script) | sizes | {"run_dir": str(folder.parent)})
    assert vars(args).items() <= config.items()
    assert {"script", "device"} <= config.keys()
    assert (
        config["machine"]["cores"] == os.cpu_count()
        and config["machine"]["memory_gib"] > 0
        and config["machine"]["cpu"]
    )
    assert {"python", "torch", "numpy", "gymnasium"} <= config["versions"].keys()
    assert (folder / f"{stem(script)}.py").read_text() == Path(script.__file__).read_text()
    *_, day, time = folder.name.split("_")
    started = datetime.strptime(f"{day}_{time}", "%Y-%m-%d_%H-%M-%S.%f")
    assert 0 < (datetime.now() - started).total_seconds() < 600
    keys = "script env_id seed num_envs device compile cudagraphs matmul_precision global_step episodic_return episodes"
    assert set(f"{keys} wall_seconds versions".split()) <= report.keys()
    assert (report["compile"], report["cudagraphs"]) == (False, False)
    assert report["global_step"] == 500
    events = EventAccumulator(str(folder)).Reload()
    returns, lengths = (scalars(folder, f"charts/episodic_{name}") for name in ("return", "length"))
    least = 1 if algorithm(script) in ATARI + ON_DEVICE else 2  # a game takes a while
    assert len(returns) == len(lengths) >= least
    if entry_of(script).on_device:  # where means over some episodes are logged
        assert report["episodes"] >= 2
    else:
        assert report["episodes"] == len(returns)
    assert report["episodic_return"] == pytest.approx(sum(returns[-20:]) / len(returns[-20:]))
    if args.env_id == "Pendulum-v1":
        assert lengths == [200, 200] and max(returns) < 0
    else:
        assert sum(lengths) <= 500
        assert returns == lengths or args.env_id != "CartPole-v1"
    assert "charts/SPS" in events.Tags()["scalars"]
    assert any(name.startswith("losses/") and "loss" in name[7:] for name in events.Tags()["scalars"])
    limit = {"ppo_atari": 22, "pqn_atari": 22, "dqn_atari": 30, "sac_atari": 76}.get(algorithm(script), 10)  # MB
    assert (folder / "checkpoint.pt").stat().st_size < limit * 2**20


def test_two_runs_at_once_have_two_folders(tmp_path):
    """Though they begin in the same second."""
    processes = [start(TURBO["dqn"], total_timesteps=110, run_dir=tmp_path) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert len(list(tmp_path.glob("*/summary.json"))) == 2


def test_threads_and_the_precision_of_matmuls(either, tmp_path, monkeypatch):
    before = torch.get_float32_matmul_precision()
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: chosen.append(threads))
    monkeypatch.setitem(either.AT_MOST, "threads", 4)
    try:
        folder = run_tiny(either, tmp_path, threads=3, matmul_precision="high", total_timesteps=110)
        assert chosen == [3] and torch.get_float32_matmul_precision() == "high"
        assert summary(folder)["matmul_precision"] == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def count_episodes(script, monkeypatch):
    """From now on environments come with gymnasium's statistics, which land, for each call, in the list returned."""
    counted, make_envs = [], script.make_envs

    def counting(*args):
        envs = make_envs(*args)
        envs.unwrapped.envs = [RecordEpisodeStatistics(env, buffer_length=1000) for env in envs.unwrapped.envs]
        counted.append(envs.unwrapped.envs[0])
        for env in envs.unwrapped.envs:  # in one order
            env.return_queue, env.length_queue = counted[-1].return_queue, counted[-1].length_queue
        return envs

    monkeypatch.setattr(script, "make_envs", counting)
    return counted


@on_gymnasium
def test_episodes_are_counted_as_gymnasium_does(script, tmp_path, monkeypatch):
    counted = count_episodes(script, monkeypatch)
    folder = run_tiny(script, tmp_path, total_timesteps=1500, num_envs=3)
    returns, lengths = (scalars(folder, f"charts/episodic_{name}") for name in ("return", "length"))
    assert summary(folder)["episodes"] == len(returns) == len(counted[0].return_queue) >= 6
    assert returns == pytest.approx(list(counted[0].return_queue)) and lengths == list(counted[0].length_queue)
    assert summary(folder)["episodic_return"] == pytest.approx(np.mean(returns[-20:]))


def test_same_seed_same_numbers(script, tmp_path):
    """With checkpoints on the way or without."""
    states = []
    for seed, interval in ((3, 0), (3, 75), (4, 0)):
        steps = 150 if algorithm(script) in ATARI else 250
        folder = run_tiny(script, tmp_path, total_timesteps=steps, seed=seed, checkpoint_interval=interval)
        checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
        states.append(dict(leaves({"returns": checkpoint["returns"], "learner": checkpoint["learner"]})))
    one, same, other = states
    assert one.keys() == same.keys() and all(equal(one[path], same[path]) for path in one)
    assert not all(equal(one[path], other[path]) for path in one.keys() & other.keys())  # as many episodes or not


@pytest.mark.parametrize("name", ["sac", "td3"])
def test_learning_starts_at_zero_and_several_updates_per_step(name, tmp_path):
    folder = run_tiny(TURBO[name], tmp_path, total_timesteps=50, learning_starts=0, updates_per_step=3)
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["learner"]["updates"] == 150


def test_rows_that_were_never_stored_are_never_used(script, tmp_path, monkeypatch):
    """Memory that was never written holds NaN here; one row of it would spoil every parameter."""

    def poison(library, is_float):
        empty = library.empty

        def poisoned(*size, **kwargs):
            array = empty(*size, **kwargs)
            if is_float(array):
                array[...] = float("nan")
            return array

        monkeypatch.setattr(library, "empty", poisoned)

    poison(torch, lambda tensor: tensor.is_floating_point() and not tensor.is_meta)
    poison(np, lambda array: array.dtype.kind == "f")
    folder = run_tiny(script, tmp_path, total_timesteps=300)
    for path, leaf in leaves(torch.load(folder / "checkpoint.pt", weights_only=True)["learner"]):
        assert not isinstance(leaf, torch.Tensor) or leaf.isfinite().all(), path


def first_observations(script, num_envs):
    """The observations (num_envs, ...) of new environments, a tensor."""
    args = script.Args(**tiny(script) | {"num_envs": num_envs})
    envs = make_envs(script, args)
    obs = envs.reset(1) if entry_of(script).on_device else envs.reset(seed=1)[0]
    envs.close()
    return torch.as_tensor(obs)


WITH_TORCH_ALONE = """
import sys, json, torch
policy = torch.export.load(sys.argv[1]).module()
print(json.dumps(policy(torch.tensor(json.loads(sys.argv[2]))).tolist()))
assert not any("leanrl" in name or "gymnasium" in name for name in sys.modules)
"""


def test_the_exported_policy_is_the_learners(script, tmp_path):
    """For other batch sizes than it was exported with; also the one of a checkpoint. Once in a process of its own."""
    learners = []
    sizes = {"total_timesteps": 300, "checkpoint_interval": 100, "run_dir": str(tmp_path)}
    args = script.Args(**tiny(script) | sizes)
    train(script, args, on_start=lambda run: learners.append(run.learner))
    (folder,) = tmp_path.iterdir()
    obs = first_observations(script, num_envs=5)
    policy, _ = learners[0].policy()
    program = torch.export.load(folder / "policy.pt2")
    states = [torch.zeros(5, *state.shape[1:]) for state in program.example_inputs[0][1:]]
    torch.testing.assert_close(program.module()(obs, *states), policy(obs, *states))
    if script is TURBO["dqn"]:
        command = [sys.executable, "-c", WITH_TORCH_ALONE, str(folder / "policy.pt2"), json.dumps(obs.tolist())]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == policy(obs).tolist()


def test_policy_and_checkpoint_are_written_together(either, tmp_path):
    """At each checkpoint, not only at the end."""
    seen = []

    def look(learner, losses, step):
        (folder,) = tmp_path.iterdir()
        seen.append({path.name for path in folder.glob("*.p*t*")} >= {"checkpoint.pt", "policy.pt2"})

    args = either.Args(**tiny(either), total_timesteps=300, checkpoint_interval=50, run_dir=str(tmp_path))
    train(either, args, on_log=look)
    assert seen[-1]


@pytest.mark.parametrize("script", script_params(left_out=GAMES | SIMULATORS))
@pytest.mark.parametrize("env_id", ["DictObservations-v0", "TupleObservations-v0", "DiscreteObservations-v0"])
def test_observations_of_several_parts_are_flattened(script, env_id):
    prefix = "Pick" if algorithm(script) in DISCRETE else "Push"
    envs = script.make_envs(script.Args(env_id=f"{prefix}{env_id}", num_envs=2), None)
    obs, *_ = envs.reset(seed=1)
    assert obs.ndim == 2 and obs.shape == (2, *envs.single_observation_space.shape)


@pytest.mark.parametrize("script", script_params(left_out=GAMES | DISCRETE))
def test_actions_in_double_precision(script, tmp_path):
    run_tiny(script, tmp_path, env_id="DoublePrecision-v0")


NO_VIDEO = dict.fromkeys(ON_DEVICE, "simulators on the device render in their own ways")


@pytest.mark.parametrize("script", script_params([*TURBO.values(), *VARIANTS], AGENTS | NO_VIDEO))
def test_capture_video_records_mp4(script, tmp_path):
    folder = run_tiny(script, tmp_path, total_timesteps=201, capture_video=True)
    assert [video.suffix for video in (folder / "videos").glob("*.mp4")]


def test_track_logs_to_wandb_without_a_network(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    process = start(TURBO["dqn"], total_timesteps=250, track=True, run_dir=tmp_path)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert list(next(tmp_path.iterdir()).glob("wandb/offline-run-*"))


@pytest.fixture
def wandb_offline(monkeypatch):
    """Weights & Biases replaces TensorBoard's writer for the rest of the process, and then warns about each new one."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    yield
    wandb.tensorboard.unpatch()


@pytest.mark.parametrize("script", [TURBO["dqn"], POPULATION], ids=stem)
def test_tracked_runs_of_one_process_are_two(script, tmp_path, wandb_offline):
    """The numbers of the second are not added to the first."""
    for run_dir in (tmp_path / "1", tmp_path / "2"):
        script.train(script.Args(**tiny(script) | {"total_timesteps": 250, "track": True, "run_dir": str(run_dir)}))
        assert wandb.run is None
        (folder,) = run_dir.iterdir()
        assert list(folder.glob("wandb/offline-run-*/*.wandb"))
