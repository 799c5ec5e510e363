"""The tokens that a filtered row may draw from, tile by tile: as they were collected or, WIDE, from the row itself.

Weights are added as whole numbers (2 ** -44 of the largest), so that no sum depends on an order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .scores import BEYOND, INFINITY, load_scores, order_key, weight

SCALE = tl.constexpr(float(2**44))


@triton.jit
def tile_of(source, ids, i, n, temperature, floor, WIDE: tl.constexpr):
    """Scores and ids: of collected tokens or, WIDE, of a row itself. -inf where there is no candidate."""
    if WIDE:
        scores = tl.div_rn(load_scores(source, i, n), temperature)
        return tl.where(scores >= floor, scores, -INFINITY), i
    else:
        bits = tl.load(source + i, mask=i < n, other=0)
        scores = tl.where(i < n, bits.to(tl.float32, bitcast=True), -INFINITY)
        return scores, tl.load(ids + i, mask=i < n, other=BEYOND)


@triton.jit
def count_from(source, ids, n, temperature, floor, key, id_end, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """How many candidates have this key or a larger one; with an `id_end`, exactly this key and an id before it."""
    counts, j = tl.zeros([BLOCK], tl.int32), tl.arange(0, BLOCK)
    for start in range(0, n, BLOCK):
        scores, own = tile_of(source, ids, start + j, n, temperature, floor, WIDE)
        keys = order_key(scores)
        counts += tl.where(id_end < 0, keys >= key, (keys == key) & (own < id_end)).to(tl.int32)
    return tl.sum(counts, 0)


@triton.jit
def mass_of(source, ids, n, temperature, floor, peak, first, last, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """The weight of the candidates whose keys are from `first` to `last`, as a whole number."""
    sums, j = tl.zeros([BLOCK], tl.int64), tl.arange(0, BLOCK)
    for start in range(0, n, BLOCK):
        scores, _ = tile_of(source, ids, start + j, n, temperature, floor, WIDE)
        keys = order_key(scores)
        sums += tl.where((keys >= first) & (keys <= last), whole_weight(scores, peak), 0)
    return tl.sum(sums, 0)


@triton.jit
def whole_weight(scores, peak):
    return (weight(scores - peak) * SCALE).to(tl.int64)
