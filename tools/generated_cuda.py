"""The code that torch.compile generates for a CUDA device: made, assembled and executed on a machine without one.

    code = cuda_code(graph, inputs)         # inductor's Python module and its Triton kernels, for an H100
    outputs = Program(code)(inputs)         # by the CPU: kernels by Triton's interpreter, library calls by torch
    python generated_cuda.py FOLDER         # all kernels in FOLDER/*.py to machine code, by the ptxas in triton's wheel

    with emulated_cuda(), compiled_for_cuda():
        train(...)                          # torch.compile makes programs that the emulated device queues and captures

Dynamo and AOTAutograd trace on the CPU. Inductor is given their graph with the devices replaced, and fake CUDA tensors
for inputs, while torch.cuda describes a card. A program's memory is NaN until it is written, and a kernel that reads or
writes beyond its tensors is an error. The interpreter needs TRITON_INTERPRET=1 in the environment before torch is
imported.

This file and emulated_cuda.py need nothing but torch and triton (`pip install --no-deps triton`): they can be copied.
"""

import copy
import linecache
import math
import os
import re
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import copy_context
from functools import partial
from pathlib import Path
from types import MethodType, SimpleNamespace
from unittest import mock

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # triton reads it when it is imported

import emulated_cuda
import numpy as np
import torch
import triton
import triton.language as tl
from emulated_cuda import DeviceTensor
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import compile_fx, graph
from torch._inductor.debug import DebugContext
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.runtime.hints import TRITON_MAX_BLOCK
from torch._inductor.select_algorithm import extern_kernels
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, interpreter

CARDS = {  # by compute capability: name, multiprocessors, shared memory of a block, L2 cache
    80: ("NVIDIA A100-SXM4-80GB", 108, 166912, 40 << 20),
    90: ("NVIDIA H100 80GB HBM3", 132, 232448, 50 << 20),
    100: ("NVIDIA B200", 148, 232448, 126 << 20),
}
CUDA = torch.device("cuda", 0)
CODES = {}  # that `cuda_code` has generated, by graph, inputs, card and options
KERNEL = re.compile(r"^(triton_\w+) = async_compile\.triton\('\w+', '''(.*?)''', device_str='cuda'\)", re.M | re.S)


def properties(capability):
    """What torch.cuda.get_device_properties says of a card."""
    name, multiprocessors, shared_memory, l2 = CARDS[capability]
    return SimpleNamespace(
        name=name,
        major=capability // 10,
        minor=capability % 10,
        multi_processor_count=multiprocessors,
        warp_size=32,
        total_memory=80 << 30,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=shared_memory,
        shared_memory_per_multiprocessor=shared_memory + 1024,
        L2_cache_size=l2,
        gcnArchName="",
        uuid="0",
        is_integrated=0,
    )


def copied(self, source, *args):
    """What copy_ returns, for fake CUDA tensors: outside of a FakeTensorMode torch would look for the device."""
    return self if self.device.type == "cuda" else torch.Tensor.copy_(self, source, *args)


@contextmanager
def described_card(capability):
    """Within it torch.cuda and triton describe a card, on which nothing can be launched."""
    card = properties(capability)
    target = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=0: 0,
    )
    of_torch = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_properties": lambda device=None: card,
        "get_device_capability": lambda device=None: (card.major, card.minor),
        "_lazy_init": lambda: None,
        "get_rng_state": lambda device=None: torch.zeros(0),
        "set_rng_state": lambda state, device=None: None,
        "synchronize": lambda device=None: None,
    }
    of_inductor = {
        "get_compute_capability": lambda device=None: capability,
        "is_triton_capable": lambda device=None: True,
        "raise_if_triton_unavailable": lambda device=None: None,
        "current_device": lambda: 0,
        "get_raw_stream": lambda index: 0,
        "get_device_properties": lambda device=None: card,
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(driver, "_active", target))
        for name, value in of_torch.items():
            stack.enter_context(mock.patch(f"torch.cuda.{name}", value))
        stack.enter_context(mock.patch("torch.version.cuda", "12.8"))
        for name, value in of_inductor.items():
            stack.enter_context(mock.patch.object(CudaInterface, name, staticmethod(value)))
        worker = staticmethod(of_inductor["get_device_properties"])
        stack.enter_context(mock.patch.object(CudaInterface.Worker, "get_device_properties", worker))
        stack.enter_context(mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None))
        stack.enter_context(mock.patch.object(compile_fx, "get_cuda_device_context", lambda gm: nullcontext()))
        stack.enter_context(mock.patch.object(FakeTensor, "copy_", copied, create=True))
        stack.enter_context(mock.patch("torch._C._select_conv_backend", cudnn))
        stack.enter_context(mock.patch("torch._C._conv_determine_backend_memory_format", cudnn_format))
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("torch.") and "has_triton" in vars(module):
                stack.enter_context(mock.patch.object(module, "has_triton", lambda: True))
        yield


