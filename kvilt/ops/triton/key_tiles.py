"""Tiles of keys and values, one after the other, into the running softmax of a tile of queries."""

from __future__ import annotations

import triton
import triton.language as tl

from .unpack import even_odd

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def first_seen(position, window, CHUNKED: tl.constexpr):
    """The oldest key that queries see."""
    return position // window * window if CHUNKED else tl.maximum(position - window + 1, 0)


@triton.jit
def _over_keys(
    q, q_odd, q_scale, keys, values, key_scales, value_scales, table,
    known, at, head, start, stop, window, soft_cap, best, total, mixed, odd, unit,
    KV_HEADS: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, SCALED: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, CAPPED: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, FLOATS: tl.constexpr, ASSEMBLY: tl.constexpr, MASKED: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """One tile of keys and values into the running softmax; without masks where every query sees all of the tile."""
    WORD: tl.constexpr = 2 if SCALED else 1
    d, dv = tl.arange(0, D_PAD // WORD), tl.arange(0, DV_PAD // WORD)
    key = start + tl.arange(0, BLOCK_N)
    there = key < stop if MASKED else key >= 0
    page = tl.load(table + key // PAGE, mask=there, other=0)
    slot = (tl.maximum(page, 0) * PAGE + key % PAGE) * KV_HEADS + head
    k_at, k_mask = keys + slot[None, :] * (D // WORD) + d[:, None], (d < D // WORD)[:, None]
    k = tl.load(k_at, mask=there[None, :] & k_mask if MASKED else k_mask, other=0)
    if SCALED:
        k_even, k_odd = even_odd(k, FLOATS, ASSEMBLY)
        scores = tl.dot(q, k_even.to(q.dtype), input_precision=PRECISION)
        scores = tl.dot(q_odd, k_odd.to(q.dtype), scores, input_precision=PRECISION)
        scores = scores * tl.load(key_scales + slot, mask=there, other=0.0)[None, :]
    else:
        scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION)
    if CAPPED:
        scores = soft_cap * (2 * tl.sigmoid(2 * scores * q_scale[:, None] / soft_cap) - 1)
    useful = there
    if MASKED:
        seen = known[:, None] & there[None, :] & (key[None, :] <= at[:, None])
        if WINDOW:
            seen = seen & (key[None, :] >= first_seen(at, window, CHUNKED)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        # What no query sees may never have been written: 0 * NaN would be NaN.
        useful = there & (tl.max(seen.to(tl.int32), 0) > 0)
    higher = tl.maximum(best, tl.max(scores, 1))
    calm = tl.where(higher == float("-inf"), 0.0, higher)  # rows that have seen no key yet
    # Scores are scaled as they become powers of two, in one instruction.
    unit_of = tl.full([q.shape[0]], LOG2E, tl.float32) if CAPPED else q_scale * LOG2E
    weights = tl.exp2(scores * unit_of[:, None] - (calm * unit_of)[:, None])
    fading = tl.exp2((best - calm) * unit_of)
    total = total * fading + tl.sum(weights, 1)
    v_at, v_mask = values + slot[:, None] * (DV // WORD) + dv[None, :], (dv < DV // WORD)[None, :]
    v = tl.load(v_at, mask=useful[:, None] & v_mask if MASKED else v_mask, other=0)
    if SCALED:
        # Scales are counted in the largest so far, so that weights stay within float16.
        v_scale = tl.load(value_scales + slot, mask=useful, other=0.0)
        larger = tl.maximum(unit, tl.max(tl.abs(v_scale), 0))
        safe = tl.where(larger > 0, larger, 1.0)
        inverse = 1.0 / safe
        weights = (weights * (v_scale * inverse)[None, :]).to(q.dtype)
        fading = fading * (unit * inverse)
        if PACKED:  # a byte is a pair, where the others have two bytes
            v_even, v_odd = (v & 15).to(tl.float16) - 8.0, (v >> 4).to(tl.float16) - 8.0
        else:
            v_even, v_odd = even_odd(v, FLOATS, ASSEMBLY)
        mixed = tl.dot(weights, v_even.to(q.dtype), mixed * fading[:, None], input_precision=PRECISION)
        odd = tl.dot(weights, v_odd.to(q.dtype), odd * fading[:, None], input_precision=PRECISION)
        unit = larger
    else:
        mixed = tl.dot(weights.to(q.dtype), v.to(q.dtype), mixed * fading[:, None], input_precision=PRECISION)
    return higher, total, mixed, odd, unit


@triton.jit
def over_tiles(
    q, q_odd, q_scale, keys, values, key_scales, value_scales, table,
    known, at, head, begin, end, stop, window, soft_cap, best, total, mixed, odd, unit,
    KV_HEADS: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, SCALED: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, CAPPED: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, FLOATS: tl.constexpr, ASSEMBLY: tl.constexpr,
    SINGLE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """All tiles between two positions.

    The only tile of a decode step goes straight into registers; several are loaded ahead, through shared memory.
    """
    if SINGLE and (end > begin) & (end - begin <= BLOCK_N):
        best, total, mixed, odd, unit = _over_keys(
            q, q_odd, q_scale, keys, values, key_scales, value_scales, table,
            known, at, head, begin, stop, window, soft_cap, best, total, mixed, odd, unit,
            KV_HEADS, PAGE, D, DV, D_PAD, DV_PAD, SCALED, WINDOW, CHUNKED, CAPPED, BLOCK_N, PRECISION, FLOATS,
            ASSEMBLY, MASKED, PACKED,
        )  # fmt: skip
    else:
        for start in range(begin, end, BLOCK_N):
            best, total, mixed, odd, unit = _over_keys(
                q, q_odd, q_scale, keys, values, key_scales, value_scales, table,
                known, at, head, start, stop, window, soft_cap, best, total, mixed, odd, unit,
                KV_HEADS, PAGE, D, DV, D_PAD, DV_PAD, SCALED, WINDOW, CHUNKED, CAPPED, BLOCK_N, PRECISION, FLOATS,
                ASSEMBLY, MASKED, PACKED,
            )  # fmt: skip
    return best, total, mixed, odd, unit
