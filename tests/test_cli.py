"""The SAC scripts as a user runs them: flags, run directory, bad input, Ctrl-C, kill -9, resume, evaluation, video."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import PLAIN, TURBO
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parent.parent
SMALL = {"env_id": "Pendulum-v1", "learning_starts": 100, "batch_size": 32, "buffer_size": 1000, "cuda": False}


def flags(**kwargs):
    """Args as a command line: {"num_envs": 2, "autotune": False} to --num-envs 2 --no-autotune."""
    words = []
    for name, value in kwargs.items():
        name = name.replace("_", "-")
        words += [f"--{name}"] if value is True else [f"--no-{name}"] if value is False else [f"--{name}", str(value)]
    return words


def start(script, start_new_session=False, **kwargs):
    command = [sys.executable, str(ROOT / "leanrl" / f"{script.SCRIPT}.py"), *flags(**SMALL | kwargs)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **pipes, start_new_session=start_new_session)


def run_folders(run_dir):
    return sorted(Path(run_dir).iterdir(), key=lambda folder: folder.stat().st_mtime)


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def train(script, run_dir, **kwargs):
    """Train in this process; returns the run's folder."""
    script.train(script.Args(**SMALL | {"total_timesteps": 200} | kwargs, run_dir=str(run_dir)))
    return run_folders(run_dir)[-1]


@pytest.mark.parametrize("cudagraphs", [False, True])
@pytest.mark.parametrize("compile", [False, True])
def test_every_mode_trains_past_learning_starts(compile, cudagraphs, tmp_path):
    process = start(TURBO, total_timesteps=300, run_dir=tmp_path, compile=compile, cudagraphs=cudagraphs, cuda=True)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    report = summary(run_folders(tmp_path)[0])
    on_cuda = torch.cuda.is_available()
    assert (report["compile"], report["cudagraphs"]) == (compile, cudagraphs and on_cuda)
    assert report["global_step"] == 300 and report["steady_sps"] > 0 and report["warmup_seconds"] > 0
    assert ("warning: --cudagraphs needs a CUDA device" in errors) == (cudagraphs and not on_cuda)
    assert ("compiling" in errors) == compile


def test_run_directory(script, tmp_path):
    folder = train(script, tmp_path, total_timesteps=500, num_envs=2)
    config, report = json.loads((folder / "config.json").read_text()), summary(folder)
    assert vars(script.Args(**SMALL, total_timesteps=500, num_envs=2, run_dir=str(tmp_path))).items() <= config.items()
    assert {"versions", "device", "cores", "git_commit"} <= config.keys()
    keys = "script env_id seed num_envs device compile cudagraphs global_step episodic_return episodes steady_sps"
    assert set(f"{keys} warmup_seconds wall_seconds versions".split()) == report.keys()
    assert report["episodes"] == 2 and report["episodic_return"] < 0
    events = EventAccumulator(str(folder)).Reload()
    tags = set(events.Tags()["scalars"])
    assert {"charts/episodic_return", "charts/episodic_length", "charts/SPS", "losses/qf_loss", "losses/alpha"} <= tags
    assert [event.value for event in events.Scalars("charts/episodic_length")] == [200, 200]


def test_same_seed_same_numbers(script, tmp_path):
    checkpoints = []
    for seed in (3, 3, 4):
        folder = train(script, tmp_path, total_timesteps=400, seed=seed)
        checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
        checkpoints.append((checkpoint["returns"], checkpoint["learner"]["log_alpha"].item()))
    assert checkpoints[0] == checkpoints[1] != checkpoints[2]


def test_resuming_continues_the_run(script, tmp_path):
    first = train(script, tmp_path, total_timesteps=450)
    again = train(script, tmp_path, total_timesteps=700, resume=str(first / "checkpoint.pt"))
    checkpoint = torch.load(again / "checkpoint.pt", weights_only=True)
    assert checkpoint["global_step"] == 700 and checkpoint["episodes"] == 3 and len(checkpoint["returns"]) == 3
    assert checkpoint["learner"]["updates"] == 600 and int(checkpoint["learner"]["stored"]) == 700


def test_learning_starts_at_zero_and_several_updates_per_step(tmp_path):
    folder = train(TURBO, tmp_path, total_timesteps=50, learning_starts=0, updates_per_step=3)
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["learner"]["updates"] == 150


