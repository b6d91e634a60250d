"""tools/copies.py: which texts must be identical, how they are copied, and how a helper is added."""

import subprocess
import sys
from pathlib import Path

import copies
import pytest

ONE, TWO, TWIN = Path("one.py"), Path("two.py"), Path("one_torchcompile.py")
SOURCE = """\
LOG_INTERVAL = 100  # steps between two logs
AT_LEAST_1 = ("num_envs",)


@dataclass
class Args:
    seed: int = 1  # seed of everything
    num_envs: int = 1  # environments

    track: bool = False  # copy the log


def first():
    return 1


@cache
def second():
    # why
    return 2


def third():
    return 3


# /// script
# dependencies = ["torch==2.13.0", "numpy==2.4.6"]
# ///
"""


def changed(old, new):
    assert SOURCE.count(old) == 1
    return SOURCE.replace(old, new)


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("LOG_INTERVAL = 100", "LOG_INTERVAL = 10", "LOG_INTERVAL"),
        ("steps between two logs", "steps", "LOG_INTERVAL"),
        ("seed: int", "seed: float", "--seed"),
        ("seed of everything", "the seed", "--seed"),
        ("# why", "# how", "second"),
        ("torch==2.13.0", "torch==2.14.0", "torch"),
    ],
)
def test_what_differs_is_named_and_carried(old, new, name):
    target = changed(old, new)
    assert copies.drifted({ONE: SOURCE, TWO: target}) == [name]
    assert copies.carry(ONE, SOURCE, TWO, target) == SOURCE


@pytest.mark.parametrize(
    ("old", "new"), [("seed: int = 1", "seed: int = 7"), ('("num_envs",)', '("seed",)'), ("# environments", "# games")]
)
def test_what_is_a_scripts_own_stays(old, new):
    """Defaults, limits, and the help of some flags."""
    target = changed(old, new)
    assert not copies.drifted({ONE: SOURCE, TWO: target})
    assert copies.carry(ONE, SOURCE, TWO, target) == target


def test_the_help_of_such_a_flag_is_that_of_its_twin():
    target = changed("# environments", "# games")
    assert copies.drifted({ONE: SOURCE, TWIN: target}) == ["--num-envs"]
    assert copies.carry(ONE, SOURCE, TWIN, target) == SOURCE


@pytest.mark.parametrize("name", ["first", "second", "third"])
def test_a_helper_is_added_where_the_others_have_it(name):
    _, begin, end = copies.definitions(SOURCE)[name]
    lines = SOURCE.splitlines(keepends=True)
    target = "".join(lines[:begin] + lines[end + 2 :] if name != "third" else lines[: begin - 2] + lines[end:])
    assert name not in copies.definitions(target)
    assert copies.add(name, SOURCE, target) == SOURCE


def test_the_first_definition_is_added_before_the_next():
    source = "def first():\n    return 1\n\n\ndef second():\n    return 2\n"
    assert copies.add("first", source, source.split("\n\n\n")[1]) == source


@pytest.fixture
def repository(tmp_path):
    """A copy of the tool, and two scripts."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "leanrl").mkdir()
    (tmp_path / "tools" / "copies.py").write_text(Path(copies.__file__).read_text())
    for name in ("one", "two"):
        (tmp_path / "leanrl" / f"{name}.py").write_text(SOURCE)

    def run(*words):
        command = [sys.executable, "tools/copies.py", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    return tmp_path / "leanrl", run


def test_the_command_line(repository):
    folder, run = repository
    assert run().returncode == 0
    (folder / "two.py").write_text(changed("# why", "# how"))
    done = run()
    assert done.returncode == 1 and done.stderr.startswith("these differ between scripts: second\n")
    assert run("leanrl/two.py").returncode == 0 and "# how" in (folder / "one.py").read_text()
    (folder / "one.py").write_text(changed("def third():\n    return 3\n\n\n", ""))
    assert run("--add", "third", "leanrl/one.py", "leanrl/two.py").returncode == 1  # since `second` has drifted
    assert (folder / "one.py").read_text() == SOURCE


@pytest.mark.parametrize(
    ("words", "said"), [(["--add", "fourth", "leanrl/one.py"], "error: --add fourth"), (["leanrl/none.py"], "Keeps")]
)
def test_bad_input_changes_nothing(words, said, repository):
    folder, run = repository
    done = run(*words)
    assert done.returncode == 1 and done.stderr.startswith(said)
    assert all(path.read_text() == SOURCE for path in folder.glob("*.py"))
