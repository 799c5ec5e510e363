"""All that `kvilt cluster up` can start at once, on a Ray of its own, with the default model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray_commands import PATIENCE_S, cluster_down, cluster_up

import kvilt

pytestmark = pytest.mark.slow
TOKENS = 8


def _question(n: int, words: int) -> str:
    return " ".join(f"word{(k * 7919 + n * 104729) % 10007}" for k in range(words))


def _chat(door: httpx.Client, content: str, **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": TOKENS, "temperature": 0, **more}
    reply = door.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    done: dict[str, Any] = reply.json()
    return done


def _text(done: dict[str, Any]) -> str:
    return str(done["choices"][0]["message"]["content"])


def _goes_on(door: httpx.Client, handle: str) -> str:
    body = {"prompt": " And so", "kv": handle, "max_tokens": TOKENS, "temperature": 0}
    return str(door.post("/v1/completions", json=body).json()["choices"][0]["text"])


def _status(door: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = door.get("/v1/cluster").json()
    return found


def _until(true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.2)


def _load(doors: list[httpx.Client], ended: threading.Event, client: int) -> None:
    n = 0
    while not ended.is_set():
        _chat(doors[n % 2], _question(1000 * client + n, 10))
        n += 1


def test_doors_prefill_replica_and_growth_at_once(tmp_path: Path) -> None:
    options = ["--min", "1", "--max", "2", "--prefill-replicas", "1", "--doors", "2", "--store", str(tmp_path / "kv")]
    long = [_question(n, 150) for n in range(3)]
    with kvilt.load(threads=1) as llm:
        expected = [llm.chat([{"role": "user", "content": one}], max_tokens=TOKENS, temperature=0).text for one in long]
    with cluster_up(tmp_path / "log", *options) as (process, urls), ExitStack() as stack:
        doors = [stack.enter_context(httpx.Client(base_url=url, timeout=PATIENCE_S)) for url in urls]
        one, other = doors
        assert _text(_chat(one, "Name three rivers.")) == _text(_chat(other, "Name three rivers."))
        handle = one.post("/v1/kv", json={"prompt": "The river of the north flows to the sea. " * 8}).json()["id"]
        continued = _goes_on(one, handle)
        assert _goes_on(other, handle) == continued
        _chat(one, "My name is Anna.", session="mine")
        assert _chat(other, "My name is Bert.", session="mine")["usage"]["prompt_tokens_details"]["cached_tokens"]
        with ThreadPoolExecutor(3) as threads:  # the first is computed where it is answered, one behind it elsewhere
            assert [_text(done) for done in threads.map(lambda asked: _chat(one, asked), long)] == expected
        found = _status(one)
        assert found["transfers"]["count"] and not found["transfers"]["failed"]
        assert any(replica["prefill_only"] and replica["prefix_blocks"] for replica in found["replicas"])
        ended = threading.Event()
        with ThreadPoolExecutor(16) as threads:
            loads = [threads.submit(_load, doors, ended, client) for client in range(16)]
            try:
                _until(lambda: all(len(_status(door)["replicas"]) == 3 for door in doors))
            finally:
                ended.set()
            for load in loads:
                load.result()
        _until(lambda: all(len(_status(door)["replicas"]) == 2 for door in doors))
        assert [_goes_on(door, handle) for door in doors] == [continued, continued]
        cluster_down(process)


def test_a_replica_of_two_processes_answers(tmp_path: Path) -> None:
    with cluster_up(tmp_path / "log", "--replicas", "1", "--tensor-parallel", "2") as (process, urls):
        with httpx.Client(base_url=urls[0], timeout=PATIENCE_S) as door:
            assert _text(_chat(door, "Name three rivers."))
        cluster_down(process)
