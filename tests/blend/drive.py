"""A blended prompt run by hand, without an engine, and what it must equal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvilt.batch import Batch, Ids, Last, Nothing, Row
from kvilt.blend.blender import Blending
from kvilt.blend.chunk import ChunkCache
from kvilt.blend.recipe import BlendPrompt, Recipe
from kvilt.executor.protocol import Executor
from kvilt.kv.cache import KVCache
from kvilt.store.store import Store
from kvilt.store.tier import Budget


def memory_store(total_bytes: int = 1 << 26) -> Store:
    return Store(Budget(total_bytes))


def start(executor: Executor, blend_prompt: BlendPrompt) -> KVCache:
    """A cache that holds what stands before the first document."""
    kv = executor.create_kv_cache()
    if blend_prompt.exact:
        executor.prefill(list(blend_prompt.ids[: blend_prompt.exact]), kv)
    return kv


def finish(executor: Executor, blending: Blending, step: int = 512, beside: Sequence[Row] = ()) -> Tensor:
    """Run a blending that has begun to its end; logits [vocab]. `beside` are other rows that share every step."""
    logits = None
    while not blending.done:
        row = blending.next(step)
        result = executor.run(Batch.of([*beside, row]))
        if isinstance(row.want, Last):
            logits = result.of_row(len(beside))[0]
        blending.took(row, result, len(beside))
    assert logits is not None
    return logits


def blended(
    executor: Executor, chunks: ChunkCache, blend_prompt: BlendPrompt, recipe: Recipe, step: int = 512
) -> tuple[Tensor, KVCache, Blending]:
    """Logits after a blended prompt, its committed cache, and what did it."""
    blending = Blending(executor, chunks, blend_prompt, recipe)
    kv = start(executor, blend_prompt)
    blending.begin(kv)
    logits = finish(executor, blending, step)
    kv.commit([list(blend_prompt.ids[blend_prompt.exact :])])
    return logits, kv, blending


def computed(executor: Executor, ids: Sequence[int]) -> tuple[Tensor, KVCache]:
    """Logits after a prompt that is computed as a whole, and its committed cache."""
    kv = executor.create_kv_cache()
    kv.reserve(len(ids))
    cut = len(ids) - 1
    if cut:
        executor.run(Batch.of([Row(Ids(ids[:cut]), range(cut), kv, want=Nothing())]))
    logits = executor.run(Batch.of([Row(Ids(ids[cut:]), [cut], kv)])).values[0]
    kv.commit([list(ids)])
    return logits, kv


def content(kv: KVCache) -> list[Tensor]:
    """All numbers a cache of one row holds."""
    image = kv.row(0).image()
    return [part for group in image.groups for part in (group.keys, group.values)]


def tokens(count: int, seed: int, vocab: int = 61) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(i) for i in torch.randint(0, vocab, (count,), generator=generator)]
