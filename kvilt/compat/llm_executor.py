"""The executor as another scheduler or model trait calls it: caches by id, synchronous calls.

Thin: they own the map from id to cache, so that `Executor` stays stateless. The engine uses neither, it calls `run`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..batch import Batch, Logits
from ..errors import InputError
from ..executor.protocol import Executor
from .cache_table import CacheInput, CacheTable
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


class LlmExecutor:
    """The batched executor of a scheduler: prompts, decodes and their mixtures, one forward each."""

    def __init__(self, executor: Executor) -> None:
        self._table = CacheTable(executor)
        self._executor = executor

    def prefill(self, prompt: PrefillInput) -> PrefillOutput:
        """`batch_prefill` of one."""
        return self.batch_prefill([prompt])[0]

    def batch_prefill(self, inputs: Sequence[PrefillInput]) -> list[PrefillOutput]:
        """All prompts in one ragged forward."""
        if not inputs:
            return []
        logits = self._table.prefill([(one.cache_id, one.tokens) for one in inputs])
        return [
            PrefillOutput(row, CacheHandle(one.cache_id, len(one.tokens)))
            for one, row in zip(inputs, logits, strict=True)
        ]

    def decode(self, token: DecodeInput) -> DecodeOutput:
        """`batch_decode` of one."""
        return self.batch_decode([token])[0]

    def batch_decode(self, inputs: Sequence[DecodeInput]) -> list[DecodeOutput]:
        """One token for each of these caches, whatever their lengths, in one forward."""
        if not inputs:
            return []
        with self._table.lock:  # until the lengths are read, too
            logits = self._table.extend([CacheInput(one.cache_id, [one.token], 1) for one in inputs])
            return [self._decoded(one.cache_id, logits.of_row(row)[0], 0) for row, one in enumerate(inputs)]

    def forward_verify(self, inputs: Sequence[DecodeInput]) -> list[DecodeOutput]:
        """N+1 tokens in one forward, one row of logits per token; the tokens of a cache are consecutive."""
        if not inputs:
            return []
        tokens: dict[str, list[int]] = {}
        for one in inputs:
            tokens.setdefault(one.cache_id, []).append(one.token)
        with self._table.lock:  # until the lengths are read, too
            logits = self._table.extend([CacheInput(cache_id, ids, len(ids)) for cache_id, ids in tokens.items()])
            rows = {cache_id: iter(logits.of_row(row)) for row, cache_id in enumerate(tokens)}
            left = {cache_id: len(ids) for cache_id, ids in tokens.items()}
            outputs = []
            for one in inputs:
                left[one.cache_id] -= 1
                outputs.append(self._decoded(one.cache_id, next(rows[one.cache_id]), left[one.cache_id]))
            return outputs

    def unified_decode(self, batch: UnifiedBatch) -> list[Tensor | None]:
        """Prefill chunks and decodes mixed in one forward; [vocab] logits where a chunk is final, in order."""
        if not batch.items:
            return []
        with self._table.lock:
            for item in batch.items:
                _check_position(item.cache_id, self._table.length(item.cache_id), item.position)
            parts = [CacheInput(item.cache_id, item.tokens, int(item.is_final_chunk)) for item in batch.items]
            logits = self._table.extend(parts, create=True)
        return [logits.of_row(row)[0] if item.is_final_chunk else None for row, item in enumerate(batch.items)]

    def truncate_kv(self, kv_cache: CacheHandle, new_len: int) -> CacheHandle:
        """Roll a cache back; the handle that comes back has the new length."""
        self._table.truncate(kv_cache.cache_id, new_len)
        return CacheHandle(kv_cache.cache_id, new_len)

    def truncate_kv_for_cache_id(self, cache_id: str, new_len: int) -> None:
        """Roll the cache of that id back."""
        self._table.truncate(cache_id, new_len)

    def release_cache(self, cache_id: str) -> None:
        """Close a cache; doing it twice is fine."""
        self._table.release(cache_id)

    def kv_capacity(self) -> int:
        """Tokens a new cache could hold now."""
        pool = self._executor.pool
        return min(self._executor.max_context, min(pool.free_pages()) * pool.layout.page_tokens)

    def forward(self, batch: Batch) -> Logits:
        """The primitive: `Executor.run`."""
        return self._executor.run(batch)

    def capabilities(self) -> ExecutorCapabilities:
        """What is true of the executor now."""
        executor, pool = self._executor, self._executor.pool
        groups = pool.layout.groups
        return ExecutorCapabilities(
            family=executor.spec.family,
            backend=pool.ops.name,
            numerics=pool.ops.numerics,
            device=str(pool.device),
            kv_dtype=groups[0].shape.dtype.name,
            max_context=executor.max_context,
            page_tokens=pool.layout.page_tokens,
            layer_groups=tuple(type(group.reach).__name__.lower() for group in groups),
            max_rows=min(pool.group_pages),
            expanded_formats=executor.expanded_formats,
        )

    def status(self) -> ExecutorStatus:
        """What the executor is doing now."""
        usage = self._executor.pool.usage()
        return ExecutorStatus(
            busy=self._executor.busy,
            caches=len(self._table),
            tokens=self._table.tokens(),
            pages_used=usage.used,
            pages_free=usage.free,
            pages_total=usage.total,
        )

    def cache_metrics_snapshot(self) -> dict[str, Any]:
        """Prompts with a reused beginning, and where the pages are."""
        pool = self._executor.pool
        usage = pool.usage()
        return {
            "hits": self._table.hits,
            "misses": self._table.misses,
            "saved_tokens": self._table.saved_tokens,
            "evictions": self._executor.prefixes.evictions,  # of prefixes; a cache lives until its holder releases it
            "pages_used": usage.used,
            "pages_shared": usage.shared,
            "pages_free": usage.free,
            "bytes_used": usage.used_bytes,
        }

    def lora_metrics_snapshot(self) -> dict[str, Any]:
        """Adapters, and the rows each has served."""
        return self._executor.lora_metrics_snapshot()

    def _decoded(self, cache_id: str, logits: Tensor, later: int) -> DecodeOutput:
        return DecodeOutput(logits, CacheHandle(cache_id, self._table.get(cache_id).num_entries - later))


class DecoderOnlyLLM:
    """A decoder-only model that keeps its caches by id."""

    def __init__(self, executor: Executor) -> None:
        self._table = CacheTable(executor)
        self._executor = executor

    def config(self) -> LlmRuntimeConfig:
        """The sizes of the model as it runs here."""
        spec = self._executor.spec
        attention = spec.layers[0].attention
        return LlmRuntimeConfig(
            hidden_size=spec.hidden_size,
            num_layers=len(spec.layers),
            num_kv_heads=attention.kv_heads,
            head_dim=attention.head_dim,
            vocab_size=spec.vocab_size,
            max_seq_len=self._executor.max_context,
        )

    def prefill(self, cache_id: str, tokens: Sequence[int]) -> Tensor:
        """Begin a sequence with a prompt; [vocab] logits for its last token."""
        return self._table.prefill([(cache_id, tokens)])[0]

    def decode(self, cache_id: str, token: int, pos: int) -> Tensor:
        """Advance a sequence by one token, which must stand at `pos`; [vocab] logits for the next."""
        return self.decode_batch([(cache_id, token, pos)])[0]

    def decode_batch(self, batch: Sequence[tuple[str, int, int]]) -> list[Tensor]:
        """One token for each of several sequences in one forward; logits in the same order."""
        if not batch:
            return []
        with self._table.lock:
            for cache_id, _, pos in batch:
                _check_position(cache_id, self._table.get(cache_id).num_entries, pos)
            logits = self._table.extend([CacheInput(cache_id, [token], 1) for cache_id, token, _ in batch])
        return [logits.of_row(row)[0] for row in range(len(batch))]

    def release(self, cache_id: str) -> None:
        """Free the cache of a completed sequence; an unknown id is fine."""
        self._table.release(cache_id)

    def reset(self) -> None:
        """Drop all cached state."""
        self._table.clear()


def _check_position(cache_id: str, held: int, position: int) -> None:
    if position != held:
        raise InputError(f"cache {cache_id!r} holds {held} tokens; the next one stands at {held}, not at {position}")
