"""From a checkpoint to a decoder: read the spec, match every tensor, prepare the weights for a backend."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import WeightError
from ..kv.layout import KVLayout, LayerSlot
from ..ops.contract import Activation, Ops, Prepared
from ..quant.tensor import QuantTensor, Weight
from ..quant.unpack import dequantize
from ..weights.names import ExpectedTensor, match
from ..weights.source import Checkpoint
from .altup import HALF, AltUpLayer
from .attention import Attention
from .decoder import Decoder, Layer, Mixer
from .expert_slices import ExpertSlice, expert_slices
from .experts import DenseBeside, Experts, FeedForward
from .families.family import CheckpointDialect, expert_part
from .families.registry import recognise
from .fused_slice import FusedSlice
from .latent import LatentAttention
from .latent_loading import latent_attention, per_head_shapes
from .layer_shapes import layer_shapes, with_biases
from .layers import AnyNorm, DenseFeedForward, LayerNorm, Linear, Norm, PlainFeedForward
from .recurrent import AttentionAndRecurrent
from .recurrent_loading import recurrent_block
from .rope import frequencies
from .spec import AttentionSpec, ExpertsSpec, FeedForwardSpec, LayerSpec, ModelSpec, RopeSpec
from .stream_loading import (
    laurel,
    per_layer_block,
    per_layer_inputs,
    stream_entry,
    stream_router,
    stream_slices,
    stream_tensors,
)
from .stream_spec import AltUpSpec

Progress = Callable[[int, int], None]  # tensors done, tensors in all
EXTRA_LAYERS = 8  # the most that predict further tokens
# Tensors that some checkpoints keep with a dimension of one, and others without.
LOOSE = ("selection_bias", "shared_gate", "conv", "a_log", "skip")
FLAT = ("memory_norm",)  # of several groups, each a row of its own in some checkpoints


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    """The architecture of a checkpoint, without touching its weights."""
    return recognise(checkpoint).dialect.spec(checkpoint)


def assemble(
    checkpoint: Checkpoint, spec: ModelSpec, layout: KVLayout, ops: Ops, progress: Progress | None = None
) -> Decoder:
    """A decoder with this checkpoint's weights; raises a report if a tensor is missing, extra or misshapen."""
    dialect = recognise(checkpoint).dialect
    loader = _Loader(checkpoint, *locate(checkpoint, spec, dialect), ops, dialect, spec, progress)
    embedding = loader.weight("embedding")
    slots, streams = layout.slots(), spec.altup
    last = _scaled(loader.norm("norm"), spec.logit_scale)
    if streams is not None:  # it norms the sum of all streams in the place of their mean
        last = replace(last, eps=last.eps * streams.streams**2)
    return Decoder(
        spec=spec,
        ops=ops,
        embedding=embedding,
        layers=tuple(_layer(loader, i, layer, _slots_of(i, layer, slots)) for i, layer in enumerate(spec.layers)),
        norm=last,
        head=Linear(embedding if spec.tied_head else loader.weight("head"), name="head"),
        frequencies={rope: frequencies(rope).to(ops.device) for rope in _ropes(spec)},
        position_embedding=loader.weight("position_embedding") if spec.learned_positions else None,
        per_layer=None if spec.per_layer is None else per_layer_inputs(loader, spec.per_layer, spec.hidden_size),
        streams=None if streams is None else stream_entry(loader, streams),
    )


class Located(NamedTuple):
    """Where the parts of a model lie in a checkpoint, by our names."""

    found: Mapping[str, str]  # tensors, and what the checkpoint calls them
    slices: Mapping[str, FusedSlice | ExpertSlice]  # parts that are a share of a tensor


def locate(checkpoint: Checkpoint, spec: ModelSpec, dialect: CheckpointDialect) -> Located:
    """Find every tensor of a model; raises a report if one is missing, extra or misshapen."""
    present = frozenset(checkpoint.tensors.names())
    needed = dict(needed_tensors(spec, dialect, present))
    found = match(needed, checkpoint.tensors, tuple(_ignored(spec, dialect)))
    return Located(found, slices_of(spec, dialect, present))


def slices_of(
    spec: ModelSpec, dialect: CheckpointDialect, present: Container[str]
) -> dict[str, FusedSlice | ExpertSlice]:
    """The parts that are a share of a tensor; `present` are the checkpoint's tensors."""
    return {**dict(_slices(spec, dialect, present)), **dict(stream_slices(spec, dialect))}


def tensor_shapes(checkpoint: Checkpoint, present: Container[str] = ()) -> dict[str, tuple[int, ...]]:
    """The tensors that a model of this configuration needs, as its checkpoints call them.

    `present`: which of the names that only some checkpoints have are among them.
    """
    dialect = recognise(checkpoint).dialect
    return {one.name: one.shape for _, one in needed_tensors(dialect.spec(checkpoint), dialect, present)}


