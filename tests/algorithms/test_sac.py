"""The SAC learners: plain against turbo, bounds, values, capture, learning, CUDA."""

import conftest
import numpy as np
import pytest
import torch
from conftest import (
    MODES,
    advance,
    assert_close_in_norm,
    assert_learners_agree,
    clones,
    copy_networks,
    feed_same_batches,
    fill_replay,
    learnt,
    leaves,
    make_envs,
    make_learner,
    networks,
    one_graph_each,
    replay_in_order,
    scalars,
    train,
    transitions,
)

PLAIN, TURBO = conftest.PLAIN["sac"], conftest.TURBO["sac"]


@pytest.fixture(params=[PLAIN, TURBO], ids=["plain", "turbo"])
def script(request):
    return request.param


@pytest.mark.parametrize(
    ("kwargs", "mode"),
    [
        ({}, "eager"),
        ({}, "compile"),
        ({"env_id": "Unequal-v0", "policy_frequency": 3, "target_network_frequency": 2}, "eager"),
        ({"autotune": False, "alpha": 0.1, "policy_frequency": 1}, "eager"),  # turbo draws more noise, last
    ],
    ids=["default-eager", "default-compile", "unequal bounds, other frequencies", "no autotune"],
)
def test_turbo_equals_plain(kwargs, mode):
    """From the same weights and batches, losses, gradients (Adam's first moments) and parameters agree, update 1 to 50.

    The policy learns slowly: where tanh saturates, log(1 - tanh**2 + 1e-6) turns its last bit into a 10% difference.
    """
    kwargs = {"policy_lr": 3e-5} | kwargs
    plain, turbo = make_learner(PLAIN, **kwargs), make_learner(TURBO, **kwargs, **MODES[mode])
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
                assert turbo.log_alpha.exp().item() == pytest.approx(plain.log_alpha.exp().item(), rel=tolerance)
        for _ in range(3):
            turbo.observe(**transitions(turbo, np.random.default_rng(0)))


def test_actions_respect_each_dimensions_bounds(script):
    learner = make_learner(script, env_id="Unequal-v0")
    with torch.no_grad():
        actions, _ = learner.actor.sample(*learner.actor.gaussian(torch.randn(5000, 2)), torch.randn(5000, 3))
    actions = actions.numpy()
    low, high = np.array([-1, -10, 0]), np.array([3, -8, 0.5])
    assert (actions >= low - 1e-5).all() and (actions <= high + 1e-5).all()
    assert np.allclose(actions.mean(0), (low + high) / 2, atol=(high - low) / 10)
    assert (np.ptp(actions, 0) > 0.3 * (high - low)).all()


@pytest.mark.parametrize("side", [-1, 1])
def test_a_saturated_policy_stays_within_the_bounds(script, side):
    """Also where float32 cannot hold them, and where middle and half range add up to more than a bound."""
    learner = make_learner(script, env_id="Decimals-v0")
    networks(learner)["actor"]["net.4.bias"].data[:2] = side * 1000.0  # means, then log standard deviations
    if script is PLAIN:
        (action,) = learner.act(np.zeros((1, 2)))
    else:
        learner.observe(**transitions(learner, np.random.default_rng(0)))
        (action,) = learner.next_actions()
    policy, _ = learner.policy()
    (mode,) = policy(torch.zeros(1, 2)).detach().numpy()
    space = make_envs(script, learner.args).single_action_space
    bound = space.low if side < 0 else space.high
    assert space.contains(action) and np.allclose(action, bound, atol=1e-6)
    assert np.allclose(mode, bound, atol=1e-6)


def test_a_resumed_run_takes_the_alpha_it_is_given(script):
    state = make_learner(script).state_dict()
    learner = make_learner(script, autotune=False, alpha=0.05)
    learner.load_state_dict(state)
    assert learner.log_alpha.exp().item() == pytest.approx(0.05)


@pytest.mark.parametrize(("env_id", "value"), [("BlindTruncates-v0", 10.0), ("BlindTerminates-v0", 2.5)])
def test_values_bootstrap_through_truncation_but_not_termination(script, env_id, value, tmp_path):
    """With gamma = 0.9 and rewards of 1, V = 1 + gamma V, or V = 1 + gamma V 2/3 if every third step is the last."""
    values = []
    kwargs = {"gamma": 0.9, "tau": 0.1, "q_lr": 3e-3, "autotune": False, "alpha": 0.0, "batch_size": 64}
    sizes = {"total_timesteps": 1000, "learning_starts": 100, "buffer_size": 1000}
    args = script.Args(env_id=env_id, run_dir=str(tmp_path), **kwargs, **sizes)
    train(script, args, on_log=lambda learner, losses, step: values.append(losses["q_values"]))
    assert values[-1] == pytest.approx(value, rel=0.1)


@pytest.mark.parametrize("script", [pytest.param(PLAIN, marks=pytest.mark.finding), TURBO], ids=["plain", "turbo"])
def test_sac_swings_up_the_pendulum(script, tmp_path):
    """A random policy scores about -1200, a swing-up about -130 and less when the pendulum starts near the top.

    A wrong sign in a loss, or lost updates, fail here.
    """
    sizes = {"total_timesteps": 5000, "learning_starts": 500, "policy_lr": 1e-3, "batch_size": 128}
    script.train(script.Args(env_id="Pendulum-v1", run_dir=str(tmp_path), **sizes))
    returns = scalars(next(tmp_path.iterdir()), "charts/episodic_return")
    assert np.median(returns[:5]) < -700
    assert np.median(returns[-9:]) > -300


ON_CUDA = {"script": TURBO, "device": "cuda", "batch_size": 64, "buffer_size": 200, "policy_lr": 3e-5}


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "eager"])
@pytest.mark.gpu
def test_modes_agree(mode):
    """Before, at and after capture, a mode has made exactly the updates that eager code makes."""
    learners = [make_learner(**ON_CUDA, **kwargs) for kwargs in ({}, MODES[mode])]
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
            correction, _ = learner.optimizers["critics"].corrections
            assert correction.item() == pytest.approx(1 - 0.9**update)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.gpu
def test_repeated_updates_draw_fresh_rows_and_noise(mode):
    """From the same state, past capture, the same kind of update has another loss each time."""
    learner = make_learner(**ON_CUDA, **MODES[mode])
    advance(learner, 30)
    saved = clones(learner.tensors())
    losses = set()
    for _ in range(6):
        for name, tensor in leaves(learner.tensors()):
            tensor.data.copy_(saved[name])
        learner.updates = 30
        learner.update()
        losses.add((learner.losses()["qf_loss"], learner.losses()["actor_loss"]))
    assert len({loss for loss, _ in losses}) == len({loss for _, loss in losses}) == 6
