"""Contract B: the seeds' KV cache and what kvilt adds to it, sentence by sentence, on `kvilt.KVCache`."""

from __future__ import annotations

import ast
import gc
import pickle
import zlib
from pathlib import Path

import pytest
import torch

import kvilt
from kvilt import KVCache
from kvilt.errors import BlobError, CacheClosed, InputError, LayoutMismatch, PoolExhausted, TruncateError
from kvilt.kv.identity import Identity
from kvilt.kv.layout import Full, KVLayout, LayerGroup, Window
from kvilt.kv.pool import PagePool
from kvilt.ops.contract import PageShape
from kvilt.ops.kv_dtypes import FLOAT32
from kvilt.ops.reference import ReferenceOps

PAGE, PAGES, WINDOW = 4, 48, 5
SHAPE = PageShape(layers=2, page_tokens=PAGE, kv_heads=1, key_dim=4, value_dim=4, dtype=FLOAT32)
LAYOUT = KVLayout((LayerGroup(Full(), (0, 2), SHAPE), LayerGroup(Window(WINDOW), (1, 3), SHAPE)))
PROMPT = list(range(10, 23))


def new_pool(layout: KVLayout = LAYOUT, model: str = "one") -> PagePool:
    return PagePool(layout, PAGES, ReferenceOps(), lambda: Identity(model, "reference"))


@pytest.fixture
def pool() -> PagePool:
    return new_pool()


def numbers(token: int, position: int, layer: int) -> torch.Tensor:
    """Keys and values, [1, 8], of a token at a position in a layer of the model."""
    at = torch.arange(8.0)
    return torch.cos(at * (1 + token) + position * 0.7 + layer * 3.1).view(1, 8)


def extend(cache: KVCache, *rows: list[int]) -> None:
    """What an executor's step does: find room, write each layer's KV, advance."""
    cache.reserve([len(tokens) for tokens in rows])
    for row, tokens in zip(cache.rows(), rows, strict=True):
        for position, token in enumerate(tokens, start=row.length):
            for g, group in enumerate(cache.layout.groups):
                slot = row.slots(g, position, position + 1)
                for index, layer in enumerate(group.layers):
                    kv = numbers(token, position, layer)
                    cache.pool.ops.write(cache.pool.stores[g], index, slot, kv[:, None, :4], kv[:, None, 4:])
    cache.commit(rows)


def filled(pool: PagePool, *rows: list[int]) -> KVCache:
    cache = KVCache(pool, len(rows))
    extend(cache, *rows)
    return cache


def holds(cache: KVCache, *rows: list[int]) -> bool:
    """Whether the rows are these, with the right KV at each position that a query can still see, in every layer."""
    return [cache.tokens(i) for i in range(cache.batch_size)] == list(rows) and all(
        _kv_is_right(cache, index, g, tokens) for index, tokens in enumerate(rows) for g in range(len(LAYOUT.groups))
    )


def _kv_is_right(cache: KVCache, index: int, g: int, tokens: list[int]) -> bool:
    row, group, pool = cache.row(index), cache.layout.groups[g], cache.pool
    oldest = max(0, len(tokens) - WINDOW + 1) if isinstance(group.reach, Window) else 0
    found = pool.ops.read_slots(pool.stores[g], row.slots(g, oldest, len(tokens)))
    both = torch.cat((found.keys, found.values), dim=-1)  # [layers, tokens, 1, 8]
    expected = [[numbers(tokens[p], p, layer) for p in range(oldest, len(tokens))] for layer in group.layers]
    return all(torch.equal(both[i, t], kv) for i, layer in enumerate(expected) for t, kv in enumerate(layer))


# The seed.


def test_a_cache_includes_all_buffers_of_a_model(pool: PagePool) -> None:
    """ "The KV cache interface including all K and V buffers for a model." """
    with filled(pool, PROMPT) as cache:
        assert cache.layout.num_layers == 4
        assert sorted(layer for group in cache.layout.groups for layer in group.layers) == [0, 1, 2, 3]
        assert holds(cache, PROMPT)


def test_num_entries(pool: PagePool) -> None:
    """ "Returns the total number of entries in the KV cache per block." """
    with KVCache(pool) as cache:
        assert cache.num_entries == 0
        extend(cache, PROMPT)
        extend(cache, [1, 2])
        assert cache.num_entries == len(PROMPT) + 2


def test_num_entries_of_ragged_rows(pool: PagePool) -> None:
    """ "entries held per layer: max of `lengths` (one per row)" """
    with filled(pool, [1, 2, 3], PROMPT, []) as cache:
        assert cache.lengths == (3, len(PROMPT), 0)
        assert cache.num_entries == max(cache.lengths)


