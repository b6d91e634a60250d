"""PPO's losses and gradients equal the paper's formulas, in NumPy and float64, on handmade rows."""

import itertools
import math
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import MULTI, PLAIN, THREE_PARTS, TURBO, algorithm, gradients, stem
from formulas import CONTINUOUS, DISCRETE, IMAGES, double, images, make_learner, noticing, pair, random_masks, slopes
from scipy.special import xlogy

CLIP, ENT_COEF, VF_COEF = 0.2, 0.02, 0.7
LOG_STD = np.array([-0.5, 0.0, 0.3])
PPO_CASES = [(script, CONTINUOUS) for script in pair("ppo")]
PPO_CASES += [(script, actions) for script in pair("ppo_discrete") for actions in (THREE_PARTS, DISCRETE)]
PPO_CASES += [(script, DISCRETE) for script in (*pair("ppo_atari"), MULTI)]
PPO_CASES += [(script, actions) for script in pair("ppo_lstm") for actions in (DISCRETE, CONTINUOUS)]
each_ppo = pytest.mark.parametrize(
    ("script", "actions"), PPO_CASES, ids=[f"{stem(script)}-{type(actions).__name__}" for script, actions in PPO_CASES]
)


class Rows:
    """Transitions on both sides of every clip, as columns by name, and the network's outputs for them.

    The ratio of the probabilities is 0.5, 0.95, 1.05 or 1.6. Advantages have both signs. The values have moved by 0.5
    or 3 times the largest change, up or down, and the returns lie above and below all of them. The scripts for Atari
    have rows besides that do not count. Discrete actions are columns of the logits, one for each part.
    """

    def __init__(self, learner, actions, masked):
        self.discrete = not isinstance(actions, gym.spaces.Box)
        cases = np.array(list(itertools.product((0.5, 0.95, 1.05, 1.6), (-1, 1), (-3, -0.5, 0.5, 3))))
        generator = np.random.default_rng(0)
        ratio, sign, move = generator.permutation(cases).T
        count = len(cases)
        valid = np.ones(count)
        if hasattr(learner, "obs_shape"):
            valid[[3, 20]] = 0
            self.obs = images(generator, count)
        else:
            self.obs = torch.from_numpy(generator.standard_normal((count, 5)).astype(np.float32))
        with torch.no_grad():
            last(learner.agent.actor).weight.mul_(100)  # it starts almost at 0
            if not self.discrete:
                learner.agent.log_std.copy_(torch.from_numpy(LOG_STD))
        self.outputs, self.values = outputs_of(learner, self.obs)
        if self.discrete:
            sizes = actions.nvec if actions is THREE_PARTS else [actions.n]
            self.ends = np.cumsum(sizes)
            self.mask = random_masks(generator, count, sizes) if masked else np.ones((count, sum(sizes)), bool)
            drawn = np.split(generator.random(self.mask.shape) * self.mask, self.ends[:-1], -1)
            self.actions = self.ends - sizes + np.stack([part.argmax(-1) for part in drawn], -1)
        else:
            self.actions = self.outputs + np.exp(LOG_STD) * generator.standard_normal((count, 3))
        log_prob, _ = self.policy()
        advantages = sign * (1 + np.arange(count) / count) + 100 * (1 - valid)
        values = self.values - CLIP * move
        self.columns = {"log_prob": log_prob - np.log(ratio), "values": values, "advantages": advantages}
        self.columns |= {"returns": values + advantages, "valid": valid}
        self.inputs = {"actions": self.actions} | ({"mask": self.mask} if masked else {})
        self.count = count

    def policy(self, outputs=0.0, log_std=0.0):
        """Log-probabilities of the actions and entropies, with these numbers added to what the network puts out."""
        outputs, log_std = self.outputs + outputs, LOG_STD + log_std
        if not self.discrete:
            squares = ((self.actions - outputs) / np.exp(log_std)) ** 2
            entropy = (0.5 * np.log(2 * np.pi * np.e) + log_std).sum()
            log_prob = -(0.5 * squares + log_std + 0.5 * np.log(2 * np.pi)).sum(-1)
            return log_prob, np.full(len(log_prob), entropy)
        parts = np.split(np.exp(outputs) * self.mask, self.ends[:-1], -1)
        probs = np.concatenate([part / part.sum(-1, keepdims=True) for part in parts], -1)
        return np.log(np.take_along_axis(probs, self.actions, -1)).sum(-1), -xlogy(probs, probs).sum(-1)

    def losses(self, part, norm_adv, clip_vloss, outputs=0.0, log_std=0.0, value=0.0):
        """What the paper and its reference implementation compute for a part of the rows, by name.

        The numbers are added to what the network puts out.
        """
        part = part[self.columns["valid"][part] == 1]
        log_prob, entropies = (column[part] for column in self.policy(outputs, log_std))
        values = self.values[part] + value
        old_log_prob, old_values, advantages, returns, _ = (column[part] for column in self.columns.values())
        ratio = np.exp(log_prob - old_log_prob)
        if norm_adv:
            advantages = (advantages - advantages.mean()) / advantages.std(ddof=1)
        gains = np.minimum(ratio * advantages, np.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages)
        errors = (values - returns) ** 2
        if clip_vloss:
            near = np.clip(values, old_values - CLIP, old_values + CLIP)
            errors = np.maximum(errors, (near - returns) ** 2)
        return {
            "policy_loss": -gains.mean(),
            "value_loss": errors.mean() / 2,
            "entropy": entropies.mean(),
            "approx_kl": np.mean(ratio - 1 - np.log(ratio)),
            "clipfrac": np.mean((ratio < 1 - CLIP) | (ratio > 1 + CLIP)),
        }

    def explained_variance(self):
        valid = self.columns["valid"] == 1
        values, returns = self.columns["values"][valid], self.columns["returns"][valid]
        return 1 - (returns - values).var() / returns.var()

    def tensors(self):
        """The columns as the scripts have them, obs, actions and masks among them."""
        tensors = {name: torch.from_numpy(column).float() for name, column in self.columns.items()}
        return {"obs": self.obs} | {name: torch.from_numpy(column) for name, column in self.inputs.items()} | tensors


