"""Edits that could fail silently: they work in all modes, or an error names the problem."""

from functools import partial

import conftest
import pytest
import test_fast_td3
import torch
from conftest import POPULATION, TURBO, make_learner, networks
from emulated_cuda import emulated_cuda
from test_edits import check_graphs, check_one_graph, check_updates, take_step, trace_only
from torch import nn

PLAIN, SCRIPT = conftest.PLAIN["sac"], TURBO["sac"]  # what it shares with the other scripts is one text
SLOW = {"policy_lr": 3e-5}  # as where plain and turbo are compared


class RunningMean(nn.Module):
    """Subtracts a running mean, a buffer that each forward changes."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x - self.mean


def edit(monkeypatch, network, change, scripts=(PLAIN, SCRIPT)):
    """From now on `change(module)` edits each network of this class when it is made."""
    for script in scripts:
        original = getattr(script, network)

        class Edited(original):
            def __init__(self, *sizes):
                super().__init__(*sizes)
                change(self)

        monkeypatch.setattr(script, network, Edited)


def freeze_first_layer(network):
    network.net[0].requires_grad_(False)


def tie_two_layers(network):
    network.net.insert(4, nn.Linear(256, 256))
    network.net[4].weight = network.net[2].weight


def spectral_norm(network):
    nn.utils.parametrizations.spectral_norm(network.net[2])


@pytest.mark.parametrize(
    ("network", "change"), [("Actor", freeze_first_layer), ("Critic", freeze_first_layer), ("Actor", tie_two_layers)]
)
def test_frozen_and_tied_layers_work(network, change, monkeypatch):
    edit(monkeypatch, network, change)
    plain, turbo = make_learner(PLAIN, **SLOW), make_learner(SCRIPT, **SLOW)
    before = {name: w.clone() for name, w in networks(plain)["actor" if network == "Actor" else "critics"].items()}
    check_updates(plain, turbo, monkeypatch)
    after = networks(turbo)["actor" if network == "Actor" else "critics"]
    frozen = [name for name in before if "net.0." in name] if change is freeze_first_layer else []
    for name, weights in before.items():
        assert torch.equal(weights, after[name]) == (name in frozen or name in ("scale", "bias")), name
    check_graphs(SCRIPT, partial(make_learner, SCRIPT))
    check_one_graph(partial(make_learner, SCRIPT), monkeypatch)


def batch_norm(network):
    network.net[0].register_parameter("bias", None)
    network.net.insert(1, nn.BatchNorm1d(network.net[0].out_features))


def test_batch_norm_in_the_critics_of_td3(monkeypatch):
    """SAC's is an edit of the page."""
    plain, turbo = conftest.PLAIN["td3"], TURBO["td3"]
    edit(monkeypatch, "Critic", batch_norm, (plain, turbo))
    check_updates(make_learner(plain), make_learner(turbo), monkeypatch)
    check_graphs(turbo, partial(make_learner, turbo))
    check_one_graph(partial(make_learner, turbo), monkeypatch)


def test_batch_norm_in_the_critics_of_fast_td3(monkeypatch):
    plain, turbo = conftest.PLAIN["fast_td3"], TURBO["fast_td3"]
    edit(monkeypatch, "Critic", batch_norm, (plain, turbo))
    test_fast_td3.check_equal(plain, turbo, steps=(6,))


def test_batch_norm_in_the_critics_of_a_population(monkeypatch):
    """Each agent does what it does alone, and its statistics are saved."""
    edit(monkeypatch, "Critic", batch_norm, (SCRIPT, POPULATION))
    sizes = {"batch_size": 16, "buffer_size": 40}
    args = POPULATION.Args(seeds=(1, 2), **sizes)
    agents = POPULATION.agents_of(args)
    envs = [conftest.make_envs(SCRIPT, SCRIPT.Args(**conftest.entry_of(SCRIPT).small), torch.device("cpu"))] * 2
    population = POPULATION.SACPopulation(args, agents, envs, torch.device("cpu"))
    alone = [make_learner(SCRIPT, seed=agent.seed, **sizes) for agent in agents]
    rows = torch.randn(2, 40, population.replay.rows.shape[-1])
    population.replay.store(rows)
    for learner, own in zip(alone, rows, strict=True):
        learner.replay.store(own)
    for i, learner in enumerate(alone):
        torch.set_rng_state(population.generators[i].get_state())
        for _ in range(4):
            learner.update()
    for _ in range(4):
        population.update()
    for i, learner in enumerate(alone):
        got, wanted = (
            conftest.clones(x) for x in (population.state_dict(i)["networks"], learner.tensors()["networks"])
        )
        assert any("running_mean" in name for name in wanted)
        conftest.assert_close_in_norm(got, wanted, 1e-4, least=1e-6)


