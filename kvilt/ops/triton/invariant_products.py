"""Products whose bits do not depend on the number of rows: each output is summed over the columns in one order.

A tensor core multiplies 16 columns at a time and adds them to what it has. All kernels here go through the columns in
ascending order, and none splits them among programs. So the tile they work in is a matter of speed alone, and so is
which operand stands on the left: `tests/gpu/test_deterministic.py` proves it on the card. Packed weights become
bfloat16 first, in registers or, for many rows, in memory: both give the same numbers.

Where rows are many, cuBLAS is faster. It chooses how it sums by the shape, so it gets slabs of a few fixed numbers of
rows, and only those for which it gave, the first time, the bits of the kernel here (`SlabProducts`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .grouped_products import group_constants, halves, planes_of, power_of_two
from .overlap import HOPPER, await_inputs, fetch_ahead, launch_next, overlap
from .packed import GroupedLayout
from .quantized import MANY_ROWS, SLAB, expanded
from .unpack import load_codes

REVISION = 1
SLABS = (2048, 512, 256)  # rows that cuBLAS multiplies at once
FULL_LINES = 64  # numbers: of which rows must be multiples, so that all slabs are aligned alike


@dataclass(frozen=True, slots=True)
class ProductTile:
    """Rows and outputs of a program, columns at a time."""

    rows: int
    outputs: int
    columns: int
    warps: int
    stages: int
    weights_first: bool = True  # as the left operand, of which a tensor core takes more rows: few inputs fit the other
    bulk: bool = False  # the copy engine loads tiles (TMA)

    def options(self) -> dict[str, Any]:
        """As a launch takes it."""
        return {
            "ROWS": self.rows, "OUTPUTS": self.outputs, "COLUMNS": self.columns, "WEIGHTS_FIRST": self.weights_first,
            "num_warps": self.warps, "num_stages": self.stages,
        }  # fmt: skip


# Measured on an H200, with weights of an 8B model: up to so many rows, and so many outputs.
_ANY = 1 << 40
TILES = (
    (8, _ANY, ProductTile(8, 16, 256, 1, 5)),
    (16, _ANY, ProductTile(16, 64, 128, 4, 5)),
    (32, _ANY, ProductTile(32, 64, 128, 4, 5, bulk=True)),
    (64, 4096, ProductTile(64, 32, 128, 4, 5, weights_first=False, bulk=True)),
    (64, 16384, ProductTile(64, 64, 128, 4, 4, bulk=True)),
    (64, _ANY, ProductTile(64, 128, 64, 4, 5, bulk=True)),
    (128, 4096, ProductTile(128, 32, 128, 4, 4, weights_first=False, bulk=True)),
    (512, 8192, ProductTile(128, 64, 64, 4, 5, weights_first=False, bulk=True)),
    (_ANY, _ANY, ProductTile(128, 128, 64, 8, 4, weights_first=False, bulk=True)),
)
FLOAT32_TILE = ProductTile(32, 64, 32, 4, 2)  # no tensor core: one tile, since its order is the compiler's


def tile_of(x: Tensor, outputs: int) -> ProductTile:
    """The tile for the rows of an input, and so many outputs."""
    if x.dtype == torch.float32:
        return FLOAT32_TILE
    return next(tile for rows, most, tile in TILES if len(x) <= rows and outputs <= most)


class SlabProducts:
    """Products of one device: slabs by cuBLAS where it sums in the order of the kernel here, the rest by the kernel."""

    def __init__(self) -> None:
        self._alike: dict[tuple[int, int, int, bool], bool] = {}

    def product(self, x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
        """As `product`, to the bit."""
        rows, outputs = len(x), len(weight)
        lines = outputs % FULL_LINES == 0 and x.shape[1] % FULL_LINES == 0
        if rows < SLABS[-1] or not x.is_cuda or x.dtype == torch.float32 or not lines:
            return product(x, weight, residual)
        out, start = torch.empty((rows, outputs), dtype=x.dtype, device=x.device), 0
        for size in SLABS:
            while rows - start >= size and self._slab(x, weight, residual, out, slice(start, start + size)):
                start += size
        if start < rows:
            product(x[start:], weight, None if residual is None else residual[start:], out[start:])
        return out

    def _slab(self, x: Tensor, weight: Tensor, residual: Tensor | None, out: Tensor, span: slice) -> bool:
        """Put the product of a slab into `out`; False where cuBLAS sums in another order, or cannot be asked now."""
        shape = (span.stop - span.start, *weight.shape, residual is not None)
        known = self._alike.get(shape)
        if known is False or (known is None and torch.cuda.is_current_stream_capturing()):
            return False
        if residual is None:
            torch.mm(x[span], weight.T, out=out[span])
        else:
            torch.addmm(residual[span], x[span], weight.T, out=out[span])
        if known is None:
            own = product(x[span], weight, None if residual is None else residual[span])
            self._alike[shape] = torch.equal(own, out[span])
        return self._alike[shape]


def product(x: Tensor, weight: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """`x` [rows, in] times `weight` [out, in] transposed, plus `residual` [rows, out], rounded once."""
    (rows, columns), outputs = x.shape, len(weight)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device) if out is None else out
    tile = tile_of(x, outputs)
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs),)
    added, constants = x if residual is None else residual, {"RESIDUAL": residual is not None, **tile.options()}
    if tile.bulk and columns % 8 == 0 and _has_copy_engine(x):
        left = TensorDescriptor.from_tensor(x, [tile.rows, tile.columns])
        right = TensorDescriptor.from_tensor(weight, [tile.outputs, tile.columns])
        _bulk_product[grid](left, right, added, out, rows, outputs, columns, **constants, **overlap(x))
        return out
    _product[grid](
        x, weight, added, out, rows, outputs, columns, CUT=columns % tile.columns != 0,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", **constants, **overlap(x),
    )  # fmt: skip
    return out


def _has_copy_engine(x: Tensor) -> bool:
    return x.is_cuda and x.data_ptr() % 16 == 0 and _capability(x.device.index) >= HOPPER


@cache
def _capability(device: int) -> int:
    return torch.cuda.get_device_capability(device)[0]


@triton.jit
def _place(rows, outputs, ROWS: tl.constexpr, OUTPUTS: tl.constexpr):
    """The tile of a program: eight tiles of rows go through the outputs together, so that caches serve them all."""
    program, rows_tiles, outputs_tiles = tl.program_id(0), tl.cdiv(rows, ROWS), tl.cdiv(outputs, OUTPUTS)
    first = program // (8 * outputs_tiles) * 8
    size, inside = tl.minimum(rows_tiles - first, 8), program % (8 * outputs_tiles)
    return first + inside % size, inside // size


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, weight, residual, out, rows, outputs, columns,
    CUT: tl.constexpr, RESIDUAL: tl.constexpr, PRECISION: tl.constexpr, WEIGHTS_FIRST: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    row_tile, output_tile = _place(rows, outputs, ROWS, OUTPUTS)
    m, n, c = row_tile * ROWS + tl.arange(0, ROWS), output_tile * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, COLUMNS)
    known, there = m < rows, n < outputs
    x_at = x + m.to(tl.int64)[:, None] * columns + c[None, :]
    near = weight + tl.minimum(n, outputs - 1).to(tl.int64) * columns
    w_at = near[:, None] + c[None, :]
    if WEIGHTS_FIRST and columns >= 512:
        fetch_ahead(near[:, None] + 64 * tl.arange(0, 8)[None, :], PDL)
    await_inputs(PDL)
    sums = tl.zeros([OUTPUTS, ROWS] if WEIGHTS_FIRST else [ROWS, OUTPUTS], tl.float32)
    for start in range(0, columns, COLUMNS):
        inside = known[:, None]
        if CUT:
            inside = inside & (start + c < columns)[None, :]
            w = tl.load(w_at + start, mask=(start + c < columns)[None, :], other=0.0)
        else:
            w = tl.load(w_at + start)
        own = tl.load(x_at + start, mask=inside, other=0.0)
        if WEIGHTS_FIRST:
            sums = tl.dot(w, tl.trans(own), sums, input_precision=PRECISION)
        else:
            sums = tl.dot(own, tl.trans(w), sums, input_precision=PRECISION)
    _store(sums, residual, out, m, n, known, there, outputs, RESIDUAL, WEIGHTS_FIRST)


@triton.jit(do_not_specialize=["rows"])
def _bulk_product(
    x, weight, residual, out, rows, outputs, columns, RESIDUAL: tl.constexpr, WEIGHTS_FIRST: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `_product`, with tiles that the copy engine loads; it reads zeros beyond the edges."""
    launch_next(PDL)
    await_inputs(PDL)
    row_tile, output_tile = _place(rows, outputs, ROWS, OUTPUTS)
    sums = tl.zeros([OUTPUTS, ROWS] if WEIGHTS_FIRST else [ROWS, OUTPUTS], tl.float32)
    for start in range(0, columns, COLUMNS):
        own, w = x.load([row_tile * ROWS, start]), weight.load([output_tile * OUTPUTS, start])
        sums = tl.dot(w, own.T, sums) if WEIGHTS_FIRST else tl.dot(own, w.T, sums)
    m, n = row_tile * ROWS + tl.arange(0, ROWS), output_tile * OUTPUTS + tl.arange(0, OUTPUTS)
    _store(sums, residual, out, m, n, m < rows, n < outputs, outputs, RESIDUAL, WEIGHTS_FIRST)


