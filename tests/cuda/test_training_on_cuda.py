"""`train` on the emulated CUDA device ends bit-equal with and without graphs, with operators at once and late."""

from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import conftest
import pytest
import torch
from conftest import ATARI, SMALL_FAST_TD3, TURBO, algorithm, assert_same_state, learner_class, leaves
from emulated_cuda import emulated_cuda

REPLAY = {"env_id": "Pendulum-v1", "batch_size": 16, "buffer_size": 40, "learning_starts": 30, "total_timesteps": 60}
EPSILON = {"exploration_fraction": 0.3, "learning_rate": 1e-2}  # soon greedy, and soon not always of the same action
STATE = ("global_step", "episodes", "returns", "learner")  # of a checkpoint
SIZES = {
    "sac": REPLAY,
    "td3": REPLAY,
    "dqn": REPLAY | EPSILON | {"env_id": "CartPole-v1", "train_frequency": 5, "total_timesteps": 300},
    "ppo": {"env_id": "Pendulum-v1", "num_steps": 16, "num_minibatches": 2, "update_epochs": 2, "total_timesteps": 96},
    "ppo_atari": {"num_envs": 2, "num_steps": 8, "num_minibatches": 2, "update_epochs": 2, "total_timesteps": 96},
    "ppo_lstm": {"num_envs": 4, "num_steps": 6, "num_minibatches": 2, "update_epochs": 2, "total_timesteps": 96},
}
SIZES["ppo_gpu"] = SIZES["ppo_lstm"] | {"env_id": "tests.torch_pendulum:Short-v0"}
SIZES["pqn"] = SIZES["ppo_lstm"] | EPSILON | {"env_id": "CartPole-v1", "total_timesteps": 168}
SIZES["pqn_atari"] = SIZES["ppo_atari"] | EPSILON | {"learning_rate": 1e-4}
SMALL_ATARI = REPLAY | {"env_id": "Breakout-v5", "num_envs": 2, "batch_size": 4, "target_network_frequency": 30}
SIZES["sac_atari"] = SMALL_ATARI
SIZES["dqn_atari"] = SMALL_ATARI | EPSILON | {"learning_rate": 1e-4}
SIZES["fast_td3"] = SMALL_FAST_TD3 | {"total_timesteps": 120, "buffer_size": 12, "batch_size": 8}
TF32 = {"matmul_precision": "high"}  # images then are channels last
OTHERS = {  # other settings take other ways through the code
    "sac": {"num_envs": 3, "autotune": False, "policy_frequency": 1, "target_network_frequency": 2},
    "td3": {"num_envs": 3, "updates_per_step": 2, "policy_frequency": 3},
    "dqn": {"num_envs": 3, "train_frequency": 2, "target_network_frequency": 50, "tau": 0.5},
    "ppo": {"num_envs": 2, "target_kl": 0.05, "ent_coef": 0.01, "clip_vloss": False},
    "ppo_atari": {"num_envs": 3, "target_kl": 1e-4, "norm_adv": False, "clip_vloss": False} | TF32,
    "dqn_atari": {"num_envs": 3, "train_frequency": 1, "tau": 0.5} | TF32,
    "sac_atari": {"num_envs": 3, "update_frequency": 3, "autotune": False, "tau": 0.5},
    "ppo_lstm": {"env_id": "Unequal-v0", "cell": "gru", "target_kl": 1e-4},
    "pqn": {"num_envs": 3, "num_steps": 7, "num_minibatches": 3, "update_epochs": 3, "q_lambda": 0.0},
    "pqn_atari": {"num_envs": 3, "anneal_lr": False, "max_grad_norm": 0.5} | TF32,
}
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
