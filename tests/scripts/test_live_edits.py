"""Edits during a run: compiled code follows a change of the learner, its layers and constants, as eager code does."""

import pytest
import torch
from conftest import TURBO, learnt, make_learner
from test_edits import take_step, trace_only
from torch import nn

NAMES = ("sac", "td3", "dqn", "ppo", "pqn", "ppo_lstm")
SOME = [name if name == "sac" else pytest.param(name, marks=pytest.mark.thorough) for name in NAMES]


def layers(learner):
    """The sequence of layers of a network that learns."""
    if hasattr(learner, "actor"):
        return learner.actor.net
    if hasattr(learner, "q"):
        return learner.q
    return learner.agent.encoder if hasattr(learner.agent, "encoder") else learner.agent.actor


def replace_linear(learner):
    torch.manual_seed(0)
    old = layers(learner)[0]
    layers(learner)[0] = nn.Linear(old.in_features, old.out_features)


def patch_layer(learner):
    layers(learner)[1].forward = lambda x: x.sin()


def unchanged(learner):
    pass


def steepen(learner):
    layers(learner)[-1].negative_slope = 0.7


CHANGES = {  # before the run, during it
    "dropout in eval mode": (lambda learner: layers(learner).append(nn.Dropout(0.5)), lambda x: layers(x).eval()),
    "another activation": (unchanged, lambda learner: layers(learner).__setitem__(1, nn.Sigmoid())),
    "another linear layer": (unchanged, replace_linear),
    "an attribute of a layer": (lambda learner: layers(learner).append(nn.LeakyReLU(0.1)), steepen),
    "a patched method": (unchanged, patch_layer),
}


def differences(learners, seeds):
    """The largest difference between two learners after some steps."""
    for seed in seeds:
        for learner in learners:
            torch.manual_seed(seed)
            take_step(learner, seed)
    one, other = map(learnt, learners)
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", SOME)
def test_compiled_code_follows_a_change_during_the_run(name, change, monkeypatch):
    before, during = CHANGES[change]
    trace_only(monkeypatch)
    learners = [make_learner(TURBO[name], compile=compile) for compile in (False, True)]
    for learner in learners:
        before(learner)
    assert differences(learners, range(3)) < 1e-6
    unedited = learnt(learners[0])
    for learner in learners:
        during(learner)
    assert differences(learners, range(3, 6)) < 1e-6
    assert any(not torch.equal(value, unedited[path]) for path, value in learnt(learners[0]).items())


def test_compiled_code_follows_a_constant_that_is_annealed(monkeypatch):
    trace_only(monkeypatch)
    learners = [make_learner(TURBO["sac"], compile=compile) for compile in (False, True)]
    for seed in range(5):
        monkeypatch.setattr(TURBO["sac"], "LOG_STD_MAX", 2.0 - 0.3 * seed)
        assert differences(learners, [seed]) < 1e-6


@pytest.mark.parametrize("name", SOME)
def test_a_layer_that_is_frozen_during_the_run_raises(name, monkeypatch):
    """Compiled or not: the optimizer has its weights already."""
    trace_only(monkeypatch)
    for compile in (False, True):
        learner = make_learner(TURBO[name], compile=compile)
        take_step(learner, 0)
        layers(learner)[0].requires_grad_(False)
        with pytest.raises(RuntimeError, match="does not require grad"):
            take_step(learner, 1)
            take_step(learner, 2)  # SAC and TD3 update the actor in every second step


@pytest.mark.parametrize("name", SOME)
def test_learners_of_one_process_have_their_own_layers(name, monkeypatch):
    trace_only(monkeypatch)
    take_step(make_learner(TURBO[name], compile=True), 0)
    others = [make_learner(TURBO[name], compile=compile) for compile in (False, True)]
    for learner in others:
        layers(learner)[1] = nn.Sigmoid()
    assert differences(others, range(3)) < 1e-6
