"""Known documents kept in step with a store: read from it once, and asked for again before they are used.

Refuses to know what a store is made of, and what documents are found for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from ..kv.row import Token
from .known_documents import DocumentScope, KnownDocuments
from .recipe import Span

_log = logging.getLogger(__name__)
_MOST_WAITING = 16  # scopes to read; each costs a look at every record
_MOST_READ = 1024  # scopes that are remembered as read
_ASKING_S = 1.0  # for all documents of a prompt; a tier may take half as long for each


class DocumentFinder:
    """Documents that may stand in prompts, by tenant and adapter."""

    def __init__(
        self,
        stored: Callable[[DocumentScope], Iterable[Sequence[Token]]],
        there: Callable[[DocumentScope, Sequence[int]], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stored` gives the tokens of everything kept for a scope; `there` says whether a document still is."""
        self.known = KnownDocuments()
        self._stored = stored
        self._there = there
        self._clock = clock
        self._lock = threading.Lock()
        self._read: dict[DocumentScope, None] = {}
        self._waiting: deque[DocumentScope] = deque()
        self._reader: threading.Thread | None = None
        self._closed = False

    def find(self, scope: DocumentScope, ids: Sequence[int], start: int = 0) -> tuple[Span, ...]:
        """What stands in a prompt and is stored, as far as the store answers in time."""
        self.read(scope)
        spans, deadline_s = [], self._clock() + _ASKING_S
        for span in self.known.find(scope, ids, start).spans:
            document = ids[span.start : span.stop]
            if self._clock() < deadline_s and self._there(scope, document):
                spans.append(span)
            else:  # evicted, or its tier does not answer just now
                self.known.demote(scope, document)
        return tuple(spans)

    # Reading what was stored before.

    def read(self, scope: DocumentScope) -> None:
        """Begin to read what is stored for a scope, in a thread of its own, unless that was done."""
        with self._lock:
            if self._closed or scope in self._read or len(self._waiting) >= _MOST_WAITING:
                return
            self._read[scope] = None
            for old in list(self._read)[:-_MOST_READ]:
                del self._read[old]
            self._waiting.append(scope)
            if self._reader is None:
                self._reader = threading.Thread(target=self._run, name="kvilt-documents", daemon=True)
                self._reader.start()

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait until what was to be read is read."""
        with self._lock:
            reader = self._reader
        if reader is not None:
            reader.join(timeout_s)

    def close(self) -> None:
        """Read no more; waits for the record that is being read, and not long."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
        self.settle(1.0)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._reader = None
                    return
                scope = self._waiting.popleft()
            try:
                self._take(scope)
            except Exception:  # whatever is wrong with a store, documents are then found a little later
                _log.exception("stored documents cannot be read")

    def _take(self, scope: DocumentScope) -> None:
        for tokens in self._stored(scope):
            if self._closed:
                return
            ids = [token for token in tokens if isinstance(token, int)]
            if len(ids) == len(tokens):
                self.known.add(scope, ids)
