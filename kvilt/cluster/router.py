"""The router: sends each request to the replica that is expected to give its first token first.

It knows which prefixes each replica has, what it was asked to do and how fast it was so far. All of it comes from KV
events and from the requests themselves, so a router that starts again knows it after a snapshot. Plain code: it refuses
to know HTTP, Ray, sockets and clocks; times are given.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..errors import InputError
from ..server.kv_events.messages import KVEvent
from .prefix_directory import MOST_SLOTS, PrefixDirectory
from .prefix_hash import PrefixHasher
from .ticket import Prompt as Prompt
from .ticket import RouterConfig as RouterConfig
from .ticket import Ticket as Ticket
from .transfer_speed import TransferSpeed

Floats = npt.NDArray[np.float64]


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
        self._decoding: Floats = np.zeros(0)  # requests with a first token
        self._closed: Floats = np.zeros(0)  # infinite for slots without a replica
        self._apart: Floats = np.zeros(0)  # infinite for replicas that only compute prompts for others
        self._suspect: Floats = np.zeros(0)  # infinite for those that may be gone
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

    def add(self, replica: str, version: str = "", prefill_only: bool = False) -> None:
        """Requests may go to this replica from now on; KV moves only while all replicas have one version.

        A replica with `prefill_only` computes prompts, which others go on with.
        """
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
        self._backlog[slot] = self._decoding[slot] = self._closed[slot] = self._suspect[slot] = 0.0
        self._apart[slot] = np.inf if prefill_only else 0.0

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

    def suspect(self, replica: str, doubtful: bool) -> None:
        """A replica may be gone, or is back: it keeps what it has, but requests go to others where there are any."""
        if replica in self._slots:
            self._suspect[self._slots[replica]] = np.inf if doubtful else 0.0

    def _grow(self, count: int) -> None:
        more = count - len(self._closed)
        if more > 0:
            self._s_per_token = np.append(self._s_per_token, np.zeros(more))
            self._backlog = np.append(self._backlog, np.zeros(more))
            self._decoding = np.append(self._decoding, np.zeros(more))
            self._apart = np.append(self._apart, np.zeros(more))
            self._suspect = np.append(self._suspect, np.zeros(more))
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
        closed = self._closed_to(avoid)
        keys = self.hasher.keys(prompt.tokens, self.hasher.scope(prompt.adapter, prompt.salt))
        held = self._held(keys)
        cached = self._cached(held, keys, now_s)
        moves = self._moves(np.where(np.isinf(closed), 0.0, held), cached, now_s)
        compute = self._to_compute(prompt, cached + moves.tokens)
        apart = self._apart if np.isfinite(closed + self._apart).any() else np.zeros(len(closed))
        scores = (self._backlog + compute * (1 + self.config.work)) * self._s_per_token + moves.seconds + closed + apart
        slot = self._choice(prompt, scores, compute)
        source, moved, moving_s = moves.source, float(moves.tokens[slot]), float(moves.seconds[slot])
        computed = None
        if self._apart.any():
            computed = self._prefill_elsewhere(prompt, slot, cached, float(compute[slot]), moving_s, closed, now_s)
        if computed is not None:
            size = self.config.block_tokens
            whole = (len(prompt.tokens) - 1) // size * size
            source, moved = computed.slot, whole - float(cached[slot])
            moving_s = self._seconds_to_move(moved, now_s)
            compute[slot] = max(1.0, len(prompt.tokens) - whole)
        ticket = self._ticket(prompt, keys, slot, int(cached[slot]), float(compute[slot]), now_s)
        if moved:
            ticket.source, ticket.moved, ticket.prefill = self._names[source], int(moved), computed
            ticket.expected_s += moving_s + (0.0 if computed is None else computed.expected_s)
        ticket.reach = ticket.cached + ticket.moved
        return ticket

    def _closed_to(self, avoid: Iterable[str]) -> Floats:
        """Infinite for each replica that a request cannot go to; InputError where none is left."""
        closed = self._closed
        if avoided := [self._slots[name] for name in avoid if name in self._slots]:
            closed = closed.copy()
            closed[avoided] = np.inf
        if not len(closed) or np.isinf(closed).all():
            raise InputError("no replica is there that could take the request")
        sure = closed + self._suspect
        return closed if np.isinf(sure).all() else sure

    def _prefill_elsewhere(
        self, prompt: Prompt, slot: int, cached: Floats, compute: float, moving_s: float, closed: Floats, now_s: float
    ) -> Ticket | None:
        """A ticket at a replica that only computes prompts, if its KV is expected earlier than if `slot` computed it.

        Computing beside requests that decode counts more: each of them waits for it.
        """
        if not self.token_bytes or len(set(self._versions.values())) != 1 or self.transfers.resting(now_s):
            return None
        tokens, speed = len(prompt.tokens), self._s_per_token
        here_s = moving_s + compute * speed[slot] * (1 + self.config.interference * self._decoding[slot])
        here_s += self._backlog[slot] * speed[slot]
        only = np.where(np.isinf(self._apart), 0.0, np.inf) + closed
        work = np.maximum(tokens - cached, 1.0)
        there_s = (self._backlog + work) * speed + only
        best = int(there_s.argmin())
        if best == slot or there_s[best] + self._seconds_to_move(tokens - cached[slot], now_s) >= here_s:
            return None
        ahead = float(self._backlog[best])
        self._backlog[best] += int(work[best])
        expected_s = float(there_s[best])
        return Ticket(self._names[best], best, int(work[best]), int(cached[best]), ahead, now_s, expected_s)

    def _seconds_to_move(self, tokens: float, now_s: float) -> float:
        return tokens * self.token_bytes / self.transfers.speed(now_s) + self.config.transfer_latency_s

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
        if prompt.names and self.config.doors > 1:
            # Another door may be asked for the same name now. Both must choose alike, whatever each of them knows.
            open_slots = [int(slot) for slot in np.flatnonzero(np.isfinite(scores))]
            return max(open_slots, key=lambda slot: _rank(prompt.names[0], self._names[slot]))
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
        self._decoding[ticket.slot] += 1
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
            self._decoding[ticket.slot] -= ticket.started

    def load(self) -> dict[str, tuple[float, float]]:
        """For each replica its backlog in tokens, and how many tokens it computes in a second."""
        return {
            name: (float(self._backlog[slot]), float(1 / self._s_per_token[slot])) for name, slot in self._slots.items()
        }


def _rank(name: str, replica: str) -> bytes:
    """Of the replicas that are there, the one with the highest rank gets a name."""
    return hashlib.blake2b(f"{len(name)} {name} {replica}".encode("utf-8", "surrogatepass"), digest_size=8).digest()


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
