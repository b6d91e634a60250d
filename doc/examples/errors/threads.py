"""Each of several processes takes as many threads as the machine has cores."""

import os

import torch
from torch.multiprocessing import get_context

PROCESSES = 2


def one_each():
    torch.set_num_threads(1)


def threads_of_all(**settings):
    """How many threads PROCESSES processes compute with together."""
    with get_context("spawn").Pool(PROCESSES, **settings) as pool:
        return sum(pool.apply(torch.get_num_threads) for _ in range(PROCESSES))


def broken():
    """How many threads there are."""
    given = os.environ.pop("OMP_NUM_THREADS", None)
    try:
        return threads_of_all()
    finally:
        if given is not None:
            os.environ["OMP_NUM_THREADS"] = given


def fixed():
    return threads_of_all(initializer=one_each)  # or OMP_NUM_THREADS=1 in the environment, before torch is imported


def is_right(threads):
    return threads == PROCESSES
