"""No `eval()` and `train()` around each action of a network without dropout and batch normalization."""

import torch
from torch import nn

from benchmark.studies.tips.before_after import DEVICE, time_both

torch.manual_seed(0)
NETWORK = nn.Sequential(nn.Linear(17, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 6)).to(DEVICE)
OBS = torch.ones(1, 17, device=DEVICE)


@torch.no_grad()
def before():
    NETWORK.eval()
    actions = NETWORK(OBS)
    NETWORK.train()
    return actions


@torch.no_grad()
def after():
    return NETWORK(OBS)


if __name__ == "__main__":
    time_both(before, after)
