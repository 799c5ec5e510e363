"""One engine replica in this process: the whole server of `kvilt serve` on loopback, in a thread, with KV events."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..batch import Adapted
from ..errors import KviltError
from ..executor.protocol import Executor
from ..server.kv_events.publisher import KVEventPublisher
from ..server.listener import HTTPServer
from .cluster_key import ClusterKey
from .exchange import Exchange
from .replica_set import ReplicaInfo

_log = logging.getLogger(__name__)
OnReady = Callable[[HTTPServer, KVEventPublisher | None], None]


@dataclass(slots=True, eq=False)
class _Served:
    listener: HTTPServer
    publisher: KVEventPublisher
    loop: asyncio.AbstractEventLoop
    exchange: Exchange


class ReplicaThread:
    """Runs `start`, which serves until it is told to stop, and says what a router needs to know."""

    def __init__(self, start: Callable[[OnReady], None], key: ClusterKey, prefill_only: bool = False) -> None:
        self._start, self._key, self._prefill_only = start, key, prefill_only
        self._served: _Served | None = None
        self._error: BaseException | None = None
        self._leaving = False
        self._task: asyncio.Task[None] | None = None
        self._ready = threading.Event()
        self._name = secrets.token_hex(4)
        self._thread = threading.Thread(target=self._run, name="kvilt-replica", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until the server listens; raises what kept it from that."""
        self._ready.wait()
        if self._error is not None:
            raise self._error

    @property
    def healthy(self) -> bool:
        """Whether the server runs and its steps end in time."""
        served = self._served
        return served is not None and self._thread.is_alive() and served.listener.service.llm.healthy

    def info(self) -> ReplicaInfo:
        """What a door must know."""
        assert self._served is not None
        listener, publisher = self._served.listener, self._served.publisher
        executor = listener.service.llm.executor
        usage, prefixes = executor.pool.usage(), executor.prefixes
        asked = prefixes.hits + prefixes.misses
        adapters = {one.name: executor.adapters.identity(Adapted(one.id)) for one in executor.adapters.all()}
        return ReplicaInfo(
            name=self._name,
            url=f"http://{listener.service.config.host}:{listener.port}",
            events=publisher.endpoint,
            replay=publisher.replay,
            page_tokens=executor.layout.page_tokens,
            pid=os.getpid(),
            healthy=self.healthy and not self._leaving,
            adapters=adapters,
            kv_used=usage.used / max(1, executor.pool.pages),
            hit_rate=prefixes.hits / max(1, asked),
            exchange=self._served.exchange.url,
            version=version_of(executor),
            token_bytes=executor.layout.page_bytes / executor.layout.page_tokens,
            prefill_only=self._prefill_only,
            rows=listener.service.llm.config.step_sizes(executor.pool.device.type).max_rows,
            running=listener.service.running,
        )

    def leave(self) -> ReplicaInfo:
        """The last announcement: no more requests, please."""
        self._leaving = True
        return replace(self.info(), healthy=False)

    def stop(self) -> None:
        """Let requests in progress end, and close the model."""
        if self._served is not None and self._thread.is_alive():
            self._served.loop.call_soon_threadsafe(self._served.listener.end)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._start(self._on_ready)
        except BaseException as error:
            _log.exception("the replica ends")
            self._error = error
        finally:
            self._ready.set()

    def _on_ready(self, listener: HTTPServer, publisher: KVEventPublisher | None) -> None:
        if publisher is None:
            raise KviltError("a replica publishes KV events")
        loop = asyncio.get_running_loop()
        exchange = Exchange(listener.service, self._key, listener.service.config.host)
        self._served = _Served(listener, publisher, loop, exchange)
        self._task = loop.create_task(self._exchange(exchange))

    async def _exchange(self, exchange: Exchange) -> None:
        """Serve the exchange until the event loop ends."""
        try:
            await exchange.start()
        except OSError as error:
            self._error = error
            return
        finally:
            self._ready.set()
        try:
            await asyncio.Event().wait()
        finally:
            await exchange.stop()


def version_of(executor: Executor) -> str:
    """What two replicas must have in common to use each other's KV."""
    identity = executor.pool.identity()
    return hashlib.sha256(f"{identity.model} {identity.numerics}".encode()).hexdigest()[:16]
