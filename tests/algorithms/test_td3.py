"""The TD3 learners: plain against turbo, exploration and smoothing, the delay, capture, learning, CUDA."""

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

PLAIN, TURBO = conftest.PLAIN["td3"], conftest.TURBO["td3"]
UNEQUAL_LOW, UNEQUAL_HIGH = np.array([-1.0, -10.0, 0.0]), np.array([3.0, -8.0, 0.5])  # the bounds of Unequal-v0


@pytest.fixture(params=[PLAIN, TURBO], ids=["plain", "turbo"])
def script(request):
    return request.param


OTHER = {"env_id": "Unequal-v0", "policy_frequency": 3, "policy_noise": 0.5, "noise_clip": 0.3, "tau": 0.1}


@pytest.mark.parametrize(
    ("kwargs", "mode"),
    [({}, "eager"), ({}, "compile"), (OTHER, "eager")],
    ids=["default-eager", "default-compile", "unequal bounds, other hyper-parameters"],
)
def test_turbo_equals_plain(kwargs, mode):
    """From the same weights and batches losses, gradients (Adam's first moments) and weights agree, for 50 updates."""
    plain, turbo = make_learner(PLAIN, **kwargs), make_learner(TURBO, **kwargs, **MODES[mode])
    copy_networks(plain, turbo)
    feed_same_batches(plain, turbo, seed=0)
    with one_graph_each({"eager": 0, "compile": 4}[mode]):  # critics, actor, target networks, acting
        for update in range(50):
            for learner in (plain, turbo):
                torch.manual_seed(update)
                learner.update()
            if update in (0, 49):
                assert_learners_agree(plain, turbo, tolerance=1e-5 if update == 0 else 1e-4)
        for _ in range(3):
            turbo.observe(**transitions(turbo, np.random.default_rng(0)))


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


def fill_columns(learner):
    """Store random transitions in the plain learner's replay buffer."""
    columns = learner.replay.columns
    generator = np.random.default_rng(0)
    learner.replay.store(**{name: generator.standard_normal((8, *c.shape[1:])) for name, c in columns.items()})


def actions_for(learner, obs):
    """Actions with exploration noise for each row of `obs`, (count, act_dim)."""
    if not hasattr(learner, "observe"):
        return learner.act(obs)
    actions = []
    for row in obs:
        learner.observe(**transitions(learner, np.random.default_rng(0)) | {"act_on": row[None]})
        actions.append(learner.next_actions()[0])
    return np.stack(actions)


def noisy_actions(learner, count):
    """`count` actions with exploration noise, (count, act_dim)."""
    return actions_for(learner, np.zeros((count, 2)))


def smoothed_actions(learner):
    """The next actions that one update asks the target critics about, (batch, act_dim)."""
    seen = []
    if hasattr(learner, "observe"):
        learner.observe(**transitions(learner, np.random.default_rng(0)))
    else:
        columns = learner.replay.columns
        learner.replay.store(**{name: np.ones((1, *column.shape[1:])) for name, column in columns.items()})
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


@pytest.mark.parametrize(("noise", "deviation"), [(0.1, 0.1), (0.3, 0.3)])
def test_exploration_noise_is_in_each_dimensions_unit(script, noise, deviation):
    learner = make_learner(script, env_id="Unequal-v0", exploration_noise=noise)
    set_policy(learner, 0.0)
    assert_noise_is_per_dimension(noisy_actions(learner, 1500), deviation, largest=1.0)


@pytest.mark.parametrize("side", [-1, 1])
def test_exploration_respects_each_dimensions_bounds(script, side):
    learner = make_learner(script, env_id="Unequal-v0", exploration_noise=0.3)
    set_policy(learner, side * 0.95)
    actions = noisy_actions(learner, 300)
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
    (action,) = actions_for(learner, np.zeros((1, 2)))
    policy, _ = learner.policy()
    (exported,) = policy(torch.zeros(1, 2)).detach().numpy()
    space = make_envs(script, learner.args).single_action_space
    bound = space.low if side < 0 else space.high
    assert space.contains(action) and np.allclose(action, bound, atol=1e-6)
    assert np.allclose(exported, bound, atol=1e-6)


