"""The router of kvilt over a discrete-event model of many replicas, beside other ways to choose a replica.

    python bench/cluster_sim.py [--replicas 8,64] [--requests 6000] [--load 0.7] [--json out.json]
    python bench/cluster_sim.py --scale [--replicas 1000] [--known 10000000]

The router is the code of `kvilt.cluster.router`, with real token ids, real KV events (they arrive 10 ms late) and its
own measurements of speed; the replicas are a model:

 prefill   one prompt at a time, first come first served, at --prefill tokens a second
 decode    --decode seconds a token; each request that decodes takes 1/256 of the prefill's speed
 transfer  --transfer bytes a second after 20 ms, 128 KiB a token, beside computing and without a queue
 cache     --cache blocks of 32 tokens, least recently used first, the ends of prefixes before their beginnings

Requests are turns of conversations. Their distributions: conversations arrive as a Poisson process; a conversation
belongs to one of 100 tenants (Zipf, exponent 1), each with a system prompt (log-normal, median 1,024 tokens, sigma
0.7); it has a geometric number of turns (mean 6); a question is log-normal (median 128, sigma 1), an answer too
(median 200, sigma 0.6); the next question comes after an exponential time (mean 15 s); one turn in ten goes back to an
earlier turn and forks there. The same requests, at the same times where they do not depend on answers, go through every
policy. The rate is --load of what the replicas could do if every prompt were computed once in one giant cache.

`--scale` fills one router with blocks of many replicas and measures the time to route a prompt of 8,000 tokens.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import resource
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvilt.cluster.prefix_hash import PrefixHasher
from kvilt.cluster.router import Prompt, Router, RouterConfig, Ticket
from kvilt.server.kv_events.messages import BlockRemoved, BlockStored, KVEvent

# ruff: noqa: ARG002 (a policy need not use all that it is told)

BLOCK = 32
EVENT_DELAY_S = 0.01
DECODE_SHARE = 1 / 256
TOKEN_BYTES = 131_072.0  # KV of a token of a model with 8 billion parameters, in 16 bits
TRANSFER_LATENCY_S = 0.02
VOCABULARY = 50_000


@dataclass(eq=False)
class Turn:
    """One request."""

    tenant: int
    tokens: Any  # np.uint32
    answer: Any
    after: Turn | None  # the turn whose end it waits for
    wait_s: float  # from that end, or from the start
    keys: list[int] = field(default_factory=list)
    then: list[Turn] = field(default_factory=list)


class Conversations:
    """Turns from the distributions above."""

    def __init__(self, seed: int) -> None:
        self.dice = np.random.default_rng(seed)
        self.systems = [self._text(1024, 0.7) for _ in range(100)]
        weights = 1 / np.arange(1, 101)
        self.popularity = weights / weights.sum()

    def _text(self, median: float, sigma: float) -> Any:
        count = max(1, int(median * np.exp(sigma * self.dice.standard_normal())))
        return self.dice.integers(0, VOCABULARY, min(count, 16 * int(median)), dtype=np.uint32)

    def make(self, requests: int, per_s: float) -> list[Turn]:
        """Conversations of about so many turns in all, and so many turns in a second."""
        made: list[Turn] = []
        now = 0.0
        while len(made) < requests:
            now += self.dice.exponential(6 / per_s)
            made += self._conversation(now)
        return made

    def _conversation(self, begin_s: float) -> list[Turn]:
        tenant = int(self.dice.choice(100, p=self.popularity))
        first = Turn(tenant, np.append(self.systems[tenant], self._text(128, 1)), self._text(200, 0.6), None, begin_s)
        turns = [first]
        for _ in range(int(self.dice.geometric(1 / 6)) - 1):
            back = len(turns) > 1 and self.dice.random() < 0.1
            origin = turns[int(self.dice.integers(len(turns)))] if back else turns[-1]
            tokens = np.concatenate([origin.tokens, origin.answer, self._text(128, 1)])
            if len(tokens) > 32_000:
                break
            turns.append(Turn(tenant, tokens, self._text(200, 0.6), turns[-1], self.dice.exponential(15)))
        for turn in turns[1:]:
            assert turn.after is not None
            turn.after.then.append(turn)
        return turns


class Replica:
    """A model of one engine."""

    def __init__(self, name: str, blocks: int) -> None:
        self.name, self._room = name, blocks
        self.cache: OrderedDict[int, None] = OrderedDict()
        self.waiting: deque[Any] = deque()
        self.busy = False
        self.decoding = 0

    def cached(self, keys: list[int]) -> int:
        """Blocks of a prompt that are there."""
        return next((at for at, key in enumerate(keys) if key not in self.cache), len(keys))

    def keep(self, keys: list[int], tokens: Any) -> list[KVEvent]:
        """The KV of a sequence is there now; what changed, as events."""
        have = self.cached(keys)
        events: list[KVEvent] = []
        if have < len(keys):
            parent = keys[have - 1] if have else None
            ids = tuple(tokens[have * BLOCK : len(keys) * BLOCK].tolist())
            events.append(BlockStored(tuple(keys[have:]), parent, ids, BLOCK))
        for key in reversed(keys):  # beginnings are used last, so that ends go first
            self.cache[key] = None
            self.cache.move_to_end(key)
        gone = [self.cache.popitem(last=False)[0] for _ in range(max(0, len(self.cache) - self._room))]
        return [*events, BlockRemoved(tuple(gone))] if gone else events


class Policy:
    """Chooses a replica for each turn."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.backlog = dict.fromkeys(names, 0.0)

    def choose(self, turn: Turn, now_s: float) -> tuple[str, Ticket | None]:
        raise NotImplementedError

    def first_token(self, turn: Turn, name: str, ticket: Ticket | None, now_s: float) -> None:
        self.backlog[name] -= len(turn.tokens)

    def moved(self, ticket: Ticket, seconds: float, now_s: float) -> None:
        """KV was moved for a request."""

    def end(self, ticket: Ticket | None) -> None:
        """The request is over."""

    def apply(self, name: str, events: list[KVEvent]) -> None:
        """KV events of a replica."""

    def _sent(self, turn: Turn, name: str) -> tuple[str, None]:
        self.backlog[name] += len(turn.tokens)
        return name, None


