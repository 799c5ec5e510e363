"""Known documents inside ordinary prompts: a rolling hash finds where one may stand, its exact tokens say whether.

Linear in the prompt. Refuses to know stores, models and requests: it has tokens, and the scope they were kept for.
"""

from __future__ import annotations

import secrets
import threading
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..kv.owner import owner_of
from .recipe import Span

WINDOW_TOKENS = 32  # a document is looked for by its first ones; shorter ones are not found
MOST_TOKENS = 8 << 20  # of all documents that are known, four bytes each
MOST_ALIKE = 64  # different lengths of documents that begin with the same window
LOOKS = 8  # hashes that are looked up for each token of a prompt, at the most; after that, documents are not found
_FREE_LOOKS = 4096
_PRIME = (1 << 61) - 1
_ID_BYTES = array("I").itemsize


class DocumentScope(NamedTuple):
    """The tenant for which documents were kept, and the adapter that made them."""

    tenant: str
    maker: str


class _Key(NamedTuple):
    scope: DocumentScope
    first: int  # hash of the first window
    tokens: int
    whole: int  # hash of all of it

    @property
    def owner(self) -> str:
        return owner_of(self.scope.tenant)


_Alike = dict[int, dict[int, bytes]]  # documents with the same first window, by length and by hash: tokens as bytes


@dataclass(frozen=True, slots=True)
class FoundDocuments:
    """Documents in a prompt, in order and apart from each other, and what finding them took."""

    spans: tuple[Span, ...] = ()
    looked: int = 0  # hashes that were looked up after a known window
    compared: int = 0  # tokens that were compared


def _extended(total: int, ids: Sequence[int], base: int) -> int:
    """The hash of another hash's tokens and these after them."""
    for token in ids:
        total = (total * base + token + 1) % _PRIME
    return total


class _Hashes:
    """Hashes of any part of some tokens, each in constant time."""

    def __init__(self, ids: Sequence[int], base: int) -> None:
        # A token counts one more than its id: zeros in front are not nothing.
        total, power = 0, 1
        self._sums, self._powers = [0], [1]
        for token in ids:
            total = (total * base + token + 1) % _PRIME
            power = power * base % _PRIME
            self._sums.append(total)
            self._powers.append(power)

    def part(self, start: int, stop: int) -> int:
        return (self._sums[stop] - self._sums[start] * self._powers[stop - start]) % _PRIME


