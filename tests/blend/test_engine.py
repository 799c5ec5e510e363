"""Blended prompts through the engine: beside others, behind prefix hits, through preemption; always the same tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from drive import blended, memory_store, tokens
from small import Ear, asks, finish, load_small
from small import start as ask_start
from stores import always

from kvilt.batch import Batch
from kvilt.blend.chunk import ChunkCache
from kvilt.blend.recipe import BlendPrompt, Recipe
from kvilt.config import EngineConfig
from kvilt.engine.admission import BorrowedKV
from kvilt.engine.counters import PREEMPTIONS
from kvilt.engine.engine import Engine
from kvilt.engine.request import Request
from kvilt.errors import InputError, ParamError, PoolExhausted
from kvilt.executor.protocol import Executor
from kvilt.sampling.params import SamplingParams
from kvilt.store.store import Store

SYSTEM, QUESTION = tokens(70, 1), tokens(9, 5)
DOCUMENTS = [tokens(40, 2), tokens(1, 3), tokens(60, 4)]
QUILT = BlendPrompt.of([SYSTEM, *DOCUMENTS, QUESTION], [False, True, True, True, False])
STRATEGIES = ("deviation", "head", "query")


@pytest.fixture(scope="module", params=[None, 9], ids=["full", "window"])
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Executor:
    return load_small(tmp_path_factory.mktemp("blend"), 64, request.param, "native")


@pytest.fixture
def store() -> Iterator[Store]:
    with memory_store() as made:
        yield made


def recipe(strategy: str, ratio: float = 0.3) -> Recipe:
    return Recipe(ratio, strategy, check_layer=0, min_gain=0.0)


def request(blend_prompt: BlendPrompt, made: Recipe, **fields: object) -> Request:
    params = fields.pop("params", SamplingParams(max_tokens=8, temperature=0.0))
    return Request(blend_prompt.ids, params, documents=blend_prompt.documents, recipe=made, **fields)  # type: ignore[arg-type]


def put(engine: Engine, asked: Request) -> Ear:
    ear = Ear(asked.samples)
    engine.add(engine.prepare(asked, ear))
    return ear


def alone(executor: Executor, blend_prompt: BlendPrompt, made: Recipe, count: int = 8) -> list[int]:
    """What a blended prompt says without an engine."""
    with memory_store() as store:
        logits, kv, _ = blended(executor, ChunkCache(executor, store), blend_prompt, made)
    with kv:
        first = int(logits.argmax())
        params = SamplingParams(max_tokens=count - 1, temperature=0.0)
        return [first, *executor.sample_tokens(count - 1, [first], kv, params=params)[0]]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("step_tokens", [16, 512])
def test_a_blended_prompt_says_the_same_by_hand_and_by_engine(
    executor: Executor, store: Store, strategy: str, step_tokens: int
) -> None:
    executor.prefixes.clear()
    made = recipe(strategy)
    expected = alone(executor, QUILT, made)
    engine = Engine(
        executor, EngineConfig(step_tokens=step_tokens, max_rows=8), chunks=always(ChunkCache(executor, store))
    )
    for round_ in range(2):
        ear = put(engine, request(QUILT, made))
        finish(engine)
        assert ear.tokens == [expected]
        end = ear.ends[0]
        assert end is not None
        assert end.blended is not None
        assert (end.blended.computed, end.blended.reused + end.blended.recomputed) == (len(QUESTION), QUILT.reused)
        assert end.blended.recomputed == 30
        assert end.blended.made == (0 if round_ else QUILT.reused)
        # The exact beginning is found again, in whole pages; a window layer may have to compute the last of them.
        assert end.cached == (0 if not round_ else 64)
        assert end.cached + end.computed == len(QUILT.ids)


def test_only_the_exact_beginning_is_known_to_others(executor: Executor, store: Store) -> None:
    executor.prefixes.clear()
    engine = Engine(executor, chunks=always(ChunkCache(executor, store)))
    put(engine, request(QUILT, recipe("query")))
    finish(engine)
    assert len(executor.prefixes) == len(SYSTEM) // 32
    plain = Ear()
    engine.add(engine.prepare(Request(QUILT.ids, SamplingParams(max_tokens=4, temperature=0.0)), plain))
    finish(engine)
    end = plain.ends[0]
    assert end is not None
    assert end.cached <= len(SYSTEM)
    with executor.create_kv_cache() as kv:
        params = SamplingParams(max_tokens=4, temperature=0.0)
        assert plain.tokens == executor.sample_tokens(4, list(QUILT.ids), kv, params=params)


@pytest.mark.parametrize("step_tokens", [24, 512])
def test_everybody_says_what_they_say_alone(executor: Executor, store: Store, step_tokens: int) -> None:
    """Blended prompts, plain ones and decodes in the same steps."""
    executor.prefixes.clear()
    dice = random.Random(step_tokens)
    quilts = []
    for index in range(4):
        parts = [SYSTEM[: dice.randrange(0, 60)], *dice.sample(DOCUMENTS, 2), tokens(dice.randrange(1, 9), index)]
        quilts.append((BlendPrompt.of(parts, [False, True, True, False]), recipe(STRATEGIES[index % 3])))
    others = asks(4, seed=3, longest=100)
    expected = [alone(executor, *one) for one in quilts]
    engine = Engine(
        executor, EngineConfig(step_tokens=step_tokens, max_rows=8), chunks=always(ChunkCache(executor, store))
    )
    widths: list[int] = []
    run = executor.run

    def watched(batch: Batch) -> object:
        widths.append(len(batch.rows))
        return run(batch)

    executor.run = watched  # type: ignore[method-assign, assignment]
    try:
        heard, plain = [], []
        for (blend_prompt, made), other in zip(quilts, others, strict=True):
            plain.append(ask_start(engine, other))
            heard.append(put(engine, request(blend_prompt, made)))
        finish(engine)
    finally:
        executor.run = run  # type: ignore[method-assign]
    assert [ear.tokens[0] for ear in heard] == expected
    for ear, other in zip(plain, others, strict=True):
        assert ear.tokens[0] == other.alone(executor)
    assert max(widths) > 2


def test_who_comes_later_takes_what_others_have_computed_meanwhile(executor: Executor, store: Store) -> None:
    made = recipe("query")
    expected = alone(executor, QUILT, made)
    executor.prefixes.clear()
    engine = Engine(executor, EngineConfig(step_tokens=16, max_rows=8), chunks=always(ChunkCache(executor, store)))
    ears = [put(engine, request(QUILT, made)) for _ in range(4)]
    finish(engine)
    assert [ear.tokens for ear in ears] == [[expected]] * 4
    ends = [ear.ends[0] for ear in ears]
    computed = sum(end.blended.made for end in ends if end is not None and end.blended is not None)
    assert computed < 2 * QUILT.reused  # each for itself would be four times as many


@pytest.mark.parametrize("pages", [8, 10, 11, 12, 13])
def test_through_preemption(tmp_path: Path, store: Store, pages: int) -> None:
    """Few pages: whoever has to give way blends again, and says the same."""
    executor = load_small(tmp_path, pages, None, "native")
    quilts = [
        (BlendPrompt.of([SYSTEM[:20], *two, QUESTION], [False, True, True, False]), recipe(strategy))
        for two, strategy in zip(([DOCUMENTS[0], DOCUMENTS[2]], [DOCUMENTS[2], DOCUMENTS[1]]), STRATEGIES, strict=False)
    ]
    long = SamplingParams(max_tokens=90, temperature=0.0)
    expected = [alone(executor, *one, 90) for one in quilts]
    executor.prefixes.clear()
    engine = Engine(executor, EngineConfig(step_tokens=64, max_rows=8), chunks=always(ChunkCache(executor, store)))
    ears = [put(engine, request(*one, params=long)) for one in quilts]
    plain = [ask_start(engine, one) for one in asks(2, seed=8, longest=90)]
    finish(engine)
    assert [ear.error for ear in (*ears, *plain)] == [None] * 4
    assert [ear.tokens[0] for ear in ears] == expected
    preempted = sum(point["value"] for point in engine.metrics.snapshot()[PREEMPTIONS.name]["series"])
    assert preempted > 0
    executor.prefixes.clear()
    assert executor.pool.usage().used == 0


def test_only_the_kv_of_a_blended_prompt(executor: Executor, store: Store) -> None:
    """Nothing is drawn: the prompt's KV is there in the end, and no logits are asked for."""
    engine = Engine(executor, chunks=always(ChunkCache(executor, store)))
    ear = put(engine, request(QUILT, recipe("query"), params=None, keep_kv=True))
    finish(engine)
    end = ear.ends[0]
    assert end is not None
    assert end.kv is not None
    with end.kv as kv:
        assert kv.tokens() == list(QUILT.ids)


