"""PPO for discrete actions: plain against turbo, masks from the environments to the loss, acting, learning, graphs."""

import re
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import checks
import conftest
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import (
    MODES,
    THREE_PARTS,
    Masked,
    PushAnything,
    assert_close_in_norm,
    assert_learners_agree,
    copy_networks,
    gradients,
    learnt,
    one_graph_each,
    scalars,
    train,
)
from formulas import make_learner, noticing, random_masks
from scipy.special import softmax
from test_cli import refused
from test_ppo import fix_order, random_steps, textbook_advantages
from test_training_on_cuda import no_export

PLAIN, TURBO = conftest.PLAIN["ppo_discrete"], conftest.TURBO["ppo_discrete"]
script = checks.plain_and_turbo("ppo_discrete")
FROM_FIVE = gym.spaces.Discrete(4, start=5)
SMALL = {"num_envs": 4, "num_steps": 12, "num_minibatches": 4, "update_epochs": 1}


def make(script, actions=THREE_PARTS, masked=True, **kwargs):
    return make_learner(script, actions, masked=masked, **SMALL | kwargs)


def roll_out(learners, seed=0):
    """Give all learners the same rollout: random steps, masks and episode ends, and the actions of the first one."""
    first = learners[0]
    steps = (first.args.num_steps, first.args.num_envs)
    generator = np.random.default_rng(seed)
    obs, next_obs = generator.standard_normal((2, *steps, first.obs_dim)).astype(np.float32)
    masks = random_masks(generator, np.prod(steps), sizes_of(first.agent)).reshape(*steps, -1)
    rewards, _, _, terminated, ended = random_steps(*steps, ends=0.1, seed=seed)
    for learner in learners:
        if hasattr(learner, "start_rollout"):
            learner.start_rollout()
        for t in range(steps[0]):
            learner.act(t, obs[t], *([masks[t]] if first.masked else []))
            stored_of(learner)["actions"][t] = stored_of(first)["actions"][t]
            learner.record(t, next_obs[t], rewards[t], terminated[t], ended[t])
    return obs


def sizes_of(agent):
    """The number of choices of each part of an action."""
    return [part.stop - part.start for part in agent.parts]


def stored_of(learner):
    """The columns of a rollout where they are stored."""
    return getattr(learner, "host_columns", learner.rollout)


def update_all(learners, seeds, learning_rate=1e-3):
    for seed in seeds:
        roll_out(learners, seed)
        for learner in learners:
            learner.update(learning_rate)


# Plain and turbo


OTHER = {"actions": FROM_FIVE, "clip_vloss": False, "norm_adv": False, "ent_coef": 0.0, "bootstrap_truncation": False}
UNMASKED = {"actions": FROM_FIVE, "masked": False}


@pytest.mark.parametrize(
    ("kwargs", "mode"),
    [({}, "eager"), ({}, "compile"), (UNMASKED, "eager"), (UNMASKED, "compile"), (OTHER, "eager")],
    ids=["masks-eager", "masks-compile", "none-eager", "none-compile", "other-eager"],
)
def test_turbo_equals_plain(kwargs, mode, monkeypatch):
    """From the same weights and rollouts, all agrees after one iteration (5 minibatches) and after ten (50)."""
    kwargs = {"num_steps": 50, "num_minibatches": 5} | kwargs
    plain, turbo = make(PLAIN, **kwargs), make(TURBO, **kwargs, **MODES[mode])
    copy_networks(plain, turbo)
    fix_order(monkeypatch)
    with one_graph_each(int(mode == "compile")):
        for iteration in range(10):
            update_all([plain, turbo], [iteration], 3e-4 * (1 - iteration / 10))
            if iteration in (0, 9):
                assert_learners_agree(plain, turbo, tolerance=1e-5 if iteration == 0 else 1e-4)


