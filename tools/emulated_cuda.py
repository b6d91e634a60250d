"""A CUDA device emulated on the CPU, to test code that uses streams, events, pinned memory and CUDA graphs.

    with emulated_cuda(late=True) as device:  # torch.cuda.is_available() is True in here
        train(...)
    print(device.counts)

Operators are queued, as on a GPU, and computed by CPU kernels: at once, or with `late`, only when the host waits. If
the results differ between the two, a wait is missing. Tensors hold real memory. It is NaN until it is written, in a
host copy until the copy has run, and again after memory is freed that a graph still reads. doc/cuda_without_a_gpu.md
has the rules and the limits.

This file needs only torch and can be copied.
"""

import contextlib
import math
import random
import time
from collections import Counter, deque
from functools import cache, partial

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

aten = torch.ops.aten
DEVICE = None  # the emulated device, if it is active
OPERATOR = {"operators": 1}
FOREACH = (110, 64, 48, 36, 30)  # maximum tensors per kernel of a `_foreach_` operator, by its number of lists
MATMULS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")
CAPTURING = "operation not permitted when stream is capturing"
CUDA, CPU, META = torch.device("cuda", 0), torch.device("cpu"), torch.device("meta")


class Device:
    """The state of the emulated device.

    `counts` has the operators launched outside of graphs, graph replays and the operators in them ("nodes"), the bytes
    that all of these read and write, the number and sizes of matmuls and convolutions among them (see `cost`), copies
    and bytes to the device ("h2d") and from it ("d2h"), and the number of times that the host waited. The replay of a
    graph that draws random numbers first launches two "fills", of seed and offset.
    """

    def __init__(self, late, seed, draws_like_cpu):
        self.late = late
        self.draws_like_cpu = draws_like_cpu
        self.streams = []
        self.order = random.Random(seed)  # random order of streams that do not wait for each other
        self.capture = None
        self.pinned = {}  # page-locked host memory, by address
        self.default_generator = self.generator = Generator()
        self.sync_debug_mode = "default"
        self.counts = Counter()

    def enqueue(self, run, prepare=None, counts=OPERATOR):
        """Queue `run` on the current stream, or record it in the graph that is being captured.

        `prepare` runs on the host at each launch and returns the arguments of `run`. `counts` are the counts of a
        launch, by name.
        """
        if self.capture is not None and self.current in self.capture.streams:
            self.capture.work.append((run, prepare, counts))
            if self.current is not self.capture.origin:
                self.capture.unjoined.add(self.current)
            return
        self.counts.update(counts)
        self.current.push(partial(run, *prepare()) if prepare else run)

    def wait(self, streams, operator=None):
        """Make the host wait until `streams` have finished all work launched so far."""
        if self.capture is not None:
            raise RuntimeError(f"{CAPTURING}: {operator or 'a wait'}")
        if operator is not None and self.sync_debug_mode == "error":
            raise RuntimeError(f"called a synchronizing CUDA operation: {operator}")
        self.counts["waits"] += 1
        ends = {stream: stream.launched for stream in streams}
        while ends:
            stream = self.order.choice(list(ends))
            if stream.done < ends[stream]:
                stream.run_one()
            else:
                del ends[stream]

    def synchronize(self, device=None):
        self.wait(self.streams)

    def next_random(self):
        """The seed for the next random operator."""
        return self.generator.next()

    def get_rng_state(self, device=None):
        return self.default_generator.get_state()

    def set_rng_state(self, state, device=None):
        self.default_generator.set_state(state)

    def manual_seed(self, seed):
        self.default_generator.manual_seed(seed)

    def set_sync_debug_mode(self, mode):
        self.sync_debug_mode = {0: "default", 1: "warn", 2: "error"}.get(mode, mode)

    def current_stream(self, device=None):
        return self.current

    @contextlib.contextmanager
    def stream(self, stream):
        outer, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = outer


