"""A scribe that writes KV no two writes share, and knows what every position of a row must hold afterwards."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import pytest
import torch

from kvilt.kv.cache import KVCache
from kvilt.kv.identity import Identity
from kvilt.kv.layout import Full, KVLayout, Latent, LayerGroup, RecurrentGroup, Window
from kvilt.kv.pool import PagePool
from kvilt.kv.row import CacheRow, Token, held
from kvilt.ops.contract import KeysValues, PageShape, StateShape
from kvilt.ops.kv_dtypes import KV_DTYPES, KVDtype
from kvilt.ops.reference import ReferenceOps

IDENTITY = Identity("weights-1", "reference-1")
WINDOW = 6

# A cell is a token and the seed of the KV that was written for it; a row of cells is the oracle of a cache's row.
Cell = tuple[Token, bytes]


class Scribe:
    """Layouts, pools, and the two ends of every test: writing KV, and checking it."""

    identity = IDENTITY
    window = WINDOW

    def __init__(self) -> None:
        self._before: dict[bytes, bytes] = {}  # by the seed of a cell, that of the cell before it

    def full(self, dtype: torch.dtype | KVDtype = torch.float32, page_tokens: int = 4) -> KVLayout:
        """Two layers that see everything."""
        return KVLayout((LayerGroup(Full(), (0, 1), PageShape(2, page_tokens, 2, 4, 4, _named(dtype))),))

    def windowed(self, dtype: torch.dtype | KVDtype = torch.float32, page_tokens: int = 4) -> KVLayout:
        """One layer that sees everything between two that see a window; keys and values of different sizes."""
        return KVLayout(
            (
                LayerGroup(Full(), (1,), PageShape(1, page_tokens, 1, 4, 4, _named(dtype))),
                LayerGroup(Window(WINDOW), (0, 2), PageShape(2, page_tokens, 2, 4, 2, _named(dtype))),
            )
        )

    def recurrent(self, dtype: torch.dtype | KVDtype = torch.float32, page_tokens: int = 4) -> KVLayout:
        """One layer that sees everything between two that keep a state."""
        paged = LayerGroup(Full(), (1,), PageShape(1, page_tokens, 1, 4, 4, _named(dtype)))
        return KVLayout((paged,), RecurrentGroup((0, 2), StateShape(2, (3, 2), (2, 2, 3))))

    def latent(self, dtype: torch.dtype | KVDtype = torch.float32, page_tokens: int = 4) -> KVLayout:
        """Two layers of latent attention: keys that go on in their values, one head."""
        return KVLayout(
            (LayerGroup(Latent(2), (0, 1), PageShape(2, page_tokens, 1, 2, 4, _named(dtype), latent=True)),)
        )

    def layout(self, name: str, dtype: torch.dtype | KVDtype = torch.float32, page_tokens: int = 4) -> KVLayout:
        made = {"full": self.full, "windowed": self.windowed, "latent": self.latent, "recurrent": self.recurrent}
        return made[name](dtype, page_tokens)

    def pool(
        self,
        layout: KVLayout | None = None,
        pages: int | Sequence[int] = 32,
        identity: Identity = IDENTITY,
        states: int = 64,
    ) -> PagePool:
        """A pool full of NaN: whoever reads what nobody wrote is found out."""
        layout = layout or self.full()
        own = {} if layout.recurrent is None else {"states": states, "checkpoints": 2 * layout.page_tokens}
        pool = PagePool(layout, pages, ReferenceOps(), lambda: identity, **own)
        if pool.state_store is not None:
            pool.state_store.tails.fill_(float("nan"))
            pool.state_store.memories.fill_(float("nan"))
        for store in pool.stores:
            scaled = (store.key_scales, store.value_scales)
            for part in scaled if store.shape.scales else (store.keys, store.values):
                part.fill_(float("nan"))
        return pool

    def cells(self, tokens: Sequence[Token], before: Sequence[Cell] = (), salt: bytes = b"") -> list[Cell]:
        """Cells for new tokens after `before`: like real KV, each depends on all tokens up to it (and on a salt)."""
        seed, made = before[-1][1] if before else b"start", []
        for token in tokens:
            before_it, seed = seed, hashlib.sha256(seed + repr(token).encode() + salt).digest()
            self._before[seed] = before_it
            made.append((token, seed))
        return made

    def write(self, cache: KVCache, cells: Sequence[Sequence[Cell]], steps: Sequence[range] | None = None) -> None:
        """Write KV behind each row's length, the way a step does: layer by layer into reserved slots.

        `steps`: which of the cells are written.
        """
        self.write_pages(cache, cells, steps)
        for row, new, step in zip(cache.rows(), cells, steps or [range(len(new)) for new in cells], strict=True):
            if step and row.states is not None:
                self._fold(row, new, step)

    def write_pages(
        self, cache: KVCache, cells: Sequence[Sequence[Cell]], steps: Sequence[range] | None = None
    ) -> None:
        """The same without states."""
        pool = cache.pool
        for row, new, step in zip(cache.rows(), cells, steps or [range(len(new)) for new in cells], strict=True):
            if not step:
                continue
            places = range(row.length + step.start, row.length + step.stop)
            assert row.writable(places)
            for group, kv in enumerate(self.image(new[step.start : step.stop], pool.layout)):
                slots = row.slots(group, places.start, places.stop)
                for layer in range(kv.keys.shape[0]):
                    pool.ops.write(pool.stores[group], layer, slots, kv.keys[layer].float(), kv.values[layer].float())

    def _fold(self, row: CacheRow, new: Sequence[Cell], step: range) -> None:
        """Write the states of a step the way a model does: from the newest state on, all tokens after it."""
        assert row.states is not None
        start = row.length + step.start if step.start else row.resumes_at
        fold = row.states.fold(range(start, row.length + step.stop), 1)
        for position, slot in fold.writes.items():
            row.pool.write_states([slot], _state(self._seed(new, position - row.length), row.pool.layout))

    def state(self, seed: bytes, layout: KVLayout) -> KeysValues:
        """The state after the cell with this seed."""
        return _state(seed, layout)

    def _seed(self, new: Sequence[Cell], count: int) -> bytes:
        """The seed after so many new cells; a negative number counts cells before them."""
        if count > 0:
            return new[count - 1][1]
        seed = self._before[new[0][1]]
        for _ in range(-count):
            seed = self._before[seed]
        return seed

    def extend(self, cache: KVCache, cells: Sequence[Sequence[Cell]]) -> None:
        """A step that succeeds: reserve, write, commit."""
        cache.reserve([len(new) for new in cells])
        self.write(cache, cells)
        cache.commit([[token for token, _ in new] for new in cells])

    def extend_in_steps(self, cache: KVCache, cells: Sequence[Sequence[Cell]], size: int) -> None:
        """An input that is too long for one step: `size` tokens of each row at a time, and one commit at the end."""
        for start in range(0, max(map(len, cells)), size):
            steps = [range(min(start, len(new)), min(start + size, len(new))) for new in cells]
            cache.reserve([len(new) for new in cells], steps)
            self.write(cache, cells, steps)
        cache.commit([[token for token, _ in new] for new in cells])

    def grown(self, pool: PagePool, tokens: Sequence[Token], batch: int = 1) -> tuple[KVCache, list[list[Cell]]]:
        """A cache whose rows all hold these tokens, each on pages of its own, and its oracle."""
        cache, rows = KVCache(pool, batch), [self.cells(tokens) for _ in range(batch)]
        self.extend(cache, rows)
        return cache, rows

    def image(self, cells: Sequence[Cell], layout: KVLayout) -> list[KeysValues]:
        """What every group must hold for these cells, in canonical order."""
        parts = [_cell_kv(seed, layout) for _, seed in cells]
        return [
            KeysValues(
                torch.stack([part[g].keys for part in parts], dim=1),
                torch.stack([part[g].values for part in parts], dim=1),
            )
            for g in range(len(layout.groups))
        ]

    def check(self, cache: KVCache, rows: Sequence[Sequence[Cell]]) -> None:
        """The cache holds exactly these rows: lengths, tokens, and the KV of every position a query can see."""
        assert cache.batch_size == len(rows)
        assert cache.lengths == tuple(len(row) for row in rows)
        assert cache.num_entries == max(len(row) for row in rows)
        for index, cells in enumerate(rows):
            assert cache.tokens(index) == [token for token, _ in cells]
            self._check_kv(cache, index, cells)

    def _check_kv(self, cache: KVCache, index: int, cells: Sequence[Cell]) -> None:
        pool, row = cache.pool, cache.row(index)
        for g, group in enumerate(pool.layout.groups):
            first = row.firsts[g]
            oldest_seen = max(0, len(cells) - WINDOW + 1) if isinstance(group.reach, Window) else 0
            assert first <= oldest_seen, "a position that the next query sees is gone"
            if first == len(cells):
                continue
            found = pool.ops.read_slots(pool.stores[g], row.slots(g, first, row.length))
            expected = _as_kept(group.shape, self.image(cells[first:], pool.layout)[g])
            assert torch.equal(found.keys, expected.keys), f"keys of row {index}, group {g}"
            assert torch.equal(found.values, expected.values), f"values of row {index}, group {g}"
        if row.states is not None:
            self._check_states(row, cells)

    def _check_states(self, row: CacheRow, cells: Sequence[Cell]) -> None:
        """Every state that is held is that of the tokens before it."""
        assert row.states is not None
        for position, slot in row.states.committed.items():
            assert 0 < position <= len(cells)
            found = row.pool.read_states([slot]).wait()
            expected = _state(cells[position - 1][1], row.pool.layout)
            assert torch.equal(found[0], expected.keys), f"the state at {position}"
            assert torch.equal(found[1], expected.values), f"the state at {position}"

    def check_counts(self, pool: PagePool, caches: Sequence[KVCache]) -> None:
        """Each page is counted exactly as often as the tables of these caches name it, and the rest is free."""
        free = pool.free_pages()
        for g in range(len(pool.layout.groups)):
            tables = [row.tables[g] for cache in caches if cache.pool is pool for row in cache.rows()]
            named = Counter(page for table in tables for page in held(table))
            assert {page: pool.holders(g, page) for page in range(pool.group_pages[g])} == {
                page: named[page] for page in range(pool.group_pages[g])
            }
            assert free[g] == pool.group_pages[g] - len(named)
        if pool.layout.recurrent is not None:
            self._check_state_counts(pool, [row for cache in caches if cache.pool is pool for row in cache.rows()])

    def _check_state_counts(self, pool: PagePool, rows: Sequence[CacheRow]) -> None:
        named = Counter(slot for row in rows if row.states is not None for slot in row.states.slots())
        group, slots = pool.layout.state_group, range(pool.state_slots)
        assert {slot: pool.holders(group, slot) for slot in slots} == {slot: named[slot] for slot in slots}
        assert pool.free_states() == pool.state_slots - len(named)


@lru_cache(maxsize=4096)
def _state(seed: bytes, layout: KVLayout) -> KeysValues:
    """The state after a cell, in canonical order: small whole numbers drawn from its seed."""
    assert layout.recurrent is not None
    shape = layout.recurrent.shape.page
    raw = hashlib.shake_128(b"state" + seed).digest(shape.layers * (shape.key_dim + shape.value_dim))
    tails, memories = (
        torch.frombuffer(bytearray(raw), dtype=torch.int8)
        .float()
        .split([shape.layers * shape.key_dim, shape.layers * shape.value_dim])
    )
    return KeysValues(tails.view(shape.layers, 1, 1, -1), memories.view(shape.layers, 1, 1, -1))


@lru_cache(maxsize=4096)
def _cell_kv(seed: bytes, layout: KVLayout) -> tuple[KeysValues, ...]:
    """Small whole numbers, exact in every KV dtype, drawn from the seed: [layers, heads, dim] per group."""
    made, stream = [], _numbers(seed, layout)
    for group in layout.groups:
        shape, (keys, stream) = group.shape, _cut(stream, group.shape, group.shape.key_dim)
        values, stream = _cut(stream, shape, shape.value_dim)
        made.append(KeysValues(keys.to(shape.dtype.storage), values.to(shape.dtype.storage)))
    return tuple(made)


def _numbers(seed: bytes, layout: KVLayout) -> torch.Tensor:
    count = sum(g.shape.layers * g.shape.kv_heads * (g.shape.key_dim + g.shape.value_dim) for g in layout.groups)
    raw = hashlib.shake_128(seed).digest(count)
    return torch.frombuffer(bytearray(raw), dtype=torch.int8).float()


def _cut(stream: torch.Tensor, shape: PageShape, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    size = shape.layers * shape.kv_heads * dim
    return stream[:size].view(shape.layers, shape.kv_heads, dim), stream[size:]


@pytest.fixture(scope="session")
def scribe() -> Scribe:
    return Scribe()


def _as_kept(shape: PageShape, kv: KeysValues) -> KeysValues:
    """What pages keep of numbers: as they are, or scaled and rounded token by token."""
    if not shape.scales:
        return kv
    ops, tokens = ReferenceOps(), kv.keys.shape[1]
    store = ops.new_pages(shape, -(-tokens // shape.page_tokens), torch.device("cpu"))
    for layer in range(shape.layers):
        ops.write(store, layer, torch.arange(tokens), kv.keys[layer].float(), kv.values[layer].float())
    return ops.read_slots(store, torch.arange(tokens))


def _named(dtype: torch.dtype | KVDtype) -> KVDtype:
    return dtype if isinstance(dtype, KVDtype) else KV_DTYPES[str(dtype).removeprefix("torch.")]
