"""Stored KV that a row brings: in pages before its layer's attention reads them, however late copies are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drive import blended, memory_store, tokens
from late_copies import LateStream, staged
from tiny import write_tiny

from kvilt.batch import Batch, HiddenOut, Ids, KVLoad, Last, LayerSpan, Row
from kvilt.blend.chunk import ChunkCache
from kvilt.blend.recipe import BlendPrompt, Recipe
from kvilt.config import RunConfig
from kvilt.errors import InputError
from kvilt.executor.executor import ModelExecutor
from kvilt.executor.load import load_executor

PROMPT = BlendPrompt.of(
    [tokens(5, 1), tokens(40, 2), tokens(17, 3), tokens(40, 2), tokens(8, 4)], [False, True, True, True, False]
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelExecutor]:
    folder: Path = write_tiny(tmp_path_factory.mktemp("loads"), sliding_window=9, max_position_embeddings=640)
    yield load_executor(folder, RunConfig(kv_memory=1 << 21, backend="reference", threads=1))


def load_of(executor: ModelExecutor, ids: list[int], spans: list[range], layers: range) -> KVLoad:
    """The KV of `ids` in these spans, as one run computes it."""
    with executor.create_kv_cache() as kv:
        kv.reserve(len(ids))
        seen = executor.run(Batch.of([Row(Ids(ids), range(len(ids)), kv, want=HiddenOut(layers))])).kv[0]
    cut = {
        layer: [replace(one, keys=one.keys[a : b + 1], values=one.values[a : b + 1]) for a, b in map(_ends, spans)]
        for layer, one in seen.items()
    }
    return KVLoad(spans, cut)


def _ends(span: range) -> tuple[int, int]:
    return span[0], span[-1]


@pytest.mark.parametrize("copies", ["direct", "late"])
def test_a_row_reads_what_it_loads(reference: ModelExecutor, copies: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that brings the KV of earlier tokens equals one before which they were computed."""
    if copies == "late":
        monkeypatch.setattr(reference.pool.ops, "host_copies", staged(LateStream()))
    ids, layers = tokens(30, 7), range(len(reference.spec.layers))
    load = load_of(reference, ids[:20], [range(12), range(12, 20)], layers)
    with reference.create_kv_cache() as whole, reference.create_kv_cache() as loaded:
        for kv in (whole, loaded):
            kv.reserve(30)
        reference.run(Batch.of([Row(Ids(ids[:20]), range(20), whole)]))
        expected = reference.run(Batch.of([Row(Ids(ids[20:]), range(20, 30), whole)])).values
        row = Row(Ids(ids[20:]), range(20, 30), loaded, loads=(load,))
        assert torch.equal(reference.run(Batch.of([row])).values, expected)


@pytest.mark.parametrize(("cut", "writes"), [(16, 1), (13, 2)])
def test_texts_that_are_neighbours_on_the_device_are_written_at_once(
    reference: ModelExecutor, cut: int, writes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers begin at multiples of 256 bytes, so not all texts are neighbours; what is written is the same."""
    ops, layers, seen, real = (
        reference.pool.ops,
        range(len(reference.spec.layers)),
        list[int](),
        reference.pool.ops.write,
    )

    def counted(store: Any, layer: int, slots: torch.Tensor, *rest: Any) -> None:
        seen.append(len(slots))
        real(store, layer, slots, *rest)

    load = load_of(reference, tokens(32, 7), [range(cut), range(cut, 32)], layers)
    row = Row(Ids([5]), [32], reference.create_kv_cache(), loads=(load,))
    with row.cache as kv:
        kv.reserve(33)
        expected = reference.run(Batch.of([row])).values
        monkeypatch.setattr(ops, "host_copies", staged(LateStream()))
        monkeypatch.setattr(ops, "write", counted)
        assert torch.equal(reference.run(Batch.of([row])).values, expected)
    assert sum(seen) == 33 * len(layers)
    assert len(seen) == (writes + 1) * len(layers)


def test_a_row_may_compute_what_it_loads_again(reference: ModelExecutor) -> None:
    """Its own KV stands above the stored one, in every layer."""
    ids, layers = tokens(20, 7), range(len(reference.spec.layers))
    load = load_of(reference, tokens(20, 8), [range(20)], layers)
    with reference.create_kv_cache() as whole, reference.create_kv_cache() as loaded:
        for kv in (whole, loaded):
            kv.reserve(20)
        expected = reference.run(Batch.of([Row(Ids(ids), range(20), whole)])).values
        assert torch.equal(reference.run(Batch.of([Row(Ids(ids), range(20), loaded, loads=(load,))])).values, expected)


@pytest.mark.parametrize("strategy", ["head", "deviation", "query", "deviation+query"])
@pytest.mark.parametrize("repair", [0.0, 0.8])
def test_late_copies_change_no_bit_of_a_blended_prompt(
    reference: ModelExecutor, strategy: str, repair: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, found = Recipe(0.3, strategy, check_layer=0, repair=repair, min_gain=0.0), []
    for copies in (reference.pool.ops.host_copies, staged(LateStream())):
        monkeypatch.setattr(reference.pool.ops, "host_copies", copies)
        with memory_store() as store:
            for step in (512, 7):  # computed, then found
                logits, kv, _ = blended(reference, ChunkCache(reference, store), PROMPT, recipe, step)
                kv.close()
                found.append(logits)
    assert all(torch.allclose(found[0], one, rtol=1e-4, atol=1e-4) for one in found[1:])
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


def test_a_decode_that_loads_is_not_replayed(tiny: Any) -> None:
    layers, ids = range(len(tiny.spec.layers)), tokens(3, 1)
    load = load_of(tiny, ids, [range(3)], layers)
    for _ in range(3):  # a plain decode is recorded, and replayed from then on
        with tiny.create_kv_cache() as kv, tiny.create_kv_cache() as computed:
            for one in (kv, computed):
                one.reserve(4)
            tiny.run(Batch.of([Row(Ids(ids), range(3), computed)]))
            tiny.run(Batch.of([Row(Ids([9, 9, 9]), range(3), kv)]))  # something else stands there
            expected = tiny.run(Batch.of([Row(Ids([3]), [3], computed)])).values
            assert torch.equal(tiny.run(Batch.of([Row(Ids([3]), [3], kv, loads=(load,))])).values, expected)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"spans": [range(60, 70)]}, "in room that reserve"),
        ({"spans": [range(0)]}, "in room that reserve"),
        ({"spans": [range(6, 9)]}, "of as many tokens"),
        ({"spans": [range(6, 8), range(9, 11)]}, "of as many tokens"),
    ],
)
def test_a_load_that_does_not_fit_its_row_is_refused(
    reference: ModelExecutor, change: dict[str, Any], says: str
) -> None:
    load = load_of(reference, tokens(2, 1), [range(2)], range(2))
    with reference.create_kv_cache() as kv:
        kv.reserve(20)
        with pytest.raises(InputError, match=says):
            Batch.of([Row(Ids([5]), [5], kv, want=Last(), loads=(replace(load, **change),))])
        with pytest.raises(InputError, match="of its own layers"):
            span = LayerSpan(0, 1)
            Batch.of([Row(Ids([5]), [5], kv, layers=span, want=HiddenOut(), loads=(load,))])
