"""Documents that prompts hold without naming them: blended as if they were named, where that is asked for and helps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from drive import memory_store, tokens
from lora_files import write_lora
from small import Ear, load_small
from stores import always

from kvilt.batch import Base
from kvilt.blend.chunk import ChunkCache
from kvilt.blend.recipe import BlendPrompt, Recipe, Span
from kvilt.config import EngineConfig
from kvilt.engine.engine import Engine
from kvilt.engine.event import Ended
from kvilt.engine.request import Request
from kvilt.executor.protocol import Executor
from kvilt.sampling.params import SamplingParams
from kvilt.store.disk import Disk
from kvilt.store.store import Store
from kvilt.store.tier import Budget

SYSTEM, QUESTION = tokens(50, 1), tokens(9, 5)
DOCUMENTS = [tokens(40, 2), tokens(60, 4)]
QUILT = BlendPrompt.of([SYSTEM, *DOCUMENTS, QUESTION], [False, True, True, False])
OTHER = BlendPrompt.of(
    [SYSTEM[:20], DOCUMENTS[1], tokens(5, 8), DOCUMENTS[0], QUESTION], [False, True, False, True, False]
)
RECIPE = Recipe(0.3, "head", min_gain=0.0)


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    return load_small(tmp_path_factory.mktemp("discovery"), 64, None, "native")


@pytest.fixture
def store() -> Iterator[Store]:
    with memory_store() as made:
        yield made


def make(executor: Executor, store: Store, discover: bool = False) -> Engine:
    executor.prefixes.clear()
    return Engine(executor, EngineConfig(discover=discover), chunks=always(ChunkCache(executor, store)))


def ask(engine: Engine, blend_prompt: BlendPrompt, named: bool = False, **fields: Any) -> tuple[list[int], Ended]:
    params = SamplingParams(max_tokens=8, temperature=0.0)
    documents = blend_prompt.documents if named else ()
    asked = Request(blend_prompt.ids, **{"params": params, "documents": documents, "recipe": RECIPE, **fields})
    ear = Ear()
    engine.add(engine.prepare(asked, ear))
    while not ear.over:  # it may wait for a disk meanwhile
        engine.step()
    (end,) = ear.ends
    assert end is not None
    assert end.error is None
    return ear.tokens[0], end


def test_what_is_found_is_blended_as_if_it_were_named(executor: Executor, store: Store) -> None:
    engine = make(executor, store)
    ask(engine, QUILT, named=True)
    expected, named = ask(make(executor, store), OTHER, named=True)
    engine = make(executor, store)
    ask(engine, QUILT, named=True)  # what this engine has seen
    executor.prefixes.clear()
    said, found = ask(engine, OTHER, discover=True)
    assert said == expected
    assert found.blended == named.blended
    assert found.blended is not None
    assert found.blended.made == 0


def test_off_unless_it_is_asked_for(executor: Executor, store: Store) -> None:
    for default, asked, blends in ((False, None, False), (False, True, True), (True, None, True), (True, False, False)):
        engine = make(executor, store, default)
        ask(engine, QUILT, named=True)
        executor.prefixes.clear()
        _, end = ask(engine, OTHER, discover=asked)
        assert (end.blended is not None) == blends


def test_off_by_default() -> None:
    """An answer would depend on what happens to be stored."""
    assert not EngineConfig().discover
    assert Request((1,)).discover is None


def test_documents_of_others_are_not_found(executor: Executor, store: Store) -> None:
    engine = make(executor, store, True)
    ask(engine, QUILT, named=True, tenant="a")
    executor.prefixes.clear()
    assert ask(engine, OTHER, tenant="b")[1].blended is None
    assert ask(engine, OTHER, tenant="a")[1].blended is not None


def test_documents_of_other_adapters_are_not_found(tmp_path: Path, store: Store) -> None:
    """One that tokens switch on finds what the base model made, before those tokens."""
    executor = load_small(tmp_path / "base", 40, None, "native")
    one = executor.load_lora(write_lora(tmp_path / "one", 2, seed=1))
    late = executor.load_lora(write_lora(tmp_path / "late", 4, seed=2, alora_invocation_tokens=QUESTION[2:4]))
    engine = make(executor, store, True)
    ask(engine, QUILT, named=True)

    def found(which: int | None) -> bool:
        executor.prefixes.clear()
        adapter = Base() if which is None else executor.adapters.choose(which, 1.0, list(OTHER.ids))
        return ask(engine, OTHER, adapter=adapter)[1].blended is not None

    assert [found(None), found(one), found(late)] == [True, False, True]
    ask(engine, QUILT, named=True, adapter=executor.adapters.choose(one, 1.0, []))
    assert found(one)
    executor.close()


def test_what_the_prefix_index_has_is_left_as_it_is(executor: Executor, store: Store) -> None:
    engine = make(executor, store, True)
    for blend_prompt in (QUILT, OTHER):
        ask(engine, blend_prompt, named=True)
    executor.prefixes.clear()
    plain, end = ask(engine, OTHER, discover=False)  # all of it is known from here on
    assert end.blended is None
    said, end = ask(engine, OTHER)
    assert (said, end.blended) == (plain, None)
    more = BlendPrompt((*OTHER.ids, *DOCUMENTS[1], *QUESTION), ())
    _, end = ask(engine, more)
    assert end.blended is not None
    assert end.blended.reused + end.blended.recomputed == len(DOCUMENTS[1])  # only what stands behind
    assert end.cached >= len(OTHER.ids) - 32


def test_small_gain_is_a_plain_prefill(executor: Executor, store: Store) -> None:
    engine = make(executor, store, True)
    ask(engine, QUILT, named=True)
    executor.prefixes.clear()
    assert ask(engine, OTHER, recipe=Recipe(0.3, "head", min_gain=0.9))[1].blended is None
    long = BlendPrompt.of([tokens(200, 9), DOCUMENTS[0], tokens(100, 10)], [False, True, False])
    assert ask(engine, long, recipe=Recipe(0.3, "head"))[1].blended is None


def test_what_is_no_longer_stored_is_not_blended(executor: Executor) -> None:
    """A document would have to be computed twice then, standalone and again."""
    with memory_store(60_000) as store:
        engine = make(executor, store, True)
        ask(engine, QUILT, named=True)
        for seed in range(20, 40):
            ask(engine, BlendPrompt.of([[1], tokens(60, seed), [2]], [False, True, False]), named=True)
        executor.prefixes.clear()
        _, end = ask(engine, OTHER)
        assert end.blended is None


def test_scores_and_lent_caches_are_what_they_are_without(executor: Executor, store: Store) -> None:
    engine = make(executor, store, True)
    ask(engine, QUILT, named=True)
    executor.prefixes.clear()
    scored = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=0)
    assert ask(engine, OTHER, params=scored)[1].blended is None
    assert ask(engine, OTHER, reuse=False)[1].blended is None


def test_a_restart_finds_what_the_disk_has(executor: Executor, tmp_path: Path) -> None:
    def kept() -> Store:
        return Store(Budget(1 << 24), [Disk(tmp_path, Budget(1 << 24))])

    with kept() as store:
        ask(make(executor, store), QUILT, named=True, tenant="t")
    with kept() as store:
        engine = make(executor, store, True)
        chunks = engine._jobs.chunks()  # type: ignore[misc]
        chunks.read("t")
        chunks._finder.settle(30)
        for tenant, spans in (("t", OTHER.documents), ("", ())):
            assert chunks.find(OTHER.ids, tenant) == spans
        assert ask(engine, OTHER, tenant="t")[1].blended is not None
        chunks.close()


def test_a_store_that_fails_costs_what_would_have_been_found(executor: Executor, store: Store) -> None:
    chunks = ChunkCache(executor, store)

    def broken(*_: object) -> Iterator[list[int]]:
        yield DOCUMENTS[0]
        raise RuntimeError("no")

    chunks._finder._stored = broken  # type: ignore[assignment]
    chunks.read()
    chunks._finder.settle(30)
    assert len(chunks._finder.known) == 1
    assert chunks.find(QUILT.ids) == ()  # it is not there


def test_the_end_of_a_prompt_may_be_a_document(executor: Executor, store: Store) -> None:
    engine = make(executor, store, True)
    ask(engine, QUILT, named=True)
    executor.prefixes.clear()
    whole = BlendPrompt((*SYSTEM[:7], *DOCUMENTS[1]), (Span(7, 67),))
    expected, named = ask(engine, whole, named=True)
    executor.prefixes.clear()
    said, found = ask(engine, whole)
    assert (said, found.blended) == (expected, named.blended)
