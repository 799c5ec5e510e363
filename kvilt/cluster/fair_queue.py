"""Weighted fair queueing of requests over API keys, before they go to replicas.

As long as replicas have room, every request goes on at once. Beyond that, requests wait, and those of the key that got
the least work for its weight go first. A key below its share of the room goes on at once even then, up to twice the
room in all: the flood of another key cannot fill it. Plain code: it refuses to know HTTP, clocks and event loops.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..errors import QueueFull


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request of a key. `work` is any measure that is the same for all."""

    key: str
    work: float
    start: Callable[[], None]  # called when it may go on
    tag: float  # virtual time at which it begins
    running: bool = False
    over: bool = False


@dataclass(slots=True)
class _Key:
    waiting: deque[QueuedRequest] = field(default_factory=deque)
    running: int = 0
    finish: float = 0.0  # virtual time at which its last request ends: work by weight


class FairQueue:
    """Admits requests of many keys into `room` places. Not for several threads at once."""

    def __init__(self, weights: Mapping[str, float] | None = None, room: int = 1, most_waiting: int = 1024) -> None:
        """A key that has no weight weighs 1; `most_waiting` requests of one key may wait."""
        self._weights = dict(weights or {})
        self._most = most_waiting
        self._keys: dict[str, _Key] = {}
        self._now = 0.0  # virtual time of the request that was begun last
        self.room = room
        self.running = self.waiting = 0

    def enter(self, key: str, work: float, start: Callable[[], None]) -> QueuedRequest:
        """A request arrives; `start` is called now or later. QueueFull: too many of its key wait already."""
        found = self._keys.setdefault(key, _Key())
        request = QueuedRequest(key, work, start, max(self._now, found.finish))
        finish, found.finish = found.finish, request.tag + work / self._weight(key)
        if not found.waiting and (self.running < self.room or self._is_short(key)):
            self._begin(found, request)
            return request
        if len(found.waiting) >= self._most:
            found.finish = finish
            raise QueueFull(len(found.waiting), self._most)
        found.waiting.append(request)
        self.waiting += 1
        return request

    def leave(self, request: QueuedRequest) -> None:
        """A request is over, or its client left while it waited."""
        if request.over:
            return
        request.over = True
        found = self._keys[request.key]
        if request.running:
            found.running -= 1
            self.running -= 1
        else:
            found.waiting.remove(request)
            self.waiting -= 1
        self.admit()
        if not found.running and not found.waiting and found.finish <= self._now:
            self._keys.pop(request.key, None)  # a request of it would begin where all others are

    def admit(self) -> None:
        """Let waiting requests go on as far as there is room; after the room changed."""
        while self.waiting:
            waiting = [name for name, one in self._keys.items() if one.waiting]
            among = [name for name in waiting if self._is_short(name)] or (waiting if self.running < self.room else [])
            if not among:
                return
            found = self._keys[min(among, key=lambda name: self._keys[name].waiting[0].tag)]
            self.waiting -= 1
            self._begin(found, found.waiting.popleft())

    def _is_short(self, key: str) -> bool:
        """Whether a key has less than its share, and its request may go on although there is no room."""
        return self.running < 2 * self.room and self._keys[key].running < self._share(key)

    def _begin(self, key: _Key, request: QueuedRequest) -> None:
        self._now = max(self._now, request.tag)
        key.running += 1
        self.running += 1
        request.running = True
        request.start()

    def _share(self, key: str) -> float:
        """Places of a key among those that have requests here now; at least one."""
        active = sum(
            self._weight(name) for name, one in self._keys.items() if one.running or one.waiting or name == key
        )
        return max(1.0, self.room * self._weight(key) / active)

    def _weight(self, key: str) -> float:
        return self._weights.get(key, 1.0)
