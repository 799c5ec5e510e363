"""Notes of handles: whatever is in one, reading it ends with a note or a typed error.

Every input is tried as it is and with a right seal. Oracle: a note that is read and written again is read the same.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import struct
from array import array

from kvilt.errors import BlobError
from kvilt.store.note import FORMAT, MAGIC, SEAL_BYTES, HandleNote, pack_note, peek_expiry, read_note

from .driver import main
from .target import Finding, Target, label
from .values import changed, dumped

_PREFIX = struct.Struct("<8sII")
_NAME, _MODEL = "0123456789abcdef" * 2, "weights-1"


def seeds() -> list[bytes]:
    """Bodies without a seal: `check` adds it."""
    notes = [
        HandleNote(_NAME, "owner", array("q", range(9)), "base", 1e9, None, 5.5),
        HandleNote(_NAME, "", array("q"), "adapter:0.5@3", 2e9, 1.5e9, 0),
    ]
    return [pack_note(note, _MODEL, None)[0] for note in notes]


def sealed(body: bytes) -> bytes:
    return body + hashlib.blake2b(body, digest_size=SEAL_BYTES, person=b"kvilt note").digest()


def check(data: bytes) -> str:
    return " | ".join(_read(one) for one in (data, sealed(data)))


def _read(data: bytes) -> str:
    try:
        expiry = peek_expiry(data)
    except BlobError:
        expiry = None
    try:
        note = read_note(data, _NAME, _MODEL, None)
    except BlobError as error:
        return label(error)
    if expiry != note.expires_s:
        raise Finding("peek_expiry and read_note disagree")
    if not all(map(math.isfinite, (note.expires_s, note.used_s, note.pinned_until_s or 0.0))):
        raise Finding("a note with an infinite time was read")
    again = read_note(b"".join(pack_note(note, _MODEL, None)), _NAME, _MODEL, None)
    if again != note:
        raise Finding("a note does not survive writing")
    return "read"


def mutate(data: bytes, dice: random.Random) -> bytes:
    """Another header in a right frame."""
    try:
        magic, version, size = _PREFIX.unpack_from(data)
        header = dumped(changed(json.loads(data[_PREFIX.size : _PREFIX.size + size]), dice), dice)
        return _PREFIX.pack(magic, version, len(header)) + header + data[_PREFIX.size + size :]
    except (ValueError, struct.error, RecursionError, OverflowError):
        return mutate(dice.choice(seeds()), dice)


WORDS = (MAGIC, struct.pack("<I", FORMAT), b'"expires_s":', b'"count":', b'"pinned_until_s":', b"1e400", _NAME.encode())
TARGET = Target("notes", check, seeds, WORDS, mutate, most_bytes=1 << 13)

if __name__ == "__main__":
    main(TARGET)
