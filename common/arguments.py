"""The programs' command lines. Bad input is refused: exit code 2, and one line."""

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


def stop(message):
    """End the program with this line."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def note(text):
    print(f"note: {text}", file=sys.stderr)


def one_line(error):
    """What an error says, in one line."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 300)
