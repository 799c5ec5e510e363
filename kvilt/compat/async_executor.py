"""The executor of a scheduler on an event loop: the same methods, awaited, and cancelled with their tasks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from torch import Tensor

from ..batch import Batch, Logits
from ..executor.protocol import Executor
from .exchange import (
    CacheHandle,
    DecodeInput,
    DecodeOutput,
    ExecutorCapabilities,
    ExecutorStatus,
    ModelInfo,
    PrefillInput,
    PrefillOutput,
    UnifiedBatch,
)
from .interfaces import DecoderSteps
from .llm_executor import LlmExecutor

T = TypeVar("T")


class AsyncLlmExecutor:
    """`LlmExecutor` for one event loop. `sync` has the same caches, for threads without one.

    Calls run in turn, in a thread. A task that is cancelled stops its own call, waiting or running, and no other: a
    step stops before its next layer, its caches keep their lengths, and `CancelledError` comes once that is so.
    """

    def __init__(self, model: DecoderSteps | Executor | LlmExecutor, info: ModelInfo | None = None) -> None:
        self.sync = model if isinstance(model, LlmExecutor) else LlmExecutor(model, info)
        self._turn = asyncio.Lock()
        self._releases: deque[str] = deque()

    def info(self) -> ModelInfo:
        """What the model is."""
        return self.sync.info()

    async def prefill(self, prompt: PrefillInput) -> PrefillOutput:
        """`batch_prefill` of one."""
        return await self._run(lambda: self.sync.prefill(prompt))

    async def batch_prefill(self, inputs: Sequence[PrefillInput]) -> list[PrefillOutput]:
        """All prompts in one ragged forward."""
        return await self._run(lambda: self.sync.batch_prefill(inputs))

    async def decode(self, token: DecodeInput) -> DecodeOutput:
        """`batch_decode` of one."""
        return await self._run(lambda: self.sync.decode(token))

    async def batch_decode(self, inputs: Sequence[DecodeInput]) -> list[DecodeOutput]:
        """One token for each of these caches in one forward."""
        return await self._run(lambda: self.sync.batch_decode(inputs))

    async def forward_verify(self, inputs: Sequence[DecodeInput]) -> list[DecodeOutput]:
        """N+1 tokens in one forward, one row of logits per token."""
        return await self._run(lambda: self.sync.forward_verify(inputs))

    async def unified_decode(self, batch: UnifiedBatch) -> list[Tensor | None]:
        """Prefill chunks and decodes mixed in one forward."""
        return await self._run(lambda: self.sync.unified_decode(batch))

    async def truncate_kv(self, kv_cache: CacheHandle, new_len: int) -> CacheHandle:
        """Roll a cache back, if the handle says its length."""
        return await self._run(lambda: self.sync.truncate_kv(kv_cache, new_len))

    async def forward(self, batch: Batch) -> Logits:
        """The primitive: `Executor.run`."""
        return await self._run(lambda: self.sync.forward(batch))

    # What the seed has without a future, because it waits for nothing.

    def truncate_kv_for_cache_id(self, cache_id: str, new_len: int) -> None:
        """Roll the cache of that id back; waits for the step in progress, which `truncate_kv` does without blocking."""
        self.sync.truncate_kv_for_cache_id(cache_id, new_len)

    def release_cache(self, cache_id: str) -> None:
        """Close a cache: at once, or after the step in progress, and before any call that is made later."""
        self._releases.append(cache_id)
        if not self._turn.locked():
            self._release_all()

    def kv_capacity(self) -> int | None:
        """Tokens a new cache could hold now."""
        return self.sync.kv_capacity()

    def capabilities(self) -> ExecutorCapabilities:
        """What is true of the executor now."""
        return self.sync.capabilities()

    def status(self) -> ExecutorStatus:
        """What the executor is doing now."""
        return self.sync.status()

    def cache_metrics_snapshot(self) -> dict[str, Any] | None:
        """Prompts with a reused beginning, and where the pages are."""
        return self.sync.cache_metrics_snapshot()

    def lora_metrics_snapshot(self) -> dict[str, Any] | None:
        """Adapters, and the rows each has served."""
        return self.sync.lora_metrics_snapshot()

    async def _run(self, work: Callable[[], T]) -> T:
        """`work` in a thread, when it is its turn; stopped if this task is cancelled."""
        async with self._turn:
            self._release_all()
            call = self.sync.call()

            def run() -> T:
                with self.sync.table.lock, call:
                    return work()

            running = asyncio.get_running_loop().run_in_executor(None, run)
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                call.cancel()
                while not running.done():  # until it has stopped, its caches are in use
                    with suppress(asyncio.CancelledError):
                        await asyncio.wait([running])
                running.exception()  # looked at, so that asyncio does not report it
                raise
            finally:
                self._release_all()

    def _release_all(self) -> None:
        while self._releases:
            self.sync.release_cache(self._releases.popleft())
