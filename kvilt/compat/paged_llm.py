"""kvilt's own executor as a decoder-only model: caches by id, on shared pages."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..errors import InputError
from ..executor.protocol import Executor
from .cache_table import CacheTable
from .exchange import LlmRuntimeConfig, ModelInfo
from .interfaces import DecoderOnlyLLM
from .sequence_table import CacheInput


class PagedLLM(DecoderOnlyLLM):
    """A `DecoderOnlyLLM` over an executor of kvilt. Batches are one forward."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.table = CacheTable(executor)

    def config(self) -> LlmRuntimeConfig:
        """The sizes of the model as it runs here."""
        spec = self.executor.spec
        attention = spec.layers[0].attention
        return LlmRuntimeConfig(
            hidden_size=spec.hidden_size,
            num_layers=len(spec.layers),
            num_kv_heads=attention.kv_heads,
            head_dim=attention.head_dim,
            vocab_size=spec.vocab_size,
            max_seq_len=self.executor.max_context,
        )

    def info(self) -> ModelInfo:
        """What the model is, read off its checkpoint and its pool."""
        spec, pool, config = self.executor.spec, self.executor.pool, self.config()
        return ModelInfo(
            model_id=spec.family,
            model_type=spec.family,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            vocab_size=config.vocab_size,
            max_sequence_length=config.max_seq_len,
            num_heads=spec.layers[0].attention.heads,
            dtype=str(pool.ops.dtype).removeprefix("torch."),
            device=str(pool.device),
            metadata={"weight_bytes": self.executor.weight_bytes},
        )

    def prefill(self, cache_id: str, tokens: Sequence[int]) -> Tensor:
        """Begin a sequence with a prompt; [vocab] logits for its last token."""
        return self.table.prefill([CacheInput(cache_id, tokens, 1)])[0]

    def decode(self, cache_id: str, token: int, pos: int) -> Tensor:
        """Advance a sequence by one token, which must stand at `pos`; [vocab] logits for the next."""
        return self.decode_batch([(cache_id, token, pos)])[0]

    def decode_batch(self, batch: Sequence[tuple[str, int, int]]) -> list[Tensor]:
        """One token for each of several sequences in one forward; logits in the same order."""
        if not batch:
            return []
        with self.table.lock:
            for cache_id, _, pos in batch:
                check_position(cache_id, self.table.known_length(cache_id), pos)
            logits = self.table.extend([CacheInput(cache_id, [token], 1) for cache_id, token, _ in batch])
        return [one[0] for one in logits]

    def release(self, cache_id: str) -> None:
        """Free the cache of a completed sequence; an unknown id is fine."""
        self.table.release(cache_id)

    def reset(self) -> None:
        """Drop all cached state."""
        self.table.clear()


def check_position(cache_id: str, held: int, position: int) -> None:
    if position != held:
        raise InputError(f"cache {cache_id!r} holds {held} tokens; the next one stands at {held}, not at {position}")
