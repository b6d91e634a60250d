"""Losses and their gradients are those of formulas, written from the papers in NumPy and float64, on rows made by hand.

Plain and turbo are compared with each other elsewhere: these tests notice what is wrong in both. At the end bugs are
planted in copies of the scripts, in CI one of each kind; the others by `pytest -m planted tests/algorithms`.
"""

import itertools
import math
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import (
    ATARI,
    MULTI,
    PLAIN,
    TURBO,
    algorithm,
    gradients,
    learner_class,
    leaves,
    load_copy,
    networks,
    stem,
    unstacked,
)

from leanrl import sac_population_torchcompile as POPULATION

IMAGES = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
VECTORS = gym.spaces.Box(-np.inf, np.inf, (5,))
MIDDLE, SCALE = np.array([1.0, -2.0, 0.25]), np.array([2.0, 1.0, 0.25])
CONTINUOUS = gym.spaces.Box(np.float32(MIDDLE - SCALE), np.float32(MIDDLE + SCALE))
DISCRETE = gym.spaces.Discrete(4)


def pair(name):
    """The plain and the turbo script of an algorithm."""
    return [PLAIN[name], TURBO[name]]


def is_population(script):
    return hasattr(script, "SACPopulation")


def name_of(script):
    """The script's name in ALGORITHMS; a population is SAC."""
    return "sac" if is_population(script) else algorithm(script)


def make_learner(script, actions=None, **kwargs):
    """A learner for environments that have spaces and nothing else."""
    images = name_of(script) in ATARI
    discrete = images or name_of(script) == "dqn"
    args = script.Args(**kwargs)
    envs = SimpleNamespace(num_envs=args.num_envs, single_observation_space=IMAGES if images else VECTORS)
    envs.single_action_space = actions or (DISCRETE if discrete else CONTINUOUS)
    torch.manual_seed(1)
    if is_population(script):
        return script.SACPopulation(args, script.agents_of(args), [envs], torch.device("cpu"))
    return learner_class(script)(args, envs, torch.device("cpu"))


def double(tensor):
    return tensor.detach().double().numpy()


def images(generator, count):
    """Each of one shade, with two darker halves: noise would look the same to a network everywhere."""
    shades = generator.integers(0, 256, (2, count, 4, 1, 1))
    middle = IMAGES.shape[1] // 2
    halves = np.repeat(shades, middle, axis=3).repeat(IMAGES.shape[2], axis=4)
    return torch.from_numpy(np.concatenate(halves, 2).astype(np.uint8))


def slopes(function, count):
    """The derivatives of a function of `count` numbers at 0, by central differences."""
    steps = 1e-5 * np.eye(count)
    return np.array([(function(step) - function(-step)) / 2e-5 for step in steps])


# ---------------------------------------------------------------------------------------------------------------------
# PPO (arXiv:1707.06347)
# ---------------------------------------------------------------------------------------------------------------------

CLIP, ENT_COEF, VF_COEF = 0.2, 0.02, 0.7
LOG_STD = np.array([-0.5, 0.0, 0.3])
PPO_CASES = [(script, CONTINUOUS) for script in pair("ppo")]
PPO_CASES += [(script, DISCRETE) for script in (*pair("ppo_atari"), MULTI)]
PPO_CASES += [(script, actions) for script in pair("ppo_lstm") for actions in (DISCRETE, CONTINUOUS)]
each_ppo = pytest.mark.parametrize(
    ("script", "actions"), PPO_CASES, ids=[f"{stem(script)}-{type(actions).__name__}" for script, actions in PPO_CASES]
)


