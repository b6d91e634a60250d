"""The PPO learners: advantages, normalization, plain against turbo, episode ends, capture, learning."""

import itertools
import json

import conftest
import numpy as np
import pytest
import torch
from conftest import (
    MODES,
    assert_close_in_norm,
    assert_learners_agree,
    assert_same_state,
    clones,
    copy_networks,
    learnt,
    leaves,
    make_learner,
    networks,
    saved,
    scalars,
    train,
)

PLAIN, TURBO = conftest.PLAIN["ppo"], conftest.TURBO["ppo"]


@pytest.fixture(params=[PLAIN, TURBO], ids=["plain", "turbo"])
def script(request):
    return request.param


def roll_out(learners, seed=0):
    """Give all learners the same rollout: random steps, with episode ends, and the actions of the first one."""
    generator, first = np.random.default_rng(seed), learners[0]
    n, obs_dim = first.args.num_envs, len(first.normalizer.mean) - 1
    obs = [generator.standard_normal((n, obs_dim)).astype(np.float32)] * len(learners)
    for t in range(first.args.num_steps):
        next_obs, last_obs, rewards = (generator.standard_normal((n, *width)) for width in ((obs_dim,), (obs_dim,), ()))
        terminated, truncated = generator.random((2, n)) < 0.1
        last_obs = np.where((terminated | truncated)[:, None], last_obs, next_obs)
        for i, learner in enumerate(learners):
            learner.act(t, obs[i])
            if i:
                learner.steps["actions"][t] = first.rollout["actions"][t].numpy()
            obs[i] = learner.record(t, next_obs, last_obs, rewards, terminated, terminated | truncated)
    return obs[0]


def fix_order(monkeypatch):
    """Give a turbo learner's epochs the orders of the plain learner's, which has to be updated first."""
    orders = []
    rand, randperm = torch.rand, torch.randperm

    def draw(*args, **kwargs):
        return orders.pop(0).argsort().float() if orders else rand(*args, **kwargs)  # whose argsort is the order

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


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 8, 33, 128])
@pytest.mark.parametrize("ends", [0.0, 0.1, 0.5, 1.0])
def test_advantages_equal_the_textbooks(steps, ends):
    columns = random_steps(steps, 4, ends)
    got = TURBO.gae(*(torch.as_tensor(c, dtype=torch.float32) for c in columns), 0.99, 0.95)
    np.testing.assert_allclose(got.numpy(), textbook_advantages(*columns, 0.99, 0.95), rtol=1e-4, atol=1e-4)


def test_advantages_with_an_end_in_every_position():
    for position, terminal in itertools.product(range(9), (False, True)):
        columns = random_steps(9, 1, 0.0, seed=position)
        columns[3][position], columns[4][position] = terminal, True
        got = TURBO.gae(*(torch.as_tensor(c, dtype=torch.float64) for c in columns), 0.9, 0.8)
        np.testing.assert_allclose(got.numpy(), textbook_advantages(*columns, 0.9, 0.8), rtol=1e-12)


def test_the_plain_scripts_advantages_equal_the_textbooks():
    learner = make_learner(PLAIN, num_envs=3, num_steps=20)
    rewards, values, _, terminated, ended = random_steps(20, 3, 0.2)
    columns = {"rewards": rewards, "values": values, "terminated": terminated, "ended": ended}
    for name, column in columns.items():
        learner.rollout[name].copy_(torch.as_tensor(column))
    learner.rollout["next_obs"].normal_()
    _, _, next_values = learner.agent(learner.rollout["next_obs"])
    wanted = textbook_advantages(rewards, values, next_values.detach().numpy(), terminated, ended, 0.99, 0.95)
    batch = learner.make_batch()
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


