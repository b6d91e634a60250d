"""Faults in a run: signals, crashes, full disks, closed pipes, NaN. Nothing is lost, and one line gives the cause."""

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import (
    AGENTS,
    GAMES,
    PLAIN,
    TURBO,
    Countdown,
    DiscreteCountdown,
    countdown,
    entry_of,
    learner_class,
    leaves,
    script_params,
    stem,
    tiny,
    train,
    wait_for,
)
from copies import ROOT
from test_cli import flags, run_tiny, start, summary


def checkpoint_step(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)["global_step"]


SIGNALS = [pytest.param(*one.values, signal.SIGTERM, id=one.id, marks=one.marks) for one in script_params()]
SIGNALS += [pytest.param(PLAIN["sac"], signal.SIGINT, id="sac-SIGINT")]
OTHERS = {"SIGHUP": TURBO["dqn"], "SIGUSR1": PLAIN["sac"], "SIGXCPU": TURBO["dqn"]}
SIGNALS += [pytest.param(script, signal.Signals[name], id=f"{stem(script)}-{name}") for name, script in OTHERS.items()]


def before_each_step(run, function):
    """Call `function()` in each step of a run's environments."""
    step = run.envs.step

    def call_and_step(*actions):
        function()
        return step(*actions)

    run.envs.step = call_and_step


