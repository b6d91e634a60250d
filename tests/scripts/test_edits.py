"""The edits in doc/changing.md, read from the page and applied to copies of plain and turbo."""

import inspect
import re
from functools import partial

import conftest
import copies
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import (
    ENTRIES,
    assert_learners_agree,
    assert_same_state,
    clones,
    copy_networks,
    feed_same_batches,
    load_copy,
    make_learner,
    saved,
    transitions,
)
from emulated_cuda import emulated_cuda
from test_ppo import fix_order, roll_out
from test_ppo_lstm import LONG_MAZE, returns_in_the_maze
from test_ppo_lstm import roll_out as roll_out_episodes
from test_training_on_cuda import batched

from common import scripts

PAGE = (copies.ROOT / "doc" / "changing.md").read_text()
HUNK = re.compile(r"^@@ ([\w ]+), (plain and turbo|plain|turbo) @@\n(.*?)(?=^@@|^```|\Z)", re.M | re.S)
SECTIONS = {s.split("\n", 1)[0].lower(): s for s in PAGE.split("\n## ")[1:] if "```diff" in s}
QUICK = ("auxiliary head",)
EXECUTED = ("layernorm", "five critics", "adamw", "auxiliary head", "a custom recurrent cell")
SCRIPTS = {entry.title.lower(): entry.script for entry in ENTRIES.values()}


class SmallImage(conftest.PushAnything):
    """Observations of 8 by 8 pixels, of which the first says how often reset has been called."""

    def __init__(self):
        super().__init__(gym.spaces.Box(0, 1, (8, 8)))


gym.register("SmallImage-v0", entry_point=SmallImage)
ENVIRONMENT = {"shared encoder": "SmallImage-v0", "envpool": "InvertedPendulum-v5"}


def hunks(title):
    """The algorithm of an edit, and its hunks: which scripts they are for, and their lines."""
    found = HUNK.findall(SECTIONS[title])
    (algorithm,) = {name.lower() for name, _, _ in found}
    return algorithm, [(kind, lines.splitlines()) for _, kind, lines in found]


def apply_hunk(source, lines):
    """`source` with one hunk applied, whose old lines must stand there exactly once."""
    old = "".join(f"{line[1:]}\n" for line in lines if line[:1] in (" ", "-") or not line)
    new = "".join(f"{line[1:]}\n" for line in lines if line[:1] in (" ", "+") or not line)
    assert source.count(old) == 1, f"not there once, but {source.count(old)} times:\n{old}"
    return source.replace(old, new)


def edited(title, kind, tmp_path):
    """The module of a copy of the plain or turbo script with the edit applied."""
    algorithm, parts = hunks(title)
    name = SCRIPTS[algorithm] + ("_torchcompile" if kind == "turbo" else "")
    source = (copies.ROOT / "leanrl" / f"{name}.py").read_text()
    for for_kind, lines in parts:
        if kind in for_kind:
            source = apply_hunk(source, lines)
    return load_copy(name, source, tmp_path)


def make(module, title, **kwargs):
    """The edited script's learner, small."""
    algorithm, _ = hunks(title)
    if title in ENVIRONMENT:
        kwargs["env_id"] = ENVIRONMENT[title]
    if algorithm == "sac":
        kwargs["policy_lr"] = 3e-5  # as where plain and turbo are compared
    elif algorithm in ("ppo", "pqn"):
        kwargs["update_epochs"] = 2
    return make_learner(module, **kwargs)


def random_columns(learner, seed):
    """A random transition per environment, as `observe` or `collect` of a turbo learner takes it."""
    generator = np.random.default_rng(seed)
    if not hasattr(learner, "num_actions"):
        return transitions(learner, generator)
    n = learner.args.num_envs
    columns = {name: generator.standard_normal((n, learner.obs_dim)) for name in ("obs", "next_obs")}
    columns |= {name: generator.standard_normal(n) for name in ("rewards", "discounts")}
    columns |= {"actions": generator.integers(learner.num_actions, size=n), "terminated": generator.random(n) < 0.1}
    return {name: columns[name] for name in inspect.signature(learner.replay.collect).parameters}


