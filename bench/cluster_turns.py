"""Conversations or documents over a running cluster: through its door, by turns to its replicas, and by Ray's router.

    kvilt cluster up --replicas 2 --threads 1 &
    python bench/cluster_turns.py [--url http://127.0.0.1:8000] [--sessions 100] [--turns 6] [--clients 4]
        [--turn-words 20] [--ray-router]
    python bench/cluster_turns.py --documents 64 [--questions 300] ...

All ways get requests of the same sizes with words of their own, so that none finds KV of another. With --ray-router the
bench deploys one forwarder for each replica on the cluster's Ray, whose requests Ray Serve routes with its own
PrefixCacheAffinityRouter: the replicas are the same, and the choice is Ray's.

Conversations share one of four system prompts; one turn in ten asks from an earlier turn on. The hit rate is the part
of all prompt tokens that was cached; one giant cache would have all of a prompt that stood in an earlier prompt or
answer, which is counted in tokens from the usage of the requests, in whole pages.

With --documents each request asks a question about three documents, in any order. They are drawn so that the document
at place n of the list is asked for 1/n as often as the first one. The hit rate is the part of the documents' tokens
that no replica had to compute for the request; one giant cache would compute every document once.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

WORDS = ("river", "stone", "window", "letter", "garden", "market", "bridge", "winter", "silver", "paper", "engine")
ANSWER, PAGE = 16, 32
SYSTEM_WORDS = 60
DOCUMENT_WORDS, ASKED = 60, 3


@dataclass
class Chat:
    """What is asked; the name of the first field is the one that Ray's router reads the text of a request from."""

    messages: list[dict[str, str]]
    documents: list[str] = field(default_factory=list)


Send = Callable[[Chat], dict[str, Any]]


def text(dice: random.Random, words: int) -> str:
    return " ".join(f"{dice.choice(WORDS)}{dice.randrange(1000)}" for _ in range(words))


