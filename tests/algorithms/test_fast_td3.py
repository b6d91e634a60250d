"""FastTD3: projection, losses, n-step returns, noise, plain against turbo, capture, edits, learning."""

import math
import tempfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import checks
import conftest
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import load_copy, make_envs, make_learner, one_graph_each, saved, scalars, stem
from emulated_cuda import emulated_cuda
from formulas import noticing
from gymnasium.envs.classic_control import PendulumEnv
from gymnasium.vector import AutoresetMode
from test_cli import refused
from test_edits import HUNK, apply_hunk
from test_training_on_cuda import check_training, no_export

from instruments import __main__ as command

PLAIN, TURBO = conftest.PLAIN["fast_td3"], conftest.TURBO["fast_td3"]
SHORT = "tests.torch_pendulum:Short{}-v0"
PAGE = (Path(__file__).parents[2] / "doc" / "fast_td3.md").read_text()
each_script = pytest.mark.parametrize("script", [PLAIN, TURBO], ids=stem)


def is_turbo(learner):
    return hasattr(learner, "learn")


@contextmanager
def draws(learner, seed):
    """The learner draws from a stream of numbers for each use, so that the order of draws does not matter."""
    streams = {use: np.random.default_rng([seed, i]) for i, use in enumerate(("acting", "smoothing", "rows", "stds"))}

    def normal(use, shape):
        return torch.from_numpy(streams[use].standard_normal(shape)).float()

    def uniform(use, shape, low=0.0, high=1.0):
        return low + (high - low) * torch.from_numpy(streams[use].random(shape))

    if is_turbo(learner):
        patched = [
            (learner.acting_noise, "normal_", lambda: normal("acting", learner.acting_noise.shape)),
            (learner.noise, "normal_", lambda: normal("smoothing", learner.noise.shape)),
            (learner.uniform, "uniform_", lambda: uniform("rows", learner.uniform.shape)),
            (learner.new_stds, "uniform_", lambda *bounds: uniform("stds", learner.new_stds.shape, *bounds)),
        ]
        for tensor, name, draw in patched:
            setattr(tensor, name, lambda *bounds, tensor=tensor, draw=draw: tensor.copy_(draw(*bounds)))
        yield
        for tensor, name, _ in patched:
            delattr(tensor, name)
    else:
        num_envs = learner.args.num_envs
        instead = {
            "randn_like": lambda x: normal("acting" if len(x) == num_envs else "smoothing", x.shape),
            "randint": lambda low, high, shape, device: uniform("rows", shape, low, high).long(),
            "rand": lambda *shape, device: uniform("stds", shape).float(),
        }
        with patch.multiple(torch, **instead):
            yield


def take_step(learner, outcome, learning):
    """What `train` does after a step of the environments."""
    if is_turbo(learner):
        learner.observe(*outcome)
        learner.update() if learning else learner.store()
    else:
        learner.store(*outcome)
        for _ in range(learning * learner.args.updates_per_step):
            learner.update()


def after_steps(script, steps, mode="eager", **kwargs):
    """A learner after steps of the environments, of which the first five are followed by no update."""
    learner = make_learner(script, **kwargs, **conftest.MODES[mode])
    envs = make_envs(script, learner.args)
    obs = envs.reset(1)
    with draws(learner, seed=0):
        for step in range(steps):
            obs, *outcome = envs.step(learner.act(obs))
            take_step(learner, outcome, learning=step >= 5)
    return learner


# distributions and losses


def projected(probabilities, returns, v_max):
    """The projection, share by share, in float64."""
    num_atoms = len(probabilities[0])
    spacing = 2 * v_max / (num_atoms - 1)
    rows = np.zeros((len(probabilities), num_atoms))
    for row, shares, values in zip(rows, probabilities, returns, strict=True):
        for share, value in zip(shares, values, strict=True):
            position = (min(max(value, -v_max), v_max) + v_max) / spacing
            lower = math.floor(position + 1e-9)
            row[lower] += share * (1 - (position - lower))
            if lower + 1 < num_atoms:
                row[lower + 1] += share * (position - lower)
    return rows


