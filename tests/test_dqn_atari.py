"""DQN for Atari: what the loop stores, resuming with and without the replay buffer, memory, learning."""

import numpy as np
import pytest
import torch
from conftest import assert_same_state, leaves, saved, scalars
from test_frame_replay import draw_all
from test_ppo_atari import GAMES, SHAPE, ScriptedPool, short_games, with_resets

from leanrl import dqn_atari as script

SMALL = {"num_envs": 4, "buffer_size": 200, "batch_size": 8, "learning_starts": 40, "train_frequency": 20}
SMALL |= {"total_timesteps": 400, "threads": 1, "cuda": False}


class StackingPool(ScriptedPool):
    """ScriptedPool with stacks of what `draw` shows. They go on after a lost life, and are one frame in a new game."""

    def __init__(self, games=GAMES, **scripted):
        super().__init__(games, **scripted)
        self.starts_game = np.ones(len(self.games), bool)
        self.stacks = np.zeros((len(self.games), *SHAPE), np.uint8)
        self.steps = 0

    def draw(self):
        """The newest frames, (games, 84, 84): of the colour 255, and one less in each step."""
        return np.full((len(self.games), *SHAPE[1:]), 255 - self.steps, np.uint8)

    def observe(self):
        newest = self.draw()[:, None]
        moved_on = np.concatenate((self.stacks[:, 1:], newest), 1)
        self.stacks = np.where(self.starts_game[:, None, None, None], newest, moved_on)
        return self.stacks

    def reset(self):
        obs, infos = super().reset()
        self.starts_game[:] = False
        return obs, infos

    def recv(self):
        self.steps += 1
        obs, rewards, terminated, truncated, infos = super().recv()
        self.starts_game = truncated | infos["terminated"].astype(bool)
        return obs, rewards, terminated, truncated, infos


class PaysForAction2(StackingPool):
    def recv(self):
        obs, rewards, *others, infos = super().recv()
        return obs, rewards * (self.actions == 2), *others, infos


