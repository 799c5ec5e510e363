"""The pieces of a transformer layer: linear maps, norms and the feed-forward block.

Reads like the equation; names no backend and no family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Protocol, TypeAlias

from torch import Tensor

from ..batch import PlacedRepair, Segment, UnrotatedKV
from ..kv.layout import LayerSlot
from ..ops.contract import (
    AttentionMask,
    LinearMap,
    Ops,
    PageStore,
    Paging,
    Prepared,
    RmsNorm,
    Rotation,
    StateSlots,
    StateStore,
)
from .spec import FeedForwardSpec, NoRope, RopeSpec
from .step_adapters import StepAdapters


class AttentionTap(Protocol):
    """Sees the inside of one layer's attention, and changes nothing."""

    def written(self, keys: Tensor, values: Tensor) -> None:
        """Keys before rotation, and values, of all tokens of the segment."""
        ...

    def attended(
        self, ops: Ops, query: Tensor, store: PageStore, layer: int, paging: Paging, mask: AttentionMask
    ) -> None:
        """Rotated queries, and where they look."""
        ...


class AllReduce(Protocol):
    """Sums a tensor over the ranks that share a model."""

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class LayerRepair:
    """A placed repair in one layer."""

    placed: PlacedRepair
    stored: UnrotatedKV  # of the layer, on the device
    rotations: Mapping[RopeSpec, Rotation]  # of the repaired positions

    def write(
        self, ops: Ops, store: PageStore, place: LayerSlot, rope: RopeSpec | NoRope, keys: Tensor, values: Tensor
    ) -> None:
        """Write the repaired tokens; `keys`, not rotated, and `values` are those of all tokens of the segment."""
        one, kept = self.placed, (self.stored.keys, self.stored.values)
        fresh = (keys[one.first : one.stop], values[one.first : one.stop])
        rotation = self.rotations[rope] if isinstance(rope, RopeSpec) else None
        ops.interpolate(store, place.layer, one.slots[place.group], one.interpolation, kept, fresh, rotation)


@dataclass(frozen=True, slots=True)
class LayerContext:
    """What the layers of one segment share: where KV goes and how positions rotate."""

    ops: Ops
    stores: tuple[PageStore, ...]  # one per layer group
    paging: tuple[Paging, ...]  # one per layer group
    rotations: Mapping[RopeSpec, Rotation]
    tap: AttentionTap | None = None  # set where a row wants to see this layer's attention
    step_adapters: StepAdapters | None = None  # some rows run on adapters
    repairs: tuple[LayerRepair, ...] = ()  # KV of tokens that some rows repair in this layer
    state_store: StateStore | None = None  # of models with recurrent state
    states: StateSlots | None = None
    layer_inputs: Tensor | None = None  # [tokens, layers, width], of models with inputs of each layer's own
    written: bool = False  # whether the KV of these tokens is in the pages already

    def linears(self, x: Tensor, maps: Sequence[Linear], norm: AnyNorm | None = None) -> list[Tensor]:
        """Several linear maps of the same input, normalized first, each token's adapter included."""
        if self.step_adapters is None:
            x, pair = apart(x, norm, self.ops)
            return self.ops.linears(x, [linear.map for linear in maps], pair)
        x = x if norm is None else norm(x, self.ops)
        outs = self.ops.linears(x, [linear.map for linear in maps])
        self.step_adapters.add(maps, x, outs, self.ops)
        return outs

    def normed_linears(self, x: Tensor, maps: Sequence[Linear], norm: AnyNorm | None) -> tuple[Tensor, list[Tensor]]:
        """The normalized input, and several linear maps of it."""
        if self.step_adapters is None and isinstance(norm, Norm):
            return self.ops.norm_linears(x, [linear.map for linear in maps], norm.pair)
        x = x if norm is None else norm(x, self.ops)
        return x, self.linears(x, maps)

    def linear(self, x: Tensor, linear: Linear, residual: Tensor | None = None) -> Tensor:
        """One of them, plus `residual`."""
        if linear.all_reduce is not None:
            return self._reduced(x, linear, linear.all_reduce, residual)
        out = linear(x, self.ops, residual)
        if self.step_adapters is not None:
            self.step_adapters.add([linear], x, [out], self.ops, residual is not None)
        return out

    def _reduced(self, x: Tensor, linear: Linear, all_reduce: AllReduce, residual: Tensor | None) -> Tensor:
        """A map whose inputs are shared out among ranks: the residual is added once, to the sum of all shares."""
        (part,) = self.linears(x, [linear])
        whole = all_reduce(part)
        return whole if residual is None else self.ops.add(residual, whole)

    def wanted(self, segment: Segment, rotations: Callable[[Tensor], Mapping[RopeSpec, Rotation]]) -> LayerContext:
        """For some tokens of the segment, after all of its tokens have written their KV."""
        inputs, own = self.layer_inputs, segment.tokens
        return replace(
            self,
            paging=segment.paging,
            rotations=rotations(segment.rotated_by),
            step_adapters=None if self.step_adapters is None else self.step_adapters.of(own),
            repairs=(),
            layer_inputs=None if inputs is None else inputs[own],
            written=True,
        )

    def of(self, tokens: Tensor) -> LayerContext:
        """For a block that sees only some tokens of the segment."""
        if self.step_adapters is None:
            return self
        return replace(self, step_adapters=self.step_adapters.of(tokens))


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight [out, in] and perhaps a bias [out]."""

    weight: Prepared
    bias: Tensor | None = None
    name: str = ""  # what adapters know it by
    all_reduce: AllReduce | None = None  # set where this is one rank's share of the inputs

    def __call__(self, x: Tensor, ops: Ops, residual: Tensor | None = None) -> Tensor:
        return ops.linear(x, self.weight, self.bias, residual)

    @property
    def map(self) -> LinearMap:
        """As the backend takes it."""
        return self.weight, self.bias


@dataclass(frozen=True, slots=True)
class Norm:
    """Root-mean-square norm with a learned scale."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor, ops: Ops) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)

    @property
    def pair(self) -> RmsNorm:
        """As the backend takes it together with the maps behind it."""
        return self.weight, self.eps


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Mean and variance norm with a learned scale and perhaps a bias."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor, ops: Ops) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)


