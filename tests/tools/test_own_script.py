"""A user's own script, outside of leanrl/ and in no table of this repository, works with instruments and launch."""

import json
import subprocess
import sys

import gymnasium as gym
import pytest

from common import ROOT
from instruments import __main__ as command

FLAGS = ["--total-timesteps=300", "--learning-starts=100", "--no-cuda"]
REGISTERS = 'gym.register("Mine-v0", "gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=20)\n\n\n'


@pytest.fixture
def script(tmp_path):
    """DQN under another name, with a learner of another name, in an environment that the script registers."""
    source = (ROOT / "leanrl" / "dqn_torchcompile.py").read_text()
    source = source.replace("DQN", "MyDQN").replace("CartPole-v1", "Mine-v0")
    assert "class MyDQN:" in source and "Mine-v0" in source
    path = tmp_path / "mine.py"
    path.write_text(source.replace("@dataclass\nclass Args", f"{REGISTERS}@dataclass\nclass Args"))
    yield path
    gym.registry.pop("Mine-v0", None)


def test_instruments(script, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["instruments"])
    own = ["--watch-gradients", "--random-baseline", "2"]
    command.main([*own, "--", str(script), *FLAGS, f"--run-dir={tmp_path / 'runs'}"])
    (run,) = (tmp_path / "runs").iterdir()
    assert json.loads((run / "random_baseline.json").read_text())["mean_return"] > 5
    assert json.loads((run / "summary.json").read_text())["global_step"] == 300
    gym.registry.pop("Mine-v0")
    command.main(["evaluate", str(run), "--episodes", "3"])
    out, err = capsys.readouterr()
    assert out.startswith("3 episodes: mean return ") and "warning" not in err
    assert f"note: imports {run / 'mine.py'}, which may register Mine-v0" in err


@pytest.mark.thorough
def test_launch(script, tmp_path, ray_lock):
    pytest.importorskip("ray", reason="pip install -r requirements/launch.txt")
    words = ["run", str(script), "--seeds", "1", "2", "--out", str(tmp_path / "runs"), "--", *FLAGS]
    done = subprocess.run([sys.executable, "-m", "launch", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [json.loads(path.read_text()) for path in tmp_path.rglob("summary.json")]
    assert sorted(summary["seed"] for summary in found) == [1, 2]
    assert {summary["global_step"] for summary in found} == {300}
