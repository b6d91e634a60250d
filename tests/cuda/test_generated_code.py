"""The GPU code of `--compile`, generated, assembled and executed without a GPU, as called by `train`."""

import os
import re
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import conftest
import pytest
import torch
from conftest import ENTRIES, MULTI, POPULATION, TURBO, assert_same_state, leaves, saved, stem
from copies import ROOT
from emulated_cuda import emulated_cuda
from tensordict.nn import CudaGraphModule
from test_multigpu import ON_CUDA, QueuedCollectives, become, learn
from test_training_on_cuda import SIZES, batched, no_export

if (reason := conftest.missing_interpreter()) is not None:
    pytest.skip(reason, allow_module_level=True)
from generated_cuda import KERNEL, call_of, compiled_for_cuda, longest_reduction

FUNCTIONS = {stem(TURBO[name]): entry.functions for name, entry in ENTRIES.items()}  # that are compiled
FUNCTIONS |= {stem(POPULATION): ENTRIES["sac"].functions, stem(MULTI): {"decide", "compute_gradient", "step"}}
LIMITS = {  # of errors, by script and whether it has other settings
    ("ppo_atari", True): 2e-5,  # Adam's second moments: twice the relative error of a gradient
    # The norm of a gradient of Q-values that are 50 times their distance from the targets: a last bit of the weights
    # changes it by up to 7e-5, and torch's own error is less than 1e-6 by chance.
    ("pqn_atari", False): 1e-4,
}
LEFT_TO_EAGER = {"convolution_backward"}  # operators that inductor does not generate: cuDNN's
QUICK = ("dqn",)


CASES = []
for name, entry in ENTRIES.items():
    CASES.append(pytest.param(name, {}, marks=[] if name in QUICK else [pytest.mark.thorough], id=f"{name}-default"))
    others = entry.others | entry.generated_others
    CASES.append(pytest.param(name, others, marks=pytest.mark.thorough, id=f"{name}-others"))


def train(name, settings, folder, late=True, compile=True, **session):
    """A short run on the emulated device; returns its losses, its learner's state and the `Session`."""
    script = TURBO[name]
    kwargs = SIZES[name] | ENTRIES[name].generated | settings | {"compile": compile, "cudagraphs": compile}
    args = script.Args(**kwargs, run_dir=str(folder))
    losses, runs = [], []
    often = patch.object(script, "LOG_INTERVAL", 3, create=True)
    near = nullcontext() if compile else batched(script)
    with no_export(), emulated_cuda(late), often, near, compiled_for_cuda(**session) as programs:
        log = lambda learner, values, step: losses.append(values)  # noqa: E731
        conftest.train(script, args, on_log=log, on_start=runs.append)
        return losses, saved(runs[0].learner), programs


def check_programs(script, programs, record_property, limit=1e-5):
    """Generated code is on the card, and computes what torch computes. tools/versions.sh shows what is recorded."""
    check_placement(script, programs)
    assert programs.errors.keys() == FUNCTIONS[stem(script)]
    record_property(stem(script), max(programs.errors.values()))
    assert max(programs.errors.values()) < limit, programs.errors


def check_placement(script, programs):
    """No tensor of the host, and no operator that is left to eager code, but those that are known."""
    assert {function for function, _ in programs.codes} == FUNCTIONS[stem(script)]
    for function, code in programs.codes:
        assert "cpu" not in call_of(code), function
        assert set(re.findall(r"torch\.ops\.\w+\.(\w+)\.\w+\(", call_of(code))) <= LEFT_TO_EAGER, function
        assert len(re.findall(r"\.run\(", call_of(code))) >= len(KERNEL.findall(code)) > 0, function


