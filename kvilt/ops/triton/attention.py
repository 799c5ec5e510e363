"""Attention over pages by explicit positions, for decode, ragged prefill and sparse sets of queries alike.

A program takes a tile of queries of one row, with all heads that share a key head, over a share of the row's keys. Few
queries over many keys are split among programs (flash decoding), and the last of them merges the shares.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from ..contract import AttentionMask, Paging
from ..reference import ReferencePages
from .overlap import await_inputs, launch_next, overlap

MAX_SPLITS = 16
MANY = 256  # programs that fill a card
SHARED_BYTES = 160 << 10
COUNTERS = 1 << 16  # tiles times key heads of a step that is split
LONG = 1024  # queries of a row from which on torch's own attention is faster


def attention(
    query: Tensor, pages: ReferencePages, layer: int, paging: Paging, mask: AttentionMask, counters: Tensor
) -> Tensor:
    """`query` [tokens, heads, dim] to [tokens, heads, value_dim]. `counters` are zero before and after."""
    tokens, heads, dim = query.shape
    shape, lengths = pages.shape, paging.lengths
    group = heads // shape.kv_heads
    if lengths.dense and lengths.max_query >= LONG and _is_plain(query, pages, mask):
        return _long_rows(query, pages, layer, paging, mask)
    decoding = lengths.max_query * group <= 16
    block_m = max(16 if decoding else 128 if dim <= 128 else 64, triton.next_power_of_2(group))
    single = lengths.max_query <= block_m // group  # a row is one tile
    tiles = lengths.rows if single else tokens // (block_m // group) + lengths.rows
    splits = _splits(tiles * shape.kv_heads, paging.tables.shape[1] * shape.page_tokens) if decoding else 1
    out = torch.empty((tokens, heads, shape.value_dim), dtype=query.dtype, device=query.device)
    wide = (splits, tokens, heads)
    parts = out if splits == 1 else torch.empty((*wide, shape.value_dim), dtype=torch.float32, device=query.device)
    sums = out if splits == 1 else torch.empty((*wide, 2), dtype=torch.float32, device=query.device)
    _attention[(tiles, shape.kv_heads, splits)](
        query, pages.keys[layer], pages.values[layer], pages.key_scales, pages.value_scales,
        paging.tables, paging.positions, lengths.cu_seqlens, out, parts, sums, counters,
        lengths.rows, tokens, mask.scale, mask.window, mask.soft_cap,
        query.stride(0), query.stride(1), paging.tables.stride(0), layer * pages.key_scales.stride(0),
        **_constants(shape.kv_heads, heads, dim, shape.value_dim, shape.page_tokens),
        SCALED=bool(shape.scales), WINDOW=mask.window > 0, CAPPED=mask.soft_cap > 0, SPLITS=splits, SINGLE=single,
        BLOCK_M=block_m, PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        **_tile(block_m, tiles * shape.kv_heads, max(dim, shape.value_dim) * query.element_size()), **overlap(query),
    )  # fmt: skip
    return out


def _is_plain(query: Tensor, pages: ReferencePages, mask: AttentionMask) -> bool:
    """Whether torch's own attention computes this: half precision on a GPU, no window, no cap, no scales."""
    plain = query.is_cuda and query.dtype == pages.keys.dtype and query.dtype != torch.float32
    return plain and not mask.window and not mask.soft_cap and pages.shape.key_dim == pages.shape.value_dim


