"""The pool's counts: all or nothing, exact under threads, and right again after any finalizer."""

from __future__ import annotations

import gc
import random
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from kvilt.errors import PoolExhausted
from kvilt.kv.cache import KVCache
from kvilt.kv.pool import PagePool, PoolUsage


@pytest.fixture
def pool(scribe: Any) -> PagePool:
    """Two groups of eight pages."""
    return scribe.pool(scribe.windowed(), pages=8)


def test_a_new_pool_is_free(pool: PagePool) -> None:
    assert pool.free_pages() == (8, 8)
    assert pool.usage() == PoolUsage(total=16, used=0, shared=0, used_bytes=0)
    assert pool.usage().free == 16


def test_pages_are_handed_out_once(pool: PagePool) -> None:
    taken = [pool.take([3, 2]), pool.take([5, 0]), pool.take([0, 6])]
    for group in (0, 1):
        assert sorted(page for part in taken for page in part[group]) == list(range(8))
    assert pool.free_pages() == (0, 0)


@pytest.mark.parametrize("counts", [[9, 0], [0, 9], [1, 9], [8, 2**63]])
def test_taking_is_all_or_nothing_across_groups(pool: PagePool, counts: list[int]) -> None:
    pool.take([0, 1])
    with pytest.raises(PoolExhausted) as refused:
        pool.take(counts)
    assert refused.value.needed > refused.value.free
    assert refused.value.total == 8
    assert pool.free_pages() == (8, 7)
    assert pool.usage().used == 1


def test_a_page_is_free_again_after_its_last_holder(pool: PagePool) -> None:
    (pages, _) = pool.take([2, 0])
    page_bytes = pool.layout.groups[0].shape.page_bytes
    pool.share(0, pages)
    pool.share(0, pages[:1])
    assert [pool.holders(0, page) for page in pages] == [3, 2]
    assert pool.usage() == PoolUsage(total=16, used=2, shared=2, used_bytes=2 * page_bytes)
    assert pool.shared((0, page) for page in pages) == 2
    pool.drop(0, pages)
    assert pool.shared((0, page) for page in pages) == 1
    pool.drop(0, pages)
    assert pool.free_pages() == (7, 8)
    assert pool.usage() == PoolUsage(total=16, used=1, shared=0, used_bytes=page_bytes)
    pool.drop(0, pages[:1])
    assert pool.free_pages() == (8, 8)


def test_groups_count_their_pages_apart(pool: PagePool) -> None:
    ((first,), (second,)) = pool.take([1, 1])
    assert first == second  # the same id, another page
    pool.share(0, [first])
    assert (pool.holders(0, first), pool.holders(1, second)) == (2, 1)


def test_a_page_used_before_is_used_again_before_fresh_memory(pool: PagePool) -> None:
    ((page,), _) = pool.take([1, 0])
    pool.drop(0, [page])
    assert pool.take([1, 0])[0] == [page]


def test_dropping_a_free_page_is_our_own_mistake(pool: PagePool) -> None:
    ((page,), _) = pool.take([1, 0])
    pool.drop(0, [page])
    with pytest.raises(AssertionError, match="more often than it was held"):
        pool.drop(0, [page])
    assert pool.free_pages() == (8, 8)


def test_sharing_a_free_page_is_our_own_mistake(pool: PagePool) -> None:
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.share(1, [3])


def test_an_abandoned_page_is_free_at_the_next_count(pool: PagePool) -> None:
    taken = pool.take([2, 3])
    pool.share(1, taken[1][:1])
    pool.abandon(0, taken[0])
    pool.abandon(1, taken[1])
    assert pool.usage().used == 1
    assert pool.holders(1, taken[1][0]) == 1
    assert pool.free_pages() == (8, 7)


@pytest.mark.parametrize(
    "count",
    [
        lambda pool, page: pool.caches(0, page),
        lambda pool, page: pool.holders(0, page),
        lambda pool, page: pool.held_by("a"),
        lambda pool, page: pool.usage().used,
        lambda pool, page: 8 - pool.free_pages()[0],
    ],
    ids=["caches", "holders", "held_by", "usage", "free_pages"],
)
def test_no_count_includes_an_abandoned_page(pool: PagePool, count: Callable[[PagePool, int], int]) -> None:
    ((page,), _) = pool.take([1, 0], "a")
    assert count(pool, page) == 1
    pool.abandon(0, [page])
    assert count(pool, page) == 0