class RoundRobin(Policy):
    def choose(self, turn: Turn, now_s: float) -> tuple[str, Ticket | None]:
        self.names.append(self.names.pop(0))
        return self._sent(turn, self.names[-1])


class LeastLoaded(Policy):
    """Fewest tokens of prompts without an answer; of those that have equally many, any."""

    dice = random.Random(0)

    def choose(self, turn: Turn, now_s: float) -> tuple[str, Ticket | None]:
        least = min(self.backlog.values())
        return self._sent(turn, self.dice.choice([name for name in self.names if self.backlog[name] <= least]))


class ConsistentHash(Policy):
    """By the tenant and the first question: a conversation stays where it began."""

    def choose(self, turn: Turn, now_s: float) -> tuple[str, Ticket | None]:
        first = turn
        while first.after is not None:
            first = first.after
        at = zlib.crc32(first.tokens.tobytes())
        return self._sent(turn, max(self.names, key=lambda name: zlib.crc32(f"{at} {name}".encode())))


class KviltRouter(Policy):
    def __init__(self, names: list[str], moves: bool = False, **settings: Any) -> None:
        super().__init__(names)
        self.router = Router(RouterConfig(**settings))
        self.router.token_bytes = TOKEN_BYTES if moves else 0.0
        for name in names:
            self.router.add(name)
        self.took_s: list[float] = []

    def choose(self, turn: Turn, now_s: float) -> tuple[str, Ticket | None]:
        began = time.perf_counter()
        ticket = self.router.route(Prompt(turn.tokens), now_s)
        self.took_s.append(time.perf_counter() - began)
        return ticket.replica, ticket

    def first_token(self, turn: Turn, name: str, ticket: Ticket | None, now_s: float) -> None:
        assert ticket is not None
        self.router.first_token(ticket, now_s)

    def moved(self, ticket: Ticket, seconds: float, now_s: float) -> None:
        self.router.moved(ticket, int(ticket.moved * TOKEN_BYTES), seconds, now_s)

    def end(self, ticket: Ticket | None) -> None:
        assert ticket is not None
        self.router.end(ticket)

    def apply(self, name: str, events: list[KVEvent]) -> None:
        self.router.apply(name, events)


