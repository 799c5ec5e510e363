"""Work on behalf of requests is off the event loop, has a deadline, and ends with its client, in every phase."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from running import PATIENCE, QUESTION, Running, until
from test_http_protocol import connected, request

from kvilt.config import EngineConfig
from kvilt.llm.async_llm import AsyncLLM
from kvilt.llm.offload import PARSE, PROMPT, TOKENIZE, Offload
from kvilt.server import app
from kvilt.server.http import body
from kvilt.server.metrics import EventLoopMonitor
from kvilt.server.openai import chat, completions, tokenizer

Start = Callable[..., Any]
LARGE = "x " * 4000
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "parse": ("/v1/completions", {"prompt": LARGE}),
    "check": ("/v1/chat/completions", {"messages": QUESTION}),
    "prompt": ("/v1/completions", {"prompt": "x", "max_tokens": 1}),
    "chat": ("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 1}),
    "stream": ("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 1, "stream": True}),
    "kv": ("/v1/kv", {"prompt": "x"}),
    "chunks": ("/v1/kv/chunks", {"documents": ["x"]}),
    "tokenize": ("/tokenize", {"messages": QUESTION}),
    "detokenize": ("/detokenize", {"tokens": [1]}),
}


class Endless:
    """Replaces a piece of work by one that only ends when it is ended."""

    def __init__(self) -> None:
        self.begun = threading.Event()

    def __call__(self, *_given: Any, **_more: Any) -> Any:
        self.begun.set()
        while True:
            pass


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Endless]:
    def replaced(phase: str) -> Endless:
        made = Endless()
        place: tuple[Any, str] = {
            "parse": (body, "parse_json"),
            "check": (chat, "template_messages"),
            "prompt": (AsyncLLM, "prompt_ids"),
            "chat": (AsyncLLM, "chat_ids"),
            "stream": (AsyncLLM, "chat_ids"),
            "kv": (AsyncLLM, "prompt_ids"),
            "chunks": (Documents, "ids"),
            "tokenize": (tokenizer, "template_messages"),
            "detokenize": (tokenizer, "json_response"),
        }[phase]
        monkeypatch.setattr(*place, made)
        return made

    from kvilt.llm.blend import Documents

    return replaced


def idle(server: Running) -> bool:
    return all(load == (0, 0) for load in server.llm.offload.load().values())


@pytest.mark.parametrize("phase", BODIES)
def test_a_client_that_leaves_ends_what_is_done_for_it(
    start: Start, endless: Callable[[str], Endless], phase: str
) -> None:
    """While it runs others are served."""
    work = endless(phase)
    with start() as server, server.http() as http:
        path, asked = BODIES[phase]
        with connected(server) as one:
            one.sendall(request(json.dumps(asked).encode(), path))
            assert work.begun.wait(30)
            assert http.get("/health").status_code == 200
            assert not idle(server)
        until(lambda: idle(server), "ending")
        until(lambda: server.service._in_progress == 0)
        assert server.llm.engine.requests == 0
        ends = server.service.metrics.snapshot()["kvilt_http_requests_total"]["series"]
        assert {one["labels"]["status"] for one in ends} == {"200", "499"}, "not by its deadline"


@pytest.mark.parametrize("phase", ["parse", "check", "prompt", "tokenize"])
def test_work_that_takes_too_long_is_refused_and_ended(
    start: Start, endless: Callable[[str], Endless], monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    module, lane = {
        "parse": (body, PARSE),
        "check": (chat, PROMPT),
        "prompt": (completions, PROMPT),
        "tokenize": (tokenizer, TOKENIZE),
    }[phase]
    monkeypatch.setattr(module, lane.name.upper(), replace(lane, deadline_s=0.1 / PATIENCE))
    with start() as server, server.http() as http:
        path, asked = BODIES[phase]
        endless(phase)
        late = http.post(path, json=asked)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "took_too_long")
        until(lambda: idle(server), "ending")


def test_a_caller_whose_own_time_ends_at_the_same_moment_hears_of_that() -> None:
    release = threading.Event()

    async def ended() -> None:
        async with asyncio.timeout(0):
            await Offload().run(replace(PARSE, deadline_s=0.0), release.wait)

    try:
        with pytest.raises(TimeoutError):
            asyncio.run(ended())
    finally:
        release.set()


def test_a_full_queue_refuses_its_own_kind_alone(
    start: Start, endless: Callable[[str], Endless], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "TOKENIZE", replace(TOKENIZE, threads=1, waiting=1))
    with start() as server, server.http() as http:
        endless("detokenize")
        path, asked = BODIES["detokenize"]
        with connected(server) as one, connected(server) as two:
            one.sendall(request(json.dumps(asked).encode(), path))
            until(lambda: server.llm.offload.load().get("tokenize") == (1, 0))
            two.sendall(request(json.dumps(asked).encode(), path))
            until(lambda: server.llm.offload.load().get("tokenize") == (1, 1))
            full = http.post(path, json=asked)
            assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
            assert http.post("/v1/completions", json={"prompt": LARGE[:600], "max_tokens": 1}).status_code == 200
        until(lambda: idle(server), "ending")


def test_nothing_of_fastapi_runs_in_threads() -> None:
    """Neither routes nor what they depend on: its threads have no bound of ours, and no deadline."""

    def calls(dependant: Dependant) -> Iterator[Any]:
        yield dependant.call
        for each in dependant.dependencies:
            yield from calls(each)

    routes = [route for router in app._ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    assert len(routes) > 20
    for route in routes:
        for call in calls(route.dependant):
            assert inspect.iscoroutinefunction(call), f"{route.path}: {call}"


# Pauses of the loop.


def test_pauses_are_kept_for_a_minute() -> None:
    from kvilt.metrics import Metrics
    from kvilt.server.metrics import SERVER_METRICS

    now_s = 1000.0
    watch = EventLoopMonitor(Metrics(SERVER_METRICS), lambda: now_s)
    assert watch.longest_s() == 0
    watch.note(0.5)
    now_s += 30
    watch.note(0.1)
    assert watch.longest_s() == 0.5
    now_s += 31
    assert watch.longest_s() == 0.1
    now_s += 100
    watch.note(0.01)
    assert watch.longest_s() == 0.01


CALLS = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "[" * 4_000_000}}]
PART = {"type": "text", "text": "x"}
ATTACKS: dict[str, tuple[str, bytes]] = {
    "quotes": ("/v1/completions", b'{"prompt": "' + b'\\"' * 500_000 + b"[" * 65),
    "brackets in text": ("/v1/completions", json.dumps({"prompt": "a [b] " * 1_000_000}).encode()),
    "brackets": ("/v1/completions", b'{"prompt": [' + (b"[" * 60 + b"]" * 60 + b",") * 60_000),
    "numbers": ("/v1/completions", b'{"prompt": [' + b"5," * 260_000 + b"5]}"),
    "escapes": ("/tokenize", b'{"prompt": "' + b"\\u00e9" * 1_300_000 + b'"}'),
    "parts": (
        "/v1/chat/completions",
        json.dumps({"messages": [{"role": "user", "content": [PART] * 80_000}]}).encode(),
    ),
    "arguments": (
        "/v1/chat/completions",
        json.dumps({"messages": [*QUESTION, {"role": "assistant", "tool_calls": CALLS}]}).encode(),
    ),
    "tokens": ("/detokenize", b'{"tokens": [' + b"5," * 260_000 + b"5]}"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_request_stops_the_loop(start: Start, attack: str) -> None:
    """A hostile body is refused, and the loop hardly pauses: the worst of them stopped it for as long as it liked."""
    path, content = ATTACKS[attack]
    with start(EngineConfig()) as server, server.http() as http:
        for _ in range(20):
            assert http.get("/health").status_code == 200
        idle_s = server.service.loop_monitor.longest_s()
        server.service.loop_monitor._longest.clear()
        refused = http.post(path, content=content, headers={"content-type": "application/json"})
        assert refused.status_code in (400, 413), refused.text[:200]
        assert http.get("/health").status_code == 200
        assert server.service.loop_monitor.longest_s() <= 1.0 + 10 * idle_s
        assert "kvilt_event_loop_pause_max_seconds" in http.get("/metrics").text
