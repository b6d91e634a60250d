"""The call that a CUDA graph would capture is compiled again, because it was warmed up in another mode."""

import torch


def compiled(function):
    """`function` compiled, and the list of its graphs, one entry for each time that it was compiled."""
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph

    return torch.compile(function, backend=backend), graphs


def broken():
    """How often the call to capture compiles."""
    torch._dynamo.reset()
    update, graphs = compiled(lambda x: (x * 2).sum())
    with torch.no_grad():
        for _ in range(3):
            update(torch.ones(4))
    before = len(graphs)
    update(torch.ones(4))
    return len(graphs) - before


def fixed():
    torch._dynamo.reset()
    update, graphs = compiled(lambda x: (x * 2).sum())
    for _ in range(3):
        update(torch.ones(4))  # as it will be called
    before = len(graphs)
    update(torch.ones(4))
    return len(graphs) - before


def is_right(compilations):
    return compilations == 0