class Generator(torch._C.Generator):
    """Random numbers of the device: a seed and the count of random operators since, kept on the host as for a GPU."""

    def __init__(self):
        self.rng = (0, 0)

    def next(self):
        seed, offset = self.rng
        self.rng = (seed, offset + 1)
        return (hash((seed, offset)) % 2**63,)

    def get_state(self):
        if DEVICE.capture is not None:
            raise RuntimeError("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture")
        return torch.tensor(self.rng, dtype=torch.int64).view(torch.uint8)

    def set_state(self, state):
        self.set_rng(*state.view(torch.int64).tolist())

    def manual_seed(self, seed):
        self.set_rng(seed, 0)

    def set_rng(self, seed, offset):
        if DEVICE.capture is not None:
            raise RuntimeError("Cannot call CUDAGeneratorImpl::set_current_seed during CUDA graph capture")
        self.rng = (seed, offset)


class AnyGenerator(type):
    """Replaces torch.Generator: it creates generators of the device and of the host, and both are instances of it."""

    def __call__(cls, device="cpu"):
        return Generator() if is_cuda(device) else torch._C.Generator(device)

    def __instancecheck__(cls, instance):
        return isinstance(instance, torch._C.Generator)


class Stream:
    """Work done in order: functions, and (stream, position) for waits on another stream."""

    def __init__(self, device=None, priority=0):
        self.device = CUDA
        self.queue = deque()
        self.launched = 0
        self.done = 0
        self.freed = []  # memory that results of the next operators may reuse
        DEVICE.streams.append(self)

    def push(self, work):
        if not isinstance(work, tuple):
            freed, self.freed = self.freed, []  # in one statement: the garbage collector may free more at any time
            self.queue.extend(partial(poison, memory) for memory in freed)
            self.launched += len(freed)
        self.queue.append(work)
        self.launched += 1
        if not DEVICE.late:
            self.run_until(self.launched)

    def run_one(self):
        work = self.queue.popleft()
        if isinstance(work, tuple):
            stream, position = work
            stream.run_until(position)
        else:
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch.no_grad():
                work()
        self.done += 1

    def run_until(self, position):
        while self.done < position:
            self.run_one()

    def wait_stream(self, stream):
        event = Event()
        event.record(stream)
        self.wait_event(event)

    def wait_event(self, event):
        capture = DEVICE.capture
        if event.capture is not None and event.capture is capture:
            capture.streams.setdefault(self)  # forks from the capture or rejoins it
            capture.unjoined.discard(event.stream)
            if self is not capture.origin:
                capture.unjoined.add(self)
        elif capture is not None and self in capture.streams:
            raise RuntimeError(f"{CAPTURING}: dependency on work outside of the capture")
        elif event.capture is not None:
            raise RuntimeError("the event was recorded in a capture, and means nothing outside of it")
        elif event.stream is not None:
            self.push((event.stream, event.position))

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self):
        DEVICE.wait([self], "synchronize")

    def query(self):
        return self.done == self.launched


class Event:
    """A position in a stream."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        self.stream = None
        self.position = 0
        self.capture = None

    def record(self, stream=None):
        self.recorded = time.perf_counter()
        self.stream = stream or DEVICE.current
        self.position = self.stream.launched
        captured = DEVICE.capture is not None and self.stream in DEVICE.capture.streams
        self.capture = DEVICE.capture if captured else None

    def wait(self, stream=None):
        (stream or DEVICE.current).wait_event(self)

    def elapsed_time(self, end):
        """Milliseconds by the host's clock: the emulated device has no clock."""
        return 1000 * (end.recorded - self.recorded)

    def synchronize(self):
        if DEVICE.capture is not None or self.capture is not None:
            raise RuntimeError(f"{CAPTURING}: waiting for an event")
        DEVICE.counts["waits"] += 1
        if self.stream is not None:
            self.stream.run_until(self.position)

    def query(self):
        if DEVICE.capture is not None:
            raise RuntimeError(f"{CAPTURING}: asking for an event")
        if self.stream is None or self.stream.done >= self.position:
            return True
        self.stream.run_one()  # so that polling ends eventually
        return False


class Pool:
    """A graph's private memory. Graphs that share it may reuse memory that is free when their capture begins."""

    def __init__(self):
        self.free = []


