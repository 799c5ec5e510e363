"""Products of 8-bit floats with 8-bit floats, on cards whose tensor cores take both.

Inputs are rounded: each row has a scale for every 128 columns, so that the largest of them becomes the largest number
there is. Sums of 128 columns are float32, and are scaled before they are added up.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .overlap import await_inputs, launch_next, overlap
from .packed import SPAN, Float8Layout, PackedTile

LARGEST = 448.0  # of these floats
CAPABILITY = (8, 9)  # the first that multiplies them

# Rows of the weight, stages and warps of a program, measured on an H200 with the weights of an 8B model.
NARROW, WIDE = PackedTile(32, 1, stages=6, warps=4), PackedTile(128, 1, stages=4, warps=4)
ROWS = 64  # of the input, for a program
MANY_OUTPUTS = 1 << 14
MOST_ROWS = 256  # of the input; more are multiplied faster by the weight in bfloat16


def pairs(x: Tensor) -> bool:
    """Whether products of `x` may be of 8-bit floats on both sides."""
    return len(x) <= MOST_ROWS and x.is_cuda and x.dtype == torch.bfloat16 and has_pairs(x.device.index)


@cache
def has_pairs(device: int) -> bool:
    """Whether a card multiplies 8-bit floats."""
    return torch.cuda.get_device_capability(device) >= CAPABILITY


def product(x: Tensor, data: Tensor, layout: Float8Layout, residual: Tensor | None = None) -> Tensor:
    """`x` [rows, in], rounded, times a packed weight [out, row_bytes] transposed, plus `residual` [rows, out]."""
    (rows, columns), outputs = x.shape, len(data)
    codes = torch.empty((rows, layout.padded), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((rows, layout.padded // SPAN), dtype=torch.float32, device=x.device)
    _round[(rows, layout.padded // SPAN)](
        x, codes, scales, columns, x.stride(0), SPAN=SPAN, LARGEST=LARGEST, num_warps=1, **overlap(x)
    )
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    tile = NARROW if rows <= ROWS and outputs < MANY_OUTPUTS else WIDE
    _product[(triton.cdiv(rows, ROWS), triton.cdiv(outputs, tile.outputs))](
        codes, scales, data.view(torch.float8_e4m3fn), data.view(torch.float32), x if residual is None else residual,
        out, rows, outputs, layout.padded, layout.row_bytes, layout.row_bytes // 4, layout.padded // 4,
        BLOCKS=layout.blocks, RESIDUAL=residual is not None, ROWS=ROWS, OUTPUTS=tile.outputs, SPAN=SPAN,
        num_warps=tile.warps, num_stages=tile.stages, **overlap(x),
    )  # fmt: skip
    return out


@triton.jit
def _round(
    x, codes, scales, columns, stride, SPAN: tl.constexpr, LARGEST: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """128 columns of a row as 8-bit floats, in the order that a weight has: column 64 stands behind column 0."""
    launch_next(PDL)
    await_inputs(PDL)
    row, span, i = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, SPAN)
    column = span * SPAN + i // 2 + i % 2 * (SPAN // 2)
    own = tl.load(x + row * stride + column, mask=column < columns, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(own), 0)
    scale = tl.where(largest > 0, largest / LARGEST, 1.0)
    place = row * tl.num_programs(1) + span
    tl.store(codes + place * SPAN + i, (own / scale).to(tl.float8e4nv))
    tl.store(scales + place, scale)


@triton.jit(do_not_specialize=["rows"])
def _product(
    codes, scales, weight, weight_scales, residual, out, rows, outputs, padded, stride, stride_scales, first_scale,
    BLOCKS: tl.constexpr, RESIDUAL: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, SPAN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    m, n = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    known, there, c = m < rows, n < outputs, tl.arange(0, SPAN)
    # Rows behind the last read the last one; their results are not stored.
    row, output = tl.minimum(m, rows - 1).to(tl.int64), tl.minimum(n, outputs - 1).to(tl.int64)
    codes_at, weight_at = codes + row[:, None] * padded + c[None, :], weight + output[:, None] * stride + c[None, :]
    scales_at, own_at = scales + row * (padded // SPAN), weight_scales + output * stride_scales + first_scale
    await_inputs(PDL)
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, padded, SPAN):
        made = tl.dot(tl.load(codes_at + start), tl.trans(tl.load(weight_at + start)))
        scale = tl.load(scales_at + start // SPAN)[:, None]
        if BLOCKS:
            total += made * (scale * tl.load(own_at + start // SPAN)[None, :])
        else:
            total += made * scale
    if not BLOCKS:
        total = total * tl.load(own_at)[None, :]
    place, inside = m[:, None].to(tl.int64) * outputs + n[None, :], known[:, None] & there[None, :]
    if RESIDUAL:
        total += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total, mask=inside)
