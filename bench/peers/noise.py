"""How quiet the machine is: waits for it, and says who else used it while something was timed."""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

DISTURBED_CORES = 0.12  # used by other processes: a sample above this is taken again
RETRIES = 4  # of a disturbed sample
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Noise:
    """Cores that others used and that the host took away, while a sample was taken."""

    others: float
    steal: float
    seconds: float

    @property
    def disturbed(self) -> bool:
        # The counters tick a hundred times a second, so that a short sample cannot tell a few ticks from none.
        allowed = max(DISTURBED_CORES, 6 * _TICK_S / self.seconds)
        return self.others > allowed or self.steal > allowed


@dataclass(frozen=True, slots=True)
class _Ticks:
    total: int
    idle: int
    steal: int


def _ticks() -> _Ticks:
    with Path("/proc/stat").open() as file:
        values = [int(x) for x in file.readline().split()[1:]]
    return _Ticks(sum(values[:8]), values[3] + values[4], values[7])


def _own_s() -> float:
    """CPU time of this process and of those it started that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class Watch:
    """The machine's CPU time against this process's own, from construction to `noise()`."""

    def __init__(self) -> None:
        self._ticks, self._own, self._started_s = _ticks(), _own_s(), time.perf_counter()

    def noise(self) -> Noise:
        now, seconds = _ticks(), max(1e-9, time.perf_counter() - self._started_s)
        steal = (now.steal - self._ticks.steal) * _TICK_S
        busy = (now.total - self._ticks.total - (now.idle - self._ticks.idle)) * _TICK_S - steal
        others = max(0.0, busy - (_own_s() - self._own))
        return Noise(others / seconds, steal / seconds, seconds)


def wait_quiet(patience_s: float, busy: float = 0.06, windows: int = 2) -> float:
    """Wait until the machine was idle for some windows of half a second; returns how busy it was in the last one."""
    started_s, quiet = time.monotonic(), 0
    while True:
        before = _ticks()
        time.sleep(0.5)
        after = _ticks()
        share = 1 - (after.idle - before.idle) / max(1, after.total - before.total)
        quiet = quiet + 1 if share <= busy else 0
        if quiet >= windows or time.monotonic() - started_s > patience_s:
            return share
