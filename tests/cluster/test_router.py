"""The router: where requests go, and that what it knows is what replicas have."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from desk import BASE, SIZE, Desk
from hypothesis import given
from hypothesis import strategies as st

from kvilt.cluster.feed import BatchOrder, EventFeed
from kvilt.cluster.prefix_directory import PrefixDirectory
from kvilt.cluster.prefix_hash import PrefixHasher
from kvilt.cluster.router import Prompt, Router, RouterConfig
from kvilt.errors import InputError
from kvilt.kv.prefix_keys import PrefixScope
from kvilt.server.kv_events.messages import AllBlocksCleared, BlockRemoved, BlockStored
from kvilt.server.kv_events.publisher import KVEventPublisher

SPEED = 1000.0
TOKENS = st.lists(st.integers(0, 3), max_size=24)


def router(replicas: int = 3, **settings: Any) -> Router:
    made = Router(RouterConfig(**{"block_tokens": SIZE, "prefill_tokens_per_s": SPEED, "expected_s": 1.0, **settings}))
    for n in range(replicas):
        made.add(f"r{n}")
    return made


def stored(tokens: list[int], salt: str = "", first: int = 0, adapter: str | None = None) -> BlockStored:
    count = len(tokens) // SIZE
    keys = ((salt,),) * count if salt else None
    hashes = tuple(range(first, first + count))
    return BlockStored(hashes, None, tuple(tokens[: count * SIZE]), SIZE, None, "CPU", adapter, keys)


# Keys.


@given(TOKENS, TOKENS, st.integers(0, 6))
def test_keys_are_equal_where_beginnings_are_and_may_be_made_piece_by_piece(
    left: list[int], right: list[int], cut: int
) -> None:
    hasher = PrefixHasher(SIZE)
    scope = hasher.scope(None, "a")
    keys, others = hasher.keys(left, scope), hasher.keys(right, scope)
    assert len(keys) == len(left) // SIZE
    for at, (one, other) in enumerate(zip(keys, others, strict=False)):
        assert (one == other) == (left[: (at + 1) * SIZE] == right[: (at + 1) * SIZE])
    cut = min(cut, len(keys))
    before = keys[cut - 1] if cut else 0
    assert keys[:cut] + hasher.following(before, left[cut * SIZE :], scope) == keys


def test_tenants_and_adapters_have_keys_of_their_own() -> None:
    hasher = PrefixHasher(SIZE)
    scopes = [hasher.scope(*one) for one in ((None, ""), (None, "a"), ("a", ""), ("", ""), ("None", ""), ("a", "a"))]
    assert len({hasher.keys([1, 2, 3, 4], scope)[0] for scope in scopes}) == len(scopes)


# What replicas have.


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.one_of(TOKENS, st.just("clear"), st.integers(0, 5)), st.sampled_from(["", "a"])
        ),
        max_size=20,
    ),
    TOKENS,
)
def test_the_directory_finds_what_each_replica_has(moves: list[Any], asked: list[int]) -> None:
    """Against a plain set of prefixes for each replica."""
    hasher = PrefixHasher(SIZE)
    directory = PrefixDirectory(hasher)
    known: list[dict[int, tuple[str, tuple[int, ...]]]] = [{} for _ in range(3)]
    for slot, move, salt in moves:
        if move == "clear":
            directory.apply(slot, [AllBlocksCleared()])
            known[slot].clear()
        elif isinstance(move, int):  # one of the longest goes
            here = known[slot]
            leaves = [one for one in here if not any(_is_before(here[one], other) for other in here.values())]
            for one in leaves[move : move + 1]:
                directory.apply(slot, [BlockRemoved((one,))])
                del here[one]
        else:
            new = [(salt, tuple(move[: (at + 1) * SIZE])) for at in range(len(move) // SIZE)]
            for at, prefix in enumerate(new):
                number = _number(prefix)
                if number not in known[slot]:
                    parent = _number(new[at - 1]) if at else None
                    keys = ((salt,),) if salt else None
                    event = BlockStored((number,), parent, prefix[1][-SIZE:], SIZE, None, None, None, keys)
                    directory.apply(slot, [event])
                    known[slot][number] = prefix
    keys = hasher.keys(asked, hasher.scope(None, "a"))
    found = {slot: blocks for blocks, slots in directory.match(keys, 0b111) for slot in range(3) if slots >> slot & 1}
    for slot, here in enumerate(known):
        prefixes = set(here.values())
        depth = 0
        while (depth + 1) * SIZE <= len(asked) and ("a", tuple(asked[: (depth + 1) * SIZE])) in prefixes:
            depth += 1
        assert found.get(slot, 0) == depth
        assert directory.known(slot) == len(here)


def _is_before(one: Any, other: Any) -> bool:
    return one[0] == other[0] and len(one[1]) < len(other[1]) and other[1][: len(one[1])] == one[1]


def _number(prefix: Any) -> int:
    return hash(prefix) & (1 << 63) - 1


def test_events_that_do_not_fit_ask_for_a_snapshot() -> None:
    one = router()
    with pytest.raises(InputError, match="follows"):
        one.apply("r0", [BlockStored((5,), 4, (1, 2, 3, 4), SIZE)])
    with pytest.raises(InputError, match="tokens in this cluster"):
        one.apply("r0", [BlockStored((5,), None, (1, 2), 2)])
    one.apply("gone", [BlockStored((5,), 4, (1, 2, 3, 4), SIZE)])


# Where requests go.


def test_a_request_goes_where_its_prefix_is() -> None:
    one = router()
    one.apply("r1", [stored([*range(40)])])
    ticket = one.route(Prompt([*range(40), 90, 91]), 0.0)
    assert (ticket.replica, ticket.cached, ticket.tokens) == ("r1", 40, 2)
    assert ticket.expected_s == pytest.approx(2 / SPEED)


def test_the_longest_prefix_does_not_win_where_its_replica_is_busy() -> None:
    """A hot prefix spreads: what waits there costs more than computing it elsewhere."""
    one = router()
    one.apply("r1", [stored([*range(40)])])
    used = [one.route(Prompt([*range(40), 90 + n]), 0.0).replica for n in range(3)]
    assert used == ["r1"] * 3
    busy = one.route(Prompt([*range(500, 700)], names=("elsewhere",)), 0.0)
    one.settle("home", "r1")
    one.route(Prompt([*range(1000, 1200)], names=("home",)), 0.0)
    spread = one.route(Prompt([*range(40), 99]), 0.0).replica
    assert spread not in ("r1", busy.replica)


def test_tenants_do_not_see_each_other() -> None:
    one = router()
    one.apply("r1", [stored([*range(40)], salt="a")])
    assert one.route(Prompt([*range(40)], salt="a"), 0.0).cached == 40
    assert one.route(Prompt([*range(40)], salt="b"), 0.0).cached == 0
    assert one.route(Prompt([*range(40)], adapter="x", salt="a"), 0.0).cached == 0


def test_requests_that_begin_alike_meet_before_the_first_event() -> None:
    one = router()
    first = one.route(Prompt([*range(400)]), 10.0)
    second = one.route(Prompt([*range(400), 1, 2, 3, 4]), 10.01)
    assert (second.replica, second.cached) == (first.replica, 400)
    one.end(first)
    one.end(second)
    assert one.route(Prompt([*range(400)]), 20.0).cached == 0, "no event came: it is forgotten"


def test_loads_even_out() -> None:
    one = router(4)
    rng = np.random.default_rng(0)
    used = [one.route(Prompt(rng.integers(0, 1000, 100).tolist()), 0.0).replica for _ in range(40)]
    assert {used.count(name) for name in one.replicas} == {10}


def test_a_slow_replica_is_noticed() -> None:
    one = router(2)
    for n in range(30):
        ticket = one.route(Prompt([n] * 100), float(n))
        one.first_token(ticket, n + (1.0 if ticket.replica == "r0" else 0.1))
        one.end(ticket)
    speeds = {name: speed for name, (_, speed) in one.load().items()}
    assert speeds["r0"] < speeds["r1"]
    assert all(backlog == 0 for backlog, _ in one.load().values())
    assert one.route(Prompt([77] * 100), 99.0).replica == "r1"


def test_handles_and_sessions_go_home_and_elsewhere_when_it_is_gone() -> None:
    one = router()
    one.settle("kv-1", "r2")
    one.apply("r0", [stored([*range(40)])])
    assert one.route(Prompt([*range(40)], names=("kv-1",)), 0.0).replica == "r2"
    assert one.route(Prompt([*range(40)], names=("kv-1",)), 0.0, avoid=["r2"]).replica == "r0"
    one.settle("kv-1", "r2")
    one.remove("r2")
    assert one.home("kv-1") is None
    one.add("r3")
    assert one.route(Prompt([*range(40)], names=("kv-1",)), 0.0).replica == "r0"
    assert one.home("kv-1") == "r0"
    one.unsettle("kv-1")
    assert one.home("kv-1") is None


def test_documents_draw_requests_to_where_they_were_used() -> None:
    one = router()
    first = one.route(Prompt([1, 2], documents=(("d", 500),)), 0.0)
    one.end(first)
    again = one.route(Prompt([3, 4], documents=(("d", 500),)), 0.0)
    assert (again.replica, again.tokens) == (first.replica, 2)


def test_kv_moves_where_that_is_faster_than_computing_it() -> None:
    """From a replica with a queue, at 10 times the speed of computing; the measured speed decides the next time."""
    one = router(transfer_bytes_per_s=10 * SPEED * 8, transfer_latency_s=0.001)
    one.token_bytes = 8.0
    one.apply("r1", [stored([*range(400)])])
    one.settle("busy", "r1")
    one.route(Prompt([9] * 3000, names=("busy",)), 0.0)
    ticket = one.route(Prompt([*range(400), 7]), 0.0)
    assert (ticket.source, ticket.moved, ticket.reach, ticket.tokens) == ("r1", 400, 400, 1)
    assert ticket.replica != "r1"
    assert ticket.expected_s == pytest.approx(41 / SPEED + 0.001)
    one.moved(ticket, 400 * 8, 4.0, 5.0)  # slower than computing
    other = one.route(Prompt([*range(200), *[3] * 200], salt=""), 5.0, avoid=[ticket.replica])
    assert other.source is None
    late = one.route(Prompt([*range(200), *[3] * 200], salt=""), 40.0, avoid=[ticket.replica, "r1"])
    assert late.source is None  # a replica that failed the request before sends no KV either
    for _ in range(2):
        assert not one.transfers.resting(40.0)
        one.moved(late, 0, 1.0, 40.0)
        assert one.transfers.resting(40.9)
        one.transfers.add(8, 1.0, 40.0)
        one.transfers._resting_until_s = 0.0


def test_kv_does_not_move_between_versions_of_a_model() -> None:
    for versions, moves in ((("1", "1"), True), (("1", "2"), False)):
        one = router(0, transfer_bytes_per_s=1e9)
        one.token_bytes = 8.0
        for name, version in zip(("r0", "r1"), versions, strict=True):
            one.add(name, version)
        one.apply("r1", [stored([*range(400)])])
        one.settle("busy", "r1")
        one.route(Prompt([9] * 3000, names=("busy",)), 0.0)
        ticket = one.route(Prompt([*range(400), 7]), 0.0)
        assert (ticket.source is not None) == moves


def test_without_a_replica_there_is_no_route() -> None:
    one = router(1)
    with pytest.raises(InputError):
        one.route(Prompt([1]), 0.0, avoid=["r0"])
    one.remove("r0")
    one.remove("r0")
    with pytest.raises(InputError):
        one.route(Prompt([1]), 0.0)


def test_a_replica_in_the_place_of_another_has_nothing_of_it() -> None:
    one = router(1)
    one.apply("r0", [stored([*range(40)])])
    late = one.route(Prompt([*range(40)]), 0.0)
    one.remove("r0")
    one.add("r9")
    assert len(one.directory) == 0
    one.first_token(late, 5.0)
    one.end(late)
    assert one.load()["r9"] == (0.0, SPEED)
    assert one.route(Prompt([*range(40)]), 0.0).cached == 0


# Following.


def test_numbers_say_what_was_missed() -> None:
    order = BatchOrder()
    assert order.place(0) == "gap"
    order.next = 5
    assert [order.place(number) for number in (4, 5, 7)] == ["old", "next", "gap"]
    assert order.place(0) == "gap"
    assert order.next is None, "the publisher began again"


def test_a_router_that_starts_late_or_misses_batches_catches_up(scribe: Any) -> None:
    desk = Desk(scribe, scribe.full(page_tokens=SIZE), 8)
    desk.once(range(8), PrefixScope(salt="a"))

    async def life() -> None:
        one = router(1)
        with KVEventPublisher(desk.index, SIZE, "tcp://127.0.0.1:*", kept=2) as publisher:
            feed = EventFeed(one, "r0", publisher.endpoint, publisher.replay)
            task = asyncio.ensure_future(feed.run())
            await _until(lambda: one.directory.known(0) == 2)
            assert one.route(Prompt([*range(9)], salt="a"), 0.0).cached == 8
            desk.once(range(100, 120))
            await _until(lambda: one.directory.known(0) == len(desk.index))
            for far in (1, 100):  # one batch was missed, then more than are kept
                await _until(lambda: feed._order.next is not None)
                feed._order.next -= far  # type: ignore[operator]
                desk.once(range(200 * far, 200 * far + 8), BASE)
                desk.index.clear()
                desk.once(range(300 * far, 300 * far + 4))
                await _until(lambda: one.directory.known(0) == 1 == len(desk.index))
            task.cancel()

    asyncio.run(life())


async def _until(true: Any) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.005)


# Prefill and decode apart.


def test_a_long_prompt_is_computed_apart_where_that_pays() -> None:
    one = router(2, transfer_bytes_per_s=100 * SPEED * 8, transfer_latency_s=0.001, interference=0.5)
    one.token_bytes = 8.0
    one.add("p", prefill_only=True)
    short = one.route(Prompt([1, 2, 3]), 0.0)
    assert short.replica != "p" and short.prefill is None  # not without requests that decode beside it
    for ticket in [short, *(one.route(Prompt([5, n]), 0.0) for n in range(9))]:
        assert ticket.replica != "p"
        one.first_token(ticket, 0.1)
    long = one.route(Prompt([*range(400), 7]), 1.0)
    assert long.replica != "p" and long.prefill is not None
    assert (long.prefill.replica, long.prefill.tokens) == ("p", 401)
    assert (long.source, long.moved, long.reach, long.tokens) == ("p", 400, 400, 1)
    again = one.route(Prompt([*range(400), 7, 8]), 1.0)  # the replica has it soon
    assert (again.replica, again.prefill) == (long.replica, None)
    one.end(long.prefill)
    one.remove("r0")
    one.remove("r1")
    assert one.route(Prompt([1]), 2.0).replica == "p"  # better than nothing


def test_doors_choose_alike_for_names_that_have_no_home() -> None:
    left, right = router(5, doors=2), router(5, doors=2)
    left.apply("r3", [stored([*range(40)])])  # what the other does not know yet
    for n in range(20):
        prompt = Prompt([*range(40)], names=(f"t sessions {n}",))
        assert left.route(prompt, 0.0).replica == right.route(prompt, 0.0).replica


def test_a_replica_that_may_be_gone_keeps_its_kv_but_gets_no_requests() -> None:
    one = router(2)
    one.apply("r1", [stored([*range(40)])])
    one.suspect("r1", True)
    assert one.route(Prompt([*range(40)]), 0.0).replica == "r0"
    one.suspect("r0", True)
    assert one.route(Prompt([*range(40)], salt="x"), 0.0) is not None  # all are in doubt: any is better than none
    one.suspect("r1", False)
    assert one.route(Prompt([*range(39), 99, 98]), 9.0).cached == 36
