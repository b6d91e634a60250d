"""`train` on the emulated CUDA device ends bit-equal with and without graphs, with operators at once and late."""

from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import conftest
import pytest
import torch
from conftest import ATARI, ENTRIES, TURBO, algorithm, assert_same_state, learner_class, leaves
from emulated_cuda import emulated_cuda

STATE = ("global_step", "episodes", "returns", "learner")  # of a checkpoint
SIZES = {name: entry.emulated for name, entry in ENTRIES.items()}
OTHERS = {name: entry.others for name, entry in ENTRIES.items()}
SETTINGS = [(name, 1, {}) for name in TURBO] + [(name, 3, OTHERS[name]) for name in TURBO]


def batched(script):
    """Critics as one batched matmul per layer in eager code too: else its numbers differ in their last bits."""
    learner = learner_class(script)
    if not hasattr(learner, "q_values"):
        return nullcontext()
    q_values = learner.q_values

    def as_with_graphs(self, *inputs):
        with patch.object(self.args, "cudagraphs", True):
            return q_values(self, *inputs)

    return patch.object(learner, "q_values", as_with_graphs)


@contextmanager
def no_export():
    """Runs write empty policy.pt2 files, to save time."""
    with patch("torch.export.export"), patch("torch.export.save"):
        yield


def train(script, folder, device, cudagraphs, seed, settings):
    """What a run leaves that is resumed half-way: logged losses and, by path, all that is in its checkpoints.

    `device` is a context: an emulated device, or none.
    """
    kwargs = SIZES[algorithm(script)] | settings | {"seed": seed, "cudagraphs": cudagraphs, "run_dir": str(folder)}
    steps = kwargs["total_timesteps"]
    losses = []
    checkpoints = {}
    often = patch.object(script, "LOG_INTERVAL", 7, create=True)  # odd, so that each kind of update is logged
    with no_export(), device, often, batched(script):
        for part in (1, 2):
            args = script.Args(**kwargs | {"total_timesteps": part * steps, "checkpoint_interval": 32})
            args.resume = str(*checkpoints) or None
            conftest.train(script, args, on_log=lambda learner, values, step: losses.append((step, values)))
            (path,) = set(folder.glob("*/checkpoint.pt")) - checkpoints.keys()
            checkpoints[path] = torch.load(path)
    parts = [checkpoint[name] for checkpoint in checkpoints.values() for name in STATE]
    return losses, leaves(parts)


RUNS = [(cudagraphs, late) for cudagraphs in (False, True) for late in (False, True)]


def check_training(script, folder, seed=1, settings=None, runs=RUNS):
    """A run is the same with and without graphs, whether the device works at once or as late as it may."""
    results = []
    for cudagraphs, late in runs:
        own = folder / f"{cudagraphs}-{late}"
        results.append(train(script, own, emulated_cuda(late, seed), cudagraphs, seed, settings or {}))
    for losses, state in results[1:]:
        assert len(losses) > 2 and losses == results[0][0]
        assert_same_state(dict(state), dict(results[0][1]))


@pytest.mark.parametrize(("name", "seed", "settings"), SETTINGS)
def test_training_is_the_same_in_all_modes_and_schedules(name, seed, settings, tmp_path):
    all_runs = seed == 1 and name not in ATARI
    check_training(TURBO[name], tmp_path, seed, settings, RUNS if all_runs else [RUNS[0], RUNS[-1]])


def check_against_cpu(script, folder, settings):
    """A run on the device sees the same observations and learns the same as one on the CPU, up to rounding."""
    device = emulated_cuda(late=False, draws_like_cpu=True)
    losses, state = train(script, folder / "cuda", device, False, 1, settings)
    losses_on_cpu, state_on_cpu = train(script, folder / "cpu", nullcontext(), False, 1, settings)
    assert len(losses) == len(losses_on_cpu) > 2
    for (step, values), (step_on_cpu, values_on_cpu) in zip(losses, losses_on_cpu, strict=True):
        # rounding, divided by a variance of returns that is nearly 0 without rewards
        explained = [each.pop("explained_variance", 0.0) for each in (values, values_on_cpu)]
        assert explained[0] == pytest.approx(explained[1], rel=0.1, abs=1e-2)
        assert step == step_on_cpu and values == pytest.approx(values_on_cpu, rel=1e-2, abs=1e-4)
    on_cpu = dict(state_on_cpu)
    for name, value in state:
        if ".replay." in name or ".normalizer." in name:
            torch.testing.assert_close(value, on_cpu[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", TURBO)
def test_training_is_that_of_the_cpu(name, tmp_path):
    """What never reaches the device goes unnoticed where runs on it are compared with each other."""
    check_against_cpu(TURBO[name], tmp_path, {})
