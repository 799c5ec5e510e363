"""A record that is loading: layers arrive in order from the tiers, each verified before it is handed out.

If a tier fails or is late in the middle of a record, the next tier continues from the missing layer. When no tier is
left, the rest of the record is a miss. Refuses to know what the tiers are.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..errors import BlobError, InputError, ParamError, StoreError, StoreMiss, Unsupported
from ..kv.layout import KVLayout
from ..kv.row import EMBEDDED, RowImage, maker_parts
from ..kv.row_states import RowStateImages
from ..metrics import Metrics
from ..ops.contract import KeysValues
from .address import Address, tokens_of
from .channel import FIRST, TierChannel
from .codec_registry import codec_named
from .codecs import Codec
from .counters import HITS, LOOKUP_S, MISSES, REFUSED
from .layer import LayerKV, stacked
from .memory import MemoryEntry
from .record import RecordHeader, read_content, read_header, read_layer
from .tier import RecordReader


@dataclass(frozen=True, slots=True)
class LookupContext:
    """What all lookups of one record kind share."""

    channels: tuple[TierChannel, ...]
    codec: Codec
    metrics: Metrics
    secret: bytes | None
    lookup_s: float  # to a trusted header
    layer_s: float  # for each layer from then on
    found: Callable[[MemoryEntry, TierChannel], None]  # called once a whole record has been loaded

    def key(self, address: Address) -> bytes:
        """The key of a record in this store: a lossy codec and a secret have keys of their own."""
        codec = self.codec.name.encode() if self.codec.lossy else b""
        return address.key_under(codec, b"" if self.secret is None else self.secret)


class Loading:
    """One lookup. Methods may be called from any thread; early layers can be used while later ones load."""

    def __init__(self, address: Address, context: LookupContext, started: bool = True) -> None:
        self.address = address
        self._context = context
        self._change = threading.Condition()
        self._began_s = time.monotonic()
        self._layers: list[LayerKV | bytes | None] = [None] * len(address.form)
        self._firsts: tuple[int, ...] | None = None  # known with the first header that can be trusted
        self._tier = ""
        self._reason = ""
        self._doubt = ""  # why a tier that had something was not used
        self._next = 0
        self._channel = -1
        self._reader: RecordReader | None = None
        self._header: RecordHeader | None = None
        self._codec = context.codec  # the record's own: exact ones may differ from the store's
        self._asked_s: float | None = None  # since when a caller waits for layers that are not here
        self._heard_s = self._began_s  # when something of it came
        self._watchers: list[tuple[int, Callable[[], None]]] = []
        self._wait: Callable[[], None] = lambda: None  # until numbers that a device copies are there
        if started:
            self._next_channel()

    @classmethod
    def ready(cls, entry: MemoryEntry, context: LookupContext, tier: str = "memory") -> Loading:
        """A lookup that is complete."""
        made = cls(entry.address, context, started=False)
        made._layers = list(entry.layers)
        made._firsts, made._tier, made._next = entry.address.firsts, tier, len(entry.layers)
        made._wait = entry.wait
        return made

    # Asking.

    @property
    def lossy(self) -> bool:
        """Whether the layers are rounded; a record that is not is exact to the bit."""
        return self._context.codec.lossy

    @property
    def tier(self) -> str:
        """Where it was found; empty as long as it was not."""
        return self._tier

    @property
    def reason(self) -> str:
        """Why it is a miss; empty as long as it is none."""
        return self._reason

    @property
    def layers_ready(self) -> int:
        """How many layers, from the first on, can be had without waiting."""
        with self._change:
            return next((i for i, one in enumerate(self._layers) if one is None), len(self._layers))

    def settled(self, layers: int = 0) -> bool:
        """Whether so many layers are loaded or a miss; with 0, whether hit or miss is known. Never waits.

        The deadline runs as if the caller waited: after it, what is missing counts as a miss.
        """
        with self._change:
            if self._settled(layers):
                return True
            if self._left_s() > 0:
                return False
        self._give_up()
        return True

    def patience_s(self, layers: int = 0) -> float:
        """Seconds until `settled` is true at the latest; 0 if it is already."""
        with self._change:
            return 0.0 if self._settled(layers) else max(0.0, self._left_s())

    def settle(self, layers: int = 0) -> None:
        """Wait until `settled`, at most until the deadline."""
        while not self.settled(layers):
            with self._change:
                self._change.wait_for(lambda: self._settled(layers), max(0.0, self._left_s()))

    def watch(self, notify: Callable[[], None], layers: int = 0) -> None:
        """Call `notify`, from any thread, at each change once `layers` layers are loaded, or on a miss."""
        with self._change:
            self._watchers.append((layers, notify))

    def hit(self) -> bool:
        """Whether the record was found and its header and tokens match; waits for that up to the deadline."""
        self.settle()
        return not self._reason

    def layer(self, index: int) -> LayerKV:
        """One layer; waits for it, and raises StoreMiss if it does not come."""
        if not 0 <= index < len(self._layers):
            raise InputError(f"layer {index} does not exist; this record has layers 0 to {len(self._layers) - 1}")
        if self._layers[index] is None:
            self.settle(index + 1)
        found = self._layers[index]
        if found is None:
            raise StoreMiss(self._reason)
        self._wait()
        return found if isinstance(found, LayerKV) else self._decode(index, found)

    def wait(self) -> bool:
        """Wait for the whole record; whether all of it came."""
        try:
            for index in range(len(self._layers)):
                if self._layers[index] is None:
                    self.layer(index)
        except StoreMiss:
            return False
        return self.hit()

    def layers(self) -> tuple[LayerKV, ...]:
        """All layers, or StoreMiss."""
        return tuple(self.layer(index) for index in range(len(self._layers)))

    def image(self, layout: KVLayout) -> RowImage:
        """The row of a cache that was stored, or StoreMiss."""
        layers = self.layers()
        assert self._firsts is not None
        groups, firsts = [], []
        for group in range(len(layout.groups)):
            own = [layers[index] for index in layout.places_in(group)]
            starts = {self._firsts[index] for index in layout.places_in(group)}
            if len(starts) != 1:
                raise StoreMiss("firsts")
            firsts.append(starts.pop())
            groups.append(KeysValues(*map(stacked, zip(*(one.parts for one in own), strict=True))))
        states = self._states(layout.places_in(layout.state_group), layers) if layout.recurrent is not None else None
        return replace(row_image(self.address, tuple(firsts), tuple(groups)), states=states)

    def _states(self, places: Sequence[int], layers: Sequence[LayerKV]) -> RowStateImages:
        """The recurrent state at the end, if the record has one."""
        assert self._firsts is not None
        own = [layers[index] for index in places]
        numbers = KeysValues(stacked([one.keys for one in own]), stacked([one.values for one in own]))
        there = {self._firsts[index] for index in places} == {self.address.tokens - 1}
        return RowStateImages((self.address.tokens,) if there else (), numbers)

    def cancel(self) -> None:
        """Stop loading: the caller does not need the rest."""
        self._fail("cancelled")

    def _decode(self, index: int, data: bytes) -> LayerKV:
        assert self._firsts is not None
        tokens = self.address.tokens - self._firsts[index]
        return self._context.codec.decode(data, self.address.form[index], tokens)

    def _settled(self, layers: int) -> bool:
        here = self._firsts is not None and all(one is not None for one in self._layers[:layers])
        return here or bool(self._reason)

    def _left_s(self) -> float:
        """Seconds until the deadline; once the header is there, counted from the first request or the latest layer."""
        now_s = time.monotonic()
        if self._firsts is None:
            return self._context.lookup_s - (now_s - self._began_s)
        self._asked_s = now_s if self._asked_s is None else self._asked_s
        return self._context.layer_s - (now_s - self._since_s())

    def _since_s(self) -> float:
        """When the current wait began."""
        return self._began_s if self._asked_s is None else max(self._asked_s, self._heard_s)

    def _notify_watchers(self) -> None:
        """Notify the watchers of a change; outside of the lock, since they may call back."""
        ready = self.layers_ready
        for layers, notify in tuple(self._watchers):
            if ready >= layers or self._reason:
                notify()

    # Loading; from here on in a channel's threads.

    def _next_channel(self) -> None:
        self._close_reader()
        while self._channel + 1 < len(self._context.channels):
            self._channel += 1
            channel = self._context.channels[self._channel]
            reason = "down"
            if channel.is_open("read"):
                if channel.read(FIRST, self._step):
                    return
                reason = "closed"
            self._doubt = self._doubt or reason
            self._context.metrics.add(REFUSED, tier=channel.name, reason=reason)
        self._fail(self._doubt or "absent")

    def _step(self) -> None:
        """One unit of work: the header, or the next layer."""
        channel = self._context.channels[self._channel]
        if self._reason:
            self._close_reader()
            return
        try:
            more = channel.guarded("read", self._begin if self._header is None else self._load)
        except (BlobError, StoreError) as error:
            self._refused(channel, error)
        except Exception:
            self._refused(channel, StoreError("error", "the tier failed in an unexpected way"))
            raise
        else:
            if more:
                self._go_on(channel)
            else:
                self._next_channel()

    def _go_on(self, channel: TierChannel) -> None:
        done = self._next == len(self._layers)
        if done or channel.busy:
            self._let_go()
        if not done and not channel.read(self._next, self._step):
            self._refused(channel, StoreError("closed", "the store is closed"))

    def _begin(self) -> bool:
        """Open the record and verify its header; False if the tier has no record."""
        context, channel = self._context, self._context.channels[self._channel]
        reader = channel.tier.open(context.key(self.address))
        self._reader = reader
        if reader is None or reader.nbytes < 0:
            return False
        header = read_header(reader.read, reader.nbytes, context.secret)
        read_content(reader.read, header, self.address)
        self._codec = _codec(header, context.codec)
        if self._firsts is not None and header.firsts != self._firsts:
            raise BlobError("span", "two tiers hold different parts of this record")
        with self._change:
            self._header, self._firsts = header, header.firsts
            if not self._tier:
                context.metrics.observe(LOOKUP_S, time.monotonic() - self._began_s, tier=channel.name)
            self._tier, self._heard_s = channel.name, time.monotonic()
            self._change.notify_all()
        self._notify_watchers()
        return True

    def _load(self) -> bool:
        assert self._header is not None
        if self._reader is None:  # frames are compared with the header: another record in its place is noticed
            channel = self._context.channels[self._channel]
            self._reader = channel.tier.open(self._context.key(self.address))
            if self._reader is None:
                raise StoreError("absent", "the record was removed while it was read")
        data, layer = read_layer(self._reader.read, self._header, self._codec, self._next)
        kept = bytes(data) if self._context.codec.lossy else layer
        if self._next == len(self._layers) - 1:  # a caller that has the last layer also finds the record in memory
            self._finish((*(one for one in self._layers if one is not None), kept))
        with self._change:
            self._layers[self._next] = kept
            self._next, self._heard_s = self._next + 1, time.monotonic()
            self._change.notify_all()
        self._notify_watchers()
        return True

    def _refused(self, channel: TierChannel, error: BlobError | StoreError) -> None:
        reason = error.field if isinstance(error, BlobError) else error.reason
        self._doubt = reason
        self._context.metrics.add(REFUSED, tier=channel.name, reason=reason)
        if isinstance(error, BlobError):  # it would be refused every time: removed, so that a good one can be written
            key = self._context.key(self.address)
            channel.later(lambda tier: tier.discard(key))
        self._next_channel()

    def _finish(self, layers: tuple[LayerKV | bytes, ...]) -> None:
        channel = self._context.channels[self._channel]
        if not self._reason:
            self._context.metrics.add(HITS, tier=channel.name, kind=self.address.kind.value)
        assert self._firsts is not None
        self._context.found(
            MemoryEntry(replace(self.address, firsts=self._firsts), self._context.codec, layers), channel
        )

    def _give_up(self) -> None:
        """The deadline is over."""
        if self._fail("deadline"):
            self._context.channels[self._channel].report_timeout(self._since_s())
            if (reader := self._reader) is not None:
                reader.abort()

    def _fail(self, reason: str) -> bool:
        with self._change:
            if self._reason or self._next == len(self._layers):
                return False
            self._reason = reason
            self._change.notify_all()
        if reason != "cancelled":
            self._context.metrics.add(MISSES, reason=reason)
            self._context.metrics.observe(LOOKUP_S, time.monotonic() - self._began_s, tier="none")
        self._notify_watchers()
        return True

    def _let_go(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = None

    def _close_reader(self) -> None:
        self._let_go()
        self._header = None


def _codec(header: RecordHeader, wanted: Codec) -> Codec:
    """The codec of a record, if it is as exact as the one that is wanted."""
    try:
        own = codec_named(header.codec)
    except ParamError:
        raise BlobError("codec", "not one that is known here") from None
    except Unsupported as error:  # others can read it
        raise StoreError("codec", str(error)) from error
    if own.lossy != wanted.lossy or (own.lossy and own.name != wanted.name):
        raise BlobError("codec", "this record is not as exact as the one that was asked for")
    return own


def row_image(address: Address, firsts: tuple[int, ...], groups: tuple[KeysValues, ...]) -> RowImage:
    """The row up to the end of a record, of which it holds these groups from these positions on."""
    tokens = tokens_of(address.content)
    ids = array("q", [token if isinstance(token, int) else EMBEDDED for token in tokens])
    embeds = {place: token for place, token in enumerate(tokens) if isinstance(token, bytes)}
    return RowImage(ids, embeds, firsts, groups, address.identity.origin, *maker_parts(address.identity.adapter))
