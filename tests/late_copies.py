"""Streams without a device: copies that happen as late, or as early, as the order that was asked for allows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvilt.ops.host_copies import StagedCopies


class FakeEvent:
    """A number of copies of a stream."""

    def __init__(self, stream: LateStream, count: int) -> None:
        self._stream, self._count = stream, count

    def wait(self) -> None:
        self._stream.run(self._count)

    def compute_waits(self) -> None:
        self._stream.run(self._count)

    @property
    def done(self) -> bool:
        return self._stream.ended >= self._count


class LateStream:
    """Copies happen when the host or the compute stream waits for them, which works at once."""

    def __init__(self) -> None:
        self.begun: list[tuple[Tensor, Tensor]] = []
        self.ended = 0

    def after_compute(self) -> None:
        pass

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.begun.append((target, source))

    def record(self) -> FakeEvent:
        return FakeEvent(self, len(self.begun))

    def run(self, count: int) -> None:
        while self.ended < count:
            target, source = self.begun[self.ended]
            target.copy_(source)
            self.ended += 1


class EarlyStream(LateStream):
    """Copies happen at once, and the work of the compute stream when a copy waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.compute: list[Callable[[], object]] = []

    def after_compute(self) -> None:
        for work in self.compute:
            work()
        self.compute.clear()

    def copy(self, target: Tensor, source: Tensor) -> None:
        super().copy(target, source)
        self.run(len(self.begun))


class OrdinaryMemory:
    """Memory of the host without slabs; what is not written yet is noise."""

    def empty(self, like: Tensor) -> Tensor:
        return (
            torch.empty(like.numel() * like.element_size(), dtype=torch.uint8)
            .fill_(0x7F)
            .view(like.dtype)
            .view(like.shape)
        )

    def pinned(self, source: Tensor) -> Tensor:
        return source

    def note(self) -> str:
        return ""


def staged(stream: LateStream) -> StagedCopies:
    return StagedCopies(stream, OrdinaryMemory(), torch.device("cpu"))
