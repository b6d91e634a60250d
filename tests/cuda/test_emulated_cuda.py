"""The rules of the emulated CUDA device, one by one, on small functions."""

import copy
import io

import numpy as np
import pytest
import torch
from emulated_cuda import DeviceTensor, emulated_cuda
from tensordict.nn import CudaGraphModule
from torch import nn
from torch.func import functional_call, vmap

SEEDS = range(20)


@pytest.fixture
def device():
    with emulated_cuda(late=True) as device:
        yield device


def ones(*shape):
    return torch.ones(*shape, device="cuda")


def pinned(*shape):
    return torch.zeros(*shape, pin_memory=True)


def captured(function):
    """A graph of `function()` on a stream of its own, and what the function returned while it was captured."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


def in_all_orders(function):
    """The different results of `function()`, as a set, with streams run at once and late in many orders."""
    results = set()
    for late, seed in [(False, 0), *((True, seed) for seed in SEEDS)]:
        with emulated_cuda(late, seed):
            results.add(str(function()))
    return results


class TestOneStream:
    def test_operators_run_at_once_or_as_late_as_allowed(self):
        for late in (False, True):
            with emulated_cuda(late):
                x = ones(2)
                x.add_(1)
                assert (x.memory.tolist() != [2, 2]) == late
                torch.cuda.synchronize()
                assert x.memory.tolist() == [2, 2]

    @pytest.mark.parametrize(
        "wait",
        [
            lambda x: torch.cuda.current_stream().synchronize(),
            lambda x: torch.cuda.current_stream().record_event().synchronize(),
            lambda x: x.sum().item(),
            lambda x: bool(x.any()),
            lambda x: x.cpu(),
            lambda x: x.tolist(),
            lambda x: torch.zeros(3).copy_(x),
            lambda x: torch.ones(3).to("cuda"),
            lambda x: torch.tensor([1.0, 2.0], device="cuda"),
            lambda x: x.nonzero(),
            lambda x: x[x > 0],
            lambda x: torch.equal(x, x),
        ],
    )
    def test_the_queue_runs_when_somebody_waits(self, wait, device):
        x = ones(3)
        waits = device.counts["waits"]
        wait(x)
        assert x.memory.tolist() == [1, 1, 1]
        assert device.counts["waits"] == waits + 1

    def test_an_event_waits_for_what_was_launched_before_it(self, device):
        x = torch.zeros(1, device="cuda")
        event = torch.cuda.Event()
        event.record()
        x.add_(1)
        event.synchronize()
        assert x.memory.item() == 0
        event.record()
        event.synchronize()
        assert x.memory.item() == 1

    def test_who_asks_an_event_again_and_again_is_answered(self, device):
        x = ones(1)
        event = torch.cuda.current_stream().record_event()
        assert not event.query()
        while not event.query():
            pass
        assert x.memory.item() == 1

    def test_uninitialized_memory_is_nan(self, device):
        assert torch.empty(3, device="cuda").isnan().all()
        assert torch.empty_like(ones(3)).isnan().all()
        assert (ones(3).new_empty(2, dtype=torch.int64) != 0).all()

    def test_devices_do_not_mix(self, device):
        number = torch.zeros(())
        for wrong in (
            lambda x: x + torch.ones(3),
            lambda x: torch.ones(3).add_(x),
            lambda x: number.add_(x.sum()),
            lambda x: torch.stack([x.sum(), number]),
        ):
            with pytest.raises(RuntimeError, match="same device"):
                wrong(ones(3))
        with pytest.raises(RuntimeError, match="ordinal"):
            torch.zeros(3, device="cuda:1")
        with pytest.raises(TypeError):
            np.asarray(ones(3))

    def test_a_number_of_the_host_is_read_at_launch(self, device):
        number = torch.tensor(2.0)
        x, y = ones(2) * number, number - ones(2)
        number.fill_(5)
        assert x.tolist() == [2, 2] and y.tolist() == [1, 1]

    def test_synchronizing_operators_can_be_forbidden(self, device):
        torch.cuda.set_sync_debug_mode("error")
        x = ones(3)
        pinned(3).copy_(x, non_blocking=True)
        torch.cuda.current_stream().record_event().synchronize()
        with pytest.raises(RuntimeError, match="synchronizing"):
            x.sum().item()
        with pytest.raises(RuntimeError, match="synchronizing"):
            x.cpu()
        with pytest.raises(RuntimeError, match="synchronizing"):
            torch.cuda.current_stream().synchronize()

    def test_what_happens_is_counted(self, device):
        x = ones(4)
        x.view(2, 2)[0].add_(1)  # a view launches nothing, nor does an allocation
        torch.empty(3, device="cuda")
        pinned(4).copy_(x, non_blocking=True)
        x.copy_(pinned(4), non_blocking=True)
        graph, _ = captured(lambda: x.mul_(2).add_(1).copy_(pinned(4), non_blocking=True))
        device.counts.pop("waits")
        graph.replay()
        graph.replay()
        expected = {"operators": 2, "d2h": 1, "d2h bytes": 16, "h2d": 3, "h2d bytes": 48, "replays": 2, "nodes": 4}
        assert dict(device.counts) == expected | {"bytes": 16 + 16 + 2 * (32 + 32)}

    def test_matmuls_and_the_fills_of_random_numbers_are_counted(self, device):
        x = ones(2, 2)
        device.counts.clear()
        graph, _ = captured(lambda: torch.rand_like(x) @ x)
        device.counts.pop("waits")
        graph.replay()
        expected = {"replays": 1, "nodes": 2, "matmuls": 1, "matmul 1x2x2x2": 1, "fills": 2}
        assert dict(device.counts) == expected | {"bytes": 32 + 48}

    @pytest.mark.parametrize(
        ("sizes", "operator", "expected"),
        [
            ([(3,), (2, 5), (5, 3)], torch.addmm, ["matmul 1x2x3x5"]),
            ([(4, 2, 5), (4, 5, 3)], torch.bmm, ["matmul 4x2x3x5"]),
            ([(2, 3, 8, 8), (4, 3, 5, 5)], torch.conv2d, ["matmul 1x32x4x75"]),
        ],
    )
    def test_sizes_of_matmuls_are_counted(self, sizes, operator, expected, device):
        operator(*(torch.zeros(size, device="cuda") for size in sizes))
        assert [name for name in device.counts if name.startswith("matmul ")] == expected

    def test_both_matmuls_of_the_gradients_of_a_convolution_are_counted(self, device):
        images, weight = (torch.zeros(size, device="cuda", requires_grad=True) for size in [(2, 3, 8, 8), (4, 3, 5, 5)])
        output = torch.conv2d(images, weight)
        device.counts.clear()
        torch.autograd.grad(output.sum(), (images, weight))
        assert device.counts["matmul 1x32x4x75"] == 2

    @pytest.mark.parametrize(
        ("sizes", "transposed", "kernels"),
        [
            ([(3,)] * 40, False, 1),
            ([(3,)] * 200, False, 4),  # 64 pairs of tensors a kernel
            ([(2000, 2000)] * 6, False, 2),  # 320 blocks of 65,536 numbers a kernel
            ([(3, 2)] * 6, True, 6),
        ],
    )
    def test_kernels_of_foreach_operators_are_counted(self, sizes, transposed, kernels, device):
        lists = [[torch.empty(size, device="cuda") for size in sizes] for _ in range(2)]
        if transposed:
            lists[1] = [torch.empty(size[::-1], device="cuda").t() for size in sizes]
        device.counts.clear()
        torch._foreach_add_(*lists)
        assert device.counts["operators"] == kernels

    def test_an_index_counts_what_it_picks(self, device):
        rows, i = torch.zeros(1000, 4, device="cuda"), torch.zeros(2, dtype=torch.int64, device="cuda")
        device.counts.clear()
        picked = rows.index_select(0, i)
        rows.index_copy_(0, i, picked)
        assert device.counts["bytes"] == (32 + 16 + 32) + (32 + 16 + 32 + 32)


class TestCopies:
    def test_a_copy_from_pinned_memory_reads_it_when_it_runs(self):
        seen = []
        for late in (False, True):
            with emulated_cuda(late):
                host, x = pinned(1), ones(1)
                x.copy_(host, non_blocking=True)
                host.fill_(7)
                seen.append(x.item())
        assert seen == [0, 7]

    @pytest.mark.parametrize("non_blocking", [False, True])
    def test_a_copy_from_other_memory_reads_it_at_once(self, non_blocking, device):
        host, x = torch.zeros(1), ones(1)
        x.copy_(host, non_blocking=non_blocking)
        host.fill_(7)
        assert x.item() == 0

    @pytest.mark.parametrize(
        "copy",
        [
            lambda x: pinned(3).copy_(x, non_blocking=True),
            lambda x: torch.zeros(3).pin_memory().copy_(x, non_blocking=True),
            lambda x: x.to("cpu", non_blocking=True),
        ],
    )
    def test_pinned_memory_is_nan_until_a_copy_to_it_has_run(self, copy, device):
        host = copy(ones(3))
        assert host.isnan().all()
        torch.cuda.synchronize()
        assert host.tolist() == [1, 1, 1]

    def test_a_blocking_copy_waits(self, device):
        assert pinned(3).copy_(ones(3)).tolist() == [1, 1, 1]
        assert torch.zeros(3).copy_(ones(3), non_blocking=True).tolist() == [1, 1, 1]

    def test_a_graph_reads_and_writes_pinned_memory_at_each_replay(self, device):
        source, target, x = pinned(1), pinned(1), ones(1)

        def function():
            x.copy_(source, non_blocking=True)
            target.copy_(x * 2, non_blocking=True)

        graph, _ = captured(function)
        for i in range(3):
            source.fill_(i)
            graph.replay()
            assert target.isnan().all()
            torch.cuda.synchronize()
            assert target.item() == 2 * i


class TestStreams:
    @pytest.mark.parametrize("forgotten", [None, "before", "after"])
    def test_streams_run_in_any_order_unless_they_wait(self, forgotten):
        def function():
            side, x = torch.cuda.Stream(), torch.zeros(1, device="cuda")
            x.add_(1)
            if forgotten != "before":
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                x.mul_(10)
            if forgotten != "after":
                torch.cuda.current_stream().wait_stream(side)
            x.add_(2)
            torch.cuda.synchronize()
            return x.item()

        assert (in_all_orders(function) == {"12.0"}) == (forgotten is None)

    def test_an_event_orders_streams(self):
        def function(waits):
            side, x = torch.cuda.Stream(), torch.zeros(1, device="cuda")
            event = torch.cuda.Event()
            event.record()
            x.add_(1)
            if waits:
                event.record()
            side.wait_event(event)
            with torch.cuda.stream(side):
                y = x * 10
            side.synchronize()
            return y.tolist()

        assert in_all_orders(lambda: function(True)) == {"[10.0]"}
        assert len(in_all_orders(lambda: function(False))) > 1

    def test_waiting_for_a_stream_leaves_others_alone(self, device):
        x, side = ones(1), torch.cuda.Stream()
        side.synchronize()
        assert x.memory.isnan()

    @pytest.mark.parametrize("recorded", [False, True])
    def test_memory_that_another_stream_uses_is_kept_by_record_stream_alone(self, recorded):
        def function():
            side, x = torch.cuda.Stream(), ones(1)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y = x + 1
            if recorded:
                x.record_stream(side)
            del x
            ones(1)  # takes the memory that is free
            torch.cuda.synchronize()
            return y.item()

        assert (in_all_orders(function) == {"2.0"}) == recorded

    def test_record_stream_is_no_wait(self):
        def function():
            side, x, y = torch.cuda.Stream(), ones(1), ones(1)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y.mul_(10 * x)
            x.record_stream(side)
            del x
            y.add_(2)
            torch.cuda.synchronize()
            return y.item()

        assert in_all_orders(function) == {"12.0", "30.0"}


class Descent:
    """Gradient descent on x**2, with its learning rate in a tensor or, wrongly, in a Python number."""

    def __init__(self, rate):
        self.x, self.rate = ones(3), rate

    def __call__(self):
        self.x.sub_(2 * self.rate * self.x)


class TestGraphs:
    def test_capture_runs_nothing_and_each_replay_all(self, device):
        x = ones(1)
        graph, y = captured(lambda: x.add_(1) * 2)
        torch.cuda.synchronize()
        assert x.item() == 1 and y.isnan().all()
        for i in range(3):
            graph.replay()
            assert (x.item(), y.item()) == (2 + i, 4 + 2 * i)

    def test_what_python_computed_is_frozen(self, device):
        right, wrong, eager = Descent(torch.tensor(0.1, device="cuda")), Descent(0.1), Descent(0.1)
        graphs = [captured(step)[0] for step in (right, wrong)]
        right.rate.fill_(0.05)
        wrong.rate = eager.rate = 0.05
        for graph in graphs:
            graph.replay()
        eager()
        assert torch.equal(right.x, eager.x) and not torch.equal(wrong.x, eager.x)

    @pytest.mark.parametrize(
        "forbidden",
        [
            lambda x: x.sum().item(),
            lambda x: x.mul_(2) if x.sum() > 0 else x.mul_(3),
            lambda x: x.cpu(),
            lambda x: torch.zeros(3).copy_(x, non_blocking=True),
            lambda x: x.copy_(torch.zeros(3)),
            lambda x: x.copy_(torch.zeros(3), non_blocking=True),
            lambda x: torch.tensor([1.0], device="cuda"),
            lambda x: x[x > 0],
            lambda x: torch.cuda.synchronize(),
            lambda x: torch.cuda.Event().synchronize(),
            lambda x: torch.cuda.Event().query(),
            lambda x: torch.cuda.current_stream().record_event().synchronize(),
            lambda x: torch.cuda.current_stream().wait_stream(torch.cuda.default_stream()),
            lambda x: torch.cuda.Stream().wait_stream(torch.cuda.current_stream()),  # and does not come back
            lambda x: torch.cuda.get_rng_state(),
            lambda x: torch.cuda.manual_seed(1),
            lambda x: x.copy_(pinned(3, 2)[:, 0], non_blocking=True),  # by way of memory that is not pinned
            lambda x: torch.cuda.CUDAGraph().replay(),
            lambda x: captured(lambda: None),
        ],
    )
    def test_what_capture_forbids_raises_and_ends_it(self, forbidden, device):
        x = ones(3)
        with pytest.raises(RuntimeError, match="captur"):
            captured(lambda: forbidden(x))
        captured(lambda: x.add_(1))[0].replay()
        assert x.tolist() == [2, 2, 2]

    def test_capture_on_the_default_stream_is_forbidden(self, device):
        with pytest.raises(RuntimeError, match="non-default stream"):
            torch.cuda.CUDAGraph().capture_begin()

    def test_a_stream_joins_a_capture_by_waiting(self, device):
        x, y, side = ones(1), ones(1), torch.cuda.Stream()

        def function():
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                x.add_(1)
            torch.cuda.current_stream().wait_stream(side)

        graph, _ = captured(function)
        with torch.cuda.stream(side):
            y.add_(1)  # the capture is over: this runs
        torch.cuda.synchronize()
        assert (x.item(), y.item()) == (1, 2)
        graph.replay()
        assert x.item() == 2

    def test_a_stream_that_joined_has_to_come_back_again(self, device):
        x, side = ones(1), torch.cuda.Stream()

        def function():
            side.wait_stream(torch.cuda.current_stream())
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.stream(side):
                x.add_(1)

        with pytest.raises(RuntimeError, match="unjoined"):
            captured(function)

    def test_an_event_of_a_capture_means_nothing_outside(self, device):
        events = []
        captured(lambda: events.append(torch.cuda.current_stream().record_event()))
        with pytest.raises(RuntimeError, match="captur"):
            torch.cuda.current_stream().wait_event(events[0])
        with pytest.raises(RuntimeError, match="captur"):
            events[0].synchronize()

    def test_a_graph_that_was_not_captured_cannot_be_replayed(self, device):
        with pytest.raises(RuntimeError, match="not captured"):
            torch.cuda.CUDAGraph().replay()

    def test_a_mask_may_choose_what_to_fill(self, device):
        x = torch.arange(3.0, device="cuda")

        def function():
            x[x > 1] = 7.0

        graph, _ = captured(function)
        graph.replay()
        assert x.tolist() == [0, 1, 7]

    def test_work_on_other_streams_is_not_captured(self, device):
        x, side = ones(1), torch.cuda.Stream()

        def function():
            with torch.cuda.stream(side):
                x.add_(1)

        graph, _ = captured(function)
        torch.cuda.synchronize()
        graph.replay()
        assert x.item() == 2

    def test_a_graph_that_reads_freed_memory_reads_nan(self, device):
        holder = {"x": ones(1)}
        graph, y = captured(lambda: holder["x"] + 1)
        graph.replay()
        assert y.item() == 2
        holder["x"] = ones(1)  # rebound instead of filled
        graph.replay()
        assert y.isnan().all()

    def test_what_one_call_keeps_for_the_next_is_lost(self, device):
        kept = {"sum": torch.zeros(1, device="cuda")}

        def function():
            kept["sum"] = kept["sum"] + 1

        graph, _ = captured(function)
        graph.replay()
        assert kept["sum"].isnan().all()

    @pytest.mark.parametrize("shared", [False, True])
    def test_graphs_that_share_a_pool_reuse_what_nobody_holds(self, shared, device):
        pool = torch.cuda.graph_pool_handle() if shared else None
        first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(first, pool=pool):
            x = ones(1)
            held = x + 1
            memory = x.memory
        del x
        with torch.cuda.graph(second, pool=pool):
            ones(1)
        first.replay()
        second.replay()
        torch.cuda.synchronize()
        assert memory.isnan().all() == shared
        assert held.item() == 2

    def test_cuda_graph_module_makes_each_call_once(self):
        """tensordict's own, with its streams: warm-up, capture and replays, with inputs and outputs."""

        def function():
            total = torch.zeros(3, device="cuda")
            module = CudaGraphModule(lambda x: total.add_(x) * 2, warmup=3)
            outputs = [module(torch.full((3,), float(i), device="cuda")) for i in range(8)]
            return [output.tolist() for output in outputs]

        assert in_all_orders(function) == {str([[2.0 * sum(range(i + 1))] * 3 for i in range(8)])}


