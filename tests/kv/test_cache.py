"""What a cache refuses, what it counts, and how it ends; the verbs in every order are in test_cache_machine."""

from __future__ import annotations

import gc
import threading
import warnings
from typing import Any

import numpy as np
import pytest

from kvilt.errors import CacheClosed, ContextOverflow, InputError, LayoutMismatch, PoolExhausted, TruncateError
from kvilt.kv.cache import KVCache
from kvilt.kv.identity import Identity
from kvilt.kv.row import CacheRow, RowImage


@pytest.fixture
def pool(scribe: Any) -> Any:
    return scribe.pool()


# Truncating.


def test_a_refused_truncate_of_several_rows_names_a_length_that_suits_them_all(scribe: Any) -> None:
    pool = scribe.pool(scribe.windowed())
    with KVCache(pool, 2) as cache:
        rows = [scribe.cells(range(18)), scribe.cells(range(22))]
        scribe.extend(cache, rows)
        assert cache.row(0).floor < cache.row(1).floor
        with pytest.raises(TruncateError) as refused:
            cache.truncate(3)
        assert str(cache.row(1).floor) in str(refused.value)
        cache.truncate(refused.value.smallest)
        assert cache.lengths == (cache.row(1).floor,) * 2


def test_a_refused_truncate_names_zero_where_no_other_length_suits_all_rows(scribe: Any) -> None:
    pool = scribe.pool(scribe.windowed())
    with KVCache(pool, 2) as cache:
        scribe.extend(cache, [scribe.cells(range(3)), scribe.cells(range(22))])
        with pytest.raises(TruncateError, match="choose 0 to empty the row") as refused:
            cache.truncate(2)
        assert refused.value.smallest == 0
        with pytest.raises(TruncateError) as refused:
            cache.truncate([2, 5])
        cache.truncate([2, refused.value.smallest])


@pytest.mark.parametrize("length", [-1, 6, 2**63, -(2**63)])
def test_a_truncate_outside_the_row_is_refused(scribe: Any, pool: Any, length: int) -> None:
    cache, rows = scribe.grown(pool, range(5))
    with cache:
        with pytest.raises(TruncateError, match="choose 0 to 5"):
            cache.truncate(length)
        scribe.check(cache, rows)


# Extending.


@pytest.mark.parametrize("extra", [-1, [1, -1]])
def test_a_negative_reserve_is_refused(scribe: Any, pool: Any, extra: Any) -> None:
    with KVCache(pool, 2) as cache, pytest.raises(InputError, match="must not be negative"):
        cache.reserve(extra)


@pytest.mark.parametrize("verb", ["reserve", "truncate"])
@pytest.mark.parametrize("value", [1.0, [1, 2.0], "12", ["1", "2"], None, [True, None], True])
def test_counts_that_are_not_whole_numbers_are_refused(scribe: Any, pool: Any, verb: str, value: Any) -> None:
    cache, rows = scribe.grown(pool, range(5), batch=2)
    with cache:
        with pytest.raises(InputError, match="whole number"):
            getattr(cache, verb)(value)
        scribe.check(cache, rows)


@pytest.mark.parametrize("verb", ["reserve", "truncate"])
@pytest.mark.parametrize("value", [[], [1], [1, 1, 1]])
def test_one_number_per_row_means_exactly_that(scribe: Any, pool: Any, verb: str, value: list[int]) -> None:
    cache, rows = scribe.grown(pool, range(5), batch=2)
    with cache:
        with pytest.raises(InputError, match="2 rows"):
            getattr(cache, verb)(value)
        scribe.check(cache, rows)


@pytest.mark.parametrize(
    "tokens",
    [
        [[1]],
        [[1], [2], [3]],
        [[1], [2, 3, 4, 5]],  # the second row has room for three
        [[1], [-1]],
        [[1], [2**63]],
        [[1], [b"not a hash"]],
    ],
)
def test_a_commit_that_cannot_be_advances_no_row(scribe: Any, pool: Any, tokens: Any) -> None:
    cache, rows = scribe.grown(pool, range(5), batch=2)
    with cache:
        cache.reserve(3)
        with pytest.raises(InputError):
            cache.commit(tokens)
        scribe.check(cache, rows)


def test_a_row_past_its_capacity_is_refused_before_a_page_is_taken(scribe: Any, pool: Any) -> None:
    with KVCache(pool, 2, capacity=10) as cache:
        with pytest.raises(ContextOverflow) as refused:
            cache.reserve([3, 11])
        assert (refused.value.tokens, refused.value.limit) == (11, 10)
        assert pool.free_pages() == (32,)


