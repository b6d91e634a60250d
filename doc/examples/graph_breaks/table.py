"""Measure the examples of this folder, and write the figures of doc/graph_breaks.md.

    python doc/examples/graph_breaks/table.py                 # count, and print the tables
    python doc/examples/graph_breaks/table.py --write         # also rewrite figures.json and doc/graph_breaks.md
    python doc/examples/graph_breaks/table.py --write --time  # also time everything: ten minutes, on a quiet machine

With torch 2.0.1, the PyTorch of the study of 2023, --write counts for the column of that version alone:

    python3.10 -m venv old-torch && old-torch/bin/pip install torch==2.0.1 "numpy<2"
    old-torch/bin/python doc/examples/graph_breaks/table.py --write
"""

import argparse
import contextlib
import difflib
import importlib
import inspect
import io
import json
import os
import re
import statistics
import sys
import tempfile
import time
import types
from functools import partial
from pathlib import Path
from unittest.mock import patch

import measure
import sac_atari_breaks_simplified as broken
import torch
import torch._dynamo

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
DATA = HERE / "figures.json"
PAGE = ROOT / "doc" / "graph_breaks.md"
OLD = torch.__version__.startswith("2.0.")
FUNCTIONS = [function.__name__ for function in (*broken.UPDATES, *broken.OF_2023, *broken.OF_TODAY)]
MANY, FEW = 20, 10  # updates of the whole scripts

# What the study's README says, commit 21aff3c of https://github.com/timoklein/rl_graph_breaks, with torch 2.0.1
STUDY = {
    "update_critics": "2 breaks",
    "update_actor": "1 break",
    "update_temperature": "1 break",
    "sample": "breaks",
    "zero_grad": "breaks",
    "return_alpha": "breaks",
}
FIXES = {
    "update_critics": "all of the below",
    "update_actor": "all of the below",
    "update_temperature": "all of the below",
    "sample": "none needed; better: a sum over the probabilities",
    "zero_grad": "`.grad = None`, or no `.grad` at all",
    "return_alpha": "none needed; `detach()`",
    "backward": "`trace_autograd_ops` and `torch.autograd.grad`",
    "optimizer_step": "Adam as tensor operations",
    "validate": "`validate_args=False`",
    "item": "keep it a tensor",
    "branch": "`clamp`, `where`",
    "log": "return it, print outside",
    "mask": "multiply by the mask",
    "learning_rate": "a tensor, set by `fill_`",
    "temperature": "a tensor, set by `fill_`",
    "count": "a tensor, incremented by `add_`",
}
BACKWARD = {"broken": "`loss.backward()`", "fixed": "`torch.autograd.grad`"}
FLAG = {"off": False, "on": True}


def examples():
    """The simplified examples by name."""
    return {"broken": broken, "fixed": importlib.import_module("sac_atari_fixed_simplified")}


def tracing(flag):
    """Whether Dynamo traces backward passes."""
    return torch._dynamo.config.patch(trace_autograd_ops=flag)


def count(name, function, flag):
    """Graphs, breaks, recompilations and the reasons of breaks of a function of the example `name`."""
    example = examples()[name]
    function = getattr(example, function)
    before_call = example.BEFORE_CALLS.get(function, measure.nothing)
    torch.manual_seed(0)
    with tracing(flag):
        counts, reasons = measure.measure(function, example.Agent, example.make_batch(), before_call, fullgraph=flag)
    return counts | {"reasons": portable(reasons)}


def count_backward():
    """What `count` counts for both ways to a gradient, with Dynamo's flag off and on."""
    return {name: {state: count(name, "backward", flag) for state, flag in FLAG.items()} for name in BACKWARD}


def portable(reasons):
    """Messages and lines of code, without what differs from machine to machine."""
    return [[re.sub(r" +\| .*| at 0x\w+", "", message), place.line] for message, place in reasons]


