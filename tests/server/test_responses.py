"""The Responses API through the real openai client; the library's own chat is the oracle."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from running import KEY, QUESTION, Running, say, until

from kvilt import LLM
from kvilt.config import EngineConfig
from kvilt.executor.protocol import Executor
from kvilt.server.responses.output import OutputItems
from kvilt.server.responses.tools import CallableTool, CustomToolSpec
from kvilt.server.responses.translate import shortened
from kvilt.text.parse import CallArguments, CallEnd, CallStart, Content, Piece, Reasoning, parser_named
from kvilt.text.tokenizer import Tokenizer

Start = Callable[..., Any]
ASKED = QUESTION[0]["content"]
SHORT: dict[str, Any] = {"model": "tiny", "input": ASKED, "max_output_tokens": 8, "temperature": 0}
WEATHER = {
    "type": "function",
    "name": "weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Berlin", "Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
# The beginning of the grammar that Codex sends for its tool apply_patch.
PATCH = r"""start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | delete_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
filename: /[a-z]{1,8}/
add_line: "+" /[a-z ]{0,8}/ LF
%import common.LF
"""
APPLY = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
APPLY["format"] = {"type": "grammar", "syntax": "lark", "definition": PATCH}  # type: ignore[assignment]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture(scope="module")
def llm(executor: Executor, tokenizer: Tokenizer) -> LLM:
    return LLM(executor, tokenizer)


def test_a_response_is_what_the_library_says(server: Running, llm: LLM) -> None:
    expected = llm.chat(QUESTION, max_tokens=8)
    done = server.openai().responses.create(**SHORT)
    assert done.output_text == expected.text
    assert (done.status, done.model, done.object) == ("incomplete", "tiny", "response")
    assert done.incomplete_details is not None
    assert done.incomplete_details.reason == "max_output_tokens"
    assert done.usage is not None
    assert (done.usage.input_tokens, done.usage.output_tokens) == (expected.usage.prompt_tokens, 8)
    assert done.usage.total_tokens == done.usage.input_tokens + 8
    (message,) = done.output
    assert (message.type, message.status) == ("message", "incomplete")


def test_instructions_and_items_are_messages(server: Running, llm: LLM) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": "e"},
    ]
    told = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c"},
        {"role": "system", "content": "d"},
        {"role": "user", "content": "e"},
    ]
    fields = {"model": "tiny", "instructions": "Be brief.", "input": items}
    client = server.openai()
    assert client.responses.input_tokens.count(**fields).input_tokens == len(llm.chat_ids(told))
    done = client.responses.create(**fields, max_output_tokens=4, temperature=0)
    assert done.output_text == llm.chat(told, max_tokens=4).text


def test_replayed_items_need_neither_id_nor_status(start: Start, monkeypatch: Any) -> None:
    seen: list[Any] = []
    with start() as server:
        honest = server.llm.stream_chat
        monkeypatch.setattr(
            server.llm,
            "stream_chat",
            lambda messages, *given, **more: seen.append(messages) or honest(messages, *given, **more),
        )
        items = [
            {"role": "user", "content": "x"},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Paris"}'},
            {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "+a"},
            {"type": "function_call_output", "call_id": "c1", "output": "Sunny."},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "Done."}]},
        ]
        server.openai().responses.create(**{**SHORT, "input": items}, tools=[WEATHER, APPLY], store=False)
    (messages,) = seen
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
    assert (messages[1]["content"], messages[1]["reasoning_content"]) == ("I look.", "Hm.")
    calls = [call["function"] for call in messages[1]["tool_calls"]]
    assert calls == [
        {"name": "weather", "arguments": {"city": "Paris"}},
        {"name": "apply_patch", "arguments": {"input": "+a"}},
    ]
    assert [(one["tool_call_id"], one["content"]) for one in messages[2:]] == [("c1", "Sunny."), ("c2", "Done.")]


# Events.


def raw_events(http: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    with http.stream("POST", "/v1/responses", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        blocks = "".join(answer.iter_text()).strip().split("\n\n")
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


TEXTS = {
    "message": ("response.output_text", "text"),
    "reasoning": ("response.reasoning_text", "text"),
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}


def check_items(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The state machine of items: added, its part, deltas, done, the part done, the item done. Returns the items."""
    output: list[dict[str, Any]] = []
    state, text, item = "none", "", {}
    for event in events:
        kind = event["type"]
        if state == "none":
            assert kind == "response.output_item.added"
            item, text = event["item"], ""
            assert item["status"] == "in_progress"
            state = "part" if item["type"] in ("message", "reasoning") else "deltas"
        elif kind == "response.output_item.done":
            assert state == "done"
            assert event["item"]["id"] == item["id"]
            output.append(event["item"])
            state = "none"
        else:
            stem, field = TEXTS[item["type"]]
            assert event["item_id"] == item["id"]
            if state == "part":
                assert kind == "response.content_part.added"
                assert event["part"]["text"] == ""
                state = "deltas"
            elif kind == f"{stem}.delta":
                assert state == "deltas"
                text += event["delta"]
            elif kind == f"{stem}.done":
                assert state == "deltas"
                assert event[field] == text
                state = "part done" if item["type"] in ("message", "reasoning") else "done"
            else:
                assert (kind, state) == ("response.content_part.done", "part done")
                assert event["part"]["text"] == text
                state = "done"
        assert event["output_index"] == len(output) - (kind == "response.output_item.done")
    assert state == "none"
    return output


