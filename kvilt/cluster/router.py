"""The router: sends each request to the replica that is expected to give its first token first.

It knows which prefixes each replica has, what it was asked to do and how fast it was so far. All of it comes from KV
events and from the requests themselves, so a router that starts again knows it after a snapshot. Plain code: it refuses
to know HTTP, Ray, sockets and clocks; times are given.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..errors import InputError, ParamError
from ..server.kv_events.messages import KVEvent
from .prefix_directory import MOST_SLOTS, PrefixDirectory
from .prefix_hash import PrefixHasher, Tokens
from .transfer_speed import TransferSpeed

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """What a router assumes until it has measured, and how long it remembers."""

    block_tokens: int = 32
    prefill_tokens_per_s: float = 2000.0  # of a replica that has not answered yet
    decode_tokens: float = 8.0  # work that a request in decoding puts before a prompt, in tokens of prefill
    transfer_bytes_per_s: float = 2e8  # of KV between replicas, until it was measured
    transfer_latency_s: float = 0.02  # of one transfer, however small
    transfer_again_s: float = 30.0  # after so long without a transfer, the measured speed is not believed any more
    work: float = 3.0  # part of the seconds of computing that is added to a score: requests behind it wait for them
    tie: float = 0.05  # scores that differ by less than this part are equal, and the load decides
    expected_s: float = 10.0  # how long a request counts as having left its prompt's KV, before an event says so
    most_named: int = 1 << 20  # handles, sessions and documents

    def __post_init__(self) -> None:
        if self.prefill_tokens_per_s <= 0 or self.expected_s <= 0 or self.block_tokens < 1:
            raise ParamError("router", "speeds, times and block sizes are above 0")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What decides where a request goes."""

    tokens: Tokens = ()
    adapter: str | None = None
    salt: str = ""
    names: tuple[str, ...] = ()  # handles and sessions that it begins with: their home serves it while it lives
    documents: tuple[tuple[str, int], ...] = ()  # hash and number of tokens of each


@dataclass(slots=True, eq=False)
class Ticket:
    """A request on its way through a replica; the caller reports its first token and its end."""

    replica: str
    slot: int
    tokens: int  # to compute
    cached: int  # of the prompt, expected to be there
    ahead: float  # tokens of work before it
    began_s: float
    expected_s: float  # to its first token
    source: str | None = None  # the replica whose KV it takes first
    moved: int = 0  # tokens of it
    reach: int = 0  # tokens of the prompt that are there when that is done
    started: bool = False
    ended: bool = False


@dataclass(slots=True)
class _Expected:
    """Blocks of requests that were sent lately: their KV will be there before an event says so."""

    now: dict[int, int] = field(default_factory=dict)  # slot by key
    before: dict[int, int] = field(default_factory=dict)
    since_s: float = 0.0

    def slot(self, key: int) -> int | None:
        """The replica that the last request with this block went to."""
        return self.now.get(key, self.before.get(key))


@dataclass(frozen=True, slots=True)
class _Moves:
    """What each replica would get from the one that has the most of a prompt."""

    source: int
    tokens: Floats
    seconds: Floats


