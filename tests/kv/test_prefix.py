"""The prefix index: exact on every hit, gone only where room was needed, tails first, and each page counted once."""

from __future__ import annotations

import dataclasses
import logging
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from desk import BASE, SIZE, Desk, Line
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

from kvilt.errors import PoolExhausted
from kvilt.kv import prefix_keys as prefix_keys_module
from kvilt.kv.cache import KVCache
from kvilt.kv.layout import KVLayout, LayerGroup, Window
from kvilt.kv.prefix import EvictedPage, PrefixMatch
from kvilt.kv.prefix_keys import PrefixKeys, PrefixScope
from kvilt.kv.row import GONE, RowImage, held
from kvilt.ops.contract import PageShape
from kvilt.ops.kv_dtypes import FLOAT32


@pytest.fixture
def desk(scribe: Any) -> Desk:
    return Desk(scribe, scribe.full(page_tokens=SIZE), 8)


# Whose room is taken.


def test_a_tenant_that_comes_with_much_does_not_flush_what_another_left(desk: Desk) -> None:
    """The pool has eight pages: one tenant leaves two, the other brings twenty."""
    quiet, loud = PrefixScope(salt="quiet"), PrefixScope(salt="loud")
    desk.once(range(8), quiet)
    for n in range(10):
        desk.once(range(100 * n, 100 * n + 8), loud)
    assert desk.found(range(8), quiet) == 8
    assert desk.found(range(900, 908), loud) == 8, "of its own, the oldest went"
    assert desk.found(range(8), loud) == 0


def test_where_nobody_else_has_more_the_longest_unused_goes_first(desk: Desk) -> None:
    for n in range(4):
        desk.once(range(100 * n, 100 * n + 8))
    desk.begin(range(9)).cache.close()  # used again
    desk.once(range(500, 508))
    assert [desk.found(range(100 * n, 100 * n + 8)) for n in range(4)] == [8, 0, 8, 8]


# What can be seen of it.


def test_branches_are_the_tree_of_what_is_known(desk: Desk) -> None:
    stem, left, right = [*range(8)], [20, 21, 22, 23], [30, 31, 32, 33]
    desk.once([*stem, *left])
    (alone,) = desk.index.branches("")
    assert (alone.tokens, alone.parent, alone.start, alone.pages) == ((*stem, *left), None, 0, 3)
    assert (alone.hits, alone.caches, alone.adapter) == (0, 0, "base")
    line = desk.run([*stem, *right, 40])
    trunk, one, other = desk.index.branches("")
    assert trunk.id == alone.id, "a branch keeps its name when another one leaves it"
    assert [(each.tokens, each.start, each.pages) for each in (trunk, one, other)] == [
        (tuple(stem), 0, 2),
        (tuple(left), 8, 1),
        (tuple(right), 8, 1),
    ]
    assert (one.parent, other.parent) == (trunk.id, trunk.id)
    assert [(each.hits, each.caches) for each in (trunk, one, other)] == [(1, 1), (0, 0), (0, 1)]
    fork = line.cache.fork()
    assert [each.caches for each in desk.index.branches("")] == [2, 0, 2]
    fork.close()
    line.cache.close()
    desk.index.clear()
    assert desk.index.branches("") == []


def test_branches_are_those_of_one_tenant(desk: Desk) -> None:
    desk.once(range(8), PrefixScope(salt="a"))
    desk.once(range(4), PrefixScope(adapter="a1", salt="b"))
    desk.once(range(4), PrefixScope(salt="b"))
    assert [(one.tokens, one.adapter) for one in desk.index.branches("a")] == [(tuple(range(8)), "base")]
    assert [(one.tokens, one.adapter) for one in desk.index.branches("b")] == [
        (tuple(range(4)), "a1"),
        (tuple(range(4)), "base"),
    ]
    assert desk.index.branches("") == []


# What is found.


def test_whole_pages_of_a_finished_sequence_are_found_and_hold_its_kv(desk: Desk) -> None:
    desk.once(range(10))
    assert desk.pool.usage().used == 0
    assert desk.pool.usage().cached == 2
    line = desk.begin(range(12))
    assert line.cache.num_entries == 8
    assert desk.pool.usage().used == 2
    line.cache.close()


