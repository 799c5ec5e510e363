"""What an executor takes for an input, and what it refuses by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvilt import Executor, Inputs
from kvilt.errors import InputError


@pytest.mark.parametrize("make", [np.array, torch.tensor, lambda rows: [np.array(row) for row in rows]])
def test_rows_may_be_arrays(tiny: Executor, make: Callable[[Any], Any]) -> None:
    with tiny.create_kv_cache(2) as kv:
        tiny.prefill(make([[1, 2], [3, 4]]), kv)
        assert [kv.tokens(0), kv.tokens(1)] == [[1, 2], [3, 4]]


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_places_of_embeddings_may_be_arrays(tiny: Executor, make: Callable[[Any], Any]) -> None:
    vectors = torch.ones(2, tiny.spec.hidden_size)
    with tiny.create_kv_cache() as kv, tiny.create_kv_cache() as same:
        tiny.prefill(Inputs([0, 7, 0], make([0, 2]), vectors), kv)
        tiny.prefill(Inputs([0, 7, 0], [0, 2], vectors), same)
        assert kv.tokens() == same.tokens()


@pytest.mark.parametrize("value", [None, 5, "text", b"\x01\x02"])
def test_what_is_no_input_is_refused_by_name(tiny: Executor, value: Any) -> None:
    with tiny.create_kv_cache() as kv, pytest.raises(InputError, match="token ids"):
        tiny.prefill(value, kv)


def test_embeddings_that_overflow_float32_are_refused(tiny: Executor) -> None:
    huge = torch.full((1, tiny.spec.hidden_size), 1e300, dtype=torch.float64)
    with tiny.create_kv_cache() as kv:
        with pytest.raises(InputError, match="finite"):
            tiny.step(Inputs([0], [0], huge), kv)
        assert kv.num_entries == 0
