"""The running servers of this user: one small file for each, in a folder that only this user may read.

A server holds a lock on its file for as long as it runs, so a file without a lock is stale.
Files of other users, links, and files that others may read or write are ignored. Imports neither torch nor HTTP.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from ..config import run_home
from ..errors import Unsupported

_log = logging.getLogger(__name__)
_FORMAT = 1
_MAX_BYTES = 1 << 20
_ABANDONED_S = 60.0  # an unlocked file that is being written for this long was left by a process that died


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model of a running server."""

    names: tuple[str, ...]  # that requests may use; the first is shown
    source: str  # what the server was started with: smollm2, hf:org/name or a path
    path: str  # of the file or folder
    identity: str  # kvilt.weights.file_identity.file_identity(path), taken before the model was loaded


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server of this user that runs now."""

    pid: int
    url: str  # as a client on this machine reaches it
    models: tuple[ServedModel, ...]
    started_s: float = field(default_factory=time.time)  # Unix time
    needs_key: bool = False
    version: str = ""
    # Options of the runtime, of drafts and of the store that differ from the defaults: device, kv_dtype, ...
    options: Mapping[str, Any] = field(default_factory=dict)
    start_ticks: int | None = (
        None  # the process's start as the kernel counts it; tells it from a later one with its pid
    )

    def model_with(self, identity: str) -> ServedModel | None:
        """The model that was loaded from the files of this identity."""
        return next((model for model in self.models if model.identity == identity), None)


@contextmanager
def register(server: RunningServer, folder: Path | None = None) -> Iterator[None]:
    """List a server of this process while a block runs.

    A server runs all the same where the folder cannot be used: it is then not listed, and a warning is logged.
    """
    try:
        path, file = _write(server, _own_folder(folder or run_home()))
    except (OSError, Unsupported) as error:
        _log.warning("this server is not listed by `kvilt ps`: %s", error)
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        file.close()  # lets go of the lock


def running_servers(folder: Path | None = None) -> list[RunningServer]:
    """The servers of this user that run now, the oldest first. Removes the files of those that have ended."""
    folder = folder or run_home()
    with suppress(OSError):  # there is no folder before the first server
        if _is_private(folder.lstat(), stat.S_ISDIR):
            found = [_read(path) for path in sorted(folder.glob("*.json"))]
            _sweep_unfinished(folder)
            return sorted((one for one in found if one is not None), key=lambda one: (one.started_s, one.pid))
    return []


def stop(server: RunningServer) -> bool:
    """Ask a server to end, as Ctrl-C does: requests in progress end first. False if it has ended already."""
    if process_ticks(server.pid) != server.start_ticks:
        return False
    try:
        os.kill(server.pid, signal.SIGTERM)
    except ProcessLookupError:
        return False
    return True


def is_running(server: RunningServer) -> bool:
    """Whether its process still runs."""
    try:
        os.kill(server.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return False  # the pid belongs to another user by now
    return process_ticks(server.pid) == server.start_ticks


def process_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since the machine did; None where the system does not say."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        return None if state == "Z" else int(rest[18])  # Z: it has ended, and its parent did not ask for its status
    except (OSError, ValueError, IndexError):
        return None


def _own_folder(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_private(folder.lstat(), stat.S_ISDIR):
        raise Unsupported(f"{folder} must be a folder of this user that no other may use; chmod it to 700")
    return folder


def _is_private(found: os.stat_result, kind: Any) -> bool:
    """Whether something is of this kind, belongs to this user, and is closed to all others."""
    return bool(kind(found.st_mode)) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _write(server: RunningServer, folder: Path) -> tuple[Path, IO[str]]:
    """The path of a server's new file, and the open file, which is locked until it is closed.

    It gets its name when it is locked and complete, so that no reader takes it for a stale one.
    """
    name = f"{server.pid}-{secrets.token_hex(4)}"
    unfinished = folder / f"{name}.new"
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    file = os.fdopen(descriptor, "w", encoding="utf-8")
    try:
        if not _lock(descriptor, exclusive=True):
            raise Unsupported(f"{folder} is on a file system without locks; set KVILT_HOME to another folder")
        json.dump({"format": _FORMAT, **asdict(server)}, file)
        file.flush()
        path = unfinished.with_suffix(".json")
        unfinished.rename(path)
    except BaseException:
        file.close()
        unfinished.unlink(missing_ok=True)
        raise
    return path, file


def _read(path: Path) -> RunningServer | None:
    """The server of a file; None for a file that is stale, and thereby removed, or not to be trusted."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        if not _is_private(os.fstat(descriptor), stat.S_ISREG):
            return None
        if _lock(descriptor, exclusive=False):
            with suppress(OSError):
                path.unlink()
            return None
        try:
            found = _parse(json.loads(file.read(_MAX_BYTES)))
        except (ValueError, TypeError, KeyError):  # of another version, or damaged
            return None
    return found if is_running(found) else None


def _parse(record: Any) -> RunningServer:
    if not isinstance(record, dict) or record.pop("format") != _FORMAT:
        raise ValueError("another format")
    if type(record["pid"]) is not int or record["pid"] < 1 or not isinstance(record["url"], str):
        raise ValueError("no server")
    models = tuple(ServedModel(**{**each, "names": tuple(each["names"])}) for each in record.pop("models"))
    return RunningServer(models=models, **record)


def _sweep_unfinished(folder: Path) -> None:
    for path in folder.glob("*.new"):
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime > _ABANDONED_S:
                path.unlink()


def _lock(descriptor: int, exclusive: bool) -> bool:
    """Lock a file if no other process has; False if one has, or if the system has no locks."""
    try:
        import fcntl

        fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True
