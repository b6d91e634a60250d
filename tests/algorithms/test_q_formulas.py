"""SAC's, TD3's and DQN's losses and gradients equal the papers' formulas, in NumPy and float64."""

import math

import numpy as np
import pytest
import torch
from conftest import ATARI, PLAIN, POPULATION, TURBO, algorithm, clones, gradients, leaves, networks, stem, unstacked
from formulas import MIDDLE, SCALE, double, images, is_population, make_learner, noticing, pair, slopes

ROWS, GAMMA, ALPHA = 12, 0.9, 0.6
RATES = {"sac": ("policy_lr", "q_lr"), "td3": ("learning_rate",), "dqn": ("learning_rate",)}
RATES |= {"sac_atari": RATES["sac"], "dqn_atari": RATES["dqn"]}
SACS = [*pair("sac"), POPULATION]
OFF_POLICY = [*SACS, *(script for name in ("td3", "dqn", "sac_atari", "dqn_atari") for script in pair(name))]
each_sac = pytest.mark.parametrize("script", SACS, ids=stem)


def make_off_policy(script, rate=0.0, tau=0.0, rows=ROWS, **kwargs):
    """A learner, and a batch for it that it learns from. Its target networks are others than its networks."""
    settings = dict.fromkeys(RATES[algorithm(script)], rate) | {"gamma": GAMMA, "tau": tau}
    if is_population(script):
        settings = {name: (value,) for name, value in settings.items()} | {"seeds": (1,)}
    learner = make_learner(script, batch_size=rows, buffer_size=100, **settings | kwargs)
    generator = np.random.default_rng(0)
    for path, tensor in leaves(networks_of(learner)):
        if "target" in path and not path.endswith(("actor.scale", "actor.bias")):
            tensor.data.mul_(torch.from_numpy(1 + 0.5 * generator.standard_normal(tensor.shape)))
    if hasattr(learner, "log_alpha"):
        learner.log_alpha.data.fill_(math.log(ALPHA))
    batch = random_batch(generator, algorithm(script), rows)
    center_values(learner, batch)
    sampled = tuple(batch.values())
    if algorithm(script) not in ATARI:
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
                own_actions = torch.from_numpy(scaled(actions)).float() if hasattr(learner, "log_alpha") else actions
                inputs = torch.cat((obs, own_actions), 1) if "critics" in name else obs
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


def scaled(actions):
    """Actions in units of half the range, from -1 to 1, as SAC's critics take them."""
    return (double(actions) - MIDDLE) / SCALE


def squashed_gaussian(actor, obs, noise, offset=0.0):
    """Actions from -1 to 1 and their log-probabilities (arXiv:1812.05905, appendix C), with CleanRL's deviations."""
    mean, raw = np.split(mlp(actor, obs, offset), 2, axis=1)
    log_std = -5 + (2 + 5) / 2 * (np.tanh(raw) + 1)
    squashed = np.tanh(mean + np.exp(log_std) * noise)
    log_prob = -(noise**2) / 2 - log_std - np.log(2 * np.pi) / 2 - np.log(1 - squashed**2 + 1e-6)
    return squashed, log_prob.sum(1)


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


@each_sac
def test_sac_computes_the_papers_losses_and_gradients(script):
    """Losses of arXiv:1812.05905 (equations 5, 7 and 18) and their gradients."""
    learner, batch = make_off_policy(script, policy_frequency=1)
    noises = noise_of_samples(learner)
    learner.update()
    tensors = networks_of(learner)
    obs, next_obs, _, rewards, terminated = map(double, batch.values())
    next_noise, noise, temperature_noise = noises

    next_actions, next_log_prob = squashed_gaussian(tensors["actor"], next_obs, next_noise)
    next_value = q_values(tensors["target_critics"], next_obs, next_actions).min(0) - ALPHA * next_log_prob
    target = rewards + GAMMA * (1 - terminated) * next_value
    q = q_values(tensors["critics"], obs, scaled(batch["actions"]))

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


def outputs_for(network, obs):
    """What a network for images puts out, float64."""
    with torch.no_grad():
        return double(network(obs))


def probabilities(logits):
    log_probs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return np.exp(log_probs), log_probs


@pytest.mark.parametrize("script", pair("sac_atari"), ids=stem)
def test_sac_for_atari_computes_the_papers_losses_and_gradients(script):
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


