"""Draws of rows with typical-p: the thresholds of all filters, each by bisection over the order of floats.

What typical-p keeps depends on all that the filters before it keep, so their thresholds must be known.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .candidates import SCALE, count_from, mass_of, tile_of
from .scores import (
    BEYOND,
    CUT,
    INFINITY,
    LOWEST,
    MIN_P,
    TOP_K,
    TOP_P,
    gumbel,
    noise_bits,
    order_key,
    read_float,
)


@triton.jit
def draw_typical(
    source, ids, n, temperature, floor, record, mode, peak, total, noise_key, typical_p,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token of a row: thresholds first, then the best of what they leave."""
    top_k, top = tl.load(record + TOP_K), order_key(peak).to(tl.int64)
    kth = order_key(floor).to(tl.int64)  # tokens with a smaller key are out
    if top_k > 0:
        high = top + 1
        while high - kth > 1:
            middle = kth + (high - kth) // 2
            enough = count_from(source, ids, n, temperature, floor, middle.to(tl.int32), -1, WIDE, BLOCK) >= top_k
            kth, high = tl.where(enough, middle, kth), tl.where(enough, high, middle)
    first, first_id = kth.to(tl.int32), 0  # tokens with this key are out before this id
    if (mode & TOP_P) != 0:
        first, first_id = _nucleus(source, ids, n, temperature, floor, record, peak, total, kth, top, WIDE, BLOCK)
    min_p = read_float(record + MIN_P)
    entropy, log_total, near = _typical(
        source, ids, n, temperature, floor, peak, first, first_id, min_p, typical_p, WIDE, BLOCK
    )
    return _best(
        source, ids, n, temperature, floor, peak, first, first_id, min_p, entropy, log_total, near, noise_key,
        WIDE, BLOCK,
    )  # fmt: skip


@triton.jit
def _is_out(mass, rest, total, cut):
    """Whether a weight from the lowest on lies in what top-p cuts."""
    return ((rest + mass.to(tl.float64) / SCALE) / total).to(tl.float32) <= cut


