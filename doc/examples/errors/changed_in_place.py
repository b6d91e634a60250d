"""The critic's optimizer steps between the actor's loss and its backward pass, which needs the old weights."""

import torch
from torch import nn

ERROR = (RuntimeError, "modified by an inplace operation")


def setting():
    torch.manual_seed(0)
    actor = nn.Linear(3, 2)
    critic = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizers = [torch.optim.Adam(network.parameters()) for network in (actor, critic)]
    return actor, critic, *optimizers, torch.randn(8, 3), torch.randn(8, 2), torch.randn(8, 1)


def broken():
    actor, critic, actor_optimizer, critic_optimizer, obs, actions, target = setting()
    actor_loss = -critic(torch.cat((obs, actor(obs)), -1)).mean()
    critic_loss = (critic(torch.cat((obs, actions), -1)) - target).square().mean()
    critic_loss.backward()
    critic_optimizer.step()  # changes the weights in place
    actor_loss.backward()
    actor_optimizer.step()


def fixed():
    actor, critic, actor_optimizer, critic_optimizer, obs, actions, target = setting()
    critic_loss = (critic(torch.cat((obs, actions), -1)) - target).square().mean()
    critic_loss.backward()
    critic_optimizer.step()  # changes the weights in place
    actor_loss = -critic(torch.cat((obs, actor(obs)), -1)).mean()
    actor_loss.backward()
    actor_optimizer.step()