def test_a_hit_costs_no_page_that_somebody_holds_and_says_how_many_nobody_does(desk: Desk) -> None:
    first = desk.run(range(10))
    prefix_keys = PrefixKeys(BASE)
    prefix_keys.extend(range(10), SIZE)
    assert desk.index.match(prefix_keys, 9) == PrefixMatch(8, idle=0)
    first.cache.close()
    assert desk.index.match(prefix_keys, 9) == PrefixMatch(8, idle=2)
    assert desk.index.match(prefix_keys, 5) == PrefixMatch(5, idle=2)
    assert desk.index.match(prefix_keys, 0) == PrefixMatch(0, idle=0)


def test_a_hit_may_end_inside_a_page_which_is_then_copied_by_the_first_write(desk: Desk) -> None:
    desk.once(range(8))
    line = desk.begin(range(8), most=7)
    assert line.cache.num_entries == 7
    desk.extend(line, [99])
    desk.scribe.check(line.cache, [line.cells])
    other = desk.begin(range(9))
    assert other.cache.num_entries == 8, "the page that was known is as it was"
    other.cache.close()
    line.cache.close()


def test_the_same_pages_computed_twice_are_held_once(desk: Desk) -> None:
    one, two = desk.begin(range(9)), desk.begin(range(9))
    desk.extend(one, range(9))
    used = desk.pool.usage().used
    desk.extend(two, range(9))
    assert desk.pool.usage().used == used + 1, "only the begun page is its own"
    desk.scribe.check(two.cache, [two.cells])
    one.cache.close()
    two.cache.close()
    assert desk.pool.free_pages() == (8,)


@pytest.mark.parametrize(
    "other",
    [PrefixScope(salt="b"), PrefixScope(adapter="sha256:1 x 0.5"), PrefixScope("bas", "e"), PrefixScope("", "base")],
)
def test_another_tenant_or_adapter_finds_nothing(desk: Desk, other: PrefixScope) -> None:
    desk.once(range(8))
    assert desk.found(range(8)) == 8
    assert desk.found(range(8), other) == 0
    desk.once(range(8), other)
    assert desk.found(range(8), other) == 8
    assert len(desk.index) == 4


def test_any_text_is_a_tenant(desk: Desk) -> None:
    """Also one that is no Unicode: a name that came through a system's files may be such."""
    desk.once(range(8), PrefixScope(salt="\ud800"))
    assert [desk.found(range(8), PrefixScope(salt=salt)) for salt in ("\ud800", "\ud801", "?")] == [8, 0, 0]


def test_embedding_rows_count_by_their_hashes(desk: Desk) -> None:
    image, other = b"\x07" * 32, b"\x08" * 32
    for one in (image, other):
        line = Line(KVCache(desk.pool), PrefixKeys(BASE), [])
        desk.extend(line, [1, one, 2, 3, 4])
        line.cache.close()
    for one in (image, other):
        prefix_keys = PrefixKeys(BASE)
        row = KVCache(desk.pool)
        row.reserve(4)
        row.commit([[1, one, 2, 3]])
        prefix_keys.add(row.row(0).content(0, 4))
        with desk.index.fork(prefix_keys, 4, 32) as cache:
            assert cache.tokens() == [1, one, 2, 3]
            desk.scribe.check(cache, [desk.cells([1, one, 2, 3], BASE)])
        row.close()
    assert desk.found([1, 5, 2, 3]) == 0


