"""Command lines of the programs. Bad input ends them with one line and exit code 2."""

import math
import sys
import textwrap
from pathlib import Path

import tyro


def parse(kind, description, words=None, name=None):
    """Parse the arguments `words` of `python -m name`; returns a dataclass `kind`. By default those of this program."""
    name = name or sys.modules["__main__"].__spec__.name.removesuffix(".__main__")
    args = tyro.cli(kind, args=words, prog=f"python -m {name}", description=description)
    for field, value in vars(args).items():
        setattr(args, field, tuple(map(at_home, value)) if isinstance(value, tuple) else at_home(value))
    return args


def at_home(value):
    """A path with the home folder in place of ~, which no shell replaces in --out=~/runs; other values as they are."""
    try:
        return value.expanduser() if isinstance(value, Path) else value
    except RuntimeError:
        stop(f"{value}: there is no such home folder; give its path")


def refuse(name, value, remedy):
    """Exit with a line that names the argument, its value and the remedy."""
    stop(f"--{name} {value}: {remedy}")


def check(name, given, choices):
    """Refuse values of the argument `name` that are not among `choices`."""
    for value in given:
        if value not in choices:
            refuse(name, value, f"choose from {', '.join(choices)}")


def from_low(low, args, *names, high=math.inf):
    """Refuse numbers in `args` or its lists that are not finite, below `low` or above `high`; None is a default."""
    for name in names:
        given = getattr(args, name)
        for value in given if isinstance(given, tuple) else (given,):
            if value is not None and not (low <= value <= high and value < math.inf):
                remedy = f"a finite number from {low}" if high == math.inf else f"a number from {low} to {high}"
                refuse(name.replace("_", "-"), value, f"give {remedy}")


def check_seeds(args, *names):
    """Refuse seeds in `args` that NumPy does not take."""
    from_low(0, args, *names, high=2**32 - 1)


def distinct(args, *names):
    """Refuse lists in `args` that are empty or have duplicates; None stands for a default."""
    for name in names:
        values = getattr(args, name)
        if values == ():
            refuse(name.replace("_", "-"), "", "give at least one")
        for value in values or ():
            if values.count(value) > 1:
                refuse(name.replace("_", "-"), value, "give it once")


def stop(message):
    """Exit with this line."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def note(text):
    print(f"note: {text}", file=sys.stderr)


def one_line(error):
    """The message of an error in one line."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 300)