@triton.jit
def _store(
    sums, residual, out, m, n, known, there, outputs, RESIDUAL: tl.constexpr, WEIGHTS_FIRST: tl.constexpr
):  # fmt: skip
    """A tile, with the residual if there is one."""
    if WEIGHTS_FIRST:
        place, inside = m.to(tl.int64)[None, :] * outputs + n[:, None], known[None, :] & there[:, None]
    else:
        place, inside = m.to(tl.int64)[:, None] * outputs + n[None, :], known[:, None] & there[None, :]
    if RESIDUAL:
        sums += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=inside)


def packed_product(
    products: SlabProducts, x: Tensor, data: Tensor, layout: GroupedLayout, residual: Tensor | None = None
) -> Tensor:
    """`x` [rows, in] times a packed weight [out, row_bytes] transposed, plus `residual` [rows, out]."""
    if len(x) >= MANY_ROWS or x.dtype == torch.float32:
        return _by_slabs(products, x, data, layout, residual)
    rows, outputs = len(x), len(data)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    block = max(16, triton.next_power_of_2(rows))
    tile = {"OUTPUTS": 16, "num_warps": 1} if block == 16 else {"OUTPUTS": 64, "num_warps": 4}
    _packed_product[(triton.cdiv(outputs, tile["OUTPUTS"]),)](
        x, *planes_of(data, layout), x if residual is None else residual, out, rows, outputs, layout.columns,
        layout.padded, CUT=layout.columns != layout.padded, RESIDUAL=residual is not None, **group_constants(layout),
        ROWS=block, CHUNKS=4 if block == 16 and layout.padded % 512 == 0 else 2, ASSEMBLY=x.is_cuda,
        enable_fp_fusion=False, **tile, **overlap(x),
    )  # fmt: skip
    return out


