"""doc/environments.md: its environments pass gymnasium's check, and can be trained on and evaluated."""

import re
import sys
import warnings
from pathlib import Path

import gymnasium as gym
import pytest
from conftest import PLAIN, TURBO, stem
from gymnasium.utils.env_checker import check_env
from test_cli import run_tiny, summary

from instruments import __main__ as command

PAGE = Path(__file__).resolve().parents[2] / "doc" / "environments.md"


@pytest.fixture
def example(tmp_path, monkeypatch):
    """A folder where Python finds the modules of the page, my_env and wrapped."""
    monkeypatch.syspath_prepend(tmp_path)
    my_env, wrapped, *_ = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.M | re.S)
    (tmp_path / "my_env.py").write_text(my_env)
    (tmp_path / "wrapped.py").write_text(f"import gymnasium as gym\n\n\n{wrapped}")
    yield tmp_path
    for name in ("my_env", "wrapped"):
        sys.modules.pop(name, None)
    for env_id in ("Cart-v0", "DiscreteCart-v0", "RescaledPendulum-v0"):
        gym.registry.pop(env_id, None)


def test_the_example_passes_the_check(example):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gym.make("my_env:Cart-v0").unwrapped)


@pytest.mark.parametrize(
    ("script", "env_id"),
    [
        (TURBO["sac"], "my_env:Cart-v0"),
        (PLAIN["ppo"], "my_env:Cart-v0"),
        (TURBO["dqn"], "my_env:DiscreteCart-v0"),
        (PLAIN["td3"], "wrapped:RescaledPendulum-v0"),
    ],
    ids=lambda value: value if isinstance(value, str) else stem(value),
)
def test_the_environments_train_and_are_evaluated(script, env_id, example, capsys):
    folder = run_tiny(script, example / "runs", env_id=env_id)
    assert summary(folder)["episodes"] >= 1
    command.main(["evaluate", str(folder), "--episodes", "1"])
    captured = capsys.readouterr()
    assert "1 episodes: mean return" in captured.out
    assert f"imports the module {env_id.partition(':')[0]}" in captured.err
