"""The kernels of experts on a GPU, tile by tile: right beside the reference, and how fast.

    python bench/gpu_experts.py [--only one,few,many,packed,packed-few] [--workers 8]

Sizes are those of Qwen3-30B-A3B, and of gpt-oss-20b for packed weights. `--workers` processes compile the kernels
first. Each launch takes other experts, so that weights come from memory.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from graph_timer import graph_us
from random_model import random_mxfp4
from torch import Tensor

from kvilt.ops.contract import Routed, Routing
from kvilt.ops.triton import expert_products, packed_experts, router
from kvilt.ops.triton.expert_products import ExpertTensors, GroupedTile
from kvilt.ops.triton.expert_tiles import tile_map
from kvilt.ops.triton.packed import PackedTile, pack
from kvilt.ops.triton.packed_experts import PackedMaps
from kvilt.ops.triton.products import Tile

GPU = torch.device("cuda")
LAUNCHES = 12
Runs = Sequence[Callable[[], Any]]


@dataclass(frozen=True)
class Job:
    """One kind of launch: its tiles, what makes the launches of a tile, and the bytes or operations of each."""

    name: str
    tiles: Sequence[Any]
    runs: Callable[[Any], Runs]
    work: float
    unit: str = "GB/s"


def routes(tokens: int, experts: int, top_k: int) -> list[Routed]:
    """Other experts for each launch."""
    random = torch.Generator(GPU).manual_seed(tokens)
    logits = torch.randn((LAUNCHES, tokens, experts), generator=random, device=GPU)
    return [router.route(one, Routing(top_k), None) for one in logits]


def dense(experts: int, hidden: int, inner: int) -> ExpertTensors:
    def made(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=GPU) / shape[-1] ** 0.5

    return ExpertTensors(made(experts, 2, inner, hidden), made(experts, hidden, inner), None, None)


def activations(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=GPU)


def dense_jobs(tokens: int, gate_up_tiles: Sequence[Any], down_tiles: Sequence[Any], kind: str) -> list[Job]:
    experts, hidden, inner, top_k = 128, 2048, 768, 8
    held, routed, pairs = dense(experts, hidden, inner), routes(tokens, experts, top_k), tokens * top_k
    x, opened = activations(tokens, hidden), activations(pairs, inner)

    def gate_up(tile: Any) -> Runs:
        if isinstance(tile, Tile):
            return [lambda r=r: expert_products.one_gate_up(x, r.chosen, held, "silu", top_k, tile) for r in routed]
        out = torch.empty_like(opened)
        maps = [tile_map(r.chosen, experts, tile.rows) for r in routed]
        return [
            lambda m=m: expert_products.grouped_gate_up(x, m, held.gate_up, None, out, "silu", top_k, tile)
            for m in maps
        ]

    def down(tile: Any) -> Runs:
        if isinstance(tile, Tile):
            return [lambda r=r: expert_products.one_down(opened, r, held, x, None, tile) for r in routed]
        out = torch.empty((pairs, hidden), dtype=x.dtype, device=GPU)
        maps = [tile_map(r.chosen, experts, tile.rows) for r in routed]
        return [lambda m=m: expert_products.grouped_down(opened, m, held.down, None, out, tile) for m in maps]

    if tokens > 256:
        work, unit = 2.0 * pairs * hidden * inner, "TFLOP/s"
    else:
        used = sum(len(r.chosen.unique()) for r in routed) / len(routed)
        work, unit = used * hidden * inner * 2, "GB/s"
    return [
        Job(f"{kind}, gate and up, {tokens} tokens", gate_up_tiles, gate_up, 2 * work, unit),
        Job(f"{kind}, down, {tokens} tokens", down_tiles, down, work, unit),
    ]


def packed_maps(experts: int, maps: int, outputs: int, inputs: int) -> PackedMaps:
    data = pack(random_mxfp4((experts * maps * outputs, inputs), GPU, 3), GPU)
    return PackedMaps(data.data, data.handle, experts, outputs, None)


def packed_jobs(tokens: int, tiles: Sequence[Any], kind: str) -> list[Job]:
    experts, hidden, inner, top_k = 32, 2880, 2880, 4
    gate_up, down = packed_maps(experts, 2, inner, hidden), packed_maps(experts, 1, hidden, inner)
    routed, x, opened = routes(tokens, experts, top_k), activations(tokens, hidden), activations(tokens * top_k, inner)

    counters = torch.zeros(1 << 16, dtype=torch.int32, device=GPU)

    def one(x: Tensor, r: Routed, maps: PackedMaps, readers: int, tile: PackedTile, activation: int) -> Tensor:
        if activation < 0:
            return packed_experts.one_down(x, r, maps, None, None, tile, counters)
        return packed_experts.one_gate_up(x, r.chosen, maps, readers, tile, activation)

    def runs(x: Tensor, maps: PackedMaps, readers: int, activation: int) -> Callable[[Any], Runs]:
        def of_tile(tile: Any) -> Runs:
            if isinstance(tile, PackedTile):
                return [lambda r=r: one(x, r, maps, readers, tile, activation) for r in routed]
            rows, own = tile
            tiles = [tile_map(r.chosen, experts, rows) for r in routed]
            return [lambda t=t: packed_experts.several(x, t, maps, readers, own, rows, activation) for t in tiles]

        return of_tile

    used = sum(len(r.chosen.unique()) for r in routed) / len(routed)
    row_bytes = gate_up.layout.row_bytes
    return [
        Job(f"{kind}, gate and up, {tokens} tokens", tiles, runs(x, gate_up, top_k, 3), used * 2 * inner * row_bytes),
        Job(f"{kind}, down, {tokens} tokens", tiles, runs(opened, down, 1, -1), used * hidden * row_bytes),
    ]


def router_jobs() -> list[Job]:
    logits = activations(1, 128)
    return [Job("router", [1], lambda _: [lambda: router.route(logits, Routing(8), None)] * LAUNCHES, 0.0)]


MAKERS: dict[str, Callable[[], list[Job]]] = {
    "one": lambda: [*router_jobs(), *dense_jobs(
        1,
        [Tile(4, 512), Tile(2, 1024), Tile(4, 1024, warps=8), Tile(8, 512), Tile(2, 2048, warps=8), Tile(8, 256)],
        [Tile(4, 512), Tile(8, 256), Tile(4, 1024, warps=8), Tile(8, 512), Tile(2, 1024), Tile(16, 256)],
        "bf16",
    )],
    "few": lambda: dense_jobs(
        64,
        [GroupedTile(16, 32, 128), GroupedTile(16, 64, 64, 4, 4), GroupedTile(16, 32, 64, 4, 5),
         GroupedTile(16, 64, 128)],
        [GroupedTile(16, 32, 128), GroupedTile(16, 64, 64, 4, 4), GroupedTile(16, 64, 128, 4, 4),
         GroupedTile(16, 128, 64)],
        "grouped bf16",
    ),
    "many": lambda: dense_jobs(
        8192,
        [GroupedTile(128, 64, 64, 8), GroupedTile(128, 128, 64, 8), GroupedTile(128, 64, 64, 4),
         GroupedTile(64, 128, 64, 4)],
        [GroupedTile(128, 128, 64, 8), GroupedTile(128, 256, 64, 8), GroupedTile(128, 128, 64, 4),
         GroupedTile(64, 128, 64, 4)],
        "grouped bf16",
    ),
    "packed": lambda: packed_jobs(
        1,
        [PackedTile(16, 4, 3), PackedTile(16, 2, 4), PackedTile(16, 4, 2), PackedTile(32, 4, 3), PackedTile(32, 2, 3),
         PackedTile(16, 4, 4)],
        "MXFP4",
    ),
    "packed-few": lambda: packed_jobs(
        64,
        [(16, PackedTile(64, 1, 3, 4)), (16, PackedTile(64, 1, 4, 4)), (16, PackedTile(32, 1, 4, 4)),
         (16, PackedTile(128, 1, 3, 8)), (32, PackedTile(64, 1, 3, 4))],
        "grouped MXFP4",
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(MAKERS))
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--compile", default="", help="i/n: compile the i-th of n parts, and time nothing")
    asked = parser.parse_args()
    workers = [
        subprocess.Popen([sys.executable, __file__, "--only", asked.only, "--compile", f"{i}/{asked.workers}"])
        for i in range(asked.workers)
    ]
    for worker in workers:
        worker.wait()
    part, parts = map(int, asked.compile.split("/")) if asked.compile else (0, 1)
    number = 0
    for name in asked.only.split(","):
        for job in MAKERS[name]():
            found = []
            for tile in job.tiles:
                number += 1
                if number % parts != part % parts:
                    continue
                try:
                    runs = job.runs(tile)
                    if asked.compile:
                        runs[0]()
                        continue
                    us = graph_us(lambda runs=runs: [run() for run in runs], launches=len(runs))
                    rate = job.work / us * 1e6 / (1e12 if job.unit == "TFLOP/s" else 1e9)
                    found.append(f"{us:.1f} us {rate:.0f} {job.unit}  {tile}")
                except Exception:
                    traceback.print_exc()
            if not asked.compile:
                print(job.name, *found, sep="\n    ")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