def test_a_capacity_past_the_pool_is_refused_and_the_pool_named(pool: Any) -> None:
    with pytest.raises(ContextOverflow, match=r"129 tokens .* KV memory holds 128; .* raise kv_memory"):
        KVCache(pool, capacity=32 * 4 + 1)
    with KVCache(pool) as cache, pytest.raises(ContextOverflow, match="kv_memory") as refused:
        assert cache.capacity == 32 * 4
        cache.reserve(129)
    assert refused.value.setting == "kv_memory"
    with KVCache(pool, capacity=127) as cache, pytest.raises(ContextOverflow, match="max_context"):
        cache.reserve(128)


@pytest.mark.parametrize(
    ("batch", "capacity"),
    [(0, None), (-1, None), (1, 0), (1, -5), (True, None), (1.0, None), ("1", None), (1, 2.5), (1, True), (1, "9")],
)
def test_a_cache_without_rows_or_room_is_refused(pool: Any, batch: Any, capacity: Any) -> None:
    with pytest.raises(InputError, match="at least 1"):
        KVCache(pool, batch, capacity)


def test_sizes_may_be_whole_numbers_of_any_kind(pool: Any) -> None:
    with KVCache(pool, np.int64(2), np.int32(9)) as cache:
        assert (cache.batch_size, cache.capacity) == (2, 9)
        assert type(cache.capacity) is int


def test_a_fork_to_a_length_is_empty_where_a_window_gave_that_part_back(scribe: Any) -> None:
    cache, rows = scribe.grown(scribe.pool(scribe.windowed()), range(60))
    with cache, cache.fork_to(59) as near, cache.fork_to(1) as far:
        scribe.check(near, [rows[0][:59]])
        scribe.check(far, [[]])
        scribe.check(cache, rows)


def test_nobody_waits_while_an_identity_is_computed(scribe: Any) -> None:
    """Hashing weights may take long; another thread's verbs go on meanwhile."""
    caches = [scribe.grown(scribe.pool(), range(5))[0] for _ in range(2)]
    pools = [cache.pool for cache in caches]
    free: list[bool] = []

    def hashing() -> Identity:
        def verb() -> None:
            for pool in pools:
                free.append(pool.lock.acquire(timeout=60))
                pool.lock.release()

        other = threading.Thread(target=verb)
        other.start()
        other.join()
        return scribe.identity

    for pool in pools:
        pool._identity = hashing
    with caches[0] as one, caches[1] as other:
        one.serialize()
        one.select_and_copy_from(other, 0)
        one.broadcast_and_copy_from(other)
    assert len(free) >= 6
    assert all(free)


def test_asking_again_for_room_that_is_there_changes_no_table(scribe: Any, pool: Any) -> None:
    """A batch that was made of the tables stays up to date."""
    cache, _ = scribe.grown(pool, range(5))
    with cache:
        cache.reserve(9)
        version, pages = cache.row(0).version, cache.pages()
        for extra in (9, 3, 0):
            cache.reserve(extra)
        assert (cache.row(0).version, cache.pages()) == (version, pages)
        cache.reserve(12)
        assert cache.row(0).version != version


def test_only_reserved_unshared_room_above_the_length_is_writable(scribe: Any, pool: Any) -> None:
    cache, _ = scribe.grown(pool, range(5))
    row = cache.row(0)
    assert row.writable([])
    assert row.writable([5, 7])  # the rest of the tail page
    assert not row.writable([4, 5])
    assert not row.writable([7, 8])
    cache.reserve(4)
    assert row.writable([5, 8])
    fork = cache.fork()
    assert not row.writable([5])
    assert row.writable([8])
    cache.reserve(1)
    assert row.writable([5])
    assert fork.row(0).writable([5])
    cache.close()
    fork.close()


def test_forking_between_reserve_and_commit_keeps_both_sides_apart(scribe: Any, pool: Any) -> None:
    cache, rows = scribe.grown(pool, range(5))
    new = scribe.cells([9, 9], rows[0])
    cache.reserve(2)
    scribe.write(cache, [new])
    with cache, cache.fork() as fork:
        cache.commit([[9, 9]])
        other = scribe.cells([8, 8, 8], rows[0])
        scribe.extend(fork, [other])
        scribe.check(cache, [rows[0] + new])
        scribe.check(fork, [rows[0] + other])


def test_a_fork_holds_no_page_that_was_only_reserved(scribe: Any, pool: Any) -> None:
    cache, rows = scribe.grown(pool, range(8))
    cache.reserve(20)
    with cache, cache.fork() as fork:
        assert [len(pages) for pages in (*cache.pages(), *fork.pages())] == [7, 2]
        scribe.check(fork, rows)


def test_rows_that_share_a_tail_give_the_spare_page_back(scribe: Any, pool: Any) -> None:
    source, rows = scribe.grown(pool, range(5))
    with KVCache(pool, 3) as wide:
        wide.broadcast_and_copy_from(source)
        source.close()
        new = [scribe.cells([i], rows[0]) for i in range(3)]
        scribe.extend(wide, new)
        scribe.check(wide, [rows[0] + row for row in new])
        assert pool.free_pages() == (32 - 1 - 3,)  # one full page together, a tail each


