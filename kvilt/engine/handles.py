"""Named handles on KV: tokens with a name, an owner and a time to live, and their KV for as long as there is room.

A handle never changes under a request: each use forks it. KV that must give way is computed again when it is next
needed, so a handle is slow at worst. Every method may be called from any thread; refuses to know text and HTTP.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..batch import Adapted, Adapter
from ..config import EngineConfig
from ..errors import BlobError, HandleExpired, HandleLimit, HandleUnknown, InputError, ParamError, TruncateError
from ..executor.executor import Executor
from ..executor.lora import Adapters
from ..kv.cache import KVCache, read_file
from ..kv.codec import describe, pack, unpack
from ..kv.file import write_whole
from ..kv.identity import Identity
from ..kv.row import BASE, EXACT, made_by, maker_parts
from ..metrics import Metrics
from .counters import HANDLES
from .request import new_id

MOST_REMEMBERED = 4096  # ids of handles that expired, to say so rather than that they never were


@dataclass(frozen=True, slots=True)
class HandleInfo:
    """What can be said of a handle."""

    id: str
    tokens: int
    resident: bool  # its KV is here; otherwise the next use computes it
    pinned: bool
    expires_in_s: float
    kv_bytes: int  # of its pages, those it shares included
    maker: str = BASE  # the base model, or an adapter by content and scale


@dataclass(frozen=True, slots=True)
class Loan:
    """What a request begins with: the handle's tokens, and a fork of its KV, if that is there, for it to close."""

    tokens: Sequence[int]
    kv: KVCache | None
    maker: str = BASE  # who read them: the base model, or an adapter by content and scale


@dataclass(slots=True, eq=False)
class _Handle:
    tenant: str
    ids: array[int]
    kv: KVCache | None
    expires_s: float
    maker: str = BASE
    pinned_until_s: float = -math.inf


