"""The page pool: page ids with reference counts, one set per layer group, and slots for recurrent states likewise.

Refuses to know sequences: it hands pages out, counts the handles that share them and takes them back.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ..errors import InputError, ModelClosed, PoolExhausted
from ..ops.contract import HostCopies, HostCopy, KeysValues, Ops, StateShape, StateStore
from .checkpoints import CheckpointSchedule
from .identity import Identity
from .layout import KVLayout
from .pages_by_owner import PagesByOwner

NewStates = Callable[[StateShape, int, torch.device], StateStore]
OnEvict = Callable[[int, int], None]  # gets a layer group and a page


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """Pages of all groups together."""

    total: int
    used: int
    shared: int  # used by more than one handle, counted once
    used_bytes: int
    cached: int = 0  # held by no cache, kept for the next sequence with the same tokens; counted as free
    states: int = 0  # slots for recurrent states
    used_states: int = 0

    @property
    def free(self) -> int:
        return self.total - self.used


class PagePool:
    """Pages for every layer group of one layout."""

    def __init__(
        self,
        layout: KVLayout,
        pages: int | Sequence[int],
        ops: Ops,
        identity: Callable[[], Identity],
        device: torch.device | None = None,
        token_limit: int = 1 << 63,
        states: int = 0,
        checkpoints: CheckpointSchedule | int = 0,
        new_states: NewStates = StateStore.empty,
    ) -> None:
        """`pages` of each group, or one number for each; window groups may have fewer than the others.

        `states` is the number of slots for recurrent states, for layouts that have some. Rows keep checkpoints of
        their state as a schedule says, or every so many tokens, a whole number of pages; 0: only where a caller asks.
        """
        self.layout = layout
        self.group_pages = _checked_pages(layout, pages)
        self.pages = max(self.group_pages)  # of the groups that have the most: a sequence is no longer than they hold
        self.page_tokens = layout.page_tokens
        self.window_groups = tuple(g for g, group in enumerate(layout.groups) if group.window_pages is not None)
        self.small_groups = tuple(g for g, n in enumerate(self.group_pages) if n < self.pages)  # for a few windows
        self.ops = ops
        # A callable: hashing a model's weights takes a while, and only KV that leaves the process needs it.
        self._identity: Callable[[], Identity] | None = identity
        self.token_limit = token_limit  # ids at or past it are no tokens; loaded KV is checked against it
        self.device = device or torch.device("cpu")
        # One page more than there is room for: rows that only pad a step to a shape write there.
        self.stores = tuple(
            ops.new_pages(group.shape, n + 1, self.device)
            for n, group in zip(self.group_pages, layout.groups, strict=True)
        )
        self.dummy_pages = self.group_pages
        schedule = checkpoints if isinstance(checkpoints, CheckpointSchedule) else CheckpointSchedule(checkpoints)
        self.state_slots, self.checkpoints = _checked_states(layout, states, schedule)
        self.state_store: StateStore | None = None
        if layout.recurrent is not None:
            self.state_store = new_states(layout.recurrent.shape, states + 1, self.device)
        # State slots are counted like the pages of one group more, `layout.state_group`.
        self._totals = self.group_pages if layout.recurrent is None else (*self.group_pages, states)
        self._refs = [array("I", bytes(4 * n)) for n in self._totals]
        # A stack with the lowest id on top: pages touched before are used again before fresh memory is.
        self._free = [list(range(n - 1, -1, -1)) for n in self._totals]
        self.lock = threading.RLock()  # verbs of caches hold it too, so that each is one event to every thread
        # A finalizer may run inside any allocation, even ours, so it only leaves a note here.
        self._abandoned: deque[tuple[int, list[int]]] = deque()
        self._leases = self._shared = 0
        self._limbo: dict[tuple[int, int], None] = {}  # (group, page) freed while a step may still write to it
        # Pages that an index knows, and what it wants to be called with before one of them is freed.
        self._kept: list[dict[int, OnEvict]] = [{} for _ in self._totals]
        self._holdings = [PagesByOwner() for _ in self._totals]

    def identity(self) -> Identity:
        """What KV of this pool is known by outside of it; ModelClosed once the files it is hashed from are closed."""
        if self._identity is None:
            raise ModelClosed()
        return self._identity()

    def close(self) -> None:
        """Forget the identity: KV stays usable here, and is saved and loaded no more."""
        self._identity = None

    @property
    def host_copies(self) -> HostCopies:
        """What copies KV between the host and the device of these pages."""
        return self.ops.host_copies

    @property
    def tokens(self) -> int:
        """Tokens a sequence could have if every page were its own."""
        return self.pages * self.layout.page_tokens

    @property
    def nbytes(self) -> int:
        """Bytes of all pages and states."""
        return self._bytes(self._totals)

    @property
    def step_tokens(self) -> int | None:
        """The most tokens that a step may add to a sequence; None: as many as fit its length.

        A window group with few pages has room for two windows, a sequence's own and one that is kept, and for this.
        """
        groups = [(self.group_pages[g], self.layout.groups[g].window_pages or 0) for g in self.small_groups]
        spare = min((n - 2 * window for n, window in groups), default=None)
        return None if spare is None else spare * self.layout.page_tokens

    def take(self, counts: Sequence[int], owner: str = "", states: int = 0) -> list[list[int]]:
        """`counts[g]` pages of each group g for an owner, and state slots, all of them or none."""
        if self.layout.recurrent is not None:
            counts = [*counts, states]
        with self.lock:
            self._settle()
            for count, there, total in zip(counts, self._takeable(), self._totals, strict=True):
                if count > there:
                    raise PoolExhausted(count, there, total)
            for holdings, count in zip(self._holdings, counts, strict=True):
                holdings.grow(owner, count)
            for group, count in enumerate(counts):
                while len(self._free[group]) < count:
                    self._evict(group)
            taken = [[free.pop() for _ in range(count)] for free, count in zip(self._free, counts, strict=True)]
            for refs, holdings, pages in zip(self._refs, self._holdings, taken, strict=True):
                for page in pages:
                    refs[page] = 1
                    holdings.assign(page, owner)
            return taken

    def share(self, group: int, pages: Iterable[int]) -> None:
        """One more handle holds these pages."""
        with self.lock:
            refs, kept = self._refs[group], self._kept[group]
            for page in pages:
                assert refs[page] > 0 or page in kept, "a free page cannot be shared"
                if refs[page] == 0:
                    self._holdings[group].wake(page)
                    self._limbo.pop((group, page), None)
                refs[page] += 1
                self._shared += refs[page] == 2

    def drop(self, group: int, pages: Iterable[int]) -> None:
        """One handle fewer holds these pages; the last one frees them."""
        with self.lock:
            refs = self._refs[group]
            for page in pages:
                assert refs[page] > 0, "a page was dropped more often than it was held"
                refs[page] -= 1
                self._shared -= refs[page] == 1
                if refs[page] == 0 and self._leases:
                    self._limbo[group, page] = None
                elif refs[page] == 0:
                    self._let_go(group, page)

    def keep(self, group: int, page: int, on_evict: OnEvict, owner: str = "") -> None:
        """An index knows what this page holds: no cache writes to it, and it stays until its room is needed.

        Then `on_evict` is called with its group and id, while its bytes are still there, and calls `unkeep`.
        Room is taken from the owner that has the most pages, idle or not, so that none can flush what others left.
        """
        with self.lock:
            self._kept[group][page] = on_evict
            self._holdings[group].move(page, owner)

    def unkeep(self, group: int, page: int) -> None:
        """The index forgets this page."""
        with self.lock:
            del self._kept[group][page]
            if self._holdings[group].wake(page):
                self._give_back(group, page)

    @contextmanager
    def lease(self) -> Iterator[None]:
        """While it lasts, dropped pages are given to no other cache: a running step may still write to them."""
        with self.lock:
            self._leases += 1
        try:
            yield
        finally:
            with self.lock:
                self._leases -= 1
                if self._leases == 0:
                    for group, page in self._limbo:
                        self._let_go(group, page)
                    self._limbo.clear()

    def abandon(self, group: int, pages: list[int]) -> None:
        """Drop from a finalizer: takes no lock, takes effect before the next count."""
        self._abandoned.append((group, pages))

    def holders(self, group: int, page: int) -> int:
        """How many handles see a page; an index that keeps it is one of them."""
        with self.lock:
            self._settle()
            return self._refs[group][page] + (page in self._kept[group])

    def are_sole(self, group: int, pages: Iterable[int]) -> bool:
        """Whether one handle alone sees each of these pages."""
        with self.lock:
            self._settle()
            refs, kept = self._refs[group], self._kept[group]
            return all(refs[page] + (page in kept) == 1 for page in pages)

    def is_sole(self, group: int, page: int) -> bool:
        """Whether this is a page, and one handle alone sees it."""
        with self.lock:
            if self._abandoned:
                self._settle()
            return page >= 0 and self._refs[group][page] + (page in self._kept[group]) == 1

    def shared(self, pages: Iterable[tuple[int, int]]) -> int:
        """How many of these pages, each with its group, more than one cache holds."""
        with self.lock:
            self._settle()
            return sum(self._refs[group][page] > 1 for group, page in pages)

    def caches(self, group: int, page: int) -> int:
        """How many caches hold a page."""
        with self.lock:
            self._settle()
            return self._refs[group][page]

    def idle(self, group: int, pages: Iterable[int]) -> int:
        """How many of these pages are kept, but held by no cache."""
        with self.lock:
            return sum(self._holdings[group].is_idle(page) for page in pages)

    def ages(self, group: int) -> dict[int, int]:
        """Of each page that is kept but held by no cache, how many of its owner's were let go after it."""
        with self.lock:
            self._settle()
            return {page: age for mine in self._holdings[group].idle() for age, page in enumerate(reversed(mine))}

    def held_by(self, owner: str) -> int:
        """Pages of an owner in the group of which it has the largest share, those that no cache holds included.

        They count as that share of `pages`, so that groups of different sizes can be compared.
        """
        with self.lock:
            self._settle()
            return self.largest_share([holdings.count(owner) for holdings in self._holdings])

    def fair_share(self) -> int:
        """Pages for each owner that has any, if all have as many."""
        with self.lock:
            return self.pages // max(1, *(holdings.owners for holdings in self._holdings))

    def largest_share(self, counts: Iterable[int]) -> int:
        """The largest share of a group that so many pages of each are, in parts of `pages`."""
        return max(n * self.pages // total for n, total in zip(counts, self._totals, strict=False))

    def free_pages(self) -> tuple[int, ...]:
        """Pages of each group that may be taken: empty ones, and those an index keeps and no cache holds."""
        with self.lock:
            self._settle()
            return self._takeable()[: len(self.group_pages)]

    def free_states(self) -> int:
        """State slots that may be taken: empty ones, and those an index keeps and no cache holds."""
        with self.lock:
            self._settle()
            return self._takeable()[-1] if self.layout.recurrent is not None else 0

    def empty_states(self) -> int:
        """State slots that hold nothing: taking them evicts no other."""
        with self.lock:
            self._settle()
            return len(self._free[-1]) if self.layout.recurrent is not None else 0

    def read_states(self, slots: Sequence[int]) -> HostCopy:
        """Recurrent states in canonical order on the host, perhaps still arriving; the fields of `KeysValues`."""
        assert self.state_store is not None
        return self.state_store.read(torch.tensor(slots, dtype=torch.int64, device=self.device), self.host_copies)

    def write_states(self, slots: Sequence[int], states: KeysValues) -> None:
        """The inverse of `read_states`."""
        assert self.state_store is not None
        at = torch.tensor(slots, dtype=torch.int64, device=self.device)
        self.state_store.write(at, states, self.host_copies)

    def usage(self) -> PoolUsage:
        """How full the pool is."""
        with self.lock:
            self._settle()
            used = [n - there for n, there in zip(self._totals, self._takeable(), strict=True)]
            groups, idle = len(self.group_pages), sum(self._idle_pages()[: len(self.group_pages)])
            pages = (sum(self.group_pages), sum(used[:groups]), self._shared, self._bytes(used), idle)
            return PoolUsage(*pages, self.state_slots, sum(used[groups:]))

    def _bytes(self, counts: Sequence[int]) -> int:
        """Bytes of so many pages of each group."""
        return sum(n * self.layout.shape_of(group).page_bytes for group, n in enumerate(counts))

    def _idle_pages(self) -> list[int]:
        return [holdings.idle_pages for holdings in self._holdings]

    def _takeable(self) -> tuple[int, ...]:
        return tuple(len(free) + idle for free, idle in zip(self._free, self._idle_pages(), strict=True))

    def _let_go(self, group: int, page: int) -> None:
        """No cache holds this page any more."""
        if page in self._kept[group]:
            self._holdings[group].rest(page)
        else:
            self._give_back(group, page)

    def _give_back(self, group: int, page: int) -> None:
        self._holdings[group].free(page)
        self._free[group].append(page)

    def _evict(self, group: int) -> None:
        """Free a page that an index keeps."""
        page = self._holdings[group].victim()
        self._kept[group][page](group, page)
        assert page not in self._kept[group], "an index that is told of an eviction forgets the page"

    def _settle(self) -> None:
        while self._abandoned:
            self.drop(*self._abandoned.popleft())


def _checked_states(layout: KVLayout, states: int, checkpoints: CheckpointSchedule) -> tuple[int, CheckpointSchedule]:
    """Slots for states and where checkpoints stand. A row needs a slot to read and one to write."""
    if layout.recurrent is None:
        return 0, CheckpointSchedule(0)
    if any(group.window_pages is not None for group in layout.groups):
        raise InputError("a model with recurrent state and sliding windows is not supported: going back needs old keys")
    if states < 2 or checkpoints.every % layout.page_tokens:
        raise InputError(
            f"{states} slots for recurrent states, with a checkpoint every {checkpoints.every} tokens, "
            f"do not serve a sequence: it needs 2 slots, and checkpoints where pages of {layout.page_tokens} tokens end"
        )
    return states, checkpoints


def _checked_pages(layout: KVLayout, pages: int | Sequence[int]) -> tuple[int, ...]:
    """Pages of each group. A group that has fewer than others has a window, and room for two and one page more."""
    each = (pages,) * len(layout.groups) if isinstance(pages, int) else tuple(pages)
    for n, group in zip(each, layout.groups, strict=True):
        window = group.window_pages
        least = max(each) if window is None else min(max(each), 2 * window + 1)
        if n < least:
            raise InputError(f"a layer group of {n} pages cannot stand beside one of {max(each)}: it needs {least}")
    return each
