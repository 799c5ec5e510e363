"""Interfaces that others may implement: a KV cache, executors around it, and a decoder-only model.

Plain protocols: a class with these methods implements them, whether it derives from them or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

from ..executor.inputs import InputsLike
from ..weights.assets import AssetsLike
from .exchange import (
    CacheHandle,
    DecodeInput,
    DecodeOutput,
    ExecutorCapabilities,
    ExecutorStatus,
    LlmRuntimeConfig,
    PrefillInput,
    PrefillOutput,
    UnifiedBatch,
)


@runtime_checkable
class KVCacheInterface(Protocol):
    """All keys and values of a batch of sequences. `kvilt.KVCache` implements it."""

    @property
    def num_entries(self) -> int:
        """Entries held per layer: of several rows, those of the longest."""
        ...

    @property
    def batch_size(self) -> int:
        """Rows."""
        ...

    def serialize(self) -> bytes:
        """The whole cache as bytes."""
        ...

    def load(self, data: bytes) -> None:
        """Become what `data` holds, or raise and stay as it was."""
        ...

    def select_and_copy_from(self, other: Self, batch_index: int) -> None:
        """Row `batch_index` of `other` becomes the one row of this cache."""
        ...

    def broadcast_and_copy_from(self, other: Self) -> None:
        """The one row of `other` becomes every row of this cache."""
        ...

    def deep_copy(self) -> Self:
        """The same content in memory of its own."""
        ...


CacheT = TypeVar("CacheT", bound=KVCacheInterface)


@runtime_checkable
class LlmExecutorBaseInterface(Protocol[CacheT]):
    """What every executor does. It remembers no sequence: all of that is in the caches of its own kind `CacheT`."""

    def create_kv_cache(self) -> CacheT:
        """An empty cache that fits this executor's model."""
        ...

    def prefill(self, inputs: InputsLike, kv: CacheT, lora_id: int | None = None) -> None:
        """Extend the cache by the input."""
        ...

    def load_lora(self, assets: AssetsLike) -> int:
        """Load an adapter and return its id."""
        ...

    def unload_lora(self, lora_id: int) -> None:
        """Unload an adapter."""
        ...

    def cancel(self) -> None:
        """Stop what is in progress, as far as possible; does nothing when nothing is."""
        ...


@runtime_checkable
class LlmExecutorExternalSamplerInterface(LlmExecutorBaseInterface[CacheT], Protocol[CacheT]):
    """An executor whose caller samples."""

    def step(self, inputs: InputsLike, kv: CacheT, lora_id: int | None = None) -> Any:
        """One decode step: extend the cache by the input, and return logits [batch, vocab] after it."""
        ...


@runtime_checkable
class LlmExecutorInternalSamplerInterface(LlmExecutorBaseInterface[CacheT], Protocol[CacheT]):
    """An executor that samples itself."""

    def sample_tokens(
        self, num_steps: int, inputs: InputsLike, kv: CacheT, lora_id: int | None = None
    ) -> Sequence[Sequence[int]]:
        """Up to `num_steps` decode steps back to back; the sampled ids of each row."""
        ...


class DecoderSteps(Protocol):
    """What a decoder-only model must have; the rest of `DecoderOnlyLLM` has defaults."""

    def config(self) -> LlmRuntimeConfig:
        """Sizes that the surroundings of the model need."""
        ...

    def prefill(self, cache_id: str, tokens: Sequence[int]) -> Any:
        """Begin the sequence `cache_id` with a prompt; logits [vocab] for its last token."""
        ...

    def decode(self, cache_id: str, token: int, pos: int) -> Any:
        """Advance a sequence by one token, which stands at `pos`; logits [vocab] for the next one."""
        ...

    def release(self, cache_id: str) -> None:
        """Free the cache of a sequence; an unknown id is fine."""
        ...


@runtime_checkable
class DecoderOnlyLLM(DecoderSteps, Protocol):
    """A decoder-only model that keeps its caches by id. Logits are a tensor, or any sequence of `vocab` numbers.

    A class that derives from it inherits `decode_batch` and `reset`, and may override them. `LlmExecutor` stands over
    classes without them as well, and over those that also have `unified_forward(batch)` or `truncate(cache_id, length)`
    it uses these.
    """

    def decode_batch(self, batch: Sequence[tuple[str, int, int]]) -> list[Any]:
        """Advance several sequences, each by (cache_id, token, pos); logits in the same order. Here one by one."""
        return [self.decode(cache_id, token, pos) for cache_id, token, pos in batch]

    def reset(self) -> None:
        """Drop all cached state; a model that keeps none beyond `release` need not do anything."""
        return


@runtime_checkable
class ModelExecutorInterface(Protocol):
    """The executor that a scheduler calls. `kvilt.AsyncLlmExecutor` implements it."""

    async def prefill(self, prompt: PrefillInput) -> PrefillOutput: ...

    async def batch_prefill(self, inputs: Sequence[PrefillInput]) -> list[PrefillOutput]: ...

    async def decode(self, token: DecodeInput) -> DecodeOutput: ...

    async def batch_decode(self, inputs: Sequence[DecodeInput]) -> list[DecodeOutput]: ...

    async def unified_decode(self, batch: UnifiedBatch) -> Sequence[Any]: ...

    async def forward_verify(self, inputs: Sequence[DecodeInput]) -> list[DecodeOutput]: ...

    async def truncate_kv(self, kv_cache: CacheHandle, new_len: int) -> CacheHandle: ...

    def release_cache(self, cache_id: str) -> None: ...

    def kv_capacity(self) -> int | None: ...

    def capabilities(self) -> ExecutorCapabilities: ...

    def status(self) -> ExecutorStatus: ...

    def cache_metrics_snapshot(self) -> dict[str, Any] | None: ...

    def lora_metrics_snapshot(self) -> dict[str, Any] | None: ...
