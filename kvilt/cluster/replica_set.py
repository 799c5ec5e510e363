"""The replicas behind a door: those that announced themselves lately, and the feeds of their KV events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from .feed import EventFeed
from .router import Router

_log = logging.getLogger(__name__)
ANNOUNCE_S = 0.25
# A broken connection says at once that a replica is gone. One that is silent hangs, or its machine is busy or lost.
SUSPECT_S = 0.75  # without a sign of life it gets no new requests while others are there
SILENT_S = 5.0  # and then it is gone, and requests without a first token go to another one
Beats = Callable[[str], AsyncIterator[None]]  # the signs of life of the exchange at a URL, until its connection breaks


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
    prefill_only: bool = False  # it computes prompts, and others go on with their KV
    rows: int = 128  # requests that it runs at once
    running: int = 0  # requests in progress


@dataclass(slots=True, eq=False)
class _Member:
    info: ReplicaInfo
    heard_s: float
    feed: EventFeed
    task: asyncio.Task[None]
    watch: asyncio.Task[None] | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # set where it hangs
    suspect: bool = False


class ReplicaSet:
    """Keeps a router's replicas those that are alive. Belongs to one event loop."""

    def __init__(self, router: Router, beats: Beats | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._router, self._beats, self._clock = router, beats, clock
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
            member.info = info
            self._heard(member)
            return
        _log.info("replica %s is there: process %d", info.name, info.pid)
        version = info.version if info.exchange else f"alone {info.name}"
        self._router.add(info.name, version, info.prefill_only)
        self._router.token_bytes = info.token_bytes or self._router.token_bytes
        feed = EventFeed(self._router, info.name, info.events, info.replay)
        task = asyncio.ensure_future(feed.run())
        member = self._members[info.name] = _Member(info, self._clock(), feed, task)
        if self._beats is not None and info.exchange:
            member.watch = asyncio.ensure_future(self._watch(member, self._beats(info.exchange)))

    async def _watch(self, member: _Member, beats: AsyncIterator[None]) -> None:
        async for _ in beats:
            self._heard(member)
        if self._members.get(member.info.name) is member:
            member.watch = None
            self.lost(member.info.name, "its connection broke")

    def _heard(self, member: _Member) -> None:
        member.heard_s = self._clock()
        if member.suspect:
            member.suspect = False
            self._router.suspect(member.info.name, False)

    def gone(self, name: str) -> asyncio.Event:
        """Set when a replica is found to hang."""
        member = self._members.get(name)
        return asyncio.Event() if member is None else member.gone

    def lost(self, name: str, why: str, hangs: bool = False) -> None:
        """A replica is gone, with all that it had; with `hangs` requests that wait for it end."""
        member = self._members.pop(name, None)
        if member is not None:
            _log.warning("replica %s is gone: %s", name, why)
            member.task.cancel()
            if member.watch is not None:
                member.watch.cancel()
            self._router.remove(name)
            if hangs:
                member.gone.set()

    def sweep(self) -> None:
        """Suspect replicas that are silent, and forget those that have been so for too long."""
        for name, member in list(self._members.items()):
            silent_s = self._clock() - member.heard_s
            if silent_s > SILENT_S:
                self.lost(name, f"no word for {SILENT_S:g} s", hangs=True)
            elif silent_s > SUSPECT_S and not member.suspect:
                member.suspect = True
                self._router.suspect(name, True)

    async def close(self) -> None:
        """Stop all feeds."""
        tasks = [member.task for member in self._members.values()]
        for name in list(self._members):
            self.lost(name, "the door closes")
        await asyncio.gather(*tasks, return_exceptions=True)
