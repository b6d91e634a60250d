"""The input of an Atari policy, drawn."""

import sys
from importlib.util import find_spec

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from common.arguments import stop
from instruments.instrument import Instrument
from instruments.playing import is_atari

STEPS = 8
FRAME_INCHES = 1.1


class FrameDump(Instrument):
    """Draws the input of the first convolution for consecutive steps of the first game, one row per step, at the start
    and then every `interval` environment steps.

    Frames are in the order of their channels, the newest last. Each row should equal the row above, shifted by one
    frame; a warning is printed if it does not.
    """

    def __init__(self, interval):
        self.interval = interval

    def prepare(self, script, args):
        super().prepare(script, args)
        if not is_atari(args.env_id):
            stop(f"--dump-frames {self.interval}: {args.env_id} is not an Atari game of envpool; leave this out")
        if not find_spec("matplotlib"):
            stop(f"--dump-frames {self.interval}: pip install matplotlib, or leave this out")

    def start(self, run):
        super().start(run)
        self.next = run.step + self.interval
        self.record()

    def log(self, losses):
        if self.run.step >= self.next and self.stacks is None:
            self.next = self.run.step + self.interval
            self.record()

    def record(self):
        """Keep the first game's observations of the next steps, then draw them."""
        step = self.run.envs.step
        self.stacks = []

        def recording(actions):
            results = step(actions)
            self.stacks.append((results[0][0].copy(), bool(results[-1]["is_reset"][0])))
            if len(self.stacks) == STEPS:
                self.run.envs.step = step
                self.finish()
                self.stacks = None
            return results

        self.run.envs.step = recording

    def finish(self):
        obs, resets = zip(*self.stacks, strict=True)
        policy, _ = self.run.learner.policy()
        inputs = first_inputs(policy, torch.as_tensor(np.stack(obs)))
        folder = self.run.folder / "frames"
        folder.mkdir(exist_ok=True)
        path = folder / f"{self.run.step}.png"
        draw(inputs, resets, path)
        if not in_order(inputs, resets):
            warning = f"warning: step {self.run.step}: frames are out of order: a step does not show those of the step"
            tqdm.write(f"{warning} before, moved by one channel; see {path}", file=sys.stderr)


def first_inputs(policy, obs):
    """The input, NumPy, of the first convolution of `policy` for `obs` (n, 4, 84, 84); without a convolution, `obs`."""
    seen = []
    convolutions = [module for module in policy.modules() if isinstance(module, nn.Conv2d)]
    if not convolutions:
        return obs.numpy()
    hook = convolutions[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        policy(obs)
    hook.remove()
    return seen[0].numpy()


def in_order(inputs, resets):
    """Whether most stacks (n, 4, ...) have the frames of the previous stack, one channel further toward the oldest.

    The first stack of an episode is ignored, and so are stacks in which nothing moves.
    """
    moves = [
        np.array_equal(after[:-1], before[1:])
        for before, after, reset in zip(inputs, inputs[1:], resets[1:], strict=False)
        if not reset and (after != after[:1]).any()
    ]
    return not moves or np.mean(moves) > 0.5


def difference(new, old, largest):
    """An image (height, width, 3) of the difference of two frames: white where equal, red where `new` is brighter.

    A change of `largest` has full color.
    """
    change = (new.astype(np.float32) - old) / largest
    brighter, darker = change.clip(0, 1), (-change).clip(0, 1)
    return 1 - np.stack((darker, brighter + darker, brighter), -1).clip(0, 1)


def draw(inputs, resets, path):
    """Write a sheet with a row for each of `inputs` (n, frames, height, width) and a column for each frame.

    An extra column shows the difference of the second newest frame and the newest frame of the row above. It is blank
    if the frames are in order.
    """
    from matplotlib.figure import Figure

    rows, columns = inputs.shape[:2]
    figure = Figure(figsize=(FRAME_INCHES * (columns + 2), FRAME_INCHES * (rows + 1)), layout="constrained")
    all_axes = figure.subplots(rows, columns + 1, squeeze=False)
    low, high = inputs.min(), inputs.max()
    largest = max(abs(low), abs(high), 1e-9)
    for row in range(rows):
        for column in range(columns):
            axes = all_axes[row, column]
            axes.imshow(inputs[row, column], cmap="gray", vmin=low, vmax=high, interpolation="nearest")
            axes.set(xticks=[], yticks=[])
        all_axes[row, 0].set_ylabel(f"step {row}\n(reset)" if resets[row] else f"step {row}")
        all_axes[row, columns].set(xticks=[], yticks=[])
        if row:
            change = difference(inputs[row, columns - 2], inputs[row - 1, columns - 1], largest)
            all_axes[row, columns].imshow(change, interpolation="nearest")
        else:
            all_axes[row, columns].set_axis_off()
    for column in range(columns):
        place = {0: "\noldest", columns - 1: "\nnewest"}.get(column, "\n")
        all_axes[0, column].set_title(f"channel {column}{place}", fontsize=9)
    explained = f"channel {columns - 2} less channel\n{columns - 1} of the row above:\nblank if in order"
    all_axes[0, columns].set_title(explained, fontsize=8)
    figure.suptitle(f"input of the first convolution: {low:.3g} to {high:.3g}", fontsize=10)
    figure.savefig(path, dpi=100)
