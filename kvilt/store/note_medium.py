"""Where notes are kept: in a folder beside a disk's records, or on a Redis server. Refuses to know what they say."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ..errors import BlobError
from .files import FileSystem, explained


class NoteMedium(Protocol):
    """Small values by name. Every method may be called from any thread and raises StoreError, or nothing."""

    def names(self, suffix: str) -> list[str]:
        """The names that end so."""
        ...

    def read(self, name: str, most_bytes: int) -> bytes | None:
        """A value; None where there is none. One that is longer raises BlobError."""
        ...

    def write(self, name: str, pieces: Sequence[bytes], life_s: float) -> None:
        """Write a value completely or not at all; it may be removed after `life_s`."""
        ...

    def remove(self, name: str) -> None: ...


class NoteFiles:
    """Notes as files of a folder."""

    def __init__(self, folder: Path, files: FileSystem | None = None) -> None:
        """`folder` is the disk's own."""
        self._folder, self._scratch = folder / "notes", folder / "tmp"
        self._files = files or FileSystem()

    def names(self, suffix: str) -> list[str]:
        try:
            with explained(), os.scandir(self._folder) as entries:
                return sorted(entry.name for entry in entries if entry.name.endswith(suffix))
        except Exception:
            if not self._folder.exists():
                return []
            raise

    def read(self, name: str, most_bytes: int) -> bytes | None:
        if (fd := self._files.open(self._folder / name)) is None:
            return None
        try:
            size = os.fstat(fd).st_size
            if size > most_bytes:
                raise BlobError("size", "longer than all notes together may be")
            with explained():
                return bytes(self._files.pread(fd, size, 0))
        finally:
            os.close(fd)

    def write(self, name: str, pieces: Sequence[bytes], life_s: float) -> None:  # noqa: ARG002 (readers remove files)
        self._files.write_whole(self._folder / name, pieces, self._scratch)

    def remove(self, name: str) -> None:
        self._files.unlink(self._folder / name)
