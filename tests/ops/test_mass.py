"""Attention that keys receive, against attention itself: values that name their key come out as its weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvilt.ops import mass as mass_module
from kvilt.ops.contract import AttentionMask, Ops, PageShape, PageStore, Paging
from kvilt.ops.kv_dtypes import KV_DTYPES

KEYS = 16
MASKS = {
    "plain": AttentionMask(0.35),
    "window": AttentionMask(0.35, window=5),
    "chunks": AttentionMask(0.35, window=5, chunked=True),
    "capped": AttentionMask(0.5, soft_cap=2.0),
    "sinks": AttentionMask(0.35, sinks=torch.tensor([0.0, 1.0, -4.0, 5.0])),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "float8_e4m3fn", "k8v4"])
@pytest.mark.parametrize("at", [[15], [0, 3, 9, 14], list(range(9, 13))], ids=str)
def test_mass_is_the_sum_of_weights(
    ops: Ops,
    noisy_pages: Callable[[PageShape, int], PageStore],
    paging_of: Callable[..., Paging],
    random_of: Callable[..., Tensor],
    monkeypatch: pytest.MonkeyPatch,
    mask: AttentionMask,
    dtype: str,
    at: list[int],
) -> None:
    monkeypatch.setattr(mass_module, "QUERY_BLOCK", 3)
    table, query = [5, 0, 7, 2], random_of(len(at), 4, 16)
    store = noisy_pages(PageShape(2, 4, 2, 16, KEYS, KV_DTYPES[dtype]), 8)
    names = torch.eye(KEYS).unsqueeze(1).expand(KEYS, 2, KEYS).contiguous()
    written = paging_of(4, (table, list(range(KEYS))))
    ops.write(store, 1, written.slots, random_of(KEYS, 2, 16, seed=1), names)
    paging = paging_of(4, (table, at))
    weights = ops.attention(query, store, 1, paging, mask)  # [tokens, heads, keys]
    found = ops.key_mass(query, store, 1, paging.tables[0], paging.positions, mask)
    assert found.shape == (max(at) + 1,)
    torch.testing.assert_close(found, weights.mean(1).sum(0)[: max(at) + 1], rtol=0, atol=2e-3)
    if mask.sinks is None:
        torch.testing.assert_close(found.sum(), torch.tensor(float(len(at))))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_mass_on_latent_keys_counts_their_values(
    ops: Ops,
    noisy_pages: Callable[[PageShape, int], PageStore],
    paging_of: Callable[..., Paging],
    random_of: Callable[..., Tensor],
    dtype: str,
) -> None:
    table, at, mask = [5, 0, 7, 2], [3, 15], MASKS["plain"]
    store = noisy_pages(PageShape(2, 4, 1, 6, KEYS, KV_DTYPES[dtype], latent=True), 8)
    query, names = random_of(len(at), 4, 6 + KEYS), torch.eye(KEYS).unsqueeze(1).contiguous()
    ops.write(store, 1, paging_of(4, (table, list(range(KEYS)))).slots, random_of(KEYS, 1, 6, seed=1), names)
    paging = paging_of(4, (table, at))
    weights = ops.attention(query, store, 1, paging, mask)  # [tokens, heads, keys]
    found = ops.key_mass(query, store, 1, paging.tables[0], paging.positions, mask)
    torch.testing.assert_close(found, weights.mean(1).sum(0)[: max(at) + 1], rtol=0, atol=2e-3)
