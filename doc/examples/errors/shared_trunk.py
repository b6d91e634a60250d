"""Actor and critic share a trunk, and each has an optimizer that steps it."""

import torch
from torch import nn

ERROR = (RuntimeError, "modified by an inplace operation")


def setting():
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
    return trunk, nn.Linear(16, 2), nn.Linear(16, 1), torch.randn(8, 3), torch.randn(8, 1)


def broken():
    trunk, policy_head, value_head, obs, returns = setting()
    policy_optimizer = torch.optim.Adam([*trunk.parameters(), *policy_head.parameters()])
    value_optimizer = torch.optim.Adam([*trunk.parameters(), *value_head.parameters()])
    features = trunk(obs)
    policy_loss = -policy_head(features).log_softmax(-1)[:, 0].mean()
    value_loss = (value_head(features) - returns).square().mean()
    policy_loss.backward(retain_graph=True)
    policy_optimizer.step()  # changes the trunk, which the second loss needs
    value_loss.backward()
    value_optimizer.step()


def fixed():
    trunk, policy_head, value_head, obs, returns = setting()
    networks = nn.ModuleList([trunk, policy_head, value_head])
    optimizer = torch.optim.Adam(networks.parameters())
    features = trunk(obs)
    policy_loss = -policy_head(features).log_softmax(-1)[:, 0].mean()
    value_loss = (value_head(features) - returns).square().mean()
    (policy_loss + 0.5 * value_loss).backward()
    optimizer.step()