@pytest.mark.parametrize("script", [*SACS, *pair("sac_atari")], ids=stem)
def test_alpha_moves_the_entropy_to_the_target(script):
    """Alpha falls while the entropy is a little above the target, and rises while it is a little below."""
    if algorithm(script) == "sac":
        target, rows = -3, 300
        policies = [[0.0] * 3 + [np.arctanh((log_std + 5) / 3.5 - 1)] * 3 for log_std in (-2.33, -2.53)]
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
def test_alpha_stays_without_autotune(script):
    """Alpha starts at 1; without autotune it is the one that is given, and stays."""
    given = {"autotune": False, "alpha": (0.3,) if is_population(script) else 0.3, "buffer_size": 100}
    for kwargs, start in (({"buffer_size": 100}, 1.0), (given, 0.3)):
        assert make_learner(script, **kwargs).log_alpha.exp().mean().item() == pytest.approx(start)
    learner, _ = make_off_policy(script, rate=1e-3, rows=2, autotune=False)
    learner.update()
    assert losses_of(learner)["alpha"] == pytest.approx(ALPHA) and "alpha_loss" not in losses_of(learner)


@pytest.mark.parametrize("script", pair("td3"), ids=stem)
def test_td3_computes_the_papers_losses_and_gradients(script):
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


@pytest.mark.parametrize("script", [*pair("dqn"), *pair("dqn_atari")], ids=stem)
def test_dqn_computes_the_papers_loss_and_gradient(script):
    """The squared difference from r + gamma max Q'(s', a'), and its gradient."""
    learner, batch = make_off_policy(script)
    learner.update()
    obs, next_obs, actions, *outcomes = batch.values()
    rewards, terminated = map(double, outcomes)
    if algorithm(script) == "dqn":
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


@pytest.mark.parametrize("script", OFF_POLICY, ids=stem)
def test_target_networks_move_by_tau(script):
    """They move by tau of the difference toward the networks, and become them if tau is 1."""
    for tau in (0.25, 1.0):
        learner, _ = make_off_policy(script, rate=1e-3, tau=tau, rows=2)
        before = clones(networks_of(learner))
        targets = [path for path in before if path.startswith(".target_")]
        learner.update()
        after = clones(networks_of(learner))
        if hasattr(learner, "update_target"):
            assert all(torch.equal(after[path], before[path]) for path in targets)
            learner.update_target()
            after = clones(networks_of(learner))
        assert targets
        for path in targets:
            online = after[path.replace(".target_", ".", 1)]
            wanted = (1 - tau) * before[path] + tau * online
            torch.testing.assert_close(after[path], wanted, rtol=1e-4, atol=1e-6)
            assert tau < 1 or torch.equal(after[path], online)


@each_sac
def test_sacs_actor_and_target_networks_wait(script):
    """Every third update the actor makes three steps, and alpha too; every second one the target networks move."""
    learner, _ = make_off_policy(script, rate=1e-3, tau=0.25, policy_frequency=3, target_network_frequency=2)
    noises = noise_of_samples(learner)
    for update in range(6):
        before, alpha, sampled = clones(networks_of(learner)), learner.log_alpha.item(), len(noises)
        learner.update()
        after = leaves(networks_of(learner))
        moved = {path.split(".")[1] for path, tensor in after if not torch.equal(tensor, before[path])}
        assert moved == {"critics", *["actor"] * (update % 3 == 0), *["target_critics"] * (update % 2 == 0)}
        assert (learner.log_alpha.item() != alpha) == (update % 3 == 0)
        assert len(noises) - sampled == 1 + 2 * 3 * (update % 3 == 0)