def count_of_2023(function):
    """What `count` counts, with torch 2.0.1 and without the fixed example, which that version cannot run."""
    function = getattr(broken, function)
    before_call = broken.BEFORE_CALLS.get(function, measure.nothing)
    counts, reasons = measure.measure(function, broken.Agent, broken.make_batch(), before_call)
    return counts | {"reasons": portable(reasons)}


def emulated_device():
    """tools/emulated_cuda.py's device, which counts how often the host waits."""
    sys.path.append(str(ROOT / "tools"))
    return importlib.import_module("emulated_cuda").emulated_cuda()


def count_waits(name, function):
    """How often the host waits for the device in a call."""
    example = examples()[name]
    function = getattr(example, function)
    validation = patch.object(torch.distributions.Distribution, "_validate_args", True)  # off as soon as Dynamo ran
    with emulated_device() as device, validation, contextlib.redirect_stdout(io.StringIO()):
        agent = example.Agent("cuda")
        batch = example.make_batch("cuda")
        for call in range(2):  # optimizers make their state in the first one
            example.BEFORE_CALLS.get(function, measure.nothing)(agent, call)
            before = device.counts["waits"]
            function(agent, batch)
        return device.counts["waits"] - before


def load_script(name):
    """A whole script on games of Catch (tests/algorithms/catch.py) instead of envpool's."""
    sys.path.append(str(ROOT / "tests" / "algorithms"))
    catch = importlib.import_module("catch")
    script = importlib.import_module(f"sac_atari_{'breaks' if name == 'broken' else name}_full")
    script.make_pool = lambda args: catch.Catch(1, args.seed)
    return script


def run_script(name, updates, **flags):
    """Train with a whole script until so many updates are made; returns the learner."""
    script = load_script(name)
    flags = {"learning_starts": 40, "batch_size": 8, "buffer_size": 100} | flags
    with tempfile.TemporaryDirectory() as run_dir:
        return script.train(script.Args(total_timesteps=40 + 4 * updates, run_dir=run_dir, **flags))


def count_graphs(name, updates):
    """Graphs that a whole script compiles until so many updates are made, and how many of them end with a break."""
    reasons = []

    def backend(graph, inputs):
        reasons.append(graph.compile_subgraph_reason.graph_break)
        return graph.forward

    torch._dynamo.reset()
    with tracing(name == "fixed"), patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        run_script(name, updates)
    torch._dynamo.reset()
    return len(reasons), sum(reasons)


def count_script(name):
    """What a whole script compiles for its first update, what for the next ones, and waits per update."""
    graphs, breaks = count_graphs(name, 1)
    later, _ = count_graphs(name, MANY)
    waits = {}
    for updates in (FEW, MANY):
        validation = patch.object(torch.distributions.Distribution, "_validate_args", True)
        with emulated_device() as device, validation:
            run_script(name, updates, compile=False)
            waits[updates] = device.counts["waits"]
    per_update = (waits[MANY] - waits[FEW]) / (MANY - FEW)
    return {"graphs": graphs, "breaks": breaks, "recompilations": later - graphs, "waits": per_update}


def time_calls(calls, warm=measure.CALLS, rounds=15, per_round=20):
    """Of functions of the number of a call: seconds of the first calls, microseconds of later ones (medians)."""
    first = []
    for call in calls:
        begin = time.perf_counter()
        for number in range(warm):
            call(number)
        first.append(time.perf_counter() - begin)
    later = [[] for _ in calls]
    for turn in range(rounds):
        for call, times in zip(calls, later, strict=True):
            begin = time.perf_counter()
            for number in range(per_round):
                call(warm + turn * per_round + number)
            times.append((time.perf_counter() - begin) / per_round * 1e6)
    return {"first": first, "later": [statistics.median(times) for times in later]}


def time_function(function):
    """`time_calls` of a function of both examples, compiled by inductor with an empty cache."""
    times = time_calls([compiled_call(name, function, name == "fixed") for name in examples()])
    torch._dynamo.reset()
    return times


