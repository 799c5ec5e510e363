"""The thread that steps: nobody stalls it, no mistake ends it, a hung step is noticed, and it ends in order."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from small import Ask, Ear, asks, load_small

from kvilt.batch import Batch, Logits
from kvilt.config import EngineConfig
from kvilt.engine.admission import BorrowedKV
from kvilt.engine.driver import Driver
from kvilt.engine.engine import Engine
from kvilt.engine.event import Ended, Event
from kvilt.engine.request import Request
from kvilt.errors import Cancelled, Draining, QueueFull, StepHung
from kvilt.executor.protocol import Executor
from kvilt.sampling.params import SamplingParams

ENDLESS = Ask((5, 6, 7), SamplingParams(max_tokens=400))
SHORT = Ask((5, 6, 7), SamplingParams(max_tokens=3))


class Waiting(Ear):
    """An ear one can wait for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.done, self.begun = threading.Event(), threading.Event()

    def on_event(self, event: Event) -> bool:
        enough = super().on_event(event)
        self.begun.set()
        if isinstance(event, Ended) and self.over:
            self.done.set()
        return enough


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    return load_small(tmp_path_factory.mktemp("small"), 60, backend="native")


@pytest.fixture(autouse=True)
def nothing_left(executor: Executor) -> Iterator[None]:
    yield
    assert executor.pool.usage().used == 0


class Desk:
    """An engine with its driver, and short ways to ask."""

    def __init__(self, executor: Executor, **config: Any) -> None:
        self.config = EngineConfig(**config)
        self.engine = Engine(executor, self.config)
        self.hung: list[StepHung] = []
        self.driver = Driver(self.engine, executor, self.config, on_hung=self.hung.append)

    def ask(self, ask: Ask, borrowed: BorrowedKV | None = None, **fields: Any) -> Waiting:
        ear = Waiting(ask.params.n)
        self.driver.submit(self.engine.prepare(Request(ask.prompt, ask.params, **fields), ear, borrowed))
        return ear


@pytest.fixture
def desk(executor: Executor) -> Iterator[Desk]:
    made = Desk(executor)
    yield made
    made.driver.close()


def until(true: Callable[[], bool], most_s: float = 300) -> None:
    end = time.monotonic() + most_s
    while not true():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.002)


