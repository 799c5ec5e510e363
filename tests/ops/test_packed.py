"""Products with packed weights in the layout of the GPU kernels, against the weights as their format defines them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor

from kvilt.ops.contract import PackedWeight
from kvilt.ops.select import CPU
from kvilt.quant.formats import FORMATS
from kvilt.quant.groups import GROUPED_FORMATS
from kvilt.quant.tensor import QuantTensor
from kvilt.quant.unpack import dequantize

pytest.importorskip("triton")

from kvilt.ops.triton import quantized
from kvilt.ops.triton.backend import TritonOps
from kvilt.ops.triton.grouped_products import launch
from kvilt.ops.triton.packed import PackedTile, pack

HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,), "Q8_0": (0,), "MXFP4": ()}  # float16 in blocks
# Scales of formats of two levels are products, which the layout keeps in float16.
TOLERANCE = {"Q4_0": 1e-6, "Q4_1": 1e-6, "Q8_0": 1e-6, "Q4_K": 5e-4, "Q6_K": 5e-4, "MXFP4": 1e-6}


def weight_of(name: str, rows: int, columns: int, seed: int = 0) -> QuantTensor:
    """Blocks of random bytes with scales of a usual size."""
    random, format_ = torch.Generator().manual_seed(seed), FORMATS[name]
    blocks = torch.randint(
        0, 256, (rows, columns // format_.block_elements, format_.block_bytes), generator=random, dtype=torch.uint8
    )
    if name == "MXFP4":
        blocks[..., 0] = 115 + blocks[..., 0] % 10
    for at in HALVES[name]:
        scales = torch.rand(*blocks.shape[:2], 1, generator=random) * 0.01 + 0.001
        blocks[..., at : at + 2] = scales.half().view(torch.uint8)
    return QuantTensor.of_blocks(format_, (rows, columns), blocks.view(rows, -1))


def close(found: Tensor, truth: Tensor, tolerance: float) -> None:
    assert found.shape == truth.shape
    assert float((found.double() - truth).norm() / truth.norm()) < tolerance


@pytest.fixture
def ops() -> TritonOps:
    return TritonOps(CPU, torch.float32)


@pytest.mark.parametrize("name", GROUPED_FORMATS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 256), (3, 512), (20, 256)])
def test_a_product_is_that_of_the_weight(ops: TritonOps, random_of: Any, name: str, rows: int, columns: int) -> None:
    weight = weight_of(name, 20, columns)
    x, bias, residual = random_of(rows, columns), random_of(20), random_of(rows, 20, seed=1)
    truth = x.double() @ dequantize(weight).double().T + bias + residual
    packed = ops.prepare(weight)
    assert isinstance(packed, PackedWeight)
    assert packed.nbytes < 1.15 * weight.nbytes + 128 * 20
    close(ops.linear(x, packed, bias, residual), truth, TOLERANCE[name])


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0"])
def test_columns_may_fill_no_tile(ops: TritonOps, random_of: Any, name: str) -> None:
    weight, x = weight_of(name, 5, 288), random_of(2, 288)
    close(ops.linear(x, ops.prepare(weight)), x.double() @ dequantize(weight).double().T, TOLERANCE[name])


def test_inputs_of_half_precision_are_summed_in_float32(random_of: Any) -> None:
    ops, weight, x = TritonOps(CPU, torch.bfloat16), weight_of("Q4_K", 20, 512), random_of(2, 512).bfloat16()
    close(ops.linear(x, ops.prepare(weight)), x.double() @ dequantize(weight).double().T, 5e-3)


@pytest.mark.parametrize("names", [("Q4_K", "Q4_K"), ("Q4_0", "Q8_0"), ("Q4_K", "F32")], ids="-".join)
def test_maps_of_one_input_may_differ_in_format(ops: TritonOps, random_of: Any, names: tuple[str, str]) -> None:
    weights = [random_of(20, 256) if name == "F32" else weight_of(name, 20, 256, i) for i, name in enumerate(names)]
    dense = [dequantize(one) if isinstance(one, QuantTensor) else one for one in weights]
    x, norm = random_of(3, 256), (random_of(256, seed=1), 1e-5)
    normed = F.rms_norm(x.double(), (256,), norm[0].double(), 1e-5)
    truth = [normed @ one.double().T for one in dense]
    maps = [(ops.prepare(one), None) for one in weights]
    for _ in range(2):  # the first call moves weights that can be one
        for found, expected in zip(ops.linears(x, maps, norm), truth, strict=True):
            close(found, expected, 5e-4)
    gated = ops.gate_up(x, maps[0], maps[1], "silu", norm)
    close(gated, F.silu(truth[0]) * truth[1], 2e-3)


@pytest.mark.parametrize("name", GROUPED_FORMATS)
def test_rows_of_a_packed_table(ops: TritonOps, name: str) -> None:
    table, ids = weight_of(name, 9, 512), torch.tensor([8, 0, 3, 3])
    truth = 2 * dequantize(table).double()[ids]
    close(ops.embed(ops.prepare(table), ids, 2.0), truth, TOLERANCE[name])
    close(ops.embed(table, ids, 2.0), truth, TOLERANCE[name])


@pytest.mark.parametrize("tile", [PackedTile(32, 1, 2), PackedTile(16, 8, 3)], ids=["one chunk", "more than there are"])
def test_a_tile_decides_nothing_but_the_speed(random_of: Any, tile: PackedTile) -> None:
    weight, x = weight_of("Q4_1", 40, 512), random_of(3, 512)
    packed = pack(weight, CPU)
    found = launch(x, packed.data, packed.handle, 40, tile)
    close(found, x.double() @ dequantize(weight).double().T, 1e-6)


def test_many_rows_expand_the_weight_slab_by_slab(
    ops: TritonOps, random_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized, "MANY_ROWS", 4)
    weight, x, residual = weight_of("Q4_0", 20, 256), random_of(5, 256), random_of(5, 20, seed=1)
    truth = x.double() @ dequantize(weight).double().T + residual
    for slab in (1 << 20, 7 * 256):
        monkeypatch.setattr(quantized, "SLAB", slab)
        close(ops.linear(x, ops.prepare(weight), None, residual.clone()), truth, 1e-6)


def test_formats_without_kernels_are_expanded(ops: TritonOps) -> None:
    assert ops.expands(FORMATS["Q5_K"]) and not ops.expands(FORMATS["F16"])
    assert not any(ops.expands(FORMATS[name]) for name in GROUPED_FORMATS)
    assert isinstance(ops.prepare(weight_of("Q8_0", 4, 64)), PackedWeight)
