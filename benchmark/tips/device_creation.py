"""A tensor is made on the device, not on the host and then moved there."""

import torch
from tip import DEVICE, main


def before():
    return torch.zeros(256, 64).to(DEVICE)


def after():
    return torch.zeros(256, 64, device=DEVICE)


if __name__ == "__main__":
    main(before, after, needs_cuda=True)