TARGET_ENTROPY = ("self.target_entropy = -np.count", "self.target_entropy = np.count")
ALPHA_LOSS = ("(-self.log_alpha.exp() * (log_prob", "(self.log_alpha.exp() * (log_prob")
DISCRETE_ENTROPY = ("= args.target_entropy_scale * math", "= -args.target_entropy_scale * math")
BONUS_OF_V = ("next_v = next_q - self.log_alpha", "next_v = next_q + self.log_alpha")
LARGER = ("in self.target_critics]).amin(0)", "in self.target_critics]).amax(0)")
UNCLIPPED = (".clamp(-self.args.noise_clip, self.args.noise_clip)", "")
ALWAYS_TUNED = ("if self.args.autotune:\n            with", "if True:\n            with")
ONE_STEP = ("range(self.args.policy_frequency):", "range(1):")
OTHER_TAU = (", self.args.tau)", ", 1 - self.args.tau)")
check_sac = test_sac_computes_the_papers_losses_and_gradients
check_sac_atari = test_sac_for_atari_computes_the_papers_losses_and_gradients
check_temperature = test_alpha_moves_the_entropy_to_the_target
check_td3 = test_td3_computes_the_papers_losses_and_gradients
check_dqn = test_dqn_computes_the_papers_loss_and_gradient
PLAIN_BUGS = [  # algorithm, what is wrong, what is replaced by what, who notices
    ("sac", "target is the larger value", *LARGER, check_sac),
    ("sac", "target of the critics themselves", "in self.target_critics])", "in self.critics])", check_sac),
    ("sac", "entropy is a cost", *BONUS_OF_V, check_sac),
    ("sac", "no end of episodes", '(1 - batch["terminated"]) * ', "", check_sac),
    ("sac", "actor by the larger value", "in self.critics]).amin(0)", "in self.critics]).amax(0)", check_sac),
    ("sac", "alpha is part of the actor's gradient alone", "log_prob - q)", "log_prob.detach() - q)", check_sac),
    (
        "sac",
        "density in the environment's units",
        "- (1 - actions.square()",
        "- (self.scale * (1 - actions.square())",
        check_sac,
    ),
    (
        "sac",
        "critics see the environment's units",
        'actions = (batch["actions"] - self.actor.bias) / ',
        'actions = batch["actions"] + 0 * ',
        check_sac,
    ),
    ("sac", "sign of the temperature's loss", *ALPHA_LOSS, check_temperature),
    ("sac", "sign of the target entropy", *TARGET_ENTROPY, check_temperature),
    ("sac", "alpha is always tuned", *ALWAYS_TUNED, test_alpha_stays_without_autotune),
    ("sac", "target networks move by 1 - tau", *OTHER_TAU, test_target_networks_move_by_tau),
    ("sac", "one step of the actor", *ONE_STEP, test_sacs_actor_and_target_networks_wait),
    ("sac_atari", "sign of the temperature's loss", "(entropy - self", "-(entropy - self", check_temperature),
    ("sac_atari", "sign of the target entropy", *DISCRETE_ENTROPY, check_temperature),
    ("sac_atari", "entropy is a cost", "(next_q - self.log_alpha", "(next_q + self.log_alpha", check_sac_atari),
    ("sac_atari", "no end of episodes", "(1 - terminated) * ", "", check_sac_atari),
    ("sac_atari", "target of the critics themselves", "in self.target_critics])", "in self.critics])", check_sac_atari),
    ("td3", "smoothing noise is not clipped", *UNCLIPPED, check_td3),
    ("td3", "target is the larger value", *LARGER, check_td3),
    ("td3", "target of the actor itself", "self.target_actor(next_obs", "self.actor(next_obs", check_td3),
    ("td3", "actor by the other critic", "-self.critics[0](", "-self.critics[1](", check_td3),
    ("td3", "no end of episodes", '(1 - batch["terminated"]) * ', "", check_td3),
    ("dqn", "target of the network itself", "self.target_q(batch", "self.q(batch", check_dqn),
    ("dqn", "mean instead of the largest value", "amax(-1)", "mean(-1)", check_dqn),
    ("dqn", "no end of episodes", '(1 - batch["terminated"]) * ', "", check_dqn),
    ("dqn", "target networks move by 1 - tau", *OTHER_TAU, test_target_networks_move_by_tau),
    ("dqn_atari", "target of the network itself", "self.target_q(next_obs)", "self.q(next_obs)", check_dqn),
    ("dqn_atari", "no end of episodes", "(1 - terminated) * ", "", check_dqn),
]
TURBO_BUGS = [
    ("sac", "critics see the environment's units", "(actions - self.actor.bias) / ", "actions + 0 * ", check_sac),
    ("sac", "entropy is a cost", *BONUS_OF_V, check_sac),
    ("sac", "sign of the temperature's loss", *ALPHA_LOSS, check_temperature),
    ("sac", "sign of the target entropy", *TARGET_ENTROPY, check_temperature),
    ("sac_atari", "sign of the temperature's loss", "(entropies - self", "-(entropies - self", check_temperature),
    ("sac_atari", "sign of the target entropy", *DISCRETE_ENTROPY, check_temperature),
    ("td3", "smoothing noise is not clipped", *UNCLIPPED, check_td3),
    ("dqn", "target of the network itself", "self.target_q(next_obs)", "self.q(next_obs)", check_dqn),
    ("dqn_atari", "target of the network itself", "self.target_q(next_obs)", "self.q(next_obs)", check_dqn),
]
BUGS = [(scripts[name], *bug) for scripts, bugs in ((PLAIN, PLAIN_BUGS), (TURBO, TURBO_BUGS)) for name, *bug in bugs]
BUGS += [
    (POPULATION, "critics see the environment's units", "(actions - self.actor.bias) / ", "actions + 0 * ", check_sac),
    (POPULATION, "entropy is a cost", *BONUS_OF_V, check_sac),
    (POPULATION, "sign of the temperature's loss", "(-alpha * (log_prob", "(alpha * (log_prob", check_temperature),
    (POPULATION, "sign of the target entropy", *TARGET_ENTROPY, check_temperature),
]


test_a_planted_bug_is_noticed = noticing(BUGS)
