"""How long an H100-class GPU computes what was counted: an estimate from published constants and two assumptions.

    us = device_us({"nodes": 100, "bytes": 40e6, "matmul 2x256x256x256": 6}, BEST)
    python -m benchmark.studies.gpu_model  # on a GPU: measure what the model assumes

A card runs the nodes of a CUDA graph one after the other. Each takes a fixed time, and its bytes take time on their
way through the L2 cache, which holds all that a step touches. A matmul takes as long as its tiles do: each is computed
by one multiprocessor, and as many at a time as there are multiprocessors.

The fixed time and the bandwidth are measured by others, on an H200, which has the H100's multiprocessors and cache:
github.com/te42kyfo/gpu-benches, gpu-small-kernels/h200_graph.txt, where each of 10 000 kernels in a graph reads what
the one before has written. Those of 65 kB reach 29 GB/s, those of 7.16 MB 2031 GB/s: 2.26 us and 5.6 TB/s.

The rates are those of NVIDIA's H100 data sheet (SXM: 67 TFLOP/s in float32, 495 in TF32 without sparsity, 132
multiprocessors). Tiles and waves are explained in NVIDIA's Matrix Multiplication Background User's Guide. Which tile
cuBLAS takes, and how much of the rate is reached within it, is not published: `BEST` and `WORST` are assumptions, and
the reason why an estimate is a range. Copies to and from the host count as nodes, whatever their size.
"""

import math
from dataclasses import dataclass
from statistics import median

import torch

from benchmark.arguments import parse, stop

NODE_US = 2.26
BYTES_PER_US = 5.6e6
MULTIPROCESSORS = 132
LAUNCHED = ("operators", "nodes", "kernels", "fills", "h2d", "d2h")
RATES = {"float32": 67e6 / MULTIPROCESSORS, "TF32": 495e6 / MULTIPROCESSORS}  # operations in a us, of one of them


@dataclass
class Matmul:
    tile: int
    """rows and columns of the result that a multiprocessor computes at a time"""
    efficiency: float
    """the part of a multiprocessor's rate that is reached"""


BEST = Matmul(tile=32, efficiency=0.75)
WORST = Matmul(tile=64, efficiency=0.5)


def matmul_us(sizes, matmul, precision="float32"):
    """How long the arithmetic of a matmul takes; `sizes` are (batch, m, n, k)."""
    batch, m, n, k = sizes
    tiles = batch * math.ceil(m / matmul.tile) * math.ceil(n / matmul.tile)
    operations = 2 * matmul.tile**2 * k
    return math.ceil(tiles / MULTIPROCESSORS) * operations / (RATES[precision] * matmul.efficiency)


def device_us(counts, matmul, precision="float32"):
    """How long a card computes what was counted (see tests/cuda/emulated_cuda.py), in microseconds."""
    launched = sum(counts.get(name, 0) for name in LAUNCHED)
    arithmetic = 0.0
    for name, count in counts.items():
        if name.startswith("matmul "):
            sizes = map(int, name.removeprefix("matmul ").split("x"))
            arithmetic += count * matmul_us(sizes, matmul, precision)
    return launched * NODE_US + counts.get("bytes", 0) / BYTES_PER_US + arithmetic


@dataclass
class Args:
    repeat: int = 20
    """replays of each graph; their median counts"""


CHAIN = 1000  # nodes of a graph that is timed: so many that its launch does not count


def measured_us(function, repeat):
    """How long a node takes in a graph of CHAIN calls of `function`, in microseconds."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CHAIN):
            function()
    times = []
    for _ in range(repeat + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * begin.elapsed_time(end) / CHAIN)
    return median(times[1:])


def main(args):
    if not torch.cuda.is_available():
        stop("a CUDA device is what this measures, and there is none")
    print("| in a graph | assumed, us | measured, us |\n|---|---|---|")
    for count in (256, 250_000, 1_000_000):
        x = torch.ones(count, device="cuda")
        assumed = device_us({"nodes": 1, "bytes": 2 * x.nbytes}, BEST)
        measured = measured_us(lambda x=x: x.mul_(1), args.repeat)
        print(f"| {2 * x.nbytes} bytes, in place | {assumed:.2f} | {measured:.2f} |")
    for precision, setting in (("float32", "highest"), ("TF32", "high")):
        torch.set_float32_matmul_precision(setting)
        for sizes in ((1, 256, 256, 256), (2, 256, 256, 256), (1, 256, 12, 256), (1, 1, 256, 256)):
            batch, m, n, k = sizes
            a, b = torch.ones(batch, m, k, device="cuda"), torch.ones(batch, k, n, device="cuda")
            out = torch.empty(batch, m, n, device="cuda")
            name = "x".join(map(str, sizes))
            counts = {"nodes": 1, "bytes": a.nbytes + b.nbytes + out.nbytes, f"matmul {name}": 1}
            least, most = (device_us(counts, matmul, precision) for matmul in (BEST, WORST))
            measured = measured_us(lambda a=a, b=b, out=out: torch.bmm(a, b, out=out), args.repeat)
            print(f"| matmul {name}, {precision} | {least:.2f} to {most:.2f} | {measured:.2f} |")


if __name__ == "__main__":
    main(parse(Args, __doc__))