@each_script
def test_projection_shares_each_return_between_two_atoms(script):
    """Between atoms, on them, beyond both ends, and all at one place, as after a terminal state."""
    learner = make_learner(script)
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.randn(6, 21, generator=generator).mul(3).softmax(-1)
    returns = torch.randn(6, 21, generator=generator) * 15
    returns[1], returns[2], returns[3], returns[4] = learner.atoms, 7.3, 1000.0, -1000.0
    got = learner.project(probabilities, returns.clamp(-20, 20)).double().numpy()
    np.testing.assert_allclose(got, projected(probabilities.tolist(), returns.tolist(), 20.0), atol=2e-6)


def test_losses_are_their_formulas(script=PLAIN):
    """In NumPy, from the networks' logits and the batch that was drawn, of which some steps only reset."""
    sizes = {"env_id": SHORT.format("NextStep"), "num_steps": 2, "policy_frequency": 1}
    learner = after_steps(script, 12, policy_noise=0.5, noise_clip=0.3, **sizes)
    args, atoms = learner.args, learner.atoms.double().numpy()
    sample, seen = learner.replay.sample, SimpleNamespace()

    def distributions(critics, obs, actions):
        return [critic(obs, actions).softmax(-1).double().numpy() for critic in critics]

    @torch.no_grad()
    def sample_and_see(*sizes):
        """The batch, and the distributions of the networks before they are updated."""
        batch = sample(*sizes)
        obs, next_obs = learner.actor.normalizer(batch["obs"]), learner.actor.normalizer(batch["next_obs"])
        noise = np.random.default_rng([0, 1]).standard_normal(batch["actions"].shape)
        noise = torch.from_numpy(noise * 0.5).float().clamp(-0.3, 0.3)
        next_actions = (learner.actor.squashed(next_obs) + noise).clamp(-1, 1)
        seen.next = distributions(learner.target_critics, next_obs, next_actions)
        seen.mine = distributions(learner.critics, obs, batch["actions"])
        seen.batch, seen.obs, seen.actions = batch, obs, learner.actor.squashed(obs)
        return batch

    learner.replay.sample = sample_and_see
    with draws(learner, seed=0):
        learner.update()
    rewards, discounts, valid = (seen.batch[name].double().numpy() for name in ("rewards", "discounts", "valid"))
    returns = rewards[:, None] + discounts[:, None] * atoms
    first, second = (projected(p, returns, args.v_max) for p in seen.next)
    smaller = first @ atoms <= second @ atoms
    target = np.where(smaller[:, None], first, second)
    losses = learner.losses()
    assert 0 < valid.mean() < 1 and 0 < smaller.mean() < 1
    errors = -sum((target * np.log(p)).sum(-1) for p in seen.mine)
    assert losses["qf_loss"] == pytest.approx(errors[valid == 1].mean(), rel=1e-4)
    assert losses["q_values"] == pytest.approx(np.mean([(p @ atoms)[valid == 1] for p in seen.mine]), rel=1e-4)
    with torch.no_grad():
        values = [p @ atoms for p in distributions(learner.critics, seen.obs, seen.actions)]
    assert losses["actor_loss"] == pytest.approx(-np.minimum(*values)[valid == 1].mean(), rel=1e-4)


# replay buffer


def fill(learner, steps):
    """Store random steps; returns them as columns (steps, num_envs, ...) by name. Observations number the steps."""
    generator = torch.Generator().manual_seed(0)
    shape = (steps, learner.args.num_envs)
    time, env = torch.meshgrid(*(torch.arange(n).float() for n in shape), indexing="ij")
    obs = torch.stack((time, env, torch.zeros(shape)), -1)
    terminated, ended = torch.rand(2, *shape, generator=generator).lt(0.15).float()
    columns = {"obs": obs, "actions": torch.randn(*shape, 1, generator=generator), "next_obs": obs + 0.5}
    columns |= {"rewards": torch.randn(*shape, generator=generator), "terminated": terminated}
    columns |= {"ended": torch.maximum(ended, terminated), "valid": torch.ones(shape)}
    for t in range(steps):
        row = {name: column[t] for name, column in columns.items()}
        if is_turbo(learner):
            learner.replay.store(torch.cat([column.view(shape[1], -1) for column in row.values()], -1))
        else:
            learner.replay.store(**row)
    return columns


