"""What can be said of the adapters of an executor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """What can be said of a loaded adapter."""

    id: int
    name: str
    content: str  # hash of everything that decides what it computes
    rank: int  # the largest
    parts: tuple[str, ...]  # kinds of maps it changes
    nbytes: int
    resident: bool  # in memory now; otherwise the next row brings it back
    users: int  # requests and running steps that hold it
    invocation: tuple[int, ...]  # tokens that switch it on; empty: it is always on
    loaded_s: float  # since the epoch


@dataclass(frozen=True, slots=True)
class AdapterCounts:
    """The adapters of an executor, counted."""

    loaded: int  # new requests may use them
    unloading: int  # new requests do not find them; they leave with their last users
    active: int  # held by a request or a step, of both kinds
    resident: int  # in memory, of both kinds
    resident_bytes: int
    loads: int
    evictions: int
