"""Environments and helpers shared by the tests."""

import fcntl
import importlib.util
import io
import math
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from contextlib import contextmanager, suppress
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: processes that share cores wait for threads
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asks the driver for a GPU without starting CUDA: tests fork

import torch

if not torch.cuda.is_available():  # and triton has not been imported yet
    os.environ["TRITON_INTERPRET"] = "1"  # for generated_cuda.py; with a GPU, triton compiles for it instead

import gymnasium as gym
import numpy as np
import pytest
import torch._dynamo.config
import torch.utils._device
from emulated_cuda import emulated_cuda
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmark.masked_tasks import HighOrLow
from common import scripts
from common.algorithms import ALGORITHMS
from common.scripts import learner_class, takes_discrete_actions_alone

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if a shell script runs the tests in the background
# Many tests compile the same function, each for its own sizes. As in a run, sizes are constants, not symbols.
torch._dynamo.config.automatic_dynamic_shapes = False
torch._dynamo.config.recompile_limit = 64
torch.utils._device._device_constructors()  # memoized: not first called in a test that has replaced torch.empty

ENTRIES = {entry.short: entry for entry in ALGORITHMS.values()}
ATARI = tuple(name for name, entry in ENTRIES.items() if entry.atari)
ON_DEVICE = tuple(name for name, entry in ENTRIES.items() if entry.on_device)
PLAIN = {name: scripts.load(entry.script) for name, entry in ENTRIES.items()}
TURBO = {name: scripts.load(entry.turbo) for name, entry in ENTRIES.items()}
MULTI = scripts.load("ppo_atari_multigpu_torchcompile")  # without torchrun: one process
POPULATION = scripts.load("sac_population_torchcompile")
VARIANTS = [scripts.load(variant) for entry in ENTRIES.values() for variant in entry.variants]
ALL = [*PLAIN.values(), *TURBO.values(), *VARIANTS]
MODES = {
    "eager": {},
    "compile": {"compile": True},
    "cudagraphs": {"cudagraphs": True},
    "compile+cudagraphs": {"compile": True, "cudagraphs": True},
}
PYTHON_FIRST = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
WITH_PYTHON = os.environ | {"PATH": PYTHON_FIRST}  # for shell scripts, where the virtual environment is not activated


