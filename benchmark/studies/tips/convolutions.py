"""Forward and backward pass of the network that plays Atari, for the tips about convolutions."""

import torch
from torch import nn

from benchmark.studies.tips.before_after import DEVICE

torch.manual_seed(0)
NETWORK = nn.Sequential(
    nn.Conv2d(4, 32, 8, stride=4),
    nn.ReLU(),
    nn.Conv2d(32, 64, 4, stride=2),
    nn.ReLU(),
    nn.Conv2d(64, 64, 3, stride=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(3136, 512),
    nn.ReLU(),
    nn.Linear(512, 6),
).to(DEVICE)
PARAMETERS = list(NETWORK.parameters())


def learn(images):
    """The norm of the gradient for `images`, (batch, 4, 84, 84), float32."""
    gradients = torch.autograd.grad(NETWORK(images).square().mean(), PARAMETERS)
    return torch.stack([gradient.norm() for gradient in gradients]).norm().detach()
