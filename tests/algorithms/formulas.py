"""Helpers for tests of formulas: learners without environments, derivatives, bugs planted in copies of scripts.

Other tests compare plain and turbo with each other; tests of formulas notice errors that both share. At the end of
their files, bugs are planted: one of each kind in CI, the others with `pytest -m planted tests/algorithms`.
"""

from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ATARI, PLAIN, TURBO, algorithm, learner_class, load_copy, stem
from gymnasium.vector.utils import batch_space

from common.scripts import takes_discrete_actions_alone

IMAGES = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
VECTORS = gym.spaces.Box(-np.inf, np.inf, (5,))
MIDDLE, SCALE = np.array([1.0, -2.0, 0.25]), np.array([2.0, 1.0, 0.25])
CONTINUOUS = gym.spaces.Box(np.float32(MIDDLE - SCALE), np.float32(MIDDLE + SCALE))
DISCRETE = gym.spaces.Discrete(4)


def pair(name):
    """The plain and the turbo script of an algorithm."""
    return [PLAIN[name], TURBO[name]]


def is_population(script):
    return hasattr(script, "SACPopulation")


def make_learner(script, actions=None, device="cpu", seed=1, masked=False, **kwargs):
    """A learner for environments that have spaces and nothing else."""
    images = algorithm(script) in ATARI
    args = script.Args(**kwargs)
    envs = SimpleNamespace(num_envs=args.num_envs, single_observation_space=IMAGES if images else VECTORS)
    envs.single_action_space = actions or (DISCRETE if images or takes_discrete_actions_alone(script) else CONTINUOUS)
    envs.action_space = batch_space(envs.single_action_space, args.num_envs)
    torch.manual_seed(seed)
    if is_population(script):
        return script.SACPopulation(args, script.agents_of(args), [envs], torch.device("cpu"))
    masks = {"masked": True} if masked else {}
    return learner_class(script)(args, envs, torch.device(device), **masks)


def random_masks(generator, count, sizes):
    """Masks (count, sum of sizes), bool, of parts with these sizes. Every fourth one allows one choice of each part."""
    masks = []
    for size in sizes:
        more = (generator.random((count, size)) < 0.5) & (np.arange(count) % 4 > 0)[:, None]
        masks.append(np.eye(size, dtype=bool)[generator.integers(size, size=count)] | more)
    return np.concatenate(masks, -1)


def double(tensor):
    return tensor.detach().double().numpy()


def images(generator, count):
    """Stacks of frames whose halves have a shade each: a network could hardly tell apart images of noise."""
    shades = generator.integers(0, 256, (2, count, 4, 1, 1))
    middle = IMAGES.shape[1] // 2
    halves = np.repeat(shades, middle, axis=3).repeat(IMAGES.shape[2], axis=4)
    return torch.from_numpy(np.concatenate(halves, 2).astype(np.uint8))


def slopes(function, count):
    """The derivatives of a function of `count` numbers at 0, by central differences."""
    steps = 1e-5 * np.eye(count)
    return np.array([(function(step) - function(-step)) / 2e-5 for step in steps])


def assert_orthogonal(weight, gain):
    """Rows or columns are orthogonal, with this norm."""
    weight = weight.detach().flatten(1)
    products = weight @ weight.T if len(weight) <= weight.shape[1] else weight.T @ weight
    torch.testing.assert_close(products, gain**2 * torch.eye(len(products)), rtol=1e-3, atol=1e-3 * gain**2)


def planted(bugs):
    """Parameters of a test: the first bug of each kind runs in CI."""
    first = {bug[1]: bug for bug in reversed(bugs)}
    marks = [[] if bug is first[bug[1]] else [pytest.mark.planted] for bug in bugs]
    return [pytest.param(*bug, id=f"{stem(bug[0])}, {bug[1]}", marks=own) for bug, own in zip(bugs, marks, strict=True)]


def noticing(bugs, errors=AssertionError):
    """A test that plants bugs: script, what is wrong, what is replaced by what, who notices with one of `errors`."""

    @pytest.mark.parametrize(("script", "bug", "old", "new", "check"), planted(bugs))
    def test_a_planted_bug_is_noticed(script, bug, old, new, check, tmp_path):
        assert_noticed(script, old, new, check, tmp_path, errors)

    return test_a_planted_bug_is_noticed


def assert_noticed(script, old, new, check, folder, errors=AssertionError):
    """`check` fails for a copy of the script in which `old` is replaced by `new`; returns the error."""
    source = Path(script.__file__).read_text()
    assert source.count(old) == 1, f"not there once: {old}"
    edited = load_copy(stem(script), source.replace(old, new), folder)
    with pytest.raises(errors) as noticed:
        check(edited)
    assert noticed.type is not NotImplementedError  # which the emulated device raises
    return noticed.value
