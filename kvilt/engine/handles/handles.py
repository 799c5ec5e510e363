"""Named handles on KV: tokens with a name, an owner and a time to live, and their KV for as long as there is room.

A handle never changes under a request: each use forks it. KV that was evicted is computed again when it is next needed.
Where there are notes, the next process knows the handles too. Every method may be called
from any thread; refuses to know text and HTTP.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...batch import Adapter
from ...config import EngineConfig
from ...errors import BlobError, HandleExpired, HandleLimit, HandleUnknown, InputError, ParamError, TruncateError
from ...executor.protocol import Executor
from ...kv.cache import KVCache
from ...kv.codec import describe, pack, unpack
from ...kv.file import write_whole
from ...kv.identity import Identity
from ...kv.owner import owner_of
from ...kv.row import BASE, EXACT, maker_parts
from ...kv.saved import read_file
from ...metrics import Metrics
from ...store.address import tenant_of
from ...store.note import HandleNote
from ...store.notes import HandleNotes
from ..counters import HANDLES
from ..request import new_id
from .handle import Handle, HandleLoan, from_note, pages_of

MAX_EXPIRED = 4096  # ids of expired handles, to answer "expired" rather than "unknown"


@dataclass(frozen=True, slots=True)
class HandleInfo:
    """The state of a handle, for its tenant."""

    id: str
    tokens: int
    resident: bool  # its KV is here; otherwise the next use computes it
    pinned: bool
    expires_in_s: float
    kv_bytes: int  # of its pages, those it shares included
    maker: str = BASE  # the base model, or an adapter by content and scale


class Handles:
    """The handles of one executor. Close it: it holds pages."""

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig | None = None,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        notes: HandleNotes | None = None,
        calendar: Callable[[], float] = time.time,
        on_expired: Callable[[str, Sequence[int]], None] | None = None,
    ) -> None:
        """`notes` keep handles across restarts; `calendar` dates them.

        `on_expired` is called with the hashed tenant and the tokens of a handle that has expired.
        """
        self._executor = executor
        self._config = config or EngineConfig()
        self._metrics = metrics
        self._clock = clock
        self._lock = threading.RLock()
        self._handles: OrderedDict[str, Handle] = OrderedDict()  # the least recently used first
        self._expired: OrderedDict[str, str] = OrderedDict()  # id -> tenant, hashed
        self._notes = notes
        self._calendar = calendar
        self._on_expired = on_expired
        if notes is not None:
            self._read_notes(notes)

    # Making.

    def check_room(self, tenant: str, tokens: int) -> None:
        """Raise unless a tenant's owner may have one more handle, of so many tokens: before they are computed."""
        with self._lock:
            self._sweep()
            owner = owner_of(tenant_of(tenant))
            there = sum(one.owner == owner for one in self._handles.values())
            if there >= self._config.max_handles:
                raise HandleLimit("handles", there + 1, self._config.max_handles)
            if (pages := self._executor.layout.pages_for(tokens)) > self._share:
                raise HandleLimit("pages", pages, self._share)

    @property
    def _share(self) -> int:
        """Pages that one owner's handles may hold."""
        return max(1, int(self._executor.pool.pages * self._config.handle_share))

    def keep(self, tenant: str, kv: KVCache, ttl_s: float | None = None, noted: bool = True) -> HandleInfo:
        """Name what a cache of one row holds. Takes the cache over, also if this raises.

        Only for KV that this executor computed from these tokens for this tenant, or that was restored. The next
        process does not know handles that are not `noted`.
        """
        try:
            if kv.batch_size != 1 or any(not isinstance(token, int) for token in kv.tokens()):
                raise InputError("a handle names one row of tokens; rows of embeddings cannot be computed again")
            return self._add(tenant, kv.row(0).ids[:], kv, ttl_s, kv.maker, noted)
        except BaseException:
            kv.close()
            raise

    def fork(self, tenant: str, handle: str, ttl_s: float | None = None, noted: bool = True) -> HandleInfo:
        """A second handle on the same content; costs page ids."""
        with self._lock:
            found = self._find(tenant, handle)
            kv = None if found.kv is None else found.kv.fork()
            return self._add(tenant, found.ids[:], kv, ttl_s, found.maker, noted)

    def restore(self, tenant: str, path: str | os.PathLike[str], ttl_s: float | None = None) -> HandleInfo:
        """A handle from a file that `save` wrote for the same tenant and model.

        KV made with other numerics is dropped, and computed again from its tokens when it is next needed. The handle
        remembers what computed it: requests on another adapter, or on the base model, are refused. KV that was blended
        keeps its mark, so that it is never used as exact.
        """
        pool, capacity = self._executor.pool, self._room()
        data = read_file(pool, path, capacity)
        said = describe(data).identity
        maker, identity = said.adapter, self._identity(tenant, said.adapter, said.origin)
        try:
            images, same = unpack(data, pool.layout, identity, capacity), True
        except BlobError as error:
            if error.field != "identity.numerics":
                raise
            images, same = unpack(data, pool.layout, identity, capacity, accept_numerics=True), False
        if len(images) != 1 or images[0].embeds or max(images[0].ids, default=0) >= pool.token_limit:
            raise BlobError("rows", "a handle is one row of this model's tokens")
        image = replace(images[0], origin=said.origin)
        kv = KVCache.of_images(pool, [image], capacity, owner_of(tenant)) if same else None
        return self._add(tenant, images[0].ids, kv, ttl_s, maker)

    # Asking.

    def info(self, tenant: str, handle: str) -> HandleInfo:
        """The state of a handle."""
        with self._lock:
            return self._info(handle, self._find(tenant, handle))

    def held_since(self, tenant: str, handle: str) -> float | None:
        """When a handle that is here was last used, by the calendar.

        None for a handle that is not here, also for one that another process noted, until a request uses it.
        """
        with self._lock:
            self._sweep()
            found = self._handles.get(handle)
            if found is None or found.tenant != tenant_of(tenant):
                return None
            return found.used_s + self._calendar() - self._clock()

    def tokens(self, tenant: str, handle: str) -> Sequence[int]:
        """The tokens of a handle."""
        with self._lock:
            return self._find(tenant, handle).ids[:]

    def owned(self, tenant: str) -> list[HandleInfo]:
        """All handles of a tenant, the least recently used first."""
        with self._lock:
            self._sweep()
            hashed = tenant_of(tenant)
            here = [self._info(name, one) for name, one in self._handles.items() if one.tenant == hashed]
            return [*self._noted_elsewhere(hashed), *here] if self._config.shared_notes else here

    def _noted_elsewhere(self, hashed: str) -> list[HandleInfo]:
        """A tenant's handles that other processes noted."""
        now_s, today_s = self._clock(), self._calendar()
        notes = [] if self._notes is None else self._notes.read()
        found = {one.name: from_note(one, now_s, today_s) for one in notes if one.name not in self._handles}
        return [self._info(name, one) for name, one in found.items() if one.tenant == hashed and one.expires_s > now_s]

    def lend(self, tenant: str, handle: str) -> HandleLoan:
        """The tokens and KV that a request starts with."""
        with self._lock:
            found = self._find(tenant, handle)
            self._handles.move_to_end(handle)
            found.used_s = self._clock()
            return HandleLoan(found.ids[:], None if found.kv is None else found.kv.fork(), found.maker)

    def adapter_of(self, loan: HandleLoan) -> Adapter:
        """The adapter that computes a handle's KV again."""
        adapter, start = maker_parts(loan.maker)
        return self._executor.adapters.by_identity(adapter, start)

    def __len__(self) -> int:
        return len(self._handles)

    # Changing.

    def truncate(self, tenant: str, handle: str, length: int) -> HandleInfo:
        """Forget everything from `length` on. Where a window gave that part back, the KV is computed again."""
        with self._lock:
            found = self._find(tenant, handle)
            if not isinstance(length, int) or isinstance(length, bool) or not 0 < length <= len(found.ids):
                raise TruncateError(f"cannot truncate to {length!r}: choose 1 to {len(found.ids)}", 1)
            del found.ids[length:]
            found.used_s = self._clock()
            if length <= maker_parts(found.maker)[1]:
                found.maker = BASE
            self._cut(found, length)
            self._mark(handle, found)
            return self._info(handle, found)

    def pin(self, tenant: str, handle: str, ttl_s: float) -> HandleInfo:
        """Keep a handle at least so long, and its KV before that of others. A starving request may take its pages."""
        with self._lock:
            found = self._find(tenant, handle)
            found.pinned_until_s = self._clock() + check_seconds(ttl_s)
            found.used_s = self._clock()
            found.expires_s = max(found.expires_s, found.pinned_until_s)
            self._mark(handle, found)
            return self._info(handle, found)

    def extend(self, tenant: str, handle: str, ttl_s: float) -> None:
        """Keep a handle at least so long; its KV may be evicted as before."""
        with self._lock:
            found = self._find(tenant, handle)
            found.expires_s = max(found.expires_s, self._clock() + check_seconds(ttl_s))
            self._handles.move_to_end(handle)
            self._mark(handle, found)

    def fill(self, tenant: str, handle: str, kv: KVCache) -> None:
        """KV that was computed again. Takes the cache over; what does not fit the handle any more is dropped."""
        with self._lock:
            found = self._handles.get(handle)
            if found is None or found.tenant != tenant_of(tenant) or found.kv is not None or not found.fits(kv):
                kv.close()
                return
            found.kv = kv
            self._enforce_share(found)

    def save(self, tenant: str, handle: str, path: str | os.PathLike[str]) -> int:
        """Write a handle whose KV is here to a file; how many bytes it took."""
        with self._lock:
            found = self._find(tenant, handle)
            if found.kv is None:
                raise InputError("the KV of this handle is not here; compute it first")
            kv = found.kv.fork()
        return self.write(tenant, kv, path)

    def write(self, tenant: str, kv: KVCache, path: str | os.PathLike[str]) -> int:
        """Write the KV of a tenant's handle to a file; how many bytes it took. Takes the cache over."""
        with kv:
            identity = self._identity(tenant, kv.maker, kv.origin)
            with kv.pool.lock:
                images = [row.image() for row in kv.rows()]
            data = pack(images, kv.layout, identity)
        write_whole(Path(path), data)
        return len(data)

    def delete(self, tenant: str, handle: str) -> None:
        """Forget a handle."""
        with self._lock:
            self._find(tenant, handle)
            self._drop(handle)

    def evict_one(self, pinned: bool) -> bool:
        """Evict the KV of one handle: of the owner that has the most pages, the least recently used one.

        A pinned one only if `pinned`, or where its owner has no others and more than its fair share of all pages.
        """
        with self._lock:
            self._sweep()
            held: dict[str, list[Handle]] = {}
            for one in self._handles.values():
                if one.kv is not None:
                    held.setdefault(one.kv.owner, []).append(one)
            pool = self._executor.pool
            pages, fair = {owner: pool.held_by(owner) for owner in held}, pool.fair_share()
            fullest = sorted(held, key=lambda owner: -pages[owner])
            for owner in fullest:
                loose = held[owner] if pages[owner] > fair else []
                for one in [one for one in held[owner] if not self._pinned(one)] or loose:
                    one.free_kv()
                    return True
            for owner in fullest if pinned else ():
                held[owner][0].free_kv()
                return True
            return False

    @property
    def shares_notes(self) -> bool:
        """Whether other processes read the notes of this one."""
        return self._notes is not None and self._config.shared_notes

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all notes are written; False where that takes longer, or they cannot be written."""
        return self._notes is None or self._notes.flush(timeout_s)

    def close(self) -> None:
        """Forget all handles; their notes stay."""
        if self._notes is not None:
            self._notes.close()
        with self._lock:
            for handle in list(self._handles):
                self._drop(handle)

    # Inside.

    def _add(
        self, tenant: str, ids: array[int], kv: KVCache | None, ttl_s: float | None, maker: str, noted: bool = True
    ) -> HandleInfo:
        with self._lock:
            try:
                life_s = self._config.handle_ttl_s if ttl_s is None else check_seconds(ttl_s)
                self.check_room(tenant, len(ids))
                now_s = self._clock()
                found = Handle(tenant_of(tenant), ids, kv, now_s + life_s, now_s, maker, noted=noted)
                self._enforce_share(found)
            except BaseException:
                if kv is not None:
                    kv.close()
                raise
            handle = new_id()
            self._handles[handle] = found
            self._count()
            self._mark(handle, found)
            return self._info(handle, found)

    def _enforce_share(self, newest: Handle) -> None:
        """Keep an owner's handles within its share of the pages: the KV of its older ones is evicted."""
        mine = [one for one in self._handles.values() if one.owner == newest.owner and one.kv is not None]
        mine.sort(key=self._pinned)  # stable: unpinned first, each by last use
        while mine and pages_of([*mine, newest]) > self._share:
            mine.pop(0).free_kv()

    def _find(self, tenant: str, handle: str) -> Handle:
        self._sweep()
        found, hashed = self._handles.get(handle), tenant_of(tenant)
        if found is not None and found.tenant == hashed:
            return found
        if self._expired.get(handle) == hashed:
            raise HandleExpired(handle)
        noted = self._noted(handle) if found is None else None
        if noted is None or noted.tenant != hashed:
            raise HandleUnknown(handle)
        noted.used_s = self._clock()
        self._handles[handle] = noted
        self._count()
        return noted

    def _noted(self, handle: str) -> Handle | None:
        """A handle that another process has noted; its KV comes from the store or its tokens."""
        note = None if self._notes is None else self._notes.find(handle)
        noted = None if note is None else from_note(note, self._clock(), self._calendar())
        return noted if noted is not None and noted.expires_s > self._clock() else None

    def _sweep(self) -> None:
        now_s = self._clock()
        for handle in [name for name, one in self._handles.items() if one.expires_s <= now_s]:
            gone = self._handles[handle]
            self._expired[handle] = gone.tenant
            if self._on_expired is not None:
                self._on_expired(gone.tenant, gone.ids)
            self._drop(handle, not self._config.shared_notes or self._noted(handle) is None)
        while len(self._expired) > MAX_EXPIRED:
            self._expired.popitem(last=False)

    def _drop(self, handle: str, marked: bool = True) -> None:
        """Forget a handle, and with `marked` its note: where another process keeps it longer, that one stays."""
        gone = self._handles.pop(handle)
        gone.free_kv()
        self._count()
        if marked:
            self._mark(handle, gone)

    def _cut(self, one: Handle, length: int) -> None:
        if one.kv is None:
            return
        try:
            one.kv.truncate(length)
        except TruncateError:
            one.free_kv()

    def _pinned(self, one: Handle) -> bool:
        return one.pinned_until_s > self._clock()

    def _info(self, handle: str, one: Handle) -> HandleInfo:
        layout = self._executor.layout
        held = one.kv.row(0).held_pages() if one.kv is not None else ()
        return HandleInfo(
            id=handle,
            tokens=len(one.ids),
            resident=one.kv is not None,
            pinned=self._pinned(one),
            expires_in_s=one.expires_s - self._clock(),
            kv_bytes=sum(n * group.shape.page_bytes for n, group in zip(held, layout.groups, strict=False)),
            maker=one.maker,
        )

    def _identity(self, tenant: str, maker: str, origin: str = EXACT) -> Identity:
        """The tenant of the KV, and how it was made; a tenant's name may be a secret, so a file has its hash."""
        salt = hashlib.sha256(tenant.encode("utf-8", "surrogatepass")).hexdigest() if tenant else ""
        return replace(self._executor.pool.identity(), salt=salt, adapter=maker, origin=origin)

    def _room(self) -> int:
        with self._executor.create_kv_cache() as empty:
            return empty.capacity

    def _count(self) -> None:
        if self._metrics is not None:
            self._metrics.set(HANDLES, len(self._handles))

    # Notes.

    def _read_notes(self, notes: HandleNotes) -> None:
        """Restore noted handles that have not expired, as many as an owner may have."""
        now_s, today_s, there = self._clock(), self._calendar(), Counter[str]()
        notes.attach(self._note)
        if self._config.shared_notes:
            for name in [note.name for note in notes.read() if note.expires_s <= today_s]:
                notes.mark(name)  # nothing here knows it, so it is removed
            return
        self._handles.update((note.name, from_note(note, now_s, today_s)) for note in notes.read())
        self._sweep()
        for name, one in reversed(list(self._handles.items())):
            there[one.owner] += 1
            if there[one.owner] > self._config.max_handles:
                self._drop(name)
        self._count()

    def _note(self, handle: str) -> HandleNote | None:
        """The note of a handle; None where there is none any more."""
        with self._lock:
            found = self._handles.get(handle)
            return None if found is None else found.note(handle, self._clock(), self._calendar())

    def _mark(self, handle: str, one: Handle) -> None:
        if self._notes is not None and one.noted:
            self._notes.mark(handle)


def check_seconds(value: float) -> float:
    """A time to live; raises where it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise ParamError("ttl_s", f"must be a finite number of seconds above 0, not {value!r}")
    return float(value)
