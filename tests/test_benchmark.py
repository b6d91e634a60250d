"""The speed table, from summaries as the scripts write them."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmark"))
import run  # noqa: E402


def write(folder, sps, episodic_return=1.0, matmuls="highest"):
    folder.mkdir(parents=True)
    report = {"steady_sps": sps, "warmup_seconds": 10 * sps, "episodic_return": episodic_return, "device": "cpu"}
    report |= {"env_id": "Env-v0", "num_envs": 1, "matmul_precision": matmuls, "versions": {"torch": "2"}}
    (folder / "summary.json").write_text(json.dumps(report))


def report(*flags):
    command = [sys.executable, str(ROOT / "benchmark" / "run.py"), *flags]
    return subprocess.run(command, capture_output=True, text=True)


def test_table_of_medians_ranges_and_ratios_within_a_round(tmp_path):
    for seed, plain, eager in [(1, 100, 150), (2, 50, 100), (3, 80, 200)]:
        write(tmp_path / "plain" / str(seed) / "run", plain)
        write(tmp_path / "eager" / str(seed) / "run", eager, None, matmuls="highest" if seed < 3 else "high")
    done = report("--report-only", "--run-dir", str(tmp_path))
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[0].startswith("sac_continuous_action on Env-v0, 1 environment(s), CPU")
    rows = [
        "| plain | highest | 80.0 (50.0 to 100.0) | 1.00 (1.00 to 1.00) | 800.0 (500.0 to 1000.0) | 1 (1 to 1) |",
        "| eager | high, highest | 150.0 (100.0 to 200.0) | 2.00 (1.50 to 2.50) | 1500.0 (1000.0 to 2000.0) | none |",
        "| compile | | not measured | | | |",
    ]
    assert set(rows) <= set(lines)


def program(path, body):
    """A stand-in for a training process: `body` may use `turns`, whose turns have 10 steps."""
    imports = f"import os, sys, time\nsys.path.append({str(ROOT / 'benchmark')!r})\nfrom turns import Turns\n"
    path.write_text(f"{imports}turns = Turns(600)\n{body}")
    return path


def test_turns_count_neither_waiting_nor_an_unfinished_turn(tmp_path):
    """Turns end at the steps 15, 25 and 35; printing is no signal."""
    body = """
for step in (5, 10, 15, 25, 35, 38):
    print("noise")
    turns(step)
    time.sleep(0.01)
print(turns.steps_taken, turns.seconds, turns.waited, file=turns.channel)
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    process = subprocess.Popen([sys.executable, program(tmp_path / "program.py", body)], **pipes)
    for _ in range(4):
        assert process.stdout.readline() == "over\n"
        time.sleep(0.3)
        print(file=process.stdin, flush=True)
    steps, seconds, waited = map(float, process.communicate()[0].split())
    assert steps == 30 and 0.04 <= seconds < 0.6 and waited >= 1.2


def test_a_process_that_nobody_drives_any_more_ends(tmp_path):
    command = [sys.executable, program(tmp_path / "program.py", "turns(1)\nprint('alive', file=turns.channel)")]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == "over\n"


@pytest.mark.parametrize("death", ["os._exit(3)", "turns(1)\nos._exit(3)", "turns(1)\nturns(11)\nos._exit(3)"])
def test_a_round_in_which_a_mode_dies_says_so_and_leaves_no_process(death, tmp_path, monkeypatch):
    body = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\nfor step in range(10**9):\n    turns(step)"
    modes = {"good": [str(program(tmp_path / "good.py", body))], "bad": [str(program(tmp_path / "bad.py", death))]}
    monkeypatch.setattr(run, "MODES", modes)
    with pytest.raises(SystemExit, match=r"error: bad ended with exit code 3; see .*log\.txt"):
        run.run_round(run.Args(run_dir=tmp_path / "runs"), list(modes), seed=1)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_round_takes_turns(tmp_path, monkeypatch):
    """Two modes of which each notes its turns; the shorter run ends first."""
    log = tmp_path / "turns.txt"
    body = "for step in range(0, {}, 10):\n    turns(step)\n    open({!r}, 'a').write('{}')"
    for name, steps in (("a", 30), ("b", 50)):
        path = program(tmp_path / f"{name}.py", body.format(steps, str(log), name))
        monkeypatch.setitem(run.MODES, name, [str(path)])
    run.run_round(run.Args(run_dir=tmp_path / "runs"), ["a", "b"], seed=1)
    assert log.read_text() == "abababbb"


def test_a_real_round(tmp_path):
    flags = ["--modes", "plain", "eager", "--seeds", "1", "--env-id", "Pendulum-v1", "--total-timesteps", "5300"]
    done = report(*flags, "--run-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith(("| plain", "| eager"))]
    assert len(rows) == 2 and not any("none" in row or "not measured" in row for row in rows)


def test_bad_input(tmp_path):
    write(tmp_path / "plain" / "1" / "run", 1)
    done = report("--run-dir", str(tmp_path))
    assert done.returncode == 2 and done.stderr.startswith(f"error: --run-dir {tmp_path}: it holds runs")
    for flags, choices in [(["--modes", "fast"], "plain, eager"), (["--algo", "a2c"], "sac_continuous_action")]:
        done = report(*flags)
        assert done.returncode == 2 and done.stderr.startswith(f"error: {flags[0]} {flags[1]}: choose from")
        assert choices in done.stderr and len(done.stderr.splitlines()) == 1
