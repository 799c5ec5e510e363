"""Draws from what top-k, top-p, min-p and typical-p leave of a row, as kvilt/sampling/transforms.py defines them.

The tokens that are not below a row's floor are collected, mostly a few hundred; if they are too many, one program looks
at the row itself. Nothing is sorted, and no threshold is searched for: the best of all tokens is drawn, and then looked
at. If the filters keep it, it is the best of those that they keep. If not, they keep no token that is below it either,
and the best of the tokens above it is drawn. Each look leaves half of the weight on average.

The CPU adds weights as float64, and from the lowest on: a token that brings a sum within about 1e-6 of the threshold of
top-p may fall on the other side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..draw_table import DrawTable
from .candidates import SCALE, count_from, mass_of, tile_of, whole_weight
from .overlap import await_inputs, launch_next, overlap
from .scores import (
    BEYOND,
    CUT,
    FILTERED,
    INFINITY,
    LOWEST,
    MIN_P,
    MODE,
    PARTS,
    RECORD,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TYPICAL,
    TYPICAL_P,
    best_draw,
    load_scores,
    order_key,
    read_float,
    record_of,
    scores_of,
)
from .typical import draw_typical

BLOCK = 2048  # tokens of a program
TILE = 2048  # candidates that are looked at together
CANDIDATES = 8192  # that are collected of a row
WIDE_TILE = 4096  # tokens of a row that are looked at together


def draw(logits: Tensor, copies: Tensor, table: DrawTable, scanned: tuple[Tensor, ...], out: Tensor) -> None:
    """Tokens of the filtered rows into `out`.

    `scanned` are what the scan leaves: floors, peaks and total weights; peaks of shares; counts, which are zero.
    """
    limits, parts, counts = scanned
    rows, vocab = logits.shape
    splits, room = triton.cdiv(vocab, BLOCK), min(CANDIDATES, vocab)
    found = torch.empty((2, rows, room), dtype=torch.int32, device=logits.device)  # scores as bits, ids
    _collect[(splits, rows)](
        logits, copies, table.words, limits, parts, found, counts, out, rows, vocab, logits.stride(0), splits, room,
        EDITS=table.copies > 0, BLOCK=BLOCK, num_warps=4, **overlap(logits),
    )  # fmt: skip
    _draw_collected[(rows,)](
        logits, copies, table.words, table.words.view(torch.int64), limits, found, counts, out, rows, vocab,
        logits.stride(0), room,
        EDITS=table.copies > 0, TYPICALS=table.typical, TILE=TILE, WIDE_TILE=WIDE_TILE,
        num_warps=8, enable_fp_fusion=False, **overlap(logits),
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "splits", "room"])
def _collect(
    logits, copies, words, limits, parts, found, counts, out, rows, vocab, stride, splits, room,
    EDITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Collect the tokens of filtered rows that are not below the floor."""
    launch_next(PDL)
    await_inputs(PDL)
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    record = record_of(words, row, rows)
    mode = tl.load(record + MODE)
    if ((mode & FILTERED) == 0) | (tl.load(out + rows + row) != 0):
        return
    temperature, floor = read_float(record + TEMPERATURE), tl.load(limits + 3 * row)
    # The floor before temperature, or a little less: most shares of a row have no token above it.
    low = floor * temperature.to(tl.float64)
    low = tl.maximum(low - tl.abs(low) * 1e-6, LOWEST)
    if tl.load(parts + row * PARTS * splits + split) < low:
        return
    i = split * BLOCK + tl.arange(0, BLOCK)
    x = load_scores(scores_of(logits, copies, record, row, mode, vocab, stride, EDITS), i, vocab)
    above = (x >= low.to(tl.float32)).to(tl.int32)
    place = tl.atomic_add(counts + row, tl.sum(above, 0)) + tl.cumsum(above, 0) - 1
    fits = (above == 1) & (place < room)
    tl.store(found + row * room + place, tl.div_rn(x, temperature).to(tl.int32, bitcast=True), mask=fits)
    tl.store(found + (rows + row) * room + place, i, mask=fits)