def test_nothing_is_learnt_from_rows_that_were_never_stored(script, tmp_path, monkeypatch):
    """Memory that was never written holds NaN here; one row of it would spoil every parameter."""
    empty = torch.empty

    def poisoned(*size, **kwargs):
        tensor = empty(*size, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)
    folder = train(script, tmp_path, total_timesteps=300)
    learner = torch.load(folder / "checkpoint.pt", weights_only=True)["learner"]
    assert learner["log_alpha"].isfinite().all()


BAD_INPUTS = [
    {"env_id": "NoSuchEnv-v0"},
    {"env_id": "CartPole-v1"},
    {"env_id": "FrozenLake-v1"},
    {"env_id": "Unbounded-v0"},
    {"total_timesteps": 0},
    {"num_envs": 0},
    {"batch_size": 0},
    {"buffer_size": 1, "num_envs": 2},
    {"learning_starts": -1},
    {"gamma": 1.5},
    {"tau": -0.1},
    {"policy_lr": float("nan")},
    {"q_lr": 0.0},
    {"alpha": -1.0},
    {"policy_frequency": 0},
    {"target_network_frequency": 0},
    {"checkpoint_interval": -5},
    {"seed": -1},
    {"run_dir": "{tmp}/file/runs"},
    {"resume": "{tmp}/missing.pt"},
    {"resume": "{tmp}/damaged.pt"},
    {"resume": "{tmp}"},
]


@pytest.mark.parametrize("arguments", BAD_INPUTS, ids=str)
def test_bad_input_gets_one_clear_line(script, arguments, tmp_path, capsys):
    """The line names the first of the arguments."""
    (tmp_path / "damaged.pt").write_bytes(b"PK\x03\x04 not a checkpoint")
    (tmp_path / "file").touch()
    fill = {name: v.format(tmp=tmp_path) if isinstance(v, str) else v for name, v in arguments.items()}
    with pytest.raises(SystemExit) as error:
        script.train(script.Args(**SMALL | {"run_dir": str(tmp_path / "runs")} | fill))
    assert error.value.code == 2
    lines, (name, value) = capsys.readouterr().err.splitlines(), next(iter(fill.items()))
    assert len(lines) == 1 and lines[0].startswith(f"error: --{name.replace('_', '-')} {value}: "), lines
    assert not (tmp_path / "runs").exists(), "nothing is left behind"