@triton.jit
def _nucleus(
    source, ids, n, temperature, floor, record, peak, total, kth, top, WIDE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The smallest key that top-p keeps, and the first id with it; of equal scores the lower ids are out first."""
    cut, least = read_float(record + CUT), kth.to(tl.int32)
    own = mass_of(source, ids, n, temperature, floor, peak, least, top.to(tl.int32), WIDE, BLOCK).to(tl.float64) / SCALE
    # What top-k leaves is all there is; a floor left a rest.
    total = tl.where(tl.load(record + TOP_K) > 0, own, tl.maximum(total, own))
    rest = total - own
    low, high = kth - 1, top
    while high - low > 1:
        middle = low + (high - low) // 2
        mass = mass_of(source, ids, n, temperature, floor, peak, least, middle.to(tl.int32), WIDE, BLOCK)
        out = _is_out(mass, rest, total, cut)
        low, high = tl.where(out, middle, low), tl.where(out, high, middle)
    first = high.to(tl.int32)
    below = mass_of(source, ids, n, temperature, floor, peak, least, first - 1, WIDE, BLOCK)
    upto = mass_of(source, ids, n, temperature, floor, peak, least, first, WIDE, BLOCK)
    equals = count_from(source, ids, n, temperature, floor, first, BEYOND, WIDE, BLOCK)
    each = (upto - below) // tl.maximum(equals, 1)  # none where the floor itself is the threshold
    gone, stays = equals * 0, equals  # of the equals, so many are out, and not so many
    while stays - gone > 1:
        middle = gone + (stays - gone) // 2
        out = _is_out(below + each * middle, rest, total, cut)
        gone, stays = tl.where(out, middle, gone), tl.where(out, stays, middle)
    # The id before which so many of them stand.
    low_id, high_id = 0, tl.where(gone > 0, BEYOND, 1)
    while high_id - low_id > 1:
        middle = low_id + (high_id - low_id) // 2
        few = count_from(source, ids, n, temperature, floor, first, middle, WIDE, BLOCK) <= gone
        low_id, high_id = tl.where(few, middle, low_id), tl.where(few, high_id, middle)
    return first, low_id


@triton.jit
def _kept(scores, own, peak, first, first_id, min_p):
    keys = order_key(scores)
    kept = (scores >= LOWEST) & ((keys > first) | ((keys == first) & (own >= first_id)))
    return kept & (tl.exp((scores - peak).to(tl.float64)).to(tl.float32) >= min_p)


@triton.jit
def _typical(
    source, ids, n, temperature, floor, peak, first, first_id, min_p, typical_p,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The entropy of what is left, the logarithm of its weight, and the distance within which tokens are typical."""
    sums, j = tl.zeros([BLOCK], tl.int64), tl.arange(0, BLOCK)
    for start in range(0, n, BLOCK):
        scores, own = tile_of(source, ids, start + j, n, temperature, floor, WIDE)
        kept = _kept(scores, own, peak, first, first_id, min_p)
        sums += tl.where(kept, (tl.exp((scores - peak).to(tl.float64)) * SCALE).to(tl.int64), 0)
    total = tl.sum(sums, 0).to(tl.float64) / SCALE
    log_total, sums = tl.log(total), tl.zeros([BLOCK], tl.int64)
    for start in range(0, n, BLOCK):
        scores, own = tile_of(source, ids, start + j, n, temperature, floor, WIDE)
        kept = _kept(scores, own, peak, first, first_id, min_p)
        height = tl.where(kept, scores - peak, 0.0).to(tl.float64)
        sums += tl.where(kept, (tl.exp(height) / total * (log_total - height) * SCALE).to(tl.int64), 0)
    entropy = tl.sum(sums, 0).to(tl.float64) / SCALE
    low, high = tl.full([], -1, tl.int64), tl.full([], INFINITY, tl.float64).to(tl.int64, bitcast=True)
    while high - low > 1:
        middle = low + (high - low) // 2
        sums = tl.zeros([BLOCK], tl.int64)
        for start in range(0, n, BLOCK):
            scores, own = tile_of(source, ids, start + j, n, temperature, floor, WIDE)
            kept = _kept(scores, own, peak, first, first_id, min_p)
            height = tl.where(kept, scores - peak, 0.0).to(tl.float64)
            kept = kept & (_distance(height, log_total, entropy).to(tl.int64, bitcast=True) <= middle)
            sums += tl.where(kept, (tl.exp(height) / total * SCALE).to(tl.int64), 0)
        enough = tl.sum(sums, 0).to(tl.float64) / SCALE >= typical_p
        low, high = tl.where(enough, low, middle), tl.where(enough, middle, high)
    return entropy, log_total, high.to(tl.float64, bitcast=True)


@triton.jit
def _distance(height, log_total, entropy):
    return tl.abs(log_total - height - entropy)


@triton.jit
def _best(
    source, ids, n, temperature, floor, peak, first, first_id, min_p, entropy, log_total, near, noise_key,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token with the largest score plus noise; among equals the lower id."""
    best, token, j = tl.full([], -INFINITY, tl.float64), tl.full([], BEYOND, tl.int32), tl.arange(0, BLOCK)
    for start in range(0, n, BLOCK):
        scores, own = tile_of(source, ids, start + j, n, temperature, floor, WIDE)
        kept = _kept(scores, own, peak, first, first_id, min_p)
        height = tl.where(kept, scores - peak, 0.0).to(tl.float64)
        kept = kept & (_distance(height, log_total, entropy) <= near)
        values = tl.where(kept, scores.to(tl.float64) + gumbel(noise_bits(noise_key, own.to(tl.int64))), -INFINITY)
        value = tl.max(values, 0)
        place = tl.min(tl.where(kept & (values == value), own, BEYOND), 0)
        better = (value > best) | ((value == best) & (place < token))
        best, token = tl.where(better, value, best), tl.where(better, place, token)
    return token
