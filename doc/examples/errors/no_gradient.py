"""The log-probabilities in the loss are those that were computed under `no_grad`, while acting."""

import torch
from torch import nn
from torch.distributions import Categorical


def setting():
    torch.manual_seed(0)
    return nn.Linear(3, 2), nn.Linear(3, 1), torch.randn(8, 3), torch.randn(8), torch.randn(8)


def broken():
    """The gradient of the actor's weights."""
    actor, critic, obs, advantages, returns = setting()
    with torch.no_grad():  # acting
        policy = Categorical(logits=actor(obs))
        actions = policy.sample()
        log_prob = policy.log_prob(actions)
    value_loss = (critic(obs).squeeze(-1) - returns).square().mean()
    loss = -(log_prob * advantages).mean() + value_loss
    loss.backward()
    return actor.weight.grad


def fixed():
    actor, critic, obs, advantages, returns = setting()
    with torch.no_grad():  # acting
        policy = Categorical(logits=actor(obs))
        actions = policy.sample()
    log_prob = Categorical(logits=actor(obs)).log_prob(actions)
    value_loss = (critic(obs).squeeze(-1) - returns).square().mean()
    loss = -(log_prob * advantages).mean() + value_loss
    loss.backward()
    return actor.weight.grad


def is_right(gradient):
    return gradient is not None and bool(gradient.any())
