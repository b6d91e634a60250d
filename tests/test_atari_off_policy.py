"""DQN and SAC for Atari: plain against turbo."""

import numpy as np
import pytest
import torch
from conftest import MODES, PLAIN, TURBO, assert_learners_agree, copy_networks, make_learner
from test_atari_replay import StackingPool

SCRIPTS = ("dqn_atari", "sac_atari")


@pytest.fixture(autouse=True)
def pools(monkeypatch):
    for module in (PLAIN[name] for name in SCRIPTS):
        monkeypatch.setattr(module, "make_pool", lambda args, num_envs, seed, **settings: StackingPool(seed=seed))
    for module in (TURBO[name] for name in SCRIPTS):
        monkeypatch.setattr(module, "make_pool", lambda args, num_envs, seed, **settings: StackingPool(seed=seed))


def applies(turbo):
    """The learner's `Apply`s by the names of their optimisers."""
    return {name: getattr(turbo, name) for name in turbo.optimizers if name != "alpha"}


@pytest.mark.parametrize("mode", ["eager", "compile"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_turbo_equals_plain(name, mode):
    """From the same weights and replay buffers, all agrees after one update and after fifty."""
    plain = make_learner(PLAIN[name], num_envs=4)
    turbo = make_learner(TURBO[name], num_envs=4, **MODES[mode])
    copy_networks(plain, turbo)
    envs = PLAIN[name].make_games(plain.args, 4, seed=0)
    obs, _ = envs.reset()
    for learner in (plain, turbo):
        learner.replay.begin(obs)
    generator = np.random.default_rng(0)
    for _ in range(20):
        actions = generator.integers(0, 4, 4)
        obs, rewards, terminated, _, infos = envs.step(actions)
        for learner in (plain, turbo):
            learner.replay.store(obs, actions, rewards, terminated, infos["is_reset"])
    for update in range(50):
        for learner in (plain, turbo):
            torch.manual_seed(update)
            learner.update()
            if update % 10 == 9:
                learner.update_target()
        if update == 0:
            assert_learners_agree(plain, turbo, applies(turbo), tolerance=3e-5)
    assert_learners_agree(plain, turbo, applies(turbo), tolerance=1e-4, gradient_tolerance=3e-3)
