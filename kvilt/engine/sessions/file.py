"""The bytes of a session: its tree of turns with their tokens and text, the model they belong to, and perhaps their KV.

    magic 8 | version u32 | header length u64 | header (JSON) | KV of turns, as `kv/codec.py` writes it | sha256

A turn has the tokens behind those that it shares with its parent. Refuses to know executors and handles.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from dataclasses import fields as fields_of
from typing import Any, TypeGuard

from ...errors import BlobError
from ...kv.identity import Identity
from ...kv.pool import PagePool
from ..misses.past_prompts import shared_tokens, token_array
from .session import MAX_NAME
from .tree import MAX_TURNS, Turn, TurnTree

MAGIC = b"KVILTSES"
VERSION = 1
_PREFIX = struct.Struct("<8sIQ")
_DIGEST_BYTES = 32
_MAX_ID = 64  # characters of the id of a turn


@dataclass(frozen=True, slots=True)
class SessionFile:
    """A session outside any engine."""

    name: str
    exact: bool
    identity: Identity
    tree: TurnTree
    kv: Mapping[str, bytes]  # by turn
    conversation: str = ""  # what a chat page shows of it; only the page reads this text


def pack_session(file: SessionFile, text: Callable[[list[int]], str]) -> bytes:
    """The bytes of a session; `text` decodes tokens, for readers of the file."""
    turns = [_turn_fields(turn, file, text) for turn in file.tree]
    fields = {
        "name": file.name,
        "exact": file.exact,
        "identity": asdict(file.identity),
        "numbered": file.tree.numbered,
        "turns": turns,
        **({"conversation": file.conversation} if file.conversation else {}),
    }
    header = json.dumps(fields, separators=(",", ":")).encode()
    parts = [_PREFIX.pack(MAGIC, VERSION, len(header)), header]
    parts += [file.kv[turn.id] for turn in file.tree if turn.id in file.kv]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return b"".join([*parts, digest.digest()])


def _turn_fields(turn: Turn, file: SessionFile, text: Callable[[list[int]], str]) -> dict[str, Any]:
    own: list[int] = turn.ids[turn.shared :].tolist()
    return {
        "id": turn.id,
        "parent": turn.parent,
        "shared": turn.shared,
        "tokens": own,
        "maker": turn.maker,
        "origin": turn.origin,
        "kv_bytes": len(file.kv.get(turn.id, b"")),
        "text": text(own),
    }


def unpack_session(data: bytes) -> SessionFile:
    """The session in these bytes, if every doubt about them is settled; otherwise a BlobError that names the field."""
    fields, payload = _open(data)
    name, exact = fields.get("name"), fields.get("exact")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not isinstance(exact, bool):
        raise BlobError("name", "missing, or no name of a session")
    identity, tree, kv = _identity(fields.get("identity")), TurnTree(), dict[str, bytes]()
    turns = fields.get("turns")
    if not isinstance(turns, list) or len(turns) > MAX_TURNS:
        raise BlobError("turns", f"missing, or more than {MAX_TURNS}")
    at = 0
    for entry in turns:
        turn, kv_bytes = _turn(entry, tree)
        tree.turns[turn.id] = turn
        if kv_bytes:
            kv[turn.id] = bytes(payload[at : at + kv_bytes])
            at += kv_bytes
    if at != len(payload):
        raise BlobError("payload", f"the header promises {at} bytes of KV and {len(payload)} are there")
    conversation = fields.get("conversation", "")
    if not isinstance(conversation, str):
        raise BlobError("conversation", "not a text")
    numbered = fields.get("numbered")
    tree.numbered = max(len(tree), numbered if _is_count(numbered) and numbered <= 1 << 40 else 0)
    return SessionFile(name, exact, identity, tree, kv, conversation)


def check_session(file: SessionFile, pool: PagePool) -> None:
    """Raise unless a session belongs to the model of a pool."""
    if file.identity.model != pool.identity().model:
        raise BlobError("identity.model", "this session belongs to another model, whose tokens mean something else")
    limit = pool.token_limit
    if any(turn.tokens and int(turn.ids.max()) >= limit for turn in file.tree):
        raise BlobError("turns.tokens", f"a token id is past this model's vocabulary of {limit}")


def _open(data: bytes) -> tuple[dict[str, Any], memoryview]:
    """Header fields and KV of a file whose frame and checksum are right."""
    view = memoryview(data)
    if len(view) < _PREFIX.size + _DIGEST_BYTES:
        raise BlobError("size", f"{len(view)} bytes are too few for a session")
    magic, version, header_bytes = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise BlobError("magic", "these bytes are not a session")
    if version != VERSION:
        newer = "; a newer kvilt has written it" if version > VERSION else ""
        raise BlobError("version", f"format {version} cannot be read here, only {VERSION}{newer}")
    if header_bytes > len(view) - _PREFIX.size - _DIGEST_BYTES:
        raise BlobError("header", f"a header of {header_bytes} bytes does not fit; the file is cut short or damaged")
    if hashlib.sha256(view[:-_DIGEST_BYTES]).digest() != bytes(view[-_DIGEST_BYTES:]):
        raise BlobError("checksum", "the bytes were damaged after they were written")
    try:
        fields = json.loads(bytes(view[_PREFIX.size : _PREFIX.size + header_bytes]))
    except (ValueError, RecursionError) as error:
        raise BlobError("header", f"not readable as JSON ({type(error).__name__})") from None
    if not isinstance(fields, dict):
        raise BlobError("header", "not an object")
    return fields, view[_PREFIX.size + header_bytes : -_DIGEST_BYTES]


def _identity(found: Any) -> Identity:
    names = {field.name for field in fields_of(Identity)}
    if not isinstance(found, dict) or found.keys() != names or not all(isinstance(v, str) for v in found.values()):
        raise BlobError("identity", "missing or incomplete")
    return Identity(**found)


def _turn(entry: Any, tree: TurnTree) -> tuple[Turn, int]:
    """One turn, whose parent was read before it, and how many bytes of KV it has."""
    if not isinstance(entry, dict):
        raise BlobError("turns", "a turn is not an object")
    name, parent, shared, own = (entry.get(field) for field in ("id", "parent", "shared", "tokens"))
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_ID or name in tree.turns:
        raise BlobError("turns.id", "missing, or given twice")
    if parent is not None and (not isinstance(parent, str) or parent not in tree.turns):
        raise BlobError("turns.parent", "not a turn that stands before")
    before = None if parent is None else tree.turns[parent].ids
    if not _is_count(shared) or shared > (0 if before is None else len(before)):
        raise BlobError("turns.shared", "not a number of tokens of its parent")
    if not isinstance(own, list) or not all(_is_count(token) and token < 1 << 31 for token in own):
        raise BlobError("turns.tokens", "not token ids")
    ids = token_array([*([] if before is None else before[:shared].tolist()), *own])
    if not len(ids) or (before is not None and shared_tokens(before, ids) != shared):
        raise BlobError("turns.tokens", "none, or more shared with its parent than is said")
    maker, origin, kv_bytes = entry.get("maker"), entry.get("origin"), entry.get("kv_bytes")
    if not isinstance(maker, str) or not isinstance(origin, str) or not _is_count(kv_bytes):
        raise BlobError("turns", "a maker, an origin or a size is missing")
    return Turn(name, ids, parent, shared, maker, origin), kv_bytes


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and value >= 0
