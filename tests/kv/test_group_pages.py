"""Layer groups with different numbers of pages: how memory is split, and that every verb works on the result."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from desk import BASE, SIZE, Desk
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from kvilt.errors import ContextOverflow, InputError, PoolExhausted
from kvilt.kv.cache import KVCache
from kvilt.kv.layout import Full, KVLayout, Latent, LayerGroup, Window
from kvilt.kv.pool import PagePool
from kvilt.kv.prefix_keys import PrefixKeys
from kvilt.kv.row import RowImage
from kvilt.kv.saved import read_file
from kvilt.kv.sizing import SEQUENCE_TOKENS, STEP_TOKENS, split_memory
from kvilt.ops.contract import PageShape
from kvilt.ops.kv_dtypes import FLOAT16

PAGE = 32
FEW = (40, 9)  # pages of the scribe's windowed layout: the full group, and two windows and a page of the other


def layers(reach: Full | Window | Latent, first: int, count: int, heads: int = 4) -> LayerGroup:
    return LayerGroup(reach, tuple(range(first, first + count)), PageShape(count, PAGE, heads, 256, 256, FLOAT16))


GEMMA = KVLayout((layers(Window(1024), 0, 29), layers(Full(), 29, 5)))  # as many of each as in Gemma 3 of 4B
ONE = KVLayout((layers(Full(), 0, 34),))


# How memory is split.


def used_bytes(layout: KVLayout, pages: Sequence[int]) -> int:
    return sum(n * group.shape.page_bytes for n, group in zip(pages, layout.groups, strict=True))


def test_more_tokens_fit_the_same_memory_than_with_equal_groups() -> None:
    memory = 4 << 30
    window, full = split_memory(GEMMA, memory, 131072)
    equal = memory // GEMMA.page_bytes
    assert used_bytes(GEMMA, (window, full)) <= memory < used_bytes(GEMMA, (window + 1, full + 1))
    assert (equal, full, window) == (963, 2257, 740)
    assert full * PAGE > 2 * equal * PAGE, "twice as many tokens of long sequences"
    per_sequence = 2 * 34 + STEP_TOKENS // PAGE  # a window of 1024 tokens takes 34 pages at most
    assert GEMMA.groups[0].window_pages == 34
    assert window // per_sequence == full * PAGE // SEQUENCE_TOKENS == 8, "sequences that fit, by either group"


def test_what_fits_one_long_sequence_is_split_for_one() -> None:
    memory = 400 << 20
    window, full = split_memory(GEMMA, memory, 131072)
    assert window == 2 * 34 + STEP_TOKENS // PAGE
    assert 0 <= memory - used_bytes(GEMMA, (window, full)) < GEMMA.groups[1].shape.page_bytes
    small = 40 * GEMMA.page_bytes
    assert split_memory(GEMMA, small, 131072) == (40, 40), "as long as a window sees all, groups need as much"


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 20))
def test_one_group_has_all_the_pages_that_fit(memory: int, context: int) -> None:
    assert split_memory(ONE, memory, context) == (memory // ONE.page_bytes,)
    both = KVLayout((layers(Full(), 0, 3), layers(Latent(8), 3, 2, heads=1)))
    assert split_memory(both, memory, context) == (memory // both.page_bytes,) * 2
    windows = KVLayout((layers(Window(64), 0, 3), layers(Window(512), 3, 2)))
    assert split_memory(windows, memory, context) == (memory // windows.page_bytes,) * 2


reaches = st.lists(st.one_of(st.just(Full()), st.builds(Window, st.integers(1, 5000))), min_size=1, max_size=4)


@given(reaches, st.integers(0, 1 << 36), st.integers(1, 1 << 20))
@settings(max_examples=examples(300))
def test_every_split_fits_the_memory_and_makes_a_pool(each: list[Full | Window], memory: int, context: int) -> None:
    layout = KVLayout(tuple(layers(reach, i, 1) for i, reach in enumerate(each)))
    pages = split_memory(layout, memory, context)
    equal = memory // layout.page_bytes
    assert used_bytes(layout, pages) <= memory
    assert max(pages) >= equal, "no sequence became shorter"
    assert (max(pages) == 0) == (equal == 0)
    if equal:
        ops = _Ops()
        pool = PagePool(layout, [min(n, 5000) for n in pages], ops, _no_identity)  # type: ignore[arg-type]
        assert ops.made == [min(n, 5000) + 1 for n in pages]
        assert pool.step_tokens is None or pool.step_tokens >= STEP_TOKENS
    if context <= PAGE * equal:
        more = split_memory(layout, memory + layout.page_bytes, context)
        assert all(a <= b for a, b in zip(pages, more, strict=True)), "more memory is more pages of each group"


@given(reaches, st.integers(0, 1 << 36), st.integers(1, 1 << 20), st.integers(1, 1 << 14))
@settings(max_examples=examples(300))
def test_a_prompt_enters_in_steps_of_the_device(
    each: list[Full | Window], memory: int, context: int, step_tokens: int
) -> None:
    """Where memory holds one sequence, its windows have room for a whole step, however long steps are."""
    layout = KVLayout(tuple(layers(reach, i, 1) for i, reach in enumerate(each)))
    pages = split_memory(layout, memory, context, step_tokens)
    assert used_bytes(layout, pages) <= memory
    assert max(pages) >= memory // layout.page_bytes
    if min(pages):
        pool = PagePool(layout, [min(n, 5000) for n in pages], _Ops(), _no_identity)  # type: ignore[arg-type]
        assert pool.step_tokens is None or pool.step_tokens >= step_tokens


def test_sequences_share_the_room_of_a_long_step() -> None:
    memory, step = 4 << 30, 8192
    short, long = (split_memory(GEMMA, memory, 131072, tokens) for tokens in (STEP_TOKENS, step))
    assert short == split_memory(GEMMA, memory, 131072)
    assert long == (799, 1913), "a long step is held once, not for each sequence"


class _Ops:
    """Counts pages instead of making them."""

    def __init__(self) -> None:
        self.made: list[int] = []

    def new_pages(self, _shape: PageShape, pages: int, _device: torch.device) -> None:
        self.made.append(pages)


def _no_identity() -> Any:
    raise AssertionError("not asked for")


# Pools.


@pytest.mark.parametrize("pages", [(9, 8), (8, 20), (40, 8), (4, 40)])
def test_a_group_that_is_too_small_is_refused(scribe: Any, pages: tuple[int, int]) -> None:
    """A group that keeps everything needs as many pages as any other, a window group two windows and a page."""
    with pytest.raises(InputError, match="cannot stand beside"):
        scribe.pool(scribe.windowed(), pages)


def test_a_pool_counts_each_group(scribe: Any) -> None:
    pool = scribe.pool(scribe.windowed(), FEW)
    shapes = [group.shape.page_bytes for group in pool.layout.groups]
    assert (pool.pages, pool.group_pages, pool.dummy_pages, pool.small_groups) == (40, FEW, FEW, (1,))
    assert (pool.tokens, pool.nbytes) == (160, 40 * shapes[0] + 9 * shapes[1])
    assert pool.step_tokens == 4
    pool.take([3, 2], "a")
    usage = pool.usage()
    assert (usage.total, usage.used, usage.used_bytes) == (49, 5, 3 * shapes[0] + 2 * shapes[1])
    assert pool.held_by("a") == 2 * 40 // 9, "its largest share of a group"
    pool.take([5, 0], "b")
    assert (pool.held_by("b"), pool.fair_share()) == (5, 20)
    with pytest.raises(PoolExhausted) as error:
        pool.take([1, 8])
    assert (error.value.needed, error.value.free, error.value.total) == (8, 7, 9)
    assert pool.free_pages() == (32, 7)


# Caches.


@given(st.integers(0, 40), st.integers(1, 100), st.integers(1, 4))
@settings(max_examples=examples(150))
def test_a_long_input_needs_no_more_than_its_windows(scribe: Any, before: int, tokens: int, size: int) -> None:
    """Whatever is there already, an input runs in steps while the pool has two windows and a step; one commit."""
    pool, equal = scribe.pool(scribe.windowed(), FEW), scribe.pool(scribe.windowed(), 40)
    old = scribe.cells(range(before))
    new = scribe.cells(range(before, before + tokens), old)
    with KVCache(pool) as cache, KVCache(equal) as other:
        scribe.extend_in_steps(cache, [old], size)
        with cache.fork() as kept:
            scribe.extend_in_steps(cache, [new], size)
            scribe.check(kept, [old])
        scribe.check(cache, [old + new])
        scribe.extend(other, [old])
        scribe.extend(other, [new])
        assert cache.serialize() == other.serialize(), "the same as on equal groups"
        assert len(cache.pages()[1]) <= pool.layout.groups[1].window_pages
        scribe.check_counts(pool, [cache])
    assert pool.free_pages() == FEW


def test_a_sequence_may_be_as_long_as_the_full_group(scribe: Any) -> None:
    pool = scribe.pool(scribe.windowed(), FEW)
    cells = scribe.cells(range(160))
    with KVCache(pool) as cache:
        for start in range(0, 160, 4):
            scribe.extend(cache, [cells[start : start + 4]])
        scribe.check(cache, [cells])
        assert pool.free_pages()[0] == 0
        with pytest.raises(ContextOverflow):
            cache.reserve(1)


def test_an_input_that_stops_half_way_leaves_the_cache_as_it_was(scribe: Any) -> None:
    pool = scribe.pool(scribe.windowed(), FEW)
    cache, rows = scribe.grown(pool, range(11))
    new = [scribe.cells(range(60), rows[0])]
    with cache:
        for start in range(0, 32, 4):
            cache.reserve(60, [range(start, start + 4)])
            scribe.write(cache, new, [range(start, start + 4)])
        with pytest.raises(InputError, match="reserve it before the step"):
            cache.commit([[token for token, _ in new[0]]])  # the last ones were not written
        with pytest.raises(InputError, match="reserve it before the step"):
            cache.commit([[token for token, _ in new[0][:8]]])  # the window has left these behind
        scribe.check(cache, rows)
        cache.truncate(cache.lengths)
        scribe.check(cache, rows)
        scribe.check_counts(pool, [cache])


def test_an_input_may_turn_out_longer_than_the_room_that_was_made(scribe: Any) -> None:
    pool = scribe.pool(scribe.windowed(), FEW)
    with KVCache(pool) as cache:
        cache.reserve(6, [range(0)])  # room for two pages, and none for a step
        cache.reserve(12, [range(12)])
        row = cache.row(0)
        assert (row.reserved, row.writable(range(12))) == (12, True)
        assert [len(pages) for pages in cache.pages()] == [3, 3]


def test_what_a_step_has_no_page_for_is_not_writable(scribe: Any) -> None:
    pool = scribe.pool(scribe.windowed(), FEW)
    with KVCache(pool) as cache:
        cache.reserve(60, [range(8)])
        row = cache.row(0)
        assert (row.reserved, row.writable(range(8)), row.writable(range(9))) == (60, True, False)
        cache.reserve(60, [range(24, 28)])
        assert (row.writable(range(24, 28)), row.writable(range(4))) == (True, False)
        with pytest.raises(PoolExhausted):
            cache.reserve(60)  # all at once are 15 pages of the window group


def test_forks_cuts_and_files_of_a_long_row(scribe: Any, tmp_path: Path) -> None:
    pool = scribe.pool(scribe.windowed(), (60, 9))
    cells = scribe.cells(range(90))
    with KVCache(pool) as cache:
        scribe.extend_in_steps(cache, [cells], 4)
        with cache.fork() as fork:
            more = scribe.cells([7, 8, 9], cells)
            scribe.extend(fork, [more])
            scribe.check(fork, [cells + more])
            fork.truncate(89)
            scribe.check(fork, [cells[:89]])
        cache.save(tmp_path / "kv")
        data = read_file(pool, tmp_path / "kv", 160)
        with KVCache(pool) as loaded, cache.deep_copy() as copy:
            assert max(map(len, copy.pages())) == 23
            copy.close()
            loaded.load(data)
            scribe.check(loaded, [cells])
        scribe.check_counts(pool, [cache])


# Prefixes.


def image_at(desk: Desk, tokens: Sequence[int], at: int) -> RowImage:
    """Page `at` of a sequence, as a store gives it back."""
    layout, stop = desk.pool.layout, (at + 1) * SIZE
    kv = desk.scribe.image(desk.cells(tokens[:stop], BASE)[at * SIZE :], layout)
    return RowImage(array("q", tokens[:stop]), {}, (at * SIZE,) * len(kv), tuple(kv))


@pytest.mark.parametrize("known", [0, 3, 12])
def test_a_stored_prefix_longer_than_the_window_group_is_restored(scribe: Any, known: int) -> None:
    desk = Desk(scribe, scribe.windowed(page_tokens=SIZE), FEW)
    tokens = list(range(30 * SIZE))
    for stop in range(SIZE, known * SIZE + 1, SIZE):
        desk.once(tokens[:stop])
    prefix_keys = PrefixKeys(BASE)
    prefix_keys.extend(tokens, SIZE)
    first = desk.index.missing(prefix_keys, len(tokens) - 1)
    assert first == known
    images = [image_at(desk, tokens, at) for at in range(first, 30)]
    assert desk.index.restore(prefix_keys, images[:10]) == 10
    assert desk.index.restore(prefix_keys, images[10:]) == len(images) - 10
    line = desk.begin(tokens)
    assert line.cache.num_entries == len(tokens) - 1
    line.cache.close()
    assert desk.pool.free_pages() == FEW


def test_a_long_input_is_known_also_where_windows_stand_before_the_full_group(scribe: Any) -> None:
    """When it is committed, the first of its pages have left the window group already."""
    full, window = scribe.windowed(page_tokens=SIZE).groups
    desk = Desk(scribe, KVLayout((window, full)), (9, 40))
    line, cells = desk.begin(range(40)), desk.cells(range(40), BASE)
    for start in range(0, 40, SIZE):
        line.cache.reserve(40, [range(start, start + SIZE)])
        scribe.write(line.cache, [cells], [range(start, start + SIZE)])
    tokens = [token for token, _ in cells]
    line.cache.commit([tokens], filled=lambda row: desk.index.insert(row, line.prefix_keys))
    line.cache.close()
    assert desk.found(range(40)) == 40
    again = desk.begin(range(44))
    assert again.cache.num_entries == 40
    again.cache.close()


def test_a_prefix_is_found_while_its_window_is_kept(scribe: Any) -> None:
    """A conversation goes on while others take no more pages of the window group than it has beside its window."""
    desk = Desk(scribe, scribe.windowed(page_tokens=SIZE), (60, 12))
    talk, found = list(range(20 * SIZE)), []
    line = desk.begin(talk)
    for start in range(0, len(talk), SIZE):
        desk.extend(line, talk[start : start + SIZE])
    line.cache.close()
    for other in range(10):
        desk.once([1000 + other] * SIZE)
        found.append(desk.found(talk))
    assert found == [20 * SIZE] * 9 + [19 * SIZE], "its last pages were let go last, and the last of them first"
    assert desk.pool.free_pages() == (60, 12)
