"""Documents computed ahead of their questions: stored once, found by those questions, beside everybody else's rows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from lora_files import write_lora
from stores import Shelfware

from kvilt.blend.recipe import Recipe
from kvilt.config import EngineConfig
from kvilt.errors import AdapterUnknown, InputError, ParamError, QueueFull
from kvilt.executor.protocol import Executor
from kvilt.llm import LLM, AsyncLLM, StoredDocument
from kvilt.store.disk import Disk
from kvilt.store.store import Store, StoreLimits
from kvilt.store.tier import Budget
from kvilt.text.tokenizer import Tokenizer

ONE = "The Eiffel Tower is 330 metres tall. It stands in Paris and was finished in 1889. " * 3
TWO = "Mount Everest is 8849 metres high. It was first climbed in 1953 by two people. " * 3
MANY = [f"Document {i} says that {i} times two is {i * 2}, which nobody doubts. " * 2 for i in range(11)]
LOOSE = Recipe(0.2, min_gain=0.0)
SMALL = EngineConfig(step_tokens=32, max_rows=8)


def made(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """What is put into the store from here on."""
    chunks, put = llm.documents.chunks, llm.documents.chunks.keep
    seen: list[tuple[int, ...]] = []

    def keep(ids: Any, *given: Any, **more: Any) -> Any:
        seen.append(tuple(ids))
        return put(ids, *given, **more)

    monkeypatch.setattr(chunks, "keep", keep)
    return seen


def test_documents_are_computed_once_and_found_by_questions(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    cold = tiny_llm.generate("So", documents=[ONE, TWO], recipe=LOOSE, max_tokens=6)
    tiny_llm.documents.close()  # and with it the store
    kept = made(tiny_llm, monkeypatch)
    first = tiny_llm.warm([ONE, TWO, ONE])
    tokens = [len(tiny_llm.documents.ids(text)) for text in (ONE, TWO, ONE)]
    assert [(one.tokens, one.found) for one in first] == [(tokens[0], False), (tokens[1], False), (tokens[2], True)]
    assert first[0].id == first[2].id != first[1].id
    assert kept == [tuple(tiny_llm.documents.ids(text)) for text in (ONE, TWO)]
    again = tiny_llm.warm([TWO, tiny_llm.documents.ids(ONE)])
    assert again == [StoredDocument(first[1].id, tokens[1], True), StoredDocument(first[0].id, tokens[0], True)]
    warm = tiny_llm.generate("So", documents=[ONE, TWO], recipe=LOOSE, max_tokens=6)
    assert warm.token_ids == cold.token_ids
    assert len(kept) == 2, "nothing was computed again"


def test_progress_counts_tokens_up_to_all_of_them(tiny_executor: Executor, tokenizer: Tokenizer) -> None:
    llm = LLM(tiny_executor, tokenizer, config=SMALL)
    seen: list[tuple[int, int]] = []
    results = llm.warm([ONE, *MANY, ONE], on_progress=lambda done, total: seen.append((done, total)))
    total = sum(one.tokens for one in results[:-1])
    done = [one for one, _ in seen]
    assert {each for _, each in seen} == {total}
    assert done == sorted(set(done)), "it only grows, and is told only when it does"
    assert done[-1] == total
    assert any(0 < one < results[0].tokens for one in done), "a long document moves the bar before its end"
    llm.warm(MANY, on_progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == sum(one.tokens for one in results[1:-1])
    llm.documents.close()


def test_a_damaged_document_is_computed_again(tiny_executor: Executor, tokenizer: Tokenizer, tmp_path: Path) -> None:
    found = []
    for _ in range(3):
        with Store(tiers=[Disk(tmp_path, Budget(1 << 28))]) as store:
            found += LLM(tiny_executor, tokenizer, store=store).warm([ONE])
            store.flush()
        if len(found) == 1:
            (record,) = (tmp_path / "records").rglob("*.kv")
            record.write_bytes(record.read_bytes()[:-9])
    assert [one.found for one in found] == [False, False, True]


def test_adapters_have_documents_of_their_own(tiny_llm: LLM, tmp_path: Path) -> None:
    write_lora(tmp_path / "french")
    lora = tiny_llm.load_lora(tmp_path / "french", "french")
    try:
        base, french = tiny_llm.warm([ONE]), tiny_llm.warm([ONE], lora="french")
        assert not base[0].found
        assert not french[0].found
        assert base[0].id != french[0].id
        assert tiny_llm.warm([ONE], lora="french")[0].found
        assert not tiny_llm.warm([ONE], lora="french", lora_scale=0.5)[0].found
    finally:
        tiny_llm.executor.unload_lora(lora)
    with pytest.raises(AdapterUnknown):
        tiny_llm.warm([ONE], lora="french")


def test_nothing_is_computed_if_one_cannot_be(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = made(tiny_llm, monkeypatch)
    with pytest.raises(ParamError, match=r"documents.1: is empty"):
        tiny_llm.warm([ONE, ""])
    with pytest.raises(ParamError, match=r"documents.1: has \d+ tokens, and with a max_context this small 511 fit"):
        tiny_llm.warm([ONE, [5] * 512])
    with pytest.raises(InputError, match="list of texts"):
        tiny_llm.warm(ONE)
    with pytest.raises(InputError, match="vocabulary"):
        tiny_llm.warm([[1 << 40]])
    assert tiny_llm.warm([]) == []
    assert kept == []
    assert tiny_llm.warm([[5] * 511])[0].tokens == 511


def test_a_document_for_which_there_is_no_room_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from tiny import write_tiny

    from kvilt.config import RunConfig
    from kvilt.executor.load import load_executor

    folder = write_tiny(tmp_path, vocab_size=tokenizer.vocab_size, max_position_embeddings=512)
    executor = load_executor(folder, RunConfig(kv_memory=1 << 16, backend="native", threads=1))
    with LLM(executor, tokenizer) as llm:
        most = executor.pool.tokens // 2 - executor.layout.page_tokens
        assert most < 400
        with pytest.raises(ParamError, match="raise kv_memory"):
            llm.warm([[5] * (most + 2 * executor.layout.page_tokens)])
        assert not llm.warm([[5] * most])[0].found


def asynchronously(
    executor: Executor,
    tokenizer: Tokenizer,
    ask: Callable[[AsyncLLM], Any],
    config: EngineConfig | None = None,
    store: Store | None = None,
) -> Any:
    async def life() -> Any:
        many = AsyncLLM(executor, tokenizer, config=config, store=store)
        try:
            return await ask(many)
        finally:
            await asyncio.to_thread(many._driver.close)
            many.documents.close()

    return asyncio.run(life())


def test_tenants_do_not_see_what_others_warmed(tiny_executor: Executor, tokenizer: Tokenizer) -> None:
    async def ask(many: AsyncLLM) -> list[list[StoredDocument]]:
        return [await many.warm(MANY, tenant=tenant) for tenant in ("a", "b", "a")]

    first, other, again = asynchronously(tiny_executor, tokenizer, ask)
    assert [one.found for one in (*first, *other)] == [False] * 22
    assert all(one.found for one in again)
    assert {one.id for one in first}.isdisjoint(one.id for one in other)


def test_answers_go_on_beside_it(tiny_executor: Executor, tokenizer: Tokenizer) -> None:
    """A sample that decodes draws tokens while a long document is computed, and draws the same ones."""
    told: list[str] = []

    async def ask(many: AsyncLLM) -> list[int]:
        async with await many.stream("Once", max_tokens=60, ignore_eos=True) as stream:
            tokens = [(await anext(stream)).token]
            warming = asyncio.ensure_future(many.warm([[7] * 500], on_progress=lambda *_: told.append("warm")))
            async for delta in stream:
                if delta.token is not None:
                    tokens.append(delta.token)
                    told.append("token")
            await warming
            return [token for token in tokens if token is not None]

    tokens = asynchronously(tiny_executor, tokenizer, ask, SMALL)
    assert "token" in told[: told.index("warm")], "drawn before the document was done"
    expected = LLM(tiny_executor, tokenizer).generate("Once", max_tokens=60, ignore_eos=True)
    assert tokens == expected.token_ids


def test_a_slow_store_keeps_nobody_else_waiting(tiny_executor: Executor, tokenizer: Tokenizer) -> None:
    """Other requests need threads to be read, and here there is one for all of them."""
    tier = Shelfware()
    tier.reads.clear()

    async def ask(many: AsyncLLM) -> list[StoredDocument]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        warming = asyncio.ensure_future(many.warm(MANY))
        while not tier.log:
            await asyncio.sleep(0.001)
        try:
            async with asyncio.timeout(60):
                await many.generate("So", max_tokens=1)
            assert not warming.done()
        finally:
            tier.reads.set()
        return await warming

    with Store(tiers=[tier], limits=StoreLimits(lookup_s=600, layer_s=600)) as store:
        done = asynchronously(tiny_executor, tokenizer, ask, store=store)
    assert [one.found for one in done] == [False] * len(MANY)


def test_who_stops_waiting_ends_it_and_keeps_what_is_stored(tiny_executor: Executor, tokenizer: Tokenizer) -> None:
    async def ask(many: AsyncLLM) -> tuple[list[StoredDocument], int]:
        enough = asyncio.Event()
        task = asyncio.ensure_future(many.warm([*MANY, [7] * 500], on_progress=lambda *_: enough.set()))
        task.add_done_callback(lambda _: enough.set())  # also if it fails before there is progress
        await enough.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await many.generate("So", max_tokens=1)
        return await many.warm(MANY), many.engine.requests

    results, left = asynchronously(tiny_executor, tokenizer, ask, SMALL)
    assert any(one.found for one in results)
    assert left == 0


def test_a_full_queue_refuses_it_like_any_request(tiny_executor: Executor, tokenizer: Tokenizer) -> None:
    async def ask(many: AsyncLLM) -> None:
        async with await many.stream("Once", max_tokens=400, ignore_eos=True) as stream:
            await anext(stream)
            waiting = asyncio.ensure_future(many.generate("So", max_tokens=1))
            while not many.engine.waiting:
                await asyncio.sleep(0.001)
            with pytest.raises(QueueFull):
                await many.warm([ONE])
            waiting.cancel()

    narrow = EngineConfig(max_rows=1, max_waiting=1)
    asynchronously(tiny_executor, tokenizer, ask, narrow)
    done = asynchronously(tiny_executor, tokenizer, lambda many: many.warm(MANY), narrow)
    assert len(done) == len(MANY), "its own documents do not stand in each other's way"