@pytest.mark.parametrize("arguments", [{"updates_per_step": 0}, {"eval_episodes": 0}, {"evaluate": "missing.pt"}])
def test_bad_input_of_the_turbo_script_alone(arguments, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        TURBO.train(TURBO.Args(**SMALL, **arguments))
    assert error.value.code == 2 and f"error: {flags(**arguments)[0]} " in capsys.readouterr().err


def test_words_that_are_no_arguments(script, tmp_path):
    for words in ({"no_such_flag": 1}, {"seed": "one"}):
        process = start(script, **words, run_dir=tmp_path / "runs")
        _, errors = process.communicate()
        assert process.returncode == 2 and "Traceback" not in errors
        assert flags(**words)[0] in errors


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A small checkpoint of each script."""
    return {s: train(s, tmp_path_factory.mktemp("runs")) / "checkpoint.pt" for s in (PLAIN, TURBO)}


def test_checkpoints_that_do_not_fit_are_refused(script, checkpoints, tmp_path, capsys):
    other = {PLAIN: TURBO, TURBO: PLAIN}[script]
    damaged = tmp_path / "damaged.pt"
    whole = checkpoints[script].read_bytes()
    damaged.write_bytes(whole[: len(whole) // 2])
    for kwargs, flag, word in [
        ({"resume": checkpoints[other]}, "--resume", f"{other.SCRIPT}.py"),
        ({"resume": checkpoints[script], "env_id": "Truncates-v0"}, "--resume", "Pendulum-v1"),
        ({"resume": checkpoints[script]}, "--total-timesteps", "step 200"),
        ({"resume": checkpoints[script], "buffer_size": 99, "total_timesteps": 500}, "--buffer-size", "1000"),
        ({"resume": damaged}, "--resume", "intact"),
    ]:
        with pytest.raises(SystemExit) as error:
            script.train(script.Args(**SMALL | {"total_timesteps": 200} | kwargs))
        line = capsys.readouterr().err
        assert error.value.code == 2 and line.startswith(f"error: {flag} ") and word in line, (kwargs, line)


def test_evaluation_is_deterministic_and_leaves_no_run(checkpoints, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = []
    for _ in range(2):
        TURBO.train(TURBO.Args(**SMALL, evaluate=str(checkpoints[TURBO]), eval_episodes=3))
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    mean, deviation = re.fullmatch(
        r"3 episodes: mean return (-?[\d.]+), standard deviation ([\d.]+)\n", printed[0]
    ).groups()
    assert -2000 < float(mean) < 0 <= float(deviation)
    assert not list(tmp_path.iterdir())


def test_capture_video_records_mp4(script, tmp_path):
    folder = train(script, tmp_path, total_timesteps=201, capture_video=True)
    assert [video.suffix for video in (folder / "videos").glob("*.mp4")]


def test_track_logs_to_wandb_without_a_network(script, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    process = start(script, total_timesteps=250, track=True, run_dir=tmp_path)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert list((run_folders(tmp_path)[0] / "wandb").glob("offline-run-*"))


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_ctrl_c_ends_the_run_with_everything_written(script, tmp_path):
    process = start(script, total_timesteps=10**6, run_dir=tmp_path, checkpoint_interval=150)
    wait_for(lambda: list(tmp_path.glob("*/checkpoint.pt")))
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130 and "Traceback" not in errors
    folder = run_folders(tmp_path)[0]
    step = summary(folder)["global_step"]
    assert step == torch.load(folder / "checkpoint.pt", weights_only=True)["global_step"] >= 150


def test_ctrl_c_while_the_compiler_runs(tmp_path, monkeypatch):
    """In a terminal Ctrl-C reaches the C++ compiler too; the run still ends with checkpoint and summary."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    process = start(TURBO, total_timesteps=10**6, run_dir=tmp_path / "runs", compile=True, start_new_session=True)
    while "compiling" not in process.stderr.readline(200):
        assert process.poll() is None
    wait_for(lambda: list((tmp_path / "cache").rglob("*.cpp")))
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130 and "Traceback" not in errors
    folder = run_folders(tmp_path / "runs")[0]
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["global_step"] == summary(folder)["global_step"]


def test_a_checkpoint_holds_no_more_than_is_stored(script, tmp_path):
    """200 transitions, not the room for a million."""
    folder = train(script, tmp_path, buffer_size=10**6)
    assert (folder / "checkpoint.pt").stat().st_size < 10 * 2**20


def test_actions_in_double_precision(script, tmp_path):
    train(script, tmp_path, env_id="DoublePrecision-v0")


def test_a_checkpoint_is_replaced_whole_or_not_at_all(script, tmp_path, monkeypatch):
    """The run dies in the middle of writing its second checkpoint: the first is still there."""
    write, calls = torch.save, iter(range(10))

    def die_halfway(checkpoint, file):
        write(checkpoint, file)
        if next(calls) == 1:
            file.truncate(file.tell() // 2)
            raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", die_halfway)
    with pytest.raises(OSError, match="no space"):
        train(script, tmp_path, checkpoint_interval=120, total_timesteps=400)
    checkpoint = torch.load(run_folders(tmp_path)[0] / "checkpoint.pt", weights_only=True)
    assert checkpoint["global_step"] == 120


def test_kill_9_leaves_a_checkpoint_to_resume_from(script, tmp_path):
    """Five times in a row, each run resuming the one before, at a random moment of frequent checkpoints."""
    step, resume = 0, {}
    for _ in range(5):
        known = set(tmp_path.glob("*"))
        process = start(script, total_timesteps=10**6, run_dir=tmp_path, checkpoint_interval=20, **resume)
        wait_for(lambda known=known: [p for p in tmp_path.glob("*/checkpoint.pt") if p.parent not in known])
        time.sleep(random.uniform(0, 1))
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        path = next(p for p in tmp_path.glob("*/checkpoint.pt") if p.parent not in known)
        checkpoint = torch.load(path, weights_only=True)
        assert checkpoint["global_step"] > step
        step, resume = checkpoint["global_step"], {"resume": path}
    folder = train(script, tmp_path, total_timesteps=step + 10, resume=str(resume["resume"]))
    assert summary(folder)["global_step"] == step + 10
