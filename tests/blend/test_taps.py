"""What rows can see of the layers they go through, and that seeing changes nothing."""

from __future__ import annotations

import pytest
import torch

from kvilt.batch import Batch, Hidden, HiddenOut, Ids, KeyMass, Last, LayerSpan, Row, UnrotatedKV
from kvilt.blend import KeyRotation
from kvilt.errors import InputError
from kvilt.executor.placement import rotations
from kvilt.executor.protocol import Executor
from kvilt.kv.cache import KVCache
from kvilt.kv.layout import Window
from kvilt.models.spec import RopeSpec

IDS = [int(i) for i in torch.randint(0, 61, (45,), generator=torch.Generator().manual_seed(3))]


def pages(kv: KVCache, row: int = 0, tokens: int = len(IDS)) -> list[torch.Tensor]:
    """What a cache row's pages hold, committed or not."""
    pool, own = kv.pool, kv.row(row)
    read = [pool.ops.read_slots(pool.stores[g], own.slots(g, 0, tokens)) for g in range(len(pool.layout.groups))]
    return [part for one in read for part in (one.keys, one.values)]


def write(executor: Executor, kv: KVCache, seen: dict[int, UnrotatedKV], row: int, positions: list[int]) -> None:
    """Captured KV into pages, rotated on the way."""
    pool, own = executor.pool, kv.row(row)
    tables = rotations(executor.spec, torch.tensor(positions), pool.ops)
    for place, layer in zip(pool.layout.places(), range(len(executor.spec.layers)), strict=True):
        rope = executor.spec.layers[layer].attention.rope
        slots = own.slots(place.group, positions[0], positions[-1] + 1)
        rotation = tables[rope] if isinstance(rope, RopeSpec) else None
        store = pool.stores[place.group]
        pool.ops.write(store, place.layer, slots, seen[layer].keys, seen[layer].values, rotation)


def test_captured_kv_placed_where_it_was_made_is_the_same_to_the_bit(tiny: Executor) -> None:
    layers = range(len(tiny.spec.layers))
    with tiny.create_kv_cache(batch_size=2) as kv:
        kv.reserve(len(IDS))
        row = Row(Ids(IDS), range(len(IDS)), kv, 0, want=HiddenOut(layers))
        found = tiny.run(Batch.of([row]))
        assert sorted(found.kv[0]) == list(layers)
        write(tiny, kv, dict(found.kv[0]), 1, list(range(len(IDS))))
        for made, placed in zip(pages(kv, 0), pages(kv, 1), strict=True):
            assert torch.equal(made, placed)


def test_seeing_changes_nothing(tiny: Executor) -> None:
    with tiny.create_kv_cache(batch_size=2) as kv:
        kv.reserve(len(IDS))
        plain = tiny.run(Batch.of([Row(Ids(IDS), range(len(IDS)), kv, 0, want=HiddenOut())]))
        watched = Row(Ids(IDS), range(len(IDS)), kv, 1, want=HiddenOut([0, 2]))
        seen = tiny.run(Batch.of([Row(Ids(IDS[:3]), range(3), kv, 0, want=Last()), watched]))
        assert sorted(seen.kv) == [1]
        assert sorted(seen.kv[1]) == [0, 2]
        assert seen.kv[1][2].keys.shape[0] == len(IDS)
        torch.testing.assert_close(seen.hidden[1], plain.hidden[0])


def test_queries_are_those_of_attention(tiny: Executor) -> None:
    """What keys receive, from captured queries and keys, is what the backend says they receive."""
    with tiny.create_kv_cache(batch_size=2) as kv:
        kv.reserve(len(IDS))
        seeing = Row(Ids(IDS), range(len(IDS)), kv, 0, want=HiddenOut([1], [1]))
        found = tiny.run(Batch.of([seeing, Row(Ids(IDS), range(len(IDS)), kv, 1, want=KeyMass([1]))]))
    assert list(found.queries) == [0]
    spec, query, at = tiny.spec.layers[1].attention, found.queries[0][1].float(), torch.arange(len(IDS))
    keys = KeyRotation(spec.rope).place(found.kv[0][1].keys.float(), at)
    keys = keys.repeat_interleave(query.shape[1] // keys.shape[1], 1)
    far = at[:, None] - at
    window = spec.reach.tokens if isinstance(spec.reach, Window) else len(IDS)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * spec.scale
    mass = scores.masked_fill((far < 0) | (far >= window), -torch.inf).softmax(-1).mean(0).sum(0)
    torch.testing.assert_close(mass, found.mass[1], rtol=0, atol=2e-2)


def test_mass_of_a_part_of_the_layers(tiny: Executor) -> None:
    """Two rows with different spans and wishes in one batch; each sum is the number of queries."""
    asking = list(range(40, 45))
    with tiny.create_kv_cache(batch_size=2) as kv:
        kv.reserve(len(IDS))
        lower = [Row(Ids(IDS), range(45), kv, i, layers=LayerSpan(0, 1), want=HiddenOut()) for i in range(2)]
        hidden = tiny.run(Batch.of(lower)).hidden
        for layer in (1, 2):
            full = Row(Hidden(hidden[0]), range(45), kv, 0, layers=LayerSpan(1), want=KeyMass([layer]))
            late = Row(Hidden(hidden[1][40:]), asking, kv, 1, layers=LayerSpan(1), want=KeyMass())
            mass = tiny.run(Batch.of([full, late])).mass
            assert mass[0].shape == mass[1].shape == (45,)
            torch.testing.assert_close(mass[0].sum(), torch.tensor(45.0))
            torch.testing.assert_close(mass[1].sum(), torch.tensor(5.0))


def test_mass_averages_layers(tiny: Executor) -> None:
    with tiny.create_kv_cache() as kv:
        kv.reserve(len(IDS))

        def of(*layers: int) -> torch.Tensor:
            return tiny.run(Batch.of([Row(Ids(IDS), range(45), kv, want=KeyMass(layers))])).mass[0]

        torch.testing.assert_close(of(), (of(0) + of(1) + of(2)) / 3)


def test_mass_of_the_last_tokens(tiny: Executor) -> None:
    """What the last tokens of a row attend to, whoever stands before them in it."""
    with tiny.create_kv_cache(batch_size=2) as kv:
        kv.reserve(len(IDS))
        tiny.run(Batch.of([Row(Ids(IDS[:40]), range(40), kv, 1)]))
        alone = Row(Ids(IDS[40:]), range(40, 45), kv, 1, want=KeyMass([1, 2]))
        expected = tiny.run(Batch.of([alone])).mass[0]
        for last, same in ((5, True), (4, False), (45, False)):
            row = Row(Ids(IDS), range(45), kv, 0, want=KeyMass([1, 2], last))
            mass = tiny.run(Batch.of([row])).mass[0]
            torch.testing.assert_close(mass.sum(), torch.tensor(float(last)))
            assert torch.allclose(mass, expected) == same


def test_layers_that_a_row_does_not_go_through_cannot_be_seen(tiny: Executor) -> None:
    with tiny.create_kv_cache() as kv:
        kv.reserve(4)
        for want in (HiddenOut([1]), HiddenOut([], [1]), KeyMass([0, 1])):
            with pytest.raises(InputError, match="sees nothing of layers"):
                Batch.of([Row(Ids(IDS[:4]), range(4), kv, layers=LayerSpan(0, 1), want=want)])
