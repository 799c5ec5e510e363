"""The parts of a model by our names: read out of a checkpoint, and put together as another dialect keeps them.

One mechanism for all families: the same tables that say where a dialect's parts lie are read in one direction for the
checkpoint, and in the other for the file that is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType

import torch
from torch import Tensor

from ..errors import Unsupported
from ..quant.tensor import QuantTensor
from ..weights.source import Checkpoint
from .assemble import Located, locate, needed_tensors, slices_of
from .expert_slices import ExpertSlice
from .families.family import CheckpointDialect
from .fused_slice import FusedSlice
from .recurrent_spec import Mamba2Spec
from .spec import AttentionSpec, ModelSpec, RopeSpec, each_attention

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# What a file keeps, from what a part means: the inverse of `CheckpointDialect.transforms`.
_INVERSES: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({"a_log": lambda part: -part.exp()})
# Parts that turn: with rows in pairs in one dialect and in halves in the other they are reordered.
_TURNED = ("q", "k", "q_bias", "k_bias")
# Norms that a shift does not belong to, in families that store the others as an offset from 1.
_UNSHIFTED = ("memory_norm",)


@dataclass(frozen=True, slots=True)
class PartReader:
    """Takes the parts of a model out of a checkpoint."""

    checkpoint: Checkpoint
    spec: ModelSpec
    dialect: CheckpointDialect
    located: Located

    @classmethod
    def of(cls, checkpoint: Checkpoint, spec: ModelSpec, dialect: CheckpointDialect) -> PartReader:
        return cls(checkpoint, spec, dialect, locate(checkpoint, spec, dialect))

    def sources(self, name: str) -> tuple[str, ...]:
        """The checkpoint's tensors that a part is made of."""
        piece = self.located.slices.get(name)
        wholes = (name,) if piece is None else tuple(piece.wholes)
        return tuple(self.located.found[whole] for whole in wholes)

    def part(self, name: str) -> Tensor:
        """A part in its own dtype, as it means: matrices [outputs, inputs], norms with their shift."""
        piece, sources = self.located.slices.get(name), self.sources(name)
        weights = [self.checkpoint.tensors.tensor(source) for source in sources]
        for source, weight in zip(sources, weights, strict=True):
            if isinstance(weight, QuantTensor) or weight.dtype not in _FLOATS:
                raise Unsupported(f"{source} is quantized; start from a checkpoint in F32, F16 or BF16")
        own, kind = _last(name), _last(name if piece is None else next(iter(piece.wholes)))
        plain = [one.T if kind in self.dialect.transposed and isinstance(one, Tensor) else one for one in weights]
        found = plain[0] if piece is None else piece.take(*plain)
        assert isinstance(found, Tensor)
        if transform := self.dialect.transforms.get(own):
            found = transform(found.float())
        if self.dialect.norm_shift and _is_shifted(own):
            found = found.float() + self.dialect.norm_shift
        return found


@dataclass(frozen=True, slots=True)
class JoinedParts:
    """How one tensor of a dialect is made of parts."""

    shape: tuple[int, ...]
    parts: tuple[str, ...]  # one above the other; of stacked ones, those of one expert after those of another
    experts: int = 0  # 0: it is no stack
    order: tuple[int, ...] | None = None  # the rows, where they are not in the order of the parts
    alternating: bool = False
    transposed: bool = False


def joined_parts(spec: ModelSpec, dialect: CheckpointDialect) -> dict[str, JoinedParts]:
    """Every tensor that a model of this spec has in a dialect."""
    pieces: dict[str, list[tuple[str, FusedSlice | ExpertSlice]]] = {}
    for part, piece in slices_of(spec, dialect, ()).items():
        for whole in piece.wholes:
            pieces.setdefault(whole, []).append((part, piece))
    made = {}
    for ours, tensor in needed_tensors(spec, dialect, ()):
        held = pieces.get(ours, [])
        transposed = _last(ours) in dialect.transposed
        plain = JoinedParts(_state_shape(spec, ours, tensor.shape), (ours,), transposed=transposed)
        made[tensor.name] = _joined(tensor.shape, held) if held else plain
    return made


