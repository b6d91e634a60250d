"""The base of all instruments."""

import time

SHARE = 0.001  # of a run's time, for each repeated action of an instrument


class Instrument:
    """An observer of a run. `script` is the script's module, `run` its Run, or None before the start."""

    run = None

    def prepare(self, script, args):
        """Called before the run is set up and seeded."""
        self.script = script

    def start(self, run):
        """Called after setup, before the first step."""
        self.run = run

    def log(self, losses):
        """Called at each logging interval, before `losses` (floats by name) are logged."""

    def end(self):
        """Called when a started run ends, for whatever reason."""


class Pace:
    """Limits a repeated action to a share of the run's time.

    `with pace:` measures the time of the action. Then `due` is False until this is at most SHARE of the elapsed time.
    Elapsed is the CPU time of the thread, since a run makes no progress while others use the processor.
    """

    def __init__(self):
        self.next = 0.0

    @property
    def due(self):
        return time.thread_time() >= self.next

    def __enter__(self):
        self.begin = time.thread_time()

    def __exit__(self, *error):
        now = time.thread_time()
        self.next = now + (now - self.begin) / SHARE