class Rows:
    """Transitions on both sides of every clip, as columns by name, and the network's outputs for them.

    The ratio of the probabilities is 0.5, 0.95, 1.05 or 1.6. Advantages have both signs. The values have moved by 0.5
    or 3 times the largest change, up or down, and the returns lie above and below all of them. The scripts for Atari
    have rows besides that do not count.
    """

    def __init__(self, learner, discrete):
        self.discrete = discrete
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
            self.actions = generator.integers(4, size=count)
        else:
            self.actions = self.outputs + np.exp(LOG_STD) * generator.standard_normal((count, 3))
        log_prob, _ = self.policy()
        advantages = sign * (1 + np.arange(count) / count) + 100 * (1 - valid)
        values = self.values - CLIP * move
        self.columns = {"log_prob": log_prob - np.log(ratio), "values": values, "advantages": advantages}
        self.columns |= {"returns": values + advantages, "valid": valid}
        self.count = count

    def policy(self, outputs=0.0, log_std=0.0):
        """Log-probabilities of the actions and entropies, with these numbers added to what the network puts out."""
        outputs, log_std = self.outputs + outputs, LOG_STD + log_std
        if not self.discrete:
            squares = ((self.actions - outputs) / np.exp(log_std)) ** 2
            entropy = (0.5 * np.log(2 * np.pi * np.e) + log_std).sum()
            log_prob = -(0.5 * squares + log_std + 0.5 * np.log(2 * np.pi)).sum(-1)
            return log_prob, np.full(len(log_prob), entropy)
        log_probs = outputs - np.log(np.exp(outputs).sum(-1, keepdims=True))
        return log_probs[np.arange(len(outputs)), self.actions], -(np.exp(log_probs) * log_probs).sum(-1)

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
        """The columns as the scripts have them, obs and actions among them."""
        tensors = {name: torch.from_numpy(column).float() for name, column in self.columns.items()}
        return {"obs": self.obs, "actions": torch.from_numpy(self.actions)} | tensors


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
        columns["actions"] = columns["actions"].view(rows.count, -1)
        columns = {name: column[None] for name, column in columns.items()}
        names = ("starts", *names)
        learner.start_rollout()

    def make_batch(*last_obs):
        batch = getattr(learner, "batch", None)
        if batch is None:
            return columns
        if isinstance(batch, dict):
            for name, column in columns.items():
                batch[name][: rows.count].copy_(column)
        else:
            numbers = torch.stack([columns[name] for name in names], -1)
            batch.copy_(torch.cat((columns["obs"], columns["actions"], numbers), -1))

    def in_order(shape, device):
        *sizes, count = shape if isinstance(shape, torch.Size) else [shape]
        return torch.arange(count).expand(*sizes, count)

    learner.make_batch = make_batch
    last_obs = [np.zeros((rows.count, *IMAGES.shape), np.uint8)] if rows.obs.dtype == torch.uint8 else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randperm", in_order)
        patch.setattr(torch, "rand", in_order)
        patch.setattr(torch.distributed, "all_reduce", lambda tensor: None)  # there is one rank
        learner.update(learning_rate, *last_obs)


def make_ppo(script, actions, **kwargs):
    """A learner and rows for a batch of it; they are one step of an environment each."""
    sizes = {"num_envs": 32, "num_steps": 1, "num_minibatches": 2, "update_epochs": 1, "max_grad_norm": 1e9}
    coefficients = {"clip_coef": CLIP, "ent_coef": ENT_COEF, "vf_coef": VF_COEF}
    learner = make_learner(script, actions, **sizes | coefficients | kwargs)
    return learner, Rows(learner, discrete=actions is DISCRETE)


def check_ppo(script, actions, norm_adv=True, clip_vloss=True):
    """Losses, statistics, and Adam's first moments of biases and log_std after two minibatches."""
    learner, rows = make_ppo(script, actions, norm_adv=norm_adv, clip_vloss=clip_vloss)
    learn_from(learner, rows, learning_rate=0.0)
    everything = np.arange(rows.count)
    minibatches = np.split(everything, 2)
    logged = [everything] if name_of(script) == "ppo" else minibatches  # the others log means over minibatches
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
@pytest.mark.parametrize("flags", [(True, True), (False, False)], ids=["default", "no norm_adv, no clip_vloss"])
def test_ppo_computes_the_papers_losses_and_gradients(script, actions, flags):
    check_ppo(script, actions, *flags)


def check_entropy_bonus(script, actions):
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
def test_the_entropy_bonus_raises_entropy(script, actions):
    check_entropy_bonus(script, actions)


def check_gradient_clipping(script, actions):
    """The norm is logged, and where it is larger than the largest one Adam gets the gradient scaled down to that."""
    for largest in (1e9, 0.01):
        learner, rows = make_ppo(script, actions, num_minibatches=1, max_grad_norm=largest)
        learn_from(learner, rows, learning_rate=0.0)
        norm = 10 * math.hypot(*(moment.norm().item() for moment in gradients(learner, "agent").values()))
        logged = learner.losses()["grad_norm"]
        assert logged > 0.1 and norm == pytest.approx(min(logged, largest), rel=1e-3)


@each_ppo
def test_ppo_clips_the_gradient(script, actions):
    check_gradient_clipping(script, actions)