def ask(url: str, chat: Chat) -> dict[str, Any]:
    """One streamed request: its answer, the seconds to its first token, and its counts."""
    body: dict[str, Any] = {"messages": chat.messages, "max_tokens": ANSWER, "ignore_eos": True, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    if chat.documents:
        body["documents"] = chat.documents
    headers = {"content-type": "application/json"}
    began, first, answer, usage = time.perf_counter(), 0.0, "", {}
    with urllib.request.urlopen(
        urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    ) as reply:
        for line in reply:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event["choices"] and (piece := event["choices"][0]["delta"].get("content")):
                first = first or time.perf_counter() - began
                answer += piece
            usage = event.get("usage") or usage
    counts = {"cached": usage["prompt_tokens_details"]["cached_tokens"], **usage["kvilt"]}
    return {"answer": answer, "first_s": first, "tokens": usage["prompt_tokens"], **counts}


class Forwarder:
    """Stands for one replica of kvilt before Ray's router."""

    def __init__(self, urls: list[str]) -> None:
        import ray

        numbers = ray.remote(Numbers).options(name="bench-numbers", get_if_exists=True, num_cpus=0).remote()
        self.url = urls[ray.get(numbers.take.remote()) % len(urls)]

    async def send(self, chat: Chat) -> dict[str, Any]:
        """The answer of its replica; in a thread, whatever Ray is set to do with methods that are not async."""
        began = time.time()
        done = await asyncio.to_thread(ask, self.url, chat)
        return {**done, "first_at": began + done["first_s"]}


class Numbers:
    """Counts forwarders, so that each gets a replica of its own."""

    def __init__(self) -> None:
        self.count = itertools.count()

    def take(self) -> int:
        return next(self.count)


def rays_router(urls: list[str]) -> Send:
    """Sends requests through Ray Serve with its own prefix-aware router; one forwarder for each replica."""
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from kvilt.cluster.ray_serve import join_ray

    join_ray("auto")
    router = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router:PrefixCacheAffinityRouter"
    deployment: Any = serve.deployment(
        Forwarder,
        num_replicas=len(urls),
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=64,
        request_router_config=RequestRouterConfig(request_router_class=router),
    )
    handle = serve.run(deployment.bind(urls), name="bench-router", route_prefix=None)

    def send(chat: Chat) -> dict[str, Any]:
        began = time.time()
        done: dict[str, Any] = handle.send.remote(chat).result()
        return {**done, "first_s": done["first_at"] - began}

    return send


class Conversations:
    """All conversations one way."""

    def __init__(self, send: Send, seed: str, options: argparse.Namespace) -> None:
        self.send, self.seed, self.turns, self.turn_words = send, seed, options.turns, options.turn_words
        self.count = options.sessions
        self.systems = [text(random.Random(f"{seed} system {n}"), SYSTEM_WORDS) for n in range(4)]
        self.seen: set[int] = set()
        self.lock = threading.Lock()
        self.results: list[dict[str, Any]] = []

    def one(self, number: int) -> None:
        """One conversation."""
        dice = random.Random(f"{self.seed} {number}")
        system = number % 4
        messages = [{"role": "system", "content": self.systems[system]}]
        lengths = [0]  # of prompts and answers so far, in tokens, by the number of messages
        for turn in range(self.turns):
            if turn > 1 and dice.random() < 0.1:
                messages, lengths = messages[:-2], lengths[:-1]
            messages = [*messages, {"role": "user", "content": text(dice, self.turn_words)}]
            done = self.send(Chat(messages))
            with self.lock:
                fresh = system in self.seen
                self.seen.add(system)
                known = lengths[-1] or (self.system_tokens(done) if fresh else 0)
                self.results.append({**done, "of": done["tokens"], "known": known // PAGE * PAGE})
            lengths.append(done["tokens"] + ANSWER - 1)
            messages = [*messages, {"role": "assistant", "content": done["answer"]}]

    def system_tokens(self, done: dict[str, Any]) -> int:
        """Tokens of the system prompt: a first prompt without its question."""
        return int(done["tokens"] * SYSTEM_WORDS / (SYSTEM_WORDS + self.turn_words))


class Questions:
    """All questions about documents one way."""

    def __init__(self, send: Send, seed: str, options: argparse.Namespace) -> None:
        self.send, self.seed, self.count = send, seed, options.questions
        self.documents = [text(random.Random(f"{seed} document {n}"), DOCUMENT_WORDS) for n in range(options.documents)]
        self.seen: set[str] = set()
        self.lock = threading.Lock()
        self.results: list[dict[str, Any]] = []

    def one(self, number: int) -> None:
        """One question."""
        dice = random.Random(f"{self.seed} {number}")
        chosen: dict[str, None] = {}
        while len(chosen) < ASKED:
            chosen[dice.choices(self.documents, [1 / (1 + at) for at in range(len(self.documents))])[0]] = None
        with self.lock:
            new = sum(one not in self.seen for one in chosen)
            self.seen.update(chosen)
        done = self.send(Chat([{"role": "user", "content": text(dice, 8)}], list(chosen)))
        of = done["blended_reused"] + done["blended_recomputed"]
        with self.lock:
            self.results.append(
                {**done, "of": of, "cached": of - done["documents_computed"], "known": of * (1 - new / ASKED)}
            )


def measured(work: Conversations | Questions, clients: int) -> dict[str, float]:
    """Send everything, so many at a time."""
    with ThreadPoolExecutor(clients) as threads:
        list(threads.map(work.one, range(work.count)))
    tokens = sum(one["of"] for one in work.results)
    return {
        "requests": len(work.results),
        "hit rate": sum(one["cached"] for one in work.results) / tokens,
        "giant cache": sum(one["known"] for one in work.results) / tokens,
        "TTFT median s": statistics.median(one["first_s"] for one in work.results),
        "TTFT p90 s": statistics.quantiles([one["first_s"] for one in work.results], n=10)[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--turn-words", type=int, default=20, help="in a user's message; about 4.5 tokens each")
    parser.add_argument("--documents", type=int, default=0, help="ask about so many documents instead")
    parser.add_argument("--questions", type=int, default=300, help="about documents")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--ray-router", action="store_true", help="also with Ray's own prefix-aware router")
    options = parser.parse_args()
    with urllib.request.urlopen(f"{options.url}/v1/cluster") as reply:
        replicas = [one["url"] for one in json.loads(reply.read())["replicas"]]
    turns = itertools.cycle(replicas)
    ways: dict[str, Send] = {
        "round robin": lambda chat: ask(next(turns), chat),
        "door": lambda chat: ask(options.url, chat),
    }
    if options.ray_router:
        ways["Ray's router"] = rays_router(replicas)
    for label, send in ways.items():
        kind = Questions if options.documents else Conversations
        found = measured(kind(send, f"{label} {time.time()}", options), options.clients)
        print(f"{label:14}" + "  ".join(f"{name} {value:.4g}" for name, value in found.items()), flush=True)


if __name__ == "__main__":
    main()
