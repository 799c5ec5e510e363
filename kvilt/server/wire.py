"""Connections: uvicorn's HTTP protocol with limits on how many there are and how long they may dawdle."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .refusal import Refused
from .settings import ServeConfig

_MAX_HEADER_BYTES = 1 << 16
# Little is kept for a reader who does not read, here and in the system, so that its request is held early. What is on
# its way to a reader far off does not count, so this slows nobody down.
_WRITE_BUFFER_BYTES = 1 << 12
_UNSENT_BYTES = 1 << 12


def protocol_of(settings: ServeConfig) -> type[HttpToolsProtocol]:
    """uvicorn makes its protocols itself, so the settings come with the class."""

    class Bound(Wire):
        limits = settings

    return Bound


class Wire(HttpToolsProtocol):
    """One connection."""

    limits: ServeConfig

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._deadline: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        self._in_headers = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        if (own := transport.get_extra_info("socket")) is not None:
            with suppress(AttributeError, OSError):  # Linux and macOS have it
                own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        if len(self.connections) > self.limits.max_connections:
            self._answer(Refused(503, "too many connections are open", code="busy", headers={"retry-after": "5"}))
        else:
            self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_headers:
            self._header_bytes += len(data)
            if self._deadline is None:
                self._expect_headers()
        super().data_received(data)
        if self._in_headers and self._header_bytes > _MAX_HEADER_BYTES and not self.transport.is_closing():
            self._answer(Refused(431, "the headers are too large", code="headers_too_large"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["kvilt.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._stop_clock()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_headers, self._header_bytes = True, 0

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_later()  # closing waits for the reader, and a reader may never read
        elif left := self.transport.get_write_buffer_size():
            self.loop.call_later(self.limits.write_timeout_s, self._still_reads, left)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._abort_later()

    def send_400_response(self, msg: str) -> None:
        self._answer(Refused(400, msg, code="invalid_http"))

    def _expect_headers(self) -> None:
        self._deadline = self.loop.call_later(self.limits.header_timeout_s, self._too_slow)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        if not self.transport.is_closing():
            self._answer(Refused(408, "the headers did not come in time", code="slow_headers"))

    def _still_reads(self, before: int) -> None:
        """Cut a reader off who took nothing of its answer since the last look."""
        if self.transport.is_closing() or not (left := self.transport.get_write_buffer_size()):
            return
        if left >= before:
            self.transport.abort()
        else:
            self.loop.call_later(self.limits.write_timeout_s, self._still_reads, left)

    def _abort_later(self) -> None:
        self._stop_clock()
        self._deadline = self.loop.call_later(self.limits.write_timeout_s, self.transport.abort)

    def _answer(self, refused: Refused) -> None:
        """The last words on this connection."""
        body = orjson.dumps(refused.body())
        headers = {**(refused.headers or {}), "content-type": "application/json", "connection": "close"}
        lines = [f"HTTP/1.1 {refused.status_code} Refused", *(f"{name}: {value}" for name, value in headers.items())]
        head = "\r\n".join([*lines, f"content-length: {len(body)}", "", ""])
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()
        self._abort_later()
