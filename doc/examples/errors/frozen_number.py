"""A CUDA graph has recorded kernels with their arguments: a Python number that changes later changes nothing."""

import torch

NEEDS_CUDA = True


def capture(function):
    """A CUDA graph of one call of `function`, which has been called once before, to warm up."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def broken():
    """The weight after a warm-up and a replay with learning rates 1 and 0.1, from 0."""
    weight = torch.zeros((), device="cuda")
    learning_rate = 1.0
    graph = capture(lambda: weight.add_(learning_rate))
    learning_rate = 0.1
    graph.replay()
    return weight.item()


def fixed():
    weight = torch.zeros((), device="cuda")
    learning_rate = torch.tensor(1.0, device="cuda")
    graph = capture(lambda: weight.add_(learning_rate))
    learning_rate.fill_(0.1)
    graph.replay()
    return weight.item()


def is_right(weight):
    return abs(weight - 1.1) < 1e-6
