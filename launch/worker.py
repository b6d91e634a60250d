"""What a machine of the cluster does for one run. Ray sends this code along, and
common/processes.py: at its top it imports nothing else but the standard library.

All machines see the run's folder. It holds what the driver has ordered (ORDER), the script, the log of all attempts,
and the run folder of each attempt, which resumes the one before from its checkpoint.
"""

import contextlib
import json
import os
import platform
import re
import time
from pathlib import Path

from common.processes import interrupt, start

ORDER = "order.json"
STARTED = "started.json"
DONE = "done.json"  # the step at which the script last ended without an error
LOG = "log.txt"
DIVERGED = "error: step "  # how the line begins that a script ends with at a loss that is not finite
SECONDS_TO_STOP = 120  # for the checkpoint, before a run that was asked to end is killed
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
    """Make the run that `order`, a dictionary made by `Order.message`, describes, or finish it: its outcome.

    That is a status ("done", "failed", "interrupted") and, where it failed, the last line of its log.
    """
    folder = Path(order["folder"])
    node = platform.node()
    if not (folder / ORDER).exists():
        remedy = "give --out a folder on a file system that all machines share"
        return {"status": "failed", "line": f"{node} does not see {folder}: {remedy}"}
    if done_step(folder) >= order["steps"]:
        return {"status": "done"}
    write(folder / STARTED, {"session": order["session"], "node": node})
    if Path(order["stop"]).read_text():
        return {"status": "interrupted"}
    log_start = (folder / LOG).stat().st_size if (folder / LOG).exists() else 0
    process = start_script(order, folder)
    while process.poll() is None:
        if Path(order["stop"]).read_text():
            interrupt(process, SECONDS_TO_STOP)
            return {"status": "interrupted"}
        time.sleep(0.1)
    if process.returncode == 0:
        write(folder / DONE, order["steps"])
        return {"status": "done"}
    killed = f"killed by signal {-process.returncode}" if process.returncode < 0 else ""
    line = killed or last_line(folder / LOG, log_start) or f"exit code {process.returncode}"
    return {"status": "failed", "line": line}


def started(folder):
    """Session and machine in which the run last started, by name; nothing if it never has."""
    path = folder / STARTED
    return json.loads(path.read_text()) if path.exists() else {}


def start_script(order, folder):
    """Start the script; it ends when this process does, however that ends."""
    script = folder / order["script"]
    script.write_text(order["text"])
    words = [script, *order["flags"]]
    if order["until"]:
        (folder / "until.py").write_text(UNTIL)
        words = [folder / "until.py", order["until"], *words]
    checkpoint = newest_checkpoint(folder)
    if checkpoint:
        words.append(f"--resume={checkpoint.parent}")
        step = step_of(checkpoint)
        if step >= order["total"]:  # killed when only the summary was missing: the script wants a step
            words.append(f"--total-timesteps={step + 1}")
    variables = os.environ | order["environment"]
    variables["PYTHONPATH"] = os.pathsep.join([*order["path"], os.environ.get("PYTHONPATH", "")])
    return start(words, folder / LOG, env=variables)


def newest_checkpoint(folder):
    """The checkpoint that the last attempt wrote, or one before it; None if there is none."""
    return max(folder.glob("*/checkpoint.pt"), key=lambda path: path.stat().st_mtime, default=None)


def step_of(checkpoint):
    """The environment step of a checkpoint; 0 if it cannot be read, as the script will say."""
    try:
        import torch

        return torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)["global_step"]
    except Exception:
        return 0


def summaries(folder):
    """The summaries of a run's attempts, by the steps they came to; those of killed attempts are missing."""
    found = []
    for path in folder.glob("*/summary.json"):
        with contextlib.suppress(ValueError):  # the disk was full
            found.append(json.loads(path.read_text()))
    return sorted(found, key=lambda summary: summary["global_step"])


def has_diverged(folder):
    """Whether an attempt has ended at a loss that is not finite."""
    lines = re.split(r"[\r\n]+", tail(folder / LOG)) if (folder / LOG).exists() else ()
    return any(line.startswith(DIVERGED) for line in lines)


def done_step(folder):
    """The step that a run has been trained to; 0 as long as no attempt has ended without an error."""
    return json.loads((folder / DONE).read_text()) if (folder / DONE).exists() else 0


def write(path, content):
    """Write a JSON file that nobody sees half of."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(json.dumps(content))
    os.replace(temporary, path)


def last_line(log, begin=0):
    """The last line of a log from the byte `begin` on, without progress bars."""
    lines = re.split(r"[\r\n]+", tail(log, begin))
    lines = [line.strip() for line in lines if line.strip() and not re.search(r"step/s\b|s/step\b", line)]
    return lines[-1] if lines else ""


def tail(log, begin=0):
    """The end of a log, from the byte `begin` on at most."""
    with open(log, "rb") as file:
        file.seek(max(begin, log.stat().st_size - 20_000))
        return file.read().decode(errors="replace")
