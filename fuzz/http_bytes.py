"""Bytes on a connection: whatever comes, in whatever pieces, the protocol answers in HTTP or hangs up.

The real protocol class over a transport that only notes, and an application that notes what it was asked. Oracles: no
exception reaches the loop; what is written is a sequence of HTTP responses; where h11 reads the same bytes without an
error, the application saw the same requests with the same bodies and no more; nothing is left running after the end.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from functools import cache
from typing import Any

import h11
import uvicorn
from uvicorn.server import ServerState

from kvilt.server.config import ServeConfig
from kvilt.server.http.protocol import protocol_class

from .driver import main
from .target import Finding, Target

logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
_MOST_TURNS = 4000


class Pipe(asyncio.Transport):
    """A transport whose other end reads everything at once."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.closed = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 5), "sockname": ("127.0.0.1", 80)}.get(name, default)

    def write(self, data: Any) -> None:
        if not self.closed:
            self.written += data

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Noting:
    """An application that reads bodies whole and notes them."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bytes, bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, whole = b"", False
        while not whole:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            whole = not message.get("more_body", False)
        self.seen.append((scope["method"], scope["raw_path"], body))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


@cache
def _parts() -> tuple[uvicorn.Config, Noting]:
    noting = Noting()
    config = uvicorn.Config(noting, http="httptools", ws="none", lifespan="off", log_config=None, access_log=False)
    config.load()
    return config, noting


def check(data: bytes) -> str:
    """The first byte says into how many pieces the others are cut."""
    dice = random.Random(data[:1])
    pieces = _cut(data[1:], dice)
    config, noting = _parts()
    pipe, errors = Pipe(), []
    noting.seen.clear()
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda _loop, context: errors.append(context))
    try:
        left = loop.run_until_complete(_talk(loop, config, pipe, pieces))
    finally:
        loop.close()
    if errors:
        raise Finding(f"an exception reached the loop: {errors[0]}")
    if left:
        raise Finding(f"{left} tasks are left after the connection was lost")
    statuses = _responses(bytes(pipe.written))
    said = _compare(data[1:], list(noting.seen))
    return f"{said}, {min(len(noting.seen), 3)} seen, statuses {sorted(set(statuses))}"


async def _talk(loop: asyncio.AbstractEventLoop, config: uvicorn.Config, pipe: Pipe, pieces: list[bytes]) -> int:
    state = ServerState()
    protocol = protocol_class(ServeConfig())(config=config, server_state=state, app_state={}, _loop=loop)
    protocol.connection_made(pipe)
    for piece in pieces:
        if pipe.closed:
            break
        protocol.data_received(piece)
        await asyncio.sleep(0)
    await _settled(state)
    protocol.eof_received()
    protocol.connection_lost(None)
    await _settled(state)
    return len(state.tasks)


async def _settled(state: ServerState) -> None:
    """Turns of the loop until the tasks have gone as far as they can."""
    for turn in range(_MOST_TURNS):
        await asyncio.sleep(0)
        if not state.tasks and turn > 20:
            return
        if turn > 200 and turn % 100 == 0 and len(asyncio.all_tasks()) <= 1:
            return


def _cut(data: bytes, dice: random.Random) -> list[bytes]:
    cuts = sorted(dice.randrange(len(data) + 1) for _ in range(dice.choice([0, 0, 1, 3, 20])))
    return [data[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True) if start < stop]


def _responses(written: bytes) -> list[int]:
    """The status of every response, each of them whole."""
    statuses, at = [], 0
    while at < len(written):
        end = written.find(b"\r\n\r\n", at)
        head = written[at:end].split(b"\r\n") if end >= 0 else [b""]
        words = head[0].split(b" ", 2)
        if end < 0 or words[0] != b"HTTP/1.1" or len(words) < 2 or not words[1].isdigit():
            raise Finding(f"these bytes are no response: {written[at : at + 80]!r}")
        fields = dict(line.lower().split(b": ", 1) for line in head[1:])
        statuses.append(int(words[1]))
        at = end + 4 + int(fields.get(b"content-length", b"0"))
    return statuses


def _compare(data: bytes, seen: list[tuple[str, bytes, bytes]]) -> str:
    expected = _by_h11(data)
    if expected is None:
        return "not for h11"
    # A scope has the path alone, and of a target with a host only what stands behind it.
    alike = [
        (method, path, body) if target.startswith(b"/") and not target.startswith(b"//") else (method, found, body)
        for (method, target, body), (_, found, _) in zip(expected, seen, strict=False)
        for path in [re.split(rb"[?#]", target, maxsplit=1)[0]]
    ]
    if seen != alike:
        raise Finding(f"the application saw {seen!r:.300}, h11 {expected!r:.300}")
    return "as h11"


def _by_h11(data: bytes) -> list[tuple[str, bytes, bytes]] | None:
    """The whole requests in these bytes; None where a strict reader refuses any of it."""
    connection, found = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 16), []
    try:
        connection.receive_data(data)
        while True:
            event, body = connection.next_event(), b""
            if not isinstance(event, h11.Request):
                return found if event is h11.NEED_DATA else None
            while not isinstance(part := connection.next_event(), h11.EndOfMessage):
                if not isinstance(part, h11.Data):
                    return found if part is h11.NEED_DATA else None
                body += bytes(part.data)
            found.append((event.method.decode(), event.target, body))
            connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
            connection.send(h11.EndOfMessage())
            connection.start_next_cycle()
    except h11.ProtocolError:
        return None


def seeds() -> list[bytes]:
    get = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    post = b"POST /v1/x HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
    chunked = b"POST /c HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n0\r\nT: v\r\n\r\n"
    expect = b"POST /e HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\nx"
    both = b"POST /b HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /s HTTP/1.1\r\n\r\n"
    old = b"GET / HTTP/1.0\r\n\r\n"
    each = [get, post, chunked, expect, both, old, get * 3, post + chunked + get, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]
    return [b"\x00" + one for one in each] + [b"\x05" + one for one in each]


WORDS = (
    *(
        b"\r\n",
        b"\n",
        b"\r\n\r\n",
        b": ",
        b"\x00",
        b"\t",
        b"Content-Length: ",
        b"Transfer-Encoding: chunked\r\n",
        b"0\r\n\r\n",
    ),
    *(
        b"Connection: close\r\n",
        b"Connection: keep-alive\r\n",
        b"HTTP/1.0",
        b"HTTP/2.0",
        b"Host: a\r\n",
        b"ffffffffffffffff\r\n",
    ),
    *(
        b"GET ",
        b"POST ",
        b"OPTIONS * ",
        b"CONNECT a:1 ",
        b"http://a/b",
        b"%2e%2e/",
        b"Expect: 100-continue\r\n",
        b"+",
        b"0x",
    ),
)
TARGET = Target("http_bytes", check, seeds, WORDS, most_bytes=1 << 13)

if __name__ == "__main__":
    main(TARGET)
