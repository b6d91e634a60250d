"""Checks that tests of several algorithms share. What differs between the learners is handed to them."""

from contextlib import contextmanager

import conftest
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import MODES, assert_close_in_norm, clones, learnt, leaves, make_learner, networks, saved, transitions

OTHER_MODES = [mode for mode in MODES if mode != "eager"]


def plain_and_turbo(name):
    """A fixture: the plain and the turbo script of an algorithm."""

    @pytest.fixture(params=[conftest.PLAIN[name], conftest.TURBO[name]], ids=["plain", "turbo"])
    def script(request):
        return request.param

    return script


def settings(others):
    """Parametrize a test by the default settings, eager and compiled, and by others of this name, eager."""
    cases = [({}, "eager"), ({}, "compile"), *((kwargs, "eager") for kwargs in others.values())]
    return pytest.mark.parametrize(("kwargs", "mode"), cases, ids=["default-eager", "default-compile", *others])


# all learners


def goes_on_when_restored(make, advance):
    """A learner restored from a file continues bit by bit.

    `make(seed=...)` makes a learner, and `advance(learner, part)` goes on with the first or the second part of what it
    gets to see; it may return what the learner has done.
    """
    learner = make(seed=1)
    advance(learner, 0)
    state = saved(learner)
    wanted = advance(learner, 1)
    restored = make(seed=2)
    restored.load_state_dict(state)
    got, kept = dict(leaves(restored.state_dict())), dict(leaves(state))
    rates = {name for name in kept if name.endswith(".lr")}  # those that a learner is given count
    assert got.keys() == kept.keys()
    assert all(conftest.equal(got[name], kept[name]) for name in kept.keys() - rates)
    assert advance(restored, 1) == wanted
    conftest.assert_same_state(restored.state_dict(), learner.state_dict())


@contextmanager
def no_waits():
    """The host may wait for events alone, which the debug mode does not count."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def repeated(learner, update, times):
    """What `update()` returns each time, from the same state of all tensors."""
    before = clones(learner.tensors())
    found = []
    for _ in range(times):
        for name, tensor in leaves(learner.tensors()):
            tensor.data.copy_(before[name])
        found.append(update())
    return found


def goes_on_when_captured(captured, other, advance, tolerance=1e-4):
    """Loading fills the tensors that the graphs read: what was captured goes on from its checkpoint like another one.

    The other one may be a new learner without graphs, or the same learner once more.
    """
    state = saved(captured)
    before = clones(networks(captured))
    results = []
    for learner in (captured, other):
        learner.load_state_dict(state)
        advance(learner)
        results.append(learnt(learner))
    assert_close_in_norm(results[1], results[0], tolerance, least=1e-6)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in leaves(networks(captured)))


# DQN and PQN


def explores(actions, epsilon):
    """Of actions (steps, num_envs), all are 3 but for a share of random ones, each environment's own."""
    frequencies = np.bincount(actions.flatten(), minlength=4) / actions.size
    assert frequencies == pytest.approx([epsilon / 4] * 3 + [1 - epsilon * 3 / 4], abs=0.02)
    assert ((actions != actions[:, :1]).any(1).mean() > 0.5) == (epsilon > 0)


def play(policy, seed):
    """The return of an episode of CartPole."""
    env = gym.make("CartPole-v1")
    obs, _ = env.reset(seed=seed)
    total, ended = 0.0, False
    while not ended:
        action = policy(torch.from_numpy(obs)[None]).item()
        obs, reward, terminated, truncated, _ = env.step(action)
        total += reward
        ended = terminated or truncated
    return total


def learns_cartpole(script, folder, **settings):
    """A random policy balances for about 20 steps. A wrong sign in the loss stays there."""
    script.train(script.Args(run_dir=str(folder), **settings))
    (run,) = folder.iterdir()
    returns = conftest.scalars(run, "charts/episodic_return")
    assert np.median(returns[:20]) < 40
    assert np.mean(returns[-20:]) > 120
    policy = torch.export.load(run / "policy.pt2").module()
    assert np.mean([play(policy, seed) for seed in range(5)]) > 120


# PPO and PQN


def watch_minibatches(learner, look=lambda *rows: None):
    """What `look(*rows)` returns before the update of each minibatch, in a list that grows as the learner updates."""
    seen, update_minibatch = [], learner.update_minibatch

    def watched(*rows):
        seen.append(look(*rows))
        return update_minibatch(*rows)

    learner.update_minibatch = watched
    return seen


