"""Keeps the same text what several scripts share, since each of them is one file that stands alone.

python tools/copies.py                                    # names what has drifted apart
python tools/copies.py leanrl/sac_continuous_action.py    # carries the text of this script to all others

Shared are the shell, below its banner, and above it every function and class that bears the same name in several
scripts, save those that are each script's OWN.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHELL = "\n# The shell: "
OWN = {"EnvironmentArgs", "AlgorithmArgs", "SpeedArgs", "Args", "Policy", "make_policy", "train", "evaluation_envs"}
OWN |= {"SAC", "TD3", "PPO", "DQN"}


def split(source):
    """A script's text above the shell, and the shell with its banner."""
    at = source.rindex("\n", 0, source.index(SHELL)) + 1  # the banner's first line
    return source[:at], source[at:]


def definitions(source):
    """Top-level functions and classes above the shell that may be shared: first and last line, by name."""
    top, _ = split(source)
    nodes = [node for node in ast.parse(top).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    firsts = [min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) for node in nodes]
    places = {node.name: (first - 1, node.end_lineno) for node, first in zip(nodes, firsts, strict=True)}
    return {name: place for name, place in places.items() if name not in OWN}


def shared(source):
    """The texts that must not drift, by name."""
    lines = source.splitlines(keepends=True)
    texts = {name: "".join(lines[first:last]) for name, (first, last) in definitions(source).items()}
    return texts | {"the shell": split(source)[1]}


def drifted(sources):
    """Names of what differs between sources."""
    versions = {}
    for source in sources:
        for name, text in shared(source).items():
            versions.setdefault(name, set()).add(text)
    return sorted(name for name, texts in versions.items() if len(texts) > 1)


def carry(source, target):
    """`target` with the texts of `source` wherever it has something of the same name."""
    texts = shared(source)
    top, _ = split(target)
    lines = top.splitlines(keepends=True)
    for name, (first, last) in sorted(definitions(target).items(), key=lambda item: -item[1][0]):
        if name in texts:
            lines[first:last] = texts[name]
    return "".join(lines) + texts["the shell"]


def main(origin=None):
    scripts = sorted((ROOT / "leanrl").glob("*.py"))
    if origin:
        source = Path(origin).read_text()
        for script in scripts:
            script.write_text(carry(source, script.read_text()))
    names = drifted([script.read_text() for script in scripts])
    if names:
        print(f"these differ between scripts: {', '.join(names)}", file=sys.stderr)
        print("carry the right text to all: python tools/copies.py SCRIPT", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
