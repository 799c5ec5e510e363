"""The kernels of packed weights and scaled KV on a GPU: right beside the reference, and how fast, tile by tile.

    python bench/gpu_kernels.py [--only check,products,attention] [--formats Q4_K,F8_E4M3] [--workers 8]

Each product is timed as a graph over weights that together do not fit into the cache. `--workers` processes compile
the kernels first.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from graph_timer import graph_us
from random_model import random_blocks
from torch import Tensor

from kvilt.ops.contract import AttentionMask, PackedWeight, PageShape, Paging, Rotation, RowLengths
from kvilt.ops.kv_dtypes import BFLOAT16, FLOAT8, INT8, K8V4, KVDtype
from kvilt.ops.reference import ReferenceOps, ReferencePages
from kvilt.ops.triton import attention as paged
from kvilt.ops.triton import float8_products, grouped_products, quantized
from kvilt.ops.triton.backend import TritonOps
from kvilt.ops.triton.packed import Float8Layout, PackedTile, pack
from kvilt.quant.formats import FLOAT8 as FLOAT8_WEIGHTS
from kvilt.quant.groups import GROUPED_FORMATS
from kvilt.quant.tensor import QuantTensor
from kvilt.quant.unpack import dequantize

GPU = torch.device("cuda")
APART_BYTES = 300 << 20  # weights of a graph, several times the cache

SQUARE, UP, DOWN, HEAD = (4096, 4096), (14336, 4096), (4096, 14336), (128256, 4096)
SHAPES = {"4096x4096": SQUARE, "14336x4096": UP, "4096x14336": DOWN, "vocab": HEAD}
ONE_TILES = [
    PackedTile(16, 4, 4), PackedTile(32, 4, 3), PackedTile(16, 2, 6), PackedTile(16, 8, 3), PackedTile(32, 2, 5),
    PackedTile(64, 4, 3),
]  # fmt: skip
FEW_TILES = [PackedTile(16, 4, 5), PackedTile(16, 8, 4), PackedTile(32, 4, 4)]
FLOAT8_TILES = [
    PackedTile(16, 4, 4), PackedTile(16, 8, 3), PackedTile(16, 2, 6), PackedTile(32, 4, 4), PackedTile(32, 8, 3),
    PackedTile(64, 4, 3),
]  # fmt: skip
FLOAT8_SEVERAL_TILES = [
    PackedTile(64, 1, 4, 4), PackedTile(64, 1, 5, 4), PackedTile(128, 1, 4, 8), PackedTile(32, 1, 5, 4),
]  # fmt: skip
SEVERAL_TILES = [PackedTile(64, 2, 4, 4), PackedTile(64, 1, 4, 4), PackedTile(128, 1, 3, 8)]


@dataclass(frozen=True)
class Job:
    """One kind of product: what is compiled for it, and where it is timed."""

    format: str
    rows: int
    gated: bool
    tiles: Sequence[PackedTile]
    shapes: Sequence[str]

    @property
    def name(self) -> str:
        return f"{self.format}, {self.rows} rows{', gate and up' if self.gated else ''}"


ALL = tuple(SHAPES)
JOBS = [
    Job("Q4_K", 1, False, ONE_TILES, ALL),
    Job("Q4_K", 1, True, ONE_TILES, ["14336x4096"]),
    Job("Q6_K", 1, False, ONE_TILES[:4], ALL),
    Job("Q8_0", 1, False, ONE_TILES[:4], ALL),
    Job("Q4_0", 1, False, ONE_TILES[:2], ["4096x4096", "14336x4096"]),
    Job("Q4_1", 1, False, ONE_TILES[:1], ["14336x4096"]),
    Job("Q4_K", 16, False, FEW_TILES, ["4096x4096", "14336x4096", "4096x14336"]),
    Job("Q6_K", 16, False, FEW_TILES[:1], ["4096x14336"]),
    Job("Q4_K", 64, False, SEVERAL_TILES, ["4096x4096", "14336x4096"]),
    Job("Q4_K", 64, True, SEVERAL_TILES[:2], ["14336x4096"]),
    Job("Q8_0", 64, False, SEVERAL_TILES[:1], ["14336x4096"]),
    Job(FLOAT8_WEIGHTS, 1, False, FLOAT8_TILES, ALL),
    Job(FLOAT8_WEIGHTS, 1, True, FLOAT8_TILES, ["14336x4096"]),
    Job(FLOAT8_WEIGHTS, 16, False, FLOAT8_TILES, ["4096x4096", "14336x4096"]),
    Job(FLOAT8_WEIGHTS, 64, False, FLOAT8_SEVERAL_TILES, ["4096x4096", "14336x4096"]),
    Job(FLOAT8_WEIGHTS, 64, True, FLOAT8_SEVERAL_TILES[:2], ["14336x4096"]),
]


def copy_bytes_per_s() -> float:
    source = torch.empty(2 << 30, dtype=torch.uint8, device=GPU).random_(0, 255)
    target = torch.empty_like(source)
    speed = 2 * source.nbytes / graph_us(target.copy_, source) * 1e6
    print(f"a copy moves {speed / 1e12:.2f} TB/s")
    return speed


def packed_weight(name: str, outputs: int, inputs: int) -> tuple[QuantTensor, PackedWeight]:
    weight = random_blocks(name, (outputs, inputs), GPU, seed=outputs + inputs)
    return weight, pack(weight, GPU)


def off(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth.double()).norm() / truth.double().norm())


def run_tile(x: Tensor, packed: PackedWeight, data: Tensor, job: Job, tile: PackedTile) -> Tensor:
    outputs, layout = len(data) // 2 if job.gated else len(data), packed.handle
    launch = float8_products.launch if isinstance(layout, Float8Layout) else grouped_products.launch
    return launch(x, data, layout, outputs, tile, kind=0 if job.gated else -1)


def check_product(x: Tensor, weight: QuantTensor, job: Job, found: Tensor) -> float:
    """The worst of some rows of the weight beside their dequantized floats."""
    outputs, worst = weight.shape[0] // (2 if job.gated else 1), 0.0
    for start in (0, outputs // 32 * 16, outputs - 16):
        made = x.double() @ plain_rows(weight, start).T
        if job.gated:
            made = F.silu(made) * (x.double() @ plain_rows(weight, start + outputs).T)
        worst = max(worst, off(found[:, start : start + 16], made))
    return worst


def plain_rows(weight: QuantTensor, start: int) -> Tensor:
    rows = weight.rows(start, start + 16)
    plain = QuantTensor(rows.format, rows.shape, {name: plane.cpu() for name, plane in rows.planes.items()})
    return dequantize(plain).to(GPU).double()


def wanted(formats: str) -> list[Job]:
    """The jobs of some formats, separated by commas; of all if there are none."""
    return [job for job in JOBS if not formats or job.format in formats.split(",")]


def time_products(bandwidth: float, formats: str) -> None:
    best: dict[str, list[tuple[float, PackedTile]]] = {}
    for job in wanted(formats):
        for shape in job.shapes:
            outputs, inputs = SHAPES[shape]
            weight, packed = packed_weight(job.format, outputs * (2 if job.gated else 1), inputs)
            copies = max(3, -(-APART_BYTES // packed.nbytes))
            datas = [packed.data, *(packed.data.clone() for _ in range(min(copies, 24) - 1))]
            x = torch.randn((job.rows, inputs), dtype=torch.bfloat16, device=GPU)
            for tile in job.tiles:
                try:
                    line = time_tile(job, tile, x, weight, packed, datas, bandwidth)
                except Exception as error:  # one tile that does not fit must not hide the others
                    print(f"{job.name}, {shape}, {tile}: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
                    continue
                best.setdefault(f"{job.name}, {shape}", []).append((line, tile))
            del datas, weight, packed
    print("best of each:")
    for name, found in best.items():
        us, tile = min(found, key=lambda one: one[0])
        print(f"  {name}: {us:.1f} us, {tile}")


def time_tile(
    job: Job,
    tile: PackedTile,
    x: Tensor,
    weight: QuantTensor,
    packed: PackedWeight,
    datas: list[Tensor],
    bandwidth: float,
) -> float:
    error = check_product(x, weight, job, run_tile(x, packed, packed.data, job, tile))
    us = graph_us(lambda: [run_tile(x, packed, data, job, tile) for data in datas], launches=len(datas))
    speed = packed.nbytes / us * 1e6
    where = f"{weight.shape[0]}x{weight.shape[1]}"
    print(
        f"{job.name}, {where}, {tile.outputs}x{tile.spans}/{tile.stages}: {us:.1f} us, {speed / 1e9:.0f} GB/s, "
        f"{speed / bandwidth:.0%}, off by {error:.1e}{'' if error < 6e-3 else '  WRONG'}"
    )
    return us


def expand_all(datas: list[Tensor], packed: PackedWeight) -> None:
    for data in datas:
        quantized.expanded(data, packed.handle, torch.bfloat16)


def time_expanding(bandwidth: float) -> None:
    for name in ("Q4_K", "Q6_K", FLOAT8_WEIGHTS):
        weight, packed = packed_weight(name, *UP)
        plain = quantized.expanded(packed.data, packed.handle, torch.bfloat16)
        error = off(plain[:16], plain_rows(weight, 0))
        datas = [packed.data.clone() for _ in range(8)]
        us = graph_us(expand_all, datas, packed, launches=8)
        moved = (packed.nbytes + plain.nbytes) / us * 1e6
        print(f"{name} to bfloat16, {UP}: {us:.0f} us, {moved / bandwidth:.0%}, off by {error:.1e}")
        x = torch.randn((512, UP[1]), dtype=torch.bfloat16, device=GPU)
        for rows in (64, 128, 256, 512):
            dense = graph_us(F.linear, x[:rows], plain)
            print(f"  cuBLAS alone, {rows} rows: {dense:.0f} us")
        ids = torch.randint(0, UP[0], (7,), device=GPU)
        found = quantized.embed(packed.data, packed.handle, ids, 1.0, torch.bfloat16)
        print(f"  embed equals expanded rows: {torch.equal(found, plain[ids])}")


def pages_of(ops: TritonOps, dtype: KVDtype, rows: int, tokens: int) -> tuple[ReferencePages, Paging]:
    size = 32
    shape = PageShape(1, size, 8, 128, 128, dtype)
    store = ops.new_pages(shape, rows * tokens // size, GPU)
    assert isinstance(store, ReferencePages)
    for start in range(0, rows * tokens, 1 << 16):
        slots = torch.arange(start, min(start + (1 << 16), rows * tokens), device=GPU)
        keys, values = (torch.randn((len(slots), 8, 128), device=GPU).bfloat16() for _ in range(2))
        ops.write(store, 0, slots, keys, values)
    tables = torch.randperm(rows * tokens // size, device=GPU).view(rows, -1)
    starts, at = tuple(range(rows + 1)), [tokens - 1] * rows
    tensors = torch.tensor(starts, device=GPU), torch.tensor([tokens] * rows, device=GPU)
    lengths = RowLengths.of(starts, at, tensors)
    return store, Paging(tables, torch.empty(0, dtype=torch.int64, device=GPU), lengths, torch.tensor(at, device=GPU))


# Keys at a time, warps, stages, and shares of a row.
ATTENTION_TILES = [
    (64, 2, 3, 1), (64, 2, 4, 1), (64, 2, 3, 2), (32, 2, 4, 2), (32, 1, 4, 2), (32, 1, 4, 3), (64, 1, 3, 2),
    (32, 1, 6, 4),
]  # fmt: skip
AttentionTile = tuple[int, int, int, int]


def with_tile(tile: AttentionTile | None) -> None:
    """Let attention use this tile, or what it chooses itself."""
    paged._tile, paged._splits = chosen if tile is None else (lambda *_: tile_options(tile), lambda *_: tile[3])


def tile_options(tile: AttentionTile) -> dict[str, int]:
    return dict(zip(("BLOCK_N", "num_warps", "num_stages"), tile[:3], strict=True))


chosen = paged._tile, paged._splits


def time_attention(bandwidth: float) -> None:
    ops, rows, tokens, found = TritonOps(GPU), 64, 8192, {}
    mask = AttentionMask(128**-0.5)
    query = torch.randn((rows, 32, 128), device=GPU).bfloat16()
    for dtype in (BFLOAT16, FLOAT8, INT8, K8V4):
        store, paging = pages_of(ops, dtype, rows, tokens)
        keys, values = paged.gathered(store, 0, paging.tables[5], tokens, torch.float32)
        q, k, v = (one.float().transpose(0, 1)[None] for one in (query[5:6], keys, values))
        truth = F.scaled_dot_product_attention(q, k, v, scale=mask.scale, enable_gqa=True)[0].transpose(0, 1)
        for tile in (None, *ATTENTION_TILES):
            with_tile(tile)
            try:
                error = off(ops.attention(query, store, 0, paging, mask)[5:6], truth)
                us = graph_us(ops.attention, query, store, 0, paging, mask)
            except Exception as failure:
                print(f"attention, {dtype.name}, {tile}: {str(failure).splitlines()[0][:120]}")
                continue
            moved = store.shape.token_bytes * rows * tokens / us * 1e6
            print(
                f"attention, {dtype.name}, {tile or 'as chosen'}: {us:.0f} us, {moved / bandwidth:.0%}, "
                f"off by {error:.1e}"
            )
            found[dtype.name] = min(us, found.get(dtype.name, us))
        with_tile(None)
        sunk = replace(mask, sinks=torch.zeros(32, device=GPU))
        print(f"attention with sinks, {dtype.name}: {graph_us(ops.attention, query, store, 0, paging, sunk):.0f} us")
    print(" ".join(f"{name}: {found['bfloat16'] / us:.2f}x" for name, us in found.items()))


def check_pages() -> None:
    """Writes beside the reference on the same device, long rows beside the kernel, and slots there and back."""
    ops, reference = TritonOps(GPU), ReferenceOps()
    angles = 100 * torch.rand((600, 64), device=GPU)
    rotation, slots = Rotation(angles.cos(), angles.sin(), "half"), torch.randperm(640, device=GPU)[:600]
    query, keys, values = (torch.randn((600, heads, 128), device=GPU).bfloat16() for heads in (32, 8, 8))
    for dtype in (FLOAT8, INT8):
        shape = PageShape(1, 32, 8, 128, 128, dtype)
        stores = [ops.new_pages(shape, 20, GPU), reference.new_pages(shape, 20, torch.device("cpu"))]
        ops.rotate_and_write(stores[0], 0, slots, query, keys, values, rotation)
        plain = Rotation(rotation.cos.cpu(), rotation.sin.cpu(), "half")
        reference.write(stores[1], 0, slots.cpu(), keys.cpu(), values.cpu(), plain)
        ours, truth = ops.read_slots(stores[0], slots), reference.read_slots(stores[1], slots.cpu())
        same = [
            float((a.view(torch.uint8) == b.view(torch.uint8)).float().mean())
            for a, b in ((ours.keys, truth.keys), (ours.values, truth.values), (ours.key_scales, truth.key_scales))
        ]
        other = ops.new_pages(shape, 20, GPU)
        ops.write_slots(other, slots, ours)
        again = ops.read_slots(other, slots)
        back = torch.equal(again.keys.view(torch.uint8), ours.keys.view(torch.uint8))
        print(
            f"writes, {dtype.name}: bytes equal: keys {same[0]:.4f}, values {same[1]:.4f}, scales {same[2]:.4f}; "
            f"back {back}"
        )
        check_long_rows(ops, dtype)


def check_long_rows(ops: TritonOps, dtype: KVDtype) -> None:
    store, paging = pages_of(ops, dtype, 1, 2048)
    at = torch.arange(2048, device=GPU)
    tensors = torch.tensor((0, 2048), device=GPU), torch.tensor([2048], device=GPU)
    paging = Paging(paging.tables, at, RowLengths.of((0, 2048), list(range(2048)), tensors), at)
    query, mask = torch.randn((2048, 32, 128), device=GPU).bfloat16(), AttentionMask(128**-0.5)
    long = ops.attention(query, store, 0, paging, mask)
    limit, paged.LONG = paged.LONG, 1 << 30
    short = ops.attention(query, store, 0, paging, mask)
    paged.LONG = limit
    print(f"prompt of 2,048 tokens, {dtype.name}: torch's attention and the kernel are {off(short, long):.1e} apart")


def compile_share(index: int, of: int, formats: str) -> None:
    """Run every `of`-th candidate once on little data, which leaves it in triton's cache."""
    candidates: list[Callable[[], Any]] = []
    for job in wanted(formats):
        _, packed = packed_weight(job.format, 256, 4096)
        x = torch.randn((job.rows, 4096), dtype=torch.bfloat16, device=GPU)
        candidates += [lambda t=tile, j=job, p=packed, x=x: run_tile(x, p, p.data, j, t) for tile in job.tiles]
    for candidate in candidates[index::of]:
        try:
            candidate()
        except Exception:  # it is told when it is timed
            continue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="check,products,attention")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--formats", default="", help="of the weights whose products are timed; all by default")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        index, of = map(int, options.compile.split("/"))
        compile_share(index, of, options.formats)
        return
    begun, only = time.perf_counter(), options.only.split(",")
    same = [sys.executable, __file__, "--formats", options.formats]
    shares = [[*same, "--compile", f"{i}/{options.workers}"] for i in range(options.workers)]
    bandwidth = copy_bytes_per_s()
    compiling = [subprocess.Popen(share) for share in shares] if "products" in only else []
    jobs: dict[str, Sequence[Callable[[], None]]] = {
        "check": [check_pages],
        "attention": [lambda: [one.wait() for one in compiling] and None, lambda: time_attention(bandwidth)],
        "products": [
            lambda: time_expanding(bandwidth),
            lambda: time_products(bandwidth, options.formats),
        ],
    }
    for name, parts in jobs.items():
        for part in parts if name in only else ():
            try:
                part()
            except Exception:
                traceback.print_exc()
        print(f"-- {name}: {time.perf_counter() - begun:.0f} s", flush=True)
    print("formats:", ", ".join((*GROUPED_FORMATS, FLOAT8_WEIGHTS)))


if __name__ == "__main__":
    main()
