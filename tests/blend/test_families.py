"""Every family: everything computed again equals a whole prefill, and nothing computed again equals plain reuse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from drive import blended, computed, content, memory_store, start, tokens
from families import FAMILIES, RECURRENT, SHARED_KV, random_model, write_checkpoint

from kvilt.batch import Batch, HiddenOut, Ids, Row
from kvilt.blend.chunk import ChunkCache
from kvilt.blend.recipe import BlendPrompt, Recipe
from kvilt.config import RunConfig
from kvilt.errors import InputError
from kvilt.executor.load import load_executor
from kvilt.executor.placement import rotations
from kvilt.executor.protocol import Executor
from kvilt.models.spec import RopeSpec
from kvilt.ops.contract import KeysValues

SYSTEM, DOCUMENTS, QUESTION = tokens(7, 1), [tokens(33, 2), tokens(1, 3), tokens(50, 4)], tokens(6, 5)
QUILT = BlendPrompt.of([SYSTEM, *DOCUMENTS, QUESTION], [False, True, True, True, False])
STRATEGIES = ("deviation", "head", "query", "deviation+query+head")


@pytest.fixture(scope="module", params=sorted(FAMILIES.keys() - RECURRENT - SHARED_KV))
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    folder: Path = write_checkpoint(random_model(request.param), tmp_path_factory.mktemp(request.param))
    made = load_executor(folder, RunConfig(kv_memory=1 << 24, backend="native", threads=1))
    yield made
    made.close()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_everything_computed_again_equals_a_whole_prefill_to_the_bit(executor: Executor, strategy: str) -> None:
    recipe = Recipe(ratio=1.0, strategy=strategy, check_layer=0, min_gain=0.0)
    with memory_store() as store:
        logits, kv, blending = blended(executor, ChunkCache(executor, store), QUILT, recipe, step=23)
        expected, whole = computed(executor, QUILT.ids)
        with kv, whole:
            assert torch.equal(logits, expected)
            assert kv.tokens() == whole.tokens()
            assert all(map(torch.equal, content(kv), content(whole)))
        assert blending.report().recomputed == QUILT.reused


@pytest.mark.parametrize("name", sorted(RECURRENT | SHARED_KV))
def test_documents_of_models_that_cannot_blend_are_refused_by_name(name: str, tmp_path: Path) -> None:
    folder, recipe = write_checkpoint(random_model(name), tmp_path), Recipe(ratio=1.0, strategy="head", min_gain=0.0)
    executor = load_executor(folder, RunConfig(kv_memory=1 << 24, backend="native", threads=1))
    why = "recurrent state" if name in RECURRENT else "read the KV of others"
    with memory_store() as store, pytest.raises(InputError, match=why):
        blended(executor, ChunkCache(executor, store), QUILT, recipe)
    executor.close()


def test_nothing_computed_again_equals_plain_reuse(executor: Executor) -> None:
    """Plain reuse by hand: each document standalone, its keys turned to their place, the rest computed behind it."""
    recipe = Recipe(ratio=0.0, strategy="head", min_gain=0.0)
    with memory_store() as store:
        logits, kv, blending = blended(executor, ChunkCache(executor, store), QUILT, recipe)
        expected = plain_reuse(executor)
        with kv:
            assert torch.equal(logits, expected)
        report = blending.report()
        assert (report.reused, report.recomputed, report.made) == (84, 0, 84)


def plain_reuse(executor: Executor) -> torch.Tensor:
    layers, pool = range(len(executor.spec.layers)), executor.pool
    kv = start(executor, QUILT)
    with kv:
        kv.reserve(len(QUILT.ids) - QUILT.exact)
        for document in QUILT.documents:
            ids = QUILT.ids[document.start : document.stop]
            for layer, (keys, values) in enumerate(standalone(executor, ids, len(layers))):
                place = pool.layout.places()[layer]
                rope = executor.spec.layers[layer].attention.rope
                at = torch.arange(document.start, document.stop)
                turned = keys.float()
                if isinstance(rope, RopeSpec):
                    turned = pool.ops.rotate(turned, rotations(executor.spec, at, pool.ops)[rope])
                slots = kv.row(0).slots(place.group, document.start, document.stop)
                read = pool.ops.read_slots(pool.stores[place.group], slots)
                read.keys[place.layer], read.values[place.layer] = turned.to(keys.dtype), values
                pool.ops.write_slots(pool.stores[place.group], slots, KeysValues(read.keys, read.values))
        asked = range(QUILT.question.start, len(QUILT.ids))
        return executor.run(Batch.of([Row(Ids(QUILT.ids[asked.start :]), asked, kv)])).values[0]


def standalone(executor: Executor, ids: tuple[int, ...], layers: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A document's KV on its own, the keys before rotation."""
    with executor.create_kv_cache() as kv:
        kv.reserve(len(ids))
        row = Row(Ids(ids), range(len(ids)), kv, want=HiddenOut(range(layers)))
        seen = executor.run(Batch.of([row])).kv[0]
        dtype = executor.layout.groups[0].shape.dtype.storage
        return [(seen[i].keys.to(dtype), seen[i].values.to(dtype)) for i in range(layers)]
