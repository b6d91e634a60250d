"""The advantages still depend on the critic, so that the policy loss trains it too."""

import torch
from torch import nn
from torch.distributions import Categorical


def setting():
    torch.manual_seed(0)
    return nn.Linear(3, 2), nn.Linear(3, 1), torch.randn(8, 3), torch.randint(2, (8,)), torch.randn(8)


def broken():
    """The gradient that the critic gets from the policy loss."""
    actor, critic, obs, actions, returns = setting()
    advantages = returns - critic(obs).squeeze(-1)
    log_prob = Categorical(logits=actor(obs)).log_prob(actions)
    (-(log_prob * advantages).mean()).backward()
    return critic.weight.grad


def fixed():
    actor, critic, obs, actions, returns = setting()
    with torch.no_grad():
        advantages = returns - critic(obs).squeeze(-1)
    log_prob = Categorical(logits=actor(obs)).log_prob(actions)
    (-(log_prob * advantages).mean()).backward()
    return critic.weight.grad


def is_right(gradient):
    return gradient is None
