"""From a checkpoint to a decoder: read the spec, match every tensor, prepare the weights for a backend."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import WeightError
from ..kv.layout import KVLayout, LayerSlot
from ..ops.contract import Ops, Prepared
from ..quant.tensor import QuantTensor, Weight
from ..weights.names import ExpectedTensor, match
from ..weights.source import Checkpoint
from .attention import Attention
from .decoder import Decoder, Layer
from .expert_slices import ExpertSlice, expert_slices
from .experts import Experts, FeedForward
from .families.family import CheckpointDialect, expert_part
from .families.registry import recognise
from .layers import DenseFeedForward, Linear, Norm
from .recurrent import Recurrent
from .recurrent_loading import recurrent_block
from .recurrent_spec import recurrent_shapes
from .rope import frequencies
from .spec import AttentionSpec, ExpertsSpec, FeedForwardSpec, LayerSpec, ModelSpec, RopeSpec

Progress = Callable[[int, int], None]  # tensors done, tensors in all
EXTRA_LAYERS = 8  # the most that predict further tokens
LOOSE = ("selection_bias", "shared_gate")  # vectors that some checkpoints keep as matrices of one row, and others not


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    """The architecture of a checkpoint, without touching its weights."""
    return recognise(checkpoint).dialect.spec(checkpoint)


def assemble(
    checkpoint: Checkpoint, spec: ModelSpec, layout: KVLayout, ops: Ops, progress: Progress | None = None
) -> Decoder:
    """A decoder with this checkpoint's weights; raises a report if a tensor is missing, extra or misshapen."""
    dialect = recognise(checkpoint).dialect
    present = frozenset(checkpoint.tensors.names())
    needed = dict(_needed(spec, dialect, present))
    found = match(needed, checkpoint.tensors, tuple(_ignored(spec, dialect)))
    slices = dict(_slices(spec, dialect, present))
    loader = _Loader(checkpoint, found, slices, ops, dialect.norm_shift, spec.norm_eps, progress)
    embedding = loader.weight("embedding")
    places = layout.places()
    return Decoder(
        spec=spec,
        ops=ops,
        embedding=embedding,
        layers=tuple(_layer(loader, i, layer, places[i]) for i, layer in enumerate(spec.layers)),
        norm=loader.norm("norm"),
        head=Linear(embedding if spec.tied_head else loader.weight("head"), name="head"),
        frequencies={rope: frequencies(rope).to(ops.device) for rope in _ropes(spec)},
    )


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


def _needed(
    spec: ModelSpec, dialect: CheckpointDialect, present: Container[str]
) -> Iterator[tuple[str, ExpectedTensor]]:
    """Every tensor the spec asks for, by our name."""
    width = spec.hidden_size
    yield "embedding", ExpectedTensor(dialect.names["embedding"], (spec.vocab_size, width))
    yield "norm", ExpectedTensor(dialect.names["norm"], (width,))
    if not spec.tied_head:
        yield "head", ExpectedTensor(dialect.names["head"], (spec.vocab_size, width))
    for i, layer in enumerate(spec.layers):
        shapes = _layer_shapes(layer, width)
        for whole, parts in dialect.fused.items():
            if shapes.keys() >= set(parts):
                rows = sum(shapes.pop(part)[0] for part in parts)
                shapes[whole] = (rows, width)
        for name, shape in shapes.items():
            if expert_part(name) not in dialect.stacks:
                yield f"{i}.{name}", ExpectedTensor(dialect.name_of(i, name), shape, loose=name in LOOSE)
        for part in expert_slices(i, layer, shapes, dialect, present).values():
            yield from ((name, ExpectedTensor(name, shape)) for name, shape in part.wholes.items())


@dataclass(frozen=True, slots=True)
class FusedSlice:
    """Rows [start, stop) of a tensor that holds several."""

    whole: str
    start: int
    stop: int
    order: Sequence[int] | None = None  # the rows of the whole, where they are not in the order of its parts
    last: bool = True  # the whole is not needed after it; the others read the file again

    @property
    def wholes(self) -> tuple[str, ...]:
        return (self.whole,)

    def take(self, whole: Weight) -> Weight:
        """These rows, packed or not; blocks never cross rows."""
        if self.order is not None:
            rows = torch.tensor(self.order[self.start : self.stop])
            return whole.take(rows) if isinstance(whole, QuantTensor) else whole[rows]
        return whole.rows(self.start, self.stop) if isinstance(whole, QuantTensor) else whole[self.start : self.stop]


def _slices(
    spec: ModelSpec, dialect: CheckpointDialect, present: Container[str]
) -> Iterator[tuple[str, FusedSlice | ExpertSlice]]:
    """Where the parts of fused and stacked tensors lie."""
    for i, layer in enumerate(spec.layers):
        shapes = _layer_shapes(layer, spec.hidden_size)
        for whole, parts in dialect.fused.items():
            if not shapes.keys() >= set(parts):
                continue
            order = dialect.row_orders[whole](layer) if whole in dialect.row_orders else None
            start = 0
            for part in parts:
                stop = start + shapes[part][0]
                yield f"{i}.{part}", FusedSlice(f"{i}.{whole}", start, stop, order)
                start = stop
        for name, expert in expert_slices(i, layer, shapes, dialect, present).items():
            yield f"{i}.{name}", expert


