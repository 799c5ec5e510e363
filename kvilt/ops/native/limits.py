"""What this machine can do at most, measured by the extension. Refuses to know what is compared with it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """With so many threads: bytes read per second from a working set, int8 operations per second."""

    threads: int
    bytes_per_s: float
    ops_per_s: float


def measure(threads: int, size_bytes: int) -> MachineLimits | None:
    """The limits for a working set of that size, in a second or two; None without the extension."""
    try:
        from _kvilt_native import limits
    except ImportError:  # not built, or built before it could measure
        return None
    return MachineLimits(threads, *limits(threads, size_bytes))
