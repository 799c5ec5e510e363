"""File system calls of the disk tier: each succeeds completely or changes nothing, and failures have reasons."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import StoreError
from ..kv.file import create_temporary

_REASONS = {
    errno.ENOSPC: "disk_full",
    errno.EDQUOT: "disk_full",
    errno.EFBIG: "disk_full",
    errno.EROFS: "read_only",
    errno.EACCES: "read_only",
    errno.EPERM: "read_only",
    errno.EMFILE: "descriptors",
    errno.ENFILE: "descriptors",
    errno.ELOOP: "symlink",
}


@contextmanager
def explained() -> Iterator[None]:
    """An OSError as a StoreError with its reason."""
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, "io")
        raise StoreError(reason, f"the disk tier cannot go on: {os.strerror(error.errno or errno.EIO)}") from error


class FileSystem:
    """The real file system; tests replace it with one that fails."""

    def write(self, fd: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def pread(self, fd: int, size: int, offset: int) -> bytearray:
        """Up to `size` bytes; fewer at the end of the file."""
        made = bytearray(size)
        done = 0
        while done < size and (count := os.preadv(fd, [memoryview(made)[done:]], offset + done)):
            done += count
        return made if done == size else made[:done]

    def sync_folder(self, folder: Path) -> None:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def write_whole(self, path: Path, pieces: Sequence[bytes], scratch: Path) -> None:
        """Write a file durably and atomically; on a StoreError nothing is left."""
        with explained():
            fd, temporary = create_temporary(scratch)
            try:
                for piece in pieces:
                    self.write(fd, piece)
                self.sync(fd)
                if not path.parent.is_dir():
                    path.parent.mkdir(mode=0o700, exist_ok=True)
                    self.sync_folder(path.parent.parent)
                temporary.replace(path)
                self.sync_folder(path.parent)
            except BaseException:
                with suppress(OSError):
                    temporary.unlink(missing_ok=True)
                raise
            finally:
                os.close(fd)

    def open(self, path: Path) -> int | None:
        """A descriptor of a regular file, or None where there is none. Links are not followed."""
        with explained():
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            except FileNotFoundError:
                return None
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                raise StoreError("symlink", "a record is a regular file, and this is not one")
            return fd

    def has(self, path: Path) -> bool:
        """Whether there is a regular file of that name; a link to one is none."""
        try:
            return stat.S_ISREG(path.lstat().st_mode)
        except FileNotFoundError:
            return False

    def unlink(self, path: Path) -> None:
        with explained():
            path.unlink(missing_ok=True)
