"""Decode rows that bring their keys and values along: what they write and see is what two operations would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvilt.ops.contract import AttentionMask, NewKV, Ops, PageShape, Paging, Pairing, RowLengths
from kvilt.ops.kv_dtypes import BFLOAT16, FLOAT8, FLOAT16, FLOAT32, K8V4

PLAIN = AttentionMask(scale=0.3)
SHAPE = PageShape(layers=2, page_tokens=4, kv_heads=2, key_dim=16, value_dim=16, dtype=FLOAT32)
CASES: dict[str, tuple[PageShape, int, Pairing, AttentionMask]] = {
    "all pairs": (SHAPE, 8, "half", PLAIN),
    "neighbours are pairs": (SHAPE, 8, "interleaved", PLAIN),
    "some dimensions pass": (SHAPE, 5, "half", PLAIN),
    "some neighbours pass": (SHAPE, 3, "interleaved", PLAIN),
    "narrow values": (PageShape(2, 4, 2, 24, 6, FLOAT32), 12, "half", PLAIN),
    "a window": (SHAPE, 8, "half", AttentionMask(scale=0.3, window=5)),
    "bfloat16": (PageShape(2, 4, 2, 16, 16, BFLOAT16), 8, "half", PLAIN),
    "float16": (PageShape(2, 4, 2, 16, 16, FLOAT16), 8, "half", PLAIN),
    "k8v4": (PageShape(2, 4, 2, 16, 16, K8V4), 8, "half", PLAIN),
    "float8": (PageShape(2, 4, 2, 16, 16, FLOAT8), 8, "half", PLAIN),
    "latent": (PageShape(2, 4, 1, 8, 20, FLOAT32, latent=True), 4, "interleaved", PLAIN),
}


def paging_of(positions: list[int], pages: int, page_tokens: int) -> Paging:
    """Rows of one token each, on pages of their own that are not in order."""
    order, width = list(range(pages))[::-1], -(-(max(positions) + 1) // page_tokens)
    tables = [[order.pop() if i * page_tokens <= at else -1 for i in range(width)] for at in positions]
    slots = [
        table[at // page_tokens] * page_tokens + at % page_tokens for table, at in zip(tables, positions, strict=True)
    ]
    starts = tuple(range(len(positions) + 1))
    lengths = RowLengths.of(starts, positions)
    return Paging(torch.tensor(tables), torch.tensor(slots), lengths, torch.tensor(positions))


@pytest.mark.parametrize("name", ["all pairs", "neighbours are pairs", "some dimensions pass", "bfloat16", "float8"])
@pytest.mark.parametrize("rows", [2, 3])
def test_norms_of_heads_come_first(ops: Ops, new_pages: Any, random_of: Any, name: str, rows: int) -> None:
    shape, pairs, pairing, mask = CASES[name]
    if ops.name == "native" and shape.dtype is FLOAT8:
        return
    paging, slots = paging_of([3, 9, 1][:rows], 48, 4), torch.arange(4 * 48)
    stores = [new_pages(shape, 48) for _ in range(2)]
    for store in stores:
        ops.write(store, 1, slots, *(random_of(4 * 48, 2, 16, seed=seed) for seed in (1, 2)))
    query, keys, values = (random_of(rows, heads, 16, seed=3 + heads) for heads in (4, 2, 2))
    norms = ((random_of(16, seed=8) + 1, 1e-2), (random_of(16, seed=9) + 1, 1e-3))
    rotation = ops.rotation(paging.positions, 0.7 ** torch.arange(pairs).float(), 1.1, pairing)
    found = ops.attention(query, stores[0], 1, paging, mask, NewKV(keys, values, rotation, norms))
    normed = [ops.rms_norm(x, *norm) for x, norm in zip((query, keys), norms, strict=True)]
    truth = ops.attention(normed[0], stores[1], 1, paging, mask, NewKV(normed[1], values, rotation))
    torch.testing.assert_close(found, truth, rtol=2e-5, atol=2e-5)
    read = [ops.read_slots(store, slots).keys[1].float() for store in stores]
    torch.testing.assert_close(*read, rtol=1e-5 if shape.dtype is FLOAT32 else 1e-2, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("positions", [[0], [3, 9], [2, 150]], ids=["first", "short", "split"])
def test_it_is_a_write_and_then_attention(
    ops: Ops, new_pages: Any, random_of: Any, name: str, positions: list[int]
) -> None:
    shape, pairs, pairing, mask = CASES[name]
    if ops.name == "native" and shape.dtype is FLOAT8:
        return  # refused: test_kv_dtypes.py
    paging, rows = paging_of(positions, 48, shape.page_tokens), len(positions)
    stores = [new_pages(shape, 48) for _ in range(2)]
    old, slots = 4 * 48, torch.arange(4 * 48)

    def new(tokens: int, seed: int) -> tuple[Tensor, Tensor]:
        heads = shape.kv_heads
        return random_of(tokens, heads, shape.key_dim, seed=seed), random_of(
            tokens, heads, shape.value_dim, seed=seed + 1
        )

    for store in stores:
        ops.write(store, 1, slots, *new(old, seed=1))
    query, (keys, values) = random_of(rows, 4, shape.query_dim, seed=3), new(rows, seed=4)
    rotation = ops.rotation(paging.positions, 0.7 ** torch.arange(pairs).float(), 1.1, pairing)
    found = ops.attention(query, stores[0], 1, paging, mask, NewKV(keys, values, rotation))
    turned = ops.rotate_and_write(stores[1], 1, paging.slots, query, keys, values, rotation)
    torch.testing.assert_close(found, ops.attention(turned, stores[1], 1, paging, mask), rtol=2e-6, atol=2e-6)
    read = [ops.read_slots(store, slots) for store in stores]
    torch.testing.assert_close(read[0].keys[1].float(), read[1].keys[1].float(), rtol=1e-6, atol=1e-6)
    assert torch.equal(read[0].values[1].float(), read[1].values[1].float())


@pytest.mark.parametrize("name", ["all pairs", "a window", "bfloat16"])
def test_so_it_is_with_more_rows(ops: Ops, new_pages: Any, random_of: Any, name: str) -> None:
    """A backend may have another kernel for them."""
    test_it_is_a_write_and_then_attention(ops, new_pages, random_of, name, [3, 9, 1, 0, 5, 7, 2, 30, 12])
