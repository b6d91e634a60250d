"""Values are (N, 1), returns (N,): their difference is (N, N), and no error says so."""

import warnings

import torch
from torch import nn


def setting():
    returns = torch.arange(4.0)
    values = returns[:, None]  # a critic that is always right, with an output of width 1
    return values, returns


def broken():
    """The loss of a perfect critic."""
    values, returns = setting()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # mse_loss warns; (values - returns) ** 2 does not
        return nn.functional.mse_loss(values, returns).item()


def fixed():
    values, returns = setting()
    return nn.functional.mse_loss(values.squeeze(-1), returns).item()


def is_right(loss):
    return loss == 0
