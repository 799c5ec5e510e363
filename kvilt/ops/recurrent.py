"""Operations on recurrent state in plain torch: causal convolutions, the gated delta rule, Mamba-2.

Tokens of a row are folded one after the other, so a row's result does not depend on how its prompt was cut. States are
float32, and are read from one slot and written to others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor

from .fold_values import Decay, FoldHeads, StatePlace
from .states import StateSlots

L2_EPS = 1e-6
_LANES = 64  # numbers that torch takes at once, or more


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, place: StatePlace) -> Tensor:
    """A convolution of each channel over its row's last tokens: `x` [tokens, channels], `weight` [channels, width].

    The last width - 1 inputs before a row's tokens come from its state's tail, oldest first.
    """
    tails, width = place.store.tails[place.layer], weight.shape[1]
    weight, out = weight.float(), torch.empty(x.shape, dtype=torch.float32, device=x.device)
    for span, read, writes in _rows(place.slots):
        before = tails.new_zeros(tails.shape[1:]) if read < 0 else tails[read]
        inputs = torch.cat((before.T, x[span].float()))  # [width - 1 + tokens, channels]
        made = inputs[: span.stop - span.start] * weight[:, 0]
        for k in range(1, width):
            made = made + inputs[k : k + span.stop - span.start] * weight[:, k]
        out[span] = made if bias is None else made + bias.float()
        for token, slot in writes:
            tails[slot] = inputs[token + 1 : token + width].T
    return (steady(F.silu, out) if silu else out).to(x.dtype)


def gated_delta(mixed: Tensor, step: Tensor, beta: Tensor, decay: Decay, heads: FoldHeads, place: StatePlace) -> Tensor:
    """The gated delta rule: `mixed` [tokens, channels] are queries, keys and values; [tokens, value_heads, value_dim].

    A token forgets a part of the memory, takes back what the memory has under its key, and writes its value there.
    `step` and `beta` [tokens, value_heads] are as the layer's projections made them.
    """
    q, k, v = _heads(mixed, heads)
    q, k = _normalized(q) * heads.key_dim**-0.5, _normalized(k)
    kept = steady(torch.exp, -decay.log_rate.exp() * steady(F.softplus, step.float() + decay.bias))
    return _fold(q, k, v, kept, steady(torch.sigmoid, beta.float()), True, heads, place).to(mixed.dtype)


def mamba2(mixed: Tensor, step: Tensor, skip: Tensor, decay: Decay, heads: FoldHeads, place: StatePlace) -> Tensor:
    """Mamba-2: `mixed` [tokens, channels] are values, keys (B) and queries (C); [tokens, value_heads, value_dim].

    A token forgets a part of the memory and adds its value under its key, both by its step size. `skip` [value_heads]
    of the value is added to what is read.
    """
    values = heads.value_heads * heads.value_dim
    v, k, q = torch.split(mixed.float(), [values, *[heads.key_heads * heads.key_dim] * 2], dim=-1)
    q, k = (one.reshape(-1, heads.key_heads, heads.key_dim) for one in (q, k))
    v = v.reshape(-1, heads.value_heads, heads.value_dim)
    size = steady(F.softplus, step.float() + decay.bias).clamp(decay.least, decay.most)
    kept = steady(torch.exp, -decay.log_rate.exp() * size)
    out = _fold(q, k, v, kept, size, False, heads, place)
    return (out + v * skip[:, None]).to(mixed.dtype)


def steady(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A function of each number, to the same bits wherever the number stands.

    Torch computes the last few numbers of a tensor one by one, and those round differently from whole vectors.
    """
    flat = x.reshape(-1)
    padded = F.pad(flat, (0, -len(flat) % _LANES))
    return function(padded)[: len(flat)].view(x.shape)


def _fold(
    q: Tensor, k: Tensor, v: Tensor, kept: Tensor, rate: Tensor, delta: bool, heads: FoldHeads, place: StatePlace
) -> Tensor:
    """Fold tokens into memories [value_heads, key_dim, value_dim] one by one; what each query then reads."""
    memories, share = place.store.memories[place.layer], heads.value_heads // heads.key_heads
    if heads.tiled:
        q, k = (one.repeat(1, share, 1) for one in (q, k))
    else:
        q, k = (one.repeat_interleave(share, dim=1) for one in (q, k))
    out = torch.empty_like(v)
    for span, read, writes in _rows(place.slots):
        memory = memories.new_zeros(memories.shape[1:]) if read < 0 else memories[read]
        kept_at = dict(writes)
        for token in range(span.stop - span.start):
            at = span.start + token
            memory = memory * kept[at, :, None, None]
            value = v[at]
            if delta:
                value = value - (memory * k[at, :, :, None]).sum(1)
            memory = memory + k[at, :, :, None] * (value * rate[at, :, None])[:, None]
            out[at] = (memory * q[at, :, :, None]).sum(1)
            if token in kept_at:
                memories[kept_at[token]] = memory
    return out


def _heads(mixed: Tensor, heads: FoldHeads) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [tokens, heads, dim] of a token's channels."""
    keys, tokens = heads.key_heads * heads.key_dim, len(mixed)
    q, k, v = torch.split(mixed.float(), [keys, keys, heads.value_heads * heads.value_dim], dim=-1)
    return (
        q.reshape(tokens, heads.key_heads, heads.key_dim),
        k.reshape(tokens, heads.key_heads, heads.key_dim),
        v.reshape(tokens, heads.value_heads, heads.value_dim),
    )


def _normalized(x: Tensor) -> Tensor:
    """Of length 1 along the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def _rows(slots: StateSlots) -> Iterator[tuple[slice, int, list[tuple[int, int]]]]:
    """For each row its tokens, the slot it reads, and (token, slot) for what it writes."""
    reads, writes = slots.reads.tolist(), slots.writes.tolist()
    for row, (start, stop) in enumerate(zip(slots.starts, slots.starts[1:], strict=False)):
        yield slice(start, stop), reads[row], [(i, slot) for i, slot in enumerate(writes[start:stop]) if slot >= 0]