def wait_for(condition, seconds=120):
    """Wait until `condition()` is true; raise an error if that takes too long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Terminal:
    """A process on its own terminal. `close` removes the terminal, like a lost connection."""

    def __init__(self, words, **settings):
        self.end, end = pty.openpty()
        os.set_blocking(self.end, False)
        settings |= {"stdin": end, "stdout": end, "stderr": end, "start_new_session": True}
        self.process = subprocess.Popen(words, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0), **settings)
        os.close(end)

    def wait_for(self, condition):
        """Wait until `condition()` is true, and meanwhile read what is shown: a full terminal stops the process."""

        def read_and_ask():
            with suppress(OSError):  # nothing is new, or it is closed
                os.read(self.end, 2**16)
            return condition()

        wait_for(read_and_ask)

    def close(self):
        os.close(self.end)


@pytest.fixture
def ray_lock(request, tmp_path_factory):
    """A lock for tests that start Ray. `ray symmetric-run` refuses a machine with Ray, so its test waits for others."""
    alone = request.node.name.startswith("test_the_slurm_recipe")
    with open(tmp_path_factory.getbasetemp().parent / "ray.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


class Countdown(gym.Env):
    """Shows the steps since reset and the episode; rewards each step with 1; terminates or truncates after `length`."""

    def __init__(self, length=3, terminates=False, low=(-1.0,), high=(1.0,), blind=False, dtype=np.float32):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = gym.spaces.Box(np.array(low, dtype), np.array(high, dtype), dtype=dtype)
        self.length, self.terminates, self.blind, self.episode = length, terminates, blind, -1

    def observation(self):
        return np.array([self.steps, self.episode / 1000], np.float32) * (not self.blind)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.episode = 0, self.episode + 1
        return self.observation(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.steps += 1
        ended = self.steps == self.length
        return self.observation(), 1.0, ended and self.terminates, ended and not self.terminates, {}


class DiscreteCountdown(Countdown):
    """Countdown with `n` actions that change nothing; with `pays`, each action is its own reward."""

    def __init__(self, n=2, start=0, pays=False, **kwargs):
        super().__init__(**kwargs)
        self.action_space, self.pays = gym.spaces.Discrete(n, start=start), pays

    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, float(action) if self.pays else reward, *rest


class Masked(HighOrLow):
    """HighOrLow with masks of a `dtype`, in infos that `change(info, steps)` may spoil."""

    def __init__(self, actions=None, dtype=np.int8, change=lambda info, steps: None, **kwargs):
        super().__init__(gym.spaces.Discrete(4, start=5) if actions is None else actions, **kwargs)
        self.dtype, self.change = dtype, change

    def state(self):
        obs, info = super().state()
        masks = tuple(mask.astype(self.dtype) for mask in self.masks)
        info["action_mask"] = masks[0] if self.discrete else masks
        self.change(info, self.steps)
        return obs, info


class PushAnything(gym.Env):
    """An environment whose actions (1,) change nothing; observations are samples of `space`."""

    def __init__(self, space, actions=None):
        self.observation_space = space
        self.action_space = actions or gym.spaces.Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.steps += 1
        return self.observation_space.sample(), 1.0, False, self.steps == 10, {}


THREE_PARTS = gym.spaces.MultiDiscrete([2, 3, 4], start=[0, 7, -2])
gym.register("Masked-v0", entry_point=Masked)
gym.register("MaskedParts-v0", entry_point=Masked, kwargs={"actions": THREE_PARTS})
gym.register("MaskedTerminates-v0", entry_point=Masked, kwargs={"length": 3, "terminates": True})

UNEQUAL = {"low": [-1.0, -10.0, 0.0], "high": [3.0, -8.0, 0.5]}
ENVIRONMENTS = {
    "Truncates-v0": {},
    "Terminates-v0": {"terminates": True},
    "BlindTruncates-v0": {"blind": True},
    "BlindTerminates-v0": {"blind": True, "terminates": True},
    "Unequal-v0": {"length": 20, **UNEQUAL},
    "OneIsFixed-v0": {"low": [-1.0, 0.3, 0.0], "high": [3.0, 0.3, 0.5]},
    "DoublePrecision-v0": {"dtype": np.float64},
    "Decimals-v0": {"low": [-0.1, -2.3], "high": [0.1, 0.2], "dtype": np.float64},
    "Unbounded-v0": {"low": [-np.inf], "high": [np.inf]},
}
DISCRETE_ENVIRONMENTS = {
    "DiscreteTruncates-v0": {},
    "DiscreteTerminates-v0": {"terminates": True},
    "BlindDiscreteTruncates-v0": {"blind": True},
    "BlindDiscreteTerminates-v0": {"blind": True, "terminates": True},
    "FourActions-v0": {"n": 4, "length": 20, "pays": True},
    "CountsFromOne-v0": {"start": 1},
}
for entry_point, environments in ((Countdown, ENVIRONMENTS), (DiscreteCountdown, DISCRETE_ENVIRONMENTS)):
    for name, kwargs in environments.items():
        gym.register(name, entry_point=entry_point, kwargs=kwargs)

VECTOR = gym.spaces.Box(-1, 1, (3,))


class OwnSpace(gym.Space):
    """A space of which gymnasium knows nothing."""


NOT_FLAT = {
    "Sequence": gym.spaces.Sequence(VECTOR),
    "Graph": gym.spaces.Graph(VECTOR, None),
    "OwnSpace": OwnSpace(),
    "DictOfSequence": gym.spaces.Dict(one=VECTOR, other=gym.spaces.Sequence(VECTOR)),
    "DictOfOwnSpace": gym.spaces.Dict(one=OwnSpace()),
}
SPACES = {
    "DictObservations": gym.spaces.Dict(position=VECTOR, goal=gym.spaces.Discrete(4)),
    "TupleObservations": gym.spaces.Tuple((VECTOR, gym.spaces.MultiDiscrete([2, 3]))),
    "DiscreteObservations": gym.spaces.Discrete(5),
}
for name, space in (SPACES | NOT_FLAT).items():
    gym.register(f"Push{name}-v0", entry_point=PushAnything, kwargs={"space": space})
    kwargs = {"space": space, "actions": gym.spaces.Discrete(3)}
    gym.register(f"Pick{name}-v0", entry_point=PushAnything, kwargs=kwargs)
gym.register("Image-v0", entry_point=PushAnything, kwargs={"space": gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)})

QUICK = {"sac_continuous_action", "ppo_continuous_action_torchcompile", "dqn_torchcompile"}


def missing_interpreter():
    """Why generated_cuda.py cannot be used here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "generated CUDA code needs triton"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "generated CUDA code needs Triton's interpreter: TRITON_INTERPRET=1 pytest, which cannot use the GPU"
    return None


