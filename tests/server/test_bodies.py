"""Bodies: JSON of which nobody can be in doubt, within limits, before any work."""

from __future__ import annotations

import json
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from running import QUESTION, Running

from kvilt.server.http.body import parse_json
from kvilt.server.http.errors import HTTPError
from kvilt.server.http.strict_json import MAX_DEPTH, MAX_VALUES
from kvilt.server.openai.schema import ChatRequest, CompletionRequest

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
NUMBER = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=5),
    max_leaves=20,
)


@given(JSON, st.booleans())
@settings(max_examples=examples(200))
def test_good_json_is_read_as_it_is(value: Any, ascii_only: bool) -> None:
    assert parse_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@given(st.binary(max_size=200))
@settings(max_examples=examples(300))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    try:
        value = parse_json(body)
    except HTTPError as refused:
        assert refused.status_code == 400
    else:
        assert json.loads(body) == value


DOUBTFUL = [
    b"",
    b"{",
    b"{'a': 1}",
    b'{"a": 1, "a": 2}',
    b'{"x": {"a": 1, "b": 2, "a": 1}}',
    b'{"a": NaN}',
    b'{"a": Infinity}',
    b'{"a": -Infinity}',
    b'{"a": 1e999}',
    b'{"a": -1e999}',
    b'{"a": 9223372036854775808}',
    b'{"a": -9223372036854775809}',
    b'{"a": ' + b"9" * 10_000 + b"}",
    b'{"a": "\\ud800"}',
    b'{"a": "x\\udc00y"}',
    b'{"\\udfff": 1}',
    b'{"a": "\\u0000"}',
    b'{"a": "\x00"}',
    b'{"a": "\xff\xfe"}',
    b'{"a": "\xed\xa0\x80"}',
    b"\xef\xbb\xbf{}",
    b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1),
    b"[" * 100_000,
    b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    b'{"a": [' * 40 + b"]}" * 40,
    json.dumps({str(i): i for i in range(5000)}).encode(),
]


@pytest.mark.parametrize("body", DOUBTFUL, ids=lambda body: repr(body[:24]))
def test_doubtful_json_is_refused(server: Running, body: bytes) -> None:
    with pytest.raises(HTTPError):
        parse_json(body)
    with server.http() as http:
        for route in ("/v1/chat/completions", "/v1/completions", "/v1/kv", "/tokenize"):
            refused = http.post(route, content=body, headers={"content-type": "application/json"})
            assert refused.status_code == 400
            assert set(refused.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "good", [b'"\\ud83d\\ude00"', b'"\\\\ud800"', b'"\\\\u0000"', b"[" * 64 + b"]" * 64, b'"[[[["']
)
def test_what_only_looks_doubtful_is_read(good: bytes) -> None:
    assert parse_json(good) == json.loads(good)


def test_brackets_in_strings_do_not_nest() -> None:
    text = '"[{' * 100 + '\\"]}\\\\'
    assert parse_json(json.dumps({"a": text}).encode()) == {"a": text}


@pytest.mark.parametrize("body", [b'"text"', b"[1]", b"3", b"null", b"true"])
def test_a_body_that_is_no_object_is_refused(server: Running, body: bytes) -> None:
    with server.http() as http:
        for route in ("/v1/chat/completions", "/v1/completions", "/v1/kv", "/tokenize", "/detokenize"):
            assert http.post(route, content=body, headers={"content-type": "application/json"}).status_code == 400


def test_bodies_over_the_limit_are_refused_with_and_without_a_length(start: Any) -> None:
    with start(max_body_bytes=5000) as server, server.http() as http:
        small = {"messages": QUESTION, "max_tokens": 1}
        assert http.post("/v1/chat/completions", json=small).status_code == 200
        large = json.dumps({"messages": [{"role": "user", "content": "x" * 6000}]}).encode()
        kind = {"content-type": "application/json"}
        told = http.post("/v1/chat/completions", content=large, headers=kind)
        assert told.status_code == 413
        assert told.json()["error"]["code"] == "body_too_large"
        chunked = http.post("/v1/chat/completions", content=iter([large[:3000], large[3000:]]), headers=kind)
        assert chunked.status_code == 413


