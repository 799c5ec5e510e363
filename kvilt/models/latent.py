"""Multi-head latent attention (MLA) over pages, with absorbed projections.

All heads share what pages keep of a token: a compressed vector, and a rotated part. Keys and values of heads are never
made: a query goes through its head's key projection, and the compressed vector it finds through the value projection.
Prefill and decode do the same arithmetic, so that a row's result does not depend on how its prompt was cut.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..kv.layout import LayerSlot
from ..ops.contract import AttentionMask, NewKV, Prepared
from .layers import AnyNorm, LayerContext, Linear
from .spec import AttentionSpec, LatentSpec, RopeSpec


@dataclass(frozen=True, slots=True)
class QueryProjection:
    """From hidden states to queries by way of a compressed vector."""

    down: Linear
    norm: AnyNorm
    up: Linear


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Weights of one layer's attention, and the place of its KV."""

    spec: AttentionSpec
    place: LayerSlot
    q: Linear | QueryProjection
    kv_down: Linear
    k_rope: Linear
    kv_norm: AnyNorm
    key_up: Prepared  # [heads, kv_rank, plain_dim]: a query of a head to one of compressed vectors
    value_up: Prepared  # [heads, value_dim, kv_rank]
    out: Linear

    def __call__(
        self, x: Tensor, context: LayerContext, residual: Tensor | None = None, norm: AnyNorm | None = None
    ) -> Tensor:
        """`x` [tokens, hidden], normalized first, to [tokens, hidden], plus `residual`; writes keys and values."""
        ops, latent = context.ops, self.latent
        q, kv, k = self._projected(x, context, norm)
        query = ops.per_head_linear(q.view(len(x), self.spec.heads, -1), self.key_up, moved=latent.rope_dim)
        k, v = k.view(len(x), 1, -1), self.kv_norm(kv, ops).view(len(x), 1, -1)
        mixed = ops.per_head_linear(self._attended(query, k, v, context), self.value_up)
        return context.linear(mixed.view(len(x), -1), self.out, residual)

    def _projected(self, x: Tensor, context: LayerContext, norm: AnyNorm | None) -> list[Tensor]:
        """Queries [tokens, heads * dim], compressed vectors, and the part of keys that is rotated."""
        first = self.q.down if isinstance(self.q, QueryProjection) else self.q
        q, kv, k = context.linears(x, (first, self.kv_down, self.k_rope), norm)
        if isinstance(self.q, QueryProjection):
            (q,) = context.linears(q, (self.q.up,), self.q.norm)
        return [q, kv, k]

    def _attended(self, query: Tensor, k: Tensor, v: Tensor, context: LayerContext) -> Tensor:
        """The mean compressed vector of each head [tokens, heads, kv_rank]; writes keys and values first."""
        ops, place, mask = context.ops, self.place, self.mask()
        store, paging = context.stores[place.group], context.paging[place.group]
        assert isinstance(self.spec.rope, RopeSpec)
        rotation = context.rotations[self.spec.rope]
        if context.tap is None and not context.repairs:
            return ops.attention(query, store, place.layer, paging, mask, NewKV(k, v, rotation))
        query = ops.rotate_and_write(store, place.layer, paging.slots, query, k, v, rotation)
        if context.tap is not None:
            context.tap.written(k, v)
        for repair in context.repairs:
            repair.write(ops, store, place, self.spec.rope, k, v)
        if context.tap is not None:
            context.tap.attended(ops, query, store, place.layer, paging, mask)
        return ops.attention(query, store, place.layer, paging, mask)

    @property
    def latent(self) -> LatentSpec:
        assert self.spec.latent is not None
        return self.spec.latent

    @property
    def per_head_bytes(self) -> int:
        """Bytes of the projections of single heads, which adapters cannot change."""
        return self.key_up.nbytes + self.value_up.nbytes

    def mask(self) -> AttentionMask:
        """Which keys a query sees, as the backend takes it."""
        return AttentionMask(self.spec.scale)
