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

from ..contract import AttentionMask, NewKV, Paging
from ..packed_values import unpack_values
from ..reference import ReferencePages
from .decode_attention import MOST_KEYS, MOST_PROGRAMS, decode_attention, takes
from .key_tiles import first_seen, over_tiles
from .overlap import await_inputs, fetch_ahead, launch_next, overlap
from .softmax_shares import MAX_SHARES, leave_share, merged_shares, share_of_keys, with_sink
from .vectors import turned

MANY = 256  # programs that fill a card
SHARED_BYTES = 160 << 10
COUNTERS = 1 << 16  # tiles times key heads of a step that is split
LINE = tl.constexpr(64)  # numbers of two bytes in a line of the cache
LONG = 1024  # queries of a row from which on torch's own attention is faster


def attention(
    query: Tensor,
    pages: ReferencePages,
    layer: int,
    paging: Paging,
    mask: AttentionMask,
    counters: Tensor,
    new: NewKV | None = None,
) -> Tensor:
    """`query` [tokens, heads, dim] to [tokens, heads, value_dim]. `counters` are zero before and after.

    Rows of one token may bring their `new` keys and values along; the query is not turned yet then.
    """
    tokens, heads, dim = query.shape
    shape, lengths = pages.shape, paging.lengths
    group = heads // shape.kv_heads
    if lengths.dense and lengths.max_query >= LONG and _is_plain(query, pages, mask):
        return _long_rows(query, pages, layer, paging, mask)
    decoding = lengths.max_query * group <= 16
    block_m = max(16 if decoding else 128 if dim <= 128 else 64, triton.next_power_of_2(group))
    single = lengths.max_query <= block_m // group  # a row is one tile
    tiles = lengths.rows if single else tokens // (block_m // group) + lengths.rows
    most_keys, narrow = paging.tables.shape[1] * shape.page_tokens, decoding and bool(shape.scales)
    key_bytes = max(dim, shape.value_dim) * pages.keys.element_size()
    if new is not None and takes(lengths.rows, shape.kv_heads, most_keys, group, shape.value_dim):
        return decode_attention(query, pages, layer, paging, mask, new, counters)
    splits = _splits(tiles * shape.kv_heads, most_keys, narrow) if decoding else 1
    out = torch.empty((tokens, heads, shape.value_dim), dtype=query.dtype, device=query.device)
    wide = (splits, tokens, heads)
    parts = out if splits == 1 else torch.empty((*wide, shape.value_dim), dtype=torch.float32, device=query.device)
    sums = out if splits == 1 else torch.empty((*wide, 2), dtype=torch.float32, device=query.device)
    _attention[(tiles, shape.kv_heads, splits)](
        query, *_words(pages, layer), pages.key_scales, pages.value_scales, out if mask.sinks is None else mask.sinks,
        paging.tables, paging.positions, lengths.cu_seqlens, out, parts, sums, counters,
        lengths.rows, tokens, mask.scale, mask.window, mask.soft_cap,
        query.stride(0), query.stride(1), paging.tables.stride(0), layer * pages.key_scales.stride(0),
        *((out,) * 7 + (0.0, 0.0) + (0,) * 4 if new is None else _new_arguments(new, paging.slots)),
        **_constants(pages, heads), NEW=new is not None, PAIRS=1 if new is None else new.rotation.cos.shape[1],
        HALF=new is None or new.rotation.pairing == "half", NORM=new is not None and new.norms is not None,
        SCALED=bool(shape.scales), WINDOW=mask.window > 0, CHUNKED=mask.chunked, CAPPED=mask.soft_cap > 0,
        SINKS=mask.sinks is not None, SPLITS=splits, SINGLE=single, BLOCK_M=block_m,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        FLOATS=pages.keys.dtype.is_floating_point, PACKED=shape.dtype.packed_values, ASSEMBLY=query.is_cuda,
        **_tile(block_m, tiles * shape.kv_heads, key_bytes, narrow, most_keys),
        # A product that is fused into a sum has other bits, and whether it is depends on the number of splits.
        enable_fp_fusion=mask.sinks is None, **overlap(query),
    )  # fmt: skip
    return out


