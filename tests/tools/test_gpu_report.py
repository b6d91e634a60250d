"""`./run.sh --gpu-report` on the emulated device: a table, a file, and what failed."""

import json
import subprocess
import sys

import pytest
from conftest import WITH_PYTHON, emulated_cuda

from benchmark import gpu_report
from benchmark.speed import rounds
from common import ROOT

PROGRAM = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tools")!r}]
from emulated_cuda import emulated_cuda
from benchmark.speed import interleaved
if "--compile" in sys.argv:
    raise SystemExit("error: this device compiles nothing")
with emulated_cuda():
    interleaved.main(*sys.argv[1:])
"""
SMALL = {
    "sac_continuous_action": "--learning-starts 100 --buffer-size 1000 --batch-size 8",
    "ppo_continuous_action": "--num-steps 64 --num-minibatches 2 --update-epochs 1",
    "ppo_atari_envpool": "--num-envs 2 --num-steps 8 --num-minibatches 2 --update-epochs 1",
}


SLICES = {"sac_continuous_action": 20, "ppo_continuous_action": 64, "ppo_atari_envpool": 16}


@pytest.fixture
def report(tmp_path, monkeypatch):
    """The exit code of the program on a machine with an emulated card, and the file that it writes."""
    program = tmp_path / "emulated.py"
    program.write_text(PROGRAM)
    monkeypatch.setattr(rounds, "INTERLEAVED", (program,))
    modes = {"plain": (str(program), "{algo}")}
    modes |= {mode: (str(program), "{algo}_torchcompile", *flags) for mode, flags in rounds.TURBO_FLAGS.items()}
    monkeypatch.setattr(rounds, "MODES", modes)
    monkeypatch.setattr(gpu_report, "FLAGS", SMALL)
    monkeypatch.setattr(gpu_report, "SLICES", SLICES)
    monkeypatch.setattr(gpu_report, "AGREEMENT", "-c \"print('12 passed')\"")

    def run(**settings):
        with emulated_cuda(), pytest.raises(SystemExit) as ended:
            gpu_report.main(gpu_report.Args(seconds=0.5, out=tmp_path / "results", **settings))
        (path,) = tmp_path.glob("results/*/gpu_report.json")
        return ended.value.code, json.loads(path.read_text())

    return run


@pytest.mark.thorough
def test_a_report_from_the_emulated_device(report, capsys):
    """Compiled modes fail there: they are named, the others are measured, and the exit code is 1."""
    code, stored = report()
    assert code == 1 and stored["agreement"] == {"passed": True, "says": "12 passed", "failed": []}
    assert set(stored["editions"]) >= {"sac_continuous_action", "ppo_atari_envpool_torchcompile"}
    assert stored["machine"]["gpu"] and stored["speeds"].keys() == set(gpu_report.ALGOS)
    for own in stored["speeds"].values():
        for mode in ("plain", "eager", "cudagraphs"):
            assert own[mode].get("steps_per_second", 0) > 0 and own[mode]["slices"] > 0, (mode, own[mode])
        for mode in ("compile", "compile+cudagraphs"):
            assert own[mode] == {"failed": "error: this device compiles nothing", "exit_code": 1}
    printed = capsys.readouterr()
    assert "12 passed" in printed.out and printed.out.count("| failed |") == 6 and "(1.00)" in printed.out
    assert printed.err.count("this device compiles nothing") == 6


def test_a_check_that_fails_is_reported(monkeypatch):
    monkeypatch.setattr(gpu_report, "AGREEMENT", "-c \"print('FAILED a'); print('1 failed'); raise SystemExit(1)\"")
    assert gpu_report.agreement(1) == {"passed": False, "says": "1 failed", "failed": ["FAILED a"]}
    monkeypatch.setattr(gpu_report, "AGREEMENT", "-c 'import time; time.sleep(60)'")
    assert gpu_report.agreement(0.01) == {"passed": False, "says": "not finished after 0.01 minutes"}


def test_without_a_card_one_line_says_so():
    done = subprocess.run([ROOT / "run.sh", "--gpu-report"], env=WITH_PYTHON, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: --gpu-report needs a CUDA device")
    assert len(done.stderr.splitlines()) == 1


def test_the_check_selects_tests():
    check = gpu_report.AGREEMENT.replace("real", "emulated")  # there is no real device here
    words = [sys.executable, *gpu_report.shlex.split(check), "--collect-only"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "test_sac.py::test_modes_agree" in done.stdout and "test_ppo.py" in done.stdout
