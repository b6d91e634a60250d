"""PPO with memory: plain against turbo, resets, bootstrapping, resuming, capture, planted bugs, and a maze to learn."""

import json
import re
import tempfile
from functools import partial
from pathlib import Path

import conftest
import gymnasium as gym
import numpy as np
import pytest
import torch
from checks import goes_on_when_restored, plain_and_turbo
from conftest import (
    MODES,
    assert_learners_agree,
    copy_networks,
    make_learner,
    one_graph_each,
    scalars,
    stem,
)
from formulas import assert_noticed
from test_cli import refused
from test_ppo import fix_order, textbook_advantages
from test_training_on_cuda import RUNS, check_against_cpu, check_training
from torch.distributions import Categorical, Normal

from leanrl import ppo_lstm as PLAIN
from leanrl import ppo_lstm_torchcompile as TURBO

CELLS = ("lstm", "gru")
DISCRETE, CONTINUOUS = "CartPole-v1", "Unequal-v0"
script = plain_and_turbo("ppo_lstm")
each_cell = pytest.mark.parametrize("cell", CELLS)
each_env = pytest.mark.parametrize("env_id", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])


class TMaze(gym.Env):
    """A corridor with a junction at its end. Only the first observation shows which way pays there.

    Observations are the cue, 1 or -1 at the start and 0 elsewhere, and whether this is the junction. Actions: forward,
    left, right. A turn at the junction ends the episode with a reward of 1 or -1; one in the corridor costs 0.1.
    """

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, length=10):
        self.length = length

    def observation(self):
        return np.array([self.cue * (self.place == 0), self.place == self.length], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cue = self.np_random.choice([-1, 1])
        self.place = self.steps = 0
        return self.observation(), {}

    def step(self, action):
        self.steps += 1
        late = self.steps == 5 * self.length
        if self.place == self.length and action > 0:
            return self.observation(), 1.0 if self.cue == (-1 if action == 1 else 1) else -1.0, True, False, {}
        self.place = min(self.place + (action == 0), self.length)
        return self.observation(), -0.1 * (action > 0), False, late, {}


gym.register("TMaze-v0", entry_point=TMaze)
gym.register("TMaze50-v0", entry_point=TMaze, kwargs={"length": 50})


def decided(learner):
    """Views of what a plain or turbo learner has stored of a rollout, by name, (num_steps, num_envs, ...)."""
    if isinstance(learner.rollout, dict):
        return learner.rollout
    obs, starts, _, next_obs, actions, numbers = learner.rollout.split(learner.rollout_widths, -1)
    columns = {"obs": obs, "starts": starts.squeeze(-1), "next_obs": next_obs, "actions": actions}
    columns |= zip(("rewards", "terminated", "ended"), numbers.unbind(-1), strict=True)
    return columns | {"states": learner.states[1:]}


def batch_of(learner):
    """The rollout's transitions with their values, advantages and returns, by name."""
    batch = learner.make_batch()
    if batch is None:
        obs, actions, numbers = learner.batch.split(learner.batch_widths, -1)
        names = ("starts", "log_prob", "values", "advantages", "returns")
        batch = {"obs": obs, "actions": actions} | dict(zip(names, numbers.unbind(-1), strict=True))
    return batch


def first_state(learner):
    """The states that the rollout begins with."""
    return learner.first_state if hasattr(learner, "first_state") else learner.states[0]


def roll_out(learners, seed=0, ends=0.15):
    """Give all learners the same rollout: random steps, with episode ends, and the actions of the first one."""
    generator, first = np.random.default_rng(seed), learners[0]
    n, obs_dim = first.args.num_envs, first.example.shape[1]
    obs = [generator.standard_normal((n, obs_dim)).astype(np.float32)] * len(learners)
    for learner in learners:
        learner.start_rollout()
    for t in range(first.args.num_steps):
        next_obs, act_on, rewards = (generator.standard_normal((n, *width)) for width in ((obs_dim,), (obs_dim,), ()))
        terminated, truncated = generator.random((2, n)) < ends
        ended = terminated | truncated
        act_on = np.where(ended[:, None], act_on, next_obs) if ended.any() else next_obs
        for i, learner in enumerate(learners):
            learner.act(t, obs[i])
            decided(learner)["actions"][t] = decided(first)["actions"][t]
            obs[i] = learner.record(t, next_obs, rewards, terminated, ended, act_on)


def remembering(script, **kwargs):
    """A learner whose policy depends on its state."""
    learner = make_learner(script, **kwargs)
    with torch.no_grad():
        learner.agent.actor.weight.mul_(100)
    return learner


@torch.no_grad()
def replayed(learner):
    """Values and states of a rollout, computed for each episode alone, from a state of 0 or that at the start."""
    steps = {name: column.clone() for name, column in decided(learner).items()}
    values, states = torch.zeros_like(steps["rewards"]), torch.zeros_like(steps["states"])
    for env in range(learner.args.num_envs):
        state = first_state(learner)[env : env + 1]
        begins = steps["starts"][0, env]
        for t in range(learner.args.num_steps):
            if begins:
                state = torch.zeros_like(state)
            state = learner.agent.remember(steps["obs"][t, env : env + 1], state)
            values[t, env], states[t, env] = learner.agent.value(state), state
            begins = steps["ended"][t, env]
    return values, states


# plain against turbo


def check_equal(script=TURBO, mode="eager", **kwargs):
    """From the same weights and rollouts, all agrees after one iteration and after fifty minibatches."""
    plain = make_learner(PLAIN, **kwargs)
    turbo = make_learner(script, **kwargs, **MODES[mode])
    copy_networks(plain, turbo)
    graphs = {"eager": 0, "compile": 5}[mode]  # whatever the number of steps
    with one_graph_each(graphs), pytest.MonkeyPatch.context() as patch:
        fix_order(patch)
        for iteration in range(13):
            roll_out([plain, turbo], seed=iteration)
            torch.testing.assert_close(decided(turbo)["states"], plain.rollout["states"], rtol=1e-4, atol=1e-5)
            for learner in (plain, turbo):
                learner.update(1e-3 * (1 - iteration / 13))
            if iteration in (0, 12):
                assert_learners_agree(plain, turbo, tolerance=1e-5, gradient_tolerance=1e-4)


OTHER_LOSSES = {"clip_vloss": False, "norm_adv": False, "ent_coef": 0.0, "bootstrap_truncation": False}


@each_env
@each_cell
def test_turbo_equals_plain(cell, env_id):
    check_equal(cell=cell, env_id=env_id)


@pytest.mark.thorough
@pytest.mark.parametrize(("cell", "env_id"), [("lstm", DISCRETE), ("gru", CONTINUOUS)])
def test_turbo_equals_plain_compiled(cell, env_id):
    check_equal(mode="compile", cell=cell, env_id=env_id)


@each_env
def test_turbo_equals_plain_with_other_losses(env_id):
    check_equal(env_id=env_id, **OTHER_LOSSES)


@each_cell
def test_the_recurrent_weights_have_autograds_gradient(cell):
    """`RecurrentBias` gives the gradients that autograd computes step by step, resets included."""
    learner = remembering(TURBO, cell=cell, num_minibatches=1)
    roll_out([learner])
    batch = batch_of(learner)
    columns = [batch[name] for name in ("actions", "log_prob", "values", "advantages", "returns")]
    gradients = []
    for unroll in (learner.unroll, partial(PLAIN.PPO.unroll, learner)):
        states = unroll(batch["obs"], batch["starts"], first_state(learner).clone())
        loss, _ = learner.loss(states, *columns)
        gradients.append(torch.autograd.grad(loss, list(learner.agent.parameters())))
    for (name, _), got, wanted in zip(learner.agent.named_parameters(), *gradients, strict=True):
        assert wanted.norm() > 0, name
        assert (got - wanted).norm() < 1e-5 * wanted.norm(), name


@each_env
@each_cell
def test_sampled_actions_follow_the_policy(script, cell, env_id):
    """The shares of actions, or their mean and deviation, are those of torch's distribution."""
    learner = remembering(script, cell=cell, env_id=env_id, num_envs=2000, num_steps=1)
    obs = np.tile(np.random.default_rng(0).standard_normal((1, learner.example.shape[1])), (2000, 1)).astype(np.float32)
    draws = set()
    for _ in range(3):
        learner.start_rollout()
        learner.start[:] = True
        learner.act(0, obs)
        actions = decided(learner)["actions"][0]
        with torch.no_grad():
            state = learner.agent.remember(torch.from_numpy(obs), torch.zeros_like(learner.state))
            outputs = learner.agent.actor(state[:, : script.HIDDEN])
        if env_id == DISCRETE:
            policy = Categorical(logits=outputs)
            wanted, log_prob = policy.probs[:1, 1], policy.log_prob(actions[:, 0])
        else:
            policy = Normal(outputs, 1.0)
            wanted, log_prob = outputs[0], policy.log_prob(actions).sum(-1)
            torch.testing.assert_close(actions.std(0), torch.ones(3), rtol=0, atol=0.1)
        torch.testing.assert_close(actions.mean(0), wanted, rtol=0, atol=0.1)
        torch.testing.assert_close(batch_of(learner)["log_prob"][0], log_prob, rtol=1e-4, atol=1e-5)
        draws.add(actions.double().sum().item())
    assert len(draws) == 3


# memory


@each_cell
def test_a_reset_inside_a_rollout_begins_a_new_sequence(script, cell):
    """Episodes in a rollout, which end and begin anywhere, are those that an agent sees one by one."""
    learner = remembering(script, cell=cell)
    for iteration in range(2):  # the second one begins in the middle of episodes
        roll_out([learner], seed=iteration)
        assert 3 < decided(learner)["ended"].sum() < decided(learner)["ended"].numel() - 3
        values, states = replayed(learner)
        torch.testing.assert_close(decided(learner)["states"], states, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(batch_of(learner)["values"], values, rtol=1e-4, atol=1e-5)


@each_env
@each_cell
def test_learning_sees_what_acting_saw(script, cell, env_id):
    """With a learning rate of 0 the ratio of probabilities is 1 in all minibatches, whatever the order."""
    learner = remembering(script, cell=cell, env_id=env_id)
    for iteration in range(3):
        roll_out([learner], seed=iteration, ends=0.05)
        learner.update(0.0)
        assert learner.losses()["approx_kl"] == pytest.approx(0, abs=2e-7)
        assert learner.losses()["clipfrac"] == 0
        assert learner.losses()["first_log_ratio"] < 1e-4


def test_a_cell_that_acts_in_another_way_than_it_learns_is_logged(tmp_path):
    """Also with --target-kl, which runs each epoch by itself."""
    turbo = conftest.TURBO["ppo_lstm"]
    source = Path(turbo.__file__).read_text()
    edit = ("(from_obs + from_state).chunk(4, -1)", "(from_obs + from_state + 0.1).chunk(4, -1)")
    assert source.count(edit[0]) == 1
    copy = conftest.load_copy("ppo_lstm_torchcompile", source.replace(*edit), tmp_path)
    for target_kl in (None, 1e9):
        for script, least, most in ((turbo, 0.0, 1e-4), (copy, 1e-3, 1.0)):
            learner = remembering(script, cell="lstm", target_kl=target_kl)
            roll_out([learner], seed=0, ends=0.05)
            learner.update(3e-3)
            assert least <= learner.losses()["first_log_ratio"] < most


def test_environments_are_apart(script):
    """What one environment shows changes nothing in another one."""
    results = []
    for other in (0.0, 1.0):
        learner = remembering(script)
        learner.start_rollout()
        for t in range(learner.args.num_steps):
            obs = np.full((learner.args.num_envs, learner.example.shape[1]), np.sin(t), np.float32)
            obs[1:] += other
            learner.act(t, obs)
            nothing = np.zeros(learner.args.num_envs, bool)
            learner.record(t, obs, nothing.astype(np.float64), nothing, nothing, obs)
        results.append(decided(learner)["states"].clone())
    torch.testing.assert_close(results[0][:, 0], results[1][:, 0])
    assert not torch.allclose(results[0][:, 1], results[1][:, 1])


@each_cell
def test_truncated_episodes_bootstrap_with_their_own_state(script, cell):
    """Advantages are the textbook's, with the value of the last observation by the state that has seen the episode."""
    learner = remembering(script, num_steps=20, cell=cell)
    roll_out([learner])
    roll_out([learner], seed=1)
    values, states = replayed(learner)
    steps = {name: column.clone() for name, column in decided(learner).items()}
    next_values = torch.zeros_like(values)
    with torch.no_grad():
        for t in range(learner.args.num_steps):
            next_values[t] = learner.agent.value(learner.agent.remember(steps["next_obs"][t], states[t]))
    batch = batch_of(learner)
    columns = (steps["rewards"], values, next_values, steps["terminated"], steps["ended"])
    wanted = textbook_advantages(*(column.detach().double().numpy() for column in columns), 0.99, 0.95)
    np.testing.assert_allclose(batch["advantages"].numpy(), wanted, rtol=1e-4, atol=1e-4)
    assert (steps["ended"] != steps["terminated"]).any()


@each_env
def test_explained_variance(script, env_id):
    """The share of the returns' variance that the values of the rollout explain."""
    learner = remembering(script, env_id=env_id)
    roll_out([learner])
    learner.update(0.0)
    batch = batch_of(learner)
    values, returns = (batch[name].double().numpy() for name in ("values", "returns"))
    wanted = 1 - (returns - values).var() / returns.var()
    assert abs(wanted) > 1e-3 and learner.losses()["explained_variance"] == pytest.approx(wanted, rel=1e-3)


# runs: resuming, policies, refusals

TINY = {"num_envs": 4, "num_steps": 8, "num_minibatches": 2, "update_epochs": 1, "cuda": False}


@each_cell
def test_a_restored_learner_continues(script, cell):
    """Bit by bit, with new episodes."""

    def advance(learner, part):
        learner.start[:] = True
        learner.normalizer.rows[:] = 0
        roll_out([learner], seed=part)
        learner.update(1e-3)

    goes_on_when_restored(partial(remembering, script, cell=cell), advance)


def test_a_resumed_run_begins_with_new_episodes(script, tmp_path):
    """As any run does, and so with a state of 0."""
    seen = []

    def on_log(learner, losses, step):
        seen.append(({name: decided(learner)[name][0].clone() for name in ("obs", "starts", "states")}, learner))

    args = script.Args(env_id="Unequal-v0", run_dir=str(tmp_path), total_timesteps=32, **TINY)
    args.learning_rate = 1e-10  # all states are of the same weights
    conftest.train(script, args, on_log)
    (run,) = tmp_path.glob("*/checkpoint.pt")
    args.total_timesteps, args.resume = 64, str(run)
    conftest.train(script, args, on_log)
    assert len(seen) == 2
    for first, learner in seen:
        assert first["starts"].all()
        with torch.no_grad():
            wanted = learner.agent.remember(first["obs"], torch.zeros_like(first["states"]))
        torch.testing.assert_close(first["states"], wanted)


@each_env
@each_cell
def test_the_exported_policy_takes_and_returns_its_state(script, cell, env_id, tmp_path):
    sizes = TINY | {"total_timesteps": 64, "env_id": env_id, "cell": cell}
    script.train(script.Args(run_dir=str(tmp_path), **sizes))
    (folder,) = tmp_path.iterdir()
    learner = make_learner(script, seed=2, **sizes)
    learner.load_state_dict(torch.load(folder / "checkpoint.pt", weights_only=True)["learner"])
    exported = torch.export.load(folder / "policy.pt2").module()
    agent = learner.agent
    for batch in (1, 7):
        state = own_state = torch.zeros(batch, agent.state_dim)
        for _ in range(3):
            obs = torch.randn(batch, learner.example.shape[1])
            with torch.no_grad():
                actions, state = exported(obs, state)
                own_state = agent.remember(torch.from_numpy(learner.normalizer.scale_obs(obs.numpy())), own_state)
                outputs = agent.actor(own_state[:, : script.HIDDEN])
            torch.testing.assert_close(state, own_state)
            if env_id == DISCRETE:
                assert torch.equal(actions, outputs.argmax(-1))
            else:
                space = learner.action_space
                torch.testing.assert_close(actions.numpy(), outputs.numpy().clip(space.low, space.high))
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["script"] == stem(script) and summary["global_step"] == 64


WRONG = [
    ({"num_minibatches": 3}, "--num-minibatches 3: give a divisor of num_envs, 4"),
    ({"num_minibatches": 4, "num_steps": 1}, "--num-steps 1: give at least 2"),
    ({"env_id": "CountsFromOne-v0"}, "--env-id CountsFromOne-v0: actions must be"),
    ({"env_id": "Unbounded-v0"}, "--env-id Unbounded-v0: actions must be"),
]


@pytest.mark.parametrize(("wrong", "line"), WRONG)
def test_what_does_not_fit_is_refused(script, wrong, line, tmp_path, capsys):
    args = script.Args(run_dir=str(tmp_path), **TINY | wrong)
    assert refused(capsys, partial(script.train, args)).startswith(f"error: {line}")
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_of_another_cell_is_refused(script, tmp_path, capsys):
    script.train(script.Args(run_dir=str(tmp_path), total_timesteps=32, **TINY))
    (run,) = tmp_path.iterdir()
    args = script.Args(run_dir=str(tmp_path), total_timesteps=64, resume=str(run), **TINY | {"cell": "gru"})
    capsys.readouterr()
    line = refused(capsys, partial(script.train, args))
    assert line.startswith(f"error: --resume {run}: this checkpoint does not fit the script: ")


# capture

ON_CUDA = [
    ({"cell": "lstm"}, RUNS),
    ({"cell": "gru", "env_id": "Unequal-v0"}, [RUNS[0], RUNS[-1]]),
    ({"cell": "gru", "target_kl": 1e-4}, [RUNS[0], RUNS[-1]]),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("settings", "runs"), ON_CUDA, ids=["discrete", "continuous", "target_kl"])
def test_training_is_the_same_in_all_modes_and_schedules(settings, runs, tmp_path):
    check_training(TURBO, tmp_path, settings={"env_id": DISCRETE} | settings, runs=runs)


@pytest.mark.thorough
@each_env
def test_training_is_that_of_the_cpu(env_id, tmp_path):
    check_against_cpu(TURBO, tmp_path, {"env_id": env_id})


# planted bugs


def check_captured(script):
    with tempfile.TemporaryDirectory() as folder:
        check_training(script, Path(folder), settings={"env_id": "Truncates-v0"}, runs=[RUNS[0], RUNS[-1]])


def check_resumed(script):
    with tempfile.TemporaryDirectory() as folder:
        test_a_resumed_run_begins_with_new_episodes(script, Path(folder))


resets = partial(test_a_reset_inside_a_rollout_begins_a_new_sequence, cell="lstm")
same_in_learning = partial(test_learning_sees_what_acting_saw, cell="lstm", env_id=DISCRETE)
bootstrap = partial(test_truncated_episodes_bootstrap_with_their_own_state, cell="lstm")
restored = partial(test_a_restored_learner_continues, cell="lstm")
LATE = "getattr(self, 'late', self.start.copy()), ended.copy()"
LATE_TURBO = f"self.ended[t] = ended\n        self.start[:, 0], self.late = {LATE.replace('start', 'start[:, 0]')}"
MIXED = "self.critic(state[..., :HIDDEN] + 0.1 * state[..., :HIDDEN].mean(0)).squeeze(-1)"
VALUE = "self.critic(state[..., :HIDDEN]).squeeze(-1)"
STEPS = "zip(obs, starts, strict=True)"
GOES_ON = "goes_on = 1 - starts.unsqueeze(-1)"
FIRST_MASK = f"{GOES_ON}\n        goes_on = vars(self).setdefault('mask', goes_on)"
RESET = "(1 - starts) * self.state"
RESET_ALL = "state = goes_on[t] * state"
RESET_HIDDEN = "state = torch.cat((goes_on[t] * state[:, :HIDDEN], state[:, HIDDEN:]), -1)"
BRANCH = "(1 - starts) * self.state if self.start.any() else self.state"
OWN_STATE = "self.states[0].index_select(0, env_ids)"
PLAIN_BUGS = [  # what is wrong, what is replaced by what, who sees it
    ("no reset in acting", "(1 - starts)[:, None] * self.state", "self.state", resets),
    ("no reset in learning", "(1 - start)[:, None] * state", "state", same_in_learning),
    ("reset one step late", "self.start = ended", f"self.start, self.late = {LATE}", resets),
    ("reset one step late in learning", STEPS, "zip(obs, starts.roll(1, 0), strict=True)", same_in_learning),
    ("environments mix", VALUE, MIXED, resets),
    ("state of another environment", "self.first_state[envs])", "self.first_state[envs.flip(0)])", same_in_learning),
    ("sequences begin with the last state", "self.first_state[envs])", "self.state[envs])", same_in_learning),
    ("mask of the first step for all", STEPS, "zip(obs, [starts[0]] * len(obs), strict=True)", same_in_learning),
    ("bootstrap without memory", 'rollout["states"].flatten(0, 1))', '0 * rollout["states"].flatten(0, 1))', bootstrap),
    ("normalizer not restored", '            tensor.copy_(state["normalizer"][name])', "            pass", restored),
    ("no new episodes", "self.start = np.ones(", "self.start = np.zeros(", check_resumed),
]
TURBO_BUGS = [
    ("no reset in acting", RESET, "self.state", resets),
    ("no reset in learning", GOES_ON, "goes_on = torch.ones_like(starts).unsqueeze(-1)", same_in_learning),
    ("no reset of the cell state", RESET_ALL, RESET_HIDDEN, same_in_learning),
    ("gradient across resets", "(goes_on * states[:-1, :, :HIDDEN])", "(states[:-1, :, :HIDDEN])", check_equal),
    ("gradient without states", "hidden.copy_", "hidden.clone().copy_", check_equal),
    (
        "gradient of the states after",
        "goes_on * states[:-1, :, :HIDDEN]",
        "goes_on * states[1:, :, :HIDDEN]",
        check_equal,
    ),
    ("reset one step late", "self.ended[t] = self.start[:, 0] = ended", LATE_TURBO, resets),
    ("reset one step late in learning", GOES_ON, f"{GOES_ON}.roll(1, 0)", same_in_learning),
    ("environments mix", VALUE, MIXED, resets),
    ("state of another environment", OWN_STATE, "self.states[0].index_select(0, env_ids.flip(0))", same_in_learning),
    ("sequences begin with the last state", OWN_STATE, "self.state.index_select(0, env_ids)", same_in_learning),
    ("mask of the first minibatch for all", GOES_ON, FIRST_MASK, check_equal),
    ("mask frozen at capture", RESET, BRANCH, check_captured),
    ("state rebound", "self.state.copy_(state)", "self.state = state", check_captured),
    ("first state rebound", "self.states[0].copy_(self.state)", "self.states = self.states.roll(1, 0)", check_captured),
    ("bootstrap without memory", "states.flatten(0, 1))", "0 * states.flatten(0, 1))", bootstrap),
    ("normalizer not saved", ', "normalizer": self.normalizer.tensors()}', "}", restored),
    ("no new episodes", "self.start = np.ones(", "self.start = np.zeros(", check_resumed),
]
LONG = ("state rebound", "first state rebound")  # `check_captured` finds them, as it finds "mask frozen at capture"
BUGS = [
    pytest.param(script, *change, id=f"{kind}, {what}", marks=[pytest.mark.thorough] * (what in LONG))
    for kind, script, bugs in (("plain", PLAIN, PLAIN_BUGS), ("turbo", TURBO, TURBO_BUGS))
    for what, *change in bugs
]


@pytest.mark.parametrize(("script", "old", "new", "check"), BUGS)
def test_a_planted_bug_is_caught(script, old, new, check, tmp_path):
    error = assert_noticed(script, old, new, check, tmp_path, (AssertionError, RuntimeError, KeyError, SystemExit))
    assert not isinstance(error, SystemExit) or str(error).startswith("error: step ")  # NaN


@pytest.mark.parametrize("check", [check_captured], ids=["captured"])
def test_the_script_as_it_is_passes(check):
    """All other checks that notice bugs are tests of their own."""
    check(TURBO)


# learning

MAZE = {"env_id": "TMaze-v0", "total_timesteps": 60_000, "num_envs": 16, "num_steps": 64, "cuda": False}
LONG_MAZE = MAZE | {"env_id": "TMaze50-v0", "total_timesteps": 150_000, "num_steps": 128}


def returns_in_the_maze(script, folder, **kwargs):
    """Mean return of the last 100 episodes."""
    script.train(script.Args(run_dir=str(folder), **MAZE | kwargs))
    (run,) = folder.iterdir()
    return np.mean(scalars(run, "charts/episodic_return")[-100:])


def test_turbo_learns_to_remember(tmp_path):
    assert returns_in_the_maze(TURBO, tmp_path, cell="gru", total_timesteps=40_000) > 0.8


@pytest.mark.finding
@pytest.mark.parametrize("cell", CELLS)
def test_it_learns_to_remember(script, cell, tmp_path):
    """A policy without memory has a return of 0 at most: see test_edits.py."""
    assert returns_in_the_maze(script, tmp_path, cell=cell) > 0.8


@pytest.mark.finding
def test_a_gru_remembers_for_50_steps(tmp_path):
    """An LSTM does not, with these settings."""
    assert returns_in_the_maze(TURBO, tmp_path, cell="gru", **LONG_MAZE) > 0.8


@pytest.mark.parametrize("task", ["RepeatPrevious", "PositionOnlyCartPole", "PositionOnlyPendulum"])
def test_popgym(script, task, tmp_path):
    """The tasks of doc/ppo_lstm.md train, by the names that it gives them, and resume."""
    pytest.importorskip("popgym")
    args = script.Args(env_id=f"popgym:popgym-{task}Easy-v0", run_dir=str(tmp_path), total_timesteps=64, **TINY)
    script.train(args)
    (run,) = tmp_path.iterdir()
    assert run.name.startswith(f"{args.env_id.replace(':', '_')}__{stem(script)}__1__")
    assert (run / "policy.pt2").exists()
    args.total_timesteps, args.resume = 128, str(run)
    script.train(args)
    (resumed,) = set(tmp_path.iterdir()) - {run}
    assert json.loads((resumed / "summary.json").read_text())["global_step"] == 128


def accepted(script, env_id):
    """Whether the script takes the observations and actions of an environment."""
    args = script.Args(env_id=env_id, num_envs=1)
    try:
        script.require_actions(args, script.make_envs(args, folder=None))
    except SystemExit:
        return False
    return True


def test_which_of_popgyms_tasks_fit(script, tmp_path, monkeypatch):
    """As doc/ppo_lstm.md says, whose wrappers help with what does not."""
    pytest.importorskip("popgym")
    names = [name for name in gym.registry if re.fullmatch(r"popgym-\w+(Easy|Medium|Hard)-v0", name)]
    names = [name for name in names if "Labyrinth" not in name]  # needs mazelib
    misfits = {name.split("-")[1] for name in names if not accepted(script, name)}
    games = ("Battleship", "MineSweeper")
    assert len(names) == 42 and misfits == {f"{game}{level}" for game in games for level in ("Easy", "Medium", "Hard")}
    page = (Path(__file__).parents[2] / "doc" / "ppo_lstm.md").read_text()
    (module,) = re.findall(r"^```python\n(.*?)^```$", page, flags=re.M | re.S)
    (tmp_path / "my_tasks.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    args = script.Args(env_id="my_tasks:BattleshipEasy-v0", run_dir=str(tmp_path / "runs"), total_timesteps=64, **TINY)
    script.train(args)
