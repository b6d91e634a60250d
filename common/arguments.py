"""The programs' command lines. Bad input is refused: exit code 2, and one line."""

import math
import sys
import textwrap

import tyro


def parse(kind, description):
    """The arguments of a program that was started by `python -m`, as a dataclass `kind`."""
    name = sys.modules["__main__"].__spec__.name.removesuffix(".__main__")
    return tyro.cli(kind, prog=f"python -m {name}", description=description)


def refuse(name, value, remedy):
    """End the program with a line that names the argument, its value and the remedy."""
    stop(f"--{name} {value}: {remedy}")


def check(name, given, choices):
    """Refuse what is not among the choices of the argument `name`."""
    for value in given:
        if value not in choices:
            refuse(name, value, f"choose from {', '.join(choices)}")


def from_low(low, args, *names):
    """Refuse numbers of `args`, or in its lists, that are not finite or are below `low`; None stands for a default."""
    for name in names:
        given = getattr(args, name)
        for value in given if isinstance(given, tuple) else (given,):
            if value is not None and not low <= value < math.inf:
                refuse(name.replace("_", "-"), value, f"give a finite number from {low}")


def distinct(args, *names):
    """Refuse lists of `args` that are empty, or have something twice; None stands for a default."""
    for name in names:
        values = getattr(args, name)
        if values == ():
            refuse(name.replace("_", "-"), "", "give at least one")
        for value in values or ():
            if values.count(value) > 1:
                refuse(name.replace("_", "-"), value, "give it once")


def stop(message):
    """End the program with this line."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def note(text):
    print(f"note: {text}", file=sys.stderr)


def one_line(error):
    """What an error says, in one line."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 300)
