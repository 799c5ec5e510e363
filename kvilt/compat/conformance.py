"""For the type checker alone: kvilt's own classes implement the interfaces that others may implement."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..executor.executor import ModelExecutor
    from ..executor.protocol import Executor
    from ..kv.cache import KVCache
    from .async_executor import AsyncLlmExecutor
    from .cache_table import CacheTable
    from .interfaces import (
        DecoderOnlyLLM,
        KVCacheInterface,
        LlmExecutorExternalSamplerInterface,
        LlmExecutorInternalSamplerInterface,
        ModelExecutorInterface,
    )
    from .model_table import ModelTable
    from .paged_llm import PagedLLM
    from .sequence_table import SequenceTable

    def cache(kv: KVCache) -> KVCacheInterface:
        return kv

    def protocol(executor: ModelExecutor) -> Executor:
        return executor

    def external(executor: Executor) -> LlmExecutorExternalSamplerInterface[KVCache]:
        return executor

    def internal(executor: Executor) -> LlmExecutorInternalSamplerInterface[KVCache]:
        return executor

    def model(paged: PagedLLM) -> DecoderOnlyLLM:
        return paged

    def scheduled(executor: AsyncLlmExecutor) -> ModelExecutorInterface:
        return executor

    def tables(paged: CacheTable, plain: ModelTable) -> tuple[SequenceTable, SequenceTable]:
        return paged, plain
