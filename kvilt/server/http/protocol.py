"""uvicorn's HTTP protocol with limits: the number of connections, deadlines, bytes of headers, pipelined requests.

An error is written between responses, never inside of one. This module knows no routes.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from contextlib import suppress
from typing import Any

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ..config import ServeConfig
from .errors import HTTPError

_MAX_HEADER_BYTES = 1 << 16  # also of trailers, and of the framing between two pieces of a chunked body
_MAX_PIPELINED = 16  # requests that wait for the answer of an earlier one
_MAX_PIPELINED_BODY_BYTES = 1 << 16  # of each of them
# Small buffers, here and in the kernel: a client that does not read makes its request wait early. Bytes in flight to a
# distant client do not count, so small buffers do not slow it down.
_WRITE_BUFFER_BYTES = 1 << 12
_UNSENT_BYTES = 1 << 12
_UPGRADES = frozenset({b"upgrade", b"http2-settings"})


def protocol_class(settings: ServeConfig) -> type[HttpToolsProtocol]:
    """A protocol class with these settings: uvicorn constructs its protocols itself."""

    class ConfiguredProtocol(LimitedHTTPProtocol):
        limits = settings

    return ConfiguredProtocol


class ChunkWriter:
    """Writes pieces of one response's body without a task switch: a `BodyWriter` of server-sent events.

    It writes to the socket itself while the transport has nothing left to send. Such a call releases the interpreter,
    which uvloop's own does not: the thread that steps continues during hundreds of them.
    """

    __slots__ = ("_cycle", "_fd", "_flow", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._transport = cycle.transport
        self._fd = _plain_socket(cycle.transport)

    @property
    def ready(self) -> bool:
        """Whether the connection takes more."""
        cycle = self._cycle
        return not self._flow.write_paused and not cycle.disconnected and cycle.chunked_encoding is True

    def write(self, body: bytes) -> None:
        """Write one piece, after the headers."""
        data = b"%x\r\n%b\r\n" % (len(body), body)
        transport = self._transport
        # A transport that closes keeps its socket open until `disconnected` is set.
        if self._fd is not None and not transport.get_write_buffer_size() and not transport.is_closing():
            try:
                sent = os.write(self._fd, data)
            except OSError:  # full, or broken, which the transport notices
                sent = 0
            if sent == len(data):
                return
            data = data[sent:]
        transport.write(data)


def _plain_socket(transport: asyncio.Transport) -> int | None:
    """The descriptor of a connection's socket; None where bytes must go through the transport."""
    own = transport.get_extra_info("socket")
    if own is None or sys.platform == "win32" or transport.get_extra_info("sslcontext") is not None:
        return None
    descriptor: int = own.fileno()
    return descriptor if descriptor >= 0 else None


class _PipelineOverrun(Exception):
    """Raised in a callback of the parser to stop it."""


