"""One row of a cache: its length, its tokens, a page table per layer group, and its recurrent states.

All bookkeeping of pages is here, so that `KVCache` reads as verbs. Private to this room.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError, TruncateError
from ..ops.contract import KeysValues
from .pool import PagePool
from .row_states import RowStateImages, RowStates

# A token is its id, or the hash of its bytes where an embedding row stood in its place.
Token = int | bytes
EMBEDDED = -1  # what `ids` holds where `embeds` has a hash
HASH_BYTES = 32
EXACT = "exact"  # the origin of KV that stands for a computation; otherwise it is the recipe of a blend
BASE = "base"  # the maker of KV that no adapter had a part in
GONE = -1  # what a table holds where a window gave a page back


@dataclass(frozen=True, slots=True)
class RowImage:
    """A row outside any pool: tokens, and the KV it holds in canonical order."""

    ids: array[int]
    embeds: dict[int, bytes]
    firsts: tuple[int, ...]  # per group, the oldest position held
    groups: tuple[KeysValues, ...]
    origin: str = EXACT
    adapter: str = BASE
    adapted_from: int = 0
    states: RowStateImages | None = None  # of layouts that have some

    @property
    def length(self) -> int:
        return len(self.ids)

    @property
    def maker(self) -> str:
        """What made this KV: the base model, an adapter, or an adapter from some position on."""
        return _maker(self.adapter, self.adapted_from, self.length)


class CacheRow:
    """Only `length` says what is valid: bytes at or past it are undefined, pages past it are merely reserved."""

    __slots__ = (
        *("_pool", "adapted_from", "adapter", "embeds", "firsts", "ids"),
        *("_packed", "origin", "owner", "states", "tables", "version"),
    )

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.ids: array[int] = array("q")
        self.embeds: dict[int, bytes] = {}
        self.tables: list[list[int]] = [[] for _ in pool.layout.groups]
        self.firsts = [0] * len(pool.layout.groups)
        self.origin = EXACT  # how its KV was made
        self.adapter = BASE  # what it is made with, by content and scale, from position `adapted_from` on
        self.adapted_from = 0
        self.owner = ""  # its pages are counted for this owner
        self.states = None if pool.layout.recurrent is None else RowStates(pool)
        self.version = 0  # grows whenever the tables change, so that a batch can tell that it is out of date
        self._packed: tuple[int, tuple[bytes, ...]] = (-1, ())  # a version, and the tables it had

    @property
    def pool(self) -> PagePool:
        return self._pool

    @property
    def length(self) -> int:
        return len(self.ids)

    @property
    def maker(self) -> str:
        """What made this KV: the base model, an adapter, or an adapter from some position on."""
        return _maker(self.adapter, self.adapted_from, self.length)

    @property
    def resumes_at(self) -> int:
        """The position of the next token to compute: the length, or the newest state below it."""
        return len(self.ids) if self.states is None else self.states.newest(len(self.ids))

    @property
    def reserved(self) -> int:
        """Positions that may be written: [length, reserved), or, in a window group, those of the next step."""
        return len(self.tables[0]) * self._pool.page_tokens

    def packed_table(self, group: int) -> bytes:
        """The page table of a group as int64; most steps find it as it was."""
        if self._packed[0] != self.version or self._pool.window_groups:  # windows give pages back without a version
            self._packed = self.version, tuple([array("q", table).tobytes() for table in self.tables])
        return self._packed[1][group]

    def held_pages(self) -> list[int]:
        """How many pages of each group it holds."""
        return [len(held(table)) for table in self.tables]

    def tokens(self) -> list[Token]:
        """The exact tokens this row holds."""
        return [self.embeds[i] if token == EMBEDDED else token for i, token in enumerate(self.ids)]

    # Writing: find room, then advance.

    def pages_needed(self, extra: int, step: range | None = None) -> list[int]:
        """Pages per group to take before positions [length, length + extra) can be written."""
        return [len(self._to_fill(g, extra, step)) + len(self._to_copy(g, extra)) for g in range(len(self.tables))]

    def reserve(self, extra: int, spare: list[list[int]], step: range | None = None) -> None:
        """Make [length, length + extra) writable with pages from `spare` (one list per group)."""
        want = self._pool.layout.pages_for(self.length + extra)
        self.version += 1
        for g, table in enumerate(self.tables):
            for index in self._to_copy(g, extra):
                page = spare[g].pop()
                store = self._pool.stores[g]
                self._pool.ops.copy_pages(store, [table[index]], store, [page])
                self._pool.drop(g, [table[index]])
                table[index] = page
            places = self._to_fill(g, extra, step)
            table += [GONE] * (want - len(table))
            for index in places:
                table[index] = spare[g].pop()

    def _to_fill(self, group: int, extra: int, step: range | None) -> Sequence[int]:
        """Table places that need a page: all of the write range, or in a window group what a step sees of it."""
        layout, table = self._pool.layout, self.tables[group]
        first, stop = layout.pages_for(self.length), layout.pages_for(self.length + extra)
        if step is not None and group in self._pool.small_groups:
            first = max(first, layout.groups[group].first_kept(self.length + step.start))
            stop = layout.pages_for(self.length + step.stop)
        if GONE not in table[first:stop]:
            return range(max(first, len(table)), stop)
        return [i for i in range(first, stop) if i >= len(table) or table[i] == GONE]

    def slide(self, step: range) -> None:
        """Before a step, drop pages that were written since the commit and that no query of the step sees."""
        layout = self._pool.layout
        for g in self._pool.small_groups:
            table, stop = self.tables[g], layout.groups[g].first_kept(self.length + step.start)
            for index in range(layout.pages_for(self.length), min(stop, len(table))):
                if table[index] != GONE:
                    self._pool.drop(g, [table[index]])
                    table[index] = GONE
                    self.version += 1

    def _to_copy(self, group: int, extra: int) -> list[int]:
        """Table places in the write range whose page another handle holds too."""
        if extra == 0:
            return []
        table = self.tables[group]
        places = range(self.length // self._pool.layout.page_tokens, len(table))
        return [i for i in places if table[i] != GONE and self._pool.holders(group, table[i]) > 1]

    def writable(self, positions: Sequence[int]) -> bool:
        """Whether all these positions are reserved, above the length, and in pages that no other handle holds."""
        if not positions:
            return True
        if len(positions) == 1:
            return self._is_writable(positions[0])
        low, high = min(positions), max(positions)
        if low < len(self.ids) or high >= self.reserved:
            return False
        size = self._pool.page_tokens
        span = slice(low // size, high // size + 1)
        return all(
            GONE not in table[span] and self._pool.are_sole(g, table[span]) for g, table in enumerate(self.tables)
        )

    def _is_writable(self, position: int) -> bool:
        """The same for one position, which is what nearly every row of a step has."""
        index, pool = position // self._pool.page_tokens, self._pool
        if position < len(self.ids) or index >= len(self.tables[0]):
            return False
        return all(pool.is_sole(group, table[index]) for group, table in enumerate(self.tables))

    def check_commit(self, tokens: Sequence[Token]) -> None:
        """Raise unless there is reserved room for these tokens and each of them is one."""
        length = len(self.ids) + len(tokens)
        if length > self.reserved or (self._pool.small_groups and not self._kept(length)):
            raise InputError(f"{len(tokens)} tokens do not fit the reserved room; reserve it before the step")
        for token in tokens:
            good = len(token) == HASH_BYTES if isinstance(token, bytes) else 0 <= token < 1 << 63
            if not good:
                raise InputError(f"{token!r} is neither a token id nor the {HASH_BYTES}-byte hash of an embedding row")

    def commit_token(self, token: int) -> bool:
        """`check_commit` and `commit` of one id; False, and nothing is done, where there is more to do than to append.

        That is where it fills a page, where windows give pages back, and with recurrent state.
        """
        length, pool = len(self.ids) + 1, self._pool
        if length % pool.page_tokens == 0 or self.states is not None or pool.window_groups or pool.small_groups:
            return False
        if length > self.reserved or not 0 <= token < 1 << 63:
            return False
        self.ids.append(token)
        return True

    def _kept(self, length: int) -> bool:
        """Whether the pages that a row of this length keeps are here: a step dropped none, and the last were taken."""
        layout = self._pool.layout
        for g in self._pool.small_groups:
            first = max(self.firsts[g] // layout.page_tokens, layout.groups[g].first_kept(length))
            if GONE in self.tables[g][first : layout.pages_for(length)]:
                return False
        return True

    def commit(self, tokens: Sequence[Token], filled: Callable[[CacheRow], None] | None = None) -> None:
        """Advance over tokens whose KV has been written, and give back what windows no longer see.

        `filled` is called in between: the row has all its tokens, and still all their pages.
        """
        for token in tokens:
            if isinstance(token, bytes):
                self.embeds[self.length] = token
                token = EMBEDDED
            self.ids.append(token)
        if self.states is not None:
            self.states.commit(self.length)
        if filled is not None:
            filled(self)
        if self._pool.window_groups:
            self._give_back()
        if self.states is not None:
            self.states.prune(self.length)

    def _give_back(self) -> None:
        size = self._pool.page_tokens
        for g in self._pool.window_groups:
            table, group = self.tables[g], self._pool.layout.groups[g]
            for index in range(self.firsts[g] // size, group.first_kept(self.length)):
                self._pool.drop(g, held([table[index]]))
                table[index] = GONE
                self.firsts[g] = (index + 1) * size

    # Cutting, sharing, leaving.

    @property
    def floor(self) -> int:
        """The smallest length above 0 that windows can still go back to; 0 where they gave nothing away."""
        groups = self._pool.layout.groups
        return max(group.smallest_length(first) for group, first in zip(groups, self.firsts, strict=True))

    def check_truncate(self, length: int, floor: int) -> None:
        """Raise unless the row can go back to `length`; the error advises `floor`."""
        if not 0 <= length <= self.length:
            raise TruncateError(
                f"cannot truncate to {length}: the row holds {self.length} tokens; choose 0 to {self.length}", floor
            )
        if 0 < length < self.floor:
            choice = f"{floor} or more, or 0" if floor else "0"
            raise TruncateError(
                f"cannot truncate to {length}: a sliding window gave older KV back; choose {choice} to empty the row",
                floor,
            )

    def truncate(self, length: int) -> None:
        """Forget everything from `length` on; also drops pages that were only reserved."""
        keep = self._pool.layout.pages_for(length)
        self.version += 1
        for g, table in enumerate(self.tables):
            self._pool.drop(g, reversed(held(table[keep:])))
            del table[keep:]
        if length == 0:
            self.firsts = [0] * len(self.firsts)
            self.origin = EXACT
        for position in [p for p in self.embeds if p >= length]:
            del self.embeds[position]
        del self.ids[length:]
        if self.states is not None:
            self.states.truncate(length)

    def fork(self) -> CacheRow:
        """A row that shares every page up to the length; costs page ids, not bytes."""
        child = CacheRow(self._pool)
        child.ids = self.ids[:]
        child.embeds = dict(self.embeds)
        child.firsts = list(self.firsts)
        child.owner = self.owner
        child.origin, child.adapter, child.adapted_from = self.origin, self.adapter, self.adapted_from
        keep = self._pool.layout.pages_for(self.length)
        for g, table in enumerate(self.tables):
            child.tables[g] = table[:keep]
            self._pool.share(g, held(child.tables[g]))
        if self.states is not None and child.states is not None:
            self.states.share_with(child.states)
        return child

    def close(self) -> None:
        self.version += 1
        for g, table in enumerate(self.tables):
            self._pool.drop(g, reversed(held(table)))  # the last first, so that an index evicts tails before beginnings
            table.clear()
        if self.states is not None:
            self.states.truncate(-1)

    # What an index knows of it.

    def content(self, start: int, stop: int) -> bytes:
        """The exact tokens [start, stop) as bytes; equal bytes are equal tokens."""
        ids = self.ids[start:stop]
        hashes = [self.embeds[p] for p in range(start, stop) if p in self.embeds] if self.embeds else []
        return b"".join([ids.tobytes(), *hashes])

    @classmethod
    def sharing(cls, pool: PagePool, ids: array[int], embeds: dict[int, bytes], tables: list[list[int]]) -> CacheRow:
        """A row of these tokens on pages that a cache holds or an index keeps already."""
        row = cls(pool)
        row.ids, row.embeds, row.tables = ids, embeds, tables
        for g, table in enumerate(tables):
            pages = held(table)
            row.firsts[g] = (len(table) - len(pages)) * pool.layout.page_tokens
            pool.share(g, pages)
        return row

    # Leaving the pool and entering it.

    def slots(self, group: int, first: int, stop: int) -> Tensor:
        """Flat slots of positions [first, stop) in a group."""
        size = self._pool.layout.page_tokens
        at = torch.arange(first, stop)
        table = torch.tensor(self.tables[group] or [0])
        return table[at // size] * size + at % size

    def read(self, group: int, spans: Sequence[range]) -> KeysValues:
        """A copy of a group's KV at these positions in canonical order, one span after the other."""
        pool = self._pool
        slots = torch.cat([self.slots(group, one.start, one.stop) for one in spans])
        return pool.ops.read_slots(pool.stores[group], slots.to(pool.device))

    def image(self) -> RowImage:
        """A copy of the row's content in canonical order."""
        groups = tuple(self.read(g, [range(first, self.length)]) for g, first in enumerate(self.firsts))
        made = (self.origin, self.adapter, self.adapted_from)
        return RowImage(self.ids[:], dict(self.embeds), tuple(self.firsts), groups, *made, self._state_images())

    def _state_images(self) -> RowStateImages | None:
        if self.states is None:
            return None
        positions = self.states.positions()
        copy = self._pool.read_states([self.states.committed[p] for p in positions])
        return RowStateImages(positions, KeysValues(*copy.wait()))


