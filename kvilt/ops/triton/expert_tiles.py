"""Pairs of token and expert, sorted by expert and cut into tiles, in one launch that the host does not wait for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .overlap import await_inputs, launch_next, overlap


@dataclass(frozen=True, slots=True)
class TileMap:
    """Tiles of pairs of one expert each; some places are empty."""

    pairs: Tensor  # [pairs] int32: token * top_k + place, in the order of their experts
    experts: Tensor  # [tiles] int32: the expert of each tile, as many as there are experts: none
    firsts: Tensor  # [tiles] int32: where the tile begins in `pairs`
    ends: Tensor  # [tiles] int32: where its expert's pairs end

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As a kernel takes them."""
        return self.pairs, self.experts, self.firsts, self.ends


def tile_map(chosen: Tensor, experts: int, rows: int) -> TileMap:
    """Tiles of up to `rows` pairs; `chosen` [tokens, top_k] int32."""
    count, device = chosen.numel(), chosen.device
    pairs = torch.empty(count, dtype=torch.int32, device=device)
    # The pairs of expert e begin behind b others, and its tiles at b // rows + e: that is room for all tiles before.
    kinds, firsts, ends = torch.empty((3, count // rows + experts), dtype=torch.int32, device=device)
    block = 256 if count <= 256 else 1024 if count <= 1024 else 4096
    _tile_map[(experts,)](
        chosen, pairs, kinds, firsts, ends, count, experts,
        ROWS=rows, BLOCK=block, num_warps=8 if block > 1024 else 4, **overlap(chosen),
    )  # fmt: skip
    return TileMap(pairs, kinds, firsts, ends)


@triton.jit(do_not_specialize=["count"])
def _tile_map(
    chosen, pairs, kinds, firsts, ends, count, experts, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    launch_next(PDL)
    await_inputs(PDL)
    expert, i = tl.program_id(0), tl.arange(0, BLOCK)
    lower, same = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, count, BLOCK):
        one = tl.load(chosen + start + i, mask=start + i < count, other=experts)
        lower += (one < expert).to(tl.int32)
        same += (one == expert).to(tl.int32)
    before, own = tl.sum(lower, 0), tl.sum(same, 0)
    at = before
    for start in range(0, count, BLOCK):
        one = tl.load(chosen + start + i, mask=start + i < count, other=experts) == expert
        place = at + tl.cumsum(one.to(tl.int32), 0) - 1
        tl.store(pairs + place, start + i, mask=one)
        at += tl.sum(one.to(tl.int32), 0)
    first, stop = before // ROWS + expert, (before + own) // ROWS + expert + 1
    for start in range(first, stop, BLOCK):
        tile = start + i
        begins, inside = before + (tile - first) * ROWS, tile < stop
        tl.store(kinds + tile, tl.where(begins < before + own, expert, experts), mask=inside)
        tl.store(firsts + tile, begins, mask=inside)
        tl.store(ends + tile, tl.zeros([BLOCK], tl.int32) + before + own, mask=inside)
