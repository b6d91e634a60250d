"""The SAC learners: plain against turbo, the buffer, episode ends, resuming, capture, learning, CUDA."""

import io
import json
from functools import partial

import conftest
import numpy as np
import pytest
import torch
from capture import record
from conftest import leaves
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

PLAIN, TURBO = conftest.PLAIN["sac"], conftest.TURBO["sac"]
MODES = {
    "eager": {},
    "compile": {"compile": True},
    "cudagraphs": {"cudagraphs": True},
    "compile+cudagraphs": {"compile": True, "cudagraphs": True},
}


@pytest.fixture(params=[PLAIN, TURBO], ids=["plain", "turbo"])
def script(request):
    return request.param


def make_learner(module, seed=1, device="cpu", **kwargs):
    """A SAC learner of `module` for Args(**kwargs), by default small and on Pendulum."""
    args = module.Args(**{"env_id": "Pendulum-v1", "batch_size": 32, "buffer_size": 64} | kwargs)
    torch.manual_seed(seed)
    return module.SAC(args, module.make_envs(args, args.num_envs), torch.device(device))


def transitions(learner, generator):
    """Random columns for `SAC.observe`, that is obs, next_obs, actions, rewards, terminated and the obs to act on."""
    n, obs_dim, act_dim = learner.num_envs, learner.obs_dim, learner.act_dim
    normal = generator.standard_normal
    terminated = generator.random(n) < 0.1
    return normal((n, obs_dim)), normal((n, obs_dim)), normal((n, act_dim)), normal(n), terminated, normal((n, obs_dim))


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

    learner = make_learner(script, buffer_size=15)
    advance(learner, seed=0)
    file = io.BytesIO()
    torch.save(learner.state_dict(), file)
    advance(learner, seed=1)
    wanted = dict(leaves(learner.state_dict()))

    restored = make_learner(script, seed=2, buffer_size=15)
    file.seek(0)
    restored.load_state_dict(torch.load(file, weights_only=True))
    advance(restored, seed=1)
    got = dict(leaves(restored.state_dict()))
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
    events = EventAccumulator(str(next(tmp_path.iterdir()))).Reload().Scalars("charts/episodic_return")
    returns = [event.value for event in events]
    assert np.median(returns[:5]) < -700
    assert np.median(returns[-9:]) > -300


def on_cuda(test):
    """Marks a test that needs a CUDA device."""
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")(test))


ON_CUDA = {"module": TURBO, "device": "cuda", "batch_size": 64, "buffer_size": 200, "policy_lr": 3e-5}


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
@on_cuda
def test_modes_agree(mode, updates):
    """Before, at and after capture, a mode has made exactly the updates that eager code makes."""
    results = []
    for kwargs in ({}, MODES[mode]):
        learner = make_learner(**ON_CUDA, **kwargs)
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
@on_cuda
def test_every_transition_is_stored_once(mode):
    learner = make_learner(**ON_CUDA, **MODES[mode])
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
@on_cuda
def test_replays_draw_fresh_noise(mode):
    learner = make_learner(**ON_CUDA, **MODES[mode])
    row = transitions(learner, np.random.default_rng(0))
    seen = set()
    for _ in range(12):
        learner.observe(*row)
        seen.add(learner.next_actions().item())
    assert len(seen) == 12


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


@pytest.mark.parametrize("mode", MODES)
@on_cuda
def test_the_host_waits_for_actions_alone(mode):
    """In the steady loop only the event of `next_actions` synchronises, which the debug mode does not count."""
    learner = make_learner(**ON_CUDA, **MODES[mode])
    advance(learner, 10)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        advance(learner, 10, seed=1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("mode", MODES)
@on_cuda
def test_a_checkpoint_continues_in_captured_graphs(mode):
    """Loading fills the tensors that the graphs read: a restored learner goes on like the one that was saved."""
    learner = make_learner(**ON_CUDA, **MODES[mode])
    advance(learner, 10)
    state = learner.state_dict()
    wanted = advance(learner, 5, seed=1)
    learner.load_state_dict(state)
    np.testing.assert_allclose(advance(learner, 5, seed=1), wanted, rtol=1e-4, atol=1e-4)


@on_cuda
def test_training_on_cuda(tmp_path):
    args = TURBO.Args(env_id="Pendulum-v1", total_timesteps=500, learning_starts=100, run_dir=str(tmp_path))
    args.cudagraphs = True
    TURBO.train(args)
    summary = json.loads(next(tmp_path.glob("*/summary.json")).read_text())
    assert summary["cudagraphs"] and summary["steady_sps"] > 0 and summary["device"] != "cpu"
