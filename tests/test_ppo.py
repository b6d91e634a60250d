"""The PPO learners: advantages, normalisation, plain against turbo, episode ends, envpool, capture, learning."""

import itertools
import json

import conftest
import numpy as np
import pytest
import torch
from capture import record
from conftest import MODES, assert_same_state, make_learner, on_cuda, saved, scalars
from gymnasium.vector import AutoresetMode

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
                learner.host_actions[t] = first.storage["actions"][t].numpy()
            obs[i] = learner.record(t, next_obs, last_obs, rewards, terminated, terminated | truncated)
    return obs[0]


def flat(plain, get=lambda parameter: parameter):
    """The plain agent's parameters, or what `get` makes of each, in the turbo script's order."""
    actor, critic = (
        [m for m in net if isinstance(m, torch.nn.Linear)] for net in (plain.agent.actor, plain.agent.critic)
    )
    parts = []
    for pair in zip(actor[:2], critic[:2], strict=True):
        parts += [torch.stack([get(m.weight).T for m in pair]), torch.stack([get(m.bias) for m in pair])]
    for head in (actor[2], critic[2]):
        parts += [get(head.weight).T, get(head.bias)]
    return torch.cat([part.detach().flatten() for part in (*parts, get(plain.agent.log_std))])


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
        learner.storage[name].copy_(torch.as_tensor(column))
    learner.storage["next_obs"].normal_()
    next_values = learner.agent.value(learner.storage["next_obs"]).detach().numpy()
    wanted = textbook_advantages(rewards, values, next_values, terminated, ended, 0.99, 0.95)
    np.testing.assert_allclose(learner.advantages().numpy(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_envs", [1, 8])
def test_normaliser_agrees_with_numpy_on_a_million_values(num_envs):
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
    turbo.parameters.copy_(flat(plain))
    orders, randperm = [], torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda n, device: orders.append(randperm(n)) or orders[-1])
    monkeypatch.setattr(torch, "rand", lambda n, device: orders.pop().argsort().float())  # whose argsort is the order
    for iteration in range(10):
        roll_out([plain, turbo], seed=iteration)
        for learner in (plain, turbo):
            learner.update(3e-4 * (1 - iteration / 10))
        if iteration in (0, 9):
            tolerance = 1e-5 if iteration == 0 else 1e-4
            pairs = {"parameters": (turbo.parameters, flat(plain))}
            pairs["gradients"] = (
                turbo.adam.m,
                flat(plain, lambda parameter: plain.optimizer.state[parameter]["exp_avg"]),
            )
            for name, (got, wanted) in pairs.items():
                assert (got - wanted).norm() <= tolerance * wanted.norm(), (name, iteration)
            wanted = {name: value.item() for name, value in plain.losses.items()}
            assert turbo.losses() == pytest.approx(wanted, rel=10 * tolerance, abs=tolerance)


@pytest.mark.parametrize(("bootstrap", "terminal"), [(True, 0.0), (False, 1.0)])
@pytest.mark.parametrize("env_id", ["Truncates-v0", "Terminates-v0"])
def test_steps_keep_the_true_last_observation_and_tell_terminal_from_truncated(
    script, env_id, bootstrap, terminal, tmp_path, monkeypatch
):
    do_not_normalize(script, monkeypatch)
    seen = []
    sizes = {"num_envs": 2, "total_timesteps": 200, "num_steps": 50, "num_minibatches": 2, "update_epochs": 1}
    args = script.Args(env_id=env_id, run_dir=str(tmp_path), bootstrap_truncation=bootstrap, **sizes)
    script.train(args, on_log=lambda learner, losses, step: seen.append(columns_of(learner)))
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
    if hasattr(learner, "storage"):
        return [learner.storage[name].numpy().copy() for name in ("obs", "next_obs", "terminated", "ended")]
    names = ("host_obs", "host_next_obs", "host_terminated", "host_ended")
    return [getattr(learner, name).copy() for name in names]


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
    script.train(args, on_log=lambda learner, losses, step: seen.append(learner))
    assert value_of(seen[-1], np.zeros((1, 2))) == pytest.approx(value, rel=0.1)


def value_of(learner, obs):
    obs = torch.as_tensor(obs, dtype=torch.float32)
    with torch.no_grad():
        return (
            learner.agent.value(obs) if hasattr(learner, "agent") else learner.networks(learner.parameters, obs)[2]
        ).item()


def test_actions_respect_each_dimensions_bounds(script):
    learner = make_learner(script, env_id="Unequal-v0", num_envs=100)
    actions = np.concatenate([learner.act(t, np.zeros((100, 2), np.float32)) for t in range(16)])
    low, high = np.array([-1, -10, 0]), np.array([3, -8, 0.5])
    assert (actions >= low).all() and (actions <= high).all()
    assert np.allclose(actions.min(0), (-1, -8, 0), atol=1e-3) and actions[:, 0].max() > 2


def test_the_host_acts_as_the_device_would():
    learner = make_learner(TURBO, num_envs=5)
    obs = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    for iteration in range(2):
        mean, log_std, _ = learner.networks(learner.parameters, torch.from_numpy(obs))
        np.testing.assert_allclose(learner.mean_actions(obs), mean.numpy(), rtol=1e-4, atol=1e-6)
        learner.act(0, obs)
        noise = learner.host_actions[0] - mean.numpy()
        np.testing.assert_allclose(noise, learner.host_noise[0], rtol=1e-3, atol=1e-5)
        ratio = learner.host_noise.std((0, 1)) / log_std.exp().numpy()
        assert ratio == pytest.approx(1, abs=0.3)
        roll_out([learner], seed=iteration)
        learner.update(1e-2)


def test_each_rollout_has_fresh_noise():
    learner = make_learner(TURBO)
    noises = []
    for _ in range(3):
        roll_out([learner])
        noises.append(learner.host_noise.copy())
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
        script.train(args, on_log=lambda learner, losses, step: rates.append(float(rate_of(learner))))
    assert rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4] + 4 * [1e-3])


