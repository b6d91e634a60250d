"""CUDA graph capture, emulated on the CPU.

A CUDA graph replays the kernels of one call and forgets the Python around them: a number that Python computed is frozen,
a branch that Python took is taken for ever. `record` does the same with any device's operators.
"""

import torch
from torch.fx.experimental.proxy_tensor import make_fx


def record(function, state):
    """Trace one call of `function()` and return a stand-in that replays its operators, as a CUDA graph would.

    `state` are the tensors that a call changes in place. They and torch's random numbers are put back after the trace, so
    that recording performs no step. Raises RuntimeError when `function` asks for a tensor's value on the host.
    """
    saved, rng = [tensor.clone() for tensor in state], torch.get_rng_state()
    # a lambda, because make_fx would count the self of a method as an argument
    graph = make_fx(lambda: function(), tracing_mode="real")()
    for tensor, value in zip(state, saved, strict=True):
        tensor.copy_(value)
    torch.set_rng_state(rng)
    return graph
