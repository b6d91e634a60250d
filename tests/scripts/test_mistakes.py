"""Edits that could go wrong silently: they work in all modes, or a line says what to do instead."""

from functools import partial

import pytest
import torch
from conftest import TURBO, make_learner
from emulated_cuda import emulated_cuda
from test_edits import check_graphs, take_step, trace_only
from torch import nn

SCRIPT = TURBO["sac"]  # what it shares with the other scripts is one text


def small_network(*layers):
    return nn.Sequential(nn.Linear(3, 4), *layers, nn.Linear(4, 1))


class RunningMean(nn.Module):
    """Subtracts a running mean, a buffer that each forward changes."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x):
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x - self.mean


STATISTICS = {
    "BatchNorm": nn.BatchNorm1d(4),
    "spectral_norm": nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
    "old spectral_norm": nn.utils.spectral_norm(nn.Linear(4, 4)),
}


@pytest.mark.parametrize("layer", STATISTICS.values(), ids=STATISTICS)
def test_layers_with_statistics_are_refused(layer):
    for network in (small_network(layer), nn.ModuleList([small_network(layer)])):
        with pytest.raises(ValueError, match=r"spectral norm\): use LayerNorm"):
            SCRIPT.FlatNetwork(network)


def test_networks_that_cannot_be_one_flat_vector_are_refused():
    frozen = small_network()
    frozen[0].requires_grad_(False)
    different = nn.ModuleList([small_network(nn.ReLU()), small_network(nn.Tanh())])
    with_buffers = nn.ModuleList([small_network(RunningMean(4)), small_network(RunningMean(4))])
    with_buffers[1][1].mean.fill_(1)
    for message, network in {"buffers$|frozen": frozen, "same layers": different, "equal": with_buffers}.items():
        with pytest.raises(ValueError, match=message):
            SCRIPT.FlatNetwork(network)


def test_several_networks_cannot_change_their_buffers():
    networks = nn.ModuleList([small_network(RunningMean(4)) for _ in range(2)])
    with pytest.raises(RuntimeError, match="broadcast shape"):
        SCRIPT.FlatNetwork(networks)(torch.randn(5, 3))


@pytest.mark.parametrize("batched", [False, True])
def test_each_network_of_several_has_its_own_parameters(batched):
    """A LayerNorm too; and one network in a list keeps its dimension."""
    for count in (1, 3):
        networks = nn.ModuleList([small_network(nn.LayerNorm(4)) for _ in range(count)])
        for network in networks:
            network[1].weight.data.uniform_()
        x = torch.randn(5, 3)
        wanted = torch.stack([network(x) for network in networks]).detach()
        state = {name: tensor.clone() for name, tensor in networks.state_dict().items()}
        flat = SCRIPT.FlatNetwork(networks, batched)
        torch.testing.assert_close(flat(x), wanted)
        torch.testing.assert_close(flat(x, weights=flat.weights.clone()), wanted)
        torch.testing.assert_close(dict(networks.state_dict()), state)
        assert all(view.data_ptr() % 64 == 0 for view in flat.views(flat.weights).values())


def test_tied_weights_stay_tied():
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    network[1].weight = network[0].weight
    flat = SCRIPT.FlatNetwork(network)
    x = torch.randn(2, 4)
    changed = torch.randn_like(flat.weights)
    views = flat.views(changed)
    hidden = nn.functional.linear(x, views["0.weight"], views["0.bias"])
    wanted = nn.functional.linear(hidden, views["0.weight"], views["1.bias"])
    torch.testing.assert_close(flat(x, weights=changed), wanted)


def test_a_scalar_that_is_not_detached_is_refused():
    scalars = SCRIPT.Scalars(torch.device("cpu"))
    scalars.store(loss=torch.tensor(1.0), value=torch.tensor(2.0))
    scalars.store(loss=torch.tensor(4.0), value=torch.tensor(5.0))
    assert scalars.fetch() == {"loss": 4.0, "value": 5.0}
    with pytest.raises(RuntimeError, match="requires grad"):  # it would keep every update's graph alive
        scalars.store(loss=torch.tensor(4.0, requires_grad=True), value=torch.tensor(5.0))


class CountingAdam(SCRIPT.Adam):
    """Keeps a Python number as state."""

    def step(self, weights, gradient):
        self.count = getattr(self, "count", 0) + 1
        super().step(weights, gradient)


@pytest.mark.parametrize("compile", [False, True])
def test_a_python_number_as_state_of_adam_is_refused(compile, monkeypatch):
    trace_only(monkeypatch)
    monkeypatch.setattr(SCRIPT, "Adam", CountingAdam)
    learner = make_learner(SCRIPT, compile=compile)
    with pytest.raises(Exception, match="count must be a tensor"):
        take_step(learner, 0)


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_number_of_the_learner_that_appears_later_is_not_frozen(compile, monkeypatch):
    class Counting(SCRIPT.SAC):
        def update_critics(self, *inputs):
            self.count = getattr(self, "count", 0) + 1
            obs, losses = super().update_critics(*inputs)
            return obs, losses | {"count": torch.full((), float(self.count))}

    trace_only(monkeypatch)
    monkeypatch.setattr(SCRIPT, "SAC", Counting)
    learner = make_learner(SCRIPT, compile=compile)
    for i in range(4):
        take_step(learner, i)
        assert learner.losses()["count"] == i + 1


@pytest.mark.parametrize("make_rate", [float, torch.tensor])
def test_a_learning_rate_that_update_changes_reaches_cuda_graphs(make_rate, monkeypatch):
    class Decaying(SCRIPT.SAC):
        def update(self):
            for optimizer in self.optimizers.values():
                optimizer.lr = make_rate(1e-3 / (1 + self.updates))
            super().update()

    monkeypatch.setattr(SCRIPT, "SAC", Decaying)
    check_graphs(partial(make_learner, SCRIPT))


@pytest.mark.parametrize("compile", [False, True])
def test_adam_follows_its_rate_also_to_zero(compile):
    """As torch's Adam, and with a rate for each weight."""
    torch._dynamo.reset()
    weights = torch.randn(20)
    wanted = nn.Parameter(weights.clone())
    optimizer, reference = SCRIPT.Adam(weights, 0.0), torch.optim.Adam([wanted], lr=0.0)
    step = torch.compile(optimizer.step, backend="eager", fullgraph=True) if compile else optimizer.step
    for rate in (0.0, 1e-2, 1e-3, 0.0, 1e-2):
        optimizer.lr = reference.param_groups[0]["lr"] = rate
        wanted.grad = torch.randn(20) * (torch.arange(20) > 5)  # some gradients are always 0
        step(weights, wanted.grad)
        reference.step()
        torch.testing.assert_close(weights, wanted.detach(), rtol=1e-5, atol=1e-7)