def test_a_key_that_lies_is_a_miss(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys equal: tokens are compared on every hit, so nothing but the one right page is ever found."""
    monkeypatch.setattr(prefix_keys_module, "_digest", lambda _data: b"same")
    desk.once(range(9))
    assert len(desk.index) == 1
    assert desk.found(range(8)) == 4
    assert desk.found([9, 9, 9, 9]) == 0
    assert desk.found(range(4), PrefixScope(salt="b")) == 0
    line = desk.run([9, 9, 9, 9, 9])
    desk.scribe.check(line.cache, [line.cells])
    line.cache.close()
    assert desk.pool.free_pages() == (8,)


# What is written.


def test_a_page_that_is_known_is_never_written_to(desk: Desk) -> None:
    line = desk.run(range(8))
    line.cache.truncate(6)
    assert not line.cache.row(0).writable([6])
    with pytest.raises(AssertionError):
        desk.scribe.write(line.cache, [desk.cells([1], BASE)])
    line.prefix_keys, line.cells = PrefixKeys(BASE), line.cells[:6]
    desk.extend(line, [50, 51, 52])
    desk.scribe.check(line.cache, [line.cells])
    assert desk.found(range(8)) == 8
    assert desk.found([0, 1, 2, 3, 4, 5, 50, 51]) == 8
    line.cache.close()


def test_a_trail_of_other_tokens_makes_nothing_known(desk: Desk) -> None:
    cache, _ = desk.scribe.grown(desk.pool, range(8))
    prefix_keys = PrefixKeys(BASE)
    prefix_keys.extend([9] * 8, SIZE)
    desk.index.insert(cache.row(0), prefix_keys)
    assert len(desk.index) == 0
    cache.close()


# What is evicted.


def test_the_longest_unused_goes_first_and_of_it_the_tail(desk: Desk) -> None:
    desk.once(range(12))  # three pages
    desk.once([50, 51, 52, 53, 54, 55, 56, 57])  # two pages, later
    assert desk.pool.free_pages() == (8,)
    gone = []
    for count in (3, 1, 1, 1, 1, 1):
        desk.pool.take([count])
        gone.append((desk.found(range(12)), desk.found([50, 51, 52, 53, 54, 55, 56, 57])))
    assert gone == [(12, 8), (8, 8), (4, 8), (0, 8), (0, 4), (0, 0)]
    assert desk.index.evictions == 5
    with pytest.raises(PoolExhausted):
        desk.pool.take([1])


def test_a_hit_makes_a_prefix_young_again(desk: Desk) -> None:
    desk.once(range(8))
    desk.once([50, 51, 52, 53])
    desk.begin(range(9)).cache.close()
    desk.pool.take([6])
    assert (desk.found(range(8)), desk.found([50, 51, 52, 53])) == (8, 0)


def test_what_a_sequence_holds_is_never_evicted(desk: Desk) -> None:
    line = desk.run(range(16))
    desk.once([50, 51, 52, 53])
    desk.pool.take([4])
    assert desk.found(range(16)) == 16
    with pytest.raises(PoolExhausted) as refused:
        desk.pool.take([1])
    assert refused.value.free == 0
    desk.scribe.check(line.cache, [line.cells])
    line.cache.close()
    assert desk.pool.free_pages() == (4,)


def test_the_sink_gets_tokens_and_kv_before_they_are_lost(scribe: Any) -> None:
    heard: list[EvictedPage] = []
    desk = Desk(scribe, scribe.full(page_tokens=SIZE), 4, heard.append)
    desk.once(range(8), PrefixScope(salt="a"))
    desk.pool.take([4])
    assert [(one.tokens, one.start, one.scope.salt) for one in heard] == [
        (tuple(range(8)), 4, "a"),
        (tuple(range(4)), 0, "a"),
    ]
    expected = scribe.image(desk.cells(range(8), PrefixScope(salt="a")), desk.pool.layout)[0]
    for one in heard:
        (kv,) = one.kv
        assert kv is not None
        assert torch.equal(kv.keys, expected.keys[:, one.start : one.start + SIZE])
        assert torch.equal(kv.values, expected.values[:, one.start : one.start + SIZE])


def test_the_sink_never_gets_a_page_again_with_less_of_it(scribe: Any) -> None:
    """A window group with few pages loses its part of a page first, and sends all of it then."""
    got: dict[tuple[Any, ...], list[int]] = {}
    desk = Desk(
        scribe,
        scribe.windowed(page_tokens=SIZE),
        [16, 9],
        lambda page: got.setdefault(page.tokens, []).append(sum(kv is not None for kv in page.kv)),
    )
    for n in range(8):
        desk.once(range(100 * n, 100 * n + 16))
    assert len(got) > 12 and max(map(max, got.values())) == 2
    assert all(parts == sorted(parts) for parts in got.values())


def test_without_a_sink_pages_leave_in_silence(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    for n in range(4):
        desk.once(range(100 * n, 100 * n + 16))
    assert desk.index.evictions == 8
    assert not caplog.records


def image_of(page: EvictedPage) -> RowImage:
    """A page as a store gives it back."""
    (kv,) = page.kv
    assert kv is not None
    return RowImage(
        array("q", [int(token) for token in page.tokens if isinstance(token, int)]), {}, (page.start,), (kv,)
    )


def test_all_that_is_known_leaves_what_is_held_first_and_then_the_latest_used(desk: Desk) -> None:
    desk.once(range(8))
    desk.once([50, 51, 52, 53])
    line = desk.run([60, 61, 62, 63])
    left = [(one.tokens[-1], one.start) for one in desk.index.leaving()]
    assert left == [(63, 0), (53, 0), (3, 0), (7, 4)]
    line.cache.close()


def test_a_page_that_is_held_in_one_group_leaves_with_those_that_are_held(scribe: Any) -> None:
    """A window gives its part of a page back long before the sequence ends."""
    desk = Desk(scribe, scribe.windowed(page_tokens=SIZE), 16)
    line = desk.run(range(20))
    desk.once(range(100, 108))
    assert desk.pool.ages(1).keys() - desk.pool.ages(0).keys(), "some are held in one group alone"
    assert [(one.tokens[0], one.start) for one in desk.index.leaving()] == [
        *((0, start) for start in range(0, 20, 4)),
        *((100, start) for start in (0, 4)),
    ]
    line.cache.close()


def test_tenants_leave_side_by_side(desk: Desk) -> None:
    desk.once(range(8), PrefixScope(salt="a"))
    desk.once(range(8), PrefixScope(salt="b"))
    left = [(one.scope.salt, one.start) for one in desk.index.leaving()]
    assert left == [("a", 0), ("b", 0), ("a", 4), ("b", 4)]


@pytest.mark.parametrize("known", range(4))
@pytest.mark.parametrize("taken", range(9))
def test_what_left_can_be_restored_as_far_as_there_is_room(desk: Desk, known: int, taken: int) -> None:
    """Behind what is still known, which is not given up for it; a row that begins with it finds the right KV."""
    desk.once(range(14))  # three pages
    pages = [image_of(page) for page in desk.index.leaving()]
    desk.index.clear()
    desk.once(range(known * SIZE))
    prefix_keys = PrefixKeys(BASE)
    prefix_keys.extend(range(14), SIZE)
    assert desk.index.missing(prefix_keys, 13) == known
    desk.pool.take([min(taken, 8 - known)])
    room = 8 - known - min(taken, 8 - known)
    assert desk.index.restore(prefix_keys, pages[known:]) == min(3 - known, room)
    line = desk.begin(range(14))
    assert line.cache.num_entries == SIZE * (known + min(3 - known, room))
    line.cache.close()
    assert sum(desk.pool.free_pages()) == 8 - min(taken, 8 - known)


def test_what_is_not_the_trails_is_not_restored(desk: Desk) -> None:
    desk.once(range(12))
    first, second, third = (image_of(page) for page in desk.index.leaving())
    desk.index.clear()
    prefix_keys = PrefixKeys(BASE)
    prefix_keys.extend([*range(8), 99, 99, 99, 99], SIZE)
    assert desk.index.restore(prefix_keys, [second]) == 0  # nothing stands before it
    assert desk.index.restore(prefix_keys, [dataclasses.replace(first, origin="blend")]) == 0
    assert desk.index.restore(prefix_keys, [first, second, third]) == 2
    assert desk.found(range(12)) == 8
    assert desk.index.restore(prefix_keys, [first]) == 1  # it is known already, and held once
    assert desk.pool.usage().cached == 2


def test_a_sink_that_fails_costs_no_page(scribe: Any, caplog: pytest.LogCaptureFixture) -> None:
    def broken(_evicted: EvictedPage) -> None:
        raise OSError("disk full")

    desk = Desk(scribe, scribe.full(page_tokens=SIZE), 4, broken)
    desk.once(range(8))
    with caplog.at_level(logging.ERROR):
        assert len(desk.pool.take([4])[0]) == 4
    assert "the sink of evicted prefixes failed" in caplog.text


def test_forgetting_a_doubtful_prefix_leaves_its_holders_alone(desk: Desk) -> None:
    line = desk.run(range(12))
    desk.once([50, 51, 52, 53])
    desk.index.forget(line.prefix_keys)
    assert (desk.found(range(12)), desk.found([50, 51, 52, 53])) == (0, 4)
    desk.scribe.check(line.cache, [line.cells])
    desk.extend(line, [7, 7, 7, 7, 7])
    assert len(desk.index) == 1, "what follows a doubtful prefix is in doubt too"
    line.cache.close()
    assert desk.pool.usage().cached == 1
    desk.index.clear()
    assert desk.pool.usage().cached == 0
    assert desk.pool.free_pages() == (8,)


def test_pages_let_go_during_a_step_can_be_found_and_come_free_once(desk: Desk) -> None:
    line = desk.run(range(8))
    with desk.pool.lease():
        line.cache.close()
        assert desk.pool.free_pages() == (6,), "a running step may still read them"
        again = desk.begin(range(9))
        assert again.cache.num_entries == 8
        again.cache.close()
        again = desk.begin(range(9))
    assert desk.pool.free_pages() == (6,)
    desk.scribe.check(again.cache, [again.cells])
    again.cache.close()
    assert desk.pool.free_pages() == (8,)
    assert len(set(desk.pool.take([8])[0])) == 8


# Windows.


def sliding(scribe: Any) -> KVLayout:
    """Every layer has a window."""
    return KVLayout((LayerGroup(Window(scribe.window), (0, 1), PageShape(2, SIZE, 2, 4, 4, FLOAT32)),))


def test_a_window_needs_only_the_pages_it_sees(scribe: Any) -> None:
    desk = Desk(scribe, sliding(scribe), 8)
    desk.once(range(24))
    line = desk.begin(range(25))
    assert line.cache.num_entries == 24
    assert line.cache.row(0).tables[0][:4] == [GONE] * 4
    assert len(held(line.cache.row(0).tables[0])) == 2
    desk.extend(line, [24, 25, 26, 27])
    desk.scribe.check(line.cache, [line.cells])
    line.cache.close()


def test_a_window_that_lost_a_page_falls_back_to_a_length_it_can_still_see(scribe: Any) -> None:
    desk = Desk(scribe, sliding(scribe), 6)
    desk.once(range(24))
    usable = []
    for _ in range(6):
        desk.pool.take([1])
        usable.append(desk.found(range(24)))
    assert usable == [24, 24, 24, 20, 0, 0], "first what the window had given back, then the tail"
    assert len(desk.index) == 0, "a way that leads nowhere is forgotten"


# Every order of moves.

PAGES = 14
FEW_PAGES = (14, 9)  # of the full group, and of the window group
MOST_LINES = 5
SCOPES = (BASE, PrefixScope(salt="b"), PrefixScope(adapter="a1"))
SETTINGS = settings(
    max_examples=examples(120),
    stateful_step_count=40,
    derandomize=True,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
pick = st.integers(0, 10**6)
texts = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=22)


class PrefixMachine(RuleBasedStateMachine):
    """Sequences over two letters, so that they meet all the time, in a pool that runs out all the time."""

    def __init__(self, scribe: Any, layout: KVLayout, pages: int | tuple[int, ...] = PAGES) -> None:
        super().__init__()
        self.heard: list[EvictedPage] = []
        self.desk = Desk(scribe, layout, pages, self.heard.append)
        self.lines: list[Line] = []
        self.taken: list[list[list[int]]] = []

    def any(self, index: int) -> Line:
        return self.lines[index % len(self.lines)]

    def grow(self, line: Line, tokens: Sequence[int]) -> None:
        pool = self.desk.pool
        free = pool.free_pages()
        if len(line.cells) + len(tokens) > line.cache.capacity:
            return
        try:
            self.desk.extend(line, tokens)
        except PoolExhausted as error:
            assert error.needed > error.free
            assert pool.free_pages() == free

    @initialize(text=texts)
    def first(self, text: list[int]) -> None:
        self.arrive(text, 0)

    @rule(text=texts, scope=st.sampled_from([0, 0, 0, 1, 2]))
    def arrive(self, text: list[int], scope: int) -> None:
        if len(self.lines) < MOST_LINES:
            line = self.desk.begin(text, SCOPES[scope])
            self.lines.append(line)
            self.grow(line, text[line.cache.num_entries :])
            if len(line.cells) < len(text):
                line.prefix_keys = PrefixKeys(line.prefix_keys.scope)  # what follows may be other tokens

    @precondition(lambda self: self.lines)
    @rule(index=pick, text=st.lists(st.sampled_from([0, 1]), min_size=1, max_size=6))
    def go_on(self, index: int, text: list[int]) -> None:
        self.grow(self.any(index), text)

    @precondition(lambda self: self.lines)
    @rule(index=pick)
    def leave(self, index: int) -> None:
        self.lines.pop(index % len(self.lines)).cache.close()

    @precondition(lambda self: self.lines)
    @rule(index=pick)
    def preempt_and_return(self, index: int) -> None:
        line, tokens = self.any(index), self.any(index).tokens
        line.cache.close()
        line.prefix_keys.rewind()
        line.prefix_keys.extend(tokens, SIZE)  # type: ignore[arg-type]
        line.cache = self.desk.index.fork(line.prefix_keys, max(0, len(tokens) - 1), self.desk.pool.tokens)
        line.cells = line.cells[: line.cache.num_entries]
        self.grow(line, tokens[len(line.cells) :])  # type: ignore[arg-type]
        if len(line.cells) < len(tokens):
            line.prefix_keys = PrefixKeys(line.prefix_keys.scope)  # what follows may be other tokens

    @precondition(lambda self: 0 < len(self.lines) < MOST_LINES)
    @rule(index=pick)
    def another_sample(self, index: int) -> None:
        line = self.any(index)
        prefix_keys = PrefixKeys(line.prefix_keys.scope)
        prefix_keys.extend(line.tokens, SIZE)  # type: ignore[arg-type]
        self.lines.append(Line(line.cache.fork(), prefix_keys, list(line.cells)))

    @precondition(lambda self: self.lines)
    @rule(index=pick, back=st.integers(1, 5))
    def take_back(self, index: int, back: int) -> None:
        line = self.any(index)
        length = max(0, len(line.cells) - back)
        if length and length < line.cache.row(0).floor:
            return
        line.cache.truncate(length)
        line.cells, line.prefix_keys = line.cells[:length], PrefixKeys(line.prefix_keys.scope)

    @rule(count=st.integers(1, 6))
    def somebody_else_takes_pages(self, count: int) -> None:
        free = self.desk.pool.free_pages()
        counts = [min(count, there) for there in free]
        self.taken.append(self.desk.pool.take(counts))
        assert self.desk.pool.free_pages() == tuple(a - b for a, b in zip(free, counts, strict=True))

    @precondition(lambda self: self.taken)
    @rule(index=pick)
    def somebody_else_returns_them(self, index: int) -> None:
        for group, pages in enumerate(self.taken.pop(index % len(self.taken))):
            self.desk.pool.drop(group, pages)

    @precondition(lambda self: self.lines)
    @rule(index=pick)
    def doubt(self, index: int) -> None:
        self.desk.index.forget(self.any(index).prefix_keys)

    @invariant()
    def every_sequence_holds_its_own(self) -> None:
        for line in self.lines:
            self.desk.scribe.check(line.cache, [line.cells])

    @invariant()
    def each_page_is_counted_once(self) -> None:
        pool = self.desk.pool
        for group, free in enumerate(pool.free_pages()):
            busy = {page for line in self.lines for page in held(line.cache.row(0).tables[group])}
            other = [page for pages in self.taken for page in pages[group]]
            assert not busy & set(other)
            assert free == pool.group_pages[group] - len(busy) - len(other)

    @invariant()
    def no_page_is_known_without_those_before_it(self) -> None:
        groups = self.desk.pool.layout.groups
        full = [g for g, group in enumerate(groups) if not isinstance(group.reach, Window)]
        for node in self.desk.index._nodes.values():
            assert node.alive
            assert node.parent is None or node.parent.alive
            assert all(node.pages[g] != GONE for g in full)
            assert node.children or any(page != GONE for page in node.pages)

    @invariant()
    def what_a_sequence_holds_is_found(self) -> None:
        for line in self.lines:
            node, length = line.prefix_keys.node, line.prefix_keys.placed * SIZE
            # A window may see what it needs at the sequence's length, but no more at the last whole page before it.
            if node is not None and node.alive and length >= line.cache.row(0).floor:
                assert self.desk.index.match(line.prefix_keys, 1 << 30).tokens >= length

    @invariant()
    def what_was_evicted_was_what_the_model_computes(self) -> None:
        for one in self.heard:
            expected = self.desk.scribe.image(self.desk.cells(one.tokens, one.scope), self.desk.pool.layout)
            for kv, whole in zip(one.kv, expected, strict=True):
                assert kv is None or torch.equal(kv.keys, whole.keys[:, one.start :])
        self.heard.clear()

    def teardown(self) -> None:
        for line in self.lines:
            line.cache.close()
        for pages in self.taken:
            for group, each in enumerate(pages):
                self.desk.pool.drop(group, each)
        pages = self.desk.pool.group_pages
        assert self.desk.pool.free_pages() == pages
        self.desk.index.clear()
        assert self.desk.pool.usage().cached == 0
        assert [sorted(each) for each in self.desk.pool.take(pages)] == [list(range(n)) for n in pages]


@pytest.mark.parametrize("layout", ["full", "windowed", "sliding", "few window pages"])
def test_no_order_of_moves_confuses_the_index(scribe: Any, layout: str) -> None:
    pages = FEW_PAGES if layout == "few window pages" else PAGES
    name = "windowed" if layout == "few window pages" else layout
    made = sliding(scribe) if layout == "sliding" else scribe.layout(name, torch.float32, SIZE)
    run_state_machine_as_test(lambda: PrefixMachine(scribe, made, pages), settings=SETTINGS)
