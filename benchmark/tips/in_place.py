"""A target network moves in place, by one `lerp_`, not by a sum that becomes a new tensor."""

import torch
from tip import DEVICE, main

WEIGHTS = torch.linspace(-1, 1, 2 * 73_000, device=DEVICE)  # of both critics of SAC
TARGET = WEIGHTS.clone()  # where the weights are already, so that both ways can be called often


def before():
    TARGET.copy_(0.005 * WEIGHTS + 0.995 * TARGET)
    return TARGET


def after():
    return TARGET.lerp_(WEIGHTS, 0.005)


if __name__ == "__main__":
    main(before, after)
