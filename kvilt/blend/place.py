"""Documents into reserved pages: keys are rotated once, on their way, by the arithmetic of a forward's own writes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..executor.executor import Executor
from ..kv.cache import KVCache
from ..models.spec import RopeSpec
from ..store.layer import LayerKV
from .recipe import Span
from .turn import rotations


class Placing:
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
        pool, place = self._executor.pool, self._places[index]
        rope = self._executor.spec.layers[index].attention.rope
        keys, values = (
            torch.cat(parts).to(pool.device)
            for parts in ([one.keys for one in documents], [one.values for one in documents])
        )
        rotation = self._rotations[rope] if isinstance(rope, RopeSpec) else None
        pool.ops.write(pool.stores[place.group], place.layer, self._slots[place.group], keys, values, rotation)
