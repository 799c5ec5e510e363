"""How attention ends: shares of a row's keys that several programs have weighed are merged, and a sink joins.

A share is the largest score, the sum of the weights relative to it, and the sum of the values.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def share_of_keys(begin, stop, split, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """The keys of one program among [begin, stop), in whole tiles; and how many programs have some to look at."""
    shares = stop * 0 + 1
    if SPLITS > 1:
        tiles = tl.cdiv(stop - begin, BLOCK_N)
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
    """All shares of some queries as one; each stands `step` behind the one before."""
    inside, best = known[:, None] & (dv < DV)[None, :], tl.full([BLOCK_M], float("-inf"), tl.float32)
    for other in range(shares):
        best = tl.maximum(best, tl.load(sums + (place + other * step) * 2, mask=known, other=0.0, volatile=True))
    total, mixed = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    for other in range(shares):
        own = place + other * step
        share = tl.exp(tl.load(sums + own * 2, mask=known, other=0.0, volatile=True) - best)
        total += share * tl.load(sums + own * 2 + 1, mask=known, other=0.0, volatile=True)
        theirs = tl.load(parts + own[:, None] * DV + dv[None, :], mask=inside, other=0.0, volatile=True)
        mixed += share[:, None] * theirs
    return best, total, mixed


@triton.jit
def with_sink(best, total, mixed, sink):
    """What is left of the sums when a logit without a value joins them; it does so once, after all keys."""
    higher = tl.maximum(best, sink)
    kept = tl.exp(best - higher)
    return total * kept + tl.exp(sink - higher), mixed * kept[:, None]
