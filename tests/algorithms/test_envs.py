"""PPO's and DQN's turbo scripts step environments exactly like gymnasium's SyncVectorEnv, but without its overhead."""

import numpy as np
import pytest
from conftest import TURBO

SCRIPT = TURBO["dqn"]  # which has the same text as PPO's
CONTINUOUS = ["Pendulum-v1", "Truncates-v0", "Terminates-v0", "DoublePrecision-v0"]
DISCRETE = ["CartPole-v1", "DiscreteTruncates-v0", "DiscreteTerminates-v0"]


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("env_id", [*CONTINUOUS, *DISCRETE])
def test_direct_steps_equal_gymnasiums(env_id, num_envs):
    """Bit by bit and in the same types, over several episodes; and no array that was handed out changes later."""
    args = SCRIPT.Args(env_id=env_id, num_envs=num_envs)
    sync, direct = SCRIPT.make_envs(args, None), SCRIPT.DirectEnvs(SCRIPT.make_envs(args, None))
    given, ends = [(direct.reset(seed=5)[0], sync.reset(seed=5)[0])], 0
    sync.action_space.seed(0)
    for _ in range(450):
        actions = sync.action_space.sample()
        *got, _ = direct.step(actions)
        *wanted, _ = sync.step(actions)
        assert [array.dtype for array in got] == [array.dtype for array in wanted]
        given += zip(got, wanted, strict=True)
        _, _, terminated, truncated = wanted
        ended = terminated | truncated
        if ended.any():
            given.append((direct.restart(ended), sync.reset(options={"reset_mask": ended})[0]))
        ends += ended.sum()
    assert all(np.array_equal(one, other) for one, other in given)
    assert ends >= 2 * num_envs
