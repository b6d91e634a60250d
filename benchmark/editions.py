"""Editions: the version of a script that a result was measured with. The report marks results of earlier editions."""

import ast
import functools
import hashlib
import re
from datetime import date

import torch

from common import ROOT
from common.algorithms import ALGORITHMS
from common.machine import where
from common.tables import Table

FOLDERS = ("leanrl", "benchmark/studies")
EARLIER = "earlier edition"
BANNER = re.compile(r"^# -+\n# (.+)\n# -+\n", re.MULTILINE)  # the title of a section of a script


@functools.cache
def fingerprint(text, device="cpu"):
    """12 hexadecimal digits that identify what can change the speed or the learning of a program on `device`."""
    parts = sorted(map(repr, code(counted(text, device))))
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:12]


def counted(text, device):
    """The parts of a program that can change its speed or learning on `device`; all parts of a program without a run.

    A script's parts are the defaults of its flags, what `train` reaches outside of the run, and torch's settings. Of
    the run, `advance` and `log` count, with what they reach in it.
    """
    start, *sections = BANNER.split(text)
    titled = list(zip(sections[::2], sections[1::2], strict=True))
    algorithm = parse(start + "".join(body for title, body in titled if not title.startswith("The run")), device)
    run = parse("".join(body for title, body in titled if title.startswith("The run")), device)
    flags = members([part for part in algorithm if defined(part) == {"Args"}])
    constants = reached(used(flags), algorithm)
    learner = reached({"train"}, algorithm)
    logs = reached({"advance", "log"}, members(run))
    if not (flags and learner and logs):
        return parse(text, device)
    settings = [node for part in algorithm + run for node in ast.walk(part) if is_setting(node)]
    return flags + constants + learner + logs + settings


def parse(text, device):
    """The statements of a program on `device`, without types."""
    tree = OnDevice(device).visit(ast.parse(text))
    for node in ast.walk(tree):
        if hasattr(node, "annotation"):
            node.annotation = None
    return tree.body


class OnDevice(ast.NodeTransformer):
    """Replaces a choice by type of device, such as `if self.device.type == "cuda":`, by what runs on one device."""

    def __init__(self, device):
        self.device = device

    def visit_If(self, node):
        self.generic_visit(node)
        test = re.fullmatch(r"(\w+\.)*device\.type == '(\w+)'", ast.unparse(node.test))
        if test is None:
            return node
        return node.body if test[2] == self.device else node.orelse

    visit_IfExp = visit_If


def members(parts):
    """Statements in classes, and the other `parts`."""
    return [member for part in parts for member in (part.body if isinstance(part, ast.ClassDef) else [part])]


def reached(names, parts):
    """The `parts` that define one of `names`, and those that they reach by name."""
    found = [part for part in parts if defined(part) & names]
    more = names | used(found)
    return found if more == names else reached(more, parts)


def defined(part):
    """The names that a statement defines."""
    if hasattr(part, "name"):
        return {part.name}
    return {node.id for node in ast.walk(part) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def used(parts):
    """Names and attributes in `parts`."""
    nodes = [node for part in parts for node in ast.walk(part)]
    return {getattr(node, "id", None) or getattr(node, "attr", None) for node in nodes}


def is_setting(node):
    """Whether a statement configures torch or an environment variable."""
    return isinstance(node, (ast.Assign, ast.Expr)) and ast.unparse(node).startswith(("torch.", "os.environ"))


def code(node):
    """A syntax tree as nested lists, which are equal in all versions of Python, unlike `ast.unparse`."""
    if isinstance(node, list):
        return [code(one) for one in node if not is_text(one)]
    if not isinstance(node, ast.AST):
        return node
    fields = ((name, code(value)) for name, value in ast.iter_fields(node) if value not in ([], None))
    return [type(node).__name__, *fields]


def is_text(node):
    """Whether this is a docstring or the description of a field."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def today(*paths):
    """The date and the editions of the scripts at `paths`, to be stored with a result."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = {path.stem: fingerprint(path.read_text(encoding="utf-8"), device) for path in paths}
    return {"date": date.today().isoformat(), "editions": found}


def script(name):
    """The path of the script of leanrl/ or the study of this name; None if it no longer exists."""
    paths = [ROOT / folder / f"{name}.py" for folder in FOLDERS]
    return next((path for path in paths if path.exists()), None)


def changed(result):
    """Names of the scripts that have changed since `result` was measured; None if it has no editions."""
    if "editions" not in result:
        return None
    return [name for name, edition in result["editions"].items() if not is_current(name, edition)]


def is_current(name, edition):
    path = script(name)
    return path is not None and any(
        fingerprint(path.read_text(encoding="utf-8"), device) == edition for device in ("cpu", "cuda")
    )


def is_earlier(results):
    """Whether any of `results` is from an earlier edition; failed results are ignored."""
    return any(changed(result) != [] for result in results if "failed" not in result)


def marked(name, results):
    """A row's name, marked if any of its results is from an earlier edition."""
    return f"{name} ({EARLIER})" if is_earlier(results) else name


def about(results):
    """Machine, date and seeds of `results` of multiple algorithms, and which are from an earlier edition."""
    words = [where(results[0]["machine"])]
    seeds = sorted({seed for result in results for seed in result.get("seeds", ())})
    if seeds:
        words.append(f"{'seeds' if len(seeds) > 1 else 'seed'} {', '.join(map(str, seeds))}")
    if dates(results):
        words.append(dates(results))
    stale = [ALGORITHMS[result["algo"]].title for result in results if changed(result) != []]
    if stale:
        names = f": {'; '.join(stale)}" if len(stale) < len(results) else " of the scripts"
        words.append(f"{EARLIER}{names}")
    return "; ".join(words)


def tables(measured, header, rows, nothing, words=""):
    """Markdown tables, one for each machine's results in `measured`: `words` first, then the `rows` of each result.
    Without any machine, a table with the row `nothing`."""
    parts = []
    for results in measured:
        lines = [row for result in results for row in rows(result)]
        parts.append(Table(f"{words}{about(results)}:", header, lines).markdown())
    return "\n\n".join(parts) or Table("", header, [nothing]).markdown()


def with_algorithms(machines, algos):
    """Each machine's results and the `algos` of its table: those it has measured, and those no machine has measured.

    Without any machine, yields an empty list of results.
    """
    machines = list(machines) or [[]]
    anywhere = {result["algo"] for results in machines for result in results}
    for results in machines:
        own = {result["algo"] for result in results}
        yield results, [algo for algo in algos if algo in own or algo not in anywhere]


def dates(results):
    """The dates of results, such as "2026-11-23" or "2026-11-20 to 2026-11-23"; "" if none has a date."""
    known = sorted({result["date"] for result in results if "date" in result})
    return " to ".join(dict.fromkeys((known[0], known[-1]))) if known else ""
