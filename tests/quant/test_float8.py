"""Weights of 8-bit floats: scales of any block, rows of them, and products on every backend of the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from backends import CPU_BACKENDS
from safetensors.torch import load_file, save_file
from tiny import write_tiny
from torch import Tensor

from kvilt.config import RunConfig
from kvilt.errors import Unsupported
from kvilt.executor.load import load_executor
from kvilt.ops.select import BACKENDS, CPU
from kvilt.quant.byte_blocks import byte_blocks
from kvilt.quant.formats import FLOAT8, FORMATS
from kvilt.quant.tensor import QuantTensor
from kvilt.quant.unpack import UNPACKED_FORMATS, dequantize

ROWS, COLUMNS = 300, 200
SCALES = {"tensor": (1,), "number": (), "rows": (ROWS,), "column of rows": (ROWS, 1), "blocks": (3, 2)}


def numbers(rows: int = ROWS, columns: int = COLUMNS) -> Tensor:
    """Every byte that is a number, in some order."""
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    codes[codes & 127 == 127] = 0
    return codes.view(torch.float8_e4m3fn)


def scales_of(kind: str) -> Tensor:
    return torch.rand(SCALES[kind], generator=torch.Generator().manual_seed(1)) + 0.1


def truth(codes: Tensor, scales: Tensor, kind: str) -> Tensor:
    """Element by element."""
    out = torch.empty(codes.shape)
    block = 128 if kind == "blocks" else None
    for i in range(codes.shape[0]):
        if block is None:
            out[i] = codes[i].float() * (scales.flatten()[i] if scales.numel() > 1 else scales.flatten()[0])
            continue
        for j in range(0, codes.shape[1], block):
            out[i, j : j + block] = codes[i, j : j + block].float() * scales[i // block, j // block]
    return out


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_scaled_by_their_block(kind: str, dtype: torch.dtype) -> None:
    codes, scales = numbers(), scales_of(kind)
    weight = QuantTensor.of_float8(codes, scales.to(dtype))
    assert torch.equal(dequantize(weight), truth(codes, scales.to(dtype).float(), kind))
    assert torch.equal(dequantize(weight, torch.bfloat16), dequantize(weight).bfloat16())
    assert weight.format.name == FLOAT8 and FLOAT8 in UNPACKED_FORMATS


@pytest.mark.parametrize(
    ("kind", "cuts"), [("tensor", [(0, 7), (7, 300)]), ("rows", [(1, 4)]), ("blocks", [(128, 300), (130, 140)])]
)
def test_rows_of_a_weight_have_their_scales(kind: str, cuts: list[tuple[int, int]]) -> None:
    weight = QuantTensor.of_float8(numbers(), scales_of(kind))
    for start, stop in cuts:
        assert torch.equal(dequantize(weight.rows(start, stop)), dequantize(weight)[start:stop])
    if kind == "blocks":
        with pytest.raises(AssertionError):
            weight.rows(100, 200)


def test_scales_of_another_shape_are_refused() -> None:
    for shape in ((2, 3), (ROWS, 2), (COLUMNS,)):
        with pytest.raises(ValueError, match="are not those of 300 x 200"):
            QuantTensor.of_float8(numbers(), torch.ones(shape))


@pytest.mark.parametrize("kind", ["tensor", "rows", "blocks"])
def test_a_backend_without_kernels_expands_them(kind: str) -> None:
    ops, weight = BACKENDS["reference"](CPU, 1), QuantTensor.of_float8(numbers(), scales_of(kind) * 0.01)
    x = torch.randn((3, COLUMNS), generator=torch.Generator().manual_seed(2))
    found = ops.linear(x, ops.prepare(weight))
    torch.testing.assert_close(found, x @ dequantize(weight).T, rtol=1e-4, atol=1e-4 * float(found.abs().max()))
    assert ops.expands(FORMATS[FLOAT8]) and "unpacked at load" in ops.kernel(FORMATS[FLOAT8])


@pytest.mark.parametrize("kind", ["tensor", "rows", "blocks"])
def test_blocks_of_bytes_keep_the_large_numbers(kind: str) -> None:
    """Those of at least an eighth of their block's largest, up to a scale of 16 bits; others to half a step."""
    weight = QuantTensor.of_float8(numbers(), scales_of(kind) * 0.01)
    made = byte_blocks(weight)
    assert made.format.name == "Q8_0" and made.shape == (ROWS, 224)
    found, exact = dequantize(made)[:, :COLUMNS], dequantize(weight)
    assert not dequantize(made)[:, COLUMNS:].any()
    blocks = torch.nn.functional.pad(exact, (0, 24)).view(ROWS, -1, 32)
    peaks = blocks.abs().amax(-1).repeat_interleave(32, 1)[:, :COLUMNS]
    large = exact.abs() >= peaks / 8
    assert bool(large.any())
    torch.testing.assert_close(found[large], exact[large], rtol=6e-4, atol=0.0)
    assert bool(((found - exact).abs() <= peaks / 127).all())


def test_codes_that_are_no_numbers_are_refused() -> None:
    codes = torch.zeros(3, 40, dtype=torch.uint8)
    codes[1, 35] = 0x7F
    with pytest.raises(Unsupported, match="not finite"):
        byte_blocks(QuantTensor.of_float8(codes.view(torch.float8_e4m3fn), torch.ones(1)))


def test_weights_of_zeros_stay_zeros() -> None:
    weight = QuantTensor.of_float8(torch.zeros(3, 40).to(torch.float8_e4m3fn), torch.ones(1))
    assert not dequantize(byte_blocks(weight)).any()


@pytest.mark.parametrize("kind", ["tensor", "rows", "blocks"])
def test_the_native_kernels_multiply_them_as_bytes(kind: str) -> None:
    ops, weight = BACKENDS["native"](CPU, 1), QuantTensor.of_float8(numbers(), scales_of(kind) * 0.01)
    x = torch.randn((3, COLUMNS), generator=torch.Generator().manual_seed(2))
    found, truth = ops.linear(x, ops.prepare(weight)), x @ dequantize(weight).T
    assert float((found - truth).norm() / truth.norm()) < 1e-2
    assert not ops.expands(FORMATS[FLOAT8])
    assert ops.kernel(FORMATS[FLOAT8]) == "q8 tiles, rounded to 8 bits at load"


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_checkpoint_of_them_runs(backend: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path) / "model.safetensors"
    tensors, found = load_file(path), []
    packed, plain = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        codes, scale = (tensors[name] * 16).to(torch.float8_e4m3fn), torch.full((1, 1), 1 / 16)
        packed |= {name: codes, f"{name}_scale_inv": scale}
        plain[name] = codes.float() / 16
    for written in (packed, plain):
        save_file(written, path)
        executor = load_executor(tmp_path, RunConfig(kv_memory=1 << 22, backend=backend, threads=1))
        with executor.create_kv_cache() as kv:
            found.append(executor.step([1, 5, 9, 2], kv))
        expanded = written is packed and backend == "reference"
        assert executor.expanded_formats == ((FLOAT8,) if expanded else ())
        assert (FLOAT8 in executor.weight_kernels) == (written is packed)
    if backend == "reference":
        assert torch.equal(*found)
    assert float((found[0] - found[1]).norm() / found[1].norm()) < 0.1  # activations of a tiny model in eight bits
