"""doc/common_errors.md: each example shows its error, its fix removes it, and quoted messages are correct."""

import ast
import difflib
import inspect
import re

import pytest
import torch
from helpers import DOC, ROOT, load_example, refused
from torch.multiprocessing import get_context

PAGE = (DOC / "common_errors.md").read_text()
run = load_example("errors/run")


def body(function):
    """The lines of a function below its signature and docstring."""
    lines = inspect.getsource(function).splitlines(keepends=True)[1:]
    return [line[4:] for line in lines if not line.lstrip().startswith('"""')]


def difference(name):
    """What the page shows of an example: its broken function, with the lines that fix it."""
    example = run.load(name)
    broken, fixed = body(example.broken), body(example.fixed)
    lines = list(difflib.unified_diff(broken, fixed, n=len(broken)))[3:]  # without its header
    return "".join(f"{line[0]} {line[1:]}" for line in lines)


@pytest.mark.parametrize("name", run.names())
def test_an_error_shows_and_its_remedy_removes_it(name):
    example = run.load(name)
    with run.surroundings(example):
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
    assert PAGE.count(text) == 1


def test_messages_on_the_page_are_those_of_the_examples():
    messages = re.findall(r"^> (\w+): (.*)$", PAGE, flags=re.M)
    shown = {name: example.ERROR for name in run.names() if hasattr(example := run.load(name), "ERROR")}
    assert len(messages) == len(shown)
    for kind, pattern in shown.values():
        assert any(name == kind.__name__ and re.search(pattern, text) for name, text in messages)


def pattern_of(text, constants):
    """A regular expression for what a string expression gives: wildcards for values, `constants` by name."""
    if isinstance(text, ast.Constant):
        return re.escape(str(text.value))
    if isinstance(text, ast.JoinedStr):
        return "".join(pattern_of(part, constants) for part in text.values)
    if isinstance(text, ast.FormattedValue) and isinstance(text.value, ast.Name) and text.value.id in constants:
        return f"(?:{'|'.join(map(re.escape, constants[text.value.id]))})"
    return ".+"


def messages_of_the_scripts():
    """Regular expressions for the messages of all scripts."""
    prefixes = {"refuse": "error: --[a-z-]+ .+: ", "print": "", "SystemExit": ""}
    prefixes |= {name: f"{name}: " for name in ("OSError", "ValueError")}
    patterns = set()
    for script in (ROOT / "leanrl").glob("*.py"):
        nodes = list(ast.walk(ast.parse(script.read_text())))
        constants = {}  # the strings that a variable gets
        for node in nodes:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))):
                    constants.setdefault(name, set()).add(text)
        for node in nodes:
            match node:
                case ast.Call(func=ast.Name(id=name), args=[*_, (ast.Constant(value=str()) | ast.JoinedStr()) as text]):
                    if name in prefixes:
                        patterns.add(prefixes[name] + pattern_of(text, constants))
    return patterns


def test_messages_in_the_tables_are_those_of_the_scripts():
    cells = re.findall(r"^\| (.*?) \|", PAGE, flags=re.M)
    quoted = re.compile(r"(`+)((?:error|warning|OSError|ValueError): .*?)\1(?!`)")
    messages = [text for cell in cells for _, text in quoted.findall(cell)]
    assert len(messages) > 14
    patterns = messages_of_the_scripts()
    for message in messages:
        assert any(re.fullmatch(pattern, message) for pattern in patterns), message


def nothing(*tensors):
    pass


def test_views_of_one_tensor_reach_a_new_process():
    process = get_context("spawn").Process(target=nothing, args=torch.zeros(4, 3).unbind())
    process.start()
    process.join()
    assert process.exitcode == 0


def test_unknown_examples_are_refused(capsys):
    assert refused(capsys, run.main, "nothing").startswith("nothing: choose from")
