"""What a scheduler and an executor tell each other: prompts, tokens, mixed batches, and their answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class CacheHandle:
    """A cache by name, with the length its holder believes it has."""

    cache_id: str
    length: int


@dataclass(frozen=True, slots=True)
class PrefillInput:
    """A whole prompt for one cache. What the cache already holds of its beginning is not computed again."""

    cache_id: str
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class PrefillOutput:
    """Logits after the last prompt token."""

    logits: Tensor  # [vocab] float32
    cache: CacheHandle


@dataclass(frozen=True, slots=True)
class DecodeInput:
    """One token for the next place of a cache."""

    cache_id: str
    token: int


@dataclass(frozen=True, slots=True)
class DecodeOutput:
    """Logits after that token."""

    logits: Tensor  # [vocab] float32
    cache: CacheHandle


@dataclass(frozen=True, slots=True)
class UnifiedItem:
    """A chunk of a prompt, or a decode of one token, at a given place of a cache."""

    cache_id: str
    tokens: Sequence[int]
    position: int  # of the first token; must be the cache's length
    is_final_chunk: bool = True  # only then logits come back


@dataclass(frozen=True, slots=True)
class UnifiedBatch:
    """Prefill chunks and decodes for one forward."""

    items: Sequence[UnifiedItem]


@dataclass(frozen=True, slots=True)
class ExecutorCapabilities:
    """What this executor can do, read off what it is."""

    family: str
    backend: str
    numerics: str
    device: str
    kv_dtype: str
    max_context: int
    page_tokens: int
    layer_groups: tuple[str, ...]
    max_rows: int  # sequences that the pool can hold
    expanded_formats: tuple[str, ...] = ()  # of the weights' file, held as float32: the backend has no kernels for them


@dataclass(frozen=True, slots=True)
class ExecutorStatus:
    """How an executor is doing now."""

    busy: bool
    caches: int
    tokens: int
    pages_used: int
    pages_free: int
    pages_total: int


@dataclass(frozen=True, slots=True)
class LlmRuntimeConfig:
    """What the surroundings of a model need to know: sizes, nothing about its insides."""

    hidden_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_seq_len: int
