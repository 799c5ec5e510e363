"""Products with the weights of experts that are plain floats.

Few tokens: a program for each token's expert and a few outputs, which reads only that expert's rows. Many tokens: each
program takes some pairs of token and expert, of one expert, through a tile of outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import Activation, Routed, SharedExpert
from .expert_tiles import TileMap
from .overlap import await_inputs, launch_next, overlap
from .products import Tile
from .vectors import _ACTIVATIONS, gated


@dataclass(frozen=True, slots=True)
class GroupedTile:
    """How a grouped product is shared out: pairs and outputs of a program, and inputs at a time."""

    rows: int
    outputs: int
    inputs: int
    warps: int = 4
    stages: int = 3

    def options(self, inputs: int) -> dict[str, Any]:
        """As a launch takes it."""
        return {
            "ROWS": self.rows, "WIDE": self.outputs, "DEEP": self.inputs, "EVEN": inputs % self.inputs == 0,
            "num_warps": self.warps, "num_stages": self.stages,
        }  # fmt: skip


# Measured on an H200, with the experts of a 30B model: bench/gpu_experts.py.
ONE_GATE_UP, ONE_DOWN = Tile(8, 512), Tile(4, 1024, warps=8)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertTensors:
    """All experts of a block beside each other."""

    gate_up: Tensor  # [experts, 2, inner, hidden]
    down: Tensor  # [experts, hidden, inner]
    gate_up_bias: Tensor | None  # [experts, 2, inner]
    down_bias: Tensor | None  # [experts, hidden]

    @property
    def inner(self) -> int:
        return self.down.shape[2]


def or_else(tensor: Tensor | None, other: Tensor) -> Tensor:
    """What a kernel is given where it reads nothing."""
    return other if tensor is None else tensor.contiguous()


def one_gate_up(
    x: Tensor, chosen: Tensor, tensors: ExpertTensors, activation: Activation, readers: int, tile: Tile = ONE_GATE_UP
) -> Tensor:
    """What each pair's expert makes of its token [pairs, inner]; `readers` experts read one row of `x`."""
    pairs, inner, hidden = chosen.numel(), tensors.inner, x.shape[1]
    out = torch.empty((pairs, inner), dtype=x.dtype, device=x.device)
    _one_gate_up[(triton.cdiv(inner, tile.rows), pairs)](
        x, tensors.gate_up, or_else(tensors.gate_up_bias, x), out, chosen, inner, hidden, readers,
        KIND=_ACTIVATIONS[activation], BIAS=tensors.gate_up_bias is not None, **tile.options(hidden), **overlap(x),
    )  # fmt: skip
    return out


