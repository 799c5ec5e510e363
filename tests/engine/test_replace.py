"""Replacing a span of a cache: what stands before is exact, what stands behind is moved, and 1.0 computes it again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import write_tiny, write_tiny_hybrid, write_tiny_mixed

from kvilt import LLM, AsyncLLM
from kvilt.blend.moved_spans import MovedSpan, moved_spans
from kvilt.config import RunConfig
from kvilt.errors import InputError, ParamError, Unsupported
from kvilt.executor.load import load_executor
from kvilt.executor.protocol import Executor
from kvilt.kv.cache import KVCache
from kvilt.text.tokenizer import Tokenizer, from_gguf

TEXT = [i * 7 % 61 + 100 for i in range(300)]


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return from_gguf(smollm2_path)


@pytest.fixture(scope="module")
def executor(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Executor:
    folder = write_tiny(tmp_path_factory.mktemp("tiny"), vocab_size=tokenizer.vocab_size, max_position_embeddings=1024)
    return load_executor(folder, RunConfig(kv_memory=1 << 22, backend="native", threads=1))


@pytest.fixture
def llm(executor: Executor, tokenizer: Tokenizer) -> Iterator[LLM]:
    executor.prefixes.clear()
    made = LLM(executor, tokenizer)
    yield made
    made.sessions.close()
    made._handles.close()
    assert executor.pool.usage().used == 0


@pytest.mark.parametrize(
    ("start", "stop", "new"), [(50, 80, []), (50, 80, [7, 8, 9]), (0, 10, [5]), (100, 100, [5] * 40)]
)
def test_a_repair_of_one_is_a_whole_prefill(llm: LLM, start: int, stop: int, new: list[int]) -> None:
    expected = [*TEXT[:start], *new, *TEXT[stop:]]
    with llm.prefill(TEXT) as kv, llm.replace(kv, start, stop, new, repair=1.0) as made, llm.prefill(expected) as whole:
        assert made.tokens() == expected and kv.tokens() == TEXT
        assert made.origin == "exact"
        assert made.row(0).image().groups[0].keys.equal(whole.row(0).image().groups[0].keys)
        assert made.row(0).image().groups[0].values.equal(whole.row(0).image().groups[0].values)


@pytest.mark.parametrize("repair", [0.0, 0.15, 0.5])
def test_what_stands_before_is_exact_and_the_origin_says_how_the_rest_was_made(llm: LLM, repair: float) -> None:
    expected = [*TEXT[:50], 9, *TEXT[80:]]
    with llm.prefill(TEXT) as kv, llm.replace(kv, 50, 80, [9], repair=repair) as made:
        assert made.tokens() == expected
        assert made.origin.startswith("blend/1 head") and "CacheRetriever" in made.origin
        for before, after in zip(kv.row(0).image().groups, made.row(0).image().groups, strict=True):
            assert after.keys[:, :50].equal(before.keys[:, :50]) and after.values[:, :50].equal(before.values[:, :50])
        # The first layer knows tokens and positions only: values that moved are as they were.
        moved, stood = (one.row(0).image().groups[0].values[0].float() for one in (made, kv))
        assert moved[51:].allclose(stood[80:], atol=1e-2)
        done = llm.generate([3, 4], kv=made, max_tokens=4, temperature=0)
        assert len(done.token_ids) == 4


def test_replacing_nothing_moves_nothing(llm: LLM) -> None:
    with llm.prefill(TEXT) as kv, llm.replace(kv, 50, 50, [], repair=0.0) as made:
        for before, after in zip(kv.row(0).image().groups, made.row(0).image().groups, strict=True):
            assert after.keys.allclose(before.keys, atol=1e-2) and after.values.allclose(before.values, atol=1e-2)


def test_blended_kv_never_enters_the_prefix_index(llm: LLM) -> None:
    expected = [*TEXT[:50], *TEXT[80:]]
    with llm.prefill(TEXT) as kv, llm.replace(kv, 50, 80, repair=0.1):
        llm.executor.prefixes.clear()
        done = llm.generate([*expected, 5], max_tokens=1)
        assert done.usage.prefix_hit == 0


@pytest.mark.parametrize(
    ("given", "field"),
    [((5, 4), "start"), ((-1, 4), "start"), ((0, 301), "start"), ((1.0, 4), "start"), ((True, 4), "start")],
)
def test_what_is_no_span_is_refused(llm: LLM, given: tuple[int, int], field: str) -> None:
    with llm.prefill(TEXT) as kv:
        with pytest.raises(ParamError) as refused:
            llm.replace(kv, *given)
        assert refused.value.field == field
        with pytest.raises(ParamError, match="repair"):
            llm.replace(kv, 1, 2, repair=1.5)
        with pytest.raises(InputError, match="nothing would be left"):
            llm.replace(kv, 0, 300)


@pytest.mark.parametrize("kind", ["window", "recurrent"])
def test_windows_and_states_are_computed_again_or_refused(kind: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    write = write_tiny_hybrid if kind == "recurrent" else lambda folder, context: write_tiny_mixed(folder, 40, context)
    executor = load_executor(write(tmp_path, 512), RunConfig(kv_memory=1 << 22, backend="native", threads=1))
    llm, text = LLM(executor, tokenizer), [token % 60 for token in TEXT]
    expected = [*text[:50], *text[80:]]
    with llm.prefill(text) as kv:
        with pytest.raises(Unsupported, match=r"repair=1\.0"):
            llm.replace(kv, 50, 80)
        with llm.replace(kv, 50, 80, repair=1.0) as made:
            assert made.tokens() == expected and made.origin == "exact"
            one = llm.generate([3], kv=made, max_tokens=4, temperature=0).token_ids
        assert one == llm.generate([*expected, 3], max_tokens=4, temperature=0).token_ids


def test_a_handle_is_replaced_by_a_new_one(executor: Executor, tokenizer: Tokenizer) -> None:
    async def run() -> None:
        llm = AsyncLLM(executor, tokenizer)
        old = await llm.kv.create(TEXT, tenant="a")
        made = await llm.kv.replace(old.id, 50, 80, [9], repair=1.0, tenant="a")
        assert made.origin == "exact" and made.info.tokens == 271
        assert list(llm.kv.tokens(made.info.id, tenant="a")) == [*TEXT[:50], 9, *TEXT[80:]]
        assert len(llm.kv.tokens(old.id, tenant="a")) == 300
        while llm._handles.evict_one(True):
            pass
        moved = await llm.kv.replace(old.id, 50, 80, tenant="a", repair=0.1)
        assert moved.origin.startswith("blend/1") and moved.info.tokens == 270
        await llm.drain()
        for one in (old, made.info, moved.info):
            await llm.kv.delete(one.id, tenant="a")
        await asyncio.to_thread(llm._driver.close)

    executor.prefixes.clear()
    asyncio.run(run())
    assert executor.pool.usage().used == 0


# Sessions that need not be exact.


def test_stripped_text_is_moved_where_the_session_need_not_be_exact(llm: LLM) -> None:
    loose, strict = llm.session("loose", exact=False), llm.session("strict")
    prompt = [*TEXT[:60], *TEXT[100:300]]  # tokens 60 to 100 were stripped
    for session in (loose, strict):
        session.generate(TEXT, max_tokens=1, temperature=0)
    exact = strict.generate([*prompt, 7], max_tokens=2, temperature=0)
    assert exact.usage.blended_reused == 0 and exact.usage.computed == 201
    llm.executor.prefixes.clear()
    assert exact.token_ids == llm.generate([*prompt, 7], max_tokens=2, temperature=0).token_ids
    done = loose.generate([*prompt, 7], max_tokens=2, temperature=0)
    assert done.usage.prefix_hit == 60
    assert done.usage.blended_reused > 170 and done.usage.recipe.startswith("blend/1")
    assert done.usage.computed + done.usage.blended_recomputed < 30
    turns = loose.info().turns
    assert turns[-1].origin.startswith("blend/1") and turns[0].origin == "exact"
    after = loose.generate([*prompt, 7, done.token_ids[0], 5, 6], max_tokens=2, temperature=0)
    assert after.usage.computed <= 3  # the blended turn is continued


def test_spans_are_found_in_order() -> None:
    old, new = TEXT, [*TEXT[:60], 5, 6, *TEXT[100:200], 8, *TEXT[210:300]]
    found = moved_spans(old, new, 60)
    assert all(new[one.new : one.new + one.length] == old[one.old : one.old + one.length] for one in found)
    assert sum(one.length for one in found) >= 180
    assert moved_spans(old, list(range(300)), 0) == []
    assert moved_spans([1] * 200, [1] * 100, 0) == [MovedSpan(0, 0, 100)]


@given(st.lists(st.integers(0, 2), max_size=200), st.lists(st.integers(0, 2), max_size=200), st.integers(0, 50))
def test_spans_never_overlap(old: list[int], new: list[int], begin: int) -> None:
    at = floor = 0
    for one in moved_spans(old, new, begin, least=4):
        assert one.new >= max(at, begin) and one.old >= floor and one.length >= 4
        assert new[one.new : one.new + one.length] == old[one.old : one.old + one.length]
        at, floor = one.new + one.length, one.old + one.length


def test_the_cache_may_be_closed_before_the_answer(llm: LLM) -> None:
    kv: KVCache = llm.prefill(TEXT)
    made = llm.replace(kv, 10, 20, repair=0.2)
    kv.close()
    assert made.num_entries == 290
    made.close()