def last(module):
    """The last layer of a network."""
    return list(module.modules())[-1]


@torch.no_grad()
def outputs_of(learner, obs):
    """Logits or means, and values, float64; an agent with memory begins an episode."""
    agent = learner.agent
    if hasattr(agent, "remember"):
        state = agent.remember(obs, torch.zeros(len(obs), agent.state_dim))
        outputs, values = agent.actor(state[:, : state.shape[1] // 2]), agent.value(state)
    elif hasattr(agent, "logits_and_values"):
        outputs, values = agent.logits_and_values(obs)
    else:
        outputs, values = agent.actor(obs), agent.critic(obs).squeeze(-1)
    return double(outputs), double(values)


def learn_from(learner, rows, learning_rate):
    """One update from these rows, whose minibatches are drawn in order."""
    columns = rows.tensors()
    names = ("log_prob", "values", "advantages", "returns")
    with_memory = hasattr(learner.agent, "remember")
    if with_memory:  # a sequence of one step per environment
        columns = {"starts": torch.ones(rows.count)} | columns
        columns = {name: column[None] for name, column in columns.items()}
        names = ("starts", *names)
        learner.start_rollout()
    last_obs = []
    if rows.obs.dtype == torch.uint8:
        last_obs = [np.zeros((rows.count, *IMAGES.shape), np.uint8)]
        columns["actions"] = columns["actions"].squeeze(-1)

    def make_batch(*last_obs):
        batch = getattr(learner, "batch", None)
        if batch is None:
            return columns
        if isinstance(batch, dict):
            for name, column in columns.items():
                batch[name][: rows.count].copy_(column)
        else:
            numbers = torch.stack([columns[name] for name in names], -1)
            inputs = [columns[name] for name in ("obs", *rows.inputs)]
            batch.copy_(torch.cat((*inputs, numbers), -1))

    def in_order(shape, device):
        *sizes, count = shape if isinstance(shape, torch.Size) else [shape]
        return torch.arange(count).expand(*sizes, count)

    learner.make_batch = make_batch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randperm", in_order)
        patch.setattr(torch, "rand", in_order)
        patch.setattr(torch.distributed, "all_reduce", lambda tensor: None)  # there is one rank
        learner.update(learning_rate, *last_obs)


def make_ppo(script, actions, **kwargs):
    """A learner and rows for a batch of it; they are one step of an environment each."""
    sizes = {"num_envs": 32, "num_steps": 1, "num_minibatches": 2, "update_epochs": 1, "max_grad_norm": 1e9}
    coefficients = {"clip_coef": CLIP, "ent_coef": ENT_COEF, "vf_coef": VF_COEF}
    masked = actions is THREE_PARTS
    learner = make_learner(script, actions, masked=masked, **sizes | coefficients | kwargs)
    return learner, Rows(learner, actions, masked)


@each_ppo
@pytest.mark.parametrize(("norm_adv", "clip_vloss"), [(True, True), (False, False)], ids=["default", "other"])
def test_ppo_computes_the_papers_losses_and_gradients(script, actions, norm_adv, clip_vloss):
    """Losses of arXiv:1707.06347 and statistics, and the gradients of biases and log_std after two minibatches.

    The latter are in Adam's first moments, 0.1 times the second one and 0.09 times the first one.
    """
    learner, rows = make_ppo(script, actions, norm_adv=norm_adv, clip_vloss=clip_vloss)
    learn_from(learner, rows, learning_rate=0.0)
    everything = np.arange(rows.count)
    minibatches = np.split(everything, 2)
    whole = algorithm(script) in ("ppo", "ppo_discrete")  # the others log means over minibatches
    logged = [everything] if whole else minibatches
    wanted = [rows.losses(part, norm_adv, clip_vloss) for part in logged]
    wanted = {name: np.mean([losses[name] for losses in wanted]) for name in wanted[0]}
    losses = learner.losses()
    assert {name: losses[name] for name in wanted} == pytest.approx(wanted, rel=1e-4)
    if stem(script) != "ppo_lstm_torchcompile":  # which computes it in `make_batch`: test_ppo_lstm.py
        assert losses["explained_variance"] == pytest.approx(rows.explained_variance(), rel=1e-4)

    def loss(offsets, part):
        outputs, value, log_std = np.split(offsets, [rows.outputs.shape[1], rows.outputs.shape[1] + 1])
        losses = rows.losses(part, norm_adv, clip_vloss, outputs, log_std if len(log_std) else 0.0, value)
        return losses["policy_loss"] - ENT_COEF * losses["entropy"] + VF_COEF * losses["value_loss"]

    count = rows.outputs.shape[1] + 1 + (0 if rows.discrete else 3)
    first, second = (slopes(lambda offsets, part=part: loss(offsets, part), count) for part in minibatches)
    moments = gradients(learner, "agent")
    biases = [name for name in moments if name.endswith("bias")]
    names = [[name for name in biases if name.startswith(network)][-1] for network in ("actor", "critic")]
    names += [] if rows.discrete else ["log_std"]
    got = np.concatenate([double(moments[name]).flatten() for name in names])
    np.testing.assert_allclose(got, 0.1 * (0.9 * first + second), rtol=1e-3, atol=1e-6)


@each_ppo
def test_the_entropy_bonus_raises_entropy(script, actions):
    """Without advantages and value loss an update raises the entropy."""
    learner, rows = make_ppo(script, actions, vf_coef=0.0, norm_adv=False)
    rows.columns["advantages"] *= 0
    _, before = rows.policy()
    learn_from(learner, rows, learning_rate=1e-5)
    outputs, _ = outputs_of(learner, rows.obs)
    log_std = 0.0 if rows.discrete else double(learner.agent.log_std) - LOG_STD
    _, after = rows.policy(outputs - rows.outputs, log_std)
    assert after.mean() > before.mean()


@each_ppo
def test_ppo_clips_the_gradient(script, actions):
    """The norm is logged, and where it is larger than the largest one Adam gets the gradient scaled down to that.

    With --max-grad-norm 0 there is no largest one.
    """
    for given, largest in ((1e9, 1e9), (0.01, 0.01), (0.0, 1e9)):
        learner, rows = make_ppo(script, actions, num_minibatches=1, max_grad_norm=given)
        learn_from(learner, rows, learning_rate=0.0)
        norm = 10 * math.hypot(*(moment.norm().item() for moment in gradients(learner, "agent").values()))
        logged = learner.losses()["grad_norm"]
        assert logged > 0.1 and norm == pytest.approx(min(logged, largest), rel=1e-3)


def of_ppo(check):
    """The check of PPO, with the first actions that the script is tested with."""
    return lambda script: check(script, next(own for known, own in PPO_CASES if stem(known) == stem(script)))


check_losses = partial(test_ppo_computes_the_papers_losses_and_gradients, norm_adv=True, clip_vloss=True)
TESTS = (check_losses, test_the_entropy_bonus_raises_entropy, test_ppo_clips_the_gradient)
LOSSES, ENTROPY, CLIPPING = map(of_ppo, TESTS)
VALUE_CLIP = ("torch.max(errors, (clipped_values", "torch.min(errors, (clipped_values")
BONUS = ("- self.args.ent_coef * entropy", "+ self.args.ent_coef * entropy")
NORMALIZED = "advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)"
BY_THE_FIRST = "mean, std = vars(self).setdefault('moments', (advantages.mean(), advantages.std()))"
BY_THE_FIRST += "\n            advantages = (advantages - mean) / (std + 1e-8)"
OTHER_ROWS = (NORMALIZED, BY_THE_FIRST)
ENTROPIES = "entropy = -(log_probs.exp() * log_probs)"
OF_ALL = 'free = self.agent.log_probs({}["obs"])\n        entropy = -(free.exp() * free)'
ONE_SOFTMAX = (
    "torch.cat([logits[..., part].log_softmax(-1) for part in self.parts], -1)",
    "logits.log_softmax(-1)",
)
INVALID_ROWS = ("(advantages - masked_mean(advantages, valid))", "(advantages - advantages.mean())")
PLAIN_BUGS = [  # algorithm, what is wrong, what is replaced by what, who notices
    ("ppo", "gains are the larger ones", "-torch.min(advantages * ratio", "-torch.max(advantages * ratio", LOSSES),
    ("ppo", "ratio is clipped above alone", "ratio.clamp(1 - clip, 1 + clip)", "ratio.clamp(max=1 + clip)", LOSSES),
    ("ppo", "errors of values are the smaller ones", *VALUE_CLIP, LOSSES),
    ("ppo", "values are clipped around the new ones", '= rows["values"] + (val', "= values + (val", LOSSES),
    ("ppo", "advantages normalized over other rows", *OTHER_ROWS, LOSSES),
    ("ppo", "entropy is lowered", *BONUS, ENTROPY),
    ("ppo", "half of the value loss", "self.args.vf_coef * value_loss", "0.5 * self.args.vf_coef * value_loss", LOSSES),
    ("ppo", "another estimate of the divergence", "(ratio - 1 - log_ratio)", "(-log_ratio)", LOSSES),
    ("ppo", "clips below 1 not counted", "(ratio - 1).abs() >", "(ratio - 1) >", LOSSES),
    ("ppo", "explained variance of advantages", 'var() / batch["returns"]', 'var() / batch["advantages"]', LOSSES),
    ("ppo", "no clip of the gradient", "self.args.max_grad_norm or", "1e9 or", CLIPPING),
    ("ppo_discrete", "masks left out of the loss", 'rows.get("mask")', "None", LOSSES),
    ("ppo_discrete", "entropy with masked choices", ENTROPIES, OF_ALL.format("rows"), LOSSES),
    ("ppo_discrete", "mean over parts", '.sum(-1) - rows["log_prob"]', '.mean(-1) - rows["log_prob"]', LOSSES),
    ("ppo_discrete", "one softmax for all parts", *ONE_SOFTMAX, LOSSES),
    ("ppo_discrete", "errors of values are the smaller ones", *VALUE_CLIP, LOSSES),
    ("ppo_discrete", "advantages normalized over other rows", *OTHER_ROWS, LOSSES),
    ("ppo_discrete", "entropy is lowered", *BONUS, ENTROPY),
    ("ppo_discrete", "no clip of the gradient", "self.args.max_grad_norm or", "1e9 or", CLIPPING),
    ("ppo_atari", "errors of values are the smaller ones", *VALUE_CLIP, LOSSES),
    ("ppo_atari", "advantages normalized over other rows", *INVALID_ROWS, LOSSES),
    ("ppo_atari", "entropy is lowered", *BONUS, ENTROPY),
    ("ppo_atari", "rows that do not count", "masked_mean(policy.entropy(), valid)", "policy.entropy().mean()", LOSSES),
    ("ppo_lstm", "errors of values are the smaller ones", *VALUE_CLIP, LOSSES),
    ("ppo_lstm", "advantages normalized over other rows", *OTHER_ROWS, LOSSES),
    ("ppo_lstm", "entropy is lowered", *BONUS, ENTROPY),
]
TURBO_BUGS = [
    ("ppo", "errors of values are the smaller ones", *VALUE_CLIP, LOSSES),
    ("ppo", "advantages normalized over other rows", *OTHER_ROWS, LOSSES),
    ("ppo", "entropy is lowered", *BONUS, ENTROPY),
    ("ppo", "gradients are scaled up too", "(norm + 1e-6)).clamp(max=1)", "(norm + 1e-6))", CLIPPING),
    ("ppo_discrete", "masks left out of the loss", 'batch.get("mask")', "None", LOSSES),
    ("ppo_discrete", "entropy with masked choices", ENTROPIES, OF_ALL.format("batch"), LOSSES),
    ("ppo_discrete", "mean over parts", 'batch["actions"].long()).sum(', 'batch["actions"].long()).mean(', LOSSES),
    ("ppo_discrete", "one softmax for all parts", *ONE_SOFTMAX, LOSSES),
    ("ppo_discrete", "errors of values are the smaller ones", *VALUE_CLIP, LOSSES),
    ("ppo_discrete", "advantages normalized over other rows", *OTHER_ROWS, LOSSES),
    ("ppo_discrete", "entropy is lowered", *BONUS, ENTROPY),
    ("ppo_discrete", "gradients are scaled up too", "(norm + 1e-6)).clamp(max=1)", "(norm + 1e-6))", CLIPPING),
    ("ppo_atari", "errors of values are the smaller ones", *VALUE_CLIP, LOSSES),
    ("ppo_atari", "entropy is lowered", *BONUS, ENTROPY),
    ("ppo_lstm", "errors of values are the smaller ones", *VALUE_CLIP, LOSSES),
    ("ppo_lstm", "entropy is lowered", *BONUS, ENTROPY),
]
BUGS = [(scripts[name], *bug) for scripts, bugs in ((PLAIN, PLAIN_BUGS), (TURBO, TURBO_BUGS)) for name, *bug in bugs]
BUGS += [
    (MULTI, "errors of values are the smaller ones", *VALUE_CLIP, LOSSES),
    (MULTI, "advantages normalized over other rows", "copy_(minibatch_moments)", "copy_(moments.sum(0))", LOSSES),
    (MULTI, "entropy is lowered", *BONUS, ENTROPY),
]


test_a_planted_bug_is_noticed = noticing(BUGS)