def cudnn(*args, **kwargs):
    """The library that a card's convolutions take; a build of torch for the CPU would name another one."""
    return torch._C._ConvBackend.Cudnn


def cudnn_format(inputs, weight, backend=None):
    """The layout of what cuDNN returns."""
    formats = {torch._prims_common.suggest_memory_format(tensor) for tensor in (inputs, weight)}
    return torch.channels_last if torch.channels_last in formats else torch.contiguous_format


class Generated(BaseException):
    """Carries the code out of inductor, before it would be loaded."""


def cuda_code(gm, inputs, capability=90, options=None):
    """Inductor's Python module for a graph of aten operators: Triton kernels, and `call`, which launches them.

    `gm` is the graph that AOTAutograd gives to inductor on the CPU, `inputs` are its tensors. The code of
    a graph is generated once.
    """
    key = (gm.code, emulated_cuda.form(inputs), capability, str(options))
    if key not in CODES:
        CODES[key] = generate(gm, inputs, capability, options or {})
    return CODES[key]


def generate(gm, inputs, capability, options):
    """`cuda_code`, each time anew."""
    gm = copy.deepcopy(gm)
    for node in gm.graph.nodes:
        node.args = replace_devices(node.args)
        node.kwargs = replace_devices(node.kwargs)
    gm.recompile()

    def end_with_code(lowering):
        code, _ = lowering.codegen()
        raise Generated(getattr(code, "value", code))

    options = options | {"profile_bandwidth": True}  # tells how many bytes a kernel reads and writes
    with described_card(capability), torch._inductor.config.patch(options), FakeTensorMode() as mode:
        fakes = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=CUDA) if torch.is_tensor(x) else x
            for x in inputs
        ]
        constants = [name for name, _ in [*gm.named_parameters(), *gm.named_buffers()]]
        if constants:
            raise NotImplementedError(f"constants in the graph: {', '.join(constants)}")
        kwargs = {"cudagraphs": compile_fx.BoxedBool(False), "is_inference": True}
        compiler = compile_fx._InProcessFxCompile()
        tracing = torch._guards.tracing(torch._guards.TracingContext(mode))
        debug = V.set_debug_handler(DebugContext())
        with tracing, debug, mock.patch.object(graph.GraphLowering, "compile_to_module", end_with_code):
            try:
                compiler.codegen_and_compile(gm, fakes, [], kwargs)
            except Generated as generated:
                return generated.args[0]


def call_of(code):
    """The part of `cuda_code` that runs at each call, without comments."""
    return re.sub(r"^ *#.*\n", "", code[code.index("def call") :], flags=re.M)


def replace_devices(values):
    """Arguments of a node with the card for the CPU."""
    return torch.fx.node.map_aggregate(values, lambda x: CUDA if isinstance(x, torch.device) else x)


def assemble(path):
    """Make machine code of every kernel in a file that holds `cuda_code`; returns their number.

    This is done as on a card, with all the block sizes that inductor would try: a kernel that does not fit is an error.
    """
    from torch._inductor.codecache import PyCodeCache

    code = path.read_text()
    capability = int(re.search(r"cc=(\d+)", code)[1])
    kernels = KERNEL.findall(code)
    with described_card(capability):
        for name, source in kernels:
            kernel = getattr(PyCodeCache.load(source), name)
            kernel.precompile(warm_cache_only=True)
            assert kernel.compile_results, name
    return len(kernels)


FUNCTIONS = {
    "abs": np.abs,
    "ceil": np.ceil,
    "cos": np.cos,
    "div_rn": np.divide,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "floor": np.floor,
    "isinf": np.isinf,
    "isnan": np.isnan,
    "log": np.log,
    "log1p": np.log1p,
    "log2": np.log2,
    "mul_rn": np.multiply,
    "nearbyint": np.rint,
    "pow": np.power,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "trunc": np.trunc,
}


