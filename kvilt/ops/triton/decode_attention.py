"""Attention of one or two rows of one token that bring their key and value along, over up to a few thousand keys.

The time of such a launch is one read after the other, so all that earlier steps wrote is read before the kernel in
front has ended: positions, tables, and the first tile of keys and values, into registers. The new key does not go
through memory: the last share of a row begins its softmax with it. Programs are small, two warps and little shared
memory, so that the products before and after keep their places on the card.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import AttentionMask, NewKV, Paging
from ..reference import ReferencePages
from .key_tiles import LOG2E, first_seen
from .overlap import await_inputs, fetch_ahead, launch_next, overlap
from .softmax_shares import MAX_SHARES, share_of_keys, with_sink
from .vectors import turned

LINE = tl.constexpr(64)  # numbers of two bytes in a line of the cache
TILE_BYTES = 16 << 10  # of keys, and as many of values, that a program holds in registers
MERGED = 1 << 14  # numbers of all shares, which are read at once
MOST_ROWS = 2
MOST_PROGRAMS = 16  # pairs of a row and a key head; more of them fill the card in other ways
MOST_KEYS = 4096  # of a row; with more, loads must be pipelined
AHEAD = 2  # tiles that are fetched into the cache before they are loaded


def takes(rows: int, kv_heads: int, most_keys: int, group: int, value_dim: int) -> bool:
    """Whether `decode_attention` is the fastest for so many rows of up to `most_keys` keys, with these heads."""
    shares = int(MAX_SHARES.value) * triton.next_power_of_2(group) * triton.next_power_of_2(value_dim)
    few = rows <= MOST_ROWS and rows * kv_heads <= MOST_PROGRAMS and most_keys <= MOST_KEYS
    return few and shares <= MERGED


def decode_attention(
    query: Tensor,
    pages: ReferencePages,
    layer: int,
    paging: Paging,
    mask: AttentionMask,
    new: NewKV,
    counters: Tensor,
) -> Tensor:
    """`query` [rows, heads, dim], not turned yet, to [rows, heads, value_dim]; writes the `new` keys and values.

    `counters` are zero before and after.
    """
    (rows, heads, _), shape = query.shape, pages.shape
    group = heads // shape.kv_heads
    d_pad, dv_pad = (max(16, triton.next_power_of_2(size)) for size in (shape.key_dim, shape.value_dim))
    block = max(16, min(64, TILE_BYTES // (max(d_pad, dv_pad) * pages.keys.element_size())))
    splits = int(MAX_SHARES.value)  # always: a program without keys returns, and one kernel serves all widths of tables
    out = torch.empty((rows, heads, shape.value_dim), dtype=query.dtype, device=query.device)
    parts = torch.empty((splits, rows, heads, shape.value_dim), dtype=torch.float32, device=query.device)
    sums = torch.empty((splits, rows, heads, 2), dtype=torch.float32, device=query.device)
    keys, values, rotation = new.keys, new.values, new.rotation
    (query_gain, query_eps), (key_gain, key_eps) = ((keys, 0.0), (keys, 0.0)) if new.norms is None else new.norms
    _decode_attention[(rows, shape.kv_heads, splits)](
        query, pages.keys[layer], pages.values[layer], out if mask.sinks is None else mask.sinks, paging.tables,
        paging.positions, paging.slots, out, parts, sums, counters, keys, values, rotation.cos, rotation.sin,
        query_gain, key_gain, query_eps, key_eps, rows, mask.scale, mask.window, mask.soft_cap,
        paging.tables.stride(0), query.stride(0), query.stride(1), keys.stride(0), keys.stride(1),
        values.stride(0), values.stride(1),
        KV_HEADS=shape.kv_heads, GROUP=group, PAGE=shape.page_tokens, D=shape.key_dim, DV=shape.value_dim,
        D_PAD=d_pad, DV_PAD=dv_pad, PAIRS=rotation.cos.shape[1], HALF=rotation.pairing == "half",
        NORM=new.norms is not None, WINDOW=mask.window > 0, CHUNKED=mask.chunked, CAPPED=mask.soft_cap > 0,
        SINKS=mask.sinks is not None, SPLITS=splits, AHEAD=AHEAD,
        BLOCK_M=max(16, triton.next_power_of_2(group)), GROUP_PAD=triton.next_power_of_2(group),
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        BLOCK_N=block, num_warps=2, num_stages=1, **overlap(query),
    )  # fmt: skip
    return out


@triton.jit
def _places(table, head, start, stop, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where the keys of a tile stand, and which of them are seen."""
    key = start + tl.arange(0, BLOCK_N)
    there = key < stop
    page = tl.load(table + key // PAGE, mask=there, other=0)
    return (tl.maximum(page, 0) * PAGE + key % PAGE) * KV_HEADS + head, there


@triton.jit
def _load_tile(
    keys, values, table, head, start, stop, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Keys [BLOCK_N, D_PAD] and values of a tile; zeros behind its end."""
    slot, there = _places(table, head, start, stop, KV_HEADS, PAGE, BLOCK_N)
    d, dv = tl.arange(0, D_PAD)[None, :], tl.arange(0, DV_PAD)[None, :]
    k = tl.load(keys + slot[:, None] * D + d, mask=there[:, None] & (d < D), other=0.0)
    v = tl.load(values + slot[:, None] * DV + dv, mask=there[:, None] & (dv < DV), other=0.0)
    return k, v


@triton.jit
def _new_key(
    q, new_keys, new_values, cos, sin, gain, eps, keys, values, place, ends,
    D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    PAIRS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """A row's new key, normalized and turned, and value into their place if the row `ends` here.

    Returns the scores of the queries [BLOCK_M], and the value [1, DV_PAD].
    """
    one, d, dv = tl.zeros([1, 1], tl.int32), tl.arange(0, D_PAD)[None, :], tl.arange(0, DV_PAD)[None, :]
    k = turned(new_keys + one, cos + one, sin + one, (one == 0) & ends, gain, eps, D, D_PAD, PAIRS, HALF, NORM)
    k = k.to(keys.dtype.element_ty)
    v = tl.load(new_values + dv, mask=(dv < DV) & ends, other=0.0).to(values.dtype.element_ty)
    tl.store(keys + place * D + d, k, mask=(d < D) & ends)
    tl.store(values + place * DV + dv, v, mask=(dv < DV) & ends)
    return tl.sum(q.to(tl.float32) * k.to(q.dtype).to(tl.float32), 1), v.to(q.dtype).to(tl.float32)


@triton.jit
def _scaled(scores, scale, soft_cap, CAPPED: tl.constexpr):
    """Scores as exponents of two."""
    if CAPPED:
        return soft_cap * (2 * tl.sigmoid(2 * scores * scale / soft_cap) - 1) * LOG2E
    return scores * (scale * LOG2E)


@triton.jit
def _store(best, total, mixed, sinks, out, head, g, dv, first, GROUP: tl.constexpr, DV: tl.constexpr,
           SINKS: tl.constexpr):  # fmt: skip
    """What heads `g` of a group have read, with the sink that joins them."""
    if SINKS:
        sink = tl.load(sinks + head * GROUP + g, mask=g < GROUP, other=0.0)
        total, mixed = with_sink(best / LOG2E, total, mixed, sink)
    made = mixed / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(out + (first + g)[:, None] * DV + dv[None, :], made, mask=(g < GROUP)[:, None] & (dv < DV)[None, :])


@triton.jit
def _merge(
    sums, parts, first, step, shares, g, dv, GROUP: tl.constexpr, DV: tl.constexpr
):  # fmt: skip
    """All shares of a group's heads as one, in one read."""
    share, known = tl.arange(0, MAX_SHARES)[:, None], (g < GROUP)[None, :]
    at = (share * step + first + g[None, :]) * 2
    bests = tl.load(sums + at, mask=known & (share < shares), other=float("-inf"), volatile=True)
    totals = tl.load(sums + at + 1, mask=known & (share < shares), other=0.0, volatile=True)
    best = tl.max(bests, 0)
    calm = tl.where(best == float("-inf"), 0.0, best)
    weights = tl.exp2(bests - calm[None, :])
    total = tl.sum(weights * totals, 0)
    inside = (known & (share < shares))[:, :, None] & (dv < DV)[None, None, :]
    place = (share * step + first + g[None, :])[:, :, None] * DV + dv[None, None, :]
    theirs = tl.load(parts + place, mask=inside, other=0.0, volatile=True)
    return best, total, tl.sum(weights[:, :, None] * theirs, 0)


@triton.jit(do_not_specialize=["rows", "stride_table"])
def _decode_attention(
    query, keys, values, sinks, tables, positions, slots, out, parts, sums, counters, new_keys, new_values, cos, sin,
    query_gain, key_gain, query_eps, key_eps, rows, scale, window, soft_cap,
    stride_table, query_row, query_head, key_row, key_head, value_row, value_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    D_PAD: tl.constexpr, DV_PAD: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, SPLITS: tl.constexpr,
    AHEAD: tl.constexpr, BLOCK_M: tl.constexpr, GROUP_PAD: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = tl.load(positions + row)
    begin = at * 0
    if WINDOW:
        begin = first_seen(at, window, CHUNKED)
    begin, stop, shares = share_of_keys(begin, at, split, SPLITS, BLOCK_N)
    if split >= shares:
        return
    table = tables + row * stride_table
    k, v = _load_tile(keys, values, table, head, begin, stop, KV_HEADS, PAGE, D, DV, D_PAD, DV_PAD, BLOCK_N)
    place = tl.load(slots + row) * KV_HEADS + head
    m, dv = tl.arange(0, BLOCK_M), tl.arange(0, DV_PAD)

    await_inputs(PDL)
    angle, known = m[:, None] * 0 + row * PAIRS, (m < GROUP)[:, None]
    q_at = query + row * query_row + (head * GROUP + m)[:, None] * query_head
    q = turned(q_at, cos + angle, sin + angle, known, query_gain, query_eps, D, D_PAD, PAIRS, HALF, NORM)
    q, ends = q.to(query.dtype.element_ty), split == shares - 1
    score, value = _new_key(
        q, new_keys + row * key_row + head * key_head, new_values + row * value_row + head * value_head,
        cos + row * PAIRS, sin + row * PAIRS, key_gain, key_eps, keys, values, place, ends,
        D, DV, D_PAD, DV_PAD, PAIRS, HALF, NORM,
    )  # fmt: skip
    best = tl.where(ends, _scaled(score, scale, soft_cap, CAPPED), float("-inf"))
    total = tl.where(ends, 1.0, 0.0) + tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, DV_PAD], tl.float32) + value  # zeros unless the row ends here

    for start in range(begin, stop, BLOCK_N):
        if PDL and start + (AHEAD + 1) * BLOCK_N <= stop:
            slot, _ = _places(table, head, start + AHEAD * BLOCK_N, stop, KV_HEADS, PAGE, BLOCK_N)
            fetch_ahead(keys + slot[:, None] * D + (tl.arange(0, 2) * LINE)[None, :] % D, PDL)
            fetch_ahead(values + slot[:, None] * DV + (tl.arange(0, 2) * LINE)[None, :] % DV, PDL)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
        seen = start + tl.arange(0, BLOCK_N) < stop
        scores = tl.where(seen[None, :], _scaled(scores, scale, soft_cap, CAPPED), float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        weights, fading = tl.exp2(scores - higher[:, None]), tl.exp2(best - higher)
        total = total * fading + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(q.dtype), v.to(q.dtype), mixed * fading[:, None], input_precision=PRECISION)
        best = higher
        if start + BLOCK_N < stop:
            k, v = _load_tile(
                keys, values, table, head, start + BLOCK_N, stop, KV_HEADS, PAGE, D, DV, D_PAD, DV_PAD, BLOCK_N
            )

    first, g = (row * KV_HEADS + head) * GROUP, tl.arange(0, GROUP_PAD)
    if shares == 1:
        _store(best, total, mixed, sinks, out, head, m, dv, first, GROUP, DV, SINKS)
    else:
        step = rows * KV_HEADS * GROUP
        own = split * step + first + m
        tl.store(sums + own * 2, best, mask=m < GROUP)
        tl.store(sums + own * 2 + 1, total, mask=m < GROUP)
        tl.store(parts + own[:, None] * DV + dv[None, :], mixed, mask=known & (dv < DV)[None, :])
        tl.debug_barrier()
        # The program that comes last merges the shares of all, and leaves the counter as it was.
        counter = counters + row * KV_HEADS + head
        if tl.atomic_add(counter, 1, sem="acq_rel") == shares - 1:
            tl.store(counter, 0)
            top, whole, made = _merge(sums, parts, first, step, shares, g, dv, GROUP, DV)
            _store(top, whole, made, sinks, out, head, g, dv, first, GROUP, DV, SINKS)
