"""A GRU over time, compiled with the loop inside the graph and with the loop outside: first call and later calls.

A call computes the outputs for a batch of sequences, whose hidden state is reset where an episode has ended, and the
gradient of a loss. Forms are timed in rounds, one after the other. Times are CPU time on one thread: unlike wall time,
it does not count the wait for a core that other programs use.

    python doc/examples/compile/recurrent.py 1 8 32          # all forms, for three numbers of steps
    python doc/examples/compile/recurrent.py 32 --forms inside  # this form and eager
"""

import argparse
import resource
import statistics
import time

import torch
from torch import nn

FEATURES, BATCH_SIZE, ROUNDS, CALLS = 128, 64, 15, 5
FORMS = {
    "eager": "eager",
    "outside": "loop outside",
    "inside": "loop inside",
    "layer": "`nn.GRU`, eager, no resets",
    "compiled-layer": "`nn.GRU`, compiled, no resets",
}
HEAD = "| steps | | first call, CPU s | a later call, CPU ms | ratio to eager |\n|---|---|---|---|---|"


def step(cell, inputs, hidden, ended):
    """The next hidden state; that of an ended episode is reset first."""
    return cell(inputs, hidden * (1 - ended)[:, None])


def gradient_of_loop(step, cell, inputs, ended):
    """The gradient of a loss on the outputs of all steps. `inputs` (steps, batch, features), `ended` (steps, batch)."""
    hidden = torch.zeros(BATCH_SIZE, FEATURES)
    outputs = []
    for step_inputs, step_ended in zip(inputs, ended, strict=True):
        hidden = step(cell, step_inputs, hidden, step_ended)
        outputs.append(hidden)
    return torch.autograd.grad(torch.stack(outputs).square().mean(), list(cell.parameters()))


def gradient_of_layer(layer, inputs, ended):
    """The same for a whole nn.GRU, which cannot reset: `ended` is ignored."""
    outputs, _ = layer(inputs)
    return torch.autograd.grad(outputs.square().mean(), list(layer.parameters()))


def compiled(function):
    return torch.compile(function, fullgraph=True, dynamic=False)


def make(form):
    """A function of inputs and ends."""
    if "layer" in form:
        layer = nn.GRU(FEATURES, FEATURES)
        function = compiled(gradient_of_layer) if form == "compiled-layer" else gradient_of_layer
        return lambda inputs, ended: function(layer, inputs, ended)
    cell = nn.GRUCell(FEATURES, FEATURES)
    cell_step = compiled(step) if form == "outside" else step
    function = compiled(gradient_of_loop) if form == "inside" else gradient_of_loop
    return lambda inputs, ended: function(cell_step, cell, inputs, ended)


def cpu_seconds():
    """CPU time of this process and of the C++ compilers that it has run."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def first_call(call, inputs, ended):
    begin = cpu_seconds()
    call(inputs, ended)
    return cpu_seconds() - begin


def measure(steps, forms):
    """Rows of the table for sequences of so many steps."""
    torch._dynamo.reset()
    inputs = torch.randn(steps, BATCH_SIZE, FEATURES)
    ended = (torch.rand(steps, BATCH_SIZE) < 0.05).float()
    calls = {form: make(form) for form in forms}
    first = {form: first_call(call, inputs, ended) for form, call in calls.items()}
    later = {form: [] for form in forms}
    for _ in range(ROUNDS):
        for form, call in calls.items():
            begin = time.process_time()
            for _ in range(CALLS):
                call(inputs, ended)
            later[form].append((time.process_time() - begin) / CALLS * 1e3)
    median = {form: statistics.median(times) for form, times in later.items()}
    return [
        f"| {steps} | {FORMS[form]} | {first[form]:.2g} | {median[form]:.3g} | {median[form] / median['eager']:.2f} |"
        for form in forms
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", type=int, nargs="+")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch._dynamo.config.trace_autograd_ops = True
    torch._dynamo.config.allow_rnn = True
    torch._inductor.config.compile_threads = 1  # compilers run by worker processes would not be counted
    torch._inductor.config.force_disable_caches = True
    compiled(torch.sin)(torch.ones(8))  # loads inductor, and compiles C++ headers
    print(HEAD)
    for steps in args.steps:
        print(*measure(steps, dict.fromkeys(["eager", *args.forms])), sep="\n")


if __name__ == "__main__":
    main()
