"""A serialized cache says what it is without a model, and says nothing that is not true of every byte of it."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Callable
from typing import Any

import pytest

from kvilt.errors import BlobError
from kvilt.kv.cache import KVCache
from kvilt.kv.codec import describe
from kvilt.kv.row import maker_parts
from kvilt.ops.kv_dtypes import KV_DTYPES, KVDtype

PREFIX = struct.Struct("<8sIQ")
HASH = hashlib.sha256(b"a picture").digest()


@pytest.fixture
def cache(scribe: Any) -> Any:
    """Two ragged rows on a layout with a window, one of them with an embedding row in it."""
    with KVCache(scribe.pool(scribe.windowed()), 2, capacity=40) as kv:
        scribe.extend(kv, [scribe.cells([1, HASH, 3]), scribe.cells(range(17))])
        yield kv


def changed(blob: bytes, change: Callable[[Any], object]) -> bytes:
    """The blob with another header and a right checksum."""
    magic, version, size = PREFIX.unpack_from(blob)
    header = json.loads(blob[PREFIX.size : PREFIX.size + size])
    change(header)
    raw = json.dumps(header).encode()
    body = PREFIX.pack(magic, version, len(raw)) + raw + blob[PREFIX.size + size : -32]
    return body + hashlib.sha256(body).digest()


def test_a_blob_says_its_rows_layout_and_identity(cache: KVCache, scribe: Any) -> None:
    blob = cache.serialize()
    said = describe(blob, first_tokens=5)
    assert said.identity == scribe.identity
    assert said.layout.describe() == scribe.windowed().describe()
    assert said.nbytes == len(blob)
    assert [(row.length, row.embedded, row.tokens) for row in said.rows] == [
        (3, 1, (1, -1, 3)),
        (17, 0, (0, 1, 2, 3, 4)),
    ]
    assert [list(row.firsts) for row in said.rows] == [list(row.firsts) for row in cache.rows()]
    assert said.rows[1].firsts[1] > 0
    assert describe(memoryview(blob), first_tokens=5) == said


@pytest.mark.parametrize("dtype", KV_DTYPES.values(), ids=KV_DTYPES)
def test_the_dtype_is_the_layouts(scribe: Any, dtype: KVDtype) -> None:
    cache, _ = scribe.grown(scribe.pool(scribe.full(dtype)), [5, 6])
    with cache:
        said = describe(cache.serialize())
    assert said.layout.groups[0].shape.dtype is dtype


@pytest.mark.parametrize(
    ("maker", "parts"),
    [
        ("base", ("base", 0)),
        ("a1 from 7", ("a1", 7)),
        ("a1 from " + "9" * 15, ("a1", 10**15 - 1)),
        ("a1 from " + "9" * 16, ("a1", 0)),  # no position: nothing that is read from a file becomes a huge number
        ("a1 from x", ("a1", 0)),
    ],
)
def test_a_maker_says_where_its_adapter_began(maker: str, parts: tuple[str, int]) -> None:
    assert maker_parts(maker) == parts


def test_a_flipped_bit_anywhere_is_refused(cache: KVCache) -> None:
    blob, dice = cache.serialize(), random.Random(2)
    for at in range(0, len(blob), 7):
        damaged = bytearray(blob)
        damaged[at] ^= 1 << dice.randrange(8)
        with pytest.raises(BlobError):
            describe(bytes(damaged))


def test_bytes_cut_short_anywhere_are_refused(cache: KVCache) -> None:
    blob = cache.serialize()
    for size in range(0, len(blob), 97):
        with pytest.raises(BlobError):
            describe(blob[:size])


def _group(header: Any) -> Any:
    return header["layout"]["groups"][0]


CRAFTED: dict[str, tuple[str, Callable[[Any], object]]] = {
    "no layout": ("layout", lambda h: h.pop("layout")),
    "a layout of no groups": ("layout", lambda h: h.update(layout={"groups": []})),
    "a group that is a number": ("layout", lambda h: h.update(layout={"groups": [3]})),
    "a type that is a function": ("layout.dtype", lambda h: _group(h).update(dtype="load")),
    "a type that is a list": ("layout.dtype", lambda h: _group(h).update(dtype=["float32"])),
    "heads without end": ("layout.kv_heads", lambda h: _group(h).update(kv_heads=2**63)),
    "negative keys": ("layout.key_dim", lambda h: _group(h).update(key_dim=-4)),
    "values that are true": ("layout.value_dim", lambda h: _group(h).update(value_dim=True)),
    "no layers": ("layout.layers", lambda h: _group(h).update(layers=[])),
    "a layer twice": ("layout.layers", lambda h: _group(h).update(layers=[0])),
    "a layer that is text": ("layout.layers", lambda h: _group(h).update(layers=["1"])),
    "layers of which one is text": ("layout.layers", lambda h: _group(h).update(layers=[0, "1"])),
    "an unknown reach": ("layout.reach", lambda h: _group(h).update(reach={"kind": "far"})),
    "a window of nothing": ("layout.reach", lambda h: _group(h).update(reach={"kind": "window", "tokens": 0})),
    "no reach": ("layout.reach", lambda h: _group(h).pop("reach")),
    "another size": ("payload", lambda h: _group(h).update(key_dim=8)),
    "an identity without a model": ("identity", lambda h: h["identity"].pop("model")),
    "a longer row": ("payload", lambda h: h["rows"][1].update(length=18)),
    "a row without end": ("payload", lambda h: h["rows"][1].update(length=1 << 40, firsts=[0, 0])),
    "a row of 2^63": ("rows.length", lambda h: h["rows"][1].update(length=1 << 63)),
    "rows that are none": ("rows", lambda h: h.update(rows=None)),
}


@pytest.mark.parametrize("kind", CRAFTED)
def test_a_crafted_header_is_refused_by_field(cache: KVCache, kind: str) -> None:
    field, change = CRAFTED[kind]
    with pytest.raises(BlobError) as caught:
        describe(changed(cache.serialize(), change))
    assert caught.value.field == field
    assert len(str(caught.value)) < 400