# ---------------------------------------------------------------------------------------------------------------------
# Off-policy algorithms
# ---------------------------------------------------------------------------------------------------------------------

ROWS, GAMMA, ALPHA = 12, 0.9, 0.6
RATES = {"sac": ("policy_lr", "q_lr"), "td3": ("learning_rate",), "dqn": ("learning_rate",)}
RATES |= {"sac_atari": RATES["sac"], "dqn_atari": RATES["dqn"]}
SACS = [*pair("sac"), POPULATION]
OFF_POLICY = [*SACS, *(script for name in ("td3", "dqn", "sac_atari", "dqn_atari") for script in pair(name))]
each_sac = pytest.mark.parametrize("script", SACS, ids=stem)


def make_off_policy(script, rate=0.0, tau=0.0, rows=ROWS, **kwargs):
    """A learner, and a batch for it that it learns from. Its target networks are others than its networks."""
    settings = dict.fromkeys(RATES[name_of(script)], rate) | {"gamma": GAMMA, "tau": tau}
    if is_population(script):
        settings = {name: (value,) for name, value in settings.items()} | {"seeds": (1,)}
    learner = make_learner(script, batch_size=rows, buffer_size=100, **settings | kwargs)
    generator = np.random.default_rng(0)
    for path, tensor in leaves(networks_of(learner)):
        if "target" in path and not path.endswith(("actor.scale", "actor.bias")):
            tensor.data.mul_(torch.from_numpy(1 + 0.5 * generator.standard_normal(tensor.shape)))
    if hasattr(learner, "log_alpha"):
        learner.log_alpha.data.fill_(math.log(ALPHA))
    batch = random_batch(generator, name_of(script), rows)
    center_values(learner, batch)
    sampled = tuple(batch.values())
    if name_of(script) not in ATARI:
        sampled = batch if hasattr(learner.replay, "columns") else torch.cat([x.view(rows, -1) for x in sampled], 1)
    learner.replay.sample = lambda number: sampled[None] if is_population(script) else sampled
    return learner, batch


def random_batch(generator, name, rows):
    """Transitions, every third of them terminated, as tensors by name."""
    if name in ATARI:
        obs, next_obs = images(generator, 2 * rows).chunk(2)
    else:
        obs, next_obs = torch.from_numpy(generator.standard_normal((2, rows, 5))).float()
    actions = torch.from_numpy(generator.integers(4, size=rows))
    if name == "dqn":
        actions = actions.float()
    elif name not in ATARI:
        actions = torch.from_numpy(MIDDLE + SCALE * generator.uniform(-1, 1, (rows, 3))).float()
    rewards = torch.from_numpy(generator.standard_normal(rows)).float()
    terminated = (torch.arange(rows) % 3 == 0).float()
    return {"obs": obs, "next_obs": next_obs, "actions": actions, "rewards": rewards, "terminated": terminated}


def center_values(learner, batch):
    """Give all values the same mean over the batch: then none is the largest or the smallest one on all rows."""
    obs, _, actions, *_ = batch.values()
    for name, tensors in networks_of(learner).items():
        if "actor" in name:
            continue
        for i, member in enumerate(members_of(tensors)):
            if obs.dtype == torch.uint8:
                network = getattr(learner, name)
                values = outputs_for(network[i] if "critics" in name else network, obs)
            else:
                inputs = torch.cat((obs, actions), 1) if "critics" in name else obs
                values = mlp(member, double(inputs))
            bias = list(member.values())[-1]
            bias.data.add_(torch.from_numpy(0.1 - values.mean(0)))


def members_of(tensors):
    """The tensors of each critic, or of the only network."""
    if not any(name.startswith("1.net") for name in tensors):
        return [tensors]
    return [{name: x for name, x in tensors.items() if name.startswith(f"{i}.")} for i in (0, 1)]


def networks_of(learner):
    """The tensors of its networks, by network and name; of a population its first agent's."""
    if not hasattr(learner, "agents"):
        return networks(learner)
    found = learner.tensors(0)["networks"]
    return {name: unstacked(network) if "critics" in name else network for name, network in found.items()}


def mlp(tensors, x, offset=0.0):
    """Linear layers with ReLUs between them, in float64; `offset` is added to the last one's bias."""
    layers = [double(tensor) for name, tensor in tensors.items() if name not in ("scale", "bias")]
    *hidden, weight, bias = layers
    for hidden_weight, hidden_bias in zip(hidden[::2], hidden[1::2], strict=True):
        x = np.maximum(x @ hidden_weight.T + hidden_bias, 0)
    return x @ weight.T + bias + offset


