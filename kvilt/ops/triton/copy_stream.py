"""The copy stream of a CUDA device, beside the stream that kernels run on."""

from __future__ import annotations

import torch
from torch import Tensor

from ...config import available_memory_bytes
from ..host_copies import DirectCopies, HostCopies, StagedCopies
from ..pinned_memory import PinnedMemory

_SHARE = 4  # one part in so many of the host's free memory may be pinned: pinned memory is never swapped out


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def wait(self) -> None:
        self._event.synchronize()

    def compute_waits(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    @property
    def done(self) -> bool:
        return bool(self._event.query())


class CudaCopyStream:
    """Copies on a stream of their own; the compute stream is torch's current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def after_compute(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def record(self) -> _CudaEvent:
        event = torch.cuda.Event()
        event.record(self._stream)
        return _CudaEvent(event, self._device)


def host_copies(device: torch.device) -> HostCopies:
    """What copies between the host and this device."""
    if device.type != "cuda":
        return DirectCopies(device)
    stream = CudaCopyStream(device)
    return StagedCopies(stream, PinnedMemory(_pinned, stream.record, available_memory_bytes() // _SHARE), device)


def _pinned(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
