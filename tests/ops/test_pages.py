"""Pages: what is written comes back bit for bit, in canonical order, and nothing else is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvilt.ops.contract import KeysValues, Ops, PageShape

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def shape_of(dtype: torch.dtype, value_dim: int = 6) -> PageShape:
    return PageShape(layers=3, page_tokens=4, kv_heads=2, key_dim=8, value_dim=value_dim, dtype=dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def random_kv(random_of: Any, shape: PageShape, tokens: int, seed: int = 0) -> KeysValues:
    return KeysValues(
        random_of(shape.layers, tokens, shape.kv_heads, shape.key_dim, seed=seed).to(shape.dtype),
        random_of(shape.layers, tokens, shape.kv_heads, shape.value_dim, seed=seed + 1).to(shape.dtype),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_layers_write_is_read_in_canonical_order(
    ops: Ops, noisy_pages: Any, random_of: Any, dtype: torch.dtype
) -> None:
    shape = shape_of(dtype)
    store, slots = noisy_pages(shape, 5), torch.tensor([17, 2, 3, 8])
    keys, values = random_of(3, 4, 2, 8), random_of(3, 4, 2, 6)
    for layer in range(3):
        ops.write(store, layer, slots, keys[layer], values[layer])
    for order in (torch.tensor([0, 1, 2, 3]), torch.tensor([3, 0]), torch.tensor([1, 1])):
        found = ops.read_slots(store, slots[order])
        assert same_bits(found.keys, keys[:, order].to(dtype))
        assert same_bits(found.values, values[:, order].to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_slots_is_the_inverse_of_read_slots(
    ops: Ops, noisy_pages: Any, random_of: Any, dtype: torch.dtype
) -> None:
    shape = shape_of(dtype)
    store, kv, slots = noisy_pages(shape, 5), random_kv(random_of, shape, 4), torch.tensor([19, 0, 7, 4])
    ops.write_slots(store, slots, kv)
    found = ops.read_slots(store, slots)
    assert same_bits(found.keys, kv.keys)
    assert same_bits(found.values, kv.values)
    others = ops.read_slots(store, torch.tensor([s for s in range(20) if s not in slots.tolist()]))
    assert torch.isnan(others.keys).all()
    assert torch.isnan(others.values).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_awkward_numbers_keep_their_bits(ops: Ops, noisy_pages: Any, dtype: torch.dtype) -> None:
    shape = PageShape(1, 4, 1, 8, 8, dtype)
    numbers = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-7, 1e-40, 60000.0]).to(dtype)
    kv = KeysValues(numbers.view(1, 1, 1, 8), numbers.flip(0).view(1, 1, 1, 8))
    store = noisy_pages(shape, 2)
    ops.write_slots(store, torch.tensor([5]), kv)
    found = ops.read_slots(store, torch.tensor([5]))
    assert same_bits(found.keys, kv.keys)
    assert same_bits(found.values, kv.values)


def test_what_was_read_is_a_copy(ops: Ops, noisy_pages: Any, random_of: Any) -> None:
    shape = shape_of(torch.float32)
    store, kv, slots = noisy_pages(shape, 2), random_kv(random_of, shape, 2), torch.tensor([1, 2])
    ops.write_slots(store, slots, kv)
    found = ops.read_slots(store, slots)
    ops.write_slots(store, slots, random_kv(random_of, shape, 2, seed=9))
    assert same_bits(found.keys, kv.keys)


def test_reading_no_slot_gives_empty_tensors_of_the_right_shape(ops: Ops, noisy_pages: Any) -> None:
    found = ops.read_slots(noisy_pages(shape_of(torch.bfloat16), 2), torch.empty(0, dtype=torch.int64))
    assert found.keys.shape == (3, 0, 2, 8)
    assert found.values.shape == (3, 0, 2, 6)
    assert found.keys.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("abroad", [True, False], ids=["to another store", "within a store"])
def test_pages_are_copied_whole_and_alone(
    ops: Ops, noisy_pages: Any, random_of: Any, dtype: torch.dtype, abroad: bool
) -> None:
    shape = shape_of(dtype)
    source = noisy_pages(shape, 6)
    target = noisy_pages(shape, 6) if abroad else source
    kv = random_kv(random_of, shape, 8)
    ops.write_slots(source, torch.arange(4, 12), kv)  # pages 1 and 2
    ops.copy_pages(source, [2, 1], target, [3, 5])
    copied = ops.read_slots(target, torch.cat((torch.arange(20, 24), torch.arange(12, 16))))
    assert same_bits(copied.keys, kv.keys)
    assert same_bits(copied.values, kv.values)
    untouched = ops.read_slots(target, torch.tensor([0, 1, 2, 3, 16, 17, 18, 19]))
    assert torch.isnan(untouched.keys).all()
    kept = ops.read_slots(source, torch.arange(4, 12))
    assert same_bits(kept.keys, kv.keys)


def test_a_copied_page_is_no_longer_tied_to_its_source(ops: Ops, noisy_pages: Any, random_of: Any) -> None:
    shape = shape_of(torch.float32)
    store, kv = noisy_pages(shape, 3), random_kv(random_of, shape, 4)
    ops.write_slots(store, torch.arange(4), kv)
    ops.copy_pages(store, [0], store, [2])
    ops.write_slots(store, torch.arange(4), random_kv(random_of, shape, 4, seed=5))
    assert same_bits(ops.read_slots(store, torch.arange(8, 12)).keys, kv.keys)


def test_one_layer_is_written_without_touching_the_others(ops: Ops, noisy_pages: Any, random_of: Any) -> None:
    shape = shape_of(torch.float32)
    store = noisy_pages(shape, 2)
    ops.write(store, 1, torch.tensor([3]), random_of(1, 2, 8), random_of(1, 2, 6))
    found = ops.read_slots(store, torch.tensor([3]))
    assert torch.isnan(found.keys[[0, 2]]).all()
    assert not torch.isnan(found.keys[1]).any()


def test_a_store_knows_its_shape_and_values_may_have_no_width(ops: Ops, noisy_pages: Any, random_of: Any) -> None:
    shape = shape_of(torch.float32, value_dim=0)
    store = noisy_pages(shape, 2)
    assert store.shape == shape
    kv = random_kv(random_of, shape, 2)
    ops.write_slots(store, torch.tensor([1, 6]), kv)
    found = ops.read_slots(store, torch.tensor([1, 6]))
    assert same_bits(found.keys, kv.keys)
    assert found.values.shape == (3, 2, 2, 0)
