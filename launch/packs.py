"""Runs of a population script, packed: one process trains several of them, an agent each.

Each run keeps the folder that it has without packing. There the folders of its agents are links, so that a report finds
them, and another pack can continue them.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property

from benchmark.arguments import refuse
from launch.orders import Order
from launch.worker import ORDER, done_step, link_agents, newest_checkpoint, step_of


@dataclass
class Pack:
    """Runs that one process makes. It takes the place of an `Order`."""

    members: list[Order]

    @property
    def steps(self):
        return self.members[0].steps

    @property
    def name(self):
        more = len(self.members) - 1
        return self.members[0].name + f" and {more} more" * bool(more)

    @cached_property
    def folder(self):
        names = "\n".join(str(order.folder) for order in self.members)
        return packs_folder(self.members) / hashlib.sha256(names.encode()).hexdigest()[:12]

    @property
    def flags(self):
        """One command line for all members: a flag in which they differ has a value for each."""
        words = []
        for own in zip(*(order.flags for order in self.members), strict=True):
            if own[0].startswith("--run-dir="):
                words.append(f"--run-dir={self.folder}")
            elif len(set(own)) == 1:
                words.append(own[0])
            else:
                words.append(own[0].split("=")[0])
                words += [word.split("=", 1)[1] for word in own]
        return words

    def message(self, session, environment, stop):
        """What the worker is sent."""
        return self.members[0].message(session, environment, stop) | {"folder": str(self.folder), "flags": self.flags}

    def place(self):
        """Make the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        members = [str(order.folder) for order in self.members]
        (self.folder / ORDER).write_text(json.dumps({"members": members}))


def packs_folder(orders):
    """Where the packs of a script are."""
    return orders[0].folder.parents[2] / "packs"


def check(agents, script):
    """Refuse a number of agents that the script cannot train at once."""
    if agents < 1:
        refuse("agents-per-run", agents, "give at least 1")
    if agents > 1 and not script.is_population:
        refuse("agents-per-run", agents, f"give a population script; {script.path.name} trains one agent")


def packed(orders, agents):
    """The same runs, for a population script in packs of at most `agents`; finished ones stay as they are.

    A pack's members have all flags in common but those of which each agent has its own, and have come equally far.
    """
    if not orders or not orders[0].script.is_population:
        return orders
    for path in packs_folder(orders).glob(f"*/{ORDER}"):
        link_agents(path.parent)  # of a pack that was killed
    finished = [order for order in orders if done_step(order.folder) >= order.steps]
    groups = {}
    for order in orders:
        if order not in finished:
            checkpoint = newest_checkpoint(order.folder)
            come_to = step_of(checkpoint) if checkpoint else 0
            groups.setdefault((come_to, *order.common), []).append(order)
    packs = [Pack(group[i : i + agents]) for group in groups.values() for i in range(0, len(group), agents)]
    for pack in packs:
        pack.place()
    return finished + packs
