"""PPO with memory: plain against turbo, resets, bootstrapping, resuming, capture, planted bugs, and a maze to learn."""

import json
import re
from pathlib import Path

import conftest
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import (
    MODES,
    assert_learners_agree,
    assert_same_state,
    copy_networks,
    load_copy,
    make_learner,
    saved,
    scalars,
    split_columns,
    stem,
)
from test_ppo import fix_order, textbook_advantages
from test_training_on_cuda import RUNS, check_against_cpu, check_training

from leanrl import ppo_lstm as PLAIN
from leanrl import ppo_lstm_torchcompile as TURBO

CELLS = ("lstm", "gru")
DISCRETE, CONTINUOUS = "CartPole-v1", "Unequal-v0"
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


@pytest.fixture(params=[PLAIN, TURBO], ids=["plain", "turbo"])
def script(request):
    return request.param


def decided(learner):
    """Views of what a plain or turbo learner has stored of a rollout, by name, (num_steps, num_envs, ...)."""
    if hasattr(learner, "rollout"):
        return learner.rollout
    blocks = (
        (learner.inputs, learner.input_shapes),
        (learner.decisions, learner.decision_shapes),
        (learner.outcomes, learner.outcome_shapes),
    )
    columns = {"states": learner.states}
    for rows, shapes in blocks:
        columns |= split_columns(rows, shapes)
    return columns


def roll_out(learners, seed=0, ends=0.15):
    """Give all learners the same rollout: random steps, with episode ends, and the actions of the first one."""
    generator, first = np.random.default_rng(seed), learners[0]
    n, obs_dim = first.args.num_envs, len(first.normalizer.mean) - 1
    obs = [generator.standard_normal((n, obs_dim)).astype(np.float32)] * len(learners)
    for t in range(first.args.num_steps):
        next_obs, last_obs, rewards = (generator.standard_normal((n, *width)) for width in ((obs_dim,), (obs_dim,), ()))
        terminated, truncated = generator.random((2, n)) < ends
        last_obs = np.where((terminated | truncated)[:, None], last_obs, next_obs)
        for i, learner in enumerate(learners):
            learner.act(t, obs[i])
            for name in ("actions", "log_prob"):
                decided(learner)[name][t] = decided(first)[name][t]
            obs[i] = learner.record(t, next_obs, last_obs, rewards, terminated, terminated | truncated)


def remembering(script, **kwargs):
    """A learner whose policy depends on its state."""
    learner = make_learner(script, **kwargs)
    network = getattr(learner.agent, "network", learner.agent)
    with torch.no_grad():
        network.actor.weight.mul_(100)
    return learner


def network_of(learner):
    return getattr(learner.agent, "network", learner.agent)


def replayed(learner):
    """Values and states of a rollout, computed for each episode alone, from a state of 0 or that at the start."""
    steps = {name: column.clone() for name, column in decided(learner).items()}
    values, states = torch.zeros_like(steps["values"]), torch.zeros_like(steps["states"])
    for env in range(learner.args.num_envs):
        state = learner.first_state[env : env + 1]
        begins = steps["starts"][0, env]
        for t in range(learner.args.num_steps):
            if begins:
                state = torch.zeros_like(state)
            _, _, values[t, env], state = network_of(learner)(steps["obs"][t, env : env + 1], state)
            states[t, env] = state
            begins = steps["ended"][t, env]
    return values, states


# ---------------------------------------------------------------------------------------------------------------------
# Plain against turbo
# ---------------------------------------------------------------------------------------------------------------------


