"""Adapters on a GPU: the products of all maps of a layer of an 8B model, beside float64, and their microseconds.

    python bench/gpu_lora.py

A step of decode with as many adapters as rows, or one for all; and a piece of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from graph_timer import graph_us
from torch import Tensor

from kvilt.ops.lowrank import AdapterSlots, LowRank, LowRankTable
from kvilt.ops.triton.backend import TritonOps

# Maps of one input: their outputs, and the input.
LAYER: list[tuple[tuple[int, ...], int]] = [
    ((4096, 1024, 1024), 4096), ((4096,), 4096), ((14336, 14336), 4096), ((4096,), 14336),
]  # fmt: skip
SLOTS = 64


def table_of(ops: TritonOps, outputs: int, inputs: int, rank: int) -> tuple[LowRankTable, list[LowRank]]:
    table, products = ops.new_table(outputs, inputs, SLOTS), []
    for slot in range(SLOTS):
        random = torch.Generator(device="cuda").manual_seed(slot)
        down, up = (
            torch.randn(shape, device="cuda", generator=random) / 30 for shape in ((rank, inputs), (outputs, rank))
        )
        products.append(ops.prepare_low_rank(LowRank(down, up, 0.5)))
        table.put(slot, products[-1])
    return table, products


def error_of(x: Tensor, out: Tensor, found: Tensor, products: Sequence[LowRank], slots: Tensor) -> float:
    """The largest difference from float64, of what is added."""
    wanted = torch.zeros_like(out, dtype=torch.float64)
    for slot, one in enumerate(products):
        mine = slots == slot
        wanted[mine] = (x[mine].double() @ one.down.double().T @ one.up.double().T) * one.scale
    return float((found.double() - out.double() - wanted).abs().max() / wanted.abs().max())


def main() -> None:
    ops = TritonOps(torch.device("cuda"))
    for rank in (16, 64):
        layer = [([table_of(ops, out, inputs, rank) for out in outputs], inputs) for outputs, inputs in LAYER]
        for tokens, kinds in ((1, 1), (64, 1), (64, 64), (256, 64), (2048, 1), (2048, 4)):
            rows = torch.arange(tokens) * kinds // tokens if tokens > 256 else torch.arange(tokens) % kinds
            picks = AdapterSlots(rows, torch.ones(tokens)).to(ops.device)
            total, worst = 0.0, 0.0
            for tables, inputs in layer:
                x = torch.randn(tokens, inputs, device="cuda").bfloat16()
                outs = [torch.randn(tokens, one.up.shape[0], device="cuda").bfloat16() for _, (one, *_) in tables]
                found = [out.clone() for out in outs]
                ops.adapt(x, [table for table, _ in tables], found, picks)
                for out, made, (_, products) in zip(outs, found, tables, strict=True):
                    worst = max(worst, error_of(x, out, made, products, picks.slots))
                given = [table for table, _ in tables]
                total += graph_us(lambda x=x, given=given, outs=outs, picks=picks: ops.adapt(x, given, outs, picks))
            print(
                f"rank {rank}, {tokens} tokens, {kinds} adapters: {total:.1f} us a layer, error {worst:.4f}", flush=True
            )


if __name__ == "__main__":
    main()
