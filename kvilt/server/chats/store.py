"""Conversations of the page as files in one folder, a file for each. Their content is a text that only the page reads.

A file has two lines: what the list shows, as JSON, and the conversation. Every method may be called from any thread.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from ...errors import StoreError
from ...kv.file import sweep
from ...kv.owner import owner_of
from ...store.files import FileSystem
from ..http.errors import HTTPError

CHAT_ID = r"[A-Za-z0-9_-]{1,64}"
_NAME = re.compile(CHAT_ID)
_ENDING = ".chat"
_HEAD_BYTES = 1 << 14  # of the first line, at most


@dataclass(frozen=True, slots=True)
class ChatInfo:
    """What the list shows of a conversation."""

    id: str
    title: str
    named: bool  # the user has chosen the title
    changed_s: float  # a calendar time
    revision: int  # how often it was written

    def shown(self) -> dict[str, Any]:
        """As JSON."""
        return {"object": "chat", **asdict(self)}


@dataclass(frozen=True, slots=True)
class KeptChat:
    """A conversation."""

    info: ChatInfo
    conversation: str


class ChatStore:
    """The conversations of all keys. One that a key does not own does not exist for it."""

    def __init__(self, folder: Path | None, most: int, most_bytes: int, clock: Callable[[], float] = time.time) -> None:
        """Without a folder nothing is kept. `most` conversations of one key may have `most_bytes` together."""
        self._folder = folder
        self._most, self._most_bytes = most, most_bytes
        self._clock = clock
        self._files = FileSystem()
        self._lock = threading.Lock()
        if folder is not None:
            sweep(folder)  # what a server that was killed has begun to write

    @property
    def keeps(self) -> bool:
        """Whether conversations are kept here."""
        return self._folder is not None

    def chats(self, tenant: str, words: str = "") -> list[ChatInfo]:
        """The conversations of a tenant whose title or text has all of the words, the newest first."""
        wanted = words.casefold().split()
        found = []
        for path in self._paths(tenant):
            with suppress(HTTPError):  # removed meanwhile, or no file of ours
                chat = self._read(path, whole=bool(wanted))
                said = f"{chat.info.title}\n{_said(chat.conversation)}".casefold() if wanted else ""
                if all(word in said for word in wanted):
                    found.append(chat.info)
        return sorted(found, key=lambda info: -info.changed_s)

    def load(self, tenant: str, name: str) -> KeptChat:
        """A conversation."""
        return self._read(self._path(tenant, name), whole=True)

    def save(self, tenant: str, name: str, title: str, conversation: str, revision: int) -> ChatInfo:
        """Write a conversation whose writer has seen this revision of it, 0 for a new one; others are refused."""
        path = self._path(tenant, name)
        with self._lock:
            old = None
            with suppress(HTTPError):
                old = self._read(path, whole=False).info
            if (0 if old is None else old.revision) != revision:
                raise HTTPError(409, "another page has changed this conversation; read it again", code="chat_changed")
            data = conversation.encode("utf-8", "surrogatepass")
            self._check_room(path, len(data), tenant)
            kept = old is not None and old.named
            info = ChatInfo(name, old.title if kept and old else title, kept, self._clock(), revision + 1)
            self._write(path, info, data)
            return info

    def rename(self, tenant: str, name: str, title: str) -> ChatInfo:
        """Give a conversation a title that stays."""
        path = self._path(tenant, name)
        with self._lock:
            chat = self._read(path, whole=True)
            info = replace(chat.info, title=title, named=True)
            self._write(path, info, chat.conversation.encode("utf-8", "surrogatepass"))
            return info

    def delete(self, tenant: str, name: str) -> None:
        """Remove a conversation."""
        path = self._path(tenant, name)
        with self._lock:
            self._read(path, whole=False)
            path.unlink(missing_ok=True)

    def _paths(self, tenant: str) -> Iterator[Path]:
        """The files of a tenant."""
        if self._folder is None or not self._folder.is_dir():
            return
        prefix = _prefix(tenant)
        with os.scandir(self._folder) as entries:
            names = [entry.name for entry in entries]
        for name in sorted(names):
            own = name.removeprefix(prefix)
            if own != name and own.endswith(_ENDING) and _NAME.fullmatch(own.removesuffix(_ENDING)):
                yield self._folder / name

    def _path(self, tenant: str, name: str) -> Path:
        if self._folder is None:
            raise HTTPError(
                400, "this server keeps no conversations; its owner can name a folder with --store", code="chats_off"
            )
        if not _NAME.fullmatch(name):
            raise HTTPError(400, "id: use up to 64 letters, digits, - and _", param="id", code="bad_name")
        return self._folder / f"{_prefix(tenant)}{name}{_ENDING}"

    def _check_room(self, path: Path, size: int, tenant: str) -> None:
        """Refuse what is over the limits of the key, of all its salts together."""
        assert self._folder is not None
        owner = f"{owner_of(tenant) or 'open'}."
        sizes: dict[str, int] = {}
        with suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.startswith(owner) and entry.name.endswith(_ENDING):
                    with suppress(FileNotFoundError):
                        sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
        sizes.pop(path.name, None)
        if len(sizes) >= self._most:
            raise _over(f"{self._most} conversations are kept and no more are allowed; delete some")
        if sum(sizes.values()) + size > self._most_bytes:
            raise _over(f"conversations may have {self._most_bytes} bytes together; delete some")

    def _read(self, path: Path, whole: bool) -> KeptChat:
        fd = None
        with suppress(StoreError):
            fd = self._files.open(path)
        if fd is None:
            raise HTTPError(404, "there is no such conversation", code="chat_not_found")
        with os.fdopen(fd, "rb") as file:
            info = _head(file)
            return KeptChat(info, file.read().decode("utf-8", "surrogatepass") if whole else "")

    def _write(self, path: Path, info: ChatInfo, data: bytes) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._files.write_whole(path, [orjson.dumps(asdict(info)), b"\n", data], path.parent)
        except StoreError as error:
            raise HTTPError(503, "the folder of conversations cannot be written now", code="chats_dir_full") from error


def _prefix(tenant: str) -> str:
    """How the names of a tenant's files begin; ids have no dots."""
    owner = owner_of(tenant)
    part = tenant[len(owner) + 1 :]
    return f"{owner or 'open'}.{part}." if part else f"{owner or 'open'}."


def _head(file: BinaryIO) -> ChatInfo:
    """What the first line says."""
    try:
        return ChatInfo(**orjson.loads(file.readline(_HEAD_BYTES)))
    except (orjson.JSONDecodeError, TypeError):
        raise HTTPError(404, "this conversation is damaged", code="chat_not_found") from None


def _said(conversation: str) -> str:
    """The texts of the messages, as far as the conversation can be read."""
    try:
        nodes = orjson.loads(conversation)["nodes"]
        return "\n".join(node["text"] for node in nodes if isinstance(node.get("text"), str))
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return ""


def _over(message: str) -> HTTPError:
    return HTTPError(409, message, code="chat_limit")
