"""kvilt: an LLM runtime in which the KV cache is a value you hold.

Names are loaded when first used, so that `import kvilt` and `kvilt --help` stay quick.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import errors as errors
    from .compat.llm_executor import DecoderOnlyLLM as DecoderOnlyLLM
    from .compat.llm_executor import LlmExecutor as LlmExecutor
    from .executor.inputs import Inputs as Inputs
    from .executor.protocol import Executor as Executor
    from .kv.cache import KVCache as KVCache
    from .llm import LLM as LLM
    from .llm import AsyncLLM as AsyncLLM
    from .llm import Completion as Completion
    from .llm import load as load
    from .llm import load_async as load_async
    from .sampling.params import SamplingParams as SamplingParams

__version__ = "0.1.0"

_HOMES = MappingProxyType(
    {
        "load": "llm",
        "load_async": "llm",
        "AsyncLLM": "llm",
        "LLM": "llm",
        "Completion": "llm",
        "Executor": "executor.protocol",
        "Inputs": "executor.inputs",
        "LlmExecutor": "compat.llm_executor",
        "DecoderOnlyLLM": "compat.llm_executor",
        "KVCache": "kv.cache",
        "SamplingParams": "sampling.params",
    }
)
__all__ = [
    "LLM",
    "AsyncLLM",
    "Completion",
    "DecoderOnlyLLM",
    "Executor",
    "Inputs",
    "KVCache",
    "LlmExecutor",
    "SamplingParams",
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
