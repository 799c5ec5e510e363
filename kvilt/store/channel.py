"""Reads and writes of one tier: reader threads, a write-behind thread, and a circuit breaker for each direction.

No caller of a channel waits for its tier. Reads go by layer: all headers, then all records' first layers, then their
second ones. Writes wait in a queue with bounds; what does not fit is dropped and counted. Refuses to know codecs and
records.
"""

from __future__ import annotations

import atexit
import heapq
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from ..errors import StoreError
from ..metrics import Metrics
from .breaker import CircuitBreaker
from .counters import BYTES, DROPPED, EVICTED, RECORDS, UP, WRITTEN
from .record import RecordInfo
from .tier import Tier

_log = logging.getLogger(__name__)
T = TypeVar("T")
# Reasons that count as failures of the tier, not of one record.
FIRST = -1  # the priority of lookups, before any layer
_CROWD = 32  # loading records that may keep files or connections open between two reads
UNWELL = frozenset({"io", "timeout", "down", "garbage", "disk_full", "read_only", "descriptors", "index"})


@dataclass(frozen=True, slots=True)
class QueuedWrite:
    """A record to be written; it is encoded when its turn comes."""

    key: bytes
    nbytes: int  # what it holds in memory until then
    info: RecordInfo
    encode: Callable[[], list[bytes]]


@dataclass(frozen=True, slots=True)
class TierFailure:
    """The last failure of a tier."""

    message: str
    at_s: float  # a calendar time


