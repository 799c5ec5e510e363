"""Work off the event loop: bounded, in turns, ended at its deadline or with its caller."""

from __future__ import annotations

import ast
import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

import kvilt
from kvilt.errors import QueueFull, WorkTimeout
from kvilt.llm.offload import Lane, Offload, uninterruptible

LANE = Lane("test", 1, 2, 30.0)
SHORT = Lane("short", 1, 2, 0.05)


def run(scene: Callable[[Offload], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        await asyncio.wait_for(scene(Offload()), 60)

    asyncio.run(whole())


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen")


class Endless:
    """Work that never ends by itself; says when it has begun, and how it was ended."""

    def __init__(self, stubborn: int = 0) -> None:
        self.begun = threading.Event()
        self.ended: list[type[BaseException]] = []
        self._stubborn = stubborn

    def __call__(self) -> None:
        self.begun.set()
        while True:
            try:
                while True:
                    pass
            except BaseException as error:
                self.ended.append(type(error))
                if len(self.ended) > self._stubborn:
                    raise


def test_results_and_errors_come_back() -> None:
    async def scene(offload: Offload) -> None:
        assert await offload.run(LANE, lambda a, b: a + b, 1, 2) == 3
        with pytest.raises(ZeroDivisionError):
            await offload.run(LANE, lambda: 1 // 0)
        with pytest.raises(TimeoutError, match="its own"):
            await offload.run(LANE, _raises)
        await until(lambda: offload.load() == {"test": (0, 0)})

    def _raises() -> None:
        raise TimeoutError("its own")

    run(scene)


@pytest.mark.parametrize("stubborn", [0, 2])
def test_work_is_ended_at_its_deadline(stubborn: int) -> None:
    """Also work that catches what ends it; its thread serves the next."""

    async def scene(offload: Offload) -> None:
        endless = Endless(stubborn)
        with pytest.raises(WorkTimeout) as late:
            await offload.run(SHORT, endless)
        assert (late.value.kind, late.value.limit_s) == ("short", 0.05)
        await until(lambda: offload.load()["short"] == (0, 0))
        assert len(endless.ended) == stubborn + 1
        assert await offload.run(SHORT, lambda: 5) == 5

    run(scene)


def test_work_is_ended_with_its_caller() -> None:
    async def scene(offload: Offload) -> None:
        endless = Endless()
        task = asyncio.ensure_future(offload.run(LANE, endless))
        await asyncio.to_thread(endless.begun.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: offload.load()["test"] == (0, 0))
        assert await offload.run(LANE, lambda: 5) == 5

    run(scene)


TRACED = """
import asyncio, sys, threading
from kvilt.llm.offload import Lane, Offload

def endless():
    begun.set()
    while True:
        pass

async def scene(offload):
    lane = Lane("traced", 1, 2, 300.0)
    await offload.run(lane, int)
    task = asyncio.ensure_future(offload.run(lane, endless))
    while not begun.is_set():
        await asyncio.sleep(0.001)
    task.cancel()
    while offload.load()["traced"] != (0, 0):
        await asyncio.sleep(0.001)
    threading.settrace(lambda *_: None)
    sys.settrace(lambda *_: None)
    for _ in range(50):
        await offload.run(lane, int)

begun = threading.Event()
asyncio.run(scene(Offload()))
"""


def test_no_exception_is_left_on_its_way() -> None:
    """The interpreter would look for it at every step, and under a debugger or coverage it would do nothing else."""
    subprocess.run([sys.executable, "-c", TRACED], check=True, timeout=120)


def test_what_waits_is_bounded_for_each_owner_and_takes_turns() -> None:
    async def scene(offload: Offload) -> None:
        go, begun, order = threading.Event(), threading.Event(), []

        def hold() -> None:
            begun.set()
            go.wait(30)

        first = asyncio.ensure_future(offload.run(LANE, hold))
        await asyncio.to_thread(begun.wait, 30)
        names = ("a1", "a2", "b1", "b2")
        waiting = [asyncio.ensure_future(offload.run(LANE, order.append, name, owner=name[0])) for name in names]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await offload.run(LANE, order.append, "a3", owner="a")
        assert offload.load()["test"] == (1, 4)
        waiting[0].cancel()
        await asyncio.sleep(0)
        assert offload.load()["test"] == (1, 3), "a caller that leaves gives its place back"
        go.set()
        await asyncio.gather(first, *waiting[1:])
        assert sorted(order) == ["a2", "b1", "b2"]
        order.clear()
        go.clear(), begun.clear()
        first = asyncio.ensure_future(offload.run(LANE, hold))
        await asyncio.to_thread(begun.wait, 30)
        waiting = [asyncio.ensure_future(offload.run(LANE, order.append, name, owner=name[0])) for name in names]
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(first, *waiting)
        assert order == ["a1", "b1", "a2", "b2"]

    run(scene)


def test_one_kind_of_work_does_not_wait_for_another() -> None:
    async def scene(offload: Offload) -> None:
        go = threading.Event()
        held = [asyncio.ensure_future(offload.run(LANE, go.wait, 30)) for _ in range(3)]
        await until(lambda: offload.load().get("test") == (1, 2))
        assert await offload.run(Lane("other", 1, 1, 30.0), lambda: 5) == 5
        go.set()
        await asyncio.gather(*held)

    run(scene)


def test_what_holds_something_runs_to_its_end_and_is_discarded() -> None:
    async def scene(offload: Offload) -> None:
        go, begun = threading.Event(), threading.Event()

        def work() -> str:
            uninterruptible()
            begun.set()
            go.wait(30)
            return "held"

        dropped: list[str] = []
        task = asyncio.ensure_future(offload.run(LANE, work, discard=dropped.append))
        await asyncio.to_thread(begun.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go.set()
        await until(lambda: dropped == ["held"])

    run(scene)


def test_files_are_never_cut_off() -> None:
    async def scene(offload: Offload) -> None:
        go, begun, written = threading.Event(), threading.Event(), []

        def write() -> None:
            begun.set()
            go.wait(30)
            written.append(True)

        task = asyncio.ensure_future(offload.run(Lane("files", 1, 1, None), write))
        await asyncio.to_thread(begun.wait, 30)
        task.cancel()
        go.set()
        await until(lambda: written == [True])

    run(scene)


def test_ending_many_at_every_place_loses_no_thread() -> None:
    """Work of all lengths, ended at any moment: every slot comes back, and no later job is hit."""

    async def scene(offload: Offload) -> None:
        lane = Lane("many", 4, 1000, 30.0)

        def spin(count: int) -> int:
            return sum(1 for _ in range(count))

        for delay in range(120):
            task = asyncio.ensure_future(offload.run(lane, spin, 200 * delay))
            for _ in range(delay % 7):
                await asyncio.sleep(0)
            task.cancel()
            assert await offload.run(lane, spin, 100) == 100
        await until(lambda: offload.load()["many"] == (0, 0))

    run(scene)


ROOT = Path(kvilt.__file__).parent
FORBIDDEN = {"to_thread", "run_in_executor", "ThreadPoolExecutor", "ProcessPoolExecutor", "Thread", "run_in_threadpool"}
LASTING = {"publisher"}  # one thread, which lives as long as the server and does nothing for a request


@pytest.mark.parametrize(
    "path",
    sorted(
        path
        for path in [*(ROOT / "server").rglob("*.py"), *(ROOT / "llm").glob("async_*.py")]
        if path.stem not in LASTING
    ),
    ids=lambda path: path.stem,
)
def test_there_is_no_other_way_to_a_thread(path: Path) -> None:
    """Routes and AsyncLLM get work done off the loop by Offload alone, where it has a bound and a deadline."""
    for node in ast.walk(ast.parse(path.read_text())):
        used = getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "name", None)
        assert used not in FORBIDDEN, f"{path.name}:{getattr(node, 'lineno', 0)} uses {used}; use Offload.run"
    routes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    decorated = [node.name for node in routes if any("router" in ast.unparse(each) for each in node.decorator_list)]
    assert decorated == [], "FastAPI runs routes that are not async in threads of its own"


def test_work_that_comes_soon_finds_the_same_thread() -> None:
    """Starting a thread holds up the event loop."""

    async def scene(offload: Offload) -> None:
        assert len({await offload.run(LANE, threading.get_ident) for _ in range(20)}) == 1
        await until(lambda: offload.load() == {"test": (0, 0)})

    run(scene)


def test_an_idle_thread_ends_and_work_after_that_gets_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvilt.llm.offload._IDLE_S", 0.01)

    async def scene(offload: Offload) -> None:
        for _ in range(3):
            thread = await offload.run(LANE, threading.current_thread)
            await until(lambda thread=thread: not thread.is_alive())  # type: ignore[misc]

    run(scene)


def test_waiting_work_is_shared_by_idle_threads_and_new_ones() -> None:
    wide = Lane("wide", 3, 8, 30.0)

    async def scene(offload: Offload) -> None:
        await offload.run(wide, int)
        meeting = threading.Barrier(3)
        await asyncio.gather(*(offload.run(wide, meeting.wait, 30) for _ in range(3)))

    run(scene)
