"""Instruction sets that promise the bits of another one, and the bfloat16 products of AMX.

AVX-VNNI promises the bits of AVX2, and AMX those of `amx-emulated`: the source of its kernels with the tiles in plain
C++, so that machines without AMX (but with AVX-512, BF16 and VBMI) test them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_attention_blocks import DTYPES, Drawn
from test_native import EMULATED, IDS, PACKED, PLAIN, a_weight, check_law_5, random_blocks, with_outliers
from tiny import write_tiny

from kvilt.config import RunConfig
from kvilt.errors import Unsupported
from kvilt.executor.load import build_executor
from kvilt.ops.contract import AttentionMask, PageShape, Routing
from kvilt.ops.kv_dtypes import FLOAT32, KVDtype
from kvilt.ops.native.backend import NativeOps
from kvilt.ops.reference import ReferenceOps
from kvilt.ops.routing import route
from kvilt.quant.tensor import QuantTensor
from kvilt.quant.unpack import dequantize
from kvilt.weights.source import open_checkpoint

pytestmark = pytest.mark.processor
PAIRS = [("amx", "amx-emulated"), ("avxvnni", "avx2")]
ROWS = (1, 8, 9, 15, 16, 17, 40, 272)


def of_both(one: str, other: str) -> tuple[NativeOps, NativeOps]:
    try:
        return NativeOps(3, one), NativeOps(1, other)
    except Unsupported as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module", params=PAIRS, ids=lambda pair: pair[0])
def both(request: pytest.FixtureRequest) -> tuple[NativeOps, NativeOps]:
    """The one under test, on several threads, and the one whose bits it promises."""
    return of_both(*request.param)


@pytest.fixture(scope="module")
def with_and_without_bfloat16() -> tuple[NativeOps, NativeOps]:
    return of_both("avx512bf16", "avx512")


def attention_of(ops: NativeOps, dtype: KVDtype) -> torch.Tensor:
    """Of a long row, of which every block has queries of many positions, and of single tokens."""
    rows = [(list(range(10)), list(range(150, 310))), (list(range(10, 20)), [0, 31, 33, 250])]
    case = Drawn(PageShape(1, 32, 2, 64, 64, dtype), 3, AttentionMask(0.3), rows, 1)
    return ops.attention(case.queries(), case.fill(ops), 0, case.paging(rows), case.mask).clone()


def test_they_share_the_identity_of_kv(both: tuple[NativeOps, NativeOps]) -> None:
    assert both[0].numerics == both[1].numerics


@pytest.mark.parametrize("name", [*PACKED, "F16"])
def test_products_have_the_same_bits(both: tuple[NativeOps, NativeOps], name: str) -> None:
    weight, bias = a_weight(name, 37, 768), torch.randn(37)
    for rows in ROWS:
        for x in (torch.randn(rows, 768), with_outliers(rows, 768)):
            residual = torch.randn(rows, 37)
            one, other = (ops.linear(x, ops.prepare(weight), bias, residual.clone()) for ops in both)
            assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda one: one.name)
def test_attention_has_the_same_bits(both: tuple[NativeOps, NativeOps], dtype: KVDtype) -> None:
    assert torch.equal(attention_of(both[0], dtype), attention_of(both[1], dtype))


def test_weighing_values_in_bfloat16_has_an_identity_of_its_own(
    with_and_without_bfloat16: tuple[NativeOps, NativeOps],
) -> None:
    one, other = with_and_without_bfloat16
    assert one.numerics != other.numerics
    for dtype in DTYPES:
        same = torch.equal(attention_of(one, dtype), attention_of(other, dtype))
        assert same == (dtype is FLOAT32), dtype.name


@pytest.mark.parametrize("names", [("Q4_0", "Q4_0"), ("Q4_K", "Q6_K"), ("Q8_0", "F16"), ("F32", "BF16")], ids=str)
def test_gates_have_the_same_bits(both: tuple[NativeOps, NativeOps], names: tuple[str, str]) -> None:
    gate, up = (a_weight(name, 37, 512) for name in names)
    for rows in (1, 13, 16, 35):
        x = with_outliers(rows, 512)
        one, other = (ops.gate_up(x, (ops.prepare(gate), None), (ops.prepare(up), None), "silu") for ops in both)
        assert torch.equal(one, other)


@pytest.mark.parametrize("tokens", [1, 9, 70])
def test_experts_have_the_same_bits(both: tuple[NativeOps, NativeOps], tokens: int) -> None:
    weights = [[random_blocks("Q4_0", *shape, seed=e) for shape in ((64, 256), (64, 256))] for e in range(4)]
    downs = [random_blocks("Q8_0", 256, 64, seed=e) for e in range(4)]
    x, routed = with_outliers(tokens, 256), route(torch.randn(tokens, 4), Routing(2))

    def found(ops: NativeOps) -> Any:
        maps = [tuple((ops.prepare(w), None) for w in (*own, down)) for own, down in zip(weights, downs, strict=True)]
        return ops.experts(x, routed, ops.stack_experts(maps), "silu")

    assert torch.equal(found(both[0]), found(both[1]))


# Products in bfloat16, by the emulated tiles.


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
            # Two roundings of eight bits each.
            assert float(((found - x.double() @ plain.double().T) / size).abs().max()) < 2**-8
            if name in ("Q4_0", "Q4_1", "Q4_K", "IQ4_XS"):
                continue  # ties of codes of four bits go up as often as down, not to the even number
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
    assert torch.equal(NativeOps(1, "amx-emulated").linear(x, packed), whole)


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


@pytest.mark.parametrize("isa", EMULATED)
@pytest.mark.parametrize("threads", [1, 3])
def test_law_5(isa: str, threads: int, tmp_path: Path) -> None:
    write_tiny(tmp_path)
    config = RunConfig(kv_memory=1 << 22, kv_dtype="float16", threads=threads)
    executor = build_executor(open_checkpoint(tmp_path), config, ops=NativeOps(threads, isa))
    check_law_5(executor, IDS, [1, 2, 9, 40, 41, 73], [IDS[3:8], [5], IDS[:33], [7]])
