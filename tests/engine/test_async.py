"""AsyncLLM on a tiny model behind a real vocabulary: the sync facade is its oracle, and no reader harms another."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gates import Gate
from tiny import write_tiny

from kvilt import LLM, AsyncLLM, SamplingParams
from kvilt.config import EngineConfig, RunConfig
from kvilt.engine.event import TokenEvent
from kvilt.errors import (
    ContextOverflow,
    Draining,
    HandleExpired,
    HandleLimit,
    HandleMismatch,
    HandleUnknown,
    InputError,
    ModelClosed,
    ParamError,
    QueueFull,
    StepHung,
)
from kvilt.executor.load import load_executor
from kvilt.executor.protocol import Executor
from kvilt.llm.async_stream import AsyncStream
from kvilt.llm.token_stream import Notifier, TokenStream
from kvilt.store.disk import Disk
from kvilt.store.store import Store, StoreLimits
from kvilt.store.tier import Budget
from kvilt.text.tokenizer import Tokenizer, from_gguf

QUESTION = [{"role": "user", "content": "What is the capital of Germany?"}]
SHORT = SamplingParams(max_tokens=6, ignore_eos=True)
LONG_TEXT = "Once upon a time there was a king who had three daughters. " * 8


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return from_gguf(smollm2_path)


@pytest.fixture(scope="module")
def executor(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Executor:
    folder = write_tiny(tmp_path_factory.mktemp("tiny"), vocab_size=tokenizer.vocab_size, max_position_embeddings=1024)
    return load_executor(folder, RunConfig(kv_memory=1 << 21, backend="native", threads=1))


@pytest.fixture(autouse=True)
def nothing_left(executor: Executor) -> Iterator[None]:
    executor.prefixes.clear()
    yield
    gc.collect()
    assert executor.pool.usage().used == 0


@pytest.fixture
def llm(executor: Executor, tokenizer: Tokenizer) -> LLM:
    return LLM(executor, tokenizer)


Play = Callable[[AsyncLLM], Coroutine[Any, Any, None]]


@pytest.fixture
def play(executor: Executor, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run a scene with a model of its own, over the one executor that they share."""
    monkeypatch.setattr(executor, "close", lambda: None)

    def run(scene: Play, **config: Any) -> None:
        async def whole() -> None:
            async with AsyncLLM(executor, tokenizer, config=EngineConfig(**config)) as model:
                await asyncio.wait_for(scene(model), 300)

        asyncio.run(whole())

    return run


# The same as the sync facade.


def test_generate_and_chat_say_what_the_sync_facade_says(llm: LLM, play: Callable[..., None]) -> None:
    prompts = ["The capital of France is", "Once upon a time", LONG_TEXT]
    expected = llm.generate(prompts, SHORT)
    answer = llm.chat(QUESTION, SHORT, n=2, temperature=1.0, seed=3)

    async def scene(model: AsyncLLM) -> None:
        done = await model.generate(prompts, SHORT)
        assert [one.token_ids for one in done] == [one.token_ids for one in expected]
        assert [one.text for one in done] == [one.text for one in expected]
        alone = await model.generate(prompts[0], SHORT)
        assert alone.token_ids == expected[0].token_ids
        both = await model.chat(QUESTION, SHORT, n=2, temperature=1.0, seed=3)
        assert both.token_ids == answer.token_ids
        assert [one.token_ids for one in both.alternatives] == [one.token_ids for one in answer.alternatives]
        again = await model.generate(LONG_TEXT, SHORT)
        assert again.usage.cached_tokens > 64

    play(scene)