def test_batches_have_the_textbooks_advantages(script):
    learner = make(script, num_steps=20)
    roll_out([learner])
    names = ("obs", "next_obs", "rewards", "terminated", "ended")
    obs, next_obs, rewards, terminated, ended = checks.columns_of(learner, *names)
    with torch.no_grad():
        values, next_values = (learner.agent.critic(torch.from_numpy(x)).squeeze(-1).numpy() for x in (obs, next_obs))
    wanted = textbook_advantages(rewards, values, next_values, terminated, ended, 0.99, 0.95)
    batch = learner.make_batch() or script.columns(learner.batch, learner.batch_widths)
    np.testing.assert_allclose(batch["advantages"].view(20, 4).numpy(), wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(batch["returns"].view(20, 4).numpy(), wanted + values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("target_kl", "epochs"), [(1e9, 4), (1e-9, 1)])
def test_target_kl_ends_the_epochs(script, target_kl, epochs):
    learner = make(script, target_kl=target_kl, update_epochs=4)
    minibatches = checks.watch_minibatches(learner)
    update_all([learner], [0])
    assert len(minibatches) == epochs * 4


def test_every_minibatch_is_drawn_once_an_epoch(script):
    learner = make(script, update_epochs=3)
    if script is PLAIN:
        drawn = checks.watch_minibatches(learner, lambda rows: rows["returns"].clone())
    else:
        returns = script.columns(learner.minibatch, learner.batch_widths)["returns"]
        drawn = checks.watch_minibatches(learner, lambda: returns.flatten().clone())
    update_all([learner], [0])
    checks.draws_all_rows(drawn, 48)


def test_a_restored_learner_continues_bit_by_bit(script):
    checks.goes_on_when_restored(partial(make, script), lambda learner, part: update_all([learner], [part, part + 5]))


# Masked choices in the loss


@pytest.mark.parametrize("scale", [1.0, 1e6], ids=["usual logits", "logits of 10000"])
@pytest.mark.parametrize(("script", "mode"), [(PLAIN, "eager"), (TURBO, "eager"), (TURBO, "compile")])
def test_masked_choices_have_no_probability_and_no_gradient(script, mode, scale):
    """Exactly 0, and all numbers stay finite. The first part has one choice left, and the others have all but one."""
    learner = make(script, num_minibatches=1, **MODES[mode])
    last_layer = learner.agent.actor[-1]
    last_layer.weight.data.mul_(scale)
    mask = np.array([[True, False, True, False, True, True, True, True, False]] * 4)
    obs = np.random.default_rng(0).standard_normal((12, 4, 5)).astype(np.float32)
    if script is TURBO:
        learner.start_rollout()
    for t in range(12):
        learner.act(t, obs[t], mask)
        learner.record(t, obs[t], obs[t, :, 0], *np.zeros((2, 4), bool))
    log_probs = learner.agent.log_probs(torch.from_numpy(obs), torch.from_numpy(mask)).detach()
    assert (learner.agent.actor(torch.from_numpy(obs)).abs().max() > 1e4) == (scale > 1)
    assert (log_probs.exp()[..., ~mask[0]] == 0).all() and (log_probs[..., 0] == 0).all()
    before = last_layer.weight.detach().clone()
    learner.update(1e-3)
    moments = gradients(learner, "agent")
    assert all(moment.isfinite().all() for moment in moments.values())
    assert np.isfinite(list(learner.losses().values())).all()
    got = {name: moments[f"actor.4.{name}"].reshape(9, -1) for name in ("weight", "bias")}
    zero = [0, *np.flatnonzero(~mask[0])]  # the only choice of its part has no other probability than 1
    assert all((gradient[zero] == 0).all() for gradient in got.values())
    assert scale > 1 or all(gradient.any(1).sum() == 5 for gradient in got.values())
    assert torch.equal(last_layer.weight[zero], before[zero])


@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_one_choice_has_no_entropy(script, scale):
    learner = make(script, num_minibatches=1)
    learner.agent.actor[-1].weight.data.mul_(scale)
    if script is TURBO:
        learner.start_rollout()
    mask = np.eye(2, dtype=bool)[[0, 0, 1, 1]]
    mask = np.concatenate((mask, np.eye(3, dtype=bool)[[0, 1, 2, 2]], np.eye(4, dtype=bool)[[0, 1, 2, 3]]), -1)
    for t in range(12):
        actions = learner.act(t, np.ones((4, 5)), mask)
        assert (actions == [[0, 7, -2], [0, 8, -1], [1, 9, 0], [1, 9, 1]]).all()
        learner.record(t, np.ones((4, 5)), np.arange(4), *np.zeros((2, 4), bool))
    learner.update(1e-3)
    losses = learner.losses()
    assert losses["entropy"] == losses["approx_kl"] == losses["clipfrac"] == 0
    assert not any(moment.any() for name, moment in gradients(learner, "agent").items() if name.startswith("actor"))


# Acting


@pytest.mark.parametrize("actions", [FROM_FIVE, THREE_PARTS], ids=["Discrete", "MultiDiscrete"])
def test_actions_are_samples_of_the_allowed_choices(script, actions, masked=True):
    """Frequencies of all actions are products of the softmax of what is allowed of each part."""
    learner = make(script, actions, masked, num_envs=5000)
    learner.agent.actor[-1].weight.data.mul_(100)
    if script is TURBO:
        learner.start_rollout()
    obs = np.random.default_rng(3).standard_normal((1, 5)).astype(np.float32)
    sizes = sizes_of(learner.agent)
    mask = np.arange(sum(sizes)) % 3 > 0 if masked else np.ones(sum(sizes), bool)
    masks = [mask[None].repeat(5000, 0)] * masked
    samples = np.concatenate([learner.act(t, obs.repeat(5000, 0), *masks) for t in range(12)])
    logits = np.where(mask, learner.agent.actor(torch.from_numpy(obs)).detach().numpy()[0], -np.inf)
    parts = [softmax(part) for part in np.split(logits, np.cumsum(sizes)[:-1])]
    wanted = parts[0]
    for part in parts[1:]:
        wanted = np.multiply.outer(wanted, part)
    choices = (samples - actions.start).reshape(len(samples), -1)
    counts = np.zeros(sizes)
    np.add.at(counts, tuple(choices.T), 1)
    assert all(actions.contains(action) for action in samples[:20])
    assert (counts[wanted == 0] == 0).all() and (wanted == 0).any() == masked
    np.testing.assert_allclose(counts / len(samples), wanted, atol=0.01)
    assert wanted.max() - wanted[wanted > 0].min() > 0.1


def test_actions_without_masks(script):
    test_actions_are_samples_of_the_allowed_choices(script, THREE_PARTS, masked=False)


def test_each_rollout_has_fresh_noise():
    learner = make(TURBO)
    noises = []
    for seed in range(3):
        update_all([learner], [seed])
        noises.append(learner.noise.copy())
    assert len(np.unique(noises)) > 0.99 * 3 * noises[0].size


@pytest.mark.parametrize("env_id", ["Masked-v0", "MaskedParts-v0", "CartPole-v1"])
def test_the_exported_policy_takes_the_best_allowed_choices(script, env_id, tmp_path):
    learners = []
    args = script.Args(env_id=env_id, total_timesteps=48, run_dir=str(tmp_path), **SMALL)
    train(script, args, on_start=lambda run: learners.append(run.learner))
    policy = torch.export.load(next(tmp_path.glob("*/policy.pt2"))).module()
    generator, agent = np.random.default_rng(0), learners[0].agent
    obs = torch.from_numpy(generator.standard_normal((50, learners[0].obs_dim)).astype(np.float32))
    masks = random_masks(generator, 50, sizes_of(agent))
    masked = env_id != "CartPole-v1"
    actions = policy(obs, torch.from_numpy(masks)) if masked else policy(obs)
    logits = np.where(masks | (not masked), agent.actor(obs).detach().numpy(), -np.inf)
    best = [part.argmax(-1) for part in np.split(logits, np.cumsum(sizes_of(agent))[:-1], -1)]
    start = conftest.make_envs(script, args).single_action_space.start
    assert (actions.numpy().reshape(50, -1) == np.stack(best, -1) + start).all()


# From the environments to the rollout


class Recorded(Masked):
    """Notes its steps: columns of the rollout by name."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.noted = []

    def state(self):
        obs, info = super().state()
        self.newest = {"obs": obs, "mask": np.concatenate(self.masks)}
        return obs, info

    def step(self, action):
        columns = self.newest | {"actions": np.cumsum(self.sizes) - self.sizes + action - self.action_space.start}
        obs, reward, terminated, truncated, info = super().step(action)
        columns |= {"next_obs": obs, "rewards": reward, "terminated": terminated, "ended": terminated | truncated}
        self.noted.append(columns)
        return obs, reward, terminated, truncated, info


COLUMNS = ("obs", "mask", "actions", "next_obs", "rewards", "terminated", "ended")


def run(script, folder, make, num_envs=3, **kwargs):
    """Train in environments made by `make(index)`. Returns them, and columns (steps, num_envs, ...) of all rollouts."""
    envs, rollouts = [], []

    def make_next():
        envs.append(make(len(envs)))
        return envs[-1]

    gym.registry.pop("Made-v0", None)
    gym.register("Made-v0", entry_point=make_next)
    kwargs = {"env_id": "Made-v0", "num_steps": 4, "num_minibatches": 2, "total_timesteps": 72} | kwargs
    args = script.Args(run_dir=str(folder), num_envs=num_envs, **kwargs)
    with no_export():
        train(script, args, on_log=lambda learner, *_: rollouts.append(checks.columns_of(learner, *COLUMNS)))
    return envs, dict(zip(COLUMNS, map(np.concatenate, zip(*rollouts, strict=True)), strict=True))


def stores_what_was_given(script, folder, actions=THREE_PARTS, terminates=False, bootstrap=True):
    """All rows of a run are what the environments gave and what they were given. Their episodes have 3, 4, 5 steps."""
    make = lambda index: Recorded(actions=actions, length=3 + index, terminates=terminates)  # noqa: E731
    envs, columns = run(script, folder, make, bootstrap_truncation=bootstrap)
    for name, column in columns.items():
        noted = "ended" if name == "terminated" and not bootstrap else name
        wanted = np.array([[step[noted] for step in env.noted] for env in envs]).swapaxes(0, 1)
        assert len(wanted) == 24 and (column.reshape(wanted.shape) == wanted).all(), name


@pytest.mark.parametrize(("terminates", "bootstrap"), [(False, True), (True, True), (False, False)])
@pytest.mark.parametrize("actions", [FROM_FIVE, THREE_PARTS], ids=["Discrete", "MultiDiscrete"])
def test_a_rollout_has_the_masks_of_the_states_acted_in(script, actions, terminates, bootstrap, tmp_path):
    stores_what_was_given(script, tmp_path, actions, terminates, bootstrap)


def side_by_side(info, steps):
    info["action_mask"] = np.concatenate(info["action_mask"])


def none_at_the_end(info, steps):
    if steps == 10:
        del info["action_mask"]


class SameArray(Masked):
    """Gives its masks in the same array each time."""

    def __init__(self, **kwargs):
        super().__init__(change=self.write, **kwargs)
        self.shown = np.zeros(9)

    def write(self, info, steps):
        self.shown[:] = np.concatenate(info["action_mask"])
        info["action_mask"] = self.shown


FORMS = {
    "bool": partial(Masked, dtype=bool),
    "float": partial(Masked, dtype=float),
    "side by side": partial(Masked, change=side_by_side),
    "same array": SameArray,
    "none at the end": partial(Masked, change=none_at_the_end),
}


@pytest.mark.parametrize("form", FORMS)
def test_masks_may_have_any_form(script, form, tmp_path):
    rollouts = [
        run(script, tmp_path, lambda index, make=make: make(actions=THREE_PARTS)) for make in (Masked, FORMS[form])
    ]
    (_, wanted), (_, got) = rollouts
    assert all((got[name] == wanted[name]).all() for name in COLUMNS)
    assert wanted["mask"].any((0, 1)).all() and not wanted["mask"].all((0, 1)).any()


TWO, THREE, FOUR, TEN = map(np.ones, (2, 3, 4, 10))
FAULTS = {  # actions; where (environment, step of its episode) the mask is another one; that mask; the error
    "nothing": (FROM_FIVE, lambda i, t: (i, t) == (1, 5), 0 * FOUR, "step 10, environment 1: its action_mask is [0. "),
    "too short": (FROM_FIVE, lambda i, t: (i, t) == (1, 5), THREE, "step 10, environment 1: its action_mask is [1. "),
    "missing": (FROM_FIVE, lambda i, t: (i, t) == (0, 5), None, "step 10, environment 0: its action_mask is None; "),
    "reset alone": (FROM_FIVE, lambda i, t: t > 0, None, "step 2, environment 0: its action_mask is None; give 4 "),
    "step alone": (FROM_FIVE, lambda i, t: t == 0, None, "step 2, environment 0: its action_mask is ["),
    "first alone": (FROM_FIVE, lambda i, t: i == 1, None, "step 0, environment 1: its action_mask is None; "),
    "second alone": (FROM_FIVE, lambda i, t: i == 0, None, "step 0, environment 0: its action_mask is None; "),
    "no second part": (THREE_PARTS, lambda i, t: (i, t) == (1, 5), (TWO, 0 * THREE, FOUR), "step 10, environment 1: "),
    "two parts": (THREE_PARTS, lambda i, t: t == 0, (TWO, THREE), "step 0, environment 0: its action_mask is (array"),
    "too long": (THREE_PARTS, lambda i, t: t == 0, TEN, "step 0, environment 0: its action_mask is [1. "),
}


def names_the_fault(script, folder, fault):
    """The error says where and what, and a run that had begun has saved what it has learned."""
    actions, where, mask, message = FAULTS[fault]

    def make(index):
        def change(info, steps):
            if where(index, steps):
                info["action_mask"] = mask
            if info["action_mask"] is None:
                del info["action_mask"]
                for choices in env.masks:
                    choices[:] = 1  # a state without a mask allows everything

        env = Masked(actions=actions, change=change)
        return env

    with pytest.raises(ValueError, match=re.escape(message)):
        run(script, folder, make, num_envs=2)
    steps = [torch.load(path)["global_step"] for path in folder.glob("*/checkpoint.pt")]
    assert [f"step {step}," for step in steps] == [message.split(" env")[0]] * (not message.startswith("step 0"))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mask_that_cannot_be_used_ends_the_run(script, fault, tmp_path):
    names_the_fault(script, tmp_path, fault)


REFUSED = [gym.spaces.Box(-1, 1, (2,)), gym.spaces.MultiBinary(3), gym.spaces.MultiDiscrete([[2, 3], [3, 2]])]


@pytest.mark.parametrize("space", REFUSED, ids=lambda space: type(space).__name__)
def test_other_actions_are_refused(script, space, tmp_path, capsys):
    line = refused(capsys, lambda: run(script, tmp_path, lambda index: PushAnything(REFUSED[0], space)))
    assert line.startswith("error: --env-id Made-v0: actions must be Discrete or MultiDiscrete, not ")
    assert not list(tmp_path.iterdir())


# Learning

each_but_plain_by_hand = pytest.mark.parametrize(
    "script", [pytest.param(PLAIN, marks=pytest.mark.finding), TURBO], ids=["plain", "turbo"]
)


@each_but_plain_by_hand
@pytest.mark.parametrize(("env_id", "parts"), [("Masked-v0", 1), ("MaskedParts-v0", 3)])
def test_the_best_allowed_choices_are_learned(script, env_id, parts, tmp_path):
    """A random policy finds about half of the best choices, in ten steps."""
    args = script.Args(env_id=env_id, total_timesteps=60_000, learning_rate=1e-3, run_dir=str(tmp_path))
    script.train(args)
    returns = scalars(next(tmp_path.iterdir()), "charts/episodic_return")
    assert np.mean(returns[:20]) < 7 * parts
    assert np.mean(returns[-100:]) > {1: 8.5, 3: 24}[parts]


@each_but_plain_by_hand
def test_cartpole_is_learned(script, tmp_path):
    checks.learns_cartpole(script, tmp_path, total_timesteps=40_000, learning_rate=1e-3)


# CUDA graphs


def learned_on_cuda(iterations, **kwargs):
    """A learner on CUDA after some iterations on random steps."""
    learner = make(TURBO, device="cuda", update_epochs=2, **kwargs)
    torch.manual_seed(0)
    update_all([learner], range(iterations))
    return learner


@pytest.mark.gpu
@pytest.mark.parametrize("mode", checks.OTHER_MODES)
@pytest.mark.parametrize("target_kl", [None, 1e9])
def test_modes_agree(mode, target_kl, monkeypatch):
    """Before, at and after capture, a mode has made exactly the updates that eager code makes."""
    order = torch.arange(48.0, device="cuda")
    monkeypatch.setattr(torch, "rand", lambda shape, device: order.expand(shape))
    for iterations in (1, 3, 10):
        wanted, got = (learned_on_cuda(iterations, target_kl=target_kl, **own) for own in ({}, MODES[mode]))
        assert got.optimizers["agent"].corrections[0].item() == pytest.approx(1 - 0.9 ** (8 * iterations + 1))
        assert_close_in_norm(learnt(got), learnt(wanted), 1e-5 if iterations == 1 else 1e-3, least=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_replays_shuffle_afresh(mode):
    """From the same parameters and rollout, past capture, updates differ by the order of the minibatches alone."""
    learner = learned_on_cuda(5, **MODES[mode])

    def update():
        learner.update(1e-3)
        return sum(weight.sum() for weight in learner.agent.parameters()).item()

    assert len(set(checks.repeated(learner, update, 5))) == 5


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_continues_in_captured_graphs(mode):
    captured, other = learned_on_cuda(5, **MODES[mode]), learned_on_cuda(0)
    checks.goes_on_when_captured(captured, other, lambda learner: update_all([learner], [7]))


# Planted bugs


def samples(script):
    test_actions_are_samples_of_the_allowed_choices(script, THREE_PARTS)


def masks_choices(script):
    test_masked_choices_have_no_probability_and_no_gradient(script, "eager", 1.0)


def stores(script):
    with TemporaryDirectory() as folder:
        stores_what_was_given(script, folder)


def names_an_empty_part(script):
    with TemporaryDirectory() as folder:
        names_the_fault(script, Path(folder), "no second part")


OF_THE_NEWEST = ("        self.info = outcome[-1]\n", "")
NOISE = ("self.logits(obs) + self.noise[t]", "self.logits(obs) - self.noise[t]")
BUGS = [
    (PLAIN, "masks of the first state", *OF_THE_NEWEST, stores),
    (TURBO, "masks of the first state", *OF_THE_NEWEST, stores),
    (
        PLAIN,
        "masks not in the loss",
        'self.agent.log_probs(rows["obs"], rows.get("mask"))',
        'self.agent.log_probs(rows["obs"])',
        masks_choices,
    ),
    (
        TURBO,
        "masks not in the loss",
        'log_probs(batch["obs"], batch.get("mask"))',
        'log_probs(batch["obs"])',
        masks_choices,
    ),
    (TURBO, "masks not in acting", "scores[~mask] = -np.inf", "pass", samples),
    (TURBO, "noise of the wrong sign", *NOISE, samples),
    (TURBO, "columns counted within parts", "= self.begins + choices", "= choices", stores),
    (
        PLAIN,
        "columns counted within parts",
        "columns = self.begins + choices",
        "columns = choices",
        stores,
    ),
    (
        TURBO,
        "an empty part is not noticed",
        "np.logical_or.reduceat(rows, self.begins, axis=1)",
        "rows.any(1, keepdims=True)",
        names_an_empty_part,
    ),
]
test_a_planted_bug_is_noticed = noticing(BUGS, (AssertionError, ValueError, pytest.fail.Exception))
