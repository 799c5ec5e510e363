"""Memory of the native backend: a buffer that a tensor still looks at is not handed out."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from kvilt.ops.native.memory import HUGE_PAGE_BYTES, SLAB_BYTES, Buffers, Slabs


@settings(max_examples=examples(50))
@given(st.lists(st.tuples(st.integers(0, 5000), st.booleans()), max_size=60))
def test_tensors_that_live_never_share_a_buffer(steps: list[tuple[int, bool]]) -> None:
    buffers, living = Buffers(spare_bytes=1 << 16), []
    for mark, (size, release_resources) in enumerate(steps):
        if release_resources and living:
            living.pop(0)
        tensor = buffers.empty(size, 1)
        tensor.fill_(mark)
        living.append((mark, tensor.view(-1)[: size // 2]))  # a view alone keeps its buffer
        del tensor
        for value, view in living:
            assert bool((view == value).all())


def test_a_buffer_that_no_tensor_looks_at_is_used_again() -> None:
    buffers = Buffers()
    first = buffers.empty(100, 7)
    at = first.data_ptr()
    assert buffers.empty(100, 7).data_ptr() != at
    view = first[3:]
    del first
    assert buffers.empty(100, 7).data_ptr() != at
    del view
    assert buffers.empty(7, 100).data_ptr() == at
    assert buffers.holds(buffers.empty(700)) and not buffers.holds(torch.empty(3))


def test_a_place_says_where_a_result_lies_and_does_not_keep_its_buffer() -> None:
    buffers = Buffers(spare_bytes=1 << 62)
    other, result = buffers.empty(40, 40), buffers.empty(5, 300)
    result.fill_(3)
    place, at = buffers.place(result), result.data_ptr()
    del result
    assert bool((buffers.at(place) == 3).all()) and buffers.at(place).shape == (5, 300)
    again = buffers.empty(1400)
    assert again.data_ptr() == at
    again.fill_(4)
    assert bool((buffers.at(place).view(-1)[:1400] == 4).all())
    assert other.data_ptr() != at


def test_slabs_hand_out_pieces_that_do_not_overlap() -> None:
    slabs = Slabs()
    pieces = [slabs.take(size) for size in (1, 63, 64, 65, SLAB_BYTES, 1000, SLAB_BYTES + 1, 5)]
    assert [piece.numel() for piece in pieces] == [1, 63, 64, 65, SLAB_BYTES, 1000, SLAB_BYTES + 1, 5]
    spans = sorted((piece.data_ptr(), piece.data_ptr() + piece.numel()) for piece in pieces)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
    assert all(start % 64 == 0 for start, _ in spans)
    assert not bool(pieces[3].any())


def test_a_result_that_is_looked_at_again_keeps_its_buffer() -> None:
    buffers = Buffers(spare_bytes=1 << 62)
    result = buffers.empty(5, 300)
    place, at = buffers.place(result), result.data_ptr()
    again, once_more = buffers.at(place), buffers.at(place)
    del result, again
    assert buffers.empty(1400).data_ptr() != at
    del once_more
    assert buffers.empty(1400).data_ptr() == at


def test_what_else_refers_to_a_buffer_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreters differ in how many references they hold during a call; none of them is asked."""
    monkeypatch.setattr(sys, "getrefcount", lambda _: 1)
    buffers = Buffers()
    first = buffers.empty(9)
    others = [buffer.data for held in buffers._held.values() for buffer in held]
    at = first.data_ptr()
    assert buffers.empty(9).data_ptr() != at
    del first
    assert buffers.empty(9).data_ptr() == at == others[0].ctypes.data


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux says of a mapping")
def test_linux_is_asked_for_large_pages_of_weights_and_may_give_them() -> None:
    """Of memory that is private: shared memory has none by default, whatever a process asks."""
    piece = Slabs().take(100)
    assert piece.data_ptr() % HUGE_PAGE_BYTES == 0
    own = next(one for one in mappings() if one.start <= piece.data_ptr() < one.stop)
    assert own.permissions == "rw-p"
    assert "hg" in own.flags


class Mapping(NamedTuple):
    """A piece of this process's memory."""

    start: int
    stop: int
    permissions: str
    flags: list[str]


def mappings() -> Iterator[Mapping]:
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+) ", line):
            start, stop, permissions = int(found[1], 16), int(found[2], 16), found[3]
        elif line.startswith("VmFlags:"):
            yield Mapping(start, stop, permissions, line.split()[1:])