def check_equal(plain_script, turbo_script, monkeypatch, mode="eager", **kwargs):
    """From the same weights and rollouts, all agrees after one iteration and after ten."""
    plain = make_learner(plain_script, **kwargs)
    turbo = make_learner(turbo_script, **kwargs, **MODES[mode])
    copy_networks(plain, turbo)
    fix_order(monkeypatch)
    for iteration in range(10):
        roll_out([plain, turbo], seed=iteration)
        torch.testing.assert_close(turbo.states, plain.rollout["states"], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(decided(turbo)["values"], plain.rollout["values"], rtol=1e-3, atol=1e-4)
        decided(turbo)["values"].copy_(plain.rollout["values"])
        for learner in (plain, turbo):
            learner.update(1e-3 * (1 - iteration / 10))
        if iteration in (0, 9):
            assert_learners_agree(plain, turbo, tolerance=1e-5 if iteration == 0 else 1e-4)


OTHER_LOSSES = {"clip_vloss": False, "norm_adv": False, "ent_coef": 0.0, "bootstrap_truncation": False}


@each_env
@each_cell
@pytest.mark.parametrize("mode", ["eager", pytest.param("compile", marks=pytest.mark.thorough)])
def test_turbo_equals_plain(mode, cell, env_id, monkeypatch):
    check_equal(PLAIN, TURBO, monkeypatch, mode, cell=cell, env_id=env_id)


@each_env
def test_turbo_equals_plain_with_other_losses(env_id, monkeypatch):
    check_equal(PLAIN, TURBO, monkeypatch, env_id=env_id, **OTHER_LOSSES)


@each_cell
def test_the_gradient_by_parts_is_autograds(cell, monkeypatch):
    """Backpropagation through time as it is written equals that by torch.autograd, resets included."""
    learner = remembering(TURBO, cell=cell)
    roll_out([learner])
    learner.make_batch()
    rows = split_columns(learner.batch, learner.batch_shapes)
    keep = 1 - rows["starts"].unsqueeze(-1)
    weights = learner.agent.weights.detach().requires_grad_()
    from_obs = learner.from_obs(rows["obs"], weights)
    state = learner.first_state
    states = []
    for t in range(learner.args.num_steps):
        state = learner.gates(from_obs[t], learner.from_state(state, keep[t], weights), keep[t] * state)
        states.append(state)
    policy_loss, value_loss, entropy, _ = learner.loss(rows, torch.stack(states), weights)
    loss = policy_loss - learner.args.ent_coef * entropy + learner.args.vf_coef * value_loss
    (wanted,) = torch.autograd.grad(loss, weights)
    got = []
    monkeypatch.setattr(TURBO.Adam, "step", lambda self, weights, gradient: got.append(gradient))
    learner.args.max_grad_norm = 1e9  # not clipped
    learner.update_minibatch(learner.batch, learner.first_state)
    assert (got[0] - wanted).norm() < 1e-5 * wanted.norm()


@each_env
@each_cell
def test_sampled_actions_follow_the_policy(cell, env_id):
    """Turbo's own noise: the shares of actions, or their mean and deviation, are those of the plain distribution."""
    learner = remembering(TURBO, cell=cell, env_id=env_id, num_envs=2000, num_steps=1)
    obs = np.tile(np.random.default_rng(0).standard_normal((1, len(learner.normalizer.mean) - 1)), (2000, 1))
    draws = set()
    for _ in range(3):
        learner.starts[:] = True
        learner.act(0, obs.astype(np.float32))
        outputs, log_std, _, _ = learner.agent(decided(learner)["obs"][0], torch.zeros_like(learner.state))
        policy = TURBO.distribution(outputs, log_std)
        actions = decided(learner)["actions"][0]
        torch.testing.assert_close(decided(learner)["log_prob"][0], policy.log_prob(actions), rtol=1e-4, atol=1e-5)
        wanted = policy.probs[0, 1] if log_std is None else policy.mean[0]
        torch.testing.assert_close(actions.mean(0), wanted, rtol=0, atol=0.1)
        draws.add(actions.double().sum().item())
    assert len(draws) == 3


# ---------------------------------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------------------------------


def check_resets(script, **kwargs):
    """Episodes in a rollout, which end and begin anywhere, are those that an agent sees one by one."""
    learner = remembering(script, **kwargs)
    for iteration in range(2):  # the second one begins in the middle of episodes
        roll_out([learner], seed=iteration)
        if hasattr(learner, "host_outcomes"):
            learner.outcomes.copy_(learner.host_outcomes)
        assert 3 < decided(learner)["ended"].sum() < decided(learner)["ended"].numel() - 3
        values, states = replayed(learner)
        torch.testing.assert_close(decided(learner)["states"], states, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(decided(learner)["values"], values, rtol=1e-4, atol=1e-5)


@each_cell
def test_a_reset_inside_a_rollout_begins_a_new_sequence(script, cell):
    check_resets(script, cell=cell)


def check_learning_sees_what_acting_saw(script, **kwargs):
    """With a learning rate of 0 the ratio of probabilities is 1 in all minibatches, whatever the order."""
    learner = remembering(script, **kwargs)
    for iteration in range(3):
        roll_out([learner], seed=iteration)
        learner.update(0.0)
        assert learner.losses()["approx_kl"] == pytest.approx(0, abs=1e-6)
        assert learner.losses()["clipfrac"] == 0


@each_env
@each_cell
def test_learning_sees_what_acting_saw(script, cell, env_id):
    check_learning_sees_what_acting_saw(script, cell=cell, env_id=env_id)


def check_environments_are_apart(script, **kwargs):
    """What one environment shows changes nothing in another one."""
    results = []
    for other in (0.0, 1.0):
        learner = remembering(script, **kwargs)
        for t in range(learner.args.num_steps):
            obs = np.full((learner.args.num_envs, len(learner.normalizer.mean) - 1), np.sin(t), np.float32)
            obs[1:] += other
            learner.act(t, obs)
            nothing = np.zeros(learner.args.num_envs, bool)
            learner.record(t, obs, obs, nothing.astype(np.float64), nothing, nothing)
        results.append(decided(learner)["states"].clone())
    torch.testing.assert_close(results[0][:, 0], results[1][:, 0])
    assert not torch.allclose(results[0][:, 1], results[1][:, 1])


def test_environments_are_apart(script):
    check_environments_are_apart(script)


def check_bootstrap(script, **kwargs):
    """Advantages are the textbook's, with the value of the last observation by the state that has seen the episode."""
    learner = remembering(script, num_steps=20, **kwargs)
    roll_out([learner])
    roll_out([learner], seed=1)
    if script.__name__.endswith("torchcompile"):
        learner.outcomes.copy_(learner.host_outcomes)
    values, states = replayed(learner)
    steps = {name: column.clone() for name, column in decided(learner).items()}
    next_values = torch.zeros_like(values)
    for t in range(learner.args.num_steps):
        _, _, next_values[t], _ = network_of(learner)(steps["next_obs"][t], states[t])
    batch = learner.make_batch() or split_columns(learner.batch, learner.batch_shapes)
    columns = (steps["rewards"], values, next_values, steps["terminated"], steps["ended"])
    wanted = textbook_advantages(*(column.detach().double().numpy() for column in columns), 0.99, 0.95)
    np.testing.assert_allclose(batch["advantages"].numpy(), wanted, rtol=1e-4, atol=1e-4)
    assert (steps["ended"] != steps["terminated"]).any()


@each_cell
def test_truncated_episodes_bootstrap_with_their_own_state(script, cell):
    check_bootstrap(script, cell=cell)


# ---------------------------------------------------------------------------------------------------------------------
# Runs: resuming, policies, refusals
# ---------------------------------------------------------------------------------------------------------------------

TINY = {"num_envs": 4, "num_steps": 8, "num_minibatches": 2, "update_epochs": 1, "cuda": False}


def check_restored(script, **kwargs):
    """A restored learner continues bit by bit, in the middle of episodes."""
    learner = remembering(script, **kwargs)
    roll_out([learner])
    learner.update(1e-3)
    state = saved(learner)
    assert state["memory"]["state"].abs().sum() > 0
    learner.normalizer.rows[:] = 0
    restored = make_learner(script, seed=2, **kwargs)
    restored.load_state_dict(state)
    for one in (learner, restored):
        torch.set_rng_state(state["rng"])
        roll_out([one], seed=1, ends=0.0)
        one.update(1e-3)
    assert_same_state(saved(restored), saved(learner))


@each_cell
def test_a_restored_learner_continues_with_its_state(script, cell):
    check_restored(script, cell=cell)


def check_resumed_run(script, folder):
    """A resumed run begins with new episodes, and so with a state of 0; a checkpoint has the state of its last step."""
    seen = []

    def on_log(learner, losses, step):
        first = {name: decided(learner)[name][0].clone() for name in ("obs", "starts", "states")}
        seen.append((first, learner.state.clone(), learner))

    args = script.Args(env_id="Unequal-v0", run_dir=str(folder), total_timesteps=32, **TINY)
    args.learning_rate = 1e-10  # all states are of the same weights
    conftest.train(script, args, on_log)
    (run,) = folder.glob("*/checkpoint.pt")
    memory = torch.load(run)["learner"]["memory"]
    assert memory["state"].abs().sum() > 0 and torch.equal(memory["state"], seen[-1][1])
    args.total_timesteps, args.resume = 64, str(run)
    conftest.train(script, args, on_log)
    first, _, learner = seen[-1]
    assert len(seen) == 2 and first["starts"].all()
    _, _, _, wanted = learner.agent(first["obs"], torch.zeros_like(first["states"]))
    torch.testing.assert_close(first["states"], wanted)


def test_a_resumed_run_begins_with_new_episodes(script, tmp_path):
    check_resumed_run(script, tmp_path)


@each_env
@each_cell
def test_the_exported_policy_takes_and_returns_its_state(script, cell, env_id, tmp_path):
    sizes = TINY | {"total_timesteps": 64, "env_id": env_id, "cell": cell}
    script.train(script.Args(run_dir=str(tmp_path), **sizes))
    (folder,) = tmp_path.iterdir()
    learner = make_learner(script, seed=2, **sizes)
    learner.load_state_dict(torch.load(folder / "checkpoint.pt", weights_only=True)["learner"])
    exported = torch.export.load(folder / "policy.pt2").module()
    network = network_of(learner)
    for batch in (1, 7):
        state = own_state = torch.zeros(batch, network.state_dim)
        for _ in range(3):
            obs = torch.randn(batch, len(learner.normalizer.mean) - 1)
            with torch.no_grad():
                actions, state = exported(obs, state)
                scaled = torch.from_numpy(learner.normalizer.scale_obs(obs.numpy()))
                outputs, _, _, own_state = network(scaled, own_state)
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
    ({"env_id": "CountsFromOne-v0"}, "--env-id CountsFromOne-v0: choose an environment whose actions"),
    ({"env_id": "Unbounded-v0"}, "--env-id Unbounded-v0: choose an environment whose actions"),
    ({"num_steps": 10**11}, "--num-steps 100000000000: give at most"),
]


@pytest.mark.parametrize(("wrong", "line"), WRONG)
def test_what_does_not_fit_is_refused(script, wrong, line, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        script.train(script.Args(run_dir=str(tmp_path), **TINY | wrong))
    assert error.value.code == 2 and not list(tmp_path.iterdir())
    assert f"error: {line}" in capsys.readouterr().err


@pytest.mark.parametrize("other", [{"cell": "gru"}, {"num_envs": 8}])
def test_a_resumed_run_keeps_its_cell_and_environments(script, other, tmp_path, capsys):
    script.train(script.Args(run_dir=str(tmp_path), total_timesteps=32, **TINY))
    (run,) = tmp_path.iterdir()
    with pytest.raises(SystemExit):
        script.train(script.Args(run_dir=str(tmp_path), total_timesteps=64, resume=str(run), **TINY | other))
    name, value = next(iter(other.items()))
    assert f"error: --{name.replace('_', '-')} {value}: leave it out" in capsys.readouterr().err


@pytest.mark.thorough
def test_compilation_does_not_grow_with_the_steps():
    """Each function has one graph, whatever the number of steps, and none is compiled again."""
    for num_steps in (4, 16):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        learner = make_learner(TURBO, compile=True, num_steps=num_steps)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for i in range(3):
                roll_out([learner], seed=i)
                learner.update(1e-3 / (i + 1))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 6


# ---------------------------------------------------------------------------------------------------------------------
# Capture
# ---------------------------------------------------------------------------------------------------------------------

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


# ---------------------------------------------------------------------------------------------------------------------
# Planted bugs
# ---------------------------------------------------------------------------------------------------------------------


def equality(script, folder, monkeypatch):
    check_equal(PLAIN, script, monkeypatch)


def resets(script, folder, monkeypatch):
    check_resets(script)


def same_in_learning(script, folder, monkeypatch):
    check_learning_sees_what_acting_saw(script)


def bootstrap(script, folder, monkeypatch):
    check_bootstrap(script)


def restored(script, folder, monkeypatch):
    check_restored(script)


def resumed(script, folder, monkeypatch):
    check_resumed_run(script, folder)


def captured(script, folder, monkeypatch):
    check_training(script, folder, settings={"env_id": "Truncates-v0"}, runs=[RUNS[0], RUNS[-1]])


NEW_EPISODES = (
    "        learner.starts[:] = True  # also of a resumed run, whose checkpoint has the state of other episodes\n"
)
MEMORY = '            "memory": {"state": self.state, "starts": torch.from_numpy(self.starts)},\n'
LATE = "self.starts[:], self.late = getattr(self, 'late', False), ended.copy()"
MIXED = "hidden = state[:, :HIDDEN] + 0.1 * state[:, :HIDDEN].mean(0)"
KEEP = 'keep = 1 - rows["starts"].unsqueeze(-1)'
RESET = 'state = self.state * (1 - inputs["starts"].unsqueeze(-1))'
BRANCH = f"state = self.state\n        if self.starts.any():\n            {RESET}"
PLAIN_BUGS = [  # what is wrong, what is replaced by what, who sees it
    ("no reset in acting", "self.state * (1 - starts)[:, None]", "self.state", resets),
    ("no reset in learning", "(obs, state * (1 - starts)[:, None])", "(obs, state)", same_in_learning),
    ("reset one step late", "self.starts[:] = ended", LATE, resets),
    (
        "reset one step late in learning",
        'rows["starts"], strict',
        'rows["starts"].roll(1, 0), strict',
        same_in_learning,
    ),
    ("environments mix", "hidden = state[:, :HIDDEN]", MIXED, resets),
    ("state of another environment", "self.first_state[envs])", "self.first_state[envs.flip(0)])", same_in_learning),
    ("sequences begin with the last state", "self.first_state[envs])", "self.state[envs])", same_in_learning),
    (
        "mask of the first step for all",
        'rows["starts"], strict',
        'rows["starts"][:1].expand(12, 2), strict',
        same_in_learning,
    ),
    ("bootstrap without memory", 'rollout["states"].flatten(0, 1))', '0 * rollout["states"].flatten(0, 1))', bootstrap),
    ("state of the old policy after resume", NEW_EPISODES, "", resumed),
    ("state not restored", '        self.state.copy_(state["memory"]["state"])\n', "", restored),
]
TURBO_BUGS = [
    ("no reset in acting", RESET, "state = self.state", resets),
    ("no reset in learning", KEEP, 'keep = torch.ones_like(rows["starts"]).unsqueeze(-1)', same_in_learning),
    (
        "no reset of the cell state",
        "self.agent.weights), keep * state)",
        "self.agent.weights), state)",
        same_in_learning,
    ),
    ("gradient across resets", "d_from_state, keep * d_before", "d_from_state, d_before", equality),
    ("reset one step late", "self.starts[:] = ended", LATE, resets),
    ("reset one step late in learning", KEEP, f"{KEEP}.roll(1, 0)", same_in_learning),
    ("environments mix", "hidden = state[:, :HIDDEN]", MIXED, resets),
    ("state of another environment", "index_select(0, envs))", "index_select(0, envs.flip(0)))", same_in_learning),
    (
        "sequences begin with the last state",
        "self.first_state.index_select",
        "self.state.index_select",
        same_in_learning,
    ),
    (
        "mask of the first minibatch for all",
        KEEP,
        f"{KEEP}\n        keep = vars(self).setdefault('keep', keep)",
        equality,
    ),
    ("mask frozen at capture", RESET, BRANCH, captured),
    ("state rebound", "self.state.copy_(state)", "self.state = state", captured),
    ("first state rebound", "self.first_state.copy_(self.state)", "self.first_state = self.state.clone()", captured),
    ("bootstrap without memory", "self.states.flatten(0, 1))", "0 * self.states.flatten(0, 1))", bootstrap),
    ("state of the old policy after resume", NEW_EPISODES, "", resumed),
    ("state not saved", MEMORY, "", restored),
]
LONG = ("state rebound", "first state rebound")  # `captured` finds them, as it finds "mask frozen at capture"
BUGS = [
    pytest.param(script, *change, id=f"{kind}, {what}", marks=[pytest.mark.thorough] * (what in LONG))
    for kind, script, bugs in (("plain", PLAIN, PLAIN_BUGS), ("turbo", TURBO, TURBO_BUGS))
    for what, *change in bugs
]


@pytest.mark.parametrize(("script", "old", "new", "caught_by"), BUGS)
def test_a_planted_bug_is_caught(script, old, new, caught_by, tmp_path, monkeypatch):
    source = Path(script.__file__).read_text()
    assert source.count(old) == 1, f"not there once: {old}"
    edited = load_copy(stem(script), source.replace(old, new), tmp_path)
    with pytest.raises((AssertionError, RuntimeError, KeyError, SystemExit)) as caught:
        caught_by(edited, tmp_path / "runs", monkeypatch)
    assert caught.type is not NotImplementedError  # which the emulated device raises
    assert caught.type is not SystemExit or str(caught.value).startswith("error: step ")  # NaN


@pytest.mark.parametrize("catch", [equality, resets, same_in_learning, bootstrap, restored, resumed, captured])
def test_the_script_as_it_is_passes(catch, tmp_path, monkeypatch):
    catch(TURBO, tmp_path, monkeypatch)


# ---------------------------------------------------------------------------------------------------------------------
# Learning
# ---------------------------------------------------------------------------------------------------------------------

MAZE = {"env_id": "TMaze-v0", "total_timesteps": 60_000, "num_envs": 16, "num_steps": 64, "cuda": False}
LONG_MAZE = MAZE | {"env_id": "TMaze50-v0", "total_timesteps": 150_000, "num_steps": 128}


def returns_in_the_maze(script, folder, **kwargs):
    """Mean return of the last 100 episodes."""
    script.train(script.Args(run_dir=str(folder), **MAZE | kwargs))
    (run,) = folder.iterdir()
    return np.mean(scalars(run, "charts/episodic_return")[-100:])


def test_turbo_learns_to_remember(tmp_path):
    """The one of these that is short enough for the quick suite."""
    assert returns_in_the_maze(TURBO, tmp_path, cell="gru", total_timesteps=40_000) > 0.8


@pytest.mark.thorough
@pytest.mark.parametrize("cell", CELLS)
def test_it_learns_to_remember(script, cell, tmp_path):
    """A policy without memory has a return of 0 at most: see test_edits.py."""
    assert returns_in_the_maze(script, tmp_path, cell=cell) > 0.8


@pytest.mark.thorough
def test_a_gru_remembers_for_50_steps(tmp_path):
    """An LSTM does not, with these settings."""
    assert returns_in_the_maze(TURBO, tmp_path, cell="gru", **LONG_MAZE) > 0.8


@pytest.mark.parametrize("task", ["RepeatPrevious", "PositionOnlyCartPole", "PositionOnlyPendulum"])
def test_popgym(script, task, tmp_path):
    """The tasks of doc/ppo.md train, by the names that it gives them, and resume."""
    pytest.importorskip("popgym")
    args = script.Args(env_id=f"popgym:popgym-{task}Easy-v0", run_dir=str(tmp_path), total_timesteps=64, **TINY)
    script.train(args)
    (run,) = tmp_path.iterdir()
    assert run.name.startswith(f"{args.env_id}__{stem(script)}__1__") and (run / "policy.pt2").exists()
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
    """As doc/ppo.md says, whose wrappers help with what does not."""
    pytest.importorskip("popgym")
    names = [name for name in gym.registry if re.fullmatch(r"popgym-\w+(Easy|Medium|Hard)-v0", name)]
    names = [name for name in names if "Labyrinth" not in name]  # needs mazelib
    refused = {name.split("-")[1] for name in names if not accepted(script, name)}
    games = ("Battleship", "MineSweeper")
    assert len(names) == 42 and refused == {f"{game}{level}" for game in games for level in ("Easy", "Medium", "Hard")}
    page = (Path(__file__).parents[2] / "doc" / "ppo.md").read_text()
    (module,) = re.findall(r"^```python\n(.*?)^```$", page, flags=re.M | re.S)
    (tmp_path / "my_tasks.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    args = script.Args(env_id="my_tasks:BattleshipEasy-v0", run_dir=str(tmp_path / "runs"), total_timesteps=64, **TINY)
    script.train(args)
