"""Codecs: exact ones give every bit back, lossy ones keep their promise of how far they round."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvilt.errors import BlobError, InputError, ParamError, StoreError
from kvilt.ops.kv_dtypes import KV_DTYPES
from kvilt.store.address import LayerForm
from kvilt.store.codec_registry import codec_named
from kvilt.store.layer import LayerKV, owned


def form_of(heads: int, key_dim: int, value_dim: int, dtype: str) -> LayerForm:
    """Values that are packed come in pairs."""
    return LayerForm(heads, key_dim, value_dim // 2 * 2 if KV_DTYPES[dtype].packed_values else value_dim, dtype)


FORMS = st.builds(
    form_of, st.integers(1, 3), st.integers(1, 70), st.integers(0, 70), st.sampled_from(sorted(KV_DTYPES))
)


def random_layer(form: LayerForm, tokens: int, seed: int, scale: float = 1.0) -> LayerKV:
    made = torch.Generator().manual_seed(seed)
    keys, values = (
        torch.randn(tokens, form.heads, dim, generator=made) * scale for dim in (form.key_dim, form.value_dim)
    )
    if not form.scaled:
        return LayerKV(*(one.to(KV_DTYPES[form.dtype].storage) for one in (keys, values)))
    scales = torch.rand(2, tokens, form.heads, generator=made)
    dtype = KV_DTYPES[form.dtype]
    values = (40 * values[..., : dtype.value_width(form.value_dim)] + 128 * dtype.packed_values).clamp(-128, 255)
    return LayerKV((40 * keys).to(dtype.storage), values.to(dtype.value_storage), *scales)


def equal(one: LayerKV, other: LayerKV) -> bool:
    pairs = zip(one.parts, other.parts, strict=True)
    return all(a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", ["raw", "zstd"])
@given(form=FORMS, tokens=st.integers(0, 9), seed=st.integers(0, 99))
def test_exact_codecs_give_every_bit_back(name: str, form: LayerForm, tokens: int, seed: int) -> None:
    codec, layer = codec_named(name), random_layer(form, tokens, seed)
    assert layer.form == form
    assert not codec.lossy
    assert equal(codec.decode(codec.encode(layer), form, tokens), layer)


def test_exact_codecs_keep_what_is_not_a_number() -> None:
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1e-8]).half().view(1, 1, 4)
    for name in ("raw", "zstd"):
        layer = LayerKV(odd, odd)
        found = codec_named(name).decode(codec_named(name).encode(layer), layer.form, 1)
        assert torch.equal(found.keys.view(torch.int16), odd.view(torch.int16))


@given(form=FORMS, tokens=st.integers(0, 9), seed=st.integers(0, 99), scale=st.sampled_from([0.0, 1e-3, 1.0, 300.0]))
def test_int8_rounds_to_half_a_step_of_the_largest(form: LayerForm, tokens: int, seed: int, scale: float) -> None:
    if form.scaled:
        return
    codec, layer = codec_named("int8"), random_layer(form, tokens, seed, scale)
    found = codec.decode(codec.encode(layer), form, tokens)
    assert codec.lossy
    assert found.form == form
    for exact, rounded in ((layer.keys, found.keys), (layer.values, found.values)):
        check_error(exact, rounded, exact.shape[2], 127 * 2)


@given(form=FORMS, tokens=st.integers(0, 9), seed=st.integers(0, 99), scale=st.sampled_from([0.0, 1e-3, 1.0, 300.0]))
def test_k8v4_rounds_values_within_their_group(form: LayerForm, tokens: int, seed: int, scale: float) -> None:
    if form.scaled:
        return
    codec, layer = codec_named("k8v4"), random_layer(form, tokens, seed, scale)
    found = codec.decode(codec.encode(layer), form, tokens)
    assert found.form == form
    check_error(layer.keys, found.keys, form.key_dim, 127 * 2)
    for start in range(0, form.value_dim, 32):
        group = slice(start, min(form.value_dim, start + 32))
        check_error(layer.values[..., group], found.values[..., group], 32, 15)


def check_error(exact: torch.Tensor, rounded: torch.Tensor, width: int, steps: int) -> None:
    """No number is off by more than one of `steps` parts of its head's range, and a little for the dtype itself."""
    if not exact.numel():
        return
    most = exact.float().abs().amax(dim=2, keepdim=True)
    error = (exact.float() - rounded.float()).abs()
    assert bool((error <= most * 2 / steps + most * 0.01 + 1e-6).all()), (width, steps)


