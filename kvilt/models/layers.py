"""The pieces of a transformer layer: linear maps, norms and the feed-forward block.

Reads like the equation; names no backend and no family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..ops.contract import AttentionMask, LinearMap, Ops, PageStore, Paging, Prepared, Rotation
from .spec import FeedForwardSpec, RopeSpec


class Tap(Protocol):
    """Sees the inside of one layer's attention, and changes nothing."""

    def written(self, keys: Tensor, values: Tensor) -> None:
        """Keys before rotation, and values, of all tokens of the segment."""
        ...

    def attended(
        self, ops: Ops, query: Tensor, store: PageStore, layer: int, paging: Paging, mask: AttentionMask
    ) -> None:
        """Rotated queries, and where they look."""
        ...


@dataclass(frozen=True, slots=True)
class Context:
    """What the layers of one segment share: where KV goes and how positions rotate."""

    ops: Ops
    stores: tuple[PageStore, ...]  # one per layer group
    paging: tuple[Paging, ...]  # one per layer group
    rotations: Mapping[RopeSpec, Rotation]
    tap: Tap | None = None  # somebody wants to see what this layer's attention does


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight [out, in] and perhaps a bias [out]."""

    weight: Prepared
    bias: Tensor | None = None

    def __call__(self, x: Tensor, ops: Ops, onto: Tensor | None = None) -> Tensor:
        return ops.linear(x, self.weight, self.bias, onto)

    @property
    def map(self) -> LinearMap:
        """As a backend wants to hear it."""
        return self.weight, self.bias


@dataclass(frozen=True, slots=True)
class Norm:
    """Root-mean-square norm with a learned scale."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor, ops: Ops) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class FeedForward:
    """down(activation(gate(x)) * up(x))."""

    spec: FeedForwardSpec
    gate: Linear
    up: Linear
    down: Linear

    def __call__(self, x: Tensor, context: Context, onto: Tensor | None = None) -> Tensor:
        ops = context.ops
        return self.down(ops.gated(x, self.gate.map, self.up.map, self.spec.activation), ops, onto)
