"""PQN, for vectors and for Atari: targets, loss, RAdam, exploration, plain against turbo, capture, learning."""

import itertools
from functools import partial
from types import SimpleNamespace

import checks
import conftest
import numpy as np
import pytest
import torch
from conftest import MODES, PLAIN, TURBO, clones, gradients, learnt, networks, one_graph_each, stem
from formulas import assert_orthogonal, images, make_learner, noticing, pair
from test_cli import refused
from test_ppo import fix_order
from torch import nn

NAMES = ("pqn", "pqn_atari")
SCRIPTS = [script for name in NAMES for script in pair(name)]
SIZES = {"num_envs": 3, "num_steps": 8, "num_minibatches": 4, "update_epochs": 2}
GAMMA = 0.9
each_script = pytest.mark.parametrize("script", SCRIPTS, ids=stem)


def make(script, **kwargs):
    return make_learner(script, **SIZES | {"gamma": GAMMA} | kwargs)


def is_atari(learner):
    return hasattr(learner, "obs_shape")


def is_plain(learner):
    return hasattr(learner, "last_losses")


def random_steps(learner, seed=0, ends=0.15):
    """Random steps as columns by name, each (num_steps, num_envs, ...), a share `ends` terminated, another truncated.

    In Atari's, the step after an end starts an episode, and `obs` has one more row.
    """
    generator = np.random.default_rng(seed)
    steps = (learner.args.num_steps, learner.args.num_envs)
    terminated = generator.random(steps) < ends
    truncated = ~terminated & (generator.random(steps) < ends)
    is_reset = np.zeros(steps, bool)
    if is_atari(learner):
        for t in range(1, len(terminated)):
            is_reset[t] = (terminated | truncated)[t - 1]
            terminated[t] &= ~is_reset[t]
            truncated[t] &= ~is_reset[t]
        count = steps[0] * steps[1] + steps[1]
        obs = images(generator, count).numpy().reshape(steps[0] + 1, steps[1], 4, 84, 84)
        next_obs = obs[1:]
    else:
        obs, next_obs = generator.standard_normal((2, *steps, 5)).astype(np.float32)
    return SimpleNamespace(
        obs=obs,
        next_obs=next_obs,
        actions=generator.integers(4, size=steps),
        rewards=generator.standard_normal(steps).astype(np.float32),
        terminated=terminated,
        truncated=truncated,
        ended=terminated | truncated,
        is_reset=is_reset,
    )


def roll_out(learner, steps):
    """Give a learner these steps as its rollout, after which it can be updated by `update`."""
    if hasattr(learner, "start_rollout"):
        learner.start_rollout()
    for t in range(learner.args.num_steps):
        if is_atari(learner):
            learner.act(t, steps.obs[t], 0.5)
            columns = learner.rollout if is_plain(learner) else learner.host_columns
            columns["actions"][t] = torch.from_numpy(steps.actions[t])
            learner.record(t, steps.rewards[t], steps.terminated[t], steps.truncated[t], steps.is_reset[t])
        else:
            names = ("obs", "next_obs", "actions", "rewards", "terminated", "ended")
            record = learner.store if is_plain(learner) else learner.record
            record(t, **{name: getattr(steps, name)[t] for name in names})


def update(learner, steps, learning_rate):
    learner.update(learning_rate, *([steps.obs[-1]] if is_atari(learner) else []))


def targets_of(learner, steps):
    """The targets of a rollout, (num_steps, num_envs)."""
    batch = learner.make_batch(*([steps.obs[-1]] if is_atari(learner) and is_plain(learner) else []))
    if not is_plain(learner):
        if is_atari(learner):
            learner.send(learner.args.num_steps, steps.obs[-1])
        learner.make_batch()
        batch = learner.batch if is_atari(learner) else {"targets": learner.batch[:, -1]}
    return batch["targets"].view(learner.args.num_steps, learner.args.num_envs).numpy()


def values_of(learner, obs):
    """Q(s, a) of all actions for obs, NumPy (num_steps, num_envs, ...), in the same form."""
    with torch.no_grad():
        values = learner.q(torch.from_numpy(obs).flatten(0, 1).to(learner.device))
    return values.cpu().double().numpy().reshape(*obs.shape[:2], -1)


