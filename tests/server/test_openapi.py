"""The server against its own OpenAPI document: what fits it is taken or refused politely, what does not is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import schemathesis
from effort import examples
from hypothesis import HealthCheck, Phase, given, settings
from running import Running
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CONFORM = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
OPERATIONS = [
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/embeddings",
    "POST /v1/score",
    "POST /v1/rerank",
    "POST /v1/responses",
    "POST /v1/responses/input_tokens",
    "GET /v1/responses/{name}",
    "DELETE /v1/responses/{name}",
    "POST /v1/responses/{name}/cancel",
    "POST /v1/files",
    "GET /v1/files",
    "GET /v1/files/{name}",
    "DELETE /v1/files/{name}",
    "GET /v1/files/{name}/content",
    "POST /v1/batches",
    "GET /v1/batches",
    "GET /v1/batches/{name}",
    "POST /v1/batches/{name}/cancel",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "GET /api/version",
    "GET /api/tags",
    "GET /api/ps",
    "POST /api/show",
    "POST /api/chat",
    "POST /api/generate",
    "POST /api/embed",
    "POST /api/embeddings",
    "GET /v1/models",
    "GET /v1/models/{name}",
    "POST /tokenize",
    "POST /detokenize",
    "GET /tokenizer_info",
    "POST /v1/kv",
    "POST /v1/kv/chunks",
    "GET /v1/kv",
    "GET /v1/kv/state",
    "GET /v1/kv/certificates",
    "GET /v1/kv/saved",
    "DELETE /v1/kv/saved/{name}",
    "POST /v1/kv/restore",
    "GET /v1/kv/{handle}",
    "DELETE /v1/kv/{handle}",
    "POST /v1/kv/{handle}/fork",
    "POST /v1/kv/{handle}/truncate",
    "POST /v1/kv/{handle}/replace",
    "POST /v1/kv/{handle}/pin",
    "POST /v1/kv/{handle}/save",
    "GET /v1/sessions",
    "POST /v1/sessions/import",
    "POST /v1/sessions/export",
    "GET /v1/sessions/{name}",
    "DELETE /v1/sessions/{name}",
    "POST /v1/sessions/{name}/fork",
    "GET /v1/sessions/{name}/export",
    "GET /v1/chats",
    "GET /v1/chats/{name}",
    "PUT /v1/chats/{name}",
    "POST /v1/chats/{name}",
    "DELETE /v1/chats/{name}",
    "POST /v1/documents/text",
    "POST /reset_prefix_cache",
    "POST /v1/load_lora_adapter",
    "POST /v1/unload_lora_adapter",
    "GET /health",
    "GET /ready",
    "GET /version",
    "GET /metrics",
]


@pytest.fixture(scope="module")
def schema(server: Running) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json", timeout=300)


def test_every_route_is_in_the_document_and_tested(schema: schemathesis.BaseSchema) -> None:
    found = {result.ok().label for result in schema.get_all_operations()}
    assert found == set(OPERATIONS)


def ask_for_little(name: str, body: dict[str, Any]) -> None:
    """Ask the model that is there, where one must be named, for a short answer."""
    if "v1/messages" in name or "/api/" in name:
        body["model"] = "tiny"
    if "max_tokens" in body and "v1/messages" in name:
        body["max_tokens"] = 4
    if name == "POST /v1/responses":
        body |= {"max_output_tokens": 4, "previous_response_id": None}
    if name in ("POST /api/chat", "POST /api/generate"):
        body["options"] = {**(body.get("options") or {}), "num_predict": 4}


CASES = [
    *((name, GenerationMode.POSITIVE) for name in OPERATIONS),
    *(
        (name, GenerationMode.NEGATIVE)
        for name in OPERATIONS
        if name.startswith("POST") and not name.endswith(("reset_prefix_cache", "cancel"))
    ),
]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_the_document_is_true(
    server: Running, schema: schemathesis.BaseSchema, name: str, mode: GenerationMode
) -> None:
    operation = next(one.ok() for one in schema.get_all_operations() if one.ok().label == name)
    checks = [*CONFORM, negative_data_rejection] if mode is GenerationMode.NEGATIVE else CONFORM

    @settings(
        max_examples=examples(12) if operation.body else 2,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def holds(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict) and case.body.get("max_tokens", None) is None and "chat" in name:
            case.body["max_tokens"] = 4  # an answer of a whole context takes its time
        if isinstance(case.body, dict) and mode is GenerationMode.POSITIVE:
            ask_for_little(name, case.body)
        if "{handle}" in name and mode is GenerationMode.POSITIVE:
            with server.http() as http:
                case.path_parameters["handle"] = http.post("/v1/kv", json={"prompt": [5, 6, 7]}).json()["id"]
        case.call_and_validate(checks=checks, timeout=300)  # by default 10 s, which a busy machine needs
        for handle in asyncio.run_coroutine_threadsafe(server.llm.kv.owned(), server.loop).result(300):
            asyncio.run_coroutine_threadsafe(server.llm.kv.delete(handle.id), server.loop).result(300)

    holds()
