"""What all instruments share."""

import time

SHARE = 0.001  # of a run's time, for each thing that an instrument does again and again


class Instrument:
    """Something that watches a run. `script` is the script's module, `run` its Run, or None before it has started."""

    run = None

    def prepare(self, script, args):
        """Before anything of the run is made, and before its seeds are set."""
        self.script = script

    def start(self, run):
        """When everything is made, before the first step."""
        self.run = run

    def log(self, losses):
        """At each logging interval, before `losses`, floats by name, are logged."""

    def end(self):
        """When a run that had started is over, however it has ended."""


class Pace:
    """Lets something happen as often as it stays below a share of the run's time.

    `with pace:` measures what it costs; then `due` is False until that is at most SHARE of the time gone by. Time is
    that in which the thread works: while others have the processor a run gets nowhere.
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
