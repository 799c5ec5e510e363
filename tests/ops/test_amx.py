"""Instruction sets that promise the bits of another one: AMX those of AVX-512 with BF16, AVX-VNNI those of AVX2.

`amx-emulated` is the source of the AMX kernels with its tiles in plain C++, so every machine with AVX-512 tests it. The
products of `amx-bf16` have bits of their own, which `amx-bf16-emulated` gives as well (test_amx_bf16.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_attention_blocks import DTYPES, Drawn
from test_native import PACKED, a_weight, random_blocks, with_outliers

from kvilt.errors import Unsupported
from kvilt.ops.contract import AttentionMask, PageShape, Routing
from kvilt.ops.kv_dtypes import FLOAT32, KVDtype
from kvilt.ops.native.backend import NativeOps
from kvilt.ops.routing import route

pytestmark = pytest.mark.processor
PAIRS = [
    ("amx-emulated", "avx512"),
    ("amx", "avx512bf16"),
    ("amx-bf16", "amx-bf16-emulated"),
    ("avxvnni", "avx2"),
]
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


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q6_K"])
def test_a_row_does_not_see_its_neighbours(both: tuple[NativeOps, NativeOps], name: str) -> None:
    ops, x = both[0], with_outliers(300, 512)
    packed = ops.prepare(random_blocks(name, 40, 512))
    whole = ops.linear(x, packed)
    assert torch.equal(torch.cat([ops.linear(x[i : i + 1], packed) for i in range(0, 300, 7)]), whole[::7])
    assert torch.equal(torch.cat([ops.linear(part, packed) for part in x.split([100, 13, 60, 127])]), whole)
