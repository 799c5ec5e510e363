"""The prefix index: from the exact tokens of whole pages to the pages that hold their KV.

Each page is known by a hash of its tokens and all before them, and its tokens are compared before it is used. The index
holds no page: pages that no cache holds stay in it until the pool needs their room. Refuses to know requests
and stores.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ..errors import PoolExhausted
from ..ops.contract import HostCopy, KeysValues
from .cache import KVCache
from .evicted_page import EvictedPage as EvictedPage
from .layout import Window
from .pool import PagePool
from .prefix_branches import PrefixBranch, PrefixRun, PrefixRuns, branch_of, find_runs
from .prefix_keys import PrefixKeys, PrefixNode, tokens_of
from .prefix_states import PrefixStates
from .prefix_watch import PrefixChange, PrefixWatch
from .row import EMBEDDED, EXACT, GONE, CacheRow, RowImage, Token, maker_parts, rows_from_images

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """How many tokens of a sequence have their KV here, and how many pages of it no cache holds at the moment."""

    tokens: int
    idle: int
    known: int = field(default=0, compare=False)  # tokens whose pages are here, whether or not a query could follow


Sink = Callable[[EvictedPage], None]


class PrefixIndex:
    """The prefixes of one pool. Only exact KV of the pool's own model and numerics may be inserted."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._size = pool.layout.page_tokens
        self._nodes: dict[bytes, PrefixNode] = {}
        self._roots: dict[str, dict[bytes, PrefixNode]] = {}  # by tenant
        self._owners: list[dict[int, PrefixNode]] = [{} for _ in pool.layout.groups]  # by page
        self._states = PrefixStates(pool, self._state_evicted) if pool.layout.recurrent is not None else None
        self._watches: list[PrefixWatch] = []
        self.evictions = 0
        self.hits = self.misses = self.saved_tokens = 0  # sequences that began with KV that was there, and without

    def __len__(self) -> int:
        return len(self._nodes)

    # Looking up.

    def match(self, prefix_keys: PrefixKeys, most: int) -> PrefixMatch:
        """How many tokens of the sequence, `most` at the most, have their KV here now."""
        with self._pool.lock:
            nodes = self._walk(prefix_keys)
            length = self._usable(nodes, most)
            tables = self._tables(nodes, length)
            idle = (self._pool.idle(g, [page for page in table if page != GONE]) for g, table in enumerate(tables))
            return PrefixMatch(length, max(idle), len(nodes) * self._size)

    def fork(self, prefix_keys: PrefixKeys, most: int, capacity: int) -> KVCache:
        """A cache that holds as much of the sequence as `match` finds, on shared pages; perhaps nothing."""
        with self._pool.lock:
            nodes = self._walk(prefix_keys)
            length = self._usable(nodes, most)
            whole = length // self._size
            prefix_keys.node, prefix_keys.placed = (nodes[whole - 1] if whole else None), whole
            for node in nodes[: self._pool.layout.pages_for(length)]:
                node.hits += 1
            tokens = tokens_of(nodes, self._size)[:length]
            ids = array("q", [token if isinstance(token, int) else EMBEDDED for token in tokens])
            embeds = {place: token for place, token in enumerate(tokens) if isinstance(token, bytes)}
            row = CacheRow.sharing(self._pool, ids, embeds, self._tables(nodes, length))
            row.adapter, row.adapted_from = maker_parts(prefix_keys.adapted_scope.adapter)
            row.owner = prefix_keys.scope.owner
            if self._states is not None:
                self._states.lend(row, nodes)
            self.count(length)
            return KVCache.of_row(row, capacity)

    def count(self, tokens: int) -> None:
        """Count a sequence that begins with so many tokens whose KV is there already, here or in a cache of its own."""
        with self._pool.lock:
            self.hits += tokens > 0
            self.misses += tokens == 0
            self.saved_tokens += tokens

    def branches(self, salt: str) -> list[PrefixBranch]:
        """All that is known of one tenant, as a tree: parents before children."""
        return [self.branch(run) for run in self.runs(salt).runs]

    def runs(self, salt: str, most: int | None = None) -> PrefixRuns:
        """The same, `most` of them, without their tokens: all that needs the pool's lock."""
        with self._pool.lock:
            return find_runs(self._roots.get(salt, {}).values(), self._pool, most)

    def branch(self, run: PrefixRun) -> PrefixBranch:
        """A run with its tokens; needs no lock."""
        return branch_of(run, self._size)

    def watch(self) -> PrefixWatch:
        """All nodes, parents before children, and from now on every change, until the watch is closed or lost."""
        with self._pool.lock:
            self._watches = [one for one in self._watches if not one.lost]
            self._watches.append(PrefixWatch(self._nodes.values()))
            return self._watches[-1]

    def _walk(self, prefix_keys: PrefixKeys) -> list[PrefixNode]:
        """The nodes of a sequence from its beginning on, each compared token by token."""
        found: list[PrefixNode] = []
        for key, content in zip(prefix_keys.keys, prefix_keys.contents, strict=True):
            node = self._nodes.get(key)
            scope = prefix_keys.scope_of(len(found))
            if node is None or not node.follows(found[-1] if found else None, content, scope):
                break
            found.append(node)
        return found

    def _usable(self, nodes: list[PrefixNode], most: int) -> int:
        """The largest length after which the next query finds all keys that it sees."""
        length = max(0, min(len(nodes) * self._size, most))
        while length and not all(self._sees(nodes, g, length) for g in range(len(self._owners))):
            length = (length - 1) // self._size * self._size
        return length if self._states is None else self._states.usable(nodes, length)

    def _sees(self, nodes: list[PrefixNode], group: int, length: int) -> bool:
        first, stop = self._span(group, length)
        return all(node.pages[group] != GONE for node in nodes[first:stop])

    def _span(self, group: int, length: int) -> tuple[int, int]:
        """The pages of a group that a sequence of this length needs."""
        layout = self._pool.layout
        return layout.groups[group].first_needed(length) // self._size, layout.pages_for(length)

    def _tables(self, nodes: list[PrefixNode], length: int) -> list[list[int]]:
        spans = [self._span(g, length) for g in range(len(self._owners))]
        return [[GONE] * first + [node.pages[g] for node in nodes[first:stop]] for g, (first, stop) in enumerate(spans)]

    def missing(self, prefix_keys: PrefixKeys, tokens: int) -> int:
        """The first page of a sequence that a query after so many tokens needs and that is not here."""
        with self._pool.lock:
            nodes = self._walk(prefix_keys)[: self._pool.layout.pages_for(tokens)]
            firsts = [self._span(group, tokens)[0] for group in range(len(self._owners))]
            for at, node in enumerate(nodes):
                if any(page == GONE and at >= first for page, first in zip(node.pages, firsts, strict=True)):
                    return at
            # Pages after the last known state are of no use without one.
            known = len(nodes) if self._states is None else self._states.usable(nodes, len(nodes) * self._size)
            return known if self._states is None else known // self._size

    def leaving(self) -> Iterator[EvictedPage]:
        """Every page that is known, as if it were evicted: those that a cache holds first, then the latest used."""
        with self._pool.lock:
            ages = [self._pool.ages(group) for group in range(len(self._owners))]

            def age(node: PrefixNode) -> int:
                return min(own.get(page, -1) for own, page in zip(ages, node.pages, strict=True) if page != GONE)

            nodes = [node for node in self._nodes.values() if any(page != GONE for page in node.pages)]
            nodes.sort(key=age)  # stable: parents before children
        for node in nodes:
            with self._pool.lock:
                page = self._evicted(node) if node.alive else None
            if page is not None:
                yield page

    def pages(self, prefix_keys: PrefixKeys, first: int, stop: int) -> Iterator[EvictedPage]:
        """Copies of the pages [first, stop) of a sequence, as far as they are here, for another process."""
        with self._pool.lock:
            nodes = self._walk(prefix_keys)[:stop]
        tokens = tokens_of(nodes, self._size)
        for at, node in enumerate(nodes[first:], first):
            with self._pool.lock:
                if not node.alive:
                    return
                page = self._copied(node, tuple(tokens[: (at + 1) * self._size]), at * self._size)
            yield page

    # Adding.

    def insert(self, row: CacheRow, prefix_keys: PrefixKeys, on_evict: Sink | None = None) -> None:
        """Make the whole pages of a row known; `prefix_keys` are the row's. `on_evict` gets new ones at their end.

        Where the same tokens are known already, the row changes over to the pages that are known, and gives its own
        back: equal KV takes its room once. KV that is not exact is not shared.
        """
        if row.origin != EXACT:
            return
        with self._pool.lock:
            while (prefix_keys.placed + 1) * self._size <= row.length:
                if prefix_keys.node is not None and not prefix_keys.node.alive:
                    return  # a cache that holds a page holds those before it, unless a window gave them back
                if (node := self._place(row, prefix_keys, on_evict)) is None:
                    return
                self._adopt(row, prefix_keys.placed, node)
                if self._states is not None:
                    self._states.place(row, prefix_keys.placed, node, prefix_keys)
                prefix_keys.node, prefix_keys.placed = node, prefix_keys.placed + 1

    def restore(self, prefix_keys: PrefixKeys, images: Sequence[RowImage], on_evict: Sink | None = None) -> int:
        """Make pages known again that were kept elsewhere, each an image of the row up to its end; how many could be.

        The first completes what is known of the sequence, or comes right after it. Pages that are there already are
        held meanwhile, so that they are not evicted for the new ones.
        """
        with self._pool.lock:
            nodes, placed = self._walk(prefix_keys), 0
            held: list[dict[int, int]] = [{} for _ in self._owners]  # by group: pages by their place in the sequence
            for at, node in enumerate(nodes):
                self._hold(held, at, node)
            try:
                for image in images:
                    if not self._restore(prefix_keys, nodes, image, held, on_evict):
                        break
                    placed += 1
            finally:
                for group, pages in enumerate(held):
                    self._pool.drop(group, [pages[at] for at in sorted(pages, reverse=True)])
            return placed

    def _restore(
        self,
        prefix_keys: PrefixKeys,
        nodes: list[PrefixNode],
        image: RowImage,
        held: list[dict[int, int]],
        on_evict: Sink | None,
    ) -> bool:
        """One page after `nodes`, or among them; it is held then."""
        at = image.length // self._size - 1
        if not 0 <= at <= len(nodes) or image.origin != EXACT:
            return False
        self._let_go(held, at)
        try:
            (row,) = rows_from_images(self._pool, [image], prefix_keys.scope.owner)
        except PoolExhausted:
            return False
        path = prefix_keys.twin()
        path.keys, path.contents, path.node, path.placed = (
            prefix_keys.keys,
            prefix_keys.contents,
            nodes[at - 1] if at else None,
            at,
        )
        try:
            node = self._place(row, path, on_evict) if at < len(prefix_keys.keys) else None
            if node is None:
                return False
            self._adopt(row, at, node)
            if self._states is not None:
                self._states.place(row, at, node, path)
            self._hold(held, at, node)
        finally:
            row.close()
        if at == len(nodes):
            nodes.append(node)
        return True

    def _hold(self, held: list[dict[int, int]], at: int, node: PrefixNode) -> None:
        """Hold the pages of a node in those groups where none is held for its place."""
        for group, page in enumerate(node.pages):
            if page != GONE and at not in held[group]:
                self._pool.share(group, [page])
                held[group][at] = page

    def _let_go(self, held: list[dict[int, int]], at: int) -> None:
        """Before page `at` is written: hold no more in groups of a few windows than what it sees."""
        for group in self._pool.small_groups:
            first, pages = self._pool.layout.groups[group].first_needed(at * self._size) // self._size, held[group]
            self._pool.drop(group, [pages.pop(old) for old in list(pages) if old < first])

    def _place(self, row: CacheRow, prefix_keys: PrefixKeys, on_evict: Sink | None) -> PrefixNode | None:
        """The node of the row's next page, new or known; None where another page has its key."""
        content = row.content(prefix_keys.placed * self._size, (prefix_keys.placed + 1) * self._size)
        if prefix_keys.placed == len(prefix_keys.keys):
            prefix_keys.add(content)
        if prefix_keys.contents[prefix_keys.placed] != content:
            return None  # the keys are not this row's
        key, scope = prefix_keys.keys[prefix_keys.placed], prefix_keys.scope_of(prefix_keys.placed)
        if (node := self._nodes.get(key)) is not None:
            return node if node.follows(prefix_keys.node, content, scope) else None
        node = PrefixNode(key, content, prefix_keys.node, [GONE] * len(self._owners), scope, on_evict)
        self._nodes[key] = node
        self._tell(PrefixChange("stored", node))
        if prefix_keys.node is not None:
            prefix_keys.node.children[key] = node
        else:
            self._roots.setdefault(scope.salt, {})[key] = node
        return node

    def _adopt(self, row: CacheRow, at: int, node: PrefixNode) -> None:
        for group, table in enumerate(row.tables):
            page, known = table[at], node.pages[group]
            if page in (GONE, known):
                continue
            if known == GONE:
                node.pages[group] = page
                self._owners[group][page] = node
                self._pool.keep(group, page, self._page_evicted, node.scope.owner)
            else:
                self._pool.share(group, [known])
                self._pool.drop(group, [page])
                table[at] = known
                row.version += 1

    # Forgetting.

    def forget(self, prefix_keys: PrefixKeys) -> None:
        """Drop everything that begins with this sequence's first page: something in it is in doubt."""
        with self._pool.lock:
            for node in self._walk(prefix_keys)[:1]:
                self._remove(node)

    def clear(self) -> None:
        """Forget every prefix."""
        with self._pool.lock:
            for node in [node for node in self._nodes.values() if node.parent is None]:
                self._remove(node)
            self._tell(PrefixChange("cleared"))

    def _tell(self, change: PrefixChange) -> None:
        for watch in self._watches:
            watch.add(change)

    def _page_evicted(self, group: int, page: int) -> None:
        """The pool needs the room of a page that no cache holds."""
        node = self._owners[group][page]
        self.evictions += 1
        self._send(node)
        if isinstance(self._pool.layout.groups[group].reach, Window):
            self._release(node, group)
            self._prune(node)
        else:
            self._remove(node)  # every page after it needs this one

    def _state_evicted(self, node: PrefixNode) -> None:
        """The pool needs the room of a state that no cache holds; the page stays."""
        self.evictions += 1
        self._send(node)

    def _prune(self, node: PrefixNode | None) -> None:
        """Remove nodes that have neither pages nor children, from `node` up to its ancestors."""
        while node is not None and not node.children and all(page == GONE for page in node.pages):
            parent = node.parent
            self._remove(node)
            node = parent

    def _send(self, node: PrefixNode) -> None:
        there = sum(page != GONE for page in (*node.pages, node.state))
        if node.on_evict is None or there < node.sent:
            return  # the sink has a fuller version of it
        node.sent = there
        try:
            node.on_evict(self._evicted(node))
        except Exception:  # a store that fails costs a copy, never the step that needs the room
            _log.exception("the sink of evicted prefixes failed; the page is lost")

    def _evicted(self, node: PrefixNode) -> EvictedPage:
        path = [node]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        return self._copied(node, tuple(tokens_of(path[::-1], self._size)), (len(path) - 1) * self._size)

    def _copied(self, node: PrefixNode, tokens: tuple[Token, ...], start: int) -> EvictedPage:
        copies = [None if page == GONE else self._copy_out(group, page) for group, page in enumerate(node.pages)]
        if self._states is not None:
            copies.append(None if node.state == GONE else self._pool.read_states([node.state]))
        kv = [None if one is None else KeysValues(*one.tensors) for one in copies]
        state = None if self._states is None else kv.pop()
        return EvictedPage(node.scope, tokens, start, tuple(kv), tuple(one for one in copies if one is not None), state)

    def _copy_out(self, group: int, page: int) -> HostCopy:
        pool = self._pool
        slots = torch.arange(page * self._size, (page + 1) * self._size, device=pool.device)
        return pool.ops.copy_out(pool.stores[group], slots)

    def _remove(self, node: PrefixNode) -> None:
        """Forget a node and all its descendants, the farthest first."""
        subtree = [node]
        for one in subtree:
            subtree.extend(one.children.values())
        for one in reversed(subtree):
            for group, page in enumerate(one.pages):
                if page != GONE:
                    self._release(one, group)
            if self._states is not None:
                self._states.release(one)
            one.alive = False
            del self._nodes[one.key]
            self._tell(PrefixChange("removed", one))
        if node.parent is not None:
            del node.parent.children[node.key]
            return
        roots = self._roots[node.scope.salt]
        del roots[node.key]
        if not roots:
            del self._roots[node.scope.salt]

    def _release(self, node: PrefixNode, group: int) -> None:
        page = node.pages[group]
        node.pages[group] = GONE
        del self._owners[group][page]
        self._pool.unkeep(group, page)
