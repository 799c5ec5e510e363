"""The state of the KV memory as server-sent events: a snapshot a second, and what the server has counted so far.

Snapshots are shared and throttled with those of other callers. Counters cover all keys, so a key sees them only where
it may read the metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any

import orjson

from ...engine.counters import ACCEPTED, DRAFTED, GENERATED, PREFIX_HITS, PREFIX_QUERIES, RUNNING, WAITING
from ...executor.counters import ROWS, STEPS, TOKENS
from ...metrics import Declaration
from ...store.channel import TierFailure
from ...store.counters import BYTES, DROPPED, EVICTED, HITS, LOOKUPS, RECORDS, REFUSED, UP
from ..auth import Caller
from ..service import Service

EVERY_S = 1.0
_COUNTED: Mapping[str, Declaration] = {
    "steps": STEPS,
    "rows": ROWS,
    "computed_tokens": TOKENS,
    "generated_tokens": GENERATED,
    "drafted_tokens": DRAFTED,
    "accepted_tokens": ACCEPTED,
    "prefix_queries": PREFIX_QUERIES,
    "prefix_hits": PREFIX_HITS,
    "running": RUNNING,
    "waiting": WAITING,
    "lookups": LOOKUPS,
}


class KVStateStream:
    """The events of one client, until it leaves or the server drains: an `EventSource`."""

    work: Callable[[], Awaitable[None]] | None

    def __init__(self, service: Service, caller: Caller) -> None:
        self._service = service
        self._tenant = caller.tenant
        self._sees_totals = caller.is_admin or not service.config.api_keys
        self._ready: bytes | None = None
        self._first = True
        self._closed = False
        self.work = self._look

    def on_news(self, callback: Callable[[], None]) -> None:
        """All news comes from `work`."""

    def opening(self) -> bytes:
        return b""

    def read_ready(self) -> bytes | None:
        ready, self._ready = self._ready, None
        return ready

    @property
    def over(self) -> bool:
        return self._closed or self._service.draining

    async def closing(self) -> AsyncGenerator[bytes, None]:
        """A snapshot that was made meanwhile."""
        if self._ready is not None:
            yield self._ready

    def close(self) -> None:
        self._closed = True

    async def _look(self) -> None:
        if not self._first:
            await asyncio.sleep(EVERY_S)
        self._first = False
        snapshot = await self._service.snapshots.get(self._tenant)
        totals = orjson.dumps(server_totals(self._service) if self._sees_totals else None)
        self._ready = b"data: " + snapshot[:-1] + b',"totals":' + totals + b"}\n\n"


def server_totals(service: Service) -> dict[str, Any]:
    """What was counted since the server started, and the tiers of the store."""
    llm = service.llm
    values: dict[str, Any] = {}
    for metrics in (llm.engine.metrics, llm.executor.metrics, llm.documents.metrics):
        values |= metrics.snapshot() if metrics is not None else {}
    counted = {name: _sum(values, metric.name) for name, metric in _COUNTED.items()}
    return {**counted, "tiers": _tiers(values, llm.store_failures())}


def _sum(values: dict[str, Any], name: str) -> float:
    return float(sum(point["value"] for point in values.get(name, {"series": ()})["series"]))


def _tiers(values: dict[str, Any], failures: Mapping[str, TierFailure]) -> list[dict[str, Any]]:
    """Each tier with its size, its hits, what it did not give or take, and its last failure."""
    found: dict[str, dict[str, Any]] = {}
    counted = (("bytes", BYTES), ("records", RECORDS), ("up", UP), ("hits", HITS), ("evicted", EVICTED))
    for field, metric in (*counted, ("refused", REFUSED), ("dropped", DROPPED)):
        for point in values.get(metric.name, {"series": ()})["series"]:
            tier = found.setdefault(point["labels"]["tier"], {"tier": point["labels"]["tier"]})
            tier[field] = tier.get(field, 0) + point["value"]
    for name, failure in failures.items():
        found.setdefault(name, {"tier": name})["last_failure"] = asdict(failure)
    return list(found.values())


def wants_events(accept: str) -> bool:
    """Whether a client asked for a stream, as browsers' event sources do."""
    return "text/event-stream" in accept.lower()