def test_deltas_join_to_the_completion_of_every_sample(llm: LLM, play: Callable[..., None]) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=4, n=3, logprobs=1, ignore_eos=True)
    first = llm.generate("Once upon a time", params)
    expected = [one.token_ids for one in (first, *first.alternatives)]

    async def scene(model: AsyncLLM) -> None:
        stream = await model.stream("Once upon a time", params)
        texts, tokens, ends = [""] * 3, [[], [], []], {}
        async for delta in stream:
            texts[delta.index] += delta.text
            if delta.token is not None:
                tokens[delta.index].append(delta.token)
                assert delta.logprobs is not None
                assert delta.logprobs.token == delta.token
            if delta.finish_reason is not None:
                assert delta.index not in ends
                ends[delta.index] = delta.finish_reason
        done = stream.completion
        whole = [done, *done.alternatives]
        assert texts == [one.text for one in whole]
        assert tokens == [one.token_ids for one in whole]
        assert ends == dict.fromkeys(range(3), "length")
        assert [one.token_ids for one in whole] == expected

    play(scene)


def test_stop_strings_cut_without_a_token_too_many(llm: LLM, play: Callable[..., None]) -> None:
    free = llm.generate("Once upon a time", max_tokens=12)
    stop = llm.tokenizer.decode(free.token_ids[4:5])
    expected = llm.generate("Once upon a time", max_tokens=12, stop=stop)

    async def scene(model: AsyncLLM) -> None:
        stream = await model.stream("Once upon a time", max_tokens=12, stop=stop)
        text = "".join([delta.text async for delta in stream])
        assert text == stream.completion.text == expected.text
        assert stream.completion.token_ids == expected.token_ids
        assert stream.completion.finish_reason == "stop"

    play(scene)


# Refusals.


def test_a_stream_tells_how_far_its_prompt_is_read_to_whoever_asks(play: Callable[..., None]) -> None:
    async def scene(model: AsyncLLM) -> None:
        stream = await model.stream(LONG_TEXT, SHORT, progress=True)
        deltas = [delta async for delta in stream]
        told = [delta.reading for delta in deltas if delta.reading is not None]
        usage = stream.completion.usage
        assert told and told[-1].tokens == told[-1].prompt_tokens == usage.prompt_tokens
        assert [one.tokens for one in told] == sorted({one.tokens for one in told})
        assert all(delta.token is None and not delta.text for delta in deltas if delta.reading is not None)
        assert [delta.reading is None for delta in deltas] == sorted(delta.reading is None for delta in deltas)
        assert (usage.computed, usage.prefix_hit, usage.cached_tokens) == (usage.prompt_tokens, 0, 0)
        again = await model.stream_chat(QUESTION, SHORT, progress=True)
        assert any([delta.reading is not None async for delta in again])
        silent = await model.stream(LONG_TEXT, SHORT)
        assert all([delta.reading is None async for delta in silent])
        usage = silent.completion.usage
        assert usage.computed + usage.prefix_hit == usage.prompt_tokens and usage.prefix_hit == usage.cached_tokens > 0
        with pytest.raises(ParamError, match="progress"):
            await model.generate("Hello", SHORT, progress=True)

    play(scene, step_tokens=32, max_rows=8)


def test_prompts_are_scored_whole_streamed_and_behind_handles(llm: LLM, play: Callable[..., None]) -> None:
    ids = llm.tokenizer.encode(LONG_TEXT)
    whole = llm.generate(ids, max_tokens=0, prompt_logprobs=2).prompt_logprobs
    assert whole is not None and len(whole) == len(ids)

    async def scene(model: AsyncLLM) -> None:
        done = await model.generate(ids, max_tokens=0, prompt_logprobs=2)
        assert (done.prompt_logprobs, done.token_ids, done.finish_reason) == (whole, [], "length")
        stream = await model.stream(ids, SHORT, prompt_logprobs=2, n=2)
        seen = [stream.prompt_logprobs async for delta in stream if delta.token is not None]
        assert seen and all(one == whole for one in seen)
        assert all(one.prompt_logprobs == whole for one in (stream.completion, *stream.completion.alternatives))
        handle = await model.kv.create(ids[:50])
        for resident in (True, False):
            assert (await model.kv.info(handle.id)).resident == resident
            continued_tokens = await model.generate(ids[50:], kv=handle.id, max_tokens=0, prompt_logprobs=2)
            assert continued_tokens.prompt_logprobs == [None] * 50 + whole[50:]
            model._handles.evict_one(True)
        await model.kv.delete(handle.id)
        turn = await model.kv.create(messages=QUESTION)
        chat = await model.chat(QUESTION, SHORT, kv=turn.id, prompt_logprobs=0)
        assert chat.prompt_logprobs is not None and chat.prompt_logprobs.count(None) == 1
        assert chat.usage.cached_tokens == 0
        await model.kv.delete(turn.id)

    play(scene, step_tokens=32, max_rows=8)


