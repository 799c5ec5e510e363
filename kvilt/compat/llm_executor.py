"""The executor as another scheduler calls it: caches by id, synchronous calls, over any decoder-only model.

Thin: it owns the map from id to cache, so that `Executor` stays stateless. The engine does not use it, it calls `run`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

from torch import Tensor

from ..batch import Batch, Logits
from ..errors import InputError, Unsupported
from ..executor.call import ExecutorCall
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
from .facts import cache_metrics_of, capabilities_of, kv_capacity_of, model_capabilities, model_status, status_of
from .interfaces import DecoderSteps
from .model_table import ModelTable
from .paged_llm import PagedLLM, check_position
from .sequence_table import CacheInput, SequenceTable


class LlmExecutor:
    """The batched executor of a scheduler: prompts, decodes and their mixtures.

    Over `PagedLLM`, or an executor of kvilt, which stands for it, each batch is one forward. Over any other
    `DecoderOnlyLLM` it is made of the methods that the model has.
    """

    def __init__(self, model: DecoderSteps | Executor, info: ModelInfo | None = None) -> None:
        """`info`: what the model is; read off the model where it is not given."""
        self.model: DecoderSteps = PagedLLM(model) if _is_executor(model) else _checked_model(model)
        self.table: SequenceTable
        self._executor: Executor | None = None
        if isinstance(self.model, PagedLLM):
            self.table, self._executor = self.model.table, self.model.executor
        else:
            self.table = ModelTable(self.model)
        self._info = _checked_info(self.model, info)

    def info(self) -> ModelInfo:
        """What the model is."""
        return self._info

    def prefill(self, prompt: PrefillInput) -> PrefillOutput:
        """`batch_prefill` of one."""
        return self.batch_prefill([prompt])[0]

    def batch_prefill(self, inputs: Sequence[PrefillInput]) -> list[PrefillOutput]:
        """All prompts in one ragged forward; what is there of a beginning already is not computed again."""
        if not inputs:
            return []
        parts = [CacheInput(one.cache_id, one.tokens, 1, one.lora_id, one.lora_scale) for one in inputs]
        return [
            PrefillOutput(row, CacheHandle(one.cache_id, len(one.tokens)))
            for one, row in zip(inputs, self.table.prefill(parts), strict=True)
        ]

    def decode(self, token: DecodeInput) -> DecodeOutput:
        """`batch_decode` of one."""
        return self.batch_decode([token])[0]

    def batch_decode(self, inputs: Sequence[DecodeInput]) -> list[DecodeOutput]:
        """One token for each of these caches, whatever their lengths, in one forward."""
        if not inputs:
            return []
        with self.table.lock:  # until the lengths are read, too
            parts = [CacheInput(one.cache_id, [one.token], 1, one.lora_id, one.lora_scale) for one in inputs]
            logits = self.table.extend(parts)
            return [self._decoded(one.cache_id, row[0], 0) for one, row in zip(inputs, logits, strict=True)]

    def forward_verify(self, inputs: Sequence[DecodeInput]) -> list[DecodeOutput]:
        """N+1 tokens in one forward, one row of logits per token; the tokens of a cache are consecutive."""
        if not inputs:
            return []
        with self.table.lock:  # until the lengths are read, too
            parts = _by_cache(inputs)
            found = self.table.extend(list(parts.values()))
            rows = {cache_id: iter(logits) for cache_id, logits in zip(parts, found, strict=True)}
            left = {cache_id: part.want for cache_id, part in parts.items()}
            outputs = []
            for one in inputs:
                left[one.cache_id] -= 1
                outputs.append(self._decoded(one.cache_id, next(rows[one.cache_id]), left[one.cache_id]))
            return outputs

    def unified_decode(self, batch: UnifiedBatch) -> list[Tensor | None]:
        """Prefill chunks and decodes mixed in one forward; [vocab] logits where a chunk is final, in order."""
        if not batch.items:
            return []
        with self.table.lock:
            for item in batch.items:
                check_position(item.cache_id, self.table.length(item.cache_id), item.position)
            parts = [
                CacheInput(item.cache_id, item.tokens, int(item.is_final_chunk), item.lora_id, item.lora_scale)
                for item in batch.items
            ]
            logits = self.table.extend(parts, create=True)
        return [row[0] if item.is_final_chunk else None for item, row in zip(batch.items, logits, strict=True)]

    def truncate_kv(self, kv_cache: CacheHandle, new_len: int) -> CacheHandle:
        """Roll a cache back, if the handle says its length; the handle that comes back has the new one."""
        with self.table.lock:
            held = self.table.known_length(kv_cache.cache_id)
            if kv_cache.length != held:
                raise InputError(
                    f"the handle of cache {kv_cache.cache_id!r} says {kv_cache.length} tokens and the cache holds "
                    f"{held}; give the handle that the last call returned"
                )
            self.table.truncate(kv_cache.cache_id, new_len)
        return CacheHandle(kv_cache.cache_id, new_len)

    def truncate_kv_for_cache_id(self, cache_id: str, new_len: int) -> None:
        """Roll the cache of that id back."""
        self.table.truncate(cache_id, new_len)

    def release_cache(self, cache_id: str) -> None:
        """Close a cache; doing it twice is fine."""
        self.table.release(cache_id)

    def call(self) -> ExecutorCall:
        """A handle whose `cancel` stops what runs inside of it; `table.lock` is taken before it."""
        return self.table.call()

    def kv_capacity(self) -> int | None:
        """Tokens a new cache could hold now; None where the model does not say."""
        return None if self._executor is None else kv_capacity_of(self._executor)

    def forward(self, batch: Batch) -> Logits:
        """The primitive: `Executor.run`."""
        if self._executor is None:
            raise Unsupported("forward: this model has no batches of rows; use prefill, decode and their batches")
        return self._executor.run(batch)

    def capabilities(self) -> ExecutorCapabilities:
        """What is true of the executor now."""
        if self._executor is None:
            return model_capabilities(self._info, self.model.config())
        return capabilities_of(self._executor)

    def status(self) -> ExecutorStatus:
        """What the executor is doing now."""
        if isinstance(self.table, ModelTable) or self._executor is None:
            assert isinstance(self.table, ModelTable)
            return model_status(self.table)
        return status_of(self._executor, self.table)

    def cache_metrics_snapshot(self) -> dict[str, Any] | None:
        """Prompts with a reused beginning, and where the pages are; None where the model does not say."""
        return None if self._executor is None else cache_metrics_of(self._executor)

    def lora_metrics_snapshot(self) -> dict[str, Any] | None:
        """Adapters, and the rows each has served; None where the model takes none."""
        return None if self._executor is None else self._executor.lora_metrics_snapshot()

    def _decoded(self, cache_id: str, logits: Tensor, later: int) -> DecodeOutput:
        return DecodeOutput(logits, CacheHandle(cache_id, self.table.known_length(cache_id) - later))


def _by_cache(inputs: Sequence[DecodeInput]) -> dict[str, CacheInput]:
    """Tokens of one cache together; they run on one adapter."""
    found: dict[str, CacheInput] = {}
    for one in inputs:
        before = found.get(one.cache_id)
        if before is not None and (before.lora_id, before.lora_scale) != (one.lora_id, one.lora_scale):
            raise InputError(f"the tokens of cache {one.cache_id!r} must all run on the same adapter and scale")
        tokens = [*(before.tokens if before is not None else ()), one.token]
        found[one.cache_id] = CacheInput(one.cache_id, tokens, len(tokens), one.lora_id, one.lora_scale)
    return found


def _is_executor(model: DecoderSteps | Executor) -> TypeGuard[Executor]:
    return hasattr(model, "create_kv_cache") and hasattr(model, "prefixes")


def _checked_model(model: Any) -> DecoderSteps:
    missing = [name for name in ("config", "prefill", "decode", "release") if not callable(getattr(model, name, None))]
    if missing:
        raise InputError(f"a {type(model).__name__} is no DecoderOnlyLLM: it has no {' and no '.join(missing)}")
    checked: DecoderSteps = model
    return checked


def _checked_info(model: DecoderSteps, info: ModelInfo | None) -> ModelInfo:
    """What is said of a model, unless it contradicts the model."""
    config = model.config()
    if info is None:
        return model.info() if isinstance(model, PagedLLM) else ModelInfo.of_config(type(model).__name__, config)
    said = (info.hidden_size, info.num_layers, info.num_kv_heads, info.vocab_size, info.max_sequence_length)
    own = (config.hidden_size, config.num_layers, config.num_kv_heads, config.vocab_size, config.max_seq_len)
    names = ("hidden_size", "num_layers", "num_kv_heads", "vocab_size", "max_sequence_length")
    for name, one, other in zip(names, said, own, strict=True):
        if one != other:
            raise InputError(f"the ModelInfo says {name} {one} and the model's config() {other}")
    return info
