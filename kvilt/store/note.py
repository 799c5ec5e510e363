"""The bytes of a note: what is known of a named handle, a session or a stored response, besides its KV.

    magic 8 | format u32 | header length u32 | header (JSON) | tokens, or the bytes of a session or response | seal 32

The seal covers all before it; with a secret it is an HMAC, and a reader that has one accepts no other. Refuses to know
folders, and what handles and sessions are for.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import struct
import sys
from array import array
from dataclasses import dataclass
from typing import Any

from ..errors import BlobError

MAGIC = b"KVILTNOT"
SESSION_MAGIC = b"KVILTSNO"
RESPONSE_MAGIC = b"KVILTRNO"
FORMAT = 1
SEAL_BYTES = 32
NAME = re.compile(r"[0-9a-f]{32}")
_PREFIX = struct.Struct("<8sII")
_TOKEN_BYTES = 8


@dataclass(frozen=True, slots=True)
class HandleNote:
    """A handle without its KV. Times are wall-clock times, so that the next process can read them."""

    name: str
    owner: str  # a tenant, hashed
    tokens: array[int]
    maker: str  # whose KV it is
    expires_s: float
    pinned_until_s: float | None
    used_s: float


@dataclass(frozen=True, slots=True)
class SessionNote:
    """A session without its KV. Times are wall-clock times."""

    name: str
    owner: str  # a tenant, hashed
    expires_s: float
    ttl_s: float
    used_s: float
    data: bytes  # its tree of turns, as the engine packs a session


@dataclass(frozen=True, slots=True)
class ResponseNote:
    """A stored response without its KV. Times are wall-clock times."""

    name: str
    owner: str  # a tenant, hashed
    expires_s: float
    used_s: float
    data: bytes  # as the server writes it


def pack_note(note: HandleNote, model: str, secret: bytes | None) -> list[bytes]:
    """A note as bytes, in pieces that follow each other."""
    fields = {
        "name": note.name,
        "owner": note.owner,
        "model": model,
        "maker": note.maker,
        "expires_s": note.expires_s,
        "pinned_until_s": note.pinned_until_s,
        "used_s": note.used_s,
        "count": len(note.tokens),
    }
    return _packed(MAGIC, fields, note.tokens.tobytes(), secret)


def pack_session_note(note: SessionNote, model: str, secret: bytes | None) -> list[bytes]:
    """The note of a session as bytes, in pieces that follow each other."""
    fields = {
        "name": note.name,
        "owner": note.owner,
        "model": model,
        "expires_s": note.expires_s,
        "ttl_s": note.ttl_s,
        "used_s": note.used_s,
    }
    return _packed(SESSION_MAGIC, fields, note.data, secret)


def pack_response_note(note: ResponseNote, model: str, secret: bytes | None) -> list[bytes]:
    """The note of a response as bytes, in pieces that follow each other."""
    times = {"expires_s": note.expires_s, "used_s": note.used_s}
    return _packed(RESPONSE_MAGIC, {"name": note.name, "owner": note.owner, "model": model, **times}, note.data, secret)


def read_note(data: bytes, name: str, model: str, secret: bytes | None) -> HandleNote:
    """The note of a handle, if every byte is as it was written for this model."""
    fields, body, at = _verified(data, MAGIC, name, model, secret)
    tokens: array[int] = array("q")
    if (len(body) - at) % _TOKEN_BYTES:
        raise BlobError("tokens", "these bytes are not tokens")
    tokens.frombytes(body[at:])
    if len(tokens) != fields.get("count") or min(tokens, default=0) < 0:
        raise BlobError("tokens", "not as many token ids as the note promises")
    pinned = fields.get("pinned_until_s")
    return HandleNote(
        name=name,
        owner=_text(fields, "owner"),
        tokens=tokens,
        maker=_text(fields, "maker"),
        expires_s=_time(fields, "expires_s"),
        pinned_until_s=None if pinned is None else _time(fields, "pinned_until_s"),
        used_s=_time(fields, "used_s"),
    )


def read_session_note(data: bytes, name: str, model: str, secret: bytes | None) -> SessionNote:
    """The note of a session, if every byte is as it was written for this model."""
    fields, body, at = _verified(data, SESSION_MAGIC, name, model, secret)
    return SessionNote(
        name=name,
        owner=_text(fields, "owner"),
        expires_s=_time(fields, "expires_s"),
        ttl_s=_time(fields, "ttl_s"),
        used_s=_time(fields, "used_s"),
        data=body[at:],
    )


def read_response_note(data: bytes, name: str, model: str, secret: bytes | None) -> ResponseNote:
    """The note of a response, if every byte is as it was written for this model."""
    fields, body, at = _verified(data, RESPONSE_MAGIC, name, model, secret)
    return ResponseNote(
        name, _text(fields, "owner"), _time(fields, "expires_s"), _time(fields, "used_s"), bytes(body[at:])
    )


def peek_expiry(data: bytes) -> float:
    """The expiry time that an unverified note claims."""
    magic = next((one for one in (SESSION_MAGIC, RESPONSE_MAGIC) if data.startswith(one)), MAGIC)
    return _time(_header(data, magic)[0], "expires_s")


def scope_of(model: str, secret: bytes | None) -> str:
    """The prefix of the file names of one model's notes; a reader opens no others."""
    parts = (str(FORMAT).encode(), model.encode(), secret or b"")
    state = hashlib.blake2b(digest_size=8, person=b"kvilt notes")
    state.update(b"".join(len(one).to_bytes(8, "little") + one for one in parts))
    return state.hexdigest()


