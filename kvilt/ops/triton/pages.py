"""Kernels that put keys and values into their slots: keys are rotated on the way, and both scaled where pages are.

No product is fused with a sum (`enable_fp_fusion`), so that a key has the same bits whichever kernel turns it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import Rotation
from ..reference import ReferencePages
from .overlap import await_inputs, launch_next, overlap
from .vectors import turn_heads, turned_pairs


def write(
    pages: ReferencePages, layer: int, slots: Tensor, keys: Tensor, values: Tensor, rotation: Rotation | None
) -> None:
    """Put `keys` and `values` [tokens, kv_heads, dim] into `slots`; keys are rotated on the way."""
    angles = (slots, slots) if rotation is None else (rotation.cos, rotation.sin)  # not read without a rotation
    _write[(len(slots), pages.shape.kv_heads)](
        keys, values, slots, *angles, *layer_of(pages, layer),
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        **page_constants(pages, rotation), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def rotate_and_write(
    pages: ReferencePages, layer: int, slots: Tensor, query: Tensor, keys: Tensor, values: Tensor, rotation: Rotation
) -> Tensor:
    """`query` rotated, in one launch with `write`."""
    tokens, heads, dim = query.shape
    out = torch.empty((tokens, heads, dim), dtype=query.dtype, device=query.device)
    block = min(triton.next_power_of_2(heads), 16 if tokens > 512 else 1)  # heads of a program; few tokens need many
    _rotate_and_write[(tokens, triton.cdiv(heads, block) + triton.cdiv(pages.shape.kv_heads, block))](
        query, keys, values, slots, rotation.cos, rotation.sin, out, *layer_of(pages, layer),
        query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        HEADS=heads, **page_constants(pages, rotation), BLOCK=block, num_warps=1 if block == 1 else 4,
        enable_fp_fusion=False, **overlap(query),
    )  # fmt: skip
    return out


def layer_of(pages: ReferencePages, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys and values of a layer, and their scales."""
    return pages.keys[layer], pages.values[layer], pages.key_scales[layer], pages.value_scales[layer]


def page_constants(pages: ReferencePages, rotation: Rotation | None) -> dict[str, Any]:
    """What a kernel must know of pages and of a rotation when it is compiled."""
    shape, pairs = pages.shape, 0 if rotation is None else rotation.cos.shape[1]
    return {
        "KV_HEADS": shape.kv_heads, "D": shape.key_dim, "DV": shape.value_dim,
        "D_PAD": triton.next_power_of_2(max(shape.key_dim, shape.value_dim)),
        "PAIRS": pairs, "PAIRS_PAD": triton.next_power_of_2(max(pairs, 1)),
        "HALF": rotation is None or rotation.pairing == "half",
        "LARGEST": shape.dtype.scaled_to or 0.0, "WHOLE": not shape.dtype.storage.is_floating_point,
        "PACKED": shape.dtype.packed_values,
    }  # fmt: skip


@triton.jit
def _write(
    keys, values, slots, cos, sin, key_pages, value_pages, key_scales, value_scales,
    key_token, key_head, value_token, value_head,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr,
    PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr, HALF: tl.constexpr, LARGEST: tl.constexpr, WHOLE: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1) + tl.arange(0, 1)
    _write_heads(
        keys + token * key_token + head * key_head, values + token * value_token + head * value_head, slots, cos, sin,
        key_pages, value_pages, key_scales, value_scales, token, head,
        KV_HEADS, D, DV, D_PAD, PAIRS, PAIRS_PAD, HALF, LARGEST, WHOLE, PACKED,
    )  # fmt: skip


