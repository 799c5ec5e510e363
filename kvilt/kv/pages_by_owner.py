"""Which pages of one layer group each owner has, and which owner gives way when room is needed.

An owner's pages are those it took and those an index keeps for it. The owner that has the most of them gives way first,
so an owner that takes more and more takes it from itself. Refuses to know reference counts and what pages hold.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

_SLACK = 64  # entries of the heap beyond two per owner, before it is made anew


class PagesByOwner:
    """Pages by owner.

    Finding the owner that gives way takes O(log owners), amortized, and depends on names and counts alone.
    """

    def __init__(self) -> None:
        self._owners: dict[int, str] = {}  # page -> owner
        self._counts: dict[str, int] = {}
        self._idle: dict[str, OrderedDict[int, None]] = {}  # pages that no cache holds, in the order they were let go
        self.idle_pages = 0
        # Entries say at least what an owner with idle pages has. Those that say too much are corrected when they are
        # on top; so only growth needs an entry.
        self._heap: list[tuple[int, str]] = []
        self._queued: dict[str, int] = {}

    def owner(self, page: int) -> str:
        """The owner of a page."""
        return self._owners[page]

    def count(self, owner: str) -> int:
        """Pages of an owner."""
        return self._counts.get(owner, 0)

    @property
    def owners(self) -> int:
        """How many owners have pages."""
        return len(self._counts)

    def grow(self, owner: str, pages: int) -> None:
        """An owner is about to get so many pages: it counts as having them before room is made for them."""
        if pages:
            self._counts[owner] = self._counts.get(owner, 0) + pages
            self._rank(owner)

    def assign(self, page: int, owner: str) -> None:
        """One of the pages that the owner has grown by."""
        self._owners[page] = owner

    def move(self, page: int, owner: str) -> None:
        """A page that some cache holds becomes another owner's."""
        if self._owners[page] != owner:
            self.free(page)
            self.grow(owner, 1)
            self.assign(page, owner)

    def free(self, page: int) -> None:
        """A page has no owner any more."""
        owner = self._owners.pop(page)
        self._counts[owner] -= 1
        if not self._counts[owner]:
            del self._counts[owner]

    # Pages that are kept, and that no cache holds.

    def rest(self, page: int) -> None:
        """No cache holds this page now."""
        owner = self._owners[page]
        self._idle.setdefault(owner, OrderedDict())[page] = None
        self.idle_pages += 1
        self._rank(owner)

    def wake(self, page: int) -> bool:
        """A page that was idle is so no longer; False if it was not."""
        if not self.is_idle(page):
            return False
        owner = self._owners[page]
        mine = self._idle[owner]
        del mine[page]
        if not mine:
            del self._idle[owner]
        self.idle_pages -= 1
        return True

    def is_idle(self, page: int) -> bool:
        return page in self._idle.get(self._owners.get(page, ""), ())

    def idle(self) -> Iterator[OrderedDict[int, None]]:
        """The idle pages of each owner, those let go first before the others."""
        yield from self._idle.values()

    def victim(self) -> int:
        """The page that is evicted next: of the owner that has the most, the one that was let go first."""
        while True:
            said, owner = self._heap[0]
            if owner in self._idle and -said == self._counts[owner]:
                return next(iter(self._idle[owner]))
            heapq.heappop(self._heap)
            if self._queued.get(owner) == -said:
                del self._queued[owner]
                self._rank(owner)

    def _rank(self, owner: str) -> None:
        """See to it that the heap says no less than what an owner with idle pages has."""
        if owner not in self._idle or self._queued.get(owner, 0) >= self._counts[owner]:
            return
        self._queued[owner] = self._counts[owner]
        heapq.heappush(self._heap, (-self._counts[owner], owner))
        if len(self._heap) > 2 * len(self._idle) + _SLACK:
            self._queued = {one: self._counts[one] for one in self._idle}
            self._heap = [(-count, one) for one, count in self._queued.items()]
            heapq.heapify(self._heap)
