"""The disk tier: one file for each record, named by its key, and an index that can be lost.

A lookup opens the file and needs no index, so it costs the same among a thousand records and a million. Several
processes may share a folder. Refuses to know what the bytes mean, except whose quota they count against.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from ..errors import BlobError, StoreError
from ..kv.file import sweep
from .codecs import Data
from .files import FileSystem, explained
from .index import DiskIndex, IndexRow
from .record import RecordInfo, peek
from .tier import Budget, TierUsage

_log = logging.getLogger(__name__)
_SUFFIX = ".kv"
_BATCH = 512
T = TypeVar("T")


class DiskReader:
    """An open file; it stays what it was, also if the record is replaced or evicted meanwhile."""

    def __init__(self, files: FileSystem, fd: int) -> None:
        self._files = files
        self._fd = fd
        about = os.fstat(fd)
        self.nbytes, self.inode = about.st_size, about.st_ino

    def read(self, offset: int, size: int) -> Data:
        with explained():
            return self._files.pread(self._fd, size, offset)

    def abort(self) -> None:
        """A file read cannot be interrupted; only its own thread waits for it."""

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Disk:
    """Records in a folder of its own."""

    name = "disk"

    def __init__(
        self,
        folder: str | os.PathLike[str],
        budget: Budget,
        files: FileSystem | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder = Path(folder).expanduser()
        self._records = self._folder / "records"
        self._scratch = self._folder / "tmp"
        self._path = self._folder / "index.sqlite3"
        self.budget = budget
        self._files = files or FileSystem()
        self._clock = clock
        self._lock = threading.RLock()
        self._index: DiskIndex | None = None
        self._inode = 0
        self._closed = False
        self._stop = threading.Event()
        self._reconciling: threading.Thread | None = None
        try:
            self._make_folders()
        except StoreError as error:
            _log.warning("nothing can be kept in %s: %s", self._folder, error)
            return
        sweep(self._scratch)
        with suppress(StoreError):
            self._with_index(lambda _: None)
        self._reconcile_soon()

    @property
    def folder(self) -> Path:
        """The folder; files in it that are neither records nor the index are not touched."""
        return self._folder

    # Reading: the file alone.

    def open(self, key: bytes) -> DiskReader | None:
        fd = self._files.open(self._place(key))
        return None if fd is None else DiskReader(self._files, fd)

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        with explained():
            return [self._files.has(self._place(key)) for key in keys]

    # Writing: make room in the index, write, rename.

    def put(self, key: bytes, record: Sequence[bytes], info: RecordInfo) -> int:
        nbytes = sum(map(len, record))
        if nbytes > self.budget.record:
            raise StoreError("too_large", f"{nbytes} bytes are more than a record here may have")
        row = IndexRow(key, info.tenant, info.kind, nbytes, False, self._clock())
        self._make_folders()  # the user may have removed them to delete the records
        gone = self._with_index(lambda index: index.admit(row, self.budget))
        try:
            for one in gone:
                self._files.unlink(self._place(one))
            self._files.write_whole(self._place(key), record, self._scratch)
        except BaseException:
            with suppress(StoreError):
                self._with_index(lambda index: index.remove([key]))
            raise
        self.touch([key])  # a process that compared the index with the files meanwhile has removed the row
        if info.retain:
            self._with_index(lambda index: index.retain(key, self.budget))
        return len(gone)

    def touch(self, keys: Sequence[bytes]) -> None:
        unknown = self._with_index(lambda index: index.touch(keys, self._clock()))
        if rows := [row for key in unknown if (row := self._row(key)) is not None]:
            self._with_index(lambda index: index.add(rows))

    def discard(self, key: bytes) -> None:
        self._files.unlink(self._place(key))
        self._with_index(lambda index: index.remove([key]))

    def every_key(self) -> Iterator[bytes]:
        for shard in range(256):
            yield from self._listed(shard)

    def usage(self) -> TierUsage:
        return self._with_index(lambda index: index.usage())

    def probe(self) -> None:
        with explained():
            self._records.stat()

    def close(self) -> None:
        self._stop.set()
        self.settle()
        with self._lock:
            self._closed = True
            if self._index is not None:
                self._index.close()
                self._index = None

    def _make_folders(self) -> None:
        with explained():
            for one in (self._folder, self._records, self._scratch):
                one.mkdir(mode=0o700, parents=True, exist_ok=True)

    # The index.

    def settle(self) -> None:
        """Wait until the index has caught up with the files that were there at the start."""
        if (thread := self._reconciling) is not None:
            thread.join()

    def _with_index(self, use: Callable[[DiskIndex], T]) -> T:
        """What `use` returns; a damaged index is replaced by a new one, and the work is done there."""
        with self._lock:
            if self._closed:
                raise StoreError("closed", "the disk tier is closed")
            try:
                return use(self._current())
            except sqlite3.OperationalError as error:
                raise _unavailable(error) from error
            except sqlite3.DatabaseError as error:
                _log.warning("the index of the disk tier is damaged (%s) and is built again", error)
            try:
                self._replace_index()
                return use(self._current())
            except sqlite3.Error as error:
                raise _unavailable(error) from error

    def _current(self) -> DiskIndex:
        """The index under its name: another process may have replaced it."""
        try:
            inode = self._path.stat().st_ino
        except OSError:
            inode = 0
        if self._index is not None and inode != self._inode:
            self._index.close()
            self._index = None
            self._reconcile_soon()
        if self._index is None:
            self._index = DiskIndex(self._path)
            self._inode = self._path.stat().st_ino
        return self._index

    def _replace_index(self) -> None:
        if self._index is not None:
            self._index.close()
            self._index = None
        with explained(), (self._folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                DiskIndex(self._path).close()  # another process was faster
            except sqlite3.DatabaseError:
                for suffix in ("", "-wal", "-shm"):
                    self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        self._reconcile_soon()

    def _reconcile_soon(self) -> None:
        if self._stop.is_set() or (self._reconciling is not None and self._reconciling.is_alive()):
            return
        self._reconciling = threading.Thread(target=self._reconcile, name="kvilt-store-index", daemon=True)
        self._reconciling.start()

    def _reconcile(self) -> None:
        """Add files that the index lacks, and remove rows whose files are gone."""
        try:
            for shard in range(256):
                if self._stop.is_set():
                    return
                self._reconcile_shard(shard)
        except StoreError as error:
            _log.warning("the index of the disk tier could not be brought up to date: %s", error)
        except Exception:
            _log.exception("the index of the disk tier could not be brought up to date")

    def _reconcile_shard(self, shard: int) -> None:
        first = bytes([shard])
        known = self._with_index(lambda index: index.keys(first + bytes(31), first + b"\xff" * 31))
        there = self._listed(shard)
        missing = [key for key in there if key not in known]
        for at in range(0, len(missing), _BATCH):
            rows = [row for key in missing[at : at + _BATCH] if (row := self._row(key)) is not None]
            self._with_index(lambda index, rows=rows: index.add(rows))  # type: ignore[misc]
        gone = [key for key in known if key not in there and not self._place(key).exists()]
        if gone:
            self._with_index(lambda index: index.remove(gone))

    def _listed(self, shard: int) -> dict[bytes, None]:
        """The records of a shard, in the order in which a disk reads them fastest."""
        try:
            with os.scandir(self._records / f"{shard:02x}") as found:
                names = sorted((entry.inode(), entry.name) for entry in found)
        except OSError:
            return {}
        return {key: None for _, name in names if (key := _key_of(name, shard)) is not None}

    def _row(self, key: bytes) -> IndexRow | None:
        """The index row of a file. A file that is no record is removed; one of another format is evicted first."""
        try:
            if (reader := self.open(key)) is None:
                return None
        except StoreError:
            return None
        try:
            used_s = self._place(key).stat().st_mtime
            info = peek(reader.read, reader.nbytes)
            return IndexRow(key, info.tenant, info.kind, reader.nbytes, False, used_s)
        except BlobError as error:
            if error.field == "version":
                return IndexRow(key, "", "old", reader.nbytes, False, 0.0)
            with suppress(OSError, StoreError):  # a good record may have taken its place meanwhile
                if self._place(key).stat().st_ino == reader.inode:
                    self._files.unlink(self._place(key))
            return None
        except (OSError, StoreError):
            return None
        finally:
            reader.close()

    def _place(self, key: bytes) -> Path:
        name = key.hex()  # 64 hex digits, whatever the key: no name can lead elsewhere
        return self._records / name[:2] / (name + _SUFFIX)


def _key_of(name: str, shard: int) -> bytes | None:
    try:
        key = bytes.fromhex(name.removesuffix(_SUFFIX))
    except ValueError:
        return None
    return key if len(key) == 32 and key[0] == shard and name == key.hex() + _SUFFIX else None


def _unavailable(error: sqlite3.Error) -> StoreError:
    text = str(error)
    reasons = {"readonly": "read_only", "full": "disk_full", "unable to open": "read_only", "locked": "busy"}
    reason = next((reason for word, reason in reasons.items() if word in text), "index")
    return StoreError(reason, f"the index of the disk tier cannot be used: {text}")
