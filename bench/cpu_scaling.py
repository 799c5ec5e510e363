"""How the native linear kernels scale with threads, on random weights of a 1B model's shapes.

python bench/cpu_scaling.py [--isa auto] [--format Q4_1] [--threads 1 2 4]
"""

from __future__ import annotations

import argparse
import os
import time

import numpy as np
import torch

from kvilt.ops.contract import PackedWeight
from kvilt.ops.native.backend import NativeOps
from kvilt.quant.formats import FORMATS
from kvilt.quant.tensor import QuantTensor

SHAPES = [(2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (8192, 2048), (8192, 2048), (2048, 8192)]
LAYERS = 4


def random_weight(name: str, rows: int, columns: int) -> QuantTensor:
    layout = FORMATS[name]
    data = np.random.default_rng(0).integers(0, 60, (rows, layout.row_bytes(columns)), dtype=np.uint8)
    return QuantTensor.of_blocks(layout, (rows, columns), torch.from_numpy(data))


def seconds(ops: NativeOps, weights: list[PackedWeight], rows: int) -> float:
    """The best of several passes over all weights."""
    inputs = {columns: torch.randn(rows, columns) for columns in (2048, 8192)}
    times = []
    for _ in range(6):
        started_s = time.perf_counter()
        for weight in weights:
            ops.linear(inputs[weight.shape[1]], weight)
        times.append(time.perf_counter() - started_s)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--format", default="Q4_1")
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    packer = NativeOps(1, arguments.isa)
    weights = [packer.prepare(random_weight(arguments.format, *shape)) for _ in range(LAYERS) for shape in SHAPES]
    size, count = sum(w.nbytes for w in weights), sum(w.shape[0] * w.shape[1] for w in weights)
    print(f"{packer.numerics}, {arguments.format}, {size / 1e6:.0f} MB of weights")
    print(f"{'threads':>8}{'1 row, GB/s':>14}{'32 rows, GOP/s':>16}{'256 rows, GOP/s':>17}")
    for threads in arguments.threads:
        if threads > (os.cpu_count() or 1):
            break
        ops = NativeOps(threads, arguments.isa)
        one, many, most = (seconds(ops, weights, rows) for rows in (1, 32, 256))
        print(f"{threads:>8}{size / one / 1e9:>14.1f}{64 * count / many / 1e9:>16.0f}{512 * count / most / 1e9:>17.0f}")


if __name__ == "__main__":
    main()
