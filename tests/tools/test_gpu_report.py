"""`./run.sh --gpu-report`: a table and files, complete at every moment, whatever fails."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
from conftest import WITH_PYTHON, wait_for
from helpers import error_of, python

from benchmark import algorithms, gpu_report
from benchmark.gpu_report import __main__ as report
from benchmark.gpu_report import cases, measure, programs, tables
from common import ROOT
from instruments import traces

PROFILE = {"launches_per_step": 76.0, "us_per_step": 500.0, "busy_us_per_step": 400.0, "busy_share": 0.8}
PROFILE |= {"gaps_per_step": {"over 1 us": 3.0}, "kernels": []}
# in place of turns.py: trains at 1000 steps per second, unless `behaviors` says otherwise for the script and its flags
STAND_IN = """
import json, sys, time
behaviors, speeds, profile = json.loads({settings!r})
words = sys.argv[1:]
mode = "+".join(word[2:] for word in words if word in ("--compile", "--cudagraphs", "--matmul-precision"))
mode = mode or ("eager" if words[0].endswith("_torchcompile") else "plain")
behavior = behaviors.get(words[0].removesuffix("_torchcompile") + " " + mode)
if behavior == "fails":
    raise SystemExit("error: out of luck")
if behavior == "is never warm":
    time.sleep(600)
print(json.dumps(dict(warm=True)), flush=True)
for line in sys.stdin:
    order = json.loads(line)
    if behavior == "dies":
        raise SystemExit("error: died while training")
    if behavior == "is silent":
        time.sleep(600)
    if "profile" in order:
        print(json.dumps(dict(profile=profile)), flush=True)
        continue
    time.sleep(order["seconds"])
    steps = order["seconds"] * speeds.get(mode, 1000)
    print(json.dumps(dict(steps=steps, seconds=order["seconds"], memory_mib=1234)), flush=True)