class PickTheBrightQuarter(StackingPool):
    """The action that has the number of the newest frame's bright quarter is rewarded with 1."""

    def draw(self):
        self.quarters = self.generator.integers(0, 4, len(self.games))
        frames = np.zeros((len(self.games), 2, 42, 2, 42), np.uint8)
        frames[np.arange(len(self.games)), self.quarters // 2, :, self.quarters % 2] = 255
        return frames.reshape(-1, *SHAPE[1:])

    def recv(self):
        right = self.actions == self.quarters
        obs, rewards, *others, infos = super().recv()
        return obs, rewards * right, *others, infos | {"reward": rewards * right}


@pytest.fixture(autouse=True)
def pools(monkeypatch):
    play(monkeypatch, StackingPool)


def play(monkeypatch, pool, games=GAMES):
    """From now on the script's games are these."""
    monkeypatch.setattr(script, "make_pool", lambda args, num_envs, seed, **settings: pool(games, seed=seed))


def make_learner(seed=0, **kwargs):
    torch.manual_seed(seed)
    args = script.Args(**SMALL | kwargs)
    return script.DQN(args, script.make_games(args, args.num_envs, args.seed), torch.device("cpu"))


def train(run_dir, **kwargs):
    """Train; returns the run's folder and the learner of the last log."""
    seen = [None]
    args = script.Args(**SMALL | kwargs, run_dir=str(run_dir))
    script.train(args, on_log=lambda learner, losses, step: seen.append(learner))
    return max(run_dir.iterdir(), key=lambda folder: folder.stat().st_mtime), seen[-1]


def load(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def transitions_of(first, last):
    """Of GAMES, in order: the colours of obs and next_obs, and terminated, for all steps from `first` to `last`."""
    games = [with_resets(game) for game in GAMES]
    steps = range(first, last + 1)
    letters = [(step, game[(step - 1) % len(game)]) for step in steps for game in games]
    return [(256 - step, 255 - step, letter in "lgx") for step, letter in letters if letter != "r"]


@pytest.mark.parametrize(("buffer_size", "first"), [(200, 51), (1000, 1)])
def test_what_a_run_stores(buffer_size, first, tmp_path, monkeypatch):
    """Of the newest steps each action with what it has led to, but none that was ignored."""
    play(monkeypatch, PaysForAction2)
    _, learner = train(tmp_path, buffer_size=buffer_size, end_e=1.0)
    wanted = transitions_of(first, 100)
    columns = draw_all(learner.replay, len(wanted))
    colours = [columns[name][:, -1, 0, 0] for name in ("obs", "next_obs")]
    assert list(zip(*colours, columns["terminated"], strict=True)) == wanted
    assert np.array_equal(columns["rewards"], columns["actions"] == 2)
    assert set(columns["actions"]) == {0, 1, 2, 3}


def test_numbers_that_draw_are_uniform():
    """In 200 pieces of the same length, and fine enough for a million transitions."""
    uniform = make_learner(batch_size=20_000).uniform()
    assert uniform.dtype == torch.float64 and len(uniform) == 20_000
    times = np.bincount((uniform.numpy() * 200).astype(int), minlength=200)
    assert len(times) == 200 and ((times - 100) ** 2 / 100).sum() < 200 + 5 * 400**0.5


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_each_environment_explores_by_itself(epsilon):
    learner = make_learner()
    learner.greedy = lambda obs: np.full(len(obs), 3)
    actions = np.stack([learner.act(np.zeros((10, 1)), epsilon) for _ in range(1000)])
    frequencies = np.bincount(actions.flatten(), minlength=4) / actions.size
    assert frequencies == pytest.approx([epsilon / 4] * 3 + [1 - epsilon * 3 / 4], abs=0.02)
    assert ((actions != actions[:, :1]).any(1).mean() > 0.5) == (epsilon > 0)


def test_a_restored_learner_continues_bit_by_bit():
    def advance(learner, envs):
        """Sixty steps of games that begin; returns the actions."""
        actions = []
        obs, _ = envs.reset()
        learner.replay.begin(obs)
        for step in range(60):
            actions.append(learner.act(obs, 0.5).tolist())
            obs, rewards, terminated, _, infos = envs.step(np.array(actions[-1]))
            learner.replay.store(obs, actions[-1], rewards, terminated, infos["is_reset"])
            if step % 10 == 9:
                learner.update()
        return actions

    envs = [script.make_games(script.Args(), 4, seed=0) for _ in range(3)]
    learner = make_learner()
    advance(learner, envs[0])
    state = saved(learner)
    wanted = advance(learner, envs[1])
    restored = make_learner(seed=2)
    restored.load_state_dict(state)
    assert advance(restored, envs[2]) == wanted
    assert_same_state(restored.state_dict(), learner.state_dict())


@pytest.mark.parametrize("checkpoint_replay", [True, False])
def test_resuming_with_and_without_the_buffer(checkpoint_replay, tmp_path, capsys):
    """Without it the run learns again once as many steps have been stored as before its first update, and says so."""
    first, _ = train(tmp_path, checkpoint_replay=checkpoint_replay)
    assert load(first)["learner"]["updates"] == (400 - 40) / 20
    capsys.readouterr()
    again, _ = train(tmp_path, checkpoint_replay=checkpoint_replay, resume=str(first), total_timesteps=600)
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    before, after = load(first), load(again)
    assert (before["global_step"], after["global_step"]) == (400, 600)
    assert after["learner"]["updates"] == (400 - 40 + 200 - 40 * (not checkpoint_replay)) / 20
    if checkpoint_replay:
        assert not notes
        stored = [int(state["learner"]["replay"]["stored"][0]) for state in (before, after)]
        assert stored == [len(transitions_of(1, 100)), len(transitions_of(1, 100)) + len(transitions_of(1, 50))]
    else:
        assert len(notes) == 1 and "no replay buffer" in notes[0] and "until step 440" in notes[0]
        assert before["learner"]["replay"] == after["learner"]["replay"] == {}


def test_a_checkpoint_holds_no_more_than_is_stored(tmp_path):
    """The network, its copy and Adam's moments take 27 MB, a hundred steps of four frames less than 3."""
    folder, _ = train(tmp_path, buffer_size=10**5)
    assert (folder / "checkpoint.pt").stat().st_size < 31e6


@pytest.mark.parametrize("flag", ["num_envs", "buffer_size"])
def test_a_buffer_of_another_form_is_refused(flag, tmp_path, capsys):
    folder, _ = train(tmp_path)
    with pytest.raises(SystemExit) as error:
        train(tmp_path, resume=str(folder), total_timesteps=600, **{flag: 100})
    name = flag.replace("_", "-")
    assert error.value.code == 2 and f"error: --{name} 100: the checkpoint in --resume has" in capsys.readouterr().err


@pytest.mark.parametrize(("size", "remedy"), [(10**12, "give at most "), (7, "give at least 2 * --num-envs, 8")])
def test_a_buffer_that_is_too_large_or_too_small_is_refused(size, remedy, tmp_path, capsys):
    """Before a run begins, and without the memory."""
    with pytest.raises(SystemExit) as error:
        train(tmp_path / "runs", buffer_size=size)
    (line,) = capsys.readouterr().err.splitlines()
    assert error.value.code == 2 and line.startswith(f"error: --buffer-size {size}: {remedy}")
    assert not (tmp_path / "runs").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("free", [10**6, 2**34])
def test_a_buffer_beyond_the_devices_memory_is_on_the_host(free, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2**34))
    folder, learner = train(tmp_path, cuda=True, learning_starts=300)
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert learner.replay.storage.type == ("cuda" if free > 10**7 else "cpu")
    assert len(notes) == (free < 10**7) and load(folder)["learner"]["updates"] == 5


def test_nothing_is_learnt_from_what_was_never_stored(tmp_path, monkeypatch):
    """Memory that was never written holds NaN here, and bytes of 255; one row of it would spoil the losses."""
    empty = torch.empty

    def poisoned(*size, **kwargs):
        tensor = empty(*size, **kwargs)
        return tensor.fill_(torch.nan if tensor.is_floating_point() else 255)

    monkeypatch.setattr(torch, "empty", poisoned)
    folder, _ = train(tmp_path, learning_starts=0)
    learner = load(folder)["learner"]
    assert learner["updates"] == 20
    assert all(tensor.isfinite().all() for _, tensor in leaves(learner["networks"]))


@pytest.mark.parametrize(("game", "value"), [("..t", 10.0), ("..g", 2.5)])
def test_values_bootstrap_through_truncation_but_not_termination(game, value, tmp_path, monkeypatch):
    """With gamma = 0.9 and rewards of 1, V = 1 + gamma V, or V = 1 + gamma V 2/3 if every third step is the last."""

    class Blind(StackingPool):
        def draw(self):
            return np.zeros((len(self.games), *SHAPE[1:]), np.uint8)

    play(monkeypatch, Blind, [game] * 4)
    monkeypatch.setattr(script, "LOG_INTERVAL", 10)
    rates = {"gamma": 0.9, "learning_rate": 3e-4, "train_frequency": 4, "target_network_frequency": 20}
    folder, _ = train(tmp_path, **rates, total_timesteps=800)
    assert np.mean(scalars(folder, "losses/q_values")[-8:]) == pytest.approx(value, rel=0.15)


def test_the_bright_quarter_is_picked(tmp_path, monkeypatch):
    """At first in a quarter of 16 steps."""
    play(monkeypatch, PickTheBrightQuarter, 8 * ["." * 15 + "g"])
    rates = {"learning_rate": 3e-4, "gamma": 0.5, "train_frequency": 8, "target_network_frequency": 80}
    sizes = {"num_envs": 8, "buffer_size": 4000, "batch_size": 32, "total_timesteps": 8 * 17 * 10}
    folder, _ = train(tmp_path, **rates, **sizes, learning_starts=200, exploration_fraction=0.5)
    returns = scalars(folder, "charts/episodic_return")
    assert np.mean(returns[:8]) < 8 and np.mean(returns[-8:]) > 12


def test_a_run_of_breakout(tmp_path, capsys, monkeypatch):
    """Whole games with their own rewards are played in evaluation, and policy.pt2 acts as the policy evaluated."""
    monkeypatch.undo()
    folder, _ = train(tmp_path, num_envs=2)
    short_games(script, monkeypatch, 100)
    script.evaluate(script.Args(evaluate=str(folder), eval_episodes=1, **SMALL | {"num_envs": 2}))
    assert "1 episodes: mean return" in capsys.readouterr().out
    policy = script.make_policy(script.AtariEnvs(script.Args(), 1, 1), load(folder)["learner"])
    exported = torch.export.load(folder / "policy.pt2").module()
    obs = torch.randint(0, 256, (7, *SHAPE), dtype=torch.uint8)
    assert torch.equal(exported(obs), policy(obs))
