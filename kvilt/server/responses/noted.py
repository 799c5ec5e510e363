"""Stored responses across processes: each is noted with its conversation, and another process goes on from the note.

KV is not in it: the handle that it names has a note of its own. Refuses to know requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from ...store.address import tenant_of
from ...store.note import ResponseNote
from ...store.notes import ResponseNotes
from .stored_response import Continuation, StoredResponse

_PREFIX = "resp_"


class NotedResponses:
    """The notes of one server's stored responses. Times in notes are of the calendar."""

    def __init__(
        self,
        notes: ResponseNotes,
        stored: Mapping[str, StoredResponse],
        clock: Callable[[], float] = time.monotonic,
        calendar: Callable[[], float] = time.time,
    ) -> None:
        """`stored` are the responses that are here, by name."""
        self._notes, self._stored = notes, stored
        self._clock, self._calendar = clock, calendar
        notes.attach(self._note)
        for note in notes.read():
            if note.expires_s <= calendar():
                notes.mark(note.name)  # nothing here knows it, so it is removed

    def find(self, name: str, tenant: str) -> StoredResponse | None:
        """A response of a tenant that another process noted."""
        note = self._notes.find(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else None
        if note is None or note.owner != tenant_of(tenant) or note.expires_s <= self._calendar():
            return None
        found = _response(orjson.loads(note.data), tenant)
        found.expires_s = note.expires_s - self._calendar() + self._clock()
        found.bytes = len(note.data)
        return found

    def mark(self, name: str) -> None:
        """A response was stored, changed or forgotten."""
        self._notes.mark(name.removeprefix(_PREFIX))

    def flush(self, timeout_s: float) -> bool:
        """Wait until all notes are written; False where that takes longer, or they cannot be written."""
        return self._notes.flush(timeout_s)

    def _note(self, name: str) -> ResponseNote | None:
        found = self._stored.get(_PREFIX + name)
        if found is None:
            return None
        used_s = self._calendar()
        expires_s = found.expires_s - self._clock() + used_s
        return ResponseNote(name, tenant_of(found.tenant), expires_s, used_s, orjson.dumps(_fields(found)))


def _fields(stored: StoredResponse) -> dict[str, Any]:
    kept = stored.continuation
    continued = None if kept is None else [kept.handle, kept.prompt.hex(), list(kept.unread), kept.exact]
    return {"shown": stored.shown, "messages": stored.messages, "continuation": continued}


def _response(fields: dict[str, Any], tenant: str) -> StoredResponse:
    """From a note, whose seal was right."""
    continued = fields["continuation"]
    kept = None
    if continued is not None:
        handle, prompt, unread, exact = continued
        kept = Continuation(handle, bytes.fromhex(prompt), tuple(unread), exact)
    return StoredResponse(tenant, fields["shown"], fields["messages"], kept)
