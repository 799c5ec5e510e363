"""What happens to requests when clients leave, queues fill up, steps fail or hang, and servers end."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from gates import Gate
from running import Running, running, until
from tiny import write_tiny

from kvilt.batch import Batch, Logits
from kvilt.config import EngineConfig, RunConfig
from kvilt.errors import StepHung
from kvilt.executor.load import load_executor
from kvilt.executor.protocol import Executor
from kvilt.text.tokenizer import Tokenizer

Start = Callable[..., Any]
LONG = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True}
SHORT = {"prompt": "Hello", "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(autouse=True)
def nothing_left(executor: Executor) -> Iterator[None]:
    yield
    until(lambda: executor.pool.usage().used == 0, "giving everything back")


@pytest.fixture
def slowed(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Steps wait for this event, once it is cleared."""
    return Gate(executor, monkeypatch)


# Leaving.


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("place", ["decode", "prefill", "queue"])
def test_whoever_leaves_ends_their_request(
    start: Start, executor: Executor, slowed: Gate, monkeypatch: pytest.MonkeyPatch, stream: bool, place: str
) -> None:
    """In the queue, in the prompt or in the answer: the request ends within a step, and once."""
    config = EngineConfig(step_tokens=32, max_rows=4)
    asked = {**LONG, "stream": stream, "n": 3}
    with start(config) as server, ExitStack() as left:
        aborted: list[Any] = []
        honest = server.llm.engine.abort
        monkeypatch.setattr(server.llm.engine, "abort", lambda job: (honest(job), aborted.append(job)))
        if place == "decode":
            slowed.last = 9
        else:
            slowed.clear()
            asked["prompt"] = [5] * 300
        others = 3 if place == "queue" else 0
        path = "/v1/completions"
        clients = [left.enter_context(server.asking(path, {**LONG, "n": 4})) for _ in range(others)]
        until(lambda: server.llm.engine.requests == others)
        clients.append(left.enter_context(server.asking(path, asked)))
        until(lambda: server.llm.engine.requests == others + 1)
        if place == "decode":
            until(lambda: not slowed.is_set(), "the ninth step")
        if place == "decode" and stream:
            assert clients[-1].recv(65536)
        left.close()
        until(lambda: len(aborted) == others + 1, "the server's notice")
        slowed.set()
        until(lambda: server.llm.engine.requests == 0)
        until(lambda: executor.pool.usage().used == 0)
        with server.http() as http:
            assert http.post("/v1/completions", json=SHORT).status_code == 200
        reasons = server.llm.engine.metrics.snapshot()["kvilt_request_success_total"]["series"]
        counts = {one["labels"]["finished_reason"]: one["value"] for one in reasons}
        assert counts["cancelled"] == 1 + others


