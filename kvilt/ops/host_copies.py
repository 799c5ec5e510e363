"""Copies of KV between host memory and a backend's device, and the order in which they happen.

Two streams run side by side: the compute stream runs kernels, the copy stream runs copies. Only the compute stream
reads and writes pages. The copy stream sees host memory and staging buffers alone. So pages need no care beyond what a
step needs, and four rules are enough:

1. A copy in begins after the compute stream has finished with its staging buffer.
2. The compute stream reads a staging buffer after the copy into it has ended.
3. A copy out begins after the compute stream has written its source, and the source lives until it has ended.
4. The host reads a copy out after it has ended, and host memory is used again after all copies from it have ended.

Refuses to know pages, layers and records.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

AHEAD = 3  # items of an upload that have a staging buffer: one in use, the others on their way
_ALIGN = 256  # bytes, so that kernels may read any part of a staging buffer


class CopyEvent(Protocol):
    """A point in a stream of copies."""

    def wait(self) -> None:
        """The host waits for it."""
        ...

    def compute_waits(self) -> None:
        """What the compute stream is given from now on begins after it. The host does not wait."""
        ...

    @property
    def done(self) -> bool: ...


class CopyStream(Protocol):
    """Copies one after the other, beside the compute stream."""

    def after_compute(self) -> None:
        """Copies from now on begin after all that the compute stream has been given so far."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Begin to copy. Between pinned memory and the device the host does not wait."""
        ...

    def record(self) -> CopyEvent:
        """The end of all copies so far."""
        ...


class HostMemory(Protocol):
    """Where copies out are kept on the host."""

    def empty(self, like: Tensor) -> Tensor:
        """Room for a tensor; it is free again when the last reference to it is gone."""
        ...

    def pinned(self, source: Tensor) -> Tensor:
        """The tensor, or a copy of it, in memory that a device reads without the host."""
        ...

    def note(self) -> str:
        """What a user should know of it; empty where there is nothing."""
        ...


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Tensors on the host that may still be arriving. Their shapes may be read at once, their numbers after `wait`."""

    tensors: tuple[Tensor, ...]
    event: CopyEvent | None = None  # None: they are there

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors, once they are there."""
        if self.event is not None:
            self.event.wait()
        return self.tensors


class HostCopies(Protocol):
    """How a backend copies between the host and its device."""

    def download(self, tensors: Sequence[Tensor]) -> HostCopy:
        """Copy tensors of the device to the host; no later work writes to them."""
        ...

    def uploads(self, items: Sequence[Sequence[Tensor]]) -> Generator[list[Tensor], None, None]:
        """The tensors of each item on the device, in order; copies of later items run while earlier ones are used.

        Those of an item may be used by work that is launched before the next one is asked for. Close the iterator if
        not all items are taken.
        """
        ...

    def note(self) -> str:
        """What a user should know of it; empty where there is nothing."""
        ...


class DirectCopies:
    """Copies that have ended when the call returns; where the device is the CPU there is nothing to copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def download(self, tensors: Sequence[Tensor]) -> HostCopy:
        return HostCopy(tuple(one.cpu() for one in tensors))

    def uploads(self, items: Sequence[Sequence[Tensor]]) -> Generator[list[Tensor], None, None]:
        for item in items:
            yield [one.to(self._device) for one in item]

    def note(self) -> str:
        return ""


class StagedCopies:
    """Copies on a stream of their own, through staging buffers on the device and pinned memory on the host."""

    def __init__(self, stream: CopyStream, memory: HostMemory, device: torch.device) -> None:
        self._stream, self._memory, self._device = stream, memory, device
        self._lock = threading.Lock()
        # Sources and targets of copies that may not have ended; what is let go of too early would be used again.
        self._held: deque[tuple[CopyEvent, Sequence[Tensor]]] = deque()

    def note(self) -> str:
        return self._memory.note()

    def download(self, tensors: Sequence[Tensor]) -> HostCopy:
        self._release()
        there = tuple(self._memory.empty(one) for one in tensors)
        self._stream.after_compute()
        for target, source in zip(there, tensors, strict=True):
            self._stream.copy(target, source)
        return HostCopy(there, self._recorded([*tensors, *there]))

    def uploads(self, items: Sequence[Sequence[Tensor]]) -> Generator[list[Tensor], None, None]:
        self._release()
        size = max((_staged_bytes(item) for item in items), default=0)
        buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in items[:AHEAD]]
        coming: deque[tuple[CopyEvent, list[Tensor]]] = deque()
        try:
            for index in range(len(items)):
                # The buffer of the item before this one is among them: all work with it is launched by now.
                for at in range(index + len(coming), min(len(items), index + len(buffers))):
                    coming.append(self._begin(items[at], buffers[at % len(buffers)]))
                event, there = coming.popleft()
                event.compute_waits()
                yield there
        finally:
            for event, _ in coming:  # of an iterator that was closed: its buffers go back to the compute stream
                event.compute_waits()

    def _begin(self, item: Sequence[Tensor], buffer: Tensor) -> tuple[CopyEvent, list[Tensor]]:
        """Copy one item into a buffer that the compute stream has been given the last work with."""
        there, at = [], 0
        sources = [one if self._is_there(one) else self._memory.pinned(one.contiguous()) for one in item]
        self._stream.after_compute()
        for one in sources:
            if self._is_there(one):
                there.append(one)
                continue
            target = buffer[at : at + one.nbytes].view(one.dtype).view(one.shape)
            self._stream.copy(target, one)
            there.append(target)
            at += _aligned(one.nbytes)
        return self._recorded(sources), there

    def _is_there(self, one: Tensor) -> bool:
        return one.device.type != "cpu"

    def _recorded(self, tensors: Sequence[Tensor]) -> CopyEvent:
        """The end of the copies so far, until which these tensors live."""
        event = self._stream.record()
        with self._lock:
            self._held.append((event, tensors))
        return event

    def _release(self) -> None:
        with self._lock:
            while self._held and self._held[0][0].done:
                self._held.popleft()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _staged_bytes(item: Sequence[Tensor]) -> int:
    return sum(_aligned(one.nbytes) for one in item)