def check_order(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Everything around the items; returns the response at the end."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["status"] == "in_progress"
    last = events[-1]["response"]
    assert events[-1]["type"] in ("response.completed", "response.incomplete")
    assert check_items(events[2:-1]) == last["output"]
    return last


def test_events_come_in_the_documented_order(server: Running) -> None:
    with server.http() as http:
        last = check_order(raw_events(http, SHORT))
    assert last["status"] == "incomplete"
    assert last["usage"]["output_tokens"] == 8


def test_the_client_helper_for_streams_understands_them(server: Running, llm: LLM) -> None:
    with server.openai().responses.stream(**SHORT) as stream:
        kinds = [event.type for event in stream]
    assert kinds.count("response.output_text.delta") >= 1
    events = list(server.openai().responses.create(**SHORT, stream=True))
    assert events[-1].response.output_text == llm.chat(QUESTION, max_tokens=8).text


def test_reasoning_text_and_calls_are_items_of_their_own(start: Start, monkeypatch: Any) -> None:
    patch = json.dumps("*** Begin Patch\n")
    custom = f'<tool_call>\n{{"name": "apply_patch", "arguments": {{"input": {patch}}}}}\n</tool_call>'
    say(monkeypatch, f"<think>It is Paris.</think>\n\nI look.\n{CALL}\n{custom}")
    with start() as server, server.http() as http:
        monkeypatch.setattr(server.service, "parser", parser_named("qwen3"))
        fields = {"input": ASKED, "tools": [WEATHER, APPLY], "include": ["reasoning.encrypted_content"]}
        whole = http.post("/v1/responses", json=fields).json()
        kinds = ["reasoning", "message", "function_call", "custom_tool_call"]
        assert [item["type"] for item in whole["output"]] == kinds
        reasoning, message, call, patched = whole["output"]
        assert reasoning["content"][0]["text"] == "It is Paris."
        assert message["content"][0]["text"].strip() == "I look."
        assert json.loads(call["arguments"]) == {"city": "Paris"}
        assert patched["input"] == "*** Begin Patch\n"
        assert whole["status"] == "completed"
        assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
        streamed = check_order(raw_events(http, fields))["output"]
        for item in (*streamed, *whole["output"]):
            item.pop("id")
            item.pop("call_id", None)
        assert streamed == whole["output"]
        sealed = {"type": "reasoning", "summary": [], "encrypted_content": reasoning["encrypted_content"]}
        again = [{"role": "user", "content": "x"}, sealed, {"role": "user", "content": "y"}]
        assert http.post("/v1/responses", json={"input": again}).status_code == 200


pieces = st.one_of(
    st.sampled_from(["", " ", "\n", "a", " b"]).map(Content),
    st.sampled_from(["c", "d "]).map(Reasoning),
    st.sampled_from(["f", "custom"]),
)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(pieces, max_size=12))
def test_items_never_overlap_and_lose_nothing(drawn: list[Any]) -> None:
    given_: list[Piece] = []
    calls = 0
    for piece in drawn:
        if not isinstance(piece, str):
            given_.append(piece)
            continue
        name = '{"input"' if piece == "custom" else '{"a"'
        given_ += [CallStart(calls, piece), CallArguments(calls, name), CallArguments(calls, ': "1"}'), CallEnd(calls)]
        calls += 1
    items = OutputItems({"custom": CallableTool(CustomToolSpec(type="custom", name="custom"))})
    events = [event for piece in given_ for event in items.add([piece])] + items.finish()
    output = check_items(events)
    assert output == items.output
    assert [item["name"] for item in output if "name" in item] == [piece for piece in drawn if isinstance(piece, str)]
    assert all(item["input"] == "1" for item in output if item["type"] == "custom_tool_call")
    said = "".join(part["text"] for item in output if item["type"] == "message" for part in item["content"])
    expected = "".join(piece.text for piece in given_ if isinstance(piece, Content))
    assert "".join(said.split()) == "".join(expected.split()), "only blanks beside calls and reasoning are left out"


