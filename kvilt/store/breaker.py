"""A circuit breaker: after some failures in a row a tier is left alone for a while, then asked whether it is back."""

from __future__ import annotations

import threading
from collections.abc import Callable


class CircuitBreaker:
    """Closed while all is well. Open, it lets nobody through; each failed question doubles the time to the next."""

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

    def failed(self) -> None:
        with self._lock:
            if self._wait_s and not self._asking:
                return  # something that began before: it says nothing new
            self._failed += 1
            self._asking = False
            if self._failed >= self._most:
                self._wait_s = min(self._longest_s, 2 * self._wait_s or self._first_s)
                self._due_s = self._clock() + self._wait_s

    def worked(self) -> None:
        with self._lock:
            self._failed, self._wait_s, self._asking = 0, 0.0, False

    def should_ask(self) -> bool:
        """Whether the caller, and nobody else now, should find out if the tier is back, and report it."""
        with self._lock:
            if self._wait_s == 0.0 or self._asking or self._clock() < self._due_s:
                return False
            self._asking = True
            return True
