"""Sequences by id: what `LlmExecutor` needs of whatever keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..errors import InputError
from ..executor.call import ExecutorCall


@dataclass(frozen=True, slots=True)
class CacheInput:
    """Tokens to append to a cache, how many logits of them are wanted, and the adapter that they run on."""

    cache_id: str
    tokens: Sequence[int]
    want: int
    lora_id: int | None = None
    lora_scale: float = 1.0


class SequenceTable(Protocol):
    """Sequences by the ids their holders gave them. A call that fails leaves each of them as it was."""

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held by a call; a caller that holds it sees no other call in between. Taken before any `call`."""
        ...

    def __len__(self) -> int: ...

    def call(self) -> ExecutorCall:
        """A handle that stops what runs inside of it."""
        ...

    def length(self, cache_id: str) -> int:
        """Tokens a sequence has; 0 where there is none."""
        ...

    def known_length(self, cache_id: str) -> int:
        """Tokens a sequence has; an error where there is none."""
        ...

    def tokens(self) -> int:
        """Tokens of all sequences; waits for no step."""
        ...

    def prefill(self, prompts: Sequence[CacheInput]) -> list[Tensor]:
        """Each prompt from its beginning; logits [vocab] after each."""
        ...

    def extend(self, parts: Sequence[CacheInput], create: bool = False) -> list[Tensor]:
        """Append tokens to sequences; the wanted logits [want, vocab] of each. `create`: unknown ids begin."""
        ...

    def truncate(self, cache_id: str, length: int) -> None:
        """Go back to `length` tokens."""
        ...

    def release(self, cache_id: str) -> None:
        """Forget a sequence; an id that is gone already is fine."""
        ...

    def clear(self) -> None:
        """Forget all sequences."""
        ...


def check_distinct(parts: Sequence[CacheInput]) -> None:
    if len({part.cache_id for part in parts}) < len(parts):
        raise InputError("a cache may stand in a batch only once")


def unknown_cache(cache_id: str) -> InputError:
    return InputError(f"there is no cache {cache_id!r}; prefill it first")
