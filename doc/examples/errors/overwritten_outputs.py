"""A CUDA graph writes its outputs to the same memory at each replay, so that earlier outputs change."""

import torch

NEEDS_CUDA = True


def broken():
    """The values of three observations, which are 0, 1 and 4."""
    obs = torch.zeros((), device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = obs.square()
    values = []
    for t in range(3):
        obs.fill_(t)
        graph.replay()
        values.append(value)
    return torch.stack(values).tolist()


def fixed():
    obs = torch.zeros((), device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = obs.square()
    values = []
    for t in range(3):
        obs.fill_(t)
        graph.replay()
        values.append(value.clone())
    return torch.stack(values).tolist()


def is_right(values):
    return values == [0.0, 1.0, 4.0]
