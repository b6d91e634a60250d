"""Every script with a stochastic policy logs its entropy."""

import numpy as np
import pytest
from conftest import ENTRIES, PLAIN, TURBO, algorithm, stem, train
from test_training_on_cuda import SIZES

STOCHASTIC = [name for name, entry in ENTRIES.items() if entry.name.startswith(("PPO", "SAC"))]
SCRIPTS = [scripts[name] for name in STOCHASTIC for scripts in (PLAIN, TURBO)]


@pytest.mark.parametrize("script", SCRIPTS, ids=stem)
def test_entropy_is_always_logged(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "LOG_INTERVAL", 10, raising=False)
    logged = []
    args = script.Args(**SIZES[algorithm(script)], run_dir=str(tmp_path))
    train(script, args, on_log=lambda learner, losses, step: logged.append(losses["entropy"]))
    assert logged and np.isfinite(logged).all()
