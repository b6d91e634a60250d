"""Pages of the documentation: links work, and statements about programs are true."""

import json
import os
import re
import subprocess
import sys
import textwrap
import warnings
from urllib.parse import unquote

import gymnasium as gym
import pytest
import torch
from conftest import GAMES, PLAIN, TURBO, Masked, entry_of, on_vectors, script_params, stem, tiny
from emulated_cuda import emulated_cuda
from gymnasium.utils.env_checker import check_env
from helpers import DOC, ROOT, blocks, by_hand, load_example, python, section
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensordict.nn import CudaGraphModule
from test_cli import run_tiny, summary

from instruments import __main__ as command

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOC.glob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```.*?^```", flags=re.S | re.M)


def links(page):
    """Targets of the links and pictures of a page."""
    return LINK.findall(re.sub(r"`[^`\n]*`", "", BLOCK.sub("", page.read_text())))


def anchors(page):
    """The names that GitHub gives the headings of a page."""
    names = []
    for heading in re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), flags=re.M):
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
    for page in [*PAGES, DOC / "report.html"]:
        assert page in first | second, page.name


@pytest.mark.parametrize(
    ("program", "said", "not_said"),
    [
        ("recompile", ["Recompiling function update", "learning_rate == 0.1"], ["Graph break"]),
        ("break", ["Data-dependent branching"], ["Recompiling"]),
        ("neither", [], ["Recompiling", "Graph break"]),
    ],
)
def test_torch_logs_say_what_torch_compile_md_says(program, said, not_said):
    environment = os.environ | {"TORCH_LOGS": "recompiles,graph_breaks"}
    done = python("doc/examples/compile/logs.py", program, env=environment)
    assert done.returncode == 0
    assert all(text in done.stderr for text in said)
    assert not any(text in done.stderr for text in not_said)


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
    assert python("doc/examples/compile/fault.py", backend).returncode == code


@pytest.mark.thorough
def test_recurrent_py_prints_its_table():
    lines = python("doc/examples/compile/recurrent.py", 1, "--forms", "outside", check=True).stdout.splitlines()
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


# ---------------------------------------------------------------------------------------------------------------------
# doc/using_a_policy.md
# ---------------------------------------------------------------------------------------------------------------------

COMPILED_IN_CI = {stem(TURBO[name]) for name in ("sac", "ppo", "dqn")}  # compiling a policy takes a while
LEFT_OUT = GAMES | {"ppo_lstm": "its policy takes a state too"}
build = load_example("cpp/build")


def test_the_page_shows_lines_of_the_program():
    (shown,) = blocks((DOC / "using_a_policy.md").read_text(), "cpp")
    lines = [line.strip() for line in (DOC / "examples" / "cpp" / "policy.cpp").read_text().splitlines()]
    assert all(line.strip() in lines for line in shown.splitlines())


@pytest.fixture(scope="module")
def executable(tmp_path_factory):
    path = tmp_path_factory.mktemp("cpp") / "policy"
    build.compile_program(path)
    return path


@pytest.mark.parametrize("script", by_hand(script_params(TURBO.values(), LEFT_OUT), COMPILED_IN_CI))
def test_the_program_acts_as_the_policy_does(script, executable, tmp_path):
    script.train(script.Args(**tiny(script) | {"run_dir": str(tmp_path), "total_timesteps": 200}))
    (path,) = tmp_path.glob("*/policy.pt2")
    package = tmp_path / "compiled.pt2"
    build.compile_policy(path, package)
    python = torch.export.load(path).module()

    def act(numbers):
        return subprocess.run([executable, package, *map(str, numbers)], capture_output=True, text=True)

    numbers = [0.1, -0.2, 0.05, 1.0] if tiny(script)["env_id"] == "CartPole-v1" else [0.8, -0.6, 2.0]
    actions = [float(line) for line in act(numbers).stdout.splitlines()]
    assert actions == pytest.approx(python(torch.tensor([numbers])).flatten().tolist(), abs=1e-6)
    too_few = act(numbers[:-1])
    assert too_few.returncode == 1 and "unmatched dim value at 1" in too_few.stderr


def test_a_policy_plays_with_masks(tmp_path):
    folder = run_tiny(PLAIN["ppo_discrete"], tmp_path, env_id="Taxi-v4")
    (program,) = blocks(section((DOC / "using_a_policy.md").read_text(), "With action masks"), "python")
    shown = {}
    exec(program.replace("runs/RUN", str(folder)), shown)
    assert shown["masks"].any() and shown["over"]


# ---------------------------------------------------------------------------------------------------------------------
# doc/ppo_discrete.md
# ---------------------------------------------------------------------------------------------------------------------


class Game(Masked):
    """Has its mask in the observation, and none in the info."""

    def __init__(self):
        super().__init__()
        mask = gym.spaces.MultiBinary(int(self.action_space.n))
        self.observation_space = gym.spaces.Dict(observation=self.observation_space, action_mask=mask)

    def state(self):
        obs, info = super().state()
        return {"observation": obs, **info}, {}


