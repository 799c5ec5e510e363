"""kvilt: an LLM runtime in which the KV cache is a value you hold.

Names are loaded when first used, so that `import kvilt` and `kvilt --help` stay quick.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import errors as errors
    from .compat.async_executor import AsyncLlmExecutor as AsyncLlmExecutor
    from .compat.exchange import CacheHandle as CacheHandle
    from .compat.exchange import DecodeInput as DecodeInput
    from .compat.exchange import LlmRuntimeConfig as LlmRuntimeConfig
    from .compat.exchange import ModelInfo as ModelInfo
    from .compat.exchange import PrefillInput as PrefillInput
    from .compat.exchange import UnifiedBatch as UnifiedBatch
    from .compat.exchange import UnifiedItem as UnifiedItem
    from .compat.interfaces import DecoderOnlyLLM as DecoderOnlyLLM
    from .compat.interfaces import KVCacheInterface as KVCacheInterface
    from .compat.interfaces import LlmExecutorBaseInterface as LlmExecutorBaseInterface
    from .compat.interfaces import LlmExecutorExternalSamplerInterface as LlmExecutorExternalSamplerInterface
    from .compat.interfaces import LlmExecutorInternalSamplerInterface as LlmExecutorInternalSamplerInterface
    from .compat.interfaces import ModelExecutorInterface as ModelExecutorInterface
    from .compat.llm_executor import LlmExecutor as LlmExecutor
    from .compat.paged_llm import PagedLLM as PagedLLM
    from .executor.inputs import Inputs as Inputs
    from .executor.protocol import Executor as Executor
    from .kv.cache import KVCache as KVCache
    from .llm import LLM as LLM
    from .llm import AsyncLLM as AsyncLLM
    from .llm import Completion as Completion
    from .llm import Conversation as Conversation
    from .llm import load as load
    from .llm import load_async as load_async
    from .sampling.params import SamplingParams as SamplingParams
    from .weights.assets import ModelAssets as ModelAssets

__version__ = "0.1.0"

_HOMES = MappingProxyType(
    {
        "load": "llm",
        "load_async": "llm",
        "AsyncLLM": "llm",
        "LLM": "llm",
        "Completion": "llm",
        "Conversation": "llm",
        "Executor": "executor.protocol",
        "Inputs": "executor.inputs",
        "LlmExecutor": "compat.llm_executor",
        "AsyncLlmExecutor": "compat.async_executor",
        "PagedLLM": "compat.paged_llm",
        "CacheHandle": "compat.exchange",
        "DecodeInput": "compat.exchange",
        "LlmRuntimeConfig": "compat.exchange",
        "ModelInfo": "compat.exchange",
        "PrefillInput": "compat.exchange",
        "UnifiedBatch": "compat.exchange",
        "UnifiedItem": "compat.exchange",
        "DecoderOnlyLLM": "compat.interfaces",
        "KVCacheInterface": "compat.interfaces",
        "LlmExecutorBaseInterface": "compat.interfaces",
        "LlmExecutorExternalSamplerInterface": "compat.interfaces",
        "LlmExecutorInternalSamplerInterface": "compat.interfaces",
        "ModelExecutorInterface": "compat.interfaces",
        "ModelAssets": "weights.assets",
        "KVCache": "kv.cache",
        "SamplingParams": "sampling.params",
    }
)
__all__ = [
    "LLM",
    "AsyncLLM",
    "AsyncLlmExecutor",
    "CacheHandle",
    "Completion",
    "Conversation",
    "DecodeInput",
    "DecoderOnlyLLM",
    "Executor",
    "Inputs",
    "KVCache",
    "KVCacheInterface",
    "LlmExecutor",
    "LlmExecutorBaseInterface",
    "LlmExecutorExternalSamplerInterface",
    "LlmExecutorInternalSamplerInterface",
    "LlmRuntimeConfig",
    "ModelAssets",
    "ModelExecutorInterface",
    "ModelInfo",
    "PagedLLM",
    "PrefillInput",
    "SamplingParams",
    "UnifiedBatch",
    "UnifiedItem",
    "errors",
    "load",
    "load_async",
]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module(".errors", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
