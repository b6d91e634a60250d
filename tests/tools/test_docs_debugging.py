"""doc/debugging.md: each planted bug shows where the page says, and not in the script as it is."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from conftest import load_copy, scalars

from instruments import __main__ as command
from instruments.baseline import RandomBaseline
from instruments.frames import FrameDump

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "doc" / "examples" / "debugging"
spec = importlib.util.spec_from_file_location("plant", FOLDER / "plant.py")
plant = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plant)


def train(name, folder, instruments, **flags):
    """Train the script with a bug, or as it is (None), with instruments; returns the run's folder."""
    healthy = ROOT / "leanrl" / "ppo_continuous_action_torchcompile.py"
    source = plant.planted(name) if name else healthy.read_text()
    script = load_copy(f"script_{name}", source, folder)
    command.attach(script, instruments)
    script.train(script.Args(run_dir=str(folder / "runs"), **flags))
    (run,) = (folder / "runs").iterdir()
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Of the script as it is and with the first two bugs: last returns less a random policy's, and what values explain
    of returns."""
    shown = {}
    for name in (None, "first", "second"):
        folder = tmp_path_factory.mktemp(f"{name}")
        run = train(name, folder, [RandomBaseline(5)], env_id="HalfCheetah-v5", total_timesteps=30_000)
        random = scalars(run, "charts/random_return")[0]
        last_return = np.mean(scalars(run, "charts/episodic_return")[-5:])
        shown[name] = last_return - random, np.mean(scalars(run, "losses/explained_variance")[-8:])
    return shown


def test_the_first_bug_shows_in_the_return(runs):
    assert runs[None][0] > -100
    assert runs["first"][0] < -500


def test_the_second_bug_shows_in_the_values_and_not_in_the_return(runs):
    assert runs[None][1] > 0.3
    assert runs["second"][1] < 0.15
    assert runs["second"][0] > -100


def test_the_third_bug_shows_in_the_frames(tmp_path, capsys):
    run = train("third", tmp_path, [FrameDump(1)], num_steps=32, total_timesteps=1024)
    assert "frames are out of order" in capsys.readouterr().err
    assert list(run.glob("frames/*.png"))


def test_a_bug_is_written_where_it_is_asked_for(tmp_path, monkeypatch, capsys):
    plant.main("second", str(tmp_path / "new" / "second.py"))
    assert (tmp_path / "new" / "second.py").read_text() == plant.planted("second")
    with pytest.raises(SystemExit) as stop:
        plant.main("fourth", "x.py")
    assert stop.value.code == 2 and "error: fourth: give one of first, second, third" in capsys.readouterr().err
