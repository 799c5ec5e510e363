"""The Messages API through the real anthropic client; the library's own chat is the oracle."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from running import KEY, QUESTION, Running, say

from kvilt import LLM
from kvilt.config import EngineConfig
from kvilt.executor.protocol import Executor
from kvilt.server.anthropic.blocks import ContentBlocks
from kvilt.text.parse import CallArguments, CallEnd, CallStart, Content, Piece, Reasoning, parser_named
from kvilt.text.tokenizer import Tokenizer

Start = Callable[..., Any]
GREEDY = {"temperature": 0}
SHORT: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "max_tokens": 8, "extra_body": GREEDY}
RAW = {"model": "tiny", "messages": QUESTION, "max_tokens": 8}
WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Berlin", "Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture(scope="module")
def llm(executor: Executor, tokenizer: Tokenizer) -> LLM:
    return LLM(executor, tokenizer)


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_an_answer_is_what_the_library_says(server: Running, llm: LLM) -> None:
    expected = llm.chat(QUESTION, max_tokens=8)
    done = server.anthropic().messages.create(**SHORT)
    assert text_of(done) == expected.text
    assert (done.type, done.role, done.model) == ("message", "assistant", "tiny")
    assert done.id.startswith("msg_")
    assert (done.stop_reason, done.stop_sequence) == ("max_tokens", None)
    assert done.usage.output_tokens == 8
    assert done._request_id


def test_a_stream_joins_to_the_answer(server: Running, llm: LLM) -> None:
    with server.anthropic().messages.stream(**SHORT) as stream:
        events = [event.type for event in stream]
        done = stream.get_final_message()
    assert text_of(done) == llm.chat(QUESTION, max_tokens=8).text
    assert events[0] == "message_start"
    assert events[-2:] == ["message_delta", "message_stop"]
    assert (done.stop_reason, done.usage.output_tokens) == ("max_tokens", 8)


def raw_events(http: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream; each has the name that its data says."""
    with http.stream("POST", "/v1/messages?beta=true", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        blocks = "".join(answer.iter_text()).strip().split("\n\n")
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def check_order(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The state machine of a stream: the message around its blocks, one block at a time. Returns the content."""
    kinds = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}
    assert [event["type"] for event in events[:1]] == ["message_start"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    content: list[dict[str, Any]] = []
    open_, signed, arguments = False, False, ""
    for event in events[1:-2]:
        match event["type"]:
            case "ping":
                pass
            case "content_block_start":
                assert not open_
                assert event["index"] == len(content)
                content.append(dict(event["content_block"]))
                open_, signed, arguments = True, False, ""
            case "content_block_delta":
                assert open_
                assert not signed
                assert event["index"] == len(content) - 1
                block, delta = content[-1], event["delta"]
                if delta["type"] == "signature_delta":
                    assert block["type"] == "thinking"
                    signed, block["signature"] = True, delta["signature"]
                    continue
                assert delta["type"] == kinds[block["type"]]
                if block["type"] == "tool_use":
                    arguments += delta["partial_json"]
                else:
                    block[block["type"]] += delta[block["type"]]
            case "content_block_stop":
                assert open_
                assert event["index"] == len(content) - 1
                assert signed == (content[-1]["type"] == "thinking")
                if content[-1]["type"] == "tool_use" and arguments:
                    content[-1]["input"] = json.loads(arguments)
                open_ = False
            case other:
                raise AssertionError(other)
    assert not open_
    return content


def test_events_come_in_order_and_count_the_prompt_at_the_start(server: Running) -> None:
    with server.http() as http:
        events = raw_events(http, {**RAW, **GREEDY})
    check_order(events)
    begun, ended = events[0]["message"]["usage"], events[-2]["usage"]
    for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"):
        assert begun[name] == ended[name]
    assert (begun["output_tokens"], ended["output_tokens"]) == (0, 8)


def test_stop_sequences_are_named(server: Running, llm: LLM) -> None:
    text = llm.chat(QUESTION, max_tokens=12).text
    stop = text[3:5]
    for stream in (False, True):
        fields = {**SHORT, "max_tokens": 12, "stop_sequences": ["zzzz", stop]}
        if stream:
            with server.anthropic().messages.stream(**fields) as streamed:
                done = streamed.get_final_message()
        else:
            done = server.anthropic().messages.create(**fields)
        assert (done.stop_reason, done.stop_sequence) == ("stop_sequence", stop)
        assert text_of(done) == text[: text.index(stop)]


def test_more_tokens_than_the_context_has_are_taken(server: Running, llm: LLM) -> None:
    long = [{"role": "user", "content": "word " * 980}]
    done = server.anthropic().messages.create(**{**SHORT, "messages": long, "max_tokens": 32000})
    assert done.stop_reason in ("model_context_window_exceeded", "end_turn")


# Messages.


def counted(server: Running, **fields: Any) -> int:
    return server.anthropic().messages.count_tokens(model="tiny", **{"messages": QUESTION, **fields}).input_tokens


def test_tokens_are_counted_as_the_library_counts(server: Running, llm: LLM) -> None:
    assert counted(server) == len(llm.chat_ids(QUESTION))
    for system in ("Be brief.", [{"type": "text", "text": "Be brief."}]):
        told = [{"role": "system", "content": "Be brief."}, *QUESTION]
        assert counted(server, system=system) == len(llm.chat_ids(told))
    two = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert counted(server, messages=[{"role": "user", "content": two}]) == len(
        llm.chat_ids([{"role": "user", "content": "a\nb"}])
    )
    between = [*QUESTION, {"role": "assistant", "content": "Berlin."}, {"role": "system", "content": "Hm."}, *QUESTION]
    assert counted(server, messages=between) == len(llm.chat_ids(between))
    neighbours = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert counted(server, messages=neighbours) == len(llm.chat_ids([{"role": "user", "content": "a\nb"}]))
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}, "title": "t"}
    assert counted(server, messages=[{"role": "user", "content": [document]}]) == len(
        llm.chat_ids([{"role": "user", "content": "t\nx"}])
    )


def test_tools_results_and_thinking_of_earlier_turns_reach_the_template(start: Start, monkeypatch: Any) -> None:
    seen: list[Any] = []
    with start() as server:
        honest = server.llm.chat_ids
        monkeypatch.setattr(
            server.llm, "chat_ids", lambda *given, **more: (seen.append(given), honest(*given, **more))[1]
        )
        turns = [
            *QUESTION,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "redacted_thinking", "data": "y"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Paris"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "Sunny."}]},
                    {"type": "text", "text": "And?"},
                ],
            },
        ]
        counted(server, messages=turns, tools=[WEATHER])
    messages, tools = seen[-1][:2]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "user"]
    assert messages[1]["reasoning_content"] == "Hm."
    assert messages[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Paris"}}
    assert (messages[2]["content"], messages[2]["tool_call_id"]) == ("Sunny.", "toolu_1")
    assert tools[0]["function"]["parameters"] == WEATHER["input_schema"]


# Tools and thinking.


def test_a_tool_that_must_be_called_is_called_and_answered(server: Running) -> None:
    client = server.anthropic()
    fields = {**SHORT, "max_tokens": 100, "tools": [WEATHER]}
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}):
        done = client.messages.create(**fields, tool_choice=choice)
        (call,) = done.content
        assert done.stop_reason == "tool_use"
        assert (call.type, call.name) == ("tool_use", "weather")
        assert call.input["city"] in ("Berlin", "Paris")
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "Sunny."}]}
    again = [*QUESTION, {"role": "assistant", "content": done.content}, result]
    assert text_of(client.messages.create(**{**SHORT, "messages": again, "tools": [WEATHER]}))


def test_thinking_text_and_calls_are_blocks_of_their_own(start: Start, monkeypatch: Any) -> None:
    say(monkeypatch, f"<think>It is Paris.</think>\n\nI look.\n{CALL}\n{CALL}")
    with start() as server, server.http() as http:
        monkeypatch.setattr(server.service, "parser", parser_named("qwen3"))
        fields = {**RAW, "max_tokens": 300, "tools": [WEATHER]}
        whole = http.post("/v1/messages", json=fields).json()
        assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
        assert whole["content"][0]["thinking"] == "It is Paris."
        assert whole["content"][0]["signature"]
        assert whole["content"][1]["text"].strip() == "I look."
        assert whole["content"][2]["input"] == {"city": "Paris"}
        assert whole["stop_reason"] == "tool_use"
        content = check_order(raw_events(http, fields))
        for block in (*content, *whole["content"]):
            block.pop("id", None)
        assert content == whole["content"]
        quiet = {**fields, "thinking": {"type": "adaptive", "display": "omitted"}}
        assert http.post("/v1/messages", json=quiet).json()["content"][0]["thinking"] == ""
        one = {**fields, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
        assert [b["type"] for b in http.post("/v1/messages", json=one).json()["content"]].count("tool_use") == 1


def test_an_answer_takes_the_format_that_is_asked_for(server: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    config = {"format": {"type": "json_schema", "schema": schema}}
    done = server.anthropic().messages.create(**{**SHORT, "max_tokens": 60}, output_config=config)
    assert json.loads(text_of(done))["a"] in (1, 2)


pieces = st.one_of(
    st.sampled_from(["", " ", "\n", "a", " b"]).map(Content),
    st.sampled_from(["c", "d "]).map(Reasoning),
    st.just("call"),
)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(pieces, max_size=12), st.booleans())
def test_blocks_never_overlap_and_lose_nothing(drawn: list[Any], cut: bool) -> None:
    given_: list[Piece] = []
    calls = 0
    for piece in drawn:
        if piece != "call":
            given_.append(piece)
            continue
        given_ += [CallStart(calls, "f"), CallArguments(calls, '{"a"'), CallArguments(calls, ": 1}"), CallEnd(calls)]
        calls += 1
    if cut and calls and drawn[-1] == "call":
        given_ = given_[:-2]  # the answer ends inside the call's arguments
    blocks = ContentBlocks()
    events = [event for piece in given_ for event in blocks.add([piece])] + blocks.finish()
    around = [{"type": "message_start"}, *events, {"type": "message_delta"}, {"type": "message_stop"}]
    if cut and calls and drawn[-1] == "call":
        assert blocks.content[-1]["input"] == {"partial_json": '{"a"'}
        return
    content = check_order(around)
    assert content == blocks.content
    assert sum(block["type"] == "tool_use" for block in content) == calls
    said = "".join(block["text"] for block in content if block["type"] == "text")
    expected = "".join(piece.text for piece in given_ if isinstance(piece, Content))
    assert "".join(said.split()) == "".join(expected.split()), "only blanks beside calls and reasoning are left out"
    if not calls and not any(isinstance(piece, Reasoning) for piece in given_):
        assert said == expected


# Caching.

LONG = "Once upon a time there was a king. " * 10


def test_breakpoints_pin_exactly_their_prefix_and_counts_add_up(start: Start, llm: LLM) -> None:
    def text(said: str, **more: Any) -> dict[str, Any]:
        return {"type": "text", "text": said, **more}

    hour = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    minutes = {"cache_control": {"type": "ephemeral"}}
    fields = {
        **SHORT,
        "system": [text(LONG, **hour)],
        "messages": [{"role": "user", "content": [text("Tell me. " * 20, **minutes), text("Now!")]}],
    }
    total = counted_total = len(llm.chat_ids([{"role": "system", "content": LONG}, *_user("Tell me. " * 20, "Now!")]))
    with start() as server, server.http() as http:
        client = server.anthropic()
        first = client.messages.create(**fields).usage
        pins = http.get("/v1/kv").json()["data"]
        assert [pin["pinned"] for pin in pins] == [True, True]
        system, user = (pin["tokens"] for pin in pins)
        assert 0 < system < user < total
        assert pins[0]["expires_in_s"] > 3000 > 300 >= pins[1]["expires_in_s"]
        whole = llm.chat_ids([{"role": "system", "content": LONG}, *_user("Tell me. " * 20, "Now!")])
        closed = llm.chat_ids([{"role": "system", "content": LONG}], answers=False)
        assert closed == whole[:system], "all of the system message, and nothing more"
        second = client.messages.create(**fields).usage
        assert len(http.get("/v1/kv").json()["data"]) == 2, "the same prefix is pinned once"
        for usage in (first, second):
            read, made = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
            assert usage.input_tokens + (read or 0) + (made or 0) == counted_total
            assert usage.cache_creation is not None
            parts = usage.cache_creation
            assert parts.ephemeral_1h_input_tokens + parts.ephemeral_5m_input_tokens == made
        assert first.cache_creation_input_tokens == user - (first.cache_read_input_tokens or 0)
        assert (second.cache_read_input_tokens or 0) >= user - 16
        with client.messages.stream(**fields) as stream:
            third = stream.get_final_message().usage
        assert third.cache_read_input_tokens == second.cache_read_input_tokens


def _user(*parts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "\n".join(parts)}]


def test_requests_at_once_pin_the_same_prefix_once(start: Start) -> None:
    with start() as server, server.http() as http:
        with ThreadPoolExecutor(4) as pool:
            client = server.anthropic()
            asked = [
                pool.submit(client.messages.create, **SHORT, cache_control={"type": "ephemeral"}) for _ in range(8)
            ]
            assert all(one.result().content for one in asked)
        assert len(http.get("/v1/kv").json()["data"]) == 1


def test_a_breakpoint_of_the_whole_request_is_after_its_last_block(start: Start, llm: LLM) -> None:
    with start() as server, server.http() as http:
        server.anthropic().messages.create(**SHORT, cache_control={"type": "ephemeral"})
        (pin,) = http.get("/v1/kv").json()["data"]
    assert pin["tokens"] == len(llm.chat_ids(QUESTION, answers=False))


def test_a_key_that_may_have_no_more_handles_gets_no_pin_and_no_error(start: Start) -> None:
    with start(engine=EngineConfig(max_handles=2)) as server, server.http() as http:
        for i in range(4):
            turn = [{"role": "user", "content": f"{i} {LONG}"}]
            server.anthropic().messages.create(
                **{**SHORT, "messages": turn, "max_tokens": 1}, cache_control={"type": "ephemeral"}
            )
        assert len(http.get("/v1/kv").json()["data"]) <= 2


def test_pages_are_free_again_when_pins_are_deleted(start: Start, executor: Executor) -> None:
    with start() as server, server.http() as http:
        held = executor.pool.held_by("")
        server.anthropic().messages.create(**SHORT, cache_control={"type": "ephemeral"})
        for pin in http.get("/v1/kv").json()["data"]:
            http.delete(f"/v1/kv/{pin['id']}")
        assert executor.pool.held_by("") == held
        server.anthropic().messages.create(**SHORT, cache_control={"type": "ephemeral"})
        assert len(http.get("/v1/kv").json()["data"]) == 1


# Models, keys and errors.


def test_models_come_in_the_format_that_the_header_asks_for(start: Start) -> None:
    with start(aliases=(("claude-*", "tiny"),)) as server, server.http() as http:
        (model,) = server.anthropic().models.list()
        assert (model.id, model.type, model.max_input_tokens) == ("tiny", "model", 1024)
        assert server.anthropic().models.retrieve("claude-sonnet-9").id == "claude-sonnet-9"
        assert http.get("/v1/models").json()["object"] == "list"
        assert http.head("/").status_code == 200
        done = server.anthropic().messages.create(**{**SHORT, "model": "claude-opus-9"})
        assert done.model == "tiny"
        with pytest.raises(anthropic.NotFoundError):
            server.anthropic().messages.create(**{**SHORT, "model": "gpt-9"})
        with pytest.raises(anthropic.NotFoundError):
            server.anthropic().models.retrieve("gpt-9")


def test_the_key_is_taken_from_either_header(start: Start) -> None:
    with start(api_keys=(KEY,)) as server, server.http() as http:
        assert server.anthropic().messages.create(**SHORT).content
        with pytest.raises(anthropic.AuthenticationError):
            server.anthropic("wrong").messages.create(**SHORT)
        for headers, status in (
            ({"authorization": f"Bearer {KEY}"}, 200),
            ({"x-api-key": KEY}, 200),
            ({"x-api-key": KEY, "authorization": "Bearer wrong"}, 401),
        ):
            answer = http.post("/v1/messages", json=RAW, headers=headers)
            assert answer.status_code == status
        assert answer.json()["error"]["type"] == "authentication_error"


def test_unknown_betas_are_ignored(server: Running) -> None:
    with server.http() as http:
        headers = {"anthropic-beta": "interleaved-thinking-2025-05-14,unheard-of-2031-01-01"}
        more = {"context_management": {"edits": []}, "metadata": {"user_id": "me"}, "service_tier": "auto"}
        assert http.post("/v1/messages?beta=true", json={**RAW, **more}, headers=headers).status_code == 200


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
MARKED = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE]}]}, "messages.0.content.1"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [MARKED] * 5}]}, "cache_control"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences.0"),
        ({"temperature": "hot"}, "temperature"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, None),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "nobody"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, None),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, "output_config.format"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
def test_what_is_wrong_is_refused_by_name(server: Running, change: dict[str, Any], param: str | None) -> None:
    with server.http() as http:
        refused = http.post("/v1/messages", json={**RAW, **change})
    assert refused.status_code == 400, refused.text
    body = refused.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    if param is not None:
        assert body["error"]["param"] == param
        assert param in body["error"]["message"]


def test_a_prompt_that_does_not_fit_is_refused_in_the_words_that_clients_read(server: Running) -> None:
    long = [{"role": "user", "content": "word " * 3000}]
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 1024 maximum") as refused:
        server.anthropic().messages.create(**{**SHORT, "messages": long})
    assert refused.value.body["error"]["code"] == "context_length_exceeded"


def test_errors_before_a_route_have_the_same_shape(server: Running) -> None:
    with server.http() as http:
        for answer, kind in (
            (http.post("/v1/messages", content=b"{", headers={"content-type": "application/json"}), None),
            (http.post("/v1/messages", content=b"{}", headers={"content-type": "text/plain"}), None),
            (http.get("/v1/messages"), None),
            (http.get("/v1/messages/nothing"), "not_found_error"),
            (http.post("/v1/messages", json=RAW, headers={"origin": "https://evil.com"}), "permission_error"),
        ):
            body = answer.json()
            assert body["type"] == "error"
            assert body["error"]["type"] == (kind or "invalid_request_error")


def test_an_error_in_a_stream_is_an_event(start: Start, monkeypatch: Any) -> None:
    with start() as server, server.http() as http:
        monkeypatch.setattr(ContentBlocks, "finish", lambda self: 1 / 0)
        with http.stream("POST", "/v1/messages", json={**RAW, "stream": True}) as answer:
            text = "".join(answer.iter_text())
    assert text.strip().split("\n\n")[-1].startswith("event: error\ndata: {")
    assert "api_error" in text
    assert "[DONE]" not in text


def test_a_quiet_stream_is_kept_open_by_pings(start: Start, monkeypatch: Any) -> None:
    with start(keep_alive_s=5.0) as server, server.asking("/v1/messages", {**RAW, "stream": True, **GREEDY}) as one:
        text = b""
        while b"message_stop" not in text:
            text += one.recv(65536)
    assert b"event: ping" in text
