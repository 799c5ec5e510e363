"""A real server on loopback, in a thread of its own, over a tiny model that others may share."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import anthropic
import httpx
import ollama
import openai

from kvilt import AsyncLLM
from kvilt.config import EngineConfig, GateConfig
from kvilt.executor.protocol import Executor
from kvilt.server.config import ServeConfig
from kvilt.server.listener import HTTPServer
from kvilt.server.openai import chat
from kvilt.server.service import Service
from kvilt.store.store import Store
from kvilt.text.tokenizer import Tokenizer

PATIENCE = 60.0  # a machine that is busy elsewhere is no reason to refuse work: no test depends on speed
KEY = "sk-test-0123456789"
QUESTION = [{"role": "user", "content": "What is the capital of Germany?"}]


@dataclass
class Running:
    """A server, and the way in and under it."""

    listener: HTTPServer
    loop: asyncio.AbstractEventLoop
    clients: list[Any] = field(default_factory=list)
    talking: dict[str, openai.OpenAI] = field(default_factory=dict)
    ahead_s: float = 0.0  # of the real clock, for all timers of the event loop

    def __post_init__(self) -> None:
        honest = self.loop.time
        self.loop.time = lambda: honest() + self.ahead_s  # type: ignore[method-assign]

    @property
    def service(self) -> Service:
        return self.listener.service

    @property
    def llm(self) -> AsyncLLM:
        return self.service.llm

    @property
    def port(self) -> int:
        return self.listener.port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def http(self, **options: Any) -> httpx.Client:
        return self._closed(httpx.Client(base_url=self.url, **{"timeout": 300, **options}))

    def openai(self, api_key: str = KEY) -> openai.OpenAI:
        if api_key not in self.talking:
            made = openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=300)
            self.talking[api_key] = self._closed(made)
        return self.talking[api_key]

    def async_openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=300)

    def anthropic(self, api_key: str = KEY) -> anthropic.Anthropic:
        return self._closed(anthropic.Anthropic(base_url=self.url, api_key=api_key, max_retries=0, timeout=300))

    def ollama(self) -> ollama.Client:
        return self._closed(ollama.Client(host=self.url, headers={"authorization": f"Bearer {KEY}"}, timeout=300))

    def _closed(self, client: Any) -> Any:
        """A client that ends with the server."""
        self.clients.append(client)
        return client

    @contextmanager
    def asking(self, path: str, body: dict[str, Any], key: str = KEY) -> Iterator[socket.socket]:
        """A client that has sent its request, reads when the test says so, and hangs up at the end of the block."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head += f"authorization: Bearer {key}\r\n"
        with closing(socket.create_connection(("127.0.0.1", self.port), timeout=300)) as one:
            one.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
            yield one

    def elapse(self, seconds: float) -> None:
        """Let this much time pass for the server: its timers are due, and no test waits for them."""

        def jump() -> None:
            self.ahead_s += seconds

        self.loop.call_soon_threadsafe(jump)

    def end(self) -> None:
        """What a signal would do."""
        self.loop.call_soon_threadsafe(self.listener.end)


@contextmanager
def running(
    executor: Executor,
    tokenizer: Tokenizer,
    engine: EngineConfig | None = None,
    gate: GateConfig | None = None,
    store: Store | None = None,
    **settings: Any,
) -> Iterator[Running]:
    """A server for the length of a block; the executor outlives it."""
    box: list[Running] = []
    ready = threading.Event()
    config = ServeConfig(**{"port": 0, "names": ("tiny",), "grace_s": 20.0, **settings})

    async def life() -> None:
        llm = AsyncLLM(executor, tokenizer, config=engine, gate=gate, store=store)
        llm.offload.patience = PATIENCE
        try:
            listener = HTTPServer(Service(llm, config))
            box.append(Running(listener, asyncio.get_running_loop()))
            serving = asyncio.ensure_future(listener.serve())
            while not listener.started and not serving.done():
                await asyncio.sleep(0.005)
            ready.set()
            await serving
        finally:
            llm._driver.close()
            llm.sessions.close()
            llm._handles.close()
            if llm.response_notes is not None:
                llm.response_notes.close()

    thread = threading.Thread(target=lambda: asyncio.run(life()), name="server", daemon=True)
    thread.start()
    assert ready.wait(300)
    server = box[0]
    try:
        yield server
    finally:
        for client in server.clients:
            client.close()
        if thread.is_alive():
            server.end()
        thread.join(300)
        assert not thread.is_alive()


def say(monkeypatch: Any, text: str) -> None:
    """Make every chat answer this text: the tiny model never calls tools or reasons of its own will."""
    honest = chat.sampling_params
    monkeypatch.setattr(chat, "sampling_params", lambda *given, **more: honest(*given, **more, choice=[text]))


def until(condition: Callable[[], bool], what: str = "it", most_s: float = 300.0) -> None:
    """Wait for something that is about to happen."""
    done = threading.Event()
    for _ in range(int(most_s / 0.005)):
        if condition():
            return
        done.wait(0.005)
    raise AssertionError(f"{what} did not happen")
