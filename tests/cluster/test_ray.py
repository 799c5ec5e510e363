"""`kvilt cluster up` on a Ray of its own: two replicas of the default model, one of which is killed under load."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from ray_commands import PATIENCE_S, cluster_down, cluster_up

import kvilt

pytestmark = pytest.mark.slow
TOKENS = 24


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The command that a user types on a fresh machine, with any free port."""
    with cluster_up(tmp_path_factory.mktemp("cluster") / "log", "--replicas", "2") as (process, urls):
        yield process, urls[0]


def _body(n: int, stream: bool) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Count from {n} to {n + 5}, please."}]
    seeded = {"temperature": 0.9, "seed": n} if n % 2 else {"temperature": 0}
    return {"messages": messages, "max_tokens": TOKENS, "ignore_eos": True, "stream": stream, **seeded}


def _ask(url: str, n: int) -> tuple[int, str, str]:
    """Which one, its text, and the code of its error."""
    body = _body(n, stream=n % 3 == 0)
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
        reply = http.post("/v1/chat/completions", json=body)
    if not body["stream"]:
        if reply.status_code != 200:
            return n, "", reply.json()["error"]["code"]
        return n, reply.json()["choices"][0]["message"]["content"], ""
    text = ""
    for line in reply.text.splitlines():
        if line.startswith("data: {"):
            event = httpx.Response(200, text=line[6:]).json()
            if "error" in event:
                return n, text, event["error"]["code"]
            text += event["choices"][0]["delta"].get("content") or "" if event["choices"] else ""
    return n, text, ""


def test_two_replicas_answer_as_one_process_does_and_one_may_be_killed(
    up: tuple[subprocess.Popen[bytes], str],
) -> None:
    process, url = up
    with kvilt.load(threads=1) as llm:
        expected = {}
        for n in range(16):
            body = _body(n, stream=False)
            sampling = {"temperature": body["temperature"], "seed": body.get("seed"), "ignore_eos": True}
            expected[n] = llm.chat(body["messages"], max_tokens=TOKENS, **sampling).text
    killed = threading.Event()

    def kill() -> None:
        victim = httpx.get(f"{url}/v1/cluster").json()["replicas"][0]["pid"]
        os.kill(victim, signal.SIGKILL)
        killed.set()

    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(_ask, url, n) for n in range(16)]
        threading.Timer(1.0, kill).start()
        answers = [one.result() for one in asked]
        assert killed.wait(60)
        answers += list(threads.map(lambda n: _ask(url, n), range(16)))
    broken = [code for _, _, code in answers if code]
    assert set(broken) <= {"replica_gone"}
    assert all(expected[n] == text for n, text, code in answers if not code)
    assert len(broken) < len(answers) / 2
    until = time.monotonic() + PATIENCE_S
    while len(httpx.get(f"{url}/v1/cluster").json()["replicas"]) < 2:  # Ray Serve starts another one
        assert time.monotonic() < until
        time.sleep(0.5)
    cluster_down(process)
