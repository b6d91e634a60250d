"""Effects of doc/changing.md's edits of PPO: envpool's episodes, and a policy with maximum initial entropy."""

import conftest
import numpy as np
import pytest
import torch
from conftest import make_learner, scalars
from test_edits import edited


@pytest.fixture(params=["plain", "turbo"])
def envpool_script(request, tmp_path):
    return edited("envpool", request.param, tmp_path)


def test_envpool_restarts_what_has_ended(envpool_script):
    """Hopper falls early: each observation after an end is one of a reset, close to standing still at the start."""
    envs = envpool_script.EnvPool(envpool_script.Args(num_envs=4, env_id="Hopper-v5"))
    obs, _ = envs.reset()
    generator = np.random.default_rng(0)
    ends = 0
    length = np.zeros(4, int)
    for _ in range(300):
        assert (np.abs(obs[length == 0]) < 1.3).all() and np.abs(obs[length == 0, 5:]).max(initial=0) <= 0.005
        last_obs, _, terminated, truncated, _ = envs.step(generator.uniform(-1, 1, (4, 3)))
        ended = terminated | truncated
        obs = envs.restart(ended) if ended.any() else last_obs
        length += 1
        assert (length[ended] > 1).all()
        assert (np.abs(last_obs[ended, 5:]) > 0.1).any(1).all() and (last_obs[~ended] == obs[~ended]).all()
        ends += ended.sum()
        length[ended] = 0
    assert ends > 10


def test_envpool_and_gymnasium_step_alike(envpool_script):
    """The same environment: from episode starts, which are random, observations and rewards are distributed alike."""
    args = envpool_script.Args(env_id="HalfCheetah-v5", num_envs=20)
    pool, gymnasium = envpool_script.EnvPool(args), envpool_script.make_envs(args, folder=None)
    obs, gym_obs = pool.reset()[0], gymnasium.reset(seed=0)[0]
    rewards, gym_rewards = [], []
    for _ in range(50):
        actions = np.full((20, 6), 0.5)
        obs, reward, *_ = pool.step(actions)
        gym_obs, gym_reward, *_ = gymnasium.step(actions)
        rewards.append(reward)
        gym_rewards.append(gym_reward)
    np.testing.assert_allclose(obs.mean(0), gym_obs.mean(0), atol=0.2)
    assert np.mean(rewards) == pytest.approx(np.mean(gym_rewards), abs=0.1)


def test_envpool_is_seeded(envpool_script):
    make, flags = envpool_script.EnvPool, envpool_script.Args
    first, again, other = (make(flags(num_envs=3, seed=seed)).reset()[0] for seed in (1, 1, 2))
    assert np.array_equal(first, again) and not np.isclose(first, other).any()
    assert len(np.unique(first[:, 0])) == 3


def test_training_with_envpool(envpool_script, tmp_path):
    sizes = {"num_envs": 8, "total_timesteps": 8 * 1100, "num_steps": 50, "num_minibatches": 2, "update_epochs": 1}
    envpool_script.train(envpool_script.Args(run_dir=str(tmp_path / "runs"), **sizes))
    (folder,) = (tmp_path / "runs").iterdir()
    assert scalars(folder, "charts/episodic_length") == 8 * [1000]


@pytest.mark.parametrize("kind", ["plain", "turbo"])
@torch.no_grad()
def test_the_policy_starts_with_the_entropy_of_random_actions(kind, tmp_path):
    script = edited("maximum entropy at the start, ppo", kind, tmp_path)
    bounds = conftest.UNEQUAL
    agent = make_learner(script, env_id="Unequal-v0").agent
    entropy = torch.distributions.Normal(agent.actor(torch.randn(8, 2)), agent.log_std.exp()).entropy().sum(-1)
    largest = np.log(np.subtract(bounds["high"], bounds["low"])).sum()
    assert entropy.numpy() == pytest.approx(largest, abs=1e-4)