def _layer_shapes(layer: LayerSpec, width: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer by our names: those of its blocks, and its norms."""
    norms = ["attention_norm", "feed_forward_norm"]
    if layer.post_norms:
        norms += ["post_attention_norm", "post_feed_forward_norm"]
    return {
        **dict.fromkeys(norms, (width,)),
        **(_attention_shapes(layer.attention, width) if layer.recurrent is None else _recurrent(layer, width)),
        **_feed_forward_shapes(layer.feed_forward, width),
    }


def _recurrent(layer: LayerSpec, width: int) -> dict[str, tuple[int, ...]]:
    assert layer.recurrent is not None
    return recurrent_shapes(layer.recurrent, width)


def _attention_shapes(spec: AttentionSpec, width: int) -> dict[str, tuple[int, ...]]:
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {"q": (q, width), "k": (kv, width), "v": (kv, width), "out": (width, q)}
    if spec.qkv_bias:
        shapes |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
    if spec.out_bias:
        shapes |= {"out_bias": (width,)}
    if spec.qk_norm:
        shapes |= {"q_norm": (spec.head_dim,), "k_norm": (spec.head_dim,)}
    if spec.sinks:
        shapes |= {"sinks": (spec.heads,)}
    if spec.output_gate:
        shapes |= {"q_gate": (q, width)}
    return shapes


def _feed_forward_shapes(spec: FeedForwardSpec | ExpertsSpec, width: int) -> dict[str, tuple[int, ...]]:
    match spec:
        case FeedForwardSpec(inner, bias=bias):
            shapes: dict[str, tuple[int, ...]] = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
            return shapes | ({"gate_bias": (inner,), "up_bias": (inner,), "down_bias": (width,)} if bias else {})
        case ExpertsSpec(experts, expert=expert):
            shapes = _router_shapes(spec, width)
            each = _feed_forward_shapes(expert, width)
            return shapes | {f"experts.{e}.{name}": shape for e in range(experts) for name, shape in each.items()}


def _router_shapes(spec: ExpertsSpec, width: int) -> dict[str, tuple[int, ...]]:
    """What a block of experts has besides them."""
    shapes: dict[str, tuple[int, ...]] = {"router": (spec.experts, width)}
    if spec.router.bias:
        shapes["router_bias"] = (spec.experts,)
    if spec.router.selection_bias:
        shapes["selection_bias"] = (spec.experts,)
    if spec.shared is not None:
        shapes |= {f"shared.{name}": shape for name, shape in _feed_forward_shapes(spec.shared.block, width).items()}
        shapes |= {"shared_gate": (1, width)} if spec.shared.gated else {}
    return shapes


@dataclass(slots=True)
class _Loader:
    """Takes tensors out of a checkpoint by our names, in the form the backend wants."""

    checkpoint: Checkpoint
    found: Mapping[str, str]
    slices: Mapping[str, FusedSlice | ExpertSlice]
    ops: Ops
    norm_shift: float
    norm_eps: float
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
        own = weights[0] if part is None else part.take(*weights)
        prepared = self.ops.prepare(own.unsqueeze(0) if isinstance(own, Tensor) and own.dim() == 1 else own)
        if part is None or part.last:
            for whole in wholes:
                self.checkpoint.tensors.forget(self.found[whole])  # so that a model is never in memory twice
        return prepared

    def vector(self, name: str, dtype: torch.dtype) -> Tensor:
        part = self.slices.get(name)
        wholes = (name,) if part is None else tuple(part.wholes)
        tensor = self._take(wholes[0])
        if isinstance(tensor, QuantTensor):
            raise WeightError(self.found[wholes[0]], f"is packed as {tensor.format.name}, expected plain floats")
        tensor = tensor if part is None else part.take(tensor)
        assert isinstance(tensor, Tensor)
        return tensor.to(self.ops.device, dtype, copy=True, memory_format=torch.contiguous_format)

    def linear(self, name: str) -> Linear:
        bias = f"{name}_bias"
        held = bias in self.found or bias in self.slices
        return Linear(self.weight(name), self.vector(bias, self.ops.dtype) if held else None, name)

    def norm(self, name: str) -> Norm:
        weight = self.vector(name, torch.float32)
        return Norm(weight + self.norm_shift if self.norm_shift else weight, self.norm_eps)

    def maybe_norm(self, name: str) -> Norm | None:
        return self.norm(name) if name in self.found else None


def _layer(loader: _Loader, index: int, spec: LayerSpec, place: LayerSlot) -> Layer:
    def at(name: str) -> str:
        return f"{index}.{name}"

    attention: Attention | Recurrent
    if spec.recurrent is not None:
        attention = recurrent_block(loader, index, spec.recurrent, place)
    else:
        attention = _attention(loader, index, spec.attention, place)
    return Layer(
        loader.norm(at("attention_norm")),
        attention,
        loader.norm(at("feed_forward_norm")),
        _feed_forward(loader, index, spec.feed_forward),
        loader.maybe_norm(at("post_attention_norm")),
        loader.maybe_norm(at("post_feed_forward_norm")),
    )


def _attention(loader: _Loader, index: int, spec: AttentionSpec, place: LayerSlot) -> Attention:
    def at(name: str) -> str:
        return f"{index}.{name}"

    return Attention(
        spec,
        place,
        q=loader.linear(at("q")),
        k=loader.linear(at("k")),
        v=loader.linear(at("v")),
        out=loader.linear(at("out")),
        q_norm=loader.maybe_norm(at("q_norm")),
        k_norm=loader.maybe_norm(at("k_norm")),
        sinks=loader.vector(at("sinks"), torch.float32) if spec.sinks else None,
        gate=loader.linear(at("q_gate")) if spec.output_gate else None,
    )


def _feed_forward(loader: _Loader, index: int, spec: FeedForwardSpec | ExpertsSpec) -> FeedForward:
    match spec:
        case FeedForwardSpec():
            return _dense(loader, f"{index}.", spec)
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
    )


def _dense(loader: _Loader, prefix: str, spec: FeedForwardSpec) -> DenseFeedForward:
    return DenseFeedForward(spec, *(loader.linear(f"{prefix}{name}") for name in ("gate", "up", "down")))
