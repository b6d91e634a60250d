"""Output folders, checked before hours of work and locked for one program at a time."""

import contextlib
import fcntl
import re
import tempfile
from pathlib import Path

from common.arguments import note, refuse


def writable(name, value, within=""):
    """Create and return the folder `within` that of the argument `name`; exit if it cannot be written."""
    if re.match(r"\w{2,}:/", str(value)):  # of s3://bucket/runs, Path keeps one slash
        refuse(name, value, "give a folder of this machine, such as one where that storage is mounted")
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
    with open(folder / "lock", "w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            refuse(name, value, f"another command is using {folder}; wait for it, or give another folder")
        except OSError as error:  # some file systems have no locks
            note(f"{folder} cannot be locked ({error.strerror}); start no other command with it")
        yield folder
