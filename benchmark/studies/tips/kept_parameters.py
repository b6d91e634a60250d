"""What a loop needs in each iteration is looked up once: here the parameters, for which `parameters()` searches."""

import torch
from torch import nn

from benchmark.studies.tips.before_after import DEVICE, time_both

torch.manual_seed(0)
NETWORK = nn.Sequential(nn.Linear(17, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 6)).to(DEVICE)
for parameter in NETWORK.parameters():
    parameter.grad = torch.zeros_like(parameter)
PARAMETERS = list(NETWORK.parameters())


def before():
    for parameter in NETWORK.parameters():
        parameter.grad.fill_(1)
    return nn.utils.clip_grad_norm_(NETWORK.parameters(), 0.5)


def after():
    for parameter in PARAMETERS:
        parameter.grad.fill_(1)
    return nn.utils.clip_grad_norm_(PARAMETERS, 0.5)


if __name__ == "__main__":
    time_both(before, after)
