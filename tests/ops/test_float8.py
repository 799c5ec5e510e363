"""Products with weights of 8-bit floats in the layout of the GPU kernels, against the weights as they are defined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor

from kvilt.ops.contract import PackedWeight
from kvilt.ops.select import CPU
from kvilt.quant.formats import FLOAT8, FORMATS
from kvilt.quant.tensor import QuantTensor
from kvilt.quant.unpack import dequantize

pytest.importorskip("triton")

from kvilt.ops.triton import float8_pairs, quantized
from kvilt.ops.triton.backend import TritonOps
from kvilt.ops.triton.float8_products import launch
from kvilt.ops.triton.packed import PackedTile, pack

SCALES = ("tensor", "rows", "blocks")


def weight_of(kind: str, rows: int, columns: int, seed: int = 0) -> QuantTensor:
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns), generator=random, dtype=torch.uint8)
    codes[codes & 127 == 127] = 0  # not a number
    shape = {"tensor": (1,), "rows": (rows, 1), "blocks": (-(-rows // 128), -(-columns // 128))}[kind]
    return QuantTensor.of_float8(codes.view(torch.float8_e4m3fn), torch.rand(shape, generator=random) * 0.01 + 0.001)


def close(found: Tensor, truth: Tensor, tolerance: float = 1e-6) -> None:
    assert found.shape == truth.shape
    assert float((found.double() - truth).norm() / truth.norm()) < tolerance


@pytest.fixture
def ops() -> TritonOps:
    return TritonOps(CPU, torch.float32)


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize(("rows", "outputs", "columns"), [(1, 20, 256), (3, 150, 320), (20, 20, 100)])
def test_a_product_is_that_of_the_weight(
    ops: TritonOps, random_of: Any, kind: str, rows: int, outputs: int, columns: int
) -> None:
    weight = weight_of(kind, outputs, columns)
    x, bias, residual = random_of(rows, columns), random_of(outputs), random_of(rows, outputs, seed=1)
    truth = x.double() @ dequantize(weight).double().T + bias + residual
    packed = ops.prepare(weight)
    assert isinstance(packed, PackedWeight) and not ops.expands(FORMATS[FLOAT8])
    assert packed.nbytes < weight.nbytes + outputs * (128 + 64)
    close(ops.linear(x, packed, bias, residual), truth)


def test_inputs_of_half_precision_are_summed_in_float32(random_of: Any) -> None:
    ops, weight, x = TritonOps(CPU, torch.bfloat16), weight_of("blocks", 20, 256), random_of(2, 256).bfloat16()
    close(ops.linear(x, ops.prepare(weight)), x.double() @ dequantize(weight).double().T, 5e-3)


@pytest.mark.parametrize("kinds", [("blocks", "blocks"), ("tensor", "rows"), ("rows", "blocks")], ids="-".join)
def test_maps_of_one_input_may_differ_in_scales(ops: TritonOps, random_of: Any, kinds: tuple[str, str]) -> None:
    weights = [weight_of(kind, 20, 256, seed) for seed, kind in enumerate(kinds)]
    x, norm = random_of(3, 256), (random_of(256, seed=1), 1e-5)
    normed = F.rms_norm(x.double(), (256,), norm[0].double(), 1e-5)
    truth = [normed @ dequantize(one).double().T for one in weights]
    maps = [(ops.prepare(one), None) for one in weights]
    for found, expected in zip(ops.linears(x, maps, norm), truth, strict=True):
        close(found, expected)
    close(ops.gate_up(x, maps[0], maps[1], "silu", norm), F.silu(truth[0]) * truth[1], 1e-5)


@pytest.mark.parametrize("kind", SCALES)
def test_rows_of_a_packed_table(ops: TritonOps, kind: str) -> None:
    table, ids = weight_of(kind, 9, 320), torch.tensor([8, 0, 3, 3])
    assert torch.equal(ops.embed(ops.prepare(table), ids), dequantize(table)[ids])


@pytest.mark.parametrize("tile", [PackedTile(32, 1, 2), PackedTile(16, 8, 3)], ids=["one chunk", "more than there are"])
def test_a_tile_decides_nothing_but_the_speed(random_of: Any, tile: PackedTile) -> None:
    weight, x = weight_of("blocks", 40, 512), random_of(3, 512)
    packed = pack(weight, CPU)
    close(launch(x, packed.data, packed.handle, 40, tile), x.double() @ dequantize(weight).double().T)


def test_many_rows_expand_the_weight_slab_by_slab(
    ops: TritonOps, random_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized, "MANY_ROWS", 4)
    weight, x, residual = weight_of("blocks", 20, 256), random_of(5, 256), random_of(5, 20, seed=1)
    truth = x.double() @ dequantize(weight).double().T + residual
    for slab in (1 << 20, 7 * 256):
        monkeypatch.setattr(quantized, "SLAB", slab)
        close(ops.linear(x, ops.prepare(weight), None, residual.clone()), truth)


def rounded(x: Tensor) -> Tensor:
    """Inputs as 8-bit floats with a scale for each 128 columns, as torch rounds them."""
    spans = [x[:, start : start + 128] for start in range(0, x.shape[1], 128)]
    scales = [span.abs().amax(1, keepdim=True) / 448 for span in spans]
    made = [(span / scale).to(torch.float8_e4m3fn).float() * scale for span, scale in zip(spans, scales, strict=True)]
    return torch.cat([torch.nan_to_num(one) for one in made], dim=1)


@pytest.mark.parametrize(
    ("kind", "rows", "outputs", "columns"),
    [("blocks", 17, 150, 320), ("rows", 17, 150, 320), ("tensor", 3, 20, 100), ("blocks", 70, 40, 256)],
)
def test_products_of_rounded_inputs_are_those_of_the_rounded_numbers(
    random_of: Any, kind: str, rows: int, outputs: int, columns: int
) -> None:
    weight, x, residual = weight_of(kind, outputs, columns), random_of(rows, columns), random_of(rows, outputs, seed=1)
    x[1, :100] = 0  # a span of zeros has no largest number
    x[2] *= 1e-4  # and a row of small ones has scales of its own
    packed = pack(weight, CPU)
    found = float8_pairs.product(x, packed.data, packed.handle, residual)
    plain = dequantize(weight).double().T
    close(found, rounded(x).double() @ plain + residual, 1e-5)
    exact = x.double() @ plain + residual
    close(found, exact, 4e-2)  # what rounding costs
    close(float8_pairs.product(x, packed.data, packed.handle)[2:3], x[2:3].double() @ plain, 4e-2)


def test_inputs_are_rounded_only_where_a_card_multiplies_such_floats(ops: TritonOps, random_of: Any) -> None:
    packed = pack(weight_of("blocks", 20, 256), CPU)
    assert not quantized.rounds_inputs(random_of(40, 256), packed.handle)
    assert ops.kernel(FORMATS[FLOAT8]) == "packed codes"
