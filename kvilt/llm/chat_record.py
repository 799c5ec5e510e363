"""A conversation as a file: its turns with their exact ids, and the name of the KV file beside it.

Everything that is read is checked. This module does not know models or the content of the KV file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import BlobError, InputError, WeightError
from ..kv.file import write_whole
from ..weights.json_file import read_object

FORMAT = 1
_NAME = re.compile(r"\w[\w.-]{0,63}")
_DIGEST_CHARS = 16


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A question, its answer, and the ids that both added. `ids_of` makes a conversation's ids from these alone."""

    user: str
    assistant: str
    kept: int  # ids of the conversation before that stay; fewer than all if the template rewrote the end
    ids: tuple[int, ...]  # that follow: the rest of the prompt, and the answer as it was generated


@dataclass(frozen=True, slots=True)
class ChatRecord:
    """The content of a chat file."""

    model: str  # fingerprint
    numerics: str  # that computed the KV
    label: str  # the user's name of the model
    system: str
    turns: tuple[ChatTurn, ...]
    kv: str  # name of the KV file in the same folder


def ids_of(turns: Iterable[ChatTurn]) -> list[int]:
    """The ids of a conversation."""
    ids: list[int] = []
    for turn in turns:
        del ids[turn.kept :]
        ids += turn.ids
    return ids


# Names and paths.


def chat_path(folder: Path, name: str) -> Path:
    """The path of a chat; names that could leave the folder are refused."""
    if _NAME.fullmatch(name) is None:
        raise InputError(f"{name!r} is no name for a chat; use letters, digits, - and _, and up to 64 of them")
    return folder / f"{name}.json"


def saved_chats(folder: Path) -> list[str]:
    """The names of all chats in a folder."""
    return sorted(path.stem for path in folder.glob("*.json") if _NAME.fullmatch(path.stem))


def kv_name(path: Path, tokens: Sequence[int]) -> str:
    """The name of the KV file of these tokens. It depends on the content, so a crash cannot pair the wrong files."""
    digest = hashlib.sha256(json.dumps(list(tokens)).encode()).hexdigest()
    return f"{path.stem}.{digest[:_DIGEST_CHARS]}.kv"


# Writing and reading.


def write_record(path: Path, record: ChatRecord) -> None:
    """Write a record atomically: after a crash the file is complete or unchanged."""
    data = json.dumps({"format": FORMAT, **asdict(record)}, ensure_ascii=False, separators=(",", ":")).encode()
    write_whole(path, data)


def read_record(path: Path) -> ChatRecord:
    """The record in a file; BlobError names a wrong field."""
    if not path.is_file():
        raise InputError(f"there is no saved chat {path.stem!r}")
    if path.is_symlink():
        raise BlobError("chat", f"{path.name} is a link, and chats are plain files")
    try:
        found = read_object(path)
    except WeightError as error:
        raise BlobError("chat", str(error)) from None
    if found.get("format") != FORMAT:
        raise BlobError("format", f"this chat has format {found.get('format')!r} and only {FORMAT} can be read here")
    kv = _text(found, "kv")
    if re.fullmatch(rf"{re.escape(path.stem)}\.[0-9a-f]{{{_DIGEST_CHARS}}}\.kv", kv) is None:
        raise BlobError("kv", "does not name a KV file of this chat")
    return ChatRecord(
        model=_text(found, "model"),
        numerics=_text(found, "numerics"),
        label=_text(found, "label"),
        system=_text(found, "system"),
        turns=_turns(found.get("turns")),
        kv=kv,
    )


def _turns(found: Any) -> tuple[ChatTurn, ...]:
    if not isinstance(found, list) or not found:
        raise BlobError("turns", "is not a list with at least one turn")
    turns: list[ChatTurn] = []
    length = 0
    for item in found:
        turn = _turn(item, length)
        length = turn.kept + len(turn.ids)
        turns.append(turn)
    return tuple(turns)


def _turn(found: Any, length: int) -> ChatTurn:
    if not isinstance(found, dict):
        raise BlobError("turns", "holds something that is no turn")
    kept, ids = found.get("kept"), found.get("ids")
    if type(kept) is not int or not 0 <= kept <= length:
        raise BlobError("turns.kept", f"{kept!r} is not a number from 0 to {length}")
    if not isinstance(ids, list) or not ids or not all(type(token) is int and token >= 0 for token in ids):
        raise BlobError("turns.ids", "is not a list of token ids")
    return ChatTurn(_text(found, "user"), _text(found, "assistant"), kept, tuple(ids))


def _text(found: dict[str, Any], field: str) -> str:
    value = found.get(field)
    if not isinstance(value, str):
        raise BlobError(field, "is missing or not a text")
    return value