def q_values(critics, obs, actions):
    """Q(s, a) of two critics, (2, rows). On some rows the first one is smaller, on others the second one."""
    inputs = np.concatenate((obs, actions), 1)
    found = np.stack([mlp(critic, inputs)[:, 0] for critic in members_of(critics)])
    assert 0 < (found[0] < found[1]).mean() < 1
    return found


def squashed_gaussian(actor, obs, noise, offset=0.0):
    """Actions and their log-probabilities (arXiv:1812.05905, appendix C), with CleanRL's range of deviations."""
    mean, raw = np.split(mlp(actor, obs, offset), 2, axis=1)
    log_std = -5 + (2 + 5) / 2 * (np.tanh(raw) + 1)
    squashed = np.tanh(mean + np.exp(log_std) * noise)
    log_prob = -(noise**2) / 2 - log_std - np.log(2 * np.pi) / 2 - np.log(SCALE * (1 - squashed**2) + 1e-6)
    return MIDDLE + SCALE * squashed, log_prob.sum(1)


def noise_of_samples(learner):
    """The noise of all actions that the actor samples from now on, in order."""
    noises = []
    sample = learner.actor.sample

    def watched(mean, log_std, noise):
        noises.append(double(noise).reshape(-1, 3))
        return sample(mean, log_std, noise)

    learner.actor.sample = watched
    return noises


def losses_of(learner):
    """What it would log; of a population its first agent's."""
    losses = learner.losses()
    return losses[0] if isinstance(losses, list) else losses


def assert_gradient(learner, network, names, loss):
    """Adam's first moments of these biases are those of `loss`, a function of what is added to them."""
    if hasattr(learner, "agents"):
        return  # a population makes the updates of the script for one agent: tests/scripts/test_population.py
    got = 10 * np.concatenate([double(gradients(learner, network)[name]) for name in names])
    np.testing.assert_allclose(got, slopes(loss, len(got)), rtol=1e-3, atol=1e-6)


def squared_errors(q, target):
    """The critics' loss, (critics, rows) and (rows,)."""
    return ((q - target) ** 2).mean(1).sum()


def check_sac(script):
    """Losses of arXiv:1812.05905 (equations 5, 7 and 18) and their gradients."""
    learner, batch = make_off_policy(script, policy_frequency=1)
    noises = noise_of_samples(learner)
    learner.update()
    tensors = networks_of(learner)
    obs, next_obs, actions, rewards, terminated = map(double, batch.values())
    next_noise, noise, temperature_noise = noises

    next_actions, next_log_prob = squashed_gaussian(tensors["actor"], next_obs, next_noise)
    next_value = q_values(tensors["target_critics"], next_obs, next_actions).min(0) - ALPHA * next_log_prob
    target = rewards + GAMMA * (1 - terminated) * next_value
    q = q_values(tensors["critics"], obs, actions)

    def actor_loss(offset):
        actions, log_prob = squashed_gaussian(tensors["actor"], obs, noise, offset)
        return np.mean(ALPHA * log_prob - q_values(tensors["critics"], obs, actions).min(0))

    _, log_prob = squashed_gaussian(tensors["actor"], obs, noise)
    _, temperature_log_prob = squashed_gaussian(tensors["actor"], obs, temperature_noise)
    wanted = {
        "q_values": q.mean(),
        "qf_loss": squared_errors(q, target),
        "actor_loss": actor_loss(0.0),
        "entropy": -log_prob.mean(),
        "alpha_loss": -ALPHA * np.mean(temperature_log_prob - 3),  # the target is minus the number of dimensions
        "alpha": ALPHA,
    }
    assert losses_of(learner) == pytest.approx(wanted, rel=1e-4)
    biases = ["0.net.4.bias", "1.net.4.bias"]
    assert_gradient(learner, "critics", biases, lambda offset: squared_errors(q + offset[:, None], target))
    assert_gradient(learner, "actor", ["net.4.bias"], actor_loss)


@each_sac
def test_sac_computes_the_papers_losses_and_gradients(script):
    check_sac(script)


def outputs_for(network, obs):
    """What a network for images puts out, float64."""
    with torch.no_grad():
        return double(network(obs))


def probabilities(logits):
    log_probs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return np.exp(log_probs), log_probs


