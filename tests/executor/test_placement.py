"""Stored KV is placed by the executor: the same bytes as a forward writes, and only where a forward may write."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import write_tiny

from kvilt import Executor
from kvilt.batch import Batch, HiddenOut, Ids, Row
from kvilt.config import RunConfig
from kvilt.errors import InputError
from kvilt.executor.load import load_executor
from kvilt.kv.cache import KVCache

IDS = [(7 * i + i // 4) % 60 for i in range(45)]


def pages(kv: KVCache, first: int, stop: int) -> list[torch.Tensor]:
    pool, own = kv.pool, kv.row(0)
    read = [pool.ops.read_slots(pool.stores[g], own.slots(g, first, stop)) for g in range(len(pool.layout.groups))]
    return [part for one in read for part in (one.keys, one.values)]


def test_placed_kv_is_what_a_forward_writes(tiny: Executor) -> None:
    layers = range(len(tiny.spec.layers))
    with tiny.create_kv_cache() as made, tiny.create_kv_cache() as placed:
        for kv in (made, placed):
            kv.reserve(len(IDS))
        seen = tiny.run(Batch.of([Row(Ids(IDS), range(len(IDS)), made, want=HiddenOut(layers))])).kv[0]
        spans = [range(3, 20), range(31, 44)]
        placement = tiny.place(placed, spans)
        for layer in layers:
            keys, values = seen[layer].keys, seen[layer].values
            at = [i for span in spans for i in span]
            placement.write(layer, keys[at], values[at])
        for span in spans:
            there = zip(pages(made, span.start, span.stop), pages(placed, span.start, span.stop), strict=True)
            assert all(torch.equal(one, other) for one, other in there)


def test_kv_is_placed_only_in_caches_of_its_own_executor(tiny: Executor, tmp_path: Path) -> None:
    other = load_executor(write_tiny(tmp_path / "other"), RunConfig(kv_memory=1 << 20, threads=1))
    with other.create_kv_cache() as kv:
        kv.reserve(8)
        with pytest.raises(InputError, match="belongs to another executor"):
            tiny.place(kv, [range(8)])
    other.close()


def test_kv_is_placed_only_in_reserved_room_above_the_length(tiny: Executor) -> None:
    with tiny.create_kv_cache() as kv:
        tiny.prefill(IDS[:8], kv)
        kv.reserve(8)
        tiny.place(kv, [range(8, 16)])
        for span in (range(7, 12), range(8, 200)):
            with pytest.raises(InputError, match="reserve"):
                tiny.place(kv, [span])