def time_backward():
    """Microseconds of a later call for both ways to a gradient, with Dynamo's flag off and on."""
    forms = [(name, state) for name in BACKWARD for state in FLAG]
    times = time_calls([compiled_call(name, "backward", FLAG[state]) for name, state in forms])["later"]
    torch._dynamo.reset()
    return {f"{name} {state}": later for (name, state), later in zip(forms, times, strict=True)}


def compiled_call(name, function, flag):
    """A call of a function of the example `name`, compiled with Dynamo's flag off or on."""
    example = examples()[name]
    function = getattr(example, function)
    code = function.__code__.replace()  # Dynamo keeps what it compiles by code, whatever its flag was
    compiled = torch.compile(types.FunctionType(code, function.__globals__), fullgraph=flag)
    before_call = example.BEFORE_CALLS.get(function, measure.nothing)
    agent = example.Agent()
    batch = example.make_batch()

    def call(number):
        before_call(agent, number % 100)
        with tracing(flag), contextlib.redirect_stdout(io.StringIO()):
            compiled(agent, batch)

    return call


def time_scripts():
    """`time_calls` of an update of both whole scripts, with a batch of random frames."""
    generator = torch.Generator().manual_seed(0)
    frames = torch.randint(256, (2, 64, 4, 84, 84), generator=generator, dtype=torch.uint8)
    actions = torch.randint(3, (64,), generator=generator)
    batch = {"obs": frames[0], "actions": actions, "rewards": torch.zeros(64), "terminated": torch.zeros(64)}
    batch["next_obs"] = frames[1]
    calls = []
    for name in examples():
        learner = run_script(name, 0, batch_size=64)

        def call(number, name=name, learner=learner):
            with tracing(name == "fixed"):
                learner.update(batch)

        calls.append(call)
    times = time_calls(calls, rounds=9, per_round=2)
    torch._dynamo.reset()
    return times


def machine():
    """The machine in words, and how torch runs on it."""
    models = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()}-core {models[0]}, {memory:.0f} GiB, one thread, torch {torch.__version__.split('+')[0]}"


def measured(data, timed):
    """`data` with all that this version of torch can measure."""
    if OLD:
        return data | {"of_2023": {function: count_of_2023(function) for function in FUNCTIONS}}
    simplified = {}
    for function in FUNCTIONS:
        print(f"counting {function}", file=sys.stderr)
        simplified[function] = {
            name: count(name, function, name == "fixed") | {"waits": count_waits(name, function)} for name in examples()
        }
    data = data | {"torch": torch.__version__.split("+")[0], "simplified": simplified, "backward": count_backward()}
    data["full"] = {name: count_script(name) for name in examples()}
    if timed:
        torch.set_num_threads(1)
        with torch._inductor.config.patch(force_disable_caches=True):
            times = {}
            for function in FUNCTIONS:
                print(f"timing {function}", file=sys.stderr)
                times[function] = time_function(function)
            data["times"] = {"machine": machine(), "simplified": times, "full": time_scripts()}
            data["times"]["backward"] = time_backward()
    return data


# ---------------------------------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------------------------------


def plural(number, word):
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def result(counts):
    """Breaks and recompilations in words, whichever there are."""
    texts = [plural(counts[f"{word}s"], word) for word in ("break", "recompilation") if counts[f"{word}s"]]
    return ", ".join(texts) or "no break"


def pair(values, unit):
    """What the broken form costs and what the fixed one costs, three digits each, and their ratio."""
    before, after = values
    return f"{short(before)} and {short(after)} {unit} ({before / after:.2g}x)"