def forward_view(rewards, next_values, terminated, ended, gamma, q_lambda):
    """Q(lambda) as a mean of returns over 1, 2, ... steps, in which the longest has the rest of the weight.

    The longest return ends with the episode or with the rollout.
    """
    steps, envs = rewards.shape
    targets = np.zeros((steps, envs))
    for start, env in itertools.product(range(steps), range(envs)):
        returns, total = [], 0.0
        for n, t in enumerate(range(start, steps)):
            total += gamma**n * rewards[t, env]
            returns.append(total + gamma ** (n + 1) * next_values[t, env] * (not terminated[t, env]))
            if ended[t, env]:
                break
        weights = (1 - q_lambda) * q_lambda ** np.arange(len(returns))
        weights[-1] = q_lambda ** (len(returns) - 1)
        targets[start, env] = weights @ returns
    return targets


def wanted_targets(learner, steps):
    next_values = values_of(learner, steps.next_obs).max(-1)
    args = learner.args
    return forward_view(steps.rewards, next_values, steps.terminated, steps.ended, args.gamma, args.q_lambda)


def check_targets(script, q_lambda=0.65, ends=0.15, num_steps=16):
    """Targets equal the forward view, except those of steps that start an episode, from which nothing is learned.

    Episodes are terminated and truncated within a rollout of 16 steps, not only in its last step.
    """
    learner = make(script, q_lambda=q_lambda, num_steps=num_steps, num_minibatches=1)
    steps = random_steps(learner, ends=ends)
    within = [rows[:-1].any() for rows in (steps.terminated, steps.truncated, steps.is_reset)]
    assert num_steps < 16 or within == [ends > 0, ends > 0, ends > 0 and is_atari(learner)]
    roll_out(learner, steps)
    played = ~steps.is_reset
    got, wanted = targets_of(learner, steps)[played], wanted_targets(learner, steps)[played]
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("q_lambda", "ends"), [(0.65, 0.15), (0.65, 0.0), (0.0, 0.15), (1.0, 0.15)])
@each_script
def test_targets_are_means_of_returns(script, q_lambda, ends):
    check_targets(script, q_lambda, ends)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 9, 33])
@pytest.mark.parametrize("script", pair("pqn"), ids=stem)
def test_targets_of_short_and_long_rollouts(script, num_steps):
    check_targets(script, num_steps=num_steps)


@pytest.mark.parametrize("script", pair("pqn_atari"), ids=stem)
def test_an_episode_that_ends_with_the_rollout(script):
    """Its end is the last step's, which keeps the next observation's value only if it is truncated."""
    learner = make(script, num_steps=1, num_minibatches=1)
    steps = random_steps(learner, ends=0.0)
    steps.terminated[0, 0] = steps.truncated[0, 1] = True
    roll_out(learner, steps)
    values = values_of(learner, steps.next_obs).max(-1)[0]
    wanted = steps.rewards[0] + GAMMA * values * (0, 1, 1)
    np.testing.assert_allclose(targets_of(learner, steps)[0], wanted, rtol=1e-5)


@each_script
def test_the_loss_is_the_mean_squared_td_error(script):
    """The mean squared TD error of the steps that the player had, and its gradient for the last layer's biases."""
    learner = make(script, num_minibatches=1, update_epochs=1, max_grad_norm=1e9)
    steps = random_steps(learner)
    roll_out(learner, steps)
    values = values_of(learner, steps.obs[: learner.args.num_steps])
    q = np.take_along_axis(values, steps.actions[..., None], -1)[..., 0]
    errors = q - wanted_targets(learner, steps)
    played = ~steps.is_reset
    update(learner, steps, 1e-9)
    losses = learner.losses()
    assert losses["td_loss"] == pytest.approx((errors[played] ** 2).mean(), rel=1e-4)
    assert losses["q_values"] == pytest.approx(q[played].mean(), rel=1e-4)
    *_, gradient = gradients(learner, "q").values()
    wanted = [2 * (errors * (steps.actions == a))[played].sum() / played.sum() for a in range(4)]
    np.testing.assert_allclose(10 * gradient, wanted, rtol=1e-3, atol=1e-5)


