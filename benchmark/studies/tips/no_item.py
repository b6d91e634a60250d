"""Losses are added up on the device and read once, not by `.item()` after each minibatch."""

import torch

from benchmark.studies.tips.before_after import DEVICE, time_both

VALUES = torch.linspace(0, 1, 256 * 16, device=DEVICE).view(16, 256)


def before():
    total = 0.0
    for values in VALUES:
        total += values.square().mean().item()
    return total


def after():
    total = torch.zeros((), device=DEVICE)
    for values in VALUES:
        total += values.square().mean()
    return total.item()


if __name__ == "__main__":
    time_both(before, after, needs_cuda=True)  # on a CPU nobody waits: there `item` costs nothing
