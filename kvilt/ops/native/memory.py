"""Memory of the native backend: slabs that weights are packed into, and buffers that results use again.

Refuses to know what is in them.
"""

from __future__ import annotations

import mmap
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

SLAB_BYTES = 32 << 20
HUGE_PAGE_BYTES = 2 << 20
_ALIGN = 64


class Slabs:
    """Room for weights, one after the other in large pieces, so that few and large pages of memory hold a model."""

    def __init__(self) -> None:
        self._slab: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._used = 0

    def take(self, size_bytes: int) -> Tensor:
        """Zeroed bytes that belong to the caller; a slab lives as long as any piece of it."""
        if self._used + size_bytes > len(self._slab):
            self._slab, self._used = _slab(max(size_bytes, SLAB_BYTES)), 0
        piece = self._slab[self._used : self._used + size_bytes]
        self._used += -(-size_bytes // _ALIGN) * _ALIGN
        return torch.from_numpy(piece)


def _slab(size_bytes: int) -> npt.NDArray[np.uint8]:
    """Memory that begins at a large page, if the system has them."""
    # Straight from the system: pages that are never touched cost nothing, and all of it goes back at the end.
    block = _private(size_bytes + HUGE_PAGE_BYTES)
    if hasattr(mmap, "MADV_HUGEPAGE") and sys.platform == "linux":
        block.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(block, np.uint8)
    first = -whole.ctypes.data % HUGE_PAGE_BYTES
    return whole[first : first + size_bytes]


def _private(size_bytes: int) -> mmap.mmap:
    """Memory of this process alone. Linux gives large pages to it, but none to what is shared, which is the default."""
    if sys.platform == "win32":
        return mmap.mmap(-1, size_bytes)
    return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


@dataclass(frozen=True, slots=True)
class BufferView:
    """A result in a buffer, without keeping that buffer from others."""

    room: int
    index: int
    shape: tuple[int, ...]


_Array: TypeAlias = npt.NDArray[np.float32]


class _Buffer:
    """A piece of memory, and weak references to the arrays that tensors look at it through.

    Each result gets an array of its own, which the storage of its tensor holds as long as any view of it lives. So a
    buffer is free when these references are dead, whatever the interpreter counts.
    """

    __slots__ = ("also", "data", "lent")

    def __init__(self, room: int) -> None:
        self.data: _Array = np.empty(room, np.float32)
        self.lent: Callable[[], _Array | None] = _nothing
        self.also: list[weakref.ref[_Array]] = []  # rare, and so kept apart from the first

    def lend(self, size: int, shape: tuple[int, ...]) -> Tensor:
        """The tensor that holds this memory from now on."""
        array = self.data[:size].reshape(shape)
        self.lent = weakref.ref(array)
        return torch.from_numpy(array)

    def shared(self) -> bool:
        return any(array() is not None for array in self.also)

    def share(self, shape: tuple[int, ...]) -> Tensor:
        """One more tensor on this memory."""
        array = self.data[: prod(shape)].reshape(shape)
        self.also = [one for one in self.also if one() is not None] + [weakref.ref(array)]
        return torch.from_numpy(array)


def _nothing() -> None:
    return None


class Buffers:
    """Float32 results. A buffer is used again once no tensor is left that looks at it.

    A new piece of memory costs the system a fault for each of its pages, which for the results of a long prompt takes
    longer than some of the products that fill them.
    """

    def __init__(self, spare_bytes: int = 256 << 20) -> None:
        self._spare_bytes = spare_bytes
        self._held: dict[int, list[_Buffer]] = {}  # by size, powers of two
        self._held_bytes = 0

    def empty(self, *shape: int) -> Tensor:
        """Room for a result, with noise in it."""
        size = prod(shape)
        room = 1 << max(10, (size - 1).bit_length())
        for buffer in self._held.setdefault(room, []):
            if buffer.lent() is None and not (buffer.also and buffer.shared()):
                return buffer.lend(size, shape)
        if self._held_bytes + 4 * room > self._spare_bytes:
            self._forget()  # buffers in use live on with their tensors
        buffer = _Buffer(room)
        self._held.setdefault(room, []).append(buffer)
        self._held_bytes += 4 * room
        return buffer.lend(size, shape)

    def place(self, tensor: Tensor) -> BufferView:
        """Where a result lies, for `at`. Does not keep the buffer: it is used again once no tensor looks at it."""
        at, shape = tensor.data_ptr(), tuple(tensor.shape)
        for room, held in self._held.items():
            for index, buffer in enumerate(held):
                if buffer.data.ctypes.data == at:
                    return BufferView(room, index, shape)
        raise AssertionError("this tensor does not begin where a buffer does")

    def at(self, place: BufferView) -> Tensor:
        """What lies there now. Only for buffers that are never forgotten."""
        return self._held[place.room][place.index].share(place.shape)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor begins in one of the buffers that are held."""
        at = tensor.data_ptr()
        held = (buffer.data for buffers in self._held.values() for buffer in buffers)
        return any(data.ctypes.data <= at < data.ctypes.data + data.nbytes for data in held)

    def _forget(self) -> None:
        self._held.clear()
        self._held_bytes = 0