class CUDAGraph:
    """The launches of a capture; each replay repeats them on the same memory."""

    def __init__(self, keep_graph=False):
        self.work = []
        self.reused = []
        self.memory = None

    def capture_begin(self, pool=None, capture_error_mode="global"):
        if DEVICE.capture is not None:
            raise RuntimeError(f"{CAPTURING}: another capture")
        if DEVICE.current is DEVICE.default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        self.work.clear()
        self.memory = pool or Pool()
        self.reused = list(self.memory.free)
        self.origin = DEVICE.current
        self.streams = {self.origin: None}
        self.unjoined = set()
        DEVICE.capture = self

    def capture_end(self):
        DEVICE.capture = None
        if self.unjoined:
            raise RuntimeError("capturing stream has unjoined work")

    def pool(self):
        return self.memory

    def replay(self):
        if DEVICE.capture is not None:
            raise RuntimeError(f"{CAPTURING}: replaying a graph")
        if self.memory is None:
            raise RuntimeError("replay of a graph that was not captured")
        DEVICE.counts["replays"] += 1
        for _, _, counts in self.work:
            DEVICE.counts.update({"nodes" if name == "operators" else name: n for name, n in counts.items()})
        if any(prepare == DEVICE.next_random for _, prepare, _ in self.work):
            DEVICE.counts["fills"] += 2
        ready = [partial(poison, memory) for memory in self.reused]
        ready += [partial(run, *prepare()) if prepare else run for run, prepare, _ in self.work]

        def run_all():
            for run in ready:
                run()

        DEVICE.current.push(run_all)

    def reset(self):
        self.work.clear()


@contextlib.contextmanager
def graph(cuda_graph, pool=None, stream=None, capture_error_mode="global"):
    """torch.cuda.graph: captures on its own stream, after all other work has finished."""
    DEVICE.synchronize()
    with DEVICE.stream(stream or Stream()):
        cuda_graph.capture_begin(pool, capture_error_mode)
        try:
            yield
        except BaseException:
            DEVICE.capture = None
            raise
        cuda_graph.capture_end()


class Block:
    """Memory of a tensor and all its views. When they are gone, it is filled with NaN, as if reused."""

    def __init__(self, memory):
        self.device = DEVICE
        self.memory = memory
        self.stream = DEVICE.current
        self.users = {}  # other streams, named by `record_stream`
        self.capture = DEVICE.capture if DEVICE.capture and DEVICE.current in DEVICE.capture.streams else None
        self.used_elsewhere = False

    def touch(self):
        """Note the user of the memory. Freeing is safe for its own stream and for the graph that allocated it."""
        if DEVICE.capture is not None and DEVICE.current in DEVICE.capture.streams:
            self.used_elsewhere |= DEVICE.capture is not self.capture
        else:
            self.used_elsewhere |= DEVICE.current is not self.stream

    def __del__(self):
        if self.device is not DEVICE:
            return
        if self.capture is not None:
            self.capture.memory.free.append(self.memory)
        elif self.users:  # reused once all of them are past this point, without waiting for each other
            for stream in (self.stream, *self.users):
                DEVICE.allocator.push((stream, stream.launched))
            DEVICE.allocator.push(partial(poison, self.memory))
        elif self.used_elsewhere:
            self.stream.freed.append(self.memory)


