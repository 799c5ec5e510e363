"""A small server with the shape of OpenAI's: what it answers is a script, and it keeps what it was asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    """One scripted answer: a refusal, or pieces of text with or without usage, ended or broken off."""

    pieces: tuple[str, ...] = ("a", "b", "c")
    usage: bool = True
    status: int = 200
    message: str = ""
    done: bool = True
    chunked: bool = True
    fault: str = ""  # an error inside the stream


@dataclass
class FakeOpenAI:
    """`script` makes the answer to a body; `gather` requests must be in flight before any of them is answered."""

    script: Callable[[dict[str, Any]], Answer] = lambda _: Answer()
    gather: int = 1
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    url: str = ""
    _moved: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answer(reader, writer)
            await writer.drain()
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        length = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("Content-Length"))
        body = json.loads(await reader.readexactly(length) or b"{}")
        if head.startswith("GET /v1/models "):
            _reply(writer, 200, {"data": [{"id": "fake"}]})
            return
        self.bodies.append(body)
        await self._together(body)
        self.in_flight -= 1  # before the client can know that it may go on
        await _stream(writer, self.script(body), "messages" in body)

    async def _together(self, body: dict[str, Any]) -> None:
        """Wait until enough requests are here; the first one of all is the client's question about manners."""
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        if body["max_tokens"] == 2:
            return
        async with self._moved:
            self._moved.notify_all()
            await self._moved.wait_for(lambda: self.most_in_flight >= self.gather)


async def _stream(writer: asyncio.StreamWriter, answer: Answer, chat: bool) -> None:
    if answer.status != 200:
        _reply(writer, answer.status, {"error": {"message": answer.message}})
        return
    kind = "Transfer-Encoding: chunked\r\n" if answer.chunked else ""
    writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{kind}\r\n".encode())
    events = [_event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})] if chat else []
    for piece in answer.pieces:
        events.append(_event({"choices": [{"delta": {"content": piece}} if chat else {"text": piece}]}))
    if answer.fault:
        events.append(_event({"error": {"message": answer.fault}}))
    if answer.usage:
        counts = {"prompt_tokens": 7, "completion_tokens": 2 * len(answer.pieces)}
        events.append(_event({"choices": [], "usage": {**counts, "prompt_tokens_details": {"cached_tokens": 5}}}))
    if answer.done:
        events.append(b"data: [DONE]\n\n")
    for event in events:
        # Cut in the middle of a line: parts of HTTP know nothing of events.
        for part in (event[:9], event[9:]):
            writer.write(b"%x\r\n%s\r\n" % (len(part), part) if answer.chunked else part)
            await writer.drain()
    if answer.chunked and answer.done:
        writer.write(b"0\r\n\r\n")


def _event(data: dict[str, Any]) -> bytes:
    return f": a comment\n\ndata: {json.dumps(data)}\r\n\r\n".encode()


def _reply(writer: asyncio.StreamWriter, status: int, data: dict[str, Any]) -> None:
    text = json.dumps(data).encode()
    writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(text), text))


@asynccontextmanager
async def serving(fake: FakeOpenAI) -> AsyncIterator[FakeOpenAI]:
    server = await asyncio.start_server(fake.handle, "127.0.0.1", 0)
    fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield fake
