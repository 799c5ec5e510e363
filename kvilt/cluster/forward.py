"""Forwards one request to one replica over HTTP, and its answer back piece by piece.

An answer begins for the client when its first token is here; what a stream says before it is held back. Up to then a
replica that dies costs nothing: the request can go to another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp
from starlette.types import Message, Receive, Scope, Send

_HOP = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"expect"})
# The door's own middleware sets these on every answer.
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


class ReplicaGone(Exception):
    """The replica died, or never answered. `began`: a part of the answer is with the client already."""

    def __init__(self, began: bool, content_type: str = "") -> None:
        super().__init__("the replica is gone")
        self.began, self.content_type = began, content_type


@dataclass(frozen=True, slots=True)
class ReplicaAnswer:
    """A whole answer."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


def request_headers(scope: Scope, request_id: str) -> list[tuple[str, str]]:
    """The client's headers for a replica, which then sees the same Host, keys and origin."""
    kept = [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in scope["headers"]
        if name not in _HOP and name not in (b"content-length", b"x-request-id")
    ]
    return [*kept, ("x-request-id", request_id)]


async def fetch(
    http: aiohttp.ClientSession, url: str, method: str, headers: Sequence[tuple[str, str]], body: bytes | None
) -> ReplicaAnswer:
    """A whole answer of one replica."""
    try:
        async with http.request(method, url, headers=headers, data=body, allow_redirects=False) as reply:
            return ReplicaAnswer(reply.status, _reply_headers(reply), await reply.read())
    except (aiohttp.ClientError, ConnectionError, TimeoutError):
        raise ReplicaGone(began=False) from None


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

    A task that is cancelled after `gone` was set ends with ReplicaGone.
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
        raise ReplicaGone(began, kind) from None
    except asyncio.CancelledError:
        if gone.is_set():
            raise ReplicaGone(began, kind) from None
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
    """Cancel a forwarded request when its replica is gone."""
    await gone.wait()
    work.cancel()


async def until_disconnect(work: asyncio.Task[None], receive: Receive) -> None:
    """Wait for a forwarded request; its client's disconnect ends it, and with it the replica's work."""

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
