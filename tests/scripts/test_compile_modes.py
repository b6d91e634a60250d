"""--compile-mode: what cannot work is refused; the CUDA graphs that torch.compile makes would change nothing."""

import pytest
import torch
from conftest import TURBO, assert_same_state, leaves, make_learner
from test_training_on_cuda import SIZES
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext
from torch.utils._pytree import tree_leaves, tree_map_only

SEPARATE_CRITICS = ("sac", "td3")


@pytest.fixture(params=TURBO)
def name(request):
    return request.param


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"compile_mode": "reduce-overhead"},
            "--compile-mode reduce-overhead: give --compile too, or --compile-mode default",
        ),
        (
            {"compile": True, "cudagraphs": True, "compile_mode": "reduce-overhead"},
            "--compile-mode reduce-overhead: it makes CUDA graphs of its own; leave out --cudagraphs",
        ),
        (
            {"compile": True, "cudagraphs": True, "compile_mode": "max-autotune"},
            "--compile-mode max-autotune: it makes CUDA graphs of its own; leave out --cudagraphs",
        ),
    ],
)
def test_modes_that_cannot_work_are_refused(name, flags, message, tmp_path, capsys):
    check_refused(name, flags, message, tmp_path, capsys)


@pytest.mark.parametrize("name", SEPARATE_CRITICS)
def test_modes_of_the_critics_that_cannot_work_are_refused(name, tmp_path, capsys):
    flags = {"compile": True, "cudagraphs": True, "critic_compile_mode": "max-autotune"}
    check_refused(name, flags, "--critic-compile-mode max-autotune: it makes CUDA graphs", tmp_path, capsys)


def test_without_a_cuda_device_there_is_a_warning(name, tmp_path, capsys, monkeypatch):
    record_options(monkeypatch)
    flags = SIZES[name] | {"compile": True, "compile_mode": "reduce-overhead", "run_dir": str(tmp_path)}
    TURBO[name].train(TURBO[name].Args(**flags))
    warning = "warning: CUDA graphs of --compile-mode reduce-overhead need a CUDA device; running without"
    assert [line for line in capsys.readouterr().err.splitlines() if "CUDA graphs of" in line] == [warning]


@pytest.mark.parametrize("name", SEPARATE_CRITICS)
def test_without_a_cuda_device_there_is_a_warning_for_critics_alone(name, capsys):
    TURBO[name].prepare(TURBO[name].Args(compile=True, critic_compile_mode="max-autotune"))
    warning = "warning: CUDA graphs of --critic-compile-mode max-autotune need a CUDA device; running without"
    assert capsys.readouterr().err.splitlines() == [warning]


def test_a_mode_without_graphs_goes_with_cudagraphs(name):
    TURBO[name].check_args(TURBO[name].Args(compile=True, cudagraphs=True, compile_mode="max-autotune-no-cudagraphs"))


def check_refused(name, flags, message, folder, capsys):
    with pytest.raises(SystemExit) as stop:
        TURBO[name].train(TURBO[name].Args(run_dir=str(folder), **flags))
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")
    assert not list(folder.iterdir())


def record_options(monkeypatch):
    """Let torch.compile only keep the options that it is called with, by the function's name."""
    kept = {}

    def keep(function, fullgraph, options):
        kept[function.__name__] = options
        return function

    monkeypatch.setattr(torch, "compile", keep)
    return kept


@pytest.mark.parametrize("name", SEPARATE_CRITICS)
def test_critics_have_a_mode_of_their_own(name, monkeypatch):
    options = record_options(monkeypatch)
    make_learner(TURBO[name], compile=True, compile_mode="reduce-overhead", critic_compile_mode="max-autotune")
    assert options["update_critics"]["max_autotune"]
    assert "max_autotune" not in options["update_actor"] and options["update_actor"]["triton.cudagraphs"]
    make_learner(TURBO[name], compile=True, compile_mode="max-autotune-no-cudagraphs")
    assert all(own["max_autotune"] and not own.get("triton.cudagraphs") for own in options.values())


def overwriting(function, fullgraph, options):
    """A torch.compile whose functions overwrite, like CUDA graphs of one pool, what any of them returned before."""
    assert options["triton.cudagraphs"]

    def compiled(*inputs):
        for tensor in RETURNED:
            tensor.fill_(torch.nan if tensor.is_floating_point() else 99)
        outputs = tree_map_only(torch.Tensor, torch.clone, function(*inputs))
        RETURNED[:] = [leaf for leaf in tree_leaves(outputs) if torch.is_tensor(leaf)]
        return outputs

    return compiled


RETURNED = []


def test_outputs_that_are_overwritten_have_been_used_or_cloned(name, tmp_path, monkeypatch):
    script = TURBO[name]
    states = []
    for flags in ({}, {"compile": True, "compile_mode": "reduce-overhead"}):
        folder = tmp_path / str(len(flags))
        if flags:
            monkeypatch.setattr(torch, "compile", overwriting)
        script.train(script.Args(**SIZES[name] | flags, run_dir=str(folder)))
        (path,) = folder.glob("*/checkpoint.pt")
        states.append(torch.load(path)["learner"])
    assert_same_state(dict(leaves(states[1])), dict(leaves(states[0])))


def test_graphs_change_tensors_that_stay_in_place_alone(name, tmp_path, monkeypatch):
    """Of a function that changes other tensors torch makes no CUDA graph, and gives no more than a warning."""
    changed = []

    def look(graph, example_inputs):
        metadata = TracingContext.get().fw_metadata
        changed.append(set(metadata.mutated_inp_runtime_indices))
        assert changed[-1] <= set(metadata.static_input_indices)
        return graph

    compile = torch.compile
    backend = aot_autograd(fw_compiler=look)
    monkeypatch.setattr(torch, "compile", lambda f, options, **kwargs: compile(f, backend=backend, **kwargs))
    script = TURBO[name]
    script.train(script.Args(**SIZES[name], compile=True, compile_mode="reduce-overhead", run_dir=str(tmp_path)))
    assert any(changed)