class Router:
    """Chooses replicas. Not for several threads at once."""

    def __init__(self, config: RouterConfig | None = None) -> None:
        self.config = config or RouterConfig()
        self.hasher = PrefixHasher(self.config.block_tokens)
        self.directory = PrefixDirectory(self.hasher)
        self._slots: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._alive = 0  # bits
        self._s_per_token: Floats = np.zeros(0)
        self._backlog: Floats = np.zeros(0)  # tokens of work, of requests without a first token and of those with one
        self._closed: Floats = np.zeros(0)  # infinite for slots without a replica
        self._expected = _Expected()
        self._homes: OrderedDict[str, int] = OrderedDict()
        self._documents: OrderedDict[str, int] = OrderedDict()  # bits of slots by hash
        self._versions: dict[int, str] = {}  # of models, by slot
        self.transfers = TransferSpeed(self.config.transfer_bytes_per_s, self.config.transfer_again_s)
        self.token_bytes = 0.0  # KV of one token; 0: KV does not move between replicas

    # Replicas.

    @property
    def replicas(self) -> list[str]:
        """The names of all replicas that requests may go to."""
        return list(self._slots)

    def add(self, replica: str, version: str = "") -> None:
        """Requests may go to this replica from now on; KV moves only while all replicas have one version."""
        if replica in self._slots:
            return
        slot = next(at for at in range(MOST_SLOTS + 1) if at not in self._names)
        if slot == MOST_SLOTS:
            raise InputError(f"a router has {MOST_SLOTS} replicas at the most")
        self._grow(slot + 1)
        self._slots[replica], self._names[slot] = slot, replica
        self._versions[slot] = version
        self._alive |= 1 << slot
        measured = self._s_per_token[self._closed == 0]
        self._s_per_token[slot] = measured.mean() if len(measured) else 1 / self.config.prefill_tokens_per_s
        self._backlog[slot] = self._closed[slot] = 0.0

    def remove(self, replica: str) -> None:
        """The replica is gone, and all that it had with it."""
        slot = self._slots.pop(replica, None)
        if slot is None:
            return
        del self._names[slot], self._versions[slot]
        self._alive &= ~(1 << slot)
        self._closed[slot] = np.inf
        self.directory.clear(slot)
        for names in (self._expected.now, self._expected.before, self._homes):
            for name in [name for name, home in names.items() if home == slot]:
                del names[name]  # type: ignore[arg-type]
        for name, slots in list(self._documents.items()):
            self._documents[name] = slots & ~(1 << slot)

    def _grow(self, count: int) -> None:
        more = count - len(self._closed)
        if more > 0:
            self._s_per_token = np.append(self._s_per_token, np.zeros(more))
            self._backlog = np.append(self._backlog, np.zeros(more))
            self._closed = np.append(self._closed, np.full(more, np.inf))

    # What replicas have.

    def apply(self, replica: str, events: Iterable[KVEvent]) -> None:
        """KV events of a replica; InputError: a snapshot is needed. Events of a replica that is gone are dropped."""
        if replica in self._slots:
            self.directory.apply(self._slots[replica], events)

    def clear(self, replica: str) -> None:
        """Forget the prefixes of a replica: a snapshot comes."""
        if replica in self._slots:
            self.directory.clear(self._slots[replica])

    def known(self, replica: str) -> int:
        """How many blocks a replica has."""
        return self.directory.known(self._slots[replica]) if replica in self._slots else 0

    def settle(self, name: str, replica: str) -> None:
        """A handle or a session has its home at a replica."""
        if replica in self._slots:
            _remember(self._homes, name, self._slots[replica], self.config.most_named)

    def unsettle(self, name: str) -> None:
        """A handle or a session is no more."""
        self._homes.pop(name, None)

    def home(self, name: str) -> str | None:
        """The replica that a handle or a session is at; None: no living one is known."""
        slot = self._homes.get(name)
        return None if slot is None else self._names[slot]

    # Requests.

    def route(self, prompt: Prompt, now_s: float, avoid: Iterable[str] = ()) -> Ticket:
        """The replica for a request. `avoid` are those that failed it before; InputError where none is left."""
        closed = self._closed
        if avoided := [self._slots[name] for name in avoid if name in self._slots]:
            closed = closed.copy()
            closed[avoided] = np.inf
        if not len(closed) or np.isinf(closed).all():
            raise InputError("no replica is there that could take the request")
        keys = self.hasher.keys(prompt.tokens, self.hasher.scope(prompt.adapter, prompt.salt))
        held = self._held(keys)
        cached = self._cached(held, keys, now_s)
        moves = self._moves(np.where(np.isinf(closed), 0.0, held), cached, now_s)
        compute = self._to_compute(prompt, cached + moves.tokens)
        scores = (self._backlog + compute * (1 + self.config.work)) * self._s_per_token + moves.seconds + closed
        slot = self._choice(prompt, scores, compute)
        ticket = self._ticket(prompt, keys, slot, int(cached[slot]), float(compute[slot]), now_s)
        if moves.tokens[slot]:
            ticket.source, ticket.moved = self._names[moves.source], int(moves.tokens[slot])
            ticket.expected_s += float(moves.seconds[slot])
        ticket.reach = ticket.cached + ticket.moved
        return ticket

    def _held(self, keys: list[int]) -> Floats:
        """How many tokens of the prompt each replica has by its events."""
        held = np.zeros(len(self._closed))
        for blocks, slots in self.directory.match(keys, self._alive):
            held[_slots_of(slots)] = blocks * self.config.block_tokens
        return held

    def _moves(self, held: Floats, cached: Floats, now_s: float) -> _Moves:
        """For each replica, how many tokens of KV another one would send it, and how long that takes.

        0 where computing them is as fast.
        """
        source = int(held.argmax())
        nothing = np.zeros(len(held))
        one_version = len(set(self._versions.values())) == 1
        if not self.token_bytes or not held[source] or not one_version or self.transfers.resting(now_s):
            return _Moves(source, nothing, nothing)
        more = np.maximum(held[source] - cached, 0.0)
        seconds = more * (self.token_bytes / self.transfers.speed(now_s)) + self.config.transfer_latency_s
        pays = seconds < more * self._s_per_token
        return _Moves(source, more * pays, seconds * pays)

    def _cached(self, held: Floats, keys: list[int], now_s: float) -> Floats:
        """How many tokens of the prompt each replica has, or will have when requests before it are done."""
        cached = held.copy()
        size = self.config.block_tokens
        self._expect_since(now_s)
        expected = self._expected
        if keys and (slot := expected.slot(keys[0])) is not None:
            count = bisect_left(keys, True, 1, key=lambda key: expected.slot(key) != slot)
            cached[slot] = max(cached[slot], count * size)
        return cached

    def _to_compute(self, prompt: Prompt, cached: Floats) -> Floats:
        """Tokens of work until the first token, on each replica."""
        compute: Floats = np.maximum(len(prompt.tokens) - cached, 1.0)
        for name, tokens in prompt.documents:
            missing = np.full(len(compute), float(tokens))
            missing[_slots_of(self._documents.get(name, 0))] = 0.0
            compute += missing
        return compute

    def _choice(self, prompt: Prompt, scores: Floats, compute: Floats) -> int:
        for name in prompt.names:
            home = self._homes.get(name)
            if home is not None and np.isfinite(scores[home]):
                return home
        best = scores.min()
        equal = np.flatnonzero(scores <= best * (1 + self.config.tie))
        if len(equal) == 1:
            return int(equal[0])
        load = self._backlog[equal]
        least = equal[load <= load.min()]
        # Where the loads are equal too, the prompt decides: requests that are alike go to one replica.
        most = least[compute[least] <= compute[least].min()]
        start = hash(tuple(prompt.tokens[: self.config.block_tokens])) ^ hash(prompt.salt)
        return int(most[start % len(most)])

    def _ticket(self, prompt: Prompt, keys: list[int], slot: int, cached: int, compute: float, now_s: float) -> Ticket:
        ahead = float(self._backlog[slot])
        expected_s = float((ahead + compute) * self._s_per_token[slot])
        ticket = Ticket(self._names[slot], slot, int(compute), cached, ahead, now_s, expected_s)
        self._backlog[slot] += ticket.tokens
        self._expected.now.update(dict.fromkeys(keys, slot))
        for name, _ in prompt.documents:
            held = self._documents.get(name, 0) | (1 << slot)
            _remember(self._documents, name, held, self.config.most_named)
        for name in prompt.names:
            _remember(self._homes, name, slot, self.config.most_named)
        return ticket

    def _expect_since(self, now_s: float) -> None:
        """Blocks that are expected are forgotten after `expected_s`, at the latest after twice as long."""
        expected = self._expected
        if now_s - expected.since_s >= self.config.expected_s:
            expected.before = expected.now if now_s - expected.since_s < 2 * self.config.expected_s else {}
            expected.now, expected.since_s = {}, now_s

    def moved(self, ticket: Ticket, nbytes: int, seconds: float, now_s: float) -> None:
        """KV of so many bytes was moved for a request, in so many seconds; 0 bytes: that failed."""
        self.transfers.add(nbytes, seconds, now_s)
        ticket.began_s = now_s  # what follows says how fast the replica computes

    def first_token(self, ticket: Ticket, now_s: float) -> None:
        """The replica has begun to answer: what it took says how fast it is."""
        if ticket.started or ticket.ended or self._names.get(ticket.slot) != ticket.replica:
            return
        ticket.started = True
        self._backlog[ticket.slot] += self.config.decode_tokens - ticket.tokens
        work = ticket.tokens + ticket.ahead
        if work >= self.config.block_tokens:
            share = min(0.3, work / 4096)
            measured = max(now_s - ticket.began_s, 1e-6) / work
            self._s_per_token[ticket.slot] += share * (measured - self._s_per_token[ticket.slot])

    def end(self, ticket: Ticket) -> None:
        """The request is over, or its client left."""
        if ticket.ended:
            return
        ticket.ended = True
        if self._names.get(ticket.slot) == ticket.replica:
            work = self.config.decode_tokens if ticket.started else ticket.tokens
            self._backlog[ticket.slot] = max(0.0, self._backlog[ticket.slot] - work)

    def load(self) -> dict[str, tuple[float, float]]:
        """For each replica its backlog in tokens, and how many tokens it computes in a second."""
        return {
            name: (float(self._backlog[slot]), float(1 / self._s_per_token[slot])) for name, slot in self._slots.items()
        }


def _slots_of(bits: int) -> npt.NDArray[np.int64] | int:
    """Slots as an index of arrays."""
    if bits.bit_count() == 1:
        return bits.bit_length() - 1
    if not bits:
        return np.empty(0, np.int64)
    data = np.frombuffer(bits.to_bytes(bits.bit_length() + 7 >> 3, "little"), np.uint8)
    return np.flatnonzero(np.unpackbits(data, bitorder="little"))


def _remember(names: OrderedDict[str, int], name: str, value: int, most: int) -> None:
    names[name] = value
    names.move_to_end(name)
    if len(names) > most:
        names.popitem(last=False)
