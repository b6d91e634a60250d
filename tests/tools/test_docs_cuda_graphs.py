"""doc/cuda_graphs.md: its examples run, print the page's output, and are quoted verbatim."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from emulated_cuda import emulated_cuda
from tensordict.nn import CudaGraphModule

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "doc" / "examples" / "cuda_graphs"
PAGE = (ROOT / "doc" / "cuda_graphs.md").read_text()
spec = importlib.util.spec_from_file_location("run_cuda_graphs", FOLDER / "run.py")
run = importlib.util.module_from_spec(spec)
spec.loader.exec_module(run)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", run.EXAMPLES)
def test_an_example_prints_what_the_page_says(name, late, capsys):
    torch.manual_seed(0)
    run.main(name, late=late)
    printed = capsys.readouterr().out.splitlines()
    assert printed and all(line in PAGE for line in printed)


def test_code_on_the_page_is_that_of_the_files():
    sources = [(FOLDER / f"{name}.py").read_text() for name in run.EXAMPLES]
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.M | re.S)
    assert len(blocks) == 2
    assert all(any(block in source for source in sources) for block in blocks)
    line = "CudaGraphModule(function, warmup=3)"
    assert line in PAGE and line in (ROOT / "leanrl" / "dqn_torchcompile.py").read_text()


def test_the_counts_are_those_of_the_table():
    rows = (ROOT / "doc" / "counted_costs.md").read_text().splitlines()
    (eager,) = [i for i, row in enumerate(rows) if row.startswith("| SAC | eager | 272 + 33 |")]  # 305
    assert rows[eager + 1].startswith("| | cudagraphs | 2.5 + 1 | 2.5 + 1 |")


def test_every_call_of_a_module_counts_once_and_other_arguments_are_refused():
    with emulated_cuda():
        count = torch.zeros((), device="cuda")
        add = CudaGraphModule(lambda x, number: count.add_(x.sum() * number), warmup=3)
        for _ in range(5):
            add(torch.ones(2, device="cuda"), 1.0)
        assert count.item() == 10
        for x, number in ((torch.ones(3, device="cuda"), 1.0), (torch.ones(2, device="cuda"), 2.0)):
            with pytest.raises(ValueError):
                add(x, number)


def test_reading_a_value_during_capture_is_an_error():
    with emulated_cuda():
        x = torch.ones((), device="cuda")
        for read in (torch.Tensor.item, bool):
            with pytest.raises(RuntimeError, match="captur"), torch.cuda.graph(torch.cuda.CUDAGraph()):
                read(x)
