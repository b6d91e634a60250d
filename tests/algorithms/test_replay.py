"""SAC and TD3: replay, acting, resuming, learning, the loop on CUDA; with DQN, episode ends and values."""

import json
from functools import partial

import checks
import conftest
import numpy as np
import pytest
import torch
from conftest import MODES, PLAIN, TURBO, advance, make_learner, scalars, stem, stored_rows, tiny, train, transitions

LEARNERS = ("sac", "td3")
FAST = {  # settings with which values are learned in 1000 steps
    "sac": {"tau": 0.1, "q_lr": 3e-3, "autotune": False, "alpha": 0.0},
    "td3": {"tau": 0.2, "learning_rate": 3e-3},
    "dqn": {"learning_rate": 3e-3, "train_frequency": 1, "target_network_frequency": 5},
}
PENDULUM = {
    "sac": {"total_timesteps": 5000, "learning_starts": 500, "policy_lr": 1e-3},
    "td3": {"total_timesteps": 6000, "learning_starts": 1000, "learning_rate": 1e-3, "tau": 0.01},
}
SWINGS = [pytest.param(PLAIN, name, id=f"plain-{name}", marks=pytest.mark.finding) for name in LEARNERS]
SWINGS += [pytest.param(TURBO, name, id=f"turbo-{name}", marks=pytest.mark.thorough) for name in LEARNERS]
TRAINED = [(name, "cudagraphs") for name in ("sac", "td3", "dqn", "ppo", "ppo_atari", "pqn", "pqn_atari")]
TRAINED += [("dqn", mode) for mode in MODES if mode != "cudagraphs"]


def each_replay(test):
    """Parametrize a test by the scripts, plain or turbo, and a name among them."""
    test = pytest.mark.parametrize("scripts", [PLAIN, TURBO], ids=["plain", "turbo"])(test)
    return pytest.mark.parametrize("name", [*LEARNERS, "dqn"])(test)


@pytest.fixture(params=[scripts[name] for name in LEARNERS for scripts in (PLAIN, TURBO)], ids=stem)
def script(request):
    return request.param


@pytest.fixture(params=[TURBO[name] for name in LEARNERS], ids=stem)
def turbo(request):
    return request.param


def learner_on_cuda(turbo, mode):
    slow_policy = {"policy_lr": 3e-5} if turbo is TURBO["sac"] else {}  # as where plain and turbo are compared
    return make_learner(turbo, device="cuda", batch_size=64, buffer_size=200, **slow_policy, **MODES[mode])


def send(learner, steps):
    """Step as `train` does before learning starts, on random transitions; returns them as rows of the buffer."""
    generator = np.random.default_rng(0)
    sent = []
    for _ in range(steps):
        row = transitions(learner, generator)
        sent.append(conftest.as_rows(row))
        learner.observe(**row)
        learner.next_actions()
    return np.concatenate(sent)


@pytest.mark.parametrize("num_envs", [1, 3])
def test_ring_buffer_holds_the_newest_transitions(turbo, num_envs):
    learner = make_learner(turbo, num_envs=num_envs, buffer_size=10)
    newest = send(learner, 25)[-10:]
    assert int(learner.replay.stored) == 25 * num_envs
    assert sorted(learner.replay.rows.tolist()) == sorted(newest.tolist())


@pytest.mark.parametrize("filled", [1, 5, 10])
def test_replay_draws_every_stored_row_and_no_other(turbo, filled):
    learner = make_learner(turbo, buffer_size=10, batch_size=500)
    learner.replay.rows.copy_(torch.arange(10.0)[:, None].expand_as(learner.replay.rows))
    learner.replay.stored.fill_(filled)
    assert set(learner.replay.sample(learner.uniform.uniform_())[:, 0].tolist()) == set(range(filled))


@pytest.mark.parametrize(("env_id", "ends"), [("Truncates-v0", 0.0), ("Terminates-v0", 1.0)])
@each_replay
def test_transitions_keep_the_true_last_observation_and_tell_terminal_from_truncated(
    scripts, name, env_id, ends, tmp_path
):
    script, env_id, seen = scripts[name], f"Discrete{env_id}" if name == "dqn" else env_id, []
    sizes = {"num_envs": 2, "total_timesteps": 400, "learning_starts": 300, "batch_size": 8, "buffer_size": 500}
    args = script.Args(env_id=env_id, run_dir=str(tmp_path), **sizes)
    train(script, args, on_log=lambda learner, losses, step: seen.append(stored_rows(learner)))
    obs, next_obs, terminated = seen[-1]
    assert len(obs) == 400
    assert (next_obs[:, 0] == obs[:, 0] + 1).all() and (next_obs[:, 1] == obs[:, 1]).all()
    assert (terminated == ends * (next_obs[:, 0] == 3)).all()


