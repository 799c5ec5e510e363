"""Which entries are evicted when a tier is full: the least recently used of the tenant that holds the most.

A tenant's retained entries are evicted after its others, as long as all retained entries together fit their budget: a
preference, not a guarantee. Pure bookkeeping; refuses to know what is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from .tier import Budget


@dataclass(slots=True)
class _Entry:
    tenant: str
    nbytes: int
    retained: bool


@dataclass(slots=True)
class _Tenant:
    nbytes: int = 0
    retained_bytes: int = 0
    plain: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # the oldest first
    retained: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def line(self, retained: bool) -> OrderedDict[bytes, None]:
        return self.retained if retained else self.plain

    def oldest(self) -> bytes:
        return next(iter(self.plain or self.retained))


class TenantLRU:
    """Sizes and order of what a tier holds. Not for several threads at once."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.nbytes = 0
        self._entries: dict[bytes, _Entry] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._retained_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def tenant_bytes(self, tenant: str) -> int:
        return self._tenants[tenant].nbytes if tenant in self._tenants else 0

    def add(self, key: bytes, tenant: str, nbytes: int, retain: bool) -> list[bytes] | None:
        """Count an entry; returns the keys to evict for it, or None if it is too large."""
        if nbytes > self.budget.record:
            return None
        if key in self._entries:
            self.remove(key)
        gone = []
        while self.tenant_bytes(tenant) + nbytes > self.budget.tenant:
            gone.append(self._drop_oldest(tenant))
        while self.nbytes + nbytes > self.budget.total_bytes:
            gone.append(self._drop_oldest(max(self._tenants, key=self.tenant_bytes)))
        self._insert(key, _Entry(tenant, nbytes, False))
        if retain:
            self._retain(key)
        return gone

    def touch(self, key: bytes) -> None:
        """Mark an entry as used; does nothing if it is not there."""
        if (entry := self._entries.get(key)) is not None:
            self._tenants[entry.tenant].line(entry.retained).move_to_end(key)

    def remove(self, key: bytes) -> None:
        """Remove an entry; does nothing if it is not there."""
        if (entry := self._entries.pop(key, None)) is None:
            return
        tenant = self._tenants[entry.tenant]
        del tenant.line(entry.retained)[key]
        self._count(tenant, -entry.nbytes, entry.retained)
        if not tenant.nbytes and not tenant.plain and not tenant.retained:
            del self._tenants[entry.tenant]

    def _drop_oldest(self, tenant: str) -> bytes:
        key = self._tenants[tenant].oldest()
        self.remove(key)
        return key

    def _insert(self, key: bytes, entry: _Entry) -> None:
        tenant = self._tenants.setdefault(entry.tenant, _Tenant())
        self._entries[key] = entry
        tenant.line(entry.retained)[key] = None
        self._count(tenant, entry.nbytes, entry.retained)

    def _count(self, tenant: _Tenant, nbytes: int, retained: bool) -> None:
        self.nbytes += nbytes
        tenant.nbytes += nbytes
        if retained:
            tenant.retained_bytes += nbytes
            self._retained_bytes += nbytes

    def _retain(self, key: bytes) -> None:
        """Mark an entry as retained; if that budget is full, unmark the oldest of the tenant with the most."""
        entry = self._entries[key]
        if entry.nbytes > self.budget.retain:
            return
        while self._retained_bytes + entry.nbytes > self.budget.retain:
            largest = max(self._tenants.values(), key=lambda one: one.retained_bytes)
            self._change(next(iter(largest.retained)), False)
        self._change(key, True)

    def _change(self, key: bytes, retained: bool) -> None:
        entry = self._entries[key]
        self.remove(key)
        self._insert(key, _Entry(entry.tenant, entry.nbytes, retained))
