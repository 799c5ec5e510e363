"""Gathered low-rank products: each token multiplies with the adapter in its own slot, in two launches for all of them.

The first brings the inputs down to the ranks of the adapters, the second brings these up and adds them to the outputs.
Slots are read on the device, and so are addresses, ranks and scales: a captured step stays right when slots are filled
again. Few tokens are a program each. Of many tokens a program takes a tile, which it goes through adapter by adapter:
tokens of one row stand together, so mostly there is one.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...errors import Unsupported
from ..lowrank import AdapterSlots, LowRank, LowRankTable
from .overlap import await_inputs, launch_next, overlap

MAX_RANK = 512  # room for a token's ranks between the two launches
FEW = 64  # tokens that are a program each
TILE = 64  # tokens of a program where they are many
AT_ONCE = 3  # maps of one input in a launch
SHARE = 1024  # inputs that a program adds up
_RANKS = tl.constexpr(16)  # at a time; ranks are padded to them
_ENTRY = tl.constexpr(4)  # numbers of a slot: two addresses, the padded rank, the bits of the scale
_NONE = tl.constexpr(2**31 - 1)


class TritonTable:
    """Products of one linear map, found by addresses that kernels read."""

    __slots__ = ("entries", "inputs", "outputs", "products")

    def __init__(self, outputs: int, inputs: int, slots: int, device: torch.device) -> None:
        self.outputs, self.inputs = outputs, inputs
        self.entries = torch.zeros((slots, _ENTRY.value), dtype=torch.int64, device=device)
        self.products: list[LowRank | None] = [None] * slots  # what the addresses point to

    def put(self, slot: int, product: LowRank | None) -> None:
        entry = [0] * _ENTRY.value
        if product is not None:
            (bits,) = struct.unpack("<i", struct.pack("<f", product.scale))
            entry = [product.down.data_ptr(), product.up.data_ptr(), product.rank, bits]
        self.entries[slot] = torch.tensor(entry)
        self.products[slot] = product


def prepare(product: LowRank, device: torch.device, dtype: torch.dtype) -> LowRank:
    """On the device, with zeros up to a whole number of ranks."""
    if product.rank > MAX_RANK:
        raise Unsupported(f"an adapter of rank {product.rank}; adapters on a GPU may have {MAX_RANK}")
    padded = triton.cdiv(product.rank, _RANKS.value) * _RANKS.value
    down = torch.zeros((padded, product.down.shape[1]), dtype=dtype, device=device)
    up = torch.zeros((product.up.shape[0], padded), dtype=dtype, device=device)
    down[: product.rank].copy_(product.down)
    up[:, : product.rank].copy_(product.up)
    return LowRank(down, up, product.scale)


def adapt(
    x: Tensor,
    tables: Sequence[LowRankTable],
    outs: Sequence[Tensor],
    adapter_slots: AdapterSlots,
    few: int = FEW,
) -> None:
    """Add to each of `outs` [tokens, out] what each token's slot of its table makes of `x` [tokens, in].

    Up to `few` tokens are a program each. A token's bits depend on whether it is, and on nothing else of its step.
    """
    own = [table for table in tables if isinstance(table, TritonTable)]
    assert len(own) == len(tables), "tables of another backend"
    for first in range(0, len(own), AT_ONCE):
        _adapt(x, own[first : first + AT_ONCE], outs[first : first + AT_ONCE], adapter_slots, few)


def _adapt(
    x: Tensor, tables: Sequence[TritonTable], outs: Sequence[Tensor], adapter_slots: AdapterSlots, few: int
) -> None:
    tokens, inputs = x.shape
    splits, most = triton.cdiv(inputs, SHARE), max(table.outputs for table in tables)
    ranks = torch.empty((len(tables), splits, tokens, MAX_RANK), dtype=torch.float32, device=x.device)
    tile = _tile(x, few)
    block = 256 if tile["TOKENS"] == 1 else 64  # of inputs, then of outputs
    entries = _three([table.entries for table in tables])
    tiles = triton.cdiv(tokens, tile["TOKENS"])
    _down[(tiles, splits, len(tables))](
        x, *entries, adapter_slots.slots, ranks, tokens, inputs, x.stride(0),
        ALIGNED=inputs % 16 == 0, SHARE=SHARE, RANK_ROOM=MAX_RANK, COLUMNS=block, **tile,
    )  # fmt: skip
    _up[(tiles, triton.cdiv(most, block), len(tables))](
        x, ranks, *entries, adapter_slots.slots, adapter_slots.scales,
        *_three(outs), *_three([out.shape[1] for out in outs]), *_three([out.stride(0) for out in outs]), tokens,
        SPLITS=splits, RANK_ROOM=MAX_RANK, COLUMNS=block, **tile,
    )  # fmt: skip


def _three(given: Sequence[Any]) -> list[Any]:
    return [*given, given[0], given[0]][:AT_ONCE]


def _tile(x: Tensor, most: int) -> dict[str, Any]:
    few = len(x) <= most
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    return {"TOKENS": 1 if few else TILE, "PRECISION": precision, "num_warps": 4, **overlap(x)}


@triton.jit
def _pick(which, a, b, c):
    """One of three, by number."""
    found = a
    if which == 1:
        found = b
    elif which == 2:
        found = c
    return found


@triton.jit
def _next_slot(slots):
    """The first slot that tokens of a tile are still waiting for."""
    return tl.min(tl.where(slots < 0, _NONE, slots), 0)


@triton.jit(do_not_specialize=["tokens"])
def _down(
    x, entries0, entries1, entries2, slots, ranks, tokens, inputs, stride,
    ALIGNED: tl.constexpr, SHARE: tl.constexpr, RANK_ROOM: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A share of the sums down(x), one number for each rank of a token's adapter."""
    launch_next(PDL)
    await_inputs(PDL)
    split, which = tl.program_id(1), tl.program_id(2)
    entries = _pick(which, entries0, entries1, entries2)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    waiting = tl.load(slots + token, mask=token < tokens, other=-1).to(tl.int32)
    place = ((which * tl.num_programs(1) + split) * tokens + token) * RANK_ROOM
    r, k, stop = tl.arange(0, _RANKS), tl.arange(0, COLUMNS), tl.minimum(inputs, (split + 1) * SHARE)
    slot = _next_slot(waiting)
    while slot < _NONE:
        mine = waiting == slot
        weight = tl.load(entries + slot * _ENTRY).to(tl.pointer_type(x.dtype.element_ty))
        rank = tl.load(entries + slot * _ENTRY + 2)
        for first in range(0, rank, _RANKS):
            sums = tl.zeros([TOKENS, _RANKS], tl.float32)
            for start in range(split * SHARE, stop, COLUMNS):
                inside = start + k < stop
                at = weight + (first + r)[:, None] * inputs + (start + k)[None, :]
                if ALIGNED:
                    at = tl.multiple_of(at, [1, 16])
                w = tl.load(at, mask=inside[None, :], other=0.0)
                own = x + token[:, None] * stride + (start + k)[None, :]
                own = tl.load(own, mask=mine[:, None] & inside[None, :], other=0.0)
                if TOKENS == 1:
                    sums += tl.sum(w.to(tl.float32) * own.to(tl.float32), 1)[None, :]
                else:
                    sums = tl.dot(own, tl.trans(w), sums, input_precision=PRECISION)
            tl.store(ranks + place[:, None] + (first + r)[None, :], sums, mask=mine[:, None])
        waiting = tl.where(mine, -1, waiting)
        slot = _next_slot(waiting)


