"""Cache rows and pages, which are stored by layer group, as the single layers that records hold."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..kv.layout import KVLayout
from ..kv.row import RowImage
from ..ops.contract import KeysValues
from ..ops.kv_dtypes import KV_DTYPES
from .address import LayerForm
from .layer import LayerKV


def per_layer(layout: KVLayout, firsts: Iterable[int]) -> tuple[int, ...]:
    """The first positions of groups, repeated for each of their layers."""
    groups = tuple(firsts)
    return tuple(groups[place.group] for place in layout.places())


def row_layers(layout: KVLayout, image: RowImage) -> list[LayerKV]:
    """The layers of a cache row, in the model's order."""
    groups = list(image.groups)
    if image.states is not None:
        numbers, first = image.states.numbers, len(image.states.positions) - state_tokens(image)
        groups.append(KeysValues(numbers.keys[:, first:], numbers.values[:, first:]))
    return [LayerKV(*layer_slice(groups[place.group], place.layer)) for place in layout.places()]


def state_tokens(image: RowImage) -> int:
    """1 where a row has a recurrent state at its length, which counts as its last token; otherwise 0."""
    return int(image.states is not None and image.states.positions[-1:] == (image.length,))


def layer_slice(kv: KeysValues, layer: int) -> tuple[Tensor, ...]:
    """One layer of a group; scales that are not there have no layers either."""
    parts = (kv.keys, kv.values, kv.key_scales, kv.value_scales)
    return tuple(part[layer] if part.dim() > 1 else part for part in parts)


def empty_layer(form: LayerForm) -> LayerKV:
    """A layer without tokens."""
    dtype, scales = KV_DTYPES[form.dtype], torch.empty((0, form.heads) if form.scaled else (0,))
    keys = torch.empty(0, form.heads, form.key_dim, dtype=dtype.storage)
    values = torch.empty(0, form.heads, dtype.value_width(form.value_dim), dtype=dtype.value_storage)
    return LayerKV(keys, values, scales, scales)
