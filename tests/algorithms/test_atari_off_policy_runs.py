"""DQN and SAC for Atari, plain and turbo: stored transitions, resuming without the replay buffer, values, learning."""

from functools import partial

import checks
import numpy as np
import pytest
import torch
from catch import BALLS, CatchFrameByFrame
from conftest import PLAIN, TURBO, learner_class, leaves, make_envs, scalars, script_params, stem
from conftest import train as train_script
from test_cli import refused
from test_frame_replay import draw_all
from test_ppo_atari import GAMES, SHAPE, ScriptedPool, with_resets

OFF_POLICY = ("dqn_atari", "sac_atari")
SCRIPTS = [scripts[name] for name in OFF_POLICY for scripts in (PLAIN, TURBO)]
TURBOS = [TURBO[name] for name in OFF_POLICY]
SMALL = {"num_envs": 4, "buffer_size": 200, "batch_size": 8, "learning_starts": 40, "total_timesteps": 400}
SMALL |= {"threads": 1, "cuda": False}


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


def play(script, monkeypatch, pool, games=GAMES):
    """From now on the script's games are these."""
    monkeypatch.setattr(script, "make_pool", lambda args, seed: pool(games, seed=seed))


def first_step(obs):
    """What `train` stores first: observations, (num_envs, ...), to which no actions led."""
    nothing = np.zeros(len(obs))
    return obs, nothing, nothing, nothing, np.ones(len(obs), bool)


def is_dqn(script):
    return stem(script).startswith("dqn")


def arguments(script, every=20, **kwargs):
    """Small Args, with an update in `every` so many steps."""
    frequency = {"train_frequency" if is_dqn(script) else "update_frequency": every}
    return script.Args(**SMALL | frequency | kwargs)


def rates(script, learning_rate):
    """The learning rates of all networks."""
    names = ("learning_rate",) if is_dqn(script) else ("policy_lr", "q_lr")
    return dict.fromkeys(names, learning_rate)


@pytest.fixture(params=script_params(SCRIPTS))
def script(request, monkeypatch):
    play(request.param, monkeypatch, StackingPool)
    return request.param


@pytest.fixture(params=script_params(TURBOS))
def turbo(request, monkeypatch):
    play(request.param, monkeypatch, StackingPool)
    return request.param


def make_learner(script, seed=0, **kwargs):
    torch.manual_seed(seed)
    args = arguments(script, **kwargs)
    return learner_class(script)(args, make_envs(script, args), torch.device("cpu"))


def train(script, run_dir, **kwargs):
    """Train; returns the run's folder and its learner."""
    runs = []
    train_script(script, arguments(script, **kwargs, run_dir=str(run_dir)), on_start=runs.append)
    return runs[0].folder, runs[0].learner


