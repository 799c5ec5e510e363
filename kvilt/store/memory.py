"""The first tier: records as tensors, ready for use. Records were verified when they were loaded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from .address import Address
from .codecs import Codec
from .layer import LayerKV
from .tenant_lru import TenantLRU
from .tier import Budget, TierUsage

_TOUCH_EVERY_S = 60.0


@dataclass(frozen=True, slots=True, eq=False)
class MemoryEntry:
    """A whole record in memory. Layers of a lossy codec stay encoded, which saves memory.

    The numbers of layers may still be on their way from a device: they are read after `wait`.
    """

    address: Address
    codec: Codec
    layers: tuple[LayerKV | bytes, ...]
    wait: Callable[[], None] = lambda: None

    @property
    def nbytes(self) -> int:
        held = sum(len(one) if isinstance(one, bytes) else one.nbytes for one in self.layers)
        return held + len(self.address.content)

    def frame(self, index: int) -> bytes:
        self.wait()
        found = self.layers[index]
        return found if isinstance(found, bytes) else self.codec.encode(found)


@dataclass(frozen=True, slots=True)
class MemoryHit:
    """An entry, and whether the tiers below should be told of its use."""

    entry: MemoryEntry
    should_touch: bool


class MemoryTier:
    """Entries within a budget."""

    name = "memory"

    def __init__(self, budget: Budget, clock: Callable[[], float] = time.monotonic) -> None:
        self._ledger = TenantLRU(budget)
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[bytes, MemoryEntry] = {}
        self._told_s: dict[bytes, float] = {}

    def __contains__(self, key: bytes) -> bool:
        """Whether it is here; does not count as a use."""
        with self._lock:
            return key in self._entries

    def get(self, key: bytes) -> MemoryHit | None:
        """The entry of that key; it counts as used now."""
        with self._lock:
            if (entry := self._entries.get(key)) is None:
                return None
            self._ledger.touch(key)
            now_s = self._clock()
            should_touch = now_s - self._told_s[key] >= _TOUCH_EVERY_S
            if should_touch:
                self._told_s[key] = now_s
            return MemoryHit(entry, should_touch)

    def put(self, key: bytes, entry: MemoryEntry, retain: bool) -> list[bytes] | None:
        """Keep an entry; returns the keys evicted for it, or None if it is too large."""
        with self._lock:
            gone = self._ledger.add(key, entry.address.owner, entry.nbytes, retain)
            if gone is None:
                return None
            for one in gone:
                self._forget(one)
            self._entries[key] = entry
            self._told_s[key] = self._clock()
            return gone

    def discard(self, key: bytes) -> None:
        with self._lock:
            self._ledger.remove(key)
            self._forget(key)

    def usage(self) -> TierUsage:
        with self._lock:
            return TierUsage(len(self._ledger), self._ledger.nbytes)

    def _forget(self, key: bytes) -> None:
        self._entries.pop(key, None)
        self._told_s.pop(key, None)
