"""Products with weights of codes: they become bfloat16 in registers, tensor cores multiply them, and scales come after.

A group of columns has one scale in each row of a weight, so each group is a small product of its own, exact but for
the sum, that is scaled in float32. Minimums, and what codes are shifted by, go with the sum of the group's inputs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .overlap import await_inputs, fetch_ahead, launch_next, overlap
from .packed import SPAN, GroupedLayout, PackedTile
from .unpack import load_codes
from .vectors import gated

FEW_ROWS = 16  # rows of an input up to which the warps of a program share out the columns


def launch(
    x: Tensor,
    data: Tensor,
    layout: GroupedLayout,
    outputs: int,
    tile: PackedTile,
    residual: Tensor | None = None,
    kind: int = -1,
) -> Tensor:
    """One launch of a kernel; `kind` is that of the activation, or -1 for a plain product."""
    rows, out = len(x), torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
    block = min(32 if kind >= 0 else 64, max(8 if rows <= FEW_ROWS else 16, triton.next_power_of_2(rows)))
    kernel = _one_row if rows == 1 else _few_rows if rows <= FEW_ROWS else _several_rows
    assembly, span = x.dtype == torch.bfloat16 and x.is_cuda, 8 * layout.group if rows == 1 else SPAN
    numbers = (outputs,) if rows == 1 else (rows, outputs, x.stride(0))
    kernel[(triton.cdiv(outputs, tile.outputs), triton.cdiv(rows, block))](
        x, *planes_of(data, layout), x if residual is None else residual, out, *numbers,
        layout.columns, layout.padded, CUT=layout.columns != layout.padded, RESIDUAL=residual is not None, KIND=kind,
        **chunk_constants(layout, assembly), ROWS=block, ASSEMBLY=assembly,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        **tile.options(layout.padded, span, span if rows == 1 else layout.chunk), **overlap(x),
    )  # fmt: skip
    return out


def chunk_constants(layout: GroupedLayout, assembly: bool) -> dict[str, Any]:
    """Of a chunk of columns: its words, its words of scales, and what is on top of its codes."""
    on_top = 0 if not assembly or layout.floats else 128 * 17 if layout.bits == 8 else 128
    return {
        "BITS": layout.bits, "FLOATS": layout.floats, "GROUP": layout.group, "SLOTS": layout.slots,
        "MINIMUMS": layout.minimums, "WORDS": layout.chunk * layout.bits // 16,
        "SCALE_WORDS": layout.slots if layout.minimums else layout.slots // (4 if layout.floats else 2),
        "BASE": layout.offset + on_top,
    }  # fmt: skip


def planes_of(data: Tensor, layout: GroupedLayout) -> tuple[Tensor, Tensor, int, int, int]:
    """The same memory as words of codes and as words of scales; a row in both units, and the codes before the scales.

    Scales are loaded in words of 32 bits, the smallest that can be loaded ahead of their use.
    """
    row = layout.row_bytes
    return data.view(torch.int16), data.view(torch.int32), row // 2, row // 4, layout.code_bytes // 4


def group_constants(layout: GroupedLayout) -> dict[str, Any]:
    """What a kernel must know of groups and codes when it is compiled."""
    return {
        "BITS": layout.bits, "FLOATS": layout.floats, "GROUP": layout.group, "SLOTS": layout.slots,
        "OFFSET": layout.offset, "MINIMUMS": layout.minimums,
    }  # fmt: skip


@triton.jit
def halves(word):
    """Two float16 of a word, as float32."""
    low = (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def power_of_two(exponent):
    """The float32 whose exponent is a byte."""
    return (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def weight_rows(n, outputs, stride_words, stride_scales):
    """Where rows of a weight and their scales begin; and how far behind them those of a second weight do.

    Rows past the end are read as the last one, without a mask.
    """
    near, all_rows = tl.minimum(n, outputs - 1).to(tl.int64), outputs.to(tl.int64)
    return near * stride_words, near * stride_scales, all_rows * stride_words, all_rows * stride_scales


@triton.jit
def _group(
    total, codes, x, sums, at, word, slot: tl.constexpr, BASE: tl.constexpr, MINIMUMS: tl.constexpr,
    FLOATS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`total` [..., out, rows] and what one group of columns adds; codes of eight bits come in two halves.

    A word has the scale and the minimum of a group or, without minimums, the scales of two, or the four exponents of a
    chunk of floats: also gives the word.
    """
    if FLOATS:
        if slot % 4 == 0:
            word = tl.load(at + slot // 4)
        scale = power_of_two((word >> (slot % 4 * 8)) & 0xFF)
        made = tl.dot(codes[0], x, input_precision=PRECISION)
        return total + made * tl.expand_dims(scale, -1), word
    else:
        if MINIMUMS or slot % 2 == 0:
            word = tl.load(at + (slot if MINIMUMS else slot // 2))
        low, high = halves(word)
        scale = low if MINIMUMS or slot % 2 == 0 else high
        shift = high - scale * BASE if MINIMUMS else scale * -BASE
        made = tl.dot(codes[0], x, input_precision=PRECISION)
        if len(codes) == 2:
            made = tl.dot(codes[1], x, input_precision=PRECISION) * 16 + made
        return total + made * tl.expand_dims(scale, -1) + sums * tl.expand_dims(shift, -1), word


@triton.jit
def _one_row(
    x, words, scales, stride_words, stride_scales, first_scale, residual, out, outputs, columns, padded,
    CUT: tl.constexpr, BITS: tl.constexpr, FLOATS: tl.constexpr, GROUP: tl.constexpr, SLOTS: tl.constexpr,
    WORDS: tl.constexpr, SCALE_WORDS: tl.constexpr, BASE: tl.constexpr, MINIMUMS: tl.constexpr,
    RESIDUAL: tl.constexpr, KIND: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr,
    STAGES: tl.constexpr, ASSEMBLY: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row, _, _, _ = weight_rows(n, outputs, stride_words, stride_scales)
    fetch_ahead((words + row)[:, None] + 64 * tl.arange(0, 8)[None, :], PDL)
    await_inputs(PDL)
    made, other = row_products(
        x, words, scales + first_scale, stride_words, stride_scales, n, outputs, columns, padded,
        CUT, BITS, FLOATS, GROUP, SLOTS, WORDS, SCALE_WORDS, BASE, MINIMUMS, KIND, OUTPUTS, ROWS, CHUNKS, STAGES,
        ASSEMBLY, PRECISION,
    )  # fmt: skip
    if KIND >= 0:
        made = gated(made, other, KIND)
    if RESIDUAL:
        made += tl.load(residual + n, mask=n < outputs, other=0.0).to(tl.float32)
    tl.store(out + n, made, mask=n < outputs)


@triton.jit
def row_products(
    x, words, scales, stride_words, stride_scales, n, outputs, columns, padded,
    CUT: tl.constexpr, BITS: tl.constexpr, FLOATS: tl.constexpr, GROUP: tl.constexpr, SLOTS: tl.constexpr,
    WORDS: tl.constexpr, SCALE_WORDS: tl.constexpr, BASE: tl.constexpr, MINIMUMS: tl.constexpr, KIND: tl.constexpr,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr, ASSEMBLY: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One row of inputs times the rows `n` of a weight, and times those of a second one where there is an activation.

    The tile has a column for each of `ROWS` groups, not for rows: groups are scaled together, not one by one.
    `CHUNKS` are spans of `ROWS` groups here, shared out among warps.
    """
    PARTS: tl.constexpr = ROWS // SLOTS  # chunks of a span
    kind: tl.constexpr = x.dtype.element_ty
    group, span, c = tl.arange(0, ROWS), tl.arange(0, CHUNKS), tl.arange(0, GROUP)
    row, scale_row, second, second_scale = weight_rows(n, outputs, stride_words, stride_scales)
    words_at = words + row[None, :, None] + (span * PARTS * WORDS)[:, None, None] + c[None, None, :]
    scales_at = scales + scale_row[None, :, None] + (span * PARTS * SCALE_WORDS)[:, None, None]
    column = (span * ROWS * GROUP)[:, None, None] + (group * GROUP)[None, None, :] + c[None, :, None]
    ones = tl.full([CHUNKS, OUTPUTS, GROUP], 1.0, tl.float32).to(kind)
    total, other = tl.zeros([CHUNKS, OUTPUTS, ROWS], tl.float32), tl.zeros([CHUNKS, OUTPUTS, ROWS], tl.float32)
    for start in tl.range(0, padded, ROWS * GROUP * CHUNKS, num_stages=STAGES):
        own = tl.load(x + start + column, mask=start + column < columns if CUT else None)
        sums = total
        if not FLOATS:
            sums = tl.dot(ones, own, input_precision=PRECISION)
        at = start // (SLOTS * GROUP) * WORDS
        scale_at = scales_at + start // (ROWS * GROUP) * PARTS * SCALE_WORDS
        total = _span(
            total, words_at + at, scale_at, own, sums,
            BITS, FLOATS, GROUP, SLOTS, ROWS, BASE, MINIMUMS, ASSEMBLY, PRECISION,
        )  # fmt: skip
        if KIND >= 0:
            other = _span(
                other, words_at + second + at, scale_at + second_scale, own, sums,
                BITS, FLOATS, GROUP, SLOTS, ROWS, BASE, MINIMUMS, ASSEMBLY, PRECISION,
            )  # fmt: skip
    return tl.sum(tl.sum(total, 2), 0), tl.sum(tl.sum(other, 2), 0)


@triton.jit
def _span(
    total, at, scale_at, x, sums,
    BITS: tl.constexpr, FLOATS: tl.constexpr, GROUP: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
    BASE: tl.constexpr, MINIMUMS: tl.constexpr, ASSEMBLY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`total` [spans, out, groups] and what the groups of a span add, each in its own column of `x`."""
    group = tl.arange(0, ROWS)
    made, high = tl.zeros_like(total), tl.zeros_like(total)
    for part in tl.static_range(ROWS // SLOTS):
        codes = load_codes(at + part * (SLOTS * GROUP * BITS // 16), BITS, FLOATS, GROUP, x.dtype, ASSEMBLY)
        for slot in tl.static_range(SLOTS):
            # All groups of the span with the codes of one: its own column is what is wanted.
            wanted = (group == part * SLOTS + slot)[None, None, :]
            made = tl.where(wanted, tl.dot(codes[slot][0], x, input_precision=PRECISION), made)
            if len(codes[slot]) == 2:
                high = tl.where(wanted, tl.dot(codes[slot][1], x, input_precision=PRECISION), high)
    if BITS == 8 and ASSEMBLY:
        made += 16 * high
    if FLOATS:
        return total + made * power_of_two(tl.load(scale_at.to(tl.pointer_type(tl.uint8)) + group[None, None, :]))
    elif MINIMUMS:
        scale, minimum = halves(tl.load(scale_at + group[None, None, :]))
        return total + made * scale + sums * (minimum - scale * BASE)
    else:
        scale = tl.load(scale_at.to(tl.pointer_type(tl.float16)) + group[None, None, :]).to(tl.float32)
        return total + (made - sums * BASE) * scale


@triton.jit(do_not_specialize=["rows"])
def _few_rows(
    x, words, scales, stride_words, stride_scales, first_scale, residual, out, rows, outputs, stride_x, columns, padded,
    CUT: tl.constexpr, BITS: tl.constexpr, FLOATS: tl.constexpr, GROUP: tl.constexpr, SLOTS: tl.constexpr,
    WORDS: tl.constexpr, SCALE_WORDS: tl.constexpr, BASE: tl.constexpr, MINIMUMS: tl.constexpr,
    RESIDUAL: tl.constexpr, KIND: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr,
    STAGES: tl.constexpr, ASSEMBLY: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Tiles of three axes: chunks, shared out among warps, rows of the weight, and rows of the input."""
    launch_next(PDL)
    kind: tl.constexpr = x.dtype.element_ty
    n, m = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, ROWS)
    chunk, c = tl.arange(0, CHUNKS), tl.arange(0, GROUP)
    there, known = n < outputs, m < rows
    row, scale_row, second, second_scale = weight_rows(n, outputs, stride_words, stride_scales)
    fetch_ahead((words + row)[:, None] + 64 * tl.arange(0, 8)[None, :], PDL)
    await_inputs(PDL)
    words_at = words + row[None, :, None] + (chunk * WORDS)[:, None, None] + c[None, None, :]
    scales_at = scales + first_scale + scale_row[None, :] + (chunk * SCALE_WORDS)[:, None]
    x_at = x + (m * stride_x)[None, None, :] + (chunk * SLOTS * GROUP)[:, None, None] + c[None, :, None]
    ones = tl.full([CHUNKS, OUTPUTS, GROUP], 1.0, tl.float32).to(kind)
    total, other = tl.zeros([CHUNKS, OUTPUTS, ROWS], tl.float32), tl.zeros([CHUNKS, OUTPUTS, ROWS], tl.float32)
    for start in tl.range(0, padded, SLOTS * GROUP * CHUNKS, num_stages=STAGES):
        first = start // (SLOTS * GROUP)
        codes = load_codes(words_at + first * WORDS, BITS, FLOATS, GROUP, kind, ASSEMBLY)
        if KIND >= 0:
            others = load_codes(words_at + second + first * WORDS, BITS, FLOATS, GROUP, kind, ASSEMBLY)
        at, pair, others_pair = scales_at + first * SCALE_WORDS, 0, 0
        for slot in tl.static_range(SLOTS):
            inside = known[None, None, :]
            if CUT:
                column = start + (chunk * SLOTS + slot)[:, None] * GROUP + c[None, :]
                inside = inside & (column < columns)[:, :, None]
            own = tl.load(x_at + start + slot * GROUP, mask=inside, other=0.0)
            sums = total
            if not FLOATS:
                sums = tl.dot(ones, own, input_precision=PRECISION)
            total, pair = _group(total, codes[slot], own, sums, at, pair, slot, BASE, MINIMUMS, FLOATS, PRECISION)
            if KIND >= 0:
                other, others_pair = _group(
                    other, others[slot], own, sums, at + second_scale, others_pair, slot,
                    BASE, MINIMUMS, FLOATS, PRECISION,
                )  # fmt: skip
    made = tl.sum(total, 0)
    if KIND >= 0:
        made = gated(made, tl.sum(other, 0), KIND)
    finish(made, residual, out, m, n, known, there, outputs, RESIDUAL)


@triton.jit
def finish(made, residual, out, m, n, known, there, outputs, RESIDUAL: tl.constexpr):
    """Store a tile [out, rows], with the residual if there is one."""
    place, inside = m[None, :].to(tl.int64) * outputs + n[:, None], there[:, None] & known[None, :]
    if RESIDUAL:
        made += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, made, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _several_rows(
    x, words, scales, stride_words, stride_scales, first_scale, residual, out, rows, outputs, stride_x, columns, padded,
    CUT: tl.constexpr, BITS: tl.constexpr, FLOATS: tl.constexpr, GROUP: tl.constexpr, SLOTS: tl.constexpr,
    WORDS: tl.constexpr, SCALE_WORDS: tl.constexpr, BASE: tl.constexpr, MINIMUMS: tl.constexpr,
    RESIDUAL: tl.constexpr, KIND: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr,
    STAGES: tl.constexpr, ASSEMBLY: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    await_inputs(PDL)
    n, m = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    total, other = tile_products(
        x + m.to(tl.int64) * stride_x, m < rows, words, scales + first_scale, stride_words, stride_scales, n, outputs,
        columns, padded, CUT, BITS, FLOATS, GROUP, SLOTS, WORDS, SCALE_WORDS, BASE, MINIMUMS, KIND, OUTPUTS, ROWS,
        CHUNKS, STAGES, ASSEMBLY, PRECISION,
    )  # fmt: skip
    if KIND >= 0:
        total = gated(total, other, KIND)
    finish(total, residual, out, m, n, m < rows, n < outputs, outputs, RESIDUAL)


@triton.jit
def tile_products(
    x, known, words, scales, stride_words, stride_scales, n, outputs, columns, padded,
    CUT: tl.constexpr, BITS: tl.constexpr, FLOATS: tl.constexpr, GROUP: tl.constexpr, SLOTS: tl.constexpr,
    WORDS: tl.constexpr, SCALE_WORDS: tl.constexpr, BASE: tl.constexpr, MINIMUMS: tl.constexpr, KIND: tl.constexpr,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr, ASSEMBLY: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of inputs, which begin at `x` [rows] where they are `known`, times the rows `n` of a weight [out, rows].

    And times those of a second one where there is an activation.
    """
    kind: tl.constexpr = x.dtype.element_ty
    c = tl.arange(0, GROUP)
    row, scale_row, second, second_scale = weight_rows(n, outputs, stride_words, stride_scales)
    words_at, scales_at, x_at = words + row[:, None] + c[None, :], scales + scale_row, x[None, :] + c[:, None]
    ones = tl.full([OUTPUTS, GROUP], 1.0, tl.float32).to(kind)
    total, other = tl.zeros([OUTPUTS, ROWS], tl.float32), tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in tl.range(0, padded, SLOTS * GROUP * CHUNKS, num_stages=STAGES):
        for chunk in tl.static_range(CHUNKS):
            at = start // (SLOTS * GROUP) + chunk
            codes = load_codes(words_at + at * WORDS, BITS, FLOATS, GROUP, kind, ASSEMBLY)
            if KIND >= 0:
                others = load_codes(words_at + second + at * WORDS, BITS, FLOATS, GROUP, kind, ASSEMBLY)
            scale_at = scales_at + at * SCALE_WORDS
            word, others_word = 0, 0
            for slot in tl.static_range(SLOTS):
                column = start + (chunk * SLOTS + slot) * GROUP
                inside = known[None, :] & (column + c < columns)[:, None] if CUT else known[None, :]
                own = tl.load(x_at + column, mask=inside, other=0.0)
                sums = total
                if not FLOATS:
                    sums = tl.dot(ones, own, input_precision=PRECISION)
                total, word = _group(
                    total, codes[slot], own, sums, scale_at, word, slot, BASE, MINIMUMS, FLOATS, PRECISION
                )
                if KIND >= 0:
                    other, others_word = _group(
                        other, others[slot], own, sums, scale_at + second_scale, others_word, slot,
                        BASE, MINIMUMS, FLOATS, PRECISION,
                    )  # fmt: skip
    return total, other