def _new_arguments(new: NewKV, slots: Tensor) -> tuple[Any, ...]:
    """New keys and values as the kernel takes them, with the places they go to."""
    keys, values, rotation = new.keys, new.values, new.rotation
    (query_gain, query_eps), (key_gain, key_eps) = ((keys, 0.0), (keys, 0.0)) if new.norms is None else new.norms
    strides = keys.stride(0), keys.stride(1), values.stride(0), values.stride(1)
    return (
        keys, values, rotation.cos, rotation.sin, slots, query_gain, key_gain, query_eps, key_eps, *strides,
    )  # fmt: skip


def _is_plain(query: Tensor, pages: ReferencePages, mask: AttentionMask) -> bool:
    """Whether torch's own attention computes this: half precision on a GPU, no window, no cap, no sinks."""
    kept = bool(pages.shape.scales) or query.dtype == pages.keys.dtype
    plain = query.is_cuda and kept and query.dtype != torch.float32 and mask.sinks is None
    return plain and not mask.window and not mask.soft_cap and pages.shape.key_dim == pages.shape.value_dim


def _long_rows(query: Tensor, pages: ReferencePages, layer: int, paging: Paging, mask: AttentionMask) -> Tensor:
    """Row by row with torch's attention, on a copy of the row's keys and values: fastest where queries are many."""
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    starts = paging.starts
    for row in range(paging.lengths.rows):
        span = slice(starts[row], starts[row + 1])
        count = span.stop - span.start
        seen = paging.lengths.ends[row]
        k, v = (one.transpose(0, 1)[None] for one in gathered(pages, layer, paging.tables[row], seen, query.dtype))
        q = query[span].transpose(0, 1)[None]
        bias = None if count == seen else causal_lower_right(count, seen)
        made = F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, is_causal=bias is None, scale=mask.scale, enable_gqa=True
        )
        if paging.lengths.rows == 1:
            return made[0].transpose(0, 1).contiguous()
        out[span] = made[0].transpose(0, 1)
    return out


