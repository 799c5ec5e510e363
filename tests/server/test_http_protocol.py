"""Connections that dawdle, never read, or are too many, over plain sockets."""

from __future__ import annotations

import http.client
import io
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from running import QUESTION, Running, until

from kvilt.batch import Batch, Logits
from kvilt.config import EngineConfig
from kvilt.executor.protocol import Executor

Start = Callable[..., Any]
CHAT = {"messages": QUESTION, "max_tokens": 1}


@contextmanager
def connected(server: Running, **options: int) -> Iterator[socket.socket]:
    with closing(socket.socket()) as one:
        if "buffer" in options:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, options["buffer"])
        one.settimeout(60)
        one.connect(("127.0.0.1", server.port))
        yield one


def request(body: bytes, path: str = "/v1/chat/completions", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {size}\r\n\r\n"
    )
    return head.encode() + body


def rest(one: socket.socket) -> bytes:
    """All that comes until the server closes."""
    data = b""
    while True:
        try:
            piece = one.recv(65536)
        except ConnectionResetError:
            return data
        if not piece:
            return data
        data += piece


def rest_in_time(server: Running, one: socket.socket, seconds: float) -> bytes:
    """All that comes until the server closes, while the server's clock makes jumps of so many seconds."""
    one.settimeout(0.02)
    data = b""
    while True:
        try:
            piece = one.recv(65536)
        except TimeoutError:
            server.elapse(seconds)
            continue
        except ConnectionResetError:
            return data
        if not piece:
            return data
        data += piece


def test_slow_headers_end_a_connection(start: Start) -> None:
    with start(header_timeout_s=3600, idle_timeout_s=1e8) as server:
        with connected(server) as silent, connected(server) as slow:
            slow.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: local")
            assert b" 408 " in rest_in_time(server, silent, 3601)
            assert b" 408 " in rest_in_time(server, slow, 3601)
        with connected(server) as again:
            again.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert b" 200 " in again.recv(65536)
            again.sendall(b"GET /health HTTP/1.1\r\nhos")
            assert b" 408 " in rest_in_time(server, again, 3601), "also the second request of a connection"


def test_slow_bodies_end_a_request(start: Start) -> None:
    with start(body_timeout_s=3600, header_timeout_s=1e8) as server, connected(server) as slow:
        slow.sendall(request(b'{"mess', length=500))
        answer = rest_in_time(server, slow, 3601)
        assert b" 408 " in answer
        assert b"slow_body" in answer
        assert server.llm.engine.requests == 0


def test_a_refused_request_is_not_read_on(start: Start) -> None:
    """Whoever has no key cannot hold a connection by sending the rest of a body slowly."""
    with start(api_keys=("sk-1",)) as server, connected(server) as one:
        one.sendall(request(b'{"mess', length=500))
        answer = rest(one)
        assert b" 401 " in answer
        assert b"connection: close" in answer


def test_bytes_that_trickle_in_harm_nobody(start: Start) -> None:
    with start(body_timeout_s=600) as server, server.http() as http, connected(server) as a, connected(server) as b:
        body = json.dumps(CHAT).encode()
        for one in (a, b):
            one.sendall(request(b"", length=len(body)))
        for byte in body:
            for one in (a, b):
                one.sendall(bytes([byte]))
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
        for one in (a, b):
            assert b" 200 " in one.recv(65536)


def test_headers_without_end_are_refused(start: Start) -> None:
    with start() as server, connected(server) as one:
        one.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: ")
        try:
            for _ in range(40):
                one.sendall(b"a" * 65536)
        except OSError:
            return  # it was cut off while we wrote
        assert b" 431 " in rest(one)


def test_what_is_no_http_is_refused_in_our_shape(server: Running) -> None:
    with connected(server) as one:
        one.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 this is TLS\r\n\r\n")
        answer = rest(one)
        assert b" 400 " in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


def test_connections_are_limited(start: Start) -> None:
    with start(max_connections=3) as server:
        with connected(server), connected(server), connected(server), connected(server) as fourth:
            answer = rest(fourth)
            assert b" 503 " in answer
            assert b"retry-after" in answer
        until(lambda: not server.listener.server_state.connections)
        with server.http() as http:
            assert http.get("/health").status_code == 200


def test_idle_connections_end(start: Start) -> None:
    with start(idle_timeout_s=3600, header_timeout_s=1e8) as server, connected(server) as one:
        one.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert rest_in_time(server, one, 3601).endswith(b'{"status":"ok"}')


def test_a_connection_serves_many_requests_one_after_the_other(server: Running) -> None:
    with connected(server) as one:
        one.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 3)
        data = b""
        while data.count(b'{"status":"ok"}') < 3:
            data += one.recv(65536)


