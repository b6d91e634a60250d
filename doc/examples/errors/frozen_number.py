"""A CUDA graph records kernels with their arguments: changing a Python number later changes nothing."""

import torch

NEEDS_CUDA = True


def broken():
    """The weight, from 0, after a step with a gradient of 1 and a learning rate of 0.1."""
    weight = torch.zeros((), device="cuda")
    gradient = torch.ones((), device="cuda")
    learning_rate = 1.0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weight.sub_(learning_rate * gradient)
    learning_rate = 0.1
    graph.replay()
    return weight.item()


def fixed():
    weight = torch.zeros((), device="cuda")
    gradient = torch.ones((), device="cuda")
    learning_rate = torch.tensor(1.0, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weight.sub_(learning_rate * gradient)
    learning_rate.fill_(0.1)
    graph.replay()
    return weight.item()


def is_right(weight):
    return abs(weight + 0.1) < 1e-6