def check_sac_atari(script):
    """Losses of arXiv:1910.07207 (equations 4 with 10, 12 and 11) and their gradients."""
    learner, batch = make_off_policy(script)
    learner.update()
    obs, next_obs, actions, *outcomes = batch.values()
    rewards, terminated = map(double, outcomes)
    q = np.stack([outputs_for(critic, obs) for critic in learner.critics])
    target_q = np.stack([outputs_for(critic, next_obs) for critic in learner.target_critics])
    assert 0 < (q[0] < q[1]).mean() < 1 and 0 < (target_q[0] < target_q[1]).mean() < 1
    logits, next_logits = (outputs_for(learner.actor, own_obs) for own_obs in (obs, next_obs))

    next_probs, next_log_probs = probabilities(next_logits)
    next_value = (next_probs * (target_q.min(0) - ALPHA * next_log_probs)).sum(1)
    target = rewards + GAMMA * (1 - terminated) * next_value
    chosen = (slice(None), np.arange(ROWS), actions.numpy())

    def critic_loss(offset):
        return squared_errors((q + offset.reshape(2, 1, 4))[chosen], target)

    def actor_loss(offset):
        probs, log_probs = probabilities(logits + offset)
        return np.mean((probs * (ALPHA * log_probs - q.min(0))).sum(1))

    probs, log_probs = probabilities(logits)
    entropy = -(probs * log_probs).sum(1).mean()
    wanted = {
        "q_values": q[chosen].mean(),
        "qf_loss": critic_loss(np.zeros(8)),
        "actor_loss": actor_loss(0.0),
        "entropy": entropy,
        "alpha_loss": ALPHA * (entropy - 0.89 * np.log(4)),
        "alpha": ALPHA,
    }
    assert learner.losses() == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    assert_gradient(learner, "critics", ["0.net.9.bias", "1.net.9.bias"], critic_loss)
    assert_gradient(learner, "actor", ["net.9.bias"], actor_loss)


@pytest.mark.parametrize("script", pair("sac_atari"), ids=stem)
def test_sac_for_atari_computes_the_papers_losses_and_gradients(script):
    check_sac_atari(script)


def check_temperature(script):
    """Alpha falls while the entropy is a little above the target, and rises while it is a little below."""
    if name_of(script) == "sac":
        target, rows = -3, 1000
        policies = [[0.0] * 3 + [np.arctanh((log_std + 5) / 3.5 - 1)] * 3 for log_std in (-2.1, -2.3)]
    else:
        target, rows = 0.89 * np.log(4), 2
        policies = [[logit, 0.0, 0.0, 0.0] for logit in (0.9, 1.2)]
    for outputs, above in zip(policies, (True, False), strict=True):
        learner, _ = make_off_policy(script, rows=rows, q_lr=(0.01,) if is_population(script) else 0.01)
        *_, weight, bias = [x for name, x in networks_of(learner)["actor"].items() if name.startswith("net")]
        weight.data.zero_()
        bias.data.copy_(torch.tensor(outputs))
        learner.update()
        losses = losses_of(learner)
        assert 0.01 < abs(losses["entropy"] - target) < 0.6 and (losses["entropy"] > target) == above
        assert (losses["alpha"] < ALPHA) == above


@pytest.mark.parametrize("script", [*SACS, *pair("sac_atari")], ids=stem)
def test_alpha_moves_the_entropy_to_the_target(script):
    check_temperature(script)


def check_td3(script):
    """Targets of arXiv:1802.09477 with clipped noise and the smaller value, the first critic's policy gradient."""
    learner, batch = make_off_policy(script, policy_noise=0.2, noise_clip=0.5)
    obs, next_obs, actions, rewards, terminated = map(double, batch.values())
    noise = np.random.default_rng(0).choice([-5.0, -0.3, 0.3, 5.0], (ROWS, 3))
    own_noise = torch.from_numpy(noise).float()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn_like", lambda like: own_noise)
        if hasattr(learner, "noise"):
            learner.noise.normal_ = lambda: learner.noise.copy_(own_noise)
        learner.update()
    tensors = networks_of(learner)

    def policy(name, obs, noise=0.0, offset=0.0):
        return MIDDLE + SCALE * np.clip(np.tanh(mlp(tensors[name], obs, offset)) + noise, -1, 1)

    next_actions = policy("target_actor", next_obs, np.clip(0.2 * noise, -0.5, 0.5))
    target = rewards + GAMMA * (1 - terminated) * q_values(tensors["target_critics"], next_obs, next_actions).min(0)
    q = q_values(tensors["critics"], obs, actions)

    def actor_loss(offset):
        return -q_values(tensors["critics"], obs, policy("actor", obs, offset=offset))[0].mean()

    wanted = {"q_values": q.mean(), "qf_loss": squared_errors(q, target), "actor_loss": actor_loss(0.0)}
    assert learner.losses() == pytest.approx(wanted, rel=1e-4)
    biases = ["0.net.4.bias", "1.net.4.bias"]
    assert_gradient(learner, "critics", biases, lambda offset: squared_errors(q + offset[:, None], target))
    assert_gradient(learner, "actor", ["net.4.bias"], actor_loss)


