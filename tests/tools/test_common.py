"""Code shared by the tools: training scripts under a tool, warm-up, processes, curves."""

import ast
import errno
import fcntl
import math
import os
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import script_params, tiny, wait_for
from helpers import ROOT, RUN, python, refused
from torch.utils.tensorboard import SummaryWriter

from common import curves, folders, processes, scripts, steady
from common.arguments import check_seeds, distinct, from_low, parse

SCRIPT = f"""{RUN}
events = []


class Run(Run):
    def __init__(self, args):
        super().__init__(args)
        self.learner.updates = args.resumed_at

    def __enter__(self):
        events.append("begun")
        return self

    def unfinished(self):
        return self.step < self.args.total_timesteps

    def log(self, losses):
        events.append(("log", self.step))

    def __exit__(self, kind, error, traceback):
        events.append(("ended", kind and kind.__name__))


def train(args):
    with Run(args) as run:
        while run.unfinished():
            run.advance(0, False)
            run.learner.updates += 1
            run.log(dict(loss=run.step))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "stand_in.py"
    path.write_text(SCRIPT)
    return scripts.load(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def train(:", r"it cannot be imported \(SyntaxError: .*bad.py, line 1\)\); correct it"),
        ("import nothing_of_this_name", r"it cannot be imported \(ModuleNotFoundError: .*\); correct it"),
        ("1 / 0", r"it cannot be imported \(ZeroDivisionError: .*\); correct it"),
        ("import sys; sys.exit(3)", r"it cannot be imported \(SystemExit: 3\); correct it"),
        ("def train(args): pass\ndef parse_args(): pass", "it has no `Args`; give a script of leanrl/ .*"),
        ("def train(args): pass", "it has no `parse_args`; give a script of leanrl/ .*"),
    ],
)
def test_a_script_that_is_none_of_ours_is_refused(text, said, tmp_path, capsys):
    path = tmp_path / "bad.py"
    path.write_text(text)
    line = refused(capsys, scripts.load_given, "probe", path)
    assert re.fullmatch(f"probe {path}: {said}", line), line


@pytest.mark.parametrize("folder", ["file/below", "/sys"])
def test_a_folder_that_cannot_be_written_is_refused(folder, tmp_path, capsys):
    """/sys is a folder in which nobody can make a file, the administrator neither."""
    (tmp_path / "file").write_text("")
    for function in (folders.writable, lambda *given: folders.locked(*given).__enter__()):
        line = refused(capsys, function, "out", tmp_path / folder)
        assert line.startswith(f"--out {tmp_path / folder}: give a folder that can be written (")


def test_a_folder_is_one_programs_at_a_time(tmp_path, capsys):
    with folders.locked("run-dir", tmp_path) as folder:
        line = refused(capsys, folders.locked("run-dir", tmp_path).__enter__)
    assert line == f"--run-dir {tmp_path}: another command is using {folder}; wait for it, or give another folder"
    with folders.locked("run-dir", tmp_path):
        pass


@pytest.mark.parametrize("kind", ["EAGAIN", "EACCES", "ENOSYS", "ENOTSUP", "ENOLCK"])
def test_a_file_system_without_locks_is_no_other_command(kind, tmp_path, capsys, monkeypatch):
    def flock(*_):
        raise OSError(getattr(errno, kind), kind)

    monkeypatch.setattr(fcntl, "flock", flock)
    entering = folders.locked("out", tmp_path).__enter__
    if kind in ("EAGAIN", "EACCES"):
        assert "another command is using" in refused(capsys, entering)
    else:
        assert entering() == tmp_path
        line = f"note: {tmp_path} cannot be locked ({kind}); start no other command with it\n"
        assert capsys.readouterr().err == line


@pytest.mark.parametrize("url", ["s3://bucket/runs", "gs://bucket"])
def test_a_bucket_is_no_folder(url, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = refused(capsys, folders.writable, "out", Path(url))
    assert line == f"--out {Path(url)}: give a folder of this machine, such as one where that storage is mounted"
    assert not list(tmp_path.iterdir())


@dataclass
class Paths:
    runs: tuple[Path, ...]
    out: Path = Path("runs")
    space: Path | None = None


def test_paths_begin_at_home(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    args = parse(Paths, "", ["--out=~/l", "--space=~/s", "--runs", "~/a", "b"], "tool")
    assert args == Paths((tmp_path / "a", Path("b")), tmp_path / "l", tmp_path / "s")
    line = refused(capsys, parse, Paths, "", ["--runs", "a", "--out=~nobody_here/l"], "tool")
    assert line == "~nobody_here/l: there is no such home folder; give its path"
    (tmp_path / "script.py").write_text("")
    line = refused(capsys, scripts.load_given, "probe", "~/script.py")
    assert line.startswith("probe ~/script.py: it has no `train`")


@pytest.mark.parametrize(
    ("function", "given", "line"),
    [
        (partial(from_low, 1), 0, "--the-value 0: give a finite number from 1"),
        (partial(from_low, 0), math.nan, "--the-value nan: give a finite number from 0"),
        (partial(from_low, 0), math.inf, "--the-value inf: give a finite number from 0"),
        (partial(from_low, 2), (2, 1), "--the-value 1: give a finite number from 2"),
        (partial(from_low, 0), 0, None),
        (check_seeds, 2**32, "--the-value 4294967296: give a number from 0 to 4294967295"),
        (check_seeds, (0, 2**32 - 1), None),
        (partial(from_low, 1), None, None),
        (distinct, (), "--the-value : give at least one"),
        (distinct, (3, 5, 3), "--the-value 3: give it once"),
        (distinct, (3, 5), None),
        (distinct, None, None),
    ],
)
def test_numbers_and_lists_are_checked(function, given, line, capsys):
    with pytest.raises(SystemExit) if line else nullcontext():
        function(SimpleNamespace(the_value=given), "the_value")
    assert capsys.readouterr().err == (f"error: {line}\n" if line else "")


def arguments(**changed):
    return SimpleNamespace(**{"total_timesteps": 10, "policy_frequency": 2, "resumed_at": 0, "run_dir": ""} | changed)


def test_a_tool_sees_the_run_before_its_first_step(script):
    runs = []
    scripts.train(script, arguments(), lambda run: runs.append((run, run.step)))
    ((run, step),) = runs
    assert step == 0 and run.step == 10 and script.events[-1] == ("ended", None)
    assert type(run) is not script.Run and isinstance(run, script.Run)  # the module is as it was


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, scripts.Enough])
def test_a_tool_that_fails_ends_the_run(script, error):
    def fail(run):
        raise error

    with pytest.raises(error):
        scripts.train(script, arguments(), fail)
    assert script.events == ["begun", ("ended", error.__name__)]


def test_a_tool_is_called_before_each_log(script):
    seen = []
    scripts.train(script, arguments(), lambda run: scripts.before_each_log(run, lambda losses: seen.append(losses)))
    assert seen == [{"loss": step} for step in range(1, 11)]
    assert [event for event in script.events if event[0] == "log"] == [("log", step) for step in range(1, 11)]


@pytest.mark.parametrize("resumed_at", [0, 4])
def test_a_run_is_warm_after_three_rounds_of_what_is_captured(resumed_at, script, monkeypatch):
    """Six updates, of which a resumed run needs as many; the step that sees them is the next one. A step takes 2 s."""
    clocks = []
    args = arguments(resumed_at=resumed_at)
    monkeypatch.setattr(steady.time, "perf_counter", lambda: 2.0 * clocks[0].run.step if clocks else 0.0)
    scripts.train(script, args, lambda run: clocks.extend([steady.Clock(run), steady.Clock(run)]))
    first, second = clocks
    assert first.begin == second.begin == (7, 14.0) and first.run.step == 10
    assert first.warmup_seconds == second.warmup_seconds == 14.0


@pytest.mark.parametrize(
    ("flags", "updates"),
    [
        ({"policy_frequency": 2, "target_network_frequency": 3}, 18),
        ({"policy_frequency": 2}, 6),
        ({"policy_frequency": 2, "updates_per_step": 4, "num_steps": 8}, 24),
        ({"target_network_frequency": 1000}, 3),  # in steps: no part of what is captured
        ({"num_steps": 128, "cudagraphs": True}, 3),
        ({"num_steps": 128, "cudagraphs": False}, 1),
        ({"num_steps": 128}, 1),
    ],
)
def test_updates_until_a_run_is_warm(flags, updates):
    assert steady.updates_to_warm(SimpleNamespace(**flags)) == updates


@pytest.mark.parametrize("script", script_params())
def test_a_script_of_ours_is_watched(script, tmp_path):
    clocks = []
    args = script.Args(**tiny(script) | {"total_timesteps": 200, "run_dir": str(tmp_path)})
    scripts.train(script, args, lambda run: clocks.append(steady.Clock(run)))
    (clock,) = clocks
    assert 0 < clock.begin[0] < clock.run.step == 200
    assert len(list(tmp_path.glob("*/summary.json"))) == 1


def test_a_process_ends_with_what_it_has_started(tmp_path):
    code = "import subprocess, sys, time\n"
    code += "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid, flush=True)\n"
    process = processes.start(["-c", code + "time.sleep(600)"], tmp_path / "runs" / "log.txt")
    log = tmp_path / "runs" / "log.txt"
    wait_for(lambda: log.read_text().strip())
    processes.end(process)
    assert process.returncode == -9
    wait_for(lambda: not running(int(log.read_text())))


def running(pid):
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return done.stdout.strip()[:1] not in ("", "Z")


@pytest.mark.parametrize("obeys", [True, False])
def test_a_process_is_killed_if_it_does_not_end_in_time(obeys, tmp_path):
    answer = "lambda *_: sys.exit(7)" if obeys else "signal.SIG_IGN"
    code = f"import signal, sys, time; signal.signal(signal.SIGTERM, {answer}); print(1, flush=True); time.sleep(600)"
    process = processes.start(["-c", code], tmp_path / "log.txt")
    wait_for(lambda: (tmp_path / "log.txt").read_text())
    begin = time.monotonic()
    processes.interrupt(process, 600 if obeys else 0.1)
    assert process.returncode == (7 if obeys else -9) and time.monotonic() - begin < 300


def test_a_process_ends_when_the_one_that_started_it_is_killed(tmp_path):
    code = "import sys; sys.path.insert(0, sys.argv[1])\nfrom pathlib import Path\nfrom common import processes\n"
    code += "child = processes.start(['-c', 'import time; time.sleep(600)'], Path(sys.argv[2]))\n"
    code += "print(child.pid, flush=True); child.wait()"
    words = [sys.executable, "-c", code, str(scripts.ROOT), str(tmp_path / "log.txt")]
    parent = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    assert running(child)
    parent.kill()
    parent.wait()
    wait_for(lambda: not running(child))


def test_seeds_are_thin_lines_and_their_mean_is_a_thick_one():
    """The mean goes as far as all seeds do; a seed by itself is one line."""
    runs = [{"curve": [[10, 0, 1], [20, 0, 2], [30, 0, 3]]}, {"curve": [[20, 0, 4], [40, 0, 6]]}, {"curve": []}]
    (axes,) = curves.learning_figure(
        "title", {"a": runs, "b": runs[:1]}, "5.0 ± 1", dict.fromkeys("ab", ("red", "-"))
    ).axes
    thin, other, mean, single, published = axes.lines
    assert thin.get_linewidth() == other.get_linewidth() < mean.get_linewidth() == single.get_linewidth()
    assert [line.get_label() for line in (mean, single)] == ["a, 2 seeds", "b, 1 seed"]
    assert mean.get_xydata()[0].tolist() == [20, 3] and mean.get_xydata()[-1].tolist() == [30, 4]
    assert single.get_xydata().tolist() == [[10, 1], [20, 2], [30, 3]]
    assert published.get_ydata() == [5, 5] and axes.figure.get_suptitle() == "title"


@pytest.mark.parametrize(("ended", "before"), [({"b": 4, "a": 10}, 14), ({"b": 4}, 13)])
def test_a_curve_is_joined_from_three_parts(ended, before, tmp_path, monkeypatch):
    """Parts are in the order of their training, not of their names. The third one goes on from step 20.

    A part that was killed has no summary: its seconds are those of its last episode.
    """
    parts = {"b": [(10, 1, 1.0), (20, 3, 2.0)], "a": [(30, 2, 3.0), (40, 9, 4.0)], "c": [(30, 5, 5.0), (40, 8, 6.0)]}

    def events(folder):
        rows = [SimpleNamespace(step=step, wall_time=100 + s, value=value) for step, s, value in parts[folder.name]]
        tags = {"scalars": [curves.RETURN]}
        return SimpleNamespace(FirstEventTimestamp=lambda: 100, Tags=lambda: tags, Scalars=lambda tag: rows)

    monkeypatch.setattr(curves, "read_events", events)
    for name, seconds in ended.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(f'{{"wall_seconds": {seconds}}}')
    rows = curves.learning_curve([tmp_path / name for name in parts])
    assert rows == [[10, 1, 1], [20, 3, 2], [30, before + 5, 5], [40, before + 8, 6]]


def test_the_last_tenth_is_of_steps_not_of_values():
    """Each value counts once, however many steps lie between it and the one before."""
    steps = [*range(1, 51), 90, 91, 99, 100]
    values = [0.0] * 50 + [7.0, 1.0, 2.0, 6.0]
    assert curves.last_tenth(steps, values) == 3
    assert curves.end_of([[step, 0, value] for step, value in zip(steps, values, strict=True)]) == 3


@pytest.mark.parametrize("window", [1, 3, 50, 99])
def test_a_moving_mean_has_fewer_values_at_the_beginning(window):
    values = np.random.default_rng(0).normal(size=50)
    means = [values[max(0, i + 1 - window) : i + 1].mean() for i in range(50)]
    assert curves.moving_mean(values, window) == pytest.approx(means)


def test_the_speed_of_a_run_is_that_of_its_second_half(tmp_path):
    with SummaryWriter(tmp_path) as writer:
        for step, speed in enumerate([1, 2, 3, 4, 50, 7]):
            writer.add_scalar(curves.SPEED, speed, step)
    assert curves.late_speed(tmp_path) == 7
    (tmp_path / "nothing").mkdir()
    assert curves.late_speed(tmp_path / "nothing") is None


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_tables_are_printed_and_written_in_every_locale(tmp_path):
    code = """
