"""Pages of the documentation: links work, and statements about programs are true."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "doc").glob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", flags=re.S | re.M)


def links(page):
    """Targets of the links and pictures of a page."""
    return LINK.findall(CODE.sub("", page.read_text()))


def anchors(page):
    """The names that GitHub gives the headings of a page."""
    names = []
    for heading in re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M), flags=re.M
    ):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        names.append(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in links(page):
        if link.startswith(("http://", "https://")):
            continue
        target, _, anchor = unquote(link).partition("#")
        path = page if not target else (page.parent / target).resolve()
        assert path.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(path), f"{page.name}: {link}"


def test_the_loss_in_the_readme_is_that_of_the_scripts():
    block = re.search(r"```python\n# plain\n(.*)# turbo\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    for shown, name in zip(block.groups(), ("", "_torchcompile"), strict=True):
        script = (ROOT / "leanrl" / f"sac_continuous_action{name}.py").read_text()
        assert textwrap.indent(shown, " " * 12) in script, name


def test_every_page_is_two_clicks_from_the_readme():
    def neighbours(page):
        targets = ((page.parent / link.partition("#")[0]).resolve() for link in links(page) if "://" not in link)
        return {target / "README.md" if target.is_dir() else target for target in targets}

    first = neighbours(ROOT / "README.md")
    second = {target for page in first if page.suffix == ".md" for target in neighbours(page)}
    for page in [*PAGES, ROOT / "doc" / "report.html"]:
        assert page in first | second, page.name


def run(*words, **environment):
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("program", "said", "not_said"),
    [
        ("recompile", ["Recompiling function update", "learning_rate == 0.1"], ["Graph break"]),
        ("break", ["Data-dependent branching"], ["Recompiling"]),
        ("neither", [], ["Recompiling", "Graph break"]),
    ],
)
def test_torch_logs_say_what_torch_compile_md_says(program, said, not_said):
    code, output = run("doc/examples/compile/logs.py", program, TORCH_LOGS="recompiles,graph_breaks")
    assert code == 0
    assert all(text in output for text in said)
    assert not any(text in output for text in not_said)


def operations(function, *inputs):
    """How many operations Dynamo's graph of a function has."""
    counts = []

    def backend(graph, example_inputs):
        counts.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph

    torch._dynamo.reset()
    torch.compile(function, fullgraph=True, dynamic=False, backend=backend)(*inputs)
    return sum(counts)


@pytest.mark.thorough
@pytest.mark.parametrize("backend, code", [("aot_eager", 0), ("inductor", 1)])
def test_a_faulty_backend_is_found(backend, code):
    program = ROOT / "doc" / "examples" / "compile" / "fault.py"
    assert subprocess.run([sys.executable, program, backend], stdout=subprocess.DEVNULL).returncode == code


@pytest.mark.thorough
def test_recurrent_py_prints_its_table():
    program = ROOT / "doc" / "examples" / "compile" / "recurrent.py"
    command = [sys.executable, program, "1", "--forms", "outside"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split("|")[2].strip() for line in lines if line.startswith("| 1 |")] == ["eager", "loop outside"]


def test_a_loop_over_time_is_unrolled_into_the_graph():
    """doc/torch_compile.md has the counts: 7, 49 and 193 operations for 1, 8 and 32 steps."""
    cell = torch.nn.GRUCell(4, 4)

    def loop(inputs, hidden, ended):
        outputs = []
        for x, over in zip(inputs, ended, strict=True):
            hidden = cell(x, hidden * (1 - over)[:, None])
            outputs.append(hidden)
        return torch.stack(outputs)

    counts = [operations(loop, torch.ones(n, 2, 4), torch.ones(2, 4), torch.zeros(n, 2)) for n in (1, 8)]
    assert counts == [7, 49]


def test_dynamo_refuses_whole_recurrent_layers():
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="allow_rnn"):
        torch.compile(torch.nn.GRU(2, 2), fullgraph=True, backend="eager")(torch.zeros(3, 1, 2))