# Copying.


def test_copies_refuse_another_layout_and_another_model(scribe: Any, pool: Any) -> None:
    strangers = [
        scribe.pool(scribe.windowed()),
        scribe.pool(identity=Identity("weights-2", "reference-1")),
        scribe.pool(identity=Identity("weights-1", "reference-1", salt="tenant")),
    ]
    cache, rows = scribe.grown(pool, range(5))
    with cache:
        for stranger in strangers:
            other, _ = scribe.grown(stranger, range(7))
            with other:
                with pytest.raises(LayoutMismatch):
                    cache.select_and_copy_from(other, 0)
                with pytest.raises(LayoutMismatch):
                    cache.broadcast_and_copy_from(other)
        scribe.check(cache, rows)


@pytest.mark.parametrize("index", [-1, 2, 2**63])
def test_a_row_that_does_not_exist_is_refused(scribe: Any, pool: Any, index: int) -> None:
    cache, rows = scribe.grown(pool, range(5))
    other, _ = scribe.grown(pool, range(3), batch=2)
    with cache, other:
        with pytest.raises(InputError, match="rows 0 to 1"):
            cache.select_and_copy_from(other, index)
        with pytest.raises(InputError, match="rows 0 to 1"):
            other.tokens(index)
        scribe.check(cache, rows)


def test_select_wants_one_row_and_broadcast_wants_one_source(scribe: Any, pool: Any) -> None:
    one, rows = scribe.grown(pool, range(5))
    two, pair = scribe.grown(pool, range(3), batch=2)
    with one, two:
        with pytest.raises(InputError, match="batch 1"):
            two.select_and_copy_from(one, 0)
        with pytest.raises(InputError, match="batch 1"):
            one.broadcast_and_copy_from(two)
        scribe.check(one, rows)
        scribe.check(two, pair)


def test_a_copy_from_abroad_into_a_full_pool_changes_nothing(scribe: Any, pool: Any) -> None:
    small = scribe.pool(pages=2)
    cache, rows = scribe.grown(small, range(5))
    abroad, _ = scribe.grown(pool, range(5))
    with cache, abroad:
        with pytest.raises(PoolExhausted):
            cache.select_and_copy_from(abroad, 0)
        with pytest.raises(PoolExhausted):
            cache.broadcast_and_copy_from(abroad)
        scribe.check(cache, rows)
        scribe.check_counts(small, [cache])


def test_a_broadcast_from_abroad_copies_once_and_shares_the_rest(scribe: Any, pool: Any) -> None:
    home = scribe.pool(pages=8)
    source, rows = scribe.grown(pool, range(16))
    with source, KVCache(home, 3) as wide:
        wide.broadcast_and_copy_from(source)
        assert home.free_pages() == (4,)
        scribe.check(wide, rows * 3)


# Ending.


CLOSED_VERBS = {
    "lengths": lambda kv, _: kv.lengths,
    "num_entries": lambda kv, _: kv.num_entries,
    "batch_size": lambda kv, _: kv.batch_size,
    "tokens": lambda kv, _: kv.tokens(),
    "pages": lambda kv, _: kv.pages(),
    "reserve": lambda kv, _: kv.reserve(1),
    "commit": lambda kv, _: kv.commit([[]]),
    "fork": lambda kv, _: kv.fork(),
    "forks": lambda kv, _: kv.forks(2),
    "truncate": lambda kv, _: kv.truncate(0),
    "select": lambda kv, other: kv.select_and_copy_from(other, 0),
    "select from": lambda kv, other: other.select_and_copy_from(kv, 0),
    "broadcast": lambda kv, other: kv.broadcast_and_copy_from(other),
    "broadcast from": lambda kv, other: other.broadcast_and_copy_from(kv),
    "deep_copy": lambda kv, _: kv.deep_copy(),
    "serialize": lambda kv, _: kv.serialize(),
    "load": lambda kv, other: kv.load(other.serialize()),
    "row": lambda kv, _: kv.row(0),
}


@pytest.mark.parametrize("verb", CLOSED_VERBS)
def test_a_closed_cache_does_nothing_but_say_so(scribe: Any, pool: Any, verb: str) -> None:
    cache, _ = scribe.grown(pool, range(5))
    other, rows = scribe.grown(pool, range(3))
    cache.close()
    with other:
        free = pool.free_pages()
        with pytest.raises(CacheClosed):
            CLOSED_VERBS[verb](cache, other)
        assert pool.free_pages() == free
        scribe.check(other, rows)
    assert repr(cache) == "KVCache(closed)"


