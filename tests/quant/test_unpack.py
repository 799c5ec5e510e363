"""Every dequantizer against the gguf package, bit for bit, on random blocks with awkward scales."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvilt.errors import Unsupported
from kvilt.quant.block_scales import HALF_SCALES
from kvilt.quant.formats import FLOAT8, FORMATS, FORMATS_BY_ID
from kvilt.quant.tensor import QuantTensor
from kvilt.quant.unpack import UNPACKED_FORMATS, dequantize, to_float

# Where each block keeps its float16 scales; random bytes there would be NaN or infinite now and then.
SCALES = {**HALF_SCALES, "F16": (0,)}
AWKWARD = np.array([0.0, -0.0, 6e-8, -6e-8, 6.1e-5, 65504.0, -65504.0, 1.0, -0.333], dtype=np.float16)


def _random_blocks(name: str, rows: int, blocks: int, seed: int) -> npt.NDArray[np.uint8]:
    """Rows of random blocks: [rows, blocks * block_bytes]."""
    generator = np.random.default_rng(seed)
    size = FORMATS[name].block_bytes
    raw = generator.integers(0, 256, (rows * blocks, size), dtype=np.uint8)
    for at in SCALES.get(name, ()):
        scales = generator.standard_normal(rows * blocks).astype(np.float16)
        scales[: len(AWKWARD)] = AWKWARD[: len(scales)]
        raw[:, at : at + 2] = generator.permutation(scales).view(np.uint8).reshape(-1, 2)
    if name in ("F32", "BF16"):  # clear one bit of the exponent: every value is finite
        raw[:, -1] &= 0xBF
    return raw.reshape(rows, blocks * size)


def _packed(name: str, raw: npt.NDArray[np.uint8]) -> QuantTensor:
    format_ = FORMATS[name]
    columns = raw.shape[1] // format_.block_bytes * format_.block_elements
    return QuantTensor.of_blocks(format_, (raw.shape[0], columns), torch.from_numpy(raw))


@pytest.mark.parametrize("name", [name for name in UNPACKED_FORMATS if FORMATS[name] in FORMATS_BY_ID.values()])
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (3, 5), (70, 9)])
def test_a_format_unpacks_to_the_bits_of_the_gguf_package(name: str, rows: int, blocks: int) -> None:
    raw = _random_blocks(name, rows, blocks, seed=rows)
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[name]).astype(np.float32).reshape(rows, -1)
    mine = dequantize(_packed(name, raw)).numpy()
    assert mine.shape == expected.shape
    assert np.array_equal(mine.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K", "Q3_K", "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ2_XS"])
def test_a_tensor_of_several_slabs_and_a_rest_unpacks_whole(name: str) -> None:
    raw = _random_blocks(name, 301, 2048 // FORMATS[name].block_elements, seed=7)
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[name])
    assert np.array_equal(dequantize(_packed(name, raw)).numpy(), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_narrower_result_is_the_float32_result_rounded_once(dtype: torch.dtype) -> None:
    weight = _packed("Q4_K", _random_blocks("Q4_K", 500, 3, seed=1))
    assert torch.equal(dequantize(weight, dtype), dequantize(weight).to(dtype))


def test_leading_axes_keep_their_shape() -> None:
    raw = _random_blocks("Q8_0", 6, 2, seed=3)
    stacked = QuantTensor.of_blocks(FORMATS["Q8_0"], (2, 3, 64), torch.from_numpy(raw))
    assert torch.equal(dequantize(stacked), dequantize(_packed("Q8_0", raw)).view(2, 3, 64))


def test_unpacking_leaves_the_packed_bytes_alone() -> None:
    raw = _random_blocks("Q5_0", 4, 4, seed=4)
    before = raw.copy()
    dequantize(_packed("Q5_0", raw))
    assert np.array_equal(raw, before)


def test_an_ordinary_tensor_that_fits_is_not_copied() -> None:
    tensor = torch.randn(3, 4)
    assert to_float(tensor).data_ptr() == tensor.data_ptr()
    assert to_float(tensor.half()).dtype == torch.float32


def test_a_format_without_a_dequantizer_is_refused_by_name_with_those_that_work() -> None:
    for name in ("TQ1_0", "TQ2_0", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_S", "IQ3_XXS"):
        raw = np.zeros((1, FORMATS[name].block_bytes), dtype=np.uint8)
        with pytest.raises(Unsupported, match=rf"{name}.*Q4_0.*Q6_K"):
            dequantize(_packed(name, raw))


def test_the_formats_of_models_people_download_can_all_be_unpacked() -> None:
    common = {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "F16", "BF16"}
    assert common | {"IQ4_XS", "IQ3_S", "IQ2_XS", "MXFP4"} <= set(UNPACKED_FORMATS)


def test_every_size_in_the_table_is_that_of_the_gguf_package() -> None:
    for format_ in FORMATS_BY_ID.values():
        kind = gguf.GGMLQuantizationType[format_.name]
        assert format_.ggml_id == kind
        assert (format_.block_elements, format_.block_bytes) == gguf.GGML_QUANT_SIZES[kind]
        assert FORMATS[format_.name] is format_
    assert {format_.name for format_ in FORMATS.values() if format_.ggml_id is None} == {FLOAT8}
