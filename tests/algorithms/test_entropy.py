"""Policies' entropy: logged by every script that has one, and as high as a random policy's with --init-entropy max."""

import math

import numpy as np
import pytest
import torch
from conftest import PLAIN, TURBO, algorithm, make_envs, make_learner
from test_training_on_cuda import SIZES

STOCHASTIC = ("sac", "ppo", "ppo_atari", "sac_atari")
SCRIPTS = [scripts[name] for name in STOCHASTIC for scripts in (PLAIN, TURBO)]


def network(learner, name):
    """The module of a network, whose parameters are those that learn."""
    found = getattr(learner, name)
    return getattr(found, "network", found)


def entropy(learner, envs):
    """The mean entropy, by sampling, of the policy's actions for random observations."""
    torch.manual_seed(0)
    name = algorithm(learner.script)
    space = envs.single_observation_space
    if name in ("ppo_atari", "sac_atari"):
        obs = torch.randint(0, 255, (8, *space.shape), dtype=torch.uint8)
        outputs = network(learner, "agent" if name == "ppo_atari" else "actor")(obs)
        logits = outputs[0] if name == "ppo_atari" else outputs
        return torch.distributions.Categorical(logits=logits).entropy().mean().item()
    obs = torch.randn(20_000, *space.shape)
    if name == "ppo":
        mean, log_std, _ = network(learner, "agent")(obs)
        return torch.distributions.Normal(mean, log_std.exp()).entropy().sum(-1).mean().item()
    actor = network(learner, "actor")
    mean, log_std = actor(obs)
    _, log_prob = actor.squash(mean, log_std, torch.randn_like(mean))
    return -log_prob.mean().item()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.SCRIPT)
@torch.no_grad()
def test_the_policy_begins_as_random_as_random_actions(script):
    settings = {} if algorithm(script).endswith("atari") else {"env_id": "Unequal-v0"}
    learner = make_learner(script, init_entropy="max", **settings)
    learner.script = script
    envs = make_envs(script, learner.args)
    space = envs.single_action_space
    if hasattr(space, "n"):
        assert entropy(learner, envs) == pytest.approx(math.log(space.n), abs=1e-6)
    else:
        largest = np.log(space.high - space.low).sum()
        tolerance = 0.015 * len(space.high) if algorithm(script) == "sac" else 1e-4  # tanh of a Gaussian is not uniform
        assert entropy(learner, envs) == pytest.approx(largest, abs=tolerance)
    default = make_learner(script, **settings)
    default.script = script
    assert abs(entropy(default, envs) - entropy(learner, envs)) > 2e-6


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.SCRIPT)
def test_entropy_is_always_logged(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "LOG_INTERVAL", 10, raising=False)
    logged = []
    args = script.Args(**SIZES[algorithm(script)], run_dir=str(tmp_path))
    script.train(args, on_log=lambda learner, losses, step: logged.append(losses["entropy"]))
    assert logged and np.isfinite(logged).all()
