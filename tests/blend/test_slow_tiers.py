"""Documents on their way from a slow tier: whoever needs them waits, nobody else does, and not for long."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from drive import blended, memory_store, tokens
from small import Ask, Ear, load_small, run
from small import start as ask
from stores import Shelfware, always

from kvilt.blend.chunk import ChunkCache
from kvilt.blend.recipe import BlendPrompt, Recipe
from kvilt.config import EngineConfig
from kvilt.engine.driver import Driver
from kvilt.engine.engine import Engine
from kvilt.engine.request import Request
from kvilt.executor.protocol import Executor
from kvilt.sampling.params import SamplingParams
from kvilt.store.store import Store, StoreLimits

QUILT = BlendPrompt.of([tokens(5, 1), tokens(40, 2), tokens(33, 3), tokens(8, 4)], [False, True, True, False])
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
PLAIN = Ask(tuple(tokens(30, 9)), GREEDY)
LONG = StoreLimits(lookup_s=300, layer_s=300, close_s=60)  # no test waits as long
SHORT = StoreLimits(lookup_s=0.05, layer_s=0.05, close_s=60)
RECIPES = [Recipe(0.3, name, check_layer=0, min_gain=0.0) for name in ("deviation", "head", "query")]


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    return load_small(tmp_path_factory.mktemp("slow"), 64, None, "native")


@pytest.fixture(scope="module")
def expected(executor: Executor) -> dict[str, list[int]]:
    """What each recipe says with everything in memory."""
    said = {}
    for recipe in RECIPES:
        with memory_store() as store:
            logits, kv, _ = blended(executor, ChunkCache(executor, store), QUILT, recipe)
        with kv:
            first = int(logits.argmax())
            said[recipe.name] = [first, *executor.sample_tokens(5, [first], kv, params=GREEDY)[0]]
    return said


@pytest.fixture
def tier(executor: Executor) -> Iterator[Shelfware]:
    """A tier that holds the documents, and whose reads a test may hold up."""
    made = Shelfware()
    with Store(None, [made]) as store:
        _, kv, _ = blended(executor, ChunkCache(executor, store), QUILT, RECIPES[1])
        kv.close()
        assert store.flush(60)
    yield made
    made.reads.set()


def put(engine: Engine, recipe: Recipe, **fields: object) -> Ear:
    ear = Ear()
    request = Request(QUILT.ids, GREEDY, documents=QUILT.documents, recipe=recipe, **fields)  # type: ignore[arg-type]
    engine.add(engine.prepare(request, ear))
    return ear


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.strategy)
def test_others_go_on_while_documents_are_looked_up(
    executor: Executor, tier: Shelfware, expected: dict[str, list[int]], recipe: Recipe
) -> None:
    tier.reads.clear()
    with Store(None, [tier], limits=LONG) as store:
        engine = Engine(executor, EngineConfig(step_tokens=64, max_rows=8), chunks=always(ChunkCache(executor, store)))
        slow, plain = put(engine, recipe), ask(engine, PLAIN)
        run(engine, lambda: plain.over)
        assert plain.tokens[0] == PLAIN.alone(executor)
        assert not slow.tokens[0]
        assert not engine.ready
        assert engine.wait_timeout_s is not None
        tier.reads.set()
        run(engine, lambda: slow.over)
        assert slow.tokens[0] == expected[recipe.name]
        assert slow.ends[0] is not None
        assert slow.ends[0].blended is not None
        assert slow.ends[0].blended.made == 0


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.strategy)
def test_others_go_on_between_two_layers(
    executor: Executor, tier: Shelfware, expected: dict[str, list[int]], recipe: Recipe
) -> None:
    """Every read of the tier is let through alone, and everybody else's answers come in between."""
    gate = threading.Semaphore(0)
    tier.each_read = gate.acquire
    with Store(None, [tier], limits=LONG) as store:
        engine = Engine(executor, EngineConfig(step_tokens=64, max_rows=8), chunks=always(ChunkCache(executor, store)))
        slow = put(engine, recipe)
        while not slow.over:
            plain = ask(engine, PLAIN)
            run(engine, lambda plain=plain: plain.over)  # type: ignore[misc]
            assert plain.tokens[0] == PLAIN.alone(executor)
            gate.release()
        gate.release(1000)
        assert slow.tokens[0] == expected[recipe.name]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.strategy)