@triton.jit(do_not_specialize=["tokens"])
def _up(
    x, ranks, entries0, entries1, entries2, slots, scales, out0, out1, out2, n0, n1, n2,
    stride0, stride1, stride2, tokens,
    SPLITS: tl.constexpr, RANK_ROOM: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add scale * up(ranks) to a block of outputs; a token without an adapter keeps its bits. Weights are as `x` is."""
    launch_next(PDL)
    await_inputs(PDL)
    which = tl.program_id(2)
    outputs, stride = _pick(which, n0, n1, n2), _pick(which, stride0, stride1, stride2)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if tl.program_id(1) * COLUMNS >= outputs:
        return
    entries, out = _pick(which, entries0, entries1, entries2), _pick(which, out0, out1, out2)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    waiting = tl.load(slots + token, mask=token < tokens, other=-1).to(tl.int32)
    strength = tl.load(scales + token, mask=token < tokens, other=0.0)
    r, inside = tl.arange(0, _RANKS), n < outputs
    slot = _next_slot(waiting)
    while slot < _NONE:
        mine = waiting == slot
        weight = tl.load(entries + slot * _ENTRY + 1).to(tl.pointer_type(x.dtype.element_ty))
        rank = tl.load(entries + slot * _ENTRY + 2)
        scale = tl.load(entries + slot * _ENTRY + 3).to(tl.int32).to(tl.float32, bitcast=True)
        added = tl.zeros([TOKENS, COLUMNS], tl.float32)
        for first in range(0, rank, _RANKS):
            inner = tl.zeros([TOKENS, _RANKS], tl.float32)
            for split in range(SPLITS):
                place = ((which * SPLITS + split) * tokens + token) * RANK_ROOM
                inner += tl.load(ranks + place[:, None] + (first + r)[None, :], mask=mine[:, None], other=0.0)
            at = tl.multiple_of(weight + n[:, None] * rank + (first + r)[None, :], [1, 16])
            w = tl.load(at, mask=inside[:, None], other=0.0)
            if TOKENS == 1:
                added += tl.sum(w.to(tl.float32) * inner, 1)[None, :]
            else:
                added = tl.dot(inner, tl.trans(w).to(tl.float32), added, input_precision=PRECISION)
        if rank > 0:
            at = out + token[:, None] * stride + n[None, :]
            there = mine[:, None] & inside[None, :]
            old = tl.load(at, mask=there, other=0.0).to(tl.float32)
            tl.store(at, old + added * (scale * strength)[:, None], mask=there)
        waiting = tl.where(mine, -1, waiting)
        slot = _next_slot(waiting)
