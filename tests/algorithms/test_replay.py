"""SAC and TD3: replay, acting, resuming, compilation, and the loop on CUDA; with DQN, episode ends."""

import json

import numpy as np
import pytest
import torch
from conftest import (
    MODES,
    PLAIN,
    TURBO,
    advance,
    algorithm,
    as_rows,
    assert_same_state,
    make_learner,
    saved,
    stem,
    stored_rows,
    train,
    transitions,
)

LEARNERS = ("sac", "td3")


@pytest.fixture(params=[scripts[name] for name in LEARNERS for scripts in (PLAIN, TURBO)], ids=stem)
def script(request):
    return request.param


@pytest.fixture(params=[TURBO[name] for name in LEARNERS], ids=stem)
def turbo(request):
    return request.param


def learner_on_cuda(turbo, mode):
    slow_policy = {"policy_lr": 3e-5} if algorithm(turbo) == "sac" else {}  # as where plain and turbo are compared
    return make_learner(turbo, device="cuda", batch_size=64, buffer_size=200, **slow_policy, **MODES[mode])


@pytest.mark.parametrize("num_envs", [1, 3])
def test_ring_buffer_holds_the_newest_transitions(turbo, num_envs):
    learner = make_learner(turbo, num_envs=num_envs, buffer_size=10)
    generator = np.random.default_rng(0)
    sent = []
    for _ in range(25):
        row = transitions(learner, generator)
        sent.append(as_rows(row))
        learner.observe(**row)
    newest = np.concatenate(sent)[-10:]
    assert int(learner.replay.stored) == 25 * num_envs
    assert sorted(learner.replay.rows.tolist()) == sorted(newest.tolist())


@pytest.mark.parametrize("filled", [1, 5, 10])
def test_replay_draws_every_stored_row_and_no_other(turbo, filled):
    learner = make_learner(turbo, buffer_size=10, batch_size=500)
    learner.replay.rows.copy_(torch.arange(10.0)[:, None].expand_as(learner.replay.rows))
    learner.replay.stored.fill_(filled)
    assert set(learner.replay.sample(learner.uniform.uniform_())[:, 0].tolist()) == set(range(filled))


@pytest.mark.parametrize(("env_id", "ends"), [("Truncates-v0", 0.0), ("Terminates-v0", 1.0)])
@pytest.mark.parametrize("name", [*LEARNERS, "dqn"])
@pytest.mark.parametrize("scripts", [PLAIN, TURBO], ids=["plain", "turbo"])
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

    learner = make_learner(script, buffer_size=15)
    learn(learner, seed=0)
    state = saved(learner)
    learn(learner, seed=1)

    restored = make_learner(script, seed=2, buffer_size=15)
    restored.load_state_dict(state)
    learn(restored, seed=1)
    assert_same_state(restored.state_dict(), learner.state_dict())


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
    generator = np.random.default_rng(0)
    sent = []
    for _ in range(20):
        row = transitions(learner, generator)
        sent.append(as_rows(row))
        learner.observe(**row)
        learner.next_actions()
    assert int(learner.replay.stored) == 20
    assert np.array_equal(learner.replay.rows[:20].cpu().numpy(), np.concatenate(sent))


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
    """In the steady loop only the event of `next_actions` synchronises, which the debug mode does not count."""
    learner = learner_on_cuda(turbo, mode)
    advance(learner, 10)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        advance(learner, 10, seed=1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_continues_in_captured_graphs(turbo, mode):
    """Loading fills the tensors that the graphs read: a restored learner goes on like the one that was saved."""
    learner = learner_on_cuda(turbo, mode)
    advance(learner, 10)
    state = saved(learner)
    wanted = advance(learner, 5, seed=1)
    learner.load_state_dict(state)
    np.testing.assert_allclose(advance(learner, 5, seed=1), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_training_on_cuda(turbo, tmp_path):
    args = turbo.Args(env_id="Pendulum-v1", total_timesteps=500, learning_starts=100, run_dir=str(tmp_path))
    args.cudagraphs = True
    turbo.train(args)
    summary = json.loads(next(tmp_path.glob("*/summary.json")).read_text())
    assert summary["cudagraphs"] and summary["global_step"] == 500 and summary["device"] != "cpu"
