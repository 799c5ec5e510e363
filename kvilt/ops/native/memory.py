"""Memory of the native backend: slabs that weights are packed into, and buffers that results use again.

Refuses to know what is in them.
"""

from __future__ import annotations

import mmap
import sys
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

SLAB_BYTES = 32 << 20
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
    # Straight from the system: pages that are never touched cost nothing, and all of it goes back at the end.
    block = mmap.mmap(-1, size_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE") and sys.platform == "linux":
        block.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(block, np.uint8)


@dataclass(frozen=True, slots=True)
class Place:
    """A result in a buffer, without keeping that buffer from others."""

    room: int
    index: int
    shape: tuple[int, ...]


class Buffers:
    """Float32 results. A buffer is used again once no tensor is left that looks at it.

    A new piece of memory costs the system a fault for each of its pages, which for the results of a long prompt takes
    longer than some of the products that fill them.
    """

    def __init__(self, spare_bytes: int = 256 << 20) -> None:
        self._spare_bytes = spare_bytes
        self._held: dict[int, list[npt.NDArray[np.float32]]] = {}  # by size, powers of two
        self._held_bytes = 0

    def empty(self, *shape: int) -> Tensor:
        """Room for a result, with noise in it."""
        size = prod(shape)
        room = 1 << max(10, (size - 1).bit_length())
        held = self._held.setdefault(room, [])
        for buffer in held:
            # Three know a free buffer: the list, this loop and the argument of getrefcount. A tensor is a fourth.
            if sys.getrefcount(buffer) == 3:
                return torch.from_numpy(buffer[:size]).view(shape)
        if self._held_bytes + 4 * room > self._spare_bytes:
            self._forget()  # buffers in use live on with their tensors
        buffer = np.empty(room, np.float32)
        self._held.setdefault(room, []).append(buffer)
        self._held_bytes += 4 * room
        return torch.from_numpy(buffer[:size]).view(shape)

    def place(self, tensor: Tensor) -> Place:
        """Where a result lies, for `at`. Says nothing about who may use the buffer: once no tensor looks at it, all."""
        at, shape = tensor.data_ptr(), tuple(tensor.shape)
        for room, held in self._held.items():
            for index, buffer in enumerate(held):
                if buffer.ctypes.data == at:
                    return Place(room, index, shape)
        raise AssertionError("this tensor does not begin where a buffer does")

    def at(self, place: Place) -> Tensor:
        """What lies there now. Only for buffers that are never forgotten."""
        return torch.from_numpy(self._held[place.room][place.index][: prod(place.shape)]).view(place.shape)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor begins in one of the buffers that are held."""
        at = tensor.data_ptr()
        held = (buffer for buffers in self._held.values() for buffer in buffers)
        return any(buffer.ctypes.data <= at < buffer.ctypes.data + buffer.nbytes for buffer in held)

    def _forget(self) -> None:
        self._held.clear()
        self._held_bytes = 0
