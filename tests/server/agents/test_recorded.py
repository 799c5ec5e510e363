"""Kept requests of agents' clients: the server takes each of them, and its answer has the calls that the client made.

`python -m pytest --slow --record-agents tests/server/agents` records them anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import recorded
from agent_clients import AGENTS, PACKAGES
from scripted_server import scripted

from kvilt.executor.protocol import Executor
from kvilt.text.tokenizer import Tokenizer

Call = tuple[str, dict[str, Any]]
PAGE_TOKENS = 32


def answered_calls(events: list[dict[str, Any]]) -> list[Call]:
    """The calls of an answer, in any of the three APIs."""
    last = events[-1]
    if last["type"] == "response.completed":
        return [_call_item(item) for item in last["response"]["output"] if item["type"].endswith("_call")]
    calls: dict[int, list[str]] = {}
    for event in events:
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            calls[event["index"]] = [event["content_block"]["name"], ""]
        elif event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            calls[event["index"]][1] += event["delta"]["partial_json"]
        for call in _chat_deltas(event):
            calls.setdefault(call["index"], [call["function"].get("name"), ""])[1] += call["function"]["arguments"]
    return [(name, json.loads(arguments)) for name, arguments in calls.values()]


def _chat_deltas(event: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for choice in event.get("choices", ()):
        yield from choice["delta"].get("tool_calls", ())


def made_calls(body: dict[str, Any]) -> list[Call]:
    """The calls of the latest answer that a request replays."""
    if "input" in body:
        return [_call_item(item) for item in body["input"][-2:] if item["type"].endswith("_call")]
    content = body["messages"][-2]
    if "tool_calls" in content:
        return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in content["tool_calls"]]
    return [(block["name"], block["input"]) for block in content["content"] if block["type"] == "tool_use"]


def _call_item(item: dict[str, Any]) -> Call:
    name = ".".join(item[part] for part in ("namespace", "name") if part in item) or item["type"]
    arguments = item.get("arguments", {"input": item.get("input")})
    return name, json.loads(arguments) if isinstance(arguments, str) else arguments


def counts(events: list[dict[str, Any]]) -> tuple[int, int]:
    """The tokens of a prompt, and those of them that were cached."""
    for event in reversed(events):
        usage = event.get("usage") or event.get("response", {}).get("usage")
        if usage and "prompt_tokens" in usage:
            return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
        if usage and "cache_read_input_tokens" in usage:
            read = usage["cache_read_input_tokens"]
            return usage["input_tokens"] + read + usage["cache_creation_input_tokens"], read
        if usage:
            return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    raise AssertionError("no usage")


def sse(text: str) -> list[dict[str, Any]]:
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [{"type": "", **json.loads(one)} for one in data if one != "[DONE]"]


@pytest.mark.parametrize("name", AGENTS)
def test_recorded_requests_are_answered(name: str, roomy: Executor, tokenizer: Tokenizer) -> None:
    agent, requests = AGENTS[name], recorded.read(name)
    roomy.prefixes.clear()
    turns: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    with scripted(roomy, tokenizer, agent.script(f"{recorded.WORK}/greeting.py"), aliases=agent.aliases) as running:
        http = running.server.http()
        for one in requests:
            answer = http.post(one["path"], json=one["body"], headers=one["headers"])
            assert answer.status_code == 200, answer.text
            assert answer.headers["content-type"].startswith("text/event-stream")
            if "tools" in json.dumps(one["body"]):  # requests for a title have none
                turns.append((one["body"], sse(answer.text)))
    assert len(turns) > 1
    for (_, before), (body, events) in pairwise(turns):
        for answered, made in zip(answered_calls(before), made_calls(body), strict=True):
            assert answered[0] == made[0]
            assert answered[1].items() <= made[1].items()  # clients add defaults
        prompt, cached = counts(before)[0], counts(events)[1]
        assert cached >= prompt - PAGE_TOKENS, "the next turn computes only what is new"
    assert answered_calls(turns[-1][1]) == []


def test_recordings_are_small_and_of_no_machine() -> None:
    for name in AGENTS:
        text = (recorded.FOLDER / f"{name}.json").read_text(encoding="utf-8")
        assert len(text) < 50_000
        assert not re.search(r"/tmp|/root/|/home/(?!user)|\bsk-|127\.0\.0\.1", text)


def test_versions_are_exact() -> None:
    versions = json.loads(PACKAGES.read_text())["dependencies"].values()
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in versions)
