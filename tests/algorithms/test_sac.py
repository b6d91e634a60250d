"""The SAC learners: plain against turbo, bounds, capture, CUDA."""

from functools import partial

import checks
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import MODES, PLAIN, POPULATION, TURBO, advance, assert_same_state, make_learner, networks, stem
from gymnasium.wrappers import RescaleAction

script = checks.plain_and_turbo("sac")


OTHERS = {
    "unequal bounds, other frequencies": {"env_id": "Unequal-v0", "policy_frequency": 3, "target_network_frequency": 2},
    "no autotune": {"autotune": False, "alpha": 0.1, "policy_frequency": 1},  # turbo draws more noise, last
}


@checks.settings(OTHERS)
def test_turbo_equals_plain(kwargs, mode):
    """The policy learns slowly: where tanh saturates, log(1 - tanh**2 + 1e-6) makes 10% of its last bit."""
    checks.turbo_is_plain("sac", mode, **{"policy_lr": 3e-5} | kwargs)


def test_actions_respect_each_dimensions_bounds(script):
    learner = make_learner(script, env_id="Unequal-v0")
    with torch.no_grad():
        actions, _ = learner.actor.sample(*learner.actor.gaussian(torch.randn(5000, 2)), torch.randn(5000, 3))
        actions = (actions * learner.actor.scale + learner.actor.bias).numpy()
    low, high = np.array([-1, -10, 0]), np.array([3, -8, 0.5])
    assert (actions >= low - 1e-5).all() and (actions <= high + 1e-5).all()
    assert np.allclose(actions.mean(0), (low + high) / 2, atol=(high - low) / 10)
    assert (np.ptp(actions, 0) > 0.3 * (high - low)).all()


SIZES = {"total_timesteps": 160, "learning_starts": 100, "buffer_size": 1000, "batch_size": 32, "cuda": False}


@pytest.mark.parametrize("sac", [PLAIN["sac"], TURBO["sac"], POPULATION], ids=stem)
def test_runs_in_other_units_of_actions_are_equal(sac, tmp_path):
    """Number for number, as the units are powers of two. The entropy is that of actions from -1 to 1."""
    states = []
    for exponent in (-7, 0, 7):
        name, bound = f"InUnits{exponent}-v0", np.float32(2.0**exponent)
        gym.register(name, lambda bound=bound, **kwargs: RescaleAction(gym.make("Pendulum-v1"), -bound, bound))
        try:
            sac.train(sac.Args(**SIZES, env_id=name, run_dir=str(tmp_path / name)))
        finally:
            del gym.registry[name]
        path = next((tmp_path / name).rglob("agent_0/checkpoint.pt" if sac is POPULATION else "checkpoint.pt"))
        state = torch.load(path, weights_only=True)["learner"]
        assert state["networks"]["actor"].pop("scale") == bound
        states.append({name: state[name] for name in ("networks", "optimizers", "log_alpha")})
    for state in states[1:]:
        assert_same_state(state, states[0])


def test_an_action_with_one_value_has_no_entropy(script, tmp_path):
    """Neither a log-probability nor a place in the target entropy; the actions are still in the bounds."""
    learner = make_learner(script, env_id="OneIsFixed-v0")
    assert learner.target_entropy == -2
    noise = torch.randn(100, 3)
    with torch.no_grad():
        mean, log_std = learner.actor.gaussian(torch.randn(100, 2))
        _, log_prob = learner.actor.sample(mean, log_std, noise)
        noise[:, 1] += 5
        _, same = learner.actor.sample(mean, log_std, noise)
    assert log_prob.isfinite().all() and torch.equal(log_prob, same)
    script.train(script.Args(**SIZES, env_id="OneIsFixed-v0", run_dir=str(tmp_path)))  # ends with an error at NaN
    (action,) = checks.actions_for(learner, np.zeros((1, 2)))
    assert action[1] == np.float32(0.3)


@pytest.mark.parametrize("side", [-1, 1])
def test_a_saturated_policy_stays_within_the_bounds(script, side):
    """Also where float32 cannot hold them, and where middle and half range add up to more than a bound."""
    learner = make_learner(script, env_id="Decimals-v0")
    networks(learner)["actor"]["net.4.bias"].data[:2] = side * 1000.0  # means, then log standard deviations
    checks.stays_within_bounds(script, learner, side)


def test_a_resumed_run_takes_the_alpha_it_is_given(script):
    state = make_learner(script).state_dict()
    learner = make_learner(script, autotune=False, alpha=0.05)
    learner.load_state_dict(state)
    assert learner.log_alpha.exp().item() == pytest.approx(0.05)


ON_CUDA = {"script": TURBO["sac"], "device": "cuda", "batch_size": 64, "buffer_size": 200, "policy_lr": 3e-5}


@pytest.mark.parametrize("mode", checks.OTHER_MODES)
@pytest.mark.gpu
def test_modes_agree(mode):
    checks.modes_agree(partial(make_learner, **ON_CUDA), mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.gpu
def test_repeated_updates_draw_fresh_rows_and_noise(mode):
    learner = make_learner(**ON_CUDA, **MODES[mode])
    advance(learner, 30)
    checks.draws_afresh(learner)