@pytest.mark.parametrize("script", pair("td3"), ids=stem)
def test_td3_computes_the_papers_losses_and_gradients(script):
    check_td3(script)


def check_dqn(script):
    """The squared difference from r + gamma max Q'(s', a'), and its gradient."""
    learner, batch = make_off_policy(script)
    learner.update()
    obs, next_obs, actions, *outcomes = batch.values()
    rewards, terminated = map(double, outcomes)
    if name_of(script) == "dqn":
        tensors = networks_of(learner)
        q, next_q = mlp(tensors["q"], double(obs)), mlp(tensors["target_q"], double(next_obs))
        bias = "4.bias"
    else:
        q, next_q = outputs_for(learner.q, obs), outputs_for(learner.target_q, next_obs)
        bias = "net.9.bias"
    assert len(set(next_q.argmax(1))) > 1
    target = rewards + GAMMA * (1 - terminated) * next_q.max(1)
    chosen = (np.arange(ROWS), actions.long().numpy())

    def td_loss(offset):
        return np.mean(((q + offset)[chosen] - target) ** 2)

    wanted = {"q_values": q[chosen].mean(), "td_loss": td_loss(0.0)}
    assert learner.losses() == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    assert_gradient(learner, "q", [bias], td_loss)


@pytest.mark.parametrize("script", [*pair("dqn"), *pair("dqn_atari")], ids=stem)
def test_dqn_computes_the_papers_loss_and_gradient(script):
    check_dqn(script)


def copied(learner):
    return {path: tensor.detach().clone() for path, tensor in leaves(networks_of(learner))}


