"""Documents and prefixes in a Redis that fails, through the engine: the answer is that of a healthy run, in time."""

from __future__ import annotations

import hashlib
import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
from faulty import PATIENT, QUILT, SHORT, answer, count, healthy
from stores import Proxy, Server
from tiny import write_tiny

from kvilt.config import RunConfig
from kvilt.executor.load import load_executor
from kvilt.executor.protocol import Executor
from kvilt.store.redis import Redis
from kvilt.store.store import Store, StoreLimits
from kvilt.store.tier import Budget

pytestmark = pytest.mark.needs("redis")
redis = pytest.importorskip("redis")

CONFIG = RunConfig(kv_memory=1 << 22, backend="native", threads=1)
PAGES = 64  # tokens before the first document that are whole pages


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    return load_executor(write_tiny(tmp_path_factory.mktemp("model")), CONFIG)


@pytest.fixture(scope="module")
def expected(executor: Executor) -> list[int]:
    return healthy(executor)


def in_redis(url: str, limits: StoreLimits = PATIENT, **options: Any) -> Store:
    """A store that waits long, unless the test is about waiting."""
    tier = Redis(url, Budget(1 << 28), **{"read_timeout_s": 60.0, "write_timeout_s": 60.0, **options})
    return Store(None, [tier], limits=limits)


def fill(executor: Executor, server: Server) -> dict[bytes, bytes]:
    """A server that holds the documents and the pages before them: its records."""
    with in_redis(server.url) as store:
        assert answer(executor, store).made == QUILT.reused
    with redis.Redis(port=server.port) as client:
        return {name: client.get(name) for name in client.keys("{kvilt}:r:*")}


def recovers(executor: Executor, server: Server, expected: list[int]) -> None:
    """Whatever was there: one more run repairs it, and the next finds everything."""
    with in_redis(server.url) as store:
        assert answer(executor, store).tokens == expected
    with in_redis(server.url) as store:
        said = answer(executor, store)
        assert (said.tokens, said.made, said.found) == (expected, 0, PAGES)


def test_a_healthy_server(executor: Executor, expected: list[int], redis_server: Server) -> None:
    fill(executor, redis_server)
    recovers(executor, redis_server, expected)


def test_down_at_the_start(executor: Executor, expected: list[int], redis_server: Server) -> None:
    redis_server.kill()
    with in_redis(redis_server.url, SHORT, read_timeout_s=0.25, write_timeout_s=0.25) as store:
        for _ in range(2):
            said = answer(executor, store)
            assert (said.tokens, said.made, said.found) == (expected, QUILT.reused, 0)
        assert count(store, "misses_total", reason="down") > 0
        assert store.flush(300)
        assert count(store, "dropped_total", tier="redis", reason="down") > 0
    redis_server.start()
    recovers(executor, redis_server, expected)


@pytest.mark.parametrize("answers", [0, 1, 4, 7, 10])
def test_killed_during_a_request(
    executor: Executor, expected: list[int], redis_server: Server, proxy: Proxy, answers: int
) -> None:
    """After so many answers: in the middle of the prefix, or of a document."""
    fill(executor, redis_server)
    heard = itertools.count()

    def bend(data: bytes) -> bytes | None:
        if next(heard) < answers:
            return data
        if redis_server.process is not None:
            redis_server.kill()
        return None

    proxy.bend = bend
    with in_redis(proxy.url, SHORT, read_timeout_s=0.25, write_timeout_s=0.25) as store:
        said = answer(executor, store)
        assert said.tokens == expected
        # How much comes with one answer is the network's business: ten may be all there is.
        if answers <= 1:
            assert said.made > 0 or said.found < PAGES
            assert count(store, "misses_total") > 0
    redis_server.start()
    recovers(executor, redis_server, expected)


@pytest.mark.parametrize("read_timeout_s", [0.1, 60.0])
def test_two_seconds_for_every_answer(
    executor: Executor, expected: list[int], redis_server: Server, proxy: Proxy, read_timeout_s: float
) -> None:
    """Cut short by the tier's own timeout, or by the limits of whoever waits; then it is left alone."""
    fill(executor, redis_server)
    fast = threading.Event()

    def bend(data: bytes) -> bytes:
        fast.wait(2.0)
        return data

    proxy.bend = bend
    with in_redis(proxy.url, SHORT, read_timeout_s=read_timeout_s, write_timeout_s=0.25) as store:
        said = answer(executor, store)
        assert (said.tokens, said.made, said.found) == (expected, QUILT.reused, 0)
        assert count(store, "misses_total") >= 3
        assert count(store, "misses_total", reason="timeout") + count(store, "misses_total", reason="deadline") > 0
        assert count(store, "tier_up", tier="redis") == 0
        before = count(store, "misses_total", reason="down")
        said = answer(executor, store)  # nobody asks it any more, so nobody waits
        assert (said.tokens, said.made, said.found) == (expected, QUILT.reused, 0)
        assert count(store, "misses_total", reason="down") - before >= 3
        fast.set()
    recovers(executor, redis_server, expected)


GARBAGE = {
    "noise": lambda data: hashlib.shake_128(data).digest(200) + b"\r\n",
    "http": lambda _data: b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "another type": lambda _data: b":7\r\n:8\r\n",
    "nothing": lambda _data: b"$-1\r\n:5\r\n",
    "a bulk without end": lambda _data: b"$99999999999\r\n",
    "too much": lambda _data: b"$70000\r\n" + bytes(70_000) + b"\r\n:70000\r\n",
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_nonsense(executor: Executor, expected: list[int], redis_server: Server, proxy: Proxy, kind: str) -> None:
    fill(executor, redis_server)
    proxy.bend = GARBAGE[kind]
    with in_redis(proxy.url, SHORT, read_timeout_s=0.25, write_timeout_s=0.25) as store:
        said = answer(executor, store)
        assert (said.tokens, said.made, said.found) == (expected, QUILT.reused, 0)
        assert count(store, "misses_total") >= 3
    recovers(executor, redis_server, expected)


def test_another_models_records_under_the_same_keys(
    executor: Executor, expected: list[int], redis_server: Server, tmp_path: Path
) -> None:
    other = load_executor(write_tiny(tmp_path, rope_theta=500.0), CONFIG)
    foreign = fill(other, redis_server)
    with redis.Redis(port=redis_server.port) as client:
        client.flushall()
        own = fill(executor, redis_server)
        by_size = {len(data): data for data in foreign.values()}  # each kind and length has a size of its own
        for name, data in own.items():
            client.set(name, by_size[len(data)])
    with in_redis(redis_server.url) as store:
        said = answer(executor, store)
        assert (said.tokens, said.made, said.found) == (expected, QUILT.reused, 0)
        assert count(store, "misses_total", reason="identity.model") >= 3
    recovers(executor, redis_server, expected)
