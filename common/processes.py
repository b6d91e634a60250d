"""Programs that this one starts. Each has a session of its own, so that Ctrl-C is for us alone, and ends with us.

It imports the standard library alone: Ray sends it to machines that have nothing else of this repository.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

SECONDS_TO_STOP = 120  # for the checkpoint, before a run that was asked to end is killed
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Ctrl-C, a scheduler, a connection that is lost


def end_as_at_ctrl_c():
    """Have every signal of ENDING raise KeyboardInterrupt in this program."""
    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, raise_interrupt)


def raise_interrupt(number, frame):
    if number == signal.SIGHUP:
        leave_terminal()
    raise KeyboardInterrupt


def leave_terminal():
    """Print to nowhere what would be printed to a terminal that is gone, which raises an error."""
    with open(os.devnull, "w") as nowhere:
        for descriptor in (1, 2):
            try:
                os.write(descriptor, b"")
            except OSError:
                os.dup2(nowhere.fileno(), descriptor)


@contextlib.contextmanager
def undisturbed():
    """Ignore the signals of ENDING as long as this context lasts."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def end_with_parent():
    """Have this process killed when its parent ends, even if that is killed; on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def start(words, log, **settings):
    """Start Python with the arguments `words`; what it prints is added to the file `log`, unless `settings` say else.

    These are those of subprocess.Popen.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a") as file:
        settings = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file, "text": True} | settings
        session = {"start_new_session": True, "preexec_fn": end_with_parent}
        return subprocess.Popen([sys.executable, *map(str, words)], **settings, **session)


def end(process):
    """Kill a process and what it has started, if they are still there."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def interrupt(process, seconds):
    """Have a script write its checkpoint and end; kill it if that takes longer."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    end(process)


def call(function, *inputs):
    """What `function` returns in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=end_with_parent) as pool:
        return pool.submit(function, *inputs).result()