def gathered(pages: ReferencePages, layer: int, table: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The first `count` keys and values of a row [count, kv_heads, dim], out of their pages and without scales."""
    table = table[: -(-count // pages.shape.page_tokens)]
    keys, values = (_rows(one, layer, table, count, pages) for one in (pages.keys, pages.values))
    if not pages.shape.scales:
        return keys, values
    scales = (_rows(one, layer, table, count, pages) for one in (pages.key_scales, pages.value_scales))
    key_scales, value_scales = scales
    values = unpack_values(values) if pages.shape.dtype.packed_values else values
    return (keys.float() * key_scales).to(dtype), (values.float() * value_scales).to(dtype)


def _rows(numbers: Tensor, layer: int, table: Tensor, count: int, pages: ReferencePages) -> Tensor:
    return numbers[layer].view(-1, pages.shape.page_tokens, *numbers.shape[2:])[table].flatten(0, 1)[:count]


def _tile(block_m: int, programs: int, row_bytes: int, narrow: bool, most_keys: int) -> dict[str, int]:
    """Keys at a time, warps and stages: small tiles where programs are many, as far as shared memory goes.

    Few programs over few keys have one stage: with less shared memory the products before and after run beside them.

    With `narrow` pages, of one byte a number, arithmetic costs as much as loading: more programs of one warp.
    """
    many = (64, 1, 3) if narrow else (64, 2, 3)
    keys, warps, stages = (64, 8, 2) if block_m > 64 else many if programs >= MANY else (128, 4, 2)
    if block_m <= 32 and programs <= MOST_PROGRAMS and most_keys <= MOST_KEYS:
        stages = 1
    while keys > 16 and 2 * keys * row_bytes * stages > SHARED_BYTES:
        keys //= 2
    return {"BLOCK_N": keys, "num_warps": warps, "num_stages": stages}


def _splits(programs: int, most_keys: int, narrow: bool) -> int:
    """Enough programs for a card, and at least a few tiles of keys for each."""
    if programs >= MANY:
        return 2 if narrow and programs < 4 * MANY and most_keys >= 1024 else 1
    return max(1, min(int(MAX_SHARES.value), -(-264 // programs), -(-most_keys // 128)))


def _words(pages: ReferencePages, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer; bytes in pairs, as the kernel loads them. A byte of 4-bit values is a pair."""
    keys, values = pages.keys[layer], pages.values[layer]
    if not pages.shape.scales:
        return keys, values
    return keys.view(torch.int16), values if pages.shape.dtype.packed_values else values.view(torch.int16)


def _constants(pages: ReferencePages, heads: int) -> dict[str, Any]:
    shape, least = pages.shape, 32 if pages.shape.scales else 16
    return {
        "KV_HEADS": shape.kv_heads, "GROUP": heads // shape.kv_heads, "PAGE": shape.page_tokens,
        "D": shape.key_dim, "DV": shape.value_dim, "D_PAD": max(least, triton.next_power_of_2(shape.key_dim)),
        "DV_PAD": max(least, triton.next_power_of_2(shape.value_dim)),
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
def _queries(q_at, known, scale, D: tl.constexpr, D_PAD: tl.constexpr, SCALED: tl.constexpr):
    """Queries and what their scores are multiplied with. Over bytes they come as even dimensions and odd ones.

    Half precision is float16 then, and a query's largest number one: float16 has a shorter range than bfloat16.
    """
    if SCALED:
        d = 2 * tl.arange(0, D_PAD // 2)
        even = tl.load(q_at + d[None, :], mask=known[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
        odd = tl.load(q_at + d[None, :] + 1, mask=known[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(even), 1), tl.max(tl.abs(odd), 1))
        largest = tl.where(largest > 0, largest, 1.0)
        kind: tl.constexpr = tl.float32 if q_at.dtype.element_ty == tl.float32 else tl.float16
        return (even / largest[:, None]).to(kind), (odd / largest[:, None]).to(kind), scale * largest
    else:
        d = tl.arange(0, D_PAD)
        q = tl.load(q_at + d[None, :], mask=known[:, None] & (d < D)[None, :], other=0.0)
        return q, q, tl.zeros_like(known.to(tl.float32)) + scale


@triton.jit
def _fetch_keys(
    keys, values, table, head, start, stop, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Bring the first tile of keys and values into the cache."""
    if PDL:
        key = start + tl.arange(0, BLOCK_N)
        page = tl.load(table + key // PAGE, mask=key < stop, other=0)
        slot = ((tl.maximum(page, 0) * PAGE + key % PAGE) * KV_HEADS + head)[:, None]
        fetch_ahead(keys + slot * D + (LINE * tl.arange(0, 2))[None, :] % D, PDL)
        fetch_ahead(values + slot * DV + (LINE * tl.arange(0, 2))[None, :] % DV, PDL)


@triton.jit
def _write_new(
    new_keys, new_values, cos, sin, keys, values, place, gain, eps,
    D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    PAIRS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """One head's key, normalized and turned, and value of a token, into their place."""
    one, d, dv = tl.zeros([1, 1], tl.int32), tl.arange(0, D_PAD)[None, :], tl.arange(0, DV_PAD)[None, :]
    k = turned(new_keys + one, cos + one, sin + one, one == 0, gain, eps, D, D_PAD, PAIRS, HALF, NORM)
    tl.store(keys + place * D + d, k.to(keys.dtype.element_ty), mask=d < D)
    v = tl.load(new_values + dv, mask=dv < DV, other=0.0)
    tl.store(values + place * DV + dv, v.to(values.dtype.element_ty), mask=dv < DV)


@triton.jit(do_not_specialize=["rows", "tokens", "stride_table"])
def _attention(
    query, keys, values, key_scales, value_scales, sinks, tables, positions, cu_seqlens, out, parts, sums, counters,
    rows, tokens, scale, window, soft_cap, stride_token, stride_head, stride_table, scale_offset,
    new_keys, new_values, cos, sin, slots, query_gain, key_gain, query_eps, key_eps,
    key_token, key_head, value_token, value_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    D_PAD: tl.constexpr, DV_PAD: tl.constexpr, NEW: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr,
    NORM: tl.constexpr, SCALED: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr, SPLITS: tl.constexpr, SINGLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, FLOATS: tl.constexpr, PACKED: tl.constexpr, ASSEMBLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    # Positions, tables and keys of earlier steps are in memory before a step begins, so they are read before the wait.
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
    dv = tl.arange(0, DV_PAD)

    # The keys that some query of the tile sees, from the start of a tile of them, shared out among splits.
    stop = tl.load(positions + last) + 1
    begin = stop * 0
    if WINDOW:
        begin = first_seen(tl.load(positions + first), window, CHUNKED) // BLOCK_N * BLOCK_N
    begin, stop, shares = share_of_keys(begin, stop, split, SPLITS, BLOCK_N)
    if SPLITS > 1:
        if split >= shares:
            return
    table = tables + row * stride_table
    if not SCALED:
        _fetch_keys(keys, values, table, head, begin, stop, KV_HEADS, PAGE, D, DV, BLOCK_N, PDL)

    await_inputs(PDL)
    q_at = query + token[:, None] * stride_token + head_of[:, None] * stride_head
    if NEW:
        angle = token[:, None] * PAIRS
        q = turned(
            q_at, cos + angle, sin + angle, known[:, None], query_gain, query_eps, D, D_PAD, PAIRS, HALF, NORM
        ).to(query.dtype.element_ty)
        q_odd, q_scale = q, tl.zeros([BLOCK_M], tl.float32) + scale
    else:
        q, q_odd, q_scale = _queries(q_at, known, scale, D, D_PAD, SCALED)
    if NEW and split == shares - 1:  # it reads them itself, after all its threads have written
        _write_new(
            new_keys + row * key_token + head * key_head, new_values + row * value_token + head * value_head,
            cos + row * PAIRS, sin + row * PAIRS, keys, values, tl.load(slots + row) * KV_HEADS + head,
            key_gain, key_eps, D, DV, D_PAD, DV_PAD, PAIRS, HALF, NORM,
        )  # fmt: skip
        tl.debug_barrier()

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, DV_PAD // 2 if SCALED else DV_PAD], tl.float32)
    odd = tl.zeros([BLOCK_M, DV_PAD // 2 if SCALED else 1], tl.float32)
    unit = 0.0
    # Keys that every query sees need no masks, and are nearly all in a decode step.
    plain = begin
    if not WINDOW:
        plain = tl.minimum(tl.maximum(tl.load(positions + first) + 1, begin), stop)
        plain = begin + (plain - begin) // BLOCK_N * BLOCK_N
    best, total, mixed, odd, unit = over_tiles(
        q, q_odd, q_scale, keys, values, key_scales + scale_offset, value_scales + scale_offset, table,
        known, at, head, begin, plain, stop, window, soft_cap, best, total, mixed, odd, unit,
        KV_HEADS, PAGE, D, DV, D_PAD, DV_PAD, SCALED, WINDOW, CHUNKED, CAPPED, BLOCK_N, PRECISION, FLOATS,
        ASSEMBLY, SINGLE, False, PACKED,
    )  # fmt: skip
    best, total, mixed, odd, unit = over_tiles(
        q, q_odd, q_scale, keys, values, key_scales + scale_offset, value_scales + scale_offset, table,
        known, at, head, plain, stop, stop, window, soft_cap, best, total, mixed, odd, unit,
        KV_HEADS, PAGE, D, DV, D_PAD, DV_PAD, SCALED, WINDOW, CHUNKED, CAPPED, BLOCK_N, PRECISION, FLOATS,
        ASSEMBLY, SINGLE, True, PACKED,
    )  # fmt: skip
    if SCALED:
        mixed = tl.reshape(tl.join(mixed, odd), (BLOCK_M, DV_PAD)) * unit
    if not CAPPED:
        best = best * q_scale

    place = token.to(tl.int64) * KV_HEADS * GROUP + head_of
    if shares > 1:
        step = tokens * KV_HEADS * GROUP
        leave_share(best, total, mixed, sums, parts, place + split * step, known, dv, DV)
        # The program that comes last merges the shares of all, and leaves the counter as it was.
        counter = counters + tile * KV_HEADS + head
        if tl.atomic_add(counter, 1, sem="acq_rel") < shares - 1:
            return
        tl.store(counter, 0)
        best, total, mixed = merged_shares(sums, parts, place, step, shares, known, dv, DV, BLOCK_M, DV_PAD)
    if SINKS:
        total, mixed = with_sink(best, total, mixed, tl.load(sinks + head_of, mask=known, other=0.0))
    result = mixed / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(out + place[:, None] * DV + dv[None, :], result, mask=known[:, None] & (dv < DV)[None, :])
