"""The weights of per-layer inputs and of several residual streams, as a backend takes them.

Factors of sums and of what norms read are put into the weights and epsilons of norms.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from ..ops.contract import Activation, Ops, Prepared
from ..weights.names import ExpectedTensor
from .altup import HALF, Laurel, StreamEntry, StreamRouter
from .families.family import CheckpointDialect
from .fused_slice import FusedSlice
from .layers import Linear, Norm
from .per_layer import PerLayerBlock, PerLayerInputs
from .spec import ModelSpec
from .stream_spec import AltUpSpec, PerLayerSpec

_SIDES = ("stream_spread", "stream_gather")


class StreamLoader(Protocol):
    """Takes tensors out of a checkpoint by our names."""

    ops: Ops

    @property
    def norm_eps(self) -> float: ...

    def weight(self, name: str) -> Prepared: ...

    def linear(self, name: str) -> Linear: ...

    def vector(self, name: str, dtype: torch.dtype) -> Tensor: ...


def stream_tensors(spec: ModelSpec, dialect: CheckpointDialect) -> Iterator[tuple[str, ExpectedTensor]]:
    """The tensors that belong to no layer; matrices of several streams may lie in one tensor."""
    names, width = dialect.names, spec.hidden_size
    if spec.per_layer is not None:
        own = spec.per_layer.width
        rows = len(spec.layers) * own
        yield "layer_embedding", ExpectedTensor(names["layer_embedding"], (spec.per_layer.vocab_size, rows))
        yield "layer_inputs", ExpectedTensor(names["layer_inputs"], (rows, width))
        yield "layer_inputs_norm", ExpectedTensor(names["layer_inputs_norm"], (own,))
    for side in () if spec.altup is None else _SIDES:
        others = spec.altup.streams - 1 if spec.altup is not None else 0
        if "{e}" not in names[side]:
            yield side, ExpectedTensor(names[side], (others, width, width))
            continue
        for e in range(others):
            yield f"{side}.{e}", ExpectedTensor(names[side].format(e=e), (width, width))


def stream_slices(spec: ModelSpec, dialect: CheckpointDialect) -> Iterator[tuple[str, FusedSlice]]:
    """Where the matrices of streams lie that are one tensor."""
    if spec.altup is None:
        return
    width, others = spec.hidden_size, spec.altup.streams - 1
    for side in _SIDES:
        if "{e}" not in dialect.names[side]:
            for e in range(others):
                yield f"{side}.{e}", FusedSlice(side, e * width, (e + 1) * width, last=e == others - 1)


def per_layer_inputs(loader: StreamLoader, spec: PerLayerSpec, hidden: int) -> PerLayerInputs:
    """What makes the inputs of all layers."""
    weight = loader.vector("layer_inputs_norm", torch.float32)
    # The projection is scaled by hidden ** -0.5 before its norm: so is, squared, the epsilon that it is compared with.
    norm = Norm(weight * HALF, loader.norm_eps * hidden)
    table, projection = loader.weight("layer_embedding"), loader.linear("layer_inputs")
    return PerLayerInputs(table, spec.vocab_size, projection, norm, spec.width**0.5 * HALF)


def per_layer_block(loader: StreamLoader, index: int, activation: Activation, scale: float) -> PerLayerBlock:
    """How one layer reads its input; `scale` is that of what the layer gives."""
    gate, projection = loader.linear(f"{index}.layer_gate"), loader.linear(f"{index}.layer_projection")
    weight = loader.vector(f"{index}.layer_input_norm", torch.float32)
    return PerLayerBlock(index, activation, gate, projection, Norm(weight * scale, loader.norm_eps))


def stream_entry(loader: StreamLoader, spec: AltUpSpec) -> StreamEntry:
    """What spreads an embedding over streams and gathers them again."""
    spread, gather = (tuple(loader.linear(f"{side}.{e}") for e in range(spec.streams - 1)) for side in _SIDES)
    return StreamEntry(spec, spread, gather)


def stream_router(loader: StreamLoader, index: int, spec: AltUpSpec, hidden: int) -> StreamRouter:
    """The weights of one layer by which streams are predicted and corrected."""
    norm = Norm(loader.vector(f"{index}.stream_router_norm", torch.float32) / hidden, loader.norm_eps)
    kept, whole = torch.eye(spec.streams).flatten(), torch.ones(spec.streams)
    ops, maps = loader.ops, []
    for name, bias in (("stream_predict", kept), ("stream_correct", whole)):
        plain = loader.linear(f"{index}.{name}")
        maps.append(Linear(plain.weight, bias.to(ops.device, ops.dtype), plain.name))
    return StreamRouter(norm, loader.linear(f"{index}.stream_router"), *maps)


def laurel(loader: StreamLoader, index: int) -> Laurel:
    """The product of low rank beside one layer's attention."""
    left, right = loader.linear(f"{index}.laurel_left"), loader.linear(f"{index}.laurel_right")
    return Laurel(left, right, Norm(loader.vector(f"{index}.laurel_norm", torch.float32) * HALF, loader.norm_eps))
