"""A pool with a prefix index, and the few moves that an engine makes on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvilt.kv.cache import KVCache
from kvilt.kv.layout import KVLayout
from kvilt.kv.pool import PagePool
from kvilt.kv.prefix import EvictedPage, PrefixIndex
from kvilt.kv.prefix_keys import PrefixKeys, PrefixScope
from kvilt.kv.row import Token

SIZE = 4
BASE = PrefixScope()


@dataclass(eq=False)
class Line:
    """A sequence as an engine has it: its cache, its way through the index, and what it must hold."""

    cache: KVCache
    prefix_keys: PrefixKeys
    cells: list[Any]

    @property
    def tokens(self) -> list[Token]:
        return [token for token, _ in self.cells]


class Desk:
    """A pool with an index, and an engine's few moves on them."""

    def __init__(
        self,
        scribe: Any,
        layout: KVLayout,
        pages: int | Sequence[int],
        sink: Callable[[EvictedPage], None] | None = None,
        states: int = 64,
    ):
        self.scribe = scribe
        self.pool: PagePool = scribe.pool(layout, pages, states=states)
        self.index = PrefixIndex(self.pool)
        self.sink = sink

    def cells(self, tokens: Sequence[Token], scope: PrefixScope) -> list[Any]:
        """What the one model of this pool computes: KV that depends on all tokens so far, and on the scope."""
        return self.scribe.cells(tokens, salt=scope.key())

    def begin(self, tokens: Sequence[int], scope: PrefixScope = BASE, most: int | None = None) -> Line:
        """A new sequence with whatever the index has of it."""
        prefix_keys = PrefixKeys(scope)
        prefix_keys.extend(tokens, SIZE)
        most = len(tokens) - 1 if most is None else most
        found = self.index.match(prefix_keys, most)
        cache = self.index.fork(prefix_keys, most, self.pool.tokens)
        assert cache.num_entries == found.tokens
        line = Line(cache, prefix_keys, self.cells(tokens, scope)[: found.tokens])
        self.scribe.check(cache, [line.cells])
        return line

    def extend(self, line: Line, tokens: Sequence[Token]) -> None:
        new = self.scribe.cells(tokens, line.cells, line.prefix_keys.scope.key())
        line.cache.reserve(len(new))
        self.scribe.write(line.cache, [new])
        told = [token for token, _ in new]
        line.cache.commit([told], filled=lambda row: self.index.insert(row, line.prefix_keys, self.sink))
        line.cells += new

    def run(self, tokens: Sequence[int], scope: PrefixScope = BASE) -> Line:
        """A sequence from its beginning to its end; the pages it reused are in the cache's length before."""
        line = self.begin(tokens, scope)
        self.extend(line, tokens[line.cache.num_entries :])
        return line

    def once(self, tokens: Sequence[int], scope: PrefixScope = BASE) -> None:
        self.run(tokens, scope).cache.close()

    def found(self, tokens: Sequence[int], scope: PrefixScope = BASE, most: int = 1 << 30) -> int:
        prefix_keys = PrefixKeys(scope)
        prefix_keys.extend(tokens, SIZE)
        return self.index.match(prefix_keys, most).tokens