@pytest.mark.parametrize("mode", ["eager", "compile"])
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"clip_vloss": False, "norm_adv": False, "ent_coef": 0.01, "bootstrap_truncation": False}],
    ids=["default", "other losses"],
)
def test_turbo_equals_plain(mode, kwargs, monkeypatch):
    """From the same weights and rollouts, all agrees after one iteration (5 minibatches) and after ten (50)."""
    kwargs = {"num_envs": 2, "num_steps": 50, "num_minibatches": 5, "update_epochs": 1, "env_id": "Unequal-v0"} | kwargs
    plain, turbo = make_learner(PLAIN, **kwargs), make_learner(TURBO, **kwargs, **MODES[mode])
    copy_networks(plain, turbo)
    fix_order(monkeypatch)
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
    seen = []
    sizes = {"num_envs": 2, "total_timesteps": 200, "num_steps": 50, "num_minibatches": 2, "update_epochs": 1}
    args = script.Args(env_id=env_id, run_dir=str(tmp_path), bootstrap_truncation=bootstrap, **sizes)
    train(script, args, on_log=lambda learner, losses, step: seen.append(columns_of(learner)))
    obs, next_obs, terminated, ended = seen[-1]
    assert len(seen) == 2
    assert (next_obs[..., 0] == obs[..., 0] + 1).all() and (next_obs[..., 1] == obs[..., 1]).all()
    last = next_obs[..., 0] == 3
    assert (ended == last).all() and (terminated == last * (1.0 if env_id == "Terminates-v0" else terminal)).all()
    assert (obs[1:, :, 0] == np.where(last[:-1], 0, next_obs[:-1, :, 0])).all()


def do_not_normalize(script, monkeypatch):
    monkeypatch.setattr(script.Normalizer, "normalize", lambda self, obs, rewards=0.0, ended=False: (obs, rewards))
    monkeypatch.setattr(script.Normalizer, "scale_obs", lambda self, obs: obs)


def columns_of(learner):
    """obs, next_obs, terminated and ended of the stored rollout, numpy, each (num_steps, num_envs, ...)."""
    steps = learner.steps if hasattr(learner, "steps") else learner.rollout
    return [np.asarray(steps[name]).copy() for name in ("obs", "next_obs", "terminated", "ended")]


@pytest.mark.parametrize(("bootstrap", "value"), [(True, 10.0), (False, 2.5)])
def test_values_bootstrap_through_truncation_unless_told_not_to(script, bootstrap, value, tmp_path, monkeypatch):
    """With gamma = 0.9 and rewards of 1, V = 1 + gamma V, or V = 1 + gamma V 2/3 if every third step is the last."""
    do_not_normalize(script, monkeypatch)
    seen = []
    sizes = {
        "total_timesteps": 4000,
        "num_steps": 50,
        "num_minibatches": 2,
        "learning_rate": 3e-3,
        "gamma": 0.9,
        "gae_lambda": 0,
    }
    args = script.Args(env_id="BlindTruncates-v0", run_dir=str(tmp_path), bootstrap_truncation=bootstrap, **sizes)
    args.clip_vloss, args.max_grad_norm = False, 10.0
    train(script, args, on_log=lambda learner, losses, step: seen.append(learner))
    _, _, values = seen[-1].agent(torch.zeros(1, 2))
    assert values.item() == pytest.approx(value, rel=0.1)


def test_actions_respect_each_dimensions_bounds(script):
    learner = make_learner(script, env_id="Unequal-v0", num_envs=100)
    actions = np.concatenate([learner.act(t, np.zeros((100, 2), np.float32)) for t in range(16)])
    low, high = np.array([-1, -10, 0]), np.array([3, -8, 0.5])
    assert (actions >= low).all() and (actions <= high).all()
    assert np.allclose(actions.min(0), (-1, -8, 0), atol=1e-3) and actions[:, 0].max() > 2


def test_the_host_acts_as_the_device_would(capsys):
    learner = make_learner(TURBO, num_envs=5)
    obs = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    for iteration in range(2):
        mean, log_std, _ = learner.agent(torch.from_numpy(obs))
        np.testing.assert_allclose(learner.mean_actions(obs), mean.numpy(), rtol=1e-4, atol=1e-6)
        learner.act(0, obs)
        noise = learner.steps["actions"][0] - mean.numpy()
        np.testing.assert_allclose(noise, learner.noise[0], rtol=1e-3, atol=1e-5)
        ratio = learner.noise.std((0, 1)) / log_std.exp().numpy()
        assert ratio == pytest.approx(1, abs=0.3)
        roll_out([learner], seed=iteration)
        learner.update(1e-2)
    assert capsys.readouterr().err == ""


class Shared(TURBO.Agent):
    """Actor and critic read the features of one encoder."""

    def __init__(self, obs_dim, act_dim):
        super().__init__(obs_dim, act_dim)
        self.encoder = torch.nn.Linear(obs_dim, obs_dim)

    def forward(self, obs):
        return super().forward(self.encoder(obs))


