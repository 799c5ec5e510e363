"""Caches by id over one executor, and one forward for any mix of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ..batch import Adapted, Adapter, Base, Batch, Ids, Last, Nothing, Row
from ..errors import InputError
from ..executor.call import ExecutorCall
from ..executor.executor import reserve_all, settled
from ..executor.inputs import read_ids
from ..executor.kv_maker import check_maker
from ..executor.protocol import Executor
from ..kv.cache import KVCache
from ..kv.prefix_keys import PrefixKeys, PrefixScope
from ..kv.row import CacheRow
from .sequence_table import CacheInput, check_distinct, unknown_cache


@dataclass(frozen=True, slots=True)
class _RowInput:
    """A checked part of a batch: what of it has to be computed, on which cache, and its keys in the prefix index."""

    tokens: list[int]
    want: int
    kv: KVCache
    adapter: Adapter
    keys: PrefixKeys | None  # None: what is computed is not made known

    def piece(self, first: int, stop: int) -> Row:
        """Tokens [first, stop) as a row, with room for them."""
        span = range(first, min(stop, len(self.tokens)))
        self.kv.reserve(len(self.tokens), [span])
        wanted = max(0, span.stop - max(first, len(self.tokens) - self.want))  # of the row's last `want` tokens
        start = self.kv.num_entries
        return Row(
            Ids(self.tokens[span.start : span.stop]),
            range(start + span.start, start + span.stop),
            self.kv,
            want=Last(wanted) if wanted else Nothing(),
            adapter=self.adapter,
        )


class CacheTable:
    """The caches of one executor by the ids their holders gave them."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.lock = threading.RLock()
        self._caches: dict[str, KVCache] = {}

    def __len__(self) -> int:
        return len(self._caches)

    def call(self) -> ExecutorCall:
        return self.executor.call()

    def get(self, cache_id: str) -> KVCache:
        if cache_id not in self._caches:
            raise unknown_cache(cache_id)
        return self._caches[cache_id]

    def length(self, cache_id: str) -> int:
        """Tokens a cache holds; 0 where there is none."""
        return self._caches[cache_id].num_entries if cache_id in self._caches else 0

    def known_length(self, cache_id: str) -> int:
        return self.get(cache_id).num_entries

    def tokens(self) -> int:
        """Tokens of all caches; waits for no step, since a status is asked for while one runs."""
        with self.executor.pool.lock:  # nothing is closed between the question and the count
            return sum(kv.num_entries for kv in list(self._caches.values()) if not kv.closed)

    def release(self, cache_id: str) -> None:
        """Close a cache, and leave its whole pages to the prefix index; an id that is gone already is fine."""
        with self.lock:
            if (kv := self._caches.pop(cache_id, None)) is not None:
                self._make_known(kv.row(0), self._keys(kv.row(0).adapter, kv.row(0).adapted_from))
                kv.close()

    def clear(self) -> None:
        for cache_id in list(self._caches):
            self.release(cache_id)

    def truncate(self, cache_id: str, length: int) -> None:
        with self.lock:
            self.get(cache_id).truncate(length)

    def prefill(self, prompts: Sequence[CacheInput]) -> list[Tensor]:
        """Each prompt from its beginning, all in one forward; logits [vocab] after each.

        What a prompt's cache holds of it already, or the prefix index, is not computed again.
        """
        with self.lock:
            check_distinct(prompts)
            checked = [self._checked(part) for part in prompts]
            # On forks, so that a failure leaves every cache as it was, also those that had to be cut back.
            rows = self._beginnings(checked)
            logits = self._run(rows, rows)
            for part, row in zip(checked, rows, strict=True):
                self.release(part.cache_id)
                self._caches[part.cache_id] = row.kv
            return [one[0] for one in logits]

    def extend(self, parts: Sequence[CacheInput], create: bool = False) -> list[Tensor]:
        """Append tokens to existing caches, or to new ones with `create`, all in one forward."""
        with self.lock:
            check_distinct(parts)
            checked = [self._checked(part) for part in parts]
            known = {
                part.cache_id: self._continued(part, create)
                for part in checked
                if not create or part.cache_id in self._caches
            }
            begun = [part for part in checked if part.cache_id not in known]
            fresh = dict(zip((part.cache_id for part in begun), self._beginnings(begun), strict=True))
            rows = known | fresh
            logits = self._run([rows[part.cache_id] for part in checked], list(fresh.values()))
            self._caches |= {cache_id: row.kv for cache_id, row in fresh.items()}
            return logits

    def _continued(self, part: CacheInput, share: bool) -> _RowInput:
        """The next tokens of a cache that there is."""
        kv = self.get(part.cache_id)
        adapter = self._adapter(part, kv)
        keys = self._adapter_keys(adapter) if share and len(part.tokens) > 1 else None
        return _RowInput(list(part.tokens), part.want, kv, adapter, keys)

    def _beginnings(self, parts: Sequence[CacheInput]) -> list[_RowInput]:
        """New caches that hold as much of each part as is there already; all of them or none."""
        made: list[_RowInput] = []
        try:
            for part in parts:
                made.append(self._beginning(part))  # noqa: PERF401 (on failure these are closed)
        except BaseException:
            _close(made)
            raise
        return made

    def _beginning(self, part: CacheInput) -> _RowInput:
        """At least one token is left to compute."""
        adapter, tokens, prefixes = self._adapter(part), list(part.tokens), self.executor.prefixes
        keys = self._adapter_keys(adapter)
        keys.extend(tokens, self.executor.layout.page_tokens)
        most = len(tokens) - 1
        kv = self._own_beginning(part.cache_id, tokens[:-1], adapter)
        if kv is not None and kv.num_entries < prefixes.match(keys, most).tokens:
            kv.close()
            kv = None
        if kv is None:
            kv = prefixes.fork(keys, most, min(self.executor.max_context, self.executor.pool.tokens))
        else:
            prefixes.count(kv.num_entries)
        return _RowInput(tokens[kv.num_entries :], part.want, kv, adapter, keys)

    def _own_beginning(self, cache_id: str, tokens: list[int], adapter: Adapter) -> KVCache | None:
        """A fork of the cache of that id as far as it agrees; None where it does not, or another adapter made it."""
        if cache_id not in self._caches:
            return None
        kv = self._caches[cache_id]
        child = kv.fork_to(kv.shared_prefix(tokens))
        try:
            check_maker(child.row(0), adapter, self.executor.adapters)
        except InputError:
            child.close()
            return None
        return child

    def _run(self, rows: Sequence[_RowInput], new: Sequence[_RowInput]) -> list[Tensor]:
        """The wanted logits of all rows; the caches of `new` ones are closed if anything fails."""
        try:
            with self.executor.call(), ExitStack() as settling:
                since = [one.kv.num_entries for one in rows]
                for one in rows:
                    settling.enter_context(settled(one.kv))
                    reserve_all(one.kv, [len(one.tokens)])
                logits = self._forward(rows)
                for one, length in zip(rows, since, strict=True):
                    one.kv.commit([one.tokens], [length], partial(self._make_known, keys=one.keys))
        except BaseException:
            _close(new)
            raise
        return logits

    def _forward(self, rows: Sequence[_RowInput]) -> list[Tensor]:
        """All rows in one forward; where windows have few pages and rows are long, in as many as they need."""
        most = self.executor.pool.step_tokens or max(len(one.tokens) for one in rows)
        found: list[list[Tensor]] = [[] for _ in rows]
        for first in range(0, max(len(one.tokens) for one in rows), most):
            running = [i for i, one in enumerate(rows) if first < len(one.tokens)]
            with self.executor.pool.lock:  # another thread may fork a cache, and its tail is copied then
                batch = Batch.of([rows[i].piece(first, first + most) for i in running])
            logits = self.executor.run(batch)
            for n, i in enumerate(running):
                found[i].append(logits.of_row(n))
        return [torch.cat(parts) for parts in found]

    def _make_known(self, row: CacheRow, keys: PrefixKeys | None) -> None:
        """Make the whole pages of a row known to the prefix index, unless windows have given some of them back."""
        if keys is not None and max(row.firsts) <= keys.placed * self.executor.layout.page_tokens:
            self.executor.prefixes.insert(row, keys)

    def _adapter_keys(self, adapter: Adapter) -> PrefixKeys:
        begins = adapter.begins if isinstance(adapter, Adapted) else 0
        return self._keys(self.executor.adapters.identity(adapter), begins)

    def _keys(self, adapter: str, begins: int) -> PrefixKeys:
        return PrefixKeys(PrefixScope(adapter), begins, self.executor.layout.page_tokens)

    def _adapter(self, part: CacheInput, kv: KVCache | None = None) -> Adapter:
        """What a part runs on; an adapter that tokens switch on looks for them from the sequence's beginning."""
        if part.lora_id is None:
            return Base()
        before = [] if kv is None else [token if isinstance(token, int) else -1 for token in kv.tokens()]
        return self.executor.adapters.choose(part.lora_id, part.lora_scale, [*before, *part.tokens])

    def _checked(self, part: CacheInput) -> CacheInput:
        ids = read_ids(part.tokens, self.executor.spec.vocab_size)
        if not ids:
            raise InputError("the input is empty; give at least one token")
        return replace(part, tokens=ids)


def _close(rows: Sequence[_RowInput]) -> None:
    for row in rows:
        row.kv.close()