class Math:
    """CUDA's libdevice, by NumPy."""

    def __getattr__(self, name):
        def call(*args):
            dtype = args[0].dtype
            data = np.asarray(FUNCTIONS[name](*(x.handle.data for x in args))).astype(args[0].handle.data.dtype)
            form = tl.block_type(dtype, list(data.shape)) if args[0].type.is_block() else dtype
            return tl.core.tensor(interpreter.TensorHandle(data, dtype), form)

        return call


class CheckedMemory:
    """Lets Triton's interpreter load and store within the tensors of the kernel alone."""

    def __init__(self):
        self.ranges = np.empty((0, 2), np.int64)
        for name in ("create_masked_load", "create_masked_store"):
            setattr(interpreter.InterpreterBuilder, name, self.checked(getattr(interpreter.InterpreterBuilder, name)))

    def checked(self, access):
        def call(builder, pointers, *args):
            mask = args[1] if "store" in access.__name__ else args[0]
            size = pointers.get_element_ty().primitive_bitwidth // 8
            self.check(pointers.data[np.broadcast_to(mask.data, pointers.data.shape)].astype(np.int64), size)
            return access(builder, pointers, *args)

        call.__name__ = access.__name__
        return call

    def check(self, addresses, size):
        if not addresses.size:
            return
        first, last = addresses.min(), addresses.max() + max(size, 1)
        if ((self.ranges[:, 0] <= first) & (last <= self.ranges[:, 1])).any():  # of one tensor, as almost always
            return
        for begin, end in self.ranges:
            addresses = addresses[(addresses < begin) | (addresses + max(size, 1) > end)]
        if addresses.size:
            raise IndexError(f"{addresses.size} addresses are outside of the kernel's tensors")

    @contextmanager
    def only(self, tensors):
        """Within it only the memory of these tensors may be used."""
        storages = [tensor.untyped_storage() for tensor in tensors]
        ranges = {(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages}
        outer, self.ranges = self.ranges, np.array(sorted(ranges), np.int64).reshape(-1, 2)
        try:
            yield
        finally:
            self.ranges = outer


class Kernel:
    """A Triton kernel that the interpreter runs, in few blocks: it takes as long for large ones."""

    def __init__(self, name, source):
        if not INTERPRETED:
            raise RuntimeError(
                "kernels are run by Triton's interpreter: set TRITON_INTERPRET=1 before the program starts"
            )
        heuristics = SimpleNamespace(inductor_meta=None)
        kinds = ("pointwise", "reduction", "persistent_reduction", "foreach")
        recorded = SimpleNamespace(**{kind: self.recorder(heuristics) for kind in kinds})
        source = re.sub(r"^triton_helpers\.set_driver_to_gpu\(\)$", "", source, flags=re.M)
        source = re.sub(r"^@triton_heuristics\.", "@triton_heuristics_recorded.", source, flags=re.M)
        self.fixed_blocks, source = with_large_blocks(source)
        file = f"<{name} {id(self)}>"  # under which triton finds the source
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        namespace = {"triton_heuristics_recorded": recorded, "__name__": name, "__file__": file}
        exec(compile(source, file, "exec"), namespace)
        self.source = source
        self.function = namespace[name]
        self.meta = heuristics.inductor_meta
        self.names = self.function.arg_names

    @staticmethod
    def recorder(heuristics):
        def decorator(inductor_meta=None, **rest):
            heuristics.inductor_meta = inductor_meta
            return lambda function: function

        return decorator

    def run(self, *args, stream=None):
        given = dict(zip(self.names, args, strict=False))
        reduces = "r0_numel" in given
        blocks = {}
        for name in self.names[len(args) :]:
            numels = self.numels(name.lower().replace("block", "numel"), given)
            has_mask = f"{name[:-5].lower()}mask = tl.full(" not in self.source
            largest = triton.next_power_of_2(max(numels))
            if not has_mask:  # any block that a card may choose has to divide, and so may a larger one
                divisor = math.gcd(*numels)
                largest = max(divisor & -divisor, min(largest, TRITON_MAX_BLOCK[name.removesuffix("BLOCK")]))
            blocks[name] = min(largest, 1024 if reduces else 2**18)
        while math.prod(blocks.values()) > 2**20:  # the most that Triton takes
            blocks[max(blocks, key=blocks.get)] //= 2
        sizes = blocks | self.fixed_blocks
        grid = triton_heuristics.GridExpr.from_meta(self.meta, sizes).eval_slow(given | sizes)
        with MEMORY.only([x for x in args if torch.is_tensor(x)]):
            self.function[grid](*args, **blocks)

    def numels(self, name, given):
        """The number of elements along an axis; several where inductor has combined kernels."""
        if name in given:
            return [given[name]]
        return [numel for key, numel in self.meta["combo_grid_meta"].items() if key.startswith(f"{name}_")]


def with_large_blocks(source):
    """A kernel for a `_foreach_` operator, whose blocks have a fixed size, with larger blocks: their size, the source.

    They have to divide each tensor for which there is no mask.
    """
    fixed = "XBLOCK: tl.constexpr = 1024"
    if fixed not in source:
        return {}, source
    parts = re.findall(r"^ +xnumel = (\d+)\n.*?xmask = (tl\.full)?", source, re.M | re.S)
    block = triton.next_power_of_2(max(int(numel) for numel, _ in parts))
    divisor = math.gcd(*(int(numel) for numel, unmasked in parts if unmasked))
    block = min(block, divisor & -divisor or block, 2**18)
    return {"XBLOCK": block}, source.replace(fixed, f"XBLOCK: tl.constexpr = {block}")


class Libraries:
    """cuBLAS and cuDNN by the CPU's libraries, with the layouts that they would return."""

    def __getattr__(self, name):
        return getattr(extern_kernels, name)

    def convolution(self, inputs, weight, *args, **kwargs):
        result = extern_kernels.convolution(inputs, weight, *args, **kwargs)
        return result.contiguous(memory_format=cudnn_format(inputs, weight))

    def convolution_backward(self, gradient, inputs, weight, *args):
        results = torch.ops.aten.convolution_backward.default(gradient, inputs, weight, *args)
        form = cudnn_format(inputs, weight)
        return tuple(x.contiguous(memory_format=form) if x is not None and x.dim() == 4 else x for x in results)


def empty_strided(shape, stride, dtype):
    memory = torch.empty_strided(shape, stride, dtype=dtype)
    emulated_cuda.poison(memory)
    return memory


def function(code, kernels, libraries, empty_strided, device="cpu"):
    """A module of `cuda_code` as a function of a list of tensors on another device, with its kernels by name."""
    replacements = {
        "torch.cuda._DeviceGuard(0)": "nullcontext()",
        "torch.cuda.set_device(0)": "pass",
        "get_raw_stream(0)": "0",
        "device='cuda:0'": f"device='{device}'",
        "device(type='cuda', index=0)": f"device('{device}')",
        "torch.ops.aten.convolution_backward.default(": "extern_kernels.convolution_backward(",
    }
    code = KERNEL.sub("", code)
    code = re.sub(r"^async_compile\.wait.*$|^.*import _cuda_getCurrentRawStream.*$", "", code, flags=re.M)
    for on_cuda, here in replacements.items():
        code = code.replace(on_cuda, here)
    namespace = {"nullcontext": nullcontext}
    exec(compile(code, "<generated for CUDA>", "exec"), namespace)
    namespace.update(kernels, extern_kernels=libraries, empty_strided_cuda=empty_strided)
    return lambda inputs: namespace["call"](list(inputs))


class Program:
    """A module of `cuda_code` as a function of a list of tensors on the CPU, which it may change in place."""

    def __init__(self, code):
        kernels = {name: Kernel(name, source) for name, source in KERNEL.findall(code)}
        self.call = function(code, kernels, Libraries(), empty_strided)

    def __call__(self, inputs):
        return self.call(inputs)


class Costs:
    """What `cuda_code` launches, by name as in `emulated_cuda.cost`; "kernels" are inductor's.

    Stands in for the libraries, too.
    """

    def __init__(self):
        self.counts = Counter()
        self.libraries = Libraries()

    def kernel(self, source):
        nbytes = round(1e9 * float(re.search(r"'kernel_num_gb': ([\d.e-]+)", source)[1]))
        return SimpleNamespace(run=lambda *args, **kwargs: self.counts.update(kernels=1, bytes=nbytes))

    def __getattr__(self, name):
        def call(*args, **kwargs):
            results = getattr(self.libraries, name)(*args, **kwargs)
            self.counts.update(emulated_cuda.cost(name, args, results))
            return results

        return call


def launches(code, inputs):
    """What a call of `cuda_code` with tensors of these forms launches."""
    costs = Costs()
    kernels = {name: costs.kernel(source) for name, source in KERNEL.findall(code)}
    empty = partial(torch.empty_strided, device="meta")
    run = function(code, kernels, costs, lambda shape, stride, dtype: empty(shape, stride, dtype=dtype), "meta")
    with _disable_current_modes():
        run([empty(x.shape, x.stride(), dtype=x.dtype) if torch.is_tensor(x) else x for x in inputs])
    return costs.counts


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    triton_helpers.libdevice = triton_helpers.math = Math()
    MEMORY = CheckedMemory()
    # else it spends 40% of its time on overflow checks, whose results it drops outside of debug mode
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


class Compiled:
    """What torch.compile makes of a method on the emulated device: an operator that runs a `Program`.

    The method is traced on a twin of its object, whose tensors are on the CPU and share the emulated device's memory.
    Where its results can be differentiated, the backward pass is an operator, too.
    """

    def __init__(self, method, options, session):
        owner, self.weights = session.twin(method.__self__)
        options = dict(options)
        guards = options.pop("guard_filter_fn", None)
        self.name = method.__name__
        self.options = options
        self.session = session
        self.forms = {}  # what it returns, not computed, and its launches, by the form of its arguments
        self.function = torch.compile(
            MethodType(method.__func__, owner),
            fullgraph=True,
            backend=lambda gm, inputs: compile_fx.compile_fx(gm, inputs, inner_compile=self.compile),
            options=guards and {"guard_filter_fn": guards},
        )

    def __deepcopy__(self, memo):
        return self

    def compile(self, gm, inputs, is_backward=False, **rest):
        """Stands in for inductor: the graph of aten operators as a function of a list of tensors on the CPU."""
        outputs = [
            node.meta["val"] if isinstance(node, torch.fx.Node) else node for node in gm.graph.output_node().args[0]
        ]
        shapes = [(x.shape, x.stride(), x.dtype) if torch.is_tensor(x) else None for x in outputs]
        name = f"{self.name}_back" if is_backward else self.name
        code, program = self.session.program(name, gm, inputs, self.options)
        counts = launches(code, inputs)

        def call(inputs):
            self.launches = counts
            if self.session.dry:
                return [shape and torch.empty_strided(*shape[:2], dtype=shape[2]).zero_() for shape in shapes]
            return program(inputs)

        call._boxed_call = True
        return call

    def __call__(self, *args, **kwargs):
        call = Call(self, args, kwargs)
        needs = [tensor for tensor in (*call.tensors, *self.weights) if tensor.requires_grad]
        if call.differentiable and torch.is_grad_enabled():
            leaves = Differentiable.apply(call, *needs)
        else:
            leaves = call.forward()
        return tree_unflatten(leaves, call.structure)

    def traced(self, key, function):
        """What `function`, which calls the compiled one, would return, and what it launches; once for each `key`."""
        if key not in self.forms:
            self.forms[key] = self.session.trace(function), self.launches
        return self.forms[key]


class Call:
    """A call of a compiled function: its forward pass, and its backward pass where one is needed."""

    def __init__(self, compiled, args, kwargs):
        leaves, structure = tree_flatten((args, kwargs))
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, DeviceTensor)]
        if len(self.tensors) < sum(map(torch.is_tensor, leaves)):
            raise RuntimeError(f"{compiled.name} got a tensor on the host")
        self.compiled = compiled
        self.arguments = leaves, structure
        self.key = (structure, emulated_cuda.form(leaves), *[tensor.requires_grad for tensor in self.tensors])
        results, self.counts = compiled.traced(self.key, self.compute)
        self.forms, self.structure = tree_flatten(results)
        self.differentiable = any(torch.is_tensor(x) and x.requires_grad for x in self.forms)

    def compute(self):
        """Call the function on the CPU; keeps what a backward pass needs."""
        leaves, structure = self.arguments
        self.inputs = [on_the_cpu(tensor, {}) for tensor in self.tensors]
        inputs = iter(self.inputs)
        args, kwargs = tree_unflatten([next(inputs) if torch.is_tensor(x) else x for x in leaves], structure)
        results = self.compiled.function(*args, **kwargs)
        self.outputs = tree_leaves(results)
        return results

    def forward(self):
        """Queue the call; returns its results, a list."""
        return self.queue(self.forms, self.compute, self.counts, self.tensors)

    def backward(self, gradients):
        """Queue the backward pass, given the gradients of the results; those that are None do not count."""
        given = [i for i, gradient in enumerate(gradients) if gradient is not None]
        memory = [gradients[i].memory for i in given]

        def trace():
            call = copy.copy(self)
            call.compute()
            return call.compute_gradients(given, memory)

        forms, counts = self.compiled.traced((self.key, emulated_cuda.form(gradients)), trace)
        compute = partial(self.compute_gradients, given, memory)
        return self.queue(forms, compute, counts, [gradients[i] for i in given])

    def compute_gradients(self, given, gradients):
        """The gradients of all that needs one, given those of some results, by their numbers."""
        needs = [x for x in (*self.inputs, *self.compiled.weights.values()) if x.requires_grad]
        return torch.autograd.grad([self.outputs[i] for i in given], needs, gradients, allow_unused=True)

    def queue(self, forms, function, counts, tensors):
        """Queue what `function` computes from `tensors`; returns its results, tensors of these forms."""
        for tensor in tensors:
            tensor.block.touch()
        results = [emulated_cuda.allocate(x) if torch.is_tensor(x) else x for x in forms]

        def run():
            computed = self.compiled.session.run(function)
            for result, value in zip(results, tree_leaves(computed), strict=True):
                if torch.is_tensor(value):
                    result.memory.copy_(value.detach())

        emulated_cuda.DEVICE.enqueue(run, counts=counts)
        return results


