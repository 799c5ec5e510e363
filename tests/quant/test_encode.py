"""Weights into GGML's blocks: read back by the gguf package, with less error than its own rounding has."""

from __future__ import annotations

import gguf
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvilt.errors import Unsupported
from kvilt.quant.encode import ENCODERS, quantize
from kvilt.quant.fit import fit_affine, fit_symmetric
from kvilt.quant.formats import FORMATS

# The norm of the error over that of normal numbers: what each format is worth, measured once.
LOSSES = {
    "Q8_0": 0.0056, "Q6_K": 0.0178, "Q5_K": 0.0365, "Q5_1": 0.0345, "Q5_0": 0.0410, "Q4_K": 0.0725, "Q4_1": 0.0715,
    "Q4_0": 0.0830,
}  # fmt: skip
ROUNDED_BY_GGUF = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")


def normal(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02


def read_by_gguf(blocks: Tensor, name: str, columns: int) -> Tensor:
    floats = gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[name])
    return torch.from_numpy(floats).view(-1, columns)


def loss(found: Tensor, truth: Tensor, weights: Tensor | float = 1.0) -> float:
    return float((weights * (found - truth).square()).sum().sqrt() / (weights * truth.square()).sum().sqrt())


@pytest.mark.parametrize("name", ENCODERS)
def test_the_gguf_package_reads_what_was_meant(name: str) -> None:
    x = normal(24, 512)
    assert loss(read_by_gguf(quantize(x, name), name, 512), x) < LOSSES[name]


@pytest.mark.parametrize("name", ROUNDED_BY_GGUF)
def test_the_error_is_no_larger_than_that_of_plain_rounding(name: str) -> None:
    x = normal(24, 512, seed=1)
    plain = gguf.dequantize(gguf.quantize(x.numpy(), gguf.GGMLQuantizationType[name]), gguf.GGMLQuantizationType[name])
    ours, theirs = loss(read_by_gguf(quantize(x, name), name, 512), x), loss(torch.from_numpy(plain), x)
    assert ours <= theirs * (1.0001 if name == "Q8_0" else 0.97)


@pytest.mark.parametrize("name", [name for name in ENCODERS if name != "Q8_0"])
def test_important_columns_get_the_smaller_errors(name: str) -> None:
    x, importance = normal(24, 512, seed=2), torch.rand(512, generator=torch.Generator().manual_seed(3)) ** 3
    plain, weighted = (read_by_gguf(quantize(x, name, given), name, 512) for given in (None, importance))
    assert loss(weighted, x, importance) < 0.96 * loss(plain, x, importance)


@pytest.mark.parametrize("name", ENCODERS)
def test_rows_do_not_depend_on_each_other(name: str) -> None:
    x = normal(7, 512, seed=4)
    x[2] *= 1000
    whole = quantize(x, name)
    assert torch.equal(whole[3:4], quantize(x[3:4], name))


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("value", [0.0, 0.25, -0.25, 1e-30, 3e4], ids=str)
def test_rows_of_one_number_stay_that_number(name: str, value: float) -> None:
    found = read_by_gguf(quantize(torch.full((1, 256), value), name), name, 256)
    assert torch.isfinite(found).all()
    assert torch.allclose(found, torch.full((1, 256), value), rtol=5e-3, atol=1e-7)


@settings(max_examples=examples(15), deadline=None)
@given(st.sampled_from(sorted(ENCODERS)), st.integers(0, 1 << 30), st.floats(1e-6, 1e3), st.booleans())
def test_any_numbers_come_back_near(name: str, seed: int, scale: float, sparse: bool) -> None:
    x = normal(3, 256, seed) * scale
    if sparse:
        x[torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) < 0.9] = 0
    found = read_by_gguf(quantize(x, name), name, 256)
    blocks = 256 if FORMATS[name].block_elements == 256 else 32
    largest = x.view(-1, blocks).abs().amax(1, keepdim=True)
    assert ((found - x).view(-1, blocks).abs() <= 0.15 * largest + 1e-6).all()


def test_bad_weights_are_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="blocks of 256"):
        quantize(normal(1, 288), "Q4_K")
    with pytest.raises(Unsupported, match="Q2_K"):
        quantize(normal(1, 256), "Q2_K")
    for bad in (float("nan"), float("inf")):
        x = normal(1, 256)
        x[0, 7] = bad
        with pytest.raises(Unsupported, match="not finite"):
            quantize(x, "Q8_0")


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from([8, 16, 32]))
def test_a_fit_is_the_best_for_its_codes(seed: int, half: int) -> None:
    """No other scale serves the same codes better."""
    x, weights = normal(5, 32, seed), torch.rand(5, 32, generator=torch.Generator().manual_seed(seed)) + 0.01
    for fit in (fit_symmetric(x, weights, half), fit_affine(x, weights, 2 * half - 1)):
        for factor in (0.99, 1.01):
            scaled = fit.codes * (factor * fit.scale)[:, None] - fit.minimum[:, None]
            assert ((weights * (scaled - x).square()).sum(1) >= fit.error - 1e-9).all()