def test_the_policy_is_the_actor_without_noise(script):
    """From the weights of the moment."""
    noisy, quiet = [make_learner(script, env_id="Unequal-v0", exploration_noise=noise) for noise in (10.0, 0.0)]
    obs = torch.randn(5, 2)
    fill = fill_replay if script is TURBO else fill_columns
    for learner in (noisy, quiet):
        fill(learner)
        torch.manual_seed(0)
        learner.update()
    policy, _ = noisy.policy()
    with torch.no_grad():
        np.testing.assert_allclose(policy(obs), actions_for(quiet, obs.numpy()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kwargs", "deviation", "largest"),
    [({"policy_noise": 0.2, "noise_clip": 0.5}, 0.2, 0.5), ({"policy_noise": 10.0, "noise_clip": 0.3}, 0.3, 0.3)],
    ids=["noise", "clip"],
)
def test_smoothing_noise_is_in_each_dimensions_unit(script, kwargs, deviation, largest):
    learner = make_learner(script, env_id="Unequal-v0", batch_size=1500, **kwargs)
    set_policy(learner, 0.0)
    assert_noise_is_per_dimension(smoothed_actions(learner), deviation, largest)


@pytest.mark.parametrize("side", [-1, 1])
def test_smoothing_respects_each_dimensions_bounds(script, side):
    learner = make_learner(script, env_id="Unequal-v0", batch_size=300, policy_noise=0.3)
    set_policy(learner, side * 0.95)
    assert_within_bounds_that_are_reached(smoothed_actions(learner), UNEQUAL_LOW if side < 0 else UNEQUAL_HIGH)


def test_actor_and_targets_wait(script):
    """The first update and every third after it move them; the critics move each time."""
    learner = make_learner(script, policy_frequency=3)
    fill = fill_replay if script is TURBO else fill_columns
    fill(learner)
    for update in range(9):
        before = clones(networks(learner))
        learner.update()
        after = leaves(networks(learner))
        moved = {name.split(".")[1] for name, tensor in after if not torch.equal(tensor, before[name])}
        assert moved == {"critics"} | ({"actor", "target_actor", "target_critics"} if update % 3 == 0 else set())


@pytest.mark.parametrize(("env_id", "value"), [("BlindTruncates-v0", 10.0), ("BlindTerminates-v0", 2.5)])
def test_values_bootstrap_through_truncation_but_not_termination(script, env_id, value, tmp_path):
    """With gamma = 0.9 and rewards of 1, V = 1 + gamma V, or V = 1 + gamma V 2/3 if every third step is the last."""
    values = []
    kwargs = {"gamma": 0.9, "tau": 0.2, "learning_rate": 3e-3, "batch_size": 64}
    sizes = {"total_timesteps": 1000, "learning_starts": 100, "buffer_size": 1000}
    args = script.Args(env_id=env_id, run_dir=str(tmp_path), **kwargs, **sizes)
    train(script, args, on_log=lambda learner, losses, step: values.append(losses["q_values"]))
    assert values[-1] == pytest.approx(value, rel=0.1)


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


@pytest.mark.parametrize("script", [pytest.param(PLAIN, marks=pytest.mark.finding), TURBO], ids=["plain", "turbo"])
def test_td3_swings_up_the_pendulum(script, tmp_path):
    """A random policy scores about -1200, a swing-up about -130 and less when the pendulum starts near the top."""
    kwargs = {"total_timesteps": 6000, "learning_starts": 1000, "learning_rate": 1e-3, "tau": 0.01, "batch_size": 128}
    script.train(script.Args(env_id="Pendulum-v1", run_dir=str(tmp_path), **kwargs))
    returns = scalars(next(tmp_path.iterdir()), "charts/episodic_return")
    assert np.median(returns[:5]) < -700
    assert np.median(returns[-9:]) > -300


ON_CUDA = {"script": TURBO, "device": "cuda", "batch_size": 64, "buffer_size": 200}


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "eager"])
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
            for name, steps in (("critics", update), ("actor", (update + 1) // 2)):
                correction, _ = learner.optimizers[name].corrections
                assert correction.item() == pytest.approx(1 - 0.9**steps)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fixed_rows", [False, True])
def test_repeated_updates_draw_fresh_rows_and_noise(mode, fixed_rows):
    """From the same state, past capture, an update has another loss each time, be it for its smoothing noise alone."""
    learner = make_learner(**ON_CUDA, **MODES[mode])
    if fixed_rows:
        fill_replay(learner)
        replay_in_order(learner)
    advance(learner, 30)
    saved = clones(learner.tensors())
    losses = set()
    for _ in range(6):
        for name, tensor in leaves(learner.tensors()):
            tensor.detach().copy_(saved[name])
        learner.updates = 30
        learner.update()
        losses.add((learner.losses()["qf_loss"], learner.losses()["actor_loss"]))
    assert len({loss for loss, _ in losses}) == len({loss for _, loss in losses}) == 6