@each_script
def test_updates_descend(script):
    """Small steps bring Q(s, a) closer to the targets of the first rollout."""
    learner = make(script, num_minibatches=1, update_epochs=1)
    steps = random_steps(learner)
    losses = []
    for _ in range(8):
        roll_out(learner, steps)
        update(learner, steps, 1e-3)
        losses.append(learner.losses()["td_loss"])
    assert losses[-1] < 0.9 * losses[0]


@each_script
def test_gradients_are_clipped(script):
    """The gradient is scaled to the largest norm; the norm before that is logged."""
    learner = make(script, num_minibatches=1, update_epochs=1, max_grad_norm=0.01)
    steps = random_steps(learner)
    roll_out(learner, steps)
    update(learner, steps, 1e-9)
    norm = torch.cat([gradient.flatten() for gradient in gradients(learner, "q").values()]).norm()
    assert 10 * norm.item() == pytest.approx(0.01, rel=1e-3)
    assert learner.losses()["grad_norm"] > 0.1


@each_script
def test_every_transition_is_drawn_once_an_epoch(script):
    learner = make(script, update_epochs=3)
    steps = random_steps(learner)
    steps.rewards += np.arange(24).reshape(8, 3) * 100  # so that all targets differ
    roll_out(learner, steps)

    def targets(*rows):
        if is_plain(learner):
            return rows[0]["targets"].clone()
        return learner.batch["targets"][learner.rows] if is_atari(learner) else learner.minibatch[:, -1].clone()

    drawn = checks.watch_minibatches(learner, targets)
    update(learner, steps, 1e-3)
    checks.draws_all_rows(drawn, 24)


@pytest.mark.parametrize("script", pair("pqn_atari"), ids=stem)
def test_rewards_and_actions_of_steps_that_start_an_episode_change_nothing(script):
    results = []
    for reward, action in ((0.0, 0), (1000.0, 3)):
        learner = make(script)
        steps = random_steps(learner)
        assert steps.is_reset.any()
        steps.rewards[steps.is_reset] = reward
        steps.actions[steps.is_reset] = action
        roll_out(learner, steps)
        torch.manual_seed(0)
        update(learner, steps, 1e-3)
        results.append(clones(networks(learner)))
    for name, tensor in results[0].items():
        assert torch.equal(tensor, results[1][name]), name


@pytest.mark.parametrize("script", pair("pqn_atari"), ids=stem)
def test_a_rollout_of_steps_that_start_an_episode_changes_nothing(script):
    learner = make(script)
    before = clones(networks(learner))
    steps = random_steps(learner, ends=0.0)
    steps.is_reset[:] = True
    roll_out(learner, steps)
    update(learner, steps, 1e-3)
    for name, tensor in conftest.leaves(networks(learner)):
        assert torch.equal(tensor, before[name])
    assert set(learner.losses().values()) == {0.0}


def update_both(name, monkeypatch, mode="eager", iterations=10, **kwargs):
    """Plain and turbo after each iteration, 8 minibatches, with the same rollouts and minibatches."""
    plain, turbo = make(PLAIN[name], **kwargs), make(TURBO[name], **kwargs, **MODES[mode])
    conftest.copy_networks(plain, turbo)
    fix_order(monkeypatch)
    for iteration in range(iterations):
        steps = random_steps(plain, seed=iteration)
        for learner in (plain, turbo):
            roll_out(learner, steps)
            update(learner, steps, 3e-4 * (1 - iteration / iterations))
        yield plain, turbo


OTHER = {"q_lambda": 0.0, "max_grad_norm": 0.1}


@checks.settings({"other": OTHER})
def test_turbo_equals_plain(kwargs, mode, monkeypatch):
    """From the same weights and rollouts, all agrees after one iteration (8 minibatches) and after ten (80)."""
    with one_graph_each(int(mode == "compile")):
        for iteration, learners in enumerate(update_both("pqn", monkeypatch, mode, **kwargs)):
            if iteration in (0, 9):
                conftest.assert_learners_agree(*learners, tolerance=1e-5 if iteration == 0 else 1e-4)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("kwargs", [{}, OTHER], ids=["default", "other"])
def test_turbo_equals_plain_on_images_in_double_precision(kwargs, monkeypatch):
    """From the same weights and rollouts, to float32's precision, which RAdam's step sizes have."""
    for learners in update_both("pqn_atari", monkeypatch, iterations=3, **kwargs):
        conftest.assert_learners_agree(*learners, tolerance=1e-6)


