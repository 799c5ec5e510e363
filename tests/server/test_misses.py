"""`usage.kvilt.miss` on every API, Anthropic's `diagnostics`, and what the metrics count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from running import Running

Start = Callable[..., Any]
RULES = "You answer with care, you use tools where they help, and you never forget what was said before. " * 3


@pytest.fixture
def server(start: Start) -> Iterator[Running]:
    with start() as one:
        one.llm.executor.prefixes.clear()
        yield one


def messages(system: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": "hi"}]


def chat(system: str) -> dict[str, Any]:
    return {"messages": messages(system), "max_tokens": 2, "temperature": 0}


def ask(server: Running, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(server.url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


APIS: dict[str, tuple[str, Callable[[str], dict[str, Any]], Callable[[Any], Any]]] = {
    "chat": ("/v1/chat/completions", chat, lambda answer: answer["usage"]["kvilt"]),
    "completions": (
        "/v1/completions",
        lambda system: {"prompt": system, "max_tokens": 2, "temperature": 0},
        lambda answer: answer["usage"]["kvilt"],
    ),
    "responses": (
        "/v1/responses",
        lambda system: {"instructions": system, "input": "hi", "max_output_tokens": 2, "temperature": 0},
        lambda answer: answer["usage"]["kvilt"],
    ),
    "messages": (
        "/v1/messages",
        lambda system: {
            "model": "tiny",
            "system": system,
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 2,
            "temperature": 0,
        },
        lambda answer: answer["usage"]["kvilt"],
    ),
    "ollama": (
        "/api/chat",
        lambda system: {
            "model": "tiny",
            "messages": messages(system),
            "stream": False,
            "options": {"num_predict": 2, "temperature": 0},
        },
        lambda answer: answer["kvilt"],
    ),
}


@pytest.mark.parametrize("api", APIS)
def test_every_api_says_where_a_prompt_differs(server: Running, api: str) -> None:
    path, body, kvilt = APIS[api]
    first = kvilt(ask(server, path, body(f"Today is Monday.\n{RULES}")))["miss"]
    assert (first["reason"], first["expected"], first["candidates"]) == ("not_stored", 0, [])
    told = kvilt(ask(server, path, body(f"Today is Friday.\n{RULES}")))
    miss = told["miss"]
    assert miss["reason"] == "tokens_differ"
    assert miss["text_around_it"]["earlier"].startswith(" Monday")
    assert miss["text_around_it"]["now"].startswith(" Friday")
    assert miss["text_around_it"]["before"].endswith("Today is")
    assert miss["expected"] > 32 and told["prefix_hit"] == 0
    assert miss["candidates"][0]["shared_tokens"] == miss["first_different_token"]


def test_a_key_sees_nothing_of_another_key(start: Start) -> None:
    with start(api_keys=("one", "two")) as server:
        server.llm.executor.prefixes.clear()
        for key in ("one", "two"):
            answer = httpx.post(
                server.url + "/v1/chat/completions",
                json=chat(RULES),
                headers={"Authorization": f"Bearer {key}"},
                timeout=60,
            ).json()
            miss = answer["usage"]["kvilt"]["miss"]
            assert (miss["reason"], miss["candidates"]) == ("not_stored", [])


def test_another_salt_is_named_without_its_text(server: Running) -> None:
    ask(server, "/v1/chat/completions", {**chat(RULES), "cache_salt": "one"})
    answer = ask(server, "/v1/chat/completions", {**chat(RULES), "cache_salt": "two"})
    miss = answer["usage"]["kvilt"]["miss"]
    assert miss["reason"] == "other_salt"
    assert miss["text_around_it"] is None and miss["candidates"] == [] and miss["first_different_token"] is None


def test_the_last_chunk_of_a_stream_says_it_too(server: Running) -> None:
    body = {**chat(RULES), "stream": True, "stream_options": {"include_usage": True}}
    text = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60).text
    assert '"miss":{"reason":"not_stored"' in text


def test_metrics_count_misses_by_reason(server: Running) -> None:
    ask(server, "/v1/chat/completions", chat(RULES))
    ask(server, "/v1/chat/completions", chat("Now. " + RULES))
    text = httpx.get(server.url + "/metrics", timeout=60).text
    assert 'kvilt_prefix_cache_misses_total{reason="not_stored"} 1' in text
    assert 'kvilt_prefix_cache_misses_total{reason="tokens_differ"} 1' in text


def diagnosed(server: Running, previous: str | None, **changed: Any) -> tuple[str, Any]:
    client = server.anthropic()
    fields: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 2,
        "system": RULES,
        "messages": [{"role": "user", "content": "hi"}],
        **changed,
    }
    answer = client.beta.messages.create(**fields, diagnostics={"previous_message_id": previous})
    return answer.id, answer.diagnostics


def test_diagnostics_name_the_part_that_changed(server: Running) -> None:
    first, nothing = diagnosed(server, None)
    assert nothing is None
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": "?"},
    ]
    tools = [{"name": "now", "input_schema": {"type": "object"}}]
    for changed, expected in (
        ({"system": "Now. " + RULES}, "system_changed"),
        ({"tools": tools}, "tools_changed"),
        ({"messages": [{"role": "user", "content": "ho"}]}, "messages_changed"),
    ):
        _, found = diagnosed(server, first, **changed)
        assert found.cache_miss_reason.type == expected
        assert found.cache_miss_reason.cache_missed_input_tokens >= 0
    _, unknown = diagnosed(server, "msg_0")
    assert unknown.cache_miss_reason.type == "previous_message_not_found"
    second, added = diagnosed(server, first, messages=turns)
    assert added is None or added.cache_miss_reason.type == "unavailable"
    assert second != first


def test_diagnostics_of_a_stream_come_with_its_end(server: Running) -> None:
    body = {
        "model": "tiny",
        "max_tokens": 2,
        "stream": True,
        "messages": [{"role": "user", "content": "hi"}],
        "diagnostics": {"previous_message_id": "msg_0"},
    }
    text = httpx.post(server.url + "/v1/messages", json=body, timeout=60).text
    assert "previous_message_not_found" in text
