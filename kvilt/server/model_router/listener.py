"""The socket of a router: uvicorn with the server's own limits on connections, and its way to end."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from ..http.forward import ForwardingService
from ..listener import MetricsServer, SignalledServer, raise_file_limit, tell_ready, uvicorn_config
from .app import ModelRouter

_log = logging.getLogger(__name__)
_POLL_S = 0.05


class RouterServer(SignalledServer):
    """Listens for a router. When it is told to stop, requests in progress end first."""

    service: ForwardingService

    def __init__(self, router: ModelRouter) -> None:
        config = router.service.config
        super().__init__(uvicorn_config(router, config))
        self.service = router.service
        self.router = router
        self.metrics = None if config.metrics_port is None else MetricsServer(config, router.exposition)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen until the server stops, also on the metrics port if there is one."""
        beside = None if self.metrics is None else asyncio.ensure_future(self.metrics.serve())
        try:
            await super().serve(sockets)
        finally:
            if self.metrics is not None and beside is not None:
                self.metrics.should_exit = True
                await beside

    async def drain(self) -> None:
        """Wait for the requests in progress, at most `grace_s`."""
        grace_s = self.service.config.grace_s
        _log.warning("shutting down: requests in progress have %g s", grace_s)
        try:
            async with asyncio.timeout(grace_s):
                while self.router.models.requests:
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            _log.error("requests that are still in progress are ended")
        await self.router.models.close()

    def abandon(self) -> None:
        self.router.models.kill()


async def serve_models(router: ModelRouter, on_ready: Callable[[RouterServer], None]) -> None:
    """Serve several models until a signal stops the server; then end their processes."""
    raise_file_limit(router.service.config)
    async with router:
        listener = RouterServer(router)
        told = asyncio.ensure_future(tell_ready(listener, on_ready))
        try:
            await listener.serve()
        finally:
            told.cancel()
