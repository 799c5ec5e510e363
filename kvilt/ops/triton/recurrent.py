"""Kernels for recurrent state: one warp folds all tokens of a row into its part of the memory, in order.

Programs share nothing, so a row's result does not depend on its batch or on how its prompt was cut.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import Decay, FoldHeads, StatePlace, StateSlots
from ..recurrent import L2_EPS
from .overlap import await_inputs, launch_next, overlap

_CHANNELS, _TOKENS = 64, 32  # of a program of a convolution
_VALUES = 8  # columns of a memory that a warp keeps in its registers: more of them would need several warps, which wait


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, place: StatePlace) -> Tensor:
    """As `ops.recurrent.causal_conv`."""
    x, tails = x.contiguous(), place.store.tails[place.layer]
    out, (channels, width), rows = torch.empty_like(x), weight.shape, len(place.slots.reads)
    at = (_starts(place.slots), place.slots.reads, place.slots.writes)
    longest = max(map(int.__sub__, place.slots.starts[1:], place.slots.starts))
    grid = (rows, triton.cdiv(channels, _CHANNELS), triton.cdiv(longest, _TOKENS))
    _conv[grid](
        x, weight, weight if bias is None else bias, tails, out, *at, channels,
        WIDTH=width, BIAS=bias is not None, SILU=silu, BLOCK=_CHANNELS, TOKENS=_TOKENS, num_warps=2,
        **overlap(x),
    )  # fmt: skip
    return out


@triton.jit
def _conv(
    x, weight, bias, tails, out, starts, reads, writes, channels,
    WIDTH: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    await_inputs(PDL)
    row, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, first, stop = channel < channels, tl.load(starts + row), tl.load(starts + row + 1)
    read = tl.load(reads + row)
    tail = tails + (read * channels + channel) * (WIDTH - 1)
    start = first + tl.program_id(2) * TOKENS
    for token in range(start, tl.minimum(start + TOKENS, stop)):
        total = tl.zeros([BLOCK], tl.float32)
        slot = tl.load(writes + token)
        kept = tails + (slot * channels + channel) * (WIDTH - 1)
        for k in tl.static_range(WIDTH):
            at = token - (WIDTH - 1) + k  # a token of the row, or an input before it
            new = tl.load(x + at * channels + channel, mask=inside & (at >= first), other=0.0).to(tl.float32)
            old = tl.load(tail + (at - first + WIDTH - 1), mask=inside & (at < first) & (read >= 0), other=0.0)
            total += (new + old) * tl.load(weight + channel * WIDTH + k, mask=inside, other=0.0)
            if k > 0:
                tl.store(kept + k - 1, new + old, mask=inside & (slot >= 0))
        if BIAS:
            total += tl.load(bias + channel, mask=inside, other=0.0)
        if SILU:
            total = total / (1.0 + tl.exp(-total))
        tl.store(out + token * channels + channel, total, mask=inside)


def gated_delta(mixed: Tensor, step: Tensor, beta: Tensor, decay: Decay, heads: FoldHeads, place: StatePlace) -> Tensor:
    """As `ops.recurrent.gated_delta`."""
    return _folded(mixed, step, beta.contiguous(), None, decay, heads, place)


def mamba2(mixed: Tensor, step: Tensor, skip: Tensor, decay: Decay, heads: FoldHeads, place: StatePlace) -> Tensor:
    """As `ops.recurrent.mamba2`."""
    return _folded(mixed, step, None, skip, decay, heads, place)


def _folded(
    mixed: Tensor,
    step: Tensor,
    beta: Tensor | None,
    skip: Tensor | None,
    decay: Decay,
    heads: FoldHeads,
    place: StatePlace,
) -> Tensor:
    memories, step, mixed = place.store.memories[place.layer], step.contiguous(), mixed.contiguous()
    out = torch.empty((len(mixed), heads.value_heads, heads.value_dim), dtype=mixed.dtype, device=mixed.device)
    at = (_starts(place.slots), place.slots.reads, place.slots.writes)
    values = min(_VALUES, triton.next_power_of_2(heads.value_dim))
    grid = (len(place.slots.reads), heads.value_heads, triton.cdiv(heads.value_dim, values))
    _fold[grid](
        mixed, step, step if beta is None else beta, decay.log_rate, decay.bias,
        decay.bias if skip is None else skip, memories, out, *at, decay.least, min(decay.most, 3.0e38), L2_EPS,
        KEY_HEADS=heads.key_heads, VALUE_HEADS=heads.value_heads, KEYS=heads.key_dim, VALUES=heads.value_dim,
        TILED=heads.tiled, DELTA=beta is not None, KEY_BLOCK=triton.next_power_of_2(heads.key_dim),
        VALUE_BLOCK=values, num_warps=1, **overlap(mixed),
    )  # fmt: skip
    return out


@triton.jit
def _fold(
    mixed, step, beta, log_rate, bias, skip, memories, out, starts, reads, writes, least, most, eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    TILED: tl.constexpr, DELTA: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    await_inputs(PDL)
    row, head = tl.program_id(0), tl.program_id(1)
    k, v = tl.arange(0, KEY_BLOCK), tl.program_id(2) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    place = k[:, None] * VALUES + v[None, :]
    inside = (k[:, None] < KEYS) & (v[None, :] < VALUES)
    first, stop, read = tl.load(starts + row), tl.load(starts + row + 1), tl.load(reads + row)
    source = memories + (read * VALUE_HEADS + head) * (KEYS * VALUES) + place
    memory = tl.load(source, mask=inside & (read >= 0), other=0.0)
    rate_of, bias_of = tl.exp(tl.load(log_rate + head)), tl.load(bias + head)
    group = head % KEY_HEADS if TILED else head // (VALUE_HEADS // KEY_HEADS)
    query, key, value = _inputs(mixed, first, head, group, k, v, KEY_HEADS, VALUE_HEADS, KEYS, VALUES, DELTA)
    size, rate = _rates(step, beta, first, head, bias_of, least, most, VALUE_HEADS, DELTA)
    for token in range(first, stop):
        after = tl.minimum(token + 1, stop - 1)  # what the next token brings is loaded ahead
        next_query, next_key, next_value = _inputs(
            mixed, after, head, group, k, v, KEY_HEADS, VALUE_HEADS, KEYS, VALUES, DELTA
        )
        next_size, next_rate = _rates(step, beta, after, head, bias_of, least, most, VALUE_HEADS, DELTA)
        slot = tl.load(writes + token)
        memory = memory * tl.exp(-rate_of * size)
        change = value
        if DELTA:
            query = query * tl.rsqrt(tl.sum(query * query, 0) + eps) * (1.0 / tl.sqrt(KEYS * 1.0))
            key = key * tl.rsqrt(tl.sum(key * key, 0) + eps)
            change = value - tl.sum(memory * key[:, None], 0)
        memory = memory + key[:, None] * (change * rate)[None, :]
        made = tl.sum(memory * query[:, None], 0)
        if not DELTA:
            made += value * tl.load(skip + head)
        tl.store(out + (token * VALUE_HEADS + head) * VALUES + v, made, mask=v < VALUES)
        if slot >= 0:
            target = memories + (slot * VALUE_HEADS + head) * (KEYS * VALUES) + place
            tl.store(target, memory, mask=inside)
        query, key, value, size, rate = next_query, next_key, next_value, next_size, next_rate


@triton.jit
def _inputs(
    mixed, token, head, group, k, v,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """The query, the key and the value of a token's head."""
    own = mixed + token * (2 * KEY_HEADS * KEYS + VALUE_HEADS * VALUES)
    if DELTA:  # queries, keys, values
        q_at, k_at, v_at = group * KEYS, (KEY_HEADS + group) * KEYS, 2 * KEY_HEADS * KEYS + head * VALUES
    else:  # values, keys, queries
        v_at, k_at = head * VALUES, VALUE_HEADS * VALUES + group * KEYS
        q_at = VALUE_HEADS * VALUES + (KEY_HEADS + group) * KEYS
    query = tl.load(own + q_at + k, mask=k < KEYS, other=0.0).to(tl.float32)
    key = tl.load(own + k_at + k, mask=k < KEYS, other=0.0).to(tl.float32)
    return query, key, tl.load(own + v_at + v, mask=v < VALUES, other=0.0).to(tl.float32)


@triton.jit
def _rates(step, beta, token, head, bias, least, most, VALUE_HEADS: tl.constexpr, DELTA: tl.constexpr):
    """A token's step size, and how much of its change is written."""
    size = tl.load(step + token * VALUE_HEADS + head).to(tl.float32) + bias
    size = tl.where(size > 20.0, size, tl.log(1.0 + tl.exp(tl.minimum(size, 20.0))))
    size = tl.minimum(tl.maximum(size, least), most)
    rate = size
    if DELTA:
        rate = 1.0 / (1.0 + tl.exp(-tl.load(beta + token * VALUE_HEADS + head).to(tl.float32)))
    return size, rate


def _starts(slots: StateSlots) -> Tensor:
    """Where rows begin, on the device."""
    if slots.cu_seqlens is not None:
        return slots.cu_seqlens
    return torch.tensor(slots.starts, device=slots.reads.device)