@pytest.mark.parametrize("mode", ["eager", "compile"])
def test_turbo_equals_plain_on_images(mode, monkeypatch):
    """Parameters agree; losses agree less: in float32, rounding decides on which side of 0 some units are."""
    with one_graph_each({"eager": 0, "compile": 2}[mode]):  # acting, update
        for plain, turbo in update_both("pqn_atari", monkeypatch, mode, iterations=3):
            got, wanted = (torch.cat([w.flatten() for w in learner.q.parameters()]) for learner in (turbo, plain))
            conftest.assert_close_in_norm({"q": got}, {"q": wanted}, 3e-5)
            assert turbo.losses() == pytest.approx(plain.losses(), rel=1e-2, abs=1e-4)


@each_script
def test_the_network_starts_orthogonal(script):
    """Weights have orthogonal rows or columns of norm sqrt(2), biases are 0, and LayerNorm changes nothing at first."""
    layers = [layer for layer in make(script).q.modules() if hasattr(layer, "weight")]
    normed = layers[1::2]
    assert len(layers) == (9 if conftest.algorithm(script) in conftest.ATARI else 5)
    assert all(isinstance(layer, nn.LayerNorm) and (layer.weight == 1).all() for layer in normed)
    for layer in layers[::2]:
        assert_orthogonal(layer.weight, gain=2**0.5)
    assert all((layer.bias == 0).all() for layer in layers)


def test_the_network_is_its_formula():
    """Linear layers, of which all but the last are normalized over their outputs and cut off at 0, in NumPy."""
    learner = make(PLAIN["pqn"])
    for parameter in learner.q.parameters():
        nn.init.normal_(parameter, std=0.3)
    parameters = [parameter.detach().double().numpy() for parameter in learner.q.parameters()]
    x = obs = np.random.default_rng(0).standard_normal((2, 3, 5)).astype(np.float32)
    for weight, bias, scale, shift in zip(*(parameters[i:-2:4] for i in range(4)), strict=True):
        x = x @ weight.T + bias
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        x = np.maximum(x * scale + shift, 0)
    weight, bias = parameters[-2:]
    np.testing.assert_allclose(values_of(learner, obs), x @ weight.T + bias, rtol=1e-4, atol=1e-5)


def test_the_network_on_the_host_is_that_of_torch(script=TURBO["pqn"]):
    """The network on the host is that of torch, for any weights."""
    learner = make(script)
    for parameter in learner.q.parameters():
        nn.init.normal_(parameter, std=0.3)
    learner.start_rollout()
    obs = np.random.default_rng(0).standard_normal((1, 3, 5)).astype(np.float32)
    np.testing.assert_allclose(learner.host_values(obs[0]), values_of(learner, obs)[0], rtol=1e-4, atol=1e-5)


