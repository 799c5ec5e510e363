"""Rows of real caches and pages of real prefixes through the store: what comes back is the same KV to the bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from families import random_model, write_checkpoint

from kvilt.config import RunConfig
from kvilt.errors import StoreMiss
from kvilt.executor.load import load_executor
from kvilt.executor.protocol import Executor
from kvilt.kv.cache import KVCache
from kvilt.kv.prefix import EvictedPage, PrefixIndex
from kvilt.kv.prefix_keys import PrefixKeys, PrefixScope
from kvilt.ops.contract import KeysValues
from kvilt.store.address import page_addresses, row_address

PROMPT = [(7 * i + 3) % 50 for i in range(40)]


def filled(executor: Executor, tokens: list[int]) -> KVCache:
    kv = executor.create_kv_cache()
    executor.prefill(tokens, kv)
    return kv


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_row_comes_back_to_the_bit_after_a_restart(kit: Any, tiny: Executor, tmp_path: Path, codec: str) -> None:
    identity = tiny.pool.identity()
    with filled(tiny, PROMPT) as kv, kit.store(kit.disk(tmp_path), memory=kit.roomy, codec=codec) as store:
        store.put_cache(kv)
        before = kv.serialize()
    with kit.store(kit.disk(tmp_path), codec=codec) as store:
        found = store.open_row(identity, tiny.pool.layout, PROMPT)
        with KVCache.of_images(tiny.pool, [found.image(tiny.pool.layout)], 64) as kv:
            assert kv.serialize() == before
        assert found.tier == "disk"
        with pytest.raises(StoreMiss, match="absent"):
            store.open_row(identity, tiny.pool.layout, PROMPT[:-1]).image(tiny.pool.layout)
        other = dataclasses.replace(identity, salt="somebody else")
        assert not store.open_row(other, tiny.pool.layout, PROMPT).hit()


def test_a_row_whose_layers_have_keys_and_a_state_comes_back(kit: Any, tmp_path: Path) -> None:
    """Falcon-H1, on which the next tokens are the same to the bit too."""
    folder = write_checkpoint(random_model("falcon-h1"), tmp_path)
    executor = load_executor(folder, RunConfig(kv_memory=1 << 24, backend="native", threads=1))
    with filled(executor, PROMPT) as kv, kit.store(memory=kit.roomy) as store:
        store.put_cache(kv)
        image = store.open_row(executor.pool.identity(), executor.pool.layout, PROMPT).image(executor.pool.layout)
        with KVCache.of_images(executor.pool, [image], 64) as found:
            assert found.resumes_at == found.lengths == (len(PROMPT),)
            assert torch.equal(executor.step([5, 9], found), executor.step([5, 9], kv))
    executor.close()


def test_every_row_of_a_batch_has_its_own_record(kit: Any, tiny: Executor) -> None:
    with filled(tiny, PROMPT) as one, tiny.create_kv_cache(batch_size=3) as kv, kit.store(memory=kit.roomy) as store:
        kv.broadcast_and_copy_from(one)
        kv.truncate([5, 5, 3] if min(one.row(0).firsts) == max(one.row(0).firsts) == 0 else [40, 40, 39])
        rows = store.put_cache(kv)
        assert len({row.address.key for row in rows}) == 2
        for index, row in enumerate(rows):
            assert row.image(kv.layout).ids.tolist() == kv.tokens(index)


def test_a_row_with_less_than_is_asked_for_is_a_miss(kit: Any, tiny: Executor) -> None:
    """A record of another history may have given away what this question still needs."""
    layout, identity = tiny.pool.layout, tiny.pool.identity()
    with filled(tiny, PROMPT) as kv, kit.store(memory=kit.roomy) as store:
        store.put_cache(kv)
        asked = row_address(identity, PROMPT, layout)
        assert store.open(asked).hit()
        greedy = asked.with_firsts((0,) * layout.num_layers)
        gave_away = max(kv.row(0).firsts) > 0
        assert store.open(greedy).hit() != gave_away
        if gave_away:
            assert kit.count(store, "refused_total", tier="memory", reason="span") == 1


def pages(executor: Executor, kv: KVCache, scope: PrefixScope) -> list[EvictedPage]:
    """What an index tells its sink about each page of a row when it must go."""
    told: list[EvictedPage] = []
    index = PrefixIndex(executor.pool)
    index.insert(kv.row(0), PrefixKeys(scope), told.append)
    kv.close()
    executor.pool.take([executor.pool.free_pages()[0]] * len(executor.pool.layout.groups))
    return told


@pytest.fixture
def small(tmp_path: Path, request: pytest.FixtureRequest) -> Executor:
    """A model of its own, whose pool a test may use up."""
    from tiny import write_tiny

    folder = write_tiny(tmp_path / "model", sliding_window=None)
    return load_executor(folder, RunConfig(kv_memory=1 << 19, backend="reference", threads=1))


def test_evicted_pages_are_found_again_by_the_prompt(kit: Any, small: Executor, tmp_path: Path) -> None:
    pool, size = small.pool, small.pool.layout.page_tokens
    prompt = [(5 * i + 1) % 50 for i in range(3 * size + 2)]
    kv = filled(small, prompt)
    (before,) = [kv.row(0).image()]
    scope = PrefixScope(salt="tenant")
    told = pages(small, kv, scope)
    assert sorted({one.start for one in told}) == [0, size, 2 * size]
    identity = dataclasses.replace(pool.identity(), salt="tenant")
    with kit.store(kit.disk(tmp_path / "kv")) as store:
        for page in told:
            store.put_evicted(pool.identity(), pool.layout, page)
    with kit.store(kit.disk(tmp_path / "kv")) as store:
        wanted = list(page_addresses(identity, prompt, pool.layout, size))
        assert store.count_leading(wanted) == 3
        other = list(page_addresses(identity, [9, *prompt[1:]], pool.layout, size))
        assert store.count_leading(other) == 0
        changed = list(page_addresses(identity, [*prompt[:size], 49, *prompt[size + 1 :]], pool.layout, size))
        assert store.count_leading(changed) == 1
        images = [store.open(one).image(pool.layout) for one in wanted]
        for group in range(len(pool.layout.groups)):
            keys = torch.cat([image.groups[group].keys for image in images], dim=1)
            assert torch.equal(keys, before.groups[group].keys[:, : 3 * size])
        assert [image.firsts[0] for image in images] == [0, size, 2 * size]


def test_a_page_without_its_window_serves_only_who_does_not_need_it(kit: Any, tiny: Executor) -> None:
    layout, identity, size = tiny.pool.layout, tiny.pool.identity(), tiny.pool.layout.page_tokens
    tokens = tuple(range(size))
    kv: tuple[KeysValues | None, ...] = (None,) * len(layout.groups)
    with kit.store(memory=kit.roomy) as store:
        store.put_evicted(identity, layout, EvictedPage(PrefixScope(), tokens, 0, kv))
        (asked,) = page_addresses(identity, list(tokens), layout, size)
        assert not store.open(asked).hit()