class Simulation:
    """Turns through replicas by one policy."""

    def __init__(
        self, policy: Policy, replicas: list[Replica], prefill: float, decode_s: float, transfer: float
    ) -> None:
        self.policy, self.replicas = policy, {one.name: one for one in replicas}
        self.prefill, self.decode_s, self.transfer = prefill, decode_s, transfer
        self.moved_tokens = 0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.count = itertools.count()
        self.now_s = 0.0
        self.first_token_s: list[float] = []
        self.prompt_tokens = self.cached_tokens = self.answer_tokens = 0

    def at(self, time_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (time_s, next(self.count), what))

    def run(self, turns: list[Turn]) -> dict[str, float]:
        for turn in turns:
            if turn.after is None:
                self.at(turn.wait_s, lambda turn=turn: self.arrive(turn))  # type: ignore[misc]
        while self.queue:
            self.now_s, _, what = heapq.heappop(self.queue)
            what()
        waits = np.array(self.first_token_s)
        return {
            "hit rate": self.cached_tokens / self.prompt_tokens,
            "TTFT median s": float(np.median(waits)),
            "TTFT p99 s": float(np.quantile(waits, 0.99)),
            "answer tokens/s": self.answer_tokens / self.now_s,
            "moved": self.moved_tokens / self.prompt_tokens,
        }

    def arrive(self, turn: Turn) -> None:
        name, ticket = self.policy.choose(turn, self.now_s)
        if ticket is None or ticket.source is None:
            self.wait(self.replicas[name], turn, ticket, self.now_s)
            return
        came_s, took_s = self.now_s, TRANSFER_LATENCY_S + ticket.moved * TOKEN_BYTES / self.transfer
        self.at(came_s + took_s, lambda: self.moved(turn, ticket, came_s))

    def moved(self, turn: Turn, ticket: Ticket, came_s: float) -> None:
        """KV from another replica is there, as far as that one still had it."""
        assert ticket.source is not None
        replica, blocks = self.replicas[ticket.replica], ticket.reach // BLOCK
        blocks = min(blocks, self.replicas[ticket.source].cached(turn.keys[:blocks]))
        self.tell(replica, replica.keep(turn.keys[:blocks], turn.tokens))
        self.policy.moved(ticket, self.now_s - came_s, self.now_s)
        self.moved_tokens += ticket.moved
        self.wait(replica, turn, ticket, came_s)

    def wait(self, replica: Replica, turn: Turn, ticket: Ticket | None, came_s: float) -> None:
        replica.waiting.append((turn, ticket, came_s))
        self.begin(replica)

    def begin(self, replica: Replica) -> None:
        if replica.busy or not replica.waiting:
            return
        replica.busy = True
        turn, ticket, came_s = replica.waiting.popleft()
        cached = min(replica.cached(turn.keys) * BLOCK, len(turn.tokens) - 1)
        self.prompt_tokens += len(turn.tokens)
        self.cached_tokens += cached
        speed = self.prefill * max(0.2, 1 - DECODE_SHARE * replica.decoding)
        took_s = (len(turn.tokens) - cached) / speed + self.decode_s
        self.at(self.now_s + took_s, lambda: self.prefilled(replica, turn, ticket, came_s))

    def prefilled(self, replica: Replica, turn: Turn, ticket: Ticket | None, came_s: float) -> None:
        self.first_token_s.append(self.now_s - came_s)
        self.policy.first_token(turn, replica.name, ticket, self.now_s)
        self.tell(replica, replica.keep(turn.keys, turn.tokens))
        replica.busy, replica.decoding = False, replica.decoding + 1
        ends_s = self.now_s + len(turn.answer) * self.decode_s
        self.at(ends_s, lambda: self.answered(replica, turn, ticket))
        self.begin(replica)

    def answered(self, replica: Replica, turn: Turn, ticket: Ticket | None) -> None:
        replica.decoding -= 1
        self.answer_tokens += len(turn.answer)
        self.policy.end(ticket)
        for following in turn.then:
            self.at(self.now_s + following.wait_s, lambda turn=following: self.arrive(turn))  # type: ignore[misc]

    def tell(self, replica: Replica, events: list[KVEvent]) -> None:
        if events:
            self.at(self.now_s + EVENT_DELAY_S, lambda: self.policy.apply(replica.name, events))


def giant_cache(turns: list[Turn], blocks: int) -> float:
    """The part of all prompt tokens that one cache of so many blocks would have, asked in the order of arrival."""
    one = Replica("giant", blocks)
    hit = total = 0
    for turn in turns:
        hit += min(one.cached(turn.keys) * BLOCK, len(turn.tokens) - 1)
        total += len(turn.tokens)
        one.keep(turn.keys, turn.tokens)
    return hit / total


