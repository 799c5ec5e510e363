"""The progress callback of a fetch."""

from __future__ import annotations

from typing import Protocol


class FetchProgress(Protocol):
    """Called with the bytes fetched so far and in total; a total of 0 means unknown."""

    def __call__(self, stage: str, done_bytes: int, total_bytes: int) -> None: ...
