"""Recurrent states that the prefix index knows, each at the end of a page.

Checkpoints stay until the pool needs their room. Of the other ends of pages a sequence keeps the last one it passed:
where it ends, the next turn finds that. Refuses to know keys and stores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .pool import PagePool
from .prefix_keys import PrefixKeys, PrefixNode
from .row import GONE, CacheRow


class PrefixStates:
    """The states of one index."""

    def __init__(self, pool: PagePool, on_evict: Callable[[PrefixNode], None]) -> None:
        """`on_evict` gets a node before its state is lost."""
        self._pool = pool
        self._group = pool.layout.state_group
        self._size = pool.layout.page_tokens
        self._on_evict = on_evict
        self._owners: dict[int, PrefixNode] = {}  # by slot

    def usable(self, nodes: Sequence[PrefixNode], length: int) -> int:
        """The largest number of tokens, up to `length`, at which a state is known."""
        found = (at for at in range(length // self._size, 0, -1) if nodes[at - 1].state != GONE)
        return next(found, 0) * self._size

    def lend(self, row: CacheRow, nodes: Sequence[PrefixNode]) -> None:
        """Give a row the state at its length, which `usable` has found."""
        if row.length and row.states is not None:
            row.states.adopt(row.length, nodes[row.length // self._size - 1].state)

    def place(self, row: CacheRow, at: int, node: PrefixNode, prefix_keys: PrefixKeys) -> None:
        """Make the state of a row at the end of page `at` known, if it has one there."""
        position, states = (at + 1) * self._size, row.states
        if states is None or (slot := states.committed.get(position)) is None:
            return
        if node.state not in (GONE, slot):
            states.swap(position, node.state)  # equal states take their room once
            return
        if node.state == GONE:
            node.state, self._owners[slot] = slot, node
            self._pool.keep(self._group, slot, self._evicted, node.scope.owner)
            if not states.outlasts(position):
                self._roll(prefix_keys, node)

    def _roll(self, prefix_keys: PrefixKeys, node: PrefixNode) -> None:
        """Forget the end of a page that a sequence passed before this one, unless another cache holds its state."""
        before, prefix_keys.rolling = prefix_keys.rolling, node
        if before is not None and before.state != GONE and self._pool.caches(self._group, before.state) <= 1:
            self.release(before)

    def release(self, node: PrefixNode) -> None:
        """Forget the state of a node."""
        if node.state != GONE:
            slot, node.state = node.state, GONE
            del self._owners[slot]
            self._pool.unkeep(self._group, slot)

    def _evicted(self, _group: int, slot: int) -> None:
        node = self._owners[slot]
        self._on_evict(node)
        self.release(node)