def test_adam_takes_a_rate_for_each_weight():
    weights, gradient = torch.zeros(2), torch.ones(2)
    optimizer = SCRIPT.Adam(weights, torch.tensor([1e-2, 1e-3]))
    optimizer.step(weights, gradient)
    torch.testing.assert_close(weights, torch.tensor([-1e-2, -1e-3]))


@pytest.mark.parametrize("cudagraphs", [False, True])
def test_dqn_acts_with_the_buffers_that_forward_changes(cudagraphs, monkeypatch):
    script = TURBO["dqn"]

    class Network(script.QNetwork):
        def __init__(self, obs_dim, num_actions):
            super().__init__(obs_dim, num_actions)
            self.normalize = RunningMean(obs_dim)

        def forward(self, obs):
            return super().forward(self.normalize(obs))

    monkeypatch.setattr(script, "QNetwork", Network)
    with emulated_cuda():
        learner = make_learner(script, device="cuda", cudagraphs=cudagraphs)
        for i in range(6):
            newest = learner.q.network.normalize.mean.cpu()
            take_step(learner, i)
            assert torch.equal(learner.acting_q.network.normalize.mean, newest)
            assert not torch.equal(learner.q.network.normalize.mean.cpu(), newest)


@pytest.mark.parametrize("layer", [nn.Dropout(), RunningMean(64)], ids=["dropout", "running mean"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ppo_refuses_an_actor_that_does_not_repeat_itself(layer, device, monkeypatch):
    script = TURBO["ppo"]

    class Agent(script.Agent):
        def __init__(self, obs_dim, act_dim):
            super().__init__(obs_dim, act_dim)
            self.actor.insert(1, layer)

    monkeypatch.setattr(script, "Agent", Agent)
    with emulated_cuda(), pytest.raises(ValueError, match="no dropout, no running statistics"):
        make_learner(script, device=device)
