"""How drafts fare, what steps say about costs, and who gets how many: what pays, what rests, and who never waits."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvilt.speculative.acceptance import AcceptanceRate
from kvilt.speculative.allocation import DraftBid, allot, moved, no_row_waits, possible, probe
from kvilt.speculative.cost import DraftCosts, StepPrice

READS = StepPrice(0.010, 0.0, 0.0002, 0.0, 1)  # a row alone: most of its step is reading weights
COMPUTES = StepPrice(0.023, 0.001, 0.0020, 0.0, 8)  # eight rows: a draft costs 0.7 of a token


def run(chance: float, steps: int, price: StepPrice, most: int = 16, seed: int = 0) -> tuple[int, int, int]:
    """Steps of a sample alone whose drafts are accepted by chance: drafts, those accepted, and steps with drafts."""
    acceptance, dice = AcceptanceRate.of([0.7]), random.Random(seed)
    drafted = accepted = busy = 0
    for _ in range(steps):
        acceptance.steps += 1
        bids = [DraftBid(acceptance.chance(0), acceptance.sure(0, acceptance), most, 1.0, acceptance.is_due(0))]
        paying = allot(bids, price)
        (count,) = probe(bids, paying, price)
        if count:
            good = next((i for i in range(count) if dice.random() >= chance), count)
            acceptance.took(0, count, good, probed=not paying[0])
            drafted, accepted, busy = drafted + count, accepted + good, busy + 1
    return drafted, accepted, busy


def dear(share: float) -> StepPrice:
    """A price at which a draft costs so much of a token."""
    return StepPrice(0.01, 0.0, 0.01 * share, 0.0, 1)


def test_where_nothing_is_accepted_almost_nothing_is_drafted() -> None:
    drafted, accepted, _ = run(0.0, 1000, dear(0.3))
    assert accepted == 0
    assert drafted < 25  # a few at first, then probes
    assert run(0.0, 10_000, dear(0.3))[0] < 110  # and about one in a hundred steps for ever


def test_where_all_is_accepted_as_much_as_allowed_is_drafted() -> None:
    drafted, accepted, busy = run(1.0, 200, dear(0.3))
    assert accepted == drafted
    assert busy == 200
    assert drafted > 200 * 14


def test_drafts_are_the_longer_the_likelier_they_are_and_the_cheaper() -> None:
    means = [run(chance, 2000, dear(0.25))[0] / 2000 for chance in (0.5, 0.7, 0.9)]
    assert means == sorted(means)
    assert means[0] < 4
    assert means[2] > 4
    assert run(0.8, 2000, dear(0.6))[0] < run(0.8, 2000, dear(0.1))[0]


def test_what_rests_is_found_again_when_it_pays_again() -> None:
    acceptance, price = AcceptanceRate.of([0.7]), dear(0.3)
    for step in range(3000):
        acceptance.steps += 1
        bids = [DraftBid(acceptance.chance(0), acceptance.sure(0, acceptance), 8, 1.0, acceptance.is_due(0))]
        paying = allot(bids, price)
        (count,) = probe(bids, paying, price)
        if count:
            acceptance.took(0, count, count if step > 1000 else 0, probed=not paying[0])
    assert allot([DraftBid(acceptance.chance(0), acceptance.sure(0, acceptance), 8, 1.0)], price) == [8]


def test_grades_fare_apart() -> None:
    acceptance = AcceptanceRate.of([0.5, 0.5])
    for _ in range(50):
        acceptance.steps += 1
        acceptance.took(0, 4, 0, probed=True)
        acceptance.took(1, 4, 4, probed=False)
    assert acceptance.chance(1) > 0.9
    assert acceptance.is_due(1)
    assert acceptance.chance(0) < 0.15
    assert not acceptance.is_due(0)


# Who gets how many.


def test_nothing_is_drafted_where_nothing_is_allowed() -> None:
    assert allot([DraftBid(0.99, 0.99, 0, 1.0)], READS) == [0]
    assert probe([DraftBid(0.99, 0.99, 0, 1.0, probe=True)], [0], READS) == [0]


def test_one_row_gets_all_that_is_likely_enough() -> None:
    assert allot([DraftBid(0.9, 0.9, 16, 0.0)], READS) == [16]
    (few,) = allot([DraftBid(0.3, 0.3, 16, 0.0)], READS)
    assert 0 < few < 8


def test_drafts_that_cost_as_much_as_tokens_are_not_worth_it() -> None:
    assert allot([DraftBid(0.9, 0.9, 16, 1.0)] * 8, StepPrice(0.020, 0.0, 0.0025, 0.0, 8)) == [0] * 8
    assert sum(allot([DraftBid(0.98, 0.98, 16, 1.0)] * 8, COMPUTES)) > 40


def test_who_gains_nothing_does_not_wait_for_others() -> None:
    """Six rows whose drafts are sure would draw more tokens a second; the other two would wait five times as long."""
    sure, hopeless = DraftBid(0.98, 0.98, 16, 0.0), DraftBid(0.0, 0.0, 0, 0.0)
    assert sum(allot([sure] * 8, COMPUTES)) > 40
    assert allot([sure] * 6 + [hopeless] * 2, COMPUTES) == [0] * 8
    ahead = DraftBid(0.0, 0.0, 0, 3 * COMPUTES.plain_s)  # but it may spend what it gained before
    assert sum(allot([sure] * 6 + [ahead] * 2, COMPUTES)) > 6
    assert (
        sum(allot([DraftBid(0.98, 0.98, 16, 0.0), hopeless], StepPrice(0.010, 0.0, 0.0, 0.0, 2))) == 16
    )  # nobody waits for nothing


@given(
    st.lists(
        st.builds(DraftBid, st.floats(0, 1), st.floats(0, 1), st.integers(0, 16), st.floats(-0.1, 0.5), st.booleans()),
        min_size=1,
        max_size=12,
    ),
    st.floats(0.001, 0.1),
    st.floats(0, 0.02),
    st.floats(0, 0.01),
    st.floats(0, 0.01),
)
def test_whatever_is_wished_nobody_is_likely_to_wait(
    bids: list[DraftBid], plain_s: float, first_s: float, each_s: float, own_s: float
) -> None:
    price = StepPrice(plain_s, first_s, each_s, own_s, len(bids))
    paying = allot(bids, price)
    for counts in (paying, probe(bids, paying, price)):
        assert all(0 <= count <= wish.most for count, wish in zip(counts, bids, strict=True))
        assert not any(counts) or (possible(bids, price) and no_row_waits(bids, counts, price))


def test_what_a_row_gained_is_bounded_and_so_is_what_it_lost() -> None:
    ahead_s = 0.0
    for _ in range(1000):
        ahead_s = moved(ahead_s, 10, 0.01, 0.01)
    assert ahead_s == pytest.approx(0.64)
    for _ in range(1000):
        ahead_s = moved(ahead_s, 0, 1.0, 0.01)
    assert ahead_s == pytest.approx(-0.04)
    for _ in range(500):
        ahead_s = moved(ahead_s, 0, 0.0, 0.01)  # a row without drafts gets patience back
    assert ahead_s > 0


# What steps cost.


def taught(rows: int, plain_s: float, first_s: float, each_s: float, most: int = 16) -> DraftCosts:
    """A cost that knows such steps, with drafts that take their drafter no time."""
    cost, dice = DraftCosts(), random.Random(0)
    cost.drafted(rows, 1, 0.0)
    for _ in range(200):
        drafts = dice.choice([0, dice.randrange(1, most)])
        cost.stepped(rows, drafts, plain_s + (first_s + each_s * drafts if drafts else 0.0))
    return cost


@pytest.mark.parametrize("rows", [1, 2, 8, 40])
def test_what_drafts_cost_is_learnt(rows: int) -> None:
    price = taught(rows, 0.020, 0.003, 0.001).known(rows)
    assert price is not None
    assert price.plain_s == pytest.approx(0.020)
    assert [price.extra_s(count) for count in (4, 8, 14)] == pytest.approx([0.007, 0.011, 0.017], rel=0.15)
    assert price.first_s > 0.0005  # having any costs something by itself
    assert price.extra_s(0) == 0.0


def test_each_number_of_rows_has_its_own_price() -> None:
    cost = taught(8, 0.023, 0.0, 0.002)
    assert cost.known(2) is None
    cost.drafted(2, 1, 0.0)
    for step in range(100):
        cost.stepped(2, 2 * (step % 2), 0.016 + 0.004 * (step % 2))
    wide, narrow = cost.known(8), cost.known(2)
    assert wide is not None
    assert narrow is not None
    assert wide.share == pytest.approx(0.7, rel=0.1)
    assert narrow.share == pytest.approx(0.25, rel=0.15)


def test_nothing_is_drafted_before_it_is_known_what_steps_take_without() -> None:
    cost = DraftCosts()
    asked = [cost.price(3)]
    for _ in range(4):
        cost.stepped(3, 0, 0.01)
        asked.append(cost.price(3))
    assert asked[:3] == [None] * 3  # the first step is recorded, and says nothing
    assert asked[4] is not None


def test_now_and_then_a_step_without_drafts_is_measured() -> None:
    cost = taught(2, 0.01, 0.0, 0.001)
    had = sum(cost.price(2) is not None for _ in range(640))
    assert had == 620


def test_a_recording_says_nothing() -> None:
    cost = taught(1, 0.004, 0.0, 0.001, most=4)
    before = cost.known(1)
    cost.stepped(1, 9, 0.050)
    assert cost.known(1) == before
    cost.stepped(1, 9, 0.013)
    assert cost.known(1) != before


def test_an_interrupted_step_says_nothing() -> None:
    cost = taught(1, 0.01, 0.0, 0.002)
    before = cost.known(1)
    cost.stepped(1, 1, 90.0)
    cost.stepped(1, 0, 90.0)
    assert cost.known(1) == before


def test_a_line_never_promises_drafts_for_nothing() -> None:
    cost = DraftCosts()
    for step in range(60):  # the machine got quicker: steps with drafts are shorter than those without were
        cost.stepped(4, 0 if step < 10 else 8, 0.020 if step < 10 else 0.012)
    price = cost.known(4)
    assert price is not None
    assert price.first_s >= 0
    assert price.each_s > 0


def test_what_a_drafter_takes_is_part_of_the_price() -> None:
    slow, quick = taught(1, 0.01, 0.0, 0.001), taught(1, 0.01, 0.0, 0.001)
    for _ in range(20):
        slow.drafted(1, 4, 0.016)
    assert slow.known(1).share > 3 * quick.known(1).share  # type: ignore[union-attr]


def test_what_was_seen_with_others_counts_until_it_is_known_better() -> None:
    own, others, nobody = AcceptanceRate.of([0.9]), AcceptanceRate.of([0.9], 0.97), AcceptanceRate.of([0.9])
    for _ in range(20):
        others.took(0, 4, 4, probed=False)
    assert own.sure(0, nobody) == 0.0  # hope is nothing that others should wait for
    assert own.sure(0, others) > 0.9
    assert own.surest(others) == own.sure(0, others)
    for _ in range(4):
        own.took(0, 4, 0, probed=False)
    assert own.sure(0, others) < 0.5


def test_a_row_bets_on_its_own_drafts_but_not_twice() -> None:
    """Eight rows that hope: together they may lose one step, and then they wait until they can pay for another."""
    hopeful, indebted = DraftBid(0.9, 0.0, 16, 0.0), DraftBid(0.9, 0.0, 16, -1.0 * COMPUTES.plain_s)
    assert sum(allot([hopeful] * 8, COMPUTES)) > 0
    assert allot([indebted] * 8, COMPUTES) == [0] * 8
    assert not possible([indebted] * 8, COMPUTES)


def test_what_is_known_of_drafts_grows_old_where_there_are_none() -> None:
    cost = taught(4, 0.020, 0.0, 0.010)  # dear, perhaps because the machine was busy
    dear_share = cost.known(4).share  # type: ignore[union-attr]
    for _ in range(300):
        cost.stepped(4, 0, 0.020)
    assert cost.known(4).share < 0.3 * dear_share  # type: ignore[union-attr]


def test_a_drafter_s_time_is_known_for_any_number_of_rows_once_it_was_measured() -> None:
    cost = taught(2, 0.01, 0.0, 0.001)
    for _ in range(4):
        cost.stepped(5, 0, 0.012)
    assert cost.known(5).own_s == 0.0  # type: ignore[union-attr]