class ClampedMean(TURBO.Agent):
    def forward(self, obs):
        mean, log_std, values = super().forward(obs)
        return mean.clamp(-1, 1), log_std, values


class OtherLayers(TURBO.Agent):
    """Known layers only, of another number and other sizes."""

    def __init__(self, obs_dim, act_dim):
        super().__init__(obs_dim, act_dim)
        self.actor = torch.nn.Sequential(
            torch.nn.Linear(obs_dim, 20), torch.nn.SiLU(), torch.nn.Linear(20, act_dim, bias=False)
        )


class LimitedNoise(TURBO.Agent):
    def forward(self, obs):
        mean, log_std, values = super().forward(obs)
        return mean, log_std.clamp(max=-5), values


@pytest.mark.parametrize(
    ("agent", "by_numpy"), [(Shared, False), (ClampedMean, False), (OtherLayers, True), (LimitedNoise, True)]
)
def test_acting_follows_an_edit_of_the_agent(agent, by_numpy, monkeypatch, capsys):
    """NumPy acts only where it computes what the agent's forward does; else torch acts, and one line says so."""
    monkeypatch.setattr(TURBO, "Agent", agent)
    learner = make_learner(TURBO)
    noted = capsys.readouterr().err.splitlines()
    assert len(noted) == (0 if by_numpy else 1) and all(line.startswith(f"note: {agent.__name__}") for line in noted)
    for iteration in range(2):
        roll_out([learner], seed=iteration)
        obs = np.random.default_rng(iteration).standard_normal((2, 3)).astype(np.float32)
        mean, log_std, _ = learner.agent(torch.from_numpy(obs))
        learner.act(0, obs)
        np.testing.assert_allclose(learner.steps["actions"][0] - learner.noise[0], mean.numpy(), rtol=1e-4, atol=1e-5)
        assert learner.noise.std() == pytest.approx(log_std.exp().item(), rel=0.5)
        learner.update(1e-2)


def test_a_standard_deviation_that_depends_on_observations_is_refused(monkeypatch):
    class Dependent(TURBO.Agent):
        def forward(self, obs):
            mean, log_std, values = super().forward(obs)
            return mean, log_std + obs[:, :1], values

    monkeypatch.setattr(TURBO, "Agent", Dependent)
    with pytest.raises(ValueError, match="for all observations"):
        make_learner(TURBO)


class Dropout(TURBO.Agent):
    def __init__(self, obs_dim, act_dim):
        super().__init__(obs_dim, act_dim)
        self.actor.insert(2, torch.nn.Dropout(0.1))


class RunningMean(TURBO.Agent):
    def __init__(self, obs_dim, act_dim):
        super().__init__(obs_dim, act_dim)
        self.register_buffer("mean_obs", torch.zeros(obs_dim))

    def forward(self, obs):
        self.mean_obs.lerp_(obs.mean(0), 0.01)
        return super().forward(obs - self.mean_obs)


@pytest.mark.parametrize("agent", [Dropout, RunningMean])
def test_an_actor_that_answers_differently_each_time_is_refused(agent, monkeypatch):
    """It would act with one mask or mean, and take the log-probabilities of its actions with another."""
    monkeypatch.setattr(TURBO, "Agent", agent)
    with pytest.raises(ValueError, match="no dropout, no running statistics"):
        make_learner(TURBO)


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
    count = itertools.count()
    update_minibatch = learner.update_minibatch
    learner.update_minibatch = lambda rows: (next(count), update_minibatch(rows))
    roll_out([learner])
    learner.update(1e-3)
    assert next(count) == epochs * 4


def test_the_learning_rate_is_lowered_linearly(script, tmp_path):
    rates = []
    sizes = {"total_timesteps": 200, "num_steps": 50, "num_minibatches": 2, "learning_rate": 1e-3}
    for anneal in (True, False):
        args = script.Args(env_id="Pendulum-v1", run_dir=str(tmp_path), anneal_lr=anneal, **sizes)
        train(script, args, on_log=lambda learner, losses, step: rates.append(rate_of(learner)))
    assert rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4] + 4 * [1e-3])


def rate_of(learner):
    optimizer = learner.optimizers["agent"]
    return optimizer.lr.item() if hasattr(optimizer, "lr") else optimizer.param_groups[0]["lr"]


