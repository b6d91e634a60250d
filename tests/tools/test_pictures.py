"""The figures in the documentation: learning curves and the random policy."""

import inspect
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
from helpers import refused
from matplotlib.figure import Figure
from torch.utils.tensorboard import SummaryWriter

from benchmark.report import curves
from common import ROOT
from instruments import playing

HEADER = ",".join(curves.COLUMNS)


class Paying(gym.Env):
    """Episodes as long as `lengths` say, over and over; each step is worth `reward`."""

    observation_space = action_space = gym.spaces.Discrete(2)

    def __init__(self, lengths, reward):
        self.lengths = itertools.cycle(lengths)
        self.reward = reward

    def reset(self, *, seed=None, options=None):
        self.left = next(self.lengths)
        return 0, {}

    def step(self, action):
        self.left -= 1
        return 0, self.reward, self.left == 0, False, {}


def test_random_policy_plays_as_many_games_in_each_environment(tmp_path, monkeypatch, capsys):
    """In the second one games are short, and worth 2 a step."""
    games = {("Pong-v5", 7): ([5, 1], 1), ("Pong-v5", 8): ([1, 2], 2)}
    monkeypatch.setattr(playing, "make_env", lambda env_id, seed: Paying(*games[env_id, seed]))
    path = tmp_path / "curves.csv"
    path.write_text("exp_name,env_id,seed,step,episodic_return\nppo,Pong-v5,1,1000,-20.50\n")
    curves.measure_random(path, "Pong-v5", seed=7, num_envs=2, games=3)
    returns = {7: [5, 1, 5], 8: [2, 4, 2]}
    rows = [f"random,Pong-v5,{seed},0,{value}.00" for seed, values in returns.items() for value in values]
    assert path.read_text().splitlines()[1:] == ["ppo,Pong-v5,1,1000,-20.50", *rows]
    assert capsys.readouterr().out == "6 games: mean return 3.17 ± 0.70, standard deviation 1.57\n"


def test_random_returns_are_those_of_whole_games(tmp_path):
    """Of an Atari game too: at random, Pong is lost by 15 points or more."""
    pytest.importorskip("envpool")
    curves.measure_random(tmp_path / "curves.csv", "Pong-v5", seed=3, num_envs=1, games=1)
    (row,) = (tmp_path / "curves.csv").read_text().splitlines()[1:]
    assert row.startswith("random,Pong-v5,3,0,-") and float(row.split(",")[-1]) <= -15


def test_a_new_file_of_random_returns_has_a_header(tmp_path, monkeypatch):
    monkeypatch.setattr(playing, "make_env", lambda env_id, seed: Paying([1], 1))
    for _ in range(2):
        curves.measure_random(tmp_path / "curves.csv", "Pong-v5", num_envs=1, games=1)
    rows = (tmp_path / "curves.csv").read_text().splitlines()
    assert rows == [",".join(curves.COLUMNS), "random,Pong-v5,1,0,1.00", "random,Pong-v5,1,0,1.00"]


@pytest.mark.parametrize(("flag", "value"), [("games", 0), ("num_envs", 0), ("env_id", "Pung-v5"), ("seed", 2**32)])
def test_random_policy_refuses(flag, value, tmp_path, capsys):
    settings = {"output": tmp_path / "curves.csv", "env_id": "Pong-v5"} | {flag: value}
    assert refused(capsys, curves.measure_random, **settings).startswith(f"--{flag.replace('_', '-')} {value}: ")
    assert not (tmp_path / "curves.csv").exists()


def write_rows(path, runs):
    """A CSV file of `runs`: returns of the steps 10, 20, ... by exp_name and seed; those of "random" are of step 0."""
    rows = [",".join(curves.COLUMNS)]
    for (exp_name, seed), returns in runs.items():
        for i, value in enumerate(returns):
            rows.append(f"{exp_name},Pong-v5,{seed},{0 if exp_name == 'random' else 10 * (i + 1)},{value}")
    path.write_text("\n".join(rows))


def drawn(tmp_path, monkeypatch, window, runs):
    """The lines that `draw` draws of `runs`, by label; those of seeds have none."""
    write_rows(tmp_path / "curves.csv", runs)
    return lines(tmp_path / "curves.csv", monkeypatch, window=window)


def lines(data, monkeypatch, **settings):
    """The lines that `draw` draws of a CSV file, by label; those of seeds have none."""
    figures = []

    class Drawn(Figure):
        def savefig(self, path, **settings):
            figures.append(self)
            super().savefig(path, **settings)

    monkeypatch.setattr(curves, "Figure", Drawn)
    picture = data.with_suffix(".png")
    curves.draw(data, picture, **settings)
    assert picture.stat().st_size
    (figure,) = figures
    return {line.get_label(): line for line in figure.axes[0].lines if not line.get_label().startswith("_")}


