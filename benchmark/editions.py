"""Editions: which text of a script a result is of. The report marks results of another edition than today's."""

import ast
import functools
import hashlib
from datetime import date

from benchmark.algorithms import ALGORITHMS
from common import ROOT
from common.machine import where
from common.tables import Table

FOLDERS = ("leanrl", "benchmark/studies")
EARLIER = "earlier edition"


@functools.cache
def fingerprint(text):
    """Of a Python program, without comments and docstrings: 12 hexadecimal digits."""
    return hashlib.sha256(repr(code(ast.parse(text))).encode()).hexdigest()[:12]


def code(node):
    """A syntax tree as lists that are the same in all versions of Python, which `ast.unparse` is not."""
    if isinstance(node, list):
        return [code(one) for one in node if not is_text(one)]
    if not isinstance(node, ast.AST):
        return node
    fields = ((name, code(value)) for name, value in ast.iter_fields(node) if value not in ([], None))
    return [type(node).__name__, *fields]


def is_text(node):
    """Whether this is a docstring, or a string beside a field."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def today(*paths):
    """What a result is stored with: the date, and the editions of the scripts at `paths`."""
    return {"date": date.today().isoformat(), "editions": {path.stem: fingerprint(path.read_text()) for path in paths}}


def script(name):
    """The path of the script of leanrl/, or of the study, of this name; None if there is none any more."""
    paths = [ROOT / folder / f"{name}.py" for folder in FOLDERS]
    return next((path for path in paths if path.exists()), None)


def changed(result):
    """Names of the scripts that are no longer what `result` was measured with; None if it does not say."""
    if "editions" not in result:
        return None
    return [name for name, edition in result["editions"].items() if not is_current(name, edition)]


def is_current(name, edition):
    path = script(name)
    return path is not None and fingerprint(path.read_text()) == edition


def is_earlier(results):
    """Whether any of `results`, of those that have not failed, is of an earlier edition."""
    return any(changed(result) != [] for result in results if "failed" not in result)


def marked(name, results):
    """A row's name, with a mark if any of its results is of an earlier edition."""
    return f"{name} ({EARLIER})" if is_earlier(results) else name


def about(results):
    """Where and when `results` of several algorithms were measured, with which seeds, and which are not of today."""
    words = [where(results[0]["machine"])]
    seeds = sorted({seed for result in results for seed in result.get("seeds", ())})
    if seeds:
        words.append(f"{'seeds' if len(seeds) > 1 else 'seed'} {', '.join(map(str, seeds))}")
    if dates(results):
        words.append(dates(results))
    stale = [ALGORITHMS[result["algo"]].title for result in results if changed(result) != []]
    if stale:
        names = f": {', '.join(stale)}" if len(stale) < len(results) else " of the scripts"
        words.append(f"{EARLIER}{names}")
    return "; ".join(words)


def tables(measured, header, rows, nothing, words=""):
    """Markdown tables: for each machine's results in `measured` one that has `rows` of each, with `words` before what
    they are about; without any machine one that has the row `nothing`."""
    parts = []
    for results in measured:
        lines = [row for result in results for row in rows(result)]
        parts.append(Table(f"{words}{about(results)}:", header, lines).markdown())
    return "\n\n".join(parts) or Table("", header, [nothing]).markdown()


def with_algorithms(machines, algos):
    """Each machine's results, and those of `algos` that its table names: what it has measured, and what no machine has.

    Without any machine its results are an empty list.
    """
    machines = list(machines) or [[]]
    anywhere = {result["algo"] for results in machines for result in results}
    for results in machines:
        own = {result["algo"] for result in results}
        yield results, [algo for algo in algos if algo in own or algo not in anywhere]


def dates(results):
    """When results were measured, such as "2026-11-23" or "2026-11-20 to 2026-11-23"; "" if none of them says."""
    known = sorted({result["date"] for result in results if "date" in result})
    return " to ".join(dict.fromkeys((known[0], known[-1]))) if known else ""
