"""Multi-head latent attention (MLA) over pages, with absorbed projections.

All heads share what pages keep of a token: a compressed vector, and a rotated part. Keys and values of heads are never
made: a query goes through its head's key projection, and the compressed vector it finds through the value projection.
Prefill and decode do the same arithmetic, so that a row's result does not depend on how its prompt was cut.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..kv.layout import LayerSlot
from ..ops.contract import AttentionMask, NewKV, Prepared, Rotation
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
        if context.written:
            (q,) = context.linears(x, (self._first_q,), norm)
            attended = self._read(self._query(q, context), context)
        else:
            q, kv, k = context.linears(x, (self._first_q, self.kv_down, self.k_rope), norm)
            attended = self._attended(self._query(q, context), *self._kv(kv, k, context), context)
        mixed = context.ops.per_head_linear(attended, self.value_up)
        return context.linear(mixed.view(len(x), -1), self.out, residual)

    def write(self, x: Tensor, context: LayerContext, norm: AnyNorm | None) -> None:
        """Only write keys and values of `x`, with the bits that a call writes."""
        ops, place = context.ops, self.place
        # Two calls: a backend may store weights of one call together, and theirs belong beside those of the queries.
        kv, k = (context.linears(x, (one,), norm)[0] for one in (self.kv_down, self.k_rope))
        key, value = self._kv(kv, k, context)
        store = context.stores[place.group]
        ops.write(store, place.layer, context.paging[place.group].slots, key, value, self._rotation(context))
        for repair in context.repairs:
            repair.write(ops, store, place, self.spec.rope, key, value)

    @property
    def _first_q(self) -> Linear:
        """The first linear map on the way from the layer's input to queries."""
        return self.q.down if isinstance(self.q, QueryProjection) else self.q

    def _query(self, q: Tensor, context: LayerContext) -> Tensor:
        """Queries of compressed vectors [tokens, heads, rope_dim + kv_rank], not rotated yet."""
        if isinstance(self.q, QueryProjection):
            (q,) = context.linears(q, (self.q.up,), self.q.norm)
        heads = q.view(len(q), self.spec.heads, -1)
        return context.ops.per_head_linear(heads, self.key_up, moved=self.latent.rope_dim)

    def _kv(self, kv: Tensor, k: Tensor, context: LayerContext) -> tuple[Tensor, Tensor]:
        """The part of keys that is rotated, and compressed vectors [tokens, 1, dim]."""
        return k.view(len(k), 1, -1), self.kv_norm(kv, context.ops).view(len(kv), 1, -1)

    def _rotation(self, context: LayerContext) -> Rotation:
        assert isinstance(self.spec.rope, RopeSpec)
        return context.rotations[self.spec.rope]

    def _read(self, query: Tensor, context: LayerContext) -> Tensor:
        """The mean compressed vector of each head, over KV that is already written."""
        ops, place = context.ops, self.place
        query = ops.rotate(query, self._rotation(context))
        return ops.attention(query, context.stores[place.group], place.layer, context.paging[place.group], self.mask())

    def _attended(self, query: Tensor, k: Tensor, v: Tensor, context: LayerContext) -> Tensor:
        """The mean compressed vector of each head [tokens, heads, kv_rank]; writes keys and values first."""
        ops, place, mask = context.ops, self.place, self.mask()
        store, paging = context.stores[place.group], context.paging[place.group]
        rotation = self._rotation(context)
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