def test_requests_of_many_threads_share_steps_and_say_what_they_say_alone(executor: Executor, desk: Desk) -> None:
    many = asks(24, seed=3)
    ears: dict[int, Waiting] = {}

    def submit(index: int) -> None:
        ears[index] = desk.ask(many[index])

    threads = [threading.Thread(target=submit, args=(index,)) for index in range(len(many))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, ask in enumerate(many):
        assert ears[index].done.wait(300)
        assert ears[index].tokens[0] == ask.alone(executor)


def test_an_abort_ends_a_request_and_an_idle_driver_rests(
    executor: Executor, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = Stuck(executor, monkeypatch, looks=False, steps=3)
    ear = desk.ask(ENDLESS, id="a")
    assert ear.begun.wait(300)
    desk.driver.abort("a")
    stuck.release_resources.set()
    assert ear.done.wait(300)
    assert ear.reasons == ["cancelled"]
    assert not desk.engine.ready


def test_a_held_request_waits_for_its_reader(executor: Executor, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Stuck(executor, monkeypatch, looks=False, steps=3)
    ear = desk.ask(ENDLESS, id="a")
    assert ear.begun.wait(300)
    desk.driver.hold("a")
    stuck.release_resources.set()
    other = desk.ask(SHORT)
    assert other.done.wait(300)
    said = len(ear.tokens[0])
    assert said < 400
    assert desk.ask(SHORT).done.wait(300)
    assert len(ear.tokens[0]) == said
    desk.driver.resume("a")
    assert ear.done.wait(300)
    assert len(ear.tokens[0]) == 400


def test_a_stray_cancel_costs_a_step_and_nothing_else(
    executor: Executor, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = SHORT.alone(executor)
    honest, calls = executor.run, iter(range(100))

    def cancelled_twice(batch: Batch) -> Logits:
        if next(calls) < 2:
            raise Cancelled()
        return honest(batch)

    monkeypatch.setattr(executor, "run", cancelled_twice)
    ear = desk.ask(SHORT)
    assert ear.done.wait(300)
    assert ear.tokens[0] == expected


def test_a_mistake_of_ours_ends_the_rows_of_its_step_and_the_loop_goes_on(
    executor: Executor, desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(desk.engine._scheduler, "commit", lambda *_: 1 / 0)
        ear = desk.ask(SHORT)
        assert ear.done.wait(300)
        assert isinstance(ear.error, ZeroDivisionError)
    with monkeypatch.context() as patch:
        patch.setattr(desk.engine._scheduler, "plan", lambda: 1 / 0)
        ear = desk.ask(SHORT)
        assert ear.done.wait(300)
        assert isinstance(ear.error, ZeroDivisionError)
    until(lambda: "a step failed in a way it should not" in caplog.text)
    ear = desk.ask(SHORT)
    assert ear.done.wait(300)
    assert ear.reasons == ["length"]


def test_too_many_that_wait_are_refused_without_a_trace(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(executor, max_rows=1, max_waiting=2)
    with executor.create_kv_cache() as kv:
        executor.prefill([5, 6], kv)
        own = kv.fork()
    stuck = Stuck(executor, monkeypatch, looks=False, steps=3)
    running = desk.ask(ENDLESS)
    assert running.begun.wait(300) and stuck.waits.wait(300)
    waiting = [desk.ask(SHORT) for _ in range(2)]
    until(lambda: desk.engine.waiting == 2)
    with pytest.raises(QueueFull, match="2 requests wait and 2 may"):
        desk.ask(SHORT, BorrowedKV(own))
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(desk.driver.close, 300)
        until(desk.driver._closing.is_set)
        stuck.release_resources.set()
        closing.result(300)
    assert all(isinstance(ear.error, Draining) for ear in (running, *waiting))


def test_a_queue_that_one_owner_fills_has_room_for_another(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(executor, max_rows=1, max_waiting=4)
    stuck = Stuck(executor, monkeypatch, looks=False, steps=3)
    running = desk.ask(ENDLESS, owner="crowd")
    assert running.begun.wait(300)
    assert stuck.waits.wait(300), "a step before it would give another owner the row"
    for _ in range(4):
        desk.ask(SHORT, owner="crowd")
    until(lambda: desk.engine.waiting == 4)
    with pytest.raises(QueueFull, match="4 requests wait and 4 may"):
        desk.ask(SHORT, owner="crowd")
    late = [desk.ask(SHORT, owner="late") for _ in range(2)]
    until(lambda: desk.engine.waiting == 6)
    with pytest.raises(QueueFull, match="2 requests wait and 2 may"):
        desk.ask(SHORT, owner="late")
    stuck.release_resources.set()
    assert all(ear.done.wait(300) for ear in late), "the crowd's endless request holds no other owner up"
    assert [ear.reasons for ear in late] == [["length"]] * 2
    desk.driver.close(300)


def test_draining_finishes_what_there_is_and_takes_nothing_new(executor: Executor, desk: Desk) -> None:
    ears = [desk.ask(ask) for ask in asks(6, seed=5)]
    assert desk.driver.drain(300)
    assert all(ear.reasons == ["length"] for ear in ears)
    assert not desk.driver.accepting
    with pytest.raises(Draining):
        desk.ask(SHORT)
    assert desk.driver.drain(0)


def test_draining_says_when_it_took_too_long(executor: Executor, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Stuck(executor, monkeypatch, looks=True)
    ear = desk.ask(ENDLESS)
    assert not desk.driver.drain(0.01)
    desk.driver.close(0)
    stuck.release_resources.set()
    desk.driver.close(300)
    assert isinstance(ear.error, Draining)


class Stuck:
    """A forward that waits, after some steps, until it is let go, or until it is cancelled if it looks."""

    def __init__(self, executor: Executor, monkeypatch: pytest.MonkeyPatch, looks: bool, steps: int = 0) -> None:
        self.release_resources, self.waits = threading.Event(), threading.Event()
        self._looks, self._steps = looks, steps
        self._honest, self._executor = executor.run, executor
        monkeypatch.setattr(executor, "run", self)

    def __call__(self, batch: Batch) -> Logits:
        self._steps -= 1
        if self._steps < 0:
            self.waits.set()
        with self._executor.call() as stop:
            while self._steps < 0 and not self.release_resources.wait(0.005):
                if self._looks and stop.is_set():
                    raise Cancelled()
        return self._honest(batch)


def test_a_hung_step_is_cancelled_and_its_requests_fail(
    executor: Executor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    desk, rounds = watched(executor, monkeypatch)
    stuck = Stuck(executor, monkeypatch, looks=True)
    ear = desk.ask(SHORT)
    until(lambda: desk.driver._stepping)
    rounds.make(7)
    assert ear.done.wait(300)
    assert isinstance(ear.error, StepHung)
    assert len(desk.hung) >= 1
    assert "a step has taken more than 0.05 s" in caplog.text
    stuck.release_resources.set()
    until(lambda: desk.driver.healthy)
    ear = desk.ask(SHORT)
    assert ear.done.wait(300)
    assert ear.reasons == ["length"]
    rounds.end()
    desk.driver.close()


def test_a_step_that_hears_no_cancel_is_told_to_readers_and_newcomers(
    executor: Executor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    desk, rounds = watched(executor, monkeypatch)
    stuck = Stuck(executor, monkeypatch, looks=False)
    ear = desk.ask(SHORT)
    until(lambda: desk.driver._stepping)
    rounds.make(7)
    assert desk.hung != []
    assert not desk.driver.healthy
    assert not desk.driver.accepting
    with pytest.raises(StepHung, match=r"0\.05 s"):
        desk.ask(SHORT)
    stuck.release_resources.set()
    assert ear.done.wait(300), "it ended after all, and so did its request"
    until(lambda: desk.driver.healthy)
    rounds.end()
    desk.driver.close()


class Rounds(threading.Event):
    """Lets a watchdog make its rounds one by one, when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        self._back.release()
        self._go.acquire()
        return self.is_set()

    def make(self, count: int) -> None:
        for _ in range(count):
            self._go.release()
            assert self._back.acquire(timeout=300)

    def end(self) -> None:
        self.set()
        self._go.release()


def watched(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> tuple[Desk, Rounds]:
    """A desk whose watchdog gives a step about five rounds, and makes them when the test says so."""
    desk, rounds = Desk(executor, step_timeout_s=0.05), Rounds()
    monkeypatch.setattr(desk.driver, "_closing", rounds)
    assert rounds._back.acquire(timeout=300)
    return desk, rounds


def test_time_in_which_the_whole_process_stood_still_hangs_no_step(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped by a signal or with its machine, the watchdog makes no rounds either, whatever clocks say then."""
    desk, rounds = watched(executor, monkeypatch)
    stuck = Stuck(executor, monkeypatch, looks=True)
    ear = desk.ask(SHORT)
    until(lambda: desk.driver._stepping)
    rounds.make(4)
    time.sleep(0.1)  # twice as long as a step may take
    rounds.make(1)
    assert desk.driver.healthy
    assert desk.hung == []
    rounds.make(2)
    assert ear.done.wait(300)
    assert isinstance(ear.error, StepHung)
    stuck.release_resources.set()
    rounds.end()
    desk.driver.close()