@pytest.mark.parametrize("rows", [1, 3])
def test_batch_size(pool: PagePool, rows: int) -> None:
    """ "Returns the batch size of the KV cache." """
    with KVCache(pool, rows) as cache, cache.fork() as fork:
        assert cache.batch_size == fork.batch_size == rows


def test_serialize(pool: PagePool) -> None:
    """ "Serializes the KV cache to a byte string." """
    with filled(pool, PROMPT, [7]) as cache:
        data = cache.serialize()
        assert isinstance(data, bytes)
        assert data == cache.serialize()
        assert holds(cache, PROMPT, [7])


def test_load(pool: PagePool) -> None:
    """ "Loads the KV cache from a serialized byte string." """
    with filled(pool, PROMPT, [7]) as cache, filled(pool, [1], [2, 3]) as other:
        data = cache.serialize()
        other.load(data)
        assert holds(other, PROMPT, [7])
        assert other.serialize() == data


@pytest.mark.parametrize("x", [0, 1, 2])
def test_select_and_copy_from(pool: PagePool, x: int) -> None:
    """ "Selects a single batch from the other KV cache and copies it to this KV cache." """
    rows = [PROMPT, [7, 8], []]
    with filled(pool, *rows) as other, filled(pool, [1, 2, 3]) as this:
        this.select_and_copy_from(other, x)
        assert holds(this, rows[x])
        assert holds(other, *rows)


def test_the_example_of_select(pool: PagePool) -> None:
    """ "Then we can select batch x from other and copy it to this (i.e., other[x, :, ...] -> this[0, :, ...])." """
    with filled(pool, [1], [2, 3], [4, 5, 6]) as other, KVCache(pool) as this:
        assert (this.batch_size, other.batch_size) == (1, 3)
        this.select_and_copy_from(other, 1)
        assert holds(this, [2, 3])
        extend(this, [9])
        assert holds(this, [2, 3, 9])
        assert holds(other, [1], [2, 3], [4, 5, 6])
        with pytest.raises(InputError):
            this.select_and_copy_from(other, 3)
        with pytest.raises(InputError):
            other.select_and_copy_from(this, 0)


def test_broadcast_and_copy_from(pool: PagePool) -> None:
    """ "Broadcasts the source KV with batch size 1 to this KV cache with batch size > 1." """
    with filled(pool, PROMPT) as source, filled(pool, [1], [2]) as this:
        this.broadcast_and_copy_from(source)
        assert holds(this, PROMPT, PROMPT)
        assert holds(source, PROMPT)
        with pytest.raises(InputError):
            source.broadcast_and_copy_from(this)


def test_the_example_of_broadcast(pool: PagePool) -> None:
    """ "Then we can copy other[0, :, ...] -> this[0, :, ...], this[1, :, ...], this[2, :, ...]." """
    with filled(pool, PROMPT) as other, KVCache(pool, 3) as this:
        this.broadcast_and_copy_from(other)
        extend(this, [1], [2, 2], [])
        assert holds(this, [*PROMPT, 1], [*PROMPT, 2, 2], PROMPT)
        assert holds(other, PROMPT)


def test_deep_copy(pool: PagePool) -> None:
    """ "Deep copies the KV cache." """
    with filled(pool, PROMPT, [7]) as cache:
        copy = cache.deep_copy()
        extend(cache, [1], [1])
        cache.truncate(0)
        with copy:
            assert holds(copy, PROMPT, [7])


def test_deep_copy_is_expensive_and_fork_is_not(pool: PagePool) -> None:
    """ "This is an expensive operation. Use sparingly." """
    with filled(pool, PROMPT) as cache:
        free, held = pool.free_pages(), [len(pages) for pages in cache.pages()]
        with cache.fork():
            assert pool.free_pages() == free
        with cache.deep_copy():
            assert [a - b for a, b in zip(free, pool.free_pages(), strict=True)] == held


# The rows of the contract.


def test_bytes_describe_themselves(pool: PagePool) -> None:
    """ "self-describing, versioned, checksummed, carries tokens and fingerprint" """
    with filled(pool, PROMPT) as cache:
        data = cache.serialize()
    assert data.startswith(b"KVILTKV\0" + (1).to_bytes(4, "little"))
    header = data[20 : 20 + int.from_bytes(data[12:20], "little")]
    assert b'"model":"one"' in header
    assert b'"kind":"window"' in header
    assert b'"dtype":"float32"' in header
    assert b"".join(token.to_bytes(8, "little") for token in PROMPT) in data
    with KVCache(new_pool()) as elsewhere:  # nothing but the bytes and a pool of the same model
        elsewhere.load(data)
        assert holds(elsewhere, PROMPT)


def _foreign() -> bytes:
    with filled(new_pool(model="two"), [1, 2]) as cache:
        return cache.serialize()