"""
SPEEDS = {"plain": 500, "compile+cudagraphs": 2000}
TESTS = "import pytest\n\ndef test_good():\n    pass\n\ndef test_bad():\n    assert 1 == 2\n"


class Rehearsal:
    """The report with stand-ins for programs and tests; `behaviors` are by algorithm and mode."""

    def __init__(self, folder):
        self.stand_in, self.tests, self.out = folder / "stand_in.py", folder / "test_both.py", folder / "out"
        self.tests.write_text(TESTS)
        self.names = ["test_both.py::test_good"]
        self.room = 99

    def write(self, behaviors):
        settings = json.dumps([behaviors, SPEEDS, PROFILE])
        self.stand_in.write_text(STAND_IN.format(settings=settings))

    def run(self, monkeypatch, behaviors, algos=("pqn",), seconds=18.0, warm=8.0):
        self.write(behaviors)
        monkeypatch.setenv("PYTEST_ADDOPTS", f"--rootdir={self.tests.parent}")  # to which names are relative
        monkeypatch.setattr(programs, "TURNS", (self.stand_in,))
        start_tests = measure.Measurement.start_tests
        start_own = lambda this, *names: start_tests(this, *(self.tests.with_name(name) for name in names))  # noqa: E731
        monkeypatch.setattr(measure.Measurement, "start_tests", start_own)
        monkeypatch.setattr(measure, "tests_of", lambda *inputs: self.names)
        monkeypatch.setattr(measure, "room", lambda: self.room)
        monkeypatch.setattr(measure, "LAST", 2)
        monkeypatch.setattr(measure, "SLICE", 0.2)
        with pytest.raises(SystemExit) as ended:
            report.main(report.Args(emulated=True, algos=algos, seconds=seconds, warm=warm, out=self.out))
        return ended.value.code, self.stored()

    def stored(self):
        return json.loads((self.out / "report.json").read_text())


@pytest.fixture
def rehearsal(tmp_path):
    return Rehearsal(tmp_path)


def test_a_report(rehearsal, monkeypatch, capsys):
    code, stored = rehearsal.run(monkeypatch, {}, ("sac_continuous_action", "pqn"), seconds=40.0, warm=30.0)
    assert code == 0 and stored["agreement"]["says"] == "1 passed, 0 failed, 0 skipped"
    assert set(stored["editions"]) == {f"{algo}{end}" for algo in stored["speeds"] for end in ("", "_torchcompile")}
    for algo, own in stored["speeds"].items():
        assert own.keys() == set(cases.modes_of(algo))
        for mode, result in own.items():
            assert result["steps_per_second"] == pytest.approx(SPEEDS.get(mode, 1000)) and result["memory_mib"] == 1234
            assert result["slices"] == 2 and len(result["slice_speeds"]) == 3 and result["warm_after_seconds"] > 0
    assert [name for name, _ in stored["phases"]] == ["warm-up", "measure", "more tests", "end"]
    assert len(stored["profiles"]) == sum(algo in stored["speeds"] for algo, _ in cases.PROFILED)
    assert "kernels" not in stored["profiles"]["sac_continuous_action, plain"]
    assert "kernels" in json.loads((rehearsal.out / "profile.json").read_text())["sac_continuous_action, plain"]
    assert not (rehearsal.out / "failures.log").exists() and (rehearsal.out / "tests.log").exists()
    table = (rehearsal.out / "table.txt").read_text()
    assert table.strip() in capsys.readouterr().out
    sac, pqn = (line for line in table.splitlines() if line.startswith(("| SAC, H", "| PQN, C")) and "(" in line)
    speeds = "500 (1.00) | 1,000 (2.00) | 1,000 (2.00) | 1,000 (2.00) | 2,000 (4.00)"
    assert sac == f"| SAC, HalfCheetah-v5 | {speeds} | 1,000 |"  # TF32 has no ratio: plain's precision is higher
    assert pqn == f"| PQN, CartPole-v1 | {speeds} | - |"
    assert "| sac_continuous_action, plain | 76.0 | 500.0 | 400.0 | 80% | 3.0 |" in table


@pytest.mark.thorough
def test_what_fails_is_named_and_the_rest_is_measured(rehearsal, monkeypatch, capsys):
    """A script that fails, one that dies while training, one that is never warm, one that does not answer, a test."""
    monkeypatch.setattr(measure, "PATIENCE", 1)
    behaviors = {"pqn eager": "fails", "pqn cudagraphs": "dies", "pqn compile": "is never warm"}
    rehearsal.names.append("test_both.py::test_bad")
    code, stored = rehearsal.run(monkeypatch, behaviors | {"pqn compile+cudagraphs": "is silent"})
    assert code == 1
    own = stored["speeds"]["pqn"]
    assert own["plain"]["steps_per_second"] == pytest.approx(500)
    assert own["eager"] == {"failed": "exit code 1: error: out of luck"}
    assert own["cudagraphs"] == {"failed": "exit code 1: error: died while training"}
    assert own["compile"] == {"failed": "not warm in time"}
    assert own["compile+cudagraphs"]["failed"].startswith("no answer to ")
    (name,) = stored["agreement"]["failed"]
    assert name.endswith("::test_bad") and "assert 1 == 2" in stored["agreement"]["failed"][name]
    failures = (rehearsal.out / "failures.log").read_text()
    assert failures.count("===") == 3 and "error: died while training" in failures
    assert "| PQN, CartPole-v1 | 500 (1.00) | failed | failed | failed | failed | - |" in capsys.readouterr().out


@pytest.mark.thorough
def test_without_memory_for_all_algorithms_are_measured_in_turn(rehearsal, monkeypatch):
    """Each starts when those before it have been measured and have ended."""
    running = []
    start = programs.Program.__init__

    def counting(self, *inputs):
        start(self, *inputs)
        running.append(sum(program.process.poll() is None for program in started))
        started.append(self)

    started = []
    monkeypatch.setattr(programs.Program, "__init__", counting)
    rehearsal.room = 7
    code, stored = rehearsal.run(monkeypatch, {}, ("dqn", "pqn"), seconds=40.0, warm=20.0)
    assert code == 0 and max(running) == 4  # before the fifth of an algorithm, never of two
    assert all("failed" not in result for own in stored["speeds"].values() for result in own.values())


def test_what_there_was_no_time_for_is_named(rehearsal, monkeypatch):
    rehearsal.room = 5
    code, stored = rehearsal.run(monkeypatch, {"dqn plain": "is never warm"}, ("dqn", "pqn"), seconds=8.0, warm=5.0)
    assert code == 1 and stored["speeds"]["dqn"]["plain"] == {"failed": "not warm in time"}
    assert stored["speeds"]["pqn"] == {mode: {"failed": "not started in time"} for mode in cases.modes_of("pqn")}


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_report_leaves_complete_files_and_no_process(number, rehearsal):
    """Also while PQN trains, and its other modes, pytest and the workers of pytest, which still start, stand still."""
    rehearsal.write({"dqn compile": "is never warm"})
    in_workers = "import sys, time\n\nif sys.argv[0] == '-c':\n    time.sleep(600)\n"
    rehearsal.tests.with_name("conftest.py").write_text(in_workers)
    code = "from benchmark.gpu_report import __main__ as report, measure, programs\n"
    code += f"programs.TURNS, measure.SLICE = ({str(rehearsal.stand_in)!r},), 0.2\n"
    code += "measure.room = lambda: 99\n"
    code += f"measure.tests_of = lambda *inputs: [{str(rehearsal.tests)!r}]\nreport.end_as_at_ctrl_c()\n"
    code += "args = report.Args(emulated=True, algos=('dqn', 'pqn'), seconds=300, warm=8)\n"
    code += f"args.out = {str(rehearsal.out)!r}\nreport.main(args)"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, start_new_session=True)
    path = rehearsal.out / "report.json"
    wait_for(lambda: path.exists() and "steps_per_second" in path.read_text())
    ours = psutil.Process(process.pid).children(recursive=True)
    assert len(ours) >= 13  # ten programs, pytest and two workers
    os.kill(process.pid, number)
    assert process.wait(60) == -(signal.SIGINT if number == signal.SIGTERM else number)
    wait_for(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in ours))
    stored = rehearsal.stored()
    assert "steps_per_second" in json.dumps(stored["speeds"]) and "(1.00)" in (rehearsal.out / "table.txt").read_text()
    if number == signal.SIGTERM:
        assert stored["speeds"]["dqn"]["compile"] == {"failed": "not warm in time"}
        assert stored["agreement"]["says"] == "0 passed, 0 failed, 0 skipped, 1 not finished"


@pytest.mark.thorough
def test_a_report_from_the_emulated_device(tmp_path):
    """Compiled modes fail there: they are named, the others are measured, and the exit code is 1."""
    variables = {"NINE_EMULATED": "1", "NINE_ALGOS": "sac_continuous_action", "NINE_SECONDS": "500"}
    words = [ROOT / "run.sh", "--gpu-report", "--everything", "--warm", "300", "--out", tmp_path]
    done = subprocess.run(words, env=WITH_PYTHON | variables, capture_output=True, text=True)
    stored = json.loads((tmp_path / "report.json").read_text())
    assert done.returncode == 1, done.stderr
    assert stored["agreement"]["says"] == "1 passed, 0 failed, 0 skipped"
    (own,) = stored["speeds"].values()
    for mode in cases.modes_of("sac_continuous_action"):
        if "compile" in mode:
            assert own[mode] == {"failed": "exit code 1: error: the emulated device compiles nothing"}
        else:
            assert own[mode]["steps_per_second"] > 0 and own[mode]["slices"] > 0, mode
    profiles = json.loads((tmp_path / "profile.json").read_text())
    assert profiles["sac_continuous_action, cudagraphs"]["failed"] == traces.NO_KERNELS
    assert (tmp_path / "failures.log").read_text().count("===") == 3


def event(category, begin, duration, name="triton_poi", stream=7):
    return {"ph": "X", "cat": category, "ts": begin, "dur": duration, "name": name, "args": {"stream": stream}}


def test_a_trace_is_read(tmp_path):
    """Two steps: kernels from 0 to 10 and, overlapping, from 8 to 12; copies from 15 to 16 and from 16.5 to 20."""
    events = [event("kernel", 100, 10), event("kernel", 108, 4, "sgemm", 9), event("gpu_memcpy", 115, 1)]
    events += [event("gpu_memcpy", 116.5, 3.5), event("cuda_runtime", 90, 5, "cudaGraphLaunch"), {"ph": "M"}]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events[::-1]}))
    found = traces.summary(tmp_path / "trace.json", 2)
    assert found["launches_per_step"] == 2 and found["launches"] == {"kernel": 1, "gpu_memcpy": 1, "gpu_memset": 0}
    assert found["us_per_step"] == 10 and found["busy_us_per_step"] == 8.25 and found["busy_share"] == 0.825
    assert found["gaps_per_step"]["over 0 us"] == 1 and found["gaps_per_step"]["over 2 us"] == 0.5
    assert found["gap_us_per_step"]["over 0 us"] == 1.75 and found["longest_gaps"][0] == [3, "before triton_poi"]
    assert found["streams"] == ["7", "9"] and found["host"] == [["cudaGraphLaunch", 0.5, 2.5]]
    assert found["kernels"][0] == ["triton_poi", 1.5, 7.25]


def test_a_trace_without_the_gpu_says_so(tmp_path):
    """CUPTI is missing, or the user may not use it: torch's profiler then leaves out the GPU without an error."""
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [event("cuda_runtime", 90, 5)]}))
    found = traces.summary(tmp_path / "trace.json", 1)
    assert found["failed"] == traces.NO_KERNELS and "launches_per_step" not in found
    assert tables.profile_row("SAC", found)[:2] == ["SAC", traces.NO_KERNELS]


