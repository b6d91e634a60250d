"""Keeps what the scripts share the same text.

python tools/copies.py                                    # names what has drifted apart
python tools/copies.py leanrl/sac_continuous_action.py    # carries the text of this script to all others

Every function and class of one name is one text in all scripts, except what is each script's OWN. Networks are one
text in the scripts of an algorithm. Nothing is added to a script and nothing taken away.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OWN = {"Args", "SAC", "TD3", "PPO", "DQN", "train"}


def algorithm(path):
    """The name that the scripts of an algorithm have in common: plain, turbo, and the one for several GPUs."""
    return path.stem.removesuffix("_torchcompile").replace("multigpu", "envpool")


def is_network(node):
    return isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "nn.Module" for base in node.bases)


def shared(path, source):
    """First and last line of a script's shared functions and classes; keys are equal where the text has to be."""
    places = {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name not in OWN:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            key = (node.name, algorithm(path)) if is_network(node) else (node.name,)
            places[key] = (first - 1, node.end_lineno)
    return places


def texts(path, source):
    """The shared texts of a script, by key."""
    lines = source.splitlines(keepends=True)
    return {key: "".join(lines[first:last]) for key, (first, last) in shared(path, source).items()}


def drifted(sources):
    """Names of what differs between scripts; `sources` are texts by path."""
    versions = {}
    for path, source in sources.items():
        for key, text in texts(path, source).items():
            versions.setdefault(key, set()).add(text)
    return sorted({key[0] for key, found in versions.items() if len(found) > 1})


def carry(origin, source, path, target):
    """The text `target` of the script at `path`, with the texts of the script `source` at `origin` where both share."""
    own = texts(origin, source)
    lines = target.splitlines(keepends=True)
    for key, (first, last) in sorted(shared(path, target).items(), key=lambda item: -item[1][0]):
        if key in own:
            lines[first:last] = own[key]
    return "".join(lines)


def main(origin=None):
    paths = sorted((ROOT / "leanrl").glob("*.py"))
    if origin:
        origin = Path(origin)
        for path in paths:
            path.write_text(carry(origin, origin.read_text(), path, path.read_text()))
    names = drifted({path: path.read_text() for path in paths})
    if names:
        print(f"these differ between scripts: {', '.join(names)}", file=sys.stderr)
        print("carry the right text to all: python tools/copies.py SCRIPT", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
