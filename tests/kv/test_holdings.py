"""Whose pages go when room is needed: an owner that takes more takes it from itself, whatever its salts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from desk import SIZE, Desk, Line
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from kvilt.errors import PoolExhausted
from kvilt.kv.owner import owner_of, part_of
from kvilt.kv.pages_by_owner import PagesByOwner
from kvilt.kv.prefix_keys import PrefixScope

PAGES = 16


def test_parts_of_a_tenant_have_its_owner() -> None:
    assert [owner_of(tenant) for tenant in ("", "a", part_of("a", "x"), part_of("", "x"), part_of("a", "x/y"))] == [
        "",
        "a",
        "a",
        "",
        "a",
    ]


def leave(desk: Desk, pages: int) -> range:
    """Owner `a` leaves so many pages that no cache holds."""
    kept = range(1000, 1000 + pages * SIZE)
    desk.once(kept, PrefixScope(salt="a"))
    return kept


@pytest.mark.parametrize("layout", ["full", "windowed", "latent"])
def test_salts_do_not_flush_another_key(scribe: Any, layout: str) -> None:
    """220 requests under salts of their own: the other key still finds its half of the pool."""
    desk = Desk(scribe, scribe.layout(layout, page_tokens=SIZE), PAGES)
    kept = leave(desk, PAGES // 2)
    for n in range(220):
        desk.once(range(n, n + 6 * SIZE), PrefixScope(salt=part_of("b", str(n))))
    assert desk.found(kept, PrefixScope(salt="a")) == len(kept)
    assert desk.found(kept, PrefixScope(salt=part_of("a", "x"))) == 0, "a salt still has KV of its own"
    assert desk.found(range(219, 219 + 6 * SIZE), PrefixScope(salt=part_of("b", "219"))) == 6 * SIZE


def test_an_owner_alone_may_have_everything(scribe: Any) -> None:
    desk = Desk(scribe, scribe.full(page_tokens=SIZE), PAGES)
    for n in range(4):
        desk.once(range(100 * n, 100 * n + 4 * SIZE), PrefixScope(salt=part_of("b", str(n))))
    assert desk.pool.usage().cached == PAGES == desk.pool.held_by("b")
    assert desk.pool.fair_share() == PAGES


def test_what_caches_hold_counts_like_what_is_left(scribe: Any) -> None:
    """`b` holds ten pages and left two; `a` left four: what `b` left goes first, though there is less of it."""
    desk = Desk(scribe, scribe.full(page_tokens=SIZE), PAGES)
    kept = leave(desk, 4)
    desk.once(range(2 * SIZE), PrefixScope(salt="b"))
    line = desk.run(range(100, 100 + 8 * SIZE), PrefixScope(salt="b"))
    desk.extend(line, range(200, 200 + 4 * SIZE))
    assert desk.found(kept, PrefixScope(salt="a")) == len(kept)
    assert desk.found(range(2 * SIZE), PrefixScope(salt="b")) == 0
    assert desk.pool.fair_share() == PAGES // 2
    line.cache.close()


def test_what_runs_goes_before_what_is_kept(scribe: Any) -> None:
    """Kept KV is a convenience: a request that finds no other room takes it, whoever left it."""
    desk = Desk(scribe, scribe.full(page_tokens=SIZE), PAGES)
    kept = leave(desk, 4)
    line = desk.run(range(14 * SIZE), PrefixScope(salt="b"))
    assert desk.found(kept, PrefixScope(salt="a")) == 2 * SIZE
    line.cache.close()


MOVES = st.lists(
    st.tuples(st.sampled_from(["begin", "extend", "close"]), st.integers(0, 5), st.integers(1, 6), st.integers(0, 9)),
    max_size=40,
)


@given(st.integers(1, PAGES // 2), st.sampled_from(["full", "windowed", "latent"]), MOVES)
@settings(max_examples=examples(60))
def test_a_fair_share_survives_whatever_another_owner_does(
    scribe: Any, share: int, layout: str, moves: list[tuple[str, int, int, int]]
) -> None:
    """`b` begins, extends and closes sequences under any salts, as long as what it runs fits beside `a`'s share."""
    desk = Desk(scribe, scribe.layout(layout, page_tokens=SIZE), PAGES)
    kept, lines = leave(desk, share), list[Line]()
    for move, which, pages, salt in moves:
        room = PAGES - share - sum(len(line.cells) // SIZE for line in lines)
        tokens, scope = range(which, which + pages * SIZE), PrefixScope(salt=part_of("b", str(salt)))
        # The last token of a prompt that is known is computed again, in a copy of its page.
        copies = int(desk.found(tokens, scope) == len(tokens))
        if move == "begin" and pages + copies <= room:
            lines.append(desk.run(tokens, scope))
        elif lines and move == "extend" and pages <= room:
            desk.extend(lines[which % len(lines)], tokens)
        elif lines and move == "close":
            lines.pop(which % len(lines)).cache.close()
        assert desk.found(kept, PrefixScope(salt="a")) == len(kept)
    for line in lines:
        line.cache.close()
    desk.index.clear()
    assert (desk.pool.held_by("a"), desk.pool.held_by("b")) == (0, 0), "every page is given back to no owner"


def test_pages_that_are_taken_for_no_owner_are_those_of_the_owner_without_a_name(scribe: Any) -> None:
    pool = scribe.pool(scribe.full(), 12)
    pool.take([3])
    assert (pool.held_by(""), pool.fair_share()) == (3, 12)


def test_what_a_sequence_takes_counts_for_the_owner_of_its_prefix(scribe: Any) -> None:
    desk = Desk(scribe, scribe.full(page_tokens=SIZE), PAGES)
    line = desk.begin(range(12), PrefixScope(salt=part_of("b", "x")))
    line.cache.reserve(12)  # before any page is known
    assert (desk.pool.held_by("b"), desk.pool.held_by("")) == (3, 0)
    line.cache.close()


def test_an_owner_that_gave_all_its_pages_back_has_no_share(scribe: Any) -> None:
    pool = scribe.pool(scribe.full(), 12)
    (mine,), (other,) = pool.take([2], "a"), pool.take([3], "b")
    assert pool.fair_share() == 6
    pool.drop(0, mine[:1])
    assert pool.fair_share() == 6
    pool.drop(0, mine[1:])
    assert pool.fair_share() == 12
    pool.drop(0, other)
    assert pool.fair_share() == 12, "with no owner at all"


def test_a_take_that_is_refused_counts_nothing(scribe: Any) -> None:
    pool = scribe.pool(scribe.full(), 4)
    with pytest.raises(PoolExhausted):
        pool.take([5], "a")
    assert pool.held_by("a") == 0


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.sampled_from(["take", "rest", "wake", "evict"])), max_size=120))
def test_the_fullest_owner_gives_way(moves: list[tuple[str, str]]) -> None:
    """Against counting everything each time."""
    holdings, owners, idle, page = PagesByOwner(), dict[int, str](), list[int](), 0
    for owner, move in moves:
        mine = [one for one, whose in owners.items() if whose == owner]
        if move == "take":
            page += 1
            owners[page] = owner
            holdings.grow(owner, 1)
            holdings.assign(page, owner)
        elif move == "rest" and (awake := [one for one in mine if one not in idle]):
            idle.append(awake[0])
            holdings.rest(awake[0])
        elif move == "wake" and (resting := [one for one in idle if owners[one] == owner]):
            idle.remove(resting[-1])
            assert holdings.wake(resting[-1])
        elif move == "evict" and idle:
            counts = Counter(owners.values())
            fullest = min({owners[one] for one in idle}, key=lambda one: (-counts[one], one))
            expected = next(one for one in idle if owners[one] == fullest)
            assert holdings.victim() == expected
            assert holdings.wake(expected)
            holdings.free(expected)
            idle.remove(expected)
            del owners[expected]
        assert holdings.idle_pages == len(idle)
        assert all(holdings.count(one) == Counter(owners.values())[one] for one in "abcde")


def test_finding_who_gives_way_does_not_grow_with_what_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of owners that come and go leave a heap no larger than those that are here."""
    holdings = PagesByOwner()
    for n in range(5000):
        holdings.grow(str(n), 1)
        holdings.assign(n, str(n))
        holdings.rest(n)
        if n >= 8:
            assert holdings.wake(n - 8)
            holdings.free(n - 8)
    assert len(holdings._heap) < 100
    assert holdings.victim() == 4992
