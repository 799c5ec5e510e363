"""Copies on a stream of their own: nothing is read before it is there, also where one stream is far behind."""

from __future__ import annotations

import random

import pytest
import torch
from gpu_models import VOCAB, Models

from kvilt.batch import Batch
from kvilt.blend.blender import Blending
from kvilt.blend.chunk import ChunkCache
from kvilt.blend.recipe import BlendPrompt, Recipe
from kvilt.executor.executor import ModelExecutor
from kvilt.ops.triton.copy_stream import host_copies
from kvilt.store.store import Store
from kvilt.store.tier import Budget

CUDA = torch.device("cuda")
LATE = 20_000_000  # cycles, about ten milliseconds


@pytest.mark.parametrize("late", ["nothing", "compute", "copies"])
def test_uploads_arrive_before_they_are_read_and_stay_until_they_were(late: str) -> None:
    copies = host_copies(CUDA)
    given = [[torch.full((1 << 20,), i, dtype=torch.int32), torch.full((7,), float(i))] for i in range(10)]
    found = []
    for there in copies.uploads(given):
        if late == "compute":
            torch.cuda._sleep(LATE)
        if late == "copies":
            with torch.cuda.stream(copies._stream._stream):  # type: ignore[attr-defined]
                torch.cuda._sleep(LATE)
        found.append([one + 1 for one in there])
    for i, (numbers, few) in enumerate(found):
        assert bool((numbers == i + 1).all()) and bool((few == i + 1).all())


def test_downloads_are_what_was_computed_and_their_memory_is_used_again() -> None:
    copies = host_copies(CUDA)
    for i in range(6):
        torch.cuda._sleep(LATE)
        copy = copies.download([torch.full((1 << 24,), i, dtype=torch.int32, device=CUDA)])
        assert copy.tensors[0].is_pinned()
        assert bool((copy.wait()[0] == i).all())
        del copy
    assert copies.note() == ""
    assert copies._memory.pinned_bytes == 256 << 20  # type: ignore[attr-defined]


def blended(executor: ModelExecutor, recipe: Recipe) -> torch.Tensor:
    dice = random.Random(5)
    parts = [[dice.randrange(VOCAB) for _ in range(size)] for size in (9, 300, 150, 40, 12)]
    prompt = BlendPrompt.of(parts, [False, True, True, True, False])
    found = []
    with Store(Budget(1 << 28)) as store:
        for _ in range(2):  # the second finds its documents in memory
            with executor.create_kv_cache() as kv:
                executor.prefill(parts[0], kv)
                blending = Blending(executor, ChunkCache(executor, store), prompt, recipe)
                blending.begin(kv)
                while not blending.done:
                    row = blending.next(128)
                    logits = executor.run(Batch.of([row]))
                    blending.took(row, logits, 0)
                found.append(logits.values[0].float().cpu())
    assert torch.allclose(found[0], found[1], rtol=1e-3, atol=1e-3)
    return found[1]


@pytest.mark.parametrize("strategy", ["head", "deviation", "query"])
@pytest.mark.parametrize("repair", [0.0, 0.8])
def test_a_blended_prompt_is_that_of_the_reference(models: Models, strategy: str, repair: float) -> None:
    recipe = Recipe(0.3, strategy, check_layer=0, repair=repair, min_gain=0.0)
    truth = blended(models.reference, recipe)
    found = blended(models.exact, recipe)
    assert float((found - truth).norm() / truth.norm()) < 1e-3
