"""The store: writes KV under its content address, and finds it again in memory or in the tiers below.

No method waits for a tier unless the caller asks for an answer, and then only up to a deadline. What cannot be kept is
dropped and counted; what cannot be verified is a miss and counted. Refuses to know models, engines and requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from torch import Tensor

from ..errors import BlobError, ParamError, StoreError, renamed, warn_renamed
from ..kv.cache import KVCache
from ..kv.identity import Identity
from ..kv.layout import KVLayout
from ..kv.prefix import EvictedPage
from ..kv.row import EXACT, RowImage, Token
from ..metrics import Metrics
from .address import Address, Form, Kind, chunk_address, page_address, row_address, tokens_of
from .channel import QueuedWrite, TierChannel, TierFailure
from .codec_registry import codec_named
from .codecs import Codec, Raw
from .counters import BYTES, DROPPED, EVICTED, HITS, LOOKUPS, RECORDS, REFUSED, new_metrics
from .layer import LayerKV, check_layers, owned
from .loading import Loading, LookupContext
from .memory import MemoryEntry, MemoryTier
from .note_medium import NoteMedium
from .notes import HandleNotes, ResponseNotes, SessionNotes
from .page_record import page_firsts, page_layers
from .record import RecordInfo, pack, read_header, read_tokens
from .row_layers import per_layer, row_layers, state_tokens
from .tier import Budget, Tier, TierUsage

_MIN_SECRET_BYTES = 16
_NOTES_SHARE = 16  # one part in so many of a disk's budget, besides it, is for notes of handles; one for sessions
T = TypeVar("T")
NotesT = TypeVar("NotesT", HandleNotes, SessionNotes, ResponseNotes)


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Deadlines for callers, and bounds of the write queue."""

    lookup_s: float = 0.5  # until it is known whether a record is there
    layer_s: float = 2.0  # for each layer from then on
    queue_bytes: int = 256 << 20  # of records that wait to be written to one tier
    queue_records: int = 4096
    readers: int = 2  # threads that read from one tier
    cooldown_s: float = 1.0  # a failing tier is not called for so long, then for twice as long, up to 30 s
    close_s: float = 10.0  # for writing what is queued when the store is closed

    def __post_init__(self) -> None:
        for name in ("lookup_s", "layer_s", "queue_bytes", "queue_records", "readers", "cooldown_s", "close_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ParamError(name, f"must be a finite number above 0, not {getattr(self, name)!r}")


class Store:
    """KV by content. Close it, or use it as a context manager: closing writes what is queued."""

    def __init__(
        self,
        memory: Budget | None = None,
        tiers: Sequence[Tier] = (),
        *,
        codec: str = "raw",
        chunk_codec: str | None = None,
        secret: bytes | None = None,
        metrics: Metrics | None = None,
        limits: StoreLimits | None = None,
    ) -> None:
        """`codec` is for handles and prefixes and must be exact; chunks may have one that is not."""
        if secret is not None and len(secret) < _MIN_SECRET_BYTES:
            raise ParamError("secret", f"must have at least {_MIN_SECRET_BYTES} bytes")
        exact, chunks = codec_named(codec), codec_named(chunk_codec or codec)
        if exact.lossy:
            raise ParamError("codec", f"{codec} is lossy; handles and prefixes are exact. Use it as chunk_codec")
        self.metrics = metrics or new_metrics()
        self._limits = limits or StoreLimits()
        self._secret = secret
        self._memory = MemoryTier(memory or Budget(0))
        self._remembers = memory is not None
        own = self._limits
        self._channels = tuple(
            TierChannel(one, self.metrics, own.readers, own.queue_bytes, own.queue_records, own.cooldown_s, own.close_s)
            for one in tiers
        )
        self._contexts = {kind: self._context_of(chunks if kind is Kind.CHUNK else exact, secret) for kind in Kind}
        self._exact_chunks = self._context_of(Raw() if chunks.lossy else chunks, secret)

    def _context_of(self, codec: Codec, secret: bytes | None) -> LookupContext:
        limits = self._limits
        return LookupContext(
            self._channels, codec, self.metrics, secret, limits.lookup_s, limits.layer_s, self._promote
        )

    @property
    def limits(self) -> StoreLimits:
        """Deadlines and bounds of this store."""
        return self._limits

    @property
    def least_budget(self) -> Budget | None:
        """The budget of the smallest tier that outlives the process; None where there is no such tier."""
        return min((channel.tier.budget for channel in self._channels), key=lambda one: one.total_bytes, default=None)

    def last_failures(self) -> dict[str, TierFailure]:
        """The last failure of each tier that has had one."""
        found = {channel.name: channel.last_failure for channel in self._channels}
        return {name: failure for name, failure in found.items() if failure is not None}

    @property
    def has_memory(self) -> bool:
        """Whether it keeps records in host memory."""
        return self._remembers

    # Any record.

    def put(
        self,
        address: Address,
        layers: Sequence[LayerKV | tuple[Tensor, ...]],
        retain: bool = False,
        wait: Callable[[], None] = lambda: None,
    ) -> Loading:
        """Store the KV of an address, whose `firsts` say which positions it holds; returns it as a lookup would.

        The store takes the tensors over. A record with `retain` is evicted later than others. `wait` returns when a
        device has copied their numbers; it is called before they are read.
        """
        made, context = owned(layers), self._context_for(address)
        check_layers(made, address.form, [address.tokens - first for first in address.firsts])
        try:
            entry = self._entry(context, address, made, wait)
        except StoreError as error:  # KV that its codec cannot write; the caller can still use it
            self.metrics.add(DROPPED, tier="memory", reason=error.reason)
            return Loading.ready(MemoryEntry(address, Raw(), made, wait), replace(context, codec=Raw()))
        self._remember(context, entry, retain)
        for channel in self._channels:
            self._write(channel, context, entry, retain)
        return Loading.ready(entry, context)

    def open(self, address: Address) -> Loading:
        """Start a lookup; returns at once."""
        context = self._context_for(address)
        self.metrics.add(LOOKUPS, kind=address.kind.value)
        key = context.key(address)
        if (found := self._memory.get(key)) is None:
            return Loading(address, context)
        if not _answers(found.entry.address, address):
            self.metrics.add(REFUSED, tier="memory", reason="span")
            self._memory.discard(key)
            return Loading(address, context)
        self.metrics.add(HITS, tier="memory", kind=address.kind.value)
        if found.should_touch:
            for channel in self._channels:
                channel.later(lambda tier: tier.touch([key]))
        return Loading.ready(found.entry, context)

    def count_leading(self, addresses: Sequence[Address]) -> int:
        """How many of these, counted from the first without a gap, seem to be stored; waits up to `lookup_s`."""
        deadline_s = time.monotonic() + self._limits.lookup_s
        keys = [self._context_for(one).key(one) for one in addresses]
        there = [key in self._memory for key in keys]
        for channel in self._channels:
            unknown = [at for at, known in enumerate(there) if not known]
            if not unknown or not channel.is_open("read"):
                continue
            asked = [keys[at] for at in unknown]
            answer = self._answer(channel, channel.ask(lambda tier, asked=asked: tier.has(asked)), deadline_s)  # type: ignore[misc]
            for at, known in zip(unknown, answer or [], strict=False):
                there[at] = known
        return next((at for at, known in enumerate(there) if not known), len(there))

    def stored_tokens(self, kind: Kind, identity: Identity) -> Iterator[list[Token]]:
        """The tokens of every record of a kind and an identity in the tiers below, each tier's in turn.

        For an index of known chunks or handles after a restart. Reads every header, so it is work for a thread of its
        own; tokens that two tiers hold come twice, and what cannot be read is left out.
        """
        for channel in self._channels:
            try:
                for key in channel.tier.every_key():
                    content = self._content(channel, key, kind, identity)
                    if content is not None:
                        yield tokens_of(content)
            except StoreError as error:
                self.metrics.add(REFUSED, tier=channel.name, reason=error.reason)

    def reach(self, addresses: Sequence[Address]) -> int:
        """The old name of `count_leading`."""
        warn_renamed("Store.reach", "count_leading")
        return self.count_leading(addresses)

    def stored(self, kind: Kind, identity: Identity) -> Iterator[list[Token]]:
        """The old name of `stored_tokens`."""
        warn_renamed("Store.stored", "stored_tokens")
        return self.stored_tokens(kind, identity)

    def discard(self, address: Address) -> None:
        """Forget a record in every tier."""
        key = self._context_for(address).key(address)
        self._memory.discard(key)
        for channel in self._channels:
            channel.later(lambda tier: tier.discard(key))

    # Chunks, rows of caches, and pages of prefixes.

    def put_chunk(
        self,
        identity: Identity,
        tokens: Sequence[Token],
        layers: Sequence[LayerKV | tuple[Tensor, ...]],
        retain: bool = False,
    ) -> Loading:
        """Store a document's KV with keys before rotation, layer by layer [tokens, heads, dim], as computed on its own.

        Use what this returns, not what was given: a lossy codec rounds, and later lookups find the rounded KV.
        """
        made = [one if isinstance(one, LayerKV) else LayerKV(*one) for one in layers]
        return self.put(chunk_address(identity, tokens, tuple(one.form for one in made)), made, retain)

    def open_chunk(self, identity: Identity, tokens: Sequence[Token], form: Form) -> Loading:
        """Start the lookup of a document's KV; its layers arrive in order."""
        return self.open(chunk_address(identity, tokens, form))

    def put_cache(self, kv: KVCache, identity: Identity | None = None, retain: bool = False) -> list[Loading]:
        """Keep every row of a cache as a handle of its own, under the pool's identity or a narrower one."""
        identity = identity or kv.pool.identity()
        with kv.pool.lock:
            images = [row.image() for row in kv.rows()]
        return [self.put_image(identity, kv.layout, image, retain) for image in images]

    def put_image(self, identity: Identity, layout: KVLayout, image: RowImage, retain: bool = False) -> Loading:
        """Keep one row of a cache: blended KV under its recipe, an adapter's as its own, and neither as exact KV."""
        identity = replace(identity, adapter=image.maker)
        if image.origin != EXACT:
            identity = replace(identity, origin=image.origin)
        tokens = [image.embeds.get(at, token) for at, token in enumerate(image.ids)]
        firsts = (*image.firsts, image.length - state_tokens(image))
        address = row_address(identity, tokens, layout).with_firsts(per_layer(layout, firsts))
        return self.put(address, row_layers(layout, image), retain)

    def open_row(self, identity: Identity, layout: KVLayout, tokens: Sequence[Token]) -> Loading:
        """Start the lookup of a row of exactly these tokens; a cache is made from its `image(layout)`."""
        return self.open(row_address(identity, tokens, layout))

    def put_evicted(self, identity: Identity, layout: KVLayout, page: EvictedPage, retain: bool = False) -> Loading:
        """Store a page that the prefix index evicted; `page_addresses` finds it again."""
        own = replace(identity, adapter=page.scope.adapter, salt=page.scope.salt)
        address = page_address(own, page.tokens, layout, page.start)
        layers = page_layers(layout, address, page)
        return self.put(address.with_firsts(page_firsts(layout, page)), layers, retain, page.wait)

    # Life.

    def usage(self) -> dict[str, TierUsage]:
        """What each tier holds, as far as it knows; a tier that does not answer is left out."""
        deadline_s = time.monotonic() + self._limits.lookup_s
        found = {"memory": self._memory.usage()}
        asked = [
            (channel, channel.ask(lambda tier: tier.usage())) for channel in self._channels if channel.is_open("read")
        ]
        for channel, future in asked:
            if (usage := self._answer(channel, future, deadline_s)) is not None:
                found[channel.name] = usage
        return found

    @property
    def folder(self) -> Path | None:
        """Where the first tier that has a folder keeps its records, for what else belongs beside them."""
        return None if (found := self._foldered()) is None else found[0]

    def notes(self, model: str) -> HandleNotes | None:
        """Notes of a model's handles, beside the records of a tier that outlives the process; the caller closes them.

        That is the first one with a folder, or else a Redis server; None where there is neither.
        """
        return self._notes(HandleNotes, model)

    def session_notes(self, model: str) -> SessionNotes | None:
        """Notes of a model's sessions, likewise."""
        return self._notes(SessionNotes, model)

    def response_notes(self, model: str) -> ResponseNotes | None:
        """Notes of a model's stored responses, likewise."""
        return self._notes(ResponseNotes, model)

    def _notes(self, kind: Callable[..., NotesT], model: str) -> NotesT | None:
        found: tuple[Path | NoteMedium, Budget] | None = self._foldered() or self._note_server()
        if found is None:
            return None
        (place, budget), limits = found, self._limits
        return kind(
            place,
            model,
            self.metrics,
            most_bytes=budget.total_bytes // _NOTES_SHARE,
            secret=self._secret,
            rest_s=limits.cooldown_s,
            close_s=limits.close_s,
        )

    def _foldered(self) -> tuple[Path, Budget] | None:
        found = ((getattr(channel.tier, "folder", None), channel.tier.budget) for channel in self._channels)
        return next(((folder, budget) for folder, budget in found if isinstance(folder, Path)), None)

    def _note_server(self) -> tuple[NoteMedium, Budget] | None:
        found = ((getattr(channel.tier, "note_medium", None), channel.tier.budget) for channel in self._channels)
        return next(((medium, budget) for medium, budget in found if medium is not None), None)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until what was put so far is written or dropped; False where that takes longer."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        done = True
        for channel in self._channels:
            done &= channel.flush(None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
        return done

    def close(self) -> None:
        """Write what is queued, as far as time allows, and let the tiers go. Closing twice is fine."""
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # Inside.

    def _context_for(self, address: Address) -> LookupContext:
        context = self._contexts[address.kind]
        if context.codec.lossy and any(one.scaled for one in address.form):
            return self._exact_chunks  # rounded already
        return context

    def _entry(
        self, context: LookupContext, address: Address, layers: tuple[LayerKV, ...], wait: Callable[[], None]
    ) -> MemoryEntry:
        if not context.codec.lossy:
            return MemoryEntry(address, context.codec, layers, wait)
        wait()
        return MemoryEntry(address, context.codec, tuple(context.codec.encode(one) for one in layers))

    def _promote(self, entry: MemoryEntry, source: TierChannel) -> None:
        """Copy a record that was found below into every tier above, and mark it as used in its own."""
        context = self._context_for(entry.address)
        key = context.key(entry.address)
        self._remember(context, entry, False)
        for channel in self._channels[: self._channels.index(source)]:
            self._write(channel, context, entry, False)
        source.later(lambda tier: tier.touch([key]))

    def _remember(self, context: LookupContext, entry: MemoryEntry, retain: bool) -> None:
        if not self._remembers:
            return
        gone = self._memory.put(context.key(entry.address), entry, retain)
        if gone is None:
            self.metrics.add(DROPPED, tier="memory", reason="too_large")
            return
        usage = self._memory.usage()
        self.metrics.add(EVICTED, len(gone), tier="memory")
        self.metrics.set(BYTES, usage.nbytes, tier="memory")
        self.metrics.set(RECORDS, usage.records, tier="memory")

    def _write(self, channel: TierChannel, context: LookupContext, entry: MemoryEntry, retain: bool) -> None:
        address = entry.address

        def encode() -> list[bytes]:
            frames = [entry.frame(index) for index in range(len(entry.layers))]
            return pack(address, entry.codec, frames, context.secret)

        info = RecordInfo(address.owner, address.kind.value, retain)
        channel.write(QueuedWrite(context.key(address), entry.nbytes, info, encode))

    def _content(self, channel: TierChannel, key: bytes, kind: Kind, identity: Identity) -> bytes | None:
        if (reader := channel.tier.open(key)) is None:
            return None
        try:
            if reader.nbytes < 0:
                return None
            header = read_header(reader.read, reader.nbytes, self._contexts[kind].secret)
            return read_tokens(reader.read, header, kind, identity)
        except BlobError:
            return None  # a lookup of it reports the reason
        finally:
            reader.close()

    def _answer(self, channel: TierChannel, future: Future[T], deadline_s: float) -> T | None:
        """The tier's answer, or None after the deadline or an error, which its breaker counts."""
        try:
            return future.result(max(0.0, deadline_s - time.monotonic()))
        except FutureTimeout:
            future.cancel()
            channel.report_timeout(deadline_s - self._limits.lookup_s)
            self.metrics.add(REFUSED, tier=channel.name, reason="deadline")
        except StoreError as error:
            self.metrics.add(REFUSED, tier=channel.name, reason=error.reason)
        return None


def _answers(held: Address, asked: Address) -> bool:
    """Whether a record in memory matches the address, token by token, and holds all that is asked for."""
    same = held == asked.with_firsts(held.firsts)
    return same and all(first <= needed for first, needed in zip(held.firsts, asked.firsts, strict=True))


__getattr__ = renamed(__name__, {"Limits": "StoreLimits"})