def _state_shape(spec: ModelSpec, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of vectors of recurrent layers, whose dimensions of one llama.cpp counts."""
    part, layer = _last(name), name.partition(".")[0]
    if part == "conv":
        return tuple(size for size in shape if size != 1)
    kept = spec.layers[int(layer)].recurrent if layer.isdigit() else None
    if not isinstance(kept, Mamba2Spec):
        return shape
    sizes = {"a_log": (-1, 1), "skip": (-1, 1), "memory_norm": (kept.norm_groups, -1)}.get(part, shape)
    return tuple(prod(shape) // -prod(sizes) if size < 0 else size for size in sizes)


def _joined(shape: tuple[int, ...], held: list[tuple[str, FusedSlice | ExpertSlice]]) -> JoinedParts:
    first = held[0][1]
    if isinstance(first, FusedSlice):
        order = None if first.order is None else tuple(first.order)
        return JoinedParts(shape, tuple(part for part, _ in held), order=order)
    stacked = [(one.expert, one.stack.share, part) for part, one in held if isinstance(one, ExpertSlice)]
    how = first.stack
    return JoinedParts(
        shape, tuple(part for *_, part in sorted(stacked)), shape[0], None, how.alternating, how.transposed
    )


@dataclass(frozen=True, slots=True)
class PartWriter:
    """Makes the tensors of a dialect out of the parts of a checkpoint in another one."""

    reader: PartReader
    dialect: CheckpointDialect

    @property
    def reorders(self) -> bool:
        """Whether rows whose halves turn together become neighbours."""
        return self.dialect.pairs_qk and not self.reader.dialect.pairs_qk

    @property
    def spec(self) -> ModelSpec:
        """The spec of what is written."""

        def paired(_layer: int, attention: AttentionSpec) -> AttentionSpec:
            if not isinstance(attention.rope, RopeSpec):
                return attention
            return replace(attention, rope=replace(attention.rope, pairing="interleaved"))

        return each_attention(self.reader.spec, paired) if self.reorders else self.reader.spec

    def tensor(self, joined: JoinedParts) -> Tensor:
        """The tensor, in the dtype of its parts."""
        parts = [self._stored(name) for name in joined.parts]
        if joined.experts:
            parts = self._of_experts(joined, parts)
        made = parts[0] if len(parts) == 1 else torch.cat(parts) if not joined.experts else torch.stack(parts)
        if joined.order is not None:
            whole = torch.empty_like(made)
            whole[torch.tensor(joined.order)] = made
            made = whole
        if joined.transposed:
            made = made.transpose(-1, -2)
        return made.reshape(joined.shape).contiguous()

    def _of_experts(self, joined: JoinedParts, parts: list[Tensor]) -> list[Tensor]:
        """The maps of each expert as one."""
        shares = len(parts) // joined.experts
        each = [parts[e * shares : (e + 1) * shares] for e in range(joined.experts)]
        if joined.alternating:
            return [torch.stack(one, 1).flatten(0, 1) for one in each]
        return [torch.cat(one) for one in each]

    def _stored(self, name: str) -> Tensor:
        found, own = self.reader.part(name), _last(name)
        if self.dialect.norm_shift and _is_shifted(own):
            found = found.float() - self.dialect.norm_shift
        if own in self.dialect.transforms:
            if own not in _INVERSES:
                raise Unsupported(f"{own} of this family cannot be written yet")
            found = _INVERSES[own](found.float())
        if self.reorders and own in _TURNED and "." in name:
            found = self._in_pairs(found, int(name.split(".")[0]), own)
        return found

    def _in_pairs(self, rows: Tensor, layer: int, part: str) -> Tensor:
        """Rows whose halves turn together, so that neighbours do."""
        attention = self.reader.spec.layers[layer].attention
        heads = attention.heads if part.startswith("q") else attention.kv_heads
        if isinstance(attention.rope, RopeSpec) and attention.rope.dims != attention.head_dim:
            raise Unsupported("heads that turn in part cannot be brought into the order of this kind of GGUF yet")
        return rows.reshape(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape).contiguous()


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _is_shifted(part: str) -> bool:
    return part.endswith("norm") and part not in _UNSHIFTED
