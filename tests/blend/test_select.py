"""Which tokens are computed again, on plain tensors: exactly so many, whatever stands in rows without KV."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kvilt.blend.select import budget, choose, deviations, largest, merge, select

SCORES = st.lists(st.sampled_from([0.0, 0.5, 1.0, math.inf, math.nan]), max_size=12)


@example(29, 100)  # as floats a little less than 29
@given(st.integers(0, 100), st.integers(0, 3000))
def test_a_budget_is_the_floor_of_a_decimal_share(hundredths: int, tokens: int) -> None:
    assert budget(hundredths / 100, tokens) == hundredths * tokens // 100


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_rows_without_kv_have_no_score(garbage: float) -> None:
    fresh, kept = torch.zeros(4, 2, 3), torch.ones(4, 2, 3)
    kept[1], fresh[3] = garbage, garbage
    score = deviations(fresh, kept, torch.tensor([True, False, True, False]))
    assert score.tolist() == [1.0, 0.0, 1.0, 0.0]


def test_what_cannot_be_compared_is_computed_first() -> None:
    kept = torch.ones(3, 1, 2)
    kept[1, 0, 0] = math.nan
    score = deviations(torch.zeros(3, 1, 2), kept, torch.ones(3, dtype=torch.bool))
    assert score.tolist() == [1.0, math.inf, 1.0]
    assert largest(score, 1).tolist() == [1]


def test_deviations_are_means_of_squares() -> None:
    fresh, kept = torch.tensor([[[3.0, 0.0]], [[0.0, 0.0]]]), torch.tensor([[[0.0, 1.0]], [[2.0, 0.0]]])
    assert deviations(fresh, kept, torch.tensor([True, True])).tolist() == [5.0, 2.0]


@given(SCORES, st.integers(0, 12))
def test_the_largest_are_taken_and_of_equal_ones_the_earlier(scores: list[float], count: int) -> None:
    ranks = sorted(range(len(scores)), key=lambda i: (-math.inf if math.isnan(scores[i]) else -scores[i], i))
    assert largest(torch.tensor(scores), count).tolist() == sorted(ranks[:count])


def test_only_what_is_allowed_is_chosen() -> None:
    among = torch.tensor([False, True, False, True, True])
    assert choose(torch.tensor([9.0, 1.0, 9.0, 2.0, 3.0]), among, 2).tolist() == [3, 4]
    assert choose(torch.tensor([9.0] * 5), among, 99).tolist() == [1, 3, 4]


def test_each_request_has_a_budget_of_its_own() -> None:
    scores = torch.tensor([1.0, 2.0, 3.0, 4.0, 90.0, 80.0, 70.0, 60.0, math.nan])
    valid = torch.tensor([True] * 4 + [True] * 3 + [False] * 2)
    assert select(scores, valid, 0.5, [0, 4, 9]).tolist() == [2, 3, 4, 7, 8]  # 2 of 4, 1 of 3, and what has no KV
    assert select(scores, valid, 0.0, [0, 4, 9]).tolist() == [7, 8]
    assert select(scores, valid, 1.0, [0, 4, 9]).tolist() == list(range(9))
    assert select(scores[:0], valid[:0], 0.5, [0]).tolist() == []


def test_merging_leaves_what_was_retrieved_alone() -> None:
    kept = torch.ones(3, 2)
    out = merge(kept, torch.zeros(1, 2, dtype=torch.float64), torch.tensor([1]))
    assert out.tolist() == [[1, 1], [0, 0], [1, 1]]
    assert out.dtype == kept.dtype
    assert kept.tolist() == [[1, 1]] * 3
