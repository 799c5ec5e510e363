"""Sessions across restarts: each is noted with its tree of turns, and the next process reads the notes.

KV is not in them: it comes from the store, or is computed again. Refuses to know requests.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

from ...errors import BlobError
from ...kv.pool import PagePool
from ...store.note import SessionNote
from ...store.notes import SessionNotes
from .file import SessionFile, check_session, pack_session, unpack_session
from .session import Session, SessionKey, session_id

_log = logging.getLogger(__name__)


class NotedSessions:
    """The notes of one executor's sessions. Times in notes are of the calendar, those of sessions of the clock."""

    def __init__(
        self,
        notes: SessionNotes,
        pool: PagePool,
        clock: Callable[[], float],
        calendar: Callable[[], float],
        shared: bool = False,
    ) -> None:
        """`shared`: other processes note sessions too, which are found when they are asked for."""
        self._shared = shared
        self._notes = notes
        self._pool = pool
        self._clock = clock
        self._calendar = calendar
        self._names: dict[str, SessionKey] = {}

    def read(self, sessions: Mapping[SessionKey, Session], lock: threading.RLock) -> Iterator[Session]:
        """Every session that an earlier process noted, the longest unused first; from then on `sessions` are noted."""

        def known(name: str) -> SessionNote | None:
            with lock:  # for the tree alone: packing takes a while
                key = self._names.get(name)
                found = None if key is None else sessions.get(key)
                file = None if found is None else self._file(found)
            return None if found is None or file is None else self._note(name, found, pack_session(file, _no_text))

        self._notes.attach(known)
        for note in self._notes.read():
            if self._shared:
                if note.expires_s <= self._calendar():
                    self._notes.mark(note.name)  # nothing here knows it, so it is removed
                continue
            try:
                session = self._session(note)
            except BlobError as error:
                _log.warning("a noted session cannot be used: %s", error)
                self._notes.mark(note.name)
                continue
            self._names[note.name] = session.key
            yield session

    def find(self, key: SessionKey) -> Session | None:
        """A session that another process has noted; None where there is none, or only this process notes sessions."""
        note = self._notes.find(_name(key)) if self._shared else None
        if note is None or note.expires_s <= self._calendar():
            return None
        try:
            return self._session(note)
        except BlobError as error:
            _log.warning("a noted session cannot be used: %s", error)
            return None

    def others(self, tenant: str, known: Mapping[SessionKey, Session]) -> list[Session]:
        """The sessions of a hashed tenant that other processes noted."""
        keys = {_name(key) for key in known}
        notes = self._notes.read() if self._shared else []
        mine = [note for note in notes if note.owner == tenant and note.name not in keys]
        found = []
        for note in mine:
            with suppress(BlobError):
                if note.expires_s > self._calendar():
                    found.append(self._session(note))
        return found

    def mark(self, session: Session) -> None:
        """A session was added, changed or forgotten."""
        name = _name(session.key)
        self._names[name] = session.key
        self._notes.mark(name)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all notes are written; False where that takes longer, or they cannot be written."""
        return self._notes.flush(timeout_s)

    def close(self) -> None:
        """Write what is marked."""
        self._notes.close()

    def _file(self, session: Session) -> SessionFile:
        identity = replace(self._pool.identity(), salt="")
        return SessionFile(session.name, session.exact, identity, session.tree.copy(), {})

    def _note(self, name: str, session: Session, data: bytes) -> SessionNote:
        expires_s = session.expires_s + self._calendar() - self._clock()
        return SessionNote(name, session.key.tenant, expires_s, session.ttl_s, expires_s - session.ttl_s, data)

    def _session(self, note: SessionNote) -> Session:
        file = unpack_session(note.data)
        check_session(file, self._pool)
        key = SessionKey(note.owner, session_id(file.name))
        if _name(key) != note.name:
            raise BlobError("name", "the note is of another session")
        expires_s = note.expires_s - self._calendar() + self._clock()
        return Session(file.name, key, "", expires_s, note.ttl_s, file.exact, file.tree)


def _name(key: SessionKey) -> str:
    """The name of a session's note."""
    return hashlib.sha256(f"{key.tenant} {key.id}".encode()).hexdigest()[:32]


def _no_text(_ids: list[int]) -> str:
    return ""  # the tokens are enough, and notes are written after each turn