def test_images_are_normalized_as_torch_does(script=TURBO["pqn_atari"]):
    """LayerNorm of images is torch's, whether channels are first or last in memory."""
    shape = (3, 5, 5)
    layer, wanted = script.ImageLayerNorm(shape), nn.LayerNorm(shape)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    wanted.load_state_dict(layer.state_dict())
    x = torch.randn(2, *shape)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        got = layer(x.contiguous(memory_format=memory_format))
        assert (got - wanted(x)).abs().max() < 1e-5


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("max_grad_norm", [1e9, 1.0])
def test_radam_is_torchs(max_grad_norm, compile, script=TURBO["pqn"]):
    """50 steps, the first five of them without rectification, are torch's, with other gradients and rates in each."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    weights = [torch.randn(20, requires_grad=True), torch.randn(3, 4, requires_grad=True)]
    wanted = [nn.Parameter(w.detach().clone()) for w in weights]
    optimizer, reference = script.ClippedRAdam(weights, 0.0, max_grad_norm), torch.optim.RAdam(wanted, lr=0.0)
    gradients = [torch.zeros_like(w) for w in weights]
    norms = []

    def step():
        loss = sum((w * g).sum() for w, g in zip(weights, gradients, strict=True))
        return optimizer.step(optimizer.gradient(loss))

    with torch._dynamo.config.patch(trace_autograd_ops=True):
        step = torch.compile(step, backend="eager", fullgraph=True) if compile else step
        for number in range(50):
            rate = (1e-2, 1e-3, 0.0)[number % 3]
            optimizer.lr.fill_(rate)
            reference.param_groups[0]["lr"] = rate
            for gradient, parameter in zip(gradients, wanted, strict=True):
                gradient.normal_(std=(0.01, 1.0)[number % 2])
                gradient[0] = 0
                gradient[1] *= 1e-7  # where epsilon counts
                parameter.grad = gradient.clone()
            norms.append(nn.utils.clip_grad_norm_(wanted, max_grad_norm).item())
            assert step().item() == pytest.approx(norms[-1], rel=1e-5)
            reference.step()
            for w, parameter in zip(weights, wanted, strict=True):
                torch.testing.assert_close(w.detach(), parameter.detach(), rtol=1e-6, atol=1e-7)
    assert max_grad_norm == 1e9 or min(norms) < max_grad_norm < max(norms)


def test_late_steps_of_radam_are_torchs():
    """The last size in the table is that of all later steps."""
    for number in (19_999, 20_000, 30_000, 1_000_000):
        weight, wanted = torch.zeros(4, requires_grad=True), nn.Parameter(torch.zeros(4))
        optimizer, reference = TURBO["pqn"].ClippedRAdam([weight], 0.1, 1e9), torch.optim.RAdam([wanted], lr=0.1)
        gradient = torch.tensor((1.0, -0.1, 1e-3, 0.0))
        wanted.grad = gradient.clone()
        reference.step()
        reference.state[wanted] |= {"step": torch.tensor(number - 1.0), "exp_avg_sq": gradient.square()}
        optimizer.steps.fill_(number - 1)
        optimizer.m.copy_(reference.state[wanted]["exp_avg"])
        optimizer.v.copy_(gradient.square())
        weight.data.copy_(wanted.data)
        reference.step()
        optimizer.step(gradient)
        torch.testing.assert_close(weight.detach(), wanted.detach(), rtol=1e-6, atol=0)
        assert optimizer.steps.item() == number


@each_script
def test_a_share_of_the_actions_is_random(script):
    """Actions have the highest value but for a share that is uniform; Atari's learners keep both for the rollout."""
    learner = make(script, num_envs=50)
    if hasattr(learner, "start_rollout"):
        learner.start_rollout()
    steps = random_steps(learner)
    greedy = values_of(learner, steps.obs)
    for exploration in (0.0, 0.4, 1.0):
        actions = []
        for t in range(8):
            inputs = (t, steps.obs[t]) if is_atari(learner) else (steps.obs[t],)
            actions.append(learner.act(*inputs, exploration))
        actions = np.stack(actions)
        others = actions[actions != greedy[:8].argmax(-1)]
        assert len(others) / 400 == pytest.approx(exploration * 3 / 4, abs=0.1 * (exploration > 0))
        assert exploration < 1 or np.bincount(actions.flatten(), minlength=4) / 400 == pytest.approx(0.25, abs=0.1)
        if is_atari(learner):
            assert np.array_equal(learner.rollout["actions"].numpy(), actions)
            np.testing.assert_allclose(learner.rollout["values"][:8], greedy[:8].max(-1), rtol=1e-4, atol=1e-5)


def test_the_host_acts_with_the_newest_weights():
    learner = make(TURBO["pqn"])
    for seed in range(2):
        steps = random_steps(learner, seed)
        roll_out(learner, steps)
        update(learner, steps, 1e-2)
    learner.start_rollout()
    obs = steps.obs.reshape(-1, 5)
    assert np.array_equal(learner.greedy(obs), learner.q(torch.from_numpy(obs)).argmax(-1).numpy())


@each_script
def test_a_restored_learner_continues_bit_by_bit(script):
    def advance(learner, part):
        for seed in range(3 * part, 3 * part + 3):
            steps = random_steps(learner, seed)
            roll_out(learner, steps)
            if not is_atari(learner):
                learner.act(steps.obs[0], 0.5)
            update(learner, steps, 1e-3)

    checks.goes_on_when_restored(partial(make, script), advance)


@pytest.mark.parametrize("env_id", ["DiscreteTruncates-v0", "DiscreteTerminates-v0"])
@pytest.mark.parametrize("script", pair("pqn"), ids=stem)
def test_steps_keep_the_true_last_observation_and_tell_terminal_from_truncated(script, env_id, tmp_path):
    checks.stores_true_ends(script, env_id, env_id == "DiscreteTerminates-v0", tmp_path)


