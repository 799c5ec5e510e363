"""Sessions as files: from an engine to bytes, and into another one, whose KV they use only if it is the same.

KV of other numerics, or in another dtype, is computed again from the tokens when it is next needed; a session of
another model is refused. Refuses to know paths.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Literal

from ...config import EngineConfig
from ...errors import BlobError, HandleError, HandleLimit, PoolExhausted
from ...executor.protocol import Executor
from ...kv.cache import KVCache
from ...kv.codec import pack, unpack
from ...kv.owner import owner_of
from ...kv.row import EXACT
from ..handles.handles import Handles
from .file import SessionFile, check_session, pack_session, unpack_session
from .session import Session, SessionInfo, SessionKey
from .sessions import Sessions, check_name
from .tree import Turn, TurnTree


@dataclass(frozen=True, slots=True)
class SessionImport:
    """A session from a file, and what became of the KV in it."""

    session: SessionInfo
    kv: Literal["used", "recomputed", "none"]  # none: the file has no KV
    why: str = ""  # it is computed again
    conversation: str = ""  # as the page that exported it wrote it


class SessionExchange:
    """Exports and imports the sessions of one executor."""

    def __init__(
        self,
        executor: Executor,
        handles: Handles,
        sessions: Sessions,
        text: Callable[[list[int]], str],
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`text` decodes tokens."""
        self._executor = executor
        self._handles = handles
        self._sessions = sessions
        self._text = text
        self._config = config
        self._clock = clock

    def export(self, tenant: str, name: str, kv: bool = True) -> bytes:
        """A session as bytes; with `kv` also the KV of its turns, as far as that is here."""
        session = self._sessions.find(tenant, name)
        tree = session.tree.copy()
        held = {turn.id: data for turn in list(session.tree) if kv and (data := self._kv(tenant, turn)) is not None}
        identity = replace(self._executor.pool.identity(), salt="")
        return pack_session(SessionFile(session.name, session.exact, identity, tree, held), self._text)

    def export_handles(self, tenant: str, name: str, handles: Sequence[str], conversation: str = "") -> bytes:
        """A session as bytes whose turns are what these handles hold, and a text that the importer gets back."""
        check_name(name)
        tree, held = TurnTree(), dict[str, KVCache]()
        with ExitStack() as open_caches:
            loans = []
            for one in dict.fromkeys(handles):
                loans.append(loan := self._handles.lend(tenant, one))
                if loan.kv is not None:
                    open_caches.enter_context(loan.kv)
            for loan in sorted(loans, key=lambda loan: len(loan.tokens)):
                turn = tree.add(loan.tokens, loan.maker, EXACT if loan.kv is None else loan.kv.origin)
                if loan.kv is not None:
                    held[turn.id] = loan.kv
            last = {turn.id for turn in tree.leaves()} if self._sessions.last_holds_all else held.keys()
            packed = {turn: self._packed(kv) for turn, kv in held.items() if turn in last}
        identity = replace(self._executor.pool.identity(), salt="")
        return pack_session(SessionFile(name, True, identity, tree, packed, conversation), self._text)

    def _kv(self, tenant: str, turn: Turn) -> bytes | None:
        if turn.handle is None:
            return None
        try:
            cache = self._handles.lend(tenant, turn.handle).kv
        except HandleError:
            return None
        if cache is None:
            return None
        with cache:
            return self._packed(cache)

    def _packed(self, cache: KVCache) -> bytes:
        identity = replace(self._executor.pool.identity(), salt="", adapter=cache.maker, origin=cache.origin)
        with cache.pool.lock:
            images = [row.image() for row in cache.rows()]
        return pack(images, cache.layout, identity)

    def load(self, tenant: str, data: bytes, name: str | None = None, ttl_s: float | None = None) -> SessionImport:
        """Add the session in these bytes, under its own name or another, in place of one of that name."""
        file = unpack_session(data)
        check_session(file, self._executor.pool)
        if name is not None:
            check_name(name)
        life_s = self._config.handle_ttl_s if ttl_s is None else ttl_s
        chosen = name or file.name
        key = SessionKey.of(tenant, chosen)
        session = Session(chosen, key, tenant, self._clock() + life_s, life_s, file.exact, file.tree)
        used, why = 0, ""
        for turn in session.tree:
            if (kv := file.kv.get(turn.id)) is not None:
                problem = self._restore(session, turn, kv)
                used, why = used + (not problem), problem or why
        info = self._sessions.adopt(session)
        if not file.kv:
            return SessionImport(info, "none", conversation=file.conversation)
        became: Literal["used", "recomputed"] = "used" if used == len(file.kv) else "recomputed"
        return SessionImport(info, became, "" if became == "used" else why, file.conversation)

    def _restore(self, session: Session, turn: Turn, data: bytes) -> str:
        """Keep the KV of a turn; returns why it cannot be used, or nothing."""
        pool = self._executor.pool
        identity = replace(pool.identity(), salt="", adapter=turn.maker, origin=turn.origin)
        try:
            with self._executor.create_kv_cache() as empty:
                capacity = empty.capacity
            images = unpack(data, pool.layout, identity, capacity)
            if len(images) != 1 or images[0].embeds or images[0].ids.tolist() != turn.ids.tolist():
                raise BlobError("rows", "the KV holds other tokens than its turn")
            kv = KVCache.of_images(pool, [replace(images[0], origin=turn.origin)], capacity, owner_of(session.tenant))
        except (BlobError, PoolExhausted) as error:
            return str(error)
        with suppress(HandleLimit):
            turn.handle = self._handles.keep(session.tenant, kv, session.ttl_s, noted=False).id
            turn.imported = True
            return ""
        return "the key has as many handles, or pages in them, as it may have"
