"""Forwards one request to another server process over HTTP, and its answer back piece by piece.

An answer begins for the client when its first token is here; what a stream says before it is held back. Up to then a
process that dies costs nothing: the request can go to another one.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ...metrics import Metrics
from ..config import ServeConfig
from ..metrics import SERVER_METRICS
from .errors import SHAPE, HTTPError

_HOP = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"expect"})
# The middleware of the process that forwards sets these on every answer.
_OWN = frozenset(
    {
        b"x-request-id",
        b"request-id",
        b"x-content-type-options",
        b"x-frame-options",
        b"referrer-policy",
        b"cross-origin-resource-policy",
        b"content-security-policy",
        b"access-control-allow-origin",
        b"access-control-expose-headers",
        b"vary",
        b"date",
    }
)
_STREAMS = frozenset({"text/event-stream", "application/x-ndjson"})
_COMMENT = b":"  # of a stream of events: it keeps the connection
Body = bytes | AsyncIterator[bytes] | None


class ServerGone(Exception):
    """The other process died, or never answered. `began`: a part of the answer is with the client already."""

    def __init__(self, began: bool, content_type: str = "") -> None:
        super().__init__("the server process is gone")
        self.began, self.content_type = began, content_type


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """A whole answer."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes

    def response(self) -> Response:
        """The same answer for a client."""
        made = Response(self.body, self.status)
        made.raw_headers = [(name, value) for name, value in self.headers if name != b"content-length"]
        made.raw_headers.append((b"content-length", str(len(self.body)).encode()))
        return made


class ForwardingService:
    """What the server's middleware asks of a service, in a process that forwards requests."""

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self.metrics = Metrics(SERVER_METRICS)
        self.draining = False
        self.running = 0

    @contextmanager
    def in_progress(self) -> Iterator[None]:
        """Count a request as in progress."""
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1


def add_request_id(scope: Scope) -> None:
    """Give a request without an id one, under which both processes log it."""
    if scope["type"] == "http" and not any(name == b"x-request-id" for name, _ in scope["headers"]):
        scope["headers"] = [*scope["headers"], (b"x-request-id", secrets.token_hex(16).encode())]


def request_headers(scope: Scope) -> list[tuple[str, str]]:
    """The client's headers for another process, which then sees the same Host, keys, origin and id."""
    return [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in scope["headers"]
        if name not in _HOP and name != b"content-length"
    ]


async def fetch(
    http: aiohttp.ClientSession, url: str, method: str, headers: Sequence[tuple[str, str]], body: bytes | None
) -> WholeAnswer:
    """A whole answer of another process."""
    try:
        async with http.request(method, url, headers=headers, data=body, allow_redirects=False) as reply:
            return WholeAnswer(reply.status, _reply_headers(reply), await reply.read())
    except (aiohttp.ClientError, ConnectionError, TimeoutError):
        raise ServerGone(began=False) from None


async def forward(
    http: aiohttp.ClientSession,
    url: str,
    method: str,
    headers: Sequence[tuple[str, str]],
    body: Body,
    send: Send,
    on_piece: Callable[[bytes, bool], None],
    gone: asyncio.Event,
) -> None:
    """Send a request on, and its answer back; `on_piece` sees each piece of it, and whether it has streamed tokens.

    A task that is cancelled after `gone` was set ends with ServerGone.
    """
    began, kind, held = False, "", b""
    try:
        async with http.request(method, url, headers=headers, data=body, allow_redirects=False) as reply:
            kind = reply.content_type
            start = {"type": "http.response.start", "status": reply.status, "headers": _reply_headers(reply)}
            async for piece in reply.content.iter_any():
                if not began and not held and _is_opening(piece):
                    held = piece
                    continue
                if not began:
                    began, piece, held = True, held + piece, b""
                    await send(start)
                on_piece(piece, kind in _STREAMS and not piece.startswith(_COMMENT))
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            if not began:
                began = True
                await send(start)
            await send({"type": "http.response.body", "body": held, "more_body": False})
    except (aiohttp.ClientError, ConnectionError, TimeoutError):
        raise ServerGone(began, kind) from None
    except asyncio.CancelledError:
        if gone.is_set():
            raise ServerGone(began, kind) from None
        raise


def _is_opening(piece: bytes) -> bool:
    """Whether a stream begins so before its first token: with roles, or with the head of a message or response."""
    head = piece[:1024]
    return b'"role":"assistant","content":""' in head or b"message_start" in head or b"response.created" in head


class WatchedClient:
    """A client whose body was read: its messages can be waited for beside something else, and none is lost."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._next: asyncio.Future[Message] | None = None

    async def or_gone(self, event: asyncio.Event) -> bool:
        """Wait for an event; False where the client leaves before it."""
        if event.is_set():
            return True
        waiting = asyncio.ensure_future(event.wait())
        try:
            while not event.is_set():
                coming = self._next = self._next or asyncio.ensure_future(self._receive())
                both: set[asyncio.Future[Any]] = {waiting, coming}
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                if coming.done():
                    if coming.result()["type"] == "http.disconnect":
                        return event.is_set()
                    self._next = None
            return True
        finally:
            waiting.cancel()

    async def receive(self) -> Message:
        """The client's next message."""
        found, self._next = self._next, None
        return await (self._receive() if found is None else found)


async def until_gone(work: asyncio.Task[None], gone: asyncio.Event) -> None:
    """Cancel a forwarded request when the process that answers it is gone."""
    await gone.wait()
    work.cancel()


async def until_disconnect(work: asyncio.Task[None], receive: Receive) -> None:
    """Wait for a forwarded request; its client's disconnect ends it, and with it the other process's work."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    watching = asyncio.ensure_future(watch())
    try:
        await asyncio.wait({work, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
        with suppress(asyncio.CancelledError):
            await work
    finally:
        watching.cancel()
        work.cancel()


def _reply_headers(reply: aiohttp.ClientResponse) -> list[tuple[bytes, bytes]]:
    return [(name.lower(), value) for name, value in reply.raw_headers if name.lower() not in _HOP | _OWN]


async def read_body(receive: Receive) -> bytes:
    """A whole body; the middleware bounds it."""
    return b"".join([piece async for piece in body_pieces(receive)])


async def body_pieces(receive: Receive) -> AsyncIterator[bytes]:
    """A body as it comes."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise HTTPError(400, "the client left before its body was whole", code="disconnected")
        if message.get("body"):
            yield message["body"]
        if not message.get("more_body", False):
            return


def target_url(base: str, scope: Scope) -> str:
    """The address of a request's path and query at another server."""
    path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
    query = scope.get("query_string", b"").decode("latin-1")
    return f"{base}{path.partition('?')[0]}{'?' if query else ''}{query}"


async def break_off(scope: Scope, gone: ServerGone, error: HTTPError, send: Send) -> None:
    """End an answer of which the client has a part: a stream of events gets an error as its last one."""
    if gone.content_type != "text/event-stream":
        raise RuntimeError("a server process died in the middle of an answer")  # the connection closes without an end
    data = orjson.dumps(scope[SHAPE](error))
    event = b"event: error\n" if scope["path"].startswith(("/v1/messages", "/v1/responses")) else b""
    await send({"type": "http.response.body", "body": event + b"data: " + data + b"\n\n", "more_body": False})


def plain_session() -> aiohttp.ClientSession:
    """A client for other processes: without limits of its own, and bodies pass through as they are."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=2.0)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=10.0)
    return aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False)
