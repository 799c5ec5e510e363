"""Small KV for records, and what a store counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from stores import _redis, proxy, redis_server, small_disk, until  # noqa: F401 (fixtures)

from kvilt.kv.identity import Identity
from kvilt.store.address import Form
from kvilt.store.disk import Disk
from kvilt.store.layer import LayerKV
from kvilt.store.loading import Loading
from kvilt.store.store import Store, StoreLimits
from kvilt.store.tier import Budget, Tier

IDENTITY = Identity("weights-1", "native-1", salt="tenant-a")
TOKENS = [5, 6, 7, 8, 9]
PATIENT = StoreLimits(lookup_s=120, layer_s=120, close_s=120)  # nothing here depends on how fast the machine is
ROOMY = Budget(1 << 24)


class Kit:
    """What most tests of the store need, by name."""

    identity = IDENTITY
    tokens = TOKENS
    patient = PATIENT
    roomy = ROOMY

    def layers(
        self, tokens: int = len(TOKENS), count: int = 3, seed: int = 0, dtype: torch.dtype = torch.float16
    ) -> list[LayerKV]:
        """Random KV, other numbers for every seed."""
        made = torch.Generator().manual_seed(seed)
        shape = (2, tokens, 2, 8)
        return [LayerKV(*torch.randn(shape, generator=made).to(dtype)) for _ in range(count)]

    def form(self, layers: Sequence[LayerKV] | None = None) -> Form:
        return tuple(one.form for one in layers or self.layers())

    def store(self, *tiers: Tier, memory: Budget | None = None, limits: StoreLimits = PATIENT, **options: Any) -> Store:
        """A store without memory, unless asked for: every lookup goes down."""
        return Store(memory, tiers, limits=limits, **options)

    def disk(self, folder: Path, budget: Budget = ROOMY, **options: Any) -> Disk:
        disk = Disk(folder, budget, **options)
        disk.settle()
        return disk

    def put(self, store: Store, tokens: Sequence[int] = TOKENS, seed: int = 0, **options: Any) -> Loading:
        """Keep a chunk, and wait until it is kept."""
        made = store.put_chunk(IDENTITY, tokens, self.layers(len(tokens), seed=seed), **options)
        store.flush()
        return made

    def open(self, store: Store, tokens: Sequence[int] = TOKENS, identity: Identity = IDENTITY) -> Loading:
        return store.open_chunk(identity, tokens, self.form())

    def same(self, found: Sequence[LayerKV], expected: Sequence[LayerKV]) -> bool:
        pairs = [
            pair
            for one, other in zip(found, expected, strict=True)
            for pair in zip(one.parts, other.parts, strict=True)
        ]
        return all(torch.equal(one, other) and one.dtype == other.dtype for one, other in pairs)

    def served(self, loading: Loading, seed: int = 0) -> bool:
        """Whether all of the chunk came, to the bit."""
        return loading.wait() and self.same(loading.layers(), self.layers(loading.address.tokens, seed=seed))

    def until(self, true: Callable[[], bool]) -> None:
        until(true)

    def count(self, store: Store, name: str, **labels: str) -> float:
        """What a counter or gauge of the store says."""
        series = store.metrics.snapshot()[f"kvilt_store_{name}"]["series"]
        return sum(one["value"] for one in series if labels.items() <= one["labels"].items())

    def refused(self, store: Store, tier: str, reason: str) -> bool:
        """One lookup is a miss for this reason, and it is counted."""
        before = self.count(store, "misses_total", reason=reason), self.count(store, "refused_total", reason=reason)
        loading = self.open(store)
        missed = not loading.wait() and loading.reason == reason
        after = (
            self.count(store, "misses_total", reason=reason),
            self.count(store, "refused_total", tier=tier, reason=reason),
        )
        store.flush()
        assert missed, f"the lookup ended with {loading.reason!r}"
        return after == (before[0] + 1, before[1] + 1)


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit()
