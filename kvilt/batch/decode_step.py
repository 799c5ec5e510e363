"""Steps in which every row is one token that the last step drew, which is nearly every step of an engine.

One pass checks the rows and another lays them out. The result is what `step_input` makes of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from ..kv.pool import PagePool
from ..kv.row import CacheRow
from ..ops.contract import Paging, RowLengths
from .build_step import StepNumbers
from .row import Row, SampledIds, is_plain_row
from .step_input import Segment, StepInput

_GONE = array("q", [-1]).tobytes()  # a page that is not there


def plain_decodes(rows: Sequence[Row], pool: PagePool) -> list[CacheRow] | None:
    """The cache rows of such a step, in which nothing is wrong; None for every other step.

    The caller holds the pool's lock.
    """
    drawn = rows[0].source
    if type(drawn) is not SampledIds or drawn.ids.dim() != 1 or drawn.ids.dtype != torch.int64:
        return None
    ids, count, own = drawn.ids, len(drawn.ids), []
    for row in rows:
        source, at = row.source, row.positions
        if type(source) is not SampledIds or source.ids is not ids or source.at is None or not 0 <= source.at < count:
            return None
        if row.cache.pool is not pool or len(at) != 1 or row.rope_positions or not is_plain_row(row):
            return None
        cache_row = row.cache.row(row.cache_row)
        if not len(cache_row.ids) <= at[0] < cache_row.reserved:
            return None
        own.append(cache_row)
    if pool.layout.recurrent is not None or len({id(one) for one in own}) < len(rows):
        return None
    return own if all(_writes_alone(rows, own, group, pool) for group in range(len(pool.layout.groups))) else None


def _writes_alone(rows: Sequence[Row], own: Sequence[CacheRow], group: int, pool: PagePool) -> bool:
    """Whether no other handle sees the pages that a step writes."""
    pages = _last_pages(rows, own, group, pool.page_tokens)
    return min(pages) >= 0 and pool.are_sole(group, pages)


def _last_pages(rows: Sequence[Row], own: Sequence[CacheRow], group: int, size: int) -> list[int]:
    return [one.tables[group][row.positions[0] // size] for row, one in zip(rows, own, strict=True)]


def decode_step(rows: Sequence[Row], own: Sequence[CacheRow], pool: PagePool) -> StepInput:
    """Lay such a step out; `own` are what `plain_decodes` gave."""
    numbers, starts, drawn = StepNumbers(), tuple(range(len(rows) + 1)), rows[0].source
    assert isinstance(drawn, SampledIds)
    at = [row.positions[0] for row in rows]
    ends = tuple([one + 1 for one in at])
    origins = numbers.add([row.source.at or 0 for row in rows if type(row.source) is SampledIds])
    positions, cu_seqlens, seq_lens = numbers.add(at), numbers.add(starts), numbers.add(ends)
    groups = [_paging(rows, own, at, group, pool, numbers) for group in range(len(pool.layout.groups))]
    flat: Tensor = numbers.to(pool.device)
    lengths = RowLengths(starts, flat[cu_seqlens], flat[seq_lens], 1, max(ends), True, ends)
    places = flat[positions]
    paging = tuple(Paging(flat[t].view(len(rows), -1), flat[slots], lengths, places) for t, slots in groups)
    return StepInput(drawn.ids[flat[origins]], None, (Segment(0, pool.layout.num_layers, None, places, paging),), None)


def _paging(
    rows: Sequence[Row],
    own: Sequence[CacheRow],
    at: Sequence[int],
    group: int,
    pool: PagePool,
    numbers: StepNumbers,
) -> tuple[slice, slice]:
    """Where the page tables and the slots of one group will be."""
    size, tables = pool.page_tokens, [one.packed_table(group) for one in own]
    width = max(map(len, tables))
    gone = _GONE * (width // len(_GONE))
    padded = b"".join([one + gone[len(one) :] for one in tables])
    pages = _last_pages(rows, own, group, size)
    slots = [page * size + position % size for page, position in zip(pages, at, strict=True)]
    return numbers.add_bytes(padded), numbers.add(slots)