def test_a_mean_of_curves_goes_as_far_as_all_of_them(tmp_path, monkeypatch):
    """Seed 1 is 10 rows long, seed 2 only 6: to step 60."""
    runs = {("ppo", 1): np.arange(1, 11), ("ppo", 2): np.arange(3, 9), ("other", 1): np.full(10, 5)}
    lines = drawn(tmp_path, monkeypatch, 1, runs)
    assert set(lines) == {"ppo, 2 seeds", "other, 1 seed"}
    x, y = lines["ppo, 2 seeds"].get_data()
    np.testing.assert_allclose(y, x / 10 + 1)
    assert x[0] == 10 and x[-1] == 60
    assert list(lines["other, 1 seed"].get_xdata()) == list(range(10, 101, 10))


def test_curves_are_moving_means(tmp_path, monkeypatch):
    lines = drawn(tmp_path, monkeypatch, 2, {("ppo", 1): [1, 2, 6]})
    np.testing.assert_allclose(lines["ppo, 1 seed"].get_xydata(), [[10, 1], [20, 1.5], [30, 4]])


def test_a_random_policy_is_a_dashed_line(tmp_path, monkeypatch):
    runs = {("ppo", 1): np.arange(10), ("random", 1): [1, 2], ("random", 2): [4.5]}
    lines = drawn(tmp_path, monkeypatch, 2, runs)
    assert set(lines) == {"ppo, 1 seed", "random policy, 3 games: 2.5"}
    line = lines["random policy, 3 games: 2.5"]
    assert line.get_linestyle() == "--" and list(line.get_ydata()) == [2.5, 2.5]


def write_run(folder, *values, tag=curves.RETURN, **flags):
    """A finished run with these flags that has logged `values`."""
    with SummaryWriter(folder) as writer:
        for i, value in enumerate(values):
            writer.add_scalar(tag, value, 10 * (i + 1))
    config = {"exp_name": "ppo", "env_id": "Pong-v5", "seed": 1, "device": "cpu"}
    (folder / "config.json").write_text(json.dumps(config | flags))
    (folder / "summary.json").write_text("{}")


def test_a_folder_without_runs_leaves_the_file_as_it_was(tmp_path, capsys):
    write_run(tmp_path / "runs" / "silent", 1.0, tag="losses/entropy")
    output = tmp_path / "mine.csv"
    for runs, tag in (("typo", curves.RETURN), ("runs", curves.RETURN), ("runs", "losses/typo")):
        output.write_text("mine")
        with pytest.raises(SystemExit, match="2"):
            curves.collect(tmp_path / runs, output, tag=tag)
        *_, line = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {tmp_path / runs}: no run that is finished has {tag}; give a folder of such")
        assert output.read_text() == "mine" and not output.with_suffix(".json").exists()


def test_runs_are_collected(tmp_path, capsys):
    """Those that have not logged it, or whose events are damaged, are named and left out."""
    write_run(tmp_path / "good", 1.0, 2.5)
    write_run(tmp_path / "silent", 7.0, tag="losses/entropy")
    write_run(tmp_path / "damaged", 9.0)
    (path,) = (tmp_path / "damaged").glob("events.*")
    path.write_bytes(b"\x01" + path.read_bytes()[1:])
    curves.collect(tmp_path, tmp_path / "curves.csv", steps=10)
    rows = (tmp_path / "curves.csv").read_text().splitlines()
    assert rows == [",".join(curves.COLUMNS), "ppo,Pong-v5,1,10,1", "ppo,Pong-v5,1,20,2.5"]
    left_out = [tmp_path / "damaged", tmp_path / "silent"]
    reason = "it has no charts/episodic_return, or its events are damaged; left out"
    assert capsys.readouterr().err.splitlines() == [f"note: {folder}: {reason}" for folder in left_out]


@pytest.mark.parametrize(
    ("name", "values"),
    [("gamma", (0.1, 0.99)), ("env_id", ("Pong-v5", "Breakout-v5")), ("device", ("cpu", "NVIDIA H200"))],
)
def test_runs_with_other_flags_are_not_one_curve(name, values, tmp_path, capsys):
    for i, value in enumerate(values):
        write_run(tmp_path / str(i), 1.0, **{"seed": i, name: value})
    line = refused(capsys, curves.collect, tmp_path, tmp_path / "curves.csv")
    remedy = "collect them from separate folders into separate files"
    assert line == f"{tmp_path}: runs of ppo have {name} {values[0]} and {values[1]}; {remedy}"
    assert not (tmp_path / "curves.csv").exists()


def test_what_changes_nothing_learned_may_differ(tmp_path):
    """Seeds, folders and machines; of another experiment all flags; of a resumed run its steps and its device too."""
    write_run(tmp_path / "a", 1.0, seed=1, run_dir="a", total_timesteps=10, machine={"cores": 2})
    write_run(tmp_path / "b", 2.0, seed=2, run_dir="b", total_timesteps=10, machine={"cores": 16}, track=True)
    write_run(tmp_path / "c", 3.0, seed=1, exp_name="other", total_timesteps=90)
    write_run(tmp_path / "0", 4.0, seed=3, total_timesteps=20, resume="runs/b", device="NVIDIA H200")
    curves.collect(tmp_path, tmp_path / "curves.csv")
    rows = (tmp_path / "curves.csv").read_text().splitlines()[1:]
    assert rows == ["other,Pong-v5,1,10,3", "ppo,Pong-v5,1,10,1", "ppo,Pong-v5,2,10,2", "ppo,Pong-v5,3,10,4"]
    assert json.loads((tmp_path / "curves.json").read_text())["devices"] == ["NVIDIA H200", "cpu"]


