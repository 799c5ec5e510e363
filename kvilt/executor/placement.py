"""Stored KV in a cache: what was computed before is written where its tokens stand now, and nothing is computed again.

Keys are rotated once, by the arithmetic of a forward's own writes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ..errors import InputError
from ..kv.cache import KVCache
from ..kv.pool import PagePool
from ..models.rope import frequencies, rotation
from ..models.spec import ModelSpec, Rope, RopeSpec
from ..ops.contract import Ops, Rotation


class KVPlacement:
    """Places for stored KV in one cache of one row, in reserved room above its length. `Executor.place` makes it."""

    def __init__(
        self,
        pool: PagePool,
        spec: ModelSpec,
        call: Callable[[], AbstractContextManager[threading.Event]],
        kv: KVCache,
        spans: Sequence[range],
    ) -> None:
        if kv.pool is not pool:
            raise InputError("this KV cache belongs to another executor")
        if pool.layout.recurrent is not None:
            raise InputError("stored KV is not placed in a model with recurrent state, which computes every token")
        if pool.layout.bare:
            raise InputError("stored KV is not placed in a model with layers that keep none of their own")
        row = kv.row(0)
        at = torch.cat([torch.arange(one.start, one.stop) for one in spans])
        if not row.writable(at.tolist()):
            raise InputError("stored KV is placed at or above its cache's length, in room that reserve() has made")
        self._pool, self._call = pool, call
        self._ropes = [layer.attention.rope for layer in spec.layers]
        self._slots = [
            torch.cat([row.slots(g, one.start, one.stop) for one in spans]).to(pool.device)
            for g in range(len(pool.layout.groups))
        ]
        self._places = pool.layout.places()
        self._rotations = rotations(spec, at.to(pool.device), pool.ops)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write one layer of all tokens, [tokens, heads, dim], keys as they were before rotation."""
        pool, place, rope = self._pool, self._places[layer], self._ropes[layer]
        rotated = self._rotations[rope] if isinstance(rope, RopeSpec) else None
        keys, values = keys.to(pool.device), values.to(pool.device)
        with self._call(), pool.lease(), torch.no_grad():
            pool.ops.write(pool.stores[place.group], place.layer, self._slots[place.group], keys, values, rotated)


def rotations(spec: ModelSpec, positions: Tensor, ops: Ops) -> Mapping[Rope, Rotation]:
    """What a backend's `write` needs to place keys: the same tables as in a forward."""
    ropes = dict.fromkeys(layer.attention.rope for layer in spec.layers)
    return {
        rope: rotation(rope, frequencies(rope).to(positions.device), positions, ops)
        for rope in ropes
        if isinstance(rope, RopeSpec)
    }
