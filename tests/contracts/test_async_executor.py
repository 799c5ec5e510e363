"""Contract D with an event loop: the seed's futures, awaited, and stopped when their task is cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from third_party import ToyModel

from kvilt import (
    AsyncLlmExecutor,
    DecodeInput,
    Executor,
    LlmExecutor,
    ModelExecutorInterface,
    PrefillInput,
    UnifiedBatch,
    UnifiedItem,
)
from kvilt.batch import Batch, Ids, Row
from kvilt.errors import InputError

A, B = [5, 17, 3, 44, 21, 9, 9, 30, 2, 58, 13, 7], [1, 2, 3]
LONG = [40] * 70


@pytest.fixture(params=["kvilt", "third party"])
def model(request: pytest.FixtureRequest, tiny: Executor) -> Any:
    return tiny if request.param == "kvilt" else ToyModel()


def test_every_future_gives_what_the_synchronous_call_gives(model: Any) -> None:
    """ "fn batch_prefill(...) -> Pin<Box<dyn Future<...>>>" """

    async def ask(executor: AsyncLlmExecutor) -> list[torch.Tensor]:
        found = [(await executor.prefill(PrefillInput("a", A))).logits]
        found += [one.logits for one in await executor.batch_prefill([PrefillInput("b", B), PrefillInput("c", A)])]
        found.append((await executor.decode(DecodeInput("a", 4))).logits)
        found += [one.logits for one in await executor.batch_decode([DecodeInput("a", 5), DecodeInput("b", 6)])]
        verified = await executor.forward_verify([DecodeInput("c", 1), DecodeInput("c", 2)])
        handle = await executor.truncate_kv(verified[-1].cache, len(A) + 1)
        assert handle.length == len(A) + 1
        mixed = await executor.unified_decode(UnifiedBatch([UnifiedItem("c", [9], len(A) + 1), UnifiedItem("d", B, 0)]))
        return [*found, *(one.logits for one in verified), *mixed]

    executor = AsyncLlmExecutor(model)
    assert isinstance(executor, ModelExecutorInterface)
    found = asyncio.run(ask(executor))
    assert isinstance(executor.sync, LlmExecutor)
    truth = [A, B, A, [*A, 4], [*A, 4, 5], [*B, 6], [*A, 1], [*A, 1, 2], [*A, 1, 9], B]
    for logits, tokens in zip(found, truth, strict=True):
        torch.testing.assert_close(logits, alone(model, tokens), rtol=1e-5, atol=1e-5)
    assert executor.status() == executor.sync.status() and executor.status().caches == 4
    assert executor.capabilities() == executor.sync.capabilities()
    for cache_id in "abcd":
        executor.release_cache(cache_id)
    assert executor.status().caches == 0


def alone(model: Any, tokens: list[int]) -> torch.Tensor:
    if isinstance(model, ToyModel):
        return torch.tensor(model.logits(tokens))
    with model.create_kv_cache() as kv:
        return model.step(tokens, kv)[0]


def test_errors_come_to_the_task_that_asked(tiny: Executor) -> None:
    async def ask() -> None:
        executor = AsyncLlmExecutor(tiny)
        results = await asyncio.gather(
            executor.prefill(PrefillInput("a", [999])), executor.prefill(PrefillInput("b", B)), return_exceptions=True
        )
        assert isinstance(results[0], InputError)
        assert results[1].cache.length == len(B)
        executor.release_cache("b")

    asyncio.run(ask())
    assert tiny.pool.usage().used == 0


def test_the_primitive(tiny: Executor) -> None:
    with tiny.create_kv_cache() as kv:
        kv.reserve(len(A))
        batch = Batch.of([Row(Ids(A), range(len(A)), kv)])
        found = asyncio.run(AsyncLlmExecutor(tiny).forward(batch))
        assert torch.equal(found.values, tiny.run(batch).values)


class Paused:
    """The next forwards of an executor wait at their first layer until they are let go."""

    def __init__(self, executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        decoder = executor._decoder
        monkeypatch.setattr(executor._replay, "_recorder", None)

        def waiting(batch: Batch, before_layer: Callable[[int], None], *rest: object) -> object:
            self.entered.set()
            assert self.go.wait(300)
            return decoder(batch, before_layer, *rest)

        monkeypatch.setattr(executor, "_decoder", waiting)
        monkeypatch.setattr(type(executor), "spec", property(lambda _self: decoder.spec))


async def until(event: threading.Event) -> None:
    while not event.is_set():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("stopped", [0, 1], ids=["running", "waiting"])
def test_a_cancelled_task_stops_its_own_call_alone(
    tiny: Executor, monkeypatch: pytest.MonkeyPatch, stopped: int
) -> None:
    async def ask() -> None:
        executor = AsyncLlmExecutor(tiny)
        await executor.batch_prefill([PrefillInput("a", A), PrefillInput("b", B)])
        free = tiny.pool.free_pages()
        with monkeypatch.context() as patch:
            paused = Paused(tiny, patch)
            tasks = [asyncio.create_task(executor.prefill(PrefillInput("a", [*A, *LONG])))]
            await until(paused.entered)
            tasks.append(asyncio.create_task(executor.decode(DecodeInput("b", 7))))
            await asyncio.sleep(0)
            tasks[stopped].cancel()
            await asyncio.sleep(0.01)
            assert not tasks[0].done(), "a running step is waited for: its caches are in use"
            assert tasks[1].done() == (stopped == 1), "a waiting one is gone at once"
            paused.go.set()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(ends[stopped], asyncio.CancelledError)
        assert not isinstance(ends[1 - stopped], BaseException)
        lengths = [executor.sync.table.length(cache_id) for cache_id in "ab"]
        assert lengths == ([len(A), len(B) + 1] if stopped == 0 else [len(A) + len(LONG), len(B)])
        if stopped == 0:
            assert tiny.pool.free_pages() == free, "what it had reserved went back"
        decoded = await executor.decode(DecodeInput("a", 1))  # and all of it goes on
        tokens = [*A, 1] if stopped == 0 else [*A, *LONG, 1]
        torch.testing.assert_close(decoded.logits, alone(tiny, tokens), rtol=1e-5, atol=1e-5)
        for cache_id in "ab":
            executor.release_cache(cache_id)

    asyncio.run(ask())
    assert tiny.pool.usage().used == 0


def test_a_timeout_stops_a_step(tiny: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> None:
        executor = AsyncLlmExecutor(tiny)
        with monkeypatch.context() as patch:
            paused = Paused(tiny, patch)
            threading.Timer(0.1, paused.go.set).start()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await executor.prefill(PrefillInput("a", LONG))
        assert executor.status().caches == 0
        await executor.prefill(PrefillInput("a", LONG))
        executor.release_cache("a")

    asyncio.run(ask())
    assert tiny.pool.usage().used == 0


def test_a_release_during_a_step_blocks_no_event_loop(tiny: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> None:
        executor = AsyncLlmExecutor(tiny)
        await executor.batch_prefill([PrefillInput("a", A), PrefillInput("b", B)])
        with monkeypatch.context() as patch:
            paused = Paused(tiny, patch)
            task = asyncio.create_task(executor.decode(DecodeInput("b", 7)))
            await until(paused.entered)
            executor.release_cache("a")  # would wait for ever if it waited for the step
            again = asyncio.create_task(executor.prefill(PrefillInput("a", B)))
            await asyncio.sleep(0)
            paused.go.set()
            await asyncio.gather(task, again)
        assert executor.sync.table.length("a") == len(B), "the release came before the call that was made later"
        for cache_id in "ab":
            executor.release_cache(cache_id)

    asyncio.run(ask())
    assert tiny.pool.usage().used == 0
