"""PPO for environments on the device: autoreset modes, statistics, plain against turbo and PPO, capture, learning."""

import copy
import itertools
import re
import tempfile
from functools import partial
from pathlib import Path

import checks
import conftest
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import (
    assert_close_in_norm,
    clones,
    load_copy,
    make_envs,
    make_learner,
    networks,
    one_graph_each,
    scalars,
    stem,
)
from emulated_cuda import emulated_cuda
from formulas import double, noticing
from gymnasium.spaces import Box, Dict, Graph, Sequence
from gymnasium.vector import AutoresetMode
from scipy.stats import kstest, norm
from test_cli import refused
from test_edits import apply_hunk
from test_ppo import fix_order
from test_training_on_cuda import check_training, no_export

from instruments import __main__ as command
from leanrl import ppo_continuous_action
from tests.torch_pendulum import TorchPendulum

PLAIN, TURBO = conftest.PLAIN["ppo_gpu"], conftest.TURBO["ppo_gpu"]
PAGE = Path(__file__).parents[2] / "doc" / "ppo_gpu_envs.md"
SHORT = "tests.torch_pendulum:Short{}-v0"
VARIANTS = ["", "Asymmetric", "NextStep", "Disabled", "WithoutFinal"]
each_script = pytest.mark.parametrize("script", [PLAIN, TURBO], ids=stem)


# environments


def transitions_of(script, variant, steps=60):
    """All transitions of three worlds, whose actions depend on the observation: by world, rows of numbers."""
    envs = script.make_device_envs(script.Args(env_id=SHORT.format(variant), num_envs=3), torch.device("cpu"))
    obs = envs.reset(seed=1)
    worlds = [[], [], []]
    for _ in range(steps):
        actions = 2 * (3 * obs[:, :1]).sin()
        next_obs_to_act_on, *columns = envs.step(actions)
        *columns, valid = (column.float().view(3, -1) for column in columns)
        for world, row, is_valid in zip(worlds, torch.cat((obs, *columns), -1), valid, strict=True):
            world += [row] if is_valid else []
        obs = next_obs_to_act_on
    return [torch.stack(world) for world in worlds]


def test_all_autoreset_modes_give_the_same_transitions(script=PLAIN):
    """All autoreset modes give the same transitions, with the true last observations."""
    wanted = transitions_of(script, "")
    for world in wanted:
        obs, next_obs, (_, terminated, ended) = world[:, :3], world[:, 3:6], world[:, 6:].unbind(-1)
        assert world.isfinite().all()
        assert 5 < ended.sum() < 30 and 2 < terminated.sum() < ended.sum() - 2
        assert ((obs[1:] == next_obs[:-1]).all(-1) != (ended[:-1] == 1)).all()
        assert (terminated == (next_obs[:, 2].abs() > 3)).all()
        # where an episode ends, its last observation follows from physics as others do
        moved = torch.atan2(next_obs[:, 1], next_obs[:, 0]) - torch.atan2(obs[:, 1], obs[:, 0])
        torch.testing.assert_close(torch.sin(moved), torch.sin(0.05 * next_obs[:, 2]), atol=1e-5, rtol=1e-4)
    for variant in ("NextStep", "Disabled"):
        for got, world in zip(transitions_of(script, variant), wanted, strict=True):
            assert len(got) == 60 if variant == "Disabled" else 40 < len(got) < 55
            assert torch.equal(got, world[: len(got)]), variant
    for got, world in zip(transitions_of(script, "WithoutFinal"), wanted, strict=True):
        ended = world[:, -1:] == 1
        assert torch.equal(got[:, 3:6], torch.where(ended, world[:, :3], world[:, 3:6]))
        assert torch.equal(got[:, 6:], world[:, 6:])


class Changed(TorchPendulum):
    """Short episodes. `changes` are functions of what the worlds return, by name. A reset clears the last step's."""

    def __init__(self, changes, metadata=None, **kwargs):
        super().__init__(**{"length": 7, "max_speed": 3.0} | kwargs)
        self.changes, self.returned = changes, []
        self.metadata |= metadata or {}

    def changed(self, name, value):
        return self.changes.get(name, lambda same: same)(value)

    def reset(self, **kwargs):
        obs, infos = super().reset(**kwargs)
        for column in self.returned:
            column[:] = 0
        return self.changed("obs", obs), infos

    def step(self, actions):
        obs, *columns, infos = super().step(actions)
        named = zip(("rewards", "terminated", "truncated"), columns, strict=True)
        self.returned = [self.changed(name, column) for name, column in named]
        infos = {name: self.changed(name, value) for name, value in infos.items()}
        return self.changed("obs", obs), *self.returned, infos


def steps_of(script, changes, **kwargs):
    """The columns that 30 steps of three worlds return after `changes`, step after step."""
    gym.register("Changed-v0", vector_entry_point=Changed, kwargs={"changes": changes} | kwargs)
    try:
        envs = script.make_device_envs(script.Args(env_id="Changed-v0", num_envs=3), torch.device("cpu"))
    finally:
        gym.registry.pop("Changed-v0")
    envs.reset(1)
    return [column.clone() for t in range(30) for column in envs.step(torch.full((3, 1), t % 5 - 2.0))]


