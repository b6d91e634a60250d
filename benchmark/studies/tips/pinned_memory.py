"""What crosses to the device in each step is in pinned memory that is reused, and the copy does not wait."""

import torch

from benchmark.studies.tips.before_after import DEVICE, time_both

OBS = torch.ones(8, 4, 84, 84, dtype=torch.uint8, pin_memory=DEVICE.type == "cuda")
PAGEABLE = torch.ones_like(OBS, pin_memory=False)
ARRIVED = {way: torch.zeros_like(OBS, device=DEVICE) for way in ("before", "after")}


def before():
    return ARRIVED["before"].copy_(PAGEABLE)


def after():
    return ARRIVED["after"].copy_(OBS, non_blocking=True)


if __name__ == "__main__":
    time_both(before, after, needs_cuda=True)
