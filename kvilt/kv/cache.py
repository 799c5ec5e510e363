"""The KV cache as a value: fork, cut, select, broadcast, copy, store and load it.

A `KVCache` is a handle on rows of pages in a pool. Refuses to know requests, text and models.
"""

from __future__ import annotations

import operator
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Concatenate, ParamSpec, Self, SupportsIndex, TypeGuard, TypeVar

from ..errors import BlobError, CacheClosed, ContextOverflow, InputError, KVError, LayoutMismatch, TruncateError
from .codec import pack
from .drawing import draw_cache
from .file import write_whole
from .layout import KVLayout
from .pool import PagePool
from .reserve import reserve_rows
from .row import BASE, EXACT, CacheRow, RowImage, Token, held, rows_from_images
from .saved import read_images

_LINEAGE_VERBS = 8
P = ParamSpec("P")
R = TypeVar("R")


def _one_event(verb: Callable[Concatenate[KVCache, P], R]) -> Callable[Concatenate[KVCache, P], R]:
    """Other threads see a verb as done or not begun."""

    @wraps(verb)
    def locked(self: KVCache, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.pool.lock:
            return verb(self, *args, **kwargs)

    return locked


@contextmanager
def _both(one: PagePool, other: PagePool) -> Iterator[None]:
    """Hold the locks of two pools, always in the same order, so that two copies never wait for each other."""
    first, second = sorted((one, other), key=id)
    with first.lock, second.lock:
        yield


class KVCache:
    """The keys and values of `batch_size` sequences. Close it, or use it as a context manager."""

    def __init__(self, pool: PagePool, batch_size: int = 1, capacity: int | None = None, owner: str = "") -> None:
        """Its pages are counted for `owner`."""
        self._pool = pool
        self._capacity = pool.tokens if capacity is None else positive("capacity", capacity)
        if self._capacity > pool.tokens:
            raise ContextOverflow(self._capacity, pool.tokens, "kv_memory")
        self._rows = [CacheRow(pool) for _ in range(positive("batch_size", batch_size))]
        for row in self._rows:
            row.owner = owner
        self._finalizer = weakref.finalize(self, _forgotten, pool, self._rows)
        self._finalizer.atexit = False
        self._open = True  # beside the finalizer, which takes long to ask
        self.lineage: tuple[str, ...] = ()  # the last verbs that its content came from, the oldest first

    # What it holds.

    @property
    def num_entries(self) -> int:
        """Entries held per layer: the longest row's length."""
        return max(self.lengths)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Committed tokens of each row."""
        return tuple(row.length for row in self.rows())

    @property
    def resumes_at(self) -> tuple[int, ...]:
        """The position of each row's next token to compute: its length, or its newest recurrent state below that."""
        return tuple(row.resumes_at for row in self.rows())

    @property
    def origin(self) -> str:
        """How the KV was made: `exact`, or the recipe of a blend; of several rows, all there are."""
        return " | ".join(dict.fromkeys(row.origin for row in self.rows()))

    @property
    def maker(self) -> str:
        """What the KV was made with: `base`, or an adapter by content and scale; of several rows, all there are."""
        return " | ".join(dict.fromkeys(row.maker for row in self.rows()))

    @property
    def batch_size(self) -> int:
        return len(self.rows())

    @property
    def capacity(self) -> int:
        """Tokens a row may hold."""
        return self._capacity

    @property
    def layout(self) -> KVLayout:
        return self._pool.layout

    @property
    def pool(self) -> PagePool:
        return self._pool

    @property
    def owner(self) -> str:
        """The owner for which its pages are counted."""
        return self._rows[0].owner

    @property
    def closed(self) -> bool:
        return not self._open

    def shared_prefix(self, tokens: Sequence[Token], row: int = 0) -> int:
        """How many tokens from the start a row has in common with `tokens`."""
        pairs = zip(tokens, self.tokens(row), strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), self.row(row).length))

    def tokens(self, row: int = 0) -> list[Token]:
        """The exact tokens of a row; an embedding row counts by the hash of its bytes."""
        return self.row(row).tokens()

    def pages(self) -> tuple[tuple[int, ...], ...]:
        """Page ids this handle holds in each layer group, shared or not, each once."""
        groups = range(len(self.layout.groups))
        return tuple(tuple(dict.fromkeys(p for row in self.rows() for p in held(row.tables[g]))) for g in groups)

    # Extending: find room, let the executor write, advance.

    def check_fits(self, tokens: int) -> None:
        """Raise unless a row may hold this many tokens."""
        if tokens > self._capacity:
            setting = "kv_memory" if self._capacity == self._pool.tokens else "max_context"
            raise ContextOverflow(tokens, self._capacity, setting)

    @_one_event
    def reserve(
        self,
        extra: int | Sequence[int],
        steps: Sequence[range] | None = None,
        folds: Sequence[range] | None = None,
        drafts: int = 0,
    ) -> None:
        """Make room for `extra` more tokens in each row (or one number per row), or change nothing.

        `steps`: for each row, which of its new tokens the next step writes; earlier ones are written. A window group
        that has few pages then has room for these, and drops pages of earlier ones that no query sees any more.
        `folds`: with recurrent state, the positions that the next step computes, where these are not the new tokens.
        If there are slots, the state is kept after each of the last `drafts` tokens too.
        """
        rows = self.rows()
        counts = self._per_row(extra)
        if min(counts) < 0:
            raise InputError(f"room for {min(counts)} tokens was asked for; the number must not be negative")
        for row, count in zip(rows, counts, strict=True):
            self.check_fits(row.length + count)
        each: Sequence[range | None] = [None] * len(rows) if steps is None else steps
        reserve_rows(rows, counts, each, self.owner, folds, drafts)

    @_one_event
    def want_checkpoints(self, positions: Sequence[int], row: int = 0) -> None:
        """Keep the recurrent state at these ends of pages when a step passes them, if there is a slot for it."""
        if (states := self.row(row).states) is not None:
            states.wanted.update(p for p in positions if p > 0 and p % self.layout.page_tokens == 0)

    @_one_event
    def commit(
        self,
        tokens: Sequence[Sequence[Token]],
        since: Sequence[int] | None = None,
        filled: Callable[[CacheRow], None] | None = None,
    ) -> None:
        """Advance each row over tokens whose KV was written into reserved room, or change nothing.

        `since` are the lengths the step began with: if another thread changed them meanwhile, nothing is committed.
        `filled` is called with each row before its windows give pages back.
        """
        rows = self.rows()
        if len(rows) == 1 == len(tokens) and since is None:  # a sequence of the engine: there is nothing to undo
            rows[0].check_commit(tokens[0])
            rows[0].commit(tokens[0], filled)
            return
        if since is not None and tuple(since) != self.lengths:
            raise KVError(
                f"the cache went from {list(since)} to {list(self.lengths)} tokens during the step; run it again"
            )
        if len(tokens) != len(rows):
            raise InputError(f"tokens of {len(tokens)} rows were given for {len(rows)} rows")
        for row, new in zip(rows, tokens, strict=True):
            row.check_commit(new)
        for row, new in zip(rows, tokens, strict=True):
            row.commit(new, filled)

    def commit_token(self, token: int, position: int) -> bool:
        """`commit` of one id at `position` to a cache of one row, where that is only to append it.

        False in every other case; nothing is done then, and `commit` does it or says what is wrong.
        """
        with self._pool.lock:
            rows = self._rows
            return self._open and len(rows) == 1 and len(rows[0].ids) == position and rows[0].commit_token(token)

    # The verbs.

    @_one_event
    def fork(self) -> KVCache:
        """A second handle on the same content; the first of them to write to a shared page copies it."""
        return self._sibling([row.fork() for row in self.rows()], "fork")

    def forks(self, n: int) -> list[KVCache]:
        """`n` forks."""
        if n < 0:
            raise InputError(f"n must not be negative, not {n}")
        return [self.fork() for _ in range(n)]

    def fork_to(self, length: int) -> KVCache:
        """A fork that ends at `length`, or an empty one where a window gave that part back."""
        child = self.fork()
        try:
            child.truncate(length)
        except TruncateError:
            child.truncate(0)
        return child

    @_one_event
    def truncate(self, length: int | Sequence[int]) -> None:
        """Go back to `length` tokens in every row (or one length per row)."""
        rows, lengths = self.rows(), self._per_row(length)
        for row, count in zip(rows, lengths, strict=True):
            row.check_truncate(count, row.floor if isinstance(length, Sequence) else self._common_floor())
        for row, count in zip(rows, lengths, strict=True):
            row.truncate(count)

    def select_and_copy_from(self, other: KVCache, batch_index: int) -> None:
        """Row `batch_index` of `other` becomes the one row of this cache."""
        self._check_kin(other)
        with _both(self._pool, other._pool):
            if self.batch_size != 1:
                raise InputError(f"select needs a cache of batch 1 to copy into, this one has {self.batch_size} rows")
            self._replace(self._rows_like([other.row(batch_index)], other), other, f"row {batch_index}")

    def broadcast_and_copy_from(self, other: KVCache) -> None:
        """The one row of `other` becomes every row of this cache; costs page ids, not bytes."""
        self._check_kin(other)
        with _both(self._pool, other._pool):
            if other.batch_size != 1:
                raise InputError(f"broadcast needs a source of batch 1, the other cache has {other.batch_size} rows")
            self._replace(self._rows_like([other.row(0)] * self.batch_size, other), other, "broadcast")

    @_one_event
    def deep_copy(self) -> KVCache:
        """The same content on pages of its own. Expensive; `fork` is what you usually want."""
        return self._sibling(rows_from_images(self._pool, self._images(), self.owner), "deep copy")

    @_one_event
    def close(self) -> None:
        """Give every page back. Closing twice is fine, using a closed cache is not."""
        if self._open and self._finalizer.detach() is not None:
            self._open = False
            for row in self._rows:
                row.close()

    # Bytes.

    def serialize(self) -> bytes:
        """All rows as self-describing, checksummed bytes."""
        self.rows()
        identity = self._pool.identity()  # may hash all weights, so it is outside of the lock
        with self._pool.lock:
            images, origin, maker = self._images(), self.origin, self.maker
        if origin != EXACT or maker != BASE:
            identity = replace(identity, origin=origin, adapter=maker)
        return pack(images, self.layout, identity)

    def load(self, data: bytes, accept_numerics: bool = False, maker: str = BASE, origin: str = EXACT) -> None:
        """Become what `data` holds, or raise a BlobError and stay as it was.

        `maker` and `origin` say what must have made the KV, and how: `load` takes those that it was saved with.
        """
        images = read_images(self._pool, data, self._capacity, accept_numerics, maker, origin)
        if len(images) != self.batch_size:
            raise BlobError("rows", f"{len(images)} rows do not fit a cache of batch size {self.batch_size}")
        self._adopt(images)

    @classmethod
    def of_images(cls, pool: PagePool, images: Sequence[RowImage], capacity: int, owner: str = "") -> Self:
        """A new cache with this content."""
        kv = cls(pool, len(images), capacity, owner)
        try:
            kv._adopt(images)
        except BaseException:
            kv.close()
            raise
        return kv

    @classmethod
    def of_row(cls, row: CacheRow, capacity: int) -> Self:
        """A cache of one row; from now on it holds the row's pages."""
        kv = cls(row.pool, 1, capacity)
        kv._rows[:] = [row]
        return kv

    @_one_event
    def _adopt(self, images: Sequence[RowImage]) -> None:
        self._replace(rows_from_images(self._pool, images, self.owner))
        self.lineage = ("loaded",)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `serialize()` to a file that is either complete or not there."""
        write_whole(Path(path), self.serialize())

    # For the batch, and for this package.

    def row(self, index: int) -> CacheRow:
        """One row's bookkeeping."""
        if not self._open:
            raise CacheClosed()
        if not 0 <= index < len(self._rows):
            raise InputError(f"row {index} does not exist; this cache has rows 0 to {len(self._rows) - 1}")
        return self._rows[index]

    def rows(self) -> list[CacheRow]:
        if not self._open:
            raise CacheClosed()
        return self._rows

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        if self.closed:
            return "KVCache(closed)"
        return f"KVCache(lengths={list(self.lengths)}, pages={sum(map(len, self.pages()))})"

    def _repr_html_(self) -> str:
        return draw_cache(self)

    def _images(self) -> list[RowImage]:
        return [row.image() for row in self.rows()]

    def _sibling(self, rows: list[CacheRow], verb: str) -> KVCache:
        twin = KVCache(self._pool, len(rows), self._capacity)
        twin._rows[:] = rows
        twin.lineage = self._after(verb)
        return twin

    def _after(self, verb: str) -> tuple[str, ...]:
        """The lineage of what a verb makes of this cache."""
        return (*self.lineage, f"{verb} at {max(row.length for row in self._rows)}")[-_LINEAGE_VERBS:]

    def _replace(self, rows: list[CacheRow], source: KVCache | None = None, verb: str = "") -> None:
        for row in self.rows():
            row.close()
        self._rows[:] = rows
        if source is not None:
            self.lineage = source._after(verb)

    def _rows_like(self, rows: Sequence[CacheRow], source: KVCache) -> list[CacheRow]:
        """Rows with the same content in this cache's pool: shared pages in the same pool, copies from another pool."""
        self.rows()
        for row in rows:
            self.check_fits(row.length)
        if source._pool is self._pool:
            return [row.fork() for row in rows]
        (first, *rest) = rows
        (copied,) = rows_from_images(self._pool, [first.image()], self.owner)
        return [copied, *(copied.fork() for _ in rest)]

    def _check_kin(self, other: KVCache) -> None:
        """Before any lock is taken: an identity may hash all weights."""
        if not isinstance(other, KVCache):
            raise InputError(f"KV is copied from another KVCache, not from a {type(other).__name__}")
        if other._pool is self._pool:
            return
        if self.layout.describe() != other.layout.describe():
            raise LayoutMismatch("the two caches hold KV of different shapes; they belong to different models")
        if self._pool.identity() != other._pool.identity():
            raise LayoutMismatch("the two caches were made by different models; KV cannot move between them")

    def _common_floor(self) -> int:
        """The smallest length above 0 that every row can go back to, or 0 where only that suits all of them."""
        floor = max(row.floor for row in self.rows())
        return floor if floor <= min(self.lengths) else 0

    def _per_row(self, value: int | Sequence[int]) -> list[int]:
        rows = len(self.rows())
        each = list(value) if isinstance(value, Sequence) else [value] * rows
        if not all(map(_is_whole, each)):
            raise InputError(f"a whole number, or one for each row, is needed, not {value!r}")
        if len(each) != rows:
            raise InputError(f"{len(each)} numbers were given for {rows} rows")
        return [operator.index(number) for number in each]


def _is_whole(number: object) -> TypeGuard[SupportsIndex]:
    return hasattr(number, "__index__") and not isinstance(number, bool)


def positive(name: str, number: object) -> int:
    """A whole number of any kind that is at least 1."""
    if not _is_whole(number) or operator.index(number) < 1:
        raise InputError(f"{name} must be a whole number and at least 1, not {number!r}")
    return operator.index(number)


def _forgotten(pool: PagePool, rows: list[CacheRow]) -> None:
    """Runs when a handle is collected without close(): its pages go back, and a ResourceWarning is raised."""
    for row in rows:
        for group, table in enumerate(row.tables):
            pool.abandon(group, held(table)[::-1])
        if row.states is not None:
            pool.abandon(pool.layout.state_group, row.states.slots())
    warnings.warn("a KVCache was dropped without close(); its pages were released", ResourceWarning, stacklevel=2)
