"""Values are (N, 1), returns (N,): their difference is (N, N), and no error says so."""

import torch
from torch import nn


def setting():
    """A critic, and returns that it predicts exactly."""
    torch.manual_seed(0)
    critic, obs = nn.Linear(3, 1), torch.randn(8, 3)
    return critic, obs, critic(obs).detach().squeeze(-1)


def broken():
    """The loss of a critic that is always right."""
    critic, obs, returns = setting()
    values = critic(obs)
    return (values - returns).square().mean().item()


def fixed():
    critic, obs, returns = setting()
    values = critic(obs).squeeze(-1)
    return (values - returns).square().mean().item()


def is_right(loss):
    return loss == 0