def test_abandoned_pages_serve_a_take_that_needs_them(pool: PagePool) -> None:
    taken = pool.take([8, 8])
    pool.abandon(0, taken[0])
    pool.abandon(1, taken[1])
    assert [len(pages) for pages in pool.take([8, 8])] == [8, 8]


def test_abandoning_waits_for_no_lock(pool: PagePool) -> None:
    """A finalizer may run while its own thread, or another that waits for it, holds the pool's lock."""
    taken = pool.take([1, 0])
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with pool.lock:
            entered.set()
            leave.wait(300)

    holder = threading.Thread(target=hold)
    holder.start()
    assert entered.wait(300)
    finalizer = threading.Thread(target=pool.abandon, args=(0, taken[0]))
    finalizer.start()
    finalizer.join(60)
    stuck = finalizer.is_alive()
    leave.set()
    holder.join(300)
    assert not stuck
    assert pool.free_pages() == (8, 8)


def test_a_finalizer_inside_an_allocation_settles_without_harm(scribe: Any) -> None:
    """The collector runs at every allocation, so that forgotten caches die inside the pool's own loops."""
    pool = scribe.pool(scribe.windowed(), pages=16)
    thresholds = gc.get_threshold()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.set_threshold(1, 1, 1)
        try:
            for round_ in range(30):
                cache = KVCache(pool, 2)
                cache.reserve([9, round_ % 7])
                ring: list[Any] = [cache]
                ring.append(ring)
                del cache, ring
        finally:
            gc.set_threshold(*thresholds)
            gc.collect()
    assert pool.free_pages() == (16, 16)
    assert pool.usage().used == 0


@pytest.fixture
def hasty_threads() -> Any:
    """Threads change places as often as the interpreter lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def _all_at_once(work: Any, threads: int) -> None:
    failures: list[BaseException] = []
    gate = threading.Barrier(threads)

    def run(index: int) -> None:
        try:
            gate.wait(300)
            work(index)
        except BaseException as error:  # a thread's error must reach the test
            failures.append(error)

    team = [threading.Thread(target=run, args=(index,)) for index in range(threads)]
    for one in team:
        one.start()
    for one in team:
        one.join(300)
    assert failures == []


def test_threads_that_fork_write_and_close_lose_no_page(scribe: Any, hasty_threads: None) -> None:
    pool = scribe.pool(scribe.windowed(), pages=64)
    parent, rows = scribe.grown(pool, range(18))

    def work(index: int) -> None:
        dice = random.Random(index)
        for turn in range(25):
            with parent.fork() as child, child.fork() as grandchild:
                new = scribe.cells(range(dice.randrange(1, 6)), rows[0], bytes([index, turn]))
                scribe.extend(child, [new])
                scribe.check(child, [rows[0] + new])
                scribe.check(grandchild, rows)

    _all_at_once(work, threads=6)
    scribe.check(parent, rows)
    scribe.check_counts(pool, [parent])
    parent.close()
    assert pool.free_pages() == (64, 64)


def test_threads_that_take_drop_and_abandon_keep_the_counts(scribe: Any, hasty_threads: None) -> None:
    pool = scribe.pool(pages=40)

    def work(index: int) -> None:
        dice = random.Random(index)
        for _ in range(300):
            try:
                (pages,) = pool.take([dice.randrange(1, 12)])
            except PoolExhausted:
                continue
            pool.share(0, pages)
            pool.drop(0, pages)
            assert all(pool.holders(0, page) == 1 for page in pages)
            dice.choice((pool.drop, pool.abandon))(0, pages)

    _all_at_once(work, threads=6)
    assert pool.free_pages() == (40,)


def test_many_closers_of_one_handle_free_its_pages_once(scribe: Any, hasty_threads: None) -> None:
    pool = scribe.pool(pages=8)
    for _ in range(30):
        cache, _ = scribe.grown(pool, range(9))
        _all_at_once(lambda _index, cache=cache: cache.close(), threads=4)
        assert pool.free_pages() == (8,)
