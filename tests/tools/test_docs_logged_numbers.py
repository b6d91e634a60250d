"""doc/logged_numbers.md: its tables list exactly the numbers that each script logs."""

import json
import re
from pathlib import Path

import pytest
from conftest import algorithm, script_params
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_cli import run_tiny, summary

PAGE = Path(__file__).resolve().parents[2] / "doc" / "logged_numbers.md"
EPISODES = {"charts/episodic_return", "charts/episodic_length"}  # a tiny run may not end one


def section(title):
    """The text below a heading of the page."""
    (text,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE.read_text(), flags=re.M | re.S)
    return text


def names(title):
    """What the first column of the tables in a section has in code style."""
    rows = re.findall(r"^\| (`[^|]*) \|", section(title), flags=re.M)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


@pytest.mark.parametrize("script", script_params())
def test_every_logged_number_is_in_the_tables(script, tmp_path):
    folder = run_tiny(script, tmp_path, total_timesteps=300)
    logged = set(EventAccumulator(str(folder)).Reload().Tags()["scalars"])
    own = {name for name in names(algorithm(script).split("_")[0].upper()) if name.startswith("losses/")}
    assert logged | EPISODES == own | names("All scripts")
    added = summary(folder).keys() - json.loads((folder / "config.json").read_text()).keys()
    added -= {"ranks"}  # of the script for several GPUs, in doc/multi_gpu.md
    assert added | {"cudagraphs"} == names("config.json and summary.json")
