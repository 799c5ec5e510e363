"""Caches by id over one executor, and one forward for any mix of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from torch import Tensor

from ..batch import Batch, Ids, Last, Logits, Nothing, Row
from ..errors import InputError
from ..executor.executor import settled
from ..executor.inputs import read_ids
from ..executor.protocol import Executor
from ..kv.cache import KVCache


@dataclass(frozen=True, slots=True)
class CacheInput:
    """Tokens to append to a cache, and how many logits of them are wanted."""

    cache_id: str
    tokens: Sequence[int]
    want: int


class CacheTable:
    """The caches of one executor by the ids their holders gave them."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.lock = threading.RLock()
        self._caches: dict[str, KVCache] = {}
        self.hits = self.misses = self.saved_tokens = 0

    def __len__(self) -> int:
        return len(self._caches)

    def get(self, cache_id: str) -> KVCache:
        if cache_id not in self._caches:
            raise InputError(f"there is no cache {cache_id!r}; prefill it first")
        return self._caches[cache_id]

    def length(self, cache_id: str) -> int:
        """Tokens a cache holds; 0 where there is none."""
        return self._caches[cache_id].num_entries if cache_id in self._caches else 0

    def tokens(self) -> int:
        """Tokens of all caches; waits for no step, since a status is asked for while one runs."""
        with self.executor.pool.lock:  # nothing is closed between the question and the count
            return sum(kv.num_entries for kv in list(self._caches.values()) if not kv.closed)

    def release(self, cache_id: str) -> None:
        """Close a cache; an id that is gone already is fine."""
        with self.lock:
            if (kv := self._caches.pop(cache_id, None)) is not None:
                kv.close()

    def clear(self) -> None:
        for cache_id in list(self._caches):
            self.release(cache_id)

    def truncate(self, cache_id: str, length: int) -> None:
        with self.lock:
            self.get(cache_id).truncate(length)

    def prefill(self, prompts: Sequence[tuple[str, Sequence[int]]]) -> list[Tensor]:
        """Each prompt from its beginning, all in one forward; logits [vocab] after each."""
        with self.lock:
            _distinct([cache_id for cache_id, _ in prompts])
            ids = {cache_id: self._checked(tokens) for cache_id, tokens in prompts}
            # On forks, so that a failure leaves every cache as it was, also those that had to be cut back.
            table = {name: self._beginning(name, tokens) for name, tokens in ids.items()}
            saved = {name: kv.num_entries for name, kv in table.items()}
            try:
                parts = [CacheInput(name, tokens[saved[name] :], 1) for name, tokens in ids.items()]
                logits = self._run(parts, table)
            except BaseException:
                for kv in table.values():
                    kv.close()
                raise
            for cache_id, kv in table.items():
                self.release(cache_id)
                self._caches[cache_id] = kv
            self.hits += sum(count > 0 for count in saved.values())
            self.misses += sum(count == 0 for count in saved.values())
            self.saved_tokens += sum(saved.values())
            return [logits.of_row(row)[0] for row in range(len(parts))]

    def extend(self, parts: Sequence[CacheInput], create: bool = False) -> Logits:
        """Append tokens to existing caches, all in one forward."""
        with self.lock:
            _distinct([part.cache_id for part in parts])
            checked = [CacheInput(part.cache_id, self._checked(part.tokens), part.want) for part in parts]
            known = {
                part.cache_id: self.get(part.cache_id) for part in parts if not create or part.cache_id in self._caches
            }
            fresh = {part.cache_id: self.executor.create_kv_cache() for part in parts if part.cache_id not in known}
            try:
                logits = self._run(checked, known | fresh)
            except BaseException:
                for kv in fresh.values():
                    kv.close()
                raise
            self._caches |= fresh
            return logits

    def _beginning(self, cache_id: str, tokens: list[int]) -> KVCache:
        """A cache that holds as much of `tokens` as the one of that id; at least one token is left to compute."""
        if cache_id not in self._caches:
            return self.executor.create_kv_cache()
        kv = self._caches[cache_id]
        return kv.fork_to(kv.shared_prefix(tokens[:-1]))

    def _run(self, parts: Sequence[CacheInput], table: dict[str, KVCache]) -> Logits:
        caches = [table[part.cache_id] for part in parts]
        with ExitStack() as settling:
            rows = []
            for part, kv in zip(parts, caches, strict=True):
                start = kv.num_entries
                kv.reserve(len(part.tokens))
                settling.enter_context(settled(kv))
                want = Last(part.want) if part.want else Nothing()
                rows.append(Row(Ids(part.tokens), range(start, start + len(part.tokens)), kv, want=want))
            logits = self.executor.run(Batch.of(rows))
            for part, kv, row in zip(parts, caches, rows, strict=True):
                kv.commit([list(part.tokens)], [row.positions[0]])
        return logits

    def _checked(self, tokens: Sequence[int]) -> list[int]:
        ids = read_ids(tokens, self.executor.spec.vocab_size)
        if not ids:
            raise InputError("the input is empty; give at least one token")
        return ids


def _distinct(names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        raise InputError("a cache may stand in a batch only once")
