"""Products with the weights of experts that are packed codes; the kernels of dense weights, with rows of one expert.

Few tokens: a program for each token's expert. More: tiles of pairs of one expert, up to so many pairs that it pays to
expand the weights of some experts after the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import Routed, SharedExpert
from .expert_products import added, or_else, tile_pairs
from .expert_tiles import TileMap
from .grouped_products import chunk_constants, planes_of, row_products, tile_products
from .overlap import await_inputs, fetch_ahead, launch_next, overlap
from .packed import SPAN, GroupedLayout, PackedTile
from .quantized import expanded
from .vectors import gated

LINE, LINES = tl.constexpr(64), tl.constexpr(4)  # words in a line of the cache; lines of a row that are fetched ahead
SLAB = 1 << 28  # elements of weights that are expanded at a time
# Of one row, and of several: gate and up, then down. Measured on an H200, with gpt-oss-20b's: bench/gpu_experts.py.
ONE_TILES = (PackedTile(16, 4, stages=2), PackedTile(16, 4, stages=2))
SEVERAL_TILES = (PackedTile(64, 1, stages=4, warps=4), PackedTile(64, 1, stages=3, warps=4))


@dataclass(frozen=True, slots=True, eq=False)
class PackedMaps:
    """One map of all experts, or gate and up of each, one after the other."""

    data: Tensor  # [experts * maps * outputs, row_bytes]
    layout: GroupedLayout
    experts: int
    outputs: int
    bias: Tensor | None  # [experts, maps * outputs]

    @property
    def rows(self) -> int:
        """Rows of an expert."""
        return len(self.data) // self.experts

    def slabs(self, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        """Weights of some experts after the others: the first of them, and [experts, rows, inputs]."""
        step = max(1, SLAB // (self.rows * self.layout.columns))
        for first in range(0, self.experts, step):
            part = self.data[first * self.rows : (first + step) * self.rows]
            yield first, expanded(part, self.layout, dtype).view(-1, self.rows, self.layout.columns)


def one_gate_up(x: Tensor, chosen: Tensor, maps: PackedMaps, readers: int, tile: PackedTile, kind: int) -> Tensor:
    """What each pair's expert makes of its row [pairs, inner]; `readers` pairs read one row of `x`.

    `kind` is that of the activation.
    """
    pairs, layout, outputs = chosen.numel(), maps.layout, maps.outputs
    out = torch.empty((pairs, outputs), dtype=x.dtype, device=x.device)
    span = 8 * layout.group
    _one_gate_up[(triton.cdiv(outputs, tile.outputs), pairs)](
        x, *planes_of(maps.data, layout), or_else(maps.bias, x), out, chosen, outputs, maps.rows, layout.columns,
        layout.padded, readers, BIAS=maps.bias is not None, ROWS=8, **_constants(x, layout, kind),
        **tile.options(layout.padded, span, span), **overlap(x),
    )  # fmt: skip
    return out


def one_down(
    x: Tensor,
    routed: Routed,
    maps: PackedMaps,
    residual: Tensor | None,
    shared: SharedExpert | None,
    tile: PackedTile,
    counters: Tensor,
) -> Tensor:
    """The weighted sums of each token's experts, whose inner states are `x` [pairs, inner]: [tokens, hidden].

    A program for each pair and tile of outputs; the last one of a token's tile adds. `counters` are zero before and
    after.
    """
    (tokens, top_k), layout, outputs = routed.chosen.shape, maps.layout, maps.outputs
    out = torch.empty((tokens, outputs), dtype=x.dtype, device=x.device)
    parts = torch.empty((tokens * top_k, outputs), dtype=torch.float32, device=x.device)
    (own, gate), span = (None, None) if shared is None else shared, 8 * layout.group
    _one_down[(triton.cdiv(outputs, tile.outputs), tokens * top_k)](
        x, *planes_of(maps.data, layout), or_else(maps.bias, x), routed.chosen, routed.weights, or_else(residual, out),
        or_else(own, out), or_else(gate, out), parts, counters, out, outputs, maps.rows, layout.columns, layout.padded,
        TOP_K=top_k, BIAS=maps.bias is not None, RESIDUAL=residual is not None, SHARED=own is not None,
        GATE=gate is not None, ROWS=8, **_constants(x, layout, -1), **tile.options(layout.padded, span, span),
        **overlap(x),
    )  # fmt: skip
    return out


def several(
    x: Tensor, tiles: TileMap, maps: PackedMaps, readers: int, tile: PackedTile, rows: int, kind: int
) -> Tensor:
    """The same for tiles of `rows` pairs."""
    layout, outputs = maps.layout, maps.outputs
    out = torch.empty((len(tiles.pairs), outputs), dtype=x.dtype, device=x.device)
    _several[(len(tiles.experts), triton.cdiv(outputs, tile.outputs))](
        x, *planes_of(maps.data, layout), or_else(maps.bias, x), out, *tiles.tensors, outputs, maps.rows,
        layout.columns, layout.padded, readers, EXPERTS=maps.experts, BIAS=maps.bias is not None, ROWS=rows,
        **_constants(x, layout, kind), **tile.options(layout.padded, SPAN, layout.chunk), **overlap(x),
    )  # fmt: skip
    return out


def _constants(x: Tensor, layout: GroupedLayout, kind: int) -> dict[str, Any]:
    assembly = x.dtype == torch.bfloat16 and x.is_cuda
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    cut = {"CUT": layout.columns != layout.padded, "KIND": kind, "ASSEMBLY": assembly, "PRECISION": precision}
    return cut | chunk_constants(layout, assembly)


@triton.jit
def _one_gate_up(
    x, words, scales, stride_words, stride_scales, first_scale, bias, out, chosen, outputs, height, columns, padded,
    readers,
    CUT: tl.constexpr, BITS: tl.constexpr, FLOATS: tl.constexpr, GROUP: tl.constexpr, SLOTS: tl.constexpr,
    WORDS: tl.constexpr, SCALE_WORDS: tl.constexpr, BASE: tl.constexpr, MINIMUMS: tl.constexpr, BIAS: tl.constexpr,
    KIND: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr,
    ASSEMBLY: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair, n = tl.program_id(1).to(tl.int64), tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    await_inputs(PDL)
    launch_next(PDL)  # not before: the next kernel reads at once which experts were chosen
    first = tl.load(chosen + pair).to(tl.int64) * height
    made, other = row_products(
        x + pair // readers * columns, words + first * stride_words, scales + first_scale + first * stride_scales,
        stride_words, stride_scales, n, outputs, columns, padded,
        CUT, BITS, FLOATS, GROUP, SLOTS, WORDS, SCALE_WORDS, BASE, MINIMUMS, KIND, OUTPUTS, ROWS, CHUNKS, STAGES,
        ASSEMBLY, PRECISION,
    )  # fmt: skip
    if BIAS:
        made += tl.load(bias + first + n, mask=n < outputs, other=0.0).to(tl.float32)
        other += tl.load(bias + first + outputs + n, mask=n < outputs, other=0.0).to(tl.float32)
    tl.store(out + pair * outputs + n, gated(made, other, KIND), mask=n < outputs)


@triton.jit
def _one_down(
    x, words, scales, stride_words, stride_scales, first_scale, bias, chosen, weights, residual, shared, gate, parts,
    counters, out, outputs, height, columns, padded,
    TOP_K: tl.constexpr, RESIDUAL: tl.constexpr, SHARED: tl.constexpr, GATE: tl.constexpr, CUT: tl.constexpr,
    BITS: tl.constexpr, FLOATS: tl.constexpr, GROUP: tl.constexpr, SLOTS: tl.constexpr, WORDS: tl.constexpr,
    SCALE_WORDS: tl.constexpr, BASE: tl.constexpr, MINIMUMS: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr, ASSEMBLY: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    pair, n = tl.program_id(1).to(tl.int64), tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    token, there = pair // TOP_K, n < outputs
    # Gate and up let this kernel start when all before them has ended, so only what they make themselves is waited for.
    first = tl.load(chosen + pair).to(tl.int64) * height
    row = (first + tl.minimum(n, outputs - 1))[:, None]
    fetch_ahead(words + row * stride_words + (tl.arange(0, LINES) * LINE)[None, :], PDL)
    fetch_ahead(scales + first_scale + row * stride_scales, PDL)
    await_inputs(PDL)
    made, _ = row_products(
        x + pair * columns, words + first * stride_words, scales + first_scale + first * stride_scales,
        stride_words, stride_scales, n, outputs, columns, padded,
        CUT, BITS, FLOATS, GROUP, SLOTS, WORDS, SCALE_WORDS, BASE, MINIMUMS, KIND, OUTPUTS, ROWS, CHUNKS, STAGES,
        ASSEMBLY, PRECISION,
    )  # fmt: skip
    if BIAS:
        made += tl.load(bias + first + n, mask=there, other=0.0).to(tl.float32)
    tl.store(parts + pair * outputs + n, made * tl.load(weights + pair), mask=there)
    tl.debug_barrier()
    counter = counters + token * tl.num_programs(0) + tl.program_id(0)
    if tl.atomic_add(counter, 1, sem="acq_rel") < TOP_K - 1:
        return
    tl.store(counter, 0)
    total = added(residual, shared, gate, token, n, there, outputs, RESIDUAL, SHARED, GATE)
    for place in tl.static_range(TOP_K):  # in ascending order, whichever program came last
        total += tl.load(parts + (token * TOP_K + place) * outputs + n, mask=there, other=0.0, volatile=True)
    tl.store(out + token * outputs + n, total, mask=there)


@triton.jit
def _several(
    x, words, scales, stride_words, stride_scales, first_scale, bias, out, pairs, experts, firsts, ends, outputs,
    height, columns, padded, readers,
    EXPERTS: tl.constexpr, CUT: tl.constexpr, BITS: tl.constexpr, FLOATS: tl.constexpr, GROUP: tl.constexpr,
    SLOTS: tl.constexpr, WORDS: tl.constexpr, SCALE_WORDS: tl.constexpr, BASE: tl.constexpr, MINIMUMS: tl.constexpr,
    BIAS: tl.constexpr, KIND: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr,
    STAGES: tl.constexpr, ASSEMBLY: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    await_inputs(PDL)
    expert = tl.load(experts + tl.program_id(0)).to(tl.int64)
    if expert < EXPERTS:
        pair, here = tile_pairs(pairs, firsts, ends, ROWS)
        n, first = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS), expert * height
        made, other = tile_products(
            x + pair // readers * columns, here, words + first * stride_words,
            scales + first_scale + first * stride_scales, stride_words, stride_scales, n, outputs, columns, padded,
            CUT, BITS, FLOATS, GROUP, SLOTS, WORDS, SCALE_WORDS, BASE, MINIMUMS, KIND, OUTPUTS, ROWS, CHUNKS, STAGES,
            ASSEMBLY, PRECISION,
        )  # fmt: skip
        there = n < outputs
        if BIAS:
            made += tl.load(bias + first + n, mask=there, other=0.0).to(tl.float32)[:, None]
            if KIND >= 0:
                other += tl.load(bias + first + outputs + n, mask=there, other=0.0).to(tl.float32)[:, None]
        if KIND >= 0:
            made = gated(made, other, KIND)
        tl.store(out + pair[None, :] * outputs + n[:, None], made, mask=here[None, :] & there[:, None])