def short(value):
    """Three digits, or all before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def cost(times):
    return f"{pair(times['later'], 'us')}; {pair(times['first'], 's')}"


def row(data, function):
    both = data["simplified"][function]
    cells = [f"`{function}`", STUDY.get(function, ""), result(data["of_2023"][function]), result(both["broken"])]
    cells += [result(both["fixed"]), f"{both['broken']['waits']} and {both['fixed']['waits']}", FIXES[function]]
    cells.append(cost(data["times"]["simplified"][function]))
    return f"| {' | '.join(cells)} |"


def table(data):
    """The table of all functions of the simplified examples."""
    head = f"| | the study | torch 2.0.1 | torch {data['torch']} | fixed | waits | fix "
    head += f"| a later call; the first {measure.CALLS} calls |"
    lines = [head, f"|{'---|' * (head.count('|') - 1)}", *(row(data, function) for function in FUNCTIONS)]
    machine_line = f"Times: {data['times']['machine']}."
    return "\n".join([*lines, "", machine_line])


def backward_table(data):
    """Both ways to a gradient, with Dynamo's flag off and on."""
    lines = ["| `trace_autograd_ops` | off, the default | on |", "|---|---|---|"]
    times = data["times"].get("backward")
    for name, form in BACKWARD.items():
        cells = [form]
        for state, counts in data["backward"][name].items():
            later = f"; {short(times[f'{name} {state}'])} us" if times else ""
            cells.append(result(counts) + later)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def full_table(data):
    """The table of the whole scripts."""
    broken_counts, fixed_counts = data["full"]["broken"], data["full"]["fixed"]
    times = data["times"]["full"]
    lines = ["| | `sac_atari_breaks_full.py` | `sac_atari_fixed_full.py` |", "|---|---|---|"]
    titles = {
        "graphs": "graphs for the first action and the first update",
        "breaks": "of them ended by a break",
        "recompilations": f"graphs compiled in the next {MANY - 1} updates",
        "waits": "waits per update and its four environment steps, not compiled",
    }
    for name, title in titles.items():
        lines.append(f"| {title} | {broken_counts[name]:g} | {fixed_counts[name]:g} |")
    for name, title in {"first": f"first {measure.CALLS} updates, s", "later": "a later update, ms"}.items():
        before, after = (value / (1000 if name == "later" else 1) for value in times[name])
        lines.append(f"| {title} | {short(before)} | {short(after)} |")
    return "\n".join(lines)


def fix(data, function):
    """The reasons of the broken form's breaks, and the fix as a diff."""
    versions = {data["torch"]: data["simplified"][function]["broken"]}
    if function in STUDY:
        versions = {"2.0.1": data["of_2023"][function]} | versions
    report = []
    for version, counts in versions.items():
        reasons = "; ".join(f"{message}, at `{line}`" for message, line in counts["reasons"])
        report += [f"torch {version}: {reasons}."] if reasons else []
    forms = [inspect.getsource(getattr(example, function)).splitlines() for example in examples().values()]
    lines = list(difflib.unified_diff(*forms, n=9, lineterm=""))[3:]
    hooks = [example.BEFORE_CALLS.get(getattr(example, function)) for example in examples().values()]
    if hooks[0] and function in ("learning_rate", "temperature"):
        forms = [inspect.getsource(hook).splitlines() for hook in hooks]
        lines = list(difflib.unified_diff(*forms, n=9, lineterm=""))[3:]
    return "\n".join([*([" ".join(report), ""] if report else []), "```diff", *lines, "```"])


def with_figures(page, data):
    """`page` with what is between its markers written anew from `data`."""
    texts = {"table": table, "trace_autograd_ops": backward_table, "full": full_table}

    def write(match):
        name = match[1]
        text = texts[name](data) if name in texts else fix(data, name)
        return f"<!-- table.py writes {name} -->\n\n{text}\n\n<!-- end -->"

    return re.sub(r"<!-- table.py writes (\w+) -->\n.*?<!-- end -->", write, page, flags=re.DOTALL)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="rewrite figures.json and doc/graph_breaks.md")
    parser.add_argument("--time", action="store_true", help="time all functions and updates, too")
    args = parser.parse_args()
    data = measured(json.loads(DATA.read_text(encoding="utf-8")), args.time)
    print(table(data), full_table(data), sep="\n\n")
    if args.write:
        DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(with_figures(PAGE.read_text(encoding="utf-8"), data), encoding="utf-8")


if __name__ == "__main__":
    main()