def _slots_of(index: int, layer: LayerSpec, slots: Mapping[int, tuple[LayerSlot, ...]]) -> tuple[LayerSlot, ...]:
    """Where a layer finds its KV and its state; one without any finds that of the layer it reads."""
    shared = layer.attention.shared_with
    return slots.get(index if shared is None else shared, ())


def _ignored(spec: ModelSpec, dialect: CheckpointDialect) -> Iterator[str]:
    """Patterns of tensors that may be there without being used."""
    yield from dialect.ignored
    if spec.tied_head:
        yield dialect.names["head"]
    if dialect.extra_layers:
        before, _, _ = dialect.names["attention_norm"].partition("{i}")
        yield from (f"{before}{len(spec.layers) + extra}.*" for extra in range(EXTRA_LAYERS))


def _ropes(spec: ModelSpec) -> list[RopeSpec]:
    return [rope for rope in dict.fromkeys(layer.attention.rope for layer in spec.layers) if isinstance(rope, RopeSpec)]


def needed_tensors(
    spec: ModelSpec, dialect: CheckpointDialect, present: Container[str]
) -> Iterator[tuple[str, ExpectedTensor]]:
    """Every tensor the spec asks for, by our name; `present` are those of the checkpoint."""
    width = spec.hidden_size
    yield "embedding", ExpectedTensor(dialect.names["embedding"], (spec.vocab_size, width))
    for name in with_biases(["norm"], spec):
        yield name, ExpectedTensor(dialect.names[name], (width,))
    if not spec.tied_head:
        yield "head", ExpectedTensor(dialect.names["head"], (spec.vocab_size, width))
    if spec.learned_positions:
        yield "position_embedding", ExpectedTensor(dialect.names["position_embedding"], (spec.context, width))
    yield from stream_tensors(spec, dialect)
    for i, layer in enumerate(spec.layers):
        shapes = layer_shapes(layer, spec)
        for whole, parts in _fused_in(dialect, shapes):
            each = [shapes.pop(part) for part in parts]
            shapes[whole] = (sum(rows for rows, *_ in each), *each[0][1:])
        if layer.attention.latent is not None:
            cut = "key_up" in dialect.names and dialect.name_of(i, "key_up") in present
            shapes |= per_head_shapes(layer.attention.heads, layer.attention.latent, cut)
        for name, shape in shapes.items():
            if expert_part(name) not in dialect.stacks:
                stored = shape[::-1] if name in dialect.transposed else shape
                how = {"loose": name in LOOSE, "flat": name in FLAT}
                yield f"{i}.{name}", ExpectedTensor(dialect.name_of(i, name), stored, **how)
        for part in expert_slices(i, layer, shapes, dialect, present).values():
            yield from ((name, ExpectedTensor(name, shape)) for name, shape in part.wholes.items())


def _fused_in(dialect: CheckpointDialect, shapes: Mapping[str, object]) -> list[tuple[str, tuple[str, ...]]]:
    """The fused tensors that a layer has: all of their parts are parts of it."""
    return [(whole, parts) for whole, parts in dialect.fused.items() if shapes.keys() >= set(parts)]


def _slices(
    spec: ModelSpec, dialect: CheckpointDialect, present: Container[str]
) -> Iterator[tuple[str, FusedSlice | ExpertSlice]]:
    """Where the parts of fused and stacked tensors lie."""
    for i, layer in enumerate(spec.layers):
        shapes = layer_shapes(layer, spec)
        for whole, parts in _fused_in(dialect, shapes):
            order = dialect.row_orders[whole](layer) if whole in dialect.row_orders else None
            start = 0
            for part in parts:
                stop = start + shapes[part][0]
                yield f"{i}.{part}", FusedSlice(f"{i}.{whole}", start, stop, order)
                start = stop
        for name, expert in expert_slices(i, layer, shapes, dialect, present).items():
            yield f"{i}.{name}", expert


