"""What a machine of the cluster does for one run. Ray sends this code along: it imports the standard library alone.

All machines see the run's folder. It holds what the driver has ordered (ORDER), the script, the log of all attempts,
and the run folder of each attempt, which resumes the one before from its checkpoint.
"""

import ctypes
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

ORDER = "order.json"
STARTED = "started.json"
LOG = "log.txt"
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


def stop_at_step(run):
    unfinished = run.unfinished
    run.unfinished = lambda: unfinished() and run.step < step


script.train(script.parse_args(), on_start=stop_at_step)
'''


def train(order):
    """Make the run that `order`, a dictionary made by `Order.message`, describes, or finish it: what came of it.

    That is a status ("done", "failed", "interrupted") and, where it failed, the last line of its log.
    """
    folder = Path(order["folder"])
    node = platform.node()
    if not (folder / ORDER).exists():
        remedy = "give --out a folder on a file system that all machines share"
        return {"status": "failed", "line": f"{node} does not see {folder}: {remedy}"}
    if last_step(folder) >= order["steps"]:
        return {"status": "done"}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # for ray.cancel; a shell's background jobs ignore it
    started = folder / f"{STARTED}.tmp"
    started.write_text(json.dumps({"session": order["session"], "node": node}))
    os.replace(started, folder / STARTED)  # the driver never sees half of it
    process = start(order, folder)
    try:
        while process.poll() is None:
            time.sleep(0.1)
    except KeyboardInterrupt:  # by ray.cancel
        process.terminate()
        try:
            process.wait(SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return {"status": "interrupted"}
    if process.returncode == 0:
        return {"status": "done"}
    return {"status": "failed", "line": last_line(folder / LOG) or f"exit code {process.returncode}"}


def start(order, folder):
    """Start the script; it ends when this process does, however that ends."""
    script = folder / order["script"]
    script.write_text(order["text"])
    words = [str(script), *order["flags"]]
    if order["until"]:
        (folder / "until.py").write_text(UNTIL)
        words = [str(folder / "until.py"), str(order["until"]), *words]
    checkpoint = newest_checkpoint(folder)
    if checkpoint:
        words.append(f"--resume={checkpoint.parent}")
    variables = os.environ | order["environment"]
    variables["PYTHONPATH"] = os.pathsep.join([*order["path"], os.environ.get("PYTHONPATH", "")])
    with open(folder / LOG, "a") as log:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        settings = {"start_new_session": True, "preexec_fn": end_with_parent, "env": variables}
        return subprocess.Popen([sys.executable, *words], **pipes, **settings)


def end_with_parent():
    """Have this process killed when its parent ends, even if that is killed; on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def newest_checkpoint(folder):
    """The checkpoint that the last attempt wrote, or one before it; None if there is none."""
    return max(folder.glob("*/checkpoint.pt"), key=lambda path: path.stat().st_mtime, default=None)


def summaries(folder):
    """The summaries of a run's attempts, by the steps they came to; those of killed attempts are missing."""
    read = [json.loads(path.read_text()) | {"folder": path.parent} for path in folder.glob("*/summary.json")]
    return sorted(read, key=lambda summary: summary["global_step"])


def last_step(folder):
    """The step that a run has come to, as far as its attempts have ended cleanly."""
    return max((summary["global_step"] for summary in summaries(folder)), default=0)


def last_line(log):
    """The last line of a log, without progress bars."""
    lines = re.split(r"[\r\n]+", tail(log))
    lines = [line.strip() for line in lines if line.strip() and "step/s" not in line]
    return lines[-1] if lines else ""


def tail(log):
    """The end of a log."""
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - 20_000))
        return file.read().decode(errors="replace")
