"""The KV that a cache holds, for prompts in which its tokens stand elsewhere: a retriever over one row.

Copies the spans when it is made, so that the cache may be closed. Refuses to know where the spans come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import Unsupported
from ..kv.cache import KVCache
from ..kv.layout import KVLayout, Window
from ..ops.contract import KeysValues
from ..ops.packed_values import unpack_values
from ..store.layer import LayerKV
from ..store.row_layers import layer_slice
from .interfaces import BlendRetriever, BlendRetrieverResult, BlendRetrieverTask
from .moved_spans import MovedSpan


def check_movable(layout: KVLayout) -> None:
    """Raise unless the KV of a layout can be moved: all layers must have it for all tokens."""
    if layout.recurrent is not None or any(isinstance(group.reach, Window) for group in layout.groups):
        raise Unsupported(
            "KV behind a replaced span cannot be moved in models with sliding windows or recurrent state; "
            "give repair=1.0, which computes it again"
        )


class CacheRetriever(BlendRetriever):
    """Gives moved spans of one cache row to one prompt."""

    def __init__(self, kv: KVCache, spans: Sequence[MovedSpan]) -> None:
        check_movable(kv.layout)
        row, old = kv.row(0), [range(one.old, one.old + one.length) for one in spans]
        self._layout = kv.layout
        self._spans = tuple(spans)
        with kv.pool.lock:
            self._groups = [row.read(group, old) for group in range(len(row.tables))]

    def new_request(self, full_prompts: Sequence[Tensor], indices: Sequence[Sequence[int]]) -> BlendRetrieverTask:  # noqa: ARG002
        """The spans, among the tokens of the prompt."""
        return _MovedTask(self._layout, self._groups, self._spans, len(full_prompts[0]))


@dataclass(slots=True)
class _MovedTask(BlendRetrieverTask):
    layout: KVLayout
    groups: Sequence[KeysValues]
    spans: Sequence[MovedSpan]
    tokens: int
    valid: Tensor | None = None
    original: Tensor | None = None

    def result(self, layer_id: int) -> BlendRetrieverResult:
        """One layer: keys as they were rotated at their old places."""
        if self.valid is None or self.original is None:
            self.valid = torch.zeros(self.tokens, dtype=torch.bool)
            self.original = torch.zeros(self.tokens, dtype=torch.int64)
            for one in self.spans:
                self.valid[one.new : one.new + one.length] = True
                self.original[one.new : one.new + one.length] = torch.arange(one.old, one.old + one.length)
        place = self.layout.places()[layer_id]
        layer = LayerKV(*layer_slice(self.groups[place.group], place.layer))
        packed = self.layout.shape_of(place.group).dtype.packed_values
        own_values = unpack_values(layer.values) if packed else layer.values
        keys, values = _floats(layer.keys, layer.key_scales), _floats(own_values, layer.value_scales)
        spread_keys, spread_values = (self._spread(part, self.valid) for part in (keys, values))
        return BlendRetrieverResult(spread_keys, spread_values, self.valid, self.original, rotated=True)

    def _spread(self, part: Tensor, valid: Tensor) -> Tensor:
        """Rows of the spans, each at its place in the prompt."""
        whole = torch.zeros(self.tokens, *part.shape[1:], dtype=part.dtype, device=part.device)
        whole[valid.to(part.device)] = part
        return whole


def _floats(part: Tensor, scales: Tensor) -> Tensor:
    return part.float() * scales.unsqueeze(-1) if scales.dim() > 1 else part