def test_readers_who_never_read_are_held_and_then_cut_off(start: Start) -> None:
    """A full socket holds the request; the write that waits for it ends after its time, and with it the request."""
    many = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True, "logprobs": 20, "n": 4}
    with start(EngineConfig(unread_tokens=8), write_timeout_s=3600) as server, server.http() as http:
        with connected(server, buffer=4096) as one, connected(server, buffer=4096) as two:
            for silent in (one, two):
                silent.sendall(request(json.dumps(many).encode(), "/v1/completions"))
            until(lambda: server.llm.engine.requests == 2)
            for _ in range(3):
                assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
            until(lambda: server.elapse(3601) or server.llm.engine.requests == 0, "giving up")
            until(lambda: server.llm.executor.pool.usage().used == 0)
        with server.http() as again:
            assert again.get("/health").status_code == 200


def test_an_answer_that_nobody_takes_does_not_hold_the_end(start: Start) -> None:
    with start(write_timeout_s=3600) as server, connected(server, buffer=4096) as one:
        body = json.dumps({"prompt": "word " * 900, "echo": True, "logprobs": 20, "max_tokens": 1}).encode()
        one.sendall(request(body, "/v1/completions"))
        assert one.recv(1) == b"H", "the answer has begun"
        until(lambda: server.elapse(3601) or not server.listener.server_state.connections, "cutting it off")


def test_many_threads_at_once(server: Running) -> None:
    """32 clients, each with its own connection; every answer is right."""
    answers: list[str] = []
    seeds = range(32)

    def ask(seed: int) -> None:
        with server.http() as http:
            fields = {**CHAT, "max_tokens": 12, "temperature": 1, "seed": seed % 4}
            done = http.post("/v1/chat/completions", json=fields).json()
            answers.append(f"{seed % 4} {done['choices'][0]['message']['content']}")

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert len(answers) == 32
    assert len(set(answers)) == 4, "a seed gives the same tokens whatever else is served"


# Several requests on one connection, trailers, other protocols.

LONG = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True}
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"transfer-encoding: chunked\r\n"
)


