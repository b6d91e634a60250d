"""Checks that tests of several algorithms share. What differs between the learners is handed to them."""

from contextlib import contextmanager

import conftest
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import (
    MODES,
    assert_close_in_norm,
    assert_learners_agree,
    assert_same_state,
    clones,
    copy_networks,
    feed_same_batches,
    fill_replay,
    learnt,
    leaves,
    make_envs,
    make_learner,
    one_graph_each,
    replay_in_order,
    saved,
    scalars,
    transitions,
)

OTHER_MODES = [mode for mode in MODES if mode != "eager"]


def plain_and_turbo(name):
    """A fixture: the plain and the turbo script of an algorithm."""

    @pytest.fixture(params=[conftest.PLAIN[name], conftest.TURBO[name]], ids=["plain", "turbo"])
    def script(request):
        return request.param

    return script


# all learners


def check_restored(make, advance):
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
    assert_same_state(restored.state_dict(), state)
    assert advance(restored, 1) == wanted
    assert_same_state(restored.state_dict(), learner.state_dict())


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


# DQN and PQN


def check_exploration(actions, epsilon):
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


def check_cartpole(script, folder, **settings):
    """A random policy balances for about 20 steps. A wrong sign in the loss stays there."""
    script.train(script.Args(run_dir=str(folder), **settings))
    (run,) = folder.iterdir()
    returns = scalars(run, "charts/episodic_return")
    assert np.median(returns[:20]) < 40
    assert np.mean(returns[-20:]) > 120
    policy = torch.export.load(run / "policy.pt2").module()
    assert np.mean([play(policy, seed) for seed in range(5)]) > 120


# SAC and TD3


def check_turbo(name, mode, **kwargs):
    """From the same weights and batches, losses, gradients and parameters agree after 1 and 50 updates."""
    plain = make_learner(conftest.PLAIN[name], **kwargs)
    turbo = make_learner(conftest.TURBO[name], **kwargs, **MODES[mode])
    copy_networks(plain, turbo)
    feed_same_batches(plain, turbo, seed=0)
    with one_graph_each({"eager": 0, "compile": 4}[mode]):  # critics, actor, target networks, acting
        for update in range(50):
            for learner in (plain, turbo):
                torch.manual_seed(update)
                learner.update()
            if update in (0, 49):
                tolerance = 1e-5 if update == 0 else 1e-4
                assert_learners_agree(plain, turbo, tolerance)
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


def check_saturated(script, learner, side):
    """A policy far beyond one side of its bounds acts at these bounds, and so does the policy that is exported."""
    (action,) = actions_for(learner, np.zeros((1, 2)))
    policy, _ = learner.policy()
    (exported,) = policy(torch.zeros(1, 2)).detach().numpy()
    space = make_envs(script, learner.args).single_action_space
    bound = space.low if side < 0 else space.high
    assert space.contains(action) and np.allclose(action, bound, atol=1e-6)
    assert np.allclose(exported, bound, atol=1e-6)


def check_modes(make, mode, actor_updates=None):
    """Before, at and after capture, a mode has made exactly the updates that eager code makes.

    `actor_updates(updates)` is how many of them the actor has, where its step count is checked too.
    """
    learners = [make(**kwargs) for kwargs in ({}, MODES[mode])]
    for learner in learners:
        replay_in_order(learner)
        fill_replay(learner)
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


def check_fresh_draws(learner):
    """From the same state, past capture, the same kind of update has another loss of each network each time."""

    def update():
        learner.updates = 30
        learner.update()
        return learner.losses()["qf_loss"], learner.losses()["actor_loss"]

    qf_losses, actor_losses = zip(*repeated(learner, update, 6), strict=True)
    assert len(set(qf_losses)) == len(set(actor_losses)) == 6
