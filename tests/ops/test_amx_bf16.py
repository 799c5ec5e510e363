"""Products in bfloat16 by AMX: what they round, and that rows do not see their neighbours.

`amx-bf16-emulated` is the source of the kernels with its tiles in plain C++, so machines with AVX-512, BF16 and VBMI
test it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_native import (
    EMULATED,
    EMULATED_ATTENTION,
    IDS,
    PACKED,
    PLAIN,
    a_weight,
    check_law_5,
    random_blocks,
    with_outliers,
)
from tiny import write_tiny

from kvilt.config import RunConfig
from kvilt.executor.load import build_executor
from kvilt.ops.contract import Routing
from kvilt.ops.native.backend import NativeOps
from kvilt.ops.reference import ReferenceOps
from kvilt.ops.routing import route
from kvilt.quant.tensor import QuantTensor
from kvilt.quant.unpack import dequantize
from kvilt.weights.source import open_checkpoint

pytestmark = pytest.mark.processor
ROWS = (1, 8, 9, 15, 16, 17, 40, 272)


@pytest.fixture(scope="module", params=EMULATED)
def tiles(request: pytest.FixtureRequest) -> NativeOps:
    return NativeOps(2, request.param)


def plain_of(weight: Any) -> torch.Tensor:
    return dequantize(weight) if isinstance(weight, QuantTensor) else weight.float()


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().double()


@pytest.mark.parametrize("name", [*PACKED, "F16", "BF16"])
def test_products_are_those_of_numbers_in_bfloat16(tiles: NativeOps, name: str) -> None:
    weight = a_weight(name, 37, 768)
    packed, plain = tiles.prepare(weight), plain_of(weight)
    for rows in ROWS:
        for x in (torch.randn(rows, 768), with_outliers(rows, 768)):
            found, size = tiles.linear(x, packed).double(), x.double().abs() @ plain.double().abs().T
            # Two roundings of eight bits each, of which that of four-bit weights may take 0.7 of the last bit.
            assert float(((found - x.double() @ plain.double().T) / size).abs().max()) < 1.25 * 2**-8
            if name in ("Q4_0", "Q4_1", "Q4_K", "IQ4_XS"):
                continue  # numbers of four bits are cut after a factor, not rounded to the nearest
            assert float(((found - rounded(x) @ rounded(plain).T) / size).abs().max()) < 1e-6


@pytest.mark.parametrize("name", [*PACKED, *PLAIN])
def test_weights_in_rows_unpack_to_themselves(tiles: NativeOps, name: str) -> None:
    weight = a_weight(name, 37, 512)
    assert torch.equal(tiles.embed(tiles.prepare(weight), torch.arange(37)), plain_of(weight))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_columns_that_fill_no_block_are_padded(tiles: NativeOps, dtype: torch.dtype) -> None:
    for outputs, columns in ((1, 1), (17, 24), (16, 33), (5, 70)):
        weight = torch.randn(outputs, columns).to(dtype)
        for rows in (1, 3, 40):
            x = torch.randn(rows, columns)
            truth = rounded(x) @ rounded(weight.float()).T
            torch.testing.assert_close(tiles.linear(x, tiles.prepare(weight)).double(), truth, rtol=1e-5, atol=1e-5)


def test_rounding_has_no_side(tiles: NativeOps) -> None:
    """Many weights of which none is a number of bfloat16: their errors have no sign in common."""
    weight = random_blocks("Q4_0", 64, 4096)
    packed, plain = tiles.prepare(weight), dequantize(weight)
    for sign in (1.0, -1.0):
        chosen = torch.where(plain * sign > 0, sign, 0.0).double()  # a sum of weights of one sign
        for output in range(0, 64, 8):
            found = tiles.linear(chosen[output : output + 1].float(), packed)[0, output]
            truth = (plain[output].double() * chosen[output]).sum()
            assert abs(float(found / truth) - 1) < 5e-4


@pytest.mark.parametrize("name", ["Q4_0", "Q5_K", "Q6_K", "Q8_0", "BF16"])
def test_a_row_does_not_see_its_neighbours(tiles: NativeOps, name: str) -> None:
    x, packed = with_outliers(300, 512), tiles.prepare(a_weight(name, 150, 512))
    whole = tiles.linear(x, packed)
    assert torch.equal(torch.cat([tiles.linear(x[i : i + 1], packed) for i in range(0, 300, 7)]), whole[::7])
    assert torch.equal(torch.cat([tiles.linear(part, packed) for part in x.split([100, 13, 60, 127])]), whole)
    assert torch.equal(NativeOps(1, "amx-bf16-emulated").linear(x, packed), whole)


@pytest.mark.parametrize("name", ["Q4_0", "F32"])
def test_a_row_is_the_same_in_large_and_in_small_pieces(tiles: NativeOps, name: str) -> None:
    """Enough rows and outputs for pieces of all sizes, with rests of both, and inputs that fill no chunk of blocks."""
    x, weight = with_outliers(595, 352), a_weight(name, 16 * 37 + 5, 352)
    packed, threads = tiles.prepare(weight), [NativeOps(count, "amx-bf16-emulated") for count in (1, 3)]
    whole = tiles.linear(x, packed)
    for i in (0, 127, 128, 511, 512, 594):
        assert torch.equal(tiles.linear(x[i : i + 1], packed)[0], whole[i])
    for ops in threads:
        assert torch.equal(ops.linear(x, packed), whole)
    gates = tiles.gate_up(x, (packed, None), (packed, None), "silu")
    assert torch.equal(gates, tiles.act_mul(whole, whole, "silu"))


@pytest.mark.parametrize("names", [("Q4_0", "Q4_0"), ("Q4_K", "F32"), ("F32", "Q8_0"), ("F32", "F32")], ids=str)
def test_gates_are_those_of_plain_products(tiles: NativeOps, names: tuple[str, str]) -> None:
    gate, up = (a_weight(name, 150, 512) for name in names)
    maps = [(tiles.prepare(weight), torch.randn(150)) for weight in (gate, up)]
    for rows in (1, 13, 40):
        x = with_outliers(rows, 512)
        apart = tiles.act_mul(*(tiles.linear(x, *one) for one in maps), "silu")
        found = tiles.gate_up(x, maps[0], maps[1], "silu")
        torch.testing.assert_close(found, apart, rtol=1e-4, atol=1e-4 * float(apart.abs().max()))
        assert torch.equal(tiles.gate_up(x[:1], maps[0], maps[1], "silu"), found[:1])


@pytest.mark.parametrize("tokens", [1, 9, 70])
def test_experts_are_close_to_the_reference(tiles: NativeOps, tokens: int) -> None:
    weights = [[random_blocks(name, 256, 256, seed=e) for name in ("Q4_0", "Q8_0")] for e in range(4)]
    downs = [random_blocks("Q6_K", 256, 256, seed=e) for e in range(4)]
    x, routed = torch.randn(tokens, 256), route(torch.randn(tokens, 4), Routing(2))

    def found(ops: Any) -> Any:
        maps = [tuple((ops.prepare(w), None) for w in (*own, down)) for own, down in zip(weights, downs, strict=True)]
        return ops.experts(x, routed, ops.stack_experts(maps), "silu")

    truth = found(ReferenceOps())
    assert float((found(tiles) - truth).norm() / truth.norm()) < 1e-2


@pytest.mark.parametrize("isa", [*EMULATED, *EMULATED_ATTENTION])
@pytest.mark.parametrize("threads", [1, 3])
def test_law_5(isa: str, threads: int, tmp_path: Path) -> None:
    write_tiny(tmp_path)
    config = RunConfig(kv_memory=1 << 22, kv_dtype="float16", threads=threads)
    executor = build_executor(open_checkpoint(tmp_path), config, ops=NativeOps(threads, isa))
    check_law_5(executor, IDS, [1, 2, 9, 40, 41, 73], [IDS[3:8], [5], IDS[:33], [7]])