def take_step(learner, seed):
    """What `train` does with the learner between two updates, on random data, and the update."""
    if hasattr(learner, "observe"):
        learner.observe(**random_columns(learner, seed))
    elif hasattr(learner, "replay"):
        learner.replay.collect(**random_columns(learner, seed))
    else:
        rollouts(learner)([learner], seed)
    update(learner)


def rollouts(learner):
    """What gives learners of its algorithm the same rollouts."""
    if is_pqn(learner):
        return roll_out_steps
    return roll_out_episodes if hasattr(learner, "first_state") else roll_out


def is_pqn(learner):
    return hasattr(learner.args, "q_lambda")


def roll_out_steps(learners, seed):
    """Give learners of PQN the same rollout: random steps, with episode ends."""
    generator, first = np.random.default_rng(seed), learners[0]
    n = first.args.num_envs
    for t in range(first.args.num_steps):
        columns = {name: generator.standard_normal((n, first.obs_dim)) for name in ("obs", "next_obs")}
        columns |= {"actions": generator.integers(first.num_actions, size=n), "rewards": generator.standard_normal(n)}
        columns["terminated"], truncated = generator.random((2, n)) < 0.1
        columns["ended"] = columns["terminated"] | truncated
        for learner in learners:
            record = learner.record if hasattr(learner, "record") else learner.store
            record(t, **columns)


def update(learner):
    learner.update(3e-4) if hasattr(learner, "normalizer") or is_pqn(learner) else learner.update()


def check_updates(plain, turbo, monkeypatch):
    """From the same networks and data both agree after one update and after ten."""
    copy_networks(plain, turbo)
    on_policy = not hasattr(turbo, "replay")
    if on_policy:
        fix_order(monkeypatch)
    else:
        feed_same_batches(plain, turbo, seed=0)
    for i in range(10):
        if on_policy:
            rollouts(plain)([plain, turbo], seed=i)
        for learner in (plain, turbo):
            torch.manual_seed(i)
            update(learner)
        if i in (0, 9):
            assert_learners_agree(plain, turbo, tolerance=1e-5 if i == 0 else 1e-4)


def trace_only(monkeypatch, backend="eager"):
    """Let torch.compile make graphs, but no code from them: seconds, not minutes."""
    compile = torch.compile

    def traced(function, options, **kwargs):
        return compile(function, backend=backend, **kwargs)

    monkeypatch.setattr(torch, "compile", traced)


def check_one_graph(make_turbo, monkeypatch):
    """Each compiled function is one graph, and new data or a later update does not make another one."""
    torch._dynamo.reset()
    with monkeypatch.context() as patch:
        trace_only(patch)
        turbo = make_turbo(compile=True)
    for i in range(4):
        take_step(turbo, i)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for i in range(4, 8):
            take_step(turbo, i)


def check_graphs(script, make_turbo):
    """CUDA graphs do bit for bit what eager code does, on the emulated device."""
    with emulated_cuda(), batched(script):
        eager, graphed = make_turbo(device="cuda"), make_turbo(device="cuda", cudagraphs=True)
        for i in range(10):
            for learner in (eager, graphed):
                torch.manual_seed(i)
                take_step(learner, i)
                if hasattr(learner, "next_actions"):
                    learner.next_actions()
            torch.cuda.synchronize()
            assert_same_state(graphed.tensors(), eager.tensors())
            assert graphed.losses() == eager.losses()


def check_generated_code(make_turbo):
    """What would run on a card computes what torch computes."""
    if (reason := conftest.missing_interpreter()) is not None:
        pytest.skip(f"{reason}; all other checks of this edit passed")
    from generated_cuda import compiled_for_cuda

    with emulated_cuda(), compiled_for_cuda(check=True) as session:
        learner = make_turbo(device="cuda", compile=True)
        for i in range(2):
            take_step(learner, i)
            if hasattr(learner, "next_actions"):
                learner.next_actions()
        torch.cuda.synchronize()
    assert session.errors and max(session.errors.values()) < 1e-5