def _packed(magic: bytes, fields: dict[str, Any], payload: bytes, secret: bytes | None) -> list[bytes]:
    header = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    body = _PREFIX.pack(magic, FORMAT, len(header)) + header + payload
    return [body, _seal(body, secret)]


def _verified(
    data: bytes, magic: bytes, name: str, model: str, secret: bytes | None
) -> tuple[dict[str, Any], bytes, int]:
    """The fields of a note, all before its seal, and where its payload begins there."""
    fields, at = _header(data, magic)
    body, seal = data[:-SEAL_BYTES], data[-SEAL_BYTES:]
    if at > len(body):
        raise BlobError("size", "the note is cut short")
    if not hmac.compare_digest(seal, _seal(body, secret)):
        raise BlobError("seal", "the note was damaged, or written with another secret")
    for field, expected in (("name", name), ("model", model)):
        if fields.get(field) != expected:
            raise BlobError(field, "the note is of something else")
    return fields, body, at


def _header(data: bytes, expected: bytes) -> tuple[dict[str, Any], int]:
    """The fields of a note, and where its payload begins."""
    if len(data) < _PREFIX.size + SEAL_BYTES:
        raise BlobError("size", f"{len(data)} bytes are too few for a note")
    magic, version, size = _PREFIX.unpack_from(data)
    if magic != expected:
        raise BlobError("magic", "these bytes are not a note of this kind")
    if version != FORMAT:
        raise BlobError("version", f"format {version} is not read here, only {FORMAT}")
    try:
        fields = json.loads(data[_PREFIX.size : _PREFIX.size + size])
    except (ValueError, RecursionError):
        raise BlobError("header", "not readable as JSON") from None
    if not isinstance(fields, dict):
        raise BlobError("header", "not an object")
    return fields, _PREFIX.size + size


def _seal(body: bytes, secret: bytes | None) -> bytes:
    if secret is None:
        return hashlib.blake2b(body, digest_size=SEAL_BYTES, person=b"kvilt note").digest()
    return hmac.digest(secret, body, "sha256")


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise BlobError("header", f"{name} is not a text")
    return value


def _time(fields: dict[str, Any], name: str) -> float:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise BlobError("header", f"{name} is not a time")
    return float(value)
