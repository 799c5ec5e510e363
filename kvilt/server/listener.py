"""The uvicorn servers: they listen, drain on the first signal, and stop at once on the second."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import uvicorn
from starlette.types import ASGIApp

from ..llm import AsyncLLM
from .app import make_app, make_metrics_app
from .batches.queue import BatchQueue
from .config import ServeConfig
from .http.protocol import protocol_class
from .service import Service

_log = logging.getLogger(__name__)
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ERROR_GRACE_S = 2.0
# How long a thread may keep the interpreter while another one wants it. Python's 5 ms add up: the event loop
# takes the interpreter several times for one response, and a step with prompts gives it away with each of its hundreds
# of kernel launches, so that the device would wait for the threads that prepare other requests.
SWITCH_S = 0.0001
_METRICS_CONNECTIONS = 64
_UVICORN_OPTIONS: dict[str, Any] = {
    "ws": "none",
    "lifespan": "off",
    "log_config": None,
    "access_log": False,
    "server_header": False,
    "proxy_headers": False,
}


class MetricsServer(uvicorn.Server):
    """Serves /metrics on a second port for as long as the main server runs."""

    def __init__(self, config: ServeConfig, exposition: Callable[[], Awaitable[str]]) -> None:
        limits = dataclasses.replace(config, max_connections=_METRICS_CONNECTIONS)
        made = uvicorn.Config(
            make_metrics_app(config, exposition),
            host=config.metrics_host,
            port=config.metrics_port or 0,
            http=protocol_class(limits),
            timeout_graceful_shutdown=1,
            **_UVICORN_OPTIONS,
        )
        super().__init__(made)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to the main server."""
        yield

    @property
    def port(self) -> int:
        """The port, once the server listens."""
        return listening_port(self)


def uvicorn_config(app: ASGIApp, config: ServeConfig) -> uvicorn.Config:
    """How uvicorn runs an application at the server's address, within the server's limits on connections."""
    return uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        http=protocol_class(config),
        timeout_keep_alive=int(config.idle_timeout_s) or 1,
        timeout_graceful_shutdown=5,
        **_UVICORN_OPTIONS,
    )


class DrainedService(Protocol):
    """A service that refuses new requests while it drains."""

    draining: bool


class SignalledServer(uvicorn.Server, ABC):
    """A server that drains on the first signal, and stops at once on the second."""

    service: DrainedService
    _ending: asyncio.Task[None] | None = None

    @abstractmethod
    async def drain(self) -> None:
        """Wait for the requests in progress; new ones are refused."""

    def abandon(self) -> None:
        """Do not wait any longer."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        loop = asyncio.get_running_loop()
        try:
            for number in _SIGNALS:
                loop.add_signal_handler(number, self.end)
        except (NotImplementedError, RuntimeError, ValueError):  # not in the main thread: the caller stops the server
            yield
            return
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def end(self) -> None:
        """Start to drain; a second call stops at once."""
        if self._ending is None:
            self.service.draining = True
            self._ending = asyncio.ensure_future(self._drain())
        else:
            self._ending.cancel()
            self.force_exit = self.should_exit = True
            self.abandon()

    async def _drain(self) -> None:
        await self.drain()
        self.should_exit = True

    @property
    def port(self) -> int:
        """The port, once the server listens."""
        return listening_port(self)


class HTTPServer(SignalledServer):
    """The main server. When it is told to stop, it waits for the requests in progress."""

    service: Service

    def __init__(self, service: Service) -> None:
        config = service.config
        self.batches = BatchQueue(service)
        super().__init__(uvicorn_config(make_app(service, self.batches), config))
        self.service = service
        self.metrics = None if config.metrics_port is None else MetricsServer(config, self._exposition)

    async def _exposition(self) -> str:
        return self.service.exposition()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen until the server stops, also on the metrics port if there is one."""
        watching = asyncio.ensure_future(self.service.loop_monitor.run())
        beside = None if self.metrics is None else asyncio.ensure_future(self.metrics.serve())
        self.batches.start()
        try:
            await super().serve(sockets)
        finally:
            watching.cancel()
            await self.batches.stop()
            self.batches.files.close()
            if self.metrics is not None and beside is not None:
                self.metrics.should_exit = True
                await beside

    async def drain(self) -> None:
        """Wait for the requests in progress, at most `grace_s`."""
        _log.warning("shutting down: requests in progress have %g s", self.service.config.grace_s)
        await self.batches.stop()
        if not await self.service.idle(self.service.config.grace_s):
            _log.error("requests that are still in progress are ended")
            await self.service.llm.aclose()  # open requests get an error
            await self.service.idle(_ERROR_GRACE_S)


def listening_port(server: uvicorn.Server) -> int:
    """The port of a server that listens."""
    port: int = server.servers[0].sockets[0].getsockname()[1]
    return port


async def serve(llm: AsyncLLM, config: ServeConfig, on_ready: Callable[[HTTPServer], None] = lambda _: None) -> None:
    """Serve a model until a signal stops the server; then close the model."""
    raise_file_limit(config)
    async with llm:
        listener = HTTPServer(Service(llm, config))
        told = asyncio.ensure_future(tell_ready(listener, on_ready))
        try:
            await listener.serve()
        finally:
            told.cancel()


class ServerWithMetrics(Protocol):
    """A server that may have a second port for /metrics."""

    started: bool

    @property
    def metrics(self) -> MetricsServer | None: ...


Listener = TypeVar("Listener", bound=ServerWithMetrics)


async def tell_ready(listener: Listener, on_ready: Callable[[Listener], None]) -> None:
    """Call `on_ready` as soon as the server listens."""
    while not listener.started or (listener.metrics is not None and not listener.metrics.started):
        await asyncio.sleep(0.01)
    on_ready(listener)


def raise_file_limit(config: ServeConfig) -> None:
    """Raise the limit of open files to fit the connections; log a warning if the system allows fewer."""
    try:
        import resource
    except ImportError:  # not on this system
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = config.max_connections + 256
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    if most < wanted:
        _log.warning("the system allows %d open files; lower max_connections to %d", most, max(1, most - 256))
