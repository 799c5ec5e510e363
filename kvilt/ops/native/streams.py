"""Residual streams on the native kernels; where the installed ones are older and lack these, plain torch does it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from ..streams import StreamOps, TorchStreams
from .border import F32Address, check_dims, checked, f32
from .memory import Buffers

if TYPE_CHECKING:
    from _kvilt_native import KernelRunner


class _HasBuffers(Protocol):
    @property
    def buffers(self) -> Buffers: ...


class NativeStreams:
    """The streams of one backend, whose buffers change while a step is recorded."""

    def __init__(self, runner: KernelRunner, backend: _HasBuffers) -> None:
        self._runner, self._backend = runner, backend

    def mix(self, x: Tensor, weights: Tensor) -> Tensor:
        check_dims("x", x, 3)
        weights = checked("weights", weights.contiguous(), (len(x), x.shape[1] ** 2))
        return self._streams(x, F32Address(0), weights)

    def add(self, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        check_dims("x", x, 3)
        y = checked("y", y.contiguous(), (len(x), x.shape[2]))
        weights = checked("weights", weights.contiguous(), tuple(x.shape[:2]))
        return self._streams(x, f32(y), weights)

    def match_rms(self, x: Tensor, like: Tensor) -> Tensor:
        check_dims("x", x, 2)
        x, like = checked("x", x.contiguous(), x.shape), checked("like", like.contiguous(), x.shape)
        out = self._backend.buffers.empty(*x.shape)
        self._runner.match_rms(f32(x), f32(like), x.shape[0], x.shape[1], f32(out))
        return out

    def gaussian_relu(self, x: Tensor, cut: float) -> Tensor:
        check_dims("x", x, 2)
        x = checked("x", x.contiguous(), x.shape)
        out = self._backend.buffers.empty(*x.shape)
        self._runner.gaussian_relu(f32(x), cut, x.shape[0], x.shape[1], f32(out))
        return out

    def _streams(self, x: Tensor, y: F32Address, weights: Tensor) -> Tensor:
        x = checked("x", x.contiguous(), x.shape)
        out = self._backend.buffers.empty(*x.shape)
        tokens, streams, columns = x.shape
        self._runner.streams(f32(x), y, f32(weights), tokens, streams, columns, f32(out))
        return out


def streams_of(runner: KernelRunner, backend: _HasBuffers) -> StreamOps:
    """Those of the installed kernels, or plain torch."""
    return NativeStreams(runner, backend) if hasattr(runner, "streams") else TorchStreams()