class Differentiable(torch.autograd.Function):
    """A `Call` for autograd."""

    @staticmethod
    def forward(ctx, call, *needs):
        ctx.call = call
        ctx.set_materialize_grads(False)
        results = call.forward()
        pairs = zip(results, call.forms, strict=True)
        ctx.mark_non_differentiable(*[x for x, form in pairs if torch.is_tensor(x) and not form.requires_grad])
        return tuple(results)

    @staticmethod
    def backward(ctx, *gradients):
        return None, *ctx.call.backward(gradients)


class Session:
    """Programs that were generated, by the name of the function, and how they differ from what torch computes.

    Tracing needs a thread of its own, in which the emulated device's modes are not active.
    """

    def __init__(self, capability, check, execute, edit):
        self.capability = capability
        self.check = check
        self.execute = execute
        self.edit = edit
        self.thread = ThreadPoolExecutor(1)
        self.twins = {}
        self.graphs = []  # (name, graph, its inputs, options)
        self.codes = []  # (name, code)
        self.errors = {}  # the largest ones, by name
        self.dry = False

    def twin(self, owner):
        """A copy of an object with its tensors on the CPU, in the memory of the emulated device.

        Also those tensors of the device that need gradients, each with the one on the CPU.
        """
        if id(owner) not in self.twins:
            itself = lambda x, memo: x  # noqa: E731
            weights = {}

            def copied(tensor, memo):
                memory = on_the_cpu(tensor, memo)
                if tensor.requires_grad:
                    weights[tensor] = memory
                return memory

            with ExitStack() as stack:
                stack.enter_context(mock.patch.object(DeviceTensor, "__deepcopy__", copied))
                for kind in (emulated_cuda.Event, emulated_cuda.Stream):
                    stack.enter_context(mock.patch.object(kind, "__deepcopy__", itself, create=True))
                dispatch = {torch.device: lambda x, memo: torch.device("cpu")}
                stack.enter_context(mock.patch.dict(copy._deepcopy_dispatch, dispatch))
                self.twins[id(owner)] = owner, copy.deepcopy(owner), weights
        return self.twins[id(owner)][1:]

    def trace(self, function):
        """What a function returns where compiled ones are traced and not computed."""
        self.dry = True
        try:
            with mock.patch("torch.cuda.is_available", lambda: False):
                return self.run(function)
        finally:
            self.dry = not self.execute

    def run(self, function):
        """Call a function in the thread, with this thread's settings of torch's compiler."""
        return self.thread.submit(copy_context().run, function).result()

    def program(self, name, gm, inputs, options):
        """The code of a graph, and the `Program`."""
        code = self.edit(cuda_code(gm, inputs, self.capability, options))
        self.graphs.append((name, gm, inputs, options))
        self.codes.append((name, code))
        if not self.execute:
            return code, None
        program = Program(code)
        return code, self.checked(name, program, gm) if self.check else program

    def for_cards(self, *capabilities):
        """The code of the same functions for other cards, as in `codes`."""
        return [
            (name, cuda_code(gm, inputs, capability, options))
            for capability in capabilities
            for name, gm, inputs, options in self.graphs
        ]

    def checked(self, name, program, gm):
        """`program`, whose results are compared with those of the graph's operators in float32 and in float64."""
        exact_gm = in_double(gm)

        def call(inputs):
            single = [same_layout(x) for x in inputs]
            double = [same_layout(x, {torch.float32: torch.float64}) for x in inputs]
            wanted = [*gm(*single), *single]
            with default_dtype(torch.float64):
                exact = [*exact_gm(*double), *double]
            results = program(inputs)
            compared = zip([*results, *inputs], wanted, exact, strict=True)
            error = max(error_beyond_rounding(*tensors) for tensors in compared)
            self.errors[name] = max(error, self.errors.get(name, 0.0))
            return results

        return call


