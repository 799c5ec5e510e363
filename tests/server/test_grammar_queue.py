"""Grammars of requests wait for a few workers: a client that leaves frees its place, and keys take turns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from running import Running, until

from kvilt.sampling.compile_worker import CompileCancelled, CompileWorker
from kvilt.sampling.constraint import Constraint, Regex
from kvilt.sampling.grammar import Compiler, Grammar, GrammarLimits

Start = Callable[..., Any]
WORKERS = GrammarLimits().compilers
KEYS = ("sk-test-first-key", "sk-test-second-key")


class HeldCompiler:
    """Grammars that begin with "held" are compiled until their worker is cancelled; others as ever."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []  # patterns that a worker has got
        self.cancelled: list[str] = []
        self._cancelled_workers: dict[CompileWorker, threading.Event] = {}
        self._honest = Compiler._tried
        monkeypatch.setattr(Compiler, "_tried", lambda *given: self._tried(*given))
        monkeypatch.setattr(CompileWorker, "cancel", lambda worker: self._event(worker).set())

    def _event(self, worker: CompileWorker) -> threading.Event:
        return self._cancelled_workers.setdefault(worker, threading.Event())

    def _tried(self, compiler: Compiler, constraint: Constraint, worker: CompileWorker) -> Grammar:
        assert isinstance(constraint, Regex)
        self.begun.append(constraint.pattern)
        if constraint.pattern.startswith("held"):
            self._event(worker).wait()
            self._event(worker).clear()
            self.cancelled.append(constraint.pattern)
            raise CompileCancelled
        return self._honest(compiler, constraint, worker)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> HeldCompiler:
    return HeldCompiler(monkeypatch)


def asked(pattern: str) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": 4, "response_format": {"type": "regex", "regex": pattern}}


def waiting(server: Running) -> int:
    queue = server.llm.grammars.compiler._queue
    assert queue is not None
    return len(queue._queue)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_while_its_grammar_compiles_frees_its_place(
    start: Start, held: HeldCompiler, stream: bool
) -> None:
    running = [f"held {i}" for i in range(WORKERS)]
    with start() as server, server.http() as http, ExitStack() as others:
        leaves = ExitStack()
        for i, pattern in enumerate(running):
            client = server.asking("/v1/completions", {**asked(pattern), "stream": stream})
            (others if i else leaves).enter_context(client)
            until(lambda i=i: len(held.begun) == i + 1, "a worker")  # type: ignore[misc]
        with server.asking("/v1/completions", {**asked("held in the queue"), "stream": stream}):
            until(lambda: waiting(server) == 1)
        until(lambda: waiting(server) == 0, "leaving the queue")
        assert held.cancelled == []
        leaves.close()
        assert http.post("/v1/completions", json=asked("yes")).json()["choices"][0]["text"] == "yes"
        assert held.begun == [*running, "yes"] and held.cancelled == running[:1]
        others.close()
        until(lambda: server.service._in_progress == 0)
        assert server.llm.engine.requests == 0


def test_a_key_that_queues_many_slow_grammars_does_not_starve_another_key(start: Start, held: HeldCompiler) -> None:
    def many(pattern: str) -> Any:
        return server.asking("/v1/completions", asked(pattern), KEYS[0])

    with start(api_keys=KEYS) as server, ExitStack() as others:
        running = [ExitStack() for _ in range(WORKERS)]
        for i, client in enumerate(running):
            client.enter_context(many(f"held {i}"))
            until(lambda i=i: len(held.begun) == i + 1, "a worker")  # type: ignore[misc]
        for i in range(GrammarLimits().waiting):
            others.enter_context(many(f"held in the queue {i}"))
        until(lambda: waiting(server) == GrammarLimits().waiting)
        refused = server.http().post("/v1/completions", json=asked("one more"), headers=bearer(KEYS[0]))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        with server.asking("/v1/completions", asked("yes"), KEYS[1]) as other:
            until(lambda: waiting(server) == GrammarLimits().waiting + 1)
            for client in running:  # two places: one for each key
                client.close()
            assert b"200 OK" in other.recv(65536)
        assert "yes" in held.begun[WORKERS : WORKERS + 2]
        assert waiting(server) >= GrammarLimits().waiting - 2


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