def rate_of(learner):
    return learner.optimizer.param_groups[0]["lr"] if hasattr(learner, "optimizer") else learner.learning_rate


def test_every_minibatch_is_drawn_once_an_epoch(script):
    learner = make_learner(script, update_epochs=3, num_minibatches=4)
    rows = []
    if script is PLAIN:
        learner.update_minibatch = lambda batch: rows.append(batch["actions"].clone())
    else:
        learner.update_minibatch = lambda batch: rows.append(batch[:, 3:4].clone())
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


def test_stage_counts_the_updates_of_this_process():
    learner = make_learner(TURBO)
    assert learner.stage == "warming up"
    roll_out([learner])
    learner.update(1e-3)
    assert learner.stage == "training"
    restored = make_learner(TURBO)
    restored.compile = True
    restored.load_state_dict(learner.state_dict())
    assert restored.stage == "compiling" and restored.updates == 1


def test_the_compiled_function_has_one_graph_and_does_not_recompile():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    learner = make_learner(TURBO, compile=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for i in range(3):
            roll_out([learner], seed=i)
            learner.update(1e-3 / (i + 1))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    "kwargs", [{}, {"num_envs": 1, "ent_coef": 0.01}, {"target_kl": 1e9, "clip_vloss": False}], ids=str
)
def test_every_graphed_function_replays_bit_equal(kwargs):
    """20 iterations with falling learning rate, `iterate` recorded, or with a target KL what it is made of."""
    kwargs = {"num_steps": 12, "num_minibatches": 2, "update_epochs": 2} | kwargs
    eager, graphed = (make_learner(TURBO, **kwargs) for _ in range(2))
    for learner in (eager, graphed):
        torch.manual_seed(0)
        roll_out([learner])
    state = [*graphed.tensors().values(), graphed.batch]
    for name in ("iterate",) if eager.args.target_kl is None else ("prepare", "learn_epoch", "measure"):
        setattr(graphed, name, record(getattr(graphed, name), state))
    for i in range(20):
        for learner in (eager, graphed):
            torch.manual_seed(i)
            roll_out([learner], seed=i)
            learner.update(1e-3 * (1 - i / 20))
        for name, tensor in eager.tensors().items():
            assert torch.equal(tensor, graphed.tensors()[name]), (i, name)
    assert torch.equal(eager.batch, graphed.batch) and eager.losses()["approx_kl"] > 0


def envpool_envs(num_envs, env_id="HalfCheetah-v5", seed=1):
    args = TURBO.Args(env_id=env_id, num_envs=num_envs, env_backend="envpool")
    return TURBO.EnvPool(args, seed)


def test_envpool_resets_within_the_step_that_ends_an_episode():
    """Hopper falls early: each observation after an end is one of a reset, close to standing still at the start."""
    envs = envpool_envs(4, "Hopper-v5")
    assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    obs, _ = envs.reset()
    generator, ends, length = np.random.default_rng(0), 0, np.zeros(4, int)
    for _ in range(300):
        assert (np.abs(obs[length == 0]) < 1.3).all() and np.abs(obs[length == 0, 5:]).max(initial=0) <= 0.005
        obs, _, terminated, truncated, infos = envs.step(generator.uniform(-1, 1, (4, 3)))
        length += 1
        if "_final_obs" in infos:
            ended = infos["_final_obs"]
            assert (ended == (terminated | truncated)).all() and (length[ended] > 1).all()
            last_obs = TURBO.final_observations(obs, infos)
            assert (np.abs(last_obs[ended, 5:]).max(1) > 0.1).all() and (last_obs[~ended] == obs[~ended]).all()
            ends, length = ends + ended.sum(), np.where(ended, 0, length)
    assert ends > 10


def test_envpool_and_gymnasium_step_alike():
    """The same environment: from episode starts, which are random, observations and rewards are distributed alike."""
    args = TURBO.Args(env_id="HalfCheetah-v5")
    statistics = []
    for envs in (envpool_envs(20), TURBO.make_envs(args, 20)):
        obs, _ = envs.reset(seed=0)
        rewards = []
        for _ in range(50):
            obs, reward, *_ = envs.step(np.full((20, 6), 0.5, np.float32))
            rewards.append(reward)
        statistics.append((obs.mean(0), np.mean(rewards)))
    (obs, reward), (gym_obs, gym_reward) = statistics
    np.testing.assert_allclose(obs, gym_obs, atol=0.2)
    assert reward == pytest.approx(gym_reward, abs=0.1)


