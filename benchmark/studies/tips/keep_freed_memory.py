"""On a CPU the memory of freed tensors is reused for the next ones, and Linux need not clear it again.

That is a setting of a process: each way has a process of its own, to which the calls are sent.
"""

from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context

import torch

from benchmark.studies.tips.before_after import time_both
from benchmark.studies.tips.convolutions import learn
from leanrl.ppo_atari_envpool_torchcompile import keep_freed_memory


def prepare(keep):
    torch.set_num_threads(1)
    if keep:
        keep_freed_memory()


@cache
def process(keep):
    return ProcessPoolExecutor(1, get_context("spawn"), prepare, (keep,))


def work():
    return float(learn(torch.ones(64, 4, 84, 84)))


def before():
    return process(keep=False).submit(work).result()


def after():
    return process(keep=True).submit(work).result()


if __name__ == "__main__":
    time_both(before, after)
