"""What double-buffered games are worth while somebody else computes the actions: envpool's steps per second.

python benchmark/double_buffer.py --num-envs 8

Actions are random and come after a sleep that stands for the wait for a GPU. Compared are all games at once, two halves
by `send` and `recv` (what `--double-buffer` does), two halves in two Python threads, and one pool that hands out
whichever games are ready first, half of them at a time: its rollouts cannot be made again from the seed.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import envpool
import numpy as np
import tyro


@dataclass
class Args:
    env_id: str = "Breakout-v5"
    """Atari game, by envpool's name"""
    num_envs: int = 8
    """games, an even number"""
    waits: tuple[int, ...] = (0, 100, 300, 1000)
    """microseconds to sleep for the actions of a group of games"""
    seconds: float = 2.0
    """of a turn"""
    rounds: int = 3
    """turns of each, of which the median counts"""


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


def speed(games, args):
    """Steps of games per second, in a turn."""
    begin = time.perf_counter()
    steps = 0
    while (elapsed := time.perf_counter() - begin) < args.seconds:
        games.step(args.num_envs)
        steps += args.num_envs
    return steps / elapsed


def main(args):
    ways = (AtOnce, SendAndReceive, Threads, FirstReady)
    print("| wait, us | " + " | ".join(way.__name__ for way in ways) + " |")
    print("|---" * (1 + len(ways)) + "|")
    for wait in args.waits:
        games = [way(args, wait / 1e6) for way in ways]
        speeds = np.median([[speed(one, args) for one in games] for _ in range(args.rounds)], axis=0)
        print(f"| {wait} | " + " | ".join(f"{value:.0f} ({value / speeds[0]:.2f})" for value in speeds) + " |")


if __name__ == "__main__":
    main(tyro.cli(Args))