AnyNorm: TypeAlias = Norm | LayerNorm


def apart(x: Tensor, norm: AnyNorm | None, ops: Ops) -> tuple[Tensor, RmsNorm | None]:
    """An input and its norm as the backend's products take them: they do root-mean-square norms themselves."""
    match norm:
        case None:
            return x, None
        case Norm():
            return x, norm.pair
        case LayerNorm():
            return norm(x, ops), None


@dataclass(frozen=True, slots=True)
class DenseFeedForward:
    """down(activation(gate(x)) * up(x))."""

    spec: FeedForwardSpec
    gate: Linear
    up: Linear
    down: Linear

    def __call__(
        self, x: Tensor, context: LayerContext, residual: Tensor | None = None, norm: AnyNorm | None = None
    ) -> Tensor:
        """The block of `x`, which is normalized first, plus `residual`."""
        return context.linear(self._opened(x, context, norm), self.down, residual)

    def _opened(self, x: Tensor, context: LayerContext, norm: AnyNorm | None) -> Tensor:
        ops, step_adapters, spec = context.ops, context.step_adapters, self.spec
        scaled = (spec.gate_scale, spec.down_scale) != (1.0, 1.0)
        adapted = step_adapters is not None and step_adapters.touches(self.gate.name, self.up.name)
        if not scaled and not adapted and spec.sparse_cut is None:
            x, pair = apart(x, norm, ops)
            return ops.gate_up(x, self.gate.map, self.up.map, spec.activation, pair)
        gate, up = context.linears(x, (self.gate, self.up), norm)
        if scaled:
            gate, up = gate * spec.gate_scale, up * spec.down_scale
        if spec.sparse_cut is not None:
            gate = ops.streams.gaussian_relu(gate, spec.sparse_cut)
        return ops.act_mul(gate, up, spec.activation)


@dataclass(frozen=True, slots=True)
class PlainFeedForward:
    """down(activation(up(x)))."""

    spec: FeedForwardSpec
    up: Linear
    down: Linear

    def __call__(
        self, x: Tensor, context: LayerContext, residual: Tensor | None = None, norm: AnyNorm | None = None
    ) -> Tensor:
        """The block of `x`, which is normalized first, plus `residual`."""
        (opened,) = context.linears(x, (self.up,), norm)
        return context.linear(context.ops.activate(opened, self.spec.activation), self.down, residual)


def linears_in(module: object) -> Iterator[Linear]:
    """Every linear map of a layer, a block, or several of them, in the order of their fields."""
    match module:
        case Linear():
            yield module
        case tuple():
            for one in module:
                yield from linears_in(one)
        case _ if is_dataclass(module):
            for field in fields(module):
                yield from linears_in(getattr(module, field.name))