def _by_slabs(
    products: SlabProducts, x: Tensor, data: Tensor, layout: GroupedLayout, residual: Tensor | None
) -> Tensor:
    """Slabs of the weight expanded one after the other, since a whole vocabulary would take a gigabyte."""
    step = max(1, SLAB // layout.columns)
    if len(data) <= step:
        return products.product(x, expanded(data, layout, x.dtype), residual)
    out = torch.empty((len(x), len(data)), dtype=x.dtype, device=x.device)
    for start in range(0, len(data), step):
        stop = start + step
        own = None if residual is None else residual[:, start:stop].contiguous()
        out[:, start:stop] = products.product(x, expanded(data[start:stop], layout, x.dtype), own)
    return out


@triton.jit
def _unpacked(
    codes, pair, slot: tl.constexpr, BASE: tl.constexpr, MINIMUMS: tl.constexpr, FLOATS: tl.constexpr
):  # fmt: skip
    """A group of columns [out, group] in float32; `pair` is a word of scales, as in `quantized`."""
    if FLOATS:
        return codes[0].to(tl.float32) * power_of_two((pair >> (slot % 4 * 8)) & 0xFF)[:, None]
    low, high = halves(pair)
    code = codes[0].to(tl.float32)
    if len(codes) == 2:
        code += codes[1].to(tl.float32) * 16
    if MINIMUMS:
        return (code - BASE) * low[:, None] + high[:, None]
    else:
        return (code - BASE) * (low if slot % 2 == 0 else high)[:, None]


@triton.jit(do_not_specialize=["rows"])
def _packed_product(
    x, words, scales, stride_words, stride_scales, first_scale, residual, out, rows, outputs, columns, padded,
    CUT: tl.constexpr, BITS: tl.constexpr, FLOATS: tl.constexpr, GROUP: tl.constexpr, SLOTS: tl.constexpr,
    OFFSET: tl.constexpr, MINIMUMS: tl.constexpr, RESIDUAL: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
    CHUNKS: tl.constexpr, ASSEMBLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Groups of columns in ascending order; the numbers of a weight are those that `expanded` makes."""
    launch_next(PDL)
    await_inputs(PDL)
    SHARED: tl.constexpr = 1 if MINIMUMS else 4 if FLOATS else 2  # groups of a word of scales
    SCALE_WORDS: tl.constexpr = SLOTS // SHARED  # of a chunk
    WORDS: tl.constexpr = SLOTS * GROUP * BITS // 16
    BASE: tl.constexpr = OFFSET + (0 if FLOATS or not ASSEMBLY else 128 * 17 if BITS == 8 else 128)
    kind: tl.constexpr = x.dtype.element_ty
    n, m, c = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, ROWS), tl.arange(0, GROUP)
    there, known = n < outputs, m < rows
    near = tl.minimum(n, outputs - 1).to(tl.int64)
    words_at = words + (near * stride_words)[:, None] + c[None, :]
    scales_at = scales + first_scale + near * stride_scales
    x_at = x + (m.to(tl.int64) * columns)[None, :] + c[:, None]
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in tl.range(0, padded, SLOTS * GROUP * CHUNKS, num_stages=3):
        for part in tl.static_range(CHUNKS):
            chunk = start // (SLOTS * GROUP) + part
            codes = load_codes(words_at + chunk * WORDS, BITS, FLOATS, GROUP, kind, ASSEMBLY)
            for slot in tl.static_range(SLOTS):
                column = start + (part * SLOTS + slot) * GROUP
                inside = known[None, :] & (column + c < columns)[:, None] if CUT else known[None, :]
                own = tl.load(x_at + column, mask=inside, other=0.0)
                pair = tl.load(scales_at + chunk * SCALE_WORDS + slot // SHARED)
                w = _unpacked(codes[slot], pair, slot, BASE, MINIMUMS, FLOATS)
                sums = tl.dot(w.to(kind), own, sums)
    _store(sums, residual, out, m, n, known, there, outputs, RESIDUAL, True)
