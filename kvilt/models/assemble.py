"""From a checkpoint to a decoder: read the spec, match every tensor, prepare the weights for a backend."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch

from ..kv.layout import KVLayout, LayerSlot
from ..ops.contract import Activation, Ops
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
from .loader import Progress, TensorLoader, block_sizes
from .recurrent import AttentionAndRecurrent
from .recurrent_loading import recurrent_block
from .rope import frequencies
from .spec import AttentionSpec, ExpertsSpec, FeedForwardSpec, LayerSpec, ModelSpec, RopeSpec
from .split import ModelShare, ModelSplit, split_model
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

EXTRA_LAYERS = 8  # the most that predict further tokens
# Tensors that some checkpoints keep with a dimension of one, and others without.
LOOSE = ("selection_bias", "shared_gate", "conv", "a_log", "skip")
FLAT = ("memory_norm",)  # of several groups, each a row of its own in some checkpoints


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    """The architecture of a checkpoint, without touching its weights."""
    return recognise(checkpoint).dialect.spec(checkpoint)


def assemble(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    layout: KVLayout,
    ops: Ops,
    progress: Progress | None = None,
    share: ModelShare | None = None,
) -> Decoder:
    """A decoder with this checkpoint's weights; raises a report if a tensor is missing, extra or misshapen.

    With a `share` it is one rank's part of the model.
    """
    dialect = recognise(checkpoint).dialect
    loader = TensorLoader(checkpoint, *locate(checkpoint, spec, dialect), ops, dialect, spec, progress, share)
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
        share=share,
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


def split_checkpoint(checkpoint: Checkpoint, spec: ModelSpec, ranks: int) -> list[ModelSplit]:
    """What each of several ranks has of a checkpoint's model."""
    sizes = block_sizes(checkpoint, *locate(checkpoint, spec, recognise(checkpoint).dialect))
    return [split_model(spec, cache(sizes), rank, ranks) for rank in range(ranks)]


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


def _scaled(norm: AnyNorm, scale: float) -> AnyNorm:
    """A norm times a factor: the last one carries that of the logits, since the head is linear."""
    match norm:
        case Norm(weight, eps):
            return Norm(weight * scale, eps)
        case LayerNorm(weight, bias, eps):
            return LayerNorm(weight * scale, None if bias is None else bias * scale, eps)


def _layer(loader: TensorLoader, index: int, spec: LayerSpec, slots: Sequence[LayerSlot]) -> Layer | AltUpLayer:
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


def _altup_layer(loader: TensorLoader, index: int, spec: LayerSpec, altup: AltUpSpec, place: LayerSlot) -> AltUpLayer:
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


def _mixer(loader: TensorLoader, index: int, spec: LayerSpec, slots: Sequence[LayerSlot]) -> Mixer:
    """Attention, what stands in its place, or both; of two slots the second is that of the state."""
    if spec.recurrent is None:
        return _attention(loader, index, spec.attention, slots[0])
    recurrent = recurrent_block(loader, index, spec.recurrent, slots[-1])
    if spec.beside is None:
        return recurrent
    attention = _attention(loader, index, spec.attention, slots[0])
    assert isinstance(attention, Attention)
    return AttentionAndRecurrent(attention, recurrent, *spec.beside)


def _attention(loader: TensorLoader, index: int, spec: AttentionSpec, place: LayerSlot) -> Attention | LatentAttention:
    if spec.latent is not None:
        return latent_attention(loader, index, spec, spec.latent, place)

    def at(name: str) -> str:
        return f"{index}.{name}"

    if loader.share is not None and (own := loader.share.split.heads.get(index)) is not None:
        spec = replace(spec, heads=len(own.query), kv_heads=len(own.kv))
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


def _feed_forward(loader: TensorLoader, index: int, spec: FeedForwardSpec | ExpertsSpec) -> FeedForward:
    match spec:
        case FeedForwardSpec(gated=True):
            return _dense(loader, f"{index}.", spec)
        case FeedForwardSpec():
            return _plain(loader, f"{index}.", spec)
        case ExpertsSpec():
            return _experts(loader, f"{index}.", spec)


def _experts(loader: TensorLoader, prefix: str, spec: ExpertsSpec) -> Experts:
    router = loader.linear(f"{prefix}router")
    # Ranks that have parts of each expert sum what all experts of a token make, not what each makes.
    each = tuple(_dense(loader, f"{prefix}experts.{e}.", spec.expert, False) for e in range(spec.experts))
    bias, shared, share = f"{prefix}selection_bias", spec.shared, loader.share
    split = share is not None and f"{prefix}experts." in share.split.inner
    return Experts(
        spec,
        router,
        each,
        loader.ops.stack_experts([(one.gate.map, one.up.map, one.down.map) for one in each]),
        loader.vector(bias, torch.float32).view(-1) if spec.router.selection_bias else None,
        None if shared is None else _dense(loader, f"{prefix}shared.", shared.block, False),
        loader.linear(f"{prefix}shared_gate") if shared is not None and shared.gated else None,
        None if spec.dense is None else _beside(loader, prefix, spec.dense),
        share.ranks.sum if share is not None and split else None,
    )


def _beside(loader: TensorLoader, prefix: str, dense: FeedForwardSpec) -> DenseBeside:
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


def _plain(loader: TensorLoader, prefix: str, spec: FeedForwardSpec) -> PlainFeedForward:
    return PlainFeedForward(spec, loader.linear(f"{prefix}up"), loader.linear(f"{prefix}down"))


def _dense(loader: TensorLoader, prefix: str, spec: FeedForwardSpec, reduced: bool = True) -> DenseFeedForward:
    if not spec.gated:  # relu(x) squared is relu(x) times x, so it is a gated block whose gate is its own
        up, down = loader.linear(f"{prefix}up"), loader.linear(f"{prefix}down", reduced)
        return DenseFeedForward(replace(spec, activation="relu"), up, up, down)
    gate, up = loader.linear(f"{prefix}gate"), loader.linear(f"{prefix}up")
    return DenseFeedForward(spec, gate, up, loader.linear(f"{prefix}down", reduced))
