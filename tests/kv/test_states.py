"""Recurrent state as a value: replaced and never changed in place, with checkpoints to go back to."""

from __future__ import annotations

import json
from typing import Any

import pytest
from desk import SIZE, Desk
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from kvilt.errors import BlobError, InputError
from kvilt.kv.cache import KVCache
from kvilt.kv.checkpoints import CheckpointSchedule
from kvilt.kv.layout import KVLayout
from kvilt.kv.pool import PagePool
from kvilt.kv.row_states import ROW_STATES
from kvilt.ops.reference import ReferenceOps

LAWS = settings(max_examples=examples(60), derandomize=True, database=None)
EVERY = 2 * SIZE  # tokens between two checkpoints in the pools of these tests


def states_of(cache: KVCache) -> dict[int, int]:
    states = cache.row(0).states
    assert states is not None
    return states.committed


@given(prompt=st.integers(0, 20), drafts=st.integers(1, 6), accepted=st.integers(0, 6))
@LAWS
def test_a_step_with_drafts_leaves_a_state_after_each(scribe: Any, prompt: int, drafts: int, accepted: int) -> None:
    pool = scribe.pool(scribe.recurrent(), states=16)
    cache, (row,) = scribe.grown(pool, list(range(prompt)))
    new, accepted = scribe.cells(range(drafts), row), min(accepted, drafts)
    with cache:
        cache.reserve(drafts, drafts=drafts)
        states = cache.row(0).states
        for position, slot in states.fold(range(prompt, prompt + drafts), drafts).writes.items():
            pool.write_states([slot], scribe.state(new[position - prompt - 1][1], pool.layout))
        scribe.write_pages(cache, [new])
        cache.commit([[token for token, _ in new[:accepted]]])
        assert cache.resumes_at == cache.lengths == (prompt + accepted,)
        scribe.check(cache, [row + new[:accepted]])
    assert pool.free_states() == pool.state_slots


@given(prompt=st.integers(1, 40), noise=st.integers(1, 20))
@LAWS
def test_a_step_that_is_not_committed_leaves_the_state(scribe: Any, prompt: int, noise: int) -> None:
    pool = scribe.pool(scribe.recurrent())
    cache, (row,) = scribe.grown(pool, list(range(prompt)))
    with cache:
        before, held = cache.serialize(), dict(states_of(cache))
        cache.reserve(noise)
        scribe.write(cache, [scribe.cells(range(noise), row, b"noise")])
        assert cache.serialize() == before
        cache.truncate(cache.lengths)
        assert states_of(cache) == held
        scribe.extend(cache, [scribe.cells([5] * noise, row)])
        scribe.check(cache, [row + scribe.cells([5] * noise, row)])


@given(prompt=st.integers(EVERY, 60), back=st.integers(0, SIZE))
@LAWS
def test_a_short_way_back_resumes_from_a_checkpoint(scribe: Any, prompt: int, back: int) -> None:
    pool = scribe.pool(scribe.recurrent())
    cache, (row,) = scribe.grown(pool, list(range(prompt)))
    with cache:
        length = max(EVERY, prompt - back)
        cache.truncate(length)
        assert cache.lengths == (length,)
        assert 0 <= length - cache.resumes_at[0] < 2 * EVERY
        scribe.extend(cache, [scribe.cells([1, 2, 3], row[:length])])
        assert cache.resumes_at == cache.lengths
        scribe.check(cache, [row[:length] + scribe.cells([1, 2, 3], row[:length])])


@given(steps=st.lists(st.integers(1, 30), min_size=1, max_size=12))
@LAWS
def test_a_row_holds_a_bounded_number_of_states(scribe: Any, steps: list[int]) -> None:
    pool = scribe.pool(scribe.recurrent(), pages=100, states=3 * ROW_STATES)
    with KVCache(pool) as cache:
        row: list[Any] = []
        for count in steps:
            new = scribe.cells(range(count), row)
            scribe.extend(cache, [new])
            row += new
            states = cache.row(0).states
            assert len(states.committed) <= ROW_STATES - 1
            assert len(states.slots()) <= 2 * ROW_STATES
        scribe.check(cache, [row])


@given(rows=st.integers(1, 4), more=st.integers(0, 12), steps=st.lists(st.integers(1, 24), min_size=1, max_size=6))
@LAWS
def test_checkpoints_of_a_long_prompt_give_way_to_its_rows(scribe: Any, rows: int, more: int, steps: list[int]) -> None:
    """A prompt that takes several steps before it is committed needs two slots a row, however many it passes."""
    layout = scribe.recurrent()
    schedule = CheckpointSchedule(EVERY, SIZE)
    pool = PagePool(layout, 200, ReferenceOps(), lambda: scribe.identity, states=2 * rows + more, checkpoints=schedule)
    count, done = sum(steps), 0
    new = [scribe.cells(range(row, row + count)) for row in range(rows)]
    with KVCache(pool, rows, count) as cache:
        for step in steps:
            span = range(done, done + step)
            cache.reserve([count] * rows, [span] * rows)
            scribe.write(cache, new, [span] * rows)
            done += step
        cache.commit([[token for token, _ in row] for row in new])
        assert cache.resumes_at == cache.lengths == (count,) * rows
        scribe.check(cache, new)
    assert pool.free_states() == pool.state_slots