def draws_all_rows(drawn, count):
    """In each of three epochs, four minibatches of the same size have all of `count` rows, in another order."""
    epochs = [torch.cat(drawn[i : i + 4]) for i in (0, 4, 8)]
    assert {len(minibatch) for minibatch in drawn} == {count // 4}
    assert all(torch.equal(epoch.sort(0).values, epochs[0].sort(0).values) for epoch in epochs)
    assert len(epochs[0].unique()) == count and not torch.equal(epochs[0], epochs[1])


def columns_of(learner, *names):
    """Columns of the stored rollout, NumPy, each (num_steps, num_envs, ...); scalars are (num_steps, num_envs)."""
    rollout = learner.rollout if isinstance(learner.rollout, dict) else getattr(learner, "host_columns", vars(learner))
    columns = [np.asarray(rollout[name]).copy() for name in names]
    return [column[..., 0] if column.shape[2:] == (1,) else column for column in columns]


def stores_true_ends(script, env_id, terminal, folder, **kwargs):
    """Stored steps of Countdown have the true last observation; `terminal` is whether the last ones are terminated."""
    seen = []
    sizes = {"num_envs": 2, "total_timesteps": 200, "num_steps": 50, "num_minibatches": 2, "update_epochs": 1}
    args = script.Args(env_id=env_id, run_dir=str(folder), **sizes, **kwargs)
    names = ("obs", "next_obs", "terminated", "ended")
    conftest.train(script, args, on_log=lambda learner, losses, step: seen.append(columns_of(learner, *names)))
    obs, next_obs, terminated, ended = seen[-1]
    assert len(seen) == 2
    assert (next_obs[..., 0] == obs[..., 0] + 1).all() and (next_obs[..., 1] == obs[..., 1]).all()
    last = next_obs[..., 0] == 3
    assert (ended == last).all() and (terminated == last * terminal).all()
    assert (obs[1:, :, 0] == np.where(last[:-1], 0, next_obs[:-1, :, 0])).all()


# SAC and TD3


def turbo_is_plain(name, mode, **kwargs):
    """From the same weights and batches, losses, gradients and parameters agree after 1 and 50 updates."""
    plain = make_learner(conftest.PLAIN[name], **kwargs)
    turbo = make_learner(conftest.TURBO[name], **kwargs, **MODES[mode])
    conftest.copy_networks(plain, turbo)
    conftest.feed_same_batches(plain, turbo, seed=0)
    with conftest.one_graph_each({"eager": 0, "compile": 3}[mode]):  # critics, actor, acting
        for update in range(50):
            for learner in (plain, turbo):
                torch.manual_seed(update)
                learner.update()
            if update in (0, 49):
                tolerance = 1e-5 if update == 0 else 1e-4
                conftest.assert_learners_agree(plain, turbo, tolerance)
                if name == "sac":
                    assert turbo.log_alpha.exp().item() == pytest.approx(plain.log_alpha.exp().item(), rel=tolerance)
        for _ in range(3):
            turbo.observe(**transitions(turbo, np.random.default_rng(0)))


def actions_for(learner, obs):
    """Actions with exploration noise for each row of `obs`, (count, act_dim)."""
    if not hasattr(learner, "observe"):
        return learner.act(obs)
    actions = []
    for row in obs:
        learner.observe(**transitions(learner, np.random.default_rng(0)) | {"act_on": row[None]})
        actions.append(learner.next_actions()[0])
    return np.stack(actions)


def stays_within_bounds(script, learner, side):
    """A policy far beyond one side of its bounds acts at these bounds, and so does the policy that is exported."""
    (action,) = actions_for(learner, np.zeros((1, 2)))
    policy, _ = learner.policy()
    (exported,) = policy(torch.zeros(1, 2)).detach().numpy()
    space = conftest.make_envs(script, learner.args).single_action_space
    bound = space.low if side < 0 else space.high
    assert space.contains(action) and np.allclose(action, bound, atol=1e-6)
    assert np.allclose(exported, bound, atol=1e-6)


def modes_agree(make, mode, actor_updates=None):
    """Before, at and after capture, a mode has made exactly the updates that eager code makes.

    `actor_updates(updates)` is how many of them the actor has, where its step count is checked too.
    """
    learners = [make(**kwargs) for kwargs in ({}, MODES[mode])]
    for learner in learners:
        conftest.replay_in_order(learner)
        conftest.fill_replay(learner)
    for update in range(1, 51):
        for learner in learners:
            torch.manual_seed(update)
            learner.update()
        if update in (1, 3, 6, 7, 50):
            wanted, got = map(learnt, learners)
            tolerance = 1e-5 if update == 1 else 1e-4 if update < 10 else 1e-3
            assert_close_in_norm(got, wanted, tolerance, least=1e-7)
            steps = {"critics": update} | ({"actor": actor_updates(update)} if actor_updates else {})
            for name, count in steps.items():
                correction, _ = learner.optimizers[name].corrections
                assert correction.item() == pytest.approx(1 - 0.9**count)


def draws_afresh(learner):
    """From the same state, past capture, the same kind of update has another loss of each network each time."""

    def update():
        learner.updates = 30
        learner.update()
        return learner.losses()["qf_loss"], learner.losses()["actor_loss"]

    qf_losses, actor_losses = zip(*repeated(learner, update, 6), strict=True)
    assert len(set(qf_losses)) == len(set(actor_losses)) == 6
