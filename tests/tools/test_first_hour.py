"""`./run.sh --gpu-first-hour` runs every step once, in order, within its time, and resumes."""

import shlex
import subprocess
from types import SimpleNamespace

import pytest
import torch
import tyro
from conftest import WITH_PYTHON, wait_for

from benchmark import first_hour
from benchmark.speed import matrix
from common import ROOT, scripts
from common.algorithms import ALGORITHMS

STEPS = {"first": "-c pass", "second": '-c "raise SystemExit(3)"', "third": "-c print(33)"}


@pytest.fixture
def hour(tmp_path, monkeypatch):
    """The driver with steps of a moment each, on a machine that seems to have a CUDA device."""
    monkeypatch.setattr(first_hour, "STEPS", dict(STEPS))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(first_hour, "ROOT", tmp_path)
    (tmp_path / "benchmark").mkdir()
    (tmp_path / "benchmark" / "report.py").write_text("print('reported')")
    return first_hour.Args(run_dir=tmp_path / "runs")


def run(args):
    """The exit code of the driver."""
    with pytest.raises(SystemExit) as ended:
        first_hour.main(args)
    return ended.value.code


def test_a_step_that_fails_is_named_and_run_again(hour, capfd):
    assert run(hour) == 1
    assert {path.stem for path in hour.run_dir.glob("*.done")} == {"first", "third"}
    assert (hour.run_dir / "third.txt").read_text() == "33\n"
    printed = capfd.readouterr().out
    assert f"second: failed, see {hour.run_dir / 'second.txt'}" in printed and "reported" in printed
    first_hour.STEPS["second"] = "-c pass"
    assert run(hour) == 0
    printed = capfd.readouterr().out
    assert "first: done before" in printed and "second: done\n" in printed and "third: done before" in printed


@pytest.mark.parametrize("interrupted", [False, True])
def test_when_the_time_is_over_a_step_ends_and_the_rest_is_left(interrupted, hour, capfd, monkeypatch):
    """Or at Ctrl-C: the step and what it has started are gone."""
    pid = hour.run_dir / "pid"
    code = f"import os, time; open({str(pid)!r}, chr(119)).write(str(os.getpid())); time.sleep(600)"
    first_hour.STEPS["first"] = shlex.join(["-c", code])

    def wait(process, timeout=None, wait=subprocess.Popen.wait):
        if timeout in (None, first_hour.processes.SECONDS_TO_STOP):
            return wait(process, timeout)
        wait_for(lambda: pid.exists() and pid.read_text())
        if interrupted:
            raise KeyboardInterrupt
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    first_hour.STEPS.pop("third")
    monkeypatch.setattr(first_hour, "time", SimpleNamespace(monotonic=iter([0, 1, 3600]).__next__))
    if interrupted:
        with pytest.raises(KeyboardInterrupt):
            first_hour.main(hour)
    else:
        assert run(hour) == 1
        printed = capfd.readouterr().out
        assert "first: not finished, left" in printed and "second: left" in printed and "reported" in printed
    assert not list(hour.run_dir.glob("*.done"))
    with pytest.raises(ProcessLookupError):
        first_hour.processes.os.kill(int(pid.read_text()), 0)


def test_a_step_that_ends_at_sigterm_is_waited_for(tmp_path):
    """A learning run has its checkpoint then."""
    begun, over = tmp_path / "begun", tmp_path / "over"
    code = "import pathlib, signal, sys, time\n"
    code += f"def end(*_): time.sleep(0.5); pathlib.Path({str(over)!r}).touch(); sys.exit(130)\n"
    code += f"signal.signal(signal.SIGTERM, end); pathlib.Path({str(begun)!r}).touch(); time.sleep(600)"
    assert first_hour.finish(["-c", code], tmp_path / "log.txt", 1) == "not finished, left for the next time"
    assert over.exists() == begun.exists()  # a slow machine may not have come that far


def test_without_a_cuda_device_it_is_refused_and_a_dry_run_prints_the_commands():
    command = ["bash", "run.sh", "--gpu-first-hour"]
    options = {"cwd": ROOT, "env": WITH_PYTHON, "capture_output": True, "text": True, "timeout": 120}
    if not torch.cuda.is_available():
        refused = subprocess.run(command, **options)
        assert refused.returncode == 2 and "needs a CUDA device" in refused.stderr
    printed = subprocess.run([*command, "--dry-run"], **options, check=True).stdout.splitlines()
    assert len(printed) == len(first_hour.STEPS) and all(line.startswith("python -m ") for line in printed)


def words_of(name):
    return first_hour.commands(first_hour.Args())[name]


@pytest.mark.parametrize("name", [name for name, words in first_hour.STEPS.items() if "benchmark.speed" in words])
def test_commands_of_speed_steps_are_accepted(name, monkeypatch, capsys):
    """And so are those of the runs that they start, by the scripts."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    matrix.main(tyro.cli(matrix.Args, args=[*words_of(name)[2:], "--dry-run"]))
    lines = capsys.readouterr().out.splitlines()
    assert lines
    for words in map(shlex.split, lines):
        (name, *flags) = words[3:] if words[1] == "-m" else [words[1].split("/")[1].removesuffix(".py"), *words[2:]]
        assert name.removesuffix("_torchcompile") in ALGORITHMS
        tyro.cli(scripts.load(name).Args, args=flags)
