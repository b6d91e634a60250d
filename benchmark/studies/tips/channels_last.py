"""Images have their channels last in memory, for convolutions on a CPU."""

import torch

from benchmark.studies.tips.before_after import DEVICE, time_both
from benchmark.studies.tips.convolutions import learn

IMAGES = torch.linspace(0, 1, 64 * 4 * 84 * 84, device=DEVICE).view(64, 4, 84, 84)
CHANNELS_LAST = IMAGES.contiguous(memory_format=torch.channels_last)


def before():
    return learn(IMAGES)


def after():
    return learn(CHANNELS_LAST)


if __name__ == "__main__":
    time_both(before, after)
