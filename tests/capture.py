"""CUDA graph capture, emulated on the CPU.

A CUDA graph replays the kernels of one call and forgets the Python around them: a number that Python computed is frozen, a
branch that Python took is taken for ever. `record` does the same with any device's operators.
"""

import torch
from torch.fx.experimental.proxy_tensor import make_fx


def record(function, state):
    """Trace one call of `function()` and return a stand-in that replays its operators, as a CUDA graph would.

    `state` are the tensors that a call changes in place. They, and torch's random numbers, are put back after the trace,
    so that recording performs no step. Raises whatever `function` raises when the host asks for a tensor's value.
    """
    saved, rng = [tensor.clone() for tensor in state], torch.get_rng_state()
    graph = make_fx(lambda: function(), tracing_mode="real")()  # a lambda: make_fx would count `self` as an argument
    for tensor, value in zip(state, saved, strict=True):
        tensor.copy_(value)
    torch.set_rng_state(rng)
    return graph