def load(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def transitions_of(first, last):
    """Of GAMES, in order: the colours of obs and next_obs, and terminated, for all steps from `first` to `last`."""
    games = [with_resets(game) for game in GAMES]
    steps = range(first, last + 1)
    letters = [(step, game[(step - 1) % len(game)]) for step in steps for game in games]
    return [(256 - step, 255 - step, letter in "lgx") for step, letter in letters if letter != "r"]


@pytest.mark.parametrize(("buffer_size", "first"), [(200, 51), (1000, 1)])
def test_what_a_run_stores(script, buffer_size, first, tmp_path, monkeypatch):
    """Of the newest steps each action with what it has led to, but none that was ignored."""
    play(script, monkeypatch, PaysForAction2)
    random = {"end_e": 1.0} if is_dqn(script) else {"policy_lr": 1e-12}
    _, learner = train(script, tmp_path, buffer_size=buffer_size, every=100, **random)
    wanted = transitions_of(first, 100)
    columns = draw_all(learner.replay, len(wanted))
    colours = [columns[name][:, -1, 0, 0] for name in ("obs", "next_obs")]
    assert list(zip(*colours, columns["terminated"], strict=True)) == wanted
    assert np.array_equal(columns["rewards"], columns["actions"] == 2)
    assert set(columns["actions"]) == {0, 1, 2, 3}


class Sampled(Exception):
    """Ends an update when it samples."""


def test_numbers_that_draw_are_uniform(script):
    """In 200 pieces of the same length, and fine enough for a million transitions."""

    def sample(uniform):
        raise Sampled(uniform)

    learner = make_learner(script, batch_size=20_000)
    learner.replay.sample = sample
    with pytest.raises(Sampled) as sampled:
        learner.update()
    (uniform,) = sampled.value.args
    assert uniform.dtype == torch.float64 and len(uniform) == 20_000
    times = np.bincount((uniform.numpy() * 200).astype(int), minlength=200)
    assert len(times) == 200 and ((times - 100) ** 2 / 100).sum() < 200 + 5 * 400**0.5


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("kind", ["plain", "turbo"])
def test_each_environment_explores_by_itself(kind, epsilon, monkeypatch):
    script = {"plain": PLAIN, "turbo": TURBO}[kind]["dqn_atari"]
    play(script, monkeypatch, StackingPool, ["..."] * 10)
    learner = make_learner(script, num_envs=10)
    if kind == "plain":
        learner.greedy = lambda obs: np.full(len(obs), 3)
        actions = np.stack([learner.act(np.zeros((10, 1)), epsilon) for _ in range(1000)])
    else:
        learner.host_actions.fill_(3)
        actions = np.stack([learner.next_actions(epsilon) for _ in range(1000)])
    checks.explores(actions, epsilon)


def advance(script, learner, part):
    """Sixty steps of games that begin, half of DQN's at random; returns the actions."""
    exploration = [0.5] if hasattr(learner, "rng") else []
    is_turbo = hasattr(learner, "observe")
    store = learner.observe if is_turbo else learner.replay.store
    envs = make_envs(script, script.Args(num_envs=4, seed=part))
    obs, _ = envs.reset()
    store(*first_step(obs))
    taken = []
    for step in range(60):
        actions = learner.next_actions(*exploration) if is_turbo else learner.act(obs, *exploration)
        taken.append(actions.tolist())
        obs, rewards, terminated, _, infos = envs.step(actions)
        store(obs, actions, rewards, terminated, infos["is_reset"])
        if step % 10 == 9:
            learner.update()
    return taken


def test_a_restored_learner_continues_bit_by_bit(script):
    checks.goes_on_when_restored(partial(make_learner, script), partial(advance, script))


@pytest.mark.parametrize("checkpoint_replay", [True, False])
def test_resuming_with_and_without_the_buffer(script, checkpoint_replay, tmp_path):
    """Without it the run learns again once as many steps have been stored as before its first update."""
    first, _ = train(script, tmp_path, checkpoint_replay=checkpoint_replay)
    assert load(first)["learner"]["updates"] == (400 - 40) / 20
    resume = {"resume": str(first), "total_timesteps": 600}
    again, _ = train(script, tmp_path, checkpoint_replay=checkpoint_replay, **resume)
    before, after = load(first), load(again)
    assert (before["global_step"], after["global_step"]) == (400, 600)
    assert after["learner"]["updates"] == (400 - 40 + 200 - 40 * (not checkpoint_replay)) / 20
    if checkpoint_replay:
        stored = [int(state["learner"]["replay"]["stored"]) for state in (before, after)]
        assert stored == [len(transitions_of(1, 100)), len(transitions_of(1, 100)) + len(transitions_of(1, 50))]
    else:
        assert before["learner"]["replay"] == after["learner"]["replay"] == {}


@pytest.mark.parametrize("flag", ["num_envs", "buffer_size"])
def test_a_buffer_of_another_form_is_refused(turbo, flag, tmp_path, capsys):
    folder, _ = train(turbo, tmp_path, total_timesteps=100)
    capsys.readouterr()
    line = refused(capsys, partial(train, turbo, tmp_path, resume=str(folder), **{flag: 100}))
    assert line.startswith(f"error: --{flag.replace('_', '-')} 100: the checkpoint has")


@pytest.mark.parametrize(("size", "remedy"), [(10**12, "give at most "), (7, "give at least 2 * --num-envs, 8")])
def test_a_buffer_that_is_too_large_or_too_small_is_refused(script, size, remedy, tmp_path, capsys):
    """Before a run begins, and without the memory."""
    line = refused(capsys, partial(train, script, tmp_path, buffer_size=size, batch_size=4))
    assert line.startswith(f"error: --buffer-size {size}: {remedy}")
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.parametrize("missing", [0, 1])
def test_a_buffer_leaves_room_beside_it(script, missing, monkeypatch, capsys):
    """For the rest of what a device holds, 2 GiB; where a byte is missing, one transition less is offered."""
    nbytes = 1000 * (SHAPE[1] * SHAPE[2] + 40)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2 * 2**30 + nbytes - missing, 2**40))
    args = arguments(script, buffer_size=1000)
    if missing:
        with pytest.raises(SystemExit):
            script.make_replay(args, SHAPE, torch.device("cuda"))
        assert "error: --buffer-size 1000: give at most 999, " in capsys.readouterr().err
    else:
        replay = script.make_replay(args, SHAPE, torch.device("cuda"))
        assert all(tensor.is_cuda for tensor in replay.tensors(1000).values())


