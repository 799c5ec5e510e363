"""The bytes of a record: self-describing, versioned, checksummed layer by layer.

    magic 8 | format u32 | header length u32 | header (JSON) | seal 32 | tokens | one frame for each layer

The header has the length and the blake2b digest of the tokens and of every frame, and the seal covers all before it, so
that a frame can be trusted as soon as it is there. With a secret the seal is an HMAC; a reader that has one accepts no
other seal. A reader reads its own format only: keys contain the format, so records of another one are never found, and
they are the first to be evicted. Refuses to know tiers.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from ..errors import BlobError
from ..kv.identity import Identity
from ..kv.owner import owner_of
from .address import FORMAT, Address, Form, Kind, LayerForm, tenant_of
from .codecs import Codec, Data
from .layer import LayerKV

MAGIC = b"KVILTREC"
SEAL_BYTES = 32
PREFIX = struct.Struct("<8sII")
FIRST_READ_BYTES = 1 << 16  # holds the header and the tokens of most records
_MAX_HEADER_BYTES = 1 << 24
_MOST = 1 << 48
_IDENTITY = ("model", "numerics", "adapter", "origin")

Read = Callable[[int, int], Data]  # offset, size


@dataclass(frozen=True, slots=True)
class RecordSection:
    """A byte range of a record, and its digest."""

    offset: int
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """A record's header, after its seal was verified."""

    kind: str
    names: tuple[str, ...]  # model, numerics, adapter, origin
    tenant: str
    codec: str
    tokens: int
    form: Form
    firsts: tuple[int, ...]
    content: RecordSection
    frames: tuple[RecordSection, ...]
    nbytes: int  # of the whole record


@dataclass(frozen=True, slots=True)
class RecordInfo:
    """What a tier needs to know of a record to count it against quotas."""

    tenant: str  # by which quotas count: the owner of all its salts
    kind: str
    retain: bool = False


def pack(address: Address, codec: Codec, frames: Sequence[bytes], secret: bytes | None) -> list[bytes]:
    """A record in two or more pieces that follow each other."""
    identity = address.identity
    fields = {
        "kind": address.kind.value,
        **{name: getattr(identity, name) for name in _IDENTITY},
        "tenant": address.tenant,
        "codec": codec.name,
        "seal": _seal_name(secret),
        "count": address.tokens,
        "form": [[one.heads, one.key_dim, one.value_dim, one.dtype] for one in address.form],
        "firsts": list(address.firsts),
        "tokens": [len(address.content), digest(address.content)],
        "frames": [[len(frame), digest(frame)] for frame in frames],
    }
    header = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    head = PREFIX.pack(MAGIC, FORMAT, len(header)) + header
    return [head + _seal(head, secret) + address.content, *frames]


def digest(data: Data) -> str:
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def read_header(read: Read, nbytes: int, secret: bytes | None) -> RecordHeader:
    """The header of a record of `nbytes` bytes, if frame and seal are right and every count adds up."""
    head = _head(read, nbytes)
    if not hmac.compare_digest(bytes(head[-SEAL_BYTES:]), _seal(head[:-SEAL_BYTES], secret)):
        raise BlobError("seal", "the header was damaged, or written with another secret")
    return _header(head[PREFIX.size : -SEAL_BYTES], len(head), nbytes, secret)


def peek(read: Read, nbytes: int) -> RecordInfo:
    """The unverified owner and kind of a record, for an index."""
    head = _head(read, nbytes)
    fields = _json(head[PREFIX.size : -SEAL_BYTES])
    return RecordInfo(owner_of(_text(fields, "tenant")), _text(fields, "kind"))


def read_content(read: Read, header: RecordHeader, address: Address) -> None:
    """Raise unless the record matches the address, down to the last token."""
    identity = address.identity
    _same("kind", header.kind, address.kind.value)
    for name, found in zip(_IDENTITY, header.names, strict=True):
        _same(f"identity.{name}", found, getattr(identity, name))
    _same("tenant", header.tenant, address.tenant)
    _same("form", header.form, address.form)
    _same("count", header.tokens, address.tokens)
    _same("tokens", header.content.nbytes, len(address.content))
    if any(first > needed for first, needed in zip(header.firsts, address.firsts, strict=True)):
        raise BlobError("span", "a part of what is asked for is not in this record")
    _same("tokens", bytes(read_section(read, header.content)), address.content)


def read_tokens(read: Read, header: RecordHeader, kind: Kind, identity: Identity) -> bytes | None:
    """The tokens of a record, if it is of this kind and identity."""
    names = tuple(getattr(identity, name) for name in _IDENTITY)
    if (header.kind, header.names, header.tenant) != (kind.value, names, tenant_of(identity.salt)):
        return None
    return bytes(read_section(read, header.content))


