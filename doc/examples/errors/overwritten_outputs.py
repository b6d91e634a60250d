"""A CUDA graph writes its outputs to the same memory each time: whoever keeps them without a copy sees the newest."""

import torch

NEEDS_CUDA = True


def captured(function, example):
    """`function` as a CUDA graph: called with a tensor like `example`, it returns its one static output."""
    static_input = example.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function(static_input)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static_output = function(static_input)

    def replay(x):
        static_input.copy_(x)
        graph.replay()
        return static_output

    return replay


def broken():
    """The values of three steps, which are 0, 1 and 4."""
    square = captured(torch.square, torch.zeros((), device="cuda"))
    values = [square(torch.tensor(float(t), device="cuda")) for t in range(3)]
    return torch.stack(values).tolist()


def fixed():
    square = captured(torch.square, torch.zeros((), device="cuda"))
    values = [square(torch.tensor(float(t), device="cuda")).clone() for t in range(3)]
    return torch.stack(values).tolist()


def is_right(values):
    return values == [0.0, 1.0, 4.0]
