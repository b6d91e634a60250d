"""How the turbo scripts step environments: exactly as gymnasium's SyncVectorEnv, but without it."""

import numpy as np
import pytest
from conftest import PLAIN, TURBO

DIRECT, SYNC = TURBO["dqn"], PLAIN["dqn"]  # which have the same text as the other turbo and plain scripts
CONTINUOUS = ["Pendulum-v1", "Truncates-v0", "Terminates-v0", "DoublePrecision-v0"]
DISCRETE = ["CartPole-v1", "DiscreteTruncates-v0", "DiscreteTerminates-v0"]


def gymnasium_step(envs, actions):
    """What `DirectEnvs.step` returns, by SyncVectorEnv and `final_observations`, as in the plain scripts."""
    next_obs, rewards, terminated, truncated, infos = envs.step(actions)
    return next_obs, SYNC.final_observations(next_obs, infos), rewards, terminated, truncated


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("env_id", [*CONTINUOUS, *DISCRETE])
def test_direct_steps_equal_gymnasiums(env_id, num_envs):
    """Bit by bit and in the same types, over several episodes; and no array that was handed out changes later."""
    args = DIRECT.Args(env_id=env_id, num_envs=num_envs)
    sync, direct = DIRECT.make_envs(args, None), DIRECT.DirectEnvs(DIRECT.make_envs(args, None))
    first, wanted = direct.reset(seed=5)[0], sync.reset(seed=5)[0]
    assert np.array_equal(first, wanted)
    sync.action_space.seed(0)
    given, ends = [(first, wanted)], 0
    for _ in range(450):
        actions = sync.action_space.sample()
        got, wanted = direct.step(actions), gymnasium_step(sync, actions)
        assert [array.dtype for array in got] == [array.dtype for array in wanted]
        given += zip(got, wanted, strict=True)
        next_obs, last_obs, _, terminated, truncated = got
        ended = terminated | truncated
        assert (next_obs is last_obs) == (not ended.any())
        ends += ended.sum()
    assert all(np.array_equal(one, other) for one, other in given)
    assert ends >= 2 * num_envs
