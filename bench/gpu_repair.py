"""The repair step of blending on a GPU: one kernel beside the torch operations that do the same.

    python bench/gpu_repair.py

The sizes are those of a run of 32 computed tokens in a document of 4,096, of which 15 % are computed.
"""

from __future__ import annotations

import torch
from graph_timer import graph_us

from kvilt.ops.contract import Interpolation, PageShape, Rotation
from kvilt.ops.kv_dtypes import KV_DTYPES
from kvilt.ops.reference import ReferenceOps
from kvilt.ops.triton.backend import TritonOps

GPU = torch.device("cuda")
DOCUMENT, TOKENS, ANCHORS, HEADS, DIM = 4096, 213, 32, 8, 128


class TorchRepair(TritonOps):
    """What the kernel replaces: sums by torch, then the kernel that writes."""

    interpolate = ReferenceOps.interpolate


def main() -> None:
    order = torch.randperm(DOCUMENT, device=GPU)
    weights = torch.rand((TOKENS, ANCHORS), device=GPU) / ANCHORS
    how = Interpolation(order[:TOKENS].sort().values, order[TOKENS : TOKENS + ANCHORS].sort().values, weights)
    kept = (torch.randn((DOCUMENT, HEADS, DIM), device=GPU).bfloat16(),) * 2
    fresh = (torch.randn((ANCHORS, HEADS, DIM), device=GPU).bfloat16(),) * 2
    angles = 100 * torch.rand((TOKENS, DIM // 2), device=GPU)
    rotation, slots = Rotation(angles.cos(), angles.sin(), "half"), torch.arange(TOKENS, device=GPU)
    for name, dtype in KV_DTYPES.items():
        found = []
        for ops in (TritonOps(GPU), TorchRepair(GPU)):
            store = ops.new_pages(PageShape(1, 32, HEADS, DIM, DIM, dtype), 8, GPU)
            us = graph_us(ops.interpolate, store, 0, slots, how, kept, fresh, rotation)
            found.append((us, ops.read_slots(store, slots)))
        (ours, kv), (theirs, truth) = found
        apart = [
            float((a.float() != b.float()).float().mean())
            for a, b in ((kv.keys, truth.keys), (kv.values, truth.values))
        ]
        print(
            f"repair, {name}: {ours:.1f} us, torch {theirs:.1f} us; numbers that differ: {apart[0]:.1e}, {apart[1]:.1e}"
        )


if __name__ == "__main__":
    main()