@pytest.mark.parametrize("reads", [0, 1, 3, 5, 7])
def test_what_does_not_come_in_time_is_computed(
    executor: Executor, tier: Shelfware, expected: dict[str, list[int]], recipe: Recipe, reads: int
) -> None:
    """The tier stops answering after some reads: before a header, or in the middle of a document."""
    gate = threading.Semaphore(reads)
    tier.each_read = gate.acquire
    with Store(None, [tier], limits=SHORT) as store:
        engine = Engine(executor, chunks=always(ChunkCache(executor, store)))
        slow = put(engine, recipe)
        run(engine, lambda: slow.over)
        assert slow.tokens[0] == expected[recipe.name]
        assert slow.ends[0] is not None
        assert slow.ends[0].blended is not None
        assert slow.ends[0].blended.made > 0
        series = store.metrics.snapshot()["kvilt_store_misses_total"]["series"]
        assert sum(one["value"] for one in series if one["labels"]["reason"] == "deadline") > 0
        gate.release(1000)


def test_documents_are_in_memory_only_while_they_are_placed(executor: Executor, tier: Shelfware) -> None:
    """Not while a prompt waits for its turn, not while its answer is drawn, and not for each of its samples."""
    tier.log.clear()
    with Store(None, [tier], limits=LONG) as store:
        engine = Engine(executor, EngineConfig(step_tokens=64, max_rows=3), chunks=always(ChunkCache(executor, store)))
        many = SamplingParams(max_tokens=6, temperature=0.7, seed=3, n=3)
        ear, later = Ear(3), Ear()
        request = Request(QUILT.ids, many, documents=QUILT.documents, recipe=RECIPES[1])
        engine.add(first := engine.prepare(request, ear))
        asked = Request(QUILT.ids, GREEDY, documents=QUILT.documents, recipe=RECIPES[1])
        engine.add(second := engine.prepare(asked, later))
        run(engine, lambda: bool(ear.tokens[2]))
        blends = [track.blending for track in (*first.live, second.first)]
        assert len(blends) == 4
        assert all(one is not None and not one._documents._found for one in blends)
        assert tier.log.count("open") == 2  # each document once, for the first prompt alone
        run(engine, lambda: ear.over and later.over)
        assert tier.log.count("open") == 4


def test_an_abort_while_waiting_leaves_nothing_behind(executor: Executor, tier: Shelfware) -> None:
    tier.reads.clear()
    with Store(None, [tier], limits=LONG) as store:
        engine = Engine(executor, chunks=always(ChunkCache(executor, store)))
        executor.prefixes.clear()
        slow = put(engine, RECIPES[0], id="slow")
        while engine.ready:
            engine.step()
        assert executor.pool.usage().used > 0
        engine.abort("slow")
        engine.step()
        assert slow.reasons == ["cancelled"]
        assert engine.wait_timeout_s is None
        executor.prefixes.clear()
        assert executor.pool.usage().used == 0
        tier.reads.set()


@pytest.mark.parametrize("held_up", [True, False])
def test_a_driver_sleeps_until_the_store_answers(
    executor: Executor, tier: Shelfware, expected: dict[str, list[int]], held_up: bool
) -> None:
    over, gate = threading.Event(), threading.Semaphore(0)
    tier.each_read = gate.acquire
    if not held_up:
        gate.release(2)  # the headers are there before it begins

    class Told(Ear):
        def on_event(self, event: object) -> bool:
            said = super().on_event(event)  # type: ignore[arg-type]
            if self.over:
                over.set()
            return said

    with Store(None, [tier], limits=LONG) as store:
        engine = Engine(executor, chunks=always(ChunkCache(executor, store)))
        driver = Driver(engine, executor)
        try:
            ear = Told()
            request = Request(QUILT.ids, GREEDY, documents=QUILT.documents, recipe=RECIPES[2])
            driver.submit(engine.prepare(request, ear))
            while not over.wait(0.02):  # each read comes while the driver sleeps
                gate.release()
        finally:
            driver.close()
            gate.release(1000)
        assert ear.tokens[0] == expected[RECIPES[2].name]
