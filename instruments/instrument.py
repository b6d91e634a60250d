"""What all instruments share."""

import dataclasses
import importlib.util
import sys
import textwrap
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


def load(path):
    """The module of the script at `path`, which finds what is beside it, as a program does."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def refuse_population(given, script):
    """End the program where `script` trains several agents at once; `given` is the argument that asked for it."""
    if "seeds" in {field.name for field in dataclasses.fields(script.Args)}:
        refuse(f"{given}: this script trains a population; give the script that trains one agent")


def refuse(text):
    """End the program with exit code 2 and one line."""
    print(f"error: {text}", file=sys.stderr)
    raise SystemExit(2)


def note(text):
    print(f"note: {text}", file=sys.stderr)


def one_line(error):
    """What an error says, in one line."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 300)
