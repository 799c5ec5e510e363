"""KV that is still on its way from a device: every reader of a record waits for it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from late_copies import LateStream, staged
from tiny import write_tiny

from kvilt.config import RunConfig
from kvilt.executor.executor import ModelExecutor
from kvilt.executor.load import load_executor
from kvilt.kv.cache import KVCache
from kvilt.kv.prefix import EvictedPage, PrefixIndex
from kvilt.kv.prefix_keys import PrefixKeys, PrefixScope
from kvilt.kv.row import RowImage
from kvilt.ops.reference import ReferencePages
from kvilt.store.address import page_addresses
from kvilt.store.layer import stacked


@pytest.fixture
def late(tmp_path: Path) -> ModelExecutor:
    """A model whose copies to the host happen when something waits for them."""
    folder = write_tiny(tmp_path / "model", sliding_window=None)
    executor = load_executor(folder, RunConfig(kv_memory=1 << 19, backend="reference", threads=1))
    executor.pool.ops.host_copies = staged(LateStream())  # type: ignore[misc]
    return executor


def evicted(executor: ModelExecutor, prompt: list[int]) -> tuple[RowImage, list[EvictedPage]]:
    """The KV of a prompt, and its pages as an index loses them; then the pages hold something else."""
    kv, pool = executor.create_kv_cache(), executor.pool
    executor.prefill(prompt, kv)
    image, told = kv.row(0).image(), list[EvictedPage]()
    PrefixIndex(pool).insert(kv.row(0), PrefixKeys(PrefixScope()), told.append)
    kv.close()
    pool.take(pool.free_pages())
    for store in pool.stores:
        assert isinstance(store, ReferencePages)
        store.keys.fill_(9.0)
        store.values.fill_(9.0)
    return image, told


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_a_page_that_was_evicted_comes_back_whole(kit: Any, late: ModelExecutor, tmp_path: Path, tier: str) -> None:
    pool, size = late.pool, late.pool.page_tokens
    prompt = [(5 * i + 1) % 50 for i in range(2 * size + 1)]
    before, told = evicted(late, prompt)
    assert len(told) == 2
    tiers, memory = ([kit.disk(tmp_path / "kv")], None) if tier == "disk" else ([], kit.roomy)
    with kit.store(*tiers, memory=memory) as store:
        identity = dataclasses.replace(pool.identity(), salt="")
        for page in told:
            store.put_evicted(pool.identity(), pool.layout, page)
        assert store.flush(60)
        wanted = list(page_addresses(identity, prompt, pool.layout, size))
        images = [store.open(one).image(pool.layout) for one in wanted]
        keys, values = (
            torch.cat([getattr(image.groups[0], name) for image in images], dim=1) for name in ("keys", "values")
        )
        assert torch.equal(keys, before.groups[0].keys[:, : 2 * size])
        assert torch.equal(values, before.groups[0].values[:, : 2 * size])


def test_a_row_that_is_written_from_the_host_is_there_for_the_next_step(late: ModelExecutor) -> None:
    with late.create_kv_cache() as kv:
        late.prefill(list(range(40)), kv)
        expected = late.step([7], kv)
        kv.truncate(40)
        with KVCache.of_images(late.pool, [kv.row(0).image()], 64) as copied:
            assert torch.equal(late.step([7], copied), expected)


def test_layers_that_follow_each_other_in_memory_are_stacked_without_a_copy() -> None:
    whole = torch.arange(24.0).view(4, 3, 2)
    assert stacked(list(whole)).data_ptr() == whole.data_ptr()
    assert torch.equal(stacked(list(whole)), whole)
    for parts in ([whole[0], whole[2]], [whole[1], whole[0]], [whole[0], whole[1].clone()], [whole[0].T, whole[1].T]):
        assert torch.equal(stacked(parts), torch.stack(parts))
