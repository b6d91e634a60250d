"""The SAC learners: plain against turbo, the replay buffer, episode ends, and what resuming restores."""

import io

import numpy as np
import pytest
import torch
from conftest import PLAIN, TURBO, make_learner, transitions

MODES = {"eager": {}, "compile": {"compile": True}}


def layers(*modules):
    """Weight (in, out) and bias (1, out) of linear layers, stacked over an ensemble of them if there are several."""
    weights, biases = [m.weight.detach().T for m in modules], [m.bias.detach()[None] for m in modules]
    return [torch.stack(x) if len(modules) > 1 else x[0] for x in (weights, biases)]


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


def feed_same_batches(plain, turbo, seed):
    """Make both learners see the same batch at each update, and the same noise if they are seeded alike before it."""
    generator = torch.Generator().manual_seed(seed)
    batch, obs_dim, act_dim = plain.args.batch_size, turbo.obs_dim, turbo.act_dim

    def draw():
        columns = {name: torch.randn(batch, obs_dim, generator=generator) for name in ("obs", "next_obs")}
        columns["actions"] = turbo.action_bias + turbo.action_scale * torch.randn(batch, act_dim, generator=generator)
        columns["rewards"] = torch.randn(batch, generator=generator)
        columns["terminated"] = (torch.rand(batch, generator=generator) < 0.1).float()
        return columns

    batches = []
    plain.sample = lambda: batches.append(draw()) or batches[-1]
    turbo.replay = lambda: torch.cat([column.reshape(batch, -1) for column in batches[-1].values()], 1)


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


@pytest.mark.parametrize("mode", MODES)
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


@pytest.mark.parametrize("num_envs", [1, 3])
def test_ring_buffer_holds_the_newest_transitions(num_envs):
    learner = make_learner(TURBO, num_envs=num_envs, buffer_size=10)
    generator = np.random.default_rng(0)
    sent = []
    for _ in range(25):
        row = transitions(learner, generator)
        sent += [np.concatenate([column.reshape(num_envs, -1) for column in row[:5]], 1)]
        learner.observe(*row)
    newest = np.concatenate(sent)[-10:].astype(np.float32)
    assert int(learner.stored) == 25 * num_envs
    assert sorted(learner.buffer.tolist()) == sorted(newest.tolist())


@pytest.mark.parametrize("filled", [1, 5, 10])
def test_replay_draws_every_stored_row_and_no_other(filled):
    learner = make_learner(TURBO, buffer_size=10, batch_size=500)
    learner.buffer.copy_(torch.arange(10.0)[:, None].expand_as(learner.buffer))
    learner.stored.fill_(filled)
    assert set(learner.replay()[:, 0].tolist()) == set(range(filled))


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


def stored_rows(learner):
    """obs, next_obs and terminated of all stored transitions, numpy."""
    if hasattr(learner, "columns"):
        obs, next_obs, _, _, terminated = learner.buffer[: int(learner.stored)].split(learner.columns, 1)
        return obs.cpu().numpy(), next_obs.cpu().numpy(), terminated.cpu().numpy()[:, 0]
    return [learner.buffer[name][: learner.stored].numpy() for name in ("obs", "next_obs", "terminated")]


@pytest.mark.parametrize(("env_id", "ends"), [("Truncates-v0", 0.0), ("Terminates-v0", 1.0)])
def test_transitions_keep_the_true_last_observation_and_tell_terminal_from_truncated(script, env_id, ends, tmp_path):
    seen = []
    sizes = {"num_envs": 2, "total_timesteps": 400, "learning_starts": 300, "batch_size": 8, "buffer_size": 500}
    script.train(
        script.Args(env_id=env_id, run_dir=str(tmp_path), **sizes),
        on_log=lambda learner, losses, step: seen.append(stored_rows(learner)),
    )
    obs, next_obs, terminated = seen[-1]
    assert len(obs) == 400
    assert (next_obs[:, 0] == obs[:, 0] + 1).all() and (next_obs[:, 1] == obs[:, 1]).all()
    assert (terminated == ends * (next_obs[:, 0] == 3)).all()


@pytest.mark.parametrize(("env_id", "value"), [("BlindTruncates-v0", 10.0), ("BlindTerminates-v0", 2.5)])
def test_values_bootstrap_through_truncation_but_not_termination(script, env_id, value, tmp_path):
    """With gamma = 0.9 and rewards of 1, V = 1 + gamma V, or V = 1 + gamma V 2/3 if every third step is the last."""
    values = []
    kwargs = {"gamma": 0.9, "tau": 0.1, "q_lr": 3e-3, "autotune": False, "alpha": 0.0, "batch_size": 64}
    sizes = {"total_timesteps": 1000, "learning_starts": 100, "buffer_size": 1000}
    args = script.Args(env_id=env_id, run_dir=str(tmp_path), **kwargs, **sizes)
    script.train(args, on_log=lambda learner, losses, step: values.append(losses["qf1_values"]))
    assert values[-1] == pytest.approx(value, rel=0.1)


def test_a_restored_learner_continues_bit_by_bit(script):
    def advance(learner, seed):
        generator = np.random.default_rng(seed)
        for _ in range(10):
            row = generator.standard_normal((4, 1, 3))
            if script is PLAIN:
                learner.store(obs=row[0], next_obs=row[1], actions=row[2, :, :1], rewards=row[3, :, 0], terminated=[0])
            else:
                learner.observe(row[0], row[1], row[2, :, :1], row[3, :, 0], np.zeros(1), row[1])
            learner.update()

    def flat(state, prefix=""):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        for name, value in items:
            if isinstance(value, (dict, list)):
                yield from flat(value, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", value

    learner = make_learner(script, buffer_size=15)
    advance(learner, seed=0)
    file = io.BytesIO()
    torch.save(learner.state_dict(), file)
    advance(learner, seed=1)
    wanted = dict(flat(learner.state_dict()))

    restored = make_learner(script, seed=2, buffer_size=15)
    file.seek(0)
    restored.load_state_dict(torch.load(file, weights_only=True))
    advance(restored, seed=1)
    got = dict(flat(restored.state_dict()))
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(got[name], value) if isinstance(value, torch.Tensor) else got[name] == value, name


def test_actions_are_the_environments_to_keep():
    """An environment may hold on to its last action; the next one must not be written over it."""
    learner = make_learner(TURBO)
    generator = np.random.default_rng(0)
    learner.observe(*transitions(learner, generator))
    first = learner.next_actions()
    kept = first.copy()
    learner.observe(*transitions(learner, generator))
    assert not np.array_equal(learner.next_actions(), kept) and np.array_equal(first, kept)


def test_stage_counts_the_updates_of_this_process():
    """A restored learner has to compile again, and says so, however many updates it has behind it."""
    learner = make_learner(TURBO)
    assert learner.stage == "warming up"
    for _ in range(learner.warmup_updates):
        learner.observe(*transitions(learner, np.random.default_rng(0)))
        learner.update()
    assert learner.stage == "training"
    restored = make_learner(TURBO)
    restored.compile = True
    restored.load_state_dict(learner.state_dict())
    assert restored.stage == "compiling" and restored.updates == learner.updates


def test_compiled_functions_have_one_graph_and_do_not_recompile():
    """`fullgraph=True` raises on a graph break; here a second kind of data, or a recompile, would raise too."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    learner = make_learner(TURBO, compile=True)
    generator = np.random.default_rng(0)
    for _ in range(4):
        learner.observe(*transitions(learner, generator))
        learner.update()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(10):
            learner.observe(*transitions(learner, generator))
            learner.update()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 3, "acting, critics, actor"
