"""Sends one streaming request to an OpenAI-compatible server and records the time of every event.

It speaks HTTP/1.1 with the standard library only, because it shares the machine with the server that it measures.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

from ..errors import ParamError

_LIMIT_BYTES = 1 << 20  # of a line, and of an error's text
_SAID = ("content", "reasoning_content", "reasoning", "tool_calls", "text")


class RequestFailed(Exception):
    """A request that was not answered; `kind` is a short reason by which failures are counted."""

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(message or kind)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class ServerTarget:
    """The server under test."""

    url: str
    chat: bool
    api_key: str | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        split = urlsplit(self.url)
        if split.scheme not in ("http", "https") or not split.hostname:
            raise ParamError("url", f"must look like http://127.0.0.1:8000, not {self.url[:80]!r}")

    @property
    def route(self) -> str:
        return "/chat/completions" if self.chat else "/completions"

    def path(self, route: str) -> str:
        """The path of a route below /v1; the URL may contain /v1 or not."""
        base = self._split.path.rstrip("/")
        return f"{base if base.endswith('/v1') else base + '/v1'}{route}"

    @property
    def _split(self) -> SplitResult:
        return urlsplit(self.url)

    def head(self, method: str, route: str, length: int) -> bytes:
        split = self._split
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        return (
            f"{method} {self.path(route)} HTTP/1.1\r\nHost: {split.netloc.rpartition('@')[2]}\r\n{key}"
            f"Content-Type: application/json\r\nAccept: */*\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
        ).encode("ascii", "replace")

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        split = self._split
        secure = ssl.create_default_context() if split.scheme == "https" else None
        port = split.port or (443 if secure else 80)
        try:
            return await asyncio.open_connection(split.hostname, port, ssl=secure, limit=_LIMIT_BYTES)
        except OSError as error:
            raise RequestFailed("no connection", f"{split.hostname}:{port}: {error.strerror or error}") from None


@dataclass(slots=True)
class RequestTrace:
    """The times and counts of one request, on one clock; `stamps_s` are the times of events with text."""

    started_s: float
    ended_s: float = 0.0
    stamps_s: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    text: str = ""
    error: str | None = None
    message: str = ""


async def send_request(target: ServerTarget, body: Mapping[str, Any], started_s: float | None = None) -> RequestTrace:
    """Send a request and read its stream to the end. Failures are recorded, not raised.

    `started_s` is the time at which the request was due, so that a late client does not hide latency of the server.
    """
    trace = RequestTrace(time.perf_counter() if started_s is None else started_s)
    said: list[str] = []
    try:
        async with asyncio.timeout(target.timeout_s):
            async with aclosing(_events(target, body)) as events:
                async for data in events:
                    _note(trace, data, said)
        if not trace.stamps_s and not trace.output_tokens:
            raise RequestFailed("empty answer")
    except TimeoutError:
        trace.error, trace.message = "timeout", f"no end within {target.timeout_s:g} s"
    except RequestFailed as failure:
        trace.error, trace.message = failure.kind, str(failure)
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        trace.error, trace.message = "broken stream", str(error)[:200]
    trace.ended_s = time.perf_counter()
    trace.text = "".join(said)
    return trace


async def first_model(target: ServerTarget) -> str:
    """The name of the first model that the server offers."""
    async with asyncio.timeout(target.timeout_s):
        text = b"".join([part async for part in _exchange(target, "GET", "/models", b"")])
    try:
        return str(json.loads(text)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise RequestFailed("no model", "the server lists no model; name one with --model") from None


def _note(trace: RequestTrace, data: Mapping[str, Any], said: list[str]) -> None:
    """Record one event of a stream."""
    if data.get("error"):
        raise RequestFailed("error in stream", _message(data))
    text = "".join(_texts(data))
    if text:
        trace.stamps_s.append(time.perf_counter())
        said.append(text)
    usage = data.get("usage")
    if isinstance(usage, Mapping):
        trace.prompt_tokens = usage.get("prompt_tokens")
        trace.output_tokens = usage.get("completion_tokens")
        details = usage.get("prompt_tokens_details")
        trace.cached_tokens = details.get("cached_tokens") if isinstance(details, Mapping) else None


def _texts(data: Mapping[str, Any]) -> list[str]:
    found = []
    for choice in data.get("choices") or ():
        place = choice.get("delta") or choice
        found += [part if isinstance(part, str) else json.dumps(part) for key in _SAID if (part := place.get(key))]
    return found


async def _events(target: ServerTarget, body: Mapping[str, Any]) -> AsyncGenerator[Mapping[str, Any]]:
    """The data of server-sent events up to [DONE]."""
    async with aclosing(_exchange(target, "POST", target.route, json.dumps(body).encode())) as parts:
        async for data in _data(parts):
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if isinstance(event, Mapping):
                yield event
    raise RequestFailed("broken stream", "the stream ended without [DONE]")


async def _data(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The value of each `data:` line, also where a line comes in several parts."""
    held = b""
    async for part in parts:
        *lines, held = (held + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


async def _exchange(target: ServerTarget, method: str, route: str, body: bytes) -> AsyncGenerator[bytes]:
    """Send one request on a new connection; yields the parts of the response body."""
    reader, writer = await target.connect()
    try:
        writer.write(target.head(method, route, len(body)) + body)
        await writer.drain()
        status, headers = await _head(reader)
        parts = _chunks(reader) if "chunked" in headers.get("transfer-encoding", "") else _plain(reader, headers)
        if status != 200:
            text = b"".join([part async for part in parts])[:_LIMIT_BYTES]
            raise RequestFailed(f"HTTP {status}", _refusal(text))
        async for part in parts:
            yield part
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    line = (await reader.readline()).split(b" ", 2)
    if len(line) < 2 or not line[0].startswith(b"HTTP/1.") or not line[1].strip().isdigit():
        raise RequestFailed("broken stream", "the server does not answer in HTTP/1.1")
    headers = {}
    while (header := (await reader.readline()).strip()) != b"":
        name, _, value = header.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip().lower()
    return int(line[1]), headers


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while (size := int((await reader.readline()).split(b";")[0], 16)) > 0:
        yield await reader.readexactly(size)
        await reader.readline()


async def _plain(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    left = int(headers.get("content-length", 1 << 62))  # without a length the body ends with the connection
    while left > 0 and (part := await reader.read(min(left, 1 << 16))):
        left -= len(part)
        yield part


def _refusal(text: bytes) -> str:
    try:
        return _message(json.loads(text))
    except (ValueError, AttributeError):
        return text.decode("utf-8", "replace")[:200]


def _message(data: Mapping[str, Any]) -> str:
    error = data.get("error", data)
    return str(error.get("message", error) if isinstance(error, Mapping) else error)[:200]
