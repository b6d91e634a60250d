"""Whole runs on the card log the losses of eager code, with graphs and compiled."""

from unittest.mock import patch

import conftest
import pytest
from conftest import ENTRIES, MODES, TURBO
from test_training_on_cuda import SIZES, batched, no_export

# the others have a test of single updates, which their entry names
NAMES = [n for n, entry in ENTRIES.items() if not entry.gpu_report or "runs_agree" in entry.gpu_report.agreement]
MORE = {"sac_atari": {"batch_size": 8}, "fast_td3": {"total_timesteps": 200}}


def losses_of(name, mode, folder):
    """All losses that a run logs, with their steps."""
    script, losses = TURBO[name], []
    args = script.Args(**SIZES[name] | MORE.get(name, {}) | MODES[mode], run_dir=str(folder / mode))
    with no_export(), batched(script), patch.object(script, "LOG_INTERVAL", 3, create=True):
        conftest.train(script, args, on_log=lambda learner, values, step: losses.append((step, values)))
    return losses


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", ["cudagraphs", "compile+cudagraphs"])
def test_runs_agree(name, mode, tmp_path):
    """Up to a hundredth: differences in rounding grow over the updates of a run."""
    wanted, got = (losses_of(name, each, tmp_path) for each in ("eager", mode))
    assert len(got) == len(wanted) > 3
    for (step, values), (wanted_step, wanted_values) in zip(got, wanted, strict=True):
        explained = [each.pop("explained_variance", 0.0) for each in (values, wanted_values)]
        assert explained[0] == pytest.approx(explained[1], rel=0.1, abs=1e-2)
        assert step == wanted_step and values == pytest.approx(wanted_values, rel=1e-2, abs=1e-3)
