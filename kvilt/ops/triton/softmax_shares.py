"""How attention ends: shares of a row's keys that several programs have weighed are merged, and a sink joins.

A share is the largest score, the sum of the weights relative to it, and the sum of the values.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAX_SHARES = tl.constexpr(16)


@triton.jit
def share_of_keys(begin, stop, split, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """The keys of one program among [begin, stop), in whole tiles; and how many programs have some to look at."""
    shares = stop * 0 + 1
    if SPLITS > 1:
        tiles = tl.maximum(tl.cdiv(stop - begin, BLOCK_N), 1)
        each = tl.cdiv(tiles, SPLITS)
        shares = tl.cdiv(tiles, each)
        begin = begin + split * each * BLOCK_N
        stop = tl.minimum(stop, begin + each * BLOCK_N)
    return begin, stop, shares


@triton.jit
def leave_share(best, total, mixed, sums, parts, own, known, dv, DV: tl.constexpr):
    """Put a share where the program that comes last finds it."""
    tl.store(sums + own * 2, best, mask=known)
    tl.store(sums + own * 2 + 1, total, mask=known)
    tl.store(parts + own[:, None] * DV + dv[None, :], mixed, mask=known[:, None] & (dv < DV)[None, :])
    tl.debug_barrier()


@triton.jit
def merged_shares(
    sums, parts, place, step, shares, known, dv, DV: tl.constexpr, BLOCK_M: tl.constexpr, DV_PAD: tl.constexpr
):  # fmt: skip
    """All shares of some queries as one; each stands `step` behind the one before.

    Sums are read at once and values four shares at a time: reads one after the other took longer than the rest.
    """
    share = tl.arange(0, MAX_SHARES)[None, :]
    at, there = (place[:, None] + share * step) * 2, known[:, None] & (share < shares)
    bests = tl.load(sums + at, mask=there, other=float("-inf"), volatile=True)
    best = tl.max(bests, 1)
    weights = tl.exp(bests - tl.where(best == float("-inf"), 0.0, best)[:, None])  # 0 where there is no share
    total = tl.sum(weights * tl.load(sums + at + 1, mask=there, other=0.0, volatile=True), 1)
    inside, mixed = known[:, None] & (dv < DV)[None, :], tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    for first in range(0, shares, 4):
        for more in tl.static_range(4):
            other = first + more
            own = (place + other * step)[:, None] * DV + dv[None, :]
            theirs = tl.load(parts + own, mask=inside & (other < shares), other=0.0, volatile=True)
            mixed += tl.sum(tl.where(share == other, weights, 0.0), 1)[:, None] * theirs
    return best, total, mixed


@triton.jit
def with_sink(best, total, mixed, sink):
    """What is left of the sums when a logit without a value joins them; it does so once, after all keys."""
    higher = tl.maximum(best, sink)
    kept = tl.exp(best - higher)
    return total * kept + tl.exp(sink - higher), mixed * kept[:, None]