@each_script
def test_returns_end_with_the_episode(script):
    """Samples are all steps that the buffer holds, with returns up to `num_steps` or to the episode's end."""
    for stored, num_steps in ((5, 3), (21, 1), (21, 4), (8, 8)):
        learner = make_learner(script, buffer_size=8, num_envs=3)
        columns = fill(learner, stored)
        per_env, gamma = 200, 0.9
        random_numbers = torch.rand(3 * per_env, dtype=torch.float64)
        drawn = random_numbers if is_turbo(learner) else per_env
        batch = learner.replay.sample(drawn, num_steps, gamma)
        rewards, ended, terminated = (columns[name].tolist() for name in ("rewards", "ended", "terminated"))
        starts = {}
        for i, (start, env, _) in enumerate(batch["obs"].int().tolist()):
            starts.setdefault(env, set()).add(start)
            wanted, last = 0.0, start
            for step in range(num_steps):
                last = start + step
                wanted += gamma**step * rewards[last][env]
                if ended[last][env]:
                    break
            discount = gamma ** (last - start + 1) * (1 - terminated[last][env])
            assert batch["rewards"][i].item() == pytest.approx(wanted, abs=1e-5)
            assert batch["discounts"][i].item() == pytest.approx(discount, abs=1e-6)
            assert torch.equal(batch["next_obs"][i], columns["next_obs"][last, env])
            assert torch.equal(batch["actions"][i], columns["actions"][start, env])
        all_starts = set(range(max(stored - 8, 0), stored - num_steps + 1))
        assert starts == {0: all_starts, 1: all_starts, 2: all_starts}, (stored, num_steps)


@each_script
def test_returns_end_where_a_resumed_run_begins(script):
    """New episodes begin there: in a buffer with room, full, and overwritten in part."""
    for stored in (5, 8, 11):
        saved_learner, learner = (make_learner(script, buffer_size=8, num_envs=3) for _ in range(2))
        before = fill(saved_learner, stored)
        learner.replay.load_state_dict(saved_learner.replay.state_dict())
        fill(learner, 2)  # observations 0 and 1, after those up to `stored` - 1
        drawn = torch.rand(600, dtype=torch.float64) if is_turbo(learner) else 200
        batch = learner.replay.sample(drawn, 3, 0.9)
        last = [i for i, (start, *_) in enumerate(batch["obs"].int().tolist()) if start == stored - 1]
        assert last
        for i in last:
            env = int(batch["obs"][i, 1])
            assert batch["rewards"][i] == before["rewards"][-1, env]
            assert torch.equal(batch["next_obs"][i], before["next_obs"][-1, env])


@each_script
def test_the_buffer_holds_what_happened(script):
    """Raw observations, and the actions in units of half the range that the environments got, with their noise.

    The statistics are those of all observations that were acted on.
    """
    learner = make_learner(script, env_id="Unequal-v0", num_envs=3, buffer_size=30, batch_size=3, std_max=0.8)
    envs = make_envs(script, learner.args)
    low, high = map(torch.from_numpy, (envs.single_action_space.low, envs.single_action_space.high))
    obs, seen = envs.reset(1), []
    for _ in range(30):
        actions = learner.act(obs)
        next_obs, *outcome = envs.step(actions)
        take_step(learner, outcome, learning=False)
        seen.append((obs, 2 * (actions - low) / (high - low) - 1, *outcome))
        obs = next_obs
    names = ("obs", "actions", "next_obs", "rewards", "terminated", "ended", "valid")
    for name, column in zip(names, map(torch.stack, zip(*seen, strict=True)), strict=True):
        stored = learner.replay.columns[name].reshape(column.shape)
        torch.testing.assert_close(stored, column.float(), atol=1e-5, rtol=1e-5)
    acted_on = torch.cat([obs for obs, *_ in seen]).double()
    torch.testing.assert_close(learner.actor.normalizer.mean, acted_on.mean(0))
    assert learner.actor.normalizer.count.item() == len(acted_on)
    torch.testing.assert_close(learner.actor.normalizer.variance, acted_on.var(0, correction=0))
    stored = learner.replay.columns["actions"].reshape(-1, 3)
    assert stored.abs().max() == 1 and len(stored.unique(dim=0)) > 80
    assert sum(step[-1].sum() for step in seen) == 90 - 3  # the others only reset
    episodes = learner.episodes.read()
    assert {name: value.item() for name, value in episodes.items()} == {
        "episodes": 3,
        "episodic_return": 20,
        "episodic_length": 20,
    }


# exploration, observations


