"""doc/debugging.md: planted bugs show exactly where the page says; its programs print its tables."""

import re

import numpy as np
import pytest
from conftest import load_copy, scalars
from helpers import DOC, ROOT, blocks, load_example, refused, section
from scipy import stats

from instruments import __main__ as command
from instruments.baseline import RandomBaseline
from instruments.frames import FrameDump

PAGE = (DOC / "debugging.md").read_text()
plant = load_example("debugging/plant")


def train(name, folder, instruments, **flags):
    """Train the script with a bug, or as it is (None), with instruments; returns the run's folder."""
    healthy = ROOT / "leanrl" / "ppo_continuous_action_torchcompile.py"
    source = plant.planted(name) if name else healthy.read_text()
    script = load_copy(f"script_{name}", source, folder)
    command.train(script, script.Args(run_dir=str(folder / "runs"), **flags), instruments)
    (run,) = (folder / "runs").iterdir()
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Of the script as it is and with the first two bugs: last returns less a random policy's, and what values explain
    of returns; means over three seeds."""
    shown = {}
    for name in (None, "first", "second"):
        pairs = []
        for seed in (1, 2, 3):
            folder = tmp_path_factory.mktemp(f"{name}_{seed}")
            run = train(name, folder, [RandomBaseline(5)], env_id="HalfCheetah-v5", total_timesteps=30_000, seed=seed)
            random = scalars(run, "charts/random_return")[0]
            last_return = np.mean(scalars(run, "charts/episodic_return")[-5:])
            pairs.append((last_return - random, np.mean(scalars(run, "losses/explained_variance")[-8:])))
        shown[name] = np.mean(pairs, 0)
    return shown


@pytest.mark.finding
def test_the_first_bug_shows_in_the_return(runs):
    assert runs[None][0] > -100
    assert runs["first"][0] < -500


@pytest.mark.finding
def test_the_second_bug_shows_in_the_values_and_not_in_the_return(runs):
    assert runs[None][1] > 0.3
    assert runs["second"][1] < 0.2
    assert runs["second"][0] > -100


def test_the_third_bug_shows_in_the_frames(tmp_path, capsys):
    run = train("third", tmp_path, [FrameDump(1)], num_steps=32, total_timesteps=1024)
    assert "frames are out of order" in capsys.readouterr().err
    assert list(run.glob("frames/*.png"))


def test_a_bug_is_written_where_it_is_asked_for(tmp_path, monkeypatch, capsys):
    plant.main("second", str(tmp_path / "new" / "second.py"))
    assert (tmp_path / "new" / "second.py").read_text() == plant.planted("second")
    capsys.readouterr()
    assert refused(capsys, plant.main, "fourth", "x.py").startswith("fourth: give one of first, second, third")


def program(title):
    """The Python program in a section of the page."""
    (text,) = blocks(section(PAGE, title), "python")
    return text


def test_seeds_spread_as_in_the_curves(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    exec(program("Seeds"), {})
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 4
    assert all(row in PAGE.splitlines() for row in rows)


def power(seeds, difference):
    """The probability that a two-sided t-test at 5% finds a difference, in standard deviations, between two groups."""
    degrees = 2 * seeds - 2
    limit = stats.t.ppf(0.975, degrees)
    shift = difference * (seeds / 2) ** 0.5
    return 1 - stats.nct.cdf(limit, degrees, shift) + stats.nct.cdf(-limit, degrees, shift)


def test_so_many_seeds_are_needed():
    rows = re.findall(r"^\| standard deviation (\d+)%.*? \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", PAGE, re.M)
    assert len(rows) == 3
    for deviation, *row in rows:
        for difference, seeds in zip((10, 20, 30, 50), map(int, row), strict=True):
            assert power(seeds, difference / int(deviation)) >= 0.8
            assert seeds == 2 or power(seeds - 1, difference / int(deviation)) < 0.8


@pytest.mark.parametrize("name", ["SAC", "TD3"])
def test_one_batch_is_overfitted(name, capsys):
    """In the page's program, but for 500 updates only."""
    text = program("Overfitting one batch").replace("range(2001)", "range(501)")
    text = text.replace("sac_continuous_action", f"{name.lower()}_continuous_action").replace(
        "script.SAC", f"script.{name}"
    )
    exec(text, {})
    first, last = (float(line.split()[1]) for line in capsys.readouterr().out.splitlines())
    assert 0.5 < first < 1.2
    assert last < 0.15
