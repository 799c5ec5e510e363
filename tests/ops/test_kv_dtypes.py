"""What a KV dtype says of itself is all that pages, files and the store know: one that is new fits without a change."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvilt.errors import InputError, ParamError, Unsupported
from kvilt.kv.cache import KVCache
from kvilt.kv.identity import Identity
from kvilt.kv.layout import Full, KVLayout, LayerGroup
from kvilt.kv.pool import PagePool
from kvilt.ops import kv_dtypes
from kvilt.ops.contract import AttentionMask, PageShape, Paging, RowLengths
from kvilt.ops.kv_dtypes import FLOAT32, INT8, K8V4, KV_DTYPES, KVDtype, check_kv_dtype, kv_dtype_of
from kvilt.ops.native.backend import NativeOps
from kvilt.ops.reference import ReferenceOps
from kvilt.store import address, layer
from kvilt.store.codecs import Raw
from kvilt.store.layer import LayerKV

FP8 = KVDtype("fp8_e4m3_fnuz", torch.float8_e4m3fnuz, scaled_to=240.0)
PLAIN_FP8 = KVDtype("fp8_e5m2_plain", torch.float8_e5m2)
NEW = [FP8, PLAIN_FP8]
TOKENS, HEADS, DIM = 6, 2, 16


def shape_of(dtype: KVDtype) -> PageShape:
    return PageShape(1, 4, HEADS, DIM, DIM, dtype)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The new dtypes in the one list."""
    more = {**KV_DTYPES, **{one.name: one for one in NEW}}
    from kvilt.kv import codec
    from kvilt.store import codecs

    for module in (kv_dtypes, address, layer, codecs, codec):
        monkeypatch.setattr(module, "KV_DTYPES", more)


@pytest.mark.parametrize("dtype", NEW, ids=lambda one: one.name)
def test_attention_over_a_new_dtype_is_near_that_over_floats(dtype: KVDtype, random_of: Any) -> None:
    ops, found = ReferenceOps(), []
    keys, values, query = (
        random_of(TOKENS, HEADS, DIM),
        90 * random_of(TOKENS, HEADS, DIM, seed=1),
        random_of(1, 4, DIM),
    )
    for kept in (FLOAT32, dtype):
        store = ops.new_pages(shape_of(kept), 2, torch.device("cpu"))
        ops.write(store, 0, torch.arange(TOKENS), keys, values)
        lengths, last = RowLengths.of((0, 1), [TOKENS - 1]), torch.tensor([TOKENS - 1])
        paging = Paging(torch.tensor([[0, 1]]), torch.empty(0, dtype=torch.int64), lengths, last)
        found.append(ops.attention(query, store, 0, paging, AttentionMask(0.25)))
    largest = found[0].abs().max()
    assert 0 < (found[0] - found[1]).abs().max() < 0.2 * largest


@pytest.mark.parametrize("dtype", NEW, ids=lambda one: one.name)
def test_a_new_dtype_counts_its_bytes_and_its_scales(dtype: KVDtype) -> None:
    assert shape_of(dtype).token_bytes == HEADS * (2 * DIM + 2 * 4 * dtype.scales)
    assert dtype.scales == (dtype is FP8)


def test_scales_make_the_largest_number_what_the_dtype_says(random_of: Any) -> None:
    ops = ReferenceOps()
    store = ops.new_pages(shape_of(FP8), 2, torch.device("cpu"))
    keys = random_of(TOKENS, HEADS, DIM)
    ops.write(store, 0, torch.arange(TOKENS), keys, keys)
    kv = ops.read_slots(store, torch.arange(TOKENS))
    assert torch.equal(kv.keys[0].float().abs().amax(-1), torch.full((TOKENS, HEADS), 240.0))
    assert torch.equal(kv.key_scales[0], keys.abs().amax(-1) / 240)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("dtype", NEW, ids=lambda one: one.name)
def test_saved_kv_of_a_new_dtype_loads_bit_for_bit(dtype: KVDtype, random_of: Any) -> None:
    layout = KVLayout((LayerGroup(Full(), (0,), shape_of(dtype)),))
    pool = PagePool(layout, 8, ReferenceOps(), lambda: Identity("weights", "reference"))
    with KVCache(pool) as cache, KVCache(pool) as other:
        cache.reserve(TOKENS)
        kv = random_of(TOKENS, HEADS, DIM)
        pool.ops.write(pool.stores[0], 0, cache.row(0).slots(0, 0, TOKENS), kv, -kv)
        cache.commit([list(range(TOKENS))])
        blob = cache.serialize()
        other.load(blob)
        assert other.serialize() == blob
        assert dtype.name.encode() in blob


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("dtype", NEW, ids=lambda one: one.name)
def test_a_layer_of_a_new_dtype_is_stored_bit_for_bit(dtype: KVDtype, random_of: Any) -> None:
    numbers = random_of(TOKENS, HEADS, DIM).to(dtype.storage)
    scales = [random_of(TOKENS, HEADS)] * 2 if dtype.scales else []
    one = LayerKV(numbers, numbers, *scales)
    assert (one.form.dtype, one.form.scaled) == (dtype.name, bool(dtype.scales))
    again = Raw().decode(Raw().encode(one), one.form, TOKENS)
    for a, b in zip(one.parts, again.parts, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    with pytest.raises(InputError, match=dtype.name):
        _ = LayerKV(numbers, numbers, *([] if dtype.scales else [random_of(TOKENS, HEADS)] * 2)).form


@pytest.mark.parametrize("dtype", NEW, ids=lambda one: one.name)
def test_a_backend_without_kernels_for_a_dtype_says_so(dtype: KVDtype) -> None:
    with pytest.raises(Unsupported, match=f"float32, float16, bfloat16, int8, k8v4 on the CPU, not {dtype.name}"):
        NativeOps(1).new_pages(shape_of(dtype), 2, torch.device("cpu"))


def test_dtypes_are_found_by_name_and_by_what_they_hold() -> None:
    assert kv_dtype_of(torch.int8, torch.int8, scaled=True) is INT8
    assert kv_dtype_of(torch.int8, torch.int8, scaled=False) is None
    assert kv_dtype_of(torch.int8, torch.uint8, scaled=True) is K8V4
    assert kv_dtype_of(torch.int8, torch.float32, scaled=True) is None
    assert kv_dtype_of(torch.float32, torch.float32, scaled=False) is FLOAT32
    check_kv_dtype("auto")
    with pytest.raises(ParamError, match="float32, float16, bfloat16, int8"):
        check_kv_dtype("int3")