@each_script
def test_each_environment_has_noise_of_its_own_size(script):
    """Each environment has noise of its own size, which changes where an episode ends, and only there."""
    learner = make_learner(script, num_envs=50, std_min=0.1, std_max=0.3)
    for parameter in learner.actor.net[-1].parameters():
        parameter.data.zero_()
    before = learner.stds.clone().squeeze(-1)
    actions = torch.stack([learner.act(torch.randn(50, 3)).squeeze(-1) for _ in range(300)])
    torch.testing.assert_close(actions.std(0) / 2, before, rtol=0.2, atol=0.0)  # half of the action range is 2
    ended = torch.arange(50) % 2 == 0
    take_step(learner, (torch.randn(50, 3), torch.zeros(50), ended, ended, ~ended), learning=False)
    after = learner.stds.squeeze(-1)
    assert torch.equal(after != before, ended)
    for stds in (before, after):
        assert stds.min() >= 0.1 and stds.max() <= 0.3 and stds.max() - stds.min() > 0.15


@each_script
def test_only_the_critics_see_their_observations(script):
    learner = make_learner(script, env_id=SHORT.format("Asymmetric"))
    obs, actions = torch.randn(5, 7), torch.randn(5, 1)
    for columns, seen_by_the_actor in ((slice(0, 3), True), (slice(3, 7), False)):
        other = obs.clone()
        other[:, columns] += 1.0
        values = [learner.logits(learner.critics, x, actions) for x in (obs, other)]
        assert torch.equal(*map(learner.actor.squashed, (obs, other))) != seen_by_the_actor
        assert torch.equal(*values) == seen_by_the_actor
    policy, (example,) = learner.policy()
    assert example.shape == (2, 3) and torch.equal(
        policy(obs[:, :3]), 2 * learner.actor.squashed(policy.normalizer(obs))
    )


def test_actions_without_bounds_have_the_given_one():
    space = conftest.gym.spaces.Box(np.float32([-np.inf, -3]), np.float32([np.inf, 1]))
    low, high = PLAIN.action_bounds(PLAIN.Args(action_bound=2.5), SimpleNamespace(single_action_space=space))
    assert low.tolist() == [-2.5, -3.0] and high.tolist() == [2.5, 1.0]


def test_learning_rates_follow_torchs_cosine():
    args = PLAIN.Args(critic_learning_rate=1.0, critic_learning_rate_end=0.1)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10, eta_min=0.1)
    for step in range(11):
        assert PLAIN.learning_rate(args, "critics", step / 10) == pytest.approx(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()


def test_adamw_is_torchs(script=TURBO):
    """While the learning rate moves, with gradients of all sizes, and for a weight without a gradient."""
    torch.manual_seed(0)
    weights = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((3, 4), (2,))]
    copies = [weight.detach().clone().requires_grad_() for weight in weights]
    mine, theirs = script.AdamW(weights, 0.1, 0.3), torch.optim.AdamW(copies, lr=0.1, weight_decay=0.3)
    for step in range(40):
        rate, sizes = 0.1 / (1 + step), torch.randn(3, 4) * 10.0 ** torch.randint(-9, 2, (3, 4))
        mine.lr.fill_(rate)
        theirs.param_groups[0]["lr"] = rate
        mine.step((sizes * weights[0]).sum())
        theirs.zero_grad(set_to_none=False)
        ((sizes * copies[0]).sum() + 0 * copies[1].sum()).backward()
        theirs.step()
        torch.testing.assert_close(weights, copies, rtol=1e-5, atol=1e-6)


REFUSED = [({"num_atoms": 1}, "at least 2"), ({"v_max": 0.0}, "largest return"), ({"num_steps": 12}, "at most 11")]


@pytest.mark.parametrize(("wrong", "words"), REFUSED, ids=str)
def test_bad_input_gets_one_clear_line(wrong, words, capsys, tmp_path):
    args = PLAIN.Args(**conftest.tiny(PLAIN) | wrong, run_dir=str(tmp_path / "runs"))
    assert words in refused(capsys, partial(PLAIN.train, args)) and not list(tmp_path.glob("runs/*"))


