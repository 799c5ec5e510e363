"""Damaged and crafted records: each is refused by the name of what gave it away, and none is ever served."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
from collections.abc import Callable
from typing import Any

import pytest

from kvilt.errors import BlobError
from kvilt.kv.owner import owner_of
from kvilt.store.address import Address, chunk_address
from kvilt.store.codec_registry import codec_named
from kvilt.store.codecs import Raw
from kvilt.store.layer import LayerKV
from kvilt.store.record import MAGIC, PREFIX, RecordInfo, pack, peek, read_content, read_header, read_layer

SECRET = b"a secret of the fleet"


def reader(data: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, size: data[offset : offset + size]


def read(data: bytes, address: Address, secret: bytes | None = None) -> list[LayerKV]:
    """All of a record, the way a lookup reads it."""
    header = read_header(reader(data), len(data), secret)
    read_content(reader(data), header, address)
    codec = codec_named(header.codec)
    return [read_layer(reader(data), header, codec, layer)[1] for layer in range(len(header.frames))]


def refusal(data: bytes, address: Address, secret: bytes | None = None) -> str:
    with pytest.raises(BlobError) as error:
        read(data, address, secret)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300
    return error.value.field


@pytest.fixture
def layers(kit: Any) -> list[LayerKV]:
    return kit.layers()


@pytest.fixture
def address(kit: Any, layers: list[LayerKV]) -> Address:
    return chunk_address(kit.identity, kit.tokens, kit.form(layers))


@pytest.fixture
def record(address: Address, layers: list[LayerKV]) -> bytes:
    return b"".join(pack(address, Raw(), [Raw().encode(one) for one in layers], None))


def resealed(record: bytes, change: Callable[[dict[str, Any]], Any], secret: bytes | None = None) -> bytes:
    """The record with another header, and a seal that is right for it."""
    _, version, size = PREFIX.unpack_from(record)
    fields = json.loads(record[PREFIX.size : PREFIX.size + size])
    made = change(fields)
    header = json.dumps(fields if made is None else made).encode()
    head = PREFIX.pack(MAGIC, version, len(header)) + header
    if secret is None:
        seal = hashlib.blake2b(head, digest_size=32, person=b"kvilt seal").digest()
    else:
        seal = hmac.digest(secret, head, "sha256")
    return head + seal + record[PREFIX.size + size + 32 :]


def test_a_record_gives_back_what_it_was_made_of(
    kit: Any, record: bytes, address: Address, layers: list[LayerKV]
) -> None:
    assert kit.same(read(record, address), layers)


def test_every_flipped_bit_is_noticed(record: bytes, address: Address) -> None:
    for at in range(len(record)):
        damaged = bytearray(record)
        damaged[at] ^= 1 << at % 8
        field = refusal(bytes(damaged), address)
        assert field in ("magic", "version", "size", "seal", "tokens", "checksum"), at


def test_every_truncation_and_every_tail_is_noticed(record: bytes, address: Address) -> None:
    for size in range(len(record)):
        assert refusal(record[:size], address) in ("size", "seal"), size
    assert refusal(record + b"\0", address) == "size"


def test_a_read_that_ends_early_is_noticed(record: bytes, address: Address) -> None:
    """The size was right when the file was opened, and then somebody cut it."""
    for cut in (0, 10, 200, len(record) - 1):
        with pytest.raises(BlobError) as error:
            header = read_header(reader(record[:cut]), len(record), None)
            read_content(reader(record[:cut]), header, address)
            for layer in range(3):
                read_layer(reader(record[:cut]), header, Raw(), layer)
        assert error.value.field == "size"


CRAFTED: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("another kind", lambda h: h.update(kind="handle"), "kind"),
    ("another model", lambda h: h.update(model="weights-2"), "identity.model"),
    ("other numerics", lambda h: h.update(numerics="avx"), "identity.numerics"),
    ("another adapter", lambda h: h.update(adapter="lora"), "identity.adapter"),
    ("a blend", lambda h: h.update(origin="blend 0.15"), "identity.origin"),
    ("another tenant", lambda h: h.update(tenant="0" * 32), "tenant"),
    ("another dtype", lambda h: h["form"][0].__setitem__(3, "bfloat16"), "form"),
    ("more heads", lambda h: h["form"][1].__setitem__(0, 4), "form"),
    ("fewer tokens", lambda h: h.update(count=4), "count"),
    ("2^63 tokens", lambda h: h.update(count=2**63), "firsts"),
    ("negative tokens", lambda h: h.update(count=-1), "firsts"),
    ("tokens that are true", lambda h: h.update(count=True), "firsts"),
    ("a part of it", lambda h: h.update(firsts=[1, 1, 1]), "span"),
    ("a first too few", lambda h: h.update(firsts=[0, 0]), "firsts"),
    ("a first past the end", lambda h: h.update(firsts=[0, 0, 6]), "firsts"),
    ("a frame too few", lambda h: h["frames"].pop() and None, "frames"),
    ("a frame of 2^63", lambda h: h["frames"][0].__setitem__(0, 2**63), "frames"),
    ("a frame below zero", lambda h: h["frames"][0].__setitem__(0, -1), "frames"),
    ("frames of other lengths", lambda h: (h["frames"][0].__setitem__(0, 1), None)[1], "size"),
    ("another digest", lambda h: h["frames"][1].__setitem__(1, "0" * 64), "checksum"),
    ("another digest of tokens", lambda h: h["tokens"].__setitem__(1, "0" * 64), "checksum"),
    ("digests that are numbers", lambda h: h["frames"][1].__setitem__(1, 7), "frames"),
    ("no frames", lambda h: h.pop("frames") and None, "frames"),
    ("no form", lambda h: h.update(form="none"), "form"),
    ("a form of text", lambda h: h.update(form=["x", "y", "z"]), "form"),
    ("no kind", lambda h: h.pop("kind") and None, "header"),
    ("a model that is a number", lambda h: h.update(model=7), "header"),
    ("a list", lambda h: [1, 2, 3], "header"),
    ("another seal", lambda h: h.update(seal="hmac-sha256"), "seal"),
]


@pytest.mark.parametrize(("change", "field"), [row[1:] for row in CRAFTED], ids=[row[0] for row in CRAFTED])
def test_a_crafted_header_is_refused_by_name(
    record: bytes, address: Address, change: Callable[[dict[str, Any]], Any], field: str
) -> None:
    assert refusal(resealed(record, change), address) == field


def test_a_header_that_is_not_json_is_refused(record: bytes, address: Address) -> None:
    for text in (b"\xff\xfe", b"[" * 100_000, b"{", b"9" * 10_000, b""):
        head = PREFIX.pack(MAGIC, 1, len(text)) + text
        data = head + hashlib.blake2b(head, digest_size=32, person=b"kvilt seal").digest()
        assert refusal(data, address) == "header"


def test_a_header_that_claims_gigabytes_is_refused_before_they_are_read(record: bytes, address: Address) -> None:
    asked = []

    def read(offset: int, size: int) -> bytes:
        asked.append(size)
        return record[offset : offset + size]

    for claim in (2**32 - 1, 1 << 25):
        data = record[:12] + claim.to_bytes(4, "little") + record[16:]
        record, kept = data, record
        with pytest.raises(BlobError, match="size"):
            read_header(read, 1 << 40, None)
        record = kept
    assert max(asked) <= 1 << 16


def test_tokens_are_compared_and_not_only_hashed(record: bytes, address: Address) -> None:
    other = dataclasses.replace(address, content=address.content[:-8] + (1).to_bytes(8, "little"))
    assert refusal(record, other) == "tokens"


def test_another_format_is_refused(record: bytes, address: Address) -> None:
    data = PREFIX.pack(MAGIC, 2, PREFIX.unpack_from(record)[2]) + record[PREFIX.size :]
    assert refusal(data, address) == "version"
    with pytest.raises(BlobError, match="version"):
        peek(reader(data), len(data))


def test_a_secret_seals_and_nothing_else_is_accepted(
    kit: Any, record: bytes, address: Address, layers: list[LayerKV]
) -> None:
    frames = [Raw().encode(one) for one in layers]
    sealed = b"".join(pack(address, Raw(), frames, SECRET))
    assert kit.same(read(sealed, address, SECRET), layers)
    assert refusal(sealed, address, b"another secret....") == "seal"
    assert refusal(sealed, address, None) == "seal"
    assert refusal(record, address, SECRET) == "seal"
    # Somebody without the secret cannot make a record of other KV, nor give one another name.
    poisoned = resealed(sealed, lambda header: header.update(model="weights-1"), b"a guess of mine.....")
    assert refusal(poisoned, address, SECRET) == "seal"
    assert refusal(resealed(sealed, lambda header: header.update(seal="blake2b"), SECRET), address, SECRET) == "seal"


def test_a_frame_of_another_record_does_not_fit(kit: Any, record: bytes, address: Address) -> None:
    other = b"".join(pack(address, Raw(), [Raw().encode(one) for one in kit.layers(seed=1)], None))
    mixed = record[:-100] + other[-100:]
    assert refusal(mixed, address) == "checksum"


def test_an_index_learns_owner_and_kind_of_a_record_and_keeps_it_no_longer_than_others(
    kit: Any, record: bytes, address: Address
) -> None:
    assert peek(reader(record), len(record)) == RecordInfo(owner_of(address.tenant), address.kind.value, retain=False)


def test_a_salt_is_not_in_a_record(record: bytes, kit: Any) -> None:
    assert kit.identity.salt.encode() not in record
