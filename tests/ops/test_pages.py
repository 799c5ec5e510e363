"""Pages: what is written comes back bit for bit, in canonical order, and nothing else is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvilt.ops.contract import KeysValues, Ops, PageShape, Rotation
from kvilt.ops.kv_dtypes import BFLOAT16, FLOAT16, FLOAT32, INT8, K8V4, KV_DTYPES, KVDtype
from kvilt.ops.reference import ReferenceOps

EVERY = list(KV_DTYPES.values())
DTYPES = [dtype for dtype in EVERY if not dtype.scales]
SCALED = [dtype for dtype in EVERY if dtype.scales]
TORCH_DTYPES = [dtype.storage for dtype in DTYPES]


def shape_of(dtype: KVDtype, value_dim: int = 6) -> PageShape:
    return PageShape(layers=3, page_tokens=4, kv_heads=2, key_dim=8, value_dim=value_dim, dtype=dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def random_kv(random_of: Any, shape: PageShape, tokens: int, seed: int = 0) -> KeysValues:
    heads = (shape.layers, tokens, shape.kv_heads)
    keys = (20 * random_of(*heads, shape.key_dim, seed=seed)).to(shape.dtype.storage)
    values = 20 * random_of(*heads, shape.value_width, seed=seed + 1)
    if shape.dtype.packed_values:
        values = (values + 128).clamp(0, 255)  # any byte is two values
    scales = (random_of(*heads, seed=seed + i).abs() for i in range(2)) if shape.scales else ()
    return KeysValues(keys, values.to(shape.dtype.value_storage), *scales)


def same_kv(a: KeysValues, b: KeysValues) -> bool:
    scales = same_bits(a.key_scales, b.key_scales) and same_bits(a.value_scales, b.value_scales)
    return scales and same_bits(a.keys, b.keys) and same_bits(a.values, b.values)


def is_noise(kv: KeysValues) -> bool:
    """Whether all of it is NaN: the numbers, or the scales of bytes."""
    parts = (kv.key_scales, kv.value_scales) if kv.key_scales.numel() else (kv.keys, kv.values)
    return all(bool(torch.isnan(part).all()) for part in parts)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda one: one.name)
def test_what_layers_write_is_read_in_canonical_order(
    ops: Ops, noisy_pages: Any, random_of: Any, dtype: KVDtype
) -> None:
    shape = shape_of(dtype)
    store, slots = noisy_pages(shape, 5), torch.tensor([17, 2, 3, 8])
    keys, values = random_of(3, 4, 2, 8), random_of(3, 4, 2, 6)
    for layer in range(3):
        ops.write(store, layer, slots, keys[layer], values[layer])
    for order in (torch.tensor([0, 1, 2, 3]), torch.tensor([3, 0]), torch.tensor([1, 1])):
        found = ops.read_slots(store, slots[order])
        assert same_bits(found.keys, keys[:, order].to(dtype.storage))
        assert same_bits(found.values, values[:, order].to(dtype.storage))


@pytest.mark.parametrize("dtype", EVERY, ids=lambda one: one.name)
def test_write_slots_is_the_inverse_of_read_slots(ops: Ops, noisy_pages: Any, random_of: Any, dtype: KVDtype) -> None:
    shape = shape_of(dtype)
    store, kv, slots = noisy_pages(shape, 5), random_kv(random_of, shape, 4), torch.tensor([19, 0, 7, 4])
    ops.write_slots(store, slots, kv)
    assert same_kv(ops.read_slots(store, slots), kv)
    assert is_noise(ops.read_slots(store, torch.tensor([s for s in range(20) if s not in slots.tolist()])))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda one: one.name)
def test_awkward_numbers_keep_their_bits(ops: Ops, noisy_pages: Any, dtype: KVDtype) -> None:
    shape = PageShape(1, 4, 1, 8, 8, dtype)
    numbers = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-7, 1e-40, 60000.0]).to(
        dtype.storage
    )
    kv = KeysValues(numbers.view(1, 1, 1, 8), numbers.flip(0).view(1, 1, 1, 8))
    store = noisy_pages(shape, 2)
    ops.write_slots(store, torch.tensor([5]), kv)
    found = ops.read_slots(store, torch.tensor([5]))
    assert same_bits(found.keys, kv.keys)
    assert same_bits(found.values, kv.values)


def test_what_was_read_is_a_copy(ops: Ops, noisy_pages: Any, random_of: Any) -> None:
    shape = shape_of(FLOAT32)
    store, kv, slots = noisy_pages(shape, 2), random_kv(random_of, shape, 2), torch.tensor([1, 2])
    ops.write_slots(store, slots, kv)
    found = ops.read_slots(store, slots)
    ops.write_slots(store, slots, random_kv(random_of, shape, 2, seed=9))
    assert same_bits(found.keys, kv.keys)


def test_reading_no_slot_gives_empty_tensors_of_the_right_shape(ops: Ops, noisy_pages: Any) -> None:
    found = ops.read_slots(noisy_pages(shape_of(BFLOAT16), 2), torch.empty(0, dtype=torch.int64))
    assert found.keys.shape == (3, 0, 2, 8)
    assert found.values.shape == (3, 0, 2, 6)
    assert found.keys.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", EVERY, ids=lambda one: one.name)
@pytest.mark.parametrize("abroad", [True, False], ids=["to another store", "within a store"])
def test_pages_are_copied_whole_and_alone(
    ops: Ops, noisy_pages: Any, random_of: Any, dtype: KVDtype, abroad: bool
) -> None:
    shape = shape_of(dtype)
    source = noisy_pages(shape, 6)
    target = noisy_pages(shape, 6) if abroad else source
    kv = random_kv(random_of, shape, 8)
    ops.write_slots(source, torch.arange(4, 12), kv)  # pages 1 and 2
    ops.copy_pages(source, [2, 1], target, [3, 5])
    copied = ops.read_slots(target, torch.cat((torch.arange(20, 24), torch.arange(12, 16))))
    assert same_kv(copied, kv)
    assert is_noise(ops.read_slots(target, torch.tensor([0, 1, 2, 3, 16, 17, 18, 19])))
    assert same_kv(ops.read_slots(source, torch.arange(4, 12)), kv)


def test_a_copied_page_is_no_longer_tied_to_its_source(ops: Ops, noisy_pages: Any, random_of: Any) -> None:
    shape = shape_of(FLOAT32)
    store, kv = noisy_pages(shape, 3), random_kv(random_of, shape, 4)
    ops.write_slots(store, torch.arange(4), kv)
    ops.copy_pages(store, [0], store, [2])
    ops.write_slots(store, torch.arange(4), random_kv(random_of, shape, 4, seed=5))
    assert same_bits(ops.read_slots(store, torch.arange(8, 12)).keys, kv.keys)


def test_one_layer_is_written_without_touching_the_others(ops: Ops, noisy_pages: Any, random_of: Any) -> None:
    shape = shape_of(FLOAT32)
    store = noisy_pages(shape, 2)
    ops.write(store, 1, torch.tensor([3]), random_of(1, 2, 8), random_of(1, 2, 6))
    found = ops.read_slots(store, torch.tensor([3]))
    assert torch.isnan(found.keys[[0, 2]]).all()
    assert not torch.isnan(found.keys[1]).any()


def test_a_store_knows_its_shape_and_values_may_have_no_width(ops: Ops, noisy_pages: Any, random_of: Any) -> None:
    shape = shape_of(FLOAT32, value_dim=0)
    store = noisy_pages(shape, 2)
    assert store.shape == shape
    kv = random_kv(random_of, shape, 2)
    ops.write_slots(store, torch.tensor([1, 6]), kv)
    found = ops.read_slots(store, torch.tensor([1, 6]))
    assert same_bits(found.keys, kv.keys)
    assert found.values.shape == (3, 2, 2, 0)


# Bytes: a scale per token and head.


def test_bytes_are_the_nearest_to_what_was_written(ops: Ops, noisy_pages: Any, random_of: Any) -> None:
    shape = shape_of(INT8)
    store, slots = noisy_pages(shape, 5), torch.tensor([17, 2, 3, 8])
    keys, values = 5 * random_of(4, 2, 8), random_of(4, 2, 6)
    ops.write(store, 1, slots, keys, values)
    found = ops.read_slots(store, slots)
    for x, numbers, scales in ((keys, found.keys, found.key_scales), (values, found.values, found.value_scales)):
        assert torch.equal(scales[1], x.abs().amax(-1) / 127)  # of its own token and head, and of nothing else
        back = numbers[1].double() * scales[1].double().unsqueeze(-1)
        assert ((back - x).abs() <= 0.5001 * scales[1].unsqueeze(-1)).all()
        assert (numbers[1].abs().amax(-1) == 127).all()


def test_values_of_four_bits_are_the_nearest_to_what_was_written(ops: Ops, noisy_pages: Any, random_of: Any) -> None:
    shape = PageShape(2, 4, 2, 8, 40, K8V4)
    store, slots = noisy_pages(shape, 5), torch.tensor([17, 2, 3, 8])
    keys, values = random_of(4, 2, 8), 5 * random_of(4, 2, 40)
    ops.write(store, 1, slots, keys, values)
    found = ops.read_slots(store, slots)
    scale, largest = found.value_scales[1], values.abs().amax(-1)
    assert torch.equal(scale.abs() * 8, largest)  # of its own token and head, and of nothing else
    low, high = found.values[1] & 15, found.values[1] >> 4
    codes = torch.stack((low, high), -1).flatten(-2).float() - 8
    assert codes.min() == -8  # the largest value of each head
    apart = (codes * scale.unsqueeze(-1) - values).abs()
    at_the_end = codes == 7  # the other sign has one step less: half a step beyond it is cut off
    assert (apart <= (0.5001 + 0.5 * at_the_end) * scale.abs().unsqueeze(-1)).all()
    assert torch.equal(found.key_scales[1], keys.abs().amax(-1) / 127)


AWKWARD = {
    "zeros": [0.0, -0.0, 0.0, 0.0],
    "too small for a scale": [1e-37, -1e-40, 0.0, 1e-38],
    "small": [1e-35, -1e-36, 0.0, 3e-36],
    "large": [3e38, -3e38, 1.0, 0.0],
    "ties": [127.0, 0.5, 1.5, -2.5],
    "one far from the others": [1e6, 1.0, -1.0, 4e3],
}


@pytest.mark.parametrize("dtype", SCALED, ids=lambda one: one.name)
@pytest.mark.parametrize("name", AWKWARD)
def test_every_backend_makes_the_same_bytes(ops: Ops, noisy_pages: Any, name: str, dtype: KVDtype) -> None:
    shape = PageShape(1, 4, 1, 4, 4, dtype)
    x, slots = torch.tensor(AWKWARD[name]).view(1, 1, 4), torch.tensor([5])
    reference, store = ReferenceOps(), noisy_pages(shape, 2)
    truth = reference.new_pages(shape, 2, torch.device("cpu"))
    ops.write(store, 0, slots, x, -x)
    reference.write(truth, 0, slots, x, -x)
    assert same_kv(ops.read_slots(store, slots), reference.read_slots(truth, slots))


@pytest.mark.parametrize("dtype", SCALED, ids=lambda one: one.name)
def test_many_tokens_become_the_same_bytes_on_every_backend(
    ops: Ops, new_pages: Any, random_of: Any, dtype: KVDtype
) -> None:
    shape = PageShape(1, 32, 3, 64, 40, dtype)
    slots = torch.randperm(128, generator=torch.Generator().manual_seed(1))[:100]
    keys, values = random_of(100, 3, 64) * 4, random_of(100, 3, 40)
    reference, found = ReferenceOps(), []
    for backend, store in ((ops, new_pages(shape, 4)), (reference, reference.new_pages(shape, 4, slots.device))):
        backend.write(store, 0, slots, keys, values)
        found.append(backend.read_slots(store, slots))
    assert same_kv(*found)


@pytest.mark.parametrize("dtype", [INT8, K8V4], ids=lambda one: one.name)
def test_what_is_no_number_stays_none_and_spoils_only_its_own_head(ops: Ops, noisy_pages: Any, dtype: KVDtype) -> None:
    shape = PageShape(1, 4, 2, 4, 4, dtype)
    store, slots, x = noisy_pages(shape, 2), torch.tensor([5]), torch.ones(1, 2, 4)
    x[0, 1, 2] = float("nan")
    ops.write(store, 0, slots, x, x)
    found = ops.read_slots(store, slots)
    assert torch.isnan(found.key_scales[0, 0]).tolist() == [False, True]
    assert torch.isnan(found.value_scales[0, 0]).tolist() == [False, True]
    assert torch.equal(found.keys[0, 0, 0], torch.full((4,), 127, dtype=torch.int8))


@pytest.mark.parametrize("dtype", SCALED, ids=lambda one: one.name)
def test_a_query_is_rotated_while_its_keys_are_scaled(ops: Ops, new_pages: Any, random_of: Any, dtype: KVDtype) -> None:
    shape = PageShape(2, 4, 2, 16, 8, dtype)
    angles, slots = 3 * random_of(3, 5), torch.tensor([5, 0, 7])
    query, keys, values = random_of(3, 4, 16), random_of(3, 2, 16), random_of(3, 2, 8)
    rotation, stores = Rotation(angles.cos(), angles.sin(), "half"), [new_pages(shape, 2) for _ in range(2)]
    found = ops.rotate_and_write(stores[0], 1, slots, query, keys, values, rotation)
    ops.write(stores[1], 1, slots, keys, values, rotation)
    assert torch.equal(found, ops.rotate(query, rotation))
    written = [ops.read_slots(store, slots) for store in stores]
    assert same_bits(written[0].keys[1], written[1].keys[1]) and same_bits(written[0].values[1], written[1].values[1])
    assert same_bits(written[0].key_scales[1], written[1].key_scales[1])


def test_bytes_count_their_scales() -> None:
    floats, whole = shape_of(FLOAT16), shape_of(INT8)
    assert floats.token_bytes == 3 * 2 * (8 + 6) * 2
    assert whole.token_bytes == 3 * 2 * ((8 + 6) + 2 * 4)
    assert shape_of(K8V4).token_bytes == 3 * 2 * ((8 + 3) + 2 * 4)


# Placing: keys are turned on their way into the pages.


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("pairs", [32, 20, 3])
@pytest.mark.parametrize("dtype", EVERY, ids=lambda one: one.name)
def test_keys_turned_on_their_way_are_those_turned_before(
    ops: Ops, new_pages: Any, random_of: Any, dtype: KVDtype, pairs: int, pairing: Any
) -> None:
    shape = PageShape(1, 32, 2, 64, 16, dtype)
    keys, values, angles = random_of(40, 2, 64), random_of(40, 2, 16), 3 * random_of(40, pairs)
    rotation = Rotation(angles.cos(), angles.sin(), pairing)
    slots, found = torch.arange(7, 47), []
    for turned in (False, True):
        store = new_pages(shape, 2)
        if turned:
            ops.write(store, 0, slots, ops.rotate(keys, rotation), values)
        else:
            ops.write(store, 0, slots, keys, values, rotation)
        found.append(ops.read_slots(store, slots))
    assert same_kv(*found)


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_keys_of_a_stored_chunk_may_come_in_its_own_dtype(ops: Ops, random_of: Any, dtype: torch.dtype) -> None:
    shape = PageShape(1, 4, 2, 8, 6, FLOAT32)
    keys, values, angles = random_of(3, 2, 8).to(dtype), random_of(3, 2, 6).to(dtype), random_of(3, 4)
    rotation = Rotation(angles.cos(), angles.sin(), "half")
    store, slots = ops.new_pages(shape, 2, torch.device("cpu")), torch.tensor([6, 1, 4])
    ops.write(store, 0, slots, keys, values, rotation)
    found = ops.read_slots(store, slots)
    assert same_bits(found.keys[0], ops.rotate(keys.float(), rotation))
    assert same_bits(found.values[0], values.float())