def test_lossy_codecs_are_as_small_as_they_say() -> None:
    layer = random_layer(LayerForm(3, 64, 64, "float16"), 10, 0)
    sizes = {name: len(codec_named(name).encode(layer)) for name in ("raw", "int8", "k8v4")}
    assert sizes == {"raw": 10 * 3 * 256, "int8": 10 * 3 * (128 + 8), "k8v4": 10 * 3 * (64 + 4 + 32 + 8)}


@pytest.mark.parametrize("name", ["raw", "zstd", "int8", "k8v4"])
def test_bytes_of_another_size_are_refused(name: str) -> None:
    codec, form = codec_named(name), LayerForm(2, 8, 8, "float16")
    data = codec.encode(random_layer(form, 5, 0))
    for wrong in (b"", data[:-1], data + b"\0", bytes(3)):
        with pytest.raises(BlobError, match="payload"):
            codec.decode(wrong, form, 5)
    with pytest.raises(BlobError):
        codec.decode(data, form, 6)


def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    import zstandard

    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 26))
    assert len(bomb) < 1 << 14
    with pytest.raises(BlobError, match="payload"):
        codec_named("zstd").decode(bomb, LayerForm(2, 8, 8, "float16"), 5)
    silent = zstandard.ZstdCompressor(level=19, write_content_size=False).compress(bytes(1 << 26))
    with pytest.raises(BlobError, match="payload"):
        codec_named("zstd").decode(silent, LayerForm(2, 8, 8, "float16"), 5)


@pytest.mark.parametrize("name", ["int8", "k8v4"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_lossy_codecs_refuse_what_they_cannot_round(name: str, bad: float) -> None:
    layer = random_layer(LayerForm(1, 4, 4, "float32"), 2, 0)
    layer.values[1, 0, 2] = bad
    with pytest.raises(StoreError) as error:
        codec_named(name).encode(layer)
    assert error.value.reason == "nonfinite"


def test_a_range_past_float16_is_refused_by_k8v4() -> None:
    layer = random_layer(LayerForm(1, 4, 4, "float32"), 2, 0, scale=1e7)
    with pytest.raises(StoreError, match="float16"):
        codec_named("k8v4").encode(layer)


def test_an_unknown_codec_is_named() -> None:
    with pytest.raises(ParamError, match="'lz4'"):
        codec_named("lz4")


def test_views_do_not_keep_more_than_they_show() -> None:
    large = torch.zeros(1000, 2, 8)
    (layer,) = owned([(large[:5], large[5:10])])
    assert layer.keys.untyped_storage().nbytes() == layer.keys.nbytes
    stacked = torch.zeros(2, 3, 5, 2, 8)
    kept = owned([(stacked[0, i], stacked[1, i]) for i in range(3)])
    assert kept[0].keys.data_ptr() == stacked.data_ptr()  # together they show all of it, so nothing is copied


@pytest.mark.parametrize(
    "parts",
    [
        (torch.zeros(2, 3), torch.zeros(2, 3)),
        (torch.zeros(2, 3, 4), torch.zeros(3, 3, 4)),
        (torch.zeros(2, 3, 4), torch.zeros(2, 3, 4).half()),
        (torch.zeros(2, 3, 4, dtype=torch.int8), torch.zeros(2, 3, 4, dtype=torch.int8)),
        (torch.zeros(2, 3, 4), torch.zeros(2, 3, 4), torch.zeros(2, 3), torch.zeros(2, 3)),
        (torch.zeros(2, 3, 4).double(), torch.zeros(2, 3, 4).double()),
    ],
)
def test_what_is_no_layer_is_refused(parts: tuple[torch.Tensor, ...]) -> None:
    with pytest.raises(InputError):
        _ = LayerKV(*parts).form
