"""What torch.compile makes of a function: graphs, why they break, what it compiles again. For torch 2.0 and later."""

import contextlib
import io

import torch
import torch._dynamo

CALLS = 12  # among which recompilations are counted


def explain(function, *args):
    """The number of graphs that torch._dynamo.explain finds, and for each break a message and a place in the code."""
    with contextlib.redirect_stdout(io.StringIO()):
        if torch.__version__.startswith("2.0."):
            _, _, graphs, _, reasons, _ = torch._dynamo.explain(function, *args)
            graph_count = len(graphs)
            reasons = [reason for reason in reasons if reason.reason != "return_value"]  # an end, not a break
        else:
            explanation = torch._dynamo.explain(function)(*args)
            graph_count = explanation.graph_count
            reasons = explanation.break_reasons
    return graph_count, [(reason.reason.split("\n")[0], reason.user_stack[-1]) for reason in reasons]


def count_breaks(graph_count, reasons):
    """Breaks: one with no operator before it gives `explain` no reason, one with none behind it gives no graph."""
    return max(graph_count - 1, len(reasons))


def count_recompilations(function, agent, batch, before_call, fullgraph=False):
    """How many graphs CALLS calls compile that the first one has not; `before_call(agent, call)` goes before each."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=fullgraph)
    graphs_after = []
    with contextlib.redirect_stdout(io.StringIO()):
        for call in range(CALLS):
            before_call(agent, call)
            compiled(agent, batch)
            graphs_after.append(len(graphs))
    torch._dynamo.reset()
    return graphs_after[-1] - graphs_after[0]


def nothing(agent, call):
    pass


def measure(function, make_agent, batch, before_call=nothing, fullgraph=False):
    """Counts for `function(agent, batch)`, and messages and places of its breaks. `fullgraph`: a break is an error."""
    agent = make_agent()
    before_call(agent, 0)
    graph_count, reasons = explain(function, agent, batch)
    counts = {"graphs": graph_count, "breaks": count_breaks(graph_count, reasons)}
    counts["recompilations"] = count_recompilations(function, make_agent(), batch, before_call, fullgraph)
    return counts, reasons


def report(function, *args, **kwargs):
    """Print what `measure` finds."""
    counts, reasons = measure(function, *args, **kwargs)
    print(f"\n{function.__name__}: {', '.join(f'{name} {count}' for name, count in counts.items())}")
    for message, place in reasons:
        print(f"    {message}\n        {place.filename}:{place.lineno}: {place.line}")
