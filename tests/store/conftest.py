"""Small KV for records, what a store counted, and the machines that a store must survive."""

from __future__ import annotations

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
from typing import Any

import pytest
import torch

from kvilt.kv.identity import Identity
from kvilt.store.address import Form
from kvilt.store.disk import Disk
from kvilt.store.layer import LayerKV
from kvilt.store.loading import Loading
from kvilt.store.store import Limits, Store
from kvilt.store.tier import Budget, Tier

IDENTITY = Identity("weights-1", "native-1", salt="tenant-a")
TOKENS = [5, 6, 7, 8, 9]
PATIENT = Limits(lookup_s=120, layer_s=120, close_s=120)  # nothing here depends on how fast the machine is
ROOMY = Budget(1 << 24)


class Kit:
    """What most tests of the store need, by name."""

    identity = IDENTITY
    tokens = TOKENS
    patient = PATIENT
    roomy = ROOMY

    def layers(
        self, tokens: int = len(TOKENS), count: int = 3, seed: int = 0, dtype: torch.dtype = torch.float16
    ) -> list[LayerKV]:
        """Random KV, other numbers for every seed."""
        made = torch.Generator().manual_seed(seed)
        shape = (2, tokens, 2, 8)
        return [LayerKV(*torch.randn(shape, generator=made).to(dtype)) for _ in range(count)]

    def form(self, layers: Sequence[LayerKV] | None = None) -> Form:
        return tuple(one.form for one in layers or self.layers())

    def store(self, *tiers: Tier, memory: Budget | None = None, limits: Limits = PATIENT, **options: Any) -> Store:
        """A store without memory, unless asked for: every lookup goes down."""
        return Store(memory, tiers, limits=limits, **options)

    def disk(self, folder: Path, budget: Budget = ROOMY, **options: Any) -> Disk:
        disk = Disk(folder, budget, **options)
        disk.settle()
        return disk

    def put(self, store: Store, tokens: Sequence[int] = TOKENS, seed: int = 0, **options: Any) -> Loading:
        """Keep a chunk, and wait until it is kept."""
        made = store.put_chunk(IDENTITY, tokens, self.layers(len(tokens), seed=seed), **options)
        store.flush()
        return made

    def open(self, store: Store, tokens: Sequence[int] = TOKENS, identity: Identity = IDENTITY) -> Loading:
        return store.open_chunk(identity, tokens, self.form())

    def same(self, found: Sequence[LayerKV], expected: Sequence[LayerKV]) -> bool:
        pairs = [
            pair
            for one, other in zip(found, expected, strict=True)
            for pair in zip(one.parts, other.parts, strict=True)
        ]
        return all(torch.equal(one, other) and one.dtype == other.dtype for one, other in pairs)

    def served(self, loading: Loading, seed: int = 0) -> bool:
        """Whether all of the chunk came, to the bit."""
        return loading.wait() and self.same(loading.layers(), self.layers(loading.address.tokens, seed=seed))

    def until(self, true: Callable[[], bool]) -> None:
        until(true)

    def count(self, store: Store, name: str, **labels: str) -> float:
        """What a counter or gauge of the store says."""
        series = store.metrics.snapshot()[f"kvilt_store_{name}"]["series"]
        return sum(one["value"] for one in series if labels.items() <= one["labels"].items())

    def refused(self, store: Store, tier: str, reason: str) -> bool:
        """One lookup is a miss for this reason, and it is counted."""
        before = self.count(store, "misses_total", reason=reason), self.count(store, "refused_total", reason=reason)
        loading = self.open(store)
        missed = not loading.wait() and loading.reason == reason
        after = (
            self.count(store, "misses_total", reason=reason),
            self.count(store, "refused_total", tier=tier, reason=reason),
        )
        store.flush()
        assert missed, f"the lookup ended with {loading.reason!r}"
        return after == (before[0] + 1, before[1] + 1)


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit()


class Server:
    """A real Redis on a loopback port, without files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = _free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
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
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            self._open += [client, server]
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
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
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
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.decode().strip()}")
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
