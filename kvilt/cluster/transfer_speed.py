"""How fast KV moves between replicas, as measured; after failures it rests. Refuses to know clocks: times are given."""

from __future__ import annotations

_SHARE = 0.3  # of the newest measurement in the mean
_LONGEST_S = 30.0


class TransferSpeed:
    """A running mean of bytes a second, over all pairs of replicas."""

    def __init__(self, assumed: float, again_s: float) -> None:
        """`assumed` bytes a second hold until a transfer was measured, and at least so many after `again_s` without."""
        self._assumed, self._again_s = assumed, again_s
        self._measured: float | None = None
        self._measured_s = 0.0
        self._rest_s = 0.0
        self._resting_until_s = float("-inf")
        self.count = self.failed = self.moved_bytes = 0

    def speed(self, now_s: float) -> float:
        """Bytes a second."""
        if self._measured is None:
            return self._assumed
        # A slow transfer makes the next one unlikely, which would keep the slow measurement for ever.
        return self._measured if now_s - self._measured_s < self._again_s else max(self._measured, self._assumed)

    def resting(self, now_s: float) -> bool:
        """Whether transfers failed lately, and none should be tried now."""
        return now_s < self._resting_until_s

    def add(self, nbytes: int, seconds: float, now_s: float) -> None:
        """A transfer has ended; with 0 bytes it failed, and none is tried for 1 s, then for twice as long, up to 30."""
        if not nbytes:
            self.failed += 1
            self._rest_s = min(_LONGEST_S, 2 * self._rest_s or 1.0)
            self._resting_until_s = now_s + self._rest_s
            return
        self.count += 1
        self.moved_bytes += nbytes
        self._rest_s = 0.0
        found = nbytes / max(seconds, 1e-6)
        self._measured = found if self._measured is None else self._measured + _SHARE * (found - self._measured)
        self._measured_s = now_s
