"""Whether the card, Triton and CUDA graphs work at all: a line of JSON for each, with seconds.

python -m benchmark.gpu_report.smoke
"""

import json
import time

import torch

from common.arguments import one_line


def card():
    x = torch.ones(64, 64, device="cuda")
    return [torch.cuda.get_device_name(), (x @ x).sum().item()]


def compiled():
    """The difference of a compiled sum from an eager one."""
    x = torch.linspace(0, 1, 1000, device="cuda")
    y = torch.compile(lambda x: (x.sin() * 2).sum(), options={"combo_kernels": True})(x)
    return (y - (x.sin() * 2).sum()).abs().item()


def captured():
    """The number of six calls that a captured function counts."""
    from tensordict.nn import CudaGraphModule

    total = torch.zeros((), device="cuda")
    count = CudaGraphModule(lambda: total.add_(1), warmup=3)
    for _ in range(6):
        count()
    return total.item()


def main():
    for function in (card, compiled, captured):
        begin = time.monotonic()
        try:
            says = function()
        except Exception as error:
            says = f"failed: {one_line(error)}"
        print(json.dumps({function.__name__: [says, round(time.monotonic() - begin, 1)]}), flush=True)


if __name__ == "__main__":
    main()
