"""Files that are whole or as they were: what is written appears under its name only when all of it is on the disk.

A writer holds a lock on its temporary file, which ends with the process; so what a killed writer left can be told from
what a writer still needs, and is swept. Refuses to know what files hold.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

_RANDOM = "[0-9a-f]{32}"
_ENDING = ".tmp"


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` to `path`, readable by its owner alone, or raise and leave what was there, without a trace.

    Sweeps what killed writers of the same file left.
    """
    stem = f".{path.name}."
    sweep(path.parent, re.escape(stem))
    fd, temporary = create_temporary(path.parent, stem)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def create_temporary(folder: Path, stem: str = "") -> tuple[int, Path]:
    """A new file, open for writing, that `sweep` leaves alone until its descriptor is closed."""
    while True:
        path = folder / f"{stem}{secrets.token_hex(16)}{_ENDING}"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with suppress(OSError):  # a file system without locks: then nothing is swept there
            fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd, path
        os.close(fd)  # swept before it was locked


def sweep(folder: Path, stem: str = "") -> int:
    """Remove temporary files of writers that died, and nothing else; how many. `stem` is a regular expression."""
    named, swept = re.compile(f"{stem}{_RANDOM}{re.escape(_ENDING)}"), 0
    with suppress(OSError), os.scandir(folder) as entries:
        for name in sorted(entry.name for entry in entries if named.fullmatch(entry.name)):
            swept += _sweep_one(folder / name)
    return swept


def _sweep_one(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
        return True
    except OSError:
        return False  # its writer lives
    finally:
        os.close(fd)
