"""The laws of KV as a value, one property each; KV here depends on all tokens up to it, as a model's does."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from kvilt.kv.cache import KVCache

LAWS = settings(max_examples=examples(80), derandomize=True, database=None)

tokens = st.lists(st.integers(0, 99), max_size=30)
some_tokens = st.lists(st.integers(0, 99), min_size=1, max_size=30)
each_layout = pytest.mark.parametrize("layout", ["full", "windowed", "latent", "recurrent"])


@each_layout
@given(prompt=tokens, mine=some_tokens, theirs=some_tokens)
@LAWS
def test_a_write_after_fork_changes_neither_parent_nor_sibling(
    scribe: Any, layout: str, prompt: list[int], mine: list[int], theirs: list[int]
) -> None:
    pool = scribe.pool(scribe.layout(layout), pages=64)
    parent, rows = scribe.grown(pool, prompt)
    with parent, parent.fork() as child, parent.fork() as other:
        before = parent.serialize()
        grown = [scribe.cells(mine, rows[0], b"child")]
        scribe.extend(child, grown)
        assert parent.serialize() == other.serialize() == before
        scribe.extend(parent, [scribe.cells(theirs, rows[0], b"parent")])
        scribe.check(child, [rows[0] + grown[0]])
        scribe.check(other, rows)


@each_layout
@given(prompt=some_tokens, more=some_tokens, back=st.integers(0, 12))
@LAWS
def test_truncate_then_recompute_equals_never_having_gone_further(
    scribe: Any, layout: str, prompt: list[int], more: list[int], back: int
) -> None:
    pool = scribe.pool(scribe.layout(layout), pages=64)
    cache, (row,) = scribe.grown(pool, prompt)
    straight = KVCache(pool)
    with cache, straight:
        extra = scribe.cells(range(back), row)
        scribe.extend(cache, [extra])
        floor = cache.row(0).floor
        length = max(floor, len(prompt) - back)
        cache.truncate(length)
        kept = row[:length] if length <= len(row) else row + extra[: length - len(row)]
        scribe.extend(cache, [scribe.cells(more, kept)])

        scribe.extend(straight, [scribe.cells([token for token, _ in kept] + more)])
        scribe.check(cache, [kept + scribe.cells(more, kept)])
        scribe.check(straight, [kept + scribe.cells(more, kept)])
        assert cache.tokens() == straight.tokens()
        if layout == "full":  # a window may have kept a page more or less, which the next query cannot see
            assert cache.serialize() == straight.serialize()


@each_layout
@given(prompt=tokens, cuts=st.lists(st.integers(0, 30), max_size=4))
@LAWS
def test_a_prompt_in_pieces_equals_the_prompt_in_one(
    scribe: Any, layout: str, prompt: list[int], cuts: list[int]
) -> None:
    pool = scribe.pool(scribe.layout(layout), pages=64)
    whole, (row,) = scribe.grown(pool, prompt)
    pieces = KVCache(pool)
    with whole, pieces:
        edges = [0, *sorted(min(cut, len(row)) for cut in cuts), len(row)]
        for start, stop in pairwise(edges):
            scribe.extend(pieces, [row[start:stop]])
        scribe.check(pieces, [row])
        scribe.check(whole, [row])
        assert pieces.resumes_at == whole.resumes_at == (len(row),)
        if layout != "recurrent":  # which checkpoints a row holds depends on where its pieces ended
            assert pieces.serialize() == whole.serialize()


@each_layout
@given(prompt=tokens, n=st.integers(1, 4))
@LAWS
def test_broadcast_equals_n_forks(scribe: Any, layout: str, prompt: list[int], n: int) -> None:
    pool = scribe.pool(scribe.layout(layout), pages=64)
    source, rows = scribe.grown(pool, prompt)
    wide = KVCache(pool, n)
    wide.broadcast_and_copy_from(source)
    forks = source.forks(n)
    scribe.check(wide, rows * n)
    for index, fork in enumerate(forks):
        one = KVCache(pool)
        one.select_and_copy_from(wide, index)
        assert one.serialize() == fork.serialize()
        assert one.pages() == fork.pages() == wide.pages()
        one.close()
    for cache in (source, wide, *forks):
        cache.close()
    assert pool.free_pages() == (64,) * len(pool.layout.groups)


@each_layout
@given(first=tokens, second=tokens, index=st.integers(0, 1))
@LAWS
def test_select_commutes_with_fork(scribe: Any, layout: str, first: list[int], second: list[int], index: int) -> None:
    pool = scribe.pool(scribe.layout(layout), pages=64)
    batch = KVCache(pool, 2)
    scribe.extend(batch, [scribe.cells(first), scribe.cells(second)])
    selected = KVCache(pool)
    selected.select_and_copy_from(batch, index)
    forked = batch.fork()
    selected_of_fork = KVCache(pool)
    selected_of_fork.select_and_copy_from(forked, index)
    fork_of_selected = selected.fork()
    assert selected_of_fork.serialize() == fork_of_selected.serialize()
    assert selected_of_fork.pages() == fork_of_selected.pages()
    for cache in (batch, selected, forked, selected_of_fork, fork_of_selected):
        cache.close()


@each_layout
@given(prompt=tokens, other=some_tokens)
@LAWS
def test_a_deep_copy_is_equal_shares_no_page_and_lives_on_alone(
    scribe: Any, layout: str, prompt: list[int], other: list[int]
) -> None:
    pool = scribe.pool(scribe.layout(layout), pages=64)
    cache = KVCache(pool, 2)
    rows = [scribe.cells(prompt), scribe.cells(other)]
    scribe.extend(cache, rows)
    copy = cache.deep_copy()
    assert copy.serialize() == cache.serialize()
    assert all(not set(a) & set(b) for a, b in zip(cache.pages(), copy.pages(), strict=True))
    cache.close()
    scribe.check(copy, rows)
    copy.close()
    assert pool.free_pages() == (64,) * len(pool.layout.groups)


@each_layout
@given(rows=st.lists(tokens, min_size=1, max_size=3), sizes=st.sampled_from([(4, 3), (3, 4), (2, 8)]))
@LAWS
def test_load_of_serialize_is_byte_exact_whatever_the_page_size(
    scribe: Any, layout: str, rows: list[list[int]], sizes: tuple[int, int]
) -> None:
    home, abroad = (scribe.pool(scribe.layout(layout, page_tokens=size), pages=64) for size in sizes)
    cells = [scribe.cells(row) for row in rows]
    with KVCache(home, len(rows)) as cache, KVCache(abroad, len(rows)) as guest:
        scribe.extend(cache, cells)
        guest.load(cache.serialize())
        assert guest.serialize() == cache.serialize()
        scribe.check(guest, cells)
        more = [scribe.cells([7] * 9, row) for row in cells]
        scribe.extend(guest, more)
        scribe.check(guest, [row + new for row, new in zip(cells, more, strict=True)])


@each_layout
@given(prompt=tokens, noise=some_tokens)
@LAWS
def test_a_step_without_commit_changes_nothing_but_reserved_room(
    scribe: Any, layout: str, prompt: list[int], noise: list[int]
) -> None:
    pool = scribe.pool(scribe.layout(layout), pages=64)
    cache, rows = scribe.grown(pool, prompt)
    with cache:
        before, free = cache.serialize(), pool.free_pages()
        cache.reserve(len(noise))
        scribe.write(cache, [scribe.cells(noise, rows[0], b"noise")])
        assert cache.serialize() == before
        assert cache.lengths == (len(prompt),)
        cache.truncate(cache.lengths)
        assert pool.free_pages() == free
        scribe.check(cache, rows)


@given(length=st.integers(1, 60), steps=st.integers(1, 7))
@LAWS
def test_a_window_keeps_a_bounded_number_of_pages_however_long_the_row(scribe: Any, length: int, steps: int) -> None:
    pool = scribe.pool(scribe.windowed(), pages=64)
    with KVCache(pool) as cache:
        row: list[Any] = []
        while len(row) < length:
            new = scribe.cells(range(steps), row)
            scribe.extend(cache, [new])
            row += new
            cache.truncate(cache.lengths)
            # The window can lie across three pages of four tokens; one more is slack for going back.
            assert len(cache.pages()[1]) <= 4
        scribe.check(cache, [row])


@given(length=st.integers(8, 40))
@LAWS
def test_a_windowed_row_can_always_take_back_a_page_of_tokens(scribe: Any, length: int) -> None:
    pool = scribe.pool(scribe.windowed(), pages=64)
    cache, (row,) = scribe.grown(pool, list(range(length)))
    with cache:
        cache.truncate(length - pool.layout.page_tokens)
        scribe.check(cache, [row[: length - pool.layout.page_tokens]])
