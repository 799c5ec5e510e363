"""One layer's KV as tensors, checked against its form. Refuses to know codecs and records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ..errors import InputError
from ..ops.kv_dtypes import KV_DTYPES
from .address import Form, LayerForm, stored_dtype

_NO_SCALES: Final = torch.empty(0)


@dataclass(frozen=True, slots=True, eq=False)
class LayerKV:
    """Keys and values of one layer. Read-only: other holders may share the same tensors."""

    keys: Tensor  # [tokens, heads, key_dim]
    values: Tensor  # [tokens, heads, value_dim], or half as many bytes where the dtype packs values
    key_scales: Tensor = _NO_SCALES  # float32 [tokens, heads], where the dtype has scales
    value_scales: Tensor = _NO_SCALES

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.keys, self.values, self.key_scales, self.value_scales

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def form(self) -> LayerForm:
        """Its form; InputError where it has none."""
        if self.keys.dim() != 3 or self.values.dim() != 3:
            raise InputError("keys and values of a layer are [tokens, heads, dim]")
        tokens, heads, key_dim = self.keys.shape
        if self.values.shape[:2] != (tokens, heads):
            raise InputError("keys and values of a layer must have the same tokens and heads")
        dtype = stored_dtype(self.keys.dtype, self.values.dtype, self.key_scales.dim() == 2)
        scales = (tokens, heads) if dtype.scales else (0,)
        if any(tuple(one.shape) != scales or one.dtype != torch.float32 for one in self.parts[2:]):
            what = "with float32 scales [tokens, heads]" if dtype.scales else "without scales"
            raise InputError(f"{dtype.name} KV comes {what}")
        width = self.values.shape[2]
        return LayerForm(heads, key_dim, 2 * width if dtype.packed_values else width, dtype.name)


def part_bytes(form: LayerForm, tokens: int) -> tuple[int, int, int, int]:
    """Bytes of keys, values and both scales."""
    cells, dtype = tokens * form.heads, KV_DTYPES[form.dtype]
    scales = 4 * cells if form.scaled else 0
    values = dtype.value_width(form.value_dim) * dtype.value_storage.itemsize
    return cells * form.key_dim * dtype.storage.itemsize, cells * values, scales, scales


def layer_bytes(form: LayerForm, tokens: int) -> int:
    return sum(part_bytes(form, tokens))


def owned(layers: Sequence[LayerKV | tuple[Tensor, ...]]) -> tuple[LayerKV, ...]:
    """The layers on the CPU, contiguous, and without the memory of larger tensors behind views."""
    made = [one if isinstance(one, LayerKV) else LayerKV(*one) for one in layers]
    made = [LayerKV(*(part.detach().cpu().contiguous() for part in one.parts)) for one in made]
    shown = sum(one.nbytes for one in made)
    kept = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for one in made for part in one.parts}
    if sum(kept.values()) > shown + shown // 4:  # views into something larger would keep all of it
        made = [LayerKV(*(part.clone() for part in one.parts)) for one in made]
    return tuple(made)


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """The parts along a new first axis; a view where they follow each other in memory, as the layers of a page do."""
    first = parts[0]
    base, start, size = first.untyped_storage().data_ptr(), first.storage_offset(), first.numel()
    follow = all(
        one.shape == first.shape
        and one.is_contiguous()
        and (one.untyped_storage().data_ptr(), one.storage_offset()) == (base, start + i * size)
        for i, one in enumerate(parts)
    )
    return first.as_strided((len(parts), *first.shape), (size, *first.stride())) if follow else torch.stack(list(parts))


def check_layers(layers: Sequence[LayerKV], form: Form, held: Sequence[int]) -> None:
    """Raise unless each layer has its form and holds so many tokens."""
    if len(layers) != len(form):
        raise InputError(f"{len(layers)} layers were given and {len(form)} are needed")
    for index, (layer, wanted, tokens) in enumerate(zip(layers, form, held, strict=True)):
        if layer.form != wanted or layer.keys.shape[0] != tokens:
            raise InputError(f"layer {index} is {layer.form} of {layer.keys.shape[0]} tokens, not {wanted} of {tokens}")
