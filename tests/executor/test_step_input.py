"""StepInput: the tensors of a step, which are all that a device needs, and how they are padded to a shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny import HIDDEN, LAYERS, VOCAB
from torch import Tensor

from kvilt import Executor, KVCache
from kvilt.batch import Batch, Embeds, Hidden, HiddenOut, Ids, Last, LayerSpan, Nothing, Row, SampledIds, Score
from kvilt.batch.build_step import step_input
from kvilt.batch.decode_step import decode_step, plain_decodes
from kvilt.errors import InputError

PROMPTS = [[1, 2, 3], [4] * 40, [5, 6]]


@pytest.fixture
def kv(tiny: Executor) -> Iterator[KVCache]:
    with tiny.create_kv_cache(len(PROMPTS)) as kv:
        tiny.prefill(PROMPTS, kv)
        kv.reserve([2] * len(PROMPTS))
        yield kv


def decode(kv: KVCache) -> Batch:
    return Batch.of([Row(Ids([7 + i]), [n], kv, i) for i, n in enumerate(kv.lengths)])


def leaves(value: Any) -> Iterator[Any]:
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name))
    elif isinstance(value, tuple):
        for one in value:
            yield from leaves(one)
    else:
        yield value


def close(executor: Executor, found: Tensor, expected: Tensor) -> None:
    """To the bit on the backend that promises it."""
    if executor.pool.ops.name == "native":
        assert torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_step_is_tensors_on_the_device_of_the_pool_and_plain_ints(tiny: Executor, kv: KVCache) -> None:
    found = list(leaves(decode(kv).step))
    assert {type(one) for one in found} == {Tensor, int, bool, type(None)}
    assert {one.device for one in found if isinstance(one, Tensor)} == {tiny.pool.device}


def test_lengths_are_those_of_the_rows(kv: KVCache) -> None:
    a, b, c = kv.lengths
    rows = [Row(Ids([1]), [a], kv, 0), Row(Ids([1, 2]), [b, b + 1], kv, 1), Row(Ids([3, 4]), [c, c + 1], kv, 2)]
    lengths = Batch.of(rows).step.segments[0].lengths
    assert lengths.starts == (0, 1, 3, 5) and lengths.rows == 3
    assert lengths.cu_seqlens.tolist() == [0, 1, 3, 5] and lengths.cu_seqlens.dtype == torch.int64
    assert lengths.seq_lens.tolist() == [a + 1, b + 2, c + 2] and lengths.seq_lens.dtype == torch.int64
    assert (lengths.max_query, lengths.max_seq) == (2, b + 2)


@pytest.mark.parametrize("rows", [3, 4, 8])
def test_rows_that_pad_a_step_change_nothing(tiny: Executor, kv: KVCache, rows: int) -> None:
    step, pool = decode(kv).step, tiny.pool
    padded = step.padded(rows, pool.dummy_pages, pool.layout.page_tokens)
    before = [image.groups for image in (kv.row(i).image() for i in range(len(PROMPTS)))]
    with torch.no_grad():
        expected = tiny._decoder.decode(step, pool.stores)
        found = tiny._decoder.decode(padded, pool.stores)
    assert found.shape == (rows, VOCAB)
    close(tiny, found[: len(PROMPTS)], expected)
    assert torch.isfinite(found).all()
    lengths = padded.segments[0].lengths
    assert lengths.cu_seqlens.tolist() == list(lengths.starts) == list(range(rows + 1))
    assert lengths.seq_lens.tolist() == [n + 1 for n in kv.lengths] + [1] * (rows - len(PROMPTS))
    for image, groups in zip((kv.row(i).image() for i in range(len(PROMPTS))), before, strict=True):
        assert all(torch.equal(a.keys, b.keys) for a, b in zip(image.groups, groups, strict=True))


def test_the_page_of_padding_rows_belongs_to_no_cache(tiny: Executor) -> None:
    pool, size = tiny.pool, tiny.pool.layout.page_tokens
    with tiny.create_kv_cache(capacity=tiny.max_context) as kv:
        kv.reserve(tiny.max_context)
        assert all(not {page} & set(table) for page, table in zip(pool.dummy_pages, kv.row(0).tables, strict=True))
    step = decode_one(tiny).padded(2, pool.dummy_pages, size)
    for paging, page in zip(step.segments[0].paging, pool.dummy_pages, strict=True):
        assert paging.slots[-1] == page * size and paging.tables[-1, 0] == page


def decode_one(executor: Executor) -> Any:
    with executor.create_kv_cache() as kv:
        kv.reserve(1)
        return Batch.of([Row(Ids([1]), [0], kv)]).step


def test_a_step_that_cannot_be_padded_says_so(tiny: Executor, kv: KVCache) -> None:
    pool = tiny.pool
    with pytest.raises(InputError, match="to 2 rows"):
        decode(kv).step.padded(2, pool.dummy_pages, pool.layout.page_tokens)
    silent = Batch.of([Row(Ids([1]), [kv.lengths[0]], kv, 0, want=Nothing())]).step
    with pytest.raises(InputError, match="to 4 rows"):
        silent.padded(4, pool.dummy_pages, pool.layout.page_tokens)


def test_buffers_of_a_shape_take_any_step_of_it(tiny: Executor, kv: KVCache) -> None:
    first, second = decode(kv).step, Batch.of([Row(Ids([9]), [n], kv, i) for i, n in enumerate(kv.lengths)]).step
    layout = tiny.pool.layout
    buffers = first.blank(layout.pages_for(tiny.max_context), tiny.pool.dummy_pages, layout.page_tokens)
    with torch.no_grad():
        for step in (first, second):
            buffers.copy_from(step)
            close(tiny, tiny._decoder.decode(buffers, tiny.pool.stores), tiny._decoder.decode(step, tiny.pool.stores))
    assert buffers.segments[0].lengths.seq_lens.tolist() == [n + 1 for n in kv.lengths]


def test_ids_are_embedded_in_one_call_whatever_stands_beside_them(
    tiny: Executor, kv: KVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    embed = tiny.pool.ops.embed
    monkeypatch.setattr(
        tiny.pool.ops, "embed", lambda table, ids, scale: calls.append(len(ids)) or embed(table, ids, scale)
    )
    a, b, c = kv.lengths
    vector, states = torch.randn(1, HIDDEN), torch.randn(2, HIDDEN)

    def rows() -> list[Row]:
        return [
            Row(Embeds([1, -7], [1], vector), [a, a + 1], kv, 0, want=Score([1, 2])),
            Row(SampledIds(torch.tensor([3])), [b], kv, 1),
            Row(Hidden(states), [c, c + 1], kv, 2, layers=LayerSpan(1), want=Last(2)),
        ]

    together = tiny.run(Batch.of(rows()))
    assert calls == [5]
    alone = [tiny.run(Batch.of([row])) for row in rows()[:2]]
    calls.clear()
    alone.append(tiny.run(Batch.of(rows()[2:])))
    assert calls == []  # hidden states need none
    close(tiny, together.values, torch.cat([alone[1].values, alone[2].values]))
    close(tiny, together.scores[0].logprobs, alone[0].scores[0].logprobs)


def test_ids_on_the_device_are_put_in_where_they_belong(kv: KVCache) -> None:
    """Rows may take theirs from one tensor or from several, in any order."""
    drawn, other = torch.tensor([7, 8, 9]), torch.tensor([5])
    a, b, c = kv.lengths
    rows = [
        Row(SampledIds(drawn, 2), [a], kv, 0),
        Row(SampledIds(other), [b], kv, 1),
        Row(SampledIds(drawn, 0), [c], kv, 2),
    ]
    assert Batch.of(rows).step.ids.tolist() == [9, 5, 7]
    assert drawn.tolist() == [7, 8, 9]
    for at in (-1, 3):
        with pytest.raises(InputError, match="none at"):
            Batch.of([Row(SampledIds(drawn, at), [a], kv, 0)])


def test_wanted_places_are_those_of_the_last_positions(tiny: Executor, kv: KVCache) -> None:
    a, b, c = kv.lengths
    rows = [
        Row(Ids([1, 2]), [a, a + 1], kv, 0, want=Last(1)),
        Row(Ids([1]), [b], kv, 1, want=HiddenOut()),
        Row(Ids([3, 4]), [c, c + 1], kv, 2, want=Last(2)),
    ]
    wanted = Batch.of(rows).step.wanted
    assert wanted is not None and wanted.tolist() == [1, 3, 4]
    result = tiny.run(Batch.of(rows))
    assert result.starts == (0, 1, 1, 3) and result.values.shape == (3, VOCAB)
    close(tiny, result.of_row(2), tiny.run(Batch.of([rows[2]])).values)


def test_a_step_in_parts_has_a_segment_for_each_set_of_rows(kv: KVCache) -> None:
    a, b, _ = kv.lengths
    rows = [
        Row(Ids([1]), [a], kv, 0),
        Row(Ids([1]), [b], kv, 1, layers=LayerSpan(0, 2), want=HiddenOut()),
    ]
    first, last = Batch.of(rows).step.segments
    assert (first.start, first.stop, first.tokens) == (0, 2, None)
    assert (last.start, last.stop) == (2, LAYERS)
    assert last.tokens is not None and last.tokens.tolist() == [0]
    assert last.lengths.starts == (0, 1) and last.lengths.seq_lens.tolist() == [a + 1]


def test_every_tensor_of_numbers_is_aligned(kv: KVCache) -> None:
    """A kernel that was compiled for aligned pointers serves every step."""
    a, b, c = kv.lengths
    rows = [Row(Ids([1]), [a], kv, 0), Row(Ids([1, 2]), [b, b + 1], kv, 1), Row(Ids([3, 4]), [c, c + 1], kv, 2)]
    for batch in (decode(kv), Batch.of(rows), Batch.of(rows[:2])):
        numbers = [one for one in leaves(batch.step) if isinstance(one, Tensor) and one.dtype == torch.int64]
        assert len(numbers) >= 5
        assert all(one.storage_offset() * one.element_size() % 16 == 0 for one in numbers)


def sampled_rows(kv: KVCache, drawn: Tensor, order: list[int]) -> list[Row]:
    """Rows of one token each, which stands somewhere in `drawn`."""
    return [Row(SampledIds(drawn, at), [kv.lengths[i]], kv, i) for at, i in enumerate(order, 1)]


@pytest.mark.parametrize("order", [[0], [0, 1, 2], [2, 0, 1]], ids=str)
def test_a_step_of_drawn_tokens_is_laid_out_as_any_other(kv: KVCache, order: list[int]) -> None:
    drawn = torch.tensor([90, 11, 12, 13], device=kv.pool.device)
    rows = sampled_rows(kv, drawn, order)
    for _ in range(2):  # the second time tables are found as they were packed
        own = plain_decodes(rows, kv.pool)
        assert own == [kv.row(i) for i in order]
        starts = tuple(range(len(rows) + 1))
        found, truth = decode_step(rows, own, kv.pool), step_input(rows, starts, kv.pool)
        assert [type(one) for one in leaves(found)] == [type(one) for one in leaves(truth)]
        for one, expected in zip(leaves(found), leaves(truth), strict=True):
            assert torch.equal(one, expected) if isinstance(expected, Tensor) else one == expected
        kv.reserve([40] * len(PROMPTS))  # tables grow
        rows = sampled_rows(kv, drawn, order)


def test_only_rows_of_drawn_tokens_that_may_be_written_are_laid_out_so(kv: KVCache) -> None:
    drawn = torch.tensor([90, 11, 12, 13], device=kv.pool.device)
    good, pool = sampled_rows(kv, drawn, [0, 1]), kv.pool
    assert plain_decodes(good, pool) is not None
    length = kv.lengths[2]
    others = [
        Row(Ids([5]), [length], kv, 2),
        Row(SampledIds(drawn.clone(), 1), [length], kv, 2),
        Row(SampledIds(drawn, 4), [length], kv, 2),
        Row(SampledIds(drawn), [length], kv, 2),
        Row(SampledIds(drawn, 1), [length - 1], kv, 2),
        Row(SampledIds(drawn, 1), [length + 1000], kv, 2),
        Row(SampledIds(drawn, 1), [kv.lengths[0]], kv, 0),
        Row(SampledIds(drawn, 1), [length], kv, 2, want=Nothing()),
        Row(SampledIds(drawn, 1), [length], kv, 2, layers=LayerSpan(0, 1), want=HiddenOut()),
        Row(SampledIds(drawn, 1), [length], kv, 2, rope_positions=[[length]]),
    ]
    for other in others:
        assert plain_decodes([*good, other], pool) is None
    with kv.fork():  # its last pages are shared now
        assert plain_decodes(good, pool) is None
        with pytest.raises(InputError, match="may write only"):
            Batch.of(good)
    assert plain_decodes(good, pool) is not None
