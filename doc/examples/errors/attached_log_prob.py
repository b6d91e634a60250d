"""The old log-probabilities still depend on the weights: the ratio's numerator and denominator move together."""

import torch
from torch import nn
from torch.distributions import Categorical


def setting():
    torch.manual_seed(0)
    actor, obs = nn.Linear(3, 2), torch.randn(8, 3)
    actions = torch.randint(2, (8,))
    return actor, obs, actions, torch.randn(8)


def broken():
    """The gradient of the actor's weights."""
    actor, obs, actions, advantages = setting()
    old_log_prob = Categorical(logits=actor(obs)).log_prob(actions)
    log_prob = Categorical(logits=actor(obs)).log_prob(actions)
    ratio = (log_prob - old_log_prob).exp()
    (-(ratio * advantages).mean()).backward()
    return actor.weight.grad


def fixed():
    actor, obs, actions, advantages = setting()
    with torch.no_grad():
        old_log_prob = Categorical(logits=actor(obs)).log_prob(actions)
    log_prob = Categorical(logits=actor(obs)).log_prob(actions)
    ratio = (log_prob - old_log_prob).exp()
    (-(ratio * advantages).mean()).backward()
    return actor.weight.grad


def is_right(gradient):
    return bool(gradient.any())
