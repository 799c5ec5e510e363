"""Connections that dawdle, never read, or are too many, over plain sockets."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from running import QUESTION, Running, until

from kvilt.config import EngineConfig

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
