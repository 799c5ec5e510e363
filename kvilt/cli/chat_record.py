"""A conversation as a file: its turns with their exact ids, and the name of the KV file beside it.

Checks everything it reads. Refuses to know models and what the KV file holds.
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
class Turn:
    """A question, its answer, and the ids the two added. The ids of a conversation are made of nothing else."""

    user: str
    assistant: str
    kept: int  # ids of the conversation before that it stands on: not all, where the template rewrote the end
    ids: tuple[int, ...]  # what follows them: the rest of the prompt, and the answer as it was generated


@dataclass(frozen=True, slots=True)
class Record:
    """What a saved conversation says about itself."""

    model: str  # fingerprint
    numerics: str  # with which its KV was computed
    label: str  # what the user called the model
    system: str
    turns: tuple[Turn, ...]
    kv: str  # name of the KV file in the same folder


def ids_of(turns: Iterable[Turn]) -> list[int]:
    """The ids of a conversation."""
    ids: list[int] = []
    for turn in turns:
        del ids[turn.kept :]
        ids += turn.ids
    return ids


# Names, and where they lead.


def chat_path(folder: Path, name: str) -> Path:
    """Where a chat of this name is saved; the name stays inside the folder whatever it is."""
    if _NAME.fullmatch(name) is None:
        raise InputError(f"{name!r} is no name for a chat; use letters, digits, - and _, and up to 64 of them")
    return folder / f"{name}.json"


def saved_chats(folder: Path) -> list[str]:
    """The names of all chats in a folder."""
    return sorted(path.stem for path in folder.glob("*.json") if _NAME.fullmatch(path.stem))


def kv_name(path: Path, tokens: Sequence[int]) -> str:
    """A name for the KV of these tokens: another one for another content, so that no crash can pair the wrong two."""
    digest = hashlib.sha256(json.dumps(list(tokens)).encode()).hexdigest()
    return f"{path.stem}.{digest[:_DIGEST_CHARS]}.kv"


# Writing and reading.


def write_record(path: Path, record: Record) -> None:
    """Write a record to a file that is either complete or as it was."""
    data = json.dumps({"format": FORMAT, **asdict(record)}, ensure_ascii=False, separators=(",", ":")).encode()
    write_whole(path, data)


def read_record(path: Path) -> Record:
    """The record in a file; a BlobError that names the field if anything about it is wrong."""
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
    return Record(
        model=_text(found, "model"),
        numerics=_text(found, "numerics"),
        label=_text(found, "label"),
        system=_text(found, "system"),
        turns=_turns(found.get("turns")),
        kv=kv,
    )


def _turns(found: Any) -> tuple[Turn, ...]:
    if not isinstance(found, list) or not found:
        raise BlobError("turns", "is not a list with at least one turn")
    turns: list[Turn] = []
    length = 0
    for item in found:
        turn = _turn(item, length)
        length = turn.kept + len(turn.ids)
        turns.append(turn)
    return tuple(turns)


def _turn(found: Any, length: int) -> Turn:
    if not isinstance(found, dict):
        raise BlobError("turns", "holds something that is no turn")
    kept, ids = found.get("kept"), found.get("ids")
    if type(kept) is not int or not 0 <= kept <= length:
        raise BlobError("turns.kept", f"{kept!r} is not a number from 0 to {length}")
    if not isinstance(ids, list) or not ids or not all(type(token) is int and token >= 0 for token in ids):
        raise BlobError("turns.ids", "is not a list of token ids")
    return Turn(_text(found, "user"), _text(found, "assistant"), kept, tuple(ids))


def _text(found: dict[str, Any], field: str) -> str:
    value = found.get(field)
    if not isinstance(value, str):
        raise BlobError(field, "is missing or not a text")
    return value