@pytest.mark.parametrize(("env_id", "value"), [("BlindDiscreteTruncates-v0", 2), ("BlindDiscreteTerminates-v0", 1.5)])
@pytest.mark.parametrize("script", pair("pqn"), ids=stem)
def test_values_bootstrap_through_truncation(script, env_id, value, tmp_path):
    """With gamma = 0.5 and rewards of 1, V = 1 + gamma V, or V = 1 + gamma V 2/3 if every third step is the last."""
    seen = []
    sizes = {"num_steps": 48, "num_minibatches": 2, "total_timesteps": 48 * 4 * 25}
    args = script.Args(env_id=env_id, gamma=0.5, q_lambda=0.0, learning_rate=0.3, run_dir=str(tmp_path), **sizes)
    conftest.train(script, args, on_log=lambda learner, losses, step: seen.append(learner))
    assert seen[-1].q(torch.zeros(1, 2)).max().item() == pytest.approx(value, rel=0.05)


@each_script
def test_minibatches_have_the_same_size(script, tmp_path, capsys):
    args = script.Args(run_dir=str(tmp_path), num_envs=8, num_minibatches=30)
    line = refused(capsys, partial(script.train, args))
    assert "error: --num-minibatches 30: give a divisor of num_envs * num_steps, 1024" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", pair("pqn"), ids=stem)
def test_cartpole_is_learned(script, tmp_path):
    sizes = {"total_timesteps": 40_000, "num_envs": 4, "num_steps": 64, "exploration_fraction": 0.3}
    checks.learns_cartpole(script, tmp_path, learning_rate=2e-3, **sizes)


def train_on_cuda(name, iterations, **mode):
    """A turbo learner on CUDA after some iterations on random steps."""
    learner = make(TURBO[name], device="cuda", num_minibatches=2, **mode)
    advance_on_cuda(learner, range(iterations))
    return learner


def advance_on_cuda(learner, seeds):
    for seed in seeds:
        torch.manual_seed(seed)
        steps = random_steps(learner, seed)
        roll_out(learner, steps)
        update(learner, steps, 1e-3 * (1 - seed / 20))


