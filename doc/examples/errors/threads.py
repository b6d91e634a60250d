"""Each of several processes uses as many threads as the machine has cores."""

import torch
from torch.multiprocessing import get_context

ENVIRONMENT = {"OMP_NUM_THREADS": "2"}  # the default on two cores
SEEDS = (1, 2)


def train(seed):
    """Stands for a training run; returns how many threads it computes with."""
    return torch.get_num_threads()


def broken():
    """How many threads all processes have together."""
    with get_context("spawn").Pool(len(SEEDS)) as pool:
        return sum(pool.map(train, SEEDS))


def fixed():
    with get_context("spawn").Pool(len(SEEDS), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return sum(pool.map(train, SEEDS))


def is_right(threads):
    return threads == len(SEEDS)
