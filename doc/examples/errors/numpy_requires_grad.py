"""Actions are converted to NumPy with their graph attached."""

import torch
from torch import nn

ERROR = (RuntimeError, r"Can't call numpy\(\) on Tensor that requires grad")


def broken():
    actor = nn.Linear(3, 2)
    return actor(torch.zeros(1, 3)).numpy()


def fixed():
    actor = nn.Linear(3, 2)
    with torch.no_grad():
        return actor(torch.zeros(1, 3)).numpy()