def test_what_is_wrong_is_said_before_a_stream_begins(play: Callable[..., None]) -> None:
    async def scene(model: AsyncLLM) -> None:
        for fields, error in (
            ({"temperature": -1}, ParamError),
            ({"top_pp": 1}, ParamError),
            ({"kv": "unknown"}, HandleUnknown),
            ({"logit_bias": {10**6: 1}}, ParamError),
        ):
            with pytest.raises(error):
                await model.stream("Hello", **fields)
        with pytest.raises(ContextOverflow):
            await model.stream([5] * 1025)
        with pytest.raises(InputError):
            await model.generate([[1], []])
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0, "an error leaves the caller's task as it was"

    play(scene)


def test_a_full_queue_and_a_drain_refuse_by_name(play: Callable[..., None]) -> None:
    async def scene(model: AsyncLLM) -> None:
        stream = await model.stream("Once upon a time", max_tokens=900, ignore_eos=True)
        await anext(stream)
        waiting = asyncio.ensure_future(model.generate("Hello", SHORT))
        while model.engine.waiting == 0:
            await asyncio.sleep(0.001)
        with pytest.raises(QueueFull):
            await model.generate("Hello", SHORT)
        stream.stop()
        assert await model.drain(30)
        assert (await waiting).finish_reason == "length"
        with pytest.raises(Draining):
            await model.generate("Hello", SHORT)
        assert stream.id

    play(scene, max_rows=1, max_waiting=1)


