"""A router of several models on loopback, whose models are servers of this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx
import openai
from running import KEY, Running

from kvilt.server.config import ServeConfig
from kvilt.server.model_router.app import ModelRouter
from kvilt.server.model_router.listener import RouterServer
from kvilt.server.model_router.loaded_models import LoadedModels
from kvilt.server.model_router.model_process import ModelFailed, ModelProcess, ModelReady, RoutedModel

ADMIN = "sk-admin-0123456789"


class ServerInThread:
    """In place of a process: a server of this one."""

    def __init__(self, model: RoutedModel, server: Running) -> None:
        self.model = model
        self.ready = ModelReady(server.url, 1, 1)
        self.gone = asyncio.Event()
        self.memory_bytes = 2

    async def stop(self, grace_s: float) -> None:
        self.gone.set()

    def kill(self) -> None:
        self.gone.set()


@dataclass
class Routed:
    """A router, and the servers of its models."""

    server: RouterServer
    loop: asyncio.AbstractEventLoop
    models: dict[str, Running]
    started: list[str] = field(default_factory=list)
    processes: dict[str, ServerInThread] = field(default_factory=dict)
    failing: set[str] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    def http(self, key: str | None = KEY) -> httpx.Client:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, timeout=120, headers=headers)

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=120)


@contextmanager
def router_of(models: dict[str, Running], folder: Path, **settings: Any) -> Iterator[Routed]:
    box: list[Routed] = []
    ready = threading.Event()
    routed = []
    for name in models:
        (folder / name).write_bytes(b"weights")
        routed.append(RoutedModel((name,), name, folder / name, 1024, {"temperature": 0.2}, {}))
    config = ServeConfig(**{"port": 0, "names": tuple(models), **settings})

    async def start(model: RoutedModel) -> ModelProcess:
        if model.name in box[0].failing:
            raise ModelFailed(f"{model.name} cannot be loaded: its file is damaged")
        box[0].started.append(model.name)
        made = ServerInThread(model, models[model.name])
        box[0].processes[model.name] = made
        return cast(ModelProcess, made)

    async def life() -> None:
        async with ModelRouter(config, LoadedModels(routed, start, 1 << 30, lambda: 0, 5.0), ADMIN) as router:
            server = RouterServer(router)
            box.append(Routed(server, asyncio.get_running_loop(), models))
            serving = asyncio.ensure_future(server.serve())
            while not server.started and not serving.done():
                await asyncio.sleep(0.005)
            ready.set()
            await serving

    thread = threading.Thread(target=lambda: asyncio.run(life()), name="router", daemon=True)
    thread.start()
    assert ready.wait(300)
    try:
        yield box[0]
    finally:
        if thread.is_alive():
            box[0].loop.call_soon_threadsafe(box[0].server.end)
        thread.join(300)
        assert not thread.is_alive()
