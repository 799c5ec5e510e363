"""What all routes share: the model, the configuration, and the count of requests in progress."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from starlette.requests import Request

from ..errors import AdapterUnknown
from ..kv.owner import owner_of
from ..llm import AsyncLLM
from ..metrics import Metrics
from .anthropic.diagnostics import CacheDiagnostics
from .auth import Caller
from .chats.store import ChatStore
from .config import ServeConfig
from .documents.pdf import PDFReaders
from .http.body import MemoryTrimmer
from .http.errors import HTTPError
from .kv.handles import sweep_saved
from .kv.pins import PrefixPins
from .kv.state import ThrottledSnapshots, kv_state_json
from .metrics import OFFLOAD_RUNNING, OFFLOAD_WAITING, SERVER_METRICS, EventLoopMonitor, prometheus_text
from .responses.store import ResponseStore
from .sessions.stable_prompts import StablePrompts


class Service:
    """One model behind HTTP."""

    def __init__(self, llm: AsyncLLM, config: ServeConfig) -> None:
        self.llm = llm
        self.config = config
        self.created_s = int(time.time())
        self.parser = llm.parser
        self.parser_markers = self.parser.special_markers(llm.tokenizer.special)
        self.metrics = Metrics(SERVER_METRICS)
        self.loop_monitor = EventLoopMonitor(self.metrics)
        self.memory_trimmer = MemoryTrimmer(llm.offload)
        self.pins = PrefixPins(llm)
        self.diagnostics = CacheDiagnostics()
        self.stable_prompts = StablePrompts(config.stable_prompts)
        self.chats = ChatStore(config.chats_dir, config.max_chats, config.max_chats_bytes)
        self.pdf = PDFReaders()
        self.responses = ResponseStore(llm, config.max_responses)
        self.draining = False
        self._in_progress = 0
        self._saving: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.snapshots = ThrottledSnapshots(partial(kv_state_json, llm), offload=llm.offload)
        sweep_saved(config)
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def model(self) -> str:
        """The model's name."""
        return self.config.names[0]

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: it changes when the same seed may give other tokens."""
        identity = self.llm.executor.pool.identity()
        return "fp_" + hashlib.sha256(f"{identity.model} {identity.numerics}".encode()).hexdigest()[:12]

    def check_model(self, name: str | None) -> str | None:
        """The adapter that a model name stands for; None is the model itself. Other names are refused."""
        if name is None or (meant := self.config.resolve(name)) in self.config.names:
            return None
        try:
            return self.llm.executor.adapters.find(meant).name
        except AdapterUnknown:
            raise HTTPError(
                404,
                f"this server has no model {name[:64]!r}; it has {self.model!r}",
                param="model",
                code="model_not_found",
            ) from None

    def check_new_name(self, name: str) -> None:
        """Refuse to load an adapter under the name of the model: requests could not tell the two apart."""
        if name in self.config.names:
            raise HTTPError(
                400, f"lora_name: {name[:64]!r} is the model's own name", param="lora_name", code="bad_name"
            )

    def saving(self, caller: Caller) -> asyncio.Lock:
        """A lock for saving files, one for each key. It makes the count of saved files exact."""
        return self._saving.setdefault(owner_of(caller.tenant), asyncio.Lock())

    def exposition(self) -> str:
        """All metrics, of all keys together, in the Prometheus text format."""
        self.loop_monitor.publish()
        for kind, (running, waiting) in self.llm.offload.load().items():
            self.metrics.set(OFFLOAD_RUNNING, running, kind=kind)
            self.metrics.set(OFFLOAD_WAITING, waiting, kind=kind)
        counted = [self.llm.engine.metrics, self.llm.executor.metrics, self.metrics]
        if (documents := self.llm.documents.metrics) is not None:
            counted.append(documents)
        return "".join(prometheus_text(one, self.model) for one in counted)

    @contextmanager
    def in_progress(self) -> Iterator[None]:
        """Count a request as in progress."""
        self._in_progress += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._in_progress -= 1
            if self._in_progress == 0:
                self._idle.set()

    @property
    def running(self) -> int:
        """How many requests are in progress."""
        return self._in_progress

    async def idle(self, timeout_s: float) -> bool:
        """Wait until no request is in progress; False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


def service_of(request: Request) -> Service:
    """The service behind a request."""
    service: Service = request.app.state.service
    return service


def caller_of(request: Request) -> Caller:
    """The caller, as the middleware authenticated it."""
    caller: Caller = request.scope["kvilt.caller"]
    return caller


def new_id(kind: str) -> str:
    """A fresh id in the form that clients know: a prefix and a random part."""
    return f"{kind}-{secrets.token_hex(16)}"


def answer_header(service: Service, kind: str, name: str, lora: str | None = None) -> dict[str, Any]:
    """The fields that every answer begins with."""
    return {
        "id": name,
        "object": kind,
        "created": int(time.time()),
        "model": lora or service.model,
        "system_fingerprint": service.fingerprint,
    }