def check_run(module, title, folder):
    """A short run trains, is resumed, and exports its policy; a learner is restored bit for bit."""
    algorithm, _ = hunks(title)
    sizes = {"num_steps": 32, "num_minibatches": 2, "update_epochs": 2}
    if algorithm == "ppo with memory":
        sizes |= {"num_envs": 2, "num_steps": 16}
    elif algorithm == "pqn":
        sizes |= {"num_envs": 1}
    elif algorithm != "ppo":
        sizes = {"learning_starts": 50, "batch_size": 16, "buffer_size": 100}
    sizes["env_id"] = dict.fromkeys(("dqn", "pqn"), "CartPole-v1").get(algorithm, ENVIRONMENT.get(title, "Pendulum-v1"))
    runs = []
    for total_timesteps in (96, 128):
        resume = str(runs[0].folder) if runs else None
        args = module.Args(run_dir=str(folder), resume=resume, total_timesteps=total_timesteps, **sizes)
        scripts.train(module, args, runs.append)
        assert (runs[-1].folder / "policy.pt2").exists()
    first, resumed = (run.learner for run in runs)
    before, after = (clones(learner.state_dict()["networks"]) for learner in (first, resumed))
    assert any(not torch.equal(before[name], after[name]) for name in before)
    restored = make_learner(module, seed=5, **sizes)
    restored.load_state_dict(saved(first))
    for optimizer in (*restored.optimizers.values(), *first.optimizers.values()):
        for group in getattr(optimizer, "param_groups", []):
            group["lr"] = None  # decays: it is that of the last update in one, that of the flags in the other
    assert_same_state(restored.state_dict(), first.state_dict())


@pytest.mark.parametrize(
    "title", [pytest.param(title, marks=[] if title in QUICK else [pytest.mark.thorough]) for title in SECTIONS]
)
def test_the_edit_works(title, tmp_path, monkeypatch):
    plain, turbo = (edited(title, kind, tmp_path) for kind in ("plain", "turbo"))
    for kind, module in (("plain", plain), ("turbo", turbo)):
        check_run(module, title, tmp_path / kind)
    make_turbo = partial(make, turbo, title)
    check_graphs(turbo, make_turbo)
    with monkeypatch.context() as patch:
        check_updates(make(plain, title), make_turbo(), patch)
    check_one_graph(make_turbo, monkeypatch)
    if title in EXECUTED:
        check_generated_code(make_turbo)


def places_and_lines(title):
    """Runs of neighbouring changed lines of the turbo script, and lines added or changed."""
    places, added = 0, 0
    for kind, lines in hunks(title)[1]:
        if "turbo" in kind:
            changed = "".join("x" if line[:1] in ("+", "-") else " " for line in lines)
            places += len(changed.split())
            added += sum(line[:1] == "+" for line in lines)
    return places, added


@pytest.mark.parametrize("title", SECTIONS)
def test_the_table_counts_the_diff(title):
    anchor = re.sub(r"[^\w-]", "", title.replace(" ", "-"))
    (row,) = [line for line in PAGE.splitlines() if line.startswith("|") and f"](#{anchor})" in line]
    places, lines = places_and_lines(title)
    assert row.split("|")[3].strip() == f"{places}, {lines}", title


@pytest.mark.parametrize("kind", ["plain", "turbo"])
def test_the_checkpoint_of_another_network_is_refused(kind, tmp_path, capsys):
    original = getattr(conftest, kind.upper())["sac"]
    module = edited("third hidden layer", kind, tmp_path)
    sizes = {"env_id": "Pendulum-v1", "learning_starts": 50, "total_timesteps": 60, "buffer_size": 300}
    original.train(original.Args(run_dir=str(tmp_path / "runs"), **sizes))
    (folder,) = (tmp_path / "runs").iterdir()
    sizes["total_timesteps"] = 80
    with pytest.raises(SystemExit) as error:
        module.train(module.Args(run_dir=str(tmp_path / "no"), resume=str(folder), **sizes))
    line = capsys.readouterr().err.splitlines()[-1]
    assert error.value.code == 2 and not list((tmp_path / "no").glob("*"))
    assert line.startswith(f"error: --resume {folder}: this checkpoint does not fit the script: ")
    assert kind == "turbo" or "net.6.bias" in line


