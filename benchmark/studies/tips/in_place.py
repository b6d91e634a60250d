"""A target network moves in place, by one `lerp_`, not by a sum that becomes a new tensor."""

import torch

from benchmark.studies.tips.before_after import DEVICE, time_both

WEIGHTS = torch.linspace(-1, 1, 2 * 73_000, device=DEVICE)  # of both critics of SAC
TARGETS = {way: torch.zeros_like(WEIGHTS) for way in ("before", "after")}


def before():
    target = TARGETS["before"]
    return target.copy_(0.005 * WEIGHTS + 0.995 * target)


def after():
    return TARGETS["after"].lerp_(WEIGHTS, 0.005)


if __name__ == "__main__":
    time_both(before, after)
