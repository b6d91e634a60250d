"""The SAC learners: plain against turbo, bounds, values, capture, learning, CUDA."""

from functools import partial

import conftest
import numpy as np
import pytest
import torch
from capture import record
from conftest import MODES, advance, feed_same_batches, make_learner, on_cuda, replay_in_order, scalars, transitions

PLAIN, TURBO = conftest.PLAIN["sac"], conftest.TURBO["sac"]


@pytest.fixture(params=[PLAIN, TURBO], ids=["plain", "turbo"])
def script(request):
    return request.param


def flat_actor(plain, get=lambda parameter: parameter):
    """The plain actor's parameters, or what `get` makes of each, in the turbo script's order."""
    actor, parts = plain.actor, []
    for layer in (actor.fc1, actor.fc2):
        parts += [get(layer.weight).T, get(layer.bias)]
    parts += [torch.cat((get(actor.fc_mean.weight), get(actor.fc_log_std.weight))).T]
    parts += [torch.cat((get(actor.fc_mean.bias), get(actor.fc_log_std.bias)))]
    return torch.cat([part.detach().flatten() for part in parts])


def flat_critics(qf1, qf2, get=lambda parameter: parameter):
    """Two plain critics' parameters, or what `get` makes of each, in the turbo script's order."""
    parts = []
    for name in ("fc1", "fc2", "fc3"):
        pair = getattr(qf1, name), getattr(qf2, name)
        parts += [torch.stack([get(m.weight).T for m in pair]), torch.stack([get(m.bias) for m in pair])]
    return torch.cat([part.detach().flatten() for part in parts])


def copy_plain_to_turbo(plain, turbo):
    turbo.actor.copy_(flat_actor(plain))
    turbo.critics.copy_(flat_critics(plain.qf1, plain.qf2))
    turbo.target_critics.copy_(flat_critics(plain.qf1_target, plain.qf2_target))


def assert_learners_agree(plain, turbo, tolerance):
    def moment(optimizer):
        return lambda parameter: optimizer.state[parameter]["exp_avg"]

    pairs = {
        "actor": (turbo.actor, flat_actor(plain)),
        "critics": (turbo.critics, flat_critics(plain.qf1, plain.qf2)),
        "target_critics": (turbo.target_critics, flat_critics(plain.qf1_target, plain.qf2_target)),
        "actor gradient": (turbo.actor_adam.m, flat_actor(plain, moment(plain.actor_optimizer))),
        "critic gradient": (turbo.critic_adam.m, flat_critics(plain.qf1, plain.qf2, moment(plain.q_optimizer))),
        "alpha": (turbo.log_alpha.exp(), torch.tensor([plain.alpha])),
    }
    for name, (got, wanted) in pairs.items():  # in norm: Adam blows up rounding where a gradient is all but zero
        assert (got - wanted).norm() <= tolerance * wanted.norm(), name
    wanted = {name: torch.as_tensor(value).item() for name, value in plain.losses.items()}
    for name, got in turbo.losses().items():
        assert got == pytest.approx(wanted.get(name, 0.0), rel=10 * tolerance, abs=tolerance), name


@pytest.mark.parametrize("mode", ["eager", "compile"])
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"env_id": "Unequal-v0", "policy_frequency": 3, "target_network_frequency": 2},
        {
            "autotune": False,
            "alpha": 0.1,
            "policy_frequency": 1,
        },  # turbo draws noise for a temperature all the same, last
    ],
    ids=["default", "unequal bounds, other frequencies", "no autotune"],
)
def test_turbo_equals_plain(mode, kwargs):
    """From the same weights and batches, losses, gradients (Adam's first moments) and parameters agree, update 1 to 50.

    The policy learns slowly: where tanh saturates, log(1 - tanh**2 + 1e-6) turns its last bit into a 10% difference.
    """
    kwargs = {"policy_lr": 3e-5} | kwargs
    plain, turbo = make_learner(PLAIN, **kwargs), make_learner(TURBO, **kwargs, **MODES[mode])
    copy_plain_to_turbo(plain, turbo)
    feed_same_batches(plain, turbo, seed=0)
    for update in range(50):
        for learner in (plain, turbo):
            torch.manual_seed(update)
            learner.update()
        if update in (0, 49):
            assert_learners_agree(plain, turbo, tolerance=1e-5 if update == 0 else 1e-4)


