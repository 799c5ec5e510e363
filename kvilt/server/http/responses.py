"""Responses: JSON, and server-sent events that end when the client disconnects."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import ClientDisconnected


def json_response(payload: dict[str, Any], status: int = 200) -> Response:
    """A JSON response that proxies and browsers must not cache."""
    return json_bytes(orjson.dumps(payload), status)


def json_bytes(body: bytes, status: int = 200) -> Response:
    """The same for a body that is JSON already."""
    return Response(body, status, {"cache-control": "no-store"}, "application/json")


Result = TypeVar("Result")
DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"


def sse_event(payload: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled when the client disconnects."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnected()
    finally:
        for task in (working, leaving):
            task.cancel()
        with suppress(BaseException):
            await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A stream of events. `chunks` is closed at the end, also after a disconnect or an error."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[bytes, None], keep_alive_s: float) -> None:
        self.status_code = 200
        self.background = None
        self._chunks = chunks
        self._keep_alive_s = keep_alive_s
        self._sent_s = time.monotonic()
        self._over = False
        # A proxy must not buffer events.
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        pulse = asyncio.ensure_future(self._pulse(send))
        try:
            await cancel_on_disconnect(receive, self._write(send))
        finally:
            pulse.cancel()
            await self._chunks.aclose()

    async def _write(self, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:
            async for chunk in chunks:
                self._sent_s = time.monotonic()
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        self._over = True  # a comment after the end would be an error
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pulse(self, send: Send) -> None:
        """Send comments while no event comes, so that no proxy closes the connection."""
        while not self._over:
            quiet_s = time.monotonic() - self._sent_s
            if quiet_s >= self._keep_alive_s:
                self._sent_s = time.monotonic()
                with suppress(ClientDisconnected):  # `_write` notices it too
                    await send({"type": "http.response.body", "body": COMMENT, "more_body": True})
            else:
                await asyncio.sleep(self._keep_alive_s - quiet_s)
