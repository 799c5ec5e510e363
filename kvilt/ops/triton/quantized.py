"""Products with packed weights: codes become bfloat16 in registers, tensor cores multiply them, and scales come after.

A group of columns has one scale in each row of a weight, so each group is a small product of its own, exact but for
the sum, that is scaled in float32. Minimums, and what codes are shifted by, go with the sum of the group's inputs.
Many rows are cheaper with the whole weight expanded, and cuBLAS.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
import triton
import triton.language as tl
from torch import Tensor

from ..contract import Activation
from .overlap import await_inputs, fetch_ahead, launch_next, overlap
from .packed import GroupedLayout
from .unpack import load_codes
from .vectors import _ACTIVATIONS, activated

SPAN = 128  # columns
SLAB = 1 << 27  # elements of a weight that are expanded at a time
FEW_ROWS = 16  # rows of an input up to which the warps of a program share out the columns
MANY_ROWS = 65  # and from which on expanding the weight pays


@dataclass(frozen=True, slots=True)
class PackedTile:
    """How a product is shared out: rows of a weight for a program, and spans of `SPAN` columns at a time.

    A product of few rows has a warp for each span, a product of several rows takes one span after the other.
    """

    outputs: int
    spans: int
    stages: int
    warps: int = 0  # 0: one for each span

    def options(self, layout: GroupedLayout, rows: int) -> dict[str, int]:
        """As a launch takes it; spans are halved until they fill the columns."""
        spans, span = self.spans, 8 * layout.group if rows == 1 else SPAN
        while layout.padded % (spans * span):
            spans //= 2
        chunks = spans if rows == 1 else spans * span // (layout.group * layout.slots)
        return {"OUTPUTS": self.outputs, "CHUNKS": chunks, "STAGES": self.stages, "num_warps": self.warps or spans}


# Measured on an H200, with weights of an 8B model: bench/gpu_kernels.py.
ONE, ONE_OF_MANY_OUTPUTS = PackedTile(16, 4, stages=4), PackedTile(32, 4, stages=3)
FEW, FEW_OF_MANY_OUTPUTS = PackedTile(16, 4, stages=5), PackedTile(32, 4, stages=4)
SEVERAL = PackedTile(64, 1, stages=4, warps=4)
MANY_OUTPUTS = 8192


def product(x: Tensor, data: Tensor, layout: GroupedLayout, residual: Tensor | None = None) -> Tensor:
    """`x` [rows, in] times a packed weight [out, row_bytes] transposed, plus `residual` [rows, out]."""
    if len(x) >= MANY_ROWS:
        made = _by_slabs(x, data, layout)
        return made if residual is None else residual.add_(made)
    return launch(x, data, layout, len(data), tile_of(len(x), len(data)), residual=residual)


def _by_slabs(x: Tensor, data: Tensor, layout: GroupedLayout) -> Tensor:
    """Slabs of the weight expanded one after the other, since a whole vocabulary would take a gigabyte."""
    step = max(1, SLAB // layout.columns)
    if len(data) <= step:
        return F.linear(x, expanded(data, layout, x.dtype))
    out = torch.empty((len(x), len(data)), dtype=x.dtype, device=x.device)
    for start in range(0, len(data), step):
        out[:, start : start + step] = F.linear(x, expanded(data[start : start + step], layout, x.dtype))
    return out


def gate_up(x: Tensor, data: Tensor, layout: GroupedLayout, activation: Activation) -> Tensor:
    """activation(gate(x)) * up(x) of less than many rows; `data` are the rows of gate, then those of up."""
    outputs = len(data) // 2
    return launch(x, data, layout, outputs, tile_of(len(x), outputs), kind=_ACTIVATIONS[activation])


def tile_of(rows: int, outputs: int) -> PackedTile:
    """The tile for so many rows of inputs and of the weight."""
    if rows > FEW_ROWS:
        return SEVERAL
    if outputs < MANY_OUTPUTS:
        return ONE if rows == 1 else FEW
    return ONE_OF_MANY_OUTPUTS if rows == 1 else FEW_OF_MANY_OUTPUTS


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
    numbers = (outputs,) if rows == 1 else (rows, outputs, x.stride(0))
    kernel[(triton.cdiv(outputs, tile.outputs), triton.cdiv(rows, block))](
        x, *_planes(data, layout), x if residual is None else residual, out, *numbers,
        layout.columns, layout.padded, CUT=layout.columns != layout.padded, RESIDUAL=residual is not None, KIND=kind,
        **_constants(layout), ROWS=block,
        ASSEMBLY=x.dtype == torch.bfloat16 and x.is_cuda, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        **tile.options(layout, rows), **overlap(x),
    )  # fmt: skip
    return out


def _planes(data: Tensor, layout: GroupedLayout) -> tuple[Tensor, Tensor, int, int, int]:
    """The same memory as words of codes and as words of scales; a row in both units, and the codes before the scales.

    Scales are loaded in words of 32 bits, the smallest that can be loaded ahead of their use.
    """
    row = layout.row_bytes
    return data.view(torch.int16), data.view(torch.int32), row // 2, row // 4, layout.code_bytes // 4


def _constants(layout: GroupedLayout) -> dict[str, Any]:
    return {
        "BITS": layout.bits, "GROUP": layout.group, "SLOTS": layout.slots, "OFFSET": layout.offset,
        "MINIMUMS": layout.minimums,
    }  # fmt: skip


@triton.jit
def _halves(word):
    """Two float16 of a word, as float32."""
    low = (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _group(
    total, codes, x, sums, at, pair, slot: tl.constexpr, BASE: tl.constexpr, MINIMUMS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`total` [..., out, rows] and what one group of columns adds; codes of eight bits come in two halves.

    A word has the scale and the minimum of a group or, without minimums, the scales of two: also gives the word.
    """
    if MINIMUMS or slot % 2 == 0:
        pair = tl.load(at + (slot if MINIMUMS else slot // 2))
    low, high = _halves(pair)
    scale = low if MINIMUMS or slot % 2 == 0 else high
    shift = high - scale * BASE if MINIMUMS else scale * -BASE
    made = tl.dot(codes[0], x, input_precision=PRECISION)
    if len(codes) == 2:
        made = tl.dot(codes[1], x, input_precision=PRECISION) * 16 + made
    return total + made * tl.expand_dims(scale, -1) + sums * tl.expand_dims(shift, -1), pair


@triton.jit
def _one_row(
    x, words, scales, stride_words, stride_scales, first_scale, residual, out, outputs, columns, padded,
    CUT: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, SLOTS: tl.constexpr, OFFSET: tl.constexpr,
    MINIMUMS: tl.constexpr, RESIDUAL: tl.constexpr, KIND: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
    CHUNKS: tl.constexpr, STAGES: tl.constexpr, ASSEMBLY: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The tile has a column for each of `ROWS` groups, not for rows: groups are scaled together, not one by one.

    `CHUNKS` are spans of `ROWS` groups here, shared out among warps.
    """
    launch_next(PDL)
    SCALE_WORDS: tl.constexpr = ROWS if MINIMUMS else ROWS // 2  # of a span
    WORDS: tl.constexpr = SLOTS * GROUP * BITS // 16
    PARTS: tl.constexpr = ROWS // SLOTS  # chunks of a span
    BASE: tl.constexpr = OFFSET + (0 if not ASSEMBLY else 128 * 17 if BITS == 8 else 128)
    kind: tl.constexpr = x.dtype.element_ty
    n, group = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, ROWS)
    span, c = tl.arange(0, CHUNKS), tl.arange(0, GROUP)
    near = tl.minimum(n, outputs - 1).to(tl.int64)  # rows past the end are read as the last one, without a mask
    fetch_ahead((words + near * stride_words)[:, None] + 64 * tl.arange(0, 8)[None, :], PDL)
    await_inputs(PDL)
    words_at = words + (near * stride_words)[None, :, None] + (span * PARTS * WORDS)[:, None, None] + c[None, None, :]
    scales_at = scales + first_scale + (near * stride_scales)[None, :, None] + (span * SCALE_WORDS)[:, None, None]
    column = (span * ROWS * GROUP)[:, None, None] + (group * GROUP)[None, None, :] + c[None, :, None]
    second, second_scale = outputs.to(tl.int64) * stride_words, outputs.to(tl.int64) * stride_scales
    ones = tl.full([CHUNKS, OUTPUTS, GROUP], 1.0, tl.float32).to(kind)
    total, other = tl.zeros([CHUNKS, OUTPUTS, ROWS], tl.float32), tl.zeros([CHUNKS, OUTPUTS, ROWS], tl.float32)
    for start in tl.range(0, padded, ROWS * GROUP * CHUNKS, num_stages=STAGES):
        own = tl.load(x + start + column, mask=start + column < columns if CUT else None)
        sums = tl.dot(ones, own, input_precision=PRECISION)
        at = start // (SLOTS * GROUP) * WORDS
        scale_at = scales_at + start // (ROWS * GROUP) * SCALE_WORDS
        total = _span(
            total,
            words_at + at,
            scale_at,
            own,
            sums,
            BITS,
            GROUP,
            SLOTS,
            ROWS,
            BASE,
            MINIMUMS,
            ASSEMBLY,
            PRECISION,
        )
        if KIND >= 0:
            other = _span(
                other, words_at + second + at, scale_at + second_scale, own, sums,
                BITS, GROUP, SLOTS, ROWS, BASE, MINIMUMS, ASSEMBLY, PRECISION,
            )  # fmt: skip
    made = tl.sum(tl.sum(total, 2), 0)
    if KIND >= 0:
        made = activated(made, KIND) * tl.sum(tl.sum(other, 2), 0)
    if RESIDUAL:
        made += tl.load(residual + n, mask=n < outputs, other=0.0).to(tl.float32)
    tl.store(out + n, made, mask=n < outputs)


@triton.jit
def _span(
    total, at, scale_at, x, sums,
    BITS: tl.constexpr, GROUP: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, BASE: tl.constexpr,
    MINIMUMS: tl.constexpr, ASSEMBLY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`total` [spans, out, groups] and what the groups of a span add, each in its own column of `x`."""
    group = tl.arange(0, ROWS)
    made, high = tl.zeros_like(total), tl.zeros_like(total)
    for part in tl.static_range(ROWS // SLOTS):
        codes = load_codes(at + part * (SLOTS * GROUP * BITS // 16), BITS, GROUP, x.dtype, ASSEMBLY)
        for slot in tl.static_range(SLOTS):
            # All groups of the span with the codes of one: its own column is what is wanted.
            wanted = (group == part * SLOTS + slot)[None, None, :]
            made = tl.where(wanted, tl.dot(codes[slot][0], x, input_precision=PRECISION), made)
            if len(codes[slot]) == 2:
                high = tl.where(wanted, tl.dot(codes[slot][1], x, input_precision=PRECISION), high)
    if BITS == 8 and ASSEMBLY:
        made += 16 * high
    if MINIMUMS:
        scale, minimum = _halves(tl.load(scale_at + group[None, None, :]))
        return total + made * scale + sums * (minimum - scale * BASE)
    else:
        scale = tl.load(scale_at.to(tl.pointer_type(tl.float16)) + group[None, None, :]).to(tl.float32)
        return total + (made - sums * BASE) * scale


@triton.jit
def _few_rows(
    x, words, scales, stride_words, stride_scales, first_scale, residual, out, rows, outputs, stride_x, columns, padded,
    CUT: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, SLOTS: tl.constexpr, OFFSET: tl.constexpr,
    MINIMUMS: tl.constexpr, RESIDUAL: tl.constexpr, KIND: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
    CHUNKS: tl.constexpr, STAGES: tl.constexpr, ASSEMBLY: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Tiles of three axes: chunks, shared out among warps, rows of the weight, and rows of the input."""
    launch_next(PDL)
    SCALE_WORDS: tl.constexpr = SLOTS if MINIMUMS else SLOTS // 2  # of a chunk
    WORDS: tl.constexpr = SLOTS * GROUP * BITS // 16
    BASE: tl.constexpr = OFFSET + (0 if not ASSEMBLY else 128 * 17 if BITS == 8 else 128)
    kind: tl.constexpr = x.dtype.element_ty
    n, m = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, ROWS)
    chunk, c = tl.arange(0, CHUNKS), tl.arange(0, GROUP)
    there, known = n < outputs, m < rows
    near = tl.minimum(n, outputs - 1).to(tl.int64)  # rows past the end are read as the last one, without a mask
    fetch_ahead((words + near * stride_words)[:, None] + 64 * tl.arange(0, 8)[None, :], PDL)
    await_inputs(PDL)
    words_at = words + (near * stride_words)[None, :, None] + (chunk * WORDS)[:, None, None] + c[None, None, :]
    scales_at = scales + first_scale + (near * stride_scales)[None, :] + (chunk * SCALE_WORDS)[:, None]
    x_at = x + (m * stride_x)[None, None, :] + (chunk * SLOTS * GROUP)[:, None, None] + c[None, :, None]
    second, second_scale = outputs.to(tl.int64) * stride_words, outputs.to(tl.int64) * stride_scales
    ones = tl.full([CHUNKS, OUTPUTS, GROUP], 1.0, tl.float32).to(kind)
    total, other = tl.zeros([CHUNKS, OUTPUTS, ROWS], tl.float32), tl.zeros([CHUNKS, OUTPUTS, ROWS], tl.float32)
    for start in tl.range(0, padded, SLOTS * GROUP * CHUNKS, num_stages=STAGES):
        first = start // (SLOTS * GROUP)
        codes = load_codes(words_at + first * WORDS, BITS, GROUP, kind, ASSEMBLY)
        if KIND >= 0:
            others = load_codes(words_at + second + first * WORDS, BITS, GROUP, kind, ASSEMBLY)
        at, pair, others_pair = scales_at + first * SCALE_WORDS, 0, 0
        for slot in tl.static_range(SLOTS):
            inside = known[None, None, :]
            if CUT:
                column = start + (chunk * SLOTS + slot)[:, None] * GROUP + c[None, :]
                inside = inside & (column < columns)[:, :, None]
            own = tl.load(x_at + start + slot * GROUP, mask=inside, other=0.0)
            sums = tl.dot(ones, own, input_precision=PRECISION)
            total, pair = _group(total, codes[slot], own, sums, at, pair, slot, BASE, MINIMUMS, PRECISION)
            if KIND >= 0:
                other, others_pair = _group(
                    other, others[slot], own, sums, at + second_scale, others_pair, slot, BASE, MINIMUMS, PRECISION
                )
    made = tl.sum(total, 0)
    if KIND >= 0:
        made = activated(made, KIND) * tl.sum(other, 0)
    _finish(made, residual, out, m, n, known, there, outputs, RESIDUAL)


@triton.jit
def _finish(made, residual, out, m, n, known, there, outputs, RESIDUAL: tl.constexpr):
    """Store a tile [out, rows], with the residual if there is one."""
    place, inside = m[None, :].to(tl.int64) * outputs + n[:, None], there[:, None] & known[None, :]
    if RESIDUAL:
        made += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, made, mask=inside)


@triton.jit
def _several_rows(
    x, words, scales, stride_words, stride_scales, first_scale, residual, out, rows, outputs, stride_x, columns, padded,
    CUT: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, SLOTS: tl.constexpr, OFFSET: tl.constexpr,
    MINIMUMS: tl.constexpr, RESIDUAL: tl.constexpr, KIND: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
    CHUNKS: tl.constexpr, STAGES: tl.constexpr, ASSEMBLY: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    await_inputs(PDL)
    SCALE_WORDS: tl.constexpr = SLOTS if MINIMUMS else SLOTS // 2  # of a chunk
    WORDS: tl.constexpr = SLOTS * GROUP * BITS // 16
    BASE: tl.constexpr = OFFSET + (0 if not ASSEMBLY else 128 * 17 if BITS == 8 else 128)
    kind: tl.constexpr = x.dtype.element_ty
    n, m = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, GROUP)
    there, known = n < outputs, m < rows
    near = tl.minimum(n, outputs - 1).to(tl.int64)
    words_at = words + (near * stride_words)[:, None] + c[None, :]
    scales_at = scales + first_scale + near * stride_scales
    x_at = x + (m.to(tl.int64) * stride_x)[None, :] + c[:, None]
    second, second_scale = outputs.to(tl.int64) * stride_words, outputs.to(tl.int64) * stride_scales
    ones = tl.full([OUTPUTS, GROUP], 1.0, tl.float32).to(kind)
    total, other = tl.zeros([OUTPUTS, ROWS], tl.float32), tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in tl.range(0, padded, SLOTS * GROUP * CHUNKS, num_stages=STAGES):
        for chunk in tl.static_range(CHUNKS):
            at = start // (SLOTS * GROUP) + chunk
            codes = load_codes(words_at + at * WORDS, BITS, GROUP, kind, ASSEMBLY)
            if KIND >= 0:
                others = load_codes(words_at + second + at * WORDS, BITS, GROUP, kind, ASSEMBLY)
            scale_at = scales_at + at * SCALE_WORDS
            pair, others_pair = 0, 0
            for slot in tl.static_range(SLOTS):
                column = start + (chunk * SLOTS + slot) * GROUP
                inside = known[None, :] & (column + c < columns)[:, None] if CUT else known[None, :]
                own = tl.load(x_at + column, mask=inside, other=0.0)
                sums = tl.dot(ones, own, input_precision=PRECISION)
                total, pair = _group(total, codes[slot], own, sums, scale_at, pair, slot, BASE, MINIMUMS, PRECISION)
                if KIND >= 0:
                    other, others_pair = _group(
                        other, others[slot], own, sums, scale_at + second_scale, others_pair, slot,
                        BASE, MINIMUMS, PRECISION,
                    )  # fmt: skip
    if KIND >= 0:
        total = activated(total, KIND) * other
    _finish(total, residual, out, m, n, known, there, outputs, RESIDUAL)


def expanded(data: Tensor, layout: GroupedLayout, dtype: torch.dtype) -> Tensor:
    """The whole weight [out, in] as an ordinary tensor."""
    return _rows(data, layout, data, len(data), dtype, 1.0, gather=False)


def embed(data: Tensor, layout: GroupedLayout, ids: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Rows `ids` of a packed table, times `scale`."""
    return _rows(data, layout, ids, len(ids), dtype, scale, gather=True)


def _rows(
    data: Tensor, layout: GroupedLayout, ids: Tensor, rows: int, dtype: torch.dtype, scale: float, gather: bool
) -> Tensor:
    out = torch.empty((rows, layout.columns), dtype=dtype, device=data.device)
    block = 1024
    _expand[(rows, triton.cdiv(layout.columns, block))](
        *_planes(data, layout), ids, out, scale, layout.columns,
        **_constants(layout), GATHER=gather, BLOCK=block, enable_fp_fusion=False, **overlap(data),
    )  # fmt: skip
    return out


@triton.jit
def _expand(
    words, scales, stride_words, stride_scales, first_scale, ids, out, factor, columns,
    BITS: tl.constexpr, GROUP: tl.constexpr, SLOTS: tl.constexpr, OFFSET: tl.constexpr,
    MINIMUMS: tl.constexpr, GATHER: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    await_inputs(PDL)
    WORDS: tl.constexpr = SLOTS * GROUP * BITS // 16
    target = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + target).to(tl.int64) if GATHER else target
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    chunk, slot = column // (SLOTS * GROUP), column // GROUP % SLOTS
    words_at = words + row * stride_words + chunk * WORDS + column % GROUP
    if BITS == 6:
        low = tl.load(words_at + slot // 4 * GROUP, mask=inside, other=0).to(tl.int32) >> (slot % 4 * 4)
        high = tl.load(words_at + 2 * GROUP, mask=inside, other=0).to(tl.int32) >> (slot * 2)
        code = (low & 15) | ((high & 3) << 4)
    else:
        code = (tl.load(words_at, mask=inside, other=0).to(tl.int32) >> (slot * BITS)) & ((1 << BITS) - 1)
    group, at = column // GROUP, scales + row * stride_scales + first_scale
    low, high = _halves(tl.load(at + (group if MINIMUMS else group // 2), mask=inside, other=0))
    code = (code - OFFSET).to(tl.float32)
    made = code * low + high if MINIMUMS else code * tl.where(group % 2 == 0, low, high)
    tl.store(out + target * columns + column, made * factor, mask=inside)
