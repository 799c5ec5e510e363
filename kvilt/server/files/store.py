"""Stored files: bytes in one folder, and a note beside each that says whose it is. Quotas are for each key.

Paths are made from ids that the store itself drew, never from what a client says. A file exists once its note does, so
a server that is killed leaves no half of one: data without a note is removed when the next server starts.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...errors import ParamError
from ...kv.file import sweep, write_whole
from ..http.errors import HTTPError

_log = logging.getLogger(__name__)
_ID = re.compile(r"file-[0-9a-f]{32}")
_NO_RETRY = {"x-should-retry": "false"}


@dataclass(frozen=True, slots=True)
class FileLimits:
    """What one key may store."""

    file_bytes: int  # of one upload
    files: int
    bytes: int  # of all its files
    ttl_s: int


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that is whole."""

    id: str
    owner: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int

    def shown(self) -> dict[str, Any]:
        """The file as clients see it."""
        fields = {name: value for name, value in asdict(self).items() if name != "owner"}
        return {**fields, "object": "file", "status": "processed", "status_details": None}


class FileStore:
    """The files of all keys. A file that a key does not own does not exist for it."""

    def __init__(self, folder: Path | None, limits: FileLimits, clock: Callable[[], float] = time.time) -> None:
        """Without a folder, files are in a temporary one that ends with the process."""
        self.limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._temporary = tempfile.TemporaryDirectory(prefix="kvilt-files-") if folder is None else None
        self.folder = Path(self._temporary.name) if self._temporary else Path(folder or "")
        self._held = _own(self.folder)
        self._files: dict[str, StoredFile] = {}
        self._open: dict[str, NewFile] = {}
        sweep(self.folder, r"\..*\.")
        for path in sorted(self.folder.glob("file-*.json")):
            self._load(path)

    def _load(self, path: Path) -> None:
        try:
            found = StoredFile(**json.loads(path.read_bytes()))
            whole = self.data_path(found.id).stat().st_size == found.bytes and f"{found.id}.json" == path.name
        except (OSError, ValueError, TypeError):
            whole = False
        if whole:
            self._files[found.id] = found
        else:
            _log.warning("%s is no note of a whole file, and is left out", path.name)

    def sweep(self, keep: Iterable[str]) -> None:
        """Remove data that has no note, but for files that batches still write."""
        kept = {*self._files, *keep}
        for path in self.folder.glob("file-*.data"):
            if path.stem not in kept and _ID.fullmatch(path.stem):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let another server have the folder."""
        os.close(self._held)
        if self._temporary is not None:
            self._temporary.cleanup()

    def data_path(self, name: str) -> Path:
        """Where the bytes of an id are."""
        return self.folder / f"{name}.data"

    def find(self, name: str, owner: str, param: str | None = None) -> StoredFile:
        """A file of a key."""
        found = self._files.get(name)
        if found is None or found.owner != owner or found.expires_at <= self._clock():
            raise HTTPError(
                404, "there is no such file; it was deleted, or has expired", param=param, code="file_not_found"
            )
        return found

    def files(self, owner: str) -> list[StoredFile]:
        """The files of a key, the oldest first."""
        now_s = self._clock()
        with self._lock:
            return [one for one in self._files.values() if one.owner == owner and one.expires_at > now_s]

    def delete(self, name: str, owner: str) -> None:
        """Remove a file."""
        self._remove(self.find(name, owner))

    def create(self, owner: str, name: str | None = None) -> NewFile:
        """A file to write to; refused over the limits of the key. A name continues what a stopped server wrote."""
        self._expire()
        with self._lock:
            if len(self._owned(owner)) >= self.limits.files and name is None:
                raise _over(f"{self.limits.files} files are stored and no more are allowed; delete some")
            made = NewFile(self, owner, name or f"file-{secrets.token_hex(16)}")
            self._open[made.id] = made
        return made

    def charge(self, file: NewFile, count: int) -> None:
        """Refuse bytes that would be over the quota of the file's key; else count them."""
        with self._lock:
            if sum(one.bytes for one in self._owned(file.owner)) + count > self.limits.bytes:
                raise _over(f"the files of a key may have {self.limits.bytes} bytes in all; delete some")
            file.bytes += count

    def _owned(self, owner: str) -> list[StoredFile | NewFile]:
        """All that counts for a key, also what is being written."""
        every: list[StoredFile | NewFile] = [*self._files.values(), *self._open.values()]
        return [one for one in every if one.owner == owner]

    def finish(self, file: NewFile, filename: str, purpose: str, ttl_s: int | None) -> StoredFile:
        """Make a file that was written exist."""
        now_s = int(self._clock())
        ttl_s = self.limits.ttl_s if ttl_s is None else min(ttl_s, self.limits.ttl_s)
        made = StoredFile(file.id, file.owner, filename, purpose, file.bytes, now_s, now_s + ttl_s)
        write_whole(self.folder / f"{made.id}.json", json.dumps(asdict(made)).encode())
        with self._lock:
            self._open.pop(file.id, None)
            self._files[made.id] = made
        return made

    def forget(self, file: NewFile) -> None:
        """Count a file that was given up no longer."""
        with self._lock:
            self._open.pop(file.id, None)

    def _expire(self) -> None:
        now_s = self._clock()
        for one in [one for one in list(self._files.values()) if one.expires_at <= now_s]:
            self._remove(one)

    def _remove(self, file: StoredFile) -> None:
        (self.folder / f"{file.id}.json").unlink(missing_ok=True)
        self.data_path(file.id).unlink(missing_ok=True)
        with self._lock:
            self._files.pop(file.id, None)


