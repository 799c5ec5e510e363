"""Server-sent events: a response whose events are written as they come, and which ends when its client disconnects.

In the usual case a token costs no task switch: the event loop calls back, the source encodes what is ready, and the
bytes go to the connection. A task does the rest: the first and the last events, and waiting for a slow client.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import ClientDisconnected, HTTPError, http_error_of
from .responses import cancel_on_disconnect

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
_MARK = "\0text\0"  # stands for the text of a template; no field of an answer holds NUL


def sse_event(payload: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def named_event(payload: dict[str, Any]) -> bytes:
    """One server-sent event with the name that its `type` says."""
    kind: str = payload["type"]
    return b"event: " + kind.encode() + b"\n" + sse_event(payload)


class EventTemplate:
    """An event in which only one string changes; all else is encoded once."""

    __slots__ = ("_after", "_before")

    def __init__(self, event: Callable[[str], bytes]) -> None:
        """`event` makes the event with a given string."""
        self._before, _, self._after = event(_MARK).partition(orjson.dumps(_MARK))

    def with_text(self, text: str) -> bytes:
        """The event with this string."""
        return self._before + orjson.dumps(text) + self._after


class BodyWriter(Protocol):
    """A connection that takes pieces of a response's body at once; the server offers it as `kvilt.body_writer`."""

    @property
    def ready(self) -> bool:
        """Whether the connection takes more: its buffer is not full, and the client has not gone."""

    def write(self, body: bytes) -> None:
        """Write one piece, after the headers."""


class EventSource(Protocol):
    """The events of one answer. All methods belong to the event loop."""

    work: Callable[[], Awaitable[None]] | None  # to await before more events can be read

    def on_news(self, callback: Callable[[], None]) -> None:
        """Call back whenever there may be something to read."""

    def opening(self) -> bytes:
        """The events before the first token."""

    def read_ready(self) -> bytes | None:
        """Some of the events that are ready, perhaps empty; None where nothing waits. Raises what ends the answer."""

    @property
    def over(self) -> bool:
        """Whether all was read."""

    def closing(self) -> AsyncGenerator[bytes, None]:
        """The events after the last token."""

    def close(self) -> None:
        """End the answer; may be called twice."""


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """What a stream of one API has besides the events of its source."""

    media_type: str
    end: bytes  # after the last event
    keep_alive: bytes | None  # while no event comes; None: the format has nothing that clients skip
    failure: Callable[[HTTPError], bytes]  # the event for an error after the stream has begun


OPENAI_STREAM = StreamFormat("text/event-stream", DONE, COMMENT, lambda error: sse_event(error.body()))


class EventStream(Response):
    """The events of a source, then the end of its format. The source is closed at the end, also after a disconnect or
    an error."""

    def __init__(self, source: EventSource, keep_alive_s: float, stream_format: StreamFormat = OPENAI_STREAM) -> None:
        self.status_code = 200
        self.background = None
        self.media_type = stream_format.media_type
        self._format = stream_format
        self._source = source
        self._keep_alive_s = keep_alive_s
        self._sent_s = time.monotonic()
        self._over = False
        self._end = b""
        self._writer: BodyWriter | None = None
        self._waiting: asyncio.Future[None] | None = None  # what the task waits for, when all it has read is sent
        # A proxy must not buffer events.
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._writer = scope.get("kvilt.body_writer")
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        pulse = asyncio.ensure_future(self._pulse(send))
        try:
            await cancel_on_disconnect(receive, self._write(send))
        finally:
            pulse.cancel()
            self._source.close()

    async def _write(self, send: Send) -> None:
        self._source.on_news(self._push)
        async with aclosing(self._events()) as events:
            async for body in events:
                self._sent_s = time.monotonic()
                await send({"type": "http.response.body", "body": body, "more_body": True})
        self._over = True  # a comment after the end would be an error
        await send({"type": "http.response.body", "body": self._end, "more_body": False})

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """All events but those that `_push` writes, and those at the end, which are sent at once."""
        source = self._source
        try:
            if first := source.opening():
                yield first
            while not source.over:
                body = source.read_ready()
                if body is None and source.work is not None:
                    await source.work()
                elif body is None:
                    await self._news()
                elif body:
                    yield body
            async for last in source.closing():
                self._end += last
        except Exception as error:
            self._end += self._format.failure(http_error_of(error))
        finally:
            source.close()
        self._end += self._format.end

    async def _news(self) -> None:
        """Wait for what `_push` leaves to the task."""
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None

    def _push(self) -> None:
        """Write what is ready. The task continues at the end, after an error, and where the connection is full."""
        waiting, writer, source = self._waiting, self._writer, self._source
        if waiting is None or waiting.done():
            return  # the task looks again before it waits
        try:
            while writer is not None and writer.ready:
                if (body := source.read_ready()) is None:
                    if source.over or source.work is not None:
                        break
                    return
                if body:
                    self._sent_s = time.monotonic()
                    writer.write(body)
        except Exception as error:
            waiting.set_exception(error)
        else:
            waiting.set_result(None)

    async def _pulse(self, send: Send) -> None:
        """Send something without effect while no event comes, so that no proxy closes the connection."""
        while not self._over and (nothing := self._format.keep_alive) is not None:
            quiet_s = time.monotonic() - self._sent_s
            if quiet_s >= self._keep_alive_s:
                self._sent_s = time.monotonic()
                with suppress(ClientDisconnected):  # `_write` notices it too
                    await send({"type": "http.response.body", "body": nothing, "more_body": True})
            else:
                await asyncio.sleep(self._keep_alive_s - quiet_s)
