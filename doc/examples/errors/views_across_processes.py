"""Rows of a preallocated buffer are sent through a queue: they travel as memory, not as values."""

import torch
from torch.multiprocessing import get_context


def broken():
    """The rewards of three steps, which are 0, 1 and 2, as they come out of the queue."""
    queue = get_context("spawn").SimpleQueue()
    rewards = torch.zeros(4)
    for t in range(3):
        rewards[0] = t
        queue.put(rewards[0])
    return [queue.get().item() for _ in range(3)]  # another process gets the same


def fixed():
    queue = get_context("spawn").SimpleQueue()
    rewards = torch.zeros(4)
    for t in range(3):
        rewards[0] = t
        queue.put(rewards[0].clone())
    return [queue.get().item() for _ in range(3)]  # another process gets the same


def is_right(rewards):
    return rewards == [0.0, 1.0, 2.0]