@dataclass(slots=True)
class _Loader:
    """Takes tensors out of a checkpoint by our names, in the form the backend wants."""

    checkpoint: Checkpoint
    found: Mapping[str, str]
    slices: Mapping[str, FusedSlice | ExpertSlice]
    ops: Ops
    dialect: CheckpointDialect
    spec: ModelSpec
    progress: Progress | None
    taken: set[str] = field(default_factory=set)

    def _take(self, name: str) -> Weight:
        tensor = self.checkpoint.tensors.tensor(self.found[name])
        self.taken.add(name)  # a fused tensor is taken once for each of its parts
        if self.progress is not None:
            self.progress(len(self.taken), len(self.found))
        return tensor

    def weight(self, name: str) -> Prepared:
        part = self.slices.get(name)
        wholes = (name,) if part is None else tuple(part.wholes)
        weights = [self._take(whole) for whole in wholes]
        if wholes[0].rpartition(".")[2] in self.dialect.transposed:
            weights = [self._plain(whole, weight).T for whole, weight in zip(wholes, weights, strict=True)]
        own = weights[0] if part is None else part.take(*weights)
        prepared = self.ops.prepare(own.unsqueeze(0) if isinstance(own, Tensor) and own.dim() == 1 else own)
        if part is None or part.last:
            for whole in wholes:
                self.checkpoint.tensors.forget(self.found[whole])  # so that a model is never in memory twice
        return prepared

    def vector(self, name: str, dtype: torch.dtype) -> Tensor:
        part = self.slices.get(name)
        wholes = (name,) if part is None else tuple(part.wholes)
        tensor = self._plain(wholes[0], self._take(wholes[0]))
        own = tensor if part is None else part.take(tensor)
        assert isinstance(own, Tensor)
        if transform := self.dialect.transforms.get(name.rpartition(".")[2]):
            own = transform(own.float())
        return own.to(self.ops.device, dtype, copy=True, memory_format=torch.contiguous_format)

    def _plain(self, name: str, tensor: Weight) -> Tensor:
        if isinstance(tensor, QuantTensor):
            raise WeightError(self.found[name], f"is packed as {tensor.format.name}, expected plain floats")
        return tensor

    def linear(self, name: str) -> Linear:
        bias = f"{name}_bias"
        held = bias in self.found or bias in self.slices
        return Linear(self.weight(name), self.vector(bias, self.ops.dtype) if held else None, name)

    def floats(self, name: str) -> Tensor:
        """A tensor as floats, packed or not."""
        tensor = self._take(name)
        plain = dequantize(tensor) if isinstance(tensor, QuantTensor) else tensor
        self.checkpoint.tensors.forget(self.found[name])
        return plain

    def norm(self, name: str, eps: float | None = None) -> AnyNorm:
        weight, shift, bias = self.vector(name, torch.float32), self.dialect.norm_shift, f"{name}_bias"
        weight, eps = weight + shift if shift else weight, self.spec.norm_eps if eps is None else eps
        if self.spec.norm_kind == "rms":
            return Norm(weight, eps)
        own = self.vector(bias, torch.float32) if bias in self.found else None
        return LayerNorm(weight, own, eps)

    @property
    def norm_eps(self) -> float:
        return self.spec.norm_eps

    def plain_norm(self, size: int) -> Norm:
        """A norm without a learned scale."""
        return Norm(torch.ones(size, device=self.ops.device), self.spec.norm_eps)

    def maybe_norm(self, name: str) -> AnyNorm | None:
        return self.norm(name) if name in self.found else None


def _scaled(norm: AnyNorm, scale: float) -> AnyNorm:
    """A norm times a factor: the last one carries that of the logits, since the head is linear."""
    match norm:
        case Norm(weight, eps):
            return Norm(weight * scale, eps)
        case LayerNorm(weight, bias, eps):
            return LayerNorm(weight * scale, None if bias is None else bias * scale, eps)


def _layer(loader: _Loader, index: int, spec: LayerSpec, slots: Sequence[LayerSlot]) -> Layer | AltUpLayer:
    if loader.spec.altup is not None:
        return _altup_layer(loader, index, spec, loader.spec.altup, slots[0])

    def at(name: str) -> str:
        return f"{index}.{name}"

    scale = loader.vector(at("output_scale"), torch.float32).item() if spec.output_scale else 1.0
    last = loader.maybe_norm(at("post_feed_forward_norm"))
    per_layer = per_layer_block(loader, index, _activation(spec), scale) if loader.spec.per_layer is not None else None
    return Layer(
        loader.maybe_norm(at("attention_norm")),
        None if spec.blocks == "feed_forward" else _mixer(loader, index, spec, slots),
        loader.maybe_norm(at("feed_forward_norm")),
        None if spec.blocks == "mixer" else _feed_forward(loader, index, spec.feed_forward),
        loader.maybe_norm(at("post_attention_norm")),
        last if last is None or per_layer is not None else _scaled(last, scale),
        spec.parallel,
        spec.residual_scale,
        scale,
        per_layer,
    )


def _activation(spec: LayerSpec) -> Activation:
    block = spec.feed_forward
    return block.activation if isinstance(block, FeedForwardSpec) else block.expert.activation


