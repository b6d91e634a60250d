"""Results of measurements, as JSON files under results/<machine>/."""

import json
import os

from common import ROOT
from common.arguments import one_line, stop
from common.machine import machine, slug

RESULTS = ROOT / "results"


def store(path, result):
    """Write a dictionary as JSON atomically, with one line per entry."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in result.items()]
    replace(path, "{\n" + ",\n".join(lines) + "\n}\n")


def replace(path, text):
    """Write a file atomically."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def read(path):
    """Read a file written by `store`; exit if it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        stop(f"{path}: it cannot be read ({one_line(error)}); restore it, or delete it and measure again")


def plain_name(env_id):
    """An environment's name in a form for files and folders."""
    return env_id.replace("/", "-").replace(":", "-")


def path_here(results, kind, name):
    """The file of a study under `results` for this machine."""
    return results / slug(machine()) / kind / f"{name}.json"


def stored(results, kind, names):
    """For each machine with results, the list of its results/<machine>/<kind>/<name>.json for `names`."""
    for folder in sorted(results.glob(f"*/{kind}")):
        paths = [folder / f"{name}.json" for name in names]
        yield [read(path) for path in paths if path.exists()]
