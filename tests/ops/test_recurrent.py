"""Recurrent state on every backend, against loops over single numbers in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kvilt.ops.contract import Decay, FoldHeads, Ops, StatePlace, StateShape, StateSlots, StateStore

HEADS = [FoldHeads(2, 4, 5, 3), FoldHeads(1, 2, 16, 32), FoldHeads(3, 3, 8, 17), FoldHeads(2, 6, 5, 3, tiled=True)]
ROWS = [(0, 1), (0, 7), (0, 3, 4, 9)]
Near = Callable[..., None]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def place(ops: Ops, heads: FoldHeads, starts: tuple[int, ...], width: int = 4, fresh: bool = False) -> StatePlace:
    """Rows that read slots 0, 1, ...; each leaves a state at its end, and the first one after its first token too."""
    rows, tokens = len(starts) - 1, starts[-1]
    shape = StateShape(2, (heads.channels, width - 1), (heads.value_heads, heads.key_dim, heads.value_dim))
    store = StateStore.empty(shape, 3 * rows + 2, ops.device)
    store.tails.copy_(random(*store.tails.shape, seed=1))
    store.memories.copy_(random(*store.memories.shape, seed=2))
    writes = torch.full((tokens,), -1)
    for row, stop in enumerate(starts[1:]):
        writes[stop - 1] = rows + row
    if starts[1] > 1:
        writes[0] = 2 * rows
    reads = torch.full((rows,), -1) if fresh else torch.arange(rows)
    return StatePlace(store, 1, StateSlots(reads.to(ops.device), writes.to(ops.device), starts))


def decay(heads: FoldHeads, least: float = 0.0, most: float = math.inf) -> Decay:
    return Decay(random(heads.value_heads, seed=3) * 0.5, random(heads.value_heads, seed=4), most, least)


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def true_conv(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, at: StatePlace) -> tuple[Tensor, Tensor]:
    """What comes out, and the tails of layer 1 afterwards."""
    width, out, tails = weight.shape[1], torch.zeros(x.shape, dtype=torch.float64), at.store.tails[1].double().clone()
    for row, (start, stop) in enumerate(pairwise(at.slots.starts)):
        for c in range(x.shape[1]):
            read = int(at.slots.reads[row])
            seen = [0.0] * (width - 1) if read < 0 else tails[read, c].tolist()
            for t in range(start, stop):
                seen.append(float(x[t, c]))
                y = sum(float(weight[c, k]) * seen[len(seen) - width + k] for k in range(width))
                y += 0.0 if bias is None else float(bias[c])
                out[t, c] = y * sigmoid(y) if silu else y
                if (slot := int(at.slots.writes[t])) >= 0:
                    tails[slot, c] = torch.tensor(seen[len(seen) - width + 1 :], dtype=torch.float64)
    return out, tails


def true_fold(
    q: Tensor, k: Tensor, v: Tensor, kept: Tensor, rate: Tensor, delta: bool, heads: FoldHeads, at: StatePlace
) -> tuple[Tensor, Tensor]:
    """What queries read, and the memories of layer 1 afterwards; all in float64."""
    memories, out = at.store.memories[1].double().clone(), torch.zeros(v.shape, dtype=torch.float64)
    for row, (start, stop) in enumerate(pairwise(at.slots.starts)):
        for h in range(heads.value_heads):
            g = h % heads.key_heads if heads.tiled else h // (heads.value_heads // heads.key_heads)
            read = int(at.slots.reads[row])
            memory = torch.zeros(heads.key_dim, heads.value_dim).double() if read < 0 else memories[read, h].clone()
            for t in range(start, stop):
                memory = memory * kept[t, h]
                change = v[t, h] - k[t, g] @ memory if delta else v[t, h]
                memory = memory + torch.outer(k[t, g], change * rate[t, h])
                out[t, h] = q[t, g] @ memory
                if (slot := int(at.slots.writes[t])) >= 0:
                    memories[slot, h] = memory
    return out, memories


@pytest.mark.parametrize("starts", ROWS)
@pytest.mark.parametrize(("silu", "bias"), [(True, False), (False, True)])
@pytest.mark.parametrize("fresh", [False, True])
def test_causal_conv(ops: Ops, near: Near, starts: tuple[int, ...], silu: bool, bias: bool, fresh: bool) -> None:
    at = place(ops, HEADS[0], starts, fresh=fresh)
    channels = HEADS[0].channels
    x, weight = random(starts[-1], channels), random(channels, 4, seed=5)
    added = random(channels, seed=6) if bias else None
    truth, tails = true_conv(x, weight, added, silu, at)
    near(ops.causal_conv(x, weight, added, silu, at), truth)
    near(at.store.tails[1], tails)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("starts", ROWS)
def test_gated_delta(ops: Ops, near: Near, heads: FoldHeads, starts: tuple[int, ...]) -> None:
    at, how, tokens = place(ops, heads, starts), decay(heads), starts[-1]
    mixed, step, beta = (
        random(tokens, heads.channels),
        random(tokens, heads.value_heads),
        random(tokens, heads.value_heads, seed=8),
    )
    keys = heads.key_heads * heads.key_dim
    q, k, v = (
        one.double().reshape(tokens, -1, dim)
        for one, dim in zip(
            torch.split(mixed, [keys, keys, heads.value_heads * heads.value_dim], dim=1),
            (heads.key_dim, heads.key_dim, heads.value_dim),
            strict=True,
        )
    )
    q, k = (one / (one.square().sum(-1, keepdim=True) + 1e-6).sqrt() for one in (q, k))
    sizes = (step.double() + how.bias.double()).apply_(softplus)
    kept = (-how.log_rate.double().exp() * sizes).exp()
    truth, memories = true_fold(
        q / math.sqrt(heads.key_dim), k, v, kept, beta.double().apply_(sigmoid), True, heads, at
    )
    near(ops.gated_delta(mixed, step, beta, how, heads, at), truth)
    near(at.store.memories[1], memories)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("starts", ROWS)
def test_mamba2(ops: Ops, near: Near, heads: FoldHeads, starts: tuple[int, ...]) -> None:
    at, how, tokens = place(ops, heads, starts), decay(heads, 0.3, 1.5), starts[-1]
    mixed, step, skip = (
        random(tokens, heads.channels),
        random(tokens, heads.value_heads),
        random(heads.value_heads, seed=9),
    )
    keys, values = heads.key_heads * heads.key_dim, heads.value_heads * heads.value_dim
    v, k, q = (one.double() for one in torch.split(mixed, [values, keys, keys], dim=1))
    v = v.reshape(tokens, heads.value_heads, heads.value_dim)
    q, k = (one.reshape(tokens, heads.key_heads, heads.key_dim) for one in (q, k))
    sizes = (step.double() + how.bias.double()).apply_(softplus).clamp(0.3, 1.5)
    kept = (-how.log_rate.double().exp() * sizes).exp()
    truth, memories = true_fold(q, k, v, kept, sizes, False, heads, at)
    near(ops.mamba2(mixed, step, skip, how, heads, at), truth + v * skip.double()[:, None])
    near(at.store.memories[1], memories)


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_gated_norm(ops: Ops, near: Near, tokens: int) -> None:
    x, gate, gain = random(tokens, 3, 20), random(tokens, 60, seed=1), random(20, seed=2)
    found = ops.gated_norm(x, (gain, 1e-5), gate)
    wide = x.double()
    normed = (wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * gain.double()).view(tokens, -1)
    near(found, normed * gate.double() * gate.double().sigmoid())


def test_sigmoid_mul(ops: Ops, near: Near) -> None:
    x, gate = random(5, 37), random(5, 37, seed=10)
    near(ops.sigmoid_mul(x, gate), x.double() * gate.double().sigmoid())


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("cut", [1, 2, 5])
@pytest.mark.parametrize("backend", ["native"], indirect=True)
def test_a_row_in_pieces_and_beside_others_has_the_same_bits(ops: Ops, heads: FoldHeads, cut: int) -> None:
    """Law 5, on the backend that promises it."""
    assert ops.deterministic
    tokens, how = 7, decay(heads)
    x, step, beta = (
        random(tokens, heads.channels),
        random(tokens, heads.value_heads),
        random(tokens, heads.value_heads, seed=8),
    )
    weight = random(heads.channels, 4, seed=5)

    def folded(at: StatePlace, rows: slice) -> Tensor:
        return ops.gated_delta(ops.causal_conv(x[rows], weight, None, True, at), step[rows], beta[rows], how, heads, at)

    whole = place(ops, heads, (0, tokens))
    expected = folded(whole, slice(0, tokens)).clone()
    pieces = place(ops, heads, (0, tokens))
    first = replace(pieces, slots=StateSlots(torch.tensor([0]), torch.tensor([-1] * (cut - 1) + [3]), (0, cut)))
    rest = replace(
        pieces,
        slots=StateSlots(torch.tensor([3]), torch.tensor([-1] * (tokens - cut - 1) + [1]), (0, tokens - cut)),
    )
    assert torch.equal(folded(first, slice(0, cut)), expected[:cut])
    assert torch.equal(folded(rest, slice(cut, tokens)), expected[cut:])
    assert torch.equal(pieces.store.memories[1, 1], whole.store.memories[1, 1])
    assert torch.equal(pieces.store.tails[1, 1], whole.store.tails[1, 1])
    assert torch.equal(pieces.store.memories[1, 0], whole.store.memories[1, 0]), "a state that was read is as it was"
