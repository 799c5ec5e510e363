"""Experts whose weights are plain floats: products of the chosen ones alone, found on the device.

Few tokens: a program for each token's expert and a few outputs, which reads only that expert's rows. Many tokens: pairs
of token and expert are sorted by expert, and each program takes some pairs of one expert through a tile of outputs. The
host reads nothing of either, so both can be captured. A token's experts are added in ascending order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import Activation, ExpertMaps, Routed, SharedExpert
from ..routing import weighed
from .vectors import _ACTIVATIONS, gated

FEW = 4  # tokens whose experts are read once for each of them
OUTPUTS, COLUMNS = 8, 512  # of a program that multiplies one row
ROWS, WIDE, DEEP = 32, 64, 64  # pairs, outputs and inputs of a tile


@dataclass(frozen=True, slots=True, eq=False)
class ExpertTensors:
    """All experts of a block beside each other."""

    gate_up: Tensor  # [experts, 2, inner, hidden]
    down: Tensor  # [experts, hidden, inner]
    gate_up_bias: Tensor | None  # [experts, 2, inner]
    down_bias: Tensor | None  # [experts, hidden]


@dataclass(frozen=True, slots=True)
class TileMap:
    """Pairs of token and expert, sorted by expert, and the tiles that they make."""

    pairs: Tensor  # [pairs] int32: token * top_k + place, in the order of their experts
    experts: Tensor  # [tiles] int32: the expert of each tile, as many as there are experts: none
    firsts: Tensor  # [tiles] int32: where the tile begins in `pairs`
    ends: Tensor  # [tiles] int32: where its expert's pairs end


def gather(experts: Sequence[ExpertMaps], dtype: torch.dtype) -> ExpertTensors | None:
    """The maps as few large tensors, into which they move; None where some are packed."""
    weights = [[weight for weight, _ in maps] for maps in experts]
    plain = [[weight for weight in maps if isinstance(weight, Tensor) and weight.dtype == dtype] for maps in weights]
    if any(len(maps) < 3 for maps in plain):
        return None
    inner, hidden = plain[0][0].shape
    gate_up = _moved([weight for maps in plain for weight in maps[:2]]).view(len(experts), 2, inner, hidden)
    down = _moved([maps[2] for maps in plain]).view(len(experts), hidden, inner)
    biases = [[bias for _, bias in maps if bias is not None] for maps in experts]
    if not all(len(of_maps) == 3 for of_maps in biases):
        return ExpertTensors(gate_up, down, None, None)
    both = torch.stack([torch.stack(of_maps[:2]) for of_maps in biases])
    return ExpertTensors(gate_up, down, both, torch.stack([of_maps[2] for of_maps in biases]))


def _moved(weights: Sequence[Tensor]) -> Tensor:
    """Weights one after the other; the tensors look at their new places, so that they are in memory once."""
    whole, start = torch.cat([weight.reshape(-1) for weight in weights]), 0
    for weight in weights:
        weight.set_(whole[start : start + weight.numel()].view(weight.shape))  # type: ignore[call-overload]
        start += weight.numel()
    return whole


def tile_map(chosen: Tensor, experts: int) -> TileMap:
    """Tiles of up to `ROWS` pairs of one expert each, in operations of the device alone."""
    flat, device = chosen.flatten().long(), chosen.device
    pairs = flat.sort(stable=True).indices
    counts = torch.zeros(experts, dtype=torch.int64, device=device).scatter_add_(0, flat, torch.ones_like(flat))
    ends, tiles = counts.cumsum(0), (counts + ROWS - 1) // ROWS
    tile_ends = tiles.cumsum(0)
    most = triton.cdiv(len(flat), ROWS) + min(experts, len(flat))
    number = torch.arange(most, device=device)
    expert = torch.searchsorted(tile_ends, number, right=True)
    own = expert.clamp(max=experts - 1)
    first = (ends - counts)[own] + (number - (tile_ends - tiles)[own]) * ROWS
    return TileMap(pairs.int(), expert.int(), first.int(), ends[own].int())


def experts(
    x: Tensor,
    routed: Routed,
    tensors: ExpertTensors,
    activation: Activation,
    residual: Tensor | None,
    shared: SharedExpert | None,
    weigh_inputs: bool = False,
) -> Tensor:
    """The weighted sums over each token's experts."""
    (tokens, hidden), top_k, inner = x.shape, routed.chosen.shape[1], tensors.down.shape[2]
    pairs, readers = tokens * top_k, top_k  # experts that read one row of x
    if weigh_inputs:
        x = weighed(x.repeat_interleave(top_k, dim=0), routed.weights.flatten())
        routed, readers = routed.unweighted(), 1
    x = x.contiguous()
    opened = torch.empty((pairs, inner), dtype=x.dtype, device=x.device)
    made = torch.empty((pairs, hidden), dtype=torch.float32, device=x.device)
    kind = {"KIND": _ACTIVATIONS[activation], "BIAS": tensors.gate_up_bias is not None}
    at = (x, tensors.gate_up, _or(tensors.gate_up_bias, x), opened)
    on = (opened, tensors.down, _or(tensors.down_bias, x), made)
    if tokens <= FEW:
        _one_gate_up[(pairs, triton.cdiv(inner, OUTPUTS))](
            *at, routed.chosen, inner, hidden, readers, OUTPUTS=OUTPUTS, COLUMNS=COLUMNS, **kind
        )
        _one_down[(pairs, triton.cdiv(hidden, OUTPUTS))](
            *on, routed.chosen, hidden, inner, BIAS=kind["BIAS"], OUTPUTS=OUTPUTS, COLUMNS=COLUMNS
        )
    else:
        tiles = tile_map(routed.chosen, len(tensors.down))
        where = (tiles.pairs, tiles.experts, tiles.firsts, tiles.ends)
        size: dict[str, Any] = {"EXPERTS": len(tensors.down), "ROWS": ROWS, "WIDE": WIDE, "DEEP": DEEP}
        size["PRECISION"] = "ieee" if x.dtype == torch.float32 else "tf32"
        _grouped_gate_up[(len(tiles.experts), triton.cdiv(inner, WIDE))](
            *at, *where, inner, hidden, readers, **kind, **size
        )
        _grouped_down[(len(tiles.experts), triton.cdiv(hidden, WIDE))](
            *on, *where, hidden, inner, BIAS=kind["BIAS"], **size
        )
    return sum_experts(made.view(tokens, top_k, hidden), routed, residual, shared, x.dtype)


