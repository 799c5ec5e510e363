"""Serialized KV caches: whatever is in one, loading it ends with a cache or a typed error that changes nothing.

Every input is tried as it is and with a right checksum. Oracles: what loads, serializes to the same payload and, where
the header was written as kvilt writes it, to the same bytes; a refused blob leaves the cache and the pool as they were;
a blob that loads is described with the same rows.
"""

from __future__ import annotations

import hashlib
import json
import random
import struct
from array import array

import torch

from kvilt.errors import BlobError, PoolExhausted
from kvilt.kv.cache import KVCache
from kvilt.kv.codec import DIGEST_BYTES, describe, pack
from kvilt.kv.identity import Identity
from kvilt.kv.layout import Full, KVLayout, LayerGroup, Window
from kvilt.kv.pool import PagePool
from kvilt.kv.row import RowImage
from kvilt.ops.contract import KeysValues, PageShape
from kvilt.ops.kv_dtypes import FLOAT16, INT8, KVDtype
from kvilt.ops.reference import ReferenceOps

from .driver import main
from .target import Finding, Target, label
from .values import changed, dumped

_PREFIX = struct.Struct("<8sIQ")
_IDENTITY = Identity("weights-1", "reference-1")
_CAPACITY = 40


def _layout(dtype: KVDtype) -> KVLayout:
    return KVLayout(
        (
            LayerGroup(Full(), (1,), PageShape(1, 4, 1, 4, 4, dtype)),
            LayerGroup(Window(6), (0, 2), PageShape(2, 4, 2, 4, 2, dtype)),
        )
    )


_LAYOUTS = tuple(map(_layout, (FLOAT16, INT8)))
_POOLS = tuple(PagePool(layout, 32, ReferenceOps(), lambda: _IDENTITY) for layout in _LAYOUTS)


def sealed(body: bytes) -> bytes:
    return body + hashlib.sha256(body).digest()


def _image(layout: KVLayout, ids: list[int], embeds: dict[int, bytes], seed: int) -> RowImage:
    made, groups, firsts = torch.Generator().manual_seed(seed), [], []
    for group in layout.groups:
        first, shape = group.first_needed(len(ids)), group.shape
        heads = (shape.layers, len(ids) - first, shape.kv_heads)
        dims, storage = (shape.key_dim, shape.value_dim), shape.dtype.storage
        kv = [torch.randn(*heads, dim, generator=made).to(storage) for dim in dims]
        scales = [torch.rand(*heads, generator=made) if shape.scales else torch.empty(0) for _ in range(2)]
        groups.append(KeysValues(*kv, *scales))
        firsts.append(first)
    return RowImage(array("q", ids), embeds, tuple(firsts), tuple(groups))


def seeds() -> list[bytes]:
    """Bodies without a checksum: `check` adds it."""
    made = []
    for layout in _LAYOUTS:
        rows = [_image(layout, [1, -1, 3], {1: bytes(32)}, 1), _image(layout, list(range(17)), {}, 2)]
        made += [pack(rows, layout, _IDENTITY)[:-DIGEST_BYTES], pack(rows[:1], layout, _IDENTITY)[:-DIGEST_BYTES]]
    return made


def check(data: bytes) -> str:
    return " | ".join(_load(blob, pool) for blob in (data, sealed(data)) for pool in _POOLS)


def _load(blob: bytes, pool: PagePool) -> str:
    free = pool.free_pages()
    try:
        described = describe(blob)
    except BlobError:
        described = None
    rows = 2 if described is not None and len(described.rows) == 2 else 1
    with KVCache(pool, rows, capacity=_CAPACITY) as cache:
        empty = cache.serialize()
        try:
            cache.load(blob)
        except (BlobError, PoolExhausted) as error:
            if cache.serialize() != empty or pool.free_pages() != free:
                raise Finding("a refused blob changed the cache or the pool") from error
            return label(error)
        again = cache.serialize()
        if described is None or [row.length for row in described.rows] != list(cache.lengths):
            raise Finding("a blob that loads is described otherwise")
    if pool.free_pages() != free:
        raise Finding("a closed cache kept pages")
    _compare(blob, again)
    return "loaded"


def _compare(blob: bytes, again: bytes) -> None:
    (header, payload), (own_header, own_payload) = _apart(blob), _apart(again)
    if payload != own_payload:
        raise Finding("a loaded blob serializes to another payload")
    canonical = json.dumps(json.loads(header), sort_keys=True, separators=(",", ":")).encode()
    known = set(json.loads(own_header))
    if canonical == header and set(json.loads(header)) == known and header != own_header and _plain(header):
        raise Finding("a loaded blob serializes to another header")


def _plain(header: bytes) -> bool:
    """Whether its rows have the fields that kvilt writes and no more."""
    return all(set(row) == {"length", "embeds", "firsts"} for row in json.loads(header)["rows"])


def _apart(blob: bytes) -> tuple[bytes, bytes]:
    _, _, size = _PREFIX.unpack_from(blob)
    return blob[_PREFIX.size : _PREFIX.size + size], blob[_PREFIX.size + size : -DIGEST_BYTES]


def mutate(data: bytes, dice: random.Random) -> bytes:
    """Another header in a right frame."""
    try:
        magic, version, size = _PREFIX.unpack_from(data)
        header = dumped(changed(json.loads(data[_PREFIX.size : _PREFIX.size + size]), dice), dice)
        return _PREFIX.pack(magic, version, len(header)) + header + data[_PREFIX.size + size :]
    except (ValueError, struct.error, RecursionError, OverflowError):
        return mutate(dice.choice(seeds()), dice)


WORDS = (
    b'"rows":[',
    b'"embeds":[',
    b'"firsts":[',
    b'"length":',
    b'"kind":"window"',
    b'"tokens":',
    b"KVILTKV\0",
    b"int8",
)
TARGET = Target("blobs", check, seeds, WORDS, mutate, most_bytes=1 << 13)

if __name__ == "__main__":
    main(TARGET)