class TierChannel:
    """Access to one tier from any thread."""

    def __init__(
        self,
        tier: Tier,
        metrics: Metrics,
        readers: int = 2,
        queue_bytes: int = 256 << 20,
        queue_records: int = 4096,
        cooldown_s: float = 1.0,
        close_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tier = tier
        self._metrics = metrics
        self._readers = readers
        self._queue_bytes = queue_bytes
        self._queue_records = queue_records
        self._close_s = close_s
        self._breakers = {
            "read": CircuitBreaker(clock, cooldown_s=cooldown_s),
            "write": CircuitBreaker(clock, cooldown_s=cooldown_s),
        }
        self._change = threading.Condition()
        self._reads: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._writes: deque[QueuedWrite | Callable[[], None]] = deque()
        self._pending: dict[bytes, bool] = {}  # keys whose records wait to be written, and whether to retain them
        self._pending_bytes = 0
        self._writing = False
        self._served_s = 0.0  # when the tier last answered a reader
        self.last_failure: TierFailure | None = None
        self._closed = False
        self._threads: list[threading.Thread] = []
        metrics.set(UP, 1, tier=tier.name)

    @property
    def name(self) -> str:
        return self.tier.name

    # Reading.

    def is_open(self, direction: str) -> bool:
        """Whether the tier is called now. If its breaker is open and the wait is over, a probe is started."""
        breaker = self._breakers[direction]
        if breaker.closed:
            return True
        if breaker.should_probe():
            threading.Thread(target=self._probe, args=(direction,), name="kvilt-store-probe", daemon=True).start()
        return False

    def read(self, priority: int, work: Callable[[], None]) -> bool:
        """Queue work for a reader thread, smaller priorities first; False once the channel is closed."""
        with self._change:
            if self._closed:
                return False
            heapq.heappush(self._reads, (priority, next(self._order), work))
            self._start()
            self._change.notify_all()
            return True

    @property
    def busy(self) -> bool:
        """Whether so many records are loading that each should close its reader between two reads."""
        return len(self._reads) >= _CROWD

    def ask(self, question: Callable[[Tier], T]) -> Future[T]:
        """Run `question` on the tier in a reader thread."""
        future: Future[T] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self.guarded("read", lambda: question(self.tier)))
                except BaseException as error:
                    future.set_exception(error)

        if not self.read(FIRST, work):
            future.set_exception(StoreError("closed", "the store is closed"))
        return future

    def guarded(self, direction: str, work: Callable[[], T]) -> T:
        """Run `work`, and report success or failure to the breaker."""
        try:
            result = work()
        except StoreError as error:
            if error.reason in UNWELL:
                self._report(direction, False, str(error))
            raise
        if direction == "read":
            self._served_s = time.monotonic()
        self._report(direction, True)
        return result

    def report_timeout(self, since_s: float) -> None:
        """A caller reached its deadline: a failure of the tier, unless it served other reads meanwhile."""
        if self._served_s < since_s:
            self._report("read", False, "deadline: the tier did not answer in time")

    # Background writes.

    def write(self, write: QueuedWrite) -> bool:
        """Queue a record; False, and counted, where it cannot be."""
        with self._change:
            if write.key in self._pending:
                self._pending[write.key] |= write.info.retain
                return True
            reason = "closed" if self._closed else "queue_full" if self._full(write.nbytes) else ""
            if not reason:
                self._pending[write.key] = write.info.retain
                self._pending_bytes += write.nbytes
                self._queue(write)
        if reason:
            self._metrics.add(DROPPED, tier=self.name, reason=reason)
        return not reason

    def later(self, work: Callable[[Tier], None]) -> None:
        """Queue a small job for the writer thread; dropped if the queue is full."""
        with self._change:
            if not self._closed and len(self._writes) < self._queue_records:
                self._queue(lambda: work(self.tier))

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything queued so far is written or dropped."""
        with self._change:
            return self._change.wait_for(lambda: not self._writes and not self._writing, timeout_s)

    def close(self) -> None:
        """Finish what is queued, as far as the time allows, and end the threads; what is left is dropped."""
        atexit.unregister(self._at_exit)
        deadline_s = time.monotonic() + self._close_s
        self.flush(self._close_s)
        with self._change:
            self._closed = True
            left = sum(isinstance(one, QueuedWrite) for one in self._writes)
            self._writes.clear()
            self._change.notify_all()
        self._metrics.add(DROPPED, left, tier=self.name, reason="closed")
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        self.tier.close()

    def _at_exit(self, owner: int) -> None:
        """A program that ends without closing the store still writes its queue; a forked child does not."""
        if os.getpid() == owner:
            self.close()

    def _full(self, nbytes: int) -> bool:
        """An empty queue takes any record: one that is larger than the queue may be would never be written."""
        over = self._pending_bytes > 0 and self._pending_bytes + nbytes > self._queue_bytes
        return over or len(self._writes) >= self._queue_records

    def _queue(self, item: QueuedWrite | Callable[[], None]) -> None:
        self._writes.append(item)
        self._start()
        self._change.notify_all()

    # The threads.

    def _start(self) -> None:
        if self._threads:
            return
        atexit.register(self._at_exit, os.getpid())
        jobs = [("read", self._read_loop)] * self._readers + [("write", self._write_loop)]
        for name, target in jobs:
            thread = threading.Thread(target=target, name=f"kvilt-store-{self.name}-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _read_loop(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._reads or self._closed)
                if not self._reads:
                    return
                work = heapq.heappop(self._reads)[2]
            self._safely(work)
            del work  # while this thread waits for more, it keeps no record in memory

    def _write_loop(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._writes or self._closed)
                if not self._writes:
                    return
                item = self._writes.popleft()
                self._writing = True
            self._safely(lambda item=item: self._write(item) if isinstance(item, QueuedWrite) else self._small(item))  # type: ignore[misc]
            del item
            with self._change:
                self._writing = False
                self._change.notify_all()

    def _safely(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:  # a thread that ends would turn every later lookup into a miss
            _log.exception("the %s tier of the KV store failed in an unexpected way", self.name)

    def _small(self, work: Callable[[], None]) -> None:
        try:
            if self.is_open("write"):
                self.guarded("write", work)
        except StoreError as error:
            _log.info("the %s tier did not hear of a use: %s", self.name, error)

    def _write(self, write: QueuedWrite) -> None:
        try:
            if not self.is_open("write"):
                raise StoreError("down", "the tier is left alone for a while")
            evicted = self.guarded("write", lambda: self._put(write))
            self._metrics.add(EVICTED, evicted, tier=self.name)
        except StoreError as error:
            _log.info("the %s tier did not take a record: %s", self.name, error)
            self._metrics.add(DROPPED, tier=self.name, reason=error.reason)
        except Exception:
            self._metrics.add(DROPPED, tier=self.name, reason="error")
            raise
        finally:
            with self._change:
                self._pending.pop(write.key, None)
                self._pending_bytes -= write.nbytes

    def _put(self, write: QueuedWrite) -> int:
        with self._change:
            retain = self._pending[write.key]
        if not retain and self.tier.has([write.key])[0]:  # a bias to stay is worth another write
            self.tier.touch([write.key])
            return 0
        info = RecordInfo(write.info.tenant, write.info.kind, retain)
        evicted = self.tier.put(write.key, write.encode(), info)
        self._metrics.add(WRITTEN, tier=self.name)
        self._show()
        return evicted

    def _show(self) -> None:
        usage = self.tier.usage()
        self._metrics.set(BYTES, usage.nbytes, tier=self.name)
        self._metrics.set(RECORDS, usage.records, tier=self.name)

    def _probe(self, direction: str) -> None:
        try:
            self.tier.probe()
        except Exception as error:
            _log.info("the %s tier is still unwell: %s", self.name, error)
            self._report(direction, False, str(error))
        else:
            self._report(direction, True)

    def _report(self, direction: str, well: bool, why: str = "") -> None:
        if not well:
            self.last_failure = TierFailure(why, time.time())
        breaker = self._breakers[direction]
        was = breaker.closed
        breaker.record_success() if well else breaker.record_failure()
        if was != breaker.closed:
            _log.warning("the %s tier is %s for %ss", self.name, "back" if breaker.closed else "left alone", direction)
            self._metrics.set(UP, int(all(one.closed for one in self._breakers.values())), tier=self.name)
