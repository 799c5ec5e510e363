"""Copies between host and device: each wait that the order needs is there, whichever stream is late."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from late_copies import EarlyStream, LateStream, staged
from torch import Tensor

from kvilt.ops.host_copies import AHEAD, DirectCopies, StagedCopies
from kvilt.ops.pinned_memory import PinnedMemory
from kvilt.ops.triton import copy_stream

CPU = torch.device("cpu")


def items(count: int) -> list[list[Tensor]]:
    """Items of some tensors each, all different."""
    return [[torch.full((3, 2), float(i)), torch.full((i % 4,), i, dtype=torch.int16)] for i in range(count)]


def same(found: list[list[Tensor]], expected: list[list[Tensor]]) -> bool:
    pairs = [(a, b) for one, other in zip(found, expected, strict=True) for a, b in zip(one, other, strict=True)]
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)


@pytest.mark.parametrize("count", [0, 1, AHEAD, 3 * AHEAD + 1])
def test_compute_reads_an_item_after_its_copy(count: int) -> None:
    given = items(count)
    found = [[one.clone() for one in there] for there in staged(LateStream()).uploads(given)]
    assert same(found, given)
    assert same([list(there) for there in DirectCopies(CPU).uploads(given)], given)


def test_a_copy_waits_for_the_compute_stream_to_leave_its_buffer() -> None:
    given, stream, found = items(3 * AHEAD + 1), EarlyStream(), []
    for there in staged(stream).uploads(given):
        stream.compute.append(lambda there=there: found.append([one.clone() for one in there]))  # type: ignore[misc]
    stream.after_compute()
    assert same(found, given)


def test_later_items_are_on_their_way_before_they_are_asked_for() -> None:
    stream = LateStream()
    uploads = staged(stream).uploads(items(9))
    next(uploads)
    assert (len(stream.begun), stream.ended) == (2 * AHEAD, 2)
    uploads.close()


def test_an_upload_that_is_left_early_leaves_no_copy_into_memory_that_is_free() -> None:
    stream = LateStream()
    uploads = staged(stream).uploads(items(9))
    next(uploads)
    uploads.close()
    assert stream.ended == len(stream.begun) > 2


def test_the_host_reads_a_download_after_it_has_arrived() -> None:
    stream, source = LateStream(), torch.arange(6.0)
    copy = staged(stream).download([source])
    assert copy.tensors[0].shape == source.shape
    assert not torch.equal(copy.tensors[0], source)
    assert torch.equal(copy.wait()[0], source)


def test_a_download_reads_what_the_compute_stream_has_written() -> None:
    stream, source = EarlyStream(), torch.zeros(4)
    stream.compute.append(lambda: source.fill_(3.0))
    (found,) = staged(stream).download([source]).wait()
    assert found.tolist() == [3.0] * 4


def test_the_source_of_a_download_lives_until_it_has_ended() -> None:
    stream, copies = LateStream(), staged(LateStream())
    copies = StagedCopies(stream, copies._memory, CPU)
    source = torch.arange(4.0)
    gone, event = weakref.ref(source), copies.download([source]).event
    stream.begun = [
        (target, other) if other is not source else (target, source.clone()) for target, other in stream.begun
    ]
    del source
    gc.collect()
    assert gone() is not None
    assert event is not None
    event.wait()
    copies.download([torch.zeros(1)])
    gc.collect()
    assert gone() is None


# Pinned memory.


def pinned(limit: int = 1 << 12) -> tuple[PinnedMemory, LateStream, list[int]]:
    """Slabs of a kilobyte, the stream whose copies they wait for, and the sizes that were pinned."""
    stream, sizes = LateStream(), list[int]()

    def pin(nbytes: int) -> Tensor:
        sizes.append(nbytes)
        return torch.zeros(nbytes, dtype=torch.uint8)

    return PinnedMemory(pin, stream.record, limit, 1 << 10), stream, sizes


def test_a_piece_is_used_again_after_the_copies_that_were_begun_before() -> None:
    memory, stream, sizes = pinned()
    like = torch.empty(256)  # a whole slab
    first = memory.empty(like)
    assert first.untyped_storage().nbytes() == 1024, "a store keeps it as it is"
    address = first.data_ptr()
    stream.copy(torch.empty(256), first)
    stream.begun[0] = (torch.empty(1), torch.empty(1))  # the copy, without a reference to the piece
    del first
    gc.collect()
    assert memory.empty(like).data_ptr() != address
    stream.run(1)
    kept = [memory.empty(like) for _ in range(2)]
    assert address in [one.data_ptr() for one in kept]
    assert sizes == [1024, 1024]


def test_pieces_join_again_and_what_does_not_fit_is_ordinary_memory() -> None:
    memory, _, sizes = pinned(2048)
    halves = [memory.empty(torch.empty(128)) for _ in range(2)]
    assert memory.pinned_bytes == 1024
    del halves
    gc.collect()
    whole = [memory.empty(torch.empty(256)) for _ in range(3)]
    assert sizes == [1024, 1024]
    whole[2].fill_(2.0)
    assert memory.note() == ""
    assert memory.empty(torch.empty(0, 3)).shape == (0, 3)


def test_where_pinning_fails_copies_are_ordinary_and_the_user_is_told() -> None:
    def refuse(nbytes: int) -> Tensor:
        raise RuntimeError(f"no {nbytes} bytes\nmore")

    memory = PinnedMemory(refuse, LateStream().record, 1 << 20)
    assert memory.empty(torch.empty(4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert torch.equal(memory.pinned(torch.arange(3)), torch.arange(3))
    assert "not pinned" in memory.note()
    assert StagedCopies(LateStream(), memory, CPU).note() == memory.note()


def test_a_device_without_a_copy_stream_copies_at_once() -> None:
    assert isinstance(copy_stream.host_copies(CPU), DirectCopies)
