"""Time attention over pages alone: bytes of KV read per second in decode, arithmetic per second in prefill.

python bench/attention.py --heads 9/3 --dim 64 --dtype float16 --threads 2
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from kvilt.ops.contract import AttentionMask, PageShape, PageStore, Paging, RowLengths
from kvilt.ops.kv_dtypes import KV_DTYPES
from kvilt.ops.native.backend import NativeOps

PAGE_TOKENS = 32
CONTEXTS = (128, 512, 1024, 2048, 4096, 8192)
PROMPTS = (512, 1024, 2048)


def main() -> None:
    """One line per instruction set, dtype and length."""
    options = _options()
    heads, kv_heads = map(int, options.heads.split("/"))
    for isa in options.isa or NativeOps(1)._module.available_isas():
        for dtype in options.dtype:
            ops = NativeOps(options.threads, isa)
            shape = PageShape(options.layers, PAGE_TOKENS, kv_heads, options.dim, options.dim, KV_DTYPES[dtype])
            with ops.alone():
                for context in CONTEXTS:
                    _decode(ops, shape, heads, context, options.rows)
                for tokens in PROMPTS:
                    _prefill(ops, shape, heads, tokens)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", default="9/3", help="query heads / KV heads (default SmolLM2's)")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=30, help="a decode step walks through all of them")
    parser.add_argument("--rows", type=int, default=1, help="rows of a decode step")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", nargs="*", default=["float32", "float16", "bfloat16", "int8", "k8v4"])
    parser.add_argument("--isa", nargs="*", help="default: all that this machine runs")
    return parser.parse_args()


def _decode(ops: NativeOps, shape: PageShape, heads: int, context: int, rows: int) -> None:
    """One query a row behind `context` tokens, in every layer: what a decode step asks for."""
    store, paging = _written(ops, shape, context, rows, asking=1)
    query = torch.randn(rows, heads, shape.key_dim)
    mask = AttentionMask(scale=shape.key_dim**-0.5)

    def step() -> None:
        for layer in range(shape.layers):
            ops.attention(query, store, layer, paging, mask)

    seconds = _median(step)
    read = rows * context * shape.token_bytes
    print(
        f"{ops.numerics:18} {_name(shape):9} decode  {rows:3} x {context:5}: {seconds * 1e3:8.3f} ms a step, "
        f"{read / seconds / 1e9:6.1f} GB/s of KV",
        flush=True,
    )


def _prefill(ops: NativeOps, shape: PageShape, heads: int, tokens: int) -> None:
    """A whole prompt in one layer; the masked half of the products is not counted."""
    store, paging = _written(ops, shape, tokens, 1, asking=tokens)
    query = torch.randn(tokens, heads, shape.key_dim)
    mask = AttentionMask(scale=shape.key_dim**-0.5)
    seconds = _median(lambda: ops.attention(query, store, 0, paging, mask))
    flops = 2 * heads * (shape.key_dim + shape.value_dim) * tokens * (tokens + 1) // 2
    print(
        f"{ops.numerics:18} {_name(shape):9} prefill {tokens:5}: {seconds * 1e3:12.3f} ms a layer, "
        f"{flops / seconds / 1e9:6.1f} GFLOP/s",
        flush=True,
    )


def _written(ops: NativeOps, shape: PageShape, tokens: int, rows: int, asking: int) -> tuple[PageStore, Paging]:
    """Pages with `tokens` tokens a row in every layer, and a step in which the last `asking` of them ask."""
    each = -(-tokens // PAGE_TOKENS)
    store = ops.new_pages(shape, rows * each, torch.device("cpu"))
    slots = torch.arange(rows * each * PAGE_TOKENS)
    for layer in range(shape.layers):
        keys = torch.randn(len(slots), shape.kv_heads, shape.key_dim)
        ops.write(store, layer, slots, keys, torch.randn(len(slots), shape.kv_heads, shape.value_dim))
    positions = torch.arange(tokens - asking, tokens).repeat(rows)
    starts = tuple(range(0, rows * asking + 1, asking))
    tables = torch.arange(rows * each).view(rows, each)
    lengths = RowLengths.of(starts, positions.tolist())
    return store, Paging(tables, torch.empty(0, dtype=torch.int64), lengths, positions)


def _median(work: Callable[[], object], seconds: float = 0.4) -> float:
    work()
    times: list[float] = []
    while sum(times) < seconds or len(times) < 5:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _name(shape: PageShape) -> str:
    return shape.dtype.name


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