# Tools.


def test_tools_that_must_be_called_are_called(server: Running) -> None:
    fields = {"model": "tiny", "input": ASKED, "max_output_tokens": 100, "tools": [WEATHER]}
    for choice in ("required", {"type": "function", "name": "weather"}):
        done = server.openai().responses.create(**fields, tool_choice=choice, parallel_tool_calls=False)
        (call,) = done.output
        assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
        assert json.loads(call.arguments)["city"] in ("Berlin", "Paris")
    answer = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    more = server.openai().responses.create(
        model="tiny", input=[answer], previous_response_id=done.id, tools=[WEATHER], max_output_tokens=2
    )
    assert more.output_text


@pytest.mark.parametrize("seed", range(2))
def test_the_input_of_a_forced_custom_tool_follows_its_grammar(server: Running, seed: int) -> None:
    fields = {"model": "tiny", "input": f"{ASKED} {seed}", "max_output_tokens": 300, "tools": [WEATHER, APPLY]}
    done = server.openai().responses.create(**fields, tool_choice={"type": "custom", "name": "apply_patch"})
    (call,) = done.output
    assert (call.type, call.name) == ("custom_tool_call", "apply_patch")
    assert call.input.startswith("*** Begin Patch\n*** ")
    with server.http() as http:
        body = {**fields, "tool_choice": {"type": "custom", "name": "apply_patch"}, "temperature": 0}
        last = check_order(raw_events(http, body))
    assert last["output"][0]["input"].startswith("*** Begin Patch\n")


def test_unknown_kinds_of_tools_are_skipped_with_a_warning(server: Running, llm: LLM) -> None:
    with server.http() as http:
        tools = [{"type": "web_search", "filters": {}}, {"type": "local_shell"}]
        done = http.post("/v1/responses", json={**SHORT, "tools": tools}).json()
    assert [warning.partition(":")[0] for warning in done["warnings"]] == ["tools.0", "tools.1"]
    assert "web_search" in done["warnings"][0]
    assert done["output"][0]["content"][0]["text"] == llm.chat(QUESTION, max_tokens=8).text


def test_only_allowed_tools_are_offered(server: Running) -> None:
    other = {**WEATHER, "name": "clock"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "clock"}]}
    done = server.openai().responses.create(
        model="tiny", input=ASKED, tools=[WEATHER, other], tool_choice=allowed, parallel_tool_calls=False
    )
    assert [item.name for item in done.output] == ["clock"]


