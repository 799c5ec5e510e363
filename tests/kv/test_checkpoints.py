"""Where checkpoints of recurrent state stand: dense where slots are many, further apart in long sequences."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvilt.kv.checkpoints import EVERY, SEQUENCE_TOKENS, CheckpointSchedule, schedule_for

PAGE = 32


@pytest.mark.parametrize(("slots", "dense"), [(1 << 14, 32), (256, 32), (255, 64), (64, 128), (32, 256), (31, 0)])
def test_the_distance_of_dense_ones_follows_from_the_slots(slots: int, dense: int) -> None:
    assert schedule_for(slots, PAGE) == CheckpointSchedule(EVERY, dense)


@pytest.mark.parametrize("slots", [2, 62, 200, 512, 2048, 1 << 14])
def test_dense_ones_of_a_sequence_take_a_bounded_share_of_the_slots(slots: int) -> None:
    """All of them for the first tokens, and half as many for each doubling of a long sequence."""
    schedule = schedule_for(slots, PAGE)
    for doublings in range(6):
        places = range(PAGE, (SEQUENCE_TOKENS << doublings) + 1, PAGE)
        taken = sum(schedule.has(p) and not schedule.is_regular(p) for p in places)
        assert taken <= slots * (1 + doublings / 2)


def test_no_two_are_further_apart_than_regular_ones() -> None:
    schedule = CheckpointSchedule(EVERY, PAGE)
    at = [p for p in range(0, 40 * SEQUENCE_TOKENS, PAGE) if schedule.has(p)]
    gaps = [(b - a, a) for a, b in pairwise(at)]
    assert max(gap for gap, _ in gaps) == EVERY
    assert all(gap <= max(PAGE, 2 * PAGE * start // SEQUENCE_TOKENS) for gap, start in gaps)


@pytest.mark.parametrize("span", [range(10), range(512), range(100, 4000), range(9000, 20000), range(64, 96)])
def test_a_step_writes_some_that_divide_it_evenly(span: range) -> None:
    schedule = CheckpointSchedule(EVERY, PAGE)
    regular, dense = schedule.regular_inside(span), schedule.dense_inside(span)
    every = [p for p in range(span.start + 1, span.stop) if schedule.has(p)]
    assert len(regular) <= 4 and len(dense) <= 16
    assert all(schedule.is_regular(p) for p in regular) and not any(schedule.is_regular(p) for p in dense)
    assert dense == sorted(dense, reverse=True) and set(regular + dense) <= set(every)
    assert len(dense) > 4 or sorted(regular + dense) == every


def test_one_distance_everywhere_and_none_at_all() -> None:
    fixed, none = CheckpointSchedule(96), CheckpointSchedule(0)
    assert [p for p in range(0, 400, 32) if fixed.has(p)] == [0, 96, 192, 288, 384]
    assert fixed.regular_inside(range(90, 300)) == [288, 192, 96] and fixed.dense_inside(range(300)) == []
    assert not none.has(0) and none.regular_inside(range(100)) == none.dense_inside(range(100)) == []
