"""Records of the KV store: whatever is in one, looking it up ends with the layers that were asked for or a typed error.

Every input is tried as it is and with a right seal. Oracles: a record that is served is of the question's tokens, its
layers have the question's form and, for lossless codecs, encode to the same bytes; `peek` never fails where
`read_header` succeeds.
"""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Callable

import torch

from kvilt.errors import BlobError, KviltError
from kvilt.kv.identity import Identity
from kvilt.kv.owner import owner_of
from kvilt.store.address import Address, chunk_address
from kvilt.store.codec_registry import codec_named
from kvilt.store.layer import LayerKV
from kvilt.store.record import MAGIC, PREFIX, SEAL_BYTES, digest, pack, peek, read_content, read_header, read_layer

from .driver import main
from .target import Finding, Target, label
from .values import changed, dumped

_IDENTITY = Identity("weights-1", "native-1", salt="tenant-a")
_TOKENS = [5, 6, 7, 8, 9]
_CODECS = ("raw", "zstd", "int8", "k8v4")


def _layers() -> list[LayerKV]:
    made = torch.Generator().manual_seed(0)
    return [LayerKV(*torch.randn((2, len(_TOKENS), 2, 8), generator=made).to(torch.float16)) for _ in range(2)]


_LAYERS = _layers()
_ADDRESS = chunk_address(_IDENTITY, _TOKENS, tuple(one.form for one in _LAYERS))


def seeds() -> list[bytes]:
    made = []
    for name in _CODECS:
        codec = codec_named(name)
        made.append(b"".join(pack(_ADDRESS, codec, [codec.encode(one) for one in _LAYERS], None)))
    return made


def sealed(data: bytes) -> bytes:
    """The record with a seal that is right for its header, wherever that ends."""
    if len(data) < PREFIX.size:
        return data
    size = PREFIX.unpack_from(data)[2]
    at = PREFIX.size + size
    seal = hashlib.blake2b(data[:at], digest_size=SEAL_BYTES, person=b"kvilt seal").digest()
    return data[:at] + seal + data[at + SEAL_BYTES :]


def check(data: bytes) -> str:
    return " | ".join(_read(one, _ADDRESS) for one in (data, sealed(data)))


def _reader(data: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, size: data[offset : offset + size]


def _read(data: bytes, address: Address) -> str:
    """All of a record, the way a lookup reads it."""
    read = _reader(data)
    try:
        header = read_header(read, len(data), None)
    except BlobError as error:
        return label(error)
    facts = peek(read, len(data))
    if (facts.tenant, facts.kind) != (owner_of(header.tenant), header.kind):
        raise Finding("peek and read_header disagree")
    try:
        read_content(read, header, address)
        codec = codec_named(header.codec)
        layers = [read_layer(read, header, codec, layer) for layer in range(len(header.frames))]
    except KviltError as error:
        return label(error)
    for (raw, layer), form in zip(layers, address.form, strict=True):
        if layer.form != form or layer.keys.shape[0] != len(_TOKENS):
            raise Finding("a layer is not of the form that was asked for")
        if codec.name == "raw" and codec.encode(layer) != bytes(raw):
            raise Finding("a raw layer encodes to other bytes")
        if codec.name == "zstd" and not _same(codec.decode(codec.encode(layer), form, len(_TOKENS)), layer):
            raise Finding("a layer does not survive its codec")
    return f"served by {codec.name}"


def _same(left: LayerKV, right: LayerKV) -> bool:
    raw = codec_named("raw")
    return raw.encode(left) == raw.encode(right)


def mutate(data: bytes, dice: random.Random) -> bytes:
    """Other fields, or other frames with right digests, in a right record."""
    try:
        magic, version, size = PREFIX.unpack_from(data)
        fields = json.loads(data[PREFIX.size : PREFIX.size + size])
        rest = data[PREFIX.size + size + SEAL_BYTES :]
        if dice.random() < 0.5:
            fields = changed(fields, dice)
        else:
            fields, rest = _other_frame(fields, rest, dice)
        header = dumped(fields, dice)
        return PREFIX.pack(magic, version, len(header)) + header + bytes(SEAL_BYTES) + rest
    except (ValueError, struct.error, RecursionError, TypeError, KeyError, IndexError, OverflowError):
        return mutate(dice.choice(seeds()), dice)


def _other_frame(fields: dict, rest: bytes, dice: random.Random) -> tuple[dict, bytes]:
    """Bytes of one frame change, and the header says so."""
    pieces = [fields["tokens"], *fields["frames"]]
    chosen = dice.randrange(len(pieces))
    start = sum(int(piece[0]) for piece in pieces[:chosen])
    frame = bytearray(rest[start : start + pieces[chosen][0]])
    for _ in range(dice.choice([1, 1, 3])):
        frame[dice.randrange(len(frame))] = dice.randrange(256)
    if dice.random() < 0.2:
        del frame[dice.randrange(len(frame)) :]
    rest = rest[:start] + bytes(frame) + rest[start + pieces[chosen][0] :]
    pieces[chosen][:] = [len(frame), digest(bytes(frame))]
    return fields, rest


WORDS = (
    MAGIC,
    b'"codec":"zstd"',
    b'"frames":[[',
    b'"count":',
    b'"form":[[',
    b'"float32"',
    b"\x28\xb5\x2f\xfd",
    b"blake2b",
)
TARGET = Target("records", check, seeds, WORDS, mutate, most_bytes=1 << 13)

if __name__ == "__main__":
    main(TARGET)
