"""What the report measures: algorithms, modes, profiles and tests."""

from typing import NamedTuple

from benchmark.algorithms import ALGORITHMS, FULL_SOON, named
from benchmark.speed.rounds import TURBO_FLAGS

TESTS = "tests/algorithms/test_"
RUNS_AGREE = "tests/cuda/test_runs_agree.py::test_runs_agree[{device}-{mode}-"
SMALL_REPLAY = "--learning-starts 100 --buffer-size 1000 --total-timesteps 100000"
SMALL_ROLLOUT = "--num-minibatches 2 --update-epochs 1 --total-timesteps 200000"
SOON_GREEDY = "--exploration-fraction 0.002"


class Case(NamedTuple):
    """An algorithm of the report, by the name of its plain script."""

    algo: str
    flags: str  # steady state soon, and more steps than the report has time for
    small: str  # the same on the emulated device
    agreement: str  # the test that its modes agree

    @property
    def title(self):
        return named(self.algo) if self.algo in ALGORITHMS else "FastTD3, a pendulum"

    @property
    def env_id(self):
        known = ALGORITHMS.get(self.algo)
        return known.env_id if known else "tests.torch_pendulum:TorchPendulum-v0"


CASES = (  # in order of measurement
    Case(
        "sac_continuous_action",
        f"{FULL_SOON} --total-timesteps 300000",
        f"{SMALL_REPLAY} --batch-size 8",
        TESTS + "sac.py::test_modes_agree[{device}-{mode}]",
    ),
    Case(
        "ppo_atari_envpool",
        "--total-timesteps 2000000",
        f"{SMALL_ROLLOUT} --num-envs 2 --num-steps 8",
        TESTS + "ppo_atari.py::test_modes_agree[{device}-6-None-{mode}]",
    ),
    Case(
        "ppo_continuous_action",
        "--total-timesteps 3000000",
        f"{SMALL_ROLLOUT} --num-steps 64",
        TESTS + "ppo.py::test_modes_agree[{device}-10-None-{mode}]",
    ),
    Case(
        "td3_continuous_action",
        f"{FULL_SOON} --total-timesteps 300000",
        f"{SMALL_REPLAY} --batch-size 8",
        TESTS + "td3.py::test_modes_agree[{device}-{mode}]",
    ),
    Case(
        "sac_atari",
        f"{FULL_SOON} --total-timesteps 200000",
        f"{SMALL_REPLAY} --batch-size 4",
        RUNS_AGREE + "sac_atari]",
    ),
    Case(
        "dqn",
        f"--learning-starts 2000 --total-timesteps 1000000 {SOON_GREEDY}",
        f"{SMALL_REPLAY} --batch-size 8 {SOON_GREEDY}",
        TESTS + "dqn.py::test_modes_agree[{device}-{mode}]",
    ),
    Case(
        "pqn",
        f"--total-timesteps 3000000 {SOON_GREEDY}",
        f"{SMALL_ROLLOUT} --num-steps 8 {SOON_GREEDY}",
        TESTS + "pqn.py::test_modes_agree[{device}-pqn-8-{mode}]",
    ),
    Case(
        "fast_td3",
        "--total-timesteps 50000000 --buffer-size 5120",
        "--num-envs 4 --batch-size 32 --buffer-size 16 --critic-hidden-dim 32 --actor-hidden-dim 16",
        RUNS_AGREE + "fast_td3]",
    ),
)
CASES = {case.algo: case for case in CASES}
FOUR = tuple(CASES)[:4]  # the report without --everything

FASTEST, TF32 = "compile+cudagraphs", "compile+cudagraphs, TF32"
MODES = {"plain": ("",)}  # suffix of the script, and its flags
MODES |= {mode: ("_torchcompile", *flags) for mode, flags in TURBO_FLAGS.items()}
MODES |= {TF32: (*MODES[FASTEST], "--matmul-precision", "high")}
WITH_TF32 = ("sac_continuous_action", "ppo_atari_envpool")
# FASTEST compiles first; then `compile` finds most of its kernels in the cache
NICENESS = dict.fromkeys(MODES, 2) | {FASTEST: 0, "compile": 4, TF32: 4, "tests": 6}

TRACED = ("sac_continuous_action", FASTEST)  # the program whose trace is kept
PROFILED = [("sac_continuous_action", mode) for mode in (FASTEST, "cudagraphs", "compile", "eager", "plain")]
PROFILED += [("ppo_atari_envpool", FASTEST), ("td3_continuous_action", FASTEST)]


def modes_of(algo):
    """The modes that are measured, those first that take long to warm up."""
    return [mode for mode in reversed(MODES) if mode != TF32 or algo in WITH_TF32]


def tests_of(algos, emulated):
    """Names of tests that captured and compiled code compute what eager code does."""
    device, modes = ("emulated", ["cudagraphs"]) if emulated else ("real", [FASTEST, "cudagraphs"])
    return [CASES[algo].agreement.format(device=device, mode=mode) for mode in modes for algo in algos]
