"""Operations of models with several residual streams or sparse activations (Gemma 3n), and plain torch for them.

Sums over streams are products and sums of whole tensors, one after the other, so a token's result has the same bits
whatever stands beside it.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

LEAST_SQUARE = 1e-5  # the least mean square that a vector is divided by


class StreamOps(Protocol):
    """What a backend does with the streams of tokens, [tokens, streams, hidden]."""

    def mix(self, x: Tensor, weights: Tensor) -> Tensor:
        """Stream j of a token becomes the sum over i of row j of its `weights` [tokens, streams²] times x_i."""
        ...

    def add(self, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        """Each stream j of `x` plus `weights` [tokens, streams] times `y` [tokens, hidden]."""
        ...

    def match_rms(self, x: Tensor, like: Tensor) -> Tensor:
        """Each row of `x` [rows, hidden], scaled to the root mean square of that row of `like`."""
        ...

    def gaussian_relu(self, x: Tensor, cut: float) -> Tensor:
        """relu(x - (mean + cut * deviation)) of each row: what is far above the mean of [tokens, out]."""
        ...


class TorchStreams:
    """Plain torch, on any device."""

    def mix(self, x: Tensor, weights: Tensor) -> Tensor:
        own = weights.float().view(len(x), x.shape[1], x.shape[1], 1)
        wide = x.float()
        out = own[:, :, 0] * wide[:, :1]
        for i in range(1, x.shape[1]):
            out = out + own[:, :, i] * wide[:, i : i + 1]
        return out.to(x.dtype)

    def add(self, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        return (x.float() + weights.float()[:, :, None] * y.float()[:, None]).to(x.dtype)

    def match_rms(self, x: Tensor, like: Tensor) -> Tensor:
        wide = x.float()
        target = like.float().square().mean(-1, keepdim=True).sqrt()
        own = wide.square().mean(-1, keepdim=True).clamp(min=LEAST_SQUARE).sqrt()
        return (wide * (target / own)).to(x.dtype)

    def gaussian_relu(self, x: Tensor, cut: float) -> Tensor:
        wide = x.float()
        mean = wide.mean(-1, keepdim=True)
        deviation = (wide - mean).square().mean(-1, keepdim=True).sqrt()
        return torch.relu(wide - (mean + deviation * cut)).to(x.dtype)