def check_target_networks(script):
    """They move by tau of the difference toward the networks."""
    learner, _ = make_off_policy(script, rate=1e-3, tau=0.25, rows=2)
    before = copied(learner)
    learner.update()
    if hasattr(learner, "update_target"):
        learner.update_target()
    after = copied(learner)
    targets = [path for path in before if path.startswith(".target_")]
    assert targets
    for path in targets:
        online = path.replace(".target_", ".", 1)
        torch.testing.assert_close(after[path], 0.75 * before[path] + 0.25 * after[online], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("script", OFF_POLICY, ids=stem)
def test_target_networks_move_by_tau(script):
    check_target_networks(script)


def check_frequencies(script):
    """Every third update the actor makes three steps, and alpha too; every second one the target networks move."""
    learner, _ = make_off_policy(script, rate=1e-3, tau=0.25, policy_frequency=3, target_network_frequency=2)
    noises = noise_of_samples(learner)
    for update in range(6):
        before, alpha, sampled = copied(learner), learner.log_alpha.item(), len(noises)
        learner.update()
        moved = {
            path.split(".")[1] for path, tensor in copied(learner).items() if not torch.equal(tensor, before[path])
        }
        assert moved == {"critics", *["actor"] * (update % 3 == 0), *["target_critics"] * (update % 2 == 0)}
        assert (learner.log_alpha.item() != alpha) == (update % 3 == 0)
        assert len(noises) - sampled == 1 + 2 * 3 * (update % 3 == 0)


@each_sac
def test_sacs_actor_and_target_networks_wait(script):
    check_frequencies(script)


# ---------------------------------------------------------------------------------------------------------------------
# Planted bugs
# ---------------------------------------------------------------------------------------------------------------------


def planted(bugs):
    """Parameters of a test: the first bug of each kind runs in CI."""
    first = {bug[1]: bug for bug in reversed(bugs)}
    marks = [[] if bug is first[bug[1]] else [pytest.mark.planted] for bug in bugs]
    return [pytest.param(*bug, id=f"{stem(bug[0])}, {bug[1]}", marks=own) for bug, own in zip(bugs, marks, strict=True)]


def assert_noticed(script, old, new, check, folder):
    """`check` fails for a copy of the script in which `old` is replaced by `new`."""
    source = Path(script.__file__).read_text()
    assert source.count(old) == 1, f"not there once: {old}"
    edited = load_copy(stem(script), source.replace(old, new), folder)
    with pytest.raises(AssertionError):
        check(edited)


def of_ppo(check):
    """The check of PPO, with the first actions that the script is tested with."""
    return lambda script: check(script, next(own for known, own in PPO_CASES if stem(known) == stem(script)))


LOSSES, ENTROPY, CLIPPING = map(of_ppo, (check_ppo, check_entropy_bonus, check_gradient_clipping))
VALUE_CLIP = ("torch.max(errors, (clipped_values", "torch.min(errors, (clipped_values")
BONUS = ("- self.args.ent_coef * entropy", "+ self.args.ent_coef * entropy")
NORMALIZED = "advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)"
BY_THE_FIRST = "mean, std = vars(self).setdefault('moments', (advantages.mean(), advantages.std()))"
BY_THE_FIRST += "\n            advantages = (advantages - mean) / (std + 1e-8)"
OTHER_ROWS = (NORMALIZED, BY_THE_FIRST)
INVALID_ROWS = ("(advantages - masked_mean(advantages, valid))", "(advantages - advantages.mean())")
TARGET_ENTROPY = ("self.target_entropy = -act_dim", "self.target_entropy = act_dim")
ALPHA_LOSS = ("(-self.log_alpha.exp() * (log_prob", "(self.log_alpha.exp() * (log_prob")
DISCRETE_ENTROPY = ("= args.target_entropy_scale * math", "= -args.target_entropy_scale * math")
BONUS_OF_V = ("next_v = next_q - self.log_alpha", "next_v = next_q + self.log_alpha")
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
    ("ppo", "no clip of the gradient", "self.args.max_grad_norm)", "1e9)", CLIPPING),
    ("ppo_atari", "errors of values are the smaller ones", *VALUE_CLIP, LOSSES),
    ("ppo_atari", "advantages normalized over other rows", *INVALID_ROWS, LOSSES),
    ("ppo_atari", "entropy is lowered", *BONUS, ENTROPY),
    (
        "ppo_atari",
        "rows that do not count",
        "entropy = masked_mean(policy.entropy(), valid)",
        "entropy = policy.entropy().mean()",
        LOSSES,
    ),
    ("ppo_lstm", "errors of values are the smaller ones", *VALUE_CLIP, LOSSES),
    ("ppo_lstm", "advantages normalized over other rows", *OTHER_ROWS, LOSSES),
    ("ppo_lstm", "entropy is lowered", *BONUS, ENTROPY),
    (
        "sac",
        "target is the larger value",
        "in self.target_critics]).amin(0)",
        "in self.target_critics]).amax(0)",
        check_sac,
    ),
    ("sac", "target of the critics themselves", "in self.target_critics])", "in self.critics])", check_sac),
    ("sac", "entropy is a cost", *BONUS_OF_V, check_sac),
    ("sac", "no end of episodes", '(1 - batch["terminated"]) * ', "", check_sac),
    ("sac", "actor by the larger value", "in self.critics]).amin(0)", "in self.critics]).amax(0)", check_sac),
    (
        "sac",
        "alpha is part of the actor's gradient alone",
        "(alpha * log_prob - q)",
        "(alpha * log_prob.detach() - q)",
        check_sac,
    ),
    (
        "sac",
        "no Jacobian of the bounds",
        "(self.scale * (1 - squashed.square()) + 1e-6)",
        "(1 - squashed.square() + 1e-6)",
        check_sac,
    ),
    ("sac", "sign of the temperature's loss", *ALPHA_LOSS, check_temperature),
    ("sac", "sign of the target entropy", *TARGET_ENTROPY, check_temperature),
    (
        "sac",
        "target networks move by 1 - tau",
        "(weight.data, self.args.tau)",
        "(weight.data, 1 - self.args.tau)",
        check_target_networks,
    ),
    ("sac", "one step of the actor", "range(self.args.policy_frequency):", "range(1):", check_frequencies),
    (
        "sac_atari",
        "sign of the temperature's loss",
        "(entropy - self.target_entropy)",
        "(self.target_entropy - entropy)",
        check_temperature,
    ),
    ("sac_atari", "sign of the target entropy", *DISCRETE_ENTROPY, check_temperature),
    ("sac_atari", "entropy is a cost", "(next_q - self.log_alpha", "(next_q + self.log_alpha", check_sac_atari),
    ("sac_atari", "no end of episodes", "(1 - terminated) * ", "", check_sac_atari),
    ("sac_atari", "target of the critics themselves", "in self.target_critics])", "in self.critics])", check_sac_atari),
    (
        "td3",
        "smoothing noise is not clipped",
        "noise.clamp(-self.args.noise_clip, self.args.noise_clip)",
        "noise",
        check_td3,
    ),
    (
        "td3",
        "target is the larger value",
        "in self.target_critics]).amin(0)",
        "in self.target_critics]).amax(0)",
        check_td3,
    ),
    ("td3", "target of the actor itself", "self.target_actor(next_obs", "self.actor(next_obs", check_td3),
    ("td3", "actor by the other critic", "-self.critics[0](", "-self.critics[1](", check_td3),
    ("td3", "no end of episodes", '(1 - batch["terminated"]) * ', "", check_td3),
    ("dqn", "target of the network itself", "self.target_q(batch", "self.q(batch", check_dqn),
    ("dqn", "mean instead of the largest value", "amax(-1)", "mean(-1)", check_dqn),
    ("dqn", "no end of episodes", '(1 - batch["terminated"]) * ', "", check_dqn),
    (
        "dqn",
        "target networks move by 1 - tau",
        "(weights.data, self.args.tau)",
        "(weights.data, 1 - self.args.tau)",
        check_target_networks,
    ),
    ("dqn_atari", "target of the network itself", "self.target_q(next_obs)", "self.q(next_obs)", check_dqn),
    ("dqn_atari", "no end of episodes", "(1 - terminated) * ", "", check_dqn),
]
TURBO_BUGS = [
    ("ppo", "errors of values are the smaller ones", *VALUE_CLIP, LOSSES),
    ("ppo", "advantages normalized over other rows", *OTHER_ROWS, LOSSES),
    ("ppo", "entropy is lowered", *BONUS, ENTROPY),
    ("ppo", "gradients are scaled up too", "(norm + 1e-6)).clamp(max=1)", "(norm + 1e-6))", CLIPPING),
    ("ppo_atari", "errors of values are the smaller ones", *VALUE_CLIP, LOSSES),
    ("ppo_atari", "entropy is lowered", *BONUS, ENTROPY),
    ("ppo_lstm", "errors of values are the smaller ones", *VALUE_CLIP, LOSSES),
    ("ppo_lstm", "entropy is lowered", *BONUS, ENTROPY),
    ("sac", "entropy is a cost", *BONUS_OF_V, check_sac),
    ("sac", "sign of the temperature's loss", *ALPHA_LOSS, check_temperature),
    ("sac", "sign of the target entropy", *TARGET_ENTROPY, check_temperature),
    (
        "sac_atari",
        "sign of the temperature's loss",
        "(entropies - self.target_entropy)",
        "(self.target_entropy - entropies)",
        check_temperature,
    ),
    ("sac_atari", "sign of the target entropy", *DISCRETE_ENTROPY, check_temperature),
    ("td3", "smoothing noise is not clipped", ".clamp(-self.args.noise_clip, self.args.noise_clip)", "", check_td3),
    ("dqn", "target of the network itself", "self.target_q(next_obs)", "self.q(next_obs)", check_dqn),
    ("dqn_atari", "target of the network itself", "self.target_q(next_obs)", "self.q(next_obs)", check_dqn),
]
OTHER_BUGS = [
    (MULTI, "errors of values are the smaller ones", *VALUE_CLIP, LOSSES),
    (MULTI, "advantages normalized over other rows", "copy_(minibatch_moments)", "copy_(moments.sum(0))", LOSSES),
    (MULTI, "entropy is lowered", *BONUS, ENTROPY),
    (POPULATION, "entropy is a cost", *BONUS_OF_V, check_sac),
    (POPULATION, "sign of the temperature's loss", "(-alpha * (log_prob", "(alpha * (log_prob", check_temperature),
    (POPULATION, "sign of the target entropy", *TARGET_ENTROPY, check_temperature),
]
BUGS = [(scripts[name], *bug) for scripts, bugs in ((PLAIN, PLAIN_BUGS), (TURBO, TURBO_BUGS)) for name, *bug in bugs]
BUGS += OTHER_BUGS


@pytest.mark.parametrize(("script", "bug", "old", "new", "check"), planted(BUGS))
def test_a_planted_bug_is_noticed(script, bug, old, new, check, tmp_path):
    assert_noticed(script, old, new, check, tmp_path)
