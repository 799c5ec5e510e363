"""Memory that large requests have left: given back to the system, where the C library would keep it."""

from __future__ import annotations

import asyncio
import ctypes
import logging
from collections.abc import Callable

from ..llm.offload import OWNER, Offload

_log = logging.getLogger(__name__)
LARGE_BYTES = 1 << 18  # of a body: smaller ones leave what the next one uses
PAUSE_S = 1.0  # between a large request and giving back, so that many cost one


def system_trim() -> Callable[[], None] | None:
    """What gives free memory back; None where the C library has no such call."""
    try:
        trim = ctypes.CDLL(None).malloc_trim  # glibc; without the interpreter's lock
    except (OSError, AttributeError, TypeError):
        return None
    trim.argtypes, trim.restype = (ctypes.c_size_t,), ctypes.c_int
    return lambda: trim(0)


class Trimmer:
    """Gives memory back soon after large requests, at most once in a while."""

    def __init__(self, offload: Offload, trim: Callable[[], None] | None = None, pause_s: float = PAUSE_S) -> None:
        self._offload = offload
        self._trim = trim or system_trim()
        self._pause_s = pause_s
        self._task: asyncio.Task[None] | None = None
        self._again = False

    def ended(self, body_bytes: int) -> None:
        """A request with such a body has ended."""
        if self._trim is None or body_bytes < LARGE_BYTES:
            return
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._later(self._trim))
        else:
            self._again = True

    async def _later(self, trim: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(self._pause_s)
            self._again = False
            try:
                await self._offload.run(OWNER, trim)
            except Exception:
                _log.exception("memory was not given back")
            if not self._again:
                return