def _of_another_shape() -> bytes:
    with KVCache(new_pool(KVLayout(LAYOUT.groups[:1]))) as cache:
        return cache.serialize()


def _damaged() -> bytes:
    with filled(new_pool(), [1, 2]) as cache:
        data = bytearray(cache.serialize())
    data[-100] ^= 1
    return bytes(data)


def _of_a_later_version() -> bytes:
    with filled(new_pool(), [1, 2]) as cache:
        data = cache.serialize()
    return data[:8] + (2).to_bytes(4, "little") + data[12:]


def _oversized() -> bytes:
    with filled(new_pool(), [1] * 60) as cache:
        return cache.serialize()


def _of_more_rows() -> bytes:
    with filled(new_pool(), [1], [2]) as cache:
        return cache.serialize()


REFUSED = {
    "identity.model": _foreign,
    "layout": _of_another_shape,
    "checksum": _damaged,
    "version": _of_a_later_version,
    "rows.length": _oversized,
    "rows": _of_more_rows,
    "magic": lambda: zlib.compress(bytes(10_000_000)) * 2,
    "size": lambda: b"",
}


@pytest.mark.parametrize("field", REFUSED)
def test_load_refuses_what_it_doubts(pool: PagePool, field: str) -> None:
    """ "`load` refuses a foreign, damaged or oversized blob with a named error and leaves the cache untouched" """
    with KVCache(pool, capacity=50) as cache:
        extend(cache, PROMPT)
        free = pool.free_pages()
        with pytest.raises(BlobError) as refused:
            cache.load(REFUSED[field]())
        assert refused.value.field == field
        assert holds(cache, PROMPT)
        assert pool.free_pages() == free


def test_load_into_a_pool_without_room_leaves_the_cache_untouched(pool: PagePool) -> None:
    """ "`load` refuses [...] and leaves the cache untouched" """
    with filled(pool, PROMPT) as cache:
        data, spare = cache.serialize(), pool.take(pool.free_pages())
        with pytest.raises(PoolExhausted):
            cache.load(data)
        assert holds(cache, PROMPT)
        for group, pages in enumerate(spare):
            pool.drop(group, pages)