def in_double(gm):
    """A graph that computes in float64 what `gm` computes in float32."""
    gm = copy.deepcopy(gm)
    double = lambda x: torch.float64 if x is torch.float32 else x  # noqa: E731
    for node in gm.graph.nodes:
        node.args = torch.fx.node.map_aggregate(node.args, double)
        node.kwargs = torch.fx.node.map_aggregate(node.kwargs, double)
    gm.recompile()
    return gm


def error_beyond_rounding(got, wanted, exact):
    """The distance of `got` from `exact` beyond ten times that of torch's float32, relative to the largest number.

    So code that rounds as float32 does has an error of 0, also where large numbers cancel. Where a tensor has less than
    100 numbers, the rounding of all may be small by chance: they are taken to be at least 0.1.
    """
    if not torch.is_tensor(got) or not got.numel():
        return 0.0
    undefined = wanted.isnan() & got.isnan()  # memory that nobody has written
    got, wanted, exact = (tensor.double().masked_fill(undefined, 0.0) for tensor in (got, wanted, exact))
    if got.isnan().any():
        return float("inf")
    rounding = (wanted - exact).abs().max()
    error = (got - exact).abs().max() - 10 * rounding
    return float(error.clamp(min=0.0) / exact.abs().max().clamp(min=0.1 if got.numel() < 100 else 1e-30))