def test_a_client_that_stops_a_stream(server: Running) -> None:
    asked = {"model": "tiny", "prompt": "Once", "max_tokens": 900, "stream": True}
    stream = server.openai().completions.create(**asked, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    until(lambda: server.llm.engine.requests == 0)


# Too much.


def test_a_full_queue_says_when_to_ask_again(start: Start, slowed: Gate) -> None:
    with start(EngineConfig(max_rows=1, max_waiting=1)) as server, server.http() as http:
        slowed.clear()
        post = partial(server.http().post, "/v1/completions", json=SHORT)
        waiting = [threading.Thread(target=post) for _ in range(2)]
        waiting[0].start()
        until(lambda: server.llm.engine.requests == 1 and server.llm.engine.waiting == 0)
        waiting[1].start()
        until(lambda: server.llm.engine.waiting == 1)
        for stream in (False, True):
            refused = http.post("/v1/completions", json={**SHORT, "stream": stream})
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "queue_full"
        with pytest.raises(openai.RateLimitError):
            server.openai().completions.create(model="tiny", prompt="Hello")
        slowed.set()
        for thread in waiting:
            thread.join(300)
        assert http.post("/v1/completions", json=SHORT).status_code == 200


def test_a_pool_that_is_too_small_preempts_and_says_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Eight requests whose KV does not fit at once: all are answered, as each is alone."""
    folder = write_tiny(tmp_path, vocab_size=tokenizer.vocab_size, max_position_embeddings=512)
    small = load_executor(folder, RunConfig(kv_memory=1 << 18, backend="native", threads=1))
    asked = [{**LONG, "prompt": [7 + i] * 100, "max_tokens": 120, "temperature": 0} for i in range(16)]
    assert small.pool.pages * small.layout.page_tokens < 16 * 220
    with running(small, tokenizer) as server:
        with server.http() as http:
            alone = [http.post("/v1/completions", json=one).json()["choices"][0]["text"] for one in asked[:2]]
        answers: dict[int, str] = {}

        def ask(index: int) -> None:
            with server.http() as http:
                answers[index] = http.post("/v1/completions", json=asked[index]).json()["choices"][0]["text"]

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        assert len(answers) == 16
        assert [answers[0], answers[1]] == alone
        assert server.llm.engine.metrics.snapshot()["kvilt_num_preemptions_total"]["series"][0]["value"] > 0


# Failing.


def test_bad_logits_fail_their_request_alone(start: Start, executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = executor.run

    def run(batch: Batch) -> Logits:
        logits = honest(batch)
        for index, row in enumerate(batch.rows):
            if 99 in getattr(row.source, "ids", ()):
                logits.values[index] = torch.nan
        return logits

    monkeypatch.setattr(executor, "run", run)
    with start() as server, server.http() as http:
        good = {**SHORT, "prompt": [5, 6, 7], "max_tokens": 30, "temperature": 0}
        expected = http.post("/v1/completions", json=good).json()["choices"][0]["text"]
        texts: list[str] = []
        thread = threading.Thread(
            target=lambda: texts.append(http.post("/v1/completions", json=good).json()["choices"][0]["text"])
        )
        thread.start()
        with server.http() as other:
            bad = other.post("/v1/completions", json={**SHORT, "prompt": [5, 99]})
            assert bad.status_code == 500
            assert bad.json()["error"]["code"] == "bad_logits"
            streamed = other.post("/v1/completions", json={**SHORT, "prompt": [5, 99], "stream": True}).text
            assert '"error"' in streamed
            assert streamed.endswith("data: [DONE]\n\n")
        thread.join(300)
        assert texts == [expected]


def test_an_error_in_a_stream_reaches_the_client(
    start: Start, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, runs = executor.run, [0]

    def run(batch: Batch) -> Logits:
        runs[0] += 1
        if runs[0] > 4:
            raise RuntimeError("secret 0xdead")
        return honest(batch)

    with start() as server:
        monkeypatch.setattr(executor, "run", run)
        with pytest.raises(openai.APIError) as failed:
            for _ in server.openai().completions.create(model="tiny", prompt="Once", stream=True):
                pass
        assert "secret" not in str(failed.value)
        monkeypatch.setattr(executor, "run", honest)
        with server.http() as http:
            assert http.post("/v1/completions", json=SHORT).status_code == 200


def test_a_step_that_hangs(start: Start, slowed: Gate) -> None:
    with start() as server, server.http() as http, ThreadPoolExecutor(1) as pool:
        slowed.clear()
        asked = pool.submit(lambda: http.post("/v1/completions", json=SHORT))
        driver = server.llm._driver
        until(lambda: driver._stepping and server.llm.engine.requests == 1)
        driver._trip(StepHung(0.2))  # what the watchdog does, when its rounds say so
        hung = asked.result(300)
        assert hung.status_code == 503
        assert hung.json()["error"]["code"] == "step_hung"
        assert http.get("/health").json() == {"status": "hung"}
        assert http.get("/ready").status_code == 503
        assert http.post("/v1/completions", json=SHORT).status_code == 503
        slowed.set()
        until(lambda: http.get("/health").status_code == 200)
        assert http.post("/v1/completions", json=SHORT).status_code == 200


# Silence.


def test_comments_come_while_nothing_is_said(start: Start, slowed: Gate) -> None:
    with start(keep_alive_s=0.1) as server, server.http() as http:
        slowed.clear()
        with http.stream("POST", "/v1/completions", json={**SHORT, "stream": True}) as answer:
            lines = answer.iter_lines()
            seen = [next(lines) for _ in range(3)]
            assert ": keep-alive" in seen
            slowed.set()
            assert "data: [DONE]" in list(lines)


# Ending.


def test_a_server_that_ends_finishes_what_it_has(start: Start, slowed: Gate) -> None:
    """Requests in progress, streaming or not, are served to their end; new ones are told to go elsewhere."""
    with start() as server:
        http, other = server.http(), server.http()
        assert other.get("/ready").status_code == 200
        slowed.clear()
        done: list[Any] = []

        def ask(stream: bool) -> None:
            with server.http() as own:
                done.append(own.post("/v1/completions", json={**LONG, "max_tokens": 40, "stream": stream}))

        threads = [threading.Thread(target=ask, args=(stream,)) for stream in (True, False, True, False)]
        for thread in threads:
            thread.start()
        until(lambda: server.llm.engine.requests == 4)
        server.end()
        until(lambda: server.service.draining)
        assert other.get("/ready").json() == {"status": "draining"}
        assert http.get("/health").status_code == 200
        refused = http.post("/v1/completions", json=SHORT)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert refused.headers["connection"] == "close"
        slowed.set()
        for thread in threads:
            thread.join(300)
        assert [answer.status_code for answer in done] == [200] * 4
        assert all(answer.text.count("[DONE]") == 1 or answer.json()["usage"] for answer in done)


def test_requests_that_take_longer_than_the_grace_are_told(start: Start, slowed: Gate) -> None:
    with start(grace_s=3600) as server:
        slowed.clear()
        answers: list[httpx.Response] = []

        def ask(stream: bool) -> None:
            with server.http() as http:
                answers.append(http.post("/v1/completions", json={**LONG, "stream": stream}))

        threads = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
        for thread in threads:
            thread.start()
        until(lambda: server.llm.engine.requests == 2)
        server.end()
        until(lambda: server.service.draining)
        server.elapse(3601)
        until(lambda: server.llm._driver._closing.is_set())
        slowed.set()
        for thread in threads:
            thread.join(300)
        assert sorted(answer.status_code for answer in answers) == [200, 503]
        (streamed,) = [answer for answer in answers if answer.status_code == 200]
        assert "draining" in streamed.text


def test_a_day_of_mixed_requests_leaves_nothing(start: Start, executor: Executor) -> None:
    """80 requests of all kinds, a third of them cancelled: pages, requests, handles and tasks are gone at the end."""
    dice = random.Random(5)

    async def day(server: Running) -> None:
        gate = asyncio.Semaphore(24)
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:

            async def one(seed: int) -> None:
                asked: dict[str, Any] = {
                    "prompt": [dice.randrange(1000) for _ in range(dice.randrange(1, 80))],
                    "max_tokens": dice.randrange(1, 30),
                    "n": dice.choice([1, 1, 1, 3]),
                    "seed": seed,
                    "stream": dice.random() < 0.5,
                    "logprobs": dice.choice([None, None, 3]),
                    "kv_out": dice.random() < 0.2,
                }
                patience_s = dice.random() * 0.2 if dice.random() < 0.33 else 60
                async with gate:
                    try:
                        async with asyncio.timeout(patience_s):
                            answer = await http.post("/v1/completions", json=asked)
                            assert answer.status_code in (200, 409), answer.text
                    except TimeoutError:
                        pass

            await asyncio.gather(*(one(seed) for seed in range(80)))
            for kept in (await http.get("/v1/kv")).json()["data"]:
                await http.delete(f"/v1/kv/{kept['id']}")

    with start(EngineConfig(max_handles=20)) as server:
        asyncio.run(day(server))
        until(lambda: server.llm.engine.requests == 0)
        until(lambda: executor.pool.usage().used == 0)
        until(lambda: not server.listener.server_state.tasks)
        assert server.service.draining is False
        assert len(server.llm._handles) == 0


def test_clock_jumps_do_not_end_requests(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only monotonic clocks decide anything; the wall clock is shown and nothing else."""
    with start() as server, server.http() as http:
        honest = time.time
        monkeypatch.setattr(time, "time", lambda: honest() - 10**7)
        answer = http.post("/v1/completions", json=SHORT)
        assert answer.status_code == 200
        assert answer.json()["created"] < honest() - 10**6
        made = http.post("/v1/kv", json={"prompt": [5, 6], "ttl_s": 60}).json()
        monkeypatch.setattr(time, "time", lambda: honest() + 10**7)
        assert http.get(f"/v1/kv/{made['id']}").status_code == 200
        http.delete(f"/v1/kv/{made['id']}")
