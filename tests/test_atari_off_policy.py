"""DQN and SAC for Atari: plain against turbo."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import MODES, PLAIN, TURBO, assert_learners_agree, copy_networks, make_learner
from test_dqn_atari import StackingPool


@pytest.mark.parametrize("mode", ["eager", "compile"])
@pytest.mark.parametrize("name", ["dqn_atari", "sac_atari"])
def test_turbo_equals_plain(name, mode, monkeypatch):
    """From the same weights and replay buffers, all agrees after one update and after fifty."""
    for module in (PLAIN[name], TURBO[name]):
        monkeypatch.setattr(module, "make_pool", lambda args, num_envs, seed, **settings: StackingPool(seed=seed))
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
    applies = {name: getattr(turbo, name) for name in ("q", "actor") if name in turbo.optimizers}
    if "critics" in turbo.optimizers:
        applies["critics"] = SimpleNamespace(state_dict=turbo.critics_state_dict)
    for update in range(50):
        for learner in (plain, turbo):
            torch.manual_seed(update)
            learner.update()
            if update % 10 == 9:
                learner.update_target()
        if update == 0:
            assert_learners_agree(plain, turbo, applies, tolerance=3e-5)
    assert_learners_agree(plain, turbo, applies, tolerance=1e-4, gradient_tolerance=3e-3)