@pytest.mark.parametrize(("script", "number"), SIGNALS)
def test_a_signal_ends_every_loop(script, number, hangups, tmp_path):
    """After the environments' step in which it arrives, with checkpoint, policy, summary and a shell's exit code.

    Several GPUs end after the iteration.
    """
    sent_at = []

    def interrupt(run):
        if run.step >= 150 and not sent_at:
            sent_at.append(run.step)
            signal.raise_signal(number)
            signal.raise_signal(number)  # as from a wrapper that forwards it

    args = script.Args(**tiny(script), total_timesteps=1000, run_dir=str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        train(script, args, on_start=lambda run: before_each_step(run, lambda: interrupt(run)))
    assert ended.value.code == 128 + number
    (folder,) = tmp_path.iterdir()
    iteration = args.num_envs * (args.num_steps if hasattr(script, "JointRun") else 1)
    assert checkpoint_step(folder) == summary(folder)["global_step"] == sent_at[0] + iteration
    assert (folder / "policy.pt2").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_process(either, number, tmp_path):
    process = start(either, total_timesteps=10**6, run_dir=tmp_path, checkpoint_interval=150)
    wait_for(lambda: list(tmp_path.glob("*/checkpoint.pt")))
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == 128 + number and "Traceback" not in errors
    (folder,) = tmp_path.iterdir()
    assert checkpoint_step(folder) == summary(folder)["global_step"] >= 150


def fake_clock(script, monkeypatch):
    """From now on a look at the clock takes the script a millisecond; returns the time, in a list."""
    now = [0.0]

    def tick():
        now[0] += 0.001
        return now[0]

    monkeypatch.setattr(script.time, "perf_counter", tick)
    return now


def test_a_second_signal_after_a_second_interrupts_at_once(either, tmp_path, monkeypatch):
    """Also a checkpoint that takes too long."""
    now = fake_clock(either, monkeypatch)

    def interrupt(learner, losses, step):
        signal.raise_signal(signal.SIGINT)
        now[0] += 2.0
        signal.raise_signal(signal.SIGINT)
        pytest.fail("is not interrupted")

    with pytest.raises(SystemExit) as ended:
        train(either, either.Args(**tiny(either), total_timesteps=1000, run_dir=str(tmp_path)), on_log=interrupt)
    (folder,) = tmp_path.iterdir()
    assert ended.value.code == 130 and not (folder / "checkpoint.pt").exists()


def test_a_warning_that_schedulers_repeat_does_not_interrupt(either, tmp_path, monkeypatch):
    """Linux sends SIGXCPU every second from the limit on."""
    now = fake_clock(either, monkeypatch)

    def warn(learner, losses, step):
        for _ in range(3):
            signal.raise_signal(signal.SIGXCPU)
            now[0] += 2.0

    with pytest.raises(SystemExit) as ended:
        train(either, either.Args(**tiny(either), total_timesteps=1000, run_dir=str(tmp_path)), on_log=warn)
    (folder,) = tmp_path.iterdir()
    assert ended.value.code == 128 + signal.SIGXCPU and checkpoint_step(folder) == summary(folder)["global_step"]


def test_ctrl_c_where_the_environment_has_replaced_the_handler(either, tmp_path):
    """It raises KeyboardInterrupt, of which the run does not know: as an error, it leaves a checkpoint."""

    def interrupt(learner, losses, step):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(either, either.Args(**tiny(either), total_timesteps=1000, run_dir=str(tmp_path)), on_log=interrupt)
    (folder,) = tmp_path.iterdir()
    assert checkpoint_step(folder) == summary(folder)["global_step"]


@pytest.mark.parametrize("error", [BrokenPipeError, ConnectionResetError, EOFError])
def test_a_pipe_that_breaks_at_ctrl_c(either, error, tmp_path):
    """In a terminal, Ctrl-C also ends the environments' processes. Without it, a broken pipe is an error."""

    def break_pipe(learner, losses, step, interrupted):
        if interrupted:
            signal.raise_signal(signal.SIGINT)
        raise error("of a worker")

    for interrupted, wanted in ((True, SystemExit), (False, error)):
        args = either.Args(**tiny(either), total_timesteps=1000, run_dir=str(tmp_path / str(interrupted)))
        with pytest.raises(wanted) as ended:
            train(either, args, on_log=partial(break_pipe, interrupted=interrupted))
        assert not interrupted or ended.value.code == 130
        (folder,) = (tmp_path / str(interrupted)).iterdir()
        assert checkpoint_step(folder) == summary(folder)["global_step"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_files_that_cannot_be_synced(either, number, tmp_path, monkeypatch):
    """Some file systems cannot do it at all, which costs no checkpoint. Any other error may mean that it is lost."""

    def fsync(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    if number == errno.EINVAL:
        assert checkpoint_step(run_tiny(either, tmp_path)) == 200
    else:
        with pytest.raises(OSError, match=r"could not write .*Input/output error"):
            run_tiny(either, tmp_path)


UNMAPPABLE = "/sys/kernel/mm/transparent_hugepage/enabled"


@pytest.mark.skipif(not Path(UNMAPPABLE).exists(), reason="this system has no such file")
def test_a_checkpoint_that_cannot_be_mapped_is_read(either, tmp_path, monkeypatch):
    """The error is that of a real file which the system cannot map to memory."""
    folder = run_tiny(either, tmp_path)
    from_file = torch.UntypedStorage.from_file
    with pytest.raises(RuntimeError, match="No such device"):
        from_file(UNMAPPABLE, False, 10)
    monkeypatch.setattr(torch.UntypedStorage, "from_file", lambda *words: from_file(UNMAPPABLE, False, 10))
    args = either.Args(**tiny(either), total_timesteps=300, run_dir=str(tmp_path), resume=str(folder))
    train(either, args)
    assert sorted(checkpoint_step(own) for own in tmp_path.iterdir()) == [200, 300]


def test_a_second_signal_within_a_second_leaves_the_checkpoint_alone(either, tmp_path, monkeypatch):
    """As wrappers send it: here with each file."""
    fake_clock(either, monkeypatch)
    write = either.replace_file

    def write_interrupted(path, content):
        signal.raise_signal(signal.SIGINT)
        write(path, content)

    monkeypatch.setattr(either, "replace_file", write_interrupted)
    interrupt = lambda learner, losses, step: signal.raise_signal(signal.SIGINT)  # noqa: E731
    with pytest.raises(SystemExit) as ended:
        train(either, either.Args(**tiny(either), total_timesteps=1000, run_dir=str(tmp_path)), on_log=interrupt)
    (folder,) = tmp_path.iterdir()
    assert ended.value.code == 130 and checkpoint_step(folder) == summary(folder)["global_step"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_slurm_recipe_of_a_run_is_queued_again_and_goes_on(tmp_path):
    """With another script, and `srun` and `scontrol` that only say what they were asked for."""
    text = (ROOT / "doc" / "examples" / "slurm" / "run.sbatch").read_text()
    words = flags(**tiny(PLAIN["dqn"]), total_timesteps=10**6)
    command = f"{sys.executable} leanrl/dqn.py {' '.join(words)}"
    given = "python leanrl/sac_continuous_action_torchcompile.py --compile --cudagraphs"
    assert given in text
    text = text.replace(given, command).replace("runs/slurm", f"{tmp_path}/slurm")
    functions = f'srun() {{ "$@" & echo $! > {tmp_path}/pid; wait $!; }}\n'
    functions += f'scontrol() {{ echo "$@" >> {tmp_path}/scontrol; }}\n'
    (tmp_path / "job").write_text(text.replace("#!/bin/bash\n", functions))
    steps = []
    for attempt in (1, 2):
        job = {"cwd": ROOT, "env": os.environ | {"SLURM_JOB_ID": "7"}, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(["bash", tmp_path / "job"], **job)
        wait_for(lambda attempt=attempt: len(list(tmp_path.glob("slurm-7/*/events.*"))) == attempt)
        time.sleep(1)
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGUSR1)
        assert process.wait(timeout=60) == 138
        assert (tmp_path / "scontrol").read_text() == "requeue 7\n" * attempt
        steps.append(max(checkpoint_step(folder) for folder in tmp_path.glob("slurm-7/*")))
    assert steps[0] < steps[1]


def test_a_signal_that_is_ignored_stays_ignored(tmp_path):
    """nohup starts a program that way."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        hang_up = lambda learner, losses, step: signal.raise_signal(signal.SIGHUP)  # noqa: E731
        script = PLAIN["sac"]
        train(script, script.Args(**tiny(script), total_timesteps=300, run_dir=str(tmp_path)), on_log=hang_up)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert summary(next(tmp_path.iterdir()))["global_step"] == 300


def test_what_windows_lacks_is_not_needed(either, tmp_path, monkeypatch):
    monkeypatch.delattr(signal, "SIGHUP")
    monkeypatch.delattr(os, "sysconf")
    folder = run_tiny(either, tmp_path)
    assert summary(folder)["machine"]["memory_gib"] == 0


def test_ctrl_c_while_the_compiler_runs(tmp_path, monkeypatch):
    """In a terminal Ctrl-C reaches the C++ compiler too; the run still ends with checkpoint and summary."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    kwargs = {"total_timesteps": 10**6, "run_dir": tmp_path / "runs", "compile": True}
    process = start(TURBO["dqn"], start_new_session=True, **kwargs)
    wait_for(lambda: list((tmp_path / "cache").rglob("*.cpp")))
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130 and "Traceback" not in errors
    (folder,) = (tmp_path / "runs").iterdir()
    assert checkpoint_step(folder) == summary(folder)["global_step"]


def test_an_error_in_the_step_of_a_signal_is_shown(either, tmp_path):
    def fail(learner, losses, step):
        signal.raise_signal(signal.SIGINT)
        raise ZeroDivisionError("in the very step")

    with pytest.raises(ZeroDivisionError, match="in the very step"):
        train(either, either.Args(**tiny(either), total_timesteps=1000, run_dir=str(tmp_path)), on_log=fail)
    (folder,) = tmp_path.iterdir()
    assert checkpoint_step(folder) == summary(folder)["global_step"]


def test_an_error_leaves_a_checkpoint(either, tmp_path):
    """Of the environment or of an edit: it is shown, and nothing is lost."""

    def fail(learner, losses, step):
        if step >= 200:
            raise ZeroDivisionError("of an edit")

    args = either.Args(**tiny(either), total_timesteps=1000, run_dir=str(tmp_path))
    with pytest.raises(ZeroDivisionError, match="of an edit"):
        train(either, args, on_log=fail)
    (folder,) = tmp_path.iterdir()
    assert 200 <= checkpoint_step(folder) == summary(folder)["global_step"] < 400
    assert (folder / "policy.pt2").exists()


@pytest.mark.thorough
def test_kill_9_leaves_a_checkpoint_to_resume_from(either, tmp_path):
    """Several times in a row, each run resuming the one before, at a random moment between checkpoints."""
    step, resume = 0, {}
    for _ in range(5 if either is PLAIN["sac"] else 2):
        known = set(tmp_path.glob("*"))
        process = start(either, total_timesteps=10**6, run_dir=tmp_path, checkpoint_interval=20, **resume)
        wait_for(lambda known=known: [p for p in tmp_path.glob("*/checkpoint.pt") if p.parent not in known])
        time.sleep(random.uniform(0, 1))
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        path = next(p for p in tmp_path.glob("*/checkpoint.pt") if p.parent not in known)
        checkpoint = torch.load(path, weights_only=True)
        assert checkpoint["global_step"] > step
        step, resume = checkpoint["global_step"], {"resume": path}
    folder = run_tiny(either, tmp_path, total_timesteps=step + 10, resume=str(resume["resume"]))
    assert summary(folder)["global_step"] == step + 10


def test_a_checkpoint_is_replaced_whole_or_not_at_all(either, tmp_path, monkeypatch, capsys):
    """The disk is full from the middle of the second checkpoint on: the first is still there, nothing half written.

    The run goes on, as there may be room again.
    """
    write, checkpoints = torch.save, []

    def fill_the_disk(content, file, **kwargs):
        write(content, file, **kwargs)
        checkpoints.extend([content] * ("global_step" in content))
        if "global_step" in content and len(checkpoints) > 1:
            file.truncate(file.tell() // 2)
            raise RuntimeError("unexpected pos 270208 vs 270096")  # what torch says

    monkeypatch.setattr(torch, "save", fill_the_disk)
    line = r"could not write .*checkpoint.pt: is the disk full\? (.*)"
    with pytest.raises(OSError, match=line):
        run_tiny(either, tmp_path, checkpoint_interval=150, total_timesteps=400)
    assert re.search(rf"error: {line}; the run goes on, and its last checkpoint is kept", capsys.readouterr().err)
    (folder,) = tmp_path.iterdir()
    assert checkpoint_step(folder) == 150 and summary(folder)["global_step"] == 400
    assert not list(folder.glob("*.tmp"))


@pytest.mark.parametrize("name", ["policy.pt2", "checkpoint.pt", "summary.json"])
def test_the_error_that_ends_a_run_is_shown_while_the_disk_is_full(either, name, tmp_path, monkeypatch):
    """The error of the file is shown below it."""
    write = either.replace_file

    def fill_the_disk(path, content):
        if path.name == name:
            raise OSError(f"could not write {path}: is the disk full?")
        write(path, content)

    def fail(learner, losses, step):
        raise ZeroDivisionError("of the environment")

    monkeypatch.setattr(either, "replace_file", fill_the_disk)
    with pytest.raises(OSError, match=f"could not write .*{name}: is the disk full") as ended:
        train(either, either.Args(**tiny(either), total_timesteps=1000, run_dir=str(tmp_path)), on_log=fail)
    assert "ZeroDivisionError: of the environment" in "".join(traceback.format_exception(ended.value))
    (folder,) = tmp_path.iterdir()
    assert (folder / "summary.json").exists() == (name != "summary.json")


def test_the_error_that_ends_a_run_is_shown_where_weights_are_nan(either, tmp_path, capsys):
    def spoil_and_fail(learner, losses, step):
        networks = learner.state_dict()["networks"]
        next(tensor for _, tensor in leaves(networks) if tensor.is_floating_point()).data.fill_(float("nan"))
        raise ZeroDivisionError("of the environment")

    with pytest.raises(ZeroDivisionError, match="of the environment"):
        train(either, either.Args(**tiny(either), total_timesteps=1000, run_dir=str(tmp_path)), on_log=spoil_and_fail)
    (folder,) = tmp_path.iterdir()
    assert "the checkpoint would hold NaN or inf" in capsys.readouterr().err
    assert not (folder / "checkpoint.pt").exists() and (folder / "summary.json").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_does_not_abort_the_process_at_the_policy(either, tmp_path):
    """As torch.export.save does, in C++."""
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'leanrl')!r}); import {stem(either)} as script, pathlib\n"
    code += "replace_file = script.replace_file\n"
    code += "def full(path, write):\n"
    code += "    path.with_suffix('.tmp').symlink_to('/dev/full')\n"
    code += "    replace_file(path, write)\n"
    code += "script.replace_file = full\n"
    code += f"script.train(script.Args(run_dir={str(tmp_path)!r}, **{tiny(either)!r}, total_timesteps=200))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "policy.pt2: is the disk full? ([Errno 28] No space left on device)" in done.stderr


def test_a_save_makes_the_folder_that_was_deleted(either, tmp_path):
    """TensorBoard ends the run with an error, as its file is gone; nothing that was learned is lost."""

    def delete(learner, losses, step):
        for folder in tmp_path.iterdir():
            shutil.rmtree(folder)

    with pytest.raises(FileNotFoundError, match=r"events\.out"):
        train(either, either.Args(**tiny(either), total_timesteps=10**6, run_dir=str(tmp_path)), on_log=delete)
    (folder,) = tmp_path.iterdir()
    assert {"checkpoint.pt", "policy.pt2", "summary.json"} <= {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("stderr", ["2>&1 >/dev/null | head -c 200", "2>/dev/full", "2>&-"])
def test_a_run_goes_on_when_nobody_reads_stderr(either, stderr, tmp_path):
    words = flags(**tiny(either), total_timesteps=400, run_dir=tmp_path, seed=1)
    command = " ".join([sys.executable, str(ROOT / "leanrl" / f"{stem(either)}.py"), *words, stderr])
    subprocess.run(["bash", "-c", command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (folder,) = tmp_path.iterdir()
    assert summary(folder)["global_step"] == checkpoint_step(folder) == 400


def test_training_stops_where_losses_are_no_longer_finite(either, tmp_path, monkeypatch):
    """Exit code 1, one line, the checkpoint from before, a summary."""
    losses_of = learner_class(either).losses
    calls = iter(range(100))

    def explode(learner):
        losses = losses_of(learner)
        return losses if next(calls) == 0 else {name: float("nan") for name in losses}

    monkeypatch.setattr(learner_class(either), "losses", explode)
    with pytest.raises(SystemExit) as error:
        run_tiny(either, tmp_path, total_timesteps=1000, checkpoint_interval=50)
    line = error.value.code
    assert line.startswith("error: step ") and " is nan; usual causes: NaN in observations or rewards" in line
    (folder,) = tmp_path.iterdir()
    assert checkpoint_step(folder) < summary(folder)["global_step"] < 1000


@pytest.mark.parametrize("script", script_params())
def test_a_checkpoint_is_not_overwritten_with_nan(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "LOG_INTERVAL", 5, raising=False)

    def spoil(learner, losses, step):
        if step >= 300:
            networks = learner.state_dict()["networks"]
            next(tensor for _, tensor in leaves(networks) if tensor.is_floating_point()).data.fill_(float("nan"))

    sizes = {"total_timesteps": 300, "checkpoint_interval": 100, "run_dir": str(tmp_path)}
    with pytest.raises(SystemExit, match="the checkpoint would hold NaN"):
        train(script, script.Args(**tiny(script) | sizes), on_log=spoil)
    (folder,) = tmp_path.iterdir()
    assert checkpoint_step(folder) == 200


class Broken(Countdown):
    """From the 120th step of all on, rewards or observations are NaN."""

    steps_so_far = 0

    def __init__(self, what="reward", **kwargs):
        super().__init__(**kwargs)
        self.what = what

    def step(self, action):
        Broken.steps_so_far += 1
        obs, reward, *rest = super().step(np.nan_to_num(action))  # of a policy that has seen a NaN
        if Broken.steps_so_far < 120:
            return obs, reward, *rest
        return (obs, np.nan, *rest) if self.what == "reward" else (obs * np.nan, reward, *rest)


class DiscreteBroken(Broken, DiscreteCountdown):
    pass


for what in ("reward", "observation"):
    gym.register(f"Broken-{what}-v0", entry_point=Broken, kwargs={"what": what})
    gym.register(f"DiscreteBroken-{what}-v0", entry_point=DiscreteBroken, kwargs={"what": what})


@pytest.mark.parametrize("what", ["reward", "observation"])
@pytest.mark.parametrize("script", script_params(left_out=AGENTS | GAMES))
def test_nan_of_an_environment_ends_the_run(script, what, tmp_path):
    """Before any checkpoint that holds it."""
    Broken.steps_so_far = 0
    env_id = countdown(script, f"Broken-{what}")
    with pytest.raises(SystemExit) as error:
        run_tiny(script, tmp_path, total_timesteps=1000, checkpoint_interval=50, env_id=env_id)
    assert "NaN in observations or rewards" in error.value.code
    (folder,) = tmp_path.iterdir()
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    latest = 160 if entry_of(script).on_device else 100  # steps that reset come on top
    assert 100 <= checkpoint["global_step"] <= latest
    assert all(leaf.isfinite().all() for _, leaf in leaves(checkpoint["learner"]) if torch.is_tensor(leaf))
    json.loads((folder / "summary.json").read_text(), parse_constant=pytest.fail)


def test_an_environments_own_missing_file_is_not_blamed_on_a_flag(either, tmp_path):
    def lost(**kwargs):
        raise FileNotFoundError("model.xml")

    gym.register("Lost-v0", entry_point=lost)
    try:
        with pytest.raises(FileNotFoundError, match=r"model\.xml"):
            run_tiny(either, tmp_path, env_id="Lost-v0")
    finally:
        del gym.registry["Lost-v0"]
    assert not list(tmp_path.iterdir())
