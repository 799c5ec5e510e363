"""Conversations over a running cluster: through its door, by turns to its replicas (round robin), and by Ray's router.

    kvilt cluster up --replicas 2 --threads 1 &
    python bench/cluster_turns.py [--url http://127.0.0.1:8000] [--sessions 100] [--turns 6] [--clients 4]
        [--ray-router]

All ways get conversations of the same sizes with words of their own, so that none finds KV of another. With
--ray-router the bench deploys one forwarder for each replica on the cluster's Ray, whose requests Ray Serve routes with
its own PrefixCacheAffinityRouter: the replicas are the same, and the choice is Ray's. Sessions
share one of four system prompts; one turn in ten asks from an earlier turn on. The hit rate is the part of all prompt
tokens that was cached; one giant cache would have all of a prompt that stood in an earlier prompt or answer, which is
counted in tokens from the usage of the requests, in whole pages.
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
from dataclasses import dataclass
from typing import Any

WORDS = ("river", "stone", "window", "letter", "garden", "market", "bridge", "winter", "silver", "paper", "engine")
ANSWER, PAGE = 16, 32
Send = Callable[[list[dict[str, str]]], dict[str, Any]]


def text(dice: random.Random, words: int) -> str:
    return " ".join(f"{dice.choice(WORDS)}{dice.randrange(1000)}" for _ in range(words))


def ask(url: str, messages: list[dict[str, str]]) -> dict[str, Any]:
    """One streamed request: its answer, the seconds to its first token, and its counts."""
    body = {"messages": messages, "max_tokens": ANSWER, "ignore_eos": True, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
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
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {"answer": answer, "first_s": first, "tokens": usage["prompt_tokens"], "cached": cached}


@dataclass
class RoutedChat:
    """What Ray's router reads the text of a request from."""

    messages: list[dict[str, str]]


class Forwarder:
    """Stands for one replica of kvilt before Ray's router."""

    def __init__(self, urls: list[str]) -> None:
        import ray

        numbers = ray.remote(Numbers).options(name="bench-numbers", get_if_exists=True, num_cpus=0).remote()
        self.url = urls[ray.get(numbers.take.remote()) % len(urls)]

    async def send(self, chat: RoutedChat) -> dict[str, Any]:
        """The answer of its replica; in a thread, whatever Ray is set to do with methods that are not async."""
        began = time.time()
        done = await asyncio.to_thread(ask, self.url, chat.messages)
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

    def send(messages: list[dict[str, str]]) -> dict[str, Any]:
        began = time.time()
        done: dict[str, Any] = handle.send.remote(RoutedChat(messages)).result()
        return {**done, "first_s": done["first_at"] - began}

    return send


class Run:
    """All conversations one way."""

    def __init__(
        self, send: Callable[[list[dict[str, str]]], dict[str, Any]], seed: str, sessions: int, turns: int
    ) -> None:
        self.send = send
        self.seed, self.sessions, self.turns = seed, sessions, turns
        self.systems = [text(random.Random(f"{seed} system {n}"), 60) for n in range(4)]
        self.seen: set[int] = set()
        self.lock = threading.Lock()
        self.results: list[dict[str, Any]] = []

    def session(self, number: int) -> None:
        dice = random.Random(f"{self.seed} {number}")
        system = number % 4
        messages = [{"role": "system", "content": self.systems[system]}]
        lengths = [0]  # of prompts and answers so far, in tokens, by the number of messages
        for turn in range(self.turns):
            if turn > 1 and dice.random() < 0.1:
                messages, lengths = messages[:-2], lengths[:-1]
            messages = [*messages, {"role": "user", "content": text(dice, 20)}]
            done = self.send(messages)
            with self.lock:
                fresh = system in self.seen
                self.seen.add(system)
                known = lengths[-1] or (self.system_tokens(done) if fresh else 0)
                self.results.append({**done, "known": known // PAGE * PAGE})
            lengths.append(done["tokens"] + ANSWER - 1)
            messages = [*messages, {"role": "assistant", "content": done["answer"]}]

    def system_tokens(self, done: dict[str, Any]) -> int:
        """Tokens of the system prompt: a first prompt without its question."""
        return int(done["tokens"] * 60 / 80)

    def go(self, clients: int) -> dict[str, float]:
        with ThreadPoolExecutor(clients) as threads:
            list(threads.map(self.session, range(self.sessions)))
        tokens = sum(one["tokens"] for one in self.results)
        return {
            "requests": len(self.results),
            "hit rate": sum(one["cached"] for one in self.results) / tokens,
            "giant cache": sum(one["known"] for one in self.results) / tokens,
            "TTFT median s": statistics.median(one["first_s"] for one in self.results),
            "TTFT p90 s": statistics.quantiles([one["first_s"] for one in self.results], n=10)[-1],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--ray-router", action="store_true", help="also with Ray's own prefix-aware router")
    options = parser.parse_args()
    with urllib.request.urlopen(f"{options.url}/v1/cluster") as reply:
        replicas = [one["url"] for one in json.loads(reply.read())["replicas"]]
    turns = itertools.cycle(replicas)
    ways: dict[str, Send] = {
        "round robin": lambda messages: ask(next(turns), messages),
        "door": lambda messages: ask(options.url, messages),
    }
    if options.ray_router:
        ways["Ray's router"] = rays_router(replicas)
    for label, send in ways.items():
        run = Run(send, f"{label} {time.time()}", options.sessions, options.turns)
        found = run.go(options.clients)
        print(f"{label:14}" + "  ".join(f"{name} {value:.4g}" for name, value in found.items()), flush=True)


if __name__ == "__main__":
    main()
