"""The call that a CUDA graph would capture is compiled again, because it was warmed up in another grad mode."""

import torch

ERROR = (RuntimeError, "Detected recompile when torch.compile stance is 'fail_on_recompile'")


def setting():
    """A compiled loss, and a batch."""
    torch._dynamo.reset()
    return torch.compile(lambda x: x.square().mean(), backend="eager"), torch.ones(4)


def broken():
    loss, batch = setting()
    with torch.no_grad():
        for _ in range(3):
            loss(batch)
    with torch.compiler.set_stance("fail_on_recompile"):
        loss(batch)  # the call to capture


def fixed():
    loss, batch = setting()
    for _ in range(3):
        loss(batch)
    with torch.compiler.set_stance("fail_on_recompile"):
        loss(batch)  # the call to capture
