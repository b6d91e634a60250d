"""Two epochs differentiate the values of a rollout through the one graph that the rollout built."""

import torch
from torch import nn

ERROR = (RuntimeError, "Trying to backward through the graph a second time")


def setting():
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
    return critic, torch.optim.SGD(critic.parameters(), 0.1), torch.randn(8, 3), torch.randn(8)


def broken():
    critic, optimizer, obs, returns = setting()
    values = critic(obs).squeeze(-1)  # while acting
    for _ in range(2):
        loss = (values - returns).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def fixed():
    critic, optimizer, obs, returns = setting()
    for _ in range(2):
        values = critic(obs).squeeze(-1)  # with the current weights
        loss = (values - returns).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
