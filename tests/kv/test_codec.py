"""Damaged and crafted blobs: each is refused by the name of the field that gave it away, and changes nothing."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvilt.errors import BlobError
from kvilt.kv.cache import KVCache
from kvilt.kv.identity import Identity
from kvilt.kv.layout import Full, KVLayout, LayerGroup, Window
from kvilt.ops.contract import PageShape
from kvilt.ops.kv_dtypes import FLOAT16, FLOAT32, INT8, K8V4, KVDtype

PREFIX = struct.Struct("<8sIQ")
HUGE = 2**63
HASH = hashlib.sha256(b"a picture").digest()


class Blob:
    """A blob taken apart, to be put together again with a right checksum."""

    def __init__(self, data: bytes) -> None:
        self.magic, self.version, size = PREFIX.unpack_from(data)
        self.header: Any = json.loads(data[PREFIX.size : PREFIX.size + size])
        self.payload = data[PREFIX.size + size : -32]
        self.raw_header: bytes | None = None
        self.header_bytes: int | None = None

    def sealed(self) -> bytes:
        header = self.raw_header if self.raw_header is not None else json.dumps(self.header).encode()
        size = len(header) if self.header_bytes is None else self.header_bytes
        body = PREFIX.pack(self.magic, self.version, size) + header + self.payload
        return body + hashlib.sha256(body).digest()


@pytest.fixture
def cache(scribe: Any) -> Any:
    """Two ragged rows on a layout with a window, one of them with an embedding row in it."""
    pool = scribe.pool(scribe.windowed())
    with KVCache(pool, 2, capacity=40) as kv:
        scribe.extend(kv, [scribe.cells([1, HASH, 3]), scribe.cells(range(17))])
        yield kv


def refused(cache: KVCache, data: bytes) -> str:
    """The field of the refusal, after which the cache and the pool are as they were."""
    before, free = cache.serialize(), cache.pool.free_pages()
    with pytest.raises(BlobError) as error:
        cache.load(data)
    assert cache.serialize() == before
    assert cache.pool.free_pages() == free
    assert "\n" not in str(error.value)  # one line of a log, and a short one, whatever the blob says
    assert len(str(error.value)) < 400
    return error.value.field


# Damage.


def test_a_flipped_bit_in_any_byte_is_refused(cache: KVCache) -> None:
    blob, dice = cache.serialize(), random.Random(1)
    before = cache.pool.free_pages()
    for at in range(len(blob)):
        damaged = bytearray(blob)
        damaged[at] ^= 1 << dice.randrange(8)
        with pytest.raises(BlobError) as error:
            cache.load(bytes(damaged))
        assert error.value.field in _noticed_by(at)
    assert cache.serialize() == blob
    assert cache.pool.free_pages() == before


def _noticed_by(at: int) -> tuple[str, ...]:
    """Which part of the frame notices a change at this byte; a header length that fits is left to the checksum."""
    if at < 8:
        return ("magic",)
    if at < 12:
        return ("version",)
    return ("header", "checksum") if at < 20 else ("checksum",)


def test_a_blob_cut_at_any_length_is_refused(cache: KVCache) -> None:
    blob = cache.serialize()
    fields = set()
    for length in range(len(blob)):
        with pytest.raises(BlobError) as error:
            cache.load(blob[:length])
        fields.add(error.value.field)
    assert fields == {"size", "header", "checksum"}
    assert cache.serialize() == blob


@pytest.mark.parametrize("more", [b"\0", b"\0" * 32, b"more" * 1000])
def test_bytes_behind_the_end_are_refused(cache: KVCache, more: bytes) -> None:
    assert refused(cache, cache.serialize() + more) == "checksum"


def test_a_blob_written_twice_into_one_file_is_refused(cache: KVCache) -> None:
    assert refused(cache, cache.serialize() * 2) == "checksum"


# Crafted: the checksum is right, the content is not.

Craft = Callable[[Blob], object]


def _set(*path: Any, to: Any) -> Craft:
    """Put a value at a place of the header."""

    def craft(blob: Blob) -> None:
        place = blob.header
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = to

    return craft


def _drop(*path: Any) -> Craft:
    def craft(blob: Blob) -> None:
        place = blob.header
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]

    return craft


def _attr(**values: Any) -> Craft:
    return lambda blob: [setattr(blob, name, value) for name, value in values.items()]


def _payload(change: Callable[[bytes], bytes]) -> Craft:
    return lambda blob: setattr(blob, "payload", change(blob.payload))


def _ids(*ids: int) -> Craft:
    """Overwrite the first token ids of the first row."""
    return _payload(lambda data: struct.pack(f"<{len(ids)}q", *ids) + data[8 * len(ids) :])


DEEP = b"[" * 100_000 + b"]" * 100_000
DEEP_OBJECT = b'{"a":' * 100_000 + b"1" + b"}" * 100_000

CRAFTED: list[tuple[str, str, Craft]] = [
    # name, field that must be named, craft
    ("magic of something else", "magic", _attr(magic=b"KVILTKV\1")),
    ("a zip file", "magic", _attr(magic=b"PK\3\4\0\0\0\0")),
    ("version 0", "version", _attr(version=0)),
    ("a later version", "version", _attr(version=2)),
    ("the largest version", "version", _attr(version=2**32 - 1)),
    ("header length 2^63", "header", _attr(header_bytes=HUGE)),
    ("header length 2^64-1", "header", _attr(header_bytes=2**64 - 1)),
    ("header length 0", "header", _attr(header_bytes=0)),
    ("header a byte short", "header", lambda b: _attr(header_bytes=len(json.dumps(b.header)) - 1)(b)),
    ("header not UTF-8", "header", _attr(raw_header=b"\xff\xfe\xfa{}")),
    ("header not JSON", "header", _attr(raw_header=b"rows: none")),
    ("header nested 100,000 deep", "header", _attr(raw_header=DEEP)),
    ("header of objects nested 100,000 deep", "header", _attr(raw_header=DEEP_OBJECT)),
    ("header with a number of 10,000 digits", "header", _attr(raw_header=b'{"rows":' + b"9" * 10_000 + b"}")),
    ("header a list", "header", _attr(header=[])),
    ("header a string", "header", _attr(header="rows")),
    ("header null", "header", _attr(header=None)),
    ("no identity", "identity", _drop("identity")),
    ("identity a list", "identity", _set("identity", to=["weights-1"])),
    ("identity without salt", "identity", _drop("identity", "salt")),
    ("identity with one field more", "identity", _set("identity", "owner", to="me")),
    ("another model", "identity.model", _set("identity", "model", to="weights-2")),
    ("another adapter", "identity.adapter", _set("identity", "adapter", to="lora:1.0")),
    ("a blend", "identity.origin", _set("identity", "origin", to="blend:0.15")),
    ("another tenant", "identity.salt", _set("identity", "salt", to="tenant")),
    ("other numerics", "identity.numerics", _set("identity", "numerics", to="cuda-9")),
    ("a model that is a number", "identity", _set("identity", "model", to=1)),
    ("numerics of nested lists", "identity", _set("identity", "numerics", to=json.loads("[" * 500 + "]" * 500))),
    ("numerics of several lines", "identity.numerics", _set("identity", "numerics", to="a\nERROR b\r\n")),
    ("numerics of a megabyte", "identity.numerics", _set("identity", "numerics", to="x" * (1 << 20))),
    ("no layout", "layout", _drop("layout")),
    ("layout a list", "layout", _set("layout", to=[])),
    ("layout without a group", "layout", _drop("layout", "groups", 1)),
    ("another dtype", "layout", _set("layout", "groups", 0, "dtype", to="float16")),
    ("another window", "layout", _set("layout", "groups", 1, "reach", "tokens", to=7)),
    ("more heads", "layout", _set("layout", "groups", 0, "kv_heads", to=2)),
    ("other layers", "layout", _set("layout", "groups", 0, "layers", to=[0])),
    ("a layer that is true, which equals 1", "layout.layers", _set("layout", "groups", 0, "layers", to=[True])),
    ("heads that are 1.0, which equals 1", "layout.kv_heads", _set("layout", "groups", 0, "kv_heads", to=1.0)),
    ("no rows field", "rows", _drop("rows")),
    ("rows an object", "rows", _set("rows", to={"0": {}})),
    ("no row", "rows", _set("rows", to=[])),
    ("no row and no payload", "rows", lambda b: (_set("rows", to=[])(b), _attr(payload=b"")(b))),
    ("a row that is a number", "rows", _set("rows", 0, to=3)),
    ("a row that is null", "rows", _set("rows", 0, to=None)),
    ("no length", "rows.length", _drop("rows", 0, "length")),
    ("length 2^63", "rows.length", _set("rows", 0, "length", to=HUGE)),
    ("length 2^40", "rows.length", _set("rows", 0, "length", to=2**40)),
    ("length past the capacity", "rows.length", _set("rows", 0, "length", to=41)),
    ("length -1", "rows.length", _set("rows", 0, "length", to=-1)),
    ("length 3.0", "rows.length", _set("rows", 0, "length", to=3.0)),
    ("length true", "rows.length", _set("rows", 0, "length", to=True)),
    ("length NaN", "rows.length", _set("rows", 0, "length", to=float("nan"))),
    ("length infinite", "rows.length", _set("rows", 0, "length", to=float("inf"))),
    ("length a string", "rows.length", _set("rows", 0, "length", to="3")),
    ("length null", "rows.length", _set("rows", 0, "length", to=None)),
    ("length one less", "payload", _set("rows", 0, "length", to=2)),
    ("length one more", "payload", _set("rows", 0, "length", to=4)),
    ("no embeds", "rows.embeds", _drop("rows", 0, "embeds")),
    ("embeds a number", "rows.embeds", _set("rows", 0, "embeds", to=1)),
    ("embeds past the row", "rows.embeds", _set("rows", 0, "embeds", to=[3])),
    ("embeds at 2^63", "rows.embeds", _set("rows", 0, "embeds", to=[HUGE])),
    ("embeds at -1", "rows.embeds", _set("rows", 0, "embeds", to=[-1])),
    ("embeds at 1.0", "rows.embeds", _set("rows", 0, "embeds", to=[1.0])),
    ("embeds at true", "rows.embeds", _set("rows", 0, "embeds", to=[True])),
    ("embeds twice", "rows.embeds", _set("rows", 0, "embeds", to=[1, 1])),
    ("embeds descending", "rows.embeds", _set("rows", 0, "embeds", to=[2, 1])),
    ("embeds elsewhere", "payload.tokens", _set("rows", 0, "embeds", to=[2])),
    ("an embed more", "payload", _set("rows", 0, "embeds", to=[1, 2])),
    ("no embed", "payload", _set("rows", 0, "embeds", to=[])),
    ("no firsts", "rows.firsts", _drop("rows", 1, "firsts")),
    ("firsts an object", "rows.firsts", _set("rows", 1, "firsts", to={})),
    ("firsts of one group", "rows.firsts", _set("rows", 1, "firsts", to=[0])),
    ("firsts of three groups", "rows.firsts", _set("rows", 1, "firsts", to=[0, 0, 0])),
    ("firsts at -4", "rows.firsts", _set("rows", 1, "firsts", to=[0, -4])),
    ("firsts at 8.0", "rows.firsts", _set("rows", 1, "firsts", to=[0, 8.0])),
    ("firsts false", "rows.firsts", _set("rows", 1, "firsts", to=[False, 8])),
    ("firsts past the row", "rows.firsts", _set("rows", 1, "firsts", to=[0, 18])),
    ("firsts at 2^63", "rows.firsts", _set("rows", 1, "firsts", to=[0, HUGE])),
    ("firsts too late for a window", "rows.firsts", _set("rows", 1, "firsts", to=[0, 13])),
    ("firsts too late for a full group", "rows.firsts", _set("rows", 1, "firsts", to=[1, 8])),
    ("firsts earlier than what is there", "payload", _set("rows", 1, "firsts", to=[0, 4])),
    ("a token id of -1 without an embedding", "payload.tokens", _ids(-1)),
    ("a token id of -2", "payload.tokens", _ids(-2)),
    ("a token id of -2^63", "payload.tokens", _ids(-HUGE)),
    ("an id in the place of an embedding", "payload.tokens", _ids(1, 2)),
    ("a payload with a byte more", "payload", _payload(lambda data: data + b"\0")),
    ("a payload with a byte less", "payload", _payload(lambda data: data[:-1])),
    ("no payload", "payload", _payload(lambda _: b"")),
    ("a row more than there is payload", "payload", lambda b: b.header["rows"].append(b.header["rows"][0])),
]


@pytest.mark.parametrize(("field", "craft"), [case[1:] for case in CRAFTED], ids=[case[0] for case in CRAFTED])
def test_a_crafted_blob_is_refused_by_the_name_of_its_field(cache: KVCache, field: str, craft: Craft) -> None:
    blob = Blob(cache.serialize())
    craft(blob)
    assert refused(cache, blob.sealed()) == field


@pytest.mark.parametrize("data", ["text", None, 7, [1, 2]])
def test_what_is_no_bytes_is_refused_as_data(cache: KVCache, data: Any) -> None:
    assert refused(cache, data) == "data"


def test_an_untouched_blob_put_together_again_is_taken(cache: KVCache) -> None:
    """So that the crafted ones above are refused for their craft alone."""
    cache.load(Blob(cache.serialize()).sealed())


def test_unknown_header_fields_are_harmless(cache: KVCache) -> None:
    data = cache.serialize()
    blob = Blob(data)
    blob.header["note"] = {"nested": [1, 2]}
    cache.load(blob.sealed())
    assert cache.serialize() == data


def test_more_or_fewer_rows_than_the_batch_are_refused(scribe: Any, cache: KVCache) -> None:
    for batch in (1, 3):
        other, _ = scribe.grown(cache.pool, range(3), batch)
        with other:
            assert refused(cache, other.serialize()) == "rows"


@pytest.mark.parametrize("field", ["model", "numerics", "adapter", "origin", "salt"])
def test_kv_of_another_maker_is_refused_by_field(scribe: Any, cache: KVCache, field: str) -> None:
    identity = Identity(**{"model": "weights-1", "numerics": "reference-1", field: "other"})
    other, _ = scribe.grown(scribe.pool(scribe.windowed(), identity=identity), range(3), batch=2)
    with other:
        assert refused(cache, other.serialize()) == f"identity.{field}"


def test_other_numerics_may_be_accepted_and_nothing_else(scribe: Any, cache: KVCache) -> None:
    layout = scribe.windowed()
    other, rows = scribe.grown(scribe.pool(layout, identity=Identity("weights-1", "avx512")), range(3), batch=2)
    foreign, _ = scribe.grown(scribe.pool(layout, identity=Identity("weights-2", "avx512")), range(3), batch=2)
    with other, foreign:
        with pytest.raises(BlobError, match=r"^identity\.model"):
            cache.load(foreign.serialize(), accept_numerics=True)
        cache.load(other.serialize(), accept_numerics=True)
        scribe.check(cache, rows)


SHAPE = PageShape(1, 4, 1, 4, 4, FLOAT32)
OTHER_LAYOUTS = {
    "full": KVLayout((LayerGroup(Full(), (0,), SHAPE),)),
    "dtype": KVLayout((LayerGroup(Window(6), (0,), PageShape(1, 4, 1, 4, 4, FLOAT16)),)),
    "window": KVLayout((LayerGroup(Window(7), (0,), SHAPE),)),
    "heads": KVLayout((LayerGroup(Window(6), (0,), PageShape(1, 4, 2, 4, 4, FLOAT32)),)),
    "dim": KVLayout((LayerGroup(Window(6), (0,), PageShape(1, 4, 1, 2, 4, FLOAT32)),)),
    "layers": KVLayout((LayerGroup(Window(6), (0, 1), PageShape(2, 4, 1, 4, 4, FLOAT32)),)),
    "bare": KVLayout((LayerGroup(Window(6), (0,), SHAPE),), bare=(1,)),
}


@pytest.mark.parametrize("name", OTHER_LAYOUTS)
def test_kv_of_another_layout_is_refused(scribe: Any, name: str) -> None:
    mine, theirs = scribe.pool(KVLayout((LayerGroup(Window(6), (0,), SHAPE),))), scribe.pool(OTHER_LAYOUTS[name])
    with KVCache(mine) as cache, KVCache(theirs) as other:
        assert refused(cache, other.serialize()) == "layout"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8, K8V4], ids=str)
@pytest.mark.parametrize("layout", ["full", "windowed", "latent"])
def test_a_round_trip_keeps_every_bit_also_of_nan_and_infinity(scribe: Any, layout: str, dtype: torch.dtype) -> None:
    pool = scribe.pool(scribe.layout(layout, dtype))
    awkward = torch.tensor([float("nan"), float("inf"), -0.0, 1e-7])
    with KVCache(pool) as cache, KVCache(pool) as other:
        scribe.extend(cache, [scribe.cells(range(5))])
        store = pool.stores[0]
        shape = store.shape
        keys, values = (awkward[:dim].expand(2, shape.kv_heads, dim) for dim in (shape.key_dim, shape.value_dim))
        pool.ops.write(store, 0, cache.row(0).slots(0, 1, 3), keys, values)
        blob = cache.serialize()
        other.load(blob)
        assert other.serialize() == blob


@pytest.mark.parametrize("dtype", [INT8, K8V4], ids=lambda one: one.name)
def test_bytes_travel_with_their_scales(scribe: Any, dtype: KVDtype) -> None:
    layout = scribe.windowed(dtype)
    pool, abroad = scribe.pool(layout), scribe.pool(scribe.windowed(dtype, page_tokens=3))
    with KVCache(pool) as cache, KVCache(abroad) as other, KVCache(scribe.pool(scribe.windowed())) as floats:
        scribe.extend(cache, [scribe.cells(range(5))])
        blob = cache.serialize()
        other.load(blob)
        for g, store in enumerate(pool.stores):
            kv = pool.ops.read_slots(store, cache.row(0).slots(g, 0, 5))
            there = abroad.ops.read_slots(abroad.stores[g], other.row(0).slots(g, 0, 5))
            assert torch.isfinite(kv.key_scales).all()
            for name in ("keys", "values", "key_scales", "value_scales"):
                assert torch.equal(getattr(kv, name), getattr(there, name))
        assert refused(floats, blob) == "layout"
        short = Blob(blob)
        short.payload = short.payload[:-8]  # as long as if there were no scales of the last token's values
        assert refused(cache, short.sealed()) == "payload"


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_of_bytes_loads(cache: KVCache, kind: Callable[[bytes], Any]) -> None:
    data = cache.serialize()
    cache.load(kind(data))
    assert cache.serialize() == data


def test_an_empty_cache_survives_the_round_trip(scribe: Any) -> None:
    pool = scribe.pool(scribe.windowed())
    full, _ = scribe.grown(pool, range(9), batch=2)
    with full, KVCache(pool, 2) as empty:
        full.load(empty.serialize())
        assert full.lengths == (0, 0)
        scribe.check_counts(pool, [full, empty])


def test_the_same_content_gives_the_same_bytes_wherever_its_pages_lie(scribe: Any) -> None:
    pool = scribe.pool(scribe.windowed())
    first, _ = scribe.grown(pool, range(17))
    second, _ = scribe.grown(pool, range(17))
    with first, second:
        assert first.pages() != second.pages()
        assert first.serialize() == second.serialize()
