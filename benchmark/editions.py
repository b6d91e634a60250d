"""Editions: the version of a script that a result was measured with. The report marks results of earlier editions."""

import ast
import functools
import hashlib
from datetime import date

from common import ROOT
from common.algorithms import ALGORITHMS
from common.machine import where
from common.tables import Table

FOLDERS = ("leanrl", "benchmark/studies")
EARLIER = "earlier edition"


@functools.cache
def fingerprint(text):
    """12 hexadecimal digits that identify a Python program, ignoring comments and docstrings."""
    return hashlib.sha256(repr(code(ast.parse(text))).encode()).hexdigest()[:12]


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
    return {"date": date.today().isoformat(), "editions": {path.stem: fingerprint(path.read_text()) for path in paths}}


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
    return path is not None and fingerprint(path.read_text()) == edition


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
