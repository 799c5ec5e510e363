"""Weights of several planes: a format of codes and scales apart, as GPTQ, AWQ and FP8 have, through the whole way."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from backends import CPU_BACKENDS
from torch import Tensor

from kvilt.errors import Unsupported
from kvilt.ops.contract import Ops
from kvilt.ops.select import BACKENDS, CPU
from kvilt.quant.formats import FLOAT8, FORMATS, FORMATS_BY_ID, Format, Plane
from kvilt.quant.tensor import QuantTensor
from kvilt.quant.unpack import UNPACKED_FORMATS, dequantize, to_float


def _toy(planes: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    codes, scales = planes["codes"], planes["scales"]
    whole = scales.repeat_interleave(2, 0).repeat_interleave(16, 1)[: shape[0], : shape[1]]
    return (codes.float() * whole).to(dtype)


# Bytes, and a scale for each block of two rows and sixteen columns.
TOY = Format("TOY", (Plane("codes", torch.int8, 1, 1), Plane("scales", torch.float32, 2, 16)), _toy)


def toy(rows: int, columns: int) -> tuple[QuantTensor, Tensor]:
    """A weight, and what it stands for."""
    codes = torch.randint(-100, 100, (rows, columns), dtype=torch.int8)
    scales = torch.rand(-(-rows // 2), -(-columns // 16)) + 0.1
    truth = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            truth[row, column] = float(codes[row, column]) * scales[row // 2, column // 16]
    return QuantTensor(TOY, (rows, columns), {"codes": codes, "scales": scales}), truth


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_backend_computes_a_linear_map_with_it(backend: str) -> None:
    weight, truth = toy(7, 40)
    ops: Ops = BACKENDS[backend](CPU, 1)
    x, bias = torch.randn(3, 40), torch.randn(7)
    torch.testing.assert_close(ops.linear(x, ops.prepare(weight), bias), x @ truth.T + bias, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(ops.embed(ops.prepare(weight), torch.tensor([6, 0])), truth[[6, 0]])
    assert ops.expands(TOY)


def test_it_is_unpacked_by_its_own_entry() -> None:
    weight, truth = toy(7, 40)
    assert torch.equal(dequantize(weight), truth)
    assert torch.equal(to_float(weight, torch.bfloat16), truth.bfloat16())
    assert weight.nbytes == 7 * 40 + 4 * 4 * 3


def test_rows_are_cut_where_blocks_end() -> None:
    weight, truth = toy(7, 40)
    assert torch.equal(dequantize(weight.rows(2, 6)), truth[2:6])
    assert torch.equal(dequantize(weight.rows(4, 7)), truth[4:])
    for start, stop in ((1, 4), (2, 5)):
        with pytest.raises(AssertionError):
            weight.rows(start, stop)


def test_planes_that_the_format_does_not_describe_are_refused() -> None:
    weight, _ = toy(6, 32)
    codes, scales = weight.planes["codes"], weight.planes["scales"]
    for planes in (
        {"codes": codes},
        {"codes": codes, "zeros": scales},
        {"codes": codes, "scales": scales.double()},
        {"codes": codes[:5], "scales": scales},
        {"codes": codes, "scales": scales.T.contiguous()},
    ):
        with pytest.raises(AssertionError):
            QuantTensor(TOY, (6, 32), planes)


def test_a_format_without_a_dequantizer_is_refused() -> None:
    bare = Format("BARE", TOY.planes)
    weight, _ = toy(2, 16)
    with pytest.raises(Unsupported, match="BARE"):
        dequantize(QuantTensor(bare, weight.shape, weight.planes))


def test_formats_of_ggml_have_one_plane() -> None:
    assert all(len(format_.planes) == 1 for format_ in FORMATS_BY_ID.values())
    assert all(format_.ggml_id is not None for name, format_ in FORMATS.items() if name != FLOAT8)
    assert {name for name, format_ in FORMATS.items() if not format_.packed} == {
        "F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64",
    }  # fmt: skip


def test_which_formats_a_backend_expands() -> None:
    native, reference = BACKENDS["native"](CPU, 1), BACKENDS["reference"](CPU, 1)
    assert native.expands(FORMATS["TQ1_0"]) and native.expands(FORMATS["IQ2_S"])
    assert not any(native.expands(FORMATS[name]) for name in UNPACKED_FORMATS)
    assert native.kernel(FORMATS["Q3_K"]) == "q3_k tiles"
    assert native.kernel(FORMATS["IQ3_S"]) == "q8 tiles, rounded to 8 bits at load"
    assert native.kernel(FORMATS["TQ1_0"]) == "float32 tiles, unpacked at load"
    assert reference.kernel(FORMATS["Q4_0"]) == "torch in float32, unpacked at load"
    assert reference.expands(FORMATS["Q4_0"]) and not reference.expands(FORMATS["F16"])