@pytest.fixture
def slowed(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Steps wait for this event, once it is cleared."""
    go = threading.Event()
    go.set()
    honest = executor.run

    def run(batch: Batch) -> Logits:
        go.wait(300)
        return honest(batch)

    monkeypatch.setattr(executor, "run", run)
    return go


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Answers(io.BufferedReader):
    """What comes from a socket, for one response after the other."""

    def makefile(self, _mode: str) -> Answers:
        return self

    def close(self) -> None:
        """The end of a response is not the end of the connection."""


def answers(one: socket.socket) -> Answers:
    return Answers(one.makefile("rb", buffering=0))


def response(one: Any) -> http.client.HTTPResponse:
    """The next response, by a parser that knows where it must end."""
    made = http.client.HTTPResponse(one)
    made.begin()
    return made


def protocol(server: Running) -> Any:
    until(lambda: len(server.listener.server_state.connections) == 1, "connecting")
    (only,) = server.listener.server_state.connections
    return only


def reasons(server: Running) -> dict[str, int]:
    series = server.llm.engine.metrics.snapshot()["kvilt_request_success_total"]["series"]
    return {one["labels"]["finished_reason"]: one["value"] for one in series}


def test_trailers_are_read_and_forgotten(start: Start) -> None:
    body = chunk(json.dumps({"prompt": "Hi", "max_tokens": 1}).encode())
    with start() as server, connected(server) as one:
        one.sendall(CHUNKED + b"\r\n" + body + b"0\r\nauthorization: Bearer x\r\nx-sum: 5\r\n\r\n")
        came = answers(one)
        answer = response(came)
        assert (answer.status, bool(answer.read())) == (200, True)
        assert b"x-sum" not in dict(protocol(server).headers)
        one.sendall(HEALTH)
        assert response(came).status == 200


@pytest.mark.parametrize("endless", [b"a: b\r\n", b"a: " + b"c" * 4000, b"c" * 4000], ids=["many", "long", "name"])
@pytest.mark.parametrize("place", ["trailers", "extension"])
def test_trailers_without_end_are_refused(start: Start, endless: bytes, place: str) -> None:
    """Nothing of them is kept, and a connection that sends more than a few is ended."""
    with start() as server, connected(server) as one:
        one.sendall(CHUNKED + b"\r\n" + chunk(b'{"prompt"') + (b"0\r\n" if place == "trailers" else b"5;"))
        wire = protocol(server)
        sent = 0
        try:
            while sent < 1 << 24:
                one.sendall(endless * 16)
                sent += 16 * len(endless)
        except OSError:
            pass
        else:
            pytest.fail("16 MiB were taken")
        assert len(wire.headers) < 10
        until(lambda: not server.listener.server_state.connections)
        assert server.llm.engine.requests == 0


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_ends_what_it_pipelined(
    start: Start, slowed: threading.Event, apart: bool, stream: bool
) -> None:
    """Behind the request that runs there is another, so the connection's newest request is not the one to end."""
    with start() as server:
        slowed.clear()
        first = request(json.dumps({**LONG, "stream": stream}).encode(), "/v1/completions")
        second = request(json.dumps(LONG).encode(), "/v1/completions")
        with connected(server) as one:
            one.sendall(first if apart else first + second)
            until(lambda: server.llm.engine.requests == 1)
            if apart:
                one.sendall(second)
            until(lambda: len(protocol(server).pipeline) == 1)
        until(lambda: not server.listener.server_state.connections, "noticing")
        until(lambda: not server.listener.server_state.tasks, "ending")
        slowed.set()
        until(lambda: server.llm.engine.requests == 0)
        assert reasons(server) == {"cancelled": 1}


@pytest.mark.parametrize("flood", ["requests", "body"])
def test_what_is_sent_ahead_is_bounded(start: Start, slowed: threading.Event, flood: str) -> None:
    with start() as server, connected(server) as one:
        slowed.clear()
        one.sendall(request(json.dumps(LONG).encode(), "/v1/completions"))
        until(lambda: server.llm.engine.requests == 1)
        wire = protocol(server)
        if flood == "body":
            one.sendall(request(b"", "/v1/completions", length=1 << 30))
        try:
            for _ in range(1 << 14):
                one.sendall(b" " * 4096 if flood == "body" else HEALTH * 100)
        except OSError:
            pass
        else:
            pytest.fail("all of it was taken")
        assert len(wire.pipeline) <= 17
        slowed.set()
        until(lambda: server.llm.engine.requests == 0)
        assert reasons(server) == {"cancelled": 1}


def comments(one: http.client.HTTPResponse, count: int) -> None:
    """Read on until so many comments came; each is a span of silence."""
    while count:
        count -= one.readline() == b": keep-alive\n"


@pytest.mark.parametrize(
    ("ahead", "status"), [(b"GET /health HTTP/1.1\r\nhos", 408), (b"no http\r\n\r\n", 400), (HEALTH + b"\0", 400)]
)
def test_a_refusal_waits_for_the_response_before_it(
    start: Start, slowed: threading.Event, ahead: bytes, status: int
) -> None:
    """Time runs out for headers, or they are wrong, while a stream runs: the stream is whole, and then comes that."""
    with start(header_timeout_s=0.2, keep_alive_s=0.1) as server, connected(server) as one:
        slowed.clear()
        one.sendall(request(json.dumps({**LONG, "max_tokens": 4, "stream": True}).encode(), "/v1/completions"))
        came = answers(one)
        answer = response(came)
        one.sendall(ahead)
        comments(answer, 8)
        slowed.set()
        streamed = answer.read()
        assert streamed.endswith(b"data: [DONE]\n\n")
        assert re.findall(rb"^(?!data: |: keep-alive|$).*$", streamed, re.MULTILINE) == []
        if ahead.startswith(HEALTH):
            assert json.loads(response(came).read()) == {"status": "ok"}
        assert response(came).status == status


def test_a_broken_request_does_not_wait_for_its_body(start: Start, slowed: threading.Event) -> None:
    """A pipelined request whose chunks are wrong is refused as soon as its turn comes."""
    with start() as server, connected(server) as one:
        slowed.clear()
        one.sendall(request(json.dumps({**LONG, "max_tokens": 1}).encode(), "/v1/completions"))
        until(lambda: server.llm.engine.requests == 1)
        one.sendall(CHUNKED + b"\r\nnonsense\r\n")
        until(lambda: protocol(server)._pending_error is not None)
        slowed.set()
        came = answers(one)
        first = response(came)
        first.read()
        assert (first.status, response(came).status) == (200, 400)


@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket", b"TLS/1.0"])
@pytest.mark.parametrize("cut", [0, 40, 200, 100_000])
def test_a_wish_for_another_protocol_is_left_unheard(server: Running, upgrade: bytes, cut: int) -> None:
    """The request is served as it is, its body included, wherever it is cut on its way."""
    body = json.dumps({"prompt": "Hi", "max_tokens": 1, "echo": True}).encode()
    wish = b"connection: Upgrade, HTTP2-Settings, keep-alive\r\nupgrade: " + upgrade + b"\r\nhttp2-settings: AAMA\r\n"
    for framed in (
        request(body, "/v1/completions").replace(b"host:", wish + b"host:"),
        CHUNKED + wish + b"\r\n" + chunk(body[:10]) + chunk(body[10:]) + b"0\r\n\r\n",
    ):
        with connected(server) as one:
            one.sendall(framed[:cut])
            one.sendall(framed[cut:])
            came = answers(one)
            answer = response(came)
            assert answer.status == 200
            assert json.loads(answer.read())["choices"][0]["text"].startswith("Hi")
            one.sendall(HEALTH)
            assert response(came).status == 200


def test_a_server_is_no_proxy(server: Running) -> None:
    with connected(server) as one:
        one.sendall(b"CONNECT localhost:80 HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b" 400 " in rest(one)
    with connected(server) as one:
        one.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert b" 400 " in rest(one)
