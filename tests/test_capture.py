"""The emulation of CUDA graph capture itself, on small functions."""

import pytest
import torch
from capture import record


class Step:
    """Gradient descent on x**2, with its learning rate in a tensor or, wrongly, in a Python number."""

    def __init__(self, rate):
        self.x, self.rate = torch.ones(3), rate

    def __call__(self):
        self.x.sub_(2 * self.rate * self.x)


def test_a_safe_function_replays_bit_equal():
    eager, graphed = Step(torch.tensor(0.1)), Step(torch.tensor(0.1))
    replay = record(graphed, [graphed.x])
    for i in range(20):
        for step, call in ((eager, eager), (graphed, replay)):
            step.rate.fill_(0.1 / (i + 1))
            call()
        assert torch.equal(eager.x, graphed.x)


def test_a_baked_learning_rate_is_caught():
    eager, graphed = Step(0.1), Step(0.1)
    replay = record(graphed, [graphed.x])
    eager.rate = graphed.rate = 0.05
    eager()
    replay()
    assert not torch.equal(eager.x, graphed.x)


def test_a_python_step_counter_is_caught():
    def make():
        state = {"t": 0, "x": torch.zeros(1)}

        def call():
            state["t"] += 1
            state["x"].add_(state["t"])

        return state, call

    (eager, call), (graphed, graphed_call) = make(), make()
    replay = record(graphed_call, [graphed["x"]])
    for _ in range(3):
        call()
        replay()
    assert not torch.equal(eager["x"], graphed["x"])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x.mul_(2) if x.sum() > 0 else x.mul_(3),
        lambda x: x.mul_(x.sum().item()),
        lambda x: x.mul_(int(x[0])),
        lambda x: bool(x.max()) and x.mul_(2),
    ],
    ids=["branch", "item", "int", "item without effect"],
)
@pytest.mark.parametrize("on", ["state", "intermediate"])
def test_asking_for_a_value_is_caught(wrong, on):
    x = torch.ones(3)
    with pytest.raises(RuntimeError):
        record(lambda: wrong(x if on == "state" else x + 0), [x])


def test_recording_changes_nothing_and_replays_draw_fresh_noise():
    x = torch.zeros(4)
    rng = torch.get_rng_state()
    replay = record(lambda: x.copy_(torch.randn(4)), [x])
    assert torch.equal(x, torch.zeros(4)) and torch.equal(rng, torch.get_rng_state())
    replay()
    first = x.clone()
    replay()
    assert not torch.equal(first, x)
