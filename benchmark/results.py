"""What was measured, as JSON files under results/<machine>/."""

import json
import os

from common import ROOT
from common.machine import machine, slug

RESULTS = ROOT / "results"


def store(path, result):
    """Write a dictionary of JSON, whole or not at all; a line for each entry."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in result.items()]
    temporary.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    os.replace(temporary, path)


def path_here(results, kind, name):
    """The file of a study under `results`, for this machine."""
    return results / slug(machine()) / kind / f"{name}.json"


def stored(results, kind, names):
    """The results of each machine that has some: a list of those of `names` in results/<machine>/<kind>/<name>.json."""
    for folder in sorted(results.glob(f"*/{kind}")):
        paths = [folder / f"{name}.json" for name in names]
        yield [json.loads(path.read_text()) for path in paths if path.exists()]