@triton.jit(do_not_specialize=["rows", "room"])
def _draw_collected(
    logits, copies, words, words64, limits, found, counts, out, rows, vocab, stride, room,
    EDITS: tl.constexpr, TYPICALS: tl.constexpr, TILE: tl.constexpr, WIDE_TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The tokens of filtered rows."""
    launch_next(PDL)
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    record = record_of(words, row, rows)
    mode = tl.load(record + MODE)
    if ((mode & FILTERED) == 0) | (tl.load(out + rows + row) != 0):
        return
    temperature, floor = read_float(record + TEMPERATURE), tl.load(limits + 3 * row).to(tl.float32)
    source = scores_of(logits, copies, record, row, mode, vocab, stride, EDITS)
    peak, total = tl.load(limits + 3 * row + 1).to(tl.float32), tl.load(limits + 3 * row + 2)
    key, count = tl.load(words64 + row), tl.load(counts + row)
    typical_p = tl.load(words64 + rows + (row * RECORD + TYPICAL_P) // 2).to(tl.float64, bitcast=True)
    if count <= room:
        bits, ids = found + row * room, found + (rows + row) * room
        token = _draw(
            bits, ids, count, 1.0, floor, record, mode, peak, total, key, typical_p, False, TYPICALS, TILE
        )  # fmt: skip
        tl.store(out + row, token.to(tl.int64))
    else:
        token = _draw(
            source, words, vocab, temperature, floor, record, mode, peak, total, key, typical_p,
            True, TYPICALS, WIDE_TILE,
        )  # fmt: skip
        tl.store(out + row, token.to(tl.int64))


@triton.jit
def _draw(
    source, ids, n, temperature, floor, record, mode, peak, total, noise_key, typical_p,
    WIDE: tl.constexpr, TYPICALS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    token = tl.full([], BEYOND, tl.int32)
    if TYPICALS:
        if (mode & TYPICAL) != 0:
            token = draw_typical(
                source, ids, n, temperature, floor, record, mode, peak, total, noise_key, typical_p, WIDE, 2048
            )
        else:
            token = _draw_above(source, ids, n, temperature, floor, record, mode, peak, total, noise_key, WIDE, TILE)
    else:
        token = _draw_above(source, ids, n, temperature, floor, record, mode, peak, total, noise_key, WIDE, TILE)
    return token


@triton.jit
def _draw_above(
    source, ids, n, temperature, floor, record, mode, peak, total, noise_key, WIDE: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Draw from the tokens above a threshold, and raise it to the token until the filters keep what is drawn."""
    top_k, min_p, cut = tl.load(record + TOP_K), read_float(record + MIN_P), read_float(record + CUT)
    if (top_k > 0) & ((mode & TOP_P) != 0):
        total = _weight_of_top_k(source, ids, n, temperature, floor, top_k, peak, WIDE, TILE)
    low, low_id = order_key(floor) - 1, tl.full([], BEYOND, tl.int32)
    token, again = tl.full([], BEYOND, tl.int32), tl.full([], 1, tl.int32)
    while again == 1:
        token, score = _best_above(source, ids, n, temperature, floor, low, low_id, noise_key, WIDE, TILE)
        low, low_id = order_key(score), token
        larger, after, mass = _above(source, ids, n, temperature, floor, peak, low, low_id, WIDE, TILE)
        share = ((total - mass.to(tl.float64) / SCALE) / total).to(tl.float32)  # of the token and all below it
        out = (top_k > 0) & (larger >= top_k)
        out = out | (((mode & TOP_P) != 0) & (share <= cut) & (after > 0))
        out = out | (tl.exp((score - peak).to(tl.float64)).to(tl.float32) < min_p)
        again = out.to(tl.int32)
    return token


@triton.jit
def _best_above(
    source, ids, n, temperature, floor, low, low_id, noise_key, WIDE: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The token with the largest score plus noise among those after (low, low_id) in the order of scores and ids."""
    best, j = tl.full([], -INFINITY, tl.float64), tl.arange(0, TILE)
    token, score = tl.full([], BEYOND, tl.int32), tl.full([], -INFINITY, tl.float32)
    unit = tl.full([], 1.0, tl.float32)  # scores are divided by their temperature already
    for start in range(0, n, TILE):
        scores, own = tile_of(source, ids, start + j, n, temperature, floor, WIDE)
        keys = order_key(scores)
        after = (keys > low) | ((keys == low) & (own > low_id))
        value, place, its = best_draw(tl.where(after, scores, -INFINITY), own, noise_key, unit)
        better = (value > best) | ((value == best) & (place < token))
        best, token, score = tl.where(better, value, best), tl.where(better, place, token), tl.where(better, its, score)
    return token, score


@triton.jit
def _above(source, ids, n, temperature, floor, peak, key, token, WIDE: tl.constexpr, TILE: tl.constexpr):
    """How many scores are larger, how many tokens come after this one, and the weight of these as a whole number."""
    larger, after = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
    mass, j = tl.zeros([TILE], tl.int64), tl.arange(0, TILE)
    for start in range(0, n, TILE):
        scores, own = tile_of(source, ids, start + j, n, temperature, floor, WIDE)
        keys = order_key(scores)
        later = (keys > key) | ((keys == key) & (own > token) & (own < BEYOND))
        larger += (keys > key).to(tl.int32)
        after += later.to(tl.int32)
        mass += tl.where(later, whole_weight(scores, peak), 0)
    return tl.sum(larger, 0), tl.sum(after, 0), tl.sum(mass, 0)


@triton.jit
def _weight_of_top_k(
    source, ids, n, temperature, floor, top_k, peak, WIDE: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The weight of what top-k leaves, which is all there is for top-p: the k-th largest score by bisection."""
    top = order_key(peak)
    kth, high = order_key(floor).to(tl.int64), top.to(tl.int64) + 1
    while high - kth > 1:
        middle = kth + (high - kth) // 2
        enough = count_from(source, ids, n, temperature, floor, middle.to(tl.int32), -1, WIDE, TILE) >= top_k
        kth, high = tl.where(enough, middle, kth), tl.where(enough, high, middle)
    mass = mass_of(source, ids, n, temperature, floor, peak, kth.to(tl.int32), top, WIDE, TILE)
    return mass.to(tl.float64) / SCALE
