"""A circuit breaker: after some failures in a row a tier is not called for a while, then probed."""

from __future__ import annotations

import threading
from collections.abc import Callable


class CircuitBreaker:
    """Closed while the tier works. Open, it rejects every call; each failed probe doubles the time to the next."""

    def __init__(
        self, clock: Callable[[], float], failures: int = 3, cooldown_s: float = 1.0, longest_s: float = 30.0
    ) -> None:
        self._clock = clock
        self._most = failures
        self._first_s = cooldown_s
        self._longest_s = longest_s
        self._lock = threading.Lock()
        self._failed = 0
        self._wait_s = 0.0
        self._due_s = 0.0
        self._asking = False

    @property
    def closed(self) -> bool:
        return self._wait_s == 0.0

    def record_failure(self) -> None:
        with self._lock:
            if self._wait_s and not self._asking:
                return  # a call from before the breaker opened: not counted again
            self._failed += 1
            self._asking = False
            if self._failed >= self._most:
                self._wait_s = min(self._longest_s, 2 * self._wait_s or self._first_s)
                self._due_s = self._clock() + self._wait_s

    def record_success(self) -> None:
        with self._lock:
            self._failed, self._wait_s, self._asking = 0, 0.0, False

    def should_probe(self) -> bool:
        """Whether the caller should probe the tier now and report the result; true for one caller at a time."""
        with self._lock:
            if self._wait_s == 0.0 or self._asking or self._clock() < self._due_s:
                return False
            self._asking = True
            return True
