"""Draw what the network of PPO for Atari gets as input: the four stacked frames of a few steps of a game.

    python -m benchmark.report.contact_sheet doc/artifacts/breakout_inputs.png --env-id Breakout-v5 --seed 6

A uniform random policy plays one game. The rows are the last step of each kind in it (of ordinary play, the one in
which most moves), from top to bottom as they were played; a fifth column shows what has moved. What does not happen in
the game has no row: try another seed.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from matplotlib.figure import Figure

from benchmark.arguments import parse
from instruments.frames import difference
from leanrl import ppo_atari_envpool as script

CHANGE = "newest - oldest\nred brighter, blue darker"
COLUMNS = ("channel 0\noldest", "channel 1", "channel 2", "channel 3\nnewest", CHANGE)
GAP = 4  # grey pixels on each side of a frame
SCALE = 2  # pixels of the picture for one of a frame, both ways
LEFT, TOP = 150, 50  # pixels of the picture for the labels
DPI = 100


@dataclass
class Args:
    output: tyro.conf.Positional[Path]
    """PNG file to write"""
    env_id: str = "Breakout-v5"
    """Atari game, by envpool's name"""
    seed: int = 1
    """seed of the game and of the actions"""


def play(envs):
    """Play one game of `envs`, which has one, at random: labels and observations, (4, 84, 84), of steps in order.

    These are the last step of each kind, and of those in which nothing special happens the one in which most moves.
    """
    envs.reset()
    shown = {}
    step = most_moved = 0
    kind = None
    while kind != "reset: next game":
        step += 1
        obs, _, terminated, _, infos = envs.step(envs.action_space.sample())
        reward = infos["raw_rewards"][0]
        if infos["is_reset"][0]:
            kind = "reset: next game" if kind == "end of the game" else "reset: next life"
        elif infos["game_ended"][0]:
            kind = "end of the game"
        elif terminated[0]:
            kind = "life lost"
        elif reward:
            kind = "point"
        else:
            kind = "play"
            moved = np.count_nonzero(obs[0, 3] != obs[0, 0])
            if moved < most_moved:
                continue
            most_moved = moved
        shown.pop(kind, None)  # the new entry is the last one
        shown[kind] = (f"step {step}\n{kind}\nreward {reward:g}", obs[0])
    return list(shown.values())


def change(obs):
    """A picture, (84, 84, 3), of what changes from the oldest to the newest frame of `obs`, (4, 84, 84)."""
    return np.rint(255 * difference(obs[3], obs[0], 255)).astype(np.uint8)


def sheet(observations):
    """The frames of each observation, (4, 84, 84), from left to right, one row each: (height, width, 3), in bytes."""
    rows = []
    for obs in observations:
        frames = [np.stack((frame,) * 3, -1) for frame in obs]
        edges = ((GAP, GAP), (GAP, GAP), (0, 0))
        rows.append(np.hstack([np.pad(tile, edges, constant_values=225) for tile in [*frames, change(obs)]]))
    return np.vstack(rows)


def draw(labels, observations, output):
    """Write the sheet of `observations`, with a label for each row, as a picture."""
    image = sheet(observations)
    height, width = SCALE * image.shape[0], SCALE * image.shape[1]
    figure = Figure(((LEFT + width) / DPI, (TOP + height) / DPI), dpi=DPI)
    axes = figure.add_axes((LEFT / (LEFT + width), 0, width / (LEFT + width), height / (TOP + height)))
    axes.imshow(image, interpolation="nearest")
    axes.set_frame_on(False)
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    tile = 84 + 2 * GAP
    axes.set_xticks(tile * (np.arange(len(COLUMNS)) + 0.5), COLUMNS)
    axes.set_yticks(tile * (np.arange(len(labels)) + 0.5), labels)
    figure.savefig(output)


def main(args):
    settings = script.Args(env_id=args.env_id, num_envs=1)
    envs = script.AtariEnvs(settings, args.seed)
    envs.action_space.seed(args.seed)
    draw(*zip(*play(envs), strict=True), args.output)


if __name__ == "__main__":
    main(parse(Args, __doc__))
