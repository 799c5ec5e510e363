"""How a measurement reports progress: the caller passes a `Track`, and the measurement never draws anything itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Show = Callable[[int, str], None]  # pieces of work done, and a note
Track = Callable[[str, int], AbstractContextManager[Show]]  # a description, and the number of pieces


@contextmanager
def untracked(_what: str, _total: int) -> Iterator[Show]:
    """A `Track` that shows nothing."""
    yield lambda _done, _note: None
