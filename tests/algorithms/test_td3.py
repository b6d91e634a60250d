"""The TD3 learners: plain against turbo, exploration and smoothing, the delay, capture, CUDA."""

from functools import partial

import checks
import conftest
import numpy as np
import pytest
import torch
from conftest import MODES, copy_networks, fill_replay, leaves, make_learner, networks, replay_in_order, transitions

PLAIN, TURBO = conftest.PLAIN["td3"], conftest.TURBO["td3"]
UNEQUAL_LOW, UNEQUAL_HIGH = np.array([-1.0, -10.0, 0.0]), np.array([3.0, -8.0, 0.5])  # the bounds of Unequal-v0

script = checks.plain_and_turbo("td3")

OTHER = {"env_id": "Unequal-v0", "policy_frequency": 3, "policy_noise": 0.5, "noise_clip": 0.3, "tau": 0.1}


@checks.settings({"unequal bounds, other hyper-parameters": OTHER})
def test_turbo_equals_plain(kwargs, mode):
    checks.turbo_is_plain("td3", mode, **kwargs)


@pytest.mark.parametrize("mode", ["eager", "compile"])
def test_turbo_acts_like_plain(mode):
    """From the same weights and the same seed, three environments get the same noisy actions."""
    kwargs = {"env_id": "Unequal-v0", "num_envs": 3, "exploration_noise": 0.5}
    plain, turbo = make_learner(PLAIN, **kwargs), make_learner(TURBO, **kwargs, **MODES[mode])
    copy_networks(plain, turbo)
    row = transitions(turbo, np.random.default_rng(0))
    torch.manual_seed(0)
    wanted = plain.act(row["act_on"])
    torch.manual_seed(0)
    turbo.observe(**row)
    np.testing.assert_allclose(turbo.next_actions(), wanted, rtol=1e-5, atol=1e-5)


def set_policy(learner, squashed):
    """Make actor and target actor act alike everywhere: at `squashed`, from -1 to 1, within each dimension's bounds."""
    for name in ("actor", "target_actor"):
        actor = networks(learner)[name]
        for key, tensor in actor.items():
            if key.startswith("net."):
                tensor.zero_()
        actor["net.4.bias"].fill_(float(np.arctanh(squashed)))


def fill(learner):
    """Store random transitions in the replay buffer."""
    if hasattr(learner, "observe"):
        return fill_replay(learner)
    columns = learner.replay.columns
    generator = np.random.default_rng(0)
    learner.replay.store(**{name: generator.standard_normal((8, *c.shape[1:])) for name, c in columns.items()})


def noisy_actions(learner, exploring):
    """Actions with exploration noise, or the ones that an update asks the target critics about: (batch, act_dim)."""
    if exploring:
        return checks.actions_for(learner, np.zeros((learner.args.batch_size, 2)))
    seen = []
    fill(learner)
    learner.target_actor.register_forward_hook(lambda module, inputs, actions: seen.append(actions))
    learner.update()
    (actions,) = seen
    return actions.numpy()


def assert_noise_is_per_dimension(actions, deviation, largest):
    """Noise around the middle of each dimension's bounds, in units of half their range."""
    noise = (actions - (UNEQUAL_HIGH + UNEQUAL_LOW) / 2) / ((UNEQUAL_HIGH - UNEQUAL_LOW) / 2)
    assert np.allclose(noise.mean(0), 0, atol=0.1 * deviation)
    assert np.allclose(noise.std(0), deviation, rtol=0.1)
    assert (abs(noise) <= largest + 1e-5).all() and (abs(noise).max(0) > 0.9 * min(largest, 3 * deviation)).all()


def assert_within_bounds_that_are_reached(actions, bounds):
    assert (actions >= UNEQUAL_LOW - 1e-6).all() and (actions <= UNEQUAL_HIGH + 1e-6).all()
    reached = np.isclose(actions, bounds, atol=1e-6).mean(0)
    assert (reached > 0.2).all() and (reached < 0.8).all(), "clamped where the noise leads outside, and only there"


NOISES = {  # with the noise's standard deviation and its largest size
    "exploration": ({"exploration_noise": 0.1}, 0.1, 1.0),
    "more exploration": ({"exploration_noise": 0.3}, 0.3, 1.0),
    "smoothing": ({"policy_noise": 0.2, "noise_clip": 0.5}, 0.2, 0.5),
    "clipped smoothing": ({"policy_noise": 10.0, "noise_clip": 0.3}, 0.3, 0.3),
}