@triton.jit
def _one_gate_up(
    x, weight, bias, out, chosen, inner, hidden, readers,
    KIND: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair, n, c = tl.program_id(1), tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    there = n < inner
    opened, passed = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    await_inputs(PDL)
    launch_next(PDL)  # not before: the next kernel reads at once which experts were chosen
    first = 2 * tl.load(chosen + pair).to(tl.int64) * inner
    gate = weight + first * hidden + n[:, None].to(tl.int64) * hidden + c[None, :]
    up, x_at = gate + inner.to(tl.int64) * hidden, x + (pair // readers).to(tl.int64) * hidden + c
    inside = there[:, None] & (c < hidden)[None, :]
    g = tl.load(gate, mask=inside, other=0.0, eviction_policy="evict_first")
    u = tl.load(up, mask=inside, other=0.0, eviction_policy="evict_first")
    own = tl.load(x_at, mask=c < hidden, other=0.0)
    for start in range(COLUMNS, hidden + COLUMNS, COLUMNS):
        coming = start + c < hidden
        ahead = there[:, None] & coming[None, :]
        next_g = tl.load(gate + start, mask=ahead, other=0.0, eviction_policy="evict_first")
        next_u = tl.load(up + start, mask=ahead, other=0.0, eviction_policy="evict_first")
        next_own = tl.load(x_at + start, mask=coming, other=0.0)
        number = own.to(tl.float32)[None, :]
        opened += g.to(tl.float32) * number
        passed += u.to(tl.float32) * number
        g, u, own = next_g, next_u, next_own
    made, other = tl.sum(opened, 1), tl.sum(passed, 1)
    if BIAS:
        made += tl.load(bias + first + n, mask=there, other=0.0).to(tl.float32)
        other += tl.load(bias + first + inner + n, mask=there, other=0.0).to(tl.float32)
    tl.store(out + pair.to(tl.int64) * inner + n, gated(made, other, KIND), mask=there)


def one_down(
    x: Tensor,
    routed: Routed,
    tensors: ExpertTensors,
    residual: Tensor | None,
    shared: SharedExpert | None,
    tile: Tile = ONE_DOWN,
) -> Tensor:
    """The weighted sums of each token's experts, whose inner states are `x` [pairs, inner]: [tokens, hidden]."""
    (tokens, top_k), (_, hidden, inner) = routed.chosen.shape, tensors.down.shape
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    own, gate = (None, None) if shared is None else shared
    options = tile.options(inner)
    _one_down[(triton.cdiv(hidden, tile.rows), tokens)](
        x, tensors.down, or_else(tensors.down_bias, x), routed.chosen, routed.weights, or_else(residual, out),
        or_else(own, out), or_else(gate, out), out, hidden, inner, TOP_K=top_k,
        STEPS=triton.cdiv(inner, options["COLUMNS"]), BIAS=tensors.down_bias is not None,
        RESIDUAL=residual is not None, SHARED=own is not None, GATE=gate is not None, **options, **overlap(x),
    )  # fmt: skip
    return out


@triton.jit
def _one_down(
    x, weight, bias, chosen, weights, residual, shared, gate, out, hidden, inner,
    TOP_K: tl.constexpr, STEPS: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, SHARED: tl.constexpr,
    GATE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    token, n, c = tl.program_id(1).to(tl.int64), tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    there, each = n < hidden, hidden.to(tl.int64) * inner
    row = weight + n[:, None].to(tl.int64) * inner + c[None, :]
    chosen, weights, x = chosen + token * TOP_K, weights + token * TOP_K, x + token * TOP_K * inner
    # Gate and up let this kernel start when all before them has ended, so only what they make themselves is waited for.
    inside = there[:, None] & (c < inner)[None, :]
    w = tl.load(row + tl.load(chosen).to(tl.int64) * each, mask=inside, other=0.0, eviction_policy="evict_first")
    share = tl.load(weights)
    made = added(residual, shared, gate, token, n, there, hidden, RESIDUAL, SHARED, GATE)
    await_inputs(PDL)
    own = tl.load(x + c, mask=c < inner, other=0.0)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(1, TOP_K * STEPS + 1):  # tiles of columns, expert by expert; each is loaded one step ahead
        place, start = step // STEPS, step % STEPS * COLUMNS
        more = step < TOP_K * STEPS
        coming = (start + c < inner) & more
        expert = tl.load(chosen + place, mask=more, other=0).to(tl.int64)
        at, ahead = row + expert * each + start, there[:, None] & coming[None, :]
        next_w = tl.load(at, mask=ahead, other=0.0, eviction_policy="evict_first")
        next_own = tl.load(x + place * inner + start + c, mask=coming, other=0.0)
        next_share = tl.load(weights + place, mask=more, other=0.0)
        sums += w.to(tl.float32) * (own.to(tl.float32) * share)[None, :]
        w, own, share = next_w, next_own, next_share
    made += tl.sum(sums, 1)
    if BIAS:
        for place in tl.static_range(TOP_K):
            at = bias + tl.load(chosen + place).to(tl.int64) * hidden + n
            made += tl.load(at, mask=there, other=0.0).to(tl.float32) * tl.load(weights + place)
    tl.store(out + token * hidden + n, made, mask=there)


@triton.jit
def added(
    residual, shared, gate, token, n, there, hidden,
    RESIDUAL: tl.constexpr, SHARED: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """What a token's sum has beside its experts."""
    total = tl.zeros(n.shape, tl.float32)
    if RESIDUAL:
        total += tl.load(residual + token * hidden + n, mask=there, other=0.0).to(tl.float32)
    if SHARED:
        own = tl.load(shared + token * hidden + n, mask=there, other=0.0).to(tl.float32)
        if GATE:
            own = own * tl.sigmoid(tl.load(gate + token).to(tl.float32))
        total += own
    return total


def grouped_gate_up(
    x: Tensor,
    tiles: TileMap,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    activation: Activation,
    readers: int,
    tile: GroupedTile,
    first: int = 0,
) -> None:
    """As `one_gate_up`, for tiles of pairs; `weight` [some, 2, inner, hidden] are the experts from `first` on."""
    some, _, inner, hidden = weight.shape
    _grouped_gate_up[(len(tiles.experts), triton.cdiv(inner, tile.outputs))](
        x, weight, or_else(bias, x), out, *tiles.tensors, first, first + some, inner, hidden, readers,
        KIND=_ACTIVATIONS[activation], BIAS=bias is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", **tile.options(hidden), **overlap(x),
    )  # fmt: skip


def grouped_down(
    x: Tensor, tiles: TileMap, weight: Tensor, bias: Tensor | None, out: Tensor, tile: GroupedTile, first: int = 0
) -> None:
    """What each pair's expert makes of its inner states [pairs, hidden]; `weight` [some, hidden, inner]."""
    some, hidden, inner = weight.shape
    _grouped_down[(len(tiles.experts), triton.cdiv(hidden, tile.outputs))](
        x, weight, or_else(bias, x), out, *tiles.tensors, first, first + some, hidden, inner, BIAS=bias is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", **tile.options(inner), **overlap(x),
    )  # fmt: skip


@triton.jit
def tile_pairs(pairs, firsts, ends, ROWS: tl.constexpr):
    """The pairs of this program's tile, and which of them there are; others are the first pair of all."""
    at = tl.load(firsts + tl.program_id(0)) + tl.arange(0, ROWS)
    here = at < tl.load(ends + tl.program_id(0))
    return tl.load(pairs + at, mask=here, other=0).to(tl.int64), here


@triton.jit
def _product(total, rows, weight, start, columns, DEEP: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr):
    """`total` [rows, outputs] and the products of some columns; `rows` and `weight` point to the first of these."""
    if EVEN:
        a, w = tl.load(rows + start), tl.load(weight + start)
    else:
        near = (start + tl.arange(0, DEEP) < columns)[None, :]
        a, w = tl.load(rows + start, mask=near, other=0.0), tl.load(weight + start, mask=near, other=0.0)
    return tl.dot(a, tl.trans(w), total, input_precision=PRECISION)


@triton.jit(do_not_specialize=["least", "most"])
def _grouped_gate_up(
    x, weight, bias, out, pairs, experts, firsts, ends, least, most, inner, hidden, readers,
    KIND: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    await_inputs(PDL)
    expert = tl.load(experts + tl.program_id(0)).to(tl.int64)
    if (expert >= least) & (expert < most):
        pair, here = tile_pairs(pairs, firsts, ends, ROWS)
        n, c = tl.program_id(1) * WIDE + tl.arange(0, WIDE), tl.arange(0, DEEP)
        there, first = n < inner, 2 * expert * inner
        rows = x + (pair // readers * hidden)[:, None] + c[None, :]
        gate = weight + (first - 2 * least * inner + tl.minimum(n, inner - 1))[:, None] * hidden + c[None, :]
        up = gate + inner.to(tl.int64) * hidden
        g, u = tl.zeros([ROWS, WIDE], tl.float32), tl.zeros([ROWS, WIDE], tl.float32)
        for start in range(0, hidden, DEEP):
            g = _product(g, rows, gate, start, hidden, DEEP, EVEN, PRECISION)
            u = _product(u, rows, up, start, hidden, DEEP, EVEN, PRECISION)
        if BIAS:
            g += tl.load(bias + first + n, mask=there, other=0.0).to(tl.float32)[None, :]
            u += tl.load(bias + first + inner + n, mask=there, other=0.0).to(tl.float32)[None, :]
        tl.store(out + pair[:, None] * inner + n[None, :], gated(g, u, KIND), mask=here[:, None] & there[None, :])


@triton.jit(do_not_specialize=["least", "most"])
def _grouped_down(
    x, weight, bias, out, pairs, experts, firsts, ends, least, most, hidden, inner,
    BIAS: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    await_inputs(PDL)
    expert = tl.load(experts + tl.program_id(0)).to(tl.int64)
    if (expert >= least) & (expert < most):
        pair, here = tile_pairs(pairs, firsts, ends, ROWS)
        n, c = tl.program_id(1) * WIDE + tl.arange(0, WIDE), tl.arange(0, DEEP)
        there, first = n < hidden, expert * hidden
        rows = x + (pair * inner)[:, None] + c[None, :]
        at = weight + (first - least * hidden + tl.minimum(n, hidden - 1))[:, None] * inner + c[None, :]
        made = tl.zeros([ROWS, WIDE], tl.float32)
        for start in range(0, inner, DEEP):
            made = _product(made, rows, at, start, inner, DEEP, EVEN, PRECISION)
        if BIAS:
            made += tl.load(bias + first + n, mask=there, other=0.0).to(tl.float32)[None, :]
        tl.store(out + pair[:, None] * hidden + n[None, :], made, mask=here[:, None] & there[None, :])
