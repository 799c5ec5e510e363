"""The changes of a prefix index, for a reader that follows it. Refuses to know who reads them and how they travel."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Literal, NamedTuple

from .prefix_keys import PrefixNode

MOST_CHANGES = 1 << 20  # that wait for a reader


class PrefixChange(NamedTuple):
    """A node that the index has or has no more; without a node: it has none at all any more."""

    kind: Literal["stored", "removed", "cleared"]
    node: PrefixNode | None = None


class PrefixWatch:
    """What changed in an index since the watch began, in order. The nodes that were there come first, as stored.

    The index writes under its pool's lock; one reader takes without it. A reader that is too slow loses the
    watch instead of the index its memory: `lost` says so, and the reader begins a new one.
    """

    __slots__ = ("_changes", "_most", "lost")

    def __init__(self, nodes: Iterable[PrefixNode], most: int = MOST_CHANGES) -> None:
        self._changes = deque(PrefixChange("stored", node) for node in nodes)
        self._most = len(self._changes) + most
        self.lost = False

    def add(self, change: PrefixChange) -> None:
        """The index changed; only the index calls this."""
        if len(self._changes) < self._most and not self.lost:
            self._changes.append(change)
        else:
            self.lost = True

    def take(self, most: int) -> list[PrefixChange]:
        """The next changes, `most` at the most."""
        count = min(most, len(self._changes))
        return [self._changes.popleft() for _ in range(count)]

    def close(self) -> None:
        """Read no more: the index writes nothing into it any more."""
        self.lost = True
        self._changes.clear()
