"""Products of one vector with dense weights, at the speed of memory. Products of more rows are cuBLAS's.

Each program reads whole rows of a weight once. A norm before a map costs
nothing: its scale is one number, found while the input is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import Activation, RmsNorm
from .overlap import await_inputs, launch_next, overlap
from .vectors import _ACTIVATIONS, gated


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is shared out: rows of a weight for a program, columns at a time."""

    rows: int
    columns: int
    warps: int = 4
    stages: int = 3

    def options(self, width: int) -> dict[str, Any]:
        """As a launch takes it, for an input of this width."""
        columns = min(self.columns, triton.next_power_of_2(width))
        return {"ROWS": self.rows, "COLUMNS": columns, "num_warps": self.warps, "num_stages": self.stages}


# Measured on an H200, with weights of an 8B model: bench/gpu.py.
PLAIN, NORMED_OR_WIDE, GATED = Tile(4, 1024, warps=8), Tile(8, 512), Tile(4, 512)
NARROW = Tile(1, 4096)  # of a router: a program for each output
FEW_OUTPUTS, MANY_OUTPUTS = 1 << 9, 1 << 15


def gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm: RmsNorm | None = None,
    normed: Tensor | None = None,
) -> Tensor:
    """`x` [1, in], normalized where there is a norm, times `weight` [out, in], plus `bias` [out] and `residual`.

    The normalized input goes into `normed` if that is given.
    """
    outputs, columns = weight.shape
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    tile = PLAIN if norm is None and outputs < MANY_OUTPUTS else NORMED_OR_WIDE if outputs > FEW_OUTPUTS else NARROW
    programs = triton.cdiv(outputs, tile.rows)
    _gemv[(programs,)](
        x, weight, x if bias is None else bias, x if residual is None else residual, out, *_norm_of(x, norm),
        x if normed is None else normed, outputs, columns, BIAS=bias is not None, RESIDUAL=residual is not None,
        NORM=norm is not None, KEPT=0 if normed is None else triton.next_power_of_2(triton.cdiv(columns, programs)),
        **tile.options(columns), **overlap(x),
    )  # fmt: skip
    return out


def _norm_of(x: Tensor, norm: RmsNorm | None) -> tuple[Tensor, float]:
    return (x, 0.0) if norm is None else norm


@triton.jit
def _load_gain(norm, c, columns, NORM: tl.constexpr):
    """Some of a norm's weights, ahead of their use; they are made by no kernel."""
    return tl.load(norm + c, mask=(c < columns) & NORM, other=0.0)


@triton.jit
def _gemv(
    x, weight, bias, residual, out, norm, eps, normed, outputs, columns,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, NORM: tl.constexpr, KEPT: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    n, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    there = n < outputs
    sums, squares = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([COLUMNS], tl.float32)
    at = weight + n[:, None].to(tl.int64) * columns + c[None, :]
    w = tl.load(at, mask=there[:, None] & (c < columns)[None, :], other=0.0, eviction_policy="evict_first")
    gain = _load_gain(norm, c, columns, NORM)
    await_inputs(PDL)
    own = tl.load(x + c, mask=c < columns, other=0.0)
    for start in range(0, columns, COLUMNS):
        after = start + COLUMNS + c
        coming = after < columns
        ahead = there[:, None] & coming[None, :]
        next_w = tl.load(at + start + COLUMNS, mask=ahead, other=0.0, eviction_policy="evict_first")
        next_own, next_gain = tl.load(x + after, mask=coming, other=0.0), _load_gain(norm, after, columns, NORM)
        number = own.to(tl.float32)
        if NORM:
            squares += number * number
            number = number * gain
        sums += w.to(tl.float32) * number[None, :]
        w, own, gain = next_w, next_own, next_gain
    made = tl.sum(sums, 1)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / columns + eps)
        made = made * scale
        if KEPT > 0:  # each program keeps its share of the normalized input
            i = tl.program_id(0) * KEPT + tl.arange(0, KEPT)
            own = tl.load(x + i, mask=i < columns, other=0.0).to(tl.float32)
            tl.store(normed + i, own * scale * _load_gain(norm, i, columns, NORM), mask=i < columns)
    if BIAS:
        made += tl.load(bias + n, mask=there, other=0.0).to(tl.float32)
    if RESIDUAL:
        made += tl.load(residual + n, mask=there, other=0.0).to(tl.float32)
    tl.store(out + n, made, mask=there)


def gate_up(x: Tensor, gate: Tensor, up: Tensor, activation: Activation, norm: RmsNorm | None = None) -> Tensor:
    """activation(gate(x)) * up(x) of one vector [1, in]."""
    out = torch.empty((1, len(gate)), dtype=x.dtype, device=x.device)
    _gate_up[(triton.cdiv(len(gate), GATED.rows),)](
        x, gate, up, out, *_norm_of(x, norm), len(gate), x.shape[1],
        KIND=_ACTIVATIONS[activation], NORM=norm is not None, **GATED.options(x.shape[1]), **overlap(x),
    )  # fmt: skip
    return out


@triton.jit
def _gate_up(
    x, gate, up, out, norm, eps, rows, columns,
    KIND: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    n, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    there = n < rows
    opened, passed = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    squares = tl.zeros([COLUMNS], tl.float32)
    at = n[:, None].to(tl.int64) * columns + c[None, :]
    inside = there[:, None] & (c < columns)[None, :]
    g = tl.load(gate + at, mask=inside, other=0.0, eviction_policy="evict_first")
    u = tl.load(up + at, mask=inside, other=0.0, eviction_policy="evict_first")
    gain = _load_gain(norm, c, columns, NORM)
    await_inputs(PDL)
    own = tl.load(x + c, mask=c < columns, other=0.0)
    for start in range(0, columns, COLUMNS):
        after = start + COLUMNS + c
        coming = after < columns
        ahead = there[:, None] & coming[None, :]
        next_g = tl.load(gate + at + start + COLUMNS, mask=ahead, other=0.0, eviction_policy="evict_first")
        next_u = tl.load(up + at + start + COLUMNS, mask=ahead, other=0.0, eviction_policy="evict_first")
        next_own, next_gain = tl.load(x + after, mask=coming, other=0.0), _load_gain(norm, after, columns, NORM)
        number = own.to(tl.float32)
        if NORM:
            squares += number * number
            number = number * gain
        opened += g.to(tl.float32) * number[None, :]
        passed += u.to(tl.float32) * number[None, :]
        g, u, own, gain = next_g, next_u, next_own, next_gain
    g, u = tl.sum(opened, 1), tl.sum(passed, 1)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / columns + eps)
        g, u = g * scale, u * scale
    tl.store(out + n, gated(g, u, KIND), mask=there)