def test_actions_respect_each_dimensions_bounds(script):
    learner = make_learner(script, env_id="Unequal-v0")
    if script is PLAIN:
        actions = learner.act(np.random.default_rng(0).standard_normal((5000, 2)))
    else:
        actions = learner.squash(*learner.policy(learner.actor, torch.randn(5000, 2)), torch.randn(5000, 3))[0].numpy()
    low, high = np.array([-1, -10, 0]), np.array([3, -8, 0.5])
    assert (actions >= low - 1e-5).all() and (actions <= high + 1e-5).all()
    assert np.allclose(actions.mean(0), (low + high) / 2, atol=(high - low) / 10)
    assert (np.ptp(actions, 0) > 0.3 * (high - low)).all()


@pytest.mark.parametrize(("env_id", "value"), [("BlindTruncates-v0", 10.0), ("BlindTerminates-v0", 2.5)])
def test_values_bootstrap_through_truncation_but_not_termination(script, env_id, value, tmp_path):
    """With gamma = 0.9 and rewards of 1, V = 1 + gamma V, or V = 1 + gamma V 2/3 if every third step is the last."""
    values = []
    kwargs = {"gamma": 0.9, "tau": 0.1, "q_lr": 3e-3, "autotune": False, "alpha": 0.0, "batch_size": 64}
    sizes = {"total_timesteps": 1000, "learning_starts": 100, "buffer_size": 1000}
    args = script.Args(env_id=env_id, run_dir=str(tmp_path), **kwargs, **sizes)
    script.train(args, on_log=lambda learner, losses, step: values.append(losses["qf1_values"]))
    assert values[-1] == pytest.approx(value, rel=0.1)


@pytest.mark.parametrize("autotune", [True, False])
@pytest.mark.parametrize(("num_envs", "policy_frequency", "target_frequency"), [(1, 2, 1), (3, 1, 2)])
def test_every_graphed_function_replays_bit_equal(autotune, num_envs, policy_frequency, target_frequency):
    """20 environment steps, past the end of the ring buffer, with `respond` and each `learn` recorded."""
    kwargs = {"num_envs": num_envs, "policy_frequency": policy_frequency, "target_network_frequency": target_frequency}
    eager, graphed = (make_learner(TURBO, autotune=autotune, buffer_size=20, **kwargs) for _ in range(2))
    columns = np.random.default_rng(0)
    start = transitions(eager, columns)
    for learner in (eager, graphed):
        learner.buffer.zero_()
        learner.observe(*start)
    state = [*graphed.tensors().values(), graphed.buffer, graphed.actions]
    graphed.respond = record(graphed.respond, state)
    graphed.learn_on = {turns: record(partial(TURBO.SAC.learn, graphed, *turns), state) for turns in graphed.learn_on}
    for i in range(20):
        row = transitions(eager, columns)
        for learner in (eager, graphed):
            torch.manual_seed(i)
            learner.observe(*row)
            learner.update()
        assert np.array_equal(eager.next_actions(), graphed.next_actions())
        for name, tensor in eager.tensors().items():
            assert torch.equal(tensor, graphed.tensors()[name]), (i, name)
    assert torch.equal(eager.buffer, graphed.buffer)
    assert not torch.equal(eager.actor, make_learner(TURBO).actor)


def test_sac_swings_up_the_pendulum(script, tmp_path):
    """A random policy scores about -1200, a swing-up about -130 and less when the pendulum starts near the top.

    A wrong sign in a loss, or lost updates, fail here.
    """
    sizes = {"total_timesteps": 5000, "learning_starts": 500, "policy_lr": 1e-3}
    script.train(script.Args(env_id="Pendulum-v1", run_dir=str(tmp_path), **sizes))
    returns = scalars(next(tmp_path.iterdir()), "charts/episodic_return")
    assert np.median(returns[:5]) < -700
    assert np.median(returns[-9:]) > -300


ON_CUDA = {"script": TURBO, "device": "cuda", "batch_size": 64, "buffer_size": 200, "policy_lr": 3e-5}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("updates", [1, 3, 6, 7, 50])
@on_cuda
def test_modes_agree(mode, updates):
    """Before, at and after capture, a mode has made exactly the updates that eager code makes."""
    results = []
    for kwargs in ({}, MODES[mode]):
        learner = make_learner(**ON_CUDA, **kwargs)
        replay_in_order(learner)
        learner.noise = lambda: torch.zeros(64, 1, device="cuda")  # so that all modes see the same numbers
        learner.buffer.copy_(torch.randn(learner.buffer.shape, generator=torch.Generator().manual_seed(0)))
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
@on_cuda
def test_repeated_updates_draw_fresh_rows_and_noise(mode):
    """From the same state, past capture, the same kind of update has another loss each time."""
    learner = make_learner(**ON_CUDA, **MODES[mode])
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
