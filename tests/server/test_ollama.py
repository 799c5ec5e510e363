"""Ollama's API through the real ollama client; the library's own chat is the oracle."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import ollama
import pytest
from running import QUESTION, Running, say

from kvilt import LLM
from kvilt.executor.protocol import Executor
from kvilt.server.ollama.writer import OllamaParts
from kvilt.text.parse import parser_named
from kvilt.text.tokenizer import Tokenizer

Start = Callable[..., Any]
OPTIONS = {"temperature": 0, "num_predict": 8, "repeat_penalty": 1.0, "top_p": 1.0}
SHORT: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "options": OPTIONS}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture(scope="module")
def llm(executor: Executor, tokenizer: Tokenizer) -> LLM:
    return LLM(executor, tokenizer)


def test_chat_is_what_the_library_says(server: Running, llm: LLM) -> None:
    expected = llm.chat(QUESTION, max_tokens=8)
    done = server.ollama().chat(**SHORT)
    assert done.message.content == expected.text
    assert (done.model, done.done, done.done_reason) == ("tiny", True, "length")
    assert (done.prompt_eval_count, done.eval_count) == (expected.usage.prompt_tokens, 8)
    assert (done.total_duration or 0) >= (done.prompt_eval_duration or 0) > 0
    chunks = list(server.ollama().chat(**SHORT, stream=True))
    assert "".join(chunk.message.content or "" for chunk in chunks) == expected.text
    assert [chunk.done for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].eval_count == 8


def test_generate_answers_a_prompt_or_continues_it(server: Running, llm: LLM) -> None:
    prompt = {"model": "tiny", "prompt": "What is the capital of Germany?", "options": OPTIONS}
    assert server.ollama().generate(**prompt).response == llm.chat(QUESTION, max_tokens=8).text
    told = llm.chat([{"role": "system", "content": "Be brief."}, *QUESTION], max_tokens=8)
    assert server.ollama().generate(**prompt, system="Be brief.").response == told.text
    raw = llm.generate(prompt["prompt"], max_tokens=8)
    assert server.ollama().generate(**prompt, raw=True).response == raw.text
    chunks = list(server.ollama().generate(**prompt, raw=True, stream=True))
    assert "".join(chunk.response or "" for chunk in chunks) == raw.text


def lines(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with http.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in answer.iter_lines()]


def test_streaming_is_the_default_and_counts_come_last(server: Running) -> None:
    with server.http() as http:
        found = lines(http, "/api/chat", SHORT)
        assert all("eval_count" not in line and not line["done"] for line in found[:-1])
        assert found[-1]["kvilt"]["computed"] + found[-1]["kvilt"]["prefix_hit"] == found[-1]["prompt_eval_count"]
        assert "logprobs" not in found[0]
        scored = lines(http, "/api/chat", {**SHORT, "logprobs": True, "top_logprobs": 2})
        tokens = [entry for line in scored for entry in line.get("logprobs", ())]
        assert len(tokens) == 8
        assert {len(entry["top_logprobs"]) for entry in tokens} == {2}


def test_calls_and_thinking_come_in_parts_of_their_own(start: Start, monkeypatch: Any) -> None:
    say(monkeypatch, f"<think>It is Paris.</think>\n\nI look.\n{CALL}\n{CALL}")
    with start() as server:
        monkeypatch.setattr(server.service, "parser", parser_named("qwen3"))
        fields = {**SHORT, "tools": [WEATHER], "think": True, "options": {**OPTIONS, "num_predict": 300}}
        whole = server.ollama().chat(**fields).message
        chunks = [chunk.message for chunk in server.ollama().chat(**fields, stream=True)]
        calls = [call for chunk in chunks for call in chunk.tool_calls or ()]
        assert "".join(chunk.thinking or "" for chunk in chunks) == whole.thinking == "It is Paris."
        assert (whole.content or "").strip() == "I look."
        assert "".join(chunk.content or "" for chunk in chunks).strip() == "I look."
        assert [call.function.arguments for call in calls] == [{"city": "Paris"}] * 2
        assert whole.tool_calls == calls
        shown = server.ollama().show("tiny")
        assert shown.capabilities == ["completion", "embedding", "tools", "thinking"]


def test_a_conversation_with_calls_goes_on(start: Start, monkeypatch: Any) -> None:
    seen: list[Any] = []
    with start() as server:
        honest = server.llm.stream_chat
        monkeypatch.setattr(
            server.llm,
            "stream_chat",
            lambda messages, *given, **more: seen.append(messages) or honest(messages, *given, **more),
        )
        call = {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
        turns = [
            *QUESTION,
            {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [call, call]},
            {"role": "tool", "content": "Sunny.", "tool_name": "weather"},
            {"role": "tool", "content": "Rain.", "tool_name": "weather"},
        ]
        assert server.ollama().chat(**{**SHORT, "messages": turns}).message.content
    (messages,) = seen
    first, second = (one["id"] for one in messages[1]["tool_calls"])
    assert first != second
    assert [message.get("tool_call_id") for message in messages[2:]] == [first, second]
    assert messages[1]["reasoning_content"] == "Hm."
    assert messages[2]["name"] == "weather"


def test_formats_are_followed(server: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    fields = {**SHORT, "options": {**OPTIONS, "num_predict": 60}}
    assert json.loads(server.ollama().chat(**fields, format=schema).message.content or "")["a"] in (1, 2)
    assert (server.ollama().chat(**fields, format="json").message.content or "").lstrip().startswith("{")


def test_options_left_out_are_the_models_own(start: Start, monkeypatch: Any, llm: LLM) -> None:
    seen: list[Any] = []
    with start() as server:
        honest = server.llm.stream_chat
        monkeypatch.setattr(
            server.llm,
            "stream_chat",
            lambda messages, params, **more: seen.append(params) or honest(messages, params, **more),
        )
        server.ollama().chat(model="tiny", messages=QUESTION, options={"num_predict": 1, "seed": 5, "stop": ["x"]})
        own = server.llm.sampling_defaults.params
    (params,) = seen
    assert (params.temperature, params.top_p, params.repetition_penalty) == (
        own.temperature,
        own.top_p,
        own.repetition_penalty,
    )
    assert (params.max_tokens, params.seed, params.stop) == (1, 5, ("x",))


def test_models_are_listed_and_described(server: Running) -> None:
    (model,) = server.ollama().list().models
    assert model.model == "tiny"
    assert (model.size or 0) > 0
    (loaded,) = server.ollama().ps().models
    assert (loaded.model, loaded.context_length) == ("tiny", 1024)
    shown = server.ollama().show("tiny:latest")
    assert shown.modelinfo is not None
    assert shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"] == 1024
    assert "completion" in (shown.capabilities or ())
    with server.http() as http:
        assert http.get("/api/version").json()["version"].count(".") == 2
        for path, said in (("/api/chat", "message"), ("/api/generate", "response")):
            loaded_ = http.post(path, json={"model": "tiny", "keep_alive": "5m"}).json()
            assert (loaded_["done"], loaded_["done_reason"]) == (True, "load")
            assert said in loaded_
            assert http.post(path, json={"model": "tiny", "keep_alive": 0}).json()["done_reason"] == "unload"


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages.0.images"),
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"options": {"mirostat": 2}}, "options.mirostat"),
        ({"options": {"unheard_of": 1}}, "options.unheard_of"),
        ({"options": {"stop": [""]}}, "options.stop.0"),
        ({"format": {"type": 5}}, "format"),
        ({"format": "xml"}, "format"),
        ({"think": "huge"}, "think"),
        ({"tools": [WEATHER, WEATHER]}, "weather"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
def test_what_is_wrong_is_refused_by_name(server: Running, change: dict[str, Any], part: str) -> None:
    with pytest.raises(ollama.ResponseError) as refused, server.http() as http:
        answer = http.post("/api/chat", json={**SHORT, **change})
        assert set(answer.json()) == {"error"}
        raise ollama.ResponseError(answer.text, answer.status_code)
    assert refused.value.status_code == 400
    assert part in refused.value.error


def test_other_errors_have_the_same_shape(server: Running, start: Start, monkeypatch: Any) -> None:
    with pytest.raises(ollama.ResponseError, match="no model") as refused:
        server.ollama().chat(model="other", messages=QUESTION)
    assert refused.value.status_code == 404
    with server.http() as http:
        assert set(http.post("/api/pull", json={"model": "x"}).json()) == {"error"}
        assert set(http.post("/api/chat", content=b"{", headers={"content-type": "application/json"}).json()) == {
            "error"
        }
    with start() as own:
        monkeypatch.setattr(OllamaParts, "shown", lambda self, parts: 1 / 0)
        with pytest.raises(ollama.ResponseError, match="internal error"):
            list(own.ollama().chat(**SHORT, stream=True))