def test_the_tests_exist():
    done = python("-m", "pytest", "--collect-only", "-q", "-o", "addopts=", *cases.tests_of(cases.CASES, True))
    assert done.returncode == 0 and f"{len(cases.CASES)} tests collected" in done.stdout, done.stdout


def test_variables_and_flags(monkeypatch):
    assert "--everything" in python("-m", "benchmark.gpu_report", "--help").stdout
    for name, value in {"NINE_ALGOS": "dqn pqn", "NINE_SECONDS": "90", "NINE_WARM": "", "NINE_EMULATED": "1"}.items():
        monkeypatch.setenv(name, value)
    args = report.Args()
    assert (args.algos, args.seconds, args.warm, args.emulated) == (("dqn", "pqn"), 90.0, None, True)


def test_names_that_programs_outside_of_the_repository_read():
    assert gpu_report.card() is None or "name" in gpu_report.card()
    assert gpu_report.cell({"steps_per_second": 3000.0}, {"steps_per_second": 1000.0}) == "3,000 (3.00)"
    assert gpu_report.cell({"steps_per_second": 3000.0}, {"failed": "why"}) == "3,000"
    assert algorithms.ALGORITHMS["dqn"].env_id == "CartPole-v1"


def test_the_report_has_four_algorithms_and_with_everything_eight():
    assert cases.FOUR == (
        "sac_continuous_action",
        "ppo_atari_envpool",
        "ppo_continuous_action",
        "td3_continuous_action",
    )
    assert len(cases.CASES) == 8


@pytest.mark.parametrize(
    "flags, cores, wanted", [((), 16, cases.FOUR), (("everything",), 16, cases.CASES), (("everything",), 4, cases.FOUR)]
)
def test_what_is_measured(flags, cores, wanted, tmp_path, monkeypatch, capsys):
    made = []

    def make(algos, seconds, *rest):
        made.append(([*algos], seconds))
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "Measurement", make)
    monkeypatch.setattr(report.os, "cpu_count", lambda: cores)
    with pytest.raises(KeyboardInterrupt):
        report.main(report.Args(emulated=True, out=tmp_path, **dict.fromkeys(flags, True)))
    assert made == [([*wanted], 520 if wanted is cases.CASES else 300)]
    assert ("note: --everything needs 8 cores" in capsys.readouterr().err) == (bool(flags) and wanted is cases.FOUR)


def test_without_a_card_one_line_says_so():
    done = subprocess.run([ROOT / "run.sh", "--gpu-report"], env=WITH_PYTHON, capture_output=True, text=True)
    assert error_of(done).startswith("--gpu-report needs a CUDA device")
