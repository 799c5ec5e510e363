"""`kvilt pull`: fetch a named model, with a bar."""

from __future__ import annotations

from pathlib import Path

from ..weights.hub import pull
from .progress import bars


def fetch(name: str) -> Path:
    """Fetch a model and say where it lies."""
    with bars() as shown:
        return pull(name, shown.fetching)