def test_every_minibatch_is_drawn_once_an_epoch(script):
    learner = make_learner(script, update_epochs=3, num_minibatches=4)
    rows = []

    def columns(batch):
        return TURBO.split_columns(batch, learner.batch_shapes)

    if script is PLAIN:
        learner.update_minibatch = lambda batch: rows.append(batch["actions"].clone())
    else:
        learner.update_minibatch = lambda batch: rows.append(columns(batch)["actions"].clone())
    roll_out([learner])
    learner.update(1e-3)
    epochs = [torch.cat(rows[i : i + 4]) for i in (0, 4, 8)]
    assert {len(minibatch) for minibatch in rows} == {8}
    assert all(torch.equal(epoch.sort(0).values, epochs[0].sort(0).values) for epoch in epochs)
    assert len(epochs[0].unique()) == 32 and not torch.equal(epochs[0], epochs[1])


def test_a_restored_learner_continues_bit_by_bit(script):
    def advance(learner, seed):
        for i in range(3):
            roll_out([learner], seed=10 * seed + i)
            learner.update(1e-3)

    learner = make_learner(script)
    advance(learner, seed=0)
    state = saved(learner)
    learner.normalizer.rows[:] = 0  # a resumed run starts with new episodes
    advance(learner, seed=1)
    restored = make_learner(script, seed=2)
    restored.load_state_dict(state)
    advance(restored, seed=1)
    assert_same_state(restored.state_dict(), learner.state_dict())


def test_warm_up_is_of_this_process():
    """A resumed run compiles and captures anew, however many updates the first one has made."""
    learner = make_learner(TURBO)
    assert learner.warmup_updates == 1
    for i in range(2):
        roll_out([learner], seed=i)
        learner.update(1e-3)
    restored = make_learner(TURBO)
    restored.load_state_dict(learner.state_dict())
    assert restored.updates == 2 and restored.warmup_updates == 3