def poison(memory):
    """Fill memory of the CPU with values that show misuse."""
    if memory.is_floating_point() or memory.is_complex():
        memory.fill_(float("nan"))
    elif memory.dtype is not torch.bool:
        memory.fill_(torch.iinfo(memory.dtype).max // 3)


class DeviceTensor(torch.Tensor):
    """A tensor on the emulated device: "cuda:0" for Python, "meta" for C++, so that autograd needs no CUDA build.

    `memory` is a tensor on the CPU that only the streams may access; `block` is the owner of this memory.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, memory, block=None):
        layout = {"strides": memory.stride(), "storage_offset": memory.storage_offset(), "dtype": memory.dtype}
        tensor = torch.Tensor._make_wrapper_subclass(cls, memory.shape, **layout, device=META)
        tensor.memory = memory
        tensor.block = block or Block(memory)
        return tensor

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_meta = property(lambda self: False)
    data = property(lambda self: self.detach(), lambda self, value: self.set_data(value))

    def set_data(self, value):
        """`tensor.data = value`: use the memory of `value` from now on."""
        torch.Tensor.data.__set__(self, value)
        self.memory, self.block = value.memory, value.block

    def get_device(self):
        return 0

    def record_stream(self, stream):
        self.block.users[stream] = None

    def tolist(self):
        return self.cpu().tolist()

    def numpy(self, *args, **kwargs):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    __array__ = numpy

    def __deepcopy__(self, memo):
        memo[id(self)] = copy = self.detach().clone().requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copy._is_param = True
        return copy

    def __reduce_ex__(self, protocol):
        return self.cpu().__reduce_ex__(protocol)  # like torch.save

    def __format__(self, form):
        return format(self.item(), form) if self.dim() == 0 else super().__format__(form)

    def __repr__(self):
        return f"DeviceTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return dispatch(operator, args, kwargs or {})


def tensors_in(values):
    """All tensors in arguments of an operator."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def replaced(values, function):
    """Arguments of an operator, with each tensor replaced by `function(tensor)`."""
    if isinstance(values, torch.Tensor):
        return function(values)
    if isinstance(values, (list, tuple)):
        return [replaced(value, function) for value in values]
    return values


def memory_of(tensor):
    return tensor.memory if isinstance(tensor, DeviceTensor) else tensor


def on_meta(tensor):
    """A tensor of the same form on C++'s meta device."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)


def form(value):
    """Everything in an argument that the form of an operator's results can depend on; hashable."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple([form(item) for item in value])
    return type(value), value


FORMS = {}
COSTS = {}


def signature(operator, args, kwargs):
    """Everything that the form of an operator's results and its costs can depend on; hashable."""
    return operator, form(args), *[(name, form(value)) for name, value in kwargs.items()]


def result_forms(key, operator, args, kwargs):
    """The results of an operator as a tensor or tensors on C++'s meta device, without running it."""
    if key not in FORMS:
        with torch._C._DisableTorchDispatch():
            FORMS[key] = operator(*replaced(args, on_meta), **{k: replaced(v, on_meta) for k, v in kwargs.items()})
    return FORMS[key]


@cache
def traits(operator):
    """Traits of an operator: its effect on memory, whether it draws random numbers, whether the host waits for it."""
    schema = operator._schema
    aliases = [returned.alias_info for returned in schema.returns]
    if torch.Tag.inplace_view in operator.tags:
        kind = "reshapes"
    elif schema.is_mutable:
        kind = "writes"
    elif operator.overloadpacket in (aten._unsafe_view, aten._reshape_alias) or any(aliases):
        kind = "view"
    elif operator.overloadpacket in (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty):
        kind = "allocates"
    else:
        kind = "computes"
    random_numbers = torch.Tag.nondeterministic_seeded in operator.tags
    needs_host = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(operator.tags)
    return kind, random_numbers, bool(needs_host) or operator.overloadpacket in (aten.equal, aten._local_scalar_dense)


def dispatch(operator, args, kwargs):
    """Handle an operator as a GPU would."""
    packet = operator.overloadpacket
    kind, random_numbers, needs_host = traits(operator)
    if packet is aten.copy_:
        return copy_(*args, **kwargs)
    if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu":
        return to_host(operator, args, kwargs)
    if packet in (aten.index, aten.index_put, aten.index_put_):
        target, indices, *rest = args
        if isinstance(target, DeviceTensor):  # indices may be on the host
            args = (target, [None if i is None else to_device(i) for i in indices], *rest)
        fills = rest and rest[0].numel() == 1  # with a kernel that takes the mask
        needs_host = not fills and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)
    takes_numbers = torch.Tag.pointwise in operator.tags or packet in (aten.index_put, aten.index_put_)
    for tensor in tensors_in([*args, *kwargs.values()]):
        if isinstance(tensor, DeviceTensor):
            tensor.block.touch()
        elif tensor.dim() or not takes_numbers or (kind == "writes" and tensor is args[0]):
            raise RuntimeError(f"Expected all tensors to be on the same device, but {operator} got cuda:0 and cpu")
    if needs_host:
        DEVICE.wait([DEVICE.current], operator)
        out = operator(*replaced(args, memory_of), **{k: replaced(v, memory_of) for k, v in kwargs.items()})
        return replaced(out, DeviceTensor)
    if kind == "reshapes":
        tensor = args[0]
        tensor.memory = tensor.memory.detach()  # queued work keeps the form at its launch
        with torch._C._DisableTorchDispatch():
            operator(tensor, *args[1:], **kwargs)
            operator(tensor.memory, *args[1:], **kwargs)
        return tensor
    if kind == "view":
        (base,) = [x for x in tensors_in(args) if isinstance(x, DeviceTensor)][:1]
        return replaced(operator(*replaced(args, memory_of), **kwargs), lambda view: DeviceTensor(view, base.block))
    return launch(operator, args, kwargs, kind, random_numbers)


