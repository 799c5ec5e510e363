"""How long the event loop was kept from running: what every request of every key waits for."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from ..metrics import Metrics
from .counters import LOOP_PAUSE_MAX_SECONDS, LOOP_PAUSE_SECONDS

TICK_S = 0.005
WINDOW_S = 60.0
_PARTS = 12  # of the window: the longest pause is forgotten by parts


class LoopWatch:
    """A task that sleeps and notes how late it wakes."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._longest: deque[tuple[float, float]] = deque(maxlen=_PARTS)  # begin of a part, its longest pause

    def longest_s(self) -> float:
        """The longest pause of the last minute."""
        since_s = self._clock() - WINDOW_S
        return max((pause_s for began_s, pause_s in self._longest if began_s >= since_s), default=0.0)

    def note(self, pause_s: float) -> None:
        """A pause that has just ended."""
        now_s = self._clock()
        self._metrics.observe(LOOP_PAUSE_SECONDS, pause_s)
        if not self._longest or now_s - self._longest[-1][0] >= WINDOW_S / _PARTS:
            self._longest.append((now_s, pause_s))
        elif pause_s > self._longest[-1][1]:
            self._longest[-1] = (self._longest[-1][0], pause_s)

    def publish(self) -> None:
        """Set the gauge, before it is read."""
        self._metrics.set(LOOP_PAUSE_MAX_SECONDS, self.longest_s())

    async def run(self) -> None:
        """Watch the loop that this runs in until it is cancelled."""
        while True:
            due_s = self._clock() + TICK_S
            await asyncio.sleep(TICK_S)
            self.note(max(0.0, self._clock() - due_s))
