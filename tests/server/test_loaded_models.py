"""Which of several models are in memory: loaded once for many requests, the least recently used ended for room."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from kvilt.errors import QueueFull
from kvilt.server.model_router import loaded_models
from kvilt.server.model_router.loaded_models import LoadedModels, ModelBusy
from kvilt.server.model_router.model_process import ModelFailed, ModelProcess, RoutedModel

SIZE, KV = 60, 40  # bytes of each model's file, and of its KV


class FakeProcess:
    """A process that is there until it is stopped."""

    def __init__(self, model: RoutedModel) -> None:
        self.model = model
        self.gone = asyncio.Event()
        self.memory_bytes = SIZE + KV

    async def stop(self, grace_s: float) -> None:
        await asyncio.sleep(0)
        self.gone.set()

    def kill(self) -> None:
        self.gone.set()


class Machine:
    """Starts processes, and notes the order."""

    def __init__(self, device_room: int | None = None) -> None:
        self.started: list[str] = []
        self.processes: list[FakeProcess] = []
        self.failure: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self._device_room = device_room

    @property
    def running(self) -> list[str]:
        return [process.model.name for process in self.processes if not process.gone.is_set()]

    async def start(self, model: RoutedModel) -> ModelProcess:
        self.started.append(model.name)
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        if self._device_room is not None and len(self.running) >= self._device_room:
            raise ModelFailed("the device is full", lacks_memory=True)
        self.processes.append(FakeProcess(model))
        return cast(ModelProcess, self.processes[-1])


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name in "abc":
        (tmp_path / name).write_bytes(bytes(SIZE))
    return tmp_path


def models_of(files: Path, machine: Machine, room: int, **more: Any) -> LoadedModels:
    """Room for so many models."""
    models = [RoutedModel((name,), name, files / name, 128, {}, {}) for name in "abc"]
    return LoadedModels(models, machine.start, room * (SIZE + KV), lambda: KV, **more)


def play(story: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await story()

    asyncio.run(bounded())


def test_many_requests_share_one_load_and_one_process(files: Path) -> None:
    async def story() -> None:
        machine = Machine()
        models = models_of(files, machine, 2)
        machine.gate.clear()
        waiting = [asyncio.ensure_future(models.acquire("a")) for _ in range(5)]
        await asyncio.sleep(0)
        waiting[0].cancel()  # a client that leaves ends its own request, not the load
        await asyncio.sleep(0)
        machine.gate.set()
        found = await asyncio.gather(*waiting[1:])
        assert machine.started == ["a"] and len({id(one) for one in found}) == 1
        assert models.requests == 4
        for _ in found:
            models.release("a")
        assert models.requests == 0

    play(story)


def test_the_least_recently_used_one_makes_room(files: Path) -> None:
    async def story() -> None:
        machine = Machine()
        models = models_of(files, machine, 2)
        for name in "aba":
            await models.acquire(name)
            models.release(name)
        await models.acquire("c")
        assert sorted(machine.running) == ["a", "c"], "b was used before a"
        assert [process.model.name for process in models.loaded()] == ["c", "a"]
        assert models.process_of("b") is None

    play(story)


def test_one_with_requests_stays_while_another_is_idle(files: Path) -> None:
    async def story() -> None:
        machine = Machine()
        models = models_of(files, machine, 2)
        await models.acquire("a")  # and keeps it
        await models.acquire("b")
        models.release("b")
        await models.acquire("c")
        assert sorted(machine.running) == ["a", "c"]

    play(story)


def test_requests_in_progress_end_before_their_model_does_and_new_ones_wait(files: Path) -> None:
    async def story() -> None:
        machine = Machine()
        models = models_of(files, machine, 1)
        await models.acquire("a")
        other = asyncio.ensure_future(models.acquire("b"))
        await asyncio.sleep(0.01)
        late = asyncio.ensure_future(models.acquire("a"))
        await asyncio.sleep(0.01)
        assert machine.running == ["a"] and not other.done() and not late.done()
        models.release("a")
        await other
        assert machine.running == ["b"] and not late.done()
        models.release("b")
        await late
        assert machine.started == ["a", "b", "a"] and machine.running == ["a"]

    play(story)


def test_a_model_that_stays_busy_is_named_and_keeps_its_process(files: Path) -> None:
    async def story() -> None:
        machine = Machine()
        models = models_of(files, machine, 1, grace_s=0.05)
        await models.acquire("a")
        with pytest.raises(ModelBusy, match="a answers requests, and b does not fit"):
            await models.acquire("b")
        await models.acquire("a")
        assert machine.started == ["a"] and machine.running == ["a"]

    play(story)


def test_a_full_device_makes_room_however_much_memory_there_is(files: Path) -> None:
    async def story() -> None:
        machine = Machine(device_room=1)
        models = models_of(files, machine, 100)
        for name in "ab":
            await models.acquire(name)
            models.release(name)
        assert machine.running == ["b"]

    play(story)


def test_a_load_that_fails_fails_its_requests_and_the_next_one_tries_again(files: Path) -> None:
    async def story() -> None:
        machine = Machine()
        models = models_of(files, machine, 2)
        machine.failure = ModelFailed("the file is damaged")
        for found in await asyncio.gather(*(models.acquire("a") for _ in range(2)), return_exceptions=True):
            assert isinstance(found, ModelFailed)
        machine.failure = None
        await models.acquire("a")
        assert machine.started == ["a", "a"] and models.requests == 1

    play(story)


def test_a_process_that_died_is_started_again(files: Path) -> None:
    async def story() -> None:
        machine = Machine()
        models = models_of(files, machine, 2)
        await models.acquire("a")
        machine.processes[0].gone.set()
        assert models.loaded() == []
        await models.acquire("a")
        assert machine.started == ["a", "a"]

    play(story)


def test_no_more_requests_wait_than_may(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_models, "_MAX_WAITING", 2)

    async def story() -> None:
        machine = Machine()
        models = models_of(files, machine, 2)
        machine.gate.clear()
        waiting = [asyncio.ensure_future(models.acquire("a")) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await models.acquire("a")
        machine.gate.set()
        await asyncio.gather(*waiting)

    play(story)


def test_a_client_that_leaves_as_its_model_arrives_holds_nothing(files: Path) -> None:
    async def story() -> None:
        machine = Machine()
        models = models_of(files, machine, 2)
        machine.gate.clear()
        waiting = asyncio.ensure_future(models.acquire("a"))
        await asyncio.sleep(0.01)
        machine.gate.set()
        while models.process_of("a") is None:
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert models.requests == (0 if waiting.cancelled() else 1)

    play(story)


def test_requests_of_two_models_in_the_room_of_one_are_all_answered(files: Path) -> None:
    async def story() -> None:
        machine = Machine()
        models = models_of(files, machine, 1)

        async def ask(name: str) -> None:
            for _ in range(5):
                process = await models.acquire(name)
                assert process.model.name == name and machine.running == [name]
                await asyncio.sleep(0.001)
                models.release(name)

        await asyncio.gather(*(ask(name) for name in "abcabc"))
        assert models.requests == 0

    play(story)


def test_closing_ends_all_of_them_and_a_load_that_runs(files: Path) -> None:
    async def story() -> None:
        machine = Machine()
        models = models_of(files, machine, 3)
        await models.acquire("a")
        machine.gate.clear()
        loading = asyncio.ensure_future(models.acquire("b"))
        await asyncio.sleep(0.01)
        await models.close()
        assert machine.running == []
        with pytest.raises(ModelFailed, match="shuts down"):
            await loading

    play(story)
