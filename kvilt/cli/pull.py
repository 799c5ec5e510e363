"""`kvilt pull`: fetch a model by name, with a progress bar."""

from __future__ import annotations

from pathlib import Path

from ..weights.hub import pull
from .progress import bars


def fetch(name: str) -> Path:
    """Fetch a model; returns its path."""
    with bars() as shown:
        return pull(name, shown.fetching)
