"""DQN and SAC for Atari: plain against turbo, and CUDA graphs."""

from functools import partial

import checks
import numpy as np
import pytest
import torch
from conftest import MODES, PLAIN, TURBO, algorithm, assert_learners_agree, copy_networks, make_envs, make_learner
from test_atari_off_policy_runs import StackingPool, first_step
from test_ppo_atari import script_games

NAMES = ("dqn_atari", "sac_atari")
GRAPHS = ("cudagraphs", "compile+cudagraphs")


@pytest.fixture(params=NAMES)
def turbo(request):
    return TURBO[request.param]


@pytest.fixture(autouse=True)
def pools(monkeypatch):
    for name in NAMES:
        for module in (PLAIN[name], TURBO[name]):
            script_games(module, monkeypatch, StackingPool)


@pytest.mark.parametrize("mode", ["eager", "compile"])
@pytest.mark.parametrize("name", NAMES)
def test_turbo_equals_plain(name, mode):
    """From the same weights and replay buffers, all agrees after one update and after fifty; compiled in one graph."""
    tolerance = 1e-5 if mode == "eager" else 1e-4  # compiled convolutions are channels last: they round otherwise
    plain = make_learner(PLAIN[name], num_envs=4)
    turbo = make_learner(TURBO[name], num_envs=4, **MODES[mode])
    copy_networks(plain, turbo)
    envs = make_envs(PLAIN[name], plain.args)
    obs, _ = envs.reset()
    for learner in (plain, turbo):
        learner.replay.store(*first_step(obs))
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
            assert_learners_agree(plain, turbo, tolerance)
    assert_learners_agree(plain, turbo, tolerance, gradient_tolerance=30 * tolerance)


def advance(turbo, learner, steps):
    """Make steps of games that begin as `train` does, but without random actions and with all updates in each."""
    exploration = (0.0,) if algorithm(turbo) == "dqn_atari" else ()
    envs = make_envs(turbo, learner.args)
    obs, _ = envs.reset()
    learner.observe(*first_step(obs))
    for _ in range(steps):
        actions = learner.next_actions(*exploration)
        obs, rewards, terminated, _, infos = envs.step(actions)
        learner.observe(obs, actions, rewards, terminated, infos["is_reset"])
        learner.update()
        learner.update_target()


def learner_on_cuda(turbo, mode, **kwargs):
    """A learner past capture."""
    learner = make_learner(turbo, device="cuda", batch_size=4, **kwargs, **MODES[mode])
    advance(turbo, learner, 5)
    return learner


@pytest.mark.gpu
@pytest.mark.parametrize("mode", GRAPHS)
def test_replays_draw_fresh_batches(turbo, mode):
    """Where next to nothing is learned, a loss shows which batch was drawn."""
    rates = ["learning_rate"] if algorithm(turbo) == "dqn_atari" else ["q_lr", "policy_lr"]
    learner = learner_on_cuda(turbo, mode, **dict.fromkeys(rates, 1e-12))
    losses = set()
    for _ in range(4):
        learner.update()
        losses.add(tuple(learner.losses().values()))
    assert len(losses) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("mode", GRAPHS)
def test_replays_draw_fresh_noise(mode, turbo=TURBO["sac_atari"]):
    """Past capture, the same observation gets several actions."""
    learner = learner_on_cuda(turbo, mode)
    seen = set()
    for _ in range(20):
        learner.observe(*first_step(np.zeros(learner.obs.shape, np.uint8)))
        seen.add(tuple(learner.next_actions().tolist()))
    assert len(seen) > 4


@pytest.mark.gpu
@pytest.mark.parametrize("mode", GRAPHS)
def test_the_host_waits_for_actions_alone(turbo, mode):
    """In the steady loop, by the event of `next_actions`."""
    learner = learner_on_cuda(turbo, mode)
    with checks.no_waits():
        advance(turbo, learner, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", GRAPHS)
def test_a_checkpoint_continues_in_captured_graphs(turbo, mode):
    learner = learner_on_cuda(turbo, mode)
    checks.goes_on_when_captured(learner, learner, partial(advance, turbo, steps=3), tolerance=1e-3)