def test_nothing_is_learnt_from_what_was_never_stored(script, tmp_path, monkeypatch):
    """Memory that was never written holds NaN here, and bytes of 255; one row of it would spoil the losses."""
    empty = torch.empty

    def poisoned(*size, **kwargs):
        tensor = empty(*size, **kwargs)
        return tensor if tensor.is_meta else tensor.fill_(torch.nan if tensor.is_floating_point() else 255)

    monkeypatch.setattr(torch, "empty", poisoned)
    folder, _ = train(script, tmp_path, learning_starts=0, every=40)
    learner = load(folder)["learner"]
    assert learner["updates"] == 10
    assert all(tensor.isfinite().all() for _, tensor in leaves(learner["networks"]))


class Blind(StackingPool):
    def draw(self):
        return np.full((len(self.games), *SHAPE[1:]), 128, np.uint8)


@pytest.mark.parametrize(("game", "value"), [("..t", 5.0), ("..g", 15 / 7)])
def test_values_bootstrap_through_truncation_but_not_termination(turbo, game, value, tmp_path, monkeypatch):
    """With gamma = 0.8 and rewards of 1, V = 1 + gamma V, or V = 1 + gamma V 2/3 if every third step is the last."""
    play(turbo, monkeypatch, Blind, [game] * 4)
    monkeypatch.setattr(turbo, "LOG_INTERVAL", 10)
    own = {} if is_dqn(turbo) else {"autotune": False, "alpha": 1e-6}
    own |= {"gamma": 0.8, "target_network_frequency": 20, "total_timesteps": 800}
    folder, _ = train(turbo, tmp_path, every=4, **rates(turbo, 5e-4), **own)
    values = scalars(folder, "losses/q_values")
    assert np.mean(values[-8:]) == pytest.approx(value, rel=0.2)


def pick_the_bright_quarter(script, run_dir, monkeypatch):
    """Returns of the first and of the last games of a run; at random they are 4 of 16."""
    play(script, monkeypatch, PickTheBrightQuarter, 8 * ["." * 15 + "g"])
    own = {"exploration_fraction": 0.5} if is_dqn(script) else {"autotune": False, "alpha": 0.1}
    own |= {"num_envs": 8, "buffer_size": 4000, "batch_size": 32, "total_timesteps": 8 * 17 * 14}
    own |= {"gamma": 0.1, "target_network_frequency": 40, "learning_starts": 200}
    folder, _ = train(script, run_dir, every=8, **rates(script, 5e-4), **own)
    returns = scalars(folder, "charts/episodic_return")
    return np.mean(returns[:8]), np.mean(returns[-8:])


@pytest.mark.thorough
@pytest.mark.parametrize("script", [PLAIN["dqn_atari"], TURBO["sac_atari"]], ids=stem)
def test_the_bright_quarter_is_picked(script, tmp_path, monkeypatch):
    first, last = pick_the_bright_quarter(script, tmp_path, monkeypatch)
    assert first < 8 and last > 12


def test_catch_is_learnt(tmp_path, monkeypatch):
    """At random a ball is worth -0.78; who does not see the order of the frames gets 0 at most."""
    turbo = TURBO["dqn_atari"]
    monkeypatch.setattr(turbo, "make_pool", lambda args, seed: CatchFrameByFrame(args.num_envs, seed))
    own = {"exploration_fraction": 0.4, "end_e": 0.02, "learning_rate": 5e-4, "gamma": 0.9}
    own |= {"num_envs": 16, "buffer_size": 20_000, "batch_size": 32, "total_timesteps": 8000}
    own |= {"target_network_frequency": 320, "learning_starts": 640}
    folder, _ = train(turbo, tmp_path, every=16, **own)
    returns = np.array(scalars(folder, "charts/episodic_return")) / BALLS
    assert returns[:50].mean() < -0.6 and returns[-100:].mean() > 0.75


@pytest.mark.parametrize("name", OFF_POLICY)
@pytest.mark.parametrize("scripts", [PLAIN, TURBO], ids=["plain", "turbo"])
def test_a_resumed_run_takes_other_random_actions(scripts, name, tmp_path, monkeypatch):
    """Before learning starts: the generator is the checkpoint's."""
    taken = []

    class Watched(StackingPool):
        def send(self, actions):
            taken.append(actions.tolist())
            super().send(actions)

    play(scripts[name], monkeypatch, Watched)
    folder, _ = train(scripts[name], tmp_path, learning_starts=79, total_timesteps=80)
    train(scripts[name], tmp_path, learning_starts=1000, total_timesteps=160, resume=str(folder))
    assert len(taken) == 40 and taken[:20] != taken[20:]