def launch(operator, args, kwargs, kind, random_numbers):
    """Allocate an operator's results, and queue the operator."""
    key = signature(operator, args, kwargs)
    if kind == "writes":
        results = written(operator, args, kwargs)
    else:
        results = replaced(result_forms(key, operator, args, kwargs), allocate)
    if kind == "allocates" or (kind == "computes" and not any(x.numel() for x in tensors_in([results]))):
        return results  # nothing to compute, so no kernel

    on_host = {name: CPU if name == "device" and value is not None else value for name, value in kwargs.items()}
    if key not in COSTS:
        COSTS[key] = cost(operator.overloadpacket.__name__, args, results)
    counts = COSTS[key]
    # a number on the host is read now, as an argument of the kernel
    args, on_host = replaced(args, frozen), {name: replaced(value, frozen) for name, value in on_host.items()}
    outputs = [] if kind == "writes" else [tensor.memory for tensor in tensors_in([results])]

    def run(seed=None):
        with seeded(seed) if seed is not None else contextlib.nullcontext():
            computed = operator(*args, **on_host)
        if outputs:
            for output, value in zip(outputs, tensors_in([computed]), strict=True):
                output.copy_(value)

    own_numbers = random_numbers and not DEVICE.draws_like_cpu
    DEVICE.enqueue(run, DEVICE.next_random if own_numbers else None, counts)
    return results


def cost(name, args, results):
    """The counts of an operator: bytes read and written, and for a matmul also "matmul BxMxNxK".

    This means B products of M by K with K by N; a convolution counts as the equivalent matmul.
    """
    tensors = list(tensors_in([*args, results]))
    sizes = [tensor.nbytes for tensor in tensors]
    if "index" in name or name == "gather":  # reads or writes only a part of the indexed tensor
        whole = tensors[0].nbytes
        sizes = [min(size, max((other for other in sizes if other != whole), default=whole)) for size in sizes]
    counts = Counter(operators=1, bytes=sum(sizes))
    if name.startswith("_foreach_"):
        lists = [x for x in (*args, results) if isinstance(x, (list, tuple)) and isinstance(x[0], torch.Tensor)]
        counts["operators"] = foreach_kernels(lists)
    if name in MATMULS:
        products = list(matmuls(name, args, results))
        counts.update(matmuls=1, **Counter("matmul " + "x".join(map(str, product)) for product in products))
    return counts


def foreach_kernels(lists):
    """The number of kernels that CUDA launches for a `_foreach_` operator on these lists of tensors.

    A few suffice if tensors at the same position have the same form and no gaps; otherwise it is one per tensor.
    """
    alike = [{form(tensor) for tensor in tensors} for tensors in zip(*lists, strict=True)]
    if any(len(forms) > 1 for forms in alike) or not all(map(is_dense, lists[0])):
        return len(lists[0])
    blocks = sum(math.ceil(tensor.numel() / 65536) for tensor in lists[0])
    return max(math.ceil(len(alike) / FOREACH[len(lists) - 1]), math.ceil(blocks / 320))