def _long_rows(query: Tensor, pages: ReferencePages, layer: int, paging: Paging, mask: AttentionMask) -> Tensor:
    """Row by row with torch's attention, on a copy of the row's keys and values: fastest where queries are many."""
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    starts, size = paging.starts, pages.shape.page_tokens
    keys, values = (one[layer].view(-1, size, *one.shape[2:]) for one in (pages.keys, pages.values))
    for row in range(paging.lengths.rows):
        span = slice(starts[row], starts[row + 1])
        count = span.stop - span.start
        seen = paging.lengths.ends[row]
        table = paging.tables[row, : -(-seen // size)]
        k, v = (one[table].flatten(0, 1)[:seen].transpose(0, 1)[None] for one in (keys, values))
        q = query[span].transpose(0, 1)[None]
        bias = None if count == seen else causal_lower_right(count, seen)
        made = F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, is_causal=bias is None, scale=mask.scale, enable_gqa=True
        )
        if paging.lengths.rows == 1:
            return made[0].transpose(0, 1).contiguous()
        out[span] = made[0].transpose(0, 1)
    return out


def _tile(block_m: int, programs: int, row_bytes: int) -> dict[str, int]:
    """Keys at a time, warps and stages: small tiles where programs are many, as far as shared memory goes."""
    keys, warps, stages = (64, 8, 2) if block_m > 64 else (64, 2, 3) if programs >= MANY else (128, 4, 2)
    while keys > 16 and 2 * keys * row_bytes * stages > SHARED_BYTES:
        keys //= 2
    return {"BLOCK_N": keys, "num_warps": warps, "num_stages": stages}


def _splits(programs: int, most_keys: int) -> int:
    """Enough programs for a card, and at least a few tiles of keys for each."""
    return 1 if programs >= MANY else max(1, min(MAX_SPLITS, -(-264 // programs), -(-most_keys // 128)))


def _constants(kv_heads: int, heads: int, dim: int, value_dim: int, page_tokens: int) -> dict[str, Any]:
    return {
        "KV_HEADS": kv_heads, "GROUP": heads // kv_heads, "PAGE": page_tokens,
        "D": dim, "DV": value_dim, "D_PAD": max(16, triton.next_power_of_2(dim)),
        "DV_PAD": max(16, triton.next_power_of_2(value_dim)),
    }  # fmt: skip


@triton.jit
def _row_of(cu_seqlens, tile, rows, BLOCK_Q: tl.constexpr):
    """The row of a tile: the last one whose first tile is not after it. Each row may leave one tile unused."""
    low, high = 0, rows
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(cu_seqlens + middle) // BLOCK_Q + middle
        low = tl.where(first <= tile, middle, low)
        high = tl.where(first <= tile, high, middle)
    return low


@triton.jit
def _attention(
    query, keys, values, key_scales, value_scales, tables, positions, cu_seqlens, out, parts, sums, counters,
    rows, tokens, scale, window, soft_cap, stride_token, stride_head, stride_table, scale_offset,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    D_PAD: tl.constexpr, DV_PAD: tl.constexpr, SCALED: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    SPLITS: tl.constexpr, SINGLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    await_inputs(PDL)
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tile if SINGLE else _row_of(cu_seqlens, tile, rows, BLOCK_Q)
    row_start, row_stop = tl.load(cu_seqlens + row), tl.load(cu_seqlens + row + 1)
    first = row_start if SINGLE else row_start + (tile - row_start // BLOCK_Q - row) * BLOCK_Q
    if first >= row_stop:
        return
    last = tl.minimum(first + BLOCK_Q, row_stop) - 1

    m = tl.arange(0, BLOCK_M)
    token = first + m // GROUP
    known = (m < BLOCK_Q * GROUP) & (token < row_stop)
    head_of = head * GROUP + m % GROUP
    at = tl.load(positions + token, mask=known, other=0)
    d, dv = tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
    q_at = query + token[:, None] * stride_token + head_of[:, None] * stride_head + d[None, :]
    q = tl.load(q_at, mask=known[:, None] & (d < D)[None, :], other=0.0)

    # The keys that some query of the tile sees, from the start of a tile of them, shared out among splits.
    stop = tl.load(positions + last) + 1
    begin = stop * 0
    if WINDOW:
        begin = tl.maximum(tl.load(positions + first) - window + 1, 0) // BLOCK_N * BLOCK_N
    shares = stop * 0 + 1
    if SPLITS > 1:
        tiles = tl.cdiv(stop - begin, BLOCK_N)
        each = tl.cdiv(tiles, SPLITS)
        shares = tl.cdiv(tiles, each)  # of programs that have some keys to look at
        if split >= shares:
            return
        begin = begin + split * each * BLOCK_N
        stop = tl.minimum(stop, begin + each * BLOCK_N)

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    n = tl.arange(0, BLOCK_N)
    for start in range(begin, stop, BLOCK_N):
        key = start + n
        there = key < stop
        page = tl.load(tables + row * stride_table + key // PAGE, mask=there, other=0)
        slot = (tl.maximum(page, 0) * PAGE + key % PAGE) * KV_HEADS + head
        k = tl.load(keys + slot[None, :] * D + d[:, None], mask=there[None, :] & (d < D)[:, None], other=0.0)
        scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION) * scale
        if SCALED:
            scores = scores * tl.load(key_scales + scale_offset + slot, mask=there, other=0.0)[None, :]
        if CAPPED:
            scores = soft_cap * (2 * tl.sigmoid(2 * scores / soft_cap) - 1)
        seen = known[:, None] & there[None, :] & (key[None, :] <= at[:, None])
        if WINDOW:
            seen = seen & (key[None, :] > at[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        calm = tl.where(higher == float("-inf"), 0.0, higher)  # rows that have seen no key yet
        weights = tl.exp(scores - calm[:, None])
        fading = tl.exp(best - calm)
        total = total * fading + tl.sum(weights, 1)
        # What no query sees may never have been written: 0 * NaN would be NaN.
        useful = there & (tl.max(seen.to(tl.int32), 0) > 0)
        v = tl.load(values + slot[:, None] * DV + dv[None, :], mask=useful[:, None] & (dv < DV)[None, :], other=0.0)
        if SCALED:
            weights = weights * tl.load(value_scales + scale_offset + slot, mask=useful, other=0.0)[None, :]
        mixed = mixed * fading[:, None]
        mixed = tl.dot(weights.to(q.dtype), v.to(q.dtype), mixed, input_precision=PRECISION)
        best = higher

    place = token.to(tl.int64) * KV_HEADS * GROUP + head_of
    inside = known[:, None] & (dv < DV)[None, :]
    if shares > 1:
        step = tokens * KV_HEADS * GROUP
        own = place + split * step
        tl.store(sums + own * 2, best, mask=known)
        tl.store(sums + own * 2 + 1, total, mask=known)
        tl.store(parts + own[:, None] * DV + dv[None, :], mixed, mask=inside)
        # The program that comes last merges the shares of all, and leaves the counter as it was.
        tl.debug_barrier()
        counter = counters + tile * KV_HEADS + head
        if tl.atomic_add(counter, 1, sem="acq_rel") < shares - 1:
            return
        tl.store(counter, 0)
        best = tl.full([BLOCK_M], float("-inf"), tl.float32)
        for other in range(shares):
            best = tl.maximum(best, tl.load(sums + (place + other * step) * 2, mask=known, other=0.0, volatile=True))
        total, mixed = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, DV_PAD], tl.float32)
        for other in range(shares):
            own = place + other * step
            share = tl.exp(tl.load(sums + own * 2, mask=known, other=0.0, volatile=True) - best)
            total += share * tl.load(sums + own * 2 + 1, mask=known, other=0.0, volatile=True)
            theirs = tl.load(parts + own[:, None] * DV + dv[None, :], mask=inside, other=0.0, volatile=True)
            mixed += share[:, None] * theirs
    result = mixed / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(out + place[:, None] * DV + dv[None, :], result, mask=inside)