@pytest.mark.parametrize("change", [lambda actor: actor.net.insert(1, RunningMean(256)), spectral_norm])
def test_statistics_of_the_actor_stay_inside_the_graphs(change, monkeypatch):
    edit(monkeypatch, "Actor", change)
    learner = make_learner(SCRIPT)
    before = {name: tensor.clone() for name, tensor in learner.actor.named_buffers()}
    take_step(learner, 0)
    changed = [name for name, tensor in learner.actor.named_buffers() if not torch.equal(tensor, before[name])]
    assert changed and not {"scale", "bias"} & set(changed)
    if change is not spectral_norm:  # which the emulated device cannot make
        check_graphs(SCRIPT, partial(make_learner, SCRIPT))
    check_one_graph(partial(make_learner, SCRIPT), monkeypatch)


def test_scalars_are_detached_and_known_by_name():
    learner = make_learner(SCRIPT)
    learner.keep(qf_loss=torch.tensor(4.0, requires_grad=True))
    assert learner.losses()["qf_loss"] == 4.0 and not learner.scalars["qf_loss"].requires_grad
    with pytest.raises(KeyError, match="unheard"):
        learner.keep(unheard=torch.tensor(4.0))


def test_a_number_of_the_learner_that_appears_later_is_not_frozen(monkeypatch):
    class Counting(SCRIPT.SAC):
        def update_critics(self):
            self.count = getattr(self, "count", 0) + 1
            super().update_critics()
            self.keep(q_values=torch.full((), float(self.count)))

    trace_only(monkeypatch)
    monkeypatch.setattr(SCRIPT, "SAC", Counting)
    learner = make_learner(SCRIPT, compile=True)
    for i in range(4):
        take_step(learner, i)
        assert learner.losses()["q_values"] == i + 1


def test_a_learning_rate_that_update_changes_reaches_cuda_graphs(monkeypatch):
    class Decaying(SCRIPT.SAC):
        def update(self):
            for optimizer in self.optimizers.values():
                optimizer.lr.fill_(1e-3 / (1 + self.updates))
            super().update()

    monkeypatch.setattr(SCRIPT, "SAC", Decaying)
    check_graphs(SCRIPT, partial(make_learner, SCRIPT))


@pytest.mark.parametrize("compile", [False, True])
def test_adam_follows_its_rate_also_to_zero(compile):
    """As torch's Adam, several tensors at a time."""
    torch._dynamo.reset()
    weights = [torch.randn(20, requires_grad=True), torch.randn(3, 4, requires_grad=True)]
    wanted = [nn.Parameter(w.detach().clone()) for w in weights]
    optimizer, reference = SCRIPT.Adam(weights, 0.0), torch.optim.Adam(wanted, lr=0.0)

    def step():
        optimizer.step(sum((w * g).sum() for w, g in zip(weights, gradients, strict=True)))

    gradients = [torch.zeros_like(w) for w in weights]
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        step = torch.compile(step, backend="eager", fullgraph=True) if compile else step
        for rate in (0.0, 1e-2, 1e-3, 0.0, 1e-2):
            optimizer.lr.fill_(rate)
            reference.param_groups[0]["lr"] = rate
            for gradient, parameter in zip(gradients, wanted, strict=True):
                gradient.normal_()
                gradient[:2] = 0  # some gradients are always 0
                parameter.grad = gradient.clone()
            step()
            reference.step()
            for w, parameter in zip(weights, wanted, strict=True):
                torch.testing.assert_close(w.detach(), parameter.detach(), rtol=1e-5, atol=1e-7)


def test_bias_corrections_of_adam_are_right_after_many_steps():
    """They are running averages of ones: 1 - beta**t."""
    weights = [torch.zeros(1, requires_grad=True)]
    optimizer = SCRIPT.Adam(weights, 1e-3)
    for _ in range(2000):
        optimizer.step(weights[0].sum())
    wanted = [1 - beta**2000 for beta in (0.9, 0.999)]
    assert optimizer.corrections.tolist() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("cudagraphs", [False, True])
def test_dqn_acts_with_the_buffers_that_forward_changes(cudagraphs, monkeypatch):
    script = TURBO["dqn"]
    edit(monkeypatch, "QNetwork", lambda q: q.insert(0, RunningMean(4)), [script])
    with emulated_cuda():
        learner = make_learner(script, device="cuda", cudagraphs=cudagraphs)
        for i in range(6):
            newest = learner.q[0].mean.cpu()
            take_step(learner, i)
            assert torch.equal(learner.host_q.network[0].mean, newest)
            assert not torch.equal(learner.q[0].mean.cpu(), newest)
