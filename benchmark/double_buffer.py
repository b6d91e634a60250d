"""What double-buffered games are worth while somebody else computes the actions: envpool's steps per second.

python benchmark/double_buffer.py  # measure; report.py makes the table of doc/ppo.md

Actions are random and come after a sleep that stands for the wait for a GPU. Compared are all games at once, two halves
by `send` and `recv` (what `--double-buffer` does), two halves in two Python threads, and one pool that hands out
whichever games are ready first, half of them at a time: its rollouts cannot be made again from the seed.
"""

import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import envpool
import numpy as np
import tyro
from machine import describe, machine, slug, store
from run import spread

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Args:
    env_id: str = "Breakout-v5"
    """Atari game, by envpool's name"""
    num_envs: int = 8
    """games, an even number"""
    waits: tuple[int, ...] = (0, 300, 1000)
    """microseconds to sleep for the actions of a group of games"""
    seconds: float = 2.0
    """of a turn"""
    rounds: int = 3
    """turns of each, of which the median counts"""
    results: Path = ROOT / "results"
    """folder that receives <machine>/double_buffer.json"""


class Games:
    """One or two pools of games, and actions for them, each after a sleep of `wait` seconds."""

    def __init__(self, args, groups, wait, **settings):
        size = args.num_envs // groups
        kind = {"env_type": "gymnasium", "episodic_life": True, "reward_clip": True}
        pools = [envpool.make(args.env_id, num_envs=size, seed=i * size, **kind, **settings) for i in range(groups)]
        self.pools = pools
        self.num_actions = pools[0].action_space.n
        self.generator = np.random.default_rng(0)
        self.wait = wait

    def act(self, count):
        if self.wait:
            time.sleep(self.wait)
        return self.generator.integers(0, self.num_actions, count, np.int32)


class AtOnce(Games):
    def __init__(self, args, wait):
        super().__init__(args, 1, wait)
        self.pools[0].reset()

    def step(self, count):
        self.pools[0].step(self.act(count))


class SendAndReceive(Games):
    def __init__(self, args, wait):
        super().__init__(args, 2, wait)
        for pool in self.pools:
            pool.reset()
            pool.send(self.act(args.num_envs // 2))

    def step(self, count):
        for pool in self.pools:
            pool.recv()
            pool.send(self.act(count // 2))


class Threads(Games):
    def __init__(self, args, wait):
        super().__init__(args, 2, wait)
        self.executor = ThreadPoolExecutor(2)
        self.steps = [self.executor.submit(pool.reset) for pool in self.pools]

    def step(self, count):
        for i, pool in enumerate(self.pools):
            self.steps[i].result()
            self.steps[i] = self.executor.submit(pool.step, self.act(count // 2))


class FirstReady(Games):
    def __init__(self, args, wait):
        super().__init__(args, 1, wait, batch_size=args.num_envs // 2)
        self.pools[0].async_reset()

    def step(self, count):
        for _ in range(2):
            *_, infos = self.pools[0].recv()
            self.pools[0].send(self.act(count // 2), infos["env_id"])


WAYS = {
    "all at once": AtOnce,
    "two halves, `send` and `recv`": SendAndReceive,
    "two halves, threads": Threads,
    "whichever games are ready first, half as many at a time": FirstReady,
}


def speed(games, args):
    """Steps of games per second, in a turn."""
    begin = time.perf_counter()
    steps = 0
    while (elapsed := time.perf_counter() - begin) < args.seconds:
        games.step(args.num_envs)
        steps += args.num_envs
    return steps / elapsed


def table(results):
    """A Markdown table for each machine that has been measured: steps per second, and ratios to all games at once."""
    head = f"| sleep for a group's actions, us | {' | '.join(WAYS)} |\n|---|---|---|---|---|"
    parts = []
    for path in sorted(results.glob("*/double_buffer.json")):
        data = json.loads(path.read_text())
        lines = [head]
        for wait, speeds in data["steps_per_second"].items():
            base, *others = (speeds[way] for way in WAYS)
            cells = [f"{statistics.median(base):.0f}"]
            for own in others:
                ratios = [fast / slow for fast, slow in zip(own, base, strict=True)]
                cells.append(f"{statistics.median(own):.0f}, {spread(ratios, '{:.2f}')}")
            lines.append(f"| {wait} | {' | '.join(cells)} |")
        parts += [f"{data['num_envs']} games of {data['env_id']}, {describe(data['machine'])}:", "\n".join(lines)]
    return "\n\n".join(parts or [head + "\n| all | not measured | | | |"])


def main(args):
    this = machine()
    measured = {}
    for wait in args.waits:
        games = {name: way(args, wait / 1e6) for name, way in WAYS.items()}
        turns = [{name: speed(one, args) for name, one in games.items()} for _ in range(args.rounds)]
        measured[wait] = {name: [turn[name] for turn in turns] for name in games}
    path = args.results / slug(this) / "double_buffer.json"
    store(path, {"env_id": args.env_id, "num_envs": args.num_envs, "machine": this, "steps_per_second": measured})
    print(table(args.results))


if __name__ == "__main__":
    main(tyro.cli(Args))
