"""What a scheduler and an executor tell each other: prompts, tokens, mixed batches, and their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
    lora_id: int | None = None  # None: the base model
    lora_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class PrefillOutput:
    """Logits after the last prompt token."""

    logits: Tensor  # [vocab] float32
    cache: CacheHandle


@dataclass(frozen=True, slots=True)
class DecodeInput:
    """One token for the next place of a cache, with the adapter and scale that its KV was made with."""

    cache_id: str
    token: int
    lora_id: int | None = None
    lora_scale: float = 1.0


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
    lora_id: int | None = None
    lora_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class UnifiedBatch:
    """Prefill chunks and decodes for one forward."""

    items: Sequence[UnifiedItem]


@dataclass(frozen=True, slots=True)
class ExecutorCapabilities:
    """What this executor can do, read off what it is. Of a closed one, what it was, and that it can do nothing."""

    family: str
    backend: str
    numerics: str
    device: str
    kv_dtype: str  # of the first layer group; of all: `kv_dtypes`
    max_context: int
    page_tokens: int
    layer_groups: tuple[str, ...]
    max_rows: int  # sequences that the pool can hold
    expanded_formats: tuple[str, ...] = ()  # of the weights' file, held as float32: the backend has no kernels for them
    weight_kernels: tuple[str, ...] = ()  # "Q4_0: q4 tiles": what multiplies weights of each format of the file
    devices: tuple[str, ...] = ()  # all that it computes on
    kv_dtypes: tuple[str, ...] = ()  # of each layer group
    lora: bool = False  # rows may have adapters
    drafts: bool = False  # several tokens of a sequence are verified in one forward
    blending: bool = False  # stored documents may be blended into prompts
    deterministic: bool = False  # a row's bits do not depend on its batch, or on how its prompt was cut into chunks
    closed: bool = False
    notes: tuple[str, ...] = ()  # what works, but slower than it could


@dataclass(frozen=True, slots=True)
class ExecutorStatus:
    """How an executor is doing now."""

    busy: bool
    caches: int
    tokens: int
    pages_used: int
    pages_free: int
    pages_total: int
    closed: bool = False  # nothing runs any more


@dataclass(frozen=True, slots=True)
class LlmRuntimeConfig:
    """What the surroundings of a model need to know: sizes, nothing about its insides."""

    hidden_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a model is, beside what its surroundings need to run it: for lists of models, and for a scheduler."""

    model_id: str
    model_type: str  # the family
    hidden_size: int
    num_layers: int
    num_kv_heads: int
    vocab_size: int
    max_sequence_length: int
    num_heads: int | None = None
    num_parameters: int | None = None
    dtype: str = "float32"
    device: str = "cpu"
    version: str | None = None
    license: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_config(cls, model_id: str, config: LlmRuntimeConfig, model_type: str = "decoder") -> ModelInfo:
        """What a model's own configuration says."""
        return cls(
            model_id=model_id,
            model_type=model_type,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            vocab_size=config.vocab_size,
            max_sequence_length=config.max_seq_len,
        )