def test_floods_are_refused_before_they_are_looked_at(server: Running) -> None:
    """Checking a value takes time in which nobody else is served, so there is no list that is checked to its end."""
    floods: list[dict[str, Any]] = [
        {"prompt": [5] * (2 * MAX_VALUES + 1)},
        {"prompt": [1] + ["a"] * 200_000},
        {"prompt": [["a"]] * 100_000},
        {"prompt": ["a"] * 100_000},
        {"prompt": "a", "stop": [5] * 100_000},
        {"prompt": "a", "logit_bias": {f"x{i}": "x" for i in range(4000)}},
        {"messages": [{"role": "user", "content": 5}] * 60_000},
        {"messages": [{"role": "user", "content": [{"type": "text"}] * 60_000}]},
    ]
    with server.http() as http:
        for flood in floods:
            route = "/v1/chat/completions" if "messages" in flood else "/v1/completions"
            refused = http.post(route, json=flood)
            assert refused.status_code in (400, 413), str(flood)[:40]
            assert len(refused.content) < 2000
    for model, flood in ((CompletionRequest, floods[1]), (CompletionRequest, floods[2]), (ChatRequest, floods[6])):
        with pytest.raises(ValidationError) as failed:
            model.model_validate(flood)
        assert failed.value.error_count() < 10


def test_too_many_messages_and_tools(server: Running) -> None:
    with server.http() as http:
        many = {"messages": QUESTION * 3000, "max_tokens": 1}
        refused = http.post("/v1/chat/completions", json=many)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "messages"
        tool = {"type": "function", "function": {"name": "f"}}
        tools = {"messages": QUESTION, "max_tokens": 1, "tools": [tool] * 500}
        assert http.post("/v1/chat/completions", json=tools).json()["error"]["param"] == "tools"


# Grammars: each is refused, or compiled within its limits; nothing is fetched.


@pytest.mark.parametrize(
    "form",
    [
        {"type": "regex", "regex": "a{1000}{1000}"},
        {"type": "regex", "regex": "(?=a)b"},
        {"type": "regex", "regex": "("},
        {"type": "lark", "lark": "start: ???"},
        {"type": "choice", "choice": ["x"] * 100_000},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "http://127.0.0.1:1/x.json"}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "file:///etc/passwd"}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": list(range(100_000))}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "minItems": 10**9}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"allOf": [{"const": 1}, {"const": 2}]}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"title": "x" * 3_000_000}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}},
    ],
    ids=lambda form: str(form)[:60],
)
def test_hostile_grammars_are_refused(server: Running, form: dict[str, Any]) -> None:
    with server.http() as http:
        asked = {"messages": QUESTION, "max_tokens": 4, "response_format": form}
        refused = http.post("/v1/chat/completions", json=asked)
        assert refused.status_code == 400, refused.text
        assert "Traceback" not in refused.text


def test_a_pattern_that_backtracks_elsewhere_does_not_here(server: Running) -> None:
    with server.http() as http:
        asked = {"messages": QUESTION, "max_tokens": 30, "response_format": {"type": "regex", "regex": "(a+)+b"}}
        assert http.post("/v1/chat/completions", json=asked).status_code == 200


@pytest.mark.parametrize(
    "parameters",
    [{"type": "strin"}, {"type": "array"}, {"type": "object", "properties": {"a": {"pattern": "("}}}, {"type": 5}],
)
def test_bad_schemas_of_tools_are_refused_where_they_must_hold(server: Running, parameters: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    asked = {"messages": QUESTION, "max_tokens": 4, "tools": [tool], "tool_choice": "required"}
    with server.http() as http:
        assert http.post("/v1/chat/completions", json=asked).status_code == 400
