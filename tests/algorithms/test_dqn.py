"""The DQN scripts: plain against turbo, replay, exploration, episode ends, graphs, resuming, learning."""

from functools import partial

import checks
import conftest
import numpy as np
import pytest
import torch
from conftest import MODES, as_rows, assert_learners_agree, copy_networks, learnt, make_learner, replay_in_order, saved
from torch import nn

PLAIN, TURBO = conftest.PLAIN["dqn"], conftest.TURBO["dqn"]
script = checks.plain_and_turbo("dqn")
WITH_EPSILON = ("dqn", "dqn_atari", "pqn", "pqn_atari")
EXPLORERS = [scripts[name] for name in WITH_EPSILON for scripts in (conftest.PLAIN, conftest.TURBO)]


def transitions(generator, num_envs=1, obs_dim=4, num_actions=2):
    """Random columns for the replay buffer."""
    obs, next_obs = generator.standard_normal((2, num_envs, obs_dim))
    columns = {"obs": obs, "next_obs": next_obs, "actions": generator.integers(num_actions, size=num_envs)}
    return columns | {"rewards": generator.standard_normal(num_envs), "terminated": generator.random(num_envs) < 0.1}


def fill(learner, rows):
    """Store random transitions, one vector step after the other; returns them as rows of a turbo learner's buffer."""
    generator = np.random.default_rng(0)
    sent = [transitions(generator, learner.args.num_envs) for _ in range(rows // learner.args.num_envs)]
    for columns in sent:
        store(learner, columns)
    return np.concatenate([as_rows(columns) for columns in sent])


def store(learner, columns):
    """Hand one vector step's transitions to a learner, as `train` does."""
    replay = learner.replay
    (replay.collect if hasattr(replay, "collect") else replay.store)(**columns)


def weights(network):
    """A copy of a network's parameters and buffers as one vector."""
    return torch.cat([tensor.flatten() for tensor in network.state_dict().values()])


OTHER = {"env_id": "FourActions-v0", "tau": 0.3, "gamma": 0.9, "learning_rate": 1e-3}


@pytest.mark.parametrize(("kwargs", "mode"), [({}, "eager"), ({}, "compile"), (OTHER, "eager")])
def test_turbo_equals_plain(kwargs, mode):
    """From equal weights and batches losses, gradients (Adam's first moments) and parameters agree for 50 updates.

    Compiled, they are one graph, which `fullgraph=True` proves and the number of graphs, and which no data changes.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain, turbo = make_learner(PLAIN, **kwargs), make_learner(TURBO, **kwargs, **MODES[mode])
    copy_networks(plain, turbo)
    replay_in_order(turbo)
    generator = np.random.default_rng(0)
    for update in range(50):
        see_same_batch(plain, turbo, generator)
        with torch._dynamo.config.patch(error_on_recompile=update > 0):
            for learner in (plain, turbo):
                learner.update()
                if update % 7 == 0:
                    learner.update_target()
        if update in (0, 49):
            assert_learners_agree(plain, turbo, tolerance=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (mode == "compile")


def see_same_batch(plain, turbo, generator):
    """Let the next updates of both learners take the same random batch, turbo's after `replay_in_order`."""
    batch = transitions(generator, plain.args.batch_size, turbo.obs_dim, turbo.num_actions)
    tensors = {name: torch.as_tensor(column).float() for name, column in batch.items()}
    plain.replay.sample = lambda batch_size: tensors
    turbo.replay.rows[: plain.args.batch_size] = torch.from_numpy(as_rows(batch))


@pytest.mark.parametrize(("num_envs", "train_frequency"), [(1, 10), (3, 10), (16, 10), (3, 1), (1, 100)])
def test_ring_buffer_holds_the_newest_transitions(num_envs, train_frequency):
    """However many steps lie between updates, and whether an update or a full block brings them to the device."""
    size = 40
    learner = make_learner(TURBO, num_envs=num_envs, train_frequency=train_frequency, buffer_size=size)
    learner.replay.rows.fill_(torch.nan)
    generator, sent = np.random.default_rng(0), []
    for step in range(75):
        sent.append(transitions(generator, num_envs))
        store(learner, sent[-1])
        if step % 7 == 0:
            learner.update()
    state = learner.state_dict()
    newest = np.concatenate([as_rows(columns) for columns in sent])[-size:]
    assert int(state["replay"]["stored"]) == 75 * num_envs
    assert sorted(state["replay"]["rows"].tolist()) == sorted(newest.tolist())
    assert weights(learner.q).isfinite().all()


@pytest.mark.parametrize("num_envs", [1, 3])
def test_the_plain_ring_buffer_holds_the_newest_transitions(num_envs):
    learner = make_learner(PLAIN, num_envs=num_envs, buffer_size=10)
    newest = fill(learner, 25 * num_envs)[-10:]
    assert sorted(as_rows(learner.replay.columns).tolist()) == sorted(newest.tolist())


@pytest.mark.parametrize("filled", [1, 5, 10])
def test_replay_draws_every_stored_row_and_no_other(script, filled):
    """In the turbo script, where the update itself draws them, seen by a reward that is not a number."""
    learner = make_learner(script, buffer_size=10, batch_size=500)
    if script is PLAIN:
        learner.replay.columns["rewards"][:] = torch.arange(10.0)
        learner.replay.stored = filled
        assert set(learner.replay.sample(500)["rewards"].tolist()) == set(range(filled))
        return
    drawn = []
    for row in range(10):
        learner = make_learner(script, buffer_size=10, batch_size=500)
        learner.replay.rows.zero_()
        learner.replay.rows[row, -2] = torch.nan
        learner.replay.stored.fill_(filled)
        learner.update()
        drawn += [row] * (not np.isfinite(learner.losses()["td_loss"]))
    assert drawn == list(range(filled))


@pytest.mark.parametrize("train_frequency", [1, 10, 1000])
@pytest.mark.parametrize("num_envs", [1, 3, 16])
def test_nothing_is_learned_from_rows_that_were_never_stored(script, num_envs, train_frequency, tmp_path, monkeypatch):
    """Memory that was never written holds NaN here; one row of it would spoil every parameter."""

    def poisoned(empty, *size, **kwargs):
        array = empty(*size, **kwargs)
        if array.dtype in (torch.float32, np.float32) and str(array.device) == "cpu":
            array[...] = np.nan
        return array

    monkeypatch.setattr(torch, "empty", partial(poisoned, torch.empty))
    monkeypatch.setattr(np, "empty", partial(poisoned, np.empty))
    sizes = {"total_timesteps": 1100, "learning_starts": 40, "buffer_size": 2000, "batch_size": 16}
    args = script.Args(num_envs=num_envs, train_frequency=train_frequency, run_dir=str(tmp_path), **sizes)
    script.train(args)
    learner = torch.load(next(tmp_path.glob("*/checkpoint.pt")), weights_only=True)["learner"]
    assert all(tensor.isfinite().all() for _, tensor in conftest.leaves(learner["networks"]))
    last, exploring = -(-args.total_timesteps // num_envs) * num_envs, args.learning_starts // num_envs * num_envs
    assert learner["updates"] == last // train_frequency - exploring // train_frequency
    assert int(learner["replay"]["stored"]) == last


def test_times_due_counts_the_multiples_that_a_vector_step_reaches(script):
    for num_envs in (1, 3, 10, 16):
        for frequency in (1, 4, 10, 500):
            steps = range(num_envs, 60 * num_envs, num_envs)
            assert sum(script.times_due(frequency, step, num_envs) for step in steps) == steps[-1] // frequency
            assert script.times_due(frequency, 10 * frequency * num_envs, num_envs) >= 1


@pytest.mark.parametrize("script", EXPLORERS, ids=conftest.stem)
def test_epsilon_falls_linearly_and_stays(script):
    args = script.Args(total_timesteps=1000, exploration_fraction=0.5, start_e=0.9, end_e=0.1)
    points = {0: 0.9, 1: 0.9 - 0.8 / 500, 250: 0.5, 499: 0.1 + 0.8 / 500, 500: 0.1, 501: 0.1, 10**9: 0.1}
    assert {step: script.epsilon(step, args) for step in points} == pytest.approx(points)
    args.exploration_fraction = 0
    assert script.epsilon(1, args) == pytest.approx(0.1)


def test_a_run_explores_as_scheduled(script, tmp_path, monkeypatch):
    """Action 3 pays most, and is all that a network of zeros with a bias for it wants; others are random ones' 3/4."""
    taken = []

    def greedy(self, obs):
        return np.full(len(obs), 3)

    def step(self, action, step=conftest.DiscreteCountdown.step):
        taken.append(int(action))
        return step(self, action)

    monkeypatch.setattr(script.DQN, "greedy", greedy)
    monkeypatch.setattr(conftest.DiscreteCountdown, "step", step)
    sizes = {"total_timesteps": 12_000, "learning_starts": 11_990, "num_envs": 4, "end_e": 0.2}
    script.train(script.Args(env_id="FourActions-v0", run_dir=str(tmp_path), **sizes))
    taken = np.array(taken)
    for first, last, rate in [(0, 600, 0.96), (2700, 3300, 0.6), (5400, 6000, 0.24), (6000, 12_000, 0.2)]:
        random = np.mean(taken[first:last] != 3) / 0.75
        assert random == pytest.approx(rate, abs=4 * (0.25 / (last - first)) ** 0.5 / 0.75), (first, last)
    assert set(taken.tolist()) == {0, 1, 2, 3}


def test_act_is_greedy_in_weights_of_a_known_age(script):
    """The newest in the plain script; in the turbo script those from before the last update, since it may still run."""
    age = 1 if script is TURBO else 0
    learner = make_learner(script, env_id="FourActions-v0", num_envs=8, learning_rate=0.01)
    generator = np.random.default_rng(0)
    obs = generator.standard_normal((8, 2)).astype(np.float32)
    network = script.QNetwork(2, 4)
    wanted, decisions = [], []
    for _ in range(30):
        network.load_state_dict(learner.state_dict()["networks"]["q"])
        wanted.append(network(torch.from_numpy(obs)).argmax(1).tolist())
        decisions.append(learner.act(obs, 0.0).tolist())
        store(learner, transitions(generator, 8, 2, 4))
        learner.update()
    assert decisions == [wanted[max(0, i - age)] for i in range(30)]
    assert len(set(map(str, decisions))) > 3, "the weights matter"


def test_acting_does_without_torch(monkeypatch):
    """The layers of the script are computed in NumPy: torch needs ten times as long."""
    learner = make_learner(TURBO, num_envs=3)
    monkeypatch.setattr(nn.Module, "__call__", None)
    assert learner.act(np.zeros((3, 4)), 0.0).shape == (3,)


class Clamped(TURBO.QNetwork):
    def forward(self, obs):
        return super().forward(obs.clamp(-0.5, 0.5))


class Dueling(nn.Module):
    def __init__(self, obs_dim, num_actions):
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(obs_dim, 84), nn.ReLU())
        self.value = nn.Linear(84, 1)
        self.advantage = nn.Linear(84, num_actions)

    def forward(self, obs):
        hidden = self.hidden(obs)
        return self.value(hidden) + self.advantage(hidden)


class Normalized(TURBO.QNetwork):
    def __init__(self, obs_dim, num_actions):
        super().__init__(obs_dim, num_actions)
        self.insert(1, nn.LayerNorm(120))


class Other(nn.Sequential):
    def __init__(self, obs_dim, num_actions):
        layers = [nn.Identity(), nn.Linear(obs_dim, 9, bias=False), nn.SiLU(), nn.Linear(9, 7), nn.LeakyReLU(0.1)]
        super().__init__(*layers, nn.Sequential(nn.Linear(7, 5), nn.Tanh()), nn.Linear(5, num_actions))


@pytest.mark.parametrize("network", [TURBO.QNetwork, Other, Clamped, Dueling, Normalized])
def test_an_edited_network_acts_and_learns_everywhere(network, monkeypatch):
    """On the host too, where NumPy stands for torch in the layers that it knows, and in no others."""
    monkeypatch.setattr(TURBO, "QNetwork", network)
    monkeypatch.setattr(PLAIN, "QNetwork", network)
    plain = make_learner(PLAIN, learning_rate=0.01)
    turbo = make_learner(TURBO, learning_rate=0.01)
    copy_networks(plain, turbo)
    turbo.host_q.send()
    replay_in_order(turbo)
    generator = np.random.default_rng(0)
    obs = 20 * generator.standard_normal((64, 4)).astype(np.float32)
    for _ in range(3):
        with torch.no_grad():
            wanted = plain.q(torch.from_numpy(obs)).numpy()
        see_same_batch(plain, turbo, generator)
        plain.update()
        turbo.update()
        np.testing.assert_allclose(turbo.host_q.forward(obs), wanted, rtol=1e-3, atol=1e-3)
    assert_learners_agree(plain, turbo, tolerance=1e-4)


class Centered(TURBO.QNetwork):
    """Subtracts a running mean of what it sees."""

    def __init__(self, obs_dim, num_actions):
        super().__init__(obs_dim, num_actions)
        self.register_buffer("mean", torch.zeros(obs_dim))

    def forward(self, obs):
        self.mean.lerp_(obs.detach().mean(0), 0.1)
        return super().forward(obs - self.mean)


def check_buffers(learner):
    """Buffers that forward changes are as old as the weights, wherever the learner acts and learns."""
    fill(learner, 32)
    newest = [learner.q.mean.clone()]
    for _ in range(5):
        learner.update()
        assert torch.equal(learner.host_q.network.mean, newest[-1].cpu())
        newest.append(learner.q.mean.clone())
        assert not torch.equal(newest[-1], newest[-2])


@pytest.mark.parametrize("mode", ["eager", "compile"])
def test_buffers_reach_the_host(mode, monkeypatch):
    torch._dynamo.reset()  # what is compiled is not guarded against another network
    monkeypatch.setattr(TURBO, "QNetwork", Centered)
    check_buffers(make_learner(TURBO, **MODES[mode]))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_buffers_reach_the_host_from_cuda(mode, monkeypatch):
    monkeypatch.setattr(TURBO, "QNetwork", Centered)
    check_buffers(make_learner(TURBO, device="cuda", **MODES[mode]))


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_each_environment_explores_by_itself(script, epsilon):
    learner = make_learner(script, env_id="FourActions-v0", num_envs=10)
    learner.greedy = lambda obs: np.full(len(obs), 3)
    actions = np.stack([learner.act(np.zeros((10, 2)), epsilon) for _ in range(1000)])
    checks.explores(actions, epsilon)


def test_actions_are_the_environments_to_keep(script):
    """An environment may hold on to its last actions; the next ones must not be written over them."""
    learner = make_learner(script, num_envs=20)
    obs = np.random.default_rng(0).standard_normal((20, 4)).astype(np.float32)
    first = learner.act(obs, 0.5)
    kept = first.copy()
    assert not np.array_equal(learner.act(-obs, 0.5), kept) and np.array_equal(first, kept)


@pytest.mark.parametrize(("num_envs", "train_frequency", "target_frequency"), [(1, 10, 50), (3, 10, 25), (16, 10, 8)])
def test_the_target_network_follows_at_its_own_frequency(
    script, num_envs, train_frequency, target_frequency, tmp_path, monkeypatch
):
    """Counted in environment steps from the first one on, after learning starts; after the updates of its step."""
    calls = []

    def watch(name):
        own = getattr(script.DQN, name)

        def watched(*inputs):
            calls.append(name)
            return own(*inputs)

        monkeypatch.setattr(script.DQN, name, watched)

    for name in ("act", "update", "update_target"):
        watch(name)
    args = {"train_frequency": train_frequency, "target_network_frequency": target_frequency}
    sizes = {"num_envs": num_envs, "total_timesteps": 480, "learning_starts": 100, "batch_size": 8, "buffer_size": 500}
    script.train(script.Args(env_id="DiscreteTruncates-v0", run_dir=str(tmp_path), **sizes, **args))
    steps = " ".join(calls).split("act")[1:]
    assert len(steps) == -(-480 // num_envs)
    for i, step in enumerate(steps):
        reached = range(i * num_envs + 1, (i + 1) * num_envs + 1)
        learning = (i + 1) * num_envs > 100
        updates = learning * sum(number % train_frequency == 0 for number in reached)
        target = learning and any(number % target_frequency == 0 for number in reached)
        assert step.split() == ["update"] * updates + ["update_target"] * target, i


@pytest.mark.parametrize("num_envs", [1, 3])
def test_a_restored_learner_continues_bit_by_bit(script, num_envs):
    def advance(learner, seed):
        generator, actions = np.random.default_rng(seed), []
        for step in range(25):
            actions.append(learner.act(generator.standard_normal((num_envs, 4)), 0.5).tolist())
            store(learner, transitions(generator, num_envs))
            if step % 4 == 0:
                learner.update()
        return actions

    checks.goes_on_when_restored(partial(make_learner, script, num_envs=num_envs, buffer_size=15), advance)


def test_a_checkpoint_in_mid_block_loses_no_transition():
    learner = make_learner(TURBO)
    sent = fill(learner, 13)
    state = learner.state_dict()["replay"]
    assert int(state["stored"]) == 13
    assert np.array_equal(state["rows"].numpy(), sent)


def test_resuming_continues_the_run(script, tmp_path):
    sizes = {"env_id": "FourActions-v0", "learning_starts": 100, "batch_size": 32, "buffer_size": 1000}
    for steps, resume in ((455, None), (700, "checkpoint.pt")):
        resume = resume and str(next(tmp_path.glob("*/checkpoint.pt")))
        script.train(script.Args(total_timesteps=steps, resume=resume, run_dir=str(tmp_path), **sizes))
    newest = max(tmp_path.iterdir(), key=lambda folder: folder.stat().st_mtime)
    checkpoint = torch.load(newest / "checkpoint.pt", weights_only=True)
    assert checkpoint["global_step"] == 700 and checkpoint["episodes"] == 22 + 12
    assert checkpoint["learner"]["updates"] == 60 and int(checkpoint["learner"]["replay"]["stored"]) == 700


def test_cartpole_is_learned(script, tmp_path):
    sizes = {"total_timesteps": 25_000, "learning_starts": 1000, "exploration_fraction": 0.3}
    rates = {"learning_rate": 1e-3, "train_frequency": 4, "target_network_frequency": 200}
    checks.learns_cartpole(script, tmp_path, **sizes, **rates)


def advance(learner, updates, seed=0):
    """Act, store and update as `train` does, on random transitions; returns the actions."""
    generator, actions = np.random.default_rng(seed), []
    for _ in range(updates):
        for _ in range(10):
            actions.append(learner.act(generator.standard_normal((1, 4)), 0.1))
            store(learner, transitions(generator))
        learner.update()
    return np.concatenate(actions)


CUDA = {"script": TURBO, "device": "cuda", "batch_size": 64, "buffer_size": 200}


@pytest.mark.gpu
@pytest.mark.parametrize("mode", checks.OTHER_MODES)
def test_modes_agree(mode):
    """Before, at and after capture, a mode has made exactly the updates that eager code makes."""
    eager, other = learners = [make_learner(**CUDA, **kwargs) for kwargs in ({}, MODES[mode])]
    for learner in learners:
        conftest.fill_replay(learner)
        learner.replay.rows[:, 8] = (learner.replay.rows[:, 8] > 0).float()  # actions
        replay_in_order(learner)
    for update in range(1, 51):
        for learner in learners:
            before = weights(learner.q)  # and nothing that waits
            learner.update()
        if update in (1, 2, 3, 4, 50):
            other.host_q.arrived.synchronize()
            assert torch.equal(other.host_q.arriving, weights(other.q).cpu())
            assert torch.equal(weights(other.host_q.network), before.cpu())
            tolerance = 1e-5 if update == 1 else 1e-4 if update < 10 else 1e-3
            conftest.assert_close_in_norm(learnt(other), learnt(eager), tolerance, least=1e-7)
            assert other.optimizers["q"].corrections[0].item() == pytest.approx(1 - 0.9**update)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
class TestOnCuda:
    def test_every_transition_is_stored_once(self, mode):
        """Whether one update follows a block of transitions, or several do, before, at and after capture."""
        learner = make_learner(**CUDA, **MODES[mode])
        generator, sent = np.random.default_rng(0), []
        for step in range(100):
            sent.append(transitions(generator))
            store(learner, sent[-1])
            for _ in range((0, 0, 0, 1, 0, 0, 0, 2)[step % 8]):
                learner.update()
        assert int(learner.replay.stored) == 100
        rows = np.concatenate([as_rows(columns) for columns in sent])
        assert np.array_equal(learner.replay.rows[:100].cpu().numpy(), rows)

    def test_replays_draw_fresh_rows(self, mode):
        learner = make_learner(**CUDA, **MODES[mode])
        advance(learner, 5)

        def update():
            learner.update()
            return learner.losses()["td_loss"]

        assert len(set(checks.repeated(learner, update, 20))) == 20

    def test_the_host_waits_for_weights_alone(self, mode):
        learner = make_learner(**CUDA, **MODES[mode])
        advance(learner, 10)
        with checks.no_waits():
            advance(learner, 10, seed=1)
            learner.update_target()

    def test_a_checkpoint_continues_in_captured_graphs(self, mode):
        """Loading fills the tensors that the graphs read: a restored learner goes on like the one that was saved."""
        learner = make_learner(**CUDA, **MODES[mode])
        advance(learner, 10)
        state = saved(learner)
        learner.update()
        acting = weights(learner.host_q.network)
        learner.load_state_dict(state)
        conftest.assert_same_state(saved(learner), state)
        learner.update()
        assert torch.equal(weights(learner.host_q.network), acting)  # those of `state`, which come from the device
        learner.load_state_dict(state)
        wanted_actions, wanted = advance(learner, 5, seed=1), weights(learner.q)
        learner.load_state_dict(state)
        actions = advance(learner, 5, seed=1)
        assert np.mean(actions == wanted_actions) > 0.9
        torch.testing.assert_close(weights(learner.q), wanted)
