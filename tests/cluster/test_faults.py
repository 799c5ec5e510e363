"""Faults of a cluster: replicas that hang, leave or come with another model, and two doors at once."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from clusters import Cluster, announcing, cluster_of_two, joined, opened_door
from running import KEY, QUESTION
from tiny import write_tiny

from kvilt.cluster.replica_set import SILENT_S, SUSPECT_S, ReplicaInfo, ReplicaSet
from kvilt.cluster.request_hints import named
from kvilt.cluster.router import Router
from kvilt.server.auth import tenant_of_key
from kvilt.text.tokenizer import Tokenizer

TENANT = tenant_of_key(KEY)


@pytest.fixture(scope="module")
def cluster(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster_of_two(tokenizer, tmp_path_factory.mktemp("served")) as made:
        yield made


@contextmanager
def _hanging() -> Iterator[tuple[str, threading.Event]]:
    """A replica that takes requests and never answers; the event says that one is there."""
    there, over = threading.Event(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def run() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 16)
                there.set()
                over.wait(60)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", there
        over.set()
        thread.join(60)


def test_requests_of_a_replica_that_hangs_go_to_another_one(cluster: Cluster) -> None:
    body = {"messages": QUESTION, "max_tokens": 2, "session": "hangs"}
    with _hanging() as (url, there), cluster.http() as http, ThreadPoolExecutor(1) as threads:
        hung = ReplicaInfo("hung", url, "tcp://127.0.0.1:9", "tcp://127.0.0.1:9", 32, 1)
        cluster.loop.call_soon_threadsafe(cluster.door.replicas.announce, hung)
        cluster.until(lambda: cluster.door.replicas.get("hung") is not None)
        cluster.door.router.settle(named(TENANT, "sessions", "hangs"), "hung")
        asked = threads.submit(http.post, "/v1/chat/completions", json=body)
        assert there.wait(60)

        def age() -> None:
            cluster.door.replicas._members["hung"].heard_s -= SILENT_S

        cluster.loop.call_soon_threadsafe(age)
        assert asked.result(60).status_code == 200
        assert cluster.door.replicas.get("hung") is None
        assert http.delete("/v1/sessions/hangs").status_code == 200


def test_silence_is_noticed_within_a_second_and_a_broken_connection_at_once() -> None:
    async def life() -> None:
        now, alive = [0.0], asyncio.Event()

        async def beats(_url: str) -> AsyncIterator[None]:
            yield
            await alive.wait()

        router = Router()
        replicas = ReplicaSet(router, beats, lambda: now[0])
        info = ReplicaInfo("r", "", "tcp://127.0.0.1:9", "tcp://127.0.0.1:9", 32, 1, exchange="x")
        other = replace(info, name="other", exchange="")
        replicas.announce(info)
        replicas.announce(other)
        now[0] = SUSPECT_S + 0.01
        assert SUSPECT_S + 0.25 <= 1.0  # the door sweeps four times a second
        replicas.announce(other)
        replicas.sweep()
        assert router._suspect[0] and not router._suspect[1]
        replicas.announce(info)
        assert not router._suspect[0]
        gone = replicas.gone("r")
        alive.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert replicas.get("r") is None and not gone.is_set()  # its requests say themselves that it is gone
        now[0] += SILENT_S + 0.01
        silent = replicas.gone("other")
        replicas.sweep()
        assert replicas.get("other") is None and silent.is_set()
        await replicas.close()

    asyncio.run(life())


def test_replicas_of_a_new_version_take_over_and_no_request_is_lost(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A rolling restart: new replicas come, old ones say that they leave, and end their requests."""
    new = write_tiny(tmp_path / "new", rope_theta=5000.0, vocab_size=tokenizer.vocab_size, max_position_embeddings=1024)
    over = threading.Event()

    def ask(cluster: Cluster, n: int) -> list[int]:
        statuses = []
        with cluster.http() as http:
            while not over.is_set():
                body = {"prompt": f"Count to {n}", "max_tokens": 8, "temperature": 0, "stream": bool(n % 2)}
                statuses.append(http.post("/v1/completions", json=body).status_code)
        return statuses

    with ExitStack() as stack, ThreadPoolExecutor(4) as threads:
        cluster = stack.enter_context(cluster_of_two(tokenizer, tmp_path))
        asked = [threads.submit(ask, cluster, n) for n in range(4)]
        for old, name in (("a", "c"), ("b", "d")):
            info = stack.enter_context(joined(cluster, name, new, tokenizer))
            assert info.version != cluster.infos[old].version
            cluster.until(lambda name=name: cluster.door.replicas.get(name) is not None)  # type: ignore[misc]
            cluster.silent.add(old)
            leaving = replace(cluster.infos[old], healthy=False)
            cluster.loop.call_soon_threadsafe(cluster.door.replicas.announce, leaving)
            cluster.until(lambda old=old: cluster.door.replicas.get(old) is None)  # type: ignore[misc]
            cluster.until(lambda old=old: not cluster.replicas[old].service.running)  # type: ignore[misc]
        over.set()
        statuses = [status for one in asked for status in one.result(120)]
    assert statuses and set(statuses) == {200}