class TestRandomNumbers:
    def test_the_device_has_its_own(self, device):
        torch.manual_seed(3)
        host = torch.get_rng_state()
        first = torch.rand(5, device="cuda").tolist()
        assert torch.equal(torch.get_rng_state(), host)
        torch.manual_seed(3)
        torch.rand(100)
        assert torch.rand(5, device="cuda").tolist() == first
        assert torch.rand(5, device="cuda").tolist() != first
        assert min(first) >= 0 and max(first) < 1

    def test_the_state_is_the_hosts_to_save_and_to_set(self, device):
        torch.rand(3, device="cuda")
        state = torch.cuda.get_rng_state()
        numbers = [torch.randn(2, device="cuda") for _ in range(3)]
        torch.cuda.set_rng_state(state)
        again = [torch.randn(2, device="cuda") for _ in range(3)]
        assert all(torch.equal(x, y) for x, y in zip(numbers, again, strict=True))

    def test_replays_draw_fresh_ones_the_same_as_calls(self, device):
        x = torch.zeros(4, device="cuda")

        def function():
            x.copy_(torch.randn(4, device="cuda")).add_(torch.rand_like(x))

        torch.manual_seed(0)
        wanted = []
        for _ in range(3):
            function()
            wanted.append(x.tolist())
        graph, _ = captured(function)
        torch.manual_seed(0)
        for numbers in wanted:
            graph.replay()
            assert x.tolist() == numbers
        assert wanted[0] != wanted[1]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        return (self.layers(x) * self.scale).squeeze(-1)


