"""Between two steps of a captured loop: the tokens that were drawn enter, and every row moves one position on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import Paging
from ..draw_table import LoopDraws

ROWS = 128  # of a program


def advance(
    sampled: Tensor, ids: Tensor, paging: Sequence[Paging], page_tokens: int, draws: LoopDraws | None = None
) -> Tensor:
    """Put the `sampled` tokens [2, rows] into `ids`, and each row's position, length and slots one position on.

    The table of `draws` gets the keys of the next step. Returns the tokens [rows], -1 where a row has none: `sampled`
    says so in its second row.
    """
    rows = sampled.shape[1]
    tokens = torch.empty_like(ids)
    noise = (ids, ids, ids, 0) if draws is None else (draws.table.keys, draws.keys, draws.step, len(draws.keys))
    for group, one in enumerate(paging):
        _advance[(triton.cdiv(rows, ROWS),)](
            sampled, ids, tokens, one.positions, one.lengths.seq_lens, one.tables, one.slots, *noise,
            rows, one.tables.stride(0), one.tables.shape[1],
            FIRST=group == 0, DRAWS=draws is not None, PAGE=page_tokens, ROWS=ROWS, num_warps=1,
        )  # fmt: skip
    return tokens


@triton.jit(do_not_specialize=["rows", "stride", "width", "most"])
def _advance(
    sampled, ids, tokens, positions, lengths, tables, slots, next_keys, keys, steps, most, rows, stride, width,
    FIRST: tl.constexpr, DRAWS: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    position = tl.load(positions + row, mask=inside, other=0)
    if FIRST:  # groups share ids, positions and lengths: the first of them moves these
        token = tl.load(sampled + row, mask=inside, other=0)
        failed = tl.load(sampled + rows + row, mask=inside, other=0)
        tl.store(ids + row, token, mask=inside)
        tl.store(tokens + row, tl.where(failed == 0, token, -1), mask=inside)
        position += 1
        tl.store(positions + row, position, mask=inside)
        tl.store(lengths + row, tl.load(lengths + row, mask=inside, other=0) + 1, mask=inside)
    if FIRST and DRAWS:
        step = tl.load(steps + row, mask=inside, other=0) + 1
        tl.store(steps + row, step, mask=inside)
        more = inside & (step < most)
        tl.store(next_keys + row, tl.load(keys + step * rows + row, mask=more, other=0), mask=more)
    # A dummy row may run past its table: it stays on its last page.
    page = tl.minimum(position // PAGE, width - 1)
    number = tl.load(tables + row * stride + page, mask=inside, other=0)
    tl.store(slots + row, number * PAGE + position % PAGE, mask=inside)