def stem(script):
    """The name of a script's file, without .py."""
    return Path(script.__file__).stem


def entry_of(script):
    """The entry of a script, or of an edited copy of it."""
    return next(e for e in ENTRIES.values() if stem(script) in (e.script, e.turbo, *e.variants))


def algorithm(script):
    """The name of a script's entry in tests."""
    return entry_of(script).short


def make_envs(script, args, device="cpu"):
    """The environments that `train` makes."""
    if entry_of(script).on_device:
        return script.make_device_envs(args, torch.device(device))
    make = script.make_games if entry_of(script).atari else script.make_envs
    return make(args, folder=None)


def tiny(script):
    """Arguments with which a run of `script` takes a second."""
    return entry_of(script).tiny


# why a test leaves out scripts, by names of algorithms or files
GAMES = dict.fromkeys(ATARI, "its environments are Atari games")
SIMULATORS = dict.fromkeys(ON_DEVICE, "its environments are on the device")
AGENTS = {stem(POPULATION): "each of its agents has a run"}
DISCRETE = {n: "its actions are discrete" for n, script in TURBO.items() if takes_discrete_actions_alone(script)}


def script_params(scripts=ALL, left_out=AGENTS):
    """Parameters of a test of scripts: a few in the quick suite, the others thorough.

    `left_out` has reasons: of these scripts, the test has to fail.
    """
    params = []
    for script in scripts:
        marks = [] if stem(script) in QUICK else [pytest.mark.thorough]
        if reason := left_out.get(stem(script)) or left_out.get(algorithm(script)):
            marks += [pytest.mark.xfail(reason=reason, strict=True)]
        params.append(pytest.param(script, id=stem(script), marks=marks))
    return params


on_gymnasium = pytest.mark.parametrize("script", script_params(left_out=AGENTS | GAMES | SIMULATORS))
on_vectors = pytest.mark.parametrize("script", script_params(left_out=AGENTS | GAMES))


def countdown(script, name):
    """The environment of that name with the actions that the script takes."""
    return f"{'Discrete' * (tiny(script)['env_id'] == 'CartPole-v1')}{name}-v0"


@pytest.fixture(params=[PLAIN["sac"], TURBO["dqn"]], ids=stem)
def either(request):
    """Two scripts for tests of the run's part, whose text is identical in all scripts."""
    return request.param


def make_learner(script, seed=1, device="cpu", **kwargs):
    """The learner of `script` for Args(**kwargs), small by default."""
    args = script.Args(**entry_of(script).small | kwargs)
    torch.manual_seed(seed)
    return learner_class(script)(args, make_envs(script, args, device), torch.device(device))


def train(script, args, on_log=lambda learner, losses, step: None, on_start=lambda run: None):
    """`script.train(args)`, with `on_log` called before each log."""

    def watch(run):
        log = run.log

        def watched(losses):
            on_log(run.learner, losses, run.step)
            log(losses)

        run.log = watched
        on_start(run)

    scripts.train(script, args, watch)