each_name = pytest.mark.parametrize("name", NAMES)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", checks.OTHER_MODES)
@pytest.mark.parametrize("iterations", [1, 3, 8])
@each_name
def test_modes_agree(name, iterations, mode):
    """Before, at and after capture, a mode has made exactly the updates that eager code makes."""
    wanted, got = train_on_cuda(name, iterations), train_on_cuda(name, iterations, **MODES[mode])
    assert got.optimizers["q"].steps.item() == 4 * iterations
    conftest.assert_close_in_norm(learnt(got), learnt(wanted), 1e-5 if iterations == 1 else 1e-3, least=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@each_name
def test_replays_shuffle_afresh(name, mode):
    """From the same weights and rollout, past capture, updates differ in the order of the minibatches alone."""
    learner = train_on_cuda(name, 5, **MODES[mode])
    steps = random_steps(learner)

    def roll_out_and_update():
        roll_out(learner, steps)
        update(learner, steps, 1e-3)
        return learner.losses()["td_loss"]

    assert len(set(checks.repeated(learner, roll_out_and_update, 5))) == 5


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_the_host_waits_for_actions_alone(mode, name="pqn_atari"):
    """In the steady loop, by the event of `act`."""
    learner = train_on_cuda(name, 5, **MODES[mode])
    with checks.no_waits():
        advance_on_cuda(learner, range(2))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@each_name
def test_a_checkpoint_continues_in_captured_graphs(name, mode):
    captured, new = train_on_cuda(name, 5, **MODES[mode]), train_on_cuda(name, 0)
    checks.goes_on_when_captured(captured, new, partial(advance_on_cuda, seeds=[7]))


check_host_network = test_the_network_on_the_host_is_that_of_torch
check_loss = test_the_loss_is_the_mean_squared_td_error
check_radam = partial(test_radam_is_torchs, 1e9, False)
check_acting = test_a_share_of_the_actions_is_random
TERMINATED = ' * (1 - rollout["terminated"])'
NO_END = (TERMINATED, "", check_targets)
GO_ON = (' * (1 - rollout["ended"][t])', "", check_targets)
CUT = 'q_lambda * (1 - rollout["ended"]'
GO_ON_CUT = (CUT, CUT.replace("ended", "terminated"), check_targets)
SWAPPED = (".lerp(target, weight)", ".lerp(target, 1 - weight)", check_targets)
CLIPPED = ("self.args.max_grad_norm or", "1e9 or")
ALL_ROWS = ('.square(), rows["valid"])', ".square(), torch.ones_like(q))", check_loss)
EPSILON = ("self.v.sqrt() + self.eps", "(self.v + self.eps).sqrt()", check_radam)
RECTIFIED = ("(rectification.clamp(min=0) * correction2)", "correction2", check_radam)
SAME_STEP = ('rollout["values"][1:]', 'rollout["values"][:-1]', check_targets)
NOT_KEPT = ('self.host_columns["actions"].numpy()[t] = actions', "pass", check_acting)
EXCHANGED = ("self.weight.permute(1, 2, 0)", "self.weight.permute(2, 1, 0)")
BUGS = [  # algorithm, what is wrong, what is replaced by what, who notices
    (PLAIN["pqn"], "no end of episodes", *NO_END),
    (PLAIN["pqn"], "truncation is termination", TERMINATED, ' * (1 - rollout["ended"])', check_targets),
    (PLAIN["pqn"], "returns go on in the next episode", *GO_ON),
    (PLAIN["pqn"], "lambda is the weight of one step", *SWAPPED),
    (PLAIN["pqn"], "sign of the loss", "td_loss.backward()", "(-td_loss).backward()", test_updates_descend),
    (PLAIN["pqn"], "greedy where actions explore", "< exploration", ">= exploration", check_acting),
    (PLAIN["pqn"], "gradients are not clipped", *CLIPPED, test_gradients_are_clipped),
    (TURBO["pqn"], "no end of episodes", " * (1 - terminated)", "", check_targets),
    (TURBO["pqn"], "returns go on after the rollout", "self.weights[-1] = 0", "pass", check_targets),
    (TURBO["pqn"], "returns go on in the next episode", "self.weights * (1 - ended)", "self.weights", check_targets),
    (TURBO["pqn"], "a sum instead of the mean", "targets).square().mean()", "targets).square().sum()", check_loss),
    (TURBO["pqn"], "sign of the loss", "gradient(td_loss)", "gradient(-td_loss)", test_updates_descend),
    (TURBO["pqn"], "the paper's threshold", "length > 5 ", "length > 4 ", check_radam),
    (TURBO["pqn"], "epsilon inside of the root", *EPSILON),
    (TURBO["pqn"], "no rectification", *RECTIFIED),
    (TURBO["pqn"], "normalization without bias", "* scale + shift", "* scale", check_host_network),
    (TURBO["pqn"], "mean deviation instead of the variance", "np.square(x)", "np.abs(x)", check_host_network),
    (TURBO["pqn_atari"], "steps that start an episode are learned", *ALL_ROWS),
    (TURBO["pqn_atari"], "values of the same step", *SAME_STEP),
    (TURBO["pqn_atari"], "actions that are not kept", *NOT_KEPT),
    (TURBO["pqn_atari"], "no end of episodes", *NO_END),
    (TURBO["pqn_atari"], "returns go on after a truncation", *GO_ON_CUT),
    (TURBO["pqn_atari"], "returns go on after the rollout", "        weights[-1] = 0\n", "", check_targets),
    (TURBO["pqn_atari"], "sign of the loss", "gradient(td_loss)", "gradient(-td_loss)", test_updates_descend),
    (TURBO["pqn_atari"], "rows and columns are exchanged", *EXCHANGED, test_images_are_normalized_as_torch_does),
    (PLAIN["pqn_atari"], "steps that start an episode are learned", *ALL_ROWS),
    (PLAIN["pqn_atari"], "no end of episodes", *NO_END),
    (PLAIN["pqn_atari"], "returns go on in the next episode", *GO_ON),
    (PLAIN["pqn_atari"], "returns go on after a truncation", *GO_ON_CUT),
]


test_a_planted_bug_is_noticed = noticing(BUGS)