def test_n_step_returns_are_those_of_the_definition(tmp_path):
    n, gamma, steps, envs = 3, 0.9, 40, 4
    generator = np.random.default_rng(0)
    obs = generator.standard_normal((steps + 1, envs, 2))
    rewards = generator.standard_normal((steps, envs))
    terminated, truncated = generator.random((2, steps, envs)) < 0.2
    ended = terminated | truncated
    stored = []
    store = edited("n-step returns", "turbo", tmp_path).NStep(n, gamma, lambda **columns: stored.append(columns))
    for t in range(steps):
        store(ended[t], obs=obs[t], next_obs=obs[t + 1], rewards=rewards[t], terminated=terminated[t])
    assert len(stored) == steps - n + 1
    for t, row in enumerate(stored):
        for env in range(envs):
            length = next((k for k in range(1, n) if ended[t + k - 1, env]), n)
            last = t + length - 1
            assert row["rewards"][env] == pytest.approx(sum(gamma**k * rewards[t + k, env] for k in range(length)))
            assert row["discounts"][env] == pytest.approx(gamma**length)
            assert row["terminated"][env] == terminated[last, env]
            np.testing.assert_array_equal(row["next_obs"][env], obs[last + 1, env])
            np.testing.assert_array_equal(row["obs"][env], obs[t, env])


@pytest.mark.parametrize("kind", ["plain", "turbo"])
def test_the_entropy_of_sac_starts_near_that_of_uniform_actions(kind, tmp_path):
    uniform = np.log(2)  # from -1 to 1
    sac = make(edited("maximum entropy at the start", kind, tmp_path), "maximum entropy at the start")
    _, log_prob = sac.actor.sample(*sac.actor.gaussian(torch.randn(100_000, 3)), torch.randn(100_000, 1))
    assert -log_prob.mean().item() == pytest.approx(uniform - 0.01, abs=0.005)


def test_one_step_targets_are_those_of_lambda_0(tmp_path):
    for kind, original in (("plain", conftest.PLAIN["pqn"]), ("turbo", conftest.TURBO["pqn"])):
        learners = (
            make(edited("one-step targets", kind, tmp_path), "one-step targets"),
            make_learner(original, q_lambda=0.0),
        )
        copy_networks(*learners)
        roll_out_steps(learners, seed=0)
        batches = [learner.make_batch() or {"targets": learner.batch[:, -1]} for learner in learners]
        torch.testing.assert_close(batches[0]["targets"], batches[1]["targets"])


@pytest.mark.parametrize("kind", ["plain", "turbo"])
def test_each_head_learns_from_the_value_of_its_best_action_by_the_other(kind, tmp_path):
    module = edited("double q-learning", kind, tmp_path)
    q = torch.tensor([[[1.0, 3.0, 2.0], [10.0, 30.0, 40.0]]])
    assert module.swapped_values(q).tolist() == [[30.0, 2.0]]
    learner = make(module, "double q-learning", q_lambda=0.0, gamma=0.5)
    roll_out_steps([learner], seed=0)
    if kind == "plain":
        rollout, targets = learner.rollout, learner.make_batch()["targets"]
        rewards, terminated, next_obs = (rollout[name] for name in ("rewards", "terminated", "next_obs"))
    else:
        learner.update(0.0)
        targets = learner.batch[:, -2:]
        rewards, terminated, next_obs = map(torch.from_numpy, (learner.rewards, learner.terminated, learner.next_obs))
    a, b = learner.q(next_obs).detach().flatten(0, 1).unbind(-2)
    wanted = torch.stack((b.gather(-1, a.argmax(-1)[:, None])[:, 0], a.gather(-1, b.argmax(-1)[:, None])[:, 0]), -1)
    wanted = rewards.flatten()[:, None] + 0.5 * (1 - terminated.flatten()[:, None]) * wanted
    torch.testing.assert_close(targets, wanted)


@pytest.mark.finding
@pytest.mark.parametrize("kind", ["plain", "turbo"])
def test_without_memory_a_maze_is_not_learned(kind, tmp_path):
    assert returns_in_the_maze(edited("no memory", kind, tmp_path), tmp_path / "runs") < 0.4


@pytest.mark.finding
def test_with_an_open_forget_gate_an_lstm_remembers_for_50_steps(tmp_path):
    """Within so many steps not with every seed, as doc/ppo_lstm.md says; without the edit with none that was tried."""
    script = edited("a forget gate that starts open", "turbo", tmp_path)
    settings = LONG_MAZE | {"total_timesteps": 250_000, "seed": 3}
    assert returns_in_the_maze(script, tmp_path / "runs", **settings) > 0.8