def test_a_fork_shares_states_and_each_writes_its_own(scribe: Any) -> None:
    pool = scribe.pool(scribe.recurrent())
    parent, (row,) = scribe.grown(pool, list(range(10)))
    with parent, parent.fork() as child:
        assert states_of(parent) == states_of(child)
        before = pool.free_states()
        parent.fork().close()
        assert pool.free_states() == before
        mine, theirs = scribe.cells([1], row, b"a"), scribe.cells([2], row, b"b")
        scribe.extend(child, [mine])
        scribe.extend(parent, [theirs])
        scribe.check(child, [row + mine])
        scribe.check(parent, [row + theirs])


def test_a_wanted_checkpoint_is_kept(scribe: Any) -> None:
    pool = scribe.pool(scribe.recurrent())
    with KVCache(pool) as cache:
        cache.want_checkpoints([3 * SIZE])
        row = scribe.cells(range(3 * SIZE + 2))
        scribe.extend(cache, [row])
        assert 3 * SIZE in states_of(cache)
        cache.truncate(3 * SIZE + 1)
        assert cache.resumes_at == (3 * SIZE,)


def test_a_row_that_leaves_out_positions_or_starts_elsewhere_is_refused(scribe: Any) -> None:
    from kvilt.batch import Batch, Ids, Row

    pool = scribe.pool(scribe.recurrent())
    cache, _ = scribe.grown(pool, list(range(6)))
    with cache:
        cache.reserve(4)
        with pytest.raises(InputError, match="leave no position out"):
            Batch.of([Row(Ids([1, 2]), [6, 8], cache)])
        with pytest.raises(InputError, match="no recurrent state ends at position 7"):
            Batch.of([Row(Ids([1]), [7], cache)])


def test_windows_beside_recurrent_state_are_refused(scribe: Any) -> None:
    layout = KVLayout(scribe.windowed().groups, scribe.recurrent().recurrent)
    with pytest.raises(InputError, match="sliding windows"):
        PagePool(layout, 32, ReferenceOps(), lambda: scribe.identity, states=8)


@pytest.mark.parametrize("states", [[0], [5, 3], [99], "no list", [3, 3]])
def test_positions_of_states_that_make_no_sense_are_refused(scribe: Any, states: Any) -> None:
    from kvilt.kv import codec

    pool = scribe.pool(scribe.recurrent())
    cache, _ = scribe.grown(pool, list(range(10)))
    with cache:
        row = codec._RowHeader(10, [], [0], [3]).fields() | {"states": states}
        with pytest.raises(BlobError, match=r"^rows\.states"):
            codec._row_header(json.loads(json.dumps(row)), pool.layout, 100)


# In the prefix index.


def desk(scribe: Any, states: int = 64) -> Desk:
    return Desk(scribe, scribe.recurrent(), 64, states=states)


def test_the_next_turn_finds_the_last_page_that_the_one_before_filled(scribe: Any) -> None:
    index = desk(scribe)
    line = index.run(list(range(13)))
    for token in range(13, 23):  # an answer, token by token
        index.extend(line, [token])
    line.cache.close()
    assert index.found([*range(23), 99]) == 20
    again = index.run([*range(23), 99])
    index.scribe.check(again.cache, [again.cells])
    again.cache.close()


def test_of_ends_of_pages_that_are_no_checkpoints_the_index_keeps_the_last(scribe: Any) -> None:
    index = desk(scribe)
    line = index.run([0])
    for token in range(1, 7 * SIZE + 2):
        index.extend(line, [token])
    line.cache.close()
    # Checkpoints at 8, 16 and 24, and the last end of a page, 28.
    assert index.pool.state_slots - index.pool.free_states() == 0
    assert [index.found(list(range(40)), most=n) for n in (7, 8, 15, 23, 27, 28)] == [0, 8, 8, 16, 24, 28]


@given(lines=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=8))
@LAWS
def test_a_prefix_with_its_state_is_what_was_computed_and_nothing_leaks(scribe: Any, lines: list[list[int]]) -> None:
    """Few slots: states are evicted all the time, and only hits are lost."""
    index = desk(scribe, states=6)
    for tokens in lines:
        line = index.run(tokens)
        index.scribe.check(line.cache, [line.cells])
        line.cache.close()
        assert index.found(tokens) % SIZE == 0
    index.index.clear()
    assert index.pool.free_pages() == index.pool.group_pages
    assert len(index.pool._free[-1]) == index.pool.state_slots


def test_an_evicted_page_brings_its_state(scribe: Any) -> None:
    evicted: list[Any] = []
    index = Desk(scribe, scribe.recurrent(), 64, evicted.append, states=4)
    first = index.run(list(range(9)))
    cells = list(first.cells)
    first.cache.close()
    for start in (50, 60, 70):
        index.once(list(range(start, start + 9)))
    (page,) = [one for one in evicted if one.tokens == tuple(range(8))]
    assert page.state is not None
    assert page.state.keys.equal(scribe.state(cells[7][1], index.pool.layout).keys)
