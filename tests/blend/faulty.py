"""A blended prompt through an engine whose store fails: what it says, what it cost, and what a healthy one says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drive import memory_store, tokens
from small import Ear, run
from stores import always

from kvilt.blend.chunk import ChunkCache
from kvilt.blend.recipe import BlendPrompt, Recipe
from kvilt.config import EngineConfig
from kvilt.engine.engine import Engine
from kvilt.engine.request import Request
from kvilt.executor.protocol import Executor
from kvilt.sampling.params import SamplingParams
from kvilt.store.store import Store, StoreLimits

# Two pages before the first document: they come from the store as well, as a prefix.
QUILT = BlendPrompt.of([tokens(70, 1), tokens(40, 2), tokens(33, 3), tokens(8, 4)], [False, True, True, False])
RECIPE = Recipe(0.3, "deviation+query", check_layer=0, min_gain=0.0)
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
PATIENT = StoreLimits(lookup_s=300, layer_s=300, close_s=300)
SHORT = StoreLimits(lookup_s=0.5, layer_s=0.5, close_s=300, cooldown_s=3600)


@dataclass(frozen=True)
class Said:
    tokens: list[int]
    made: int  # tokens of documents that were not stored, or not in a way that could be trusted
    found: int  # tokens before the documents that were


def answer(executor: Executor, store: Store) -> Said:
    """Ask an engine that has nothing in memory, beside somebody who wants no document, and let it go."""
    executor.prefixes.clear()
    engine = Engine(
        executor, EngineConfig(step_tokens=64, max_rows=8), chunks=always(ChunkCache(executor, store)), store=store
    )
    ear, other = Ear(), Ear()
    engine.add(engine.prepare(Request(QUILT.ids, GREEDY, documents=QUILT.documents, recipe=RECIPE), ear))
    engine.add(engine.prepare(Request(tokens(20, 9), GREEDY), other))
    run(engine, lambda: ear.over and other.over)
    engine.close()
    executor.prefixes.clear()
    end = ear.ends[0]
    assert end is not None
    assert end.error is None
    assert end.blended is not None
    assert other.reasons == ["length"]
    assert executor.pool.usage().used == 0
    return Said(ear.tokens[0], end.blended.made, end.cached)


def healthy(executor: Executor) -> list[int]:
    with memory_store() as store:
        return answer(executor, store).tokens


def count(store: Store, name: str, **labels: str) -> float:
    """What a counter of the store says."""
    series: list[dict[str, Any]] = store.metrics.snapshot()[f"kvilt_store_{name}"]["series"]
    return sum(one["value"] for one in series if labels.items() <= one["labels"].items())
