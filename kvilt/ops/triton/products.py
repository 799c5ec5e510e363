"""Products of one vector with dense weights, at the speed of memory. Products of more rows are cuBLAS's.

Each program reads whole rows of a weight once; several maps of one input are one launch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import Activation
from .vectors import _ACTIVATIONS, activated

ROWS, COLUMNS = 2, 2048  # of a weight, in a program at a time


def gemv(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], residual: Tensor | None
) -> list[Tensor]:
    """`x` [1, in] times up to three weights [out, in], plus their biases; a `residual` [1, out] is for a single one."""
    sizes = [len(weight) for weight in weights]
    out = torch.empty((1, sum(sizes)), dtype=x.dtype, device=x.device)
    parts = list(out.split(sizes, dim=1))
    blocks = [triton.cdiv(size, ROWS) for size in sizes]
    w = [*weights, weights[0], weights[0]][:3]
    o = [*parts, parts[0], parts[0]][:3]
    n = [*sizes, 0, 0][:3]
    _gemv[(sum(blocks),)](
        x, *w, *o, x if residual is None else residual, *n, blocks[0], sum(blocks[:2]), x.shape[1],
        RESIDUAL=residual is not None, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4, num_stages=3,
    )  # fmt: skip
    return [part if bias is None else part + bias for part, bias in zip(parts, biases, strict=True)]


@triton.jit
def _dot_rows(x, weight, n, there, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The rows `n` of a weight times `x`, float32 [ROWS]."""
    c = tl.arange(0, COLUMNS)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, columns, COLUMNS):
        inside = start + c < columns
        w = tl.load(
            weight + n[:, None].to(tl.int64) * columns + (start + c)[None, :],
            mask=there[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first",
        )  # fmt: skip
        own = tl.load(x + start + c, mask=inside, other=0.0).to(tl.float32)
        sums += w.to(tl.float32) * own[None, :]
    return tl.sum(sums, 1)


@triton.jit
def _gemv(
    x, w0, w1, w2, out0, out1, out2, residual, n0, n1, n2, first1, first2, columns,
    RESIDUAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    weight, out, rows = w0, out0, n0
    if block >= first2:
        weight, out, rows = w2, out2, n2
        block -= first2
    elif block >= first1:
        weight, out, rows = w1, out1, n1
        block -= first1
    n = block * ROWS + tl.arange(0, ROWS)
    there = n < rows
    made = _dot_rows(x, weight, n, there, columns, ROWS, COLUMNS)
    if RESIDUAL:
        made += tl.load(residual + n, mask=there, other=0.0).to(tl.float32)
    tl.store(out + n, made, mask=there)


def gate_up(x: Tensor, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """activation(gate(x)) * up(x) of one vector [1, in]."""
    out = torch.empty((1, len(gate)), dtype=x.dtype, device=x.device)
    _gate_up[(triton.cdiv(len(gate), ROWS),)](
        x, gate, up, out, len(gate), x.shape[1],
        KIND=_ACTIVATIONS[activation], ROWS=ROWS, COLUMNS=COLUMNS // 2, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


@triton.jit
def _gate_up(
    x, gate, up, out, rows, columns, KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there, c = n < rows, tl.arange(0, COLUMNS)
    opened, passed = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, columns, COLUMNS):
        at = n[:, None].to(tl.int64) * columns + (start + c)[None, :]
        inside = there[:, None] & (start + c < columns)[None, :]
        g = tl.load(gate + at, mask=inside, other=0.0, eviction_policy="evict_first")
        u = tl.load(up + at, mask=inside, other=0.0, eviction_policy="evict_first")
        own = tl.load(x + start + c, mask=start + c < columns, other=0.0).to(tl.float32)[None, :]
        opened += g.to(tl.float32) * own
        passed += u.to(tl.float32) * own
    tl.store(out + n, activated(tl.sum(opened, 1), KIND) * tl.sum(passed, 1), mask=there)
