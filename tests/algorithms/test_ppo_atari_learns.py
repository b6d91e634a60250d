"""PPO for Atari learns a game from images, and only if it sees the order of the frames."""

import conftest
import numpy as np
import pytest
import torch
from catch import BALLS, Catch
from conftest import scalars
from formulas import assert_noticed

PLAIN, TURBO = conftest.PLAIN["ppo_atari"], conftest.TURBO["ppo_atari"]
SETTINGS = {"num_envs": 32, "num_steps": 16, "learning_rate": 1e-3, "gamma": 0.9, "clip_coef": 0.2, "cuda": False}


def play_catch(script, monkeypatch, scrambled=False):
    """From now on the script's games are Catch."""
    monkeypatch.setattr(script, "make_pool", lambda args, seed: Catch(args.num_envs, seed, scrambled))


def train(script, run_dir, total_timesteps=5120):
    """Train on one core; returns the run's folder and what its games have brought, per ball, from -1 to 1."""
    before = torch.get_num_threads()
    try:
        script.train(script.Args(run_dir=str(run_dir), total_timesteps=total_timesteps, threads=1, **SETTINGS))
    finally:
        torch.set_num_threads(before)
    (folder,) = run_dir.iterdir()
    return folder, np.array(scalars(folder, "charts/episodic_return")) / BALLS


def compare_frames(obs):
    """Actions, (num_envs,), of a player who goes where the ball has gone from the oldest to the newest frame."""
    columns = (obs[:, :, 0] * np.arange(obs.shape[-1])).sum(-1) / obs[:, :, 0].sum(-1)
    return 1 + np.sign(columns[:, 3] - columns[:, 0])


def play(script, act, num_envs=100):
    """Play four games in each environment; returns how many balls landed, and what a ball was worth."""
    envs = script.AtariEnvs(script.Args(num_envs=num_envs), 0)
    obs, _ = envs.reset()
    earned = landed = 0
    for _ in range(4 * (2 * BALLS + 1)):
        obs, rewards, terminated, _, infos = envs.step(act(obs))
        assert not (rewards[infos["is_reset"]].any() or terminated[infos["is_reset"]].any())
        earned += rewards.sum()
        landed += np.abs(rewards).sum()
    return landed, earned / landed


@pytest.mark.parametrize(
    ("player", "scrambled", "wanted"),
    [("random", False, -7 / 9), ("compares frames", False, 1), ("compares frames", True, -1 / 2)],
)
def test_what_a_ball_is_worth(player, scrambled, wanted, monkeypatch):
    """Both of its two steps have to be right: 1 in 9 at random, 1 in 4 for a player who goes left or right blindly."""
    play_catch(PLAIN, monkeypatch, scrambled)
    generator = np.random.default_rng(0)
    act = compare_frames if player == "compares frames" else lambda obs: generator.integers(0, 3, len(obs))
    landed, per_ball = play(PLAIN, act)
    assert landed == 4 * 100 * BALLS
    assert per_ball == pytest.approx(wanted, abs=0 if wanted == 1 else 0.1)


@pytest.mark.parametrize("script", [pytest.param(PLAIN, marks=pytest.mark.finding), TURBO], ids=["plain", "turbo"])
def test_catch_is_learned(script, tmp_path, monkeypatch):
    """At random a ball is worth -0.78. Seeds 1 to 4 of both scripts end between 0.91 and 0.99."""
    play_catch(script, monkeypatch)
    folder, returns = train(script, tmp_path)
    assert returns[:50].mean() < -0.6
    assert returns[-100:].mean() > 0.8
    policy = torch.export.load(folder / "policy.pt2").module()
    _, per_ball = play(script, lambda obs: policy(torch.from_numpy(obs)).numpy())
    assert per_ball > 0.8


def test_the_order_of_the_frames_is_needed(tmp_path, monkeypatch):
    """Without it half of the balls are the most that can be caught, worth 0 in the mean."""
    play_catch(TURBO, monkeypatch, scrambled=True)
    _, returns = train(TURBO, tmp_path)
    assert returns[-100:].mean() < 0.3


def test_a_wrong_sign_is_noticed(tmp_path, monkeypatch):
    """It learns to miss, and soon."""

    def check(edited):
        play_catch(edited, monkeypatch)
        _, returns = train(edited, tmp_path / "runs", total_timesteps=2048)
        assert returns[-50:].mean() >= -0.9

    assert_noticed(TURBO, "policy_loss = -masked_mean(", "policy_loss = masked_mean(", check, tmp_path)
