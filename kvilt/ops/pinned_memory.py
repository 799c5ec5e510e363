"""Pinned host memory in slabs: pinning is slow, so a slab is pinned once and cut into pieces that are used again.

What does not fit, and everything once pinning has failed, is ordinary memory: copies of it are slower, and right.
"""

from __future__ import annotations

import math
import threading
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .host_copies import CopyEvent

SLAB_BYTES = 256 << 20
_ALIGN = 512

Pin = Callable[[int], Tensor]  # so many bytes; raises RuntimeError where the system refuses


@dataclass(slots=True, eq=False)
class _Slab:
    """One pinned block, and its free ranges (start, stop), ascending, none beside another."""

    memory: npt.NDArray[np.uint8]
    free: list[tuple[int, int]] = field(default_factory=list)

    def take(self, nbytes: int) -> int | None:
        for i, (start, stop) in enumerate(self.free):
            if stop - start >= nbytes:
                self.free[i : i + 1] = [(start + nbytes, stop)] if start + nbytes < stop else []
                return start
        return None

    def give(self, start: int, stop: int) -> None:
        insort(self.free, (start, stop))
        joined: list[tuple[int, int]] = []
        for one in self.free:
            if joined and joined[-1][1] == one[0]:
                joined[-1] = (joined[-1][0], one[1])
            else:
                joined.append(one)
        self.free = joined


_Piece = tuple[_Slab, int, int]  # where it starts and stops


class PinnedMemory:
    """Pieces of at most `limit_bytes` of pinned memory. Methods may be called from any thread."""

    def __init__(
        self, pin: Pin, record: Callable[[], CopyEvent], limit_bytes: int, slab_bytes: int = SLAB_BYTES
    ) -> None:
        """`record` gives the end of all copies so far: a piece that is let go of is used again after it."""
        self._pin, self._record = pin, record
        self._limit_bytes, self._slab_bytes = limit_bytes, max(1, min(slab_bytes, limit_bytes))
        self._lock = threading.Lock()
        self._slabs: list[_Slab] = []
        self._gone: deque[_Piece] = deque()  # finalizers run anywhere, so they only leave a note
        self._resting: deque[tuple[CopyEvent, list[_Piece]]] = deque()
        self._refused = ""

    @property
    def pinned_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(len(slab.memory) for slab in self._slabs)

    def note(self) -> str:
        return self._refused and f"host copies of KV are not pinned, so they are slower: {self._refused}"

    def empty(self, like: Tensor) -> Tensor:
        """Room for a tensor of this shape."""
        nbytes = like.numel() * like.element_size()
        if not nbytes or (piece := self._take(-(-nbytes // _ALIGN) * _ALIGN)) is None:
            return torch.empty(like.shape, dtype=like.dtype)
        slab, start, _ = piece
        # An array of its own for each piece: tensors of it hold it, and when the last one is gone the piece is free.
        view = slab.memory[start : start + nbytes]
        weakref.finalize(view, self._gone.append, piece).atexit = False
        return torch.from_numpy(view).view(like.dtype).view(like.shape)

    def pinned(self, source: Tensor) -> Tensor:
        return source if source.is_pinned() else self.empty(source).copy_(source)

    def _take(self, nbytes: int) -> _Piece | None:
        with self._lock:
            self._collect()
            for slab in self._slabs:
                if (start := slab.take(nbytes)) is not None:
                    return slab, start, start + nbytes
            more = self._grown(nbytes)
            if more is None or (start := more.take(nbytes)) is None:
                return None
            return more, start, start + nbytes

    def _collect(self) -> None:
        """Take back pieces that are let go of, after all copies that were begun before."""
        gone = [self._gone.popleft() for _ in range(len(self._gone))]
        if gone:
            self._resting.append((self._record(), gone))
        while self._resting and self._resting[0][0].done:
            for slab, start, stop in self._resting.popleft()[1]:
                slab.give(start, stop)

    def _grown(self, nbytes: int) -> _Slab | None:
        size = self._slab_bytes * math.ceil(nbytes / self._slab_bytes)
        if self._refused or self.pinned_bytes + size > self._limit_bytes:
            return None
        try:
            memory = self._pin(size)
        except RuntimeError as error:
            self._refused = str(error).splitlines()[0]
            return None
        self._slabs.append(_Slab(memory.numpy(), [(0, size)]))
        return self._slabs[-1]
