"""SAC learns: the pendulum is swung up within minutes. A wrong sign in a loss, or lost updates, fail here."""

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def test_sac_swings_up_the_pendulum(script, tmp_path):
    """A random policy scores about -1200, a swing-up about -130 and less when the pendulum starts near the top."""
    sizes = {"total_timesteps": 5000, "learning_starts": 500, "policy_lr": 1e-3}
    script.train(script.Args(env_id="Pendulum-v1", run_dir=str(tmp_path), **sizes))
    events = EventAccumulator(str(next(tmp_path.iterdir()))).Reload().Scalars("charts/episodic_return")
    returns = [event.value for event in events]
    assert np.median(returns[:5]) < -700
    assert np.median(returns[-9:]) > -300