def test_a_prompt_too_large_for_the_pool_fails_alone(tmp_path: Path, store: Store) -> None:
    executor = load_small(tmp_path, 6, None, "native")
    engine = Engine(executor, chunks=always(ChunkCache(executor, store)))
    blend_prompt = BlendPrompt.of([tokens(2, 1), tokens(150, 2), tokens(3, 3)], [False, True, False])
    ear = put(engine, request(blend_prompt, recipe("query")))
    finish(engine)
    assert isinstance(ear.error, PoolExhausted)
    assert executor.pool.usage().used == 0


def test_several_samples_share_a_blended_prompt(executor: Executor, store: Store) -> None:
    executor.prefixes.clear()
    engine = Engine(executor, chunks=always(ChunkCache(executor, store)))
    params = SamplingParams(max_tokens=6, temperature=0.0, n=3)
    ear = put(engine, request(QUILT, recipe("query"), params=params))
    finish(engine)
    assert ear.tokens == [alone(executor, QUILT, recipe("query"), 6)] * 3
    executor.prefixes.clear()
    assert executor.pool.usage().used == 0


def test_kv_that_is_kept_says_how_it_was_made(executor: Executor, store: Store) -> None:
    engine = Engine(executor, chunks=always(ChunkCache(executor, store)))
    made = recipe("head")
    ear = put(engine, request(QUILT, made, keep_kv=True))
    finish(engine)
    end = ear.ends[0]
    assert end is not None
    assert end.kv is not None
    with end.kv as kv:
        assert kv.origin == made.name
        assert kv.tokens()[: len(QUILT.ids)] == list(QUILT.ids)