def flags(change):
    return {"terminated": change, "truncated": change}


def whole(numbers):
    return (10 * numbers).int()


def with_graph(numbers):
    return numbers * torch.ones((), requires_grad=True)


KINDS = {
    "flags are int64": (flags(torch.Tensor.long), {}),
    "flags are uint8": (flags(torch.Tensor.byte), {}),
    "flags are floats": (flags(torch.Tensor.float), {}),
    "one flag is int64": ({"terminated": torch.Tensor.long}, {}),
    "float64": (dict.fromkeys(("obs", "rewards", "final_obs"), torch.Tensor.double), {}),
    "rewards are int32": ({"rewards": whole}, {"rewards": lambda x: whole(x).float()}),
    "observations are int32": ({"obs": whole}, {"obs": lambda x: whole(x).float()}),
    "with a graph": (dict.fromkeys(("obs", "rewards", "final_obs"), with_graph), {}),
    "flags with a graph": (flags(lambda x: with_graph(x.float())), {}),
    "NumPy": (dict.fromkeys(("rewards", "terminated", "truncated"), torch.Tensor.numpy), {}),
}


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP", "DISABLED"])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_any_type(kind, mode, script=PLAIN):
    """They are float32 and bool, and without a graph, which would grow with the rollout."""
    changes, same_as = KINDS[kind]
    got, wanted = (steps_of(script, each, mode=mode) for each in (changes, same_as))
    for column, same in zip(got, wanted, strict=True):
        torch.testing.assert_close(column, same, rtol=0, atol=0)
        assert column.dtype in (torch.float32, torch.bool) and not column.requires_grad
    assert torch.stack(got[4::6]).sum() > 3  # episodes that end


def test_what_a_step_returned_outlives_the_reset(script=PLAIN):
    """Where the script resets the worlds, rewards and ends are not those that the reset leaves in their memory."""
    got, wanted = (steps_of(script, {}, mode=mode) for mode in ("DISABLED", "SAME_STEP"))
    assert all(map(torch.equal, got, wanted))


def test_the_autoreset_mode_may_be_its_value(script=PLAIN):
    """`SameStep`, as gymnasium writes it; other words are an error."""
    got, wanted = (steps_of(script, {}, metadata=metadata) for metadata in ({"autoreset_mode": "SameStep"}, {}))
    assert all(map(torch.equal, got, wanted))
    with pytest.raises(ValueError, match="not a valid AutoresetMode"):
        steps_of(script, {}, metadata={"autoreset_mode": "same step"})


def critic_is_one_number(obs):
    return obs | {"critic": obs["critic"][:, 0]}


def exchanged(obs):
    return {"policy": obs["critic"], "critic": obs["policy"]}


SHAPES = {
    "observations have shape (5, 3), not (3, 3)": ({}, {"num_envs": 5}),
    "observations have shape (4, 3), not (3, 3)": ({"obs": lambda obs: obs[[0, 1, 2, 0]]}, {}),
    "observations have shape (3, 2), not (3, 3)": ({"obs": lambda obs: obs[:, :2]}, {}),
    "observations have shape (3,), not (3, 4)": ({"obs": critic_is_one_number}, {"asymmetric": True}),
    "observations have shape (3, 4), not (3, 3)": ({"obs": exchanged}, {"asymmetric": True}),
    "observations have shape (1, 3), not (3, 3)": ({"final_obs": lambda obs: obs[:1]}, {}),
    "rewards have shape (3, 1), not (3,)": ({"rewards": lambda rewards: rewards[:, None]}, {}),
    "rewards have shape (), not (3,)": ({"rewards": torch.mean}, {}),
    "terminated have shape (3, 1), not (3,)": ({"terminated": lambda ended: ended[:, None]}, {}),
    "truncated have shape (1,), not (3,)": ({"truncated": lambda ended: ended[:1]}, {}),
}


@pytest.mark.parametrize("words", SHAPES)
def test_other_shapes_are_an_error(words, script=PLAIN):
    """They are not broadcast. The first has its number of worlds from its registration."""
    changes, kwargs = SHAPES[words]
    error = ""
    try:
        steps_of(script, changes, **kwargs)
    except ValueError as raised:
        error = str(raised)
    assert error == f"the environment's {words}"


class Counts(gym.Env):
    """Shows the steps since reset; episodes end after two or three, by the seed. Infos hold strings."""

    def __init__(self, asymmetric=False):
        self.observation_space, self.asymmetric = Box(-9, 9, (1,)), asymmetric
        if asymmetric:
            self.observation_space = Dict(policy=Box(-9, 9, (1,)), critic=Box(-9, 9, (2,)))
        self.action_space = Box(-1, 1, (1,))

    def observation(self):
        steps = np.float32([self.steps])
        return {"policy": steps, "critic": np.float32([5, self.steps])} if self.asymmetric else steps

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.length = 0, self.length if seed is None else 2 + seed % 2
        return self.observation(), {"task": "count"}

    def step(self, action):
        self.steps += 1
        ended = self.steps == self.length
        terminated = ended and self.length == 3
        return self.observation(), float(action[0]), terminated, ended and not terminated, {"task": "count"}