def gradients(network, views, x):
    loss = functional_call(network, views, x).square().mean()
    return torch.autograd.grad(loss, list(views.values()))


class TestTensors:
    def test_networks_and_their_gradients_are_those_of_the_cpu(self, device):
        on_host = Net()
        with torch.device("cuda"):
            on_device = Net()
        on_device.load_state_dict(on_host.state_dict())
        x = torch.randn(7, 5)
        wanted = gradients(on_host, dict(on_host.named_parameters()), x)
        got = gradients(on_device, dict(on_device.named_parameters()), x.cuda())
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one.cpu(), other)

    def test_several_networks_by_vmap(self, device):
        networks = [Net() for _ in range(3)]
        stacked = {name: torch.stack([n.state_dict()[name] for n in networks]) for name in networks[0].state_dict()}
        on_device = {name: tensor.cuda() for name, tensor in stacked.items()}
        x = torch.randn(7, 5)
        template = copy.deepcopy(networks[0]).cuda()
        got = vmap(lambda views: functional_call(template, views, x.cuda()))(on_device)
        wanted = torch.stack([network(x) for network in networks])
        torch.testing.assert_close(got.cpu(), wanted)

    def test_modules_move_and_are_copied(self, device):
        network = Net()
        wanted = {name: tensor.clone() for name, tensor in network.state_dict().items()}
        moved = network.to("cuda")
        twin = copy.deepcopy(moved)
        assert isinstance(twin.layers[0].weight, nn.Parameter) and twin.layers[0].weight.is_cuda
        with torch.no_grad():
            moved.layers[0].weight.zero_()
        for name, tensor in twin.cpu().state_dict().items():
            assert tensor.device.type == "cpu" and torch.equal(tensor, wanted[name])

    def test_data_rebinds_memory(self, device):
        parameter, other = nn.Parameter(ones(2)), torch.zeros(2, device="cuda")
        parameter.data = other
        other.add_(5)
        assert parameter.tolist() == [5, 5]

    def test_views_share_memory_and_reshaping_in_place_changes_the_form_alone(self, device):
        x = torch.arange(6.0, device="cuda")
        view = x.view(2, 3)
        doubled = view * 2
        view.t_()
        view[0].add_(10)
        assert view.shape == (3, 2)
        assert x.tolist() == [10, 1, 2, 13, 4, 5]
        assert doubled.tolist() == [[0, 2, 4], [6, 8, 10]]

    def test_operators_with_out_and_lists_and_indices_of_the_host(self, device):
        out = torch.zeros(2, device="cuda")
        assert torch.stack([ones(()), 2 * ones(())], out=out) is out
        torch._foreach_mul_([out, out], 2.0)
        assert out.tolist() == [4, 8]
        assert out.copy_(0.5).tolist() == [0.5, 0.5]
        assert torch.arange(5.0, device="cuda")[torch.tensor([1, 3])].tolist() == [1, 3]

    def test_tensors_are_saved_as_their_values(self, device):
        """Also those that share memory by DLPack."""
        x = torch.arange(4, device="cuda")
        shared = torch.from_dlpack(x[1:3])
        x.add_(1)
        file = io.BytesIO()
        torch.save([x, shared], file)
        file.seek(0)
        assert [tensor.tolist() for tensor in torch.load(file, weights_only=True)] == [[1, 2, 3, 4], [2, 3]]

    def test_it_says_where_it_is(self, device):
        x = ones(2)
        assert isinstance(x, DeviceTensor)
        assert x.is_cuda and x.device == torch.device("cuda", 0) and x.get_device() == 0
        assert x.to("cuda") is x and x.cpu().device.type == "cpu"
        assert x.double().dtype is torch.float64 and torch.ones(2).to("cuda", torch.float64).dtype is torch.float64


def test_outside_there_is_no_device():
    before = {name: getattr(torch.cuda, name) for name in ("Event", "Stream", "is_available", "graph", "synchronize")}
    with pytest.raises(ValueError), emulated_cuda():
        assert torch.cuda.is_available()
        raise ValueError
    assert all(getattr(torch.cuda, name) is value for name, value in before.items())


def test_an_error_of_an_operator_shows_when_it_runs(device):
    x = ones(3)
    y = x[torch.tensor([7], device="cuda")]
    with pytest.raises(IndexError):
        y.cpu()
