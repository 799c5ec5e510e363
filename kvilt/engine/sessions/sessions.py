"""The sessions of one executor: which KV a prompt begins with, and what is kept of it afterwards.

Tokens are kept here, KV in handles, whose quotas and order of eviction hold. A session that lost its KV costs computing
and nothing else. Every method may be called from any thread; refuses to know text and HTTP.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress

from ...batch import Adapted, Adapter
from ...blend.moved_spans import MovedSpan, moved_spans
from ...config import EngineConfig
from ...errors import HandleError, HandleLimit, InputError, ParamError, SessionUnknown, TruncateError
from ...executor.kv_maker import check_maker
from ...executor.protocol import Executor
from ...kv.cache import KVCache
from ...kv.layout import Window
from ...kv.row import EXACT, made_by
from ...store.address import tenant_of
from ...store.notes import SessionNotes
from ..handles.handles import Handles, check_seconds
from ..misses.past_prompts import token_array
from .noted import NotedSessions
from .session import MAX_NAME, MovedLoan, Session, SessionInfo, SessionKey, SessionLoan, SessionOptions, TurnInfo
from .tree import SharedTurn, Turn

MAX_SESSIONS = 256  # of an owner; the least recently used are forgotten first
MAX_TOKENS = 1 << 23  # of an owner's sessions together
_MOVED = 3  # turns whose text is looked for at other places
_WORTH = 64  # tokens that moving must spare
_TRIED = 8  # turns whose KV is looked at for one prompt


class Sessions:
    """Named trees of turns."""

    def __init__(
        self,
        executor: Executor,
        handles: Handles,
        config: EngineConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_expired: Callable[[str, Sequence[int]], None] | None = None,
        notes: SessionNotes | None = None,
        calendar: Callable[[], float] = time.time,
    ) -> None:
        """`on_expired` is called with the hashed tenant and the tokens of each last turn of an expired session.

        `notes` keep sessions across restarts, without KV; `calendar` dates them.
        """
        self._executor = executor
        self._handles = handles
        self._config = config or EngineConfig()
        self._clock = clock
        self._on_expired = on_expired
        self._lock = threading.RLock()
        self._sessions: OrderedDict[SessionKey, Session] = OrderedDict()  # the least recently used first
        groups = executor.layout.groups
        # The last turn then holds all that earlier ones hold; windows and states are kept at the end of each turn.
        self.last_holds_all = executor.layout.recurrent is None and not any(
            isinstance(group.reach, Window) for group in groups
        )
        self._calendar = calendar
        shared = self._config.shared_notes
        self._noted = None if notes is None else NotedSessions(notes, executor.pool, clock, calendar, shared)
        if self._noted is not None:
            self._sessions.update((session.key, session) for session in self._noted.read(self._sessions, self._lock))
            self._sweep()
            for owner in dict.fromkeys(key.owner for key in self._sessions):
                self._bound(owner)

    # For requests.

    def lend(self, tenant: str, options: SessionOptions, ids: Sequence[int], adapter: Adapter) -> SessionLoan | None:
        """The KV of the session that a prompt begins with, as much as there is; at least one token is left to compute.

        None where the session has none, or the prefix index has as much.
        """
        check_options(options)
        with self._lock:
            session = self._touch(tenant, options)
            if session is None:
                return None
            begins = adapter.begins if isinstance(adapter, Adapted) else 0
            maker = made_by(self._executor.adapters.identity(adapter), begins)
            found = session.tree.shared(token_array(ids), maker)
            return self._longest(session, found, len(ids) - 1, adapter)

    def _longest(
        self, session: Session, found: Sequence[SharedTurn], most: int, adapter: Adapter
    ) -> SessionLoan | None:
        best: SessionLoan | None = None
        reached = 0
        usable = [one for one in found if one.turn.handle is not None and (not session.exact or _is_exact(one.turn))]
        for one in usable[:_TRIED]:
            if min(one.tokens, most) <= reached:
                break
            kv = self._cut(session, one.turn, min(one.tokens, most), adapter)
            if kv is None:
                continue
            if (reach := kv.row(0).resumes_at) <= reached:
                kv.close()
                continue
            if best is not None:
                best.kv.close()
            best, reached = SessionLoan(kv, one.turn.id, _is_exact(one.turn) and not one.turn.imported), reach
            one.turn.used_s = self._clock()
        return best

    def _cut(self, session: Session, turn: Turn, length: int, adapter: Adapter) -> KVCache | None:
        """The first tokens of a turn's KV; None where it is not here, or a window gave them back."""
        assert turn.handle is not None
        try:
            kv = self._handles.lend(session.tenant, turn.handle).kv
        except HandleError:
            turn.handle = None
            return None
        if kv is None:
            return None
        try:
            kv.truncate(length)
            check_maker(kv.row(0), adapter, self._executor.adapters)
        except (TruncateError, InputError):
            kv.close()
            return None
        return kv

    def moved(
        self, tenant: str, options: SessionOptions, ids: Sequence[int], adapter: Adapter, reached: int
    ) -> MovedLoan | None:
        """KV of a turn whose text was cut out, for a session that need not be exact.

        None where the session must be, or where no more than the `reached` tokens would be spared.
        """
        with self._lock:
            session = self._sessions.get(SessionKey.of(tenant, options.name))
            if session is None or session.exact or not self.last_holds_all:
                return None
            maker = made_by(self._executor.adapters.identity(adapter), 0)
            turns = [one for one in session.tree.shared(token_array(ids), maker) if one.turn.handle is not None]
            best: tuple[int, SharedTurn, tuple[MovedSpan, ...]] | None = None
            for one in turns[:_MOVED]:
                found = moved_spans(one.turn.ids.tolist(), ids[:-1], one.tokens)
                spared = sum(span.length for span in found)
                if found and (best is None or one.tokens + spared > best[0]):
                    best = one.tokens + spared, one, tuple(found)
            if best is None or best[0] < reached + _WORTH:
                return None
            kv = self._cut(session, best[1].turn, best[1].turn.tokens, adapter)
            return None if kv is None else MovedLoan(kv, best[2], best[1].tokens)

    def keep(self, tenant: str, options: SessionOptions, kv: KVCache, after: SessionLoan | None = None) -> None:
        """Add what a cache holds as a turn. Takes the cache over; what cannot be kept costs computing later."""
        with self._lock:
            session = self._touch(tenant, options) or self._new(tenant, options)
            if kv.batch_size != 1 or not kv.num_entries or kv.row(0).embeds:
                kv.close()
                return
            turn = session.tree.add(kv.row(0).ids, kv.maker, kv.origin)
            turn.used_s = self._clock()
            turn.imported = turn.imported or (after is not None and not after.shared and kv.origin == EXACT)
            if options.done or self._is_here(session, turn):
                kv.close()
            else:
                self._hold(session, turn, kv)
            if options.done:
                self._release(session)
            elif self.last_holds_all:
                self._release(session, [one for one in session.tree if session.tree.continued(one)])
            while (excess := session.tree.excess()) is not None:
                self._release(session, [excess])
                session.tree.remove(excess)
            self._bound(session.key.owner)
            self._mark(session)

    def _hold(self, session: Session, turn: Turn, kv: KVCache) -> None:
        """Keep the KV of a turn in a handle, if the owner may have one more; its oldest turns give way."""
        while True:
            try:
                self._handles.check_room(session.tenant, kv.num_entries)
                break
            except HandleLimit as limit:
                if limit.what != "handles" or not self._give_way(session.key.owner, turn):
                    kv.close()
                    return
        with suppress(HandleLimit):  # another caller was quicker
            turn.handle = self._handles.keep(session.tenant, kv, session.ttl_s, noted=False).id

    def _give_way(self, owner: str, newest: Turn) -> bool:
        """Release the handle of the least recently used turn of an owner; False where there is none."""
        held = [
            (turn.used_s, session, turn)
            for key, session in self._sessions.items()
            if key.owner == owner
            for turn in session.tree
            if turn.handle is not None and turn is not newest
        ]
        if not held:
            return False
        _, session, turn = min(held, key=lambda one: one[0])
        self._release(session, [turn])
        return True

    # For callers.

    def owned(self, tenant: str) -> list[SessionInfo]:
        """All sessions of a tenant, the least recently used first."""
        with self._lock:
            self._sweep()
            hashed = tenant_of(tenant)
            mine = [session for key, session in self._sessions.items() if key.tenant == hashed]
            others = [] if self._noted is None else self._noted.others(hashed, self._sessions)
            return [self._info(session) for session in (*others, *mine)]

    def info(self, tenant: str, name: str) -> SessionInfo:
        """The state of a session, by its name or its id."""
        with self._lock:
            return self._info(self.find(tenant, name))

    def held_since(self, tenant: str, name: str) -> float | None:
        """When a session that is here was last used, by the calendar; None where it is not here."""
        with self._lock:
            self._sweep()
            found = next((self._sessions[key] for key in _keys_of(tenant, name) if key in self._sessions), None)
            return None if found is None else found.expires_s - found.ttl_s + self._calendar() - self._clock()

    def fork(
        self, tenant: str, name: str, new: str, turn: str | None = None, ttl_s: float | None = None
    ) -> SessionInfo:
        """A second session with the same turns, or with those that lead to one of them; KV is shared."""
        check_name(new)
        with self._lock:
            old = self.find(tenant, name)
            if turn is not None and turn not in old.tree.turns:
                raise InputError(f"session {name[:64]!r} has no turn {turn[:64]!r}")
            if SessionKey.of(tenant, new) in self._sessions:
                raise ParamError("name", f"there is a session {new[:64]!r} already; delete it, or choose another name")
            made = self._new(tenant, SessionOptions(new, old.ttl_s if ttl_s is None else ttl_s, exact=old.exact))
            made.tree = old.tree.copy(turn)
            for twin in made.tree:
                handle = old.tree.turns[twin.id].handle
                if handle is not None:
                    with suppress(HandleError, HandleLimit):
                        twin.handle = self._handles.fork(tenant, handle, made.ttl_s, noted=False).id
            self._bound(made.key.owner)
            self._mark(made)
            return self._info(made)

    def delete(self, tenant: str, name: str) -> None:
        """Forget a session and its KV."""
        with self._lock:
            self._drop(self.find(tenant, name))

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all notes are written; False where that takes longer, or they cannot be written."""
        return self._noted is None or self._noted.flush(timeout_s)

    def find(self, tenant: str, name: str) -> Session:
        """A session by its name or its id; raises where the tenant has none."""
        self._sweep()
        for key in _keys_of(tenant, name):
            if (found := self._known(key)) is not None:
                found.tenant = tenant
                return found
        raise SessionUnknown(name)

    def adopt(self, session: Session) -> SessionInfo:
        """Add a session that was read from a file, in place of one of the same name."""
        with self._lock:
            self._sweep()
            if (old := self._sessions.get(session.key)) is not None:
                self._drop(old)
            self._sessions[session.key] = session
            self._bound(session.key.owner)
            self._mark(session)
            return self._info(session)

    def close(self) -> None:
        """Forget all sessions; their notes stay, and handles are closed by their owner."""
        if self._noted is not None:
            self._noted.close()
        with self._lock:
            self._sessions.clear()

    def __len__(self) -> int:
        return len(self._sessions)

    # Inside.

    def _touch(self, tenant: str, options: SessionOptions) -> Session | None:
        """A session that is used now, with what the request says of it."""
        self._sweep()
        key = SessionKey.of(tenant, options.name)
        session = self._known(key)
        if session is None:
            return None
        self._sessions.move_to_end(key)
        session.tenant = tenant
        session.ttl_s = session.ttl_s if options.ttl_s is None else options.ttl_s
        session.exact = session.exact if options.exact is None else options.exact
        session.expires_s = self._clock() + session.ttl_s
        for turn in session.tree:
            if turn.handle is not None:
                self._extend(session, turn, options.will_return)
        return session

    def _known(self, key: SessionKey) -> Session | None:
        """A session that is here, or that another process noted: it goes on here then."""
        found = self._sessions.get(key)
        if found is None and self._noted is not None and (found := self._noted.find(key)) is not None:
            self._sessions[key] = found
            self._bound(key.owner)
        return found

    def _extend(self, session: Session, turn: Turn, pinned: bool) -> None:
        assert turn.handle is not None
        try:
            if pinned:
                self._handles.pin(session.tenant, turn.handle, session.ttl_s)
            else:
                self._handles.extend(session.tenant, turn.handle, session.ttl_s)
        except HandleError:
            turn.handle = None

    def _new(self, tenant: str, options: SessionOptions) -> Session:
        ttl_s = self._config.handle_ttl_s if options.ttl_s is None else options.ttl_s
        key = SessionKey.of(tenant, options.name)
        session = Session(options.name, key, tenant, self._clock() + ttl_s, ttl_s, options.exact is not False)
        self._sessions[key] = session
        return session

    def _is_here(self, session: Session, turn: Turn) -> bool:
        if turn.handle is None:
            return False
        try:
            return self._handles.info(session.tenant, turn.handle).resident
        except HandleError:
            turn.handle = None
            return False

    def _release(self, session: Session, turns: Sequence[Turn] | None = None) -> None:
        """Give the handles of some turns back, or of all."""
        for turn in list(session.tree) if turns is None else turns:
            handle, turn.handle = turn.handle, None
            if handle is not None:
                with suppress(HandleError):
                    self._handles.delete(session.tenant, handle)

    def _drop(self, session: Session) -> None:
        self._release(session)
        del self._sessions[session.key]
        self._mark(session)

    def _mark(self, session: Session) -> None:
        if self._noted is not None:
            self._noted.mark(session)

    def _sweep(self) -> None:
        now_s = self._clock()
        for session in [one for one in self._sessions.values() if one.expires_s <= now_s]:
            if self._on_expired is not None:
                for turn in session.tree.leaves():
                    self._on_expired(session.key.tenant, turn.ids.tolist())
            self._drop(session)

    def _bound(self, owner: str) -> None:
        """Forget the least recently used sessions of an owner that has too many, or too many tokens in them."""
        mine = [session for key, session in self._sessions.items() if key.owner == owner]
        tokens = sum(turn.tokens for session in mine for turn in session.tree)
        while len(mine) > 1 and (len(mine) > MAX_SESSIONS or tokens > MAX_TOKENS):
            oldest = mine.pop(0)
            tokens -= sum(turn.tokens for turn in oldest.tree)
            self._drop(oldest)

    def _info(self, session: Session) -> SessionInfo:
        here = {turn.id for turn in session.tree if self._is_here(session, turn)}
        shown = tuple(self._turn_info(session, turn, here) for turn in session.tree)
        longest = max((turn.tokens for turn in session.tree), default=0)
        left_s = session.expires_s - self._clock()
        return SessionInfo(session.id, session.name, shown, longest, session.exact, left_s)

    def _turn_info(self, session: Session, turn: Turn, here: set[str]) -> TurnInfo:
        tree, held = session.tree, turn
        while held.id not in here and (later := [c for c in tree.children(held.id) if c.shared == held.tokens]):
            held = next((child for child in later if child.id in here), later[0])
        resident = held.id in here and (held is turn or self.last_holds_all)
        return TurnInfo(turn.id, turn.parent, turn.shared, turn.tokens, resident, turn.origin, turn.maker)


def _keys_of(tenant: str, name: str) -> tuple[SessionKey, SessionKey]:
    """The keys under which a session may be, by its name or its id."""
    return SessionKey.of(tenant, name), SessionKey(tenant_of(tenant), name)


def check_name(name: object) -> None:
    """Raise unless this can be the name of a session."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise ParamError("session", f"a name has 1 to {MAX_NAME} characters")


def check_options(options: SessionOptions) -> None:
    """Raise unless these options have a meaning."""
    check_name(options.name)
    if options.ttl_s is not None:
        check_seconds(options.ttl_s)
    if options.done and options.will_return:
        raise ParamError("session", "cannot be done and return; give one of the two hints")


def _is_exact(turn: Turn) -> bool:
    return turn.origin == EXACT