@pytest.mark.parametrize(("kwargs", "deviation", "largest"), NOISES.values(), ids=NOISES)
def test_noise_is_in_each_dimensions_unit(script, kwargs, deviation, largest):
    learner = make_learner(script, env_id="Unequal-v0", batch_size=1500, **kwargs)
    set_policy(learner, 0.0)
    actions = noisy_actions(learner, exploring="exploration_noise" in kwargs)
    assert_noise_is_per_dimension(actions, deviation, largest)


@pytest.mark.parametrize("side", [-1, 1])
@pytest.mark.parametrize("exploring", [True, False])
def test_noise_respects_each_dimensions_bounds(script, exploring, side):
    learner = make_learner(script, env_id="Unequal-v0", batch_size=300, exploration_noise=0.3, policy_noise=0.3)
    set_policy(learner, side * 0.95)
    actions = noisy_actions(learner, exploring)
    assert_within_bounds_that_are_reached(actions, UNEQUAL_LOW if side < 0 else UNEQUAL_HIGH)


@pytest.mark.parametrize("env_id", ["Unequal-v0", "DoublePrecision-v0", "Decimals-v0"])
def test_environments_are_never_sent_an_action_outside_their_bounds(script, env_id, tmp_path):
    """The environment itself asserts it, at each step."""
    sizes = {"total_timesteps": 150, "learning_starts": 50, "batch_size": 8, "buffer_size": 150}
    script.train(script.Args(env_id=env_id, exploration_noise=10.0, run_dir=str(tmp_path), **sizes))


@pytest.mark.parametrize("env_id", ["Unequal-v0", "Decimals-v0"])
@pytest.mark.parametrize("side", [-1.0, 1.0])
def test_a_saturated_policy_stays_within_the_bounds(script, env_id, side):
    """Also where float32 cannot hold them, and where middle and half range add up to more than a bound."""
    learner = make_learner(script, env_id=env_id, exploration_noise=0.0)
    set_policy(learner, side * (1 - 1e-9))
    checks.stays_within_bounds(script, learner, side)


def test_the_policy_is_the_actor_without_noise(script):
    """From the weights of the moment."""
    noisy, quiet = [make_learner(script, env_id="Unequal-v0", exploration_noise=noise) for noise in (10.0, 0.0)]
    obs = torch.randn(5, 2)
    for learner in (noisy, quiet):
        fill(learner)
        torch.manual_seed(0)
        learner.update()
    policy, _ = noisy.policy()
    with torch.no_grad():
        np.testing.assert_allclose(policy(obs), checks.actions_for(quiet, obs.numpy()), rtol=1e-5, atol=1e-6)


def test_actor_and_targets_wait(script):
    """The first update and every third after it move them; the critics move each time."""
    learner = make_learner(script, policy_frequency=3)
    fill(learner)
    for update in range(9):
        before = conftest.clones(networks(learner))
        learner.update()
        after = leaves(networks(learner))
        moved = {name.split(".")[1] for name, tensor in after if not torch.equal(tensor, before[name])}
        assert moved == {"critics"} | ({"actor", "target_actor", "target_critics"} if update % 3 == 0 else set())


def test_a_resumed_learner_takes_the_learning_rate_it_is_given(script):
    """Optimizers are restored without their learning rates: what --learning-rate says counts."""
    state = make_learner(script).state_dict()
    learner = make_learner(script, learning_rate=1e-5)
    learner.load_state_dict(state)
    if script is PLAIN:
        rates = [optimizer.param_groups[0]["lr"] for optimizer in learner.optimizers.values()]
    else:
        rates = [optimizer.lr.item() for optimizer in learner.optimizers.values()]
    assert rates == pytest.approx([1e-5, 1e-5])


ON_CUDA = {"script": TURBO, "device": "cuda", "batch_size": 64, "buffer_size": 200}


@pytest.mark.gpu
@pytest.mark.parametrize("mode", checks.OTHER_MODES)
def test_modes_agree(mode):
    checks.modes_agree(partial(make_learner, **ON_CUDA), mode, actor_updates=lambda updates: (updates + 1) // 2)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fixed_rows", [False, True])
def test_repeated_updates_draw_fresh_rows_and_noise(mode, fixed_rows):
    """Losses change for the smoothing noise alone, too."""
    learner = make_learner(**ON_CUDA, **MODES[mode])
    if fixed_rows:
        fill_replay(learner)
        replay_in_order(learner)
    conftest.advance(learner, 30)
    checks.draws_afresh(learner)
