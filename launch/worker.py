"""The part of one run that executes on a machine of the cluster. Ray sends this file and common/processes.py there, so
at the top it imports only these and the standard library.

All machines share the run's folder. It holds the driver's order (ORDER), the script, the log of all attempts, and the
run folder of each attempt. An attempt resumes the previous one from its checkpoint.
"""

import contextlib
import json
import os
import platform
import re
import time
from pathlib import Path

from common.processes import SECONDS_TO_STOP, interrupt, start

ORDER = "order.json"
STARTED = "started.json"
DONE = "done.json"  # the step at which the script last ended without an error
LOG = "log.txt"
DIVERGED = re.compile(r"error: step \d+: .*; usual causes: ")  # the last line of a script that met NaN or infinity
UNTIL = '''\
"""Run a script until a step, as if somebody interrupted it there: python until.py STEP SCRIPT FLAGS"""

import importlib.util
import sys
from pathlib import Path

step = int(sys.argv.pop(1))
sys.argv.pop(0)
path = Path(sys.argv[0])
sys.path[0] = str(path.parent)
spec = importlib.util.spec_from_file_location(path.stem, path)
script = importlib.util.module_from_spec(spec)
sys.modules[path.stem] = script
spec.loader.exec_module(script)


class Run(script.Run):
    def unfinished(self):
        return super().unfinished() and self.step < step


script.Run = Run
script.train(script.parse_args())
'''


def train(order):
    """Start or finish the run described by `order`, a dictionary from `Order.message`; returns its outcome.

    The outcome is a status ("done", "failed", "interrupted") and, for a failed run, the last line of its log.
    """
    folder = Path(order["folder"])
    node = platform.node()
    if not (folder / ORDER).exists():
        remedy = "give --out a folder on a file system that all machines share"
        return {"status": "failed", "line": f"{node} does not see {folder}: {remedy}"}
    if done_step(folder) >= order["steps"]:
        return {"status": "done"}
    write(folder / STARTED, {"session": order["session"], "node": node})
    if Path(order["stop"]).read_text(encoding="utf-8"):
        return {"status": "interrupted"}
    log_start = (folder / LOG).stat().st_size if (folder / LOG).exists() else 0
    process = start_script(order, folder)
    while process.poll() is None:
        if Path(order["stop"]).read_text(encoding="utf-8"):
            interrupt(process, SECONDS_TO_STOP)
            return {"status": "interrupted"}
        time.sleep(0.1)
    if process.returncode == 0:
        return end_of(folder, order["steps"])
    killed = f"killed by signal {-process.returncode}" if process.returncode < 0 else ""
    line = killed or last_line(folder / LOG, log_start) or f"exit code {process.returncode}"
    return {"status": "failed", "line": line}


def end_of(folder, steps):
    """The outcome of a run whose script ended without an error: an edited script may end before its last step."""
    reached = max((summary["global_step"] for summary in summaries(folder)), default=0)
    if reached < steps:
        line = f"it ended without an error at step {reached} of {steps}; see {folder / LOG}"
        return {"status": "failed", "line": line}
    write(folder / DONE, steps)
    return {"status": "done"}


def started(folder):
    """Session and machine of the run's last start, by name; empty if it has never started."""
    return read(folder / STARTED) or {}


def start_script(order, folder):
    """Start the script as a process that ends with this one, however this one ends."""
    script = folder / order["script"]
    script.write_text(order["text"], encoding="utf-8")
    words = [script, *order["flags"]]
    if order["until"]:
        (folder / "until.py").write_text(UNTIL, encoding="utf-8")
        words = [folder / "until.py", order["until"], *words]
    checkpoint = furthest_checkpoint(folder)
    if checkpoint:
        words.append(f"--resume={checkpoint.parent}")
        step = step_of(checkpoint)
        if step >= order["total"]:  # killed before the summary was written: the script needs at least one step
            words.append(f"--total-timesteps={step + 1}")
    variables = os.environ | order["environment"]
    variables["PYTHONPATH"] = os.pathsep.join([*order["path"], os.environ.get("PYTHONPATH", "")])
    return start(words, folder / LOG, env=variables)


def furthest_checkpoint(folder):
    """The checkpoint with the most steps, and among equal ones the newest; None if there is none."""
    return max(folder.glob("*/checkpoint.pt"), key=lambda path: (step_of(path), path.stat().st_mtime), default=None)


def step_of(checkpoint):
    """The environment step of a checkpoint; 0 if it cannot be read."""
    try:
        import torch

        return torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)["global_step"]
    except Exception:
        return 0


def summaries(folder):
    """The summaries of a run's attempts, by their last step; killed attempts have none."""
    found = []
    for path in folder.glob("*/summary.json"):
        with contextlib.suppress(ValueError):  # the disk was full
            found.append(json.loads(path.read_text(encoding="utf-8")))
    return sorted(found, key=lambda summary: summary["global_step"])


def has_diverged(folder):
    """Whether an attempt ended at a non-finite loss."""
    lines = re.split(r"[\r\n]+", tail(folder / LOG)) if (folder / LOG).exists() else ()
    return any(DIVERGED.match(line) for line in lines)


def done_step(folder):
    """The step up to which a run has trained; 0 until an attempt has ended without an error."""
    return read(folder / DONE) or 0


def write(path, content):
    """Write a JSON file atomically."""
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read(path):
    """Read a file written by `write`; None if it is missing or damaged."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return json.loads(path.read_text(encoding="utf-8"))
    return None


def last_line(log, begin=0):
    """The last line of a log after the byte `begin`, without progress bars."""
    lines = re.split(r"[\r\n]+", tail(log, begin))
    lines = [line.strip() for line in lines if line.strip() and not re.search(r"step/s\b|s/step\b", line)]
    return lines[-1] if lines else ""


def tail(log, begin=0):
    """The end of a log, starting at byte `begin` or later."""
    with open(log, "rb") as file:
        file.seek(max(begin, log.stat().st_size - 20_000))
        return file.read().decode(errors="replace")
