"""Progress of the runs: a live table in a terminal; elsewhere, a line for each run that has ended."""

import re
import sys

from rich.console import Console
from rich.live import Live
from rich.table import Table

from launch.worker import LOG, started, tail

BAR = re.compile(  # the scripts' progress bar
    r"(?P<step>\d+)/(?P<total>\d+) \[[^\]<]*<(?P<left>[^,\]]+), +(?P<speed>[\d.]+|\?)(?P<unit>step/s|s/step)"
    r"(?:, return=(?P<return>[-\d.enaif]+))?"
)
COLUMNS = ("run", "state", "step", "return", "steps/s", "time left", "machine")
STATES = ("failed", "running", "queued", "interrupted", "done")  # in the order of the table
MARGIN = 6  # lines of the terminal reserved for other output


def progress(log):
    """The values of the last progress bar in a log, as text by column; empty if there is none."""
    bars = list(BAR.finditer(tail(log))) if log.exists() else []
    if not bars:
        return {}
    found = bars[-1]
    speed = found["speed"]
    if found["unit"] == "s/step" and speed != "?":
        speed = f"{1 / float(speed):.2f}" if float(speed) else "?"
    columns = {"step": f"{found['step']}/{found['total']}", "return": found["return"] or ""}
    return columns | {"steps/s": speed, "time left": found["left"]}


class Board:
    """Context manager that shows the states of all runs. Runs of other sessions than `session` are earlier ones."""

    def __init__(self, session):
        self.session = session
        self.rows = {}  # orders by name
        self.outcomes = {}
        self.ended = {}  # rows of the table for runs that have ended
        self.console = Console(file=sys.stderr)
        self.live = Live(self.table(), console=self.console, auto_refresh=False, transient=True)

    def __enter__(self):
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *error):
        self.live.stop()

    def add(self, order):
        self.rows[order.name] = order
        self.outcomes.pop(order.name, None)
        self.ended.pop(order.name, None)

    def end(self, order, outcome):
        """Report that a run has ended."""
        self.outcomes[order.name] = outcome
        self.ended[order.name] = self.state(order)
        line = f": {outcome['line']}" if "line" in outcome else ""
        if not self.console.is_terminal or line:
            text = f"{outcome['status']}: {order.name}{line}"
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def refresh(self):
        if self.console.is_terminal:
            self.live.update(self.table(), refresh=True)

    def state(self, order):
        """A row of the table, without the run's name."""
        ours = started(order.folder)
        begun = ours.get("session") == self.session
        state = "running" if begun else "queued"
        if order.name in self.outcomes:
            state = self.outcomes[order.name]["status"]
        row = {"state": state, "machine": ours["node"] if begun else ""}
        if state != "queued":
            row |= progress(order.folder / LOG)
        if state != "running":
            row.pop("time left", None)
        return row

    def table(self):
        table = Table(*COLUMNS, box=None)
        rows = {name: self.ended.get(name) or self.state(order) for name, order in self.rows.items()}
        names = sorted(rows, key=lambda name: STATES.index(rows[name]["state"]))
        shown = names[: max(3, self.console.size.height - MARGIN)]
        for name in shown:
            table.add_row(name, *(rows[name].get(column, "") for column in COLUMNS[1:]))
        states = [row["state"] for row in rows.values()]
        counts = ", ".join(f"{states.count(state)} {state}" for state in STATES if state in states)
        table.caption = counts if len(shown) == len(names) else f"{counts}; {len(names) - len(shown)} not shown"
        return table
