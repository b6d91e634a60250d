"""The update of the target network binds a new tensor to a local name, and leaves the target as it is."""

import torch
from torch import nn

TAU = 0.1


def setting():
    """An online network with a weight of 1, and a target network with a weight of 0."""
    critic, target_critic = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    nn.init.ones_(critic.weight)
    nn.init.zeros_(target_critic.weight)
    return critic, target_critic


def broken():
    """The target's weight after 50 updates."""
    critic, target_critic = setting()
    for _ in range(50):
        with torch.no_grad():
            for weight, target in zip(critic.parameters(), target_critic.parameters(), strict=True):
                target = TAU * weight + (1 - TAU) * target
    return target_critic.weight.item()


def fixed():
    critic, target_critic = setting()
    for _ in range(50):
        with torch.no_grad():
            for weight, target in zip(critic.parameters(), target_critic.parameters(), strict=True):
                target.lerp_(weight, TAU)
    return target_critic.weight.item()


def is_right(weight):
    return abs(weight - (1 - (1 - TAU) ** 50)) < 1e-4
