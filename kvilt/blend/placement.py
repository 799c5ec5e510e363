"""Writes documents into reserved pages: keys are rotated once, by the arithmetic of a forward's own writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..executor.protocol import Executor
from ..kv.cache import KVCache
from ..models.spec import RopeSpec
from ..ops.contract import PageStore, Rotation
from ..store.layer import LayerKV
from .key_rotation import rotations
from .recipe import Span


class _Target(NamedTuple):
    """Where one layer goes."""

    store: PageStore
    layer: int
    slots: Tensor
    rotation: Rotation | None


class ChunkPlacement:
    """The places of some documents in one cache of one row. The positions must be reserved, and above its length."""

    def __init__(self, executor: Executor, kv: KVCache, documents: Sequence[Span]) -> None:
        self._executor = executor
        pool, row = executor.pool, kv.row(0)
        at = torch.cat([torch.arange(one.start, one.stop) for one in documents])
        assert row.writable(at.tolist()), "documents are placed in reserved room above the length"
        self._slots = [
            torch.cat([row.slots(g, one.start, one.stop) for one in documents]).to(pool.device)
            for g in range(len(pool.layout.groups))
        ]
        self._places = pool.layout.places()
        self._rotations = rotations(executor.spec, at.to(pool.device), pool.ops)

    def layer(self, index: int, documents: Sequence[LayerKV]) -> None:
        """Write one layer of all documents."""
        self.write(index, torch.cat([one.keys for one in documents]), torch.cat([one.values for one in documents]))

    def write(self, index: int, keys: Tensor, values: Tensor) -> None:
        """Write one layer of all tokens, [tokens, heads, dim], keys not rotated."""
        pool, to = self._executor.pool, self._to(index)
        pool.ops.write(to.store, to.layer, to.slots, keys.to(pool.device), values.to(pool.device), to.rotation)

    def _to(self, index: int) -> _Target:
        pool, place = self._executor.pool, self._places[index]
        rope = self._executor.spec.layers[index].attention.rope
        rotation = self._rotations[rope] if isinstance(rope, RopeSpec) else None
        return _Target(pool.stores[place.group], place.layer, self._slots[place.group], rotation)
