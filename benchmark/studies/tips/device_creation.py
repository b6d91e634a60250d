"""A tensor is made on the device, not on the host and then moved there."""

import torch

from benchmark.studies.tips.before_after import DEVICE, time_both


def before():
    return torch.zeros(256, 64).to(DEVICE)


def after():
    return torch.zeros(256, 64, device=DEVICE)


if __name__ == "__main__":
    time_both(before, after, needs_cuda=True)
