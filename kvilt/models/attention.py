"""Grouped-query attention over pages: project, rotate, write, attention, project back.

Keys and values are read from pages only, also those written in this very step, so that a row's result does not depend
on how its prompt was cut.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..kv.layout import LayerSlot, Window
from ..ops.contract import AttentionMask, NewKV, Ops, RmsNorm
from .layers import AnyNorm, LayerContext, Linear, Norm
from .spec import AttentionSpec, RopeSpec


@dataclass(frozen=True, slots=True)
class Attention:
    """Weights of one layer's attention, and the place of its KV."""

    spec: AttentionSpec
    place: LayerSlot
    q: Linear
    k: Linear | None  # None where the layer reads the KV of another one
    v: Linear | None  # None where values are keys, too
    out: Linear
    q_norm: AnyNorm | None = None
    k_norm: AnyNorm | None = None
    v_norm: AnyNorm | None = None
    sinks: Tensor | None = None  # float32 [heads]: a logit of each head that joins its softmax and has no value
    gate: Linear | None = None  # of what the heads read

    def __call__(
        self, x: Tensor, context: LayerContext, residual: Tensor | None = None, norm: AnyNorm | None = None
    ) -> Tensor:
        """`x` [tokens, hidden], normalized first, to [tokens, hidden], plus `residual`; writes keys and values."""
        if self.k is None or context.written:
            return self._read(x, context, residual, norm)
        ops, spec = context.ops, self.spec
        store, paging = context.stores[self.place.group], context.paging[self.place.group]
        q, k, v, gate = self._projected(x, context, norm)
        rotation = context.rotations[spec.rope] if isinstance(spec.rope, RopeSpec) else None
        together = rotation is not None and context.tap is None and not context.repairs
        norms = self._head_norms() if together and spec.temperature is None else None
        if norms is None and not spec.qk_norm_whole:
            q, k = self._normed(q, k, context)
        if spec.temperature is not None:
            q = ops.scale_queries(q, paging.positions, spec.temperature)
        if rotation is not None and together:
            new = NewKV(k, v, rotation, norms)
            mixed = ops.attention(q, store, self.place.layer, paging, self.mask(), new)
            return self._project(mixed, gate, context, residual)
        if rotation is None:
            ops.write(store, self.place.layer, paging.slots, k, v)
        else:
            q = ops.rotate_and_write(store, self.place.layer, paging.slots, q, k, v, rotation)
        if context.tap is not None:
            context.tap.written(k, v)
        for repair in context.repairs:
            repair.write(ops, store, self.place, spec.rope, k, v)
        if context.tap is not None:
            context.tap.attended(ops, q, store, self.place.layer, paging, self.mask())
        mixed = ops.attention(q, store, self.place.layer, paging, self.mask())
        return self._project(mixed, gate, context, residual)

    def write(self, x: Tensor, context: LayerContext, norm: AnyNorm | None) -> None:
        """Only write keys and values of `x`, with the bits that a call writes."""
        ops, spec, place = context.ops, self.spec, self.place
        assert self.k is not None
        # Two calls: a backend may store weights of one call together, and theirs belong beside those of the queries.
        k, *other = (context.linears(x, (one,), norm)[0] for one in (self.k, self.v) if one is not None)
        v = (other[0] if other else k).view(len(x), -1, spec.head_dim)
        k = self._normed_heads(k, self.k_norm, ops)
        v = v if self.v_norm is None else self.v_norm(v, ops)
        rotation = context.rotations[spec.rope] if isinstance(spec.rope, RopeSpec) else None
        ops.write(context.stores[place.group], place.layer, context.paging[place.group].slots, k, v, rotation)
        for repair in context.repairs:
            repair.write(ops, context.stores[place.group], place, spec.rope, k, v)

    def _read(self, x: Tensor, context: LayerContext, residual: Tensor | None, norm: AnyNorm | None) -> Tensor:
        """Attention over KV that `write` or an earlier layer has written."""
        ops, spec, paging = context.ops, self.spec, context.paging[self.place.group]
        q, *gate = (context.linears(x, (one,), norm)[0] for one in (self.q, self.gate) if one is not None)
        q = self._normed_heads(q, self.q_norm, ops)
        if spec.temperature is not None:
            q = ops.scale_queries(q, paging.positions, spec.temperature)
        if isinstance(spec.rope, RopeSpec):
            q = ops.rotate(q, context.rotations[spec.rope])
        store, layer, mask = context.stores[self.place.group], self.place.layer, self.mask()
        if context.tap is not None:
            context.tap.attended(ops, q, store, layer, paging, mask)
        mixed = ops.attention(q, store, layer, paging, mask)
        return self._project(mixed, gate[0] if gate else None, context, residual)

    def _normed_heads(self, x: Tensor, norm: AnyNorm | None, ops: Ops) -> Tensor:
        """Queries or keys [tokens, heads, dim], normalized head by head or as a whole."""
        if self.spec.qk_norm_whole and norm is not None:
            x, norm = norm(x, ops), None
        x = x.view(len(x), -1, self.spec.head_dim)
        return x if norm is None else norm(x, ops)

    def _project(self, mixed: Tensor, gate: Tensor | None, context: LayerContext, residual: Tensor | None) -> Tensor:
        mixed = mixed.view(-1, self.spec.heads * self.spec.head_dim)
        mixed = mixed if gate is None else context.ops.sigmoid_mul(mixed, gate)
        return context.linear(mixed, self.out, residual)

    def _projected(
        self, x: Tensor, context: LayerContext, norm: AnyNorm | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys and values [tokens, heads, dim], and the gate of what heads read.

        Queries and keys are not rotated yet, nor normalized where each head is by itself.
        """
        maps = [one for one in (self.q, self.k, self.v, self.gate) if one is not None]
        parts = context.linears(x, maps, norm)
        gate = None if self.gate is None else parts.pop()
        q, k, v = parts if self.v is not None else (*parts, parts[1])
        if self.spec.qk_norm_whole:
            q, k = self._normed(q, k, context)
        q, k, v = (part.view(len(x), -1, self.spec.head_dim) for part in (q, k, v))
        return q, k, v if self.v_norm is None else self.v_norm(v, context.ops), gate

    def _head_norms(self) -> tuple[RmsNorm, RmsNorm] | None:
        """The norms of single heads that attention may do by itself."""
        if self.spec.qk_norm_whole or not isinstance(self.q_norm, Norm) or not isinstance(self.k_norm, Norm):
            return None
        return self.q_norm.pair, self.k_norm.pair

    def _normed(self, q: Tensor, k: Tensor, context: LayerContext) -> tuple[Tensor, Tensor]:
        if self.q_norm is None or self.k_norm is None:
            return q, k
        if isinstance(self.q_norm, Norm) and isinstance(self.k_norm, Norm):
            q, k = context.ops.rms_norms([q, k], [self.q_norm.pair, self.k_norm.pair])
            return q, k
        return self.q_norm(q, context.ops), self.k_norm(k, context.ops)

    def mask(self) -> AttentionMask:
        """Which keys a query sees, as the backend takes it."""
        window = self.spec.reach.tokens if isinstance(self.spec.reach, Window) else 0
        return AttentionMask(self.spec.scale, window, self.spec.soft_cap, self.sinks, self.spec.chunked)
