"""Seconds per call of functions, interleaved, so that a temporary slowdown of the machine affects all of them."""

import time

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def wait():
    """Wait until the device has finished."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def seconds_per_call(function, calls):
    """Mean seconds over `calls` calls, including the device's time."""
    wait()
    begin = time.perf_counter()
    for _ in range(calls):
        function()
    wait()
    return (time.perf_counter() - begin) / calls


def interleaved_times(functions, rounds, seconds):
    """Seconds per call of each of `functions`, by name: a list over rounds, each of about `seconds` per function."""
    calls = {}
    for name, function in functions.items():
        seconds_per_call(function, 3)
        calls[name] = max(1, int(seconds / seconds_per_call(function, 3)))
    taken = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            taken[name].append(seconds_per_call(function, calls[name]))
    return taken
