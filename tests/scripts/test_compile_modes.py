"""--compile-mode reaches torch.compile for each function; what the scripts change in torch's compilation."""

import itertools
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from conftest import TURBO, VARIANTS, assert_close_in_norm, learnt, make_learner
from copies import ROOT
from test_edits import take_step, trace_only
from torch._inductor.cpu_vec_isa import VecISA

SEPARATE_CRITICS = ("sac", "td3")
AUTOTUNED = "max-autotune-no-cudagraphs"


@pytest.fixture(params=TURBO)
def name(request):
    return request.param


@pytest.fixture
def recorded(monkeypatch):
    """Options of torch.compile, which does nothing else, by the name of the function."""
    options_by_name = {}

    def record(function, fullgraph, options):
        assert fullgraph
        options_by_name[function.__name__] = options
        return function

    monkeypatch.setattr(torch, "compile", record)
    return options_by_name


def includes(options, mode):
    """Whether the options are those of `mode`."""
    return torch._inductor.list_mode_options(mode).items() <= options.items()


def test_each_function_gets_the_mode(name, recorded):
    make_learner(TURBO[name], compile=True)
    assert recorded and not any(includes(options, AUTOTUNED) for options in recorded.values())
    make_learner(TURBO[name], compile=True, compile_mode=AUTOTUNED)
    assert all(includes(options, AUTOTUNED) for options in recorded.values())


def test_no_mode_makes_cuda_graphs_of_its_own(name):
    for mode in get_args(TURBO[name].CompileMode):
        assert not torch._inductor.list_mode_options(mode).get("triton.cudagraphs")


@pytest.mark.parametrize("name", SEPARATE_CRITICS)
def test_critics_have_a_mode_of_their_own(name, recorded):
    make_learner(TURBO[name], compile=True, critic_compile_mode=AUTOTUNED)
    autotuned = {function for function, options in recorded.items() if includes(options, AUTOTUNED)}
    assert autotuned == {"update_critics"} < recorded.keys()
    make_learner(TURBO[name], compile=True, compile_mode=AUTOTUNED, critic_compile_mode="default")
    autotuned = {function for function, options in recorded.items() if includes(options, AUTOTUNED)}
    assert autotuned == recorded.keys() - {"update_critics"}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_each_learner_of_a_process_has_its_own_settings(name, monkeypatch):
    """A tuner trains often in one process, where torch makes a symbol of a number that changes, and then gives up."""
    trace_only(monkeypatch, backend="aot_eager")
    with torch._dynamo.config.patch(automatic_dynamic_shapes=True, recompile_limit=2):
        for number in (0.1, 0.2, 0.3):
            setting = {"clip_coef": number} if name == "ppo" else {"gamma": number}
            learners = [make_learner(TURBO[name], **setting, compile=compile) for compile in (False, True)]
            for i, learner in itertools.product(range(2), learners):
                torch.manual_seed(i)
                take_step(learner, i)
            eager, compiled = map(learnt, learners)
            assert_close_in_norm(compiled, eager, 1e-4, least=1e-6)


@pytest.mark.parametrize("script", [*TURBO.values(), *VARIANTS], ids=lambda script: script.__name__)
def test_the_compiler_is_tested_without_torchs_headers(script, recorded, monkeypatch):
    monkeypatch.setattr(VecISA, "_avx_code", "#include <ATen/cpu/vec/vec.h>")
    (learner,) = (value for value in vars(script).values() if isinstance(value, type) and hasattr(value, "losses"))
    compiled = learner.fast if hasattr(learner, "fast") else learner.compiled
    compiled(SimpleNamespace(args=script.Args(compile=True), device=torch.device("cpu")), lambda: None)
    assert VecISA._avx_code == ""


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="needs a processor with AVX-512")
@pytest.mark.parametrize(("rejected", "found"), [("nothing", "avx512"), ("-mavx512", "avx2")])
def test_a_compiler_without_avx512_compiles_for_avx2(rejected, found, tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text(f"""#!/bin/sh
case "$*" in *{rejected}*) exit 1;; esac
exec g++ "$@"
""")
    compiler.chmod(0o755)
    program = """
import types, torch
from leanrl.pqn_torchcompile import PQN, Args
PQN.compiled(types.SimpleNamespace(args=Args(compile=True), device=torch.device("cpu")), lambda: None)
print(torch._inductor.cpu_vec_isa.pick_vec_isa())
"""
    environment = os.environ | {"CXX": str(compiler), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.split()[0] == found