def check_kernels(codes, folder):
    """All kernels become machine code, with all block sizes that inductor would try."""
    folder.mkdir()
    for i, (function, code) in enumerate(codes):
        (folder / f"{i:02}_{function}.py").write_text(code)
    script = ROOT / "tools" / "generated_cuda.py"
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    result = subprocess.run([sys.executable, script, folder], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    counts = [int(count) for count in re.findall(r"(\d+) kernels", result.stdout)]
    assert counts == [len(KERNEL.findall(code)) for _, code in codes]


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_training_runs_generated_code(name, settings, tmp_path, record_property):
    """Each call computes what torch computes, on the card, and a run is near eager code's.

    With default flags, all kernels are assembled: for H100, DQN's for A100 and B200 too. The schedules are compared for
    DQN; test_training_on_cuda.py compares them for all scripts in eager mode.
    """
    eager, *_ = train(name, settings, tmp_path, compile=False)
    losses, state, programs = train(name, settings, tmp_path, check=True)
    check_programs(TURBO[name], programs, record_property, LIMITS.get((name, bool(settings)), 1e-5))
    assert losses
    for got, wanted in zip(losses, eager, strict=True):
        assert got == pytest.approx(wanted, rel=1e-2, abs=1e-3)
    if name == "dqn":
        losses_at_once, state_at_once, _ = train(name, settings, tmp_path, late=False)
        assert losses_at_once == losses
        assert_same_state(state_at_once, state)
    if not settings:
        others = programs.for_cards(80, 100) if name == "dqn" else []
        check_kernels(programs.codes + others, tmp_path / "codes")


def train_agents(folder, agents, late=True, compile=True, **session):
    """The checkpoints of 1 to 3 agents after a short run on the emulated device, and the `Session`."""
    script = POPULATION
    kwargs = SIZES["sac"] | {"total_timesteps": 34, "compile": compile, "cudagraphs": compile, "run_dir": str(folder)}
    lists = {key for key, value in vars(script.Args()).items() if isinstance(value, tuple)}
    kwargs = {key: (value,) if key in lists else value for key, value in kwargs.items()}
    with no_export(), emulated_cuda(late), compiled_for_cuda(**session) as programs:
        script.train(script.Args(**kwargs | {"seeds": (1, 2, 3)[:agents], "gamma": (0.99, 0.9, 0.8)[:agents]}))
    paths = sorted(folder.glob("*/agent_*/checkpoint.pt"))
    return [leaves(torch.load(path, weights_only=True)["learner"]) for path in paths], programs


@pytest.mark.thorough
@pytest.mark.parametrize("agents", [1, 2, 3])
def test_a_population_runs_generated_code(agents, tmp_path, record_property):
    """As the script of a single agent does: near eager code's numbers."""
    eager, _ = train_agents(tmp_path / "eager", agents, compile=False)
    generated, programs = train_agents(tmp_path / "generated", agents, check=True)
    check_programs(POPULATION, programs, record_property)
    assert len(generated) == agents
    for own, near in zip(generated, eager, strict=True):
        for (path, value), (_, expected) in zip(own, near, strict=True):
            if torch.is_tensor(value) and value.is_floating_point():
                assert (value - expected).norm() <= 1e-3 * expected.norm().clamp(min=1e-3), path
    if agents == 2:
        check_kernels(programs.codes, tmp_path / "codes")


def train_a_rank(folder):
    """Train one rank; `folder` gets the codes that are generated for a card and their errors."""
    become(MULTI, rank=0, ranks=1, port=0, stderr=folder / "stderr")
    MULTI.dist = QueuedCollectives()
    with emulated_cuda(), compiled_for_cuda(check=True) as programs:
        sizes = ON_CUDA | {"num_envs": 2, "num_steps": 4, "update_epochs": 1, "total_timesteps": 8}
        learn(MULTI, folder, compile=True, cudagraphs=True, **sizes)
    torch.save({"codes": programs.codes, "errors": programs.errors}, folder / "programs")


@pytest.mark.thorough
def test_a_rank_runs_generated_code(tmp_path, record_property):
    """In a new process: a fork of one in which other tests have compiled can crash."""
    program = f"import test_generated_code as own; own.train_a_rank(own.conftest.Path({str(tmp_path)!r}))"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    code = subprocess.run([sys.executable, "-c", program], env=env, timeout=900).returncode
    assert code == 0, (tmp_path / "stderr").read_text()
    programs = SimpleNamespace(**torch.load(tmp_path / "programs"))
    check_programs(MULTI, programs, record_property)
    check_kernels(programs.codes, tmp_path / "codes")


class Counter:
    def __init__(self, device):
        self.total = torch.zeros(8, device=device)

    def count(self):
        self.total.add_(1)


def test_what_torch_has_cached_for_the_cpu_is_not_taken():
    torch.compile(Counter("cpu").count)()
    torch._dynamo.reset()
    with emulated_cuda(), compiled_for_cuda() as programs:
        counter = Counter("cuda")
        torch.compile(counter.count, options={})()
        assert counter.total.tolist() == [1.0] * 8
    assert len(programs.codes) == 1


class Pair:
    def __init__(self, device):
        self.tensors = torch.zeros(2, 8, device=device).unbind()

    def count(self):
        torch._foreach_add_(self.tensors, 1)


def test_blocks_that_wait_for_each_other_are_noticed():
    """The second block of a kernel reads what the first one writes."""
    edit = lambda code: re.sub(r"\.run\((arg\w+), arg\w+, ", r".run(\1, \1, ", code)  # noqa: E731
    with emulated_cuda(late=False), compiled_for_cuda(edit=edit):
        pair = Pair("cuda")
        with pytest.raises(RuntimeError, match="another block"):
            torch.compile(pair.count, options={})()


class LongSums:
    def __init__(self, device):
        self.x = torch.ones(1_000_000, device=device)
        self.y = torch.ones(20_000, 3, device=device)
        self.sums = torch.zeros(4, device=device)

    def add(self):
        self.sums.copy_(torch.cat((self.x.sum()[None], self.y.sum(0))))


def longest_of_sums(**options):
    with emulated_cuda(), compiled_for_cuda(execute=False) as programs:
        torch.compile(LongSums("cuda").add, options=options)()
    return max(longest_reduction(code) for _, code in programs.codes)


@pytest.mark.parametrize("combo_kernels", [False, True])
def test_the_longest_reduction_of_a_block(combo_kernels):
    """Of a sum of a million numbers, which inductor splits by default, and the sums of three columns of 20,000."""
    numbers, results = longest_of_sums(combo_kernels=combo_kernels)
    assert numbers < 10_000 and 1_000_000 <= numbers * results < 1_010_000
    assert longest_of_sums(combo_kernels=combo_kernels, split_reductions=False) == (1_000_000, 1)


def test_blocks_of_a_cooperative_kernel_share_a_reduction():
    """The sum of a million; a column still has one block."""
    options = {"triton.cooperative_reductions": True, "split_reductions": False}
    assert longest_of_sums(**options) == (20_000, 3)


class Sums:
    def __init__(self, device):
        self.inputs = [torch.randn(128, n, device=device) for n in (3, 5)]

    def sums(self):
        return [(2 * x, x.sum(0)) for x in self.inputs]


def test_combined_reductions_are_executed():
    """A kernel of two sums over axes that are split into blocks."""
    with emulated_cuda(), compiled_for_cuda(check=True) as programs:
        sums = Sums("cuda")
        results = torch.compile(sums.sums, options={"combo_kernels": True})()
        for x, (_, total) in zip(sums.inputs, results, strict=True):
            assert total.tolist() == pytest.approx(x.sum(0).tolist(), rel=1e-5, abs=1e-5)
    ((_, code),) = programs.codes
    assert re.search(r"def triton_red\w+\(.*R0_BLOCK", code) and "'num_kernels': 2" in code
    assert programs.errors["sums"] < 1e-6


class Scale:
    def __init__(self, device):
        self.weight = torch.full((8,), 3.0, device=device).requires_grad_()

    def scale(self, x):
        return (self.weight * x).exp(), x.sum()


def gradients_of_a_scale(compile):
    scale, x = Scale("cuda"), torch.linspace(0, 1, 8).to("cuda").requires_grad_()
    function = torch.compile(scale.scale) if compile else scale.scale
    results = [torch.zeros(8, device="cuda") for _ in range(2)]

    def step():
        y, _ = function(2 * x)
        for result, gradient in zip(results, torch.autograd.grad(y.square().sum(), (x, scale.weight)), strict=True):
            result.copy_(gradient)

    step = CudaGraphModule(step, warmup=2)
    for value in (0.1, 0.2, 0.3, 0.4):
        scale.weight.detach().fill_(value)
        step()
    return [result.tolist() for result in results]


@pytest.mark.parametrize("late", [False, True])
def test_compiled_functions_are_differentiable(late):
    with emulated_cuda(late), compiled_for_cuda(check=True) as programs:
        got, wanted = gradients_of_a_scale(True), gradients_of_a_scale(False)
    assert programs.errors.keys() == {"scale", "scale_back"} and max(programs.errors.values()) < 1e-6
    for one, other in zip(got, wanted, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_without_the_interpreter_an_error_says_what_to_set():
    code = "import generated_cuda; generated_cuda.Kernel('triton_sum', '')"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tools"), "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stderr.splitlines()[-1].endswith("set TRITON_INTERPRET=1 before the program starts"), done.stderr


def without_a_mask(code):
    return re.sub(r"xmask = xindex < xnumel", "xmask = tl.full([XBLOCK], True, tl.int1)", code, count=1)


def with_swapped_arguments(code):
    """In the first launch of a kernel that reads a tensor and writes another one."""
    return re.sub(r"(triton_\w+\.run\()(\w+), (\w+), ", r"\1\3, \2, ", code, count=1)


def without_a_launch(code):
    return re.sub(r"^ +triton_\w+\.run\(.*\n", "", code, count=1, flags=re.M)


def with_a_reused_buffer(code):
    """One whose numbers are still needed is taken for another one, as wrong memory planning would do."""
    lines = code.splitlines(keepends=True)
    found = [re.match(r" *(buf\d+) = empty_strided_cuda\((.*)\)$", line) for line in lines]
    buffers = [(i, *match.groups()) for i, match in enumerate(found) if match]
    for i, needed, size in buffers:
        for j, _, other_size in buffers:
            calls = [line for line in lines[j:] if ".run(" in line or "extern_kernels" in line]
            if i < j and size == other_size and any(re.search(rf"\b{needed}\b", line) for line in calls[1:]):
                lines[j] = lines[j].replace(f"empty_strided_cuda({size})", needed)
                return "".join(lines)
    return code


def with_another_axis(code):
    """A sum over the wrong one of two axes."""
    return re.sub(r"tl\.sum\((\w+), 1\)\[:, None\]", r"tl.sum(\1, 0)[None, :]", code, count=1)


def with_another_constant(code):
    """Adam's second beta."""
    return code.replace("0.999", "0.99")


MUTANTS = [without_a_mask, with_swapped_arguments, without_a_launch, with_a_reused_buffer, with_another_axis]
MUTANTS += [with_another_constant]


@pytest.mark.parametrize("mutate", MUTANTS)
@pytest.mark.parametrize("name", [pytest.param("dqn"), pytest.param("td3", marks=pytest.mark.thorough)])
def test_wrong_code_is_noticed(name, mutate, tmp_path):
    changed = []

    def edit(code):
        changed.append(mutate(code) != code)
        return mutate(code)

    try:
        *_, programs = train(name, {}, tmp_path, check=True, edit=edit)
    except Exception as error:  # an address outside of the tensors, shapes that do not fit, or NaN that ends the run
        print(type(error).__name__, error)
    except SystemExit as error:
        assert str(error).startswith("error: step "), error
    else:
        assert max(programs.errors.values()) > 1e-4
    assert any(changed)