@pytest.mark.thorough
@pytest.mark.parametrize(("end", "value"), [("Truncates", 10.0), ("Terminates", 2.5)])
@each_replay
def test_values_bootstrap_through_truncation_but_not_termination(scripts, name, end, value, tmp_path):
    """With gamma = 0.9 and rewards of 1, V = 1 + gamma V, or V = 1 + gamma V 2/3 if every third step is the last."""
    values = []
    sizes = {"total_timesteps": 1000, "learning_starts": 100, "buffer_size": 1000, "batch_size": 64, "gamma": 0.9}
    env_id = f"Blind{'Discrete' if name == 'dqn' else ''}{end}-v0"
    args = scripts[name].Args(env_id=env_id, run_dir=str(tmp_path), **sizes, **FAST[name])
    train(scripts[name], args, on_log=lambda learner, losses, step: values.append(losses["q_values"]))
    assert values[-1] == pytest.approx(value, rel=0.1)


@pytest.mark.parametrize(("scripts", "name"), SWINGS)
def test_the_pendulum_is_swung_up(scripts, name, tmp_path):
    """A random policy scores about -1200, a swing-up about -130 and less when the pendulum starts near the top.

    A wrong sign in a loss, or lost updates, fail here.
    """
    args = scripts[name].Args(env_id="Pendulum-v1", batch_size=128, run_dir=str(tmp_path), **PENDULUM[name])
    scripts[name].train(args)
    returns = scalars(next(tmp_path.iterdir()), "charts/episodic_return")
    assert np.median(returns[:5]) < -700
    assert np.median(returns[-9:]) > -300


def test_a_restored_learner_continues_bit_by_bit(script):
    def learn(learner, seed):
        generator = np.random.default_rng(seed)
        for _ in range(11):
            row = generator.standard_normal((4, 1, 3))
            columns = {"obs": row[0], "next_obs": row[1], "actions": row[2, :, :1], "rewards": row[3, :, 0]}
            columns["terminated"] = np.zeros(1)
            if script in PLAIN.values():
                learner.replay.store(**columns)
            else:
                learner.observe(**columns, act_on=row[1])
            learner.update()

    checks.goes_on_when_restored(partial(make_learner, script, buffer_size=15), learn)


def test_actions_are_the_environments_to_keep(turbo):
    """An environment may hold on to its last action; the next one must not be written over it."""
    learner = make_learner(turbo)
    generator = np.random.default_rng(0)
    learner.observe(**transitions(learner, generator))
    first = learner.next_actions()
    kept = first.copy()
    learner.observe(**transitions(learner, generator))
    assert not np.array_equal(learner.next_actions(), kept) and np.array_equal(first, kept)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_every_transition_is_stored_once(turbo, mode):
    learner = learner_on_cuda(turbo, mode)
    sent = send(learner, 20)
    assert int(learner.replay.stored) == 20
    assert np.array_equal(learner.replay.rows[:20].cpu().numpy(), sent)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_replays_draw_fresh_noise(turbo, mode):
    learner = learner_on_cuda(turbo, mode)
    row = transitions(learner, np.random.default_rng(0))
    seen = set()
    for _ in range(12):
        learner.observe(**row)
        seen.add(learner.next_actions().item())
    assert len(seen) == 12


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_the_host_waits_for_actions_alone(turbo, mode):
    """In the steady loop, by the event of `next_actions`."""
    learner = learner_on_cuda(turbo, mode)
    advance(learner, 10)
    with checks.no_waits():
        advance(learner, 10, seed=1)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_continues_in_captured_graphs(turbo, mode):
    """Loading fills the tensors that the graphs read: a restored learner goes on like the one that was saved."""
    learner = learner_on_cuda(turbo, mode)
    advance(learner, 10)
    state = conftest.saved(learner)
    wanted = advance(learner, 5, seed=1)
    learner.load_state_dict(state)
    np.testing.assert_allclose(advance(learner, 5, seed=1), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "mode"), TRAINED)
def test_training_on_cuda(name, mode, tmp_path):
    script = TURBO[name]
    own = {"total_timesteps": 500, "cuda": True, "run_dir": str(tmp_path)}
    script.train(script.Args(**tiny(script) | own | MODES[mode]))
    summary = json.loads(next(tmp_path.glob("*/summary.json")).read_text())
    assert summary["cudagraphs"] == ("cudagraphs" in mode)
    assert summary["global_step"] == 500 and summary["device"] != "cpu"