def _altup_layer(loader: _Loader, index: int, spec: LayerSpec, altup: AltUpSpec, place: LayerSlot) -> AltUpLayer:
    def at(name: str) -> str:
        return f"{index}.{name}"

    attention = _attention(loader, index, spec.attention, place)
    assert isinstance(attention, Attention)
    others = torch.ones(altup.streams, device=loader.ops.device, dtype=loader.ops.dtype)
    others[0] = 0.0
    return AltUpLayer(
        altup,
        stream_router(loader, index, altup, loader.spec.hidden_size),
        laurel(loader, index),
        loader.norm(at("attention_norm")),
        attention,
        _scaled(loader.norm(at("post_attention_norm")), HALF),
        loader.norm(at("feed_forward_norm")),
        _feed_forward(loader, index, spec.feed_forward),
        loader.norm(at("post_feed_forward_norm")),
        loader.vector(at("stream_scale"), loader.ops.dtype) if altup.scaled else None,
        per_layer_block(loader, index, _activation(spec), 1.0),
        others,
    )


def _mixer(loader: _Loader, index: int, spec: LayerSpec, slots: Sequence[LayerSlot]) -> Mixer:
    """Attention, what stands in its place, or both; of two slots the second is that of the state."""
    if spec.recurrent is None:
        return _attention(loader, index, spec.attention, slots[0])
    recurrent = recurrent_block(loader, index, spec.recurrent, slots[-1])
    if spec.beside is None:
        return recurrent
    attention = _attention(loader, index, spec.attention, slots[0])
    assert isinstance(attention, Attention)
    return AttentionAndRecurrent(attention, recurrent, *spec.beside)


def _attention(loader: _Loader, index: int, spec: AttentionSpec, place: LayerSlot) -> Attention | LatentAttention:
    if spec.latent is not None:
        return latent_attention(loader, index, spec, spec.latent, place)

    def at(name: str) -> str:
        return f"{index}.{name}"

    return Attention(
        spec,
        place,
        q=loader.linear(at("q")),
        k=loader.linear(at("k")) if spec.shared_with is None else None,
        v=None if spec.values_are_keys or spec.shared_with is not None else loader.linear(at("v")),
        out=loader.linear(at("out")),
        q_norm=loader.plain_norm(spec.head_dim) if spec.qk_norm_plain else loader.maybe_norm(at("q_norm")),
        k_norm=loader.plain_norm(spec.head_dim) if spec.qk_norm_plain else loader.maybe_norm(at("k_norm")),
        v_norm=loader.plain_norm(spec.head_dim) if spec.v_norm else None,
        sinks=loader.vector(at("sinks"), torch.float32) if spec.sinks else None,
        gate=loader.linear(at("q_gate")) if spec.output_gate else None,
    )


def _feed_forward(loader: _Loader, index: int, spec: FeedForwardSpec | ExpertsSpec) -> FeedForward:
    match spec:
        case FeedForwardSpec(gated=True):
            return _dense(loader, f"{index}.", spec)
        case FeedForwardSpec():
            return _plain(loader, f"{index}.", spec)
        case ExpertsSpec():
            return _experts(loader, f"{index}.", spec)


def _experts(loader: _Loader, prefix: str, spec: ExpertsSpec) -> Experts:
    router = loader.linear(f"{prefix}router")
    each = tuple(_dense(loader, f"{prefix}experts.{e}.", spec.expert) for e in range(spec.experts))
    bias, shared = f"{prefix}selection_bias", spec.shared
    return Experts(
        spec,
        router,
        each,
        loader.ops.stack_experts([(one.gate.map, one.up.map, one.down.map) for one in each]),
        loader.vector(bias, torch.float32).view(-1) if spec.router.selection_bias else None,
        None if shared is None else _dense(loader, f"{prefix}shared.", shared.block),
        loader.linear(f"{prefix}shared_gate") if shared is not None and shared.gated else None,
        None if spec.dense is None else _beside(loader, prefix, spec.dense),
    )


def _beside(loader: _Loader, prefix: str, dense: FeedForwardSpec) -> DenseBeside:
    # What a router reads is divided by the root of its size.
    router_norm = _scaled(loader.norm(f"{prefix}router_norm"), loader.spec.hidden_size**-0.5)
    return DenseBeside(
        _dense(loader, prefix, dense),
        loader.norm(f"{prefix}dense_norm"),
        loader.norm(f"{prefix}experts_norm"),
        loader.norm(f"{prefix}experts_out_norm"),
        router_norm,
        loader.vector(f"{prefix}expert_factors", torch.float32).view(-1),
    )


def _plain(loader: _Loader, prefix: str, spec: FeedForwardSpec) -> PlainFeedForward:
    return PlainFeedForward(spec, loader.linear(f"{prefix}up"), loader.linear(f"{prefix}down"))


def _dense(loader: _Loader, prefix: str, spec: FeedForwardSpec) -> DenseFeedForward:
    if not spec.gated:  # relu(x) squared is relu(x) times x, so it is a gated block whose gate is its own
        up, down = loader.linear(f"{prefix}up"), loader.linear(f"{prefix}down")
        return DenseFeedForward(replace(spec, activation="relu"), up, up, down)
    return DenseFeedForward(spec, *(loader.linear(f"{prefix}{name}") for name in ("gate", "up", "down")))
