"""doc/common_errors.md: each example shows its error, what is fixed does not, and the page shows the examples."""

import difflib
import importlib.util
import inspect
import re
from pathlib import Path

import pytest
import torch
from torch.multiprocessing import get_context

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "doc" / "examples" / "errors"
PAGE = ROOT / "doc" / "common_errors.md"
spec = importlib.util.spec_from_file_location("run_errors", FOLDER / "run.py")
run = importlib.util.module_from_spec(spec)
spec.loader.exec_module(run)


def body(function):
    """The lines of a function below its signature and docstring."""
    lines = inspect.getsource(function).splitlines(keepends=True)[1:]
    return [line[4:] for line in lines if not line.lstrip().startswith('"""')]


def difference(name):
    """What the page shows of an example: its broken function, with the lines that fix it."""
    example = run.load(name)
    lines = difflib.ndiff(body(example.broken), body(example.fixed))
    return "".join(line for line in lines if not line.startswith("?"))


@pytest.mark.parametrize("name", run.names())
def test_an_error_shows_and_its_remedy_removes_it(name):
    example = run.load(name)
    with run.device_for(example):
        if hasattr(example, "ERROR"):
            kind, text = example.ERROR
            with pytest.raises(kind, match=text):
                example.broken()
            example.fixed()
        else:
            assert not example.is_right(example.broken())
            assert example.is_right(example.fixed())


@pytest.mark.parametrize("name", run.names())
def test_the_page_shows_the_example(name):
    text = f"```diff\n{difference(name)}```\n[doc/examples/errors/{name}.py](examples/errors/{name}.py)"
    assert PAGE.read_text().count(text) == 1


def test_messages_on_the_page_are_those_of_the_examples():
    page = PAGE.read_text()
    messages = re.findall(r"^> (\w+): (.*)$", page, flags=re.M)
    shown = {name: example.ERROR for name in run.names() if hasattr(example := run.load(name), "ERROR")}
    assert len(messages) == len(shown)
    for kind, pattern in shown.values():
        assert any(name == kind.__name__ and re.search(pattern, text) for name, text in messages)


def nothing(*tensors):
    pass


def test_views_of_one_tensor_reach_a_new_process():
    process = get_context("spawn").Process(target=nothing, args=torch.zeros(4, 3).unbind())
    process.start()
    process.join()
    assert process.exitcode == 0


def test_unknown_examples_are_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        run.main("nothing")
    assert stop.value.code == 2
    assert "error: nothing: choose from" in capsys.readouterr().err
