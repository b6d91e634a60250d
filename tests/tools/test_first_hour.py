"""`./run.sh --gpu-first-hour` runs every step once, in order, within its time, and resumes; on the emulated device."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch

from benchmark import ROOT, first_hour

STEPS = {"first": ("-c pass", ""), "second": ('-c "raise SystemExit(3)"', ""), "third": ("-c print(33)", "")}
EMULATED = f"""
import sys
sys.path.append({str(ROOT / "tools")!r})
from emulated_cuda import emulated_cuda
from generated_cuda import compiled_for_cuda
contexts = emulated_cuda(), compiled_for_cuda(execute=False)
for context in contexts:
    context.__enter__()
"""


@pytest.fixture
def hour(tmp_path, monkeypatch):
    """The driver with steps of a moment each, on a machine that seems to have a CUDA device."""
    monkeypatch.setattr(first_hour, "STEPS", dict(STEPS))
    monkeypatch.setattr(first_hour, "machine", lambda: {"gpu": "a card"})
    monkeypatch.setattr(first_hour, "commit", lambda: "abc")
    monkeypatch.setattr(first_hour, "path_here", lambda results, kind, name: results / kind / f"{name}.json")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(first_hour, "ROOT", tmp_path)
    (tmp_path / "benchmark").mkdir()
    (tmp_path / "benchmark" / "report.py").write_text("print('reported')")
    return first_hour.Args(steps=tuple(STEPS), results=tmp_path / "results", run_dir=tmp_path / "runs")


def codes(args):
    paths = (args.results / "first_hour").glob("*.json")
    return {path.stem: json.loads(path.read_text())["exit_code"] for path in paths}


def test_a_step_that_fails_is_named_and_run_again(hour, capfd):
    with pytest.raises(SystemExit, match="1"):
        first_hour.main(hour)
    assert codes(hour) == {"first": 0, "second": 3, "third": 0}
    assert (hour.run_dir / "third.txt").read_text() == "33\n"
    printed = capfd.readouterr().out
    assert f"second: failed, see {hour.run_dir / 'second.txt'}" in printed and "reported" in printed

    first_hour.STEPS["second"] = ("-c pass", "")
    first_hour.main(hour)
    assert codes(hour) == {"first": 0, "second": 0, "third": 0}
    printed = capfd.readouterr().out
    assert "first: done before" in printed and "second: done, " in printed and "third: done before" in printed


def test_at_another_commit_steps_run_again(hour, monkeypatch, capfd):
    del first_hour.STEPS["second"]
    hour.steps = ("first", "third")
    first_hour.main(hour)
    monkeypatch.setattr(first_hour, "commit", lambda: "def")
    first_hour.main(hour)
    assert "done before" not in capfd.readouterr().out


def test_what_the_report_writes_is_no_other_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(first_hour, "ROOT", tmp_path)
    assert first_hour.commit() is None
    page = tmp_path / "README.md"
    page.write_text("not measured")
    author = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.com"]
    for words in (["init"], ["add", "."], [*author, "commit", "-m", "a page"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True)
    before = first_hour.commit()
    page.write_text("measured")
    assert first_hour.commit() == before is not None


def test_an_interrupt_ends_the_step_and_says_how_to_go_on(hour, monkeypatch, capfd):
    marker = hour.run_dir / "went_on"
    first_hour.STEPS["first"] = (f'-c "import time; time.sleep(1); open({str(marker)!r}, chr(119))"', "")

    def interrupt(process, timeout=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="130"):
        patch.setattr(subprocess.Popen, "wait", interrupt)
        patch.setattr(first_hour.rounds, "end", lambda process: process.kill())
        first_hour.main(hour)
    assert codes(hour) == {} and "the same command resumes" in capfd.readouterr().err
    time.sleep(1.5)
    assert not marker.exists()


def test_when_the_time_is_over_a_step_ends_and_the_rest_is_left(hour, capfd):
    first_hour.STEPS["first"] = ('-c "import time; time.sleep(60)"', "")
    hour.minutes = 2 / 60
    first_hour.main(hour)
    assert codes(hour) == {}
    printed = capfd.readouterr().out
    assert "first: not finished after" in printed and "second: left" in printed and "reported" in printed


def test_without_a_cuda_device_it_is_refused_and_a_dry_run_prints_the_commands():
    command = ["bash", "run.sh", "--gpu-first-hour"]
    options = {"cwd": ROOT, "capture_output": True, "text": True}
    if not torch.cuda.is_available():
        refused = subprocess.run(command, **options)
        assert refused.returncode == 2 and "needs a CUDA device" in refused.stderr
    printed = subprocess.run([*command, "--dry-run"], **options, check=True).stdout.splitlines()
    assert len(printed) == len(first_hour.STEPS) and all(line.startswith("python -m ") for line in printed)


@pytest.mark.thorough
def test_a_trial_on_the_emulated_device(tmp_path):
    pytest.importorskip("triton")
    (tmp_path / "sitecustomize.py").write_text(EMULATED)
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    folders = ["--results", tmp_path / "results", "--run-dir", tmp_path / "runs"]
    command = [sys.executable, "-m", "benchmark.first_hour", "--trial", "--steps", "model", "threads", *folders]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(list((tmp_path / "results").glob("*/first_hour/*.json"))) == 2
    assert "matmul 1x256x256x256, TF32" in (tmp_path / "runs" / "model.txt").read_text()
    (speed,) = (tmp_path / "runs" / "threads").glob("*/quick/dqn/CartPole-v1/compile+cudagraphs/21.json")
    assert json.loads(speed.read_text())["summary"]["steady_sps"] > 0
