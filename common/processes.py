"""Programs that this one starts. Each has its own session, so that Ctrl-C reaches only us, and each ends with us.

This file imports only the standard library: Ray sends it to machines without the rest of this repository.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

SECONDS_TO_STOP = 120  # time to save a checkpoint before a run that was asked to end is killed
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Ctrl-C, a scheduler, a lost connection
ENDING += (signal.SIGUSR1, signal.SIGXCPU)  # warnings of schedulers


def end_as_at_ctrl_c():
    """Make every signal in ENDING raise KeyboardInterrupt in this program."""
    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, raise_interrupt)


def raise_interrupt(number, frame):
    if number == signal.SIGHUP:
        leave_terminal()
    raise KeyboardInterrupt


def leave_terminal():
    """Discard output to a terminal that is gone, where printing would raise an error."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        for descriptor in (1, 2):
            try:
                os.write(descriptor, b"")
            except OSError:
                os.dup2(nowhere.fileno(), descriptor)


@contextlib.contextmanager
def undisturbed():
    """Context manager that ignores the signals in ENDING."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def end_with_parent():
    """Have this process killed when its parent ends or is killed; on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def start(words, log, **settings):
    """Start Python with the arguments `words`. Its output is appended to the file `log`, unless `settings` differ.

    `settings` are those of subprocess.Popen.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a", encoding="utf-8") as file:
        settings = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file, "encoding": "utf-8"} | settings
        session = {"start_new_session": True, "preexec_fn": end_with_parent}
        return subprocess.Popen([sys.executable, *map(str, words)], **settings, **session)


def end(process):
    """Kill a process and its children, if they still run."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def interrupt(process, seconds):
    """Have a script save its checkpoint and end; kill it if this takes longer than `seconds`."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    end(process)


def call(function, *inputs):
    """Call `function` in its own process and return the result."""
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=end_with_parent) as pool:
        return pool.submit(function, *inputs).result()
