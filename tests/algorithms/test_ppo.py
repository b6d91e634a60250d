"""The PPO learners: advantages, normalization, plain against turbo, episode ends, capture, learning."""

import itertools
from functools import partial

import checks
import conftest
import numpy as np
import pytest
import torch
from conftest import MODES, assert_learners_agree, copy_networks, learnt, make_learner, one_graph_each, scalars, train
from test_cli import refused
from torch import nn

PLAIN, TURBO = conftest.PLAIN["ppo"], conftest.TURBO["ppo"]
script = checks.plain_and_turbo("ppo")


def roll_out(learners, seed=0):
    """Give all learners the same rollout: random steps, with episode ends, and the actions of the first one."""
    generator, first = np.random.default_rng(seed), learners[0]
    n, obs_dim = first.args.num_envs, len(first.normalizer.mean) - 1
    obs = [generator.standard_normal((n, obs_dim)).astype(np.float32)] * len(learners)
    for learner in learners:
        if hasattr(learner, "start_rollout"):
            learner.start_rollout()
    for t in range(first.args.num_steps):
        act_on, next_obs, rewards = (generator.standard_normal((n, *width)) for width in ((obs_dim,), (obs_dim,), ()))
        terminated, truncated = generator.random((2, n)) < 0.1
        ended = terminated | truncated
        next_obs = np.where(ended[:, None], next_obs, act_on) if ended.any() else act_on
        for i, learner in enumerate(learners):
            learner.act(t, obs[i])
            if i:
                actions = getattr(learner, "host_columns", vars(learner))["actions"]
                actions[t] = first.rollout["actions"][t].reshape(actions[t].shape)
            obs[i] = learner.record(t, next_obs, rewards, terminated, ended, act_on)
    return obs[0]


def fix_order(monkeypatch):
    """Give a turbo learner's epochs the orders of the plain learner's, which has to be updated first."""
    orders = []
    rand, randperm = torch.rand, torch.randperm

    def draw(*shape, **kwargs):
        numbers = rand(*shape, **kwargs)
        if not orders:
            return numbers
        rows = [orders.pop(0).argsort().float() for _ in range(numbers.numel() // len(orders[0]))]
        return torch.stack(rows).view_as(numbers)  # whose argsort is the order

    def permute(n, **kwargs):
        order = randperm(n, **kwargs)
        if type(order) is torch.Tensor:  # and not the compiler's own, a FakeTensor
            orders.append(order)
        return order

    monkeypatch.setattr(torch, "randperm", permute)
    monkeypatch.setattr(torch, "rand", draw)


def textbook_advantages(rewards, values, next_values, terminated, ended, gamma, gae_lambda):
    """Equation 16 of arXiv:1506.02438 as it is written: for every step a sum over the rest of its episode, float64."""
    steps, envs = rewards.shape
    advantages = np.zeros((steps, envs))
    for start, env in itertools.product(range(steps), range(envs)):
        weight = 1.0
        for t in range(start, steps):
            target = rewards[t, env] + gamma * next_values[t, env] * (not terminated[t, env])
            advantages[start, env] += weight * (target - values[t, env])
            weight *= gamma * gae_lambda
            if ended[t, env]:
                break
    return advantages


def random_steps(steps, envs, ends, seed=0):
    """rewards, values, next_values, terminated, ended of random steps, a share `ends` of them terminated."""
    generator = np.random.default_rng(seed)
    terminated, truncated = generator.random((2, steps, envs)) < ends
    return [*generator.standard_normal((3, steps, envs)), terminated, terminated | truncated]


def doubled_advantages(columns, gamma, gae_lambda, dtype):
    """What turbo's `gae` makes of random steps."""
    rewards, values, next_values, terminated, ended = (torch.as_tensor(column, dtype=dtype) for column in columns)
    return TURBO.gae(rewards + gamma * (1 - terminated) * next_values - values, gamma * gae_lambda * (1 - ended))


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 8, 33, 128])
@pytest.mark.parametrize("ends", [0.0, 0.1, 0.5, 1.0])
def test_advantages_equal_the_textbooks(steps, ends):
    columns = random_steps(steps, 4, ends)
    got = doubled_advantages(columns, 0.99, 0.95, torch.float32)
    np.testing.assert_allclose(got.numpy(), textbook_advantages(*columns, 0.99, 0.95), rtol=1e-4, atol=1e-4)


