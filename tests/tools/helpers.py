"""What tests of tools share: commands and how they are refused, pages of the documentation, and a script to train."""

import importlib.util
import re
import subprocess
import sys

import pytest

from common import ROOT

DOC = ROOT / "doc"


def python(*words, **settings):
    """The finished process of Python with these words, in the repository's folder, and its output."""
    words = [sys.executable, *map(str, words)]
    return subprocess.run(words, **{"cwd": ROOT, "capture_output": True, "text": True} | settings)


def error_of(done):
    """The one line with which a finished process has refused its input, without "error: "."""
    assert done.returncode == 2 and not done.stdout, done.stdout
    return only_error(done.stderr)


def refused(capsys, function, *inputs, **named):
    """The one line with which a call is refused, without "error: "."""
    with pytest.raises(SystemExit) as ended:
        function(*inputs, **named)
    assert ended.value.code == 2
    return only_error(capsys.readouterr().err)


def only_error(err):
    lines = [line for line in err.splitlines() if not line.startswith("note: ")]
    assert len(lines) == 1 and lines[0].startswith("error: "), err
    return lines[0].removeprefix("error: ")


def by_hand(params, in_ci=()):
    """The same parameters, of tests that take minutes: those of the ids `in_ci` are thorough, others run by hand."""
    made = []
    for param in params:
        marks = [mark for mark in param.marks if mark.name == "xfail"]
        marks.append(pytest.mark.thorough if param.id in in_ci else pytest.mark.finding)
        made.append(pytest.param(*param.values, id=param.id, marks=marks))
    return made


def load_example(name):
    """A program of doc/examples as a module."""
    path = DOC / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(text, language):
    """The code blocks of a page that are in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.M | re.S)


def section(text, title):
    """What a page has below a heading of the second level."""
    return f"\n{text}".partition(f"\n## {title}\n")[2].partition("\n## ")[0]


RUN = '''
import json
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace


@dataclass
class Args:
    env_id: str = "Env-v0"
    seed: int = 1
    total_timesteps: int = 600
    run_dir: str = "runs"


class Run:
    """The run of a script that lacks a `train`, and learns nothing."""

    def __init__(self, args):
        self.args, self.step, self.learner = args, 0, SimpleNamespace(updates=0)
        self.folder = Path(args.run_dir) / "run"

    def __enter__(self):
        self.folder.mkdir(parents=True)
        return self

    def __exit__(self, *error):
        (self.folder / "summary.json").write_text('{"wall_seconds": 1000}')

    def advance(self, rewards, ended):
        self.step += 1

    def log(self, losses):
        pass


'''