@triton.jit
def _rotate_and_write(
    query, keys, values, slots, cos, sin, out, key_pages, value_pages, key_scales, value_scales,
    query_token, query_head, key_token, key_head, value_token, value_head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr,
    PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr, HALF: tl.constexpr, LARGEST: tl.constexpr, WHOLE: tl.constexpr,
    PACKED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    await_inputs(PDL)
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first: tl.constexpr = (HEADS + BLOCK - 1) // BLOCK
    if block < first:
        head = block * BLOCK + tl.arange(0, BLOCK)
        source, target = query + token * query_token + head * query_head, out + (token * HEADS + head) * D
        turn_heads(source, cos, sin, token, target, head < HEADS, D, D_PAD, PAIRS, PAIRS_PAD, HALF)
    else:
        head = (block - first) * BLOCK + tl.arange(0, BLOCK)
        _write_heads(
            keys + token * key_token + head * key_head, values + token * value_token + head * value_head, slots,
            cos, sin, key_pages, value_pages, key_scales, value_scales, token, head,
            KV_HEADS, D, DV, D_PAD, PAIRS, PAIRS_PAD, HALF, LARGEST, WHOLE, PACKED,
        )  # fmt: skip


@triton.jit
def _write_heads(
    keys, values, slots, cos, sin, key_pages, value_pages, key_scales, value_scales, token, head,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr,
    PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr, HALF: tl.constexpr, LARGEST: tl.constexpr, WHOLE: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Keys, turned, and values of some heads of a token, into its slot."""
    known, i = head < KV_HEADS, tl.arange(0, D_PAD // 2 if PACKED else D_PAD)
    place = tl.load(slots + token) * KV_HEADS + head
    WIDTH: tl.constexpr = DV // 2 if PACKED else DV
    inside = known[:, None] & (i < WIDTH)[None, :]
    if PACKED:
        even = tl.load(values[:, None] + 2 * i[None, :], mask=inside, other=0.0).to(tl.float32)
        odd = tl.load(values[:, None] + 2 * i[None, :] + 1, mask=inside, other=0.0).to(tl.float32)
        scale = packed_scale(even, odd)
        tl.store(value_scales + place, scale, mask=known)
        own = packed_values(even, odd, scale)
    else:
        own = tl.load(values[:, None] + i[None, :], mask=inside, other=0.0)
        if LARGEST > 0:
            own = own.to(tl.float32)
            scale = scale_of(largest_of(own), LARGEST)
            tl.store(value_scales + place, scale, mask=known)
            own = scaled_by(own, scale, LARGEST, WHOLE)
    if LARGEST > 0:
        _write_scaled_keys(
            keys, cos, sin, token, key_pages + place * D, key_scales + place, known,
            D, D_PAD, PAIRS, PAIRS_PAD, HALF, LARGEST, WHOLE,
        )  # fmt: skip
    else:
        turn_heads(keys, cos, sin, token, key_pages + place * D, known, D, D_PAD, PAIRS, PAIRS_PAD, HALF)
    tl.store(value_pages + place[:, None] * WIDTH + i[None, :], own.to(value_pages.dtype.element_ty), mask=inside)


@triton.jit
def _write_scaled_keys(
    source, cos, sin, token, target, scales, known,
    D: tl.constexpr, D_PAD: tl.constexpr, PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr, HALF: tl.constexpr,
    LARGEST: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Some heads of a token, turned and scaled: one scale for all dimensions, those past the pairs as well."""
    j = tl.arange(0, D_PAD)
    rest = known[:, None] & ((j >= 2 * PAIRS) & (j < D))[None, :]
    passed = tl.load(source[:, None] + j[None, :], mask=rest, other=0.0).to(tl.float32)
    most = largest_of(passed)
    if PAIRS > 0:
        a, b, left, right, inside = turned_pairs(source, cos, sin, token, known, PAIRS, PAIRS_PAD, HALF)
        most = larger_of(most, larger_of(largest_of(a), largest_of(b)))
    scale = scale_of(most, LARGEST)
    tl.store(scales, scale, mask=known)
    kind = target.dtype.element_ty
    if PAIRS > 0:
        tl.store(target[:, None] + left, scaled_by(a, scale, LARGEST, WHOLE).to(kind), mask=inside)
        tl.store(target[:, None] + right, scaled_by(b, scale, LARGEST, WHOLE).to(kind), mask=inside)
    if 2 * PAIRS < D:
        tl.store(target[:, None] + j[None, :], scaled_by(passed, scale, LARGEST, WHOLE).to(kind), mask=rest)


@triton.jit
def largest_of(x):
    """The largest magnitude of each row [rows, numbers]; NaN if there is one among them."""
    odd = x != x
    most = tl.max(tl.where(odd, 0.0, tl.abs(x)), 1)
    return tl.where(tl.max(odd.to(tl.int32), 1) > 0, float("nan"), most)


@triton.jit
def larger_of(x, y):
    """The larger one; NaN if one of them is."""
    return tl.where(x != x, x, tl.where(y <= x, x, y))


@triton.jit
def scale_of(most, LARGEST: tl.constexpr):
    """Divided as IEEE says, so that scales have the bits of the reference."""
    scale = tl.div_rn(most, most * 0 + LARGEST)
    return tl.where(scale < 1.1754943508222875e-38, 0.0, scale)  # one over it would be no number


@triton.jit
def scaled_by(x, scale, LARGEST: tl.constexpr, WHOLE: tl.constexpr):
    """The numbers that pages keep of `x` [rows, numbers], still as float32."""
    safe = tl.where(scale == 0, 1.0, scale)
    inverse = tl.where(scale == 0, 0.0, tl.div_rn(safe * 0 + 1.0, safe))
    x = x * inverse[:, None]
    x = tl.minimum(tl.where(x > -LARGEST, x, -LARGEST), LARGEST)
    if WHOLE:  # rounds to the nearest, ties to even
        x = (x + 12582912.0) - 12582912.0
    return x


@triton.jit
def packed_scale(even, odd):
    """The scales of values of 4 bits, given as even and odd dimensions [rows, numbers]: see `ops/packed_values.py`."""
    wrong = (even != even) | (odd != odd)
    even, odd = tl.where(even == even, even, 0.0), tl.where(odd == odd, odd, 0.0)
    high = tl.maximum(tl.maximum(tl.max(even, 1), tl.max(odd, 1)), 0.0)
    low = tl.minimum(tl.minimum(tl.min(even, 1), tl.min(odd, 1)), 0.0)
    scale = tl.where(high >= -low, high, low) * -0.125
    scale = tl.where(tl.abs(scale) < 1.1754943508222875e-38, 0.0, scale)  # one over it would be no number
    return tl.where(tl.max(wrong.to(tl.int32), 1) > 0, float("nan"), scale)


@triton.jit
def packed_values(even, odd, scale):
    """Two values in a byte, as int32."""
    return _code(even, scale) | (_code(odd, scale) << 4)


@triton.jit
def _code(x, scale):
    safe = tl.where(scale == 0, 1.0, scale)
    inverse = tl.where(scale == 0, 0.0, tl.div_rn(safe * 0 + 1.0, safe))
    x = x * inverse[:, None]
    x = tl.minimum(tl.where(x > -8.0, x, -8.0), 7.0)
    return ((x + 12582912.0) - 12582912.0).to(tl.int32) + 8