def test_a_file_of_another_device_is_not_replaced(tmp_path, capsys):
    output = tmp_path / "curves.csv"
    write_run(tmp_path / "cpu", 1.0)
    write_run(tmp_path / "cuda", 2.0, device="NVIDIA H200")
    for _ in range(2):
        curves.collect(tmp_path / "cpu", output)
    before = output.read_text()
    line = refused(capsys, curves.collect, tmp_path / "cuda", output)
    said = "its runs are those of cpu, not NVIDIA H200; give another file, or delete this one"
    assert line == f"--output {output}: {said}" and output.read_text() == before


def test_curves_can_be_against_minutes(tmp_path, monkeypatch):
    write_run(tmp_path / "run")
    logged = [SimpleNamespace(step=step, value=step / 10, wall_time=1000 + 60 * step) for step in (10, 20, 30)]
    events = SimpleNamespace(FirstEventTimestamp=lambda: 1000, Tags=lambda: {"scalars": [curves.RETURN]})
    events.Scalars = lambda tag: logged
    monkeypatch.setattr(curves, "read_events", lambda folder: events)
    data = tmp_path / "curves.csv"
    curves.collect(tmp_path, data, steps=20, minutes=True)
    assert data.read_text().splitlines() == [
        f"{HEADER},minutes",
        "ppo,Pong-v5,1,20,1.5,15.00",
        "ppo,Pong-v5,1,40,3,30.00",
    ]
    with data.open("a") as file:
        file.write("random,Pong-v5,1,0,-20.00\n")  # as `random` appends it
    table = curves.table(data)
    assert table.header[-1] == "minutes" and [row[-1] for row in table.rows] == ["30", ""]
    curve = lines(data, monkeypatch, minutes=True, window=1)["ppo, 1 seed"]
    assert list(curve.get_xdata()) == [15, 30] and curve.axes.get_xlabel() == "minutes"


def test_minutes_that_were_not_collected_are_not_drawn(tmp_path, capsys):
    data = tmp_path / "curves.csv"
    write_rows(data, {("ppo", 1): [1, 2]})
    line = refused(capsys, curves.draw, data, tmp_path / "curves.png", minutes=True)
    assert line == f"--minutes True: {data} has none; collect runs with --minutes"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "it cannot be read (FileNotFoundError: "),
        ("", "it has no rows; give a CSV file that `collect` has written"),
        (HEADER, "it has no rows; give a CSV file that `collect` has written"),
        ("a,b\n1,2", "it cannot be read (KeyError: 'env_id'); give a CSV file that `collect` has written"),
        (f"{HEADER}\nppo,Pong-v5,1,10", "it cannot be read (TypeError: "),
        (f"{HEADER}\nppo,Pong-v5,1,10,high", "it cannot be read (ValueError: "),
        (f"{HEADER}\nrandom,Pong-v5,1,0,1.0", "it has rows of a random policy alone; "),
    ],
)
def test_what_is_no_curve_is_not_drawn(text, said, tmp_path, capsys):
    data = tmp_path / "curves.csv"
    if text is not None:
        data.write_text(text)
    assert refused(capsys, curves.draw, data, tmp_path / "curves.png").startswith(f"{data}: {said}")
    assert not (tmp_path / "curves.png").exists()


@pytest.mark.parametrize(
    ("function", "changed", "said"),
    [
        (curves.draw, {"window": 0}, "--window 0: give at least 1"),
        (curves.draw, {"output": Path("none/curves.png")}, "--output none/curves.png: give a PNG or SVG file in a"),
        (curves.draw, {"output": Path("curves.txt")}, "--output curves.txt: give a PNG or SVG file in a folder"),
        (curves.collect, {"steps": 0}, "--steps 0: give at least 1"),
        (curves.collect, {"output": Path("/sys/none/curves.csv")}, "--output /sys/none: give a folder that can be"),
        (curves.measure_random, {"output": Path("/sys/none/curves.csv")}, "--output /sys/none: give a folder that can"),
    ],
)
def test_bad_arguments_get_one_line(function, changed, said, tmp_path, capsys):
    given = {"data": tmp_path / "curves.csv", "run_dir": tmp_path, "output": tmp_path / "curves.png", "env_id": "A-v0"}
    names = inspect.signature(function).parameters
    given = {name: value for name, value in (given | changed).items() if name in names}
    assert refused(capsys, function, **given).startswith(said)


@pytest.mark.parametrize("data", sorted((ROOT / "doc" / "artifacts").glob("*.csv")), ids=lambda path: path.stem)
def test_what_was_measured_can_be_drawn(data, tmp_path):
    curves.draw(data, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 20_000