@pytest.mark.parametrize("steps", [0, 1, 3, 6, 9])
def test_who_is_aborted_leaves_nothing_behind(executor: Executor, store: Store, steps: int) -> None:
    executor.prefixes.clear()
    engine = Engine(executor, EngineConfig(step_tokens=32, max_rows=8), chunks=always(ChunkCache(executor, store)))
    ear = put(engine, request(QUILT, recipe("deviation"), id="x"))
    for _ in range(steps):
        engine.step()
    engine.abort("x")
    finish(engine)
    assert ear.reasons == ["cancelled"]
    executor.prefixes.clear()
    assert executor.pool.usage().used == 0


def test_small_gain_is_a_plain_prefill(executor: Executor, store: Store) -> None:
    executor.prefixes.clear()
    engine = Engine(executor, chunks=always(ChunkCache(executor, store)))
    ear = put(engine, request(QUILT, Recipe(0.99, "query", check_layer=0)))
    finish(engine)
    end = ear.ends[0]
    assert end is not None
    assert end.blended is None
    assert len(executor.prefixes) == len(QUILT.ids) // 32  # it is exact, so others may have it


def test_what_cannot_be_blended_is_refused(executor: Executor, store: Store) -> None:
    made = request(QUILT, recipe("head"))
    with pytest.raises(InputError, match="store"):
        Engine(executor).prepare(made, Ear())
    engine = Engine(executor, chunks=always(ChunkCache(executor, store)))
    kv = executor.create_kv_cache()
    executor.prefill([1], kv)
    with pytest.raises(InputError, match="cache"):
        engine.prepare(made, Ear(), BorrowedKV(kv))
    assert kv.closed
    scored = request(QUILT, recipe("head"), params=SamplingParams(max_tokens=1, prompt_logprobs=0))
    with pytest.raises(ParamError, match="prompt_logprobs"):
        engine.prepare(scored, Ear())
