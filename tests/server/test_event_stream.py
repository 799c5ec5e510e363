"""Server-sent events: what is written without the task, and what is left to it."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from kvilt.errors import NumericsError
from kvilt.server.http.errors import ClientDisconnected
from kvilt.server.http.event_stream import DONE, EventStream, EventTemplate, sse_event
from kvilt.server.http.protocol import ChunkWriter

NEVER_S = 1e6


class Source:
    """Events that a test puts there."""

    def __init__(self) -> None:
        self.waiting: deque[bytes] = deque()
        self.over = False
        self.closed = 0
        self.error: Exception | None = None
        self.work: Callable[[], Awaitable[None]] | None = None
        self._news: Callable[[], None] = lambda: None

    def on_news(self, callback: Callable[[], None]) -> None:
        self._news = callback

    def opening(self) -> bytes:
        return b"opening "

    def read_ready(self) -> bytes | None:
        if self.work is not None:
            return None
        if self.waiting:
            return self.waiting.popleft()
        if self.error is not None:
            raise self.error
        return None

    async def closing(self) -> AsyncGenerator[bytes, None]:
        yield b"closing "

    def close(self) -> None:
        self.closed += 1

    def put(self, *events: bytes, over: bool = False) -> None:
        self.waiting.extend(events)
        self.over = over
        self._news()


class Writer:
    """A connection."""

    def __init__(self, sent: list[tuple[str, bytes]]) -> None:
        self.ready = True
        self._sent = sent

    def write(self, body: bytes) -> None:
        self._sent.append(("pushed", body))


class Scene:
    """One response, and what was sent how."""

    def __init__(self) -> None:
        self.source = Source()
        self.sent: list[tuple[str, bytes]] = []
        self.writer = Writer(self.sent)

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body" and message["body"]:
            self.sent.append(("sent", message["body"]))

    async def receive(self) -> Any:
        await asyncio.Event().wait()

    async def play(self, act: Callable[[], Awaitable[None]], direct: bool = True) -> None:
        scope = {"kvilt.body_writer": self.writer} if direct else {}
        answering = asyncio.ensure_future(EventStream(self.source, NEVER_S)(scope, self.receive, self.send))
        await settle()
        await act()
        await answering


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_what_is_ready_is_written_before_any_task_runs() -> None:
    scene = Scene()

    async def act() -> None:
        scene.source.put(b"a ")
        scene.source.put(b"b ", b"", b"c ")
        assert scene.sent == [("sent", b"opening "), ("pushed", b"a "), ("pushed", b"b "), ("pushed", b"c ")]
        scene.source.put(b"d ", over=True)

    asyncio.run(scene.play(act))
    assert scene.sent[4:] == [("pushed", b"d "), ("sent", b"closing " + DONE)]
    assert scene.source.closed > 0


def test_a_full_connection_is_left_to_the_task() -> None:
    scene = Scene()

    async def act() -> None:
        scene.writer.ready = False
        scene.source.put(b"a ")
        await settle()
        scene.writer.ready = True
        scene.source.put(b"b ")
        scene.source.put(over=True)

    asyncio.run(scene.play(act))
    assert scene.sent[1:3] == [("sent", b"a "), ("pushed", b"b ")]


def test_without_a_writer_everything_is_sent_by_the_task() -> None:
    scene = Scene()

    async def act() -> None:
        scene.source.put(b"a ", b"b ")
        await settle()
        scene.source.put(over=True)

    asyncio.run(scene.play(act, direct=False))
    assert b"".join(body for _, body in scene.sent) == b"opening a b closing " + DONE
    assert {how for how, _ in scene.sent} == {"sent"}


@pytest.mark.parametrize("direct", [True, False])
def test_an_error_ends_the_events(direct: bool) -> None:
    scene = Scene()

    async def act() -> None:
        scene.source.error = NumericsError([0])
        scene.source.put(b"a ")

    asyncio.run(scene.play(act, direct))
    assert scene.sent[1][1] == b"a "
    assert b'"bad_logits"' in scene.sent[2][1]
    assert scene.sent[2][1].endswith(b"\n\n" + DONE)
    assert scene.source.closed > 0


def test_work_is_awaited_before_more_is_read() -> None:
    scene = Scene()

    async def work() -> None:
        scene.sent.append(("worked", b""))
        scene.source.work = None

    async def act() -> None:
        scene.source.work = work
        scene.source.put(b"a ")
        await settle()
        scene.source.put(over=True)

    asyncio.run(scene.play(act))
    assert scene.sent[1:3] == [("worked", b""), ("sent", b"a ")]


def test_a_client_that_leaves_closes_the_source() -> None:
    scene = Scene()

    async def leave() -> Any:
        return {"type": "http.disconnect"}

    scene.receive = leave  # type: ignore[method-assign]

    async def act() -> None:
        pass

    with pytest.raises(ClientDisconnected):
        asyncio.run(scene.play(act))
    assert scene.source.closed > 0


@pytest.mark.parametrize("text", ["", "plain", 'quotes " and \\ and \n', "\0text\0", "käse 🧀 \u2028"])
def test_a_template_encodes_its_text_as_json_does(text: str) -> None:
    def event(text: str) -> bytes:
        return sse_event({"id": "x", "choices": [{"delta": {"content": text}, "finish_reason": None}]})

    made = EventTemplate(event).with_text(text)
    assert made == event(text)
    assert orjson.loads(made.removeprefix(b"data: "))["choices"][0]["delta"]["content"] == text


class Transport:
    """A transport over one end of a socket pair; what it is given waits in its buffer."""

    def __init__(self, own: socket.socket) -> None:
        self.own = own
        self.buffer = b""
        self.closing = False

    def get_extra_info(self, name: str) -> Any:
        return self.own if name == "socket" else None

    def get_write_buffer_size(self) -> int:
        return len(self.buffer)

    def is_closing(self) -> bool:
        return self.closing

    def write(self, data: bytes) -> None:
        self.buffer += data


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def writer_over(transport: Transport) -> ChunkWriter:
    flow = SimpleNamespace(write_paused=False)
    return ChunkWriter(SimpleNamespace(flow=flow, transport=transport, disconnected=False, chunked_encoding=True))  # type: ignore[arg-type]


@pytest.mark.skipif(sys.platform == "win32", reason="sockets are no file descriptors")
def test_chunks_go_to_the_socket_while_the_transport_has_nothing_to_send(pair: Any) -> None:
    transport = Transport(pair[0])
    writer = writer_over(transport)
    writer.write(b"abc")
    assert (pair[1].recv(99), transport.buffer) == (b"3\r\nabc\r\n", b"")
    transport.buffer = b"before "
    writer.write(b"abc")
    assert transport.buffer == b"before 3\r\nabc\r\n"


@pytest.mark.skipif(sys.platform == "win32", reason="sockets are no file descriptors")
def test_what_a_full_socket_does_not_take_goes_to_the_transport(pair: Any) -> None:
    transport = Transport(pair[0])
    writer = writer_over(transport)
    body = bytes(range(256)) * 64
    while not transport.buffer:
        writer.write(body)
    pair[1].setblocking(False)
    read = b""
    with suppress(BlockingIOError):
        while data := pair[1].recv(1 << 20):
            read += data
    chunk = b"4000\r\n" + body + b"\r\n"
    whole = read + transport.buffer
    assert whole == chunk * (len(whole) // len(chunk))


def test_a_closing_or_encrypted_connection_is_left_to_its_transport(pair: Any) -> None:
    transport = Transport(pair[0])
    transport.closing = True
    writer_over(transport).write(b"abc")
    assert transport.buffer == b"3\r\nabc\r\n"
    secret = Transport(pair[0])
    secret.get_extra_info = lambda _name: pair[0]  # type: ignore[method-assign]
    writer_over(secret).write(b"abc")
    assert secret.buffer == b"3\r\nabc\r\n"
