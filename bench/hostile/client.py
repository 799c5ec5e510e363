"""HTTP/1.1 by hand: requests that are answered, and connections on which anything may be sent."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

_IDLE_S = 10.0
FAILED = 0  # the status of a request without an answer


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    status: int
    body: bytes
    seconds: float
    why: str = ""

    @property
    def json(self) -> Any:
        with suppress(ValueError):
            return json.loads(self.body)
        return {}


@dataclass
class Client:
    """One key on one server; keeps a connection for each request in progress and uses it again."""

    host: str
    port: int
    key: str
    timeout_s: float = 60.0
    _idle: list[tuple[float, asyncio.StreamReader, asyncio.StreamWriter]] = field(default_factory=list)

    def head(self, method: str, path: str, length: int | None, more: Mapping[str, str] | None = None) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.host}:{self.port}", f"Authorization: Bearer {self.key}"]
        if length is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {length}"]
        lines += [f"{name}: {value}" for name, value in (more or {}).items()]
        return "\r\n".join([*lines, "", ""]).encode()

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port, limit=1 << 24)

    async def ask(self, method: str, path: str, body: Any = None, more: Mapping[str, str] | None = None) -> Answer:
        """One request with its whole answer; a status of 0 says that there was none."""
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        head = self.head(method, path, len(raw) if body is not None else None, more)
        began_s = time.perf_counter()
        try:
            async with asyncio.timeout(self.timeout_s):
                status, content = await self._exchange(head + raw)
            return Answer(status, content, time.perf_counter() - began_s)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
            return Answer(FAILED, b"", time.perf_counter() - began_s, type(error).__name__)

    async def post(self, path: str, body: Any, more: Mapping[str, str] | None = None) -> Answer:
        return await self.ask("POST", path, body, more)

    async def get(self, path: str) -> Answer:
        return await self.ask("GET", path)

    async def _exchange(self, request: bytes) -> tuple[int, bytes]:
        reader, writer = await self._connection()
        try:
            writer.write(request)
            status, fields = await read_head(reader)
            content = await read_body(reader, fields)
        except BaseException:
            writer.transport.abort()
            raise
        if fields.get("connection") == "close":
            writer.close()
        else:
            self._idle.append((time.monotonic(), reader, writer))
        return status, content

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """One that was used lately, else a new one: servers hang up on those that idle."""
        while self._idle:
            used_s, reader, writer = self._idle.pop()
            if time.monotonic() < used_s + _IDLE_S and not reader.at_eof():
                return reader, writer
            writer.transport.abort()
        return await self.open()

    def close(self) -> None:
        for _, _, writer in self._idle:
            writer.transport.abort()
        self._idle.clear()


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers of an answer."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    fields = (line.partition(":") for line in lines[1:] if line)
    return int(lines[0].split(" ")[1]), {name.strip().lower(): value.strip() for name, _, value in fields}


async def read_body(reader: asyncio.StreamReader, fields: Mapping[str, str]) -> bytes:
    if fields.get("transfer-encoding") != "chunked":
        return await reader.readexactly(int(fields.get("content-length", "0")))
    parts = []
    while size := int(await reader.readline(), 16):
        parts.append(await reader.readexactly(size))
        await reader.readline()
    await reader.readline()
    return b"".join(parts)