def test_masks_in_observations_are_used_with_the_wrapper(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (program,) = blocks((DOC / "ppo_discrete.md").read_text(), "python")
    (tmp_path / "my_game.py").touch()
    (tmp_path / "my_masks.py").write_text(program)
    gym.register("Game-v0", entry_point=Game)
    try:
        assert summary(run_tiny(PLAIN["ppo_discrete"], tmp_path, env_id="my_masks:MaskedGame-v0"))["episodes"] > 1
        with pytest.raises(AssertionError, match="is not allowed"):
            run_tiny(PLAIN["ppo_discrete"], tmp_path, env_id="my_game:Game-v0")
    finally:
        for name in ("my_game", "my_masks"):
            sys.modules.pop(name, None)
        for env_id in ("Game-v0", "MaskedGame-v0"):
            gym.registry.pop(env_id, None)


# ---------------------------------------------------------------------------------------------------------------------
# doc/cuda_graphs.md
# ---------------------------------------------------------------------------------------------------------------------

CUDA_GRAPHS = (DOC / "cuda_graphs.md").read_text()
cuda_graphs = load_example("cuda_graphs/run")


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", cuda_graphs.EXAMPLES)
def test_an_example_prints_what_the_page_says(name, late, capsys):
    torch.manual_seed(0)
    cuda_graphs.main(name, late=late)
    printed = capsys.readouterr().out.splitlines()
    assert printed and all(line in CUDA_GRAPHS for line in printed)


def test_code_on_the_page_is_that_of_the_files():
    sources = [(DOC / "examples" / "cuda_graphs" / f"{name}.py").read_text() for name in cuda_graphs.EXAMPLES]
    shown = blocks(CUDA_GRAPHS, "python")
    assert len(shown) == 2
    assert all(any(block in source for source in sources) for block in shown)
    line = "CudaGraphModule(function, warmup=3)"
    assert line in CUDA_GRAPHS and line in (ROOT / "leanrl" / "dqn_torchcompile.py").read_text()


def test_the_counts_are_those_of_the_table():
    rows = (DOC / "counted_costs.md").read_text().splitlines()
    (eager,) = [i for i, row in enumerate(rows) if row.startswith("| SAC | eager | 277.5 + 34 |")]  # 311.5
    assert rows[eager + 1].startswith("| | cudagraphs | 2.5 + 1 | 1.5 + 1 |")


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


# ---------------------------------------------------------------------------------------------------------------------
# doc/environments.md
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def example(tmp_path, monkeypatch):
    """A folder where Python finds the modules of the page, my_env and wrapped."""
    monkeypatch.syspath_prepend(tmp_path)
    my_env, wrapped, *_ = blocks((DOC / "environments.md").read_text(), "python")
    (tmp_path / "my_env.py").write_text(my_env)
    (tmp_path / "wrapped.py").write_text(f"import gymnasium as gym\n\n\n{wrapped}")
    yield tmp_path
    for name in ("my_env", "wrapped"):
        sys.modules.pop(name, None)
    for env_id in ("Cart-v0", "DiscreteCart-v0", "RescaledPendulum-v0"):
        gym.registry.pop(env_id, None)


def test_the_example_passes_the_check(example):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gym.make("my_env:Cart-v0").unwrapped)


@on_vectors
def test_the_environments_train_and_are_evaluated(script, example, capsys):
    discrete = tiny(script)["env_id"] == "CartPole-v1"
    train_and_evaluate(script, "my_env:DiscreteCart-v0" if discrete else "my_env:Cart-v0", example, capsys)
    if not discrete:
        train_and_evaluate(script, "wrapped:RescaledPendulum-v0", example, capsys)


def train_and_evaluate(script, env_id, example, capsys):
    folder = run_tiny(script, example / "runs", env_id=env_id, num_envs=1)
    assert summary(folder)["episodes"] >= 1
    command.main(["evaluate", str(folder), "--episodes", "1"])
    captured = capsys.readouterr()
    assert "1 episodes: mean return" in captured.out
    assert f"imports the module {env_id.partition(':')[0]}" in captured.err


# ---------------------------------------------------------------------------------------------------------------------
# doc/logged_numbers.md
# ---------------------------------------------------------------------------------------------------------------------

LOGGED = (DOC / "logged_numbers.md").read_text()
EPISODES = {"charts/episodic_return", "charts/episodic_length"}  # a tiny run may not end one


def names(title):
    """What the first column of the tables in a section has in code style."""
    rows = re.findall(r"^\| (`[^|]*) \|", section(LOGGED, title), flags=re.M)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


@pytest.mark.parametrize("script", script_params())
def test_every_logged_number_is_in_the_tables(script, tmp_path):
    folder = run_tiny(script, tmp_path, total_timesteps=500)
    logged = set(EventAccumulator(str(folder)).Reload().Tags()["scalars"])
    titles = re.findall(r"^## (.*)$", LOGGED, re.M)
    own = {name for title in titles if entry_of(script).title.startswith(title) for name in names(title)}
    own = {name for name in own if name.startswith("losses/")}
    assert logged | EPISODES == own | names("All scripts")
    added = summary(folder).keys() - json.loads((folder / "config.json").read_text()).keys()
    added -= {"ranks"}  # of the script for several GPUs, in doc/multi_gpu.md
    assert added | {"cudagraphs"} == names("config.json and summary.json")