def test_advantages_with_an_end_in_every_position():
    for position, terminal in itertools.product(range(9), (False, True)):
        columns = random_steps(9, 1, 0.0, seed=position)
        columns[3][position], columns[4][position] = terminal, True
        got = doubled_advantages(columns, 0.9, 0.8, torch.float64)
        np.testing.assert_allclose(got.numpy(), textbook_advantages(*columns, 0.9, 0.8), rtol=1e-12)


def test_batches_have_the_textbooks_advantages(script):
    learner = make_learner(script, num_envs=3, num_steps=20)
    roll_out([learner])
    names = ("obs", "next_obs", "rewards", "terminated", "ended")
    obs, next_obs, rewards, terminated, ended = checks.columns_of(learner, *names)
    with torch.no_grad():
        values, next_values = (learner.agent.critic(torch.from_numpy(x)).squeeze(-1).numpy() for x in (obs, next_obs))
    wanted = textbook_advantages(rewards, values, next_values, terminated, ended, 0.99, 0.95)
    batch = learner.make_batch()
    if script is TURBO:
        *_, advantages, returns = learner.batch.split(list(learner.batch_widths.values()), -1)
        batch = {"advantages": advantages, "returns": returns}
    np.testing.assert_allclose(batch["advantages"].view(20, 3).numpy(), wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(batch["returns"].view(20, 3).numpy(), wanted + values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_envs", [1, 8])
def test_normalizer_agrees_with_numpy_on_a_million_values(num_envs):
    """Offset and scale are such that a sum of squares in float32 would fail."""
    steps, dims = 1_000_000 // (4 * num_envs), 3
    generator = np.random.default_rng(0)
    obs = 1000 + generator.standard_normal((steps, num_envs, dims)) * (0.01, 1, 50)
    rewards, ended = generator.standard_normal((steps, num_envs)), generator.random((steps, num_envs)) < 0.01
    normalizer = TURBO.Normalizer(num_envs, dims, 0.9)
    returns, running = np.zeros((steps, num_envs)), np.zeros(num_envs)
    for t in range(steps):
        scaled_obs, scaled_rewards = normalizer.normalize(obs[t], rewards[t], ended[t])
        returns[t] = running = 0.9 * running + rewards[t]
        running = np.where(ended[t], 0, running)
    rows = np.concatenate((obs.reshape(-1, dims), returns.reshape(-1, 1)), 1)
    np.testing.assert_allclose(normalizer.mean, rows.mean(0), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(normalizer.std, np.sqrt(rows.var(0) + 1e-8), rtol=1e-9)
    scaled = normalizer.scale_obs(obs[:, 0])
    assert scaled.dtype == np.float32 and np.abs(scaled.mean(0)).max() < 0.02 and np.abs(scaled.std(0) - 1).max() < 0.02
    assert np.array_equal(scaled_obs, normalizer.scale_obs(obs[-1])) and scaled_rewards.dtype == np.float32
    np.testing.assert_allclose(scaled_rewards, rewards[-1] / rows[:, -1].std(), rtol=1e-4)
    assert normalizer.scale_obs(obs[0] + 1e6).max() == 10


OTHER_LOSSES = {"clip_vloss": False, "norm_adv": False, "ent_coef": 0.01, "bootstrap_truncation": False}


@checks.settings({"other losses": OTHER_LOSSES})
def test_turbo_equals_plain(kwargs, mode, monkeypatch):
    """From the same weights and rollouts, all agrees after one iteration (5 minibatches) and after ten (50)."""
    kwargs = {"num_envs": 2, "num_steps": 50, "num_minibatches": 5, "update_epochs": 1, "env_id": "Unequal-v0"} | kwargs
    plain, turbo = make_learner(PLAIN, **kwargs), make_learner(TURBO, **kwargs, **MODES[mode])
    copy_networks(plain, turbo)
    fix_order(monkeypatch)
    with one_graph_each(int(mode == "compile")):
        for iteration in range(10):
            roll_out([plain, turbo], seed=iteration)
            for learner in (plain, turbo):
                learner.update(3e-4 * (1 - iteration / 10))
            if iteration in (0, 9):
                assert_learners_agree(plain, turbo, tolerance=1e-5 if iteration == 0 else 1e-4)


@pytest.mark.parametrize(("bootstrap", "terminal"), [(True, 0.0), (False, 1.0)])
@pytest.mark.parametrize("env_id", ["Truncates-v0", "Terminates-v0"])
def test_steps_keep_the_true_last_observation_and_tell_terminal_from_truncated(
    script, env_id, bootstrap, terminal, tmp_path, monkeypatch
):
    do_not_normalize(script, monkeypatch)
    terminal = 1.0 if env_id == "Terminates-v0" else terminal
    checks.stores_true_ends(script, env_id, terminal, tmp_path, bootstrap_truncation=bootstrap)


def do_not_normalize(script, monkeypatch):
    monkeypatch.setattr(script.Normalizer, "normalize", lambda self, obs, rewards=0.0, ended=False: (obs, rewards))
    monkeypatch.setattr(script.Normalizer, "scale_obs", lambda self, obs: obs)


@pytest.mark.parametrize(("bootstrap", "value"), [(True, 10.0), (False, 2.5)])
def test_values_bootstrap_through_truncation_unless_told_not_to(script, bootstrap, value, tmp_path, monkeypatch):
    """With gamma = 0.9 and rewards of 1, V = 1 + gamma V, or V = 1 + gamma V 2/3 if every third step is the last."""
    do_not_normalize(script, monkeypatch)
    seen = []
    sizes = {"total_timesteps": 4000, "num_steps": 50, "num_minibatches": 2}
    sizes |= {"learning_rate": 3e-3, "gamma": 0.9, "gae_lambda": 0}
    args = script.Args(env_id="BlindTruncates-v0", run_dir=str(tmp_path), bootstrap_truncation=bootstrap, **sizes)
    args.clip_vloss, args.max_grad_norm = False, 10.0
    train(script, args, on_log=lambda learner, losses, step: seen.append(learner))
    assert seen[-1].agent.critic(torch.zeros(1, 2)).item() == pytest.approx(value, rel=0.1)


def test_actions_respect_each_dimensions_bounds(script):
    learner = make_learner(script, env_id="Unequal-v0", num_envs=100)
    if script is TURBO:
        learner.start_rollout()
    actions = np.concatenate([learner.act(t, np.zeros((100, 2), np.float32)) for t in range(16)])
    low, high = np.array([-1, -10, 0]), np.array([3, -8, 0.5])
    assert (actions >= low).all() and (actions <= high).all()
    assert np.allclose(actions.min(0), (-1, -8, 0), atol=1e-3) and actions[:, 0].max() > 2


def check_acting(learner, obs):
    """The host's mean actions are the agent's, and what it adds is noise of the agent's standard deviation."""
    learner.start_rollout()
    learner.act(0, obs)
    mean = learner.agent.actor(torch.from_numpy(obs).to(learner.device)).detach().cpu().numpy()
    np.testing.assert_allclose(learner.host_columns["actions"][0] - learner.noise[0], mean, rtol=1e-4, atol=1e-5)
    ratio = learner.noise.std((0, 1)) / learner.agent.log_std.exp().detach().cpu().numpy()
    assert ratio == pytest.approx(np.ones_like(ratio), abs=0.5)


class Scale(nn.Module):
    """A layer that NumPy does not know."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return (self.factor * x).clamp(-1, 1)


class Doubled(nn.Linear):
    """Not what NumPy makes of a linear layer, though it is one."""

    def forward(self, x):
        return 2 * super().forward(x)


class Reversed(nn.Sequential):
    """Not what NumPy makes of layers one after the other, though it is a Sequential."""

    def forward(self, x):
        return super().forward(x.flip(-1))


ACTORS = {
    "as it is": None,
    "unknown layers": lambda d, n: nn.Sequential(nn.Linear(d, 20), nn.SiLU(), Doubled(20, n), Scale()),
    "no bias": lambda d, n: nn.Sequential(nn.Linear(d, 20), nn.ReLU(), nn.Linear(20, n, False)),
    "nested": lambda d, n: nn.Sequential(nn.Sequential(nn.Linear(d, n), nn.Tanh()), Scale()),
    "own Sequential": lambda d, n: Reversed(nn.Linear(d, n), nn.Tanh()),
    "no Sequential": nn.Linear,
    "parametrized": lambda d, n: nn.utils.parametrizations.weight_norm(nn.Linear(d, n)),
}


@pytest.mark.parametrize("actor", ACTORS)
@pytest.mark.parametrize("shared", [False, True])
def test_the_host_follows_an_edit_of_the_agent(actor, shared, monkeypatch):
    """Layers that NumPy does not know are called in torch, and what actor and critic share is one."""

    class Edited(TURBO.Agent):
        def __init__(self, obs_dim, action_space):
            super().__init__(obs_dim, action_space)
            if ACTORS[actor]:
                self.actor = ACTORS[actor](obs_dim, action_space.shape[0])
            if shared:
                encoder = nn.Sequential(nn.Linear(obs_dim, obs_dim), nn.Tanh())
                self.actor = nn.Sequential(encoder, self.actor)
                self.critic = nn.Sequential(encoder, self.critic)

    monkeypatch.setattr(TURBO, "Agent", Edited)
    learner = make_learner(TURBO)
    for iteration in range(2):
        check_acting(learner, np.random.default_rng(iteration).standard_normal((2, 3)).astype(np.float32))
        roll_out([learner], seed=iteration)
        learner.update(1e-2)


def test_each_rollout_has_fresh_noise():
    learner = make_learner(TURBO)
    noises = []
    for _ in range(3):
        roll_out([learner])
        noises.append(learner.noise.copy())
    assert len(np.unique(noises)) == 3 * noises[0].size


def test_rewards_are_scaled_by_returns_that_end_with_their_episode():
    """Rewards of 1 in episodes of one step have returns of 1 only: variance 0, so that they are clipped."""
    normalizer = TURBO.Normalizer(4, 1, 0.99)
    for _ in range(1000):
        _, rewards = normalizer.normalize(np.zeros((4, 1)), np.ones(4), np.ones(4, bool))
    assert rewards == pytest.approx(10)
    assert normalizer.mean[-1] == pytest.approx(1)


@pytest.mark.parametrize(("target_kl", "epochs"), [(None, 4), (1e9, 4), (1e-9, 1)])
def test_target_kl_ends_the_epochs(script, target_kl, epochs):
    learner = make_learner(script, target_kl=target_kl, update_epochs=4)
    minibatches = checks.watch_minibatches(learner)
    roll_out([learner])
    learner.update(1e-3)
    assert len(minibatches) == epochs * 4


def test_every_minibatch_is_drawn_once_an_epoch(script):
    learner = make_learner(script, update_epochs=3, num_minibatches=4)
    if script is PLAIN:
        drawn = checks.watch_minibatches(learner, lambda batch: batch["actions"].clone())
    else:
        actions = script.columns(learner.minibatch, learner.batch_widths)["actions"]
        drawn = checks.watch_minibatches(learner, actions.clone)
    roll_out([learner])
    learner.update(1e-3)
    checks.draws_all_rows(drawn, 32)


def test_a_restored_learner_continues_bit_by_bit(script):
    def advance(learner, part):
        learner.normalizer.rows[:] = 0  # a resumed run starts with new episodes
        for i in range(3):
            roll_out([learner], seed=10 * part + i)
            learner.update(1e-3)

    checks.goes_on_when_restored(partial(make_learner, script), advance)


def test_the_policy_normalizes_and_clips_as_the_learner_does(script):
    """Its statistics are the learner's, and stay, whatever the learner does."""
    learner = make_learner(script, env_id="Unequal-v0", num_envs=3)
    roll_out([learner])
    learner.update(1e-2)
    policy, _ = learner.policy()
    obs = np.random.default_rng(0).standard_normal((50, 2)).astype(np.float32) * 20
    scaled = torch.from_numpy(learner.normalizer.scale_obs(obs))
    mean = learner.agent.actor(scaled)
    actions = policy(torch.from_numpy(obs)).detach()
    torch.testing.assert_close(actions, mean.clamp(torch.tensor(learner.low), torch.tensor(learner.high)).detach())
    roll_out([learner], seed=1)
    learner.update(1e-2)
    assert torch.equal(policy(torch.from_numpy(obs)), actions)
    assert (actions[:, 1] == -8).all() and actions[:, 0].std() > 0


def test_an_explained_variance_of_nan_ends_no_run(script, tmp_path):
    """A single return has no variance to be explained."""
    sizes = {"env_id": "Pendulum-v1", "total_timesteps": 2, "num_steps": 1, "num_minibatches": 1, "norm_adv": False}
    script.train(script.Args(run_dir=str(tmp_path), **sizes))
    assert np.isnan(scalars(next(tmp_path.iterdir()), "losses/explained_variance")).all()


@pytest.mark.parametrize("num_minibatches", [30, 2048])
def test_minibatches_have_the_same_size_and_more_than_one_row(script, num_minibatches, tmp_path, capsys):
    args = script.Args(env_id="Pendulum-v1", run_dir=str(tmp_path), num_minibatches=num_minibatches)
    line = refused(capsys, partial(script.train, args))
    assert f"error: --num-minibatches {num_minibatches}: give a proper divisor of" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", [pytest.param(PLAIN, marks=pytest.mark.finding), TURBO], ids=["plain", "turbo"])
def test_ppo_balances_the_inverted_pendulum(script, tmp_path):
    """A random policy holds it for about 6 steps, a perfect one for 1000. A wrong sign in a loss fails here."""
    sizes = {"total_timesteps": 60_000, "num_envs": 4, "num_steps": 256, "learning_rate": 1e-3, "num_minibatches": 8}
    script.train(script.Args(env_id="InvertedPendulum-v5", run_dir=str(tmp_path), **sizes))
    returns = scalars(next(tmp_path.iterdir()), "charts/episodic_return")
    assert np.mean(returns[:20]) < 40
    assert np.mean(returns[-20:]) > 400


def train_on_cuda(iterations, target_kl=None, **mode):
    """A learner on CUDA after some iterations on random steps, minibatches in the rollout's order."""
    learner = make_learner(TURBO, device="cuda", num_minibatches=2, update_epochs=2, target_kl=target_kl, **mode)
    for i in range(iterations):
        torch.manual_seed(i)
        roll_out([learner], seed=i)
        learner.update(1e-3 * (1 - i / 20))
    return learner


def vector(module):
    """All parameters of a module, one after the other."""
    return nn.utils.parameters_to_vector(module.parameters()).detach()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", checks.OTHER_MODES)
@pytest.mark.parametrize("target_kl", [None, 1e9])
@pytest.mark.parametrize("iterations", [1, 3, 10])
def test_modes_agree(mode, target_kl, iterations, monkeypatch):
    """Before, at and after capture, a mode has made exactly the updates that eager code makes."""
    order = torch.arange(32.0, device="cuda")
    monkeypatch.setattr(torch, "rand", lambda shape, device: order.expand(shape))
    wanted, got = train_on_cuda(iterations, target_kl), train_on_cuda(iterations, target_kl, **MODES[mode])
    assert got.optimizers["agent"].corrections[0].item() == pytest.approx(1 - 0.9 ** (4 * iterations + 1))
    conftest.assert_close_in_norm(learnt(got), learnt(wanted), 1e-5 if iterations == 1 else 1e-3, least=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_replays_shuffle_afresh(mode):
    """From the same parameters and rollout, past capture, updates differ by the order of the minibatches alone."""
    learner = train_on_cuda(5, **MODES[mode])

    def update():
        learner.update(1e-3)
        return vector(learner.agent).sum().item()

    assert len(set(checks.repeated(learner, update, 5))) == 5


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_the_host_acts_with_the_newest_parameters(mode):
    learner = train_on_cuda(5, **MODES[mode])
    check_acting(learner, np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32))
    assert torch.equal(vector(learner.host_agent), vector(learner.agent).cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_continues_in_captured_graphs(mode):
    def advance(learner):
        learner.normalizer.rows[:] = 0
        roll_out([learner], seed=7)
        learner.update(1e-3)

    checks.goes_on_when_captured(train_on_cuda(5, **MODES[mode]), train_on_cuda(0), advance)
