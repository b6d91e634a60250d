"""On a CUDA device: all modes compute the same, graphs lose no update and repeat no noise, the host never waits."""

import json

import numpy as np
import pytest
import torch
from conftest import TURBO, make_learner, transitions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
MODES = {
    "eager": {},
    "compile": {"compile": True},
    "cudagraphs": {"cudagraphs": True},
    "compile+cudagraphs": {"compile": True, "cudagraphs": True},
}
SMALL = {"module": TURBO, "device": "cuda", "batch_size": 64, "buffer_size": 200, "policy_lr": 3e-5}


def advance(learner, steps, seed=0):
    """Step as `train` does, on random transitions; returns the actions, (steps, num_envs, act_dim)."""
    generator, actions = np.random.default_rng(seed), []
    for _ in range(steps):
        learner.observe(*transitions(learner, generator))
        learner.update()
        actions.append(learner.next_actions())
    return np.stack(actions)


def replay_in_order(learner):
    """Sample the buffer's first rows and draw no noise: then all modes see the same numbers."""
    learner.replay = lambda: learner.buffer[: learner.args.batch_size]
    learner.noise = lambda: torch.zeros(learner.args.batch_size, learner.act_dim, device=learner.device)
    learner.buffer.copy_(torch.randn(learner.buffer.shape, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("updates", [1, 3, 6, 7, 50])
def test_modes_agree(mode, updates):
    """Before, at and after capture, a mode has made exactly the updates that eager code makes."""
    results = []
    for kwargs in ({}, MODES[mode]):
        learner = make_learner(**SMALL, **kwargs)
        replay_in_order(learner)
        for _ in range(updates):
            learner.update()
        results.append({name: tensor.clone() for name, tensor in learner.tensors().items()})
    for name, wanted in results[0].items():
        difference = (results[1][name] - wanted).double().norm()
        assert (
            difference <= (1e-5 if updates == 1 else 1e-4 if updates < 10 else 1e-3) * wanted.double().norm() + 1e-7
        ), name
    assert results[1]["critic_adam.decay"][0].item() == pytest.approx(0.9**updates)


@pytest.mark.parametrize("mode", MODES)
def test_every_transition_is_stored_once(mode):
    learner = make_learner(**SMALL, **MODES[mode])
    generator = np.random.default_rng(0)
    sent = []
    for _ in range(20):
        row = transitions(learner, generator)
        sent.append(np.concatenate([column.reshape(1, -1) for column in row[:5]], 1))
        learner.observe(*row)
        learner.next_actions()
    assert int(learner.stored) == 20
    assert np.array_equal(learner.buffer[:20].cpu().numpy(), np.concatenate(sent).astype(np.float32))


@pytest.mark.parametrize("mode", MODES)
def test_replays_draw_fresh_noise(mode):
    learner = make_learner(**SMALL, **MODES[mode])
    row = transitions(learner, np.random.default_rng(0))
    seen = set()
    for _ in range(12):
        learner.observe(*row)
        seen.add(learner.next_actions().item())
    assert len(seen) == 12


@pytest.mark.parametrize("mode", MODES)
def test_repeated_updates_draw_fresh_rows_and_noise(mode):
    """From the same state, past capture, the same kind of update has another loss each time."""
    learner = make_learner(**SMALL, **MODES[mode])
    advance(learner, 30)
    saved = {name: tensor.clone() for name, tensor in learner.tensors().items()}
    losses = set()
    for _ in range(6):
        for name, tensor in learner.tensors().items():
            tensor.copy_(saved[name])
        learner.updates = 30
        learner.update()
        losses.add((learner.losses()["qf_loss"], learner.losses()["actor_loss"]))
    assert len({loss for loss, _ in losses}) == len({loss for _, loss in losses}) == 6


@pytest.mark.parametrize("mode", MODES)
def test_the_host_waits_for_actions_alone(mode):
    """In the steady loop only the event of `next_actions` synchronises, which the debug mode does not count."""
    learner = make_learner(**SMALL, **MODES[mode])
    advance(learner, 10)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        advance(learner, 10, seed=1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_continues_in_captured_graphs(mode):
    """Loading fills the tensors that the graphs read: a restored learner goes on like the one that was saved."""
    learner = make_learner(**SMALL, **MODES[mode])
    advance(learner, 10)
    state = learner.state_dict()
    wanted = advance(learner, 5, seed=1)
    learner.load_state_dict(state)
    np.testing.assert_allclose(advance(learner, 5, seed=1), wanted, rtol=1e-4, atol=1e-4)


def test_training_on_cuda(tmp_path):
    args = TURBO.Args(env_id="Pendulum-v1", total_timesteps=500, learning_starts=100, run_dir=str(tmp_path))
    args.cudagraphs = True
    TURBO.train(args)
    summary = json.loads(next(tmp_path.glob("*/summary.json")).read_text())
    assert summary["cudagraphs"] and summary["steady_sps"] > 0 and summary["device"] != "cpu"
