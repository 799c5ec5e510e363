"""The experts of a block: which kernels multiply, by the number of tokens and by how weights are kept.

The host reads nothing of what was chosen, so steps with experts can be captured. A token's experts are added in
ascending order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import Activation, ExpertMaps, PackedWeight, Routed, SharedExpert
from ..routing import weighed
from . import packed_experts
from .expert_products import (
    ExpertTensors,
    GroupedTile,
    added,
    grouped_down,
    grouped_gate_up,
    one_down,
    one_gate_up,
    or_else,
)
from .expert_tiles import tile_map
from .overlap import await_inputs, launch_next, overlap
from .packed import GroupedLayout
from .packed_experts import PackedMaps
from .vectors import _ACTIVATIONS

FEW = 4  # tokens whose experts are read once for each of them
# Tiles of gate and up, and of down, by the pairs that an expert has on average: bench/gpu_experts.py.
FEW_PAIRS, SEVERAL_PAIRS = 16, 48
PACKED_PAIRS = 32  # of an expert, up to which its codes are multiplied as they are
FEW_TILES = (GroupedTile(16, 64, 128), GroupedTile(16, 64, 128, stages=4))
SEVERAL_TILES = (GroupedTile(64, 64, 64), GroupedTile(64, 64, 64))
MANY_TILES = (GroupedTile(128, 128, 64, warps=8), GroupedTile(128, 256, 64, warps=8))


@dataclass(frozen=True, slots=True, eq=False)
class PackedExperts:
    """All experts of a block as packed codes."""

    gate_up: PackedMaps
    down: PackedMaps


def gather(experts: Sequence[ExpertMaps], dtype: torch.dtype) -> ExpertTensors | PackedExperts | None:
    """The maps as few large tensors, into which they move; None where they are of several kinds."""
    weights = [[weight for weight, _ in maps] for maps in experts]
    plain = [[weight for weight in maps if isinstance(weight, Tensor) and weight.dtype == dtype] for maps in weights]
    if any(len(maps) < 3 for maps in plain):
        return _gather_packed(experts)
    inner, hidden = plain[0][0].shape
    gate_up = _moved([weight for maps in plain for weight in maps[:2]]).view(len(experts), 2, inner, hidden)
    down = _moved([maps[2] for maps in plain]).view(len(experts), hidden, inner)
    return ExpertTensors(gate_up, down, *_biases(experts))


def _gather_packed(experts: Sequence[ExpertMaps]) -> PackedExperts | None:
    opened = [weight for maps in experts for weight, _ in maps[:2] if isinstance(weight, PackedWeight)]
    closed = [maps[2][0] for maps in experts if isinstance(maps[2][0], PackedWeight)]
    layouts = [{weight.handle for weight in of_maps} for of_maps in (opened, closed)]
    if len(opened) + len(closed) < 3 * len(experts) or any(len(one) > 1 for one in layouts):
        return None
    first, second = opened[0].handle, closed[0].handle
    if not isinstance(first, GroupedLayout) or not isinstance(second, GroupedLayout):
        return None
    both, last = _biases(experts)
    data = [_moved([weight.data for weight in of_maps]) for of_maps in (opened, closed)]
    return PackedExperts(
        PackedMaps(data[0].view(-1, first.row_bytes), first, len(experts), opened[0].shape[0], both),
        PackedMaps(data[1].view(-1, second.row_bytes), second, len(experts), closed[0].shape[0], last),
    )


def _biases(experts: Sequence[ExpertMaps]) -> tuple[Tensor | None, Tensor | None]:
    """Of gate and up [experts, 2, inner], and of down [experts, hidden]."""
    biases = [[bias for _, bias in maps if bias is not None] for maps in experts]
    if not all(len(of_maps) == 3 for of_maps in biases):
        return None, None
    both = torch.stack([torch.stack(of_maps[:2]) for of_maps in biases])
    return both, torch.stack([of_maps[2] for of_maps in biases])


def _moved(weights: Sequence[Tensor]) -> Tensor:
    """Weights one after the other; the tensors look at their new places, so that they are in memory once."""
    whole, start = torch.cat([weight.reshape(-1) for weight in weights]), 0
    for weight in weights:
        weight.set_(whole[start : start + weight.numel()].view(weight.shape))  # type: ignore[call-overload]
        start += weight.numel()
    return whole


def experts(
    x: Tensor,
    routed: Routed,
    held: ExpertTensors | PackedExperts,
    activation: Activation,
    residual: Tensor | None,
    shared: SharedExpert | None,
    weigh_inputs: bool,
    counters: Tensor,
) -> Tensor:
    """The weighted sums over each token's experts; `counters` are zero before and after."""
    (tokens, top_k), readers = routed.chosen.shape, routed.chosen.shape[1]  # experts that read one row of x
    if weigh_inputs:
        x = weighed(x.repeat_interleave(top_k, dim=0), routed.weights.flatten())
        routed, readers = routed.unweighted(), 1
    x = x.contiguous()
    if isinstance(held, PackedExperts) and tokens <= FEW:
        first, second = packed_experts.ONE_TILES
        kind = _ACTIVATIONS[activation]
        opened = packed_experts.one_gate_up(x, routed.chosen, held.gate_up, readers, first, kind)
        return packed_experts.one_down(opened, routed, held.down, residual, shared, second, counters)
    if isinstance(held, PackedExperts):
        made = _packed(x, routed.chosen, held, activation, readers)
    elif tokens <= FEW:
        opened = one_gate_up(x, routed.chosen, held, activation, readers)
        return one_down(opened, routed, held, residual, shared)
    else:
        made = _dense(x, routed.chosen, held, activation, readers)
    return sum_experts(made.view(tokens, top_k, -1), routed, residual, shared, x.dtype)


