"""CUDA graph capture, emulated on the CPU.

A CUDA graph replays the kernels of one call and forgets the Python around them: a number that Python computed is
frozen, a branch that Python took is taken for ever. `record` does the same with any device's operators.
"""

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode


class RefuseHostReads(TorchDispatchMode):
    """Raises RuntimeError where Python asks for a tensor's value, by item(), bool(), a branch: capture cannot wait."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("the host asked for a tensor's value, which a CUDA graph cannot give it")
        return operator(*args, **kwargs or {})


def record(function, state):
    """Trace one call of `function()` and return a stand-in that replays its operators, as a CUDA graph would.

    `state` are the tensors that a call changes in place. They and torch's random numbers are put back after the trace,
    so that recording performs no step. Raises RuntimeError when `function` asks for a tensor's value on the host.
    """

    def call():
        with RefuseHostReads():
            return function()

    saved, rng = [tensor.clone() for tensor in state], torch.get_rng_state()
    graph = make_fx(call, tracing_mode="real")()
    for tensor, value in zip(state, saved, strict=True):
        tensor.copy_(value)
    torch.set_rng_state(rng)
    return graph