THOROUGH = (  # tests that are too long for the quick suite, by the beginning of their names
    "algorithms/test_atari_off_policy.py::test_turbo_equals_plain",
    "algorithms/test_atari_off_policy_runs.py",
    "algorithms/test_dqn.py::test_buffers_reach",
    "algorithms/test_dqn.py::test_cartpole_is_learned[plain",
    "algorithms/test_frame_replay.py::test_stacks_are_envpools[SpaceInvaders",
    "algorithms/test_games.py::test_a_planted_bug",
    "algorithms/test_ppo.py::test_modes_agree",
    "algorithms/test_ppo.py::test_normalizer_agrees_with_numpy_on_a_million",
    "algorithms/test_ppo.py::test_ppo_balances",
    "algorithms/test_ppo.py::test_values",
    "algorithms/test_ppo_atari.py::TestEnvpool",
    "algorithms/test_ppo_atari.py::test_a_restored_learner",
    "algorithms/test_ppo_atari.py::test_modes_agree",
    "algorithms/test_ppo_atari.py::test_replays_draw",
    "algorithms/test_ppo_atari.py::test_turbo_equals_plain",
    "algorithms/test_ppo_atari_learns.py",
    "algorithms/test_ppo_formulas.py::test_ppo_clips_the_gradient[ppo_atari",
    "algorithms/test_ppo_formulas.py::test_ppo_computes_the_papers_losses_and_gradients[other-ppo_atari",
    "algorithms/test_ppo_formulas.py::test_the_entropy_bonus_raises_entropy[ppo_atari",
    "algorithms/test_pqn.py::test_cartpole_is_learned[pqn]",
    "algorithms/test_pqn.py::test_modes_agree",
    "algorithms/test_pqn.py::test_replays_shuffle",
    "algorithms/test_pqn.py::test_turbo_equals_plain_on_images",
    "algorithms/test_q_formulas.py::test_alpha_stays_without_autotune[sac_atari",
    "algorithms/test_q_formulas.py::test_target_networks_move_by_tau[sac_atari",
    "algorithms/test_replay.py::test_training_on_cuda",
    "algorithms/test_sac.py::test_modes_agree",
    "algorithms/test_sac.py::test_repeated_updates",
    "algorithms/test_sac.py::test_turbo_equals_plain",
    "algorithms/test_td3.py::test_turbo_equals_plain",
    "cuda/test_generated_code.py::test_training_runs",
    "cuda/test_generated_code.py::test_without_the_interpreter",
    "cuda/test_generated_code.py::test_wrong_code",
    "cuda/test_planted_bugs.py::test_a_planted_bug",
    "cuda/test_planted_bugs.py::test_updates_before",
    "cuda/test_runs_agree.py",
    "cuda/test_training_on_cuda.py",
    "scripts/test_cli.py::test_words",
    "scripts/test_environments.py::test_observations_that_are_not_copied",
    "scripts/test_faults.py::test_a_run_goes_on",
    "scripts/test_faults.py::test_a_signal_ends_every_loop",
    "scripts/test_faults.py::test_a_signal_ends_the_process",
    "scripts/test_faults.py::test_ctrl_c_while_the_compiler_runs",
    "scripts/test_faults.py::test_nan_of_an_environment",
    "scripts/test_mistakes.py::test_a_number_of_the_learner",
    "scripts/test_mistakes.py::test_frozen_and_tied",
    "scripts/test_mistakes.py::test_statistics_of_the_actor",
    "scripts/test_multigpu.py::test_a_signal_while",
    "scripts/test_multigpu.py::test_all_ranks_end",
    "scripts/test_multigpu.py::test_resuming",
    "scripts/test_multigpu.py::test_two_ranks",
    "scripts/test_population.py::test_a_crash",
    "scripts/test_population.py::test_a_gpu",
    "scripts/test_population.py::test_an_agent_that_diverges",
    "scripts/test_population.py::test_populations_and_single",
    "scripts/test_ppo_lstm.py::test_a_planted_bug_is_caught[turbo, mask frozen",
    "scripts/test_ppo_lstm.py::test_the_script_as_it_is_passes[captured",
    "scripts/test_ppo_lstm.py::test_turbo_learns",
    "scripts/test_runs.py::test_capture_video",
    "scripts/test_runs.py::test_episodes_are_counted",
    "scripts/test_runs.py::test_policy_and_checkpoint",
    "scripts/test_runs.py::test_same_seed",
    "scripts/test_runs.py::test_the_exported_policy_is_the_learners[ppo",
    "scripts/test_runs.py::test_the_exported_policy_is_the_learners[sac",
    "scripts/test_runs.py::test_track",
    "scripts/test_runs.py::test_two_runs",
    "scripts/test_schedules.py::test_a_planted_bug",
    "tools/test_ablation.py",
    "tools/test_benchmark.py",
    "tools/test_docs.py::test_torch_logs",
    "tools/test_docs_debugging.py::test_one_batch",
    "tools/test_docs_debugging.py::test_the_",
    "tools/test_docs_errors.py::test_an_error_shows_and_its_remedy_removes_it[threads",
    "tools/test_evaluate.py::test_a_video",
    "tools/test_evaluate.py::test_ctrl_c",
    "tools/test_first_hour.py::test_without_a_cuda_device",
    "tools/test_graph_breaks.py",
    "tools/test_instruments.py",
    "tools/test_launch.py",
    "tools/test_launches.py",
    "tools/test_pictures.py",
    "tools/test_probe.py",
)
QUICK_TOO = (  # one of a kind of these
    "algorithms/test_sac.py::test_turbo_equals_plain[default",
    "algorithms/test_td3.py::test_turbo_equals_plain[default-eager",
    "cuda/test_generated_code.py::test_wrong_code_is_noticed[dqn-without_a_launch",
    "cuda/test_planted_bugs.py::test_a_planted_bug_is_caught[sac, no wait for the actions",
    "cuda/test_training_on_cuda.py::test_training_is_the_same_in_all_modes_and_schedules[sac-1",
    "scripts/test_environments.py::test_observations_that_are_not_copied_are_noticed[turbo-ppo_gpu-Disabled",
    "scripts/test_faults.py::test_a_signal_ends_the_process[dqn_torchcompile-15",
    "tools/test_benchmark.py::test_a_round_is_interleaved",
    "tools/test_instruments.py::test_a_watched_run_learns_the_same[sac-turbo",
    "tools/test_instruments.py::test_gradients_are_read_from_what_cuda_graphs_write[td3",
    "tools/test_launch.py::test_bad_input",
    "tools/test_launch.py::test_bad_search",
    "tools/test_probe.py::test_a_planted_bug_fails_its_probes[no gamma",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the thorough tests. Long tests run first: one at the end would keep the other worker waiting."""
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        by_hand = item.get_closest_marker("planted") or item.get_closest_marker("finding")
        if name.startswith(THOROUGH) and not name.startswith(QUICK_TOO) and not by_hand:
            item.add_marker(pytest.mark.thorough)
    items.sort(key=lambda item: item.path.stem != "test_training_on_cuda")


def pytest_generate_tests(metafunc):
    """Tests marked `gpu` run on the emulated CUDA device, and on a real one if there is one."""
    if metafunc.definition.get_closest_marker("gpu"):
        metafunc.parametrize("cuda", ["emulated"] + ["real"] * torch.cuda.is_available(), indirect=True)


@pytest.fixture(autouse=True)
def signal_handlers():
    """Restore the handler of Ctrl-C, which a run whose last file cannot be written leaves behind."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Reset the compiler: torch stops recompiling after some learners in one process."""
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def cuda(request):
    """The CUDA device of a test marked `gpu`; None for other tests, and for a real device."""
    if getattr(request, "param", "real") == "real":
        yield
    elif "compile" in request.node.callspec.params.get("mode", ""):
        pytest.skip("compilation for a CUDA device needs one")
    else:
        with emulated_cuda() as device:
            yield device


@contextmanager
def one_graph_each(functions):
    """Expect this number of functions to be compiled, each once; `fullgraph=True` raises an error at a graph break."""
    torch._dynamo.utils.counters.clear()
    yield
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == functions


def load_copy(name, source, folder):
    """Write an edited copy of a script to `folder`, and load it as a module."""
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"edited_{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where Dynamo looks for it
    spec.loader.exec_module(module)
    return module


def leaves(state, path=""):
    """All leaves of nested dictionaries and lists, each with its path."""
    if not isinstance(state, (dict, list)):
        return [(path, state)]
    items = state.items() if isinstance(state, dict) else enumerate(state)
    return [leaf for name, value in items for leaf in leaves(value, f"{path}.{name}")]


def equal(one, other):
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def assert_same_state(got, wanted):
    """Two `state_dict`s have the same entries, bit for bit."""
    got, wanted = dict(leaves(got)), dict(leaves(wanted))
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert equal(got[name], value), name


def transitions(learner, generator):
    """Random columns for `observe` of SAC and TD3, by name, each (num_envs, ...)."""
    n, obs_dim, act_dim = learner.args.num_envs, learner.obs_dim, len(learner.low)
    return {
        "obs": generator.standard_normal((n, obs_dim)),
        "next_obs": generator.standard_normal((n, obs_dim)),
        "actions": generator.standard_normal((n, act_dim)),
        "rewards": generator.standard_normal(n),
        "terminated": generator.random(n) < 0.1,
        "act_on": generator.standard_normal((n, obs_dim)),
    }


def as_rows(transitions):
    """The columns of `transitions` as rows of a turbo learner's replay buffer, float32."""
    names = ("obs", "next_obs", "actions", "rewards", "terminated")
    columns = [np.asarray(transitions[name]) for name in names]
    return np.concatenate([column.reshape(len(column), -1) for column in columns], 1).astype(np.float32)


def networks(learner):
    """The tensors (without copies) of a plain or turbo learner's networks, by network and name.

    Turbo's stacked critics are separated, as in plain's nn.ModuleList.
    """
    found = learner.state_dict()["networks"]
    if not hasattr(learner, "critic_module"):
        return found
    return {name: unstacked(network) if "critics" in name else network for name, network in found.items()}


def unstacked(tensors):
    """Views of the members of stacked tensors, by their names in an nn.ModuleList."""
    return {f"{i}.{name}": part for name, tensor in tensors.items() for i, part in enumerate(tensor.detach())}


def copy_networks(source, target):
    """Copy the networks of one learner, plain or turbo, to another."""
    live = dict(leaves(networks(target)))
    for name, tensor in leaves(networks(source)):
        live[name].data.copy_(tensor)


def clones(tensors):
    """Copies of all tensors in nested dictionaries, by path."""
    return {name: tensor.detach().clone() for name, tensor in leaves(tensors)}


def learnt(turbo):
    """Copies, by path, of all tensors that a turbo learner's updates change: networks, optimizers, losses."""
    return clones(turbo.tensors() | {"losses": turbo.scalars})


def assert_close_in_norm(got, wanted, tolerance, least=0.0):
    """Tensors by name agree in norm, since Adam amplifies rounding where a gradient is almost zero."""
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        difference = (got[name] - value).double().norm()
        assert difference <= tolerance * value.double().norm() + least, (name, difference)


def gradients(learner, name):
    """Adam's first moments of a network, by parameter's name: 0.1 times the gradient after one update."""
    optimizer = learner.optimizers[name]
    network = getattr(learner, name)
    parameters = network if isinstance(network, dict) else dict(network.named_parameters())
    parameters = {key: parameter for key, parameter in parameters.items() if parameter.requires_grad}
    if isinstance(optimizer, torch.optim.Optimizer):
        return {key: optimizer.state[parameter]["exp_avg"] for key, parameter in parameters.items()}
    moments = optimizer.parts(optimizer.m) if hasattr(optimizer, "parts") else optimizer.m
    moments = dict(zip(parameters, moments, strict=True))
    return unstacked(moments) if isinstance(network, dict) else moments


def assert_learners_agree(plain, turbo, tolerance, gradient_tolerance=None):
    """Networks, gradients and losses."""

    def flat(tensors, names):
        return torch.cat([tensors[name].detach().flatten() for name in names])

    for name, network in plain.networks.items():
        parameters = dict(network.named_parameters())
        got = {name: flat(networks(turbo)[name], parameters)}
        assert_close_in_norm(got, {name: flat(parameters, parameters)}, tolerance)
        if name in plain.optimizers:
            wanted = gradients(plain, name)
            got = {f"{name} gradient": flat(gradients(turbo, name), wanted)}
            wanted = {f"{name} gradient": flat(wanted, wanted)}
            assert_close_in_norm(got, wanted, gradient_tolerance or tolerance)
    losses = turbo.losses()
    assert losses.keys() == plain.losses().keys()
    for name, value in plain.losses().items():
        assert losses[name] == pytest.approx(value, rel=10 * tolerance, abs=tolerance), name


def replay_in_order(learner):
    """Make the turbo learner's updates use the buffer's first rows instead of random ones."""
    batch = learner.args.batch_size
    order = (torch.arange(batch, dtype=torch.float64, device=learner.device) + 0.5) / batch
    order.uniform_ = lambda: order  # `update` draws no others
    learner.uniform = order
    learner.replay.stored.fill_(batch)


def fill_replay(learner, seed=0):
    """Fill the turbo learner's replay buffer with normal noise, including termination flags."""
    generator = torch.Generator().manual_seed(seed)
    learner.replay.rows.copy_(torch.randn(learner.replay.rows.shape, generator=generator))
    learner.replay.stored.fill_(len(learner.replay.rows))


def feed_same_batches(plain, turbo, seed):
    """Make both learners use the same batch at each update, and the same noise if seeded equally before it.

    Plain has to go first.
    """
    generator = torch.Generator().manual_seed(seed)
    batch = plain.args.batch_size

    def sample(batch_size):
        shapes = {name: column.shape[1:] for name, column in plain.replay.columns.items()}
        columns = {name: torch.randn(batch, *shape, generator=generator) for name, shape in shapes.items()}
        columns["terminated"] = (columns["terminated"] > 1.3).float()
        if hasattr(plain, "num_actions"):
            columns["actions"] = (columns["actions"].abs() * 1.5).floor().clamp(max=plain.num_actions - 1)
        else:
            columns["actions"] = plain.actor.bias + plain.actor.scale * columns["actions"]
        turbo.replay.rows[:batch] = torch.cat([column.view(batch, -1) for column in columns.values()], 1)
        return columns

    plain.replay.sample = sample
    replay_in_order(turbo)


def stored_rows(learner):
    """obs, next_obs and terminated of all stored transitions, numpy."""
    state = learner.state_dict()["replay"]
    if "rows" in state:
        obs, next_obs, *_, terminated = state["rows"].split(learner.widths, -1)
        return [column.numpy() for column in (obs, next_obs, terminated.squeeze(-1))]
    return [np.asarray(state[name]) for name in ("obs", "next_obs", "terminated")]


def split_columns(rows, shapes):
    """Views of `rows`, (..., width), by column name; `shapes` are those of the columns, which lie side by side."""
    columns = rows.split([math.prod(shape) for shape in shapes.values()], -1)
    return {name: x.view(*x.shape[:-1], *shapes[name]) for name, x in zip(shapes, columns, strict=True)}


def saved(learner):
    """The learner's state after saving to a file and loading."""
    file = io.BytesIO()
    torch.save(learner.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def scalars(folder, tag):
    """All values that the run in `folder` has logged under `tag`."""
    return [event.value for event in EventAccumulator(str(folder)).Reload().Scalars(tag)]


def advance(learner, steps, seed=0):
    """Step as `train` does, on random transitions; returns the actions (steps, num_envs, act_dim)."""
    generator, actions = np.random.default_rng(seed), []
    for _ in range(steps):
        learner.observe(**transitions(learner, generator))
        learner.update()
        actions.append(learner.next_actions())
    return np.stack(actions)


@pytest.fixture
def hangups():
    """SIGHUP ends a program, also where the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def double_precision():
    """Learners that are made in a test compute in float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