def compare(replicas: int, options: argparse.Namespace) -> dict[str, Any]:
    """All policies over the same turns."""
    world = PrefixHasher(BLOCK)
    trial = Conversations(options.seed).make(2000, 100.0)
    hash_all(world, trial)
    ideal = giant_cache(trial, 1 << 30)
    mean = sum(len(turn.tokens) for turn in trial) / len(trial)
    per_s = options.load * replicas * options.prefill / (mean * (1 - ideal))
    turns = Conversations(options.seed).make(options.requests * max(1, replicas // 8), per_s)
    hash_all(world, turns)
    names = [f"r{n}" for n in range(replicas)]
    made = {
        "round robin": RoundRobin([*names]),
        "least loaded": LeastLoaded([*names]),
        "consistent hash": ConsistentHash([*names]),
        "kvilt": KviltRouter([*names], prefill_tokens_per_s=options.prefill),
        "kvilt, KV moves": KviltRouter(
            [*names],
            moves=True,
            prefill_tokens_per_s=options.prefill,
            transfer_bytes_per_s=options.assumed_transfer,
        ),
    }
    blocks = options.cache
    best = giant_cache(turns, blocks * replicas)
    print(
        f"{replicas} replicas, {len(turns)} requests, {per_s:.1f}/s; one giant cache: hit rate {best:.3f}", flush=True
    )
    result: dict[str, Any] = {"replicas": replicas, "requests": len(turns), "giant cache": best}
    for label, policy in made.items():
        engines = [Replica(name, blocks) for name in names]
        result[label] = Simulation(policy, engines, options.prefill, options.decode, options.transfer).run(turns)
        if isinstance(policy, KviltRouter):
            took = np.array(policy.took_s) * 1e6
            result[label] |= {
                "router us median": float(np.median(took)),
                "router us p99": float(np.quantile(took, 0.99)),
            }
        print(f"  {label:16}" + "  ".join(f"{name} {value:.4g}" for name, value in result[label].items()), flush=True)
    return result


def hash_all(world: PrefixHasher, turns: list[Turn]) -> None:
    for turn in turns:
        turn.keys = world.keys(turn.tokens, world.scope(None, str(turn.tenant)))


def scale(replicas: int, known: int) -> dict[str, float]:
    """One router with many blocks: its memory, and the time to route prompts of 8,000 tokens as lists of integers."""
    router = Router()
    dice = np.random.default_rng(0)
    for n in range(replicas):
        router.add(f"r{n}")
    system = dice.integers(0, VOCABULARY, 40 * BLOCK).tolist()
    prompts: list[list[int]] = []
    began = time.perf_counter()
    for first in range(0, known, 250):
        tokens = system + dice.integers(0, VOCABULARY, 210 * BLOCK).tolist()
        hashes = tuple(range(first, first + 250))
        router.apply(f"r{dice.integers(replicas)}", [BlockStored(hashes, None, tuple(tokens), BLOCK)])
        if len(prompts) < 1000:
            prompts.append(tokens)
    result = {"known": float(known), "filled s": time.perf_counter() - began}
    kinds = {
        "known": lambda one: one,
        "half": lambda one: one[:4000] + prompts[0][:4000][::-1],
        "new": lambda one: one[::-1],
    }
    for kind, change in kinds.items():
        took = []
        for at, prompt in enumerate(prompts):
            asked = Prompt(change(prompt))
            start = time.perf_counter()
            ticket = router.route(asked, at * 0.1)
            took.append((time.perf_counter() - start) * 1e6)
            router.end(ticket)
        result |= {f"{kind} us median": float(np.median(took)), f"{kind} us min": min(took)}
    result["peak GB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print("  ".join(f"{name} {value:.4g}" for name, value in result.items()), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", default="8,64")
    parser.add_argument("--requests", type=int, default=6000, help="for each 8 replicas")
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument("--prefill", type=float, default=20_000.0, help="tokens a second")
    parser.add_argument("--decode", type=float, default=0.02, help="seconds a token")
    parser.add_argument("--transfer", type=float, default=1e10, help="bytes of KV a second between two replicas")
    parser.add_argument(
        "--assumed-transfer",
        type=float,
        default=RouterConfig().transfer_bytes_per_s,
        help="what the router assumes of --transfer until it has measured it",
    )
    parser.add_argument("--cache", type=int, default=16_384, help="blocks of one replica")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", action="store_true")
    parser.add_argument("--known", type=int, default=10_000_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sizes = [int(one) for one in options.replicas.split(",")]
    if options.scale:
        results: list[Any] = [scale(one, options.known) for one in (sizes if options.replicas != "8,64" else [1000])]
    else:
        results = [compare(one, options) for one in sizes]
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
