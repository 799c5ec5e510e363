"""A file mapped into memory as views that copy nothing, with a check that the file is still all there.

Knows no format. The map is private: a write through a view could never reach the file.
"""

from __future__ import annotations

import hashlib
import mmap
import sys
from contextlib import suppress
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from ..errors import ModelNotFound, WeightError

_HASH_STEP = 16 << 20


class MappedFile:
    """The bytes of one file, mapped; views keep the map alive after `close`.

    A file cut short after the map was made is refused when a view is asked for. A file cut while a view is being
    read still ends the process with SIGBUS: only a copy of everything could prevent that, and models are replaced by
    renaming a new file over the old one, which leaves the map intact.
    """

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                _check_size(path, size)
                self._hold(path, _map_private(file.fileno(), size), size)
        except FileNotFoundError as error:
            raise ModelNotFound(f"there is no file {str(path)!r}; check the path") from error
        except (OSError, ValueError) as error:
            raise WeightError("file", f"{path.name} cannot be mapped: {error}") from error

    @classmethod
    def in_memory(cls, name: str, data: bytes) -> Self:
        """The same over a copy of bytes that lie in no file, under a name for messages."""
        _check_size(Path(name), len(data))
        held = mmap.mmap(-1, len(data))
        held[:] = data
        own = cls.__new__(cls)
        own._hold(Path(name), held, len(data), anonymous=True)
        return own

    def _hold(self, path: Path, held: mmap.mmap, size: int, anonymous: bool = False) -> None:
        self.path, self.size, self._anonymous = path, size, anonymous
        self._map: mmap.mmap | None = held
        # numpy holds the map's buffer for as long as any slice lives, so closing can never leave a dangling view.
        self._bytes: npt.NDArray[np.uint8] | None = np.frombuffer(self._map, dtype=np.uint8)
        self._digest: str | None = None

    @property
    def map(self) -> mmap.mmap:
        """The map itself, for reading headers; raises once closed."""
        if self._map is None:
            raise WeightError("file", f"{self.path.name} is closed; open the checkpoint again")
        return self._map

    def view(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Bytes start..stop without a copy, after checking that the file still has them."""
        mapped = self.map
        now = self.size if self._anonymous else mapped.size()  # asks the descriptor the map keeps, not the path
        if now < stop:
            raise WeightError("file", f"{self.path.name} was cut from {self.size} to {now} bytes while in use")
        assert self._bytes is not None and 0 <= start <= stop <= self.size
        return self._bytes[start:stop]

    def will_need(self) -> None:
        """Tell the system to start reading the whole file."""
        if hasattr(mmap, "MADV_WILLNEED"):
            self.map.madvise(mmap.MADV_WILLNEED)

    def forget(self, start: int, stop: int) -> None:
        """Give the memory of bytes start..stop back; a later access reads them from the file again."""
        if self._anonymous:
            return  # there is no file to read them from
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED") and first < last and self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)

    def digest(self) -> str:
        """sha256 of every byte, computed once."""
        if self._digest is None:
            sha = hashlib.sha256()
            for start in range(0, self.size, _HASH_STEP):
                stop = min(start + _HASH_STEP, self.size)
                sha.update(self.view(start, stop).data)
                self.forget(start, stop)
            self._digest = sha.hexdigest()
        return self._digest

    def close(self) -> None:
        """Let go of the map; memory returns when the last view is gone."""
        held, self._map, self._bytes = self._map, None, None
        if held is None:
            return
        with suppress(BufferError):  # views are still out; the last of them closes it
            held.close()


def _check_size(path: Path, size: int) -> None:
    if size == 0:
        raise WeightError("file", f"{path.name} is empty; fetch it again")


def _map_private(descriptor: int, size: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
    # Writable because torch warns about every read-only buffer. NORESERVE because the kernel would otherwise count a
    # writable map as memory to be promised and refuse a model larger than the machine; Python names it from 3.13 on.
    reserve = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
    return mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE | reserve, prot=mmap.PROT_READ | mmap.PROT_WRITE)