class _Trap:
    """Unpickling it would be noticed."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (pytest.fail, ("a blob was unpickled",))


def test_no_pickle_anywhere(pool: PagePool) -> None:
    """ "no pickle anywhere" """
    with KVCache(pool) as cache, pytest.raises(BlobError):
        cache.load(pickle.dumps([_Trap()] * 20))
    banned = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    for path in sorted(Path(kvilt.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Import(names=names):
                    assert not banned & {alias.name.split(".")[0] for alias in names}, path
                case ast.ImportFrom(module=str(module)):
                    assert module.split(".")[0] not in banned, path
                case ast.Attribute(value=ast.Name(id="torch"), attr=attr):
                    assert attr not in ("load", "save"), path


def test_select_wants_a_cache_of_batch_one(pool: PagePool) -> None:
    """ "row i of other into this cache of batch 1" """
    with filled(pool, PROMPT) as one, filled(pool, [1], [2]) as two:
        with pytest.raises(InputError):
            two.select_and_copy_from(one, 0)
        for index in (-1, 2):
            with pytest.raises(InputError):
                one.select_and_copy_from(two, index)
        assert holds(one, PROMPT)
        assert holds(two, [1], [2])


def test_broadcast_costs_page_ids(pool: PagePool) -> None:
    """ "the one row of other into every row of this; costs page ids, not bytes" """
    with filled(pool, PROMPT) as source, KVCache(pool, 8) as wide:
        free = pool.free_pages()
        wide.broadcast_and_copy_from(source)
        assert pool.free_pages() == free
        assert wide.pages() == source.pages()


def test_deep_copy_shares_nothing(pool: PagePool) -> None:
    """ "shares no page with the original" """
    with filled(pool, PROMPT, PROMPT[:3]) as cache, cache.deep_copy() as copy:
        for mine, theirs in zip(cache.pages(), copy.pages(), strict=True):
            assert mine
            assert not set(mine) & set(theirs)


def test_copies_share_pages_within_a_pool(pool: PagePool) -> None:
    """ "select and broadcast share pages within a pool" """
    with filled(pool, PROMPT) as source, KVCache(pool) as one, KVCache(pool, 2) as two:
        one.select_and_copy_from(source, 0)
        two.broadcast_and_copy_from(source)
        assert one.pages() == two.pages() == source.pages()
        assert pool.holders(0, source.pages()[0][0]) == 4


def test_copies_across_pools_are_copies(pool: PagePool) -> None:
    """ "copy across pools" """
    other = new_pool()
    with filled(other, PROMPT) as abroad, KVCache(pool) as one, KVCache(pool, 2) as two:
        one.select_and_copy_from(abroad, 0)
        two.broadcast_and_copy_from(abroad)
        abroad.close()
        assert other.free_pages() == (PAGES, PAGES)
        assert holds(one, PROMPT)
        assert holds(two, PROMPT, PROMPT)


def test_copies_refuse_another_layout(pool: PagePool) -> None:
    """ "refuse another layout" """
    narrow = new_pool(KVLayout(LAYOUT.groups[:1]))
    with KVCache(narrow) as stranger, filled(pool, PROMPT) as cache:
        with pytest.raises(LayoutMismatch):
            cache.select_and_copy_from(stranger, 0)
        with pytest.raises(LayoutMismatch):
            cache.broadcast_and_copy_from(stranger)
        assert holds(cache, PROMPT)


def test_a_forgotten_handle_is_released(pool: PagePool) -> None:
    """ "a forgotten handle is released by a finalizer with a ResourceWarning" """
    with filled(pool, PROMPT) as parent:
        before = pool.free_pages()
        forgotten = parent.fork()
        extend(forgotten, [1] * 20)
        with pytest.warns(ResourceWarning, match="without close"):
            del forgotten
            gc.collect()
        assert pool.free_pages() == before
        assert holds(parent, PROMPT)
    assert pool.free_pages() == (PAGES, PAGES)


def test_fork_shares_until_someone_writes(pool: PagePool) -> None:
    """ "fork() -> KVCache, forks(n) -> list" """
    with filled(pool, PROMPT) as parent:
        one, *rest = [parent.fork(), *parent.forks(2)]
        extend(one, [1])
        extend(rest[0], [2])
        extend(parent, [3])
        assert holds(one, [*PROMPT, 1])
        assert holds(rest[0], [*PROMPT, 2])
        assert holds(rest[1], PROMPT)
        assert holds(parent, [*PROMPT, 3])
        for cache in (one, *rest):
            cache.close()


def test_fork_costs_the_same_whatever_a_page_weighs() -> None:
    """ "fork is O(pages)": a thousand forks of 64 MiB of KV copy none of it."""
    heavy = PageShape(layers=2, page_tokens=PAGE, kv_heads=64, key_dim=1024, value_dim=1024, dtype=FLOAT32)
    pool = PagePool(KVLayout((LayerGroup(Full(), (0, 1), heavy),)), 16, ReferenceOps(), lambda: Identity("one", "r"))
    with KVCache(pool) as cache:
        cache.reserve(60)
        cache.commit([[1] * 60])
        forks = cache.forks(1000)
        assert pool.free_pages() == (1,)
        for fork in forks:
            fork.close()


@pytest.mark.parametrize("length", [-1, len(PROMPT) + 1, 2**63])
def test_truncate_validates(pool: PagePool, length: int) -> None:
    """ "truncate validates 0 <= n <= length" """
    with filled(pool, PROMPT) as cache:
        with pytest.raises(TruncateError):
            cache.truncate(length)
        assert holds(cache, PROMPT)
        for fine in (len(PROMPT), len(PROMPT) - 1, 0):
            cache.truncate(fine)
            assert holds(cache, PROMPT[:fine])


def test_truncate_below_a_window_names_the_smallest_length(pool: PagePool) -> None:
    """ "a truncate below what they still hold raises a typed error that names the smallest possible length" """
    with filled(pool, PROMPT * 2) as cache:
        with pytest.raises(TruncateError) as refused:
            cache.truncate(3)
        smallest = refused.value.smallest
        assert str(smallest) in str(refused.value)
        with pytest.raises(TruncateError):
            cache.truncate(smallest - 1)
        cache.truncate(smallest)
        assert holds(cache, (PROMPT * 2)[:smallest])


def test_a_closed_handle_raises(pool: PagePool) -> None:
    """ "a closed handle raises" """
    cache = filled(pool, PROMPT)
    cache.close()
    cache.close()
    assert cache.closed
    with pytest.raises(CacheClosed):
        cache.fork()
    with pytest.raises(CacheClosed):
        cache.serialize()
    with pytest.raises(CacheClosed):
        _ = cache.num_entries


def test_a_context_manager_closes(pool: PagePool) -> None:
    """ "close(), context manager" """
    with filled(pool, PROMPT) as cache:
        assert not cache.closed
    assert cache.closed
    assert pool.free_pages() == (PAGES, PAGES)


def test_save_writes_what_load_reads(pool: PagePool, tmp_path: Path) -> None:
    """ "save(path)" """
    with filled(pool, PROMPT) as cache, KVCache(new_pool()) as other:
        cache.save(tmp_path / "prompt.kv")
        other.load((tmp_path / "prompt.kv").read_bytes())
        assert holds(other, PROMPT)