def test_a_closed_cache_asks_for_no_identity(scribe: Any, pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashing a model takes a while, and the model may be closed already."""
    cache, _ = scribe.grown(pool, range(5))
    cache.close()
    monkeypatch.setattr(pool, "identity", lambda: pytest.fail("nothing is going to be saved"))
    with pytest.raises(CacheClosed):
        cache.serialize()


def test_a_row_list_kept_past_close_frees_nothing_twice(scribe: Any, pool: Any) -> None:
    cache, _ = scribe.grown(pool, range(5))
    with cache.fork() as fork:
        for _ in range(3):
            cache.close()
        scribe.check_counts(pool, [fork])


def test_a_forgotten_cache_in_a_cycle_is_released_by_the_collector(scribe: Any, pool: Any) -> None:
    cache, _ = scribe.grown(pool, range(30))
    ring: list[Any] = [cache]
    ring.append(ring)
    del cache, ring
    with pytest.warns(ResourceWarning, match="without close"):
        gc.collect()
    assert pool.free_pages() == (32,)


def test_a_closed_cache_is_forgotten_in_silence(scribe: Any, pool: Any) -> None:
    cache, _ = scribe.grown(pool, range(30))
    cache.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del cache
        gc.collect()


def test_an_error_inside_with_still_closes(scribe: Any, pool: Any) -> None:
    with pytest.raises(KeyError), KVCache(pool) as cache:
        scribe.extend(cache, [scribe.cells(range(9))])
        raise KeyError
    assert cache.closed
    assert pool.free_pages() == (32,)


@pytest.mark.parametrize("n", [-1, -(2**63)])
def test_a_negative_number_of_forks_is_refused(pool: Any, n: int) -> None:
    with KVCache(pool) as cache, pytest.raises(InputError, match="negative"):
        cache.forks(n)


def test_thousands_of_forks_cost_no_page(scribe: Any, pool: Any) -> None:
    cache, rows = scribe.grown(pool, range(100))
    free = pool.free_pages()
    many = cache.forks(3000)
    assert pool.free_pages() == free
    assert pool.holders(0, cache.pages()[0][0]) == 3001
    scribe.check(many[-1], rows)
    for one in (cache, *many):
        one.close()
    assert pool.free_pages() == (32,)


def test_a_repr_tells_lengths_and_pages(scribe: Any, pool: Any) -> None:
    cache, _ = scribe.grown(pool, range(5), batch=2)
    with cache:
        assert repr(cache) == "KVCache(lengths=[5, 5], pages=4)"


def test_whole_numbers_of_numpy_are_numbers_and_flags_are_not(pool: Any) -> None:
    with KVCache(pool) as kv:
        kv.reserve(np.int64(3))
        kv.commit([[1, 2, 3]])
        kv.truncate([np.int32(2)])
        assert kv.lengths == (2,)
        for wrong in (True, 1.0, "1", [None]):
            with pytest.raises(InputError, match="whole number"):
                kv.truncate(wrong)  # type: ignore[arg-type]


def test_a_source_abroad_does_not_change_while_it_is_copied(scribe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    here, abroad = scribe.pool(), scribe.pool()
    with KVCache(here) as target, KVCache(abroad) as source:
        scribe.extend(source, [scribe.cells(range(9))])
        cut = threading.Thread(target=lambda: source.truncate(0))
        honest, seen = CacheRow.image, []

        def cut_meanwhile(row: CacheRow) -> RowImage:
            cut.start()
            cut.join(0.2)
            seen.append(row.length)
            return honest(row)

        monkeypatch.setattr(CacheRow, "image", cut_meanwhile)
        target.select_and_copy_from(source, 0)
        cut.join()
        assert (seen, target.lengths, source.lengths) == ([9], (9,), (0,))


def test_one_token_is_appended_where_nothing_else_is_to_do(pool: Any) -> None:
    size = pool.page_tokens
    with KVCache(pool) as kv, KVCache(pool) as other:
        for cache in (kv, other):
            cache.reserve(size + 3)
        simple = not pool.window_groups and pool.layout.recurrent is None
        for position in range(size + 2):
            fills = (position + 1) % size == 0
            assert kv.commit_token(position, position) == (simple and not fills)
            if not simple or fills:
                kv.commit([[position]])
            other.commit([[position]])
            assert kv.tokens() == other.tokens() == list(range(position + 1))
        assert not kv.commit_token(5, size + 1) and not kv.commit_token(5, size + 3), "it stands elsewhere"
        assert not kv.commit_token(-1, size + 2) and not kv.commit_token(1 << 63, size + 2)
        assert kv.lengths == (size + 2,)
    assert not kv.commit_token(5, size + 2)
    with KVCache(pool, 2) as rows, KVCache(pool) as full:
        rows.reserve(2)
        assert not rows.commit_token(5, 0) and not full.commit_token(5, 0)
