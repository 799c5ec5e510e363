"""How a fetch says how far it has come."""

from __future__ import annotations

from typing import Protocol


class FetchProgress(Protocol):
    """Told how far a fetch has come; a total of 0 means that it is not known."""

    def __call__(self, stage: str, done_bytes: int, total_bytes: int) -> None: ...
