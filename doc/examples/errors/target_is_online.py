"""The target network is the online network under another name."""

import copy

import torch
from torch import nn


def setting():
    torch.manual_seed(0)
    return nn.Linear(3, 1), torch.randn(8, 3), torch.randn(8)


def broken():
    """How far a step of the critic moves its own targets."""
    critic, obs, rewards = setting()
    target_critic = critic
    optimizer = torch.optim.SGD(critic.parameters(), 0.1)
    before = target_critic(obs).detach()
    loss = (critic(obs).squeeze(-1) - rewards).square().mean()
    loss.backward()
    optimizer.step()
    return (target_critic(obs) - before).abs().max().item()


def fixed():
    critic, obs, rewards = setting()
    target_critic = copy.deepcopy(critic)
    optimizer = torch.optim.SGD(critic.parameters(), 0.1)
    before = target_critic(obs).detach()
    loss = (critic(obs).squeeze(-1) - rewards).square().mean()
    loss.backward()
    optimizer.step()
    return (target_critic(obs) - before).abs().max().item()


def is_right(distance):
    return distance == 0