def made_by(adapter: str, start: int) -> str:
    """The maker of KV that an adapter had a part in from position `start` on."""
    return f"{adapter} from {start}" if start else adapter


def _maker(adapter: str, start: int, length: int) -> str:
    return BASE if adapter == BASE or length <= start else made_by(adapter, start)


def maker_parts(maker: str) -> tuple[str, int]:
    """The inverse of `made_by`."""
    adapter, _, start = maker.partition(" from ")
    return adapter, int(start) if start.isdecimal() and len(start) < 16 else 0


def held(table: list[int]) -> list[int]:
    """The pages a table really holds."""
    return [page for page in table if page != GONE]


def rows_from_images(pool: PagePool, images: Sequence[RowImage], owner: str = "") -> list[CacheRow]:
    """New rows of an owner with the images' content on pages of their own, all of them or none."""
    layout = pool.layout
    counts = [
        sum(layout.pages_for(image.length) - image.firsts[g] // layout.page_tokens for image in images)
        for g in range(len(layout.groups))
    ]
    spare = pool.take(counts, owner, sum(len(image.states.positions) for image in images if image.states is not None))
    rows: list[CacheRow] = []
    try:
        for image in images:
            rows.append(CacheRow(pool))
            rows[-1].owner = owner
            _fill(rows[-1], pool, image, spare)
    except BaseException:
        for row in rows:
            row.close()
        for g, pages in enumerate(spare):
            pool.drop(g, pages)
        raise
    return rows


def _fill(row: CacheRow, pool: PagePool, image: RowImage, spare: list[list[int]]) -> None:
    """Put an image into a new row, on spare pages."""
    row.ids, row.embeds, row.firsts = image.ids[:], dict(image.embeds), list(image.firsts)
    row.origin, row.adapter, row.adapted_from = image.origin, image.adapter, image.adapted_from
    for g, first in enumerate(image.firsts):
        gone = first // pool.layout.page_tokens
        count = pool.layout.pages_for(image.length) - gone
        row.tables[g] = [GONE] * gone + [spare[g].pop() for _ in range(count)]
        slots = row.slots(g, first, image.length).to(pool.device, non_blocking=True)
        pool.ops.write_slots(pool.stores[g], slots, image.groups[g])
    if row.states is not None and image.states is not None and image.states.positions:
        own = spare[pool.layout.state_group]
        row.states.committed = {position: own.pop() for position in image.states.positions}
        pool.write_states(list(row.states.committed.values()), image.states.numbers)
