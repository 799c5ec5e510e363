"""Layouts: where a layer's KV lives, and what a window may forget, by brute force."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvilt.kv.layout import Full, KVLayout, Latent, LayerGroup, LayerSlot, Window
from kvilt.ops.contract import PageShape
from kvilt.ops.kv_dtypes import BFLOAT16, FLOAT16

SHAPE = PageShape(2, 4, 1, 4, 2, FLOAT16)


def test_every_layer_has_one_place(scribe: Any) -> None:
    assert scribe.windowed().places() == (LayerSlot(1, 0), LayerSlot(0, 0), LayerSlot(1, 1))
    assert scribe.windowed().num_layers == 3


def test_layers_that_keep_nothing_count_and_have_no_place() -> None:
    layout = KVLayout((LayerGroup(Full(), (0, 2), SHAPE),), bare=(1, 3))
    assert layout.num_layers == 4
    assert layout.slots() == {0: (LayerSlot(0, 0),), 2: (LayerSlot(0, 1),)}
    assert not layout.all_paged
    assert layout.describe()["bare"] == [1, 3]


@pytest.mark.parametrize("window", [1, 2, 3, 6, 9])
def test_what_a_window_needs_is_what_its_next_query_sees(window: int) -> None:
    group = LayerGroup(Window(window), (0, 1), SHAPE)
    for length in range(30):
        seen = [key for key in range(length + 1) if length - window < key <= length]
        assert group.first_needed(length) == min(seen)


@pytest.mark.parametrize("window", [1, 2, 3, 6, 9])
def test_the_smallest_length_is_the_first_whose_window_is_held(window: int) -> None:
    group = LayerGroup(Window(window), (0, 1), SHAPE)
    for first in range(1, 20):
        possible = [length for length in range(1, 60) if group.first_needed(length) >= first]
        assert group.smallest_length(first) == min(possible)
    assert group.smallest_length(0) == 0


@pytest.mark.parametrize("reach", [Full(), Latent(2)])
def test_a_group_that_sees_everything_needs_everything(reach: Full | Latent) -> None:
    group = LayerGroup(reach, (0, 1), SHAPE)
    assert {group.first_needed(length) for length in range(30)} == {0}
    assert group.smallest_length(0) == 0


def test_a_description_tells_all_but_the_page_size() -> None:
    def described(reach: Any, shape: PageShape) -> Any:
        return KVLayout((LayerGroup(reach, (0, 1), shape),)).describe()

    same = described(Full(), SHAPE)
    assert described(Full(), PageShape(2, 16, 1, 4, 2, FLOAT16)) == same
    others = [
        described(Window(4), SHAPE),
        described(Window(5), SHAPE),
        described(Latent(2), SHAPE),
        described(Full(), PageShape(2, 4, 2, 4, 2, FLOAT16)),
        described(Full(), PageShape(2, 4, 1, 6, 2, FLOAT16)),
        described(Full(), PageShape(2, 4, 1, 4, 4, FLOAT16)),
        described(Full(), PageShape(2, 4, 1, 4, 2, BFLOAT16)),
    ]
    assert all(other != same for other in others)


def test_bytes_of_a_page_are_those_of_its_tensors(scribe: Any) -> None:
    pool = scribe.pool(scribe.windowed(torch.bfloat16), pages=5)
    held = sum(t.numel() * t.element_size() for store in pool.stores for t in (store.keys, store.values))
    assert pool.layout.page_bytes * (5 + 1) == held  # one more, for padding
    assert [pool.layout.pages_for(tokens) for tokens in (0, 1, 4, 5)] == [0, 1, 1, 2]
