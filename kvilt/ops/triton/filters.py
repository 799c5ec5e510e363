"""Draws from what top-k, top-p, min-p and typical-p leave of a row, as kvilt/sampling/transforms.py defines them.

The tokens that are not below a row's floor are collected, mostly a few hundred, and one program finds the thresholds
among them by bisection over the order of floats: nothing is sorted. If they are too many, it looks at the row itself.
Weights are added as whole numbers (2 ** -44 of the largest), so that no sum depends on an order. The CPU adds float64:
a token that brings a sum within about 1e-6 of the threshold may fall on the other side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..draw_table import DrawTable
from .overlap import await_inputs, launch_next, overlap
from .scores import (
    BEYOND,
    CUT,
    FILTERED,
    INFINITY,
    LOWEST,
    MIN_P,
    MODE,
    RECORD,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TYPICAL,
    TYPICAL_P,
    gumbel,
    load_scores,
    noise_bits,
    order_key,
    read_float,
    record_of,
    scores_of,
    weight,
)

BLOCK = 2048  # tokens of a program
TILE = 2048  # candidates that are looked at together
CANDIDATES = 8192  # that are collected of a row
_SCALE = tl.constexpr(float(2**44))


def draw(
    logits: Tensor, copies: Tensor, table: DrawTable, limits: Tensor, counts: Tensor, counters: Tensor, out: Tensor
) -> None:
    """Tokens of the filtered rows into `out`; `limits` are their floors, peaks and total weights, `counts` are zero."""
    rows, vocab = logits.shape
    splits, room = triton.cdiv(vocab, BLOCK), min(CANDIDATES, vocab)
    found = torch.empty((2, rows, room), dtype=torch.int32, device=logits.device)  # scores as bits, ids
    _collect[(splits, rows)](
        logits, copies, table.words, table.words.view(torch.int64),
        limits, found, counts, counters, out, rows, vocab, logits.stride(0), splits, room,
        EDITS=table.copies > 0, TYPICALS=table.typical, BLOCK=BLOCK, TILE=TILE,
        num_warps=8, enable_fp_fusion=False, **overlap(logits),
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "splits", "room"])
def _collect(
    logits, copies, words, words64, limits, found, counts, counters, out, rows, vocab, stride, splits, room,
    EDITS: tl.constexpr, TYPICALS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Collect the tokens that are not below the floor; the last program of a row draws from them."""
    launch_next(PDL)
    await_inputs(PDL)
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    record = record_of(words, row, rows)
    mode = tl.load(record + MODE)
    if (mode & FILTERED) == 0:
        return
    if tl.load(out + rows + row) != 0:
        return
    temperature, floor = read_float(record + TEMPERATURE), tl.load(limits + 3 * row).to(tl.float32)
    source = scores_of(logits, copies, record, row, mode, vocab, stride, EDITS)
    i = split * BLOCK + tl.arange(0, BLOCK)
    scores = tl.div_rn(load_scores(source, i, vocab), temperature)
    above = (scores >= floor).to(tl.int32)
    own = tl.sum(above, 0)
    if own > 0:
        place = tl.atomic_add(counts + row, own) + tl.cumsum(above, 0) - 1
        fits = (above == 1) & (place < room)
        tl.store(found + row * room + place, scores.to(tl.int32, bitcast=True), mask=fits)
        tl.store(found + (rows + row) * room + place, i, mask=fits)
    tl.debug_barrier()
    if tl.atomic_add(counters + row, 1, sem="acq_rel") < splits - 1:
        return
    tl.store(counters + row, 0)
    peak, total = tl.load(limits + 3 * row + 1).to(tl.float32), tl.load(limits + 3 * row + 2)
    count = tl.load(counts + row, volatile=True)
    key = tl.load(words64 + row)
    typical_p = tl.load(words64 + rows + (row * RECORD + TYPICAL_P) // 2).to(tl.float64, bitcast=True)
    if count <= room:
        bits, ids = found + row * room, found + (rows + row) * room
        token = _draw(
            bits, ids, count, 1.0, floor, record, mode, peak, total, key, typical_p, False, TYPICALS, TILE
        )  # fmt: skip
        tl.store(out + row, token.to(tl.int64))
    else:
        token = _draw(
            source, words, vocab, temperature, floor, record, mode, peak, total, key, typical_p, True, TYPICALS, TILE
        )  # fmt: skip
        tl.store(out + row, token.to(tl.int64))


@triton.jit
def _tile(source, ids, i, n, temperature, floor, WIDE: tl.constexpr):
    """Scores and ids: of collected tokens or, WIDE, of a row itself. -inf where there is no candidate."""
    if WIDE:
        scores = tl.div_rn(load_scores(source, i, n), temperature)
        return tl.where(scores >= floor, scores, -INFINITY), i
    else:
        bits = tl.load(source + i, mask=i < n, other=0)
        scores = tl.where(i < n, bits.to(tl.float32, bitcast=True), -INFINITY)
        return scores, tl.load(ids + i, mask=i < n, other=BEYOND)


@triton.jit
def _count(source, ids, n, temperature, floor, key, id_end, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """How many candidates have this key or a larger one; with an `id_end`, exactly this key and an id before it."""
    counts, j = tl.zeros([BLOCK], tl.int32), tl.arange(0, BLOCK)
    for start in range(0, n, BLOCK):
        scores, own = _tile(source, ids, start + j, n, temperature, floor, WIDE)
        keys = order_key(scores)
        counts += tl.where(id_end < 0, keys >= key, (keys == key) & (own < id_end)).to(tl.int32)
    return tl.sum(counts, 0)


@triton.jit
def _mass(source, ids, n, temperature, floor, peak, first, last, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """The weight of the candidates whose keys are from `first` to `last`, as a whole number."""
    sums, j = tl.zeros([BLOCK], tl.int64), tl.arange(0, BLOCK)
    for start in range(0, n, BLOCK):
        scores, _ = _tile(source, ids, start + j, n, temperature, floor, WIDE)
        keys = order_key(scores)
        sums += tl.where((keys >= first) & (keys <= last), _whole_weight(scores, peak), 0)
    return tl.sum(sums, 0)


@triton.jit
def _whole_weight(scores, peak):
    return (weight(scores - peak) * _SCALE).to(tl.int64)


@triton.jit
def _draw(
    source, ids, n, temperature, floor, record, mode, peak, total, noise_key, typical_p,
    WIDE: tl.constexpr, TYPICALS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token of a row: thresholds first, then the best of what they leave."""
    top_k, top = tl.load(record + TOP_K), order_key(peak).to(tl.int64)
    kth = order_key(floor).to(tl.int64)  # tokens with a smaller key are out
    if top_k > 0:
        high = top + 1
        while high - kth > 1:
            middle = kth + (high - kth) // 2
            enough = _count(source, ids, n, temperature, floor, middle.to(tl.int32), -1, WIDE, BLOCK) >= top_k
            kth, high = tl.where(enough, middle, kth), tl.where(enough, high, middle)
    first, first_id = kth.to(tl.int32), 0  # tokens with this key are out before this id
    if (mode & TOP_P) != 0:
        first, first_id = _nucleus(source, ids, n, temperature, floor, record, peak, total, kth, top, WIDE, BLOCK)
    min_p, near = read_float(record + MIN_P), tl.full([], INFINITY, tl.float64)
    entropy, log_total = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    if TYPICALS:
        if (mode & TYPICAL) != 0:
            entropy, log_total, near = _typical(
                source, ids, n, temperature, floor, peak, first, first_id, min_p, typical_p, WIDE, BLOCK
            )
    return _best(
        source, ids, n, temperature, floor, peak, first, first_id, min_p, entropy, log_total, near, noise_key,
        WIDE, TYPICALS, BLOCK,
    )  # fmt: skip


@triton.jit
def _is_out(mass, rest, total, cut):
    """Whether a weight from the lowest on lies in what top-p cuts."""
    return ((rest + mass.to(tl.float64) / _SCALE) / total).to(tl.float32) <= cut


@triton.jit
def _nucleus(
    source, ids, n, temperature, floor, record, peak, total, kth, top, WIDE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The smallest key that top-p keeps, and the first id with it; of equal scores the lower ids are out first."""
    cut, least = read_float(record + CUT), kth.to(tl.int32)
    own = _mass(source, ids, n, temperature, floor, peak, least, top.to(tl.int32), WIDE, BLOCK).to(tl.float64) / _SCALE
    # What top-k leaves is all there is; a floor left a rest.
    total = tl.where(tl.load(record + TOP_K) > 0, own, tl.maximum(total, own))
    rest = total - own
    low, high = kth - 1, top
    while high - low > 1:
        middle = low + (high - low) // 2
        mass = _mass(source, ids, n, temperature, floor, peak, least, middle.to(tl.int32), WIDE, BLOCK)
        out = _is_out(mass, rest, total, cut)
        low, high = tl.where(out, middle, low), tl.where(out, high, middle)
    first = high.to(tl.int32)
    below = _mass(source, ids, n, temperature, floor, peak, least, first - 1, WIDE, BLOCK)
    upto = _mass(source, ids, n, temperature, floor, peak, least, first, WIDE, BLOCK)
    equals = _count(source, ids, n, temperature, floor, first, BEYOND, WIDE, BLOCK)
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
        few = _count(source, ids, n, temperature, floor, first, middle, WIDE, BLOCK) <= gone
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
        scores, own = _tile(source, ids, start + j, n, temperature, floor, WIDE)
        kept = _kept(scores, own, peak, first, first_id, min_p)
        sums += tl.where(kept, (tl.exp((scores - peak).to(tl.float64)) * _SCALE).to(tl.int64), 0)
    total = tl.sum(sums, 0).to(tl.float64) / _SCALE
    log_total, sums = tl.log(total), tl.zeros([BLOCK], tl.int64)
    for start in range(0, n, BLOCK):
        scores, own = _tile(source, ids, start + j, n, temperature, floor, WIDE)
        kept = _kept(scores, own, peak, first, first_id, min_p)
        height = tl.where(kept, scores - peak, 0.0).to(tl.float64)
        sums += tl.where(kept, (tl.exp(height) / total * (log_total - height) * _SCALE).to(tl.int64), 0)
    entropy = tl.sum(sums, 0).to(tl.float64) / _SCALE
    low, high = tl.full([], -1, tl.int64), tl.full([], INFINITY, tl.float64).to(tl.int64, bitcast=True)
    while high - low > 1:
        middle = low + (high - low) // 2
        sums = tl.zeros([BLOCK], tl.int64)
        for start in range(0, n, BLOCK):
            scores, own = _tile(source, ids, start + j, n, temperature, floor, WIDE)
            kept = _kept(scores, own, peak, first, first_id, min_p)
            height = tl.where(kept, scores - peak, 0.0).to(tl.float64)
            kept = kept & (_distance(height, log_total, entropy).to(tl.int64, bitcast=True) <= middle)
            sums += tl.where(kept, (tl.exp(height) / total * _SCALE).to(tl.int64), 0)
        enough = tl.sum(sums, 0).to(tl.float64) / _SCALE >= typical_p
        low, high = tl.where(enough, low, middle), tl.where(enough, middle, high)
    return entropy, log_total, high.to(tl.float64, bitcast=True)


@triton.jit
def _distance(height, log_total, entropy):
    return tl.abs(log_total - height - entropy)


@triton.jit
def _best(
    source, ids, n, temperature, floor, peak, first, first_id, min_p, entropy, log_total, near, noise_key,
    WIDE: tl.constexpr, TYPICALS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token with the largest score plus noise; among equals the lower id."""
    best, token, j = tl.full([], -INFINITY, tl.float64), tl.full([], BEYOND, tl.int32), tl.arange(0, BLOCK)
    for start in range(0, n, BLOCK):
        scores, own = _tile(source, ids, start + j, n, temperature, floor, WIDE)
        kept = _kept(scores, own, peak, first, first_id, min_p)
        if TYPICALS:
            height = tl.where(kept, scores - peak, 0.0).to(tl.float64)
            kept = kept & (_distance(height, log_total, entropy) <= near)
        values = tl.where(kept, scores.to(tl.float64) + gumbel(noise_bits(noise_key, own.to(tl.int64))), -INFINITY)
        value = tl.max(values, 0)
        place = tl.min(tl.where(kept & (values == value), own, BEYOND), 0)
        better = (value > best) | ((value == best) & (place < token))
        best, token = tl.where(better, value, best), tl.where(better, place, token)
    return token
