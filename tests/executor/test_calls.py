"""Calls of several threads on one executor: they wait for each other, and each can be stopped alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from tiny import write_tiny

from kvilt import Executor
from kvilt.batch import Batch
from kvilt.config import RunConfig
from kvilt.errors import Cancelled
from kvilt.executor.load import load_executor

PROMPT = [5, 17, 3, 44, 21, 9, 9, 30, 2, 58, 13, 7]
SOON_S = 0.3  # far more than a thread needs to enter a forward that nothing holds back


class Paused:
    """Every forward waits at its first layer until it is let go."""

    def __init__(self, executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.go = threading.Semaphore(0), threading.Event()
        decoder = executor._decoder
        monkeypatch.setattr(executor._replay, "_recorder", None)  # a replayed step has no layers to be seen

        def waiting(batch: Batch, before_layer: Callable[[int], None], *rest: object) -> object:
            self.entered.release()
            assert self.go.wait(300)
            return decoder(batch, before_layer, *rest)

        monkeypatch.setattr(executor, "_decoder", waiting)
        monkeypatch.setattr(type(executor), "spec", property(lambda _self: decoder.spec))


class Worker:
    """A call in a thread of its own, and how it ended."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.result: Any = None
        self._work = work
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._work()
        except Exception as error:
            self.result = error

    def join(self) -> Any:
        self._thread.join(300)
        return self.result


def test_a_second_caller_enters_no_forward_while_the_first_is_in_one(
    tiny: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny.create_kv_cache() as a, tiny.create_kv_cache() as b, monkeypatch.context() as patch:
        paused = Paused(tiny, patch)
        first = Worker(lambda: tiny.prefill(PROMPT, a))
        assert paused.entered.acquire(timeout=300)
        second = Worker(lambda: tiny.prefill(PROMPT, b))
        both = paused.entered.acquire(timeout=SOON_S)
        paused.go.set()
        assert (first.join(), second.join()) == (None, None)
        assert not both
        assert a.tokens() == b.tokens() == PROMPT


def test_cancel_stops_the_call_in_progress_and_those_that_wait_go_on(
    tiny: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "Best effort cancellation of any ongoing operations": of one that has begun; the others were not ongoing."""
    with tiny.create_kv_cache() as a, tiny.create_kv_cache() as b, monkeypatch.context() as patch:
        paused = Paused(tiny, patch)
        first = Worker(lambda: tiny.prefill(PROMPT, a))
        assert paused.entered.acquire(timeout=300)
        second = Worker(lambda: tiny.prefill(PROMPT, b))
        tiny.cancel()
        paused.go.set()
        assert isinstance(first.join(), Cancelled)
        assert second.join() is None
        assert (a.tokens(), b.tokens()) == ([], PROMPT)


@pytest.mark.parametrize("stopped", [0, 1], ids=["in progress", "waiting"])
def test_a_handle_stops_its_own_call_alone(tiny: Executor, monkeypatch: pytest.MonkeyPatch, stopped: int) -> None:
    with tiny.create_kv_cache() as a, tiny.create_kv_cache() as b, monkeypatch.context() as patch:
        paused, caches, calls = Paused(tiny, patch), (a, b), (tiny.call(), tiny.call())

        def prefill(i: int) -> None:
            with calls[i]:
                tiny.prefill(PROMPT[:6], caches[i])
                tiny.prefill(PROMPT[6:], caches[i])

        workers = [Worker(lambda: prefill(0))]
        assert paused.entered.acquire(timeout=300)
        workers.append(Worker(lambda: prefill(1)))
        calls[stopped].cancel()
        paused.go.set()
        ends = [worker.join() for worker in workers]
        assert isinstance(ends[stopped], Cancelled) and ends[1 - stopped] is None
        assert caches[stopped].tokens() == []
        assert caches[1 - stopped].tokens() == PROMPT


def test_a_handle_that_comes_late_or_early(tiny: Executor) -> None:
    with tiny.create_kv_cache() as kv:
        with (call := tiny.call()):
            tiny.prefill(PROMPT[:3], kv)
        call.cancel()  # it has ended: nothing to stop
        tiny.prefill(PROMPT[3:], kv)
        call = tiny.call()
        call.cancel()
        with pytest.raises(Cancelled), call:
            pytest.fail("a call that was cancelled before it began does not begin")
        assert not tiny.busy
        assert kv.tokens() == PROMPT


def test_a_call_inside_a_call_stops_with_it(tiny: Executor) -> None:
    with tiny.create_kv_cache() as kv:
        with pytest.raises(Cancelled), tiny.call() as outer, (inner := tiny.call()) as stop:
            assert stop is outer
            inner.cancel()
            tiny.prefill(PROMPT, kv)
        tiny.prefill(PROMPT, kv)


@pytest.mark.parametrize("tokens", [40, 100])
def test_what_a_stopped_call_had_reserved_goes_back(
    tiny: Executor, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """More than a page of them, so that a page that stays behind is seen."""
    page = tiny.layout.page_tokens
    assert tokens > page
    for call in (
        lambda kv: tiny.prefill([7] * tokens, kv),
        lambda kv: tiny.step([7] * tokens, kv),
        lambda kv: tiny.sample_tokens(tokens, PROMPT, kv),
    ):
        with tiny.create_kv_cache() as kv:
            tiny.prefill(PROMPT, kv)
            free, pages = tiny.pool.free_pages(), kv.pages()
            with monkeypatch.context() as patch:
                paused = Paused(tiny, patch)
                worker = Worker(lambda call=call, kv=kv: call(kv))
                assert paused.entered.acquire(timeout=300)
                assert tiny.pool.free_pages() != free
                tiny.cancel()
                paused.go.set()
                assert isinstance(worker.join(), Cancelled)
            assert (tiny.pool.free_pages(), kv.pages(), kv.tokens()) == (free, pages, PROMPT)


def test_a_cancel_stops_a_replay_inside_of_it(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy decoding runs up to 32 steps without Python in between; a cancel during them keeps none of the rest."""
    folder = write_tiny(tmp_path_factory.mktemp("replayed"))
    executor = load_executor(folder, RunConfig(kv_memory=1 << 20, backend="native", threads=1))
    with executor.create_kv_cache() as kv:
        (truth,) = executor.sample_tokens(60, PROMPT, kv)
        executor.step([1], kv)  # recorded too, since the first step of a shape runs to its end
    replayed = type(next(iter(executor._replay._loops.values())).step)
    loop = replayed.loop
    with executor.create_kv_cache() as kv:
        with monkeypatch.context() as patch:
            patch.setattr(replayed, "loop", lambda self, *rest: executor.cancel() or loop(self, *rest))
            with pytest.raises(Cancelled) as caught:
                executor.sample_tokens(60, PROMPT, kv)
        assert caught.value.tokens == [truth[:1]]
        assert kv.tokens() == PROMPT
        assert executor.sample_tokens(59, truth[:1], kv) == [truth[1:]]
    executor.close()
