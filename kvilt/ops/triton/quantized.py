"""Products with packed weights of any layout. Few rows take the packed bytes, many the expanded weight and cuBLAS.

On cards that multiply 8-bit floats, inputs of 17 to 256 rows become such floats where the weight has them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
import triton
import triton.language as tl
from torch import Tensor

from ..contract import Activation
from . import float8_pairs, float8_products, grouped_products
from .grouped_products import FEW_ROWS, group_constants, halves, planes_of, power_of_two
from .overlap import await_inputs, launch_next, overlap
from .packed import Float8Layout, Layout, PackedTile
from .unpack import float_of_bits, last_float_bits
from .vectors import _ACTIVATIONS

SLAB = 1 << 27  # elements of a weight that are expanded at a time
MANY_ROWS = 65  # rows of an input from which on expanding the weight pays

# Measured on an H200, with weights of an 8B model: bench/gpu_kernels.py.
ONE, ONE_OF_MANY_OUTPUTS = PackedTile(16, 4, stages=4), PackedTile(32, 4, stages=3)
FEW, FEW_OF_MANY_OUTPUTS = PackedTile(16, 4, stages=5), PackedTile(32, 4, stages=4)
SEVERAL = PackedTile(64, 1, stages=4, warps=4)
FLOAT8_FEW, FLOAT8_FEW_OF_MANY_OUTPUTS = PackedTile(16, 4, stages=4), PackedTile(32, 4, stages=4)
FLOAT8_SEVERAL = PackedTile(64, 1, stages=4, warps=4)
MANY_OUTPUTS = 8192


def product(x: Tensor, data: Tensor, layout: Layout, residual: Tensor | None = None) -> Tensor:
    """`x` [rows, in] times a packed weight [out, row_bytes] transposed, plus `residual` [rows, out]."""
    if rounds_inputs(x, layout):
        assert isinstance(layout, Float8Layout)
        return float8_pairs.product(x, data, layout, residual)
    if len(x) >= MANY_ROWS:
        made = _by_slabs(x, data, layout)
        return made if residual is None else residual.add_(made)
    return _launch(x, data, layout, len(data), residual)


def rounds_inputs(x: Tensor, layout: Layout) -> bool:
    """Whether a product rounds `x` to 8-bit floats: more than few rows, with a weight of such floats."""
    return isinstance(layout, Float8Layout) and len(x) > FEW_ROWS and float8_pairs.pairs(x)


def _launch(
    x: Tensor, data: Tensor, layout: Layout, outputs: int, residual: Tensor | None = None, kind: int = -1
) -> Tensor:
    if isinstance(layout, Float8Layout):
        return float8_products.launch(x, data, layout, outputs, float8_tile_of(len(x), outputs), residual, kind)
    return grouped_products.launch(x, data, layout, outputs, tile_of(len(x), outputs), residual, kind)


def _by_slabs(x: Tensor, data: Tensor, layout: Layout) -> Tensor:
    """Slabs of the weight expanded one after the other, since a whole vocabulary would take a gigabyte."""
    step = max(1, SLAB // layout.columns)
    if len(data) <= step:
        return F.linear(x, expanded(data, layout, x.dtype))
    out = torch.empty((len(x), len(data)), dtype=x.dtype, device=x.device)
    for start in range(0, len(data), step):
        out[:, start : start + step] = F.linear(x, expanded(data[start : start + step], layout, x.dtype))
    return out


def gate_up(x: Tensor, data: Tensor, layout: Layout, activation: Activation) -> Tensor:
    """activation(gate(x)) * up(x) of less than many rows; `data` are the rows of gate, then those of up."""
    return _launch(x, data, layout, len(data) // 2, kind=_ACTIVATIONS[activation])


def tile_of(rows: int, outputs: int) -> PackedTile:
    """The tile for so many rows of inputs and of the weight."""
    if rows > FEW_ROWS:
        return SEVERAL
    if outputs < MANY_OUTPUTS:
        return ONE if rows == 1 else FEW
    return ONE_OF_MANY_OUTPUTS if rows == 1 else FEW_OF_MANY_OUTPUTS


def float8_tile_of(rows: int, outputs: int) -> PackedTile:
    """The same for 8-bit floats."""
    if rows > FEW_ROWS:
        return FLOAT8_SEVERAL
    return FLOAT8_FEW if outputs < MANY_OUTPUTS else FLOAT8_FEW_OF_MANY_OUTPUTS


def expanded(data: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    """The whole weight [out, in] as an ordinary tensor."""
    return _rows(data, layout, data, len(data), dtype, 1.0, gather=False)


def embed(data: Tensor, layout: Layout, ids: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Rows `ids` of a packed table, times `scale`."""
    return _rows(data, layout, ids, len(ids), dtype, scale, gather=True)


def _rows(
    data: Tensor, layout: Layout, ids: Tensor, rows: int, dtype: torch.dtype, scale: float, gather: bool
) -> Tensor:
    if isinstance(layout, Float8Layout):
        return float8_products.rows_of(data, layout, ids, rows, dtype, scale, gather)
    out = torch.empty((rows, layout.columns), dtype=dtype, device=data.device)
    block = 1024
    _expand[(rows, triton.cdiv(layout.columns, block))](
        *planes_of(data, layout), ids, out, scale, layout.columns,
        **group_constants(layout), GATHER=gather, BLOCK=block, enable_fp_fusion=False, **overlap(data),
    )  # fmt: skip
    return out


@triton.jit
def _expand(
    words, scales, stride_words, stride_scales, first_scale, ids, out, factor, columns,
    BITS: tl.constexpr, FLOATS: tl.constexpr, GROUP: tl.constexpr, SLOTS: tl.constexpr, OFFSET: tl.constexpr,
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
    if FLOATS:
        word = tl.load(words_at, mask=inside, other=0).to(tl.int32)
        number = float_of_bits(tl.where(slot == 3, last_float_bits(word), word << (3 * slot)))
        exponent = tl.load(at.to(tl.pointer_type(tl.uint8)) + group, mask=inside, other=0)
        tl.store(out + target * columns + column, number * power_of_two(exponent) * factor, mask=inside)
        return
    low, high = halves(tl.load(at + (group if MINIMUMS else group // 2), mask=inside, other=0))
    code = (code - OFFSET).to(tl.float32)
    made = code * low + high if MINIMUMS else code * tl.where(group % 2 == 0, low, high)
    tl.store(out + target * columns + column, made * factor, mask=inside)