class NewFile:
    """A file while it is written. A thread may still write when the caller gives up, so each call takes a lock."""

    def __init__(self, store: FileStore, owner: str, name: str) -> None:
        self.id, self.owner = name, owner
        self.bytes = 0
        self._store = store
        self._out: int | None = None  # a descriptor: nothing is buffered, so closing cannot fail
        self._closed = False
        self._lock = threading.RLock()

    def write(self, data: bytes) -> None:
        """Append bytes; nothing once the file is closed."""
        with self._lock:
            if self._closed:
                return
            self._store.charge(self, len(data))
            if self._out is None:
                self._out = _appended(self._store.data_path(self.id))
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(self._out, view) :]
            except OSError as error:
                raise _unwritable(error) from None

    def keep(self, count: int) -> None:
        """Continue after the first bytes that are there."""
        self._store.charge(self, count)
        os.truncate(self._store.data_path(self.id), count)

    def finish(self, filename: str, purpose: str, ttl_s: int | None = None) -> StoredFile:
        """The whole file."""
        with self._lock:
            self.write(b"")  # an empty file is a file
            try:
                if self._out is not None:
                    os.fsync(self._out)
                self.close()
                return self._store.finish(self, filename, purpose, ttl_s)
            except OSError as error:
                raise _unwritable(error) from None

    def close(self) -> None:
        """Stop writing; what is written stays."""
        with self._lock:
            self._closed = True
            if self._out is not None:
                os.close(self._out)
                self._out = None

    def discard(self) -> None:
        """Remove what was written."""
        self.close()
        with suppress(OSError):
            self._store.data_path(self.id).unlink(missing_ok=True)
        self._store.forget(self)


def _own(folder: Path) -> int:
    """A lock on the folder: two servers would count and sweep each other's files."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    held = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise ParamError("files_dir", "another server uses this folder; give each a folder of its own") from None
    except OSError:  # a file system without locks
        _log.warning("the folder of files cannot be locked: no other server may use it")
    return held


def _appended(path: Path) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unwritable(error) from None


def _unwritable(error: OSError) -> HTTPError:
    _log.error("a file cannot be stored: %s", error.strerror)
    return HTTPError(503, "the server's folder of files cannot be written now", code="files_dir_full")


def _over(message: str) -> HTTPError:
    return HTTPError(409, message, code="files_limit", headers=_NO_RETRY)
