"""Every verb of the cache in every order, against plain lists, on pools so small that they run out."""

from __future__ import annotations

import gc
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvilt.errors import BlobError, CacheClosed, ContextOverflow, PoolExhausted, TruncateError
from kvilt.kv.cache import KVCache
from kvilt.kv.layout import Window
from kvilt.kv.pool import PagePool
from kvilt.ops.kv_dtypes import K8V4, KVDtype

PAGES = 20
FEW_PAGES = (20, 9)  # of the full group, and of the window group: two windows and one page more
MOST_HANDLES = 6
STATES = 20  # slots for recurrent states: too few for all rows of all handles

SETTINGS = settings(
    max_examples=examples(100),
    stateful_step_count=40,
    derandomize=True,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

pick = st.integers(0, 10**6)  # an index into whatever is there, by remainder
counts = st.lists(st.integers(0, 9), min_size=3, max_size=3)
long_counts = st.lists(st.integers(4, 24), min_size=3, max_size=3)


@dataclass(eq=False)
class Held:
    """A live handle and what it must hold."""

    cache: KVCache
    rows: list[list[Any]]

    def twin(self, cache: KVCache) -> Held:
        return Held(cache, [list(row) for row in self.rows])


class CacheMachine(RuleBasedStateMachine):
    """Two pools of one model with different page sizes; handles wander between them."""

    def __init__(
        self, scribe: Any, layout: str, dtype: torch.dtype | KVDtype, pages: int | tuple[int, ...] = PAGES
    ) -> None:
        super().__init__()
        self.scribe = scribe
        self.pools = [scribe.pool(scribe.layout(layout, dtype, size), pages, states=STATES) for size in (4, 3)]
        self.live: list[Held] = []
        self.salts = itertools.count()

    # Drawing and bookkeeping.

    def any(self, index: int) -> Held:
        return self.live[index % len(self.live)]

    def keep(self, held: Held | None) -> None:
        """Remember a new handle, or close it at once where there are enough."""
        if held is None:
            return
        if len(self.live) < MOST_HANDLES:
            self.live.append(held)
        else:
            held.cache.close()

    def fresh(self, held: Held, each: list[int]) -> list[list[Any]]:
        """New cells for each row; the salt makes every write in the life of this machine a different one."""
        salt = str(next(self.salts)).encode()
        each = each[: len(held.rows)]
        return [
            self.scribe.cells([self.token(i) for i in range(count)], row, salt + bytes([r]))
            for r, (row, count) in enumerate(zip(held.rows, each, strict=True))
        ]

    def token(self, index: int) -> int | bytes:
        """Mostly ids, now and then the hash of an embedding row."""
        return bytes([index]) * 32 if index % 7 == 5 else index

    def attempt(self, pool: PagePool, action: Callable[[], Any]) -> Any:
        """The action's result, or None where the pool truly had too little."""
        free = (*pool.free_pages(), pool.free_states())
        try:
            return action()
        except PoolExhausted as error:
            assert error.needed > error.free
            assert (error.free, error.total) in zip(free, (*pool.group_pages, pool.state_slots), strict=True)
            assert (*pool.free_pages(), pool.free_states()) == free
            return None

    @contextmanager
    def drained(self, pool: PagePool) -> Iterator[None]:
        spare = pool.take(pool.free_pages(), states=pool.free_states())
        try:
            yield
        finally:
            for group, pages in enumerate(spare):
                pool.drop(group, pages)

    # Beginnings.

    @initialize(sizes=long_counts)
    def begin(self, sizes: list[int]) -> None:
        for pool, batch in zip(self.pools, (2, 1), strict=True):
            self.live.append(Held(KVCache(pool, batch), [[] for _ in range(batch)]))
            self.grow(self.live[-1], sizes)

    @rule(where=st.booleans(), batch=st.integers(1, 3), capacity=st.sampled_from([None, None, 11, 26, 1000]))
    def create(self, where: bool, batch: int, capacity: int | None) -> None:
        pool = self.pools[where]
        if capacity == 1000:
            with pytest.raises(ContextOverflow):
                KVCache(pool, batch, capacity)
            return
        cache = KVCache(pool, batch, capacity)
        room = PAGES * pool.layout.page_tokens
        assert cache.capacity == min(capacity or room, room)
        self.keep(Held(cache, [[] for _ in range(batch)]))

    # Steps.

    @rule(index=pick, each=long_counts)
    def prefill(self, index: int, each: list[int]) -> None:
        self.grow(self.any(index), each)

    @rule(index=pick, each=counts)
    def extend(self, index: int, each: list[int]) -> None:
        self.grow(self.any(index), each)

    def grow(self, held: Held, each: list[int]) -> None:
        new = self.fresh(held, each)
        grown = [row + more for row, more in zip(held.rows, new, strict=True)]
        if max(map(len, grown)) > held.cache.capacity:
            with pytest.raises(ContextOverflow):
                held.cache.reserve([len(more) for more in new])
        elif self.attempt(held.cache.pool, lambda: self.scribe.extend(held.cache, new) or True):
            held.rows = grown

    @rule(index=pick, each=long_counts, size=st.integers(1, 9))
    def prefill_in_steps(self, index: int, each: list[int], size: int) -> None:
        """A long input: where a step fails for want of pages, nothing is committed and the cache is what it was."""
        held = self.any(index)
        new = self.fresh(held, each)
        grown = [row + more for row, more in zip(held.rows, new, strict=True)]
        if max(map(len, grown)) > held.cache.capacity:
            return
        try:
            self.scribe.extend_in_steps(held.cache, new, size)
            held.rows = grown
        except PoolExhausted as error:
            assert error.needed > error.free
        finally:
            held.cache.truncate(held.cache.lengths)

    @rule(index=pick, each=counts, tidy=st.booleans())
    def fail_a_step(self, index: int, each: list[int], tidy: bool) -> None:
        """Room was found and noise was written, but nothing is committed."""
        held = self.any(index)
        noise = self.fresh(held, each)
        sizes = [len(row) for row in noise]
        if max(len(row) + n for row, n in zip(held.rows, sizes, strict=True)) > held.cache.capacity:
            return
        if self.attempt(held.cache.pool, lambda: held.cache.reserve(sizes) or True):
            self.scribe.write(held.cache, noise)
        if tidy:
            held.cache.truncate(held.cache.lengths)
            assert all(r.reserved - r.length < held.cache.layout.page_tokens for r in held.cache.rows())

    @rule(index=pick, each=counts, part=pick)
    def commit_a_part(self, index: int, each: list[int], part: int) -> None:
        """Half of a draft is rejected: more was written than is kept."""
        held = self.any(index)
        new = self.fresh(held, each)
        if max(len(row) + len(more) for row, more in zip(held.rows, new, strict=True)) > held.cache.capacity:
            return
        if self.attempt(held.cache.pool, lambda: held.cache.reserve([len(more) for more in new]) or True):
            self.scribe.write(held.cache, new)
            kept = [more[: part % (len(more) + 1)] for more in new]
            held.cache.commit([[token for token, _ in more] for more in kept])
            held.rows = [row + more for row, more in zip(held.rows, kept, strict=True)]

    @rule(index=pick)
    def run_out_of_pages(self, index: int) -> None:
        held = self.any(index)
        pool, longest = held.cache.pool, held.cache.num_entries
        with self.drained(pool):
            more = pool.layout.page_tokens * max(len(row.tables[0]) for row in held.cache.rows()) + 1 - longest
            if longest + more <= held.cache.capacity:
                with pytest.raises(PoolExhausted):
                    held.cache.reserve(more)
            if longest:
                blob = held.cache.serialize()
                with pytest.raises(PoolExhausted):
                    held.cache.deep_copy()
                with pytest.raises(PoolExhausted):
                    held.cache.load(blob)
            held.cache.fork().close()  # sharing costs no page

    # Handles.

    @rule(index=pick)
    def fork(self, index: int) -> None:
        held = self.any(index)
        before = held.cache.pool.free_pages()
        twin = held.cache.fork()
        assert held.cache.pool.free_pages() == before
        assert twin.capacity == held.cache.capacity
        self.keep(held.twin(twin))

    @rule(index=pick, n=st.integers(0, 3))
    def forks(self, index: int, n: int) -> None:
        held = self.any(index)
        made = held.cache.forks(n)
        assert len(made) == n
        for cache in made:
            self.keep(held.twin(cache))

    @rule(index=pick)
    def deep_copy(self, index: int) -> None:
        held = self.any(index)
        copy = self.attempt(held.cache.pool, held.cache.deep_copy)
        if copy is not None:
            for mine, theirs in zip(held.cache.pages(), copy.pages(), strict=True):
                assert not set(mine) & set(theirs)
            self.keep(held.twin(copy))

    @rule(into=pick, source=pick, row=pick)
    def select(self, into: int, source: int, row: int) -> None:
        held, other = self.any(into), self.any(source)
        if held.cache.batch_size != 1:
            return
        row %= other.cache.batch_size
        if len(other.rows[row]) > held.cache.capacity:
            with pytest.raises(ContextOverflow):
                held.cache.select_and_copy_from(other.cache, row)
        elif self.copied(held, other, lambda: held.cache.select_and_copy_from(other.cache, row) or True):
            held.rows = [list(other.rows[row])]

    @rule(into=pick, source=pick)
    def broadcast(self, into: int, source: int) -> None:
        held, other = self.any(into), self.any(source)
        if other.cache.batch_size != 1:
            return
        if len(other.rows[0]) > held.cache.capacity:
            with pytest.raises(ContextOverflow):
                held.cache.broadcast_and_copy_from(other.cache)
        elif self.copied(held, other, lambda: held.cache.broadcast_and_copy_from(other.cache) or True):
            held.rows = [list(other.rows[0]) for _ in held.rows]

    def copied(self, held: Held, other: Held, action: Callable[[], Any]) -> Any:
        """Within a pool a copy takes no page and cannot fail; from another pool it may find too few."""
        if held.cache.pool is not other.cache.pool:
            return self.attempt(held.cache.pool, action)
        with self.drained(held.cache.pool):
            return action()

    # Cutting.

    def can_go_back(self, held: Held, row: int, length: int) -> bool:
        cached = held.cache.row(row)
        if not 0 <= length <= len(held.rows[row]):
            return False
        return length == 0 or all(
            first <= (max(0, length - group.reach.tokens + 1) if isinstance(group.reach, Window) else 0)
            for group, first in zip(held.cache.layout.groups, cached.firsts, strict=True)
        )

    @rule(index=pick, back=st.integers(-2, 40))
    def truncate(self, index: int, back: int) -> None:
        held = self.any(index)
        length = min(held.cache.lengths) - back
        rows = range(len(held.rows))
        if all(self.can_go_back(held, row, length) for row in rows):
            held.cache.truncate(length)
            held.rows = [row[:length] for row in held.rows]
            return
        smallest = self.refused_truncate(held, length)
        possible = [n for n in range(1, 100) if all(self.can_go_back(held, row, n) for row in rows)]
        if 0 <= length <= min(held.cache.lengths):  # it is the window that refuses
            assert smallest == (min(possible) if possible else 0)
        with held.cache.fork() as twin:
            twin.truncate(smallest)
            self.scribe.check(twin, [row[:smallest] for row in held.rows])

    def refused_truncate(self, held: Held, length: int) -> int:
        """What the refusal names. Not by `pytest.raises`: what that keeps would keep the handle alive."""
        try:
            held.cache.truncate(length)
        except TruncateError as error:
            return error.smallest
        raise AssertionError(f"a truncate to {length} went through")

    @rule(index=pick, back=counts)
    def truncate_each(self, index: int, back: list[int]) -> None:
        held = self.any(index)
        lengths = [max(0, len(row) - n) for row, n in zip(held.rows, back, strict=False)]
        if all(self.can_go_back(held, row, n) for row, n in enumerate(lengths)):
            held.cache.truncate(lengths)
            held.rows = [row[:n] for row, n in zip(held.rows, lengths, strict=True)]
        else:
            with pytest.raises(TruncateError):
                held.cache.truncate(lengths)

    # Bytes.

    @rule(index=pick, into=pick)
    def serialize_and_load(self, index: int, into: int) -> None:
        held, other = self.any(index), self.any(into)
        blob = held.cache.serialize()
        if held.cache.num_entries > other.cache.capacity:
            with pytest.raises(BlobError, match=r"^rows\.length: "):
                other.cache.load(blob)
        elif held.cache.batch_size != other.cache.batch_size:
            with pytest.raises(BlobError, match=r"^rows: "):
                other.cache.load(blob)
        elif self.attempt(other.cache.pool, lambda: other.cache.load(blob) or True):
            other.rows = [list(row) for row in held.rows]
            assert other.cache.serialize() == blob

    @rule(index=pick, at=pick, bit=st.integers(0, 7))
    def load_damage(self, index: int, at: int, bit: int) -> None:
        held = self.any(index)
        blob = bytearray(held.cache.serialize())
        blob[at % len(blob)] ^= 1 << bit
        with pytest.raises(BlobError):
            held.cache.load(bytes(blob))

    # Ends.

    @precondition(lambda self: len(self.live) > 2)
    @rule(index=pick)
    def close(self, index: int) -> None:
        cache = self.live.pop(index % len(self.live)).cache
        cache.close()
        cache.close()
        assert cache.closed
        with pytest.raises(CacheClosed):
            cache.fork()

    @precondition(lambda self: len(self.live) > 2)
    @rule(index=pick)
    def forget(self, index: int) -> None:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            del self.live[index % len(self.live)]
            gc.collect(0)
        assert [one.category for one in heard] == [ResourceWarning]

    @invariant()
    def every_handle_holds_its_own(self) -> None:
        for held in self.live:
            self.scribe.check(held.cache, held.rows)

    @invariant()
    def every_page_is_counted(self) -> None:
        for pool in self.pools:
            self.scribe.check_counts(pool, [held.cache for held in self.live])

    def teardown(self) -> None:
        for held in self.live:
            held.cache.close()
        for pool in self.pools:
            assert pool.free_pages() == pool.group_pages
            assert pool.free_states() == pool.state_slots


@pytest.mark.parametrize(
    ("layout", "dtype", "pages"),
    [
        ("full", torch.float32, PAGES),
        ("windowed", torch.float32, PAGES),
        ("windowed", torch.bfloat16, PAGES),
        ("windowed", K8V4, PAGES),
        pytest.param("full", torch.int8, PAGES, marks=pytest.mark.slow),
        ("windowed", torch.float32, FEW_PAGES),
        ("recurrent", torch.float32, PAGES),
        pytest.param("latent", torch.float32, PAGES, marks=pytest.mark.slow),
    ],
    ids=["full", "windowed", "bfloat16", "k8v4", "int8", "few-window-pages", "recurrent", "latent"],
)
def test_no_order_of_verbs_breaks_a_cache(
    scribe: Any, layout: str, dtype: torch.dtype | KVDtype, pages: int | tuple[int, ...]
) -> None:
    run_state_machine_as_test(lambda: CacheMachine(scribe, layout, dtype, pages), settings=SETTINGS)