def _dense(x: Tensor, chosen: Tensor, held: ExpertTensors, activation: Activation, readers: int) -> Tensor:
    """What each pair's expert makes [pairs, hidden]."""
    pairs, (count, hidden, inner) = chosen.numel(), held.down.shape
    first, second = tiles_of(pairs, count)
    tiles = tile_map(chosen, count, first.rows)
    opened, made = (torch.empty((pairs, size), dtype=x.dtype, device=x.device) for size in (inner, hidden))
    grouped_gate_up(x, tiles, held.gate_up, held.gate_up_bias, opened, activation, readers, first)
    grouped_down(opened, tiles, held.down, held.down_bias, made, second)
    return made


def _packed(x: Tensor, chosen: Tensor, held: PackedExperts, activation: Activation, readers: int) -> Tensor:
    """The same by packed weights."""
    gate_up, down, kind, pairs = held.gate_up, held.down, _ACTIVATIONS[activation], chosen.numel()
    if pairs > gate_up.experts * PACKED_PAIRS:
        return _expanded(x, chosen, held, activation, readers)
    rows = 16 if pairs <= gate_up.experts * FEW_PAIRS else 32
    tiles, (first, second) = tile_map(chosen, gate_up.experts, rows), packed_experts.SEVERAL_TILES
    opened = packed_experts.several(x, tiles, gate_up, readers, first, rows, kind)
    return packed_experts.several(opened, tiles, down, 1, second, rows, -1)


def _expanded(x: Tensor, chosen: Tensor, held: PackedExperts, activation: Activation, readers: int) -> Tensor:
    """The same by expanded weights of some experts after the others."""
    gate_up, down, pairs = held.gate_up, held.down, chosen.numel()
    first, second = tiles_of(pairs, gate_up.experts)
    tiles = tile_map(chosen, gate_up.experts, first.rows)
    opened, made = (torch.empty((pairs, one.outputs), dtype=x.dtype, device=x.device) for one in (gate_up, down))
    for start, weight in gate_up.slabs(x.dtype):
        both = weight.view(len(weight), 2, gate_up.outputs, -1)
        grouped_gate_up(x, tiles, both, gate_up.bias, opened, activation, readers, first, start)
    for start, weight in down.slabs(x.dtype):
        grouped_down(opened, tiles, weight, down.bias, made, second, start)
    return made


def tiles_of(pairs: int, experts: int) -> tuple[GroupedTile, GroupedTile]:
    """Tiles of gate and up, and of down."""
    if pairs <= experts * FEW_PAIRS:
        return FEW_TILES
    return SEVERAL_TILES if pairs <= experts * SEVERAL_PAIRS else MANY_TILES


def sum_experts(
    made: Tensor, routed: Routed, residual: Tensor | None, shared: SharedExpert | None, dtype: torch.dtype
) -> Tensor:
    """The sums of results [tokens, top_k, hidden] that are there already."""
    tokens, top_k, hidden = made.shape
    out = torch.empty((tokens, hidden), dtype=dtype, device=made.device)
    own, gate = (None, None) if shared is None else shared
    block = 256
    _sum[(tokens, triton.cdiv(hidden, block))](
        made.contiguous(), routed.weights, or_else(residual, out), or_else(own, out), or_else(gate, out), out, hidden,
        TOP_K=top_k, RESIDUAL=residual is not None, SHARED=own is not None, GATE=gate is not None, BLOCK=block,
        **overlap(out),
    )  # fmt: skip
    return out


@triton.jit
def _sum(
    made, weights, residual, shared, gate, out, hidden,
    TOP_K: tl.constexpr, RESIDUAL: tl.constexpr, SHARED: tl.constexpr, GATE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    await_inputs(PDL)
    token, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < hidden
    total = tl.zeros([BLOCK], tl.float32)
    if RESIDUAL:
        total += tl.load(residual + token * hidden + i, mask=inside, other=0.0).to(tl.float32)
    for place in tl.static_range(TOP_K):  # so that all of them are loaded together
        own = tl.load(made + (token * TOP_K + place) * hidden + i, mask=inside, other=0.0).to(tl.float32)
        total += own * tl.load(weights + token * TOP_K + place)
    total += added(residual, shared, gate, token, i, inside, hidden, False, SHARED, GATE)
    tl.store(out + token * hidden + i, total, mask=inside)