import sys
from pathlib import Path
from benchmark import results
from common.tables import mean_and_deviation
cell = mean_and_deviation([1, 3])
results.replace(Path(sys.argv[1]), cell)
print(cell)
"""
    done = python("-c", code, tmp_path / "table.md", env=os.environ | ASCII)
    assert (done.returncode, done.stdout) == (0, "2.0 ? 1.4\n"), done.stderr
    assert (tmp_path / "table.md").read_text(encoding="utf-8") == "2.0 ± 1.4"


def opens_text(call):
    """Whether a call opens a text file in the encoding of the locale."""
    name = getattr(call.func, "attr", getattr(call.func, "id", None))
    if any(keyword.arg == "encoding" for keyword in call.keywords):
        return False
    if name == "open":
        return not any(isinstance(arg, ast.Constant) and arg.value in ("rb", "wb", "ab") for arg in call.args)
    return name in ("read_text", "write_text") or any(keyword.arg == "text" for keyword in call.keywords)


def test_text_is_utf_8_in_every_locale():
    folders = ("common", "instruments", "launch", "benchmark", "tools", "environments", "doc/examples")
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
        assert not [f"{path}:{call.lineno}" for call in calls if opens_text(call)]


def test_arrows_run_one_way():
    """common imports no tool, instruments neither launch nor benchmark, and these not each other."""
    tools = {"common", "instruments", "launch", "benchmark", "tests"}
    allowed = {"common": set(), "instruments": {"common"}, "launch": {"common", "instruments"}}
    allowed["benchmark"] = {"common", "instruments"}
    for folder, names in allowed.items():
        for path in (scripts.ROOT / folder).rglob("*.py"):
            words = [line.split() for line in path.read_text().splitlines()]
            imported = {line[1].split(".")[0] for line in words if line[:1] in (["import"], ["from"]) and len(line) > 1}
            assert imported & tools <= names | {folder}, path
