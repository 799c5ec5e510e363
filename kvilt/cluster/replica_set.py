"""The replicas behind a door: those that announced themselves lately, and the feeds of their KV events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from .feed import EventFeed
from .router import Router

_log = logging.getLogger(__name__)
ANNOUNCE_S = 0.25
SILENT_S = 3.0  # without an announcement a replica is gone; a request that finds it gone says so earlier


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """What a replica says of itself. A process has one name for its life, and no other process ever has it."""

    name: str
    url: str
    events: str
    replay: str
    page_tokens: int
    pid: int
    healthy: bool = True
    adapters: dict[str, str] = field(default_factory=dict)  # identity by name in requests
    kv_used: float = 0.0  # part of the pages
    hit_rate: float = 0.0  # part of the prompt tokens that were found
    exchange: str = ""  # where it exchanges KV with other replicas; empty: it does not
    version: str = ""  # of model and numerics: KV is exchanged between replicas of one version
    token_bytes: float = 0.0  # KV of one token


@dataclass(slots=True, eq=False)
class _Member:
    info: ReplicaInfo
    heard_s: float
    feed: EventFeed
    task: asyncio.Task[None]


class ReplicaSet:
    """Keeps a router's replicas those that are alive. Belongs to one event loop."""

    def __init__(self, router: Router, clock: Callable[[], float] = time.monotonic) -> None:
        self._router, self._clock = router, clock
        self._members: dict[str, _Member] = {}

    def __len__(self) -> int:
        return len(self._members)

    def all(self) -> list[ReplicaInfo]:
        """All that are alive."""
        return [one.info for one in self._members.values()]

    def get(self, name: str) -> ReplicaInfo | None:
        """One of them."""
        member = self._members.get(name)
        return None if member is None else member.info

    def adapters(self) -> dict[str, str]:
        """The identity of each adapter by its name."""
        return {name: made_by for one in self._members.values() for name, made_by in one.info.adapters.items()}

    def announce(self, info: ReplicaInfo) -> None:
        """A replica is alive; one that is not healthy gets no requests."""
        if not info.healthy:
            self.lost(info.name, "its engine hangs")
            return
        if info.page_tokens != self._router.config.block_tokens:
            _log.error("replica %s has pages of %d tokens and is left out", info.name, info.page_tokens)
            return
        member = self._members.get(info.name)
        if member is not None:
            member.info, member.heard_s = info, self._clock()
            return
        _log.info("replica %s is there: process %d", info.name, info.pid)
        self._router.add(info.name, info.version if info.exchange else f"alone {info.name}")
        self._router.token_bytes = info.token_bytes or self._router.token_bytes
        feed = EventFeed(self._router, info.name, info.events, info.replay)
        task = asyncio.ensure_future(feed.run())
        self._members[info.name] = _Member(info, self._clock(), feed, task)

    def lost(self, name: str, why: str) -> None:
        """A replica is gone, with all that it had."""
        member = self._members.pop(name, None)
        if member is not None:
            _log.warning("replica %s is gone: %s", name, why)
            member.task.cancel()
            self._router.remove(name)

    def sweep(self) -> None:
        """Forget replicas that have been silent for too long."""
        for name, member in list(self._members.items()):
            if self._clock() - member.heard_s > SILENT_S:
                self.lost(name, f"no word for {SILENT_S:g} s")

    async def close(self) -> None:
        """Stop all feeds."""
        tasks = [member.task for member in self._members.values()]
        for name in list(self._members):
            self.lost(name, "the door closes")
        await asyncio.gather(*tasks, return_exceptions=True)