class KnownDocuments:
    """The documents that may be found. Every method may be called from any thread, and none waits long."""

    def __init__(self, most_tokens: int = MOST_TOKENS, most_alike: int = MOST_ALIKE, base: int | None = None) -> None:
        # A client cannot make texts collide without knowing the base; and if it could, tokens are compared.
        self._base = base if base is not None else secrets.randbelow(_PRIME - (1 << 32)) + (1 << 32)
        self._most_tokens, self._most_alike = most_tokens, most_alike
        self._lock = threading.Lock()
        self._documents: dict[DocumentScope, dict[int, _Alike]] = {}
        self._orders: dict[str, OrderedDict[_Key, None]] = {}  # by owner, the longest unused first
        self._owned: Counter[str] = Counter()  # tokens by owner
        self._tokens = 0

    @property
    def tokens(self) -> int:
        """Of all documents that are known."""
        return self._tokens

    def __len__(self) -> int:
        return sum(map(len, self._orders.values()))

    def add(self, scope: DocumentScope, ids: Sequence[int]) -> None:
        """A document was stored; if there are too many, the owner of the most forgets its longest unused."""
        if not WINDOW_TOKENS <= len(ids) <= self._most_tokens:
            return
        key = self._key(scope, ids)
        with self._lock:
            order = self._orders.setdefault(key.owner, OrderedDict())
            order[key] = None
            order.move_to_end(key)
            alike = self._documents.setdefault(scope, {}).setdefault(key.first, {})
            same = alike[key.tokens] = alike.pop(key.tokens, {})  # the latest last
            if key.whole not in same:
                same[key.whole] = array("I", ids).tobytes()
                self._tokens += key.tokens
                self._owned[key.owner] += key.tokens
            if len(alike) > self._most_alike:
                oldest = next(iter(alike))
                for whole in list(alike[oldest]):
                    self._drop(_Key(scope, key.first, oldest, whole))
            while self._tokens > self._most_tokens:
                self._drop(next(iter(self._orders[max(self._owned, key=self._owned.__getitem__)])))

    def demote(self, scope: DocumentScope, ids: Sequence[int]) -> None:
        """A document was of no use after all: it is the next to be forgotten."""
        key = self._key(scope, ids)
        with self._lock:
            self._move(key, last=False)

    def find(self, scope: DocumentScope, ids: Sequence[int], start: int = 0) -> FoundDocuments:
        """The documents of a scope in a prompt from `start` on, longer ones first where they would overlap."""
        by_window = self._documents.get(scope)
        if by_window is None or len(ids) - start < WINDOW_TOKENS:
            return FoundDocuments()
        hashes = _Hashes(ids, self._base)
        looked, most, maybe = 0, LOOKS * len(ids) + _FREE_LOOKS, []
        for at in range(start, len(ids) - WINDOW_TOKENS + 1):
            first = hashes.part(at, at + WINDOW_TOKENS)
            if looked >= most or (alike := by_window.get(first)) is None:
                continue
            for tokens in tuple(alike):  # another thread may change it meanwhile
                if (stop := at + tokens) <= len(ids):
                    looked += 1
                    whole = hashes.part(at, stop)
                    if (content := alike.get(tokens, {}).get(whole)) is not None:
                        maybe.append((-tokens, at, _Key(scope, first, tokens, whole), content))
        maybe.sort(key=lambda one: one[:2])
        return self._apart(ids, [(at, key, content) for _, at, key, content in maybe], looked)

    def _apart(self, ids: Sequence[int], maybe: Sequence[tuple[int, _Key, bytes]], looked: int) -> FoundDocuments:
        """Those that do not overlap an earlier one, and have the same tokens."""
        prompt, taken, compared = memoryview(array("I", ids).tobytes()), bytearray(len(ids)), 0
        spans, used = [], []
        for at, key, content in maybe:
            stop = at + key.tokens
            if taken[at] or taken[stop - 1]:  # what is taken is no shorter, so it reaches over one of the ends
                continue
            compared += key.tokens
            if prompt[at * _ID_BYTES : stop * _ID_BYTES] == content:
                taken[at:stop] = b"\1" * key.tokens
                spans.append(Span(at, stop))
                used.append(key)
        with self._lock:
            for key in used:
                self._move(key)
        return FoundDocuments(tuple(sorted(spans, key=lambda one: one.start)), looked, compared)

    def _key(self, scope: DocumentScope, ids: Sequence[int]) -> _Key:
        first = _extended(0, ids[:WINDOW_TOKENS], self._base)
        whole = self._known_hash(scope, first, ids)
        if whole is None:
            whole = _extended(first, ids[WINDOW_TOKENS:], self._base)
        return _Key(scope, first, len(ids), whole)

    def _known_hash(self, scope: DocumentScope, first: int, ids: Sequence[int]) -> int | None:
        """The hash of a document that is known: comparing tokens is much faster than hashing them."""
        with self._lock:
            same = self._documents.get(scope, {}).get(first, {}).get(len(ids))
            if not same or min(ids) < 0 or max(ids) >= 1 << 32:
                return None
            own = array("I", ids).tobytes()
            return next((whole for whole, theirs in same.items() if theirs == own), None)

    def _move(self, key: _Key, last: bool = True) -> None:
        if (order := self._orders.get(key.owner)) is not None and key in order:
            order.move_to_end(key, last)

    def _drop(self, key: _Key) -> None:
        order = self._orders.get(key.owner)
        if order is None or key not in order:
            return
        del order[key]
        self._tokens -= key.tokens
        self._owned[key.owner] -= key.tokens
        if not order:
            del self._orders[key.owner], self._owned[key.owner]
        by_window = self._documents[key.scope]
        alike = by_window[key.first]
        del alike[key.tokens][key.whole]
        if not alike[key.tokens]:
            del alike[key.tokens]
        if not alike:
            del by_window[key.first]
        if not by_window:
            del self._documents[key.scope]