@each_script
@pytest.mark.parametrize("mode", [AutoresetMode.DISABLED, AutoresetMode.SAME_STEP])
def test_a_run_in_gymnasiums_own_vector_environment(mode, script, tmp_path):
    """Of NumPy arrays: only worlds whose episode has ended may be reset, and only these have a `final_obs`."""
    settings = {"vector_kwargs": {"autoreset_mode": mode}}
    gym.register("Own-v0", entry_point=PendulumEnv, max_episode_steps=15, kwargs=settings)
    sizes = conftest.tiny(PLAIN) | {"env_id": "Own-v0", "total_timesteps": 200, "buffer_size": 50}  # all of its steps
    runs = []
    with no_export():
        conftest.train(script, script.Args(**sizes, run_dir=str(tmp_path)), on_start=runs.append)
    columns = runs[0].learner.replay.columns
    assert columns["ended"].sum() == 4 * (50 // 15) and columns["next_obs"].isfinite().all()


# plain and turbo

OTHER = {"env_id": SHORT.format("NextStep"), "num_steps": 1, "policy_frequency": 3, "updates_per_step": 4, "tau": 0.5}
OTHER |= {"weight_decay": 10.0, "policy_noise": 0.3, "noise_clip": 0.2}
ASYMMETRIC = {"env_id": SHORT.format("Asymmetric")}


def check_equal(plain, turbo, mode="eager", steps=(6, 30), **kwargs):
    """Networks, gradients, losses, statistics and noise agree after the first updates and after those of 25 steps."""
    for count, tolerance in zip(steps, (1e-5, 1e-4), strict=False):
        wanted, got = after_steps(plain, count, **kwargs), after_steps(turbo, count, mode, **kwargs)
        episodes, wanted_episodes = got.episodes.read(), wanted.episodes.read()
        assert wanted_episodes["episodes"] > 0 or count < 10
        for name, value in wanted_episodes.items():
            torch.testing.assert_close(episodes[name], value, rtol=1e-5, atol=1e-5)
        conftest.assert_learners_agree(wanted, got, tolerance)
        torch.testing.assert_close(got.stds, wanted.stds)
        for name, statistic in wanted.actor.normalizer.state_dict().items():
            torch.testing.assert_close(got.actor.normalizer.state_dict()[name], statistic, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kwargs", [{}, OTHER, ASYMMETRIC], ids=["default", "other", "asymmetric"])
def test_turbo_equals_plain(kwargs):
    """Acting, storing and updating, in the loop of `train`."""
    check_equal(PLAIN, TURBO, **kwargs)


@pytest.mark.thorough
def test_turbo_equals_plain_compiled():
    with one_graph_each(4):  # acting, storing, critics, actor
        check_equal(PLAIN, TURBO, "compile", steps=(9,))


def test_bfloat16_is_near_float32():
    wanted, got = (after_steps(TURBO, 6, bf16=bf16).losses()["qf_loss"] for bf16 in (False, True))
    assert got != wanted and got == pytest.approx(wanted, rel=1e-2)


@each_script
def test_a_restored_learner_continues_bit_by_bit(script):
    """In the middle of the actor's delay; random numbers go on too."""

    def advance(learner, part):
        envs = make_envs(script, learner.args)
        obs = envs.reset(part)
        for step in range(8):
            obs, *outcome = envs.step(learner.act(obs))
            take_step(learner, outcome, learning=step >= 5)
        if part == 0:
            learner.load_state_dict(saved(learner))  # ends the episodes in the buffer

    checks.goes_on_when_restored(partial(make_learner, script, policy_frequency=4), advance)


@each_script
def test_a_run_its_continuation_and_its_policy(script, tmp_path, capsys):
    sizes = conftest.tiny(PLAIN) | ASYMMETRIC
    runs = []
    for total_timesteps in (120, 200):  # 30 and 50 steps of four worlds, of which 20 and 40 are followed by updates
        resume = str(*runs) or None
        with patch.object(script, "LOG_INTERVAL", 10):
            run_dir = tmp_path / str(total_timesteps)
            script.train(
                script.Args(**sizes | {"total_timesteps": total_timesteps}, run_dir=str(run_dir), resume=resume)
            )
        runs = list(run_dir.iterdir())
        checkpoint = torch.load(runs[0] / "checkpoint.pt", weights_only=True)
        state = checkpoint["learner"]
        assert checkpoint["global_step"] == total_timesteps and checkpoint["episodes"] > 0
        assert int(state["replay"]["stored"]) == total_timesteps // 4
        assert state["updates"] == 2 * (total_timesteps // 4 - 10)
        assert scalars(runs[0], "charts/episodic_return") and scalars(runs[0], "losses/actor_loss")
    learner = make_learner(script, **ASYMMETRIC)
    learner.load_state_dict(state)
    policy, _ = learner.policy()
    obs = 3 * torch.randn(5, 3)
    torch.testing.assert_close(torch.export.load(runs[0] / "policy.pt2").module()(obs), policy(obs))
    command.main(["evaluate", str(runs[0]), "--episodes", "2"])
    assert "2 episodes: mean return -" in capsys.readouterr().out


# on an emulated CUDA device

ON_CUDA = {"policy_frequency": 3}  # more than one graph of updates


def check_runs(script):
    """A run is the same with and without graphs."""
    with tempfile.TemporaryDirectory() as folder:
        check_training(script, Path(folder), settings=ON_CUDA, runs=[(False, False), (True, True)])


def test_the_host_waits_only_to_log(script=TURBO):
    """From log to log, a step replays two graphs, and the host waits once, to log."""
    counts = []
    args = conftest.tiny(PLAIN) | {"total_timesteps": 320, "cudagraphs": True, "cuda": True}
    log = lambda learner, losses, step: counts.append(device.counts.copy())  # noqa: E731
    often = patch.object(script, "LOG_INTERVAL", 20)
    with no_export(), emulated_cuda() as device, often, tempfile.TemporaryDirectory() as folder:
        conftest.train(script, script.Args(**args, run_dir=folder), on_log=log)
    *_, before, after = counts
    assert after["waits"] - before["waits"] == 1
    assert after["replays"] - before["replays"] == 2 * 20


# planted bugs

check_losses, check_buffer = test_losses_are_their_formulas, test_the_buffer_holds_what_happened
check_projection = test_projection_shares_each_return_between_two_atoms
check_returns, check_noise = test_returns_end_with_the_episode, test_each_environment_has_noise_of_its_own_size
check_against_plain = partial(check_equal, PLAIN, steps=(6,))
check_adamw = test_adamw_is_torchs
check_waits, check_restored = test_the_host_waits_only_to_log, test_a_restored_learner_continues_bit_by_bit
SAME_NUMBERS = ('        torch.set_rng_state(state["rng"])\n', "")
CRITICS = ("target.lerp_(learned, self.args.tau)", "target.lerp_(learned, 1.0)")
VALID = 'batch["valid"])'
ALL_ACTIONS = ("self.actions = obs, (actions + noise).clamp(-1, 1)", "self.actions = obs, (actions + noise)")
IN_UNITS = ("(self.obs, self.actions, next_obs", "(self.obs, self.actions_in_units, next_obs")
WITHOUT_NOISE = (
    "actions=self.actions, **",
    "actions=self.actor.squashed(self.actor.normalizer(self.obs)).detach(), **",
)
BUGS = [
    (PLAIN, "masks", f"cross_entropy.sum(0), {VALID}", f"cross_entropy.sum(0), 0 * {VALID[:-1]} + 1)", check_losses),
    (PLAIN, "masks", f"mean(0), {VALID}", f"mean(0), 0 * {VALID[:-1]} + 1)", check_losses),
    (PLAIN, "masks", "amin(0), valid)", "amin(0), 0 * valid + 1)", check_losses),
    (PLAIN, "stored actions", *ALL_ACTIONS, check_buffer),
    (PLAIN, "seen observations", "normalizer.update(obs)", "normalizer.update(obs[:1])", check_buffer),
    (PLAIN, "stored actions", *WITHOUT_NOISE, check_buffer),
    (TURBO, "stored actions", *IN_UNITS, check_buffer),
    (TURBO, "projection", "(1 - distances).clamp(min=0)", "(1 - distances).abs()", check_projection),
    (PLAIN, "projection", "probabilities * (1 - upper_share)", "probabilities * upper_share", check_projection),
    (PLAIN, "returns", "goes_on * discounts * later", "discounts * later", check_returns),
    (PLAIN, "returns", "self.stored - num_steps + 1, envs", "self.stored, envs", check_returns),
    (TURBO, "returns", "gamma**steps *", "gamma**num_steps *", check_returns),
    (TURBO, "returns", "- num_steps + 1\n", "\n", check_returns),
    (TURBO, "returns", "(self.stored - size).clamp(min=0) + ", "", check_returns),
    (PLAIN, "noise", "torch.where(ended[:, None], self.draw_stds(), self.stds)", "self.draw_stds()", check_noise),
    (TURBO, "noise", "self.stds * self.acting_noise", "self.stds.mean() * self.acting_noise", check_noise),
    (TURBO, "double Q", "first <= second", "first >= second", check_against_plain),
    (TURBO, "weight decay", "1 - self.lr * self.weight_decay", "1 - 0 * self.lr", check_against_plain),
    (TURBO, "AdamW", "1 - self.lr * self.weight_decay", "1 - 0.1 * self.weight_decay", check_adamw),
    (TURBO, "AdamW", "self.eps * root, alpha=1", "self.eps * root.square(), alpha=1", check_adamw),
    (TURBO, "AdamW", "0.9, 0.999, 1e-8", "0.9, 0.99, 1e-8", check_adamw),
    (TURBO, "delay", "if update % self", "if (update + 1) % self", check_against_plain),
    (TURBO, "target", *CRITICS, check_against_plain),
    (PLAIN, "resumed", *SAME_NUMBERS, check_restored),
    (TURBO, "resumed", *SAME_NUMBERS, check_restored),
    (TURBO, "resumed", '        self.updates = state["updates"]\n', "", check_restored),
    (TURBO, "statistics", "normalizer.update(self.obs)", "normalizer.update(self.obs[:1])", check_against_plain),
]
COUNT = "self.count = getattr(self, 'count', 0) + 1\n        self.stored.fill_(self.count)"
ACTOR_LOSS = "self.keep(actor_loss=actor_loss)"
LATER = [  # on the emulated device
    (
        TURBO,
        "placement",
        "self.corrections = torch.zeros_like(self.rates)",
        "self.corrections = torch.zeros(2)",
        check_runs,
    ),
    (TURBO, "rebound", "self.stds.copy_(torch.where", "self.stds = (torch.where", check_runs),
    (TURBO, "rebound", "self.obs.copy_(obs)", "self.obs = obs", check_runs),
    (TURBO, "random numbers", "self.uniform.uniform_()", "self.uniform.fill_(np.random.rand())", check_runs),
    (TURBO, "host reads", ACTOR_LOSS, f"float(actor_loss.detach())\n        {ACTOR_LOSS}", check_runs),
    (TURBO, "Python", "self.stored.add_(1)", COUNT, check_runs),
    (TURBO, "waits", "self.choose_actions()\n", "self.choose_actions()\n        self.losses()\n", check_waits),
]
ERRORS = (AssertionError, RuntimeError, SystemExit, IndexError)
test_a_planted_bug_is_caught = noticing(BUGS, ERRORS)
test_a_planted_bug_is_caught_on_the_device = pytest.mark.planted(noticing(LATER, ERRORS))

# edits

EDITS = {s.split("\n", 1)[0].lower(): s for s in PAGE.split("\n### ")[1:] if "```diff" in s}


@pytest.mark.parametrize("title", EDITS)
def test_edits_of_the_page(title, tmp_path):
    """Both edited scripts agree, and differ from the unedited one."""
    scripts = []
    for kind, script in (("plain", PLAIN), ("turbo", TURBO)):
        source = Path(script.__file__).read_text()
        for _, for_kind, lines in HUNK.findall(EDITS[title]):
            if kind in for_kind:
                source = apply_hunk(source, lines.splitlines())
        scripts.append(load_copy(stem(script), source, tmp_path))
    check_equal(*scripts, steps=(6,))
    with pytest.raises((AssertionError, RuntimeError, KeyError)):
        check_equal(PLAIN, scripts[1], steps=(6,))


# learning

PENDULUM = {"env_id": "tests.torch_pendulum:TorchPendulum-v0", "num_envs": 16, "batch_size": 128, "buffer_size": 2000}
PENDULUM |= {"gamma": 0.95, "v_max": 150.0, "num_atoms": 51, "num_steps": 3, "std_min": 0.1, "std_max": 0.8}
PENDULUM |= {"critic_hidden_dim": 128, "actor_hidden_dim": 64, "weight_decay": 0.0, "threads": 1}
PENDULUM |= {f"{name}_learning_rate{end}": 1e-3 for name in ("critic", "actor") for end in ("", "_end")}


@pytest.mark.thorough
@each_script
def test_the_pendulum_is_learned(script, tmp_path):
    """A random policy scores about -1200, a swing-up from anywhere about -150."""
    script.train(script.Args(**PENDULUM, total_timesteps=16_000, run_dir=str(tmp_path)))
    returns = scalars(next(tmp_path.iterdir()), "charts/episodic_return")
    assert returns[0] < -900 and returns[-1] > -400