def test_the_compiled_function_has_one_graph_and_does_not_recompile():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    learner = make_learner(TURBO, compile=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for i in range(3):
            roll_out([learner], seed=i)
            learner.update(1e-3 / (i + 1))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_the_policy_normalizes_and_clips_as_the_learner_does(script):
    """Its statistics are the learner's, and stay, whatever the learner does."""
    learner = make_learner(script, env_id="Unequal-v0", num_envs=3)
    roll_out([learner])
    learner.update(1e-2)
    policy = learner.policy()
    obs = np.random.default_rng(0).standard_normal((50, 2)).astype(np.float32) * 20
    scaled = torch.from_numpy(learner.normalizer.scale_obs(obs))
    mean, _, _ = learner.agent(scaled)
    actions = policy(torch.from_numpy(obs)).detach()
    torch.testing.assert_close(actions, mean.clamp(torch.tensor(learner.low), torch.tensor(learner.high)).detach())
    roll_out([learner], seed=1)
    learner.update(1e-2)
    assert torch.equal(policy(torch.from_numpy(obs)), actions)
    assert (actions[:, 1] == -8).all() and actions[:, 0].std() > 0


def test_the_exported_policy_is_the_checkpoints(script, tmp_path):
    sizes = {"num_envs": 3, "num_steps": 40, "num_minibatches": 4, "total_timesteps": 480, "env_id": "Pendulum-v1"}
    script.train(script.Args(run_dir=str(tmp_path), **sizes))
    folder = next(tmp_path.iterdir())
    learner = make_learner(script, seed=2, **sizes)
    learner.load_state_dict(torch.load(folder / "checkpoint.pt", weights_only=True)["learner"])
    exported = torch.export.load(folder / "policy.pt2").module()
    for batch in (1, 7):
        obs = torch.randn(batch, 3)
        with torch.no_grad():
            torch.testing.assert_close(exported(obs), learner.policy()(obs))


def test_a_run_stops_where_a_loss_is_not_finite(script, tmp_path, monkeypatch):
    own_step = conftest.Countdown.step

    def step(self, action):
        obs, _, *rest = own_step(self, action)
        return obs, np.nan, *rest

    monkeypatch.setattr(conftest.Countdown, "step", step)
    sizes = {"env_id": "Truncates-v0", "total_timesteps": 400, "num_steps": 50, "num_minibatches": 2}
    with pytest.raises(SystemExit) as stopped:
        script.train(script.Args(run_dir=str(tmp_path), **sizes))
    assert stopped.value.code.startswith("error: step 50: policy_loss is nan; the environment returned a NaN, ")


def test_an_explained_variance_of_nan_ends_no_run(script, tmp_path):
    """A single return has no variance to be explained."""
    sizes = {"env_id": "Pendulum-v1", "total_timesteps": 2, "num_steps": 1, "num_minibatches": 1, "norm_adv": False}
    script.train(script.Args(run_dir=str(tmp_path), **sizes))
    assert np.isnan(scalars(next(tmp_path.iterdir()), "losses/explained_variance")).all()


def test_sizes(script, tmp_path, capsys):
    """Minibatches that do not divide and rollouts that no memory holds are refused, an overlong iteration is noted."""
    args = script.Args(env_id="Pendulum-v1", run_dir=str(tmp_path), total_timesteps=100)
    wrong = [("num_minibatches", 30), ("num_minibatches", 2048), ("num_steps", 10**12 - 10**12 % 32)]
    for name, value in wrong:
        with pytest.raises(SystemExit) as error:
            script.train(script.Args(**vars(args) | {name: value}))
        assert error.value.code == 2 and not list(tmp_path.iterdir())
        assert f"error: --{name.replace('_', '-')} {value}: give " in capsys.readouterr().err
    for num_steps, noted in ((128, True), (96, False)):
        script.train(script.Args(**vars(args) | {"num_steps": num_steps, "update_epochs": 1}))
        note = "note: one iteration takes 128 steps, more than --total-timesteps 100"
        assert (note in capsys.readouterr().err) == noted


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


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("target_kl", [None, 1e9])
@pytest.mark.parametrize("iterations", [1, 2, 3, 4, 10])
def test_modes_agree(mode, target_kl, iterations, monkeypatch):
    """Before, at and after capture, a mode has made exactly the updates that eager code makes."""
    order = torch.arange(32.0, device="cuda")
    rand = torch.rand
    monkeypatch.setattr(torch, "rand", lambda *args, **kwargs: order if args == (32,) else rand(*args, **kwargs))
    wanted, got = train_on_cuda(iterations, target_kl), train_on_cuda(iterations, target_kl, **MODES[mode])
    assert got.optimizers["agent"].decay[0].item() == pytest.approx(0.9 ** (4 * iterations))
    assert_close_in_norm(learnt(got), learnt(wanted), 1e-5 if iterations == 1 else 1e-3, least=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_replays_shuffle_afresh(mode):
    """From the same parameters and rollout, past capture, updates differ by the order of the minibatches alone."""
    learner = train_on_cuda(5, **MODES[mode])
    before = clones(learner.tensors())
    results = set()
    for _ in range(5):
        for name, tensor in leaves(learner.tensors()):
            tensor.copy_(before[name])
        learner.update(1e-3)
        results.add(learner.agent.weights.double().sum().item())
    assert len(results) == 5


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_the_host_acts_with_the_newest_parameters(mode):
    learner = train_on_cuda(5, **MODES[mode])
    obs = torch.randn(4, 3)
    mean, log_std, _ = learner.agent(obs.cuda())
    np.testing.assert_allclose(learner.mean_actions(obs.numpy()), mean.cpu().numpy(), rtol=1e-4, atol=1e-5)
    assert torch.equal(learner.host_agent(obs)[1], log_std.cpu())
    assert torch.equal(learner.host_agent.weights, learner.agent.weights.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_continues_in_captured_graphs(mode):
    """Loading fills the tensors that the graphs read: a restored learner goes on like a new one without graphs."""
    captured = train_on_cuda(5, **MODES[mode])
    state = captured.state_dict()
    results = []
    for learner in (captured, train_on_cuda(0)):
        learner.load_state_dict(state)
        learner.normalizer.rows[:] = 0
        roll_out([learner], seed=7)
        learner.update(1e-3)
        results.append(learner.agent.weights.clone())
    assert torch.allclose(*results, rtol=1e-4, atol=1e-5)
    assert not torch.equal(networks(captured)["agent"]["log_std"].cpu(), state["networks"]["agent"]["log_std"])


@pytest.mark.gpu
def test_training_on_cuda(tmp_path):
    sizes = {"total_timesteps": 600, "num_steps": 50, "num_minibatches": 2, "cudagraphs": True}
    TURBO.train(TURBO.Args(env_id="Pendulum-v1", run_dir=str(tmp_path), **sizes))
    summary = json.loads(next(tmp_path.glob("*/summary.json")).read_text())
    assert summary["cudagraphs"] and summary["steady_sps"] > 0 and summary["device"] != "cpu"