def test_text_takes_the_format_that_is_asked_for(server: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    done = server.openai().responses.create(model="tiny", input=ASKED, text=text, max_output_tokens=60)
    assert json.loads(done.output_text)["a"] in (1, 2)


def test_logprobs_are_those_of_chat(server: Running) -> None:
    chat = server.openai().chat.completions.create(
        model="tiny", messages=QUESTION, max_tokens=4, temperature=0, logprobs=True, top_logprobs=2
    )
    fields = {**SHORT, "max_output_tokens": 4, "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    done = server.openai().responses.create(**fields)
    entries = done.output[0].content[0].logprobs
    expected = chat.choices[0].logprobs
    assert expected is not None
    assert [entry.logprob for entry in entries] == [entry.logprob for entry in expected.content or ()]
    assert {len(entry.top_logprobs) for entry in entries} == {2}


# Stored responses.

LONG = "Once upon a time there was a king. " * 12


def test_continuing_a_response_computes_only_the_new_tokens(start: Start, executor: Executor) -> None:
    with start() as server:
        client = server.openai()
        first = client.responses.create(**{**SHORT, "input": LONG}, instructions="Be brief.")
        assert first.usage is not None
        said = first.usage.input_tokens + first.usage.output_tokens
        executor.prefixes.clear()  # the stored response has its KV itself
        second = client.responses.create(
            **{**SHORT, "input": "And then?"}, instructions="Be brief.", previous_response_id=first.id
        )
        assert second.usage is not None
        assert second.usage.input_tokens_details.cached_tokens == said - 1, "all but the last sampled token"
        assert second.usage.input_tokens - said < 40
        third = client.responses.create(**{**SHORT, "input": "And?"}, previous_response_id=second.id)
        assert third.usage is not None
        assert third.usage.input_tokens > second.usage.input_tokens - 20, "the conversation without the instructions"


def test_the_same_conversation_is_continued_with_and_without_the_store(
    start: Start, monkeypatch: Any, tokenizer: Tokenizer
) -> None:
    say(monkeypatch, "Berlin.")
    with start() as server:
        client = server.openai()
        first = client.responses.create(**SHORT)
        assert first.status == "completed"
        second = client.responses.create(**{**SHORT, "input": "Sure?"}, previous_response_id=first.id)
        turns = [*QUESTION, {"role": "assistant", "content": "Berlin."}, {"role": "user", "content": "Sure?"}]
        whole = client.responses.create(**{**SHORT, "input": turns})
        assert whole.output_text == second.output_text
        with server.http() as http:
            _, *ids = (server.llm.kv.tokens(one["id"]) for one in http.get("/v1/kv").json()["data"])
    resumed, rendered = (tokenizer.decode(list(each), skip_special=False) for each in ids)
    assert resumed == rendered, "the same text; the tokens of the answer are those that were generated"


def test_stored_responses_are_found_and_deleted(start: Start) -> None:
    with start(api_keys=(KEY, "sk-other")) as server:
        client = server.openai()
        made = client.responses.create(**SHORT)
        assert client.responses.retrieve(made.id).output_text == made.output_text
        with pytest.raises(openai.NotFoundError):
            server.openai("sk-other").responses.retrieve(made.id)
        with pytest.raises(openai.NotFoundError) as missing:
            server.openai("sk-other").responses.create(**SHORT, previous_response_id=made.id)
        assert missing.value.param == "previous_response_id"
        handles = server.http(headers={"authorization": f"Bearer {KEY}"})
        assert len(handles.get("/v1/kv").json()["data"]) == 1
        client.responses.delete(made.id)
        assert handles.get("/v1/kv").json()["data"] == []
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)
        unstored = client.responses.create(**SHORT, store=False)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(unstored.id)


def test_a_key_keeps_its_latest_responses(start: Start) -> None:
    with start(max_responses=2, engine=EngineConfig(max_handles=1)) as server:
        client = server.openai()
        names = [client.responses.create(**{**SHORT, "max_output_tokens": 1}).id for _ in range(3)]
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(names[0])
        for name in names[1:]:
            assert client.responses.retrieve(name).status == "incomplete"
            assert client.responses.create(**SHORT, previous_response_id=name).output_text


def test_a_handle_that_is_gone_costs_computing_only(start: Start) -> None:
    with start() as server, server.http() as http:
        first = server.openai().responses.create(**SHORT)
        for handle in http.get("/v1/kv").json()["data"]:
            http.delete(f"/v1/kv/{handle['id']}")
        assert server.openai().responses.create(**SHORT, previous_response_id=first.id).output_text


def test_a_prompt_cache_key_names_kv_that_is_kept(start: Start) -> None:
    with start() as server, server.http() as http:
        for text in (LONG, f"{LONG} And then?"):
            done = server.openai().responses.create(**{**SHORT, "input": text}, prompt_cache_key="me", store=False)
            (handle,) = http.get("/v1/kv").json()["data"]
            assert handle["pinned"]
            assert done.usage is not None
            assert handle["tokens"] == done.usage.input_tokens + 7
        assert done.usage.input_tokens_details.cached_tokens > 64


def test_a_response_in_progress_can_be_cancelled_or_left(start: Start) -> None:
    long = {**SHORT, "max_output_tokens": 900}
    with start() as server:
        client = server.openai()
        stream = client.responses.create(**long, stream=True)
        name = next(iter(stream)).response.id
        assert client.responses.retrieve(name).status == "in_progress"
        assert client.responses.cancel(name).status == "cancelled"
        last = list(stream)[-1]
        assert last.response.status == "cancelled"
        until(lambda: client.responses.retrieve(name).status == "cancelled", "the cancelled response is stored")
        with client.responses.create(**long, stream=True) as left:
            name = next(iter(left)).response.id
        until(lambda: client.responses.retrieve(name).status == "cancelled", "the response is cancelled")
        assert client.responses.cancel(name).status == "cancelled"
        more = client.responses.create(**{**SHORT, "input": "And?"}, previous_response_id=name)
        alone = client.responses.create(**{**SHORT, "input": "And?"})
        assert more.usage is not None
        assert alone.usage is not None
        assert more.usage.input_tokens > alone.usage.input_tokens, "what was said before is not forgotten"


# Truncation.


def test_a_conversation_that_does_not_fit_is_shortened_if_asked(server: Running) -> None:
    turns = [{"role": "user" if i % 2 == 0 else "assistant", "content": f"{i} {LONG}"} for i in range(21)]
    fields = {**SHORT, "input": turns, "instructions": "Be brief."}
    with pytest.raises(openai.BadRequestError) as refused:
        server.openai().responses.create(**fields)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")
    done = server.openai().responses.create(**fields, truncation="auto")
    assert done.usage is not None
    assert 700 < done.usage.input_tokens <= 1024 - 8
    assert done.output_text


@given(st.lists(st.sampled_from(["user", "assistant", "tool"]), min_size=1, max_size=20), st.integers(0, 30))
@settings(max_examples=examples(60), deadline=None)
def test_as_many_turns_stay_as_fit(roles: list[str], most: int) -> None:
    messages: list[Any] = [{"role": "system"}, *({"role": role} for role in roles)]
    kept = shortened(messages, len, most)
    starts = [i for i, one in enumerate(messages) if one["role"] == "user"]
    if len(messages) <= most or not starts:
        assert kept == messages if len(messages) <= most else len(kept) <= len(messages)
        return
    fitting = [i for i in starts if 1 + len(messages) - i <= most] or starts[-1:]
    assert kept == [messages[0], *messages[fitting[0] :]]


# Errors.

IMAGE = {"type": "input_image", "image_url": "https://example.com/x.png"}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input.0.content.0"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input.0"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "nobody"}}, "tool_choice"),
        ({"tools": [APPLY], "tool_choice": {"type": "custom", "name": "nobody"}}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [{"name": "x"}]}, "tools.0.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": 5}}}}, "text.format"),
        ({"previous_response_id": "../x"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "x"}, "conversation"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
def test_what_is_wrong_is_refused_by_name(server: Running, change: dict[str, Any], param: str) -> None:
    with server.http() as http:
        refused = http.post("/v1/responses", json={**SHORT, **change})
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert param in error["message"]


def test_an_error_in_a_stream_is_a_failed_response(start: Start, monkeypatch: Any) -> None:
    with start() as server, server.http() as http:
        monkeypatch.setattr(OutputItems, "finish", lambda self, status: 1 / 0)
        events = raw_events(http, SHORT)
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"]["error"]["code"] == "internal_error"
        name = events[0]["response"]["id"]
        assert http.get(f"/v1/responses/{name}").json()["status"] == "failed"
        refused = http.post("/v1/responses", json={**SHORT, "previous_response_id": name})
        assert refused.json()["error"]["param"] == "previous_response_id"
