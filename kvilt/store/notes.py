"""Notes of handles, sessions and responses beside stored records: a small value for each, written in the background.

A change of a handle does not wait for the disk: the handle's name is marked, and a thread later writes its note, or
removes it if the handle is gone; others likewise. Refuses to know KV, and which callers may see a handle.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from ..errors import BlobError, StoreError
from ..metrics import Metrics
from .counters import DROPPED, REFUSED, WRITTEN
from .files import FileSystem
from .note import (
    NAME,
    HandleNote,
    ResponseNote,
    SessionNote,
    pack_note,
    pack_response_note,
    pack_session_note,
    peek_expiry,
    read_note,
    read_response_note,
    read_session_note,
    scope_of,
)
from .note_medium import NoteFiles, NoteMedium

_log = logging.getLogger(__name__)
_TIER = "notes"  # as metrics call it
_LONGEST_S = 30.0
NoteT = TypeVar("NoteT", HandleNote, SessionNote, ResponseNote)


@dataclass(frozen=True, slots=True)
class NoteFormat(Generic[NoteT]):
    """What a folder of notes holds, and how it is written."""

    of: str  # for messages
    suffix: str
    pack: Callable[[NoteT, str, bytes | None], list[bytes]]
    read: Callable[[bytes, str, str, bytes | None], NoteT]


class NoteFolder(Generic[NoteT]):
    """The notes of one model's handles, or of its sessions. Every method may be called from any thread."""

    def __init__(
        self,
        place: Path | NoteMedium,
        model: str,
        metrics: Metrics,
        *,
        most_bytes: int,
        secret: bytes | None = None,
        rest_s: float = 1.0,
        close_s: float = 10.0,
        files: FileSystem | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`place` may be the disk's own folder; notes may take `most_bytes` there, those of other models included.

        After a failure it is not used for `rest_s`, then for twice as long, up to 30 s.
        """
        self._medium = NoteFiles(place, files) if isinstance(place, Path) else place
        self._model = model
        self._metrics = metrics
        self._most = most_bytes
        self._secret = secret
        self._first_rest_s = rest_s
        self._close_s = close_s
        self._clock = clock
        self._scope = scope_of(model, secret)
        self._sizes: dict[str, int] = {}  # of files, by their names
        self._known: Callable[[str], NoteT | None] = lambda _: None
        self._change = threading.Condition()
        self._marked: dict[str, None] = {}  # names of handles whose files are out of date
        self._writing: str | None = None  # the name of what is being written
        self._rest_s = 0.0  # after a failure, until the next attempt
        self._closed = self._abandoned = False
        self._thread: threading.Thread | None = None

    @property
    def _format(self) -> NoteFormat[NoteT]:
        raise NotImplementedError

    # At the start.

    def read(self) -> list[NoteT]:
        """Every note of this model, the longest unused first; what is damaged is counted and removed."""
        found = [note for name in self._listed() if (note := self._read(name)) is not None]
        return sorted(found, key=lambda note: note.used_s)

    def _listed(self) -> list[str]:
        try:
            return self._medium.names(self._format.suffix)
        except StoreError as error:
            self._refuse("io", error)
            return []

    def _read(self, file: str) -> NoteT | None:
        scope, _, name = file.removesuffix(self._format.suffix).partition(".")
        own = scope == self._scope and NAME.fullmatch(name) is not None
        try:
            if (data := self._medium.read(file, self._most)) is None:
                return None
            self._sizes[file] = len(data)
            if own:
                return self._format.read(data, name, self._model, self._secret)
            if peek_expiry(data) <= self._clock():  # another model's, which may never be loaded again
                self._remove(file)
        except BlobError as error:
            if own:
                self._refuse(error.field, error)
                self._remove(file)
        except StoreError as error:
            self._refuse(error.reason, error)
        return None

    def _refuse(self, reason: str, error: Exception) -> None:
        _log.warning("a note of a %s cannot be used: %s", self._format.of, error)
        self._metrics.add(REFUSED, tier=_TIER, reason=reason)

    def _remove(self, file: str) -> None:
        try:
            self._medium.remove(file)
            self._sizes.pop(file, None)
        except StoreError as error:
            _log.info("a note of a %s cannot be removed: %s", self._format.of, error)

    # From then on.

    def find(self, name: str) -> NoteT | None:
        """The note of one name, which another process may have written; None while this one has yet to change it."""
        with self._change:
            if NAME.fullmatch(name) is None or name in self._marked or name == self._writing:
                return None
        return self._read(f"{self._scope}.{name}{self._format.suffix}")

    def attach(self, known: Callable[[str], NoteT | None]) -> None:
        """Set the function that returns the note to write for a name, or None if what it named is gone."""
        self._known = known

    def mark(self, name: str) -> None:
        """Note that a handle was added, changed or removed. Never waits."""
        with self._change:
            if self._closed:
                return
            self._marked[name] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="kvilt-store-notes", daemon=True)
                self._thread.start()
            self._change.notify_all()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was marked is on the disk; False where that takes longer, or the disk fails."""
        with self._change:
            self._change.wait_for(lambda: self._rest_s or not (self._marked or self._writing), timeout_s)
            return not (self._marked or self._writing)

    def close(self) -> None:
        """Write what is marked, as far as time allows, and stop. Notes of handles removed later stay on disk."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        if self._thread is not None:
            self._thread.join(self._close_s)
        self._abandoned = True

    # The thread.

    def _loop(self) -> None:
        while True:
            with self._change:
                if self._rest_s:
                    self._change.wait_for(lambda: self._closed, self._rest_s)
                self._change.wait_for(lambda: self._marked or self._closed)
                if not self._marked or self._abandoned:
                    return
                name = next(iter(self._marked))
                del self._marked[name]
                self._writing = name
            well = self._settled(name)
            with self._change:
                self._writing = None
                self._rest_s = 0.0 if well else min(_LONGEST_S, 2 * self._rest_s or self._first_rest_s)
                if not well and not self._closed:
                    self._marked.setdefault(name)
                self._change.notify_all()

    def _settled(self, name: str) -> bool:
        """Write or remove the file of a handle; whether that is done."""
        try:
            note = self._known(name)
            if self._abandoned:  # and so may have been the handles that it asks
                return True
            self._write(name, note)
        except StoreError as error:
            _log.info("a note of a %s was not written: %s", self._format.of, error)
            self._metrics.add(DROPPED, tier=_TIER, reason=error.reason)
            return error.reason == "too_large"
        except Exception:  # a thread that ends would write nothing ever after
            _log.exception("notes failed in an unexpected way")
            self._metrics.add(DROPPED, tier=_TIER, reason="error")
        return True

    def _write(self, name: str, note: NoteT | None) -> None:
        file = f"{self._scope}.{name}{self._format.suffix}"
        if note is None:
            self._medium.remove(file)
            self._sizes.pop(file, None)
            return
        pieces = self._format.pack(note, self._model, self._secret)
        size, others = sum(map(len, pieces)), sum(self._sizes.values()) - self._sizes.get(file, 0)
        try:
            if others + size > self._most:
                raise StoreError("too_large", f"notes may have {self._most} bytes together; raise the store's budget")
            self._medium.write(file, pieces, max(1.0, note.expires_s - self._clock()))
        except StoreError:
            self._remove(file)  # what it says is no longer so
            raise
        self._sizes[file] = size
        self._metrics.add(WRITTEN, tier=_TIER)


_OF_HANDLES = NoteFormat("handle", ".note", pack_note, read_note)
_OF_SESSIONS = NoteFormat("session", ".session", pack_session_note, read_session_note)
_OF_RESPONSES = NoteFormat("response", ".response", pack_response_note, read_response_note)


class HandleNotes(NoteFolder[HandleNote]):
    """The notes of one model's handles."""

    @property
    def _format(self) -> NoteFormat[HandleNote]:
        return _OF_HANDLES


class SessionNotes(NoteFolder[SessionNote]):
    """The notes of one model's sessions."""

    @property
    def _format(self) -> NoteFormat[SessionNote]:
        return _OF_SESSIONS


class ResponseNotes(NoteFolder[ResponseNote]):
    """The notes of stored responses of one model."""

    @property
    def _format(self) -> NoteFormat[ResponseNote]:
        return _OF_RESPONSES
