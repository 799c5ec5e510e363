"""Tokens that follow others: what their text had, and a share of what the others changed by, written like any other."""

from __future__ import annotations

from typing import Any

import _kvilt_native
import pytest
import torch
from torch import Tensor

from kvilt.ops.contract import Interpolation, Ops, PageShape
from kvilt.ops.kv_dtypes import FLOAT32, KV_DTYPES
from kvilt.ops.native.backend import NativeOps
from kvilt.ops.packed_values import unpack_values

FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def truth(who: Interpolation, kept: Tensor, fresh: Tensor) -> Tensor:
    """Token by token."""
    out = kept[who.tokens].double()
    for i in range(len(who.tokens)):
        for j, leader in enumerate(who.anchors.tolist()):
            out[i] += who.weights[i, j].double() * (fresh[j].double() - kept[leader].double())
    return out


def case(random_of: Any, text: int, followers: int, anchors: int) -> Interpolation:
    order = torch.randperm(text, generator=torch.Generator().manual_seed(text))
    weights = random_of(followers, anchors).abs() / max(1, anchors)
    return Interpolation(order[:followers].sort().values, order[followers : followers + anchors].sort().values, weights)


@pytest.mark.parametrize("kept_dtype", FLOATS)
@pytest.mark.parametrize(("text", "followers", "anchors"), [(80, 47, 9), (40, 3, 32), (5, 4, 1), (6, 6, 0), (4, 1, 3)])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(8, 6), (64, 64), (80, 48)])
def test_followers_take_their_share(
    ops: Ops, noisy_pages: Any, random_of: Any, near: Any, kept_dtype: torch.dtype, text: int, followers: int,
    anchors: int, key_dim: int, value_dim: int,
) -> None:  # fmt: skip
    shape = PageShape(layers=2, page_tokens=16, kv_heads=3, key_dim=key_dim, value_dim=value_dim, dtype=FLOAT32)
    store, who = noisy_pages(shape, 6), case(random_of, text, followers, anchors)
    kept = [random_of(text, 3, dim, seed=dim).to(kept_dtype) for dim in (key_dim, value_dim)]
    fresh = [random_of(anchors, 3, dim, seed=9) for dim in (key_dim, value_dim)]
    slots = torch.arange(96).flip(0)[:followers]
    inv_freq = torch.linspace(1.0, 0.01, key_dim // 2)
    rotation = ops.rotation(who.tokens + 100, inv_freq, 1.0, "half")
    expected = [truth(who, old, new) for old, new in zip(kept, fresh, strict=True)]
    for layer, turn in enumerate([rotation, None]):
        ops.interpolate(store, layer, slots, who, (kept[0], kept[1]), (fresh[0], fresh[1]), turn)
        found = ops.read_slots(store, slots)
        keys = ops.rotate(expected[0].float(), rotation) if turn is not None else expected[0]
        near(found.keys[layer], keys.double())
        near(found.values[layer], expected[1])
    others = torch.tensor([i for i in range(96) if i not in slots.tolist()])
    assert torch.isnan(ops.read_slots(store, others).keys).all()


@pytest.mark.parametrize("pairs", [0, 5], ids=["", "turned"])  # turned in part, and interleaved
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_pages_of_any_number_hold_what_write_would_put_there(
    ops: Ops, new_pages: Any, random_of: Any, dtype: str, pairs: int
) -> None:
    shape = PageShape(layers=1, page_tokens=16, kv_heads=2, key_dim=32, value_dim=16, dtype=KV_DTYPES[dtype])
    store, other = (new_pages(shape, 4) for _ in range(2))
    who, slots = case(random_of, 60, 8 if pairs else 40, 12), torch.arange(8 if pairs else 40)
    kept = (random_of(60, 2, 32, seed=1).half(), random_of(60, 2, 16, seed=2).half())
    fresh = (random_of(12, 2, 32, seed=3), random_of(12, 2, 16, seed=4))
    turn = ops.rotation(who.tokens, torch.linspace(1.0, 0.1, pairs), 1.2, "interleaved") if pairs else None
    ops.interpolate(store, 0, slots, who, kept, fresh, turn)
    keys, values = (truth(who, old, new).float() for old, new in zip(kept, fresh, strict=True))
    ops.write(other, 0, slots, keys, values, turn)
    found, expected = ops.read_slots(store, slots), ops.read_slots(other, slots)
    # A number between two that pages hold may go to either.
    unit, share = 1 if dtype in ("int8", "k8v4") else 0.02, 0.125 if dtype == "float8_e4m3fn" else 0.01
    torch.testing.assert_close(found.keys.float(), expected.keys.float(), rtol=share, atol=unit)
    both = [unpack_values(kv.values) if shape.dtype.packed_values else kv.values.float() for kv in (found, expected)]
    torch.testing.assert_close(*both, rtol=share, atol=unit)
    torch.testing.assert_close(found.key_scales, expected.key_scales)
    torch.testing.assert_close(found.value_scales, expected.value_scales)


@pytest.mark.parametrize("isa", _kvilt_native.available_isas())
def test_instruction_sets_and_threads_agree(isa: str, random_of: Any) -> None:
    shape = PageShape(layers=1, page_tokens=16, kv_heads=3, key_dim=40, value_dim=64, dtype=FLOAT32)
    who, slots = case(random_of, 400, 300, 32), torch.arange(300)
    kept = (random_of(400, 3, 40, seed=1).half(), random_of(400, 3, 64, seed=2).half())
    fresh = (random_of(32, 3, 40, seed=3), random_of(32, 3, 64, seed=4))
    found = []
    for ops in (NativeOps(1, isa), NativeOps(3, isa)):
        store = ops.new_pages(shape, 19, torch.device("cpu"))
        ops.interpolate(store, 0, slots, who, kept, fresh)
        found.append(ops.read_slots(store, slots))
    assert torch.equal(found[0].keys, found[1].keys)
    assert torch.equal(found[0].values, found[1].values)
    torch.testing.assert_close(found[0].keys[0].double(), truth(who, kept[0], fresh[0]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("tokens", "anchors", "slot"), [([5], [0], 0), ([0], [-1], 0), ([0], [5], 0), ([0], [1], 64)])
def test_nobody_follows_from_outside(random_of: Any, tokens: list[int], anchors: list[int], slot: int) -> None:
    shape = PageShape(layers=1, page_tokens=16, kv_heads=1, key_dim=8, value_dim=8, dtype=FLOAT32)
    ops = NativeOps(1)
    store = ops.new_pages(shape, 4, torch.device("cpu"))
    who = Interpolation(torch.tensor(tokens), torch.tensor(anchors), torch.ones(1, 1))
    with pytest.raises(IndexError):
        ops.interpolate(store, 0, torch.tensor([slot]), who, (random_of(5, 1, 8),) * 2, (random_of(1, 1, 8),) * 2)
