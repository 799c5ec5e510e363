"""The door's socket: uvicorn with the server's own limits on connections."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

import uvicorn

from ..server.listener import listening_port, uvicorn_config
from .door import Door

_SWEEP_S = 0.25


class DoorServer(uvicorn.Server):
    """Listens for a door until `end`. Its caller handles signals."""

    def __init__(self, door: Door) -> None:
        config = door.service.config
        super().__init__(uvicorn_config(door, config))
        self._door = door

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to the caller."""
        yield

    async def run_door(self) -> None:
        """Listen, and forget replicas that fell silent, until the server ends."""
        async with self._door:
            sweeping = asyncio.ensure_future(self._sweep())
            try:
                await self.serve()
            finally:
                sweeping.cancel()

    async def end(self) -> None:
        """Refuse new requests, and stop when those in progress are done, or after the time of grace."""
        service = self._door.service
        service.draining = True
        try:
            async with asyncio.timeout(service.config.grace_s):
                while service.running:
                    await asyncio.sleep(0.05)
        except TimeoutError:
            self.force_exit = True
        self.should_exit = True

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self._door.replicas.sweep()

    @property
    def port(self) -> int:
        """The port, once the server listens."""
        return listening_port(self)
