"""Tips for eager code: two ways to compute the same, both timed on one thread.

    python -m benchmark.studies.tips                 # all of them; two minutes
    python -m benchmark.studies.tips --tips no_item  # one
    python -m benchmark.report                       # put them into doc/tricks.md

A tip is a function in this file. It returns two functions, before and after, which take no arguments and return the
same numbers.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from benchmark import editions
from benchmark.results import RESULTS, path_here, read, store
from benchmark.studies.timing import DEVICE, interleaved_times
from common.arguments import check, distinct, from_low, parse
from common.folders import writable
from common.machine import machine
from common.tables import Table, spread


def device_creation():
    """Create tensors on the device instead of moving them there from the host."""
    return lambda: torch.zeros(256, 64).to(DEVICE), lambda: torch.zeros(256, 64, device=DEVICE)


def pinned_memory():
    """Copy the inputs of each step to the device from reused pinned memory, without waiting."""
    pageable = torch.ones(8, 4, 84, 84, dtype=torch.uint8)
    pinned = torch.ones_like(pageable, pin_memory=DEVICE.type == "cuda")
    arrived, arrived_later = (torch.zeros_like(pageable, device=DEVICE) for _ in range(2))
    return lambda: arrived.copy_(pageable), lambda: arrived_later.copy_(pinned, non_blocking=True)


def no_item():
    """Add up losses on the device and read them once, instead of calling `.item()` after each minibatch."""
    rows = torch.linspace(0, 1, 256 * 16, device=DEVICE).view(16, 256)

    def before():
        total = 0.0
        for values in rows:
            total += values.square().mean().item()
        return total

    def after():
        total = torch.zeros((), device=DEVICE)
        for values in rows:
            total += values.square().mean()
        return total.item()

    return before, after


def train_eval():
    """Omit `eval()` and `train()` around each action if a network has neither dropout nor batch normalization."""
    network = small_network()
    obs = torch.ones(1, 17, device=DEVICE)

    @torch.no_grad()
    def before():
        network.eval()
        actions = network(obs)
        network.train()
        return actions

    @torch.no_grad()
    def after():
        return network(obs)

    return before, after


def kept_parameters():
    """Look up objects once, outside of the loop: here the parameters, for which `parameters()` searches."""
    network = small_network()
    parameters = list(network.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)

    def before():
        for parameter in network.parameters():
            parameter.grad.fill_(1)
        return nn.utils.clip_grad_norm_(network.parameters(), 0.5)

    def after():
        for parameter in parameters:
            parameter.grad.fill_(1)
        return nn.utils.clip_grad_norm_(parameters, 0.5)

    return before, after


def in_place():
    """Move a target network in place with one `lerp_`, instead of computing a sum in a new tensor."""
    weights = torch.linspace(-1, 1, 2 * 73_000, device=DEVICE)  # of both critics of SAC
    target, moved_in_place = (torch.zeros_like(weights) for _ in range(2))
    return lambda: target.copy_(0.005 * weights + 0.995 * target), lambda: moved_in_place.lerp_(weights, 0.005)


def channels_last():
    """Store images with their channels last in memory, for convolutions on a CPU."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(4, 32, 8, stride=4),
        nn.ReLU(),
        nn.Conv2d(32, 64, 4, stride=2),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, stride=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(3136, 512),
        nn.ReLU(),
        nn.Linear(512, 6),
    ).to(DEVICE)
    parameters = list(network.parameters())
    images = torch.linspace(0, 1, 64 * 4 * 84 * 84, device=DEVICE).view(64, 4, 84, 84)
    images_channels_last = images.contiguous(memory_format=torch.channels_last)

    def norm_of_gradient(images):
        gradients = torch.autograd.grad(network(images).square().mean(), parameters)
        return torch.stack([gradient.norm() for gradient in gradients]).norm().detach()

    return lambda: norm_of_gradient(images), lambda: norm_of_gradient(images_channels_last)


def small_network():
    torch.manual_seed(0)
    layers = (nn.Linear(17, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 6))
    return nn.Sequential(*layers).to(DEVICE)


TIPS = (device_creation, pinned_memory, no_item, train_eval, kept_parameters, in_place, channels_last)
TIPS = {tip.__name__: tip for tip in TIPS}
NEED_CUDA = ("device_creation", "pinned_memory", "no_item")  # on a CPU nobody waits


@dataclass
class Args:
    tips: tuple[str, ...] = tuple(TIPS)
    """tips to measure"""
    rounds: int = 9
    """rounds of both ways, of which the median is taken"""
    seconds: float = 0.2
    """approximate duration of each way per round"""
    results: Path = RESULTS
    """folder that receives <machine>/tips/<name>.json"""


def ratios(taken):
    return [before / after for before, after in zip(taken["before"], taken["after"], strict=True)]


def worth(path):
    """The ratio in one result, as text."""
    return spread(ratios(read(path)["seconds"]), "{:.2f}") if path.exists() else "not measured"


def table(results):
    """A Markdown table of all tips, with a column for each machine that has been measured."""
    folders = sorted(results.glob("*/tips"))
    rows = []
    for name, tip in TIPS.items():
        cells = [worth(folder / f"{name}.json") for folder in folders] or ["not measured"]
        rows.append([tip.__doc__, *cells])
    return Table("", ("tip", *([folder.parent.name for folder in folders] or ["worth"])), rows).markdown()


def main(args):
    check("tips", args.tips, TIPS)
    distinct(args, "tips")
    from_low(1, args, "rounds")
    from_low(0, args, "seconds")
    writable("results", args.results)
    torch.set_num_threads(1)
    for name in args.tips:
        if name in NEED_CUDA and DEVICE.type != "cuda":
            print(f"{name}: not measured, it needs a CUDA device")
            continue
        taken = interleaved_times(dict(zip(("before", "after"), TIPS[name](), strict=True)), args.rounds, args.seconds)
        print(f"{name} on {DEVICE.type}: ratio {spread(ratios(taken), '{:.2f}')}", flush=True)
        data = {"device": DEVICE.type, "seconds": taken, "machine": machine()} | editions.today(Path(__file__))
        store(path_here(args.results, "tips", name), data)


if __name__ == "__main__":
    main(parse(Args, __doc__))
