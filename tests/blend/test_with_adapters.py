"""What holds of blending holds on adapters: a whole prefill at ratio 1, the same bits cold and warm, sums agree."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from drive import content, finish, memory_store, tokens
from lora_files import write_lora
from small import load_small

from kvilt.batch import Adapted, Adapter, Base, Batch, Ids, Last, Row
from kvilt.blend.blender import Blending
from kvilt.blend.chunk import ChunkCache
from kvilt.blend.recipe import BlendPrompt, Recipe
from kvilt.errors import InputError
from kvilt.executor.protocol import Executor
from kvilt.kv.cache import KVCache

SYSTEM, QUESTION = tokens(37, 1), [7, 3, *tokens(8, 5)]
DOCUMENTS = [tokens(40, 2), tokens(1, 3), tokens(30, 4)]
QUILT = BlendPrompt.of([SYSTEM, *DOCUMENTS, QUESTION], [False, True, True, True, False])
STRATEGIES = ("deviation", "head", "query", "deviation+query+head")
WHICH = ("base", "small", "wide", "half", "late", "dora")


@pytest.fixture(scope="module", params=[None, 9], ids=["full", "window"])
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    folder = tmp_path_factory.mktemp("adapted")
    made = load_small(folder / "base", 96, request.param, "native")
    made.load_lora(write_lora(folder / "small", 2, seed=1))
    made.load_lora(write_lora(folder / "wide", 16, ["self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"], seed=2))
    made.load_lora(write_lora(folder / "late", 4, seed=3, alora_invocation_tokens=[7, 3]))
    made.load_lora(write_lora(folder / "dora", 3, seed=4, use_dora=True))
    yield made
    made.close()


def adapter_of(executor: Executor, which: str) -> Adapter:
    choose = executor.adapters.choose
    match which:
        case "base":
            return Base()
        case "half":
            return choose("small", 0.5)
        case "late":
            return choose("late", ids=QUILT.ids)
    return choose(which)


def computed(executor: Executor, ids: list[int], adapter: Adapter) -> tuple[torch.Tensor, KVCache]:
    """Logits after a prompt that is computed as a whole, and its committed cache."""
    kv = executor.create_kv_cache()
    kv.reserve(len(ids))
    row = Row(Ids(ids), range(len(ids)), kv, want=Last(), adapter=adapter)
    logits = executor.run(Batch.of([row])).values[0]
    kv.commit([ids])
    return logits, kv


def blended(
    executor: Executor, chunks: ChunkCache, recipe: Recipe, adapter: Adapter, step: int = 512
) -> tuple[torch.Tensor, KVCache, Blending]:
    blending = Blending(executor, chunks, QUILT, recipe, adapter=adapter)
    kv = executor.create_kv_cache()
    kv.reserve(QUILT.exact)
    row = Row(Ids(QUILT.ids[: QUILT.exact]), range(QUILT.exact), kv, want=Last(), adapter=adapter)
    executor.run(Batch.of([row]))
    kv.commit([list(QUILT.ids[: QUILT.exact])])
    blending.begin(kv)
    logits = finish(executor, blending, step)
    kv.commit([list(QUILT.ids[QUILT.exact :])])
    return logits, kv, blending


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("which", WHICH)
def test_everything_computed_again_is_the_whole_prefill(executor: Executor, which: str, strategy: str) -> None:
    adapter, recipe = adapter_of(executor, which), Recipe(1.0, strategy, 0, min_gain=0.0)
    with memory_store() as store:
        logits, kv, _ = blended(executor, ChunkCache(executor, store), recipe, adapter, step=19)
        expected, whole = computed(executor, list(QUILT.ids), adapter)
        with kv, whole:
            assert torch.equal(logits, expected)
            assert all(map(torch.equal, content(kv), content(whole)))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("which", WHICH)
def test_cold_and_warm_are_the_same_bits(executor: Executor, which: str, strategy: str) -> None:
    adapter, recipe = adapter_of(executor, which), Recipe(0.3, strategy, 0, min_gain=0.0)
    seen = []
    with memory_store() as store:
        for turn in range(3):
            logits, kv, blending = blended(
                executor, ChunkCache(executor, store), recipe, adapter, step=(512, 23, 512)[turn]
            )
            report = blending.report()
            assert report.made == (0 if turn else QUILT.reused)
            assert report.reused + report.recomputed == QUILT.reused
            assert report.recomputed == int(0.3 * QUILT.reused)
            assert report.computed == len(QUESTION)
            with kv:
                seen.append((logits, content(kv)))
    for logits, held in seen[1:]:
        assert torch.equal(logits, seen[0][0])
        assert all(map(torch.equal, held, seen[0][1]))


def test_documents_of_one_maker_are_nobody_elses(executor: Executor) -> None:
    """Each adapter and scale makes its own; what an invocation switches on finds those of the base model."""
    recipe, made = Recipe(0.2, "head", min_gain=0.0), {}
    with memory_store() as store:
        for which in WHICH:
            _, kv, blending = blended(executor, ChunkCache(executor, store), recipe, adapter_of(executor, which))
            kv.close()
            made[which] = blending.report().made
    assert made == {which: 0 if which == "late" else QUILT.reused for which in WHICH}


def test_documents_behind_an_invocation_are_refused(executor: Executor) -> None:
    adapter = executor.adapters.choose("late", ids=QUILT.ids)
    early = Adapted(adapter.adapter_id, 1.0, QUILT.exact - 2)
    with memory_store() as store, pytest.raises(InputError, match="switch an adapter on"):
        Blending(executor, ChunkCache(executor, store), QUILT, Recipe(0.2), adapter=early)
