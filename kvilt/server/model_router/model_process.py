"""A model in a server process of its own: how it is started, what it says when it listens, and how it is ended.

The process gets its configuration on its standard input, since other users see command lines, and ends when that
closes: no model outlives the server that started it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from ...errors import KviltError

_log = logging.getLogger(__name__)
_MAX_LINE = 1 << 20


@dataclass(frozen=True, slots=True)
class RoutedModel:
    """A model that the router can start."""

    names: tuple[str, ...]  # that requests may use; the first is shown
    source: str  # as the command line has it: smollm2, hf:org/name or a path
    path: Path  # of the file or folder
    context: int  # the longest sequence in tokens, as far as that is known before it is loaded
    sampling_defaults: Mapping[str, float]
    config: Mapping[str, Any]  # for the process

    @property
    def name(self) -> str:
        """The name that answers show."""
        return self.names[0]

    @property
    def file_bytes(self) -> int:
        """The size of the weights on disk."""
        files = [self.path] if self.path.is_file() else self.path.glob("*.safetensors")
        return sum(file.stat().st_size for file in files)


class ModelFailed(KviltError):
    """The process of a model ended before it served."""

    def __init__(self, message: str, lacks_memory: bool = False) -> None:
        super().__init__(message)
        self.lacks_memory = lacks_memory  # of a device: it may fit once another model has ended


@dataclass(frozen=True, slots=True)
class ModelReady:
    """What a process says once it listens."""

    url: str
    weight_bytes: int
    kv_bytes: int


class ModelProcess:
    """A process that serves one model."""

    def __init__(self, model: RoutedModel, process: asyncio.subprocess.Process, ready: ModelReady) -> None:
        self.model, self.ready = model, ready
        self.gone = asyncio.Event()  # it has ended, for whatever reason
        self._process = process
        self._watching = asyncio.ensure_future(self._watch())

    @property
    def memory_bytes(self) -> int:
        """What it takes of the machine's memory: its weights, and the pool of KV; nothing for what is on a GPU."""
        return self.ready.weight_bytes + self.ready.kv_bytes

    async def stop(self, grace_s: float) -> None:
        """End the process: requests in progress have `grace_s`."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(grace_s):
                await self.gone.wait()
        except TimeoutError:
            self.kill()
            await self.gone.wait()

    def kill(self) -> None:
        """End the process at once."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)

    async def _watch(self) -> None:
        try:
            status = await self._process.wait()
        finally:
            self.gone.set()
        if status:
            _log.error("the process of %s ended with status %d", self.model.name, status)


async def start_model(model: RoutedModel, module: str) -> ModelProcess:
    """Start `python -m module` for a model, and wait until it listens; an error of the process is raised here."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module), stdin=pipe, stdout=pipe, limit=_MAX_LINE, start_new_session=True
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        with suppress(ConnectionError):  # it has ended: what it said tells why
            process.stdin.write(orjson.dumps({"model": str(model.path), "names": model.names, **model.config}) + b"\n")
            await process.stdin.drain()
        ready = _read_ready(model, await process.stdout.readline())
    except BaseException:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    return ModelProcess(model, process, ready)


def _read_ready(model: RoutedModel, line: bytes) -> ModelReady:
    if not line:
        raise ModelFailed(f"the process of {model.name} ended while it loaded the model; its log says why")
    said = orjson.loads(line)
    if "error" in said:
        raise ModelFailed(f"{model.name} cannot be loaded: {said['error']}", said["lacks_memory"])
    return ModelReady(said["url"], said["weight_bytes"], said["kv_bytes"])
