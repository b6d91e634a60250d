"""The speed table, from summaries as the scripts write them."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def write(folder, sps, episodic_return=1.0):
    folder.mkdir(parents=True)
    report = {"steady_sps": sps, "warmup_seconds": 10 * sps, "episodic_return": episodic_return, "device": "cpu"}
    report |= {"env_id": "Env-v0", "num_envs": 1, "versions": {"torch": "2"}}
    (folder / "summary.json").write_text(json.dumps(report))


def report(*flags):
    command = [sys.executable, str(ROOT / "benchmark" / "run.py"), *flags]
    return subprocess.run(command, capture_output=True, text=True)


def test_table_of_medians_ranges_and_ratios_within_a_round(tmp_path):
    for seed, plain, eager in [(1, 100, 150), (2, 50, 100), (3, 80, 200)]:
        write(tmp_path / "plain" / str(seed) / "run", plain)
        write(tmp_path / "eager" / str(seed) / "run", eager, None)
    done = report("--report-only", "--run-dir", str(tmp_path))
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[0].startswith("sac_continuous_action on Env-v0, 1 environment(s), CPU")
    assert "| plain | 80.0 (50.0 to 100.0) | 1.00 (1.00 to 1.00) | 800.0 (500.0 to 1000.0) | 1 (1 to 1) |" in lines
    assert "| eager | 150.0 (100.0 to 200.0) | 2.00 (1.50 to 2.50) | 1500.0 (1000.0 to 2000.0) | none |" in lines
    assert "| compile | not measured | | | |" in lines


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
