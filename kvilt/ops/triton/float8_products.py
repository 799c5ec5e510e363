"""Products with weights of 8-bit floats: they become bfloat16 in registers, exactly, and scales come after the product.

A scale belongs to a chunk of 128 columns of a row, or to the row. Inputs are not rounded here: see `float8_pairs`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .grouped_products import FEW_ROWS, finish, weight_rows
from .overlap import await_inputs, fetch_ahead, launch_next, overlap
from .packed import SPAN, Float8Layout, PackedTile
from .unpack import float8_halves
from .vectors import gated


def launch(
    x: Tensor,
    data: Tensor,
    layout: Float8Layout,
    outputs: int,
    tile: PackedTile,
    residual: Tensor | None = None,
    kind: int = -1,
) -> Tensor:
    """One launch of the kernel; `kind` is that of the activation, or -1 for a plain product."""
    rows, out = len(x), torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
    block = min(32 if kind >= 0 else 64, max(8 if rows <= FEW_ROWS else 16, triton.next_power_of_2(rows)))
    _product[(triton.cdiv(outputs, tile.outputs), triton.cdiv(rows, block))](
        x, *_planes(data, layout), x if residual is None else residual, out, rows, outputs, x.stride(0),
        layout.columns, layout.padded, CUT=layout.columns != layout.padded, BLOCKS=layout.blocks,
        RESIDUAL=residual is not None, KIND=kind, ROWS=block, SPAN=SPAN, ASSEMBLY=_has_assembly(x),
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        **tile.options(layout.padded, SPAN, SPAN), **overlap(x),
    )  # fmt: skip
    return out


def _has_assembly(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.is_cuda


def _planes(data: Tensor, layout: Float8Layout) -> tuple[Tensor, Tensor, int, int, int]:
    """The same memory as words of codes and as scales; a row in both units, and the codes before the scales."""
    row = layout.row_bytes
    return data.view(torch.int16), data.view(torch.float32), row // 2, row // 4, layout.padded // 4


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, words, scales, stride_words, stride_scales, first_scale, residual, out, rows, outputs, stride_x, columns, padded,
    CUT: tl.constexpr, BLOCKS: tl.constexpr, RESIDUAL: tl.constexpr, KIND: tl.constexpr, OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr, SPAN: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr, ASSEMBLY: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Tiles of rows of the weight and rows of the input; before them, chunks of columns where there are several."""
    launch_next(PDL)
    HALF: tl.constexpr = SPAN // 2
    n, m = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    chunk, c = tl.arange(0, CHUNKS), tl.arange(0, HALF)
    row, scale_row, second, second_scale = weight_rows(n, outputs, stride_words, stride_scales)
    fetch_ahead((words + row)[:, None] + 64 * tl.arange(0, 8)[None, :], PDL)
    await_inputs(PDL)
    known = m < rows
    words_at, scales_at = words + row[:, None] + c[None, :], scales + first_scale + scale_row
    column, total = c[:, None], tl.zeros([OUTPUTS, ROWS], tl.float32)
    if CHUNKS > 1:
        words_at = words_at[None, :, :] + (chunk * HALF)[:, None, None]
        scales_at = scales_at[None, :] + (chunk if BLOCKS else chunk * 0)[:, None]
        column = column[None, :, :] + (chunk * SPAN)[:, None, None]
        total = tl.zeros([CHUNKS, OUTPUTS, ROWS], tl.float32)
    x_at, other = x + m.to(tl.int64) * stride_x + column, total
    for start in tl.range(0, padded, SPAN * CHUNKS, num_stages=STAGES):
        inside = known & (start + column < columns) if CUT else known & (column >= 0)
        past = known & (start + column + HALF < columns) if CUT else inside
        low = tl.load(x_at + start, mask=inside, other=0.0)
        high = tl.load(x_at + start + HALF, mask=past, other=0.0)
        at, scale_at = words_at + start // 2, scales_at + start // SPAN
        total = _chunks(total, at, scale_at, low, high, BLOCKS, ASSEMBLY, PRECISION)
        if KIND >= 0:
            other = _chunks(other, at + second, scale_at + second_scale, low, high, BLOCKS, ASSEMBLY, PRECISION)
    made, opened = total, other
    if CHUNKS > 1:
        made, opened = tl.sum(total, 0), tl.sum(other, 0)
    last = scales + first_scale + scale_row
    if not BLOCKS:
        made = made * tl.load(last)[:, None]
    if KIND >= 0:
        if not BLOCKS:
            opened = opened * tl.load(last + second_scale)[:, None]
        made = gated(made, opened, KIND)
    finish(made, residual, out, m, n, known, n < outputs, outputs, RESIDUAL)


@triton.jit
def _chunks(
    total, at, scale_at, low, high, BLOCKS: tl.constexpr, ASSEMBLY: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """`total` [..., out, rows] and what some chunks add; `low` and `high` are the halves of their inputs."""
    first, second = float8_halves(tl.load(at, eviction_policy="evict_first"), low.dtype, ASSEMBLY)
    if BLOCKS:
        made = tl.dot(first, low, input_precision=PRECISION)
        made = tl.dot(second, high, made, input_precision=PRECISION)
        return total + made * tl.expand_dims(tl.load(scale_at), -1)
    else:
        total = tl.dot(first, low, total, input_precision=PRECISION)
        return tl.dot(second, high, total, input_precision=PRECISION)


def rows_of(
    data: Tensor, layout: Float8Layout, ids: Tensor, rows: int, dtype: torch.dtype, factor: float, gather: bool
) -> Tensor:
    """Some rows of a weight as an ordinary tensor, times `factor`: those of `ids`, or the first."""
    out, block = torch.empty((rows, layout.columns), dtype=dtype, device=data.device), 1024
    _expand[(rows, triton.cdiv(layout.padded, block))](
        *_planes(data, layout), ids, out, factor, layout.columns, layout.padded // 2,
        BLOCKS=layout.blocks, SPAN=SPAN, GATHER=gather, BLOCK=block // 2, ASSEMBLY=data.is_cuda, **overlap(data),
    )  # fmt: skip
    return out


@triton.jit
def _expand(
    words, scales, stride_words, stride_scales, first_scale, ids, out, factor, columns, word_count,
    BLOCKS: tl.constexpr, SPAN: tl.constexpr, GATHER: tl.constexpr, BLOCK: tl.constexpr, ASSEMBLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    await_inputs(PDL)
    HALF: tl.constexpr = SPAN // 2
    target = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + target).to(tl.int64) if GATHER else target
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there, chunk = word < word_count, word // HALF
    low, high = float8_halves(tl.load(words + row * stride_words + word, mask=there, other=0), tl.bfloat16, ASSEMBLY)
    scale = tl.load(scales + row * stride_scales + first_scale + (chunk if BLOCKS else chunk * 0), mask=there, other=0)
    column, to = chunk * SPAN + word % HALF, out + target * columns
    tl.store(to + column, low.to(tl.float32) * scale * factor, mask=there & (column < columns))
    tl.store(to + column + HALF, high.to(tl.float32) * scale * factor, mask=there & (column + HALF < columns))