class Handles:
    """The handles of one executor. Close it: it holds pages."""

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig | None = None,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = executor
        self._config = config or EngineConfig()
        self._metrics = metrics
        self._clock = clock
        self._lock = threading.RLock()
        self._handles: OrderedDict[str, _Handle] = OrderedDict()  # the least recently used first
        self._expired: OrderedDict[str, str] = OrderedDict()  # id -> tenant

    # Making.

    def check_room(self, tenant: str, tokens: int) -> None:
        """Raise unless a tenant may have one more handle, of so many tokens: before they are computed."""
        with self._lock:
            self._sweep()
            there = sum(one.tenant == tenant for one in self._handles.values())
            if there >= self._config.max_handles:
                raise HandleLimit("handles", there + 1, self._config.max_handles)
            if (pages := self._executor.layout.pages_for(tokens)) > self._share:
                raise HandleLimit("pages", pages, self._share)

    @property
    def _share(self) -> int:
        """Pages that one tenant's handles may hold."""
        return max(1, int(self._executor.pool.pages * self._config.handle_share))

    def keep(self, tenant: str, kv: KVCache, ttl_s: float | None = None) -> HandleInfo:
        """Name what a cache of one row holds. Takes the cache over, also if this raises.

        Only for KV that this executor computed from these tokens for this tenant, or that was restored.
        """
        try:
            if kv.batch_size != 1 or any(not isinstance(token, int) for token in kv.tokens()):
                raise InputError("a handle names one row of tokens; rows of embeddings cannot be computed again")
            return self._add(tenant, kv.row(0).ids[:], kv, ttl_s, kv.maker)
        except BaseException:
            kv.close()
            raise

    def fork(self, tenant: str, handle: str, ttl_s: float | None = None) -> HandleInfo:
        """A second handle on the same content; costs page ids."""
        with self._lock:
            found = self._find(tenant, handle)
            kv = None if found.kv is None else found.kv.fork()
            return self._add(tenant, found.ids[:], kv, ttl_s, found.maker)

    def restore(self, tenant: str, path: str | os.PathLike[str], ttl_s: float | None = None) -> HandleInfo:
        """A handle from a file that `save` wrote for the same tenant and model.

        KV made with other numerics is dropped, and computed again from its tokens when it is next needed. Whose KV it
        is, the handle remembers: requests on another adapter, or on the base model, are refused it. KV that was blended
        is marked as such, so that nobody takes it for exact.
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
        kv = KVCache.of_images(pool, [replace(images[0], origin=said.origin)], capacity) if same else None
        return self._add(tenant, images[0].ids, kv, ttl_s, maker)

    # Asking.

    def info(self, tenant: str, handle: str) -> HandleInfo:
        """What there is to say of a handle."""
        with self._lock:
            return self._info(handle, self._find(tenant, handle))

    def tokens(self, tenant: str, handle: str) -> Sequence[int]:
        """What a handle names."""
        with self._lock:
            return self._find(tenant, handle).ids[:]

    def owned(self, tenant: str) -> list[HandleInfo]:
        """All handles of a tenant, the least recently used first."""
        with self._lock:
            self._sweep()
            return [self._info(name, one) for name, one in self._handles.items() if one.tenant == tenant]

    def lend(self, tenant: str, handle: str) -> Loan:
        """What a request begins with."""
        with self._lock:
            found = self._find(tenant, handle)
            self._handles.move_to_end(handle)
            return Loan(found.ids[:], None if found.kv is None else found.kv.fork(), found.maker)

    def adapter_of(self, loan: Loan) -> Adapter:
        """What must read a handle's tokens again."""
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
            if length <= maker_parts(found.maker)[1]:
                found.maker = BASE
            self._cut(found, length)
            return self._info(handle, found)

    def pin(self, tenant: str, handle: str, ttl_s: float) -> HandleInfo:
        """Keep a handle at least so long, and its KV before that of others. Soft: a starving request goes first."""
        with self._lock:
            found = self._find(tenant, handle)
            found.pinned_until_s = self._clock() + _seconds(ttl_s)
            found.expires_s = max(found.expires_s, found.pinned_until_s)
            return self._info(handle, found)

    def fill(self, tenant: str, handle: str, kv: KVCache) -> None:
        """KV that was computed again. Takes the cache over; what does not fit the handle any more is dropped."""
        with self._lock:
            found = self._handles.get(handle)
            if found is None or found.tenant != tenant or found.kv is not None or not _reads(kv, found):
                kv.close()
                return
            found.kv = kv
            self._settle(tenant, found)

    def save(self, tenant: str, handle: str, path: str | os.PathLike[str]) -> int:
        """Write a handle whose KV is here to a file; how many bytes it took."""
        with self._lock:
            found = self._find(tenant, handle)
            if found.kv is None:
                raise InputError("the KV of this handle is not here; compute it first")
            kv = found.kv.fork()
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

    def relieve(self, pinned: bool) -> bool:
        """Give up the KV of the handle that was not used for longest; a pinned one only if told so."""
        with self._lock:
            self._sweep()
            held = [one for one in self._handles.values() if one.kv is not None]
            unpinned = [one for one in held if not self._pinned(one)]
            for one in unpinned or (held if pinned else []):
                self._give_up(one)
                return True
            return False

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            for handle in list(self._handles):
                self._drop(handle)

    # Inside.

    def _add(self, tenant: str, ids: array[int], kv: KVCache | None, ttl_s: float | None, maker: str) -> HandleInfo:
        with self._lock:
            try:
                life_s = self._config.handle_ttl_s if ttl_s is None else _seconds(ttl_s)
                self.check_room(tenant, len(ids))
                found = _Handle(tenant, ids, kv, self._clock() + life_s, maker)
                self._settle(tenant, found)
            except BaseException:
                if kv is not None:
                    kv.close()
                raise
            handle = new_id()
            self._handles[handle] = found
            self._count()
            return self._info(handle, found)

    def _settle(self, tenant: str, newest: _Handle) -> None:
        """Keep a tenant's handles within its share of the pages: its own older ones give their KV up."""
        mine = [one for one in self._handles.values() if one.tenant == tenant and one.kv is not None]
        mine.sort(key=self._pinned)  # stable: unpinned first, each by last use
        while mine and _pages([*mine, newest]) > self._share:
            self._give_up(mine.pop(0))

    def _find(self, tenant: str, handle: str) -> _Handle:
        self._sweep()
        found = self._handles.get(handle)
        if found is not None and found.tenant == tenant:
            return found
        if self._expired.get(handle) == tenant:
            raise HandleExpired(handle)
        raise HandleUnknown(handle)

    def _sweep(self) -> None:
        now_s = self._clock()
        for handle in [name for name, one in self._handles.items() if one.expires_s <= now_s]:
            self._expired[handle] = self._handles[handle].tenant
            self._drop(handle)
        while len(self._expired) > MOST_REMEMBERED:
            self._expired.popitem(last=False)

    def _drop(self, handle: str) -> None:
        self._give_up(self._handles.pop(handle))
        self._count()

    def _give_up(self, one: _Handle) -> None:
        if one.kv is not None:
            one.kv.close()
        one.kv = None

    def _cut(self, one: _Handle, length: int) -> None:
        if one.kv is None:
            return
        try:
            one.kv.truncate(length)
        except TruncateError:
            self._give_up(one)

    def _pinned(self, one: _Handle) -> bool:
        return one.pinned_until_s > self._clock()

    def _info(self, handle: str, one: _Handle) -> HandleInfo:
        groups = self._executor.layout.groups
        pages = one.kv.pages() if one.kv is not None else ()
        return HandleInfo(
            id=handle,
            tokens=len(one.ids),
            resident=one.kv is not None,
            pinned=self._pinned(one),
            expires_in_s=one.expires_s - self._clock(),
            kv_bytes=sum(len(each) * group.shape.page_bytes for each, group in zip(pages, groups, strict=False)),
            maker=one.maker,
        )

    def _identity(self, tenant: str, maker: str, origin: str = EXACT) -> Identity:
        """Whose KV this is, and how it was made; a tenant's name may be a secret, so a file has its hash."""
        salt = hashlib.sha256(tenant.encode("utf-8", "surrogatepass")).hexdigest() if tenant else ""
        return replace(self._executor.pool.identity(), salt=salt, adapter=maker, origin=origin)

    def _room(self) -> int:
        with self._executor.create_kv_cache() as empty:
            return empty.capacity

    def _count(self) -> None:
        if self._metrics is not None:
            self._metrics.set(HANDLES, len(self._handles))


def check_loan(loan: Loan, adapter: Adapter, adapters: Adapters) -> None:
    """Raise unless a handle's tokens were read by what a request runs on."""
    begins = adapter.begins if isinstance(adapter, Adapted) else 0
    wanted = made_by(adapters.identity(adapter), begins) if len(loan.tokens) > begins else BASE
    if loan.maker != wanted:
        raise InputError(
            f"this KV handle was made with {loan.maker[:80]!r} and the request needs {wanted[:80]!r}; "
            "give the adapter and scale it was made with, or create another handle"
        )


def _reads(kv: KVCache, handle: _Handle) -> bool:
    return kv.row(0).ids == handle.ids and kv.maker == handle.maker


def _pages(handles: Sequence[_Handle]) -> int:
    """Pages that these handles hold of the fullest group, shared ones once."""
    held = [one.kv.pages() for one in handles if one.kv is not None]
    return max((len({page for pages in group for page in pages}) for group in zip(*held, strict=True)), default=0)


def _seconds(value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ParamError("ttl_s", f"must be a finite number of seconds above 0, not {value!r}")
    return float(value)