def read_layer(read: Read, header: RecordHeader, codec: Codec, layer: int) -> tuple[Data, LayerKV]:
    """One layer, as bytes and decoded, whose checksum is right."""
    data = read_section(read, header.frames[layer])
    return data, codec.decode(data, header.form[layer], header.tokens - header.firsts[layer])


def read_section(read: Read, piece: RecordSection) -> Data:
    data = read(piece.offset, piece.nbytes)
    if len(data) != piece.nbytes:
        raise BlobError("size", "the record is cut short")
    if digest(data) != piece.digest:
        raise BlobError("checksum", "the bytes were damaged after they were written")
    return data


def _head(read: Read, nbytes: int) -> bytes:
    """Prefix, header and seal of a record that is long enough for them."""
    if nbytes < PREFIX.size + SEAL_BYTES:
        raise BlobError("size", f"{nbytes} bytes are too few for a record")
    start = bytes(read(0, min(nbytes, FIRST_READ_BYTES)))
    if len(start) < PREFIX.size:
        raise BlobError("size", "the record is cut short")
    magic, version, header_bytes = PREFIX.unpack_from(start)
    if magic != MAGIC:
        raise BlobError("magic", "these bytes are not a record")
    if version != FORMAT:
        raise BlobError("version", f"format {version} is not read here, only {FORMAT}")
    whole = PREFIX.size + header_bytes + SEAL_BYTES
    if header_bytes > _MAX_HEADER_BYTES or whole > nbytes:
        raise BlobError("size", f"a header of {header_bytes} bytes does not fit")
    head = start[:whole] if len(start) >= whole else bytes(read(0, whole))
    if len(head) != whole:
        raise BlobError("size", "the record is cut short")
    return head


def _header(data: bytes, body: int, nbytes: int, secret: bytes | None) -> RecordHeader:
    fields = _json(data)
    _same("seal", fields.get("seal"), _seal_name(secret))
    form = tuple(map(_layer_form, _list(fields, "form")))
    tokens, firsts = fields.get("count"), _list(fields, "firsts")
    if not _count(tokens) or len(firsts) != len(form) or not all(_count(first, tokens) for first in firsts):
        raise BlobError("firsts", "not one position inside the row for each layer")
    pieces, at = [], body
    for entry in [fields.get("tokens"), *_list(fields, "frames")]:
        pieces.append(_piece(entry, at))
        at += pieces[-1].nbytes
    if len(pieces) != len(form) + 1:
        raise BlobError("frames", "not one frame for each layer")
    if at != nbytes:
        raise BlobError("size", f"the header promises {at} bytes and {nbytes} are there")
    return RecordHeader(
        _text(fields, "kind"),
        tuple(_text(fields, name) for name in _IDENTITY),
        _text(fields, "tenant"),
        _text(fields, "codec"),
        tokens,
        form,
        tuple(firsts),
        pieces[0],
        tuple(pieces[1:]),
        nbytes,
    )


def _json(data: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        raise BlobError("header", "not readable as JSON") from None
    if not isinstance(fields, dict):
        raise BlobError("header", "not an object")
    return fields


def _layer_form(entry: Any) -> LayerForm:
    match entry:
        case [heads, key_dim, value_dim, str(dtype)] if all(map(_count, (heads, key_dim, value_dim))):
            return LayerForm(heads, key_dim, value_dim, dtype)
        case _:
            raise BlobError("form", "not the form of a layer")


def _piece(entry: Any, at: int) -> RecordSection:
    match entry:
        case [nbytes, str(name)] if _count(nbytes):
            return RecordSection(at, nbytes, name)
        case _:
            raise BlobError("frames", "not a length and a digest")


def _seal(head: bytes, secret: bytes | None) -> bytes:
    if secret is None:
        return hashlib.blake2b(head, digest_size=SEAL_BYTES, person=b"kvilt seal").digest()
    return hmac.digest(secret, head, "sha256")


def _seal_name(secret: bytes | None) -> str:
    return "blake2b" if secret is None else "hmac-sha256"


def _same(field: str, found: object, expected: object) -> None:
    if found != expected:
        raise BlobError(field, "the record is of something else")


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise BlobError("header", f"{name} is not a text")
    return value


def _list(fields: dict[str, Any], name: str) -> list[Any]:
    value = fields.get(name)
    if not isinstance(value, list):
        raise BlobError(name, "not a list")
    return value


def _count(value: Any, most: int = _MOST) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= most