class LimitedHTTPProtocol(HttpToolsProtocol):
    """One connection."""

    limits: ServeConfig

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._deadline: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None  # the request that is being answered, or the last one
        self._pending_error: HTTPError | None = None  # written when all earlier requests are answered
        self._header_bytes = 0
        self._in_headers = True
        self._request_started = False  # a request has begun and is not complete
        self._upgrading = False  # the parser stops after these headers and is replaced
        self._bytes_since_body = 0  # since the last piece of a body

    @property
    def _responding(self) -> bool:
        return self._running is not None and not self._running.response_complete

    # Callbacks of the transport.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        if (own := transport.get_extra_info("socket")) is not None:
            with suppress(AttributeError, OSError):  # Linux and macOS have it
                own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        if len(self.connections) > self.limits.max_connections:
            self._refuse(HTTPError(503, "too many connections are open", code="busy", headers={"retry-after": "5"}))
        else:
            self._start_header_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        # uvicorn tells only the newest request, which may be a pipelined one that still waits.
        for cycle in (self._running, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing() or self._pending_error is not None:
            return
        self._unset_keepalive_if_required()
        if self._in_headers:
            self._header_bytes += len(data)
            if self._deadline is None and not self._responding:
                self._start_header_deadline()
        else:
            self._bytes_since_body += len(data)
        self._feed(data)
        if self._in_headers and self._header_bytes > _MAX_HEADER_BYTES:
            self._refuse(HTTPError(431, "the headers are too large", code="headers_too_large"))
        elif self._bytes_since_body > _MAX_HEADER_BYTES:
            self._refuse(HTTPError(431, "the trailers are too large", code="headers_too_large"))

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stopped:
            self._feed_without_upgrade(data[stopped.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _feed_without_upgrade(self, rest: bytes) -> None:
        """Parse the request again without its Upgrade headers, which a server may ignore."""
        method, version = self.parser.get_method(), self.parser.get_http_version()
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._upgrading = False
        if method == b"CONNECT":
            self.send_400_response("This server is no proxy.")
            return
        kept = [(name, value) for name, value in self.headers if name not in (b"upgrade", b"http2-settings")]
        lines = [b"%s %s HTTP/%s" % (method, self.url, version.encode())]
        lines += [b"%s: %s" % (name, _drop_upgrade(value) if name == b"connection" else value) for name, value in kept]
        self._feed(b"\r\n".join([*lines, b"", b""]) + rest)

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._request_started = True
        self.scope["kvilt.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # a trailer would change the headers of a request that was already checked
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            self._upgrading = True
            return
        self._in_headers, self._bytes_since_body = False, 0
        self._cancel_deadline()
        waits = self._responding
        super().on_headers_complete()
        self.scope["kvilt.body_writer"] = ChunkWriter(self.cycle)  # type: ignore[typeddict-unknown-key]
        if waits:
            if len(self.pipeline) > _MAX_PIPELINED:
                self._abort_pipeline()
            self.flow.resume_reading()  # without reading, a disconnect is not noticed

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._bytes_since_body = 0
        if self.cycle is not self._running:
            if len(self.cycle.body) > _MAX_PIPELINED_BODY_BYTES:
                self._abort_pipeline()
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        if self._upgrading:
            return
        super().on_message_complete()
        self._in_headers, self._header_bytes, self._request_started, self._bytes_since_body = True, 0, False, 0

    # Callbacks of uvicorn.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_later()  # close() waits until the client has read everything, which may be never
            return
        if left := self.transport.get_write_buffer_size():
            self.loop.call_later(self.limits.write_timeout_s, self._check_reader, left)
        if self._responding:
            return  # with the next pipelined request
        if self._pending_error is not None:
            self._write_error(self._pending_error)
        elif self._in_headers and self._request_started:
            self._start_header_deadline()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._abort_later()

    def send_400_response(self, msg: str) -> None:
        self._refuse(HTTPError(400, msg, code="invalid_http"))

    # Deadlines and errors.

    def _start_header_deadline(self) -> None:
        self._deadline = self.loop.call_later(self.limits.header_timeout_s, self._headers_timeout)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _headers_timeout(self) -> None:
        self._refuse(HTTPError(408, "the headers did not come in time", code="slow_headers"))

    def _check_reader(self, before: int) -> None:
        """Abort the connection if the client has read nothing since the last check."""
        if self.transport.is_closing() or not (left := self.transport.get_write_buffer_size()):
            return
        if left >= before:
            self.transport.abort()
        else:
            self.loop.call_later(self.limits.write_timeout_s, self._check_reader, left)

    def _abort_pipeline(self) -> None:
        self.transport.abort()
        raise _PipelineOverrun

    def _abort_later(self) -> None:
        self._cancel_deadline()
        self._deadline = self.loop.call_later(self.limits.write_timeout_s, self.transport.abort)

    def _refuse(self, error: HTTPError) -> None:
        """Answer the next request on this connection with an error, after the answers to earlier requests."""
        if self.transport.is_closing() or self._pending_error is not None:
            return
        self._pending_error = error
        own = not self._in_headers and self.cycle is self._running  # the error is about the request being answered
        if not self._in_headers and not own:
            self.pipeline.popleft()  # this request will never be complete
        if own or not self._responding:
            self._write_error(error)

    def _write_error(self, error: HTTPError) -> None:
        """Write an error and close the connection."""
        if self._running is not None and not self._running.response_complete:
            if self._running.response_started:
                self.transport.abort()  # an error inside of a response would read as a part of it
                return
            self._running.disconnected = True
            self._running.message_event.set()
        body = orjson.dumps(error.body())
        headers = {**(error.headers or {}), "content-type": "application/json", "connection": "close"}
        lines = [f"HTTP/1.1 {error.status_code} Refused", *(f"{name}: {value}" for name, value in headers.items())]
        head = "\r\n".join([*lines, f"content-length: {len(body)}", "", ""])
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()
        self._abort_later()


def _drop_upgrade(connection: bytes) -> bytes:
    """A Connection header without its upgrade tokens."""
    return b", ".join(part for part in connection.split(b",") if part.strip().lower() not in _UPGRADES)