def test_envpool_is_seeded(script):
    first, again, other = (script.EnvPool(script.Args(num_envs=3), seed).reset()[0] for seed in (1, 1, 2))
    assert np.array_equal(first, again) and not np.isclose(first, other).any()
    assert len(np.unique(first[:, 0])) == 3


def test_training_with_envpool(script, tmp_path):
    sizes = {"num_envs": 8, "total_timesteps": 8 * 1100, "num_steps": 50, "num_minibatches": 2, "update_epochs": 1}
    script.train(script.Args(env_backend="envpool", run_dir=str(tmp_path), **sizes))
    assert scalars(next(tmp_path.iterdir()), "charts/episodic_length") == 8 * [1000]


def test_evaluation_leaves_the_statistics_alone(tmp_path, monkeypatch, capsys):
    """Frozen in evaluation, from the checkpoint: whatever --num-envs and --num-steps the run had."""
    sizes = {"num_envs": 3, "num_steps": 40, "num_minibatches": 4, "total_timesteps": 480}
    TURBO.train(TURBO.Args(env_id="Pendulum-v1", run_dir=str(tmp_path), **sizes))
    path = next(tmp_path.glob("*/checkpoint.pt"))
    mean = torch.load(path, weights_only=True)["learner"]["normalizer.mean"].numpy()
    used = []

    def scale_obs(self, obs, scale=TURBO.Normalizer.scale_obs):
        used.append(self.mean.copy())
        return scale(self, obs)

    monkeypatch.setattr(TURBO.Normalizer, "scale_obs", scale_obs)
    TURBO.train(TURBO.Args(env_id="Pendulum-v1", evaluate=str(path), eval_episodes=2))
    assert "2 episodes: mean return" in capsys.readouterr().out
    assert len(used) == 400 and all(np.array_equal(values, mean) for values in used) and np.abs(mean).max() > 0


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


@on_cuda
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("target_kl", [None, 1e9])
@pytest.mark.parametrize("iterations", [1, 2, 3, 4, 10])
def test_modes_agree(mode, target_kl, iterations, monkeypatch):
    """Before, at and after capture, a mode has made exactly the updates that eager code makes."""
    order = torch.arange(32.0, device="cuda")
    monkeypatch.setattr(torch, "rand", lambda n, device: order)
    wanted, got = train_on_cuda(iterations, target_kl), train_on_cuda(iterations, target_kl, **MODES[mode])
    assert got.adam.decay[0].item() == pytest.approx(0.9 ** (4 * iterations))
    for name, tensor in wanted.tensors().items():
        tolerance = 1e-5 if iterations == 1 else 1e-3
        assert (got.tensors()[name] - tensor).double().norm() <= tolerance * tensor.double().norm() + 1e-6, name


@on_cuda
@pytest.mark.parametrize("mode", MODES)
def test_replays_shuffle_afresh(mode):
    """From the same parameters and rollout, past capture, updates differ by the order of the minibatches alone."""
    learner = train_on_cuda(5, **MODES[mode])
    saved, results = {name: tensor.clone() for name, tensor in learner.tensors().items()}, set()
    for _ in range(5):
        for name, tensor in learner.tensors().items():
            tensor.copy_(saved[name])
        learner.update(1e-3)
        results.add(learner.parameters.double().sum().item())
    assert len(results) == 5


@on_cuda
@pytest.mark.parametrize("mode", MODES)
def test_the_host_acts_with_the_newest_parameters(mode):
    learner = train_on_cuda(5, **MODES[mode])
    assert torch.equal(learner.host_parameters, learner.parameters.cpu())


@on_cuda
@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_continues_in_captured_graphs(mode):
    """Loading fills the tensors that the graphs read: a restored learner goes on like the one that was saved."""
    learner = train_on_cuda(5, **MODES[mode])
    state = learner.state_dict()
    results = []
    for _ in range(2):
        learner.load_state_dict(state)
        learner.normalizer.rows[:] = 0
        roll_out([learner], seed=7)
        learner.update(1e-3)
        results.append(learner.parameters.clone())
    assert torch.allclose(*results, rtol=1e-4, atol=1e-5) and not torch.equal(results[0].cpu(), state["parameters"])


@on_cuda
def test_training_on_cuda(tmp_path):
    sizes = {"total_timesteps": 600, "num_steps": 50, "num_minibatches": 2, "cudagraphs": True}
    TURBO.train(TURBO.Args(env_id="Pendulum-v1", run_dir=str(tmp_path), **sizes))
    summary = json.loads(next(tmp_path.glob("*/summary.json")).read_text())
    assert summary["cudagraphs"] and summary["steady_sps"] > 0 and summary["device"] != "cpu"
