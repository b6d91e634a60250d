"""Output folders, checked before hours of work and locked for one program at a time."""

import contextlib
import fcntl
import tempfile
from pathlib import Path

from common.arguments import refuse


def writable(name, value, within=""):
    """Create and return the folder `within` that of the argument `name`; exit if it cannot be written."""
    folder = Path(value).resolve() / within
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        refuse(name, value, f"give a folder that can be written ({error.strerror})")
    return folder


@contextlib.contextmanager
def locked(name, value, within=""):
    """Like `writable`, and lock the folder for this program."""
    folder = writable(name, value, within)
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            refuse(name, value, f"another command is using {folder}; wait for it, or give another folder")
        yield folder
