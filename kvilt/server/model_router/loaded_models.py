"""Which models are in memory: loaded by the first request, ended when another one needs their memory.

Knows processes and bytes; no HTTP. All methods belong to one event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence

from ...errors import KviltError, QueueFull
from .model_process import ModelFailed, ModelProcess, RoutedModel

_log = logging.getLogger(__name__)
_MAX_WAITING = 256  # requests that wait for models

Start = Callable[[RoutedModel], Awaitable[ModelProcess]]


class ModelBusy(KviltError):
    """A model that would have to make room answers requests for longer than others may wait."""


class _Slot:
    """A model, and its process while it is loaded."""

    def __init__(self, model: RoutedModel) -> None:
        self.model = model
        self.process: ModelProcess | None = None
        self.loading: asyncio.Task[None] | None = None
        self.waiters: list[asyncio.Future[ModelProcess]] = []  # requests that wait until it is loaded
        self.requests = 0
        self.used = 0  # the number of the last use; a larger one is later
        self.leaving = False  # it makes room: requests in progress end, new ones wait until it is loaded again
        self.idle = asyncio.Event()
        self.idle.set()
        self.taken_bytes: int | None = None  # what it took when it was loaded last

    @property
    def is_loaded(self) -> bool:
        return self.process is not None and not self.process.gone.is_set()


class LoadedModels:
    """The models of one server, within a limit of memory."""

    def __init__(
        self,
        models: Sequence[RoutedModel],
        start: Start,
        memory_bytes: int,
        expected_kv_bytes: Callable[[], int],
        grace_s: float = 30.0,
    ) -> None:
        """Weights and KV of all may take `memory_bytes`; `grace_s` is for requests of a model that makes room.

        `expected_kv_bytes` is what the KV of a model takes that is loaded for the first time.
        """
        self._slots = {model.name: _Slot(model) for model in models}
        self._start = start
        self._memory_bytes = memory_bytes
        self._expected_kv_bytes = expected_kv_bytes
        self._grace_s = grace_s
        self._turn = asyncio.Lock()  # models are loaded and ended one after the other, in the order of requests
        self._uses = itertools.count(1)
        self._waiting = 0

    @property
    def models(self) -> list[RoutedModel]:
        """All models, in the order of the command line."""
        return [slot.model for slot in self._slots.values()]

    @property
    def requests(self) -> int:
        """How many requests are in models."""
        return sum(slot.requests for slot in self._slots.values())

    def loaded(self) -> list[ModelProcess]:
        """The processes that run, the last used first."""
        slots = sorted(self._slots.values(), key=lambda slot: -slot.used)
        return [slot.process for slot in slots if slot.process is not None and slot.is_loaded]

    def process_of(self, name: str) -> ModelProcess | None:
        """The process of a model, if it is loaded."""
        slot = self._slots[name]
        return slot.process if slot.is_loaded else None

    async def acquire(self, name: str) -> ModelProcess:
        """The process of a model, for one request; `release` ends it. A model that is not loaded is loaded first."""
        slot = self._slots[name]
        if slot.process is not None and slot.is_loaded and not slot.leaving:
            self._enter(slot)
            return slot.process
        if self._waiting >= _MAX_WAITING:
            raise QueueFull(self._waiting, _MAX_WAITING)
        granted: asyncio.Future[ModelProcess] = asyncio.get_running_loop().create_future()
        slot.waiters.append(granted)
        if slot.loading is None:  # one task for all requests; it goes on when some of their clients leave
            slot.loading = asyncio.ensure_future(self._load(slot))
        self._waiting += 1
        try:
            return await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self.release(name)  # it was loaded in the same moment
            raise
        finally:
            self._waiting -= 1

    def _enter(self, slot: _Slot) -> None:
        slot.requests += 1
        slot.used = next(self._uses)
        slot.idle.clear()

    def release(self, name: str) -> None:
        """The request has ended."""
        slot = self._slots[name]
        slot.requests -= 1
        slot.used = next(self._uses)
        if slot.requests == 0:
            slot.idle.set()

    async def close(self) -> None:
        """End all processes."""
        for slot in self._slots.values():
            if slot.loading is not None:
                slot.loading.cancel()
                await asyncio.gather(slot.loading, return_exceptions=True)
        await asyncio.gather(*(process.stop(self._grace_s) for process in self.loaded()))

    def kill(self) -> None:
        """End all processes at once."""
        for process in self.loaded():
            process.kill()

    async def _load(self, slot: _Slot) -> None:
        """Load a model for the requests that wait for it, and let them in before another one can end it."""
        try:
            async with self._turn:
                await self._make_loaded(slot)
                self._end_load(slot)
        except asyncio.CancelledError:
            self._end_load(slot, ModelFailed("the server shuts down"))
            raise
        except KviltError as error:
            _log.error("%s was not loaded: %s", slot.model.name, error)
            self._end_load(slot, error)

    def _end_load(self, slot: _Slot, error: KviltError | None = None) -> None:
        slot.loading = None
        waiters = [one for one in slot.waiters if not one.done()]
        slot.waiters.clear()
        for one in waiters:
            if error is None and slot.process is not None:
                self._enter(slot)
                one.set_result(slot.process)
            else:
                one.set_exception(error or ModelFailed(f"{slot.model.name} was not loaded"))

    async def _make_loaded(self, slot: _Slot) -> None:
        if slot.is_loaded or all(one.done() for one in slot.waiters):  # it did not make room, or nothing waits for it
            return
        while self._used_bytes(slot) + self._needed_bytes(slot) > self._memory_bytes and await self._evict(slot):
            pass
        _log.info("loading %s", slot.model.name)
        while True:
            try:
                slot.process = await self._start(slot.model)
                break
            except ModelFailed as failed:
                if not failed.lacks_memory or not await self._evict(slot):
                    raise
        slot.taken_bytes = slot.process.memory_bytes
        slot.used = next(self._uses)

    async def _evict(self, wanting: _Slot) -> bool:
        """End the model that was not used for the longest time, one without requests if there is one.

        False if no other is loaded.
        """
        others = [slot for slot in self._slots.values() if slot is not wanting and slot.is_loaded]
        if not others:
            return False
        slot = min(others, key=lambda slot: (slot.requests > 0, slot.used))
        assert slot.process is not None
        slot.leaving = True
        try:
            async with asyncio.timeout(self._grace_s):
                await slot.idle.wait()
            _log.info("ending %s: %s needs its memory", slot.model.name, wanting.model.name)
            await slot.process.stop(self._grace_s)
        except TimeoutError:
            raise ModelBusy(
                f"{slot.model.name} answers requests, and {wanting.model.name} does not fit beside it; try again"
            ) from None
        finally:
            slot.leaving = False
        return True

    def _used_bytes(self, besides: _Slot) -> int:
        loaded = [slot.process for slot in self._slots.values() if slot is not besides and slot.is_loaded]
        return sum(process.memory_bytes for process in loaded if process is not None)

    def _needed_bytes(self, slot: _Slot) -> int:
        if slot.taken_bytes is not None:
            return slot.taken_bytes
        return slot.model.file_bytes + self._expected_kv_bytes()
