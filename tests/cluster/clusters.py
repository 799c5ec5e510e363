"""A door over two real servers on loopback, all in this process, for the tests of clusters."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
from running import KEY, Running, running
from tiny import write_tiny

from kvilt.cluster.cluster_key import ClusterKey
from kvilt.cluster.door import Door
from kvilt.cluster.exchange import Exchange
from kvilt.cluster.listener import DoorServer
from kvilt.cluster.replica import version_of
from kvilt.cluster.replica_set import ReplicaInfo
from kvilt.cluster.router import Router, RouterConfig
from kvilt.config import EngineConfig, RunConfig
from kvilt.executor.load import load_executor
from kvilt.server.config import ServeConfig
from kvilt.server.kv_events.publisher import KVEventPublisher
from kvilt.store.store import Store
from kvilt.text.tokenizer import Tokenizer

OTHER, ADMIN = "sk-other-0123456789", "sk-admin-0123456789"
CLUSTER_KEY = ClusterKey.new()
KEYS = {"api_keys": (KEY, OTHER), "admin_key": ADMIN, "names": ("tiny",), "port": 0}


@dataclass
class Cluster:
    """A door with replicas in this process."""

    door: Door
    server: DoorServer
    loop: asyncio.AbstractEventLoop
    replicas: dict[str, Running] = field(default_factory=dict)
    infos: dict[str, ReplicaInfo] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)  # replicas that do not announce themselves now

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    def http(self, key: str = KEY) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120, headers={"authorization": f"Bearer {key}"})

    def openai(self, key: str = KEY) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120)

    def until(self, true: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not true():
            assert time.monotonic() < end
            time.sleep(0.005)

    def lose(self, name: str) -> None:
        """The door loses a replica, as it does when the process dies."""
        self.silent.add(name)
        time.sleep(0.15)  # an announcement may be on its way
        self.loop.call_soon_threadsafe(self.door.replicas.lost, name, "the test says so")
        self.until(lambda: self.door.replicas.get(name) is None)

    def find_again(self, name: str) -> None:
        """A lost replica comes back."""
        self.silent.discard(name)
        self.until(lambda: self.door.replicas.get(name) is not None)

    def hits(self) -> dict[str, int]:
        return {name: one.llm.executor.prefixes.saved_tokens for name, one in self.replicas.items()}

    def settled(self) -> None:
        """Wait until the door knows all that the replicas have."""
        self.until(
            lambda: all(
                self.door.router.known(name) == len(one.llm.executor.prefixes) for name, one in self.replicas.items()
            )
        )


@contextmanager
def cluster_of_two(
    tokenizer: Tokenizer, folder: Path, store: Callable[[], Store] | None = None, **more: Any
) -> Iterator[Cluster]:
    """Two replicas of a tiny model in a folder, behind a door; `more` are settings of the servers.

    `store` opens the store of each of them, which they share.
    """
    model = write_tiny(folder / "model", vocab_size=tokenizer.vocab_size, max_position_embeddings=1024)
    with ExitStack() as stack:
        cluster = stack.enter_context(opened_door(tokenizer))
        for name in ("a", "b"):
            if store is not None:
                kept = stack.enter_context(store())
                more = {**more, "store": kept, "engine": EngineConfig(shared_notes=True)}
            stack.enter_context(joined(cluster, name, model, tokenizer, kv_dir=folder / f"kv {name}", **more))
        cluster.until(lambda: len(cluster.door.replicas) == 2)
        yield cluster


@contextmanager
def joined(cluster: Cluster, name: str, model: Path, tokenizer: Tokenizer, **more: Any) -> Iterator[ReplicaInfo]:
    """One replica that announces itself to the door of a cluster."""
    with ExitStack() as stack:
        executor = load_executor(model, RunConfig(kv_memory=1 << 22, backend="native", threads=1))
        server = stack.enter_context(running(executor, tokenizer, **{**KEYS, **more}))
        size = executor.layout.page_tokens
        published = stack.enter_context(KVEventPublisher(executor.prefixes, size, "tcp://127.0.0.1:*"))
        info = stack.enter_context(exchanging(name, server, published))
        cluster.replicas[name], cluster.infos[name] = server, info
        stack.enter_context(announcing(cluster, info))
        yield info


@contextmanager
def opened_door(tokenizer: Tokenizer, **router: Any) -> Iterator[Cluster]:
    box: list[Cluster] = []

    async def life() -> None:
        door = Door(ServeConfig(**KEYS), Router(RouterConfig(**router)), tokenizer, CLUSTER_KEY)
        server = DoorServer(door)
        task = asyncio.ensure_future(server.run_door())
        while not server.started:
            await asyncio.sleep(0.005)
        box.append(Cluster(door, server, asyncio.get_running_loop()))
        await task

    thread = threading.Thread(target=lambda: asyncio.run(life()), daemon=True)
    thread.start()
    while not box:
        time.sleep(0.005)
    yield box[0]
    asyncio.run_coroutine_threadsafe(box[0].server.end(), box[0].loop)
    thread.join(60)
    assert not thread.is_alive()


@contextmanager
def exchanging(name: str, server: Running, published: KVEventPublisher) -> Iterator[ReplicaInfo]:
    """The exchange of a replica, in the event loop of its server."""
    executor = server.llm.executor
    size = executor.layout.page_tokens
    exchange = Exchange(server.service, CLUSTER_KEY)
    asyncio.run_coroutine_threadsafe(exchange.start(), server.loop).result(60)
    yield ReplicaInfo(
        name,
        server.url,
        published.endpoint,
        published.replay,
        size,
        1,
        exchange=exchange.url,
        version=version_of(executor),
        token_bytes=executor.layout.page_bytes / size,
    )
    asyncio.run_coroutine_threadsafe(exchange.stop(), server.loop).result(60)


@contextmanager
def announcing(cluster: Cluster, info: ReplicaInfo) -> Iterator[None]:
    ending = threading.Event()

    def run() -> None:
        while not ending.wait(0.1):
            if info.name in cluster.silent:
                continue
            cluster.loop.call_soon_threadsafe(cluster.door.replicas.announce, info)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    ending.set()
    thread.join()
