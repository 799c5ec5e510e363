"""How much is drafted: what pays, what rests, and what a step says about costs."""

from __future__ import annotations

import random

from kvilt.speculative.pace import Cost, Pace


def run(chance: float, steps: int, price: float, most: int = 16, seed: int = 0) -> tuple[int, int, int]:
    """Steps of a sample whose drafts are accepted by chance: drafts, those accepted, and steps with drafts."""
    pace, dice = Pace.of([0.7]), random.Random(seed)
    drafted = accepted = busy = 0
    for _ in range(steps):
        pace.steps += 1
        count = pace.most(price, most)
        if count:
            good = next((i for i in range(count) if dice.random() >= chance), count)
            pace.took(0, price, count, good)
            drafted, accepted, busy = drafted + count, accepted + good, busy + 1
    return drafted, accepted, busy


def test_where_nothing_is_accepted_almost_nothing_is_drafted() -> None:
    drafted, accepted, _ = run(0.0, 1000, price=0.3)
    assert accepted == 0
    assert drafted < 25  # a few at first, then probes
    assert run(0.0, 10_000, price=0.3)[0] < 110  # and about one in a hundred steps for ever


def test_where_all_is_accepted_as_much_as_allowed_is_drafted() -> None:
    drafted, accepted, busy = run(1.0, 200, price=0.3)
    assert accepted == drafted
    assert busy == 200
    assert drafted > 200 * 14


def test_drafts_are_the_longer_the_likelier_they_are_and_the_cheaper() -> None:
    means = [run(chance, 2000, price=0.25)[0] / 2000 for chance in (0.5, 0.7, 0.9)]
    assert means == sorted(means)
    assert means[0] < 4
    assert means[2] > 6
    assert run(0.8, 2000, price=0.6)[0] < run(0.8, 2000, price=0.1)[0]


def test_what_rests_is_found_again_when_it_pays_again() -> None:
    pace = Pace.of([0.7])
    for step in range(3000):
        pace.steps += 1
        if count := pace.most(0.3, 8):
            pace.took(0, 0.3, count, count if step > 1000 else 0)
    assert pace.most(0.3, 8) == 8


def test_grades_fare_apart() -> None:
    pace = Pace.of([0.5, 0.5])
    for _ in range(50):
        pace.steps += 1
        for grade, good in ((0, 0), (1, 4)):
            if pace.count(grade, 0.3, 4):
                pace.took(grade, 0.3, 4, good)
    assert pace.count(1, 0.3, 4) == 4
    assert pace.tallies[0].chance < 0.3


def test_nothing_is_drafted_where_nothing_is_allowed() -> None:
    assert Pace.of([0.9, 0.1]).most(0.0, 0) == 0


def test_the_price_is_the_slope_in_tokens_of_the_same_time() -> None:
    cost = Cost()
    for step in range(200):
        tokens = 1 if step % 2 else 9
        cost.stepped(1, tokens - 1, tokens, 0.010 + 0.002 * (tokens - 1))
    # 10 tokens in 36 ms: a token more, at 2 ms, costs as much as 0.55 of them
    assert 0.45 < cost.price < 0.65


def test_a_wide_step_that_computes_rather_than_reads_makes_drafts_dear() -> None:
    cost, dice = Cost(), random.Random(0)
    for _ in range(200):
        rows = dice.randrange(20, 40)
        cost.stepped(rows, 0, rows, 0.001 + 0.002 * rows)
    assert cost.price > 0.9


def test_an_interrupted_step_says_nothing() -> None:
    cost = Cost()
    for step in range(100):
        cost.stepped(1, step % 3, 1, 0.01 * (1 + 0.2 * (step % 3)))
    before = cost.price
    cost.stepped(1, 1, 1, 90.0)
    assert cost.price == before


def test_what_a_drafter_takes_is_part_of_the_price() -> None:
    slow, quick = Cost(), Cost()
    for cost, took_s in ((slow, 0.004), (quick, 0.0)):
        for step in range(100):
            cost.drafted(3 * (step % 2), 3 * took_s * (step % 2))
            cost.stepped(1, 3 * (step % 2), 1, 0.01 + 0.003 * (step % 2))
    assert slow.price > 1.5 * quick.price


def days(cost: Cost, rows: int, steps: int, plain_s: float, drafted_s: float, drawn: int) -> int:
    """Steps that may have drafts, which then take `drafted_s` and draw so many tokens; how many of them had."""
    had = 0
    for _ in range(steps):
        pays = cost.pays(rows)
        had += pays
        cost.stepped(rows, 4 * rows * pays, drawn if pays else rows, drafted_s if pays else plain_s)
    return had


def test_drafts_that_make_steps_slower_end_whatever_their_price() -> None:
    """A step with drafts may cost more from its first draft on, which no price of one more draft tells."""
    cost = Cost()
    assert days(cost, 8, 2000, plain_s=0.1, drafted_s=0.4, drawn=24) < 100
    assert days(cost, 1, 2000, plain_s=0.1, drafted_s=0.15, drawn=3) > 1900  # another number of rows is another matter
    assert days(cost, 8, 1000, plain_s=0.1, drafted_s=0.15, drawn=24) > 600  # and so is another day


def test_now_and_then_a_step_without_drafts_is_measured() -> None:
    assert 1900 < days(Cost(), 2, 2000, 0.1, 0.1, 4) < 1970
