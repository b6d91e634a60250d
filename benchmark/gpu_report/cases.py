"""What the report measures: algorithms, modes, profiles and tests."""

from benchmark.speed.rounds import TURBO_FLAGS
from common.algorithms import ALGORITHMS

CASES = {algo: entry.gpu_report for algo, entry in ALGORITHMS.items() if entry.gpu_report}
CASES = dict(sorted(CASES.items(), key=lambda item: item[1].place))
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
