"""What a cache refuses, what it counts, and how it ends; the verbs in every order are in test_cache_machine."""

from __future__ import annotations

from typing import Any

import pytest

from kvilt.errors import TruncateError
from kvilt.kv.cache import KVCache


@pytest.fixture
def pool(scribe: Any) -> Any:
    return scribe.pool()


# Truncating.


def test_a_refused_truncate_of_several_rows_names_a_length_that_suits_them_all(scribe: Any) -> None:
    pool = scribe.pool(scribe.windowed())
    with KVCache(pool, 2) as cache:
        rows = [scribe.cells(range(18)), scribe.cells(range(22))]
        scribe.extend(cache, rows)
        assert cache.row(0).floor < cache.row(1).floor
        with pytest.raises(TruncateError) as refused:
            cache.truncate(3)
        assert str(cache.row(1).floor) in str(refused.value)
        cache.truncate(refused.value.smallest)
        assert cache.lengths == (cache.row(1).floor,) * 2


def test_a_refused_truncate_names_zero_where_no_other_length_suits_all_rows(scribe: Any) -> None:
    pool = scribe.pool(scribe.windowed())
    with KVCache(pool, 2) as cache:
        scribe.extend(cache, [scribe.cells(range(3)), scribe.cells(range(22))])
        with pytest.raises(TruncateError, match="choose 0 to empty the row") as refused:
            cache.truncate(2)
        assert refused.value.smallest == 0
        with pytest.raises(TruncateError) as refused:
            cache.truncate([2, 5])
        cache.truncate([2, refused.value.smallest])


@pytest.mark.parametrize("length", [-1, 6, 2**63, -(2**63)])
def test_a_truncate_outside_the_row_is_refused(scribe: Any, pool: Any, length: int) -> None:
    cache, rows = scribe.grown(pool, range(5))
    with cache:
        with pytest.raises(TruncateError, match="choose 0 to 5"):
            cache.truncate(length)
        scribe.check(cache, rows)
