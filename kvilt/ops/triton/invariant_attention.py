"""Attention over pages whose bits depend on a query, its position and its row's KV alone.

Keys are walked in tiles and segments of a fixed size that begin at position 0. Each segment has a softmax of its own,
and segments are merged in ascending order: in registers by a program that walks all of them, or by the last of several
programs that share them out. Both merge the same numbers in the same order, so how a step is shared out among programs
changes no bit. Nor does it matter which queries share a tile: a key that a query does not see adds nothing to it.

Latent attention, whose keys go on in their values, has its only kernel here: programs share out the heads, since all of
them read the same keys.

Products are never fused with sums behind the source's back (`enable_fp_fusion`), since a compiler might do that in one
variant of the kernel and not in another.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import AttentionMask, Paging
from ..reference import ReferencePages
from .attention import _constants, _row_of
from .key_tiles import LOG2E, first_seen
from .overlap import await_inputs, launch_next, overlap

LATENT_HEADS = 16  # of a program, where all heads share their keys: a tile of a tensor core
SEGMENT = 256  # keys that have a softmax of their own; a multiple of every tile
PROGRAMS = 264  # that fill a card
SHARED_BYTES = 160 << 10


def attention(
    query: Tensor, pages: ReferencePages, layer: int, paging: Paging, mask: AttentionMask, counters: Tensor
) -> Tensor:
    """`query` [tokens, heads, dim] to [tokens, heads, value_dim]. `counters` are zero before and after."""
    tokens, heads, _ = query.shape
    shape, lengths = pages.shape, paging.lengths
    group = min(heads, LATENT_HEADS) if shape.latent else heads // shape.kv_heads
    units = triton.cdiv(heads, group)  # groups of heads that share a program
    tile = _tile(query, pages, lengths.max_query * group, lengths.rows * units)
    queries = tile["BLOCK_M"] // group
    single = lengths.max_query <= queries  # a row is one tile
    tiles = lengths.rows if single else tokens // queries + lengths.rows
    segments = triton.cdiv(paging.tables.shape[1] * shape.page_tokens, SEGMENT)
    splits = min(segments, max(1, PROGRAMS // (tiles * units))) if single else 1
    out = torch.empty((tokens, heads, shape.value_dim), dtype=query.dtype, device=query.device)
    wide = (segments, tokens, heads)
    parts = out if splits == 1 else torch.empty((*wide, shape.value_dim), dtype=torch.float32, device=query.device)
    sums = out if splits == 1 else torch.empty((*wide, 2), dtype=torch.float32, device=query.device)
    _attention[(tiles, units, splits)](
        query, _numbers(pages.keys, layer), _numbers(pages.values, layer), pages.key_scales[layer],
        pages.value_scales[layer], out if mask.sinks is None else mask.sinks, paging.tables, paging.positions,
        lengths.cu_seqlens, out, parts, sums, counters,
        lengths.rows, tokens, mask.scale * LOG2E.value, mask.scale, mask.window, mask.soft_cap,
        query.stride(0), query.stride(1), paging.tables.stride(0),
        **_constants(pages, heads) | {"GROUP": group}, HEADS=heads, LATENT=shape.latent,
        SCALED=bool(shape.scales), WINDOW=mask.window > 0, CHUNKED=mask.chunked, CAPPED=mask.soft_cap > 0,
        SINKS=mask.sinks is not None, SHARED=splits > 1, SINGLE=single, SEGMENT=SEGMENT,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        FLOATS=pages.keys.dtype.is_floating_point, PACKED=shape.dtype.packed_values, **tile, **overlap(query),
    )  # fmt: skip
    return out


def _numbers(pages: Tensor, layer: int) -> Tensor:
    """The keys or values of a layer; numbers of one byte as bytes."""
    narrow = pages.element_size() == 1 and pages.dtype != torch.uint8  # those are two values of 4 bits
    return pages[layer].view(torch.int8) if narrow else pages[layer]


def _tile(query: Tensor, pages: ReferencePages, rows: int, programs: int) -> dict[str, Any]:
    """A tile for so many queries and heads of a row, and so many rows and key heads: its size, keys, warps and stages.

    Keys at a time decide bits, so they depend on the model alone. A tile is one of a tensor core's own or several, each
    with warps of its own: all are computed alike, and no sum leaves a warp. float32 has no such unit, and one tile.
    """
    shape, group = pages.shape, query.shape[1] // pages.shape.kv_heads
    dim, keys = max(shape.key_dim, shape.value_dim), 64
    if shape.latent:
        return _latent_tile(query, dim)
    while keys > 16 and 4 * keys * dim * query.element_size() > SHARED_BYTES:
        keys //= 2
    block, warps, stages = 64, 4, 2
    if query.dtype != torch.float32 and query.is_cuda:
        if rows > 64 and dim <= 128:
            block, warps = 128, 8
        elif rows <= 16 and not shape.scales:
            block, warps, stages = 16, 1, 3 if programs >= PROGRAMS else 2
    block = max(block, triton.next_power_of_2(group))
    return {"BLOCK_M": block, "BLOCK_N": keys, "num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}


def _latent_tile(query: Tensor, dim: int) -> dict[str, Any]:
    """One tile for all steps, so that sums may leave a warp: wide values fill the registers of several."""
    keys = 32 if 4 * 32 * dim * query.element_size() <= SHARED_BYTES else 16
    return {"BLOCK_M": LATENT_HEADS, "BLOCK_N": keys, "num_warps": 4, "num_stages": 2, "enable_fp_fusion": False}


@triton.jit
def _loaded(at, scales_at, inside, there, kind: tl.constexpr, SCALED: tl.constexpr, FLOATS: tl.constexpr):
    """Numbers of pages as the matrix unit multiplies them; each number of 8 bits with its own scale, then rounded."""
    numbers = tl.load(at, mask=inside, other=0)
    if SCALED:
        if FLOATS:
            numbers = numbers.to(tl.float8e4nv, bitcast=True)
        return (numbers.to(tl.float32) * tl.load(scales_at, mask=there, other=0.0)).to(kind)
    else:
        return numbers.to(kind)


@triton.jit
def _over_keys(
    q, q_value, keys, values, key_scales, value_scales, table, known, at, head, start, stop, unit, scale, window,
    soft_cap, best, total, mixed,
    KV_HEADS: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, SCALED: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, CAPPED: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, FLOATS: tl.constexpr, LATENT: tl.constexpr, MASKED: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """One tile of keys and values into a segment's softmax. `best` is a power of two, as `unit` makes it."""
    d, dv, key = tl.arange(0, D_PAD), tl.arange(0, DV_PAD), start + tl.arange(0, BLOCK_N)
    there = key < stop if MASKED else key >= 0
    page = tl.load(table + key // PAGE, mask=there, other=0)
    slot = (tl.maximum(page, 0) * PAGE + key % PAGE) * KV_HEADS + (0 if LATENT else head)
    inside = (d < D)[:, None] & there[None, :]
    k_at, scales_at = keys + slot[None, :] * D + d[:, None], (key_scales + slot)[None, :]
    k = _loaded(k_at, scales_at, inside, there[None, :], q.dtype, SCALED, FLOATS)
    scores = tl.dot(q, k, input_precision=PRECISION)
    if LATENT:  # a key that no query sees may be noise here: its scores are masked, and its value is loaded again
        more = (dv < DV)[:, None] & there[None, :]
        rest_at, scales_at = values + slot[None, :] * DV + dv[:, None], (value_scales + slot)[None, :]
        rest = _loaded(rest_at, scales_at, more, there[None, :], q.dtype, SCALED, FLOATS)
        scores = tl.dot(q_value, rest, scores, input_precision=PRECISION)
    if CAPPED:
        scores = soft_cap * (2 * tl.sigmoid(2 * (scores * scale) / soft_cap) - 1)
    useful = there
    if MASKED:
        seen = known[:, None] & there[None, :] & (key[None, :] <= at[:, None])
        if WINDOW:
            seen = seen & (key[None, :] >= first_seen(at, window, CHUNKED)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        # What no query sees may never have been written: 0 * NaN would be NaN.
        useful = there & (tl.max(seen.to(tl.int32), 0) > 0)
    higher = tl.maximum(best, tl.max(scores, 1) * unit)
    calm = tl.where(higher == float("-inf"), 0.0, higher)  # rows that have seen no key yet
    weights = tl.exp2(tl.fma(scores, tl.zeros_like(scores) + unit, tl.zeros_like(scores) - calm[:, None]))
    fading = tl.exp2(best - calm)
    total = tl.fma(total, fading, tl.sum(weights, 1))
    inside = useful[:, None] & (dv < DV)[None, :]
    scales_at = (value_scales + slot)[:, None]
    if PACKED:
        pairs = tl.load(values + slot[:, None] * (DV // 2) + (dv // 2)[None, :], mask=inside, other=0).to(tl.int32)
        codes = (pairs >> (dv % 2 * 4)[None, :]) & 15
        v = ((codes - 8).to(tl.float32) * tl.load(scales_at, mask=useful[:, None], other=0.0)).to(q.dtype)
    else:
        v_at = values + slot[:, None] * DV + dv[None, :]
        v = _loaded(v_at, scales_at, inside, useful[:, None], q.dtype, SCALED, FLOATS)
    mixed = tl.dot(weights.to(q.dtype), v, mixed * fading[:, None], input_precision=PRECISION)
    return higher, total, mixed


@triton.jit
def _merged(best, total, mixed, more_best, more_total, more_mixed):
    """A softmax, and what the next segment adds to it."""
    higher = tl.maximum(best, more_best)
    calm = tl.where(higher == float("-inf"), 0.0, higher)
    old, new = tl.exp2(best - calm), tl.exp2(more_best - calm)
    total = tl.fma(total, old, more_total * new)
    return higher, total, tl.fma(mixed, tl.zeros_like(mixed) + old[:, None], more_mixed * new[:, None])


@triton.jit(do_not_specialize=["rows", "tokens", "stride_table"])
def _attention(
    query, keys, values, key_scales, value_scales, sinks, tables, positions, cu_seqlens, out, parts, sums, counters,
    rows, tokens, unit, scale, window, soft_cap, stride_token, stride_head, stride_table,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    D_PAD: tl.constexpr, DV_PAD: tl.constexpr, SCALED: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, SHARED: tl.constexpr, SINGLE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SEGMENT: tl.constexpr, PRECISION: tl.constexpr, FLOATS: tl.constexpr, HEADS: tl.constexpr,
    LATENT: tl.constexpr, PACKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    await_inputs(PDL)
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    # Tiles at the end of a long row have the most keys, and begin first.
    tile, head, split = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tile if SINGLE else _row_of(cu_seqlens, tile, rows, BLOCK_Q)
    row_start, row_stop = tl.load(cu_seqlens + row), tl.load(cu_seqlens + row + 1)
    first = row_start if SINGLE else row_start + (tile - row_start // BLOCK_Q - row) * BLOCK_Q
    if first >= row_stop:
        return
    last = tl.minimum(first + BLOCK_Q, row_stop) - 1

    m, d, dv = tl.arange(0, BLOCK_M), tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
    token, head_of = first + m // GROUP, head * GROUP + m % GROUP
    known = (m < BLOCK_Q * GROUP) & (token < row_stop) & (head_of < HEADS)
    at = tl.load(positions + token, mask=known, other=0).to(tl.int32)
    q_at = query + token[:, None] * stride_token + head_of[:, None] * stride_head + d[None, :]
    q = tl.load(q_at, mask=known[:, None] & (d < D)[None, :], other=0.0)
    q_value = q
    if LATENT:
        rest_at = query + token[:, None] * stride_token + head_of[:, None] * stride_head + D + dv[None, :]
        q_value = tl.load(rest_at, mask=known[:, None] & (dv < DV)[None, :], other=0.0)
    if CAPPED:
        unit = unit * 0 + LOG2E

    # The segments that some query of the tile sees, shared out among splits.
    stop, oldest = tl.load(positions + last).to(tl.int32) + 1, tl.load(positions + first).to(tl.int32)
    begin, shares = stop * 0, stop * 0 + 1
    if WINDOW:
        begin = first_seen(oldest, window, CHUNKED) // BLOCK_N * BLOCK_N
    leftmost, end = begin // SEGMENT, tl.cdiv(stop, SEGMENT)
    if SHARED:
        each = tl.cdiv(end - leftmost, tl.num_programs(2))
        shares = tl.cdiv(end - leftmost, each)  # of programs that have a segment
        if split >= shares:
            return
        begin = tl.maximum(begin, (leftmost + split * each) * SEGMENT)
        stop = tl.minimum(stop, (leftmost + (split + 1) * each) * SEGMENT)
    # Keys that every query sees need no masks.
    plain = begin
    if not WINDOW:
        plain = tl.minimum(tl.maximum(oldest + 1, begin), stop) // BLOCK_N * BLOCK_N

    place, step = token.to(tl.int64) * HEADS + head_of, tokens.to(tl.int64) * HEADS
    inside, table = known[:, None] & (dv < DV)[None, :], tables + row * stride_table
    whole_best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    whole_total, whole_mixed = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    best, total, mixed = whole_best, whole_total, whole_mixed
    for start in range(begin, plain, BLOCK_N):
        best, total, mixed = _over_keys(
            q, q_value, keys, values, key_scales, value_scales, table, known, at, head, start, stop, unit, scale,
            window, soft_cap, best, total, mixed,
            KV_HEADS, PAGE, D, DV, D_PAD, DV_PAD, SCALED, WINDOW, CHUNKED, CAPPED, BLOCK_N, PRECISION, FLOATS, LATENT,
            False, PACKED,
        )  # fmt: skip
        if ((start + BLOCK_N) % SEGMENT == 0) | (start + BLOCK_N >= stop):
            if not SHARED:
                whole_best, whole_total, whole_mixed = _merged(whole_best, whole_total, whole_mixed, best, total, mixed)
            else:
                _put(sums, parts, place + start // SEGMENT * step, dv, DV, known, inside, best, total, mixed)
            best = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total, mixed = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    for start in range(plain, stop, BLOCK_N):
        best, total, mixed = _over_keys(
            q, q_value, keys, values, key_scales, value_scales, table, known, at, head, start, stop, unit, scale,
            window, soft_cap, best, total, mixed,
            KV_HEADS, PAGE, D, DV, D_PAD, DV_PAD, SCALED, WINDOW, CHUNKED, CAPPED, BLOCK_N, PRECISION, FLOATS, LATENT,
            True, PACKED,
        )  # fmt: skip
        if ((start + BLOCK_N) % SEGMENT == 0) | (start + BLOCK_N >= stop):
            if not SHARED:
                whole_best, whole_total, whole_mixed = _merged(whole_best, whole_total, whole_mixed, best, total, mixed)
            else:
                _put(sums, parts, place + start // SEGMENT * step, dv, DV, known, inside, best, total, mixed)
            best = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total, mixed = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, DV_PAD], tl.float32)

    if SHARED:
        if shares > 1:
            # The program that comes last merges the segments of all, and leaves the counter as it was.
            tl.debug_barrier()
            counter = counters + tile * tl.num_programs(1) + head
            if tl.atomic_add(counter, 1, sem="acq_rel") < shares - 1:
                return
            tl.store(counter, 0)
        tl.debug_barrier()
        for segment in range(leftmost, end):
            own = place + segment * step
            more_best = tl.load(sums + own * 2, mask=known, other=0.0, volatile=True)
            more_total = tl.load(sums + own * 2 + 1, mask=known, other=0.0, volatile=True)
            theirs = tl.load(parts + own[:, None] * DV + dv[None, :], mask=inside, other=0.0, volatile=True)
            whole_best, whole_total, whole_mixed = _merged(
                whole_best, whole_total, whole_mixed, more_best, more_total, theirs
            )
    if SINKS:  # as a last segment of one key, without a value
        sink = tl.load(sinks + head_of, mask=known, other=0.0) * LOG2E
        whole_best, whole_total, whole_mixed = _merged(
            whole_best, whole_total, whole_mixed, sink, tl.full([BLOCK_M], 1.0, tl.float32), mixed * 0
        )
    result = whole_mixed / tl.where(whole_total == 0, 1.0, whole_total)[:, None]
    tl.store(out + place[:, None] * DV + dv[None, :], result, mask=inside)


@triton.jit
def _put(sums, parts, own, dv, DV: tl.constexpr, known, inside, best, total, mixed):
    """Leave a segment for the program that merges them."""
    tl.store(sums + own * 2, best, mask=known)
    tl.store(sums + own * 2 + 1, total, mask=known)
    tl.store(parts + own[:, None] * DV + dv[None, :], mixed, mask=inside)