for name, kwargs in (("", {}), ("Asymmetric", {"asymmetric": True})):
    for mode in AutoresetMode:
        settings = kwargs | {"vector_kwargs": {"autoreset_mode": mode}}
        gym.register(f"Counts{name}{mode.value}-v0", entry_point=Counts, kwargs=settings)


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("name", ["", "Asymmetric"])
def test_gymnasiums_own_vector_environments(name, mode, script=PLAIN):
    """In all autoreset modes, where no episode ends, one, or both: these have three steps and two."""
    env_id = f"Counts{name}{mode.value}-v0"
    envs = script.make_device_envs(script.Args(env_id=env_id, num_envs=2), torch.device("cpu"))
    obs, worlds = envs.reset(1), [[], []]
    for step in range(12):
        next_obs_to_act_on, *columns, valid = envs.step(torch.full((2, 1), step / 16))
        for i, world in enumerate(worlds):
            world += [(step / 16, obs[i].tolist(), *(column[i].tolist() for column in columns))] if valid[i] else []
        obs = next_obs_to_act_on
    for world, length in zip(worlds, (3, 2), strict=True):
        resets = mode == AutoresetMode.NEXT_STEP
        assert len(world) == (12 * length // (length + resets))
        for t, (action, obs, next_obs, reward, terminated, ended) in enumerate(world):
            shown = [[n, 5.0, n] if name else [n] for n in (t % length, t % length + 1)]
            assert (obs, next_obs, reward) == (*shown, action)
            assert ended == (next_obs[0] == length) and terminated == (ended and length == 3)


@each_script
@pytest.mark.parametrize("mode", AutoresetMode)
def test_a_run_in_gymnasiums_own(mode, script, tmp_path):
    sizes = conftest.tiny(PLAIN) | {"env_id": f"Counts{mode.value}-v0", "run_dir": str(tmp_path)}
    runs = []
    with no_export():
        conftest.train(script, script.Args(**sizes, total_timesteps=200), on_start=runs.append)
    assert runs[0].episodes > 40


@pytest.mark.thorough
@pytest.mark.parametrize("env_id", ["phys2d/Pendulum-v0", "InvertedPendulum-v5"])
def test_environments_of_numpy_and_jax(env_id, tmp_path):
    """As tensors; the first sets no autoreset mode and resets in the step after an end, the second names that mode."""
    if "phys2d" in env_id:
        pytest.importorskip("array_api_compat")
        pytest.importorskip("jax")
    envs = PLAIN.make_device_envs(PLAIN.Args(env_id=env_id, num_envs=2), torch.device("cpu"))
    envs.reset(seed=1)
    ended, valid = [], []
    for _ in range(202):
        *columns, over, is_valid = envs.step(torch.full((2, 1), 0.3))
        assert all(torch.is_tensor(column) and column.isfinite().all() for column in columns)
        ended.append(over)
        valid.append(is_valid)
    ended, valid = torch.stack(ended), torch.stack(valid)
    assert ended.any() and valid[0].all() and torch.equal(valid[1:], ~ended[:-1])


class Words(gym.Space):
    """A space of one's own."""

    def sample(self, mask=None, probability=None):
        return "up"


BOX = Box(-1, 1, (3,))
OTHER_SPACES = {"Sequence": Sequence(BOX), "Graph": Graph(BOX, None), "Words": Words()}
OTHER_SPACES |= {f"Policy{name}": Dict(policy=space) for name, space in OTHER_SPACES.items()}
OTHER_SPACES |= {"CriticSequence": Dict(critic=OTHER_SPACES["Sequence"], policy=BOX), "Critic": Dict(critic=BOX)}
for name, space in OTHER_SPACES.items():
    gym.register(
        f"Other{name}-v0", entry_point=conftest.PushAnything, kwargs={"space": space}, disable_env_checker=True
    )
REFUSED = [
    ({"env_id": "CartPole-v1"}, "actions must be"),
    ({"env_id": "Image-v0"}, "observations must be"),
    *(({"env_id": f"Other{name}-v0"}, "observations must be") for name in OTHER_SPACES),
    ({"env_id": "NoSuchEnv-v0"}, "NoSuchEnv"),
    ({"num_minibatches": 7}, "divisor"),
]


@pytest.mark.parametrize(("wrong", "words"), REFUSED, ids=str)
def test_bad_input_gets_one_clear_line(wrong, words, capsys, tmp_path):
    args = PLAIN.Args(**conftest.tiny(PLAIN) | wrong, run_dir=str(tmp_path / "runs"))
    assert words in refused(capsys, partial(PLAIN.train, args)) and not list(tmp_path.glob("runs/*"))


# statistics


@each_script
def test_statistics_are_those_of_all_observations(script):
    normalizer = script.ObsNormalizer(3)
    rows = 1000 + 5 * torch.randn(40, 7, 3).cumsum(0)
    for obs in rows:
        normalizer.update(obs)
    rows = rows.double().flatten(0, 1)
    torch.testing.assert_close(normalizer.mean, rows.mean(0))
    torch.testing.assert_close(normalizer.variance, rows.var(0, correction=0))
    wanted = ((rows - rows.mean(0)) / rows.std(0, correction=0)).clamp(-10, 10).float()
    torch.testing.assert_close(normalizer(rows.float()), wanted, atol=1e-4, rtol=1e-4)


def check_counter(script, compiled=lambda function: function):
    """Returns and lengths of the episodes that ended since the last call, without steps that only reset."""
    counter = script.EpisodeCounter(2, torch.device("cpu"))
    count = compiled(counter.count)
    steps = [  # rewards, ended, valid of two worlds
        ((1.0, 5.0), (0, 0), (1, 1)),
        ((2.0, 7.0), (1, 0), (1, 1)),
        ((100.0, 1.0), (0, 0), (0, 1)),
        ((4.0, 1.0), (1, 1), (1, 1)),
    ]
    for step in steps:
        count(*(torch.tensor(column, dtype=torch.float32) for column in step))
    read = {name: value.item() for name, value in counter.read().items()}
    assert read == {"episodes": 3, "episodic_return": pytest.approx(21 / 3), "episodic_length": pytest.approx(7 / 3)}
    assert {value.item() for value in counter.read().values()} == {0.0}


@each_script
def test_episodes_are_counted(script):
    check_counter(script)


def test_compiled_code_counts_episodes():
    """From a sum over `current * ended`, inductor 2.11 would make code that reads `current` after its last change."""
    check_counter(TURBO, partial(torch.compile, fullgraph=True))


# updates


def step_columns(learner, seed=0):
    """Random columns of a rollout by name, each (num_steps, num_envs, ...), as the learner stores them."""
    generator = torch.Generator().manual_seed(seed)
    steps = (learner.args.num_steps, learner.args.num_envs)
    normal = lambda *shape: torch.randn(*steps, *shape, generator=generator)  # noqa: E731
    ended = (normal() > 0.8).float()
    return {
        "obs": normal(3),
        "next_obs": normal(3),
        "actions": normal(1),
        "rewards": normal(),
        "terminated": ended * (normal() > 0),
        "ended": ended,
        "valid": torch.ones(steps),
    }


@torch.no_grad()
def fill(learner, columns):
    """Make these columns the learner's rollout."""
    if not isinstance(learner.rollout, dict):
        names = ("obs", "actions", "next_obs", "rewards", "terminated", "ended", "valid")
        rows = [columns[name] if columns[name].dim() == 3 else columns[name][..., None] for name in names]
        learner.rollout.copy_(torch.cat(rows, -1))
        return
    agent = learner.agent
    value = agent.value if hasattr(agent, "value") else lambda obs: agent.critic(obs).squeeze(-1)
    log_prob = learner.gaussian(columns["obs"]).log_prob(columns["actions"]).sum(-1)
    columns = columns | {"log_prob": log_prob, "values": value(columns["obs"])}
    for name, column in learner.rollout.items():
        column.copy_(columns[name])


SIZES = {"num_steps": 9, "num_envs": 4, "num_minibatches": 3, "update_epochs": 2}


@each_script
def test_an_update_is_that_of_ppo(script):
    """With one network, rollout and order of minibatches, an update is that of ppo_continuous_action.py."""
    learner = make_learner(script, desired_kl=None, learning_rate=3e-3, ent_coef=0.1, **SIZES)
    args = {"clip_vloss": False, "vf_coef": 2.0, "max_grad_norm": 1.0, "ent_coef": 0.1}
    ppo = make_learner(ppo_continuous_action, **SIZES, **args)
    ppo.agent.actor, ppo.agent.critic = copy.deepcopy(learner.agent.actor), copy.deepcopy(learner.agent.critic)
    ppo.optimizers["agent"] = torch.optim.Adam(ppo.agent.parameters(), lr=1.0, eps=1e-5)
    with pytest.MonkeyPatch.context() as monkeypatch:
        fix_order(monkeypatch)
        for iteration in range(2):
            for each in (ppo, learner):
                fill(each, step_columns(learner, iteration))
            torch.manual_seed(iteration)
            ppo.update(3e-3)
            torch.manual_seed(iteration)  # the plain script draws the same order, turbo gets it
            learner.update()
    assert_close_in_norm(dict(learner.agent.named_parameters()), dict(ppo.agent.named_parameters()), 1e-5)


@each_script
def test_steps_that_only_reset_change_nothing(script):
    """Steps that are not valid change nothing, whatever they hold."""
    results = []
    for other in (0.0, 5.0):
        learner = make_learner(script, **SIZES)
        columns = step_columns(learner)
        columns["valid"][1:] = 1 - columns["ended"][:-1]
        wrong = columns["valid"] == 0
        assert wrong.any()
        for name in ("obs", "actions", "rewards", "next_obs"):
            columns[name][wrong] += other
        fill(learner, columns)
        torch.manual_seed(0)
        learner.update()
        losses = {name: value for name, value in learner.losses().items()}
        results.append((clones(networks(learner)), losses))
    for name, tensor in results[0][0].items():
        torch.testing.assert_close(tensor, results[1][0][name], msg=name)
    assert results[1][1] == pytest.approx(results[0][1], rel=1e-4, abs=1e-6)


@each_script
def test_the_learning_rate_follows_the_divergence(script):
    """The rate grows by 1.5 below half of the desired divergence, falls by 1.5 above twice, and has limits."""
    learner = make_learner(script, desired_kl=0.01, learning_rate=1e-3)

    def after(*divergences):
        for divergence in divergences:
            learner.adapt_learning_rate(torch.tensor(divergence))
        optimizer = learner.optimizers["agent"]
        return optimizer.lr.item() if hasattr(optimizer, "lr") else optimizer.param_groups[0]["lr"]

    assert after(0.004) == pytest.approx(1.5e-3)
    assert after(0.006, 0.019) == pytest.approx(1.5e-3)
    assert after(0.021) == pytest.approx(1e-3)
    assert after(*[0.0] * 10) == pytest.approx(1e-2)
    assert after(*[1.0] * 20) == pytest.approx(1e-5)


@each_script
def test_the_critic_may_see_more(script):
    """The policy sees its own columns alone, and the critic its own alone."""
    learner = make_learner(script, env_id=SHORT.format("Asymmetric"))
    agent = learner.agent
    obs = torch.randn(5, 7)
    columns = [
        torch.autograd.grad(f(obs.requires_grad_()).sum(), obs)[0].ne(0).any(0) for f in (agent.mean, agent.value)
    ]
    assert [column.tolist() for column in columns] == [[True] * 3 + [False] * 4, [False] * 3 + [True] * 4]
    policy, (example,) = learner.policy()
    assert example.shape == (2, 3) and policy(example).shape == (2, 1)


def roll_out(learner, envs, seed=1):
    """A rollout of new episodes as in `train`: what the environments got and gave, each (num_steps, num_envs, ...)."""
    plain, seen = not hasattr(learner, "decide"), []
    raw = envs.reset(seed)
    obs = learner.observe(raw)
    if not plain:
        learner.start_rollout()
    for t in range(learner.args.num_steps):
        actions = learner.act(t, obs) if plain else learner.act()
        outcome = envs.step(actions)
        obs = learner.record(t, *outcome) if plain else learner.record(*outcome)
        seen.append((raw, actions, *outcome))
        raw = outcome[0]
    return [torch.stack(column) for column in zip(*seen, strict=True)]


def stored_columns(learner):
    """The rollout, and the log-probabilities of its actions, by name; also the batch as the learner has it."""
    batch = learner.make_batch()
    if batch is not None:
        return learner.rollout, batch
    names = ("obs", "actions", "next_obs", "rewards", "terminated", "ended", "valid")
    columns = dict(zip(names, learner.rollout.split(learner.widths, -1), strict=True))
    log_prob = learner.batch.split(learner.batch_widths, -1)[2].view(learner.rollout.shape[:2])
    single = {name: column.squeeze(-1) for name, column in columns.items() if column.shape[-1] == 1}
    return columns | single | {"log_prob": log_prob}, learner.batch


def density(actions, mean, log_std):
    """Log-probabilities of a Gaussian with independent dimensions, NumPy."""
    return norm.logpdf(actions, mean, np.exp(log_std)).sum(-1)


@each_script
def test_a_rollout_holds_what_happened(script):
    """Actions as they were sampled, though the environments get them within their bounds, and their densities.

    Observations are scaled with the statistics of all that were seen before; rewards are scaled, those of episodes not.
    """
    learner = make_learner(script, env_id="Unequal-v0", num_steps=50, num_envs=20, reward_scaler=0.1)
    learner.agent.log_std.data.copy_(torch.tensor([0.3, 1.0, -1.0]))
    envs = make_envs(script, learner.args)
    raw, actions, _, raw_next, rewards, terminated, ended, valid = roll_out(learner, envs)
    stored, batch = stored_columns(learner)
    assert 0 < (~valid).sum() == ended[:-1].sum() and not rewards[~valid].any()
    flags = {"terminated": terminated, "ended": ended, "valid": valid, "rewards": 0.1 * rewards}
    for name, column in flags.items():
        torch.testing.assert_close(stored[name], column.float())
    episodes = {name: value.item() for name, value in learner.episodes.read().items()}
    assert episodes == {"episodes": ended.sum(), "episodic_return": 20, "episodic_length": 20}

    sample, log_std = double(stored["actions"]), double(learner.agent.log_std)
    low, high = envs.single_action_space.low, envs.single_action_space.high
    np.testing.assert_allclose(actions, sample.clip(low, high), rtol=1e-6)
    with torch.no_grad():
        mean = double(learner.agent.actor(stored["obs"]))
        *_, entropy, ratio = learner.loss(batch)
    noise = (sample - mean) / np.exp(log_std)
    np.testing.assert_allclose(np.corrcoef(noise.reshape(-1, 3).T), np.eye(3), atol=0.15)
    assert kstest(noise.flatten(), "norm").pvalue > 1e-3 and len(np.unique(noise)) == noise.size
    np.testing.assert_allclose(stored["log_prob"], density(sample, mean, log_std), rtol=1e-4, atol=1e-4)
    assert entropy.item() == pytest.approx(norm.entropy(scale=np.exp(log_std)).sum(), rel=1e-5)
    torch.testing.assert_close(ratio, torch.zeros_like(ratio), atol=1e-4, rtol=0)
    learner.agent.log_std.data.add_(0.2)
    with torch.no_grad():
        *_, ratio = learner.loss(batch)
    wanted = density(sample, mean, log_std + 0.2) - density(sample, mean, log_std)
    np.testing.assert_allclose(double(ratio).flatten(), wanted.flatten(), rtol=1e-3, atol=1e-3)

    for t in (0, 1, 7, 48):
        for name, column, count in (("obs", raw, t + 1), ("next_obs", raw_next, t + 2)):
            known = double(raw[:count]).reshape(-1, 2)
            scaled = (double(column[t]) - known.mean(0)) / np.sqrt(known.var(0) + 1e-8)
            np.testing.assert_allclose(stored[name][t], scaled.clip(-10, 10), rtol=1e-3, atol=1e-3)


@each_script
def test_a_restored_learner_continues_bit_by_bit(script):
    def advance(learner, part):
        roll_out(learner, make_envs(script, learner.args), part)
        learner.update()

    checks.goes_on_when_restored(partial(make_learner, script), advance)


def noises(iteration, args):
    generator = torch.Generator().manual_seed(iteration)
    return torch.randn(args.num_steps, args.num_envs, 1, generator=generator)


def run(script, folder, device="cpu", iterations=6, **settings):
    """Losses of each iteration and the final learner of a run whose noise is fixed."""
    sizes = SIZES | {"total_timesteps": 36 * iterations, "run_dir": str(folder), "cuda": device == "cuda"} | settings
    args, losses, learners = script.Args(**{"env_id": SHORT.format("")} | sizes), [], []
    samples, rollouts = itertools.count(), itertools.count()

    class Sampled(torch.distributions.Normal):
        def sample(self):
            iteration, t = divmod(next(samples), args.num_steps)
            return self.mean + self.stddev * noises(iteration, args)[t]

    def start_rollout(self):
        self.noise.copy_(noises(next(rollouts), args))

    with pytest.MonkeyPatch.context() as monkeypatch, no_export():
        if hasattr(script.PPO, "start_rollout"):
            monkeypatch.setattr(script.PPO, "start_rollout", start_rollout)
        else:
            monkeypatch.setattr(script, "Normal", Sampled)
        log = lambda learner, values, step: losses.append(values)  # noqa: E731
        conftest.train(script, args, on_log=log, on_start=lambda run: learners.append(run.learner))
    return losses, learners[0]


def check_turbo(script, variant="", plain_script=PLAIN, mode="eager", **settings):
    """Whole runs of both agree: environments, statistics, losses, parameters."""
    settings |= {"env_id": SHORT.format(variant)}
    with pytest.MonkeyPatch.context() as monkeypatch, tempfile.TemporaryDirectory() as folder:
        fix_order(monkeypatch)
        wanted, plain = run(plain_script, folder, **settings)
        torch.manual_seed(0)
        got, turbo = run(script, folder, **settings, **conftest.MODES[mode])
    assert len(got) == len(wanted) == 6
    for iteration, (values, others) in enumerate(zip(got, wanted, strict=True)):
        assert values == pytest.approx(others, rel=1e-3, abs=1e-4), iteration
        assert values["episodes"] > 0
    ours, theirs = (dict(learner.agent.state_dict()) for learner in (turbo, plain))
    assert_close_in_norm(ours, theirs, 1e-4, least=1e-6)  # log_std is close to 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_turbo_equals_plain(variant):
    check_turbo(TURBO, variant=variant)


@pytest.mark.thorough
def test_the_edit_of_the_page(tmp_path):
    """Applied to both scripts, they still agree."""
    lines = re.search(r"```diff\n(.*?)```", PAGE.read_text(), re.S)[1].splitlines()
    edited = [load_copy(stem(s), apply_hunk(Path(s.__file__).read_text(), lines), tmp_path) for s in (PLAIN, TURBO)]
    for script in edited:
        layers = make_learner(script).agent.modules()
        assert sum(type(layer) is torch.nn.ELU for layer in layers) == 6
    check_turbo(edited[1], plain_script=edited[0])


@pytest.mark.thorough
def test_turbo_equals_plain_compiled():
    with one_graph_each(3):
        check_turbo(TURBO, mode="compile", reward_scaler=0.1)


# on the emulated device


@pytest.mark.thorough
def test_training_is_the_same_in_all_modes_and_schedules(tmp_path):
    """Where the environments reset in a step of its own, too."""
    settings = {"env_id": SHORT.format("NextStep"), "desired_kl": None, "ent_coef": 0.01}
    check_training(TURBO, tmp_path, 3, settings, runs=[(False, False), (True, False), (True, True)])


def iteration_counts(script, folder, variant="", num_steps=8, **settings):
    """Counts of an iteration in steady state on the emulated device, and those of its environment steps alone."""
    counted = []

    def on_start(run):
        step = run.envs.env.step

        def counting(actions):
            before = device.counts.copy()
            result = step(actions)
            inner.update(device.counts - before)
            return result

        run.envs.env.step = counting

    def on_log(learner, losses, step):
        counted.append((device.counts.copy(), inner.copy()))

    with no_export(), emulated_cuda() as device:
        inner = device.counts.copy()
        sizes = {"num_envs": 4, "num_steps": num_steps, "num_minibatches": 2, "update_epochs": 2, "cudagraphs": True}
        sizes["checkpoint_interval"] = 0
        sizes |= {"total_timesteps": 4 * num_steps * 6, "env_id": SHORT.format(variant), "run_dir": str(folder)}
        conftest.train(script, script.Args(**sizes | settings), on_log=on_log, on_start=on_start)
    (before, inner_before), (after, inner_after) = counted[-2:]
    return after - before, inner_after - inner_before


def check_counts(script, **settings):
    """The host waits once per iteration, for the log, and an environment step replays two graphs."""
    with tempfile.TemporaryDirectory() as folder:
        total, inner = iteration_counts(script, folder, **settings)
    assert inner["waits"] == inner["replays"] == 0
    assert (total["waits"], total["d2h"], total["h2d"]) == (1, 1, 0)
    assert total["replays"] == 2 * 8 + 1
    return total, inner


def test_the_host_waits_once_per_iteration():
    total, inner = check_counts(TURBO)
    assert total["operators"] - inner["operators"] == 8 * 6 + 5  # outside of graphs, besides the environment's own


def check_captured(script):
    """A run is the same with and without graphs; memory that a graph never wrote is NaN, which ends it."""
    with tempfile.TemporaryDirectory() as folder:
        check_training(script, Path(folder), runs=[(False, False), (True, True)])


# runs


@each_script
def test_a_run_its_continuation_and_its_policy(script, tmp_path, capsys):
    sizes = conftest.tiny(PLAIN) | {"env_id": SHORT.format("Asymmetric"), "num_steps": 10}
    learners = []
    keep = lambda run: learners.append(run.learner)  # noqa: E731
    conftest.train(script, script.Args(**sizes, total_timesteps=60, run_dir=str(tmp_path / "a")), on_start=keep)
    (first,) = (tmp_path / "a").iterdir()
    before = torch.load(first / "checkpoint.pt", weights_only=True)
    args = {"total_timesteps": 100, "run_dir": str(tmp_path / "b"), "resume": str(first)}
    conftest.train(script, script.Args(**sizes | args), on_start=lambda run: check_restored(run.learner, before))
    (second,) = (tmp_path / "b").iterdir()
    after = torch.load(second / "checkpoint.pt", weights_only=True)
    assert [each["global_step"] for each in (before, after)] == [60, 100]
    assert [len(scalars(folder, "charts/SPS")) for folder in (first, second)] == [3, 2]
    assert after["episodes"] > before["episodes"] > 0
    assert len(scalars(first, "charts/episodic_return")) == len(before["returns"]) == 3

    policy = torch.export.load(first / "policy.pt2").module()
    obs = 10 * torch.randn(5, 3)
    agent = learners[0].agent
    wanted = agent.actor(agent.normalizer(torch.cat((obs, torch.zeros(5, 4)), -1))[:, :3]).clamp(-2, 2)
    torch.testing.assert_close(policy(obs), wanted)
    command.main(["evaluate", str(first), "--episodes", "3"])
    assert "3 episodes: mean return -" in capsys.readouterr().out


def check_restored(learner, checkpoint):
    state, saved = learner.state_dict(), checkpoint["learner"]
    for name in ("networks", "optimizers"):
        conftest.assert_same_state(state[name], saved[name])


@pytest.mark.thorough
@each_script
def test_ppo_balances_a_pendulum(script, tmp_path):
    """A random policy holds it for about 6 steps, a perfect one for 1000."""
    pytest.importorskip("mujoco_warp")
    sizes = {"total_timesteps": 36_000, "num_envs": 64, "cuda": False}
    env_id = "environments.mujoco_warp:warp/InvertedPendulum-v5"
    script.train(script.Args(env_id=env_id, run_dir=str(tmp_path), **sizes))
    returns = scalars(next(tmp_path.iterdir()), "charts/episodic_return")
    assert returns[0] < 20 and np.mean(returns[-10:]) > 60


# planted bugs


check_steps_that_only_reset = test_steps_that_only_reset_change_nothing
check_learning_rate, check_asymmetric = test_the_learning_rate_follows_the_divergence, test_the_critic_may_see_more
check_update, check_modes = test_an_update_is_that_of_ppo, test_all_autoreset_modes_give_the_same_transitions
check_rollout, check_restart = test_a_rollout_holds_what_happened, test_a_restored_learner_continues_bit_by_bit
check_shapes = partial(test_other_shapes_are_an_error, "rewards have shape (3, 1), not (3,)")
check_flags = partial(test_numbers_of_any_type, "flags are int64", "NEXT_STEP")
check_graphs = partial(test_numbers_of_any_type, "with a graph", "SAME_STEP")
check_gyms = partial(test_gymnasiums_own_vector_environments, "", AutoresetMode.DISABLED)
check_memory = test_what_a_step_returned_outlives_the_reset
MASK = 'options={"reset_mask": ended.cpu().numpy() if self.in_numpy else ended}'
NEXT_EPISODES = ("torch.where(ended[:, None], final_obs, obs)", "obs")
NOT_MASKED = ("masked_mean(gains, valid)", "gains.mean()")
CLIPPED = ("obs=obs, actions=actions,", "obs=obs, actions=actions.clamp(self.agent.low, self.agent.high),")
TURBO_CLIPPED = ("(self.obs, actions), -1)", "(self.obs, actions.clamp(self.agent.low, self.agent.high)), -1)")
MEAN_DENSITY = ("log_prob = policy.log_prob(actions).sum(-1)", "log_prob = policy.log_prob(actions).mean(-1)")
LATER_SCALE = ("obs = self.observe(obs)\n        outcome", "self.observe(obs)\n        outcome")
SAME_NUMBERS = ('        torch.set_rng_state(state["rng"])\n', "")
BUGS = [
    (PLAIN, "the last observation is the next episode's", *NEXT_EPISODES, check_modes),
    (PLAIN, "steps that only reset are transitions", "self.valid = ~ended", "self.valid = valid", check_modes),
    (PLAIN, "all worlds are reset", f"reset({MASK})", "reset()", check_modes),
    (PLAIN, "gymnasium's own reset although no episode ended", "not self.in_numpy or ended.any()", "True", check_gyms),
    (PLAIN, "gymnasium's own get a tensor as mask", MASK, 'options={"reset_mask": ended}', check_gyms),
    (PLAIN, "integers as flags", '"terminated", terminated).bool()', '"terminated", terminated)', check_flags),
    (PLAIN, "rewards with a graph", "device=self.device).detach()", "device=self.device)", check_graphs),
    (PLAIN, "other shapes are broadcast", "values.shape != self.shape + width", "False", check_shapes),
    (
        PLAIN,
        "rewards that the reset clears",
        "rewards.clone(), terminated.clone()",
        "rewards, terminated",
        check_memory,
    ),
    (PLAIN, "terminal states have a value", ' * (1 - rollout["terminated"])', "", check_update),
    (PLAIN, "steps that only reset are learned", *NOT_MASKED, check_steps_that_only_reset),
    (PLAIN, "the critic sees the policy's columns", "-self.critic_dim :", ": self.critic_dim", check_asymmetric),
    (PLAIN, "the rate has no upper limit", ", 1e-2)", ", 1.0)", check_learning_rate),
    (PLAIN, "returns go on in the next episode", "self.current.sub_(over[:, 1:])", "pass", check_counter),
    (PLAIN, "actions stored within their bounds", *CLIPPED, check_rollout),
    (TURBO, "actions stored within their bounds", *TURBO_CLIPPED, check_rollout),
    (PLAIN, "rewards that are not scaled", "self.args.reward_scaler * rewards", "rewards", check_rollout),
    (TURBO, "rewards that are not scaled", "self.args.reward_scaler * rewards", "rewards", check_rollout),
    (PLAIN, "densities of one dimension", *MEAN_DENSITY, check_rollout),
    (TURBO, "densities of one dimension", ").sum(-1, keepdim=True)", ").mean(-1, keepdim=True)", check_rollout),
    (PLAIN, "entropy of one dimension", "entropy().sum(-1)", "entropy().mean(-1)", check_rollout),
    (TURBO, "entropy of one dimension", "expand_as(actions).sum(-1)", "expand_as(actions).mean(-1)", check_rollout),
    (PLAIN, "observations scaled by later statistics", *LATER_SCALE, check_rollout),
    (PLAIN, "the same random numbers again", *SAME_NUMBERS, check_restart),
    (TURBO, "the same random numbers again", *SAME_NUMBERS, check_restart),
    (TURBO, "advantages go on in the next episode", "* (1 - ended))", "+ 0 * ended)", check_update),
    (TURBO, "one noise for all steps", "index_select(0, self.t)", "index_select(0, 0 * self.t)", check_turbo),
    (TURBO, "one row of the rollout", "(self.t + 1) % self.args.num_steps", "self.t", check_turbo),
    (TURBO, "the rate goes away from its aim", "1.5**direction", "1.5**-direction", check_learning_rate),
]
ERRORS = (AssertionError, TypeError, ValueError)
test_a_planted_bug_is_noticed = pytest.mark.thorough(noticing(BUGS, ERRORS))
WAIT = (
    "        self.learn()\n\n    @torch.no_grad()",
    "        self.learn()\n        self.losses()\n\n    @torch.no_grad()",
)
OTHER_NOISE = ("self.noise.normal_()", "self.noise = torch.randn_like(self.noise)")
RATE = 'self.optimizers["agent"].lr'
REBOUND = (f"{RATE}.mul_(1.5**direction).clamp_(1e-5, 1e-2)", f"{RATE} = ({RATE} * 1.5**direction).clamp(1e-5, 1e-2)")
PYTHONS = "self.at = (getattr(self, 'at', 0) + 1) % self.args.num_steps\n        self.t.fill_(self.at)"
STEP = ("self.t.copy_((self.t + 1) % self.args.num_steps)", PYTHONS)
LATER = [  # on the emulated device
    (TURBO, "a wait in the loop", *WAIT, check_counts),
    (TURBO, "noise in other memory", *OTHER_NOISE, check_captured),
    (TURBO, "the learning rate rebound", *REBOUND, check_captured),
    (TURBO, "the step of the rollout kept in Python", *STEP, check_captured),
]
test_a_planted_bug_is_noticed_on_the_device = pytest.mark.planted(noticing(LATER, (AssertionError, SystemExit)))