def test_two_doors_agree(cluster: Cluster, tokenizer: Tokenizer) -> None:
    """Handles, sessions and files of one door are those of the other, also where both are asked at once."""
    with opened_door(tokenizer, doors=2) as left, opened_door(tokenizer, doors=2) as right, ExitStack() as stack:
        for door in (left, right):
            for name in ("a", "b"):
                stack.enter_context(announcing(door, cluster.infos[name]))
        for door in (left, right):
            door.until(lambda door=door: len(door.door.replicas) == 2)  # type: ignore[misc]
        threads = stack.enter_context(ThreadPoolExecutor(8))

        def turn(n: int) -> int:
            with (left if n % 2 else right).http() as http:
                body = {"messages": [{"role": "user", "content": f"turn {n}"}], "session": f"s{n % 4}", "max_tokens": 2}
                status = http.post("/v1/chat/completions", json=body).status_code
                made = http.post("/v1/kv", json={"messages": QUESTION}).json()["id"]
            with (right if n % 2 else left).http() as other:
                assert other.post(f"/v1/kv/{made}/fork", json={}).status_code == 200
                assert other.delete(f"/v1/kv/{made}").status_code == 200
            return status

        assert set(threads.map(turn, range(24))) == {200}
        with left.http() as one, right.http() as two:
            shown: list[Any] = [sorted(http.get("/v1/sessions").json()["data"], key=str) for http in (one, two)]
            turns = [[(item["name"], item["turns"]) for item in each] for each in shown]
            assert sorted(turns[0]) == sorted(turns[1]) == [(f"s{n}", 6) for n in range(4)]
            file = {"file": ("lines.jsonl", b"{}\n")}
            assert one.post("/v1/files", files=file, data={"purpose": "batch"}).status_code == 200
            assert len(two.get("/v1/files").json()["data"]) == 1
            for n in range(4):
                assert two.delete(f"/v1/sessions/s{n}").status_code == 200


def test_a_prompt_is_computed_by_one_replica_and_continued_by_another(cluster: Cluster) -> None:
    router = cluster.door.router
    ids = [(5 * k + k * k) % 4000 + 10 for k in range(300)]
    body = {"prompt": ids, "max_tokens": 6, "temperature": 0}
    with cluster.replicas["a"].http(headers={"authorization": f"Bearer {KEY}"}) as direct, cluster.http() as http:
        expected = direct.post("/v1/completions", json=body).json()["choices"][0]["text"]
        for one in cluster.replicas.values():
            one.llm.executor.prefixes.clear()
        cluster.settled()
        slot = router._slots["b"]
        router._apart[slot] = float("inf")  # "b" computes prompts only
        router._s_per_token[:] = 1.0
        router._decoding[:] = 1000.0
        try:
            done = http.post("/v1/completions", json=body).json()
        finally:
            router._apart[slot], router._decoding[:] = 0.0, 0.0
        assert done["choices"][0]["text"] == expected
        assert done["usage"]["prompt_tokens_details"]["cached_tokens"] == 288
        assert len(cluster.replicas["b"].llm.executor.prefixes) >= 9  # it computed them
        assert router._backlog[slot] == 0
