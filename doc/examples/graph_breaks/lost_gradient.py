"""An update whose gradient torch.compile loses, without an error.

A graph break, here that of `zero_grad`, is between the forward pass and `loss.backward()`. With `trace_autograd_ops`
Dynamo traces `backward` in the graph after the break, which has no parameter to give a gradient to. torch 2.13.

    python doc/examples/graph_breaks/lost_gradient.py
"""

import torch
from torch import nn

torch.manual_seed(0)
network = nn.Linear(4, 1)
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
obs = torch.ones(8, 4)


def update():
    loss = network(obs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def moved(**options):
    """How far a compiled update moves the network's weights."""
    torch._dynamo.reset()
    before = network.weight.detach().clone()
    torch.compile(update, backend="eager", **options)()
    return (network.weight - before).norm().item()


if __name__ == "__main__":
    print(f"trace_autograd_ops off: weights move by {moved():.3g}")
    torch._dynamo.config.trace_autograd_ops = True
    print(f"trace_autograd_ops on: weights move by {moved():.3g}")
    try:
        moved(fullgraph=True)
    except torch._dynamo.exc.Unsupported as error:
        print(f"trace_autograd_ops on, fullgraph=True: {str(error).splitlines()[0]}")
