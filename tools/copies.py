"""Keeps the code that scripts share identical.

python tools/copies.py                                             # list differences
python tools/copies.py leanrl/dqn.py                               # copy the shared text of this script to all others
python tools/copies.py --add load_tensors leanrl/td3_mine.py ...  # add a function or class that other scripts have

Functions, classes and constants of the same name, types and helps of flags, and versions of packages are identical in
all scripts. Networks and some flags are identical only in the plain and the turbo script of an algorithm. Scripts whose
environments are on the device have a `Run` of their own. Exceptions are listed below. Only --add adds text to a script,
and nothing removes any.
"""

import ast
import re
import sys
from itertools import accumulate
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OWN = {"Args", "train"}  # and the learner
OWN_TEXTS = {("pqn_torchcompile", "numpy_function"), ("pqn_atari_envpool_torchcompile", "QNetwork")}
OWN_CONSTANTS = {"AT_LEAST_1", "AT_MOST", "FIXED"}
OWN_FLAGS = {"env_id", "total_timesteps", "num_envs", "threads", "resume", "checkpoint_interval", "capture_video"}
OWN_FLAGS |= {"compile", "cudagraphs", "gamma", "tau", "alpha", "learning_rate", "policy_lr", "q_lr", "max_grad_norm"}
OWN_FLAGS |= {"buffer_size", "batch_size", "learning_starts", "policy_frequency", "target_network_frequency"}
OWN_FLAGS |= {"num_steps", "num_minibatches"}


def twins(path):
    """The common name of a plain and a turbo script."""
    return path.stem.removesuffix("_torchcompile")


def algorithm(path):
    """The common name of an algorithm's scripts: plain, turbo, and the one for several GPUs."""
    return twins(path).replace("multigpu", "envpool")


def is_network(node):
    bases = [ast.unparse(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []
    return "nn.Module" in bases or "nn.Sequential" in bases


def is_learner(node):
    """Whether this is a class with the losses."""
    return isinstance(node, ast.ClassDef) and any(getattr(part, "name", "") == "losses" for part in node.body)


def definitions(source):
    """Top-level functions and classes of a script: by name, the node, first line and end line (as in a slice)."""
    places = {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            places[node.name] = (node, first - 1, node.end_lineno)
    return places


def shared(path, source):
    """Begin and end of the shared texts of a script; texts with equal keys must be equal."""
    starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]
    places = {}
    defined = definitions(source)
    for name, (node, first, last) in defined.items():
        if name not in OWN and not is_learner(node):
            key = (name, algorithm(path)) if is_network(node) else (name,)
            if (path.stem, name) in OWN_TEXTS:
                key = (name, path.stem)
            if name == "Run" and "make_device_envs" in defined:
                key = (name, "on the device")
            places[key] = (starts[first], starts[last])
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name.isupper() and name not in OWN_CONSTANTS:
                places[name,] = (starts[node.lineno - 1], starts[node.end_lineno])
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            places |= flags(path, source, starts[node.lineno], starts[node.end_lineno])
    for package in re.finditer(r'"([\w-]+)([<>]=[^"]+)"', source):
        places[package[1], "version"] = package.span(2)
    return places


def flags(path, source, begin, end):
    """Begin and end of the types and helps of flags."""
    places = {}
    for field in re.compile(r"^    (\w+): (.+?) = .*  # (.*)$", re.M).finditer(source, begin, end):
        own = (twins(path),) if field[1] in OWN_FLAGS else ()
        flag = f"--{field[1].replace('_', '-')}"
        places |= {(flag, "type", *own): field.span(2), (flag, "help", *own): field.span(3)}
    return places


def texts(path, source):
    """The shared texts of a script, by key."""
    return {key: source[begin:end] for key, (begin, end) in shared(path, source).items()}


def drifted(sources):
    """Names of shared texts that differ between scripts; `sources` are texts by path."""
    versions = {}
    for path, source in sources.items():
        for key, text in texts(path, source).items():
            versions.setdefault(key, set()).add(text)
    return sorted({key[0] for key, found in versions.items() if len(found) > 1})


def carry(origin, source, path, target):
    """The script `target` at `path`, with its shared texts replaced by those of the script `source` at `origin`."""
    own = texts(origin, source)
    for key, (begin, end) in sorted(shared(path, target).items(), key=lambda item: -item[1][0]):
        if key in own:
            target = target[:begin] + own[key] + target[end:]
    return target


def add(name, source, target):
    """The script `target` with the function or class `name` of the script `source`.

    It is inserted after the nearest definition that it also follows there, or before the nearest that it precedes.
    """
    theirs, ours = definitions(source), definitions(target)
    _, first, last = theirs[name]
    lines = target.splitlines(keepends=True)
    text = source.splitlines(keepends=True)[first:last]
    names = list(theirs)
    before = [ours[other][2] for other in names[: names.index(name)] if other in ours]
    after = [ours[other][1] for other in names[names.index(name) + 1 :] if other in ours]
    if before:
        lines[before[-1] : before[-1]] = ["\n", "\n", *text]
    else:
        lines[after[0] : after[0]] = [*text, "\n", "\n"]
    return "".join(lines)


def main(words):
    paths = sorted((ROOT / "leanrl").glob("*.py"))
    if words[:1] == ["--add"] and len(words) > 2:
        sources = {path: path.read_text(encoding="utf-8") for path in paths}
        has_it = [source for source in sources.values() if words[1] in definitions(source)]
        if not has_it:
            raise SystemExit(f"error: --add {words[1]}: no script has it")
        for path in (Path(word).expanduser() for word in words[2:]):
            if words[1] not in definitions(path.read_text(encoding="utf-8")):
                path.write_text(add(words[1], has_it[0], path.read_text(encoding="utf-8")), encoding="utf-8")
    elif len(words) == 1 and (origin := Path(words[0]).expanduser()).is_file():
        for path in paths:
            path.write_text(
                carry(origin, origin.read_text(encoding="utf-8"), path, path.read_text(encoding="utf-8")),
                encoding="utf-8",
            )
    elif words:
        raise SystemExit(__doc__)
    names = drifted({path: path.read_text(encoding="utf-8") for path in paths})
    if names:
        print(f"these differ between scripts: {', '.join(names)}", file=sys.stderr)
        print("copy the right text to all: python tools/copies.py SCRIPT", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