def test_closing_fails_what_is_in_progress(
    executor: Executor, play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(model: AsyncLLM) -> None:
        running = asyncio.ensure_future(model.generate("Once upon a time", max_tokens=900, ignore_eos=True))
        while gate.is_set():
            await asyncio.sleep(0.001)
        closing = asyncio.ensure_future(model.aclose())
        while not model._driver._closing.is_set():
            await asyncio.sleep(0.001)
        gate.set()
        await closing
        with pytest.raises(Draining):
            await running

    gate = Gate(executor, monkeypatch)
    gate.last = 3
    play(scene)


# Leaving.


@pytest.mark.parametrize("how", ["task", "aclose", "forgotten", "abort"])
def test_whoever_stops_waiting_ends_the_request(executor: Executor, play: Callable[..., None], how: str) -> None:
    async def scene(model: AsyncLLM) -> None:
        fields = {"max_tokens": 900, "ignore_eos": True, "keep_kv": True, "id": "a"}
        if how == "task":
            task = asyncio.ensure_future(model.generate("Once upon a time", **fields))
            while executor.pool.usage().used == 0:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            stream = await model.stream("Once upon a time", **fields)
            await anext(stream)
            if how == "aclose":
                await stream.aclose()
                await stream.aclose()
            elif how == "abort":
                model.abort("a")
                rest = [delta async for delta in stream]
                assert rest[-1].finish_reason == "cancelled"
                assert stream.completion.kv is not None
                stream.completion.kv.close()
            else:
                del stream
                gc.collect()
        while model.engine.requests:
            await asyncio.sleep(0.001)
        assert executor.pool.usage().used == 0

    play(scene)


def test_a_task_cancelled_while_its_prompt_is_made_ready_leaves_nothing(
    executor: Executor, play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(model: AsyncLLM) -> None:
        loop = asyncio.get_running_loop()
        begun, go = asyncio.Event(), threading.Event()
        honest = model.prompt_ids

        def slow(*given: Any, **more: Any) -> list[int]:
            loop.call_soon_threadsafe(begun.set)
            go.wait(300)
            return honest(*given, **more)

        monkeypatch.setattr(model, "prompt_ids", slow)
        with executor.create_kv_cache() as kv:
            executor.prefill([5, 6, 7], kv)
            task = asyncio.ensure_future(model.generate("Hello", SHORT, kv=kv))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            go.set()
            used = executor.pool.usage().used
        monkeypatch.setattr(model, "prompt_ids", honest)
        while executor.pool.usage().used:
            await asyncio.sleep(0.002)
        assert used >= 1
        await model.generate("Hello", SHORT)

    play(scene)


def test_an_id_in_use_is_refused_and_its_first_owner_goes_on(play: Callable[..., None]) -> None:
    async def scene(model: AsyncLLM) -> None:
        first = asyncio.ensure_future(model.generate("Once upon a time", max_tokens=60, ignore_eos=True, id="a"))
        while not model.engine.requests:
            await asyncio.sleep(0.001)
        with pytest.raises(InputError, match="give each its own id"):
            await model.generate("Hello", SHORT, id="a")
        assert len((await first).token_ids) == 60

    play(scene)


def test_a_reader_who_does_not_read_holds_up_only_itself(executor: Executor, play: Callable[..., None]) -> None:
    async def scene(model: AsyncLLM) -> None:
        slow = await model.stream("Once upon a time", max_tokens=200, ignore_eos=True)
        await anext(slow)
        for _ in range(3):
            assert len((await model.generate("Hello", max_tokens=40, ignore_eos=True)).token_ids) == 40
        drawn = len(slow._token_stream.answer.samples[0].token_ids)
        assert drawn <= 10, "the queue is bounded"
        rest = [delta async for delta in slow]
        assert len([delta for delta in rest if delta.token is not None]) == 199
        assert slow.completion.usage.completion_tokens == 200

    play(scene, unread_tokens=8)


def test_a_reader_who_catches_up_while_it_is_being_held_is_not_left_held() -> None:
    """Reader and steps are two threads: here the reader takes everything just while the hold is on its way."""
    calls: list[str] = []

    async def scene() -> None:
        class Between:
            """A driver during whose hold the reader runs."""

            def hold(self, _job: object) -> None:
                while token_stream._queue:
                    with pytest.raises(StopIteration):
                        token_stream.next().send(None)
                calls.append("hold")

            def resume(self, _job: object) -> None:
                calls.append("resume")

        texts = SimpleNamespace(take=lambda: "x")
        answer = SimpleNamespace(on_event=lambda _event: False, over=False, error=None, samples=[texts])
        token_stream = TokenStream(answer, asyncio.get_running_loop(), Between(), Notifier(), unread=4)  # type: ignore[arg-type]
        token_stream.job = object()  # type: ignore[assignment]
        for token in range(4):
            token_stream.on_event(TokenEvent(0, token))
        waiting = token_stream.next()
        waiting.send(None)  # nothing is there: it waits, and before that it looks whether it was held
        waiting.close()

    asyncio.run(scene())
    assert calls == ["hold", "resume"]


def test_many_readers_of_all_speeds_get_every_token(llm: LLM, play: Callable[..., None]) -> None:
    expected = llm.generate("Once upon a time", max_tokens=30, ignore_eos=True).token_ids

    async def scene(model: AsyncLLM) -> None:
        async def read(pace: int) -> list[int]:
            stream = await model.stream("Once upon a time", max_tokens=30, ignore_eos=True)
            tokens = []
            async for delta in stream:
                if delta.token is not None:
                    tokens.append(delta.token)
                for _ in range(pace):
                    await asyncio.sleep(0)
            return tokens

        assert await asyncio.gather(*(read(n) for n in (0, 0, 1, 5, 20, 0, 3, 50))) == [expected] * 8

    play(scene, unread_tokens=4)


def test_a_loop_that_is_gone_ends_its_requests(executor: Executor, tokenizer: Tokenizer) -> None:
    model = AsyncLLM(executor, tokenizer)

    async def leave() -> None:
        stream = await model.stream("Once upon a time", max_tokens=900, ignore_eos=True)
        await anext(stream)
        kept.append(stream)

    kept: list[Any] = []
    asyncio.run(leave())

    async def later() -> None:
        while model.engine.requests:
            await asyncio.sleep(0.002)

    asyncio.run(asyncio.wait_for(later(), 300))
    model._driver.close()


def test_a_hung_step_fails_its_readers(
    executor: Executor, play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(executor, monkeypatch)
    gate.clear()

    async def scene(model: AsyncLLM) -> None:
        asked = asyncio.ensure_future(model.generate("Hello", SHORT))
        while not model._driver._stepping:
            await asyncio.sleep(0.001)
        model._driver._trip(StepHung(0.1))  # what the watchdog does, when its rounds say so
        with pytest.raises(StepHung):
            await asked
        assert not model.healthy
        gate.set()
        while not model.healthy:
            await asyncio.sleep(0.002)
        assert (await model.generate("Hello", SHORT)).finish_reason == "length"

    play(scene)


# Handles.


def test_a_handle_is_made_once_and_used_often(executor: Executor, llm: LLM, play: Callable[..., None]) -> None:
    expected = [llm.generate(LONG_TEXT + rest, SHORT).token_ids for rest in (" The first", " The second")]
    executor.prefixes.clear()

    async def scene(model: AsyncLLM) -> None:
        made = await model.kv.create(LONG_TEXT, tenant="a")
        for rest, tokens in zip((" The first", " The second"), expected, strict=True):
            done = await model.generate(rest, SHORT, kv=made.id, tenant="a")
            assert done.usage.cached_tokens == made.tokens
            assert done.usage.prompt_tokens > made.tokens
            assert done.token_ids == tokens
        with pytest.raises(HandleUnknown):
            await model.generate("!", SHORT, kv=made.id, tenant="b")
        assert (await model.kv.info(made.id, tenant="a")).tokens == made.tokens

    play(scene)


def test_the_verbs_of_handles(executor: Executor, play: Callable[..., None], tmp_path: Path) -> None:
    async def scene(model: AsyncLLM) -> None:
        made = await model.kv.create([5] * 50)
        twin = await model.kv.fork(made.id, ttl_s=100)
        assert (await model.kv.truncate(twin.id, 40)).tokens == 40
        assert (await model.kv.pin(made.id, 60)).pinned
        assert {one.id for one in await model.kv.owned()} == {made.id, twin.id}
        assert await model.kv.save(made.id, tmp_path / "kv") > 0
        back = await model.kv.restore(tmp_path / "kv")
        assert back.tokens == 50
        model._handles.evict_one(True)
        model._handles.evict_one(True)
        model._handles.evict_one(True)
        assert not (await model.kv.info(made.id)).resident
        slow = await model.generate([6], SHORT, kv=made.id)
        assert slow.usage.cached_tokens == 32, "whole pages are found by their tokens"
        assert await model.kv.save(made.id, tmp_path / "again") > 0
        assert (tmp_path / "again").read_bytes() == (tmp_path / "kv").read_bytes()
        for one in (made, twin, back):
            await model.kv.delete(one.id)
        with pytest.raises(HandleUnknown):
            await model.kv.info(made.id)
        for given in ({}, {"prompt": "x", "messages": QUESTION}):
            with pytest.raises(InputError, match="give one of them"):
                await model.kv.create(**given)

    play(scene)


@pytest.mark.parametrize("resident", [True, False])
def test_saving_a_handle_that_gives_way_meanwhile_saves_it(
    executor: Executor, play: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resident: bool
) -> None:
    """Its KV is here, or was just computed, and has to go before it is written: the file is the same."""

    async def scene(model: AsyncLLM) -> None:
        made = await model.kv.create([5] * 50)
        await model.kv.save(made.id, tmp_path / "kv")
        if not resident:
            assert model._handles.evict_one(True)
        write, relieved = model._handles.write, []

        def write_late(*args: Any) -> int:
            relieved.append(model._handles.evict_one(True))
            return write(*args)

        monkeypatch.setattr(model._handles, "write", write_late)
        assert await model.kv.save(made.id, tmp_path / "again") > 0
        assert relieved == [True]
        assert (tmp_path / "again").read_bytes() == (tmp_path / "kv").read_bytes()
        await model.kv.delete(made.id)

    play(scene)


def test_a_stream_that_is_closed_frees_its_request(executor: Executor, play: Callable[..., None]) -> None:
    async def scene(model: AsyncLLM) -> None:
        async def quiet() -> None:
            while model.engine.requests or executor.pool.usage().used:
                await asyncio.sleep(0.001)

        for leave in (AsyncStream.close, AsyncStream.stop):
            stream = await model.stream("Once upon a time", max_tokens=200, ignore_eos=True)
            await anext(stream)
            leave(stream)
            leave(stream)
            await quiet()
        async with await model.stream("Once upon a time", max_tokens=200, ignore_eos=True) as stream:
            await anext(stream)
        await quiet()

    play(scene)


def test_a_conversation_must_begin_with_its_handle(llm: LLM, play: Callable[..., None]) -> None:
    system = [{"role": "system", "content": "You answer briefly and never lie, whatever you are asked."}]
    expected = llm.chat([*system, *QUESTION], SHORT)
    llm.executor.prefixes.clear()

    async def scene(model: AsyncLLM) -> None:
        made = await model.kv.create(messages=system)
        done = await model.chat([*system, *QUESTION], SHORT, kv=made.id)
        assert done.token_ids == expected.token_ids
        assert done.usage.cached_tokens == made.tokens
        with pytest.raises(HandleMismatch) as refused:
            await model.chat(QUESTION, SHORT, kv=made.id)
        assert 0 < refused.value.index < made.tokens
        whole = await model.kv.create(model.chat_ids([*system, *QUESTION]))
        again = await model.chat([*system, *QUESTION], SHORT, kv=whole.id)
        assert again.token_ids == expected.token_ids
        assert again.usage.cached_tokens == whole.tokens - 1
        stream = await model.stream_chat([*system, *QUESTION], SHORT, kv=made.id)
        assert [delta.token async for delta in stream if delta.token is not None] == expected.token_ids

    play(scene)


def test_prompt_and_answer_become_a_handle(llm: LLM, play: Callable[..., None]) -> None:
    async def scene(model: AsyncLLM) -> None:
        first = await model.generate("Once upon a time", SHORT, keep_kv=True)
        assert first.kv is not None
        made = await model.kv.keep(first.kv)
        more = await model.generate(first.token_ids[-1:], SHORT, kv=made.id)
        ids = llm.tokenizer.encode("Once upon a time") + first.token_ids
        assert more.token_ids == llm.generate(ids, SHORT).token_ids

    play(scene)


def test_a_cache_of_ones_own_is_forked_and_left_alone(executor: Executor, llm: LLM, play: Callable[..., None]) -> None:
    async def scene(model: AsyncLLM) -> None:
        with llm.prefill("Once upon") as kv:
            done = await model.generate(" a time", SHORT, kv=kv)
            assert kv.num_entries == 2
        assert done.usage.cached_tokens == 2
        assert done.token_ids == llm.generate("Once upon a time", SHORT).token_ids

    play(scene)


def test_handles_are_budgeted_and_expire(play: Callable[..., None]) -> None:
    async def scene(model: AsyncLLM) -> None:
        brief = await model.kv.create([5, 6], ttl_s=0.05)
        await asyncio.sleep(0.06)
        with pytest.raises(HandleExpired):
            await model.generate([7], SHORT, kv=brief.id)
        await model.kv.create([5, 6])
        with pytest.raises(HandleLimit):
            await model.kv.create([5, 6])

    play(scene, max_handles=1)


def test_handles_give_way_to_requests(executor: Executor, play: Callable[..., None]) -> None:
    async def scene(model: AsyncLLM) -> None:
        made = [await model.kv.create([n] * 1024, tenant=str(n)) for n in range(executor.pool.pages * 32 // 1024)]
        await model.kv.pin(made[0].id, 60, tenant="0")
        done = await model.generate([50] * 1000, max_tokens=5, ignore_eos=True)
        assert done.finish_reason == "length"
        left = [(await model.kv.info(one.id, tenant=str(n))).resident for n, one in enumerate(made)]
        assert left[0], "what is pinned goes last"
        assert not all(left)

    play(scene)


@pytest.mark.parametrize("stored", [True, False])
def test_a_handle_of_a_process_before_is_loaded_or_computed_again(
    executor: Executor, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    monkeypatch.setattr(executor, "close", lambda: None)
    config = EngineConfig(stored_prefix_tokens=64 if stored else None)
    expected: list[list[int]] = []
    name = ""

    async def life(first: bool) -> None:
        nonlocal name
        with Store(None, [Disk(tmp_path, Budget(1 << 28))], limits=StoreLimits(300, 300, close_s=300)) as store:
            async with AsyncLLM(executor, tokenizer, config=config, store=store) as model:
                if first:
                    made = await model.kv.create(LONG_TEXT, tenant="a")
                    gone = await model.kv.fork(made.id, tenant="a")
                    await model.kv.delete(gone.id, tenant="a")
                    assert len(list((tmp_path / "notes").iterdir())) == 1, "a delete is on the disk when it is answered"
                    name = made.id
                (found,) = await model.kv.owned(tenant="a")
                assert (found.id, found.resident) == (name, first)
                done = await model.generate(" So", SHORT, kv=name, tenant="a")
                expected.append(done.token_ids)
                assert (done.usage.cached_tokens >= found.tokens // 32 * 32) == (first or stored)
                with pytest.raises(HandleUnknown):
                    await model.generate(" So", SHORT, kv=name, tenant="b")
        executor.prefixes.clear()

    for first in (True, False):
        asyncio.run(life(first))
    assert expected[0] == expected[1]


def test_a_view_shows_a_tenant_its_requests_prefixes_and_handles(play: Callable[..., None]) -> None:
    async def scene(model: AsyncLLM) -> None:
        made = await model.kv.create(LONG_TEXT, tenant="a")
        stream = await model.stream(LONG_TEXT, max_tokens=200, ignore_eos=True, tenant="a", id="r")
        await anext(stream)
        mine, other = model.view("a"), model.view("b")
        assert [one.request for one in mine.samples] == ["r"]
        assert [one.id for one in mine.handles] == [made.id]
        assert mine.samples[0].shared_pages > 0, "with the handle"
        assert mine.prefixes[0].caches == 2 and mine.prefixes[0].hits == 1
        assert (other.samples, other.prefixes, other.handles) == ((), (), ())
        assert mine.pages.used > 0 and mine.pages.used + mine.pages.free == mine.pages.total
        await stream.aclose()
        await model.kv.delete(made.id, tenant="a")

    play(scene, unread_tokens=4)


def test_a_closed_model_says_so(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny", vocab_size=tokenizer.vocab_size, max_position_embeddings=64)
    executor = load_executor(folder, RunConfig(kv_memory=1 << 19, backend="native", threads=1))

    async def scene() -> None:
        model = AsyncLLM(executor, tokenizer)
        await model.generate("Hello", SHORT)
        await model.aclose()
        with pytest.raises((Draining, ModelClosed)):
            await model.generate("Hello", SHORT)

    asyncio.run(scene())