def sum_experts(
    made: Tensor, routed: Routed, residual: Tensor | None, shared: SharedExpert | None, dtype: torch.dtype
) -> Tensor:
    """The sums of results [tokens, top_k, hidden] that are there already."""
    tokens, top_k, hidden = made.shape
    out = torch.empty((tokens, hidden), dtype=dtype, device=made.device)
    own, gate = (None, None) if shared is None else shared
    block = 256
    _sum[(tokens, triton.cdiv(hidden, block))](
        made.contiguous(), routed.weights, _or(residual, out), _or(own, out), _or(gate, out), out, hidden,
        TOP_K=top_k, RESIDUAL=residual is not None, SHARED=own is not None, GATE=gate is not None, BLOCK=block,
    )  # fmt: skip
    return out


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """What a kernel is given where it reads nothing."""
    return other if tensor is None else tensor.contiguous()


@triton.jit
def _one_gate_up(
    x, weight, bias, out, chosen, inner, hidden, top_k,
    KIND: tl.constexpr, BIAS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    n, c = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, COLUMNS)
    there, expert = n < inner, tl.load(chosen + pair).to(tl.int64)
    first = 2 * expert * inner
    gate = weight + (first + n)[:, None] * hidden + c[None, :]
    opened, passed = tl.zeros([OUTPUTS, COLUMNS], tl.float32), tl.zeros([OUTPUTS, COLUMNS], tl.float32)
    for start in range(0, hidden, COLUMNS):
        near = start + c < hidden
        inside = there[:, None] & near[None, :]
        own = tl.load(x + pair // top_k * hidden + start + c, mask=near, other=0.0).to(tl.float32)[None, :]
        opened += tl.load(gate + start, mask=inside, other=0.0).to(tl.float32) * own
        passed += tl.load(gate + inner * hidden + start, mask=inside, other=0.0).to(tl.float32) * own
    g, u = tl.sum(opened, 1), tl.sum(passed, 1)
    if BIAS:
        g += tl.load(bias + first + n, mask=there, other=0.0).to(tl.float32)
        u += tl.load(bias + first + inner + n, mask=there, other=0.0).to(tl.float32)
    tl.store(out + pair * inner + n, gated(g, u, KIND), mask=there)


@triton.jit
def _one_down(
    x, weight, bias, out, chosen, hidden, inner,
    BIAS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    n, c = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, COLUMNS)
    there, first = n < hidden, tl.load(chosen + pair).to(tl.int64) * hidden
    at = weight + (first + n)[:, None] * inner + c[None, :]
    sums = tl.zeros([OUTPUTS, COLUMNS], tl.float32)
    for start in range(0, inner, COLUMNS):
        near = start + c < inner
        own = tl.load(x + pair * inner + start + c, mask=near, other=0.0).to(tl.float32)[None, :]
        sums += tl.load(at + start, mask=there[:, None] & near[None, :], other=0.0).to(tl.float32) * own
    made = tl.sum(sums, 1)
    if BIAS:
        made += tl.load(bias + first + n, mask=there, other=0.0).to(tl.float32)
    tl.store(out + pair * hidden + n, made, mask=there)


@triton.jit
def _tile_rows(pairs, firsts, ends, ROWS: tl.constexpr):
    """The pairs of this program's tile, and which of them there are."""
    at = tl.load(firsts + tl.program_id(0)) + tl.arange(0, ROWS)
    here = at < tl.load(ends + tl.program_id(0))
    return tl.load(pairs + at, mask=here, other=0).to(tl.int64), here


@triton.jit
def _product(total, rows, weight, here, there, start, columns, DEEP: tl.constexpr, PRECISION: tl.constexpr):
    """`total` [rows, outputs] and the products of some columns; `rows` and `weight` point to the first of these."""
    near = start + tl.arange(0, DEEP) < columns
    a = tl.load(rows + start, mask=here[:, None] & near[None, :], other=0.0)
    w = tl.load(weight + start, mask=there[:, None] & near[None, :], other=0.0)
    return tl.dot(a, tl.trans(w), total, input_precision=PRECISION)


@triton.jit
def _grouped_gate_up(
    x, weight, bias, out, pairs, experts, firsts, ends, inner, hidden, top_k,
    KIND: tl.constexpr, BIAS: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
    DEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    expert = tl.load(experts + tl.program_id(0)).to(tl.int64)
    if expert < EXPERTS:
        pair, here = _tile_rows(pairs, firsts, ends, ROWS)
        n, c = tl.program_id(1) * WIDE + tl.arange(0, WIDE), tl.arange(0, DEEP)
        there, first = n < inner, 2 * expert * inner
        rows = x + (pair // top_k * hidden)[:, None] + c[None, :]
        gate = weight + (first + n)[:, None] * hidden + c[None, :]
        g, u = tl.zeros([ROWS, WIDE], tl.float32), tl.zeros([ROWS, WIDE], tl.float32)
        for start in range(0, hidden, DEEP):
            g = _product(g, rows, gate, here, there, start, hidden, DEEP, PRECISION)
            u = _product(u, rows, gate + inner * hidden, here, there, start, hidden, DEEP, PRECISION)
        if BIAS:
            g += tl.load(bias + first + n, mask=there, other=0.0).to(tl.float32)[None, :]
            u += tl.load(bias + first + inner + n, mask=there, other=0.0).to(tl.float32)[None, :]
        made = gated(g, u, KIND)
        tl.store(out + pair[:, None] * inner + n[None, :], made, mask=here[:, None] & there[None, :])


@triton.jit
def _grouped_down(
    x, weight, bias, out, pairs, experts, firsts, ends, hidden, inner,
    BIAS: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    expert = tl.load(experts + tl.program_id(0)).to(tl.int64)
    if expert < EXPERTS:
        pair, here = _tile_rows(pairs, firsts, ends, ROWS)
        n, c = tl.program_id(1) * WIDE + tl.arange(0, WIDE), tl.arange(0, DEEP)
        there, first = n < hidden, expert * hidden
        rows = x + (pair * inner)[:, None] + c[None, :]
        at = weight + (first + n)[:, None] * inner + c[None, :]
        made = tl.zeros([ROWS, WIDE], tl.float32)
        for start in range(0, inner, DEEP):
            made = _product(made, rows, at, here, there, start, inner, DEEP, PRECISION)
        if BIAS:
            made += tl.load(bias + first + n, mask=there, other=0.0).to(tl.float32)[None, :]
        tl.store(out + pair[:, None] * hidden + n[None, :], made, mask=here[:, None] & there[None, :])


@triton.jit
def _sum(
    made, weights, residual, shared, gate, out, hidden,
    TOP_K: tl.constexpr, RESIDUAL: tl.constexpr, SHARED: tl.constexpr, GATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < hidden
    total = tl.zeros([BLOCK], tl.float32)
    if RESIDUAL:
        total += tl.load(residual + token * hidden + i, mask=inside, other=0.0).to(tl.float32)
    for place in range(TOP_K):
        own = tl.load(made + (token * TOP_K + place) * hidden + i, mask=inside, other=0.0).to(tl.float32)
        total += own * tl.load(weights + token * TOP_K + place)
    if SHARED:
        own = tl.load(shared + token * hidden + i, mask=inside, other=0.0).to(tl.float32)
        if GATE:
            own = own * tl.sigmoid(tl.load(gate + token).to(tl.float32))
        total += own
    tl.store(out + token * hidden + i, total, mask=inside)
