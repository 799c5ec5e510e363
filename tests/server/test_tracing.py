"""Every route is a span, and every route that runs the model has OpenTelemetry's attributes for generative AI.

A route that is added needs a line in `ROUTES`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from running import QUESTION, Running, until

from kvilt.server.auth import Caller
from kvilt.server.batches.lines import read_lines
from kvilt.server.batches.runner import ROUTES as BATCH_ROUTES
from kvilt.server.batches.runner import BatchRunner, in_turn

Start = Callable[..., Any]
SAMPLED = {"temperature": 0.5, "top_p": 0.9}
CHAT = {"model": "tiny", "messages": QUESTION, **SAMPLED}
# The operation and a request for every route that runs the model; None for those that do not.
ROUTES: dict[str, tuple[str, dict[str, Any]] | None] = {
    "POST /v1/chat/completions": ("chat", {**CHAT, "max_tokens": 3}),
    "POST /v1/completions": ("text_completion", {"model": "tiny", "prompt": "x", "max_tokens": 3, **SAMPLED}),
    "POST /v1/responses": ("chat", {"model": "tiny", "input": "x", "max_output_tokens": 3, **SAMPLED}),
    "POST /v1/messages": ("chat", {**CHAT, "max_tokens": 3}),
    "POST /api/chat": ("chat", {"model": "tiny", "messages": QUESTION, "options": {"num_predict": 3, **SAMPLED}}),
    "POST /api/generate": ("chat", {"model": "tiny", "prompt": "x", "options": {"num_predict": 3, **SAMPLED}}),
    "POST /v1/embeddings": ("embeddings", {"model": "tiny", "input": ["x", "y"]}),
    "POST /v1/score": ("score", {"model": "tiny", "text_1": "x", "text_2": ["y", "z"]}),
    "POST /v1/rerank": ("rerank", {"model": "tiny", "query": "x", "documents": ["y", "z"]}),
    "POST /api/embed": ("embeddings", {"model": "tiny", "input": ["x"]}),
    "POST /api/embeddings": ("embeddings", {"model": "tiny", "prompt": "x"}),
    "POST /v1/responses/input_tokens": None,
    "GET /v1/responses/{name}": None,
    "DELETE /v1/responses/{name}": None,
    "POST /v1/responses/{name}/cancel": None,
    "POST /v1/files": None,
    "GET /v1/files": None,
    "GET /v1/files/{name}": None,
    "DELETE /v1/files/{name}": None,
    "GET /v1/files/{name}/content": None,
    "POST /v1/batches": None,
    "GET /v1/batches": None,
    "GET /v1/batches/{name}": None,
    "POST /v1/batches/{name}/cancel": None,
    "POST /v1/messages/count_tokens": None,
    "GET /api/version": None,
    "GET /api/tags": None,
    "GET /api/ps": None,
    "POST /api/show": None,
    "GET /v1/models": None,
    "GET /v1/models/{name}": None,
    "POST /tokenize": None,
    "POST /detokenize": None,
    "GET /tokenizer_info": None,
    "POST /v1/kv": None,
    "POST /v1/kv/chunks": None,
    "GET /v1/kv": None,
    "GET /v1/kv/state": None,
    "GET /v1/kv/certificates": None,
    "GET /v1/kv/saved": None,
    "DELETE /v1/kv/saved/{name}": None,
    "POST /v1/kv/restore": None,
    "GET /v1/kv/{handle}": None,
    "DELETE /v1/kv/{handle}": None,
    "POST /v1/kv/{handle}/fork": None,
    "POST /v1/kv/{handle}/truncate": None,
    "POST /v1/kv/{handle}/pin": None,
    "POST /v1/kv/{handle}/save": None,
    "POST /v1/kv/{handle}/replace": None,
    "GET /v1/sessions": None,
    "GET /v1/sessions/{name}": None,
    "DELETE /v1/sessions/{name}": None,
    "POST /v1/sessions/{name}/fork": None,
    "GET /v1/sessions/{name}/export": None,
    "POST /v1/sessions/import": None,
    "POST /v1/sessions/export": None,
    "GET /v1/chats": None,
    "GET /v1/chats/{name}": None,
    "PUT /v1/chats/{name}": None,
    "POST /v1/chats/{name}": None,
    "DELETE /v1/chats/{name}": None,
    "POST /v1/documents/text": None,
    "POST /reset_prefix_cache": None,
    "POST /v1/load_lora_adapter": None,
    "POST /v1/unload_lora_adapter": None,
    "GET /health": None,
    "GET /ready": None,
    "GET /version": None,
    "GET /metrics": None,
}
STREAMS = [name for name, given in ROUTES.items() if given is not None and given[0] in ("chat", "text_completion")]
KNOWN = {value for value in vars(gen_ai_attributes).values() if isinstance(value, str)}


def only_span(exported: InMemorySpanExporter) -> ReadableSpan:
    until(lambda: len(exported.get_finished_spans()) == 1)
    (span,) = exported.get_finished_spans()
    exported.clear()
    return span


def attributes(span: ReadableSpan) -> Mapping[str, Any]:
    assert span.attributes is not None
    own = {name for name in span.attributes if name.startswith("gen_ai.")}
    assert own <= KNOWN, "names of the conventions only"
    return span.attributes


def test_every_route_is_listed(server: Running) -> None:
    with server.http() as http:
        paths = http.get("/openapi.json").json()["paths"]
    found = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert found == set(ROUTES)


def test_every_route_is_a_span(server: Running, exported: InMemorySpanExporter) -> None:
    with server.http() as http:
        for name in ROUTES:
            method, _, path = name.partition(" ")
            asked = path.replace("{name}", "nothing").replace("{handle}", "nothing")
            body: dict[str, Any] = {"files": {"file": b"x"}} if asked == "/v1/files" else {"json": {}}
            answer = http.request(method, asked, **(body if method == "POST" else {}))
            span = only_span(exported)
            seen = attributes(span)
            assert span.name == seen["http.route"]
            assert span.name.replace(":path", "") == path
            assert span.kind == trace.SpanKind.SERVER
            assert seen["http.request.method"] == method
            assert seen["http.response.status_code"] == answer.status_code
            assert seen.get("error.type") == (str(answer.status_code) if answer.is_error else None)


@pytest.mark.parametrize("name", [name for name, given in ROUTES.items() if given is not None])
def test_a_route_that_runs_the_model_says_so(server: Running, exported: InMemorySpanExporter, name: str) -> None:
    given = ROUTES[name]
    assert given is not None
    operation, body = given
    with server.http() as http:
        for stream in (False, True) if name in STREAMS else (None,):
            asked = body if stream is None else {**body, "stream": stream}
            answer = http.post(name.partition(" ")[2], json=asked)
            assert answer.status_code == 200, answer.text
            seen = attributes(only_span(exported))
            assert seen["gen_ai.operation.name"] == operation
            assert seen["gen_ai.provider.name"] == "kvilt"
            assert seen["gen_ai.request.model"] == seen["gen_ai.response.model"] == "tiny"
            assert seen["gen_ai.usage.input_tokens"] > 0
            if stream is None:
                continue
            assert seen["gen_ai.request.stream"] == stream
            assert seen["gen_ai.request.temperature"] == 0.5
            assert seen["gen_ai.request.top_p"] == 0.9
            assert seen["gen_ai.request.max_tokens"] == seen["gen_ai.usage.output_tokens"] == 3
            assert seen["gen_ai.response.finish_reasons"] == ("length",)
            assert seen["gen_ai.response.id"]
            read, created = (seen[f"gen_ai.usage.cache_{kind}.input_tokens"] for kind in ("read", "creation"))
            assert read + created == seen["gen_ai.usage.input_tokens"]


def test_the_model_is_named_as_the_request_names_it(start: Start, exported: InMemorySpanExporter) -> None:
    with start(aliases=(("claude-*", "tiny"),)) as server, server.http() as http:
        http.post("/v1/messages", json={**CHAT, "model": "claude-some", "max_tokens": 1})
        seen = attributes(only_span(exported))
    assert (seen["gen_ai.request.model"], seen["gen_ai.response.model"]) == ("claude-some", "tiny")


def test_samples_and_stops_are_told(server: Running, exported: InMemorySpanExporter) -> None:
    with server.http() as http:
        more = {"n": 2, "stop": ["never"], "top_k": 5, "presence_penalty": 0.5, "seed": 3}
        http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 2, **more})
    seen = attributes(only_span(exported))
    assert seen["gen_ai.request.choice.count"] == 2
    assert seen["gen_ai.request.stop_sequences"] == ("never",)
    assert (seen["gen_ai.request.top_k"], seen["gen_ai.request.presence_penalty"]) == (5, 0.5)
    assert len(seen["gen_ai.response.finish_reasons"]) == 2


BATCHED: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/chat/completions": ("chat", {"messages": QUESTION, "max_tokens": 2}),
    "/v1/completions": ("text_completion", {"prompt": "x", "max_tokens": 2}),
    "/v1/embeddings": ("embeddings", {"input": "x"}),
    "/v1/responses": ("chat", {"input": "x", "max_output_tokens": 2, "store": False}),
}


def test_every_request_of_a_batch_is_a_span(server: Running, exported: InMemorySpanExporter) -> None:
    assert set(BATCHED) == set(BATCH_ROUTES)
    lines = [json.dumps({"custom_id": url, "url": url, "body": body}) for url, (_, body) in BATCHED.items()]
    runner = BatchRunner(server.service, Caller())
    answers: list[dict[str, Any]] = []

    async def write(answer: dict[str, Any]) -> None:
        answers.append(answer)

    asyncio.run_coroutine_threadsafe(runner.run(in_turn(read_lines(lines)), write), server.loop).result(300)
    spans = {span.attributes["http.route"]: span for span in exported.get_finished_spans()}  # type: ignore[index]
    assert set(spans) == set(BATCHED)
    for answer in answers:
        url, body = answer["custom_id"], answer["response"]["body"]
        seen = attributes(spans[url])
        assert seen["kvilt.batch.custom_id"] == url
        assert seen["gen_ai.operation.name"] == BATCHED[url][0]
        assert seen.get("gen_ai.response.id") == body.get("id"), "an embedding has none"
        usage = body["usage"]
        assert seen["gen_ai.usage.input_tokens"] == usage.get("prompt_tokens", usage.get("input_tokens"))


def test_nothing_is_traced_without_the_library(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvilt.server.tracing.traced", False)
    with server.http() as http:
        for name, given in ROUTES.items():
            if given is not None:
                assert http.post(name.partition(" ")[2], json=given[1]).status_code == 200