def on_the_cpu(tensor, memo):
    """The memory of a tensor of the emulated device."""
    memory = tensor.memory.detach().requires_grad_(tensor.requires_grad)
    if isinstance(tensor, torch.nn.Parameter):
        memory = torch.nn.Parameter(memory, requires_grad=tensor.requires_grad)
    memo[id(tensor)] = memory
    return memory


def same_layout(x, dtypes=None):
    """A copy of a tensor with its strides; other arguments as they are."""
    if not torch.is_tensor(x):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=(dtypes or {}).get(x.dtype, x.dtype)).copy_(x)


@contextmanager
def default_dtype(dtype):
    outer = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(outer)


@contextmanager
def compiled_for_cuda(capability=90, check=False, execute=True, edit=lambda code: code):
    """Within it torch.compile makes `Program`s for the emulated device; yields the `Session`.

    `check` compares what they compute with what torch computes; without `execute` they are generated, and
    return zeros. `edit` changes the code.
    """
    session = Session(capability, check, execute, edit)
    compile = torch.compile

    def stand_in(function, *, options=None, **kwargs):
        if "backend" in kwargs:
            return compile(function, options=options, **kwargs)
        return Compiled(function, options or {}, session)

    torch._dynamo.reset()  # sizes that it has seen before would become symbols
    no_cache = torch._functorch.config.patch(enable_autograd_cache=False)  # it holds code for the CPU
    with mock.patch("torch.compile", stand_in), no_cache:
        yield session


if __name__ == "__main__":
    for path in sorted(Path(sys.argv[1]).glob("*.py")):
        print(f"{path.stem}: {assemble(path)} kernels", flush=True)