def is_dense(tensor):
    """Whether a tensor's elements are contiguous in memory in some order."""
    steps = [(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return sum(steps) + 1 == tensor.numel()


def matmuls(name, args, results):
    """The sizes (B, M, N, K) of the matmuls in an operator."""
    if "convolution" not in name:
        *_, a, b = tensors_in(args)
        yield (*a.shape[:-2], 1)[0], a.shape[-2], b.shape[-1], a.shape[-1]
        return
    weight = args[2] if "backward" in name else args[1]
    output = args[0] if "backward" in name else results
    sizes = 1, output.numel() // output.shape[1], weight.shape[0], weight[0].numel()
    for needed in args[-1][:2] if "backward" in name else [True]:  # gradients of input and weight
        if needed:
            yield sizes


def allocate(meta):
    """An uninitialized tensor of this form on the device."""
    memory = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype)
    poison(memory)
    return DeviceTensor(memory)


def frozen(tensor):
    return tensor.memory if isinstance(tensor, DeviceTensor) else tensor.clone()


def written(operator, args, kwargs):
    """The arguments that an operator writes to and returns."""
    named = dict(zip([argument.name for argument in operator._schema.arguments], args, strict=False)) | kwargs
    by_alias = {}
    for argument in operator._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            by_alias[frozenset(argument.alias_info.before_set)] = named.get(argument.name)
    if any(x.alias_info is None for x in operator._schema.returns):
        raise NotImplementedError(f"{operator} writes some of its results in place, and not others")
    results = [by_alias[frozenset(x.alias_info.before_set)] for x in operator._schema.returns]
    return results[0] if len(results) == 1 else tuple(results) or None


@contextlib.contextmanager
def seeded(seed):
    """Use the CPU's generator in place of the device's."""
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


def is_pinned(tensor):
    return tensor.untyped_storage().data_ptr() in DEVICE.pinned


def pin(tensor):
    DEVICE.pinned[tensor.untyped_storage().data_ptr()] = tensor
    return tensor


def is_direct(on_host, on_device):
    """Whether a copy needs no temporary host memory, which would not be pinned."""
    return is_pinned(on_host) and on_host.is_contiguous() and on_host.dtype is on_device.dtype


def copy_(target, source, non_blocking=False):
    """target.copy_(source), on the device or between host and device."""
    if not isinstance(source, torch.Tensor):
        return target.fill_(source)
    for tensor in (target, source):
        if isinstance(tensor, DeviceTensor):
            tensor.block.touch()
    if isinstance(target, DeviceTensor) and isinstance(source, DeviceTensor):
        DEVICE.enqueue(partial(target.memory.copy_, source.memory))
    elif isinstance(target, DeviceTensor):
        if not (non_blocking and is_direct(source, target)):
            if not non_blocking:
                DEVICE.wait([DEVICE.current], "a copy from the host")
            if DEVICE.capture is not None:
                raise RuntimeError(f"{CAPTURING}: a copy from memory that is not pinned")
            source = source.clone()
        DEVICE.enqueue(partial(target.memory.copy_, source), counts={"h2d": 1, "h2d bytes": source.nbytes})
    else:
        pinned = non_blocking and is_direct(target, source)
        if DEVICE.capture is not None and not pinned:
            raise RuntimeError(f"{CAPTURING}: a copy to memory that is not pinned")

        def spoil():
            if DEVICE.late:
                with torch._C._DisableTorchDispatch():
                    poison(target)
            return ()

        DEVICE.enqueue(partial(target.copy_, source.memory), spoil, counts={"d2h": 1, "d2h bytes": target.nbytes})
        if not pinned:
            DEVICE.wait([DEVICE.current], None if non_blocking else "a copy to the host")
    return target


def to_device(tensor, non_blocking=False, dtype=None):
    """A tensor of the host, or one made from Python numbers, on the device."""
    if isinstance(tensor, DeviceTensor):
        return tensor if dtype is None else tensor.to(dtype)
    made = allocate(torch.empty_like(tensor, dtype=dtype))
    if tensor.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError("a differentiable copy to the device")
    return copy_(made, tensor, non_blocking)


def to_host(operator, args, kwargs):
    """An operator on device tensors with device="cpu": a copy, or a new tensor of the same shape."""
    if operator.overloadpacket is not aten._to_copy:
        return operator(*replaced(args, memory_of), **kwargs)
    (source,) = args
    dtype = kwargs.get("dtype") or source.dtype
    target = torch.empty_like(source.memory, dtype=dtype)
    if kwargs.get("non_blocking"):  # torch copies to pinned memory
        pin(target)
    return copy_(target, source, kwargs.get("non_blocking", False))


def is_cuda(device):
    """Whether this names the device, which has index 0."""
    if not isinstance(device, (str, torch.device, int)) or isinstance(device, bool):
        return False
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type == "cuda" and device.index:
        raise RuntimeError(f"invalid device ordinal: {device}")
    return device.type == "cuda"


class Functions(TorchFunctionMode):
    """Intercepts functions that name the device or pinned memory."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        if isinstance(kwargs.get("generator"), Generator):
            if DEVICE.capture is not None:
                raise RuntimeError("Attempt to increase offset for a CUDA generator not in capture mode.")
            DEVICE.generator = kwargs.pop("generator")
            try:
                return function(*args, **kwargs)
            finally:
                DEVICE.generator = DEVICE.default_generator
        if kwargs.pop("pin_memory", False):
            return pin(function(*args, **kwargs))
        if name == "pin_memory":
            return pin(args[0].clone())
        if name == "is_pinned":
            return is_pinned(args[0])
        if name == "cuda" or (name == "to" and self.names_device(args[1:], kwargs)):
            given = [x for x in (*args[1:], kwargs.get("dtype")) if isinstance(x, torch.dtype)]
            moved = to_device(args[0], kwargs.get("non_blocking", False), *given)
            return moved.clone() if moved is args[0] and kwargs.get("copy") else moved
        if is_cuda(kwargs.get("device")):
            if name in ("as_tensor", "asarray") and isinstance(args[0], DeviceTensor):
                return args[0]
            if name in ("tensor", "as_tensor", "asarray"):
                return to_device(function(*args, **kwargs | {"device": CPU}))
            return function(*args, **kwargs | {"device": META})
        return function(*args, **kwargs)

    @staticmethod
    def names_device(args, kwargs):
        given = [*args, kwargs.get("device"), kwargs.get("other")]
        return any(isinstance(x, DeviceTensor) or is_cuda(x) for x in given)


class Operators(TorchDispatchMode):
    """Intercepts operators that create tensors on the device, also within autograd's formulas."""

    _should_skip_dynamo = classmethod(lambda cls: False)  # it takes time at each call, and Dynamo is not used here

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(isinstance(x, DeviceTensor) for x in tensors_in((*args, *kwargs.values()))):
            return dispatch(operator, args, kwargs)
        device = kwargs.get("device")
        if device is None or torch.device(device).type != "meta":
            return operator(*args, **kwargs)
        kind, random_numbers, _ = traits(operator)
        return launch(operator, args, kwargs, kind, random_numbers)


def outside(function):
    """`function` as without an emulated device, for code that uses C++'s meta device itself."""

    def call(*args, **kwargs):
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def emulated_cuda(late=True, seed=0, draws_like_cpu=False):
    """Context manager with an emulated CUDA device; yields the `Device`.

    `late`: operators run when the host waits for them instead of at launch. `seed` determines the order of streams that
    do not wait for each other. `draws_like_cpu`: random operators draw the same numbers as on the CPU, to compare runs;
    not with `late` or graphs.
    """
    global DEVICE
    outer = DEVICE
    DEVICE = device = Device(late, seed, draws_like_cpu)
    device.current = device.default = Stream()
    device.allocator = Stream()
    stand_ins = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": is_cuda,  # raises an error for any other device
        "get_device_name": lambda device=None: "emulated CUDA device",
        "mem_get_info": lambda device=None: (2**34, 2**34),
        "empty_cache": lambda: None,
        "synchronize": device.synchronize,
        "Stream": Stream,
        "Event": Event,
        "stream": device.stream,
        "current_stream": device.current_stream,
        "default_stream": lambda _=None: device.default,
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "graph_pool_handle": Pool,
        "is_current_stream_capturing": lambda: device.capture is not None and device.current in device.capture.streams,
        "get_rng_state": device.get_rng_state,
        "set_rng_state": device.set_rng_state,
        "get_rng_state_all": lambda: [device.get_rng_state()],
        "set_rng_state_all": lambda states: device.set_rng_state(*states),
        "manual_seed": device.manual_seed,
        "manual_seed_all": device.manual_seed,  # torch.manual_seed calls it
        "set_sync_debug_mode": device.set_sync_debug_mode,
    }
    saved = {name: getattr(torch.cuda, name) for name in stand_ins}
    export, from_dlpack, generator = torch.export.export, torch.from_dlpack, torch.Generator
    for name, stand_in in stand_ins.items():
        setattr(torch.cuda, name, stand_in)
    torch.export.export = outside(export)
    torch.from_dlpack = lambda x: x.detach() if isinstance(x, DeviceTensor) else from_dlpack(x)
    torch.Generator = AnyGenerator("Generator", (), {})
    try:
        with Functions(), Operators():
            yield device
    finally:
        DEVICE = outer
        torch.export.export, torch.from_dlpack, torch.Generator = export, from_dlpack, generator
        for name, original in saved.items():
            setattr(torch.cuda, name, original)
