"""Arrays with different items: no token repeats one, and all that is different can be written."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
from effort import examples
from grammars import BYTES, END, allowed, byte_compiler, takes, takes_value
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from kvilt.errors import GrammarUnsupported
from kvilt.sampling.constraint import JsonSchema, Lark
from kvilt.sampling.grammar import Compiler, Grammar

LONGER = [
    '","',
    '"a"',
    'a"',
    'a","a',
    '","a"',
    "1,1",
    "[1,1]",
    '["a","a"]',
    ", 1",
    "1,",
    "11",
    '"],["',
    "],[",
    "}",
    '{"',
]
LONGER += [
    'a","',
    '":',
    "true,",
    "true,true",
    "[]",
    "null",
    '"b","a"',
    'b"]',
    "1.0",
    ".0",
    ",[",
    ", ",
    '"}',
    '"},{"a":"a"}',
]
TOKENS = [*BYTES, *(text.encode() for text in LONGER)]
UNIQUE: dict[str, Any] = {"type": "array", "uniqueItems": True}


def compiled(schema: Any, tokens: list[bytes] = TOKENS) -> Grammar:
    return Compiler(tokens, [END]).compile(JsonSchema(schema))


def written(grammar: Grammar, dice: random.Random, most: int = 40) -> str | None:
    """Some text, with long tokens liked best; None if it becomes too long or nothing can follow."""
    matcher, text = grammar.matcher(), b""
    for _ in range(most):
        ids = allowed(matcher, len(TOKENS))
        if not ids:
            return None
        liked = [20.0 if i > END else 10.0 if i == END else 3.0 if TOKENS[i] in b'"a1,[]{}' else 0.1 for i in ids]
        token = dice.choices(ids, liked)[0]
        if token == END:
            return text.decode()
        matcher.accept(token)
        text += TOKENS[token]
    return None


ITEMS: list[Any] = [
    {"type": "string", "pattern": "^[ab]*$"},
    {"type": "integer"},
    {"type": ["integer", "string", "null"]},
    {"enum": ["a", "ab", "b", "abc", "c", "d", "e"]},
    {"enum": ["a", 1, None, True]},
    {"type": "array", "items": {"enum": [1, "a"]}, "maxItems": 2},
    {"type": "object", "properties": {"a": {"enum": ["a", "b"]}, "b": {"enum": [1]}}, "additionalProperties": False},
    {**UNIQUE, "items": {"enum": ["a", "b"]}},
    {},
]


@settings(max_examples=examples(150))
@given(item=st.sampled_from(ITEMS), seed=st.integers(0, 2**32))
def test_no_item_is_repeated_whatever_the_tokens(item: Any, seed: int) -> None:
    schema = {**UNIQUE, "items": item, "maxItems": 6}
    text = written(compiled(schema), random.Random(seed))
    if text is not None:
        Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize(
    ("text", "token", "may"),
    [
        ('["', 'a","a"', False),
        ('["b', 'a","a"', True),
        ('["a","', 'a"', False),
        ('["a","', "a", True),
        ('["a","b', 'a"', True),
        ('[{"a":"a"},{"a":"a', '"}', False),
        ('[{"a":"a"},{"a":"a', '"', True),
        ('[{"a":"a"},{"a":"ab', '"}', True),
        ("[[1],[1", "],[", False),
        ("[", "1,1", True),
        ("[", "1,1]", False),
        ("[1", ",1]", False),
        ("[", '"a","a"', False),
        ("", '["a","a"]', False),
        ("", "[1,1]", False),
        ("[[1,1", "]", True),
        ("[1,", "1 ", False),
        ("[1,", "1", True),
    ],
)
def test_tokens_that_would_repeat_an_item_are_not_allowed(text: str, token: str, may: bool) -> None:
    long = [*BYTES, token.encode()]
    matcher = Compiler(long, [END]).compile(JsonSchema(UNIQUE)).matcher()
    for byte in text.encode():
        matcher.accept(byte)
    assert (len(BYTES) in allowed(matcher, len(long))) == may


@pytest.mark.parametrize("item", [*ITEMS[3:5], {"type": "null"}, {"const": 1}, {"type": "boolean"}], ids=str)
def test_a_list_of_values_has_no_dead_end(item: Any) -> None:
    grammar = compiled({**UNIQUE, "items": item})
    for seed in range(30):
        assert written(grammar, random.Random(seed)) is not None


@pytest.mark.parametrize(
    "text",
    [
        '["a","b"]',
        '["a", "ab", "abc"]',
        "[1,11,111]",
        '[1,"1"]',
        "[true,1]",
        "[[1],[2],[]]",
        '[{"a":1},{"a":2}]',
        "[[1,1]]",
    ],
)
def test_what_is_different_can_be_written(text: str) -> None:
    assert takes(byte_compiler().compile(JsonSchema(UNIQUE)), text)


@pytest.mark.parametrize(
    "text",
    [
        '["a","a"]',
        "[1,1]",
        "[1,1.0]",
        "[1, 2, 1]",
        "[[1],[1]]",
        '[{"a":1,"b":2},{"b":2,"a":1}]',
        "[null,null]",
        '["\\"","\\""]',
    ],
)
def test_what_is_equal_cannot(text: str) -> None:
    assert not takes(byte_compiler().compile(JsonSchema(UNIQUE)), text)


def test_only_the_arrays_that_are_meant_are_watched() -> None:
    schema = {
        "properties": {
            "set": UNIQUE,
            "list": {"type": "array"},
            "deep": {"additionalProperties": {"items": {"$ref": "#/$defs/set"}}},
        },
        "$defs": {"set": {"anyOf": [{"type": "null"}, {"allOf": [UNIQUE]}], "prefixItems": [{"type": "array"}]}},
    }
    grammar = byte_compiler().compile(JsonSchema(schema))
    judge = Draft202012Validator(schema)
    for pair, where in itertools.product(([1, 1], [1, 2], [[1, 1]]), ("set", "list", "deep")):
        value = {where: {"x": [pair]} if where == "deep" else pair}
        if where == "deep" and not isinstance(pair[0], list):
            value = {where: {"x": [[pair, *pair[1:]]]}}
        assert takes_value(grammar, value) == judge.is_valid(value), value


def test_a_schema_that_holds_itself_is_watched_all_the_way_down() -> None:
    grammar = byte_compiler().compile(
        JsonSchema({"$ref": "#/$defs/t", "$defs": {"t": {**UNIQUE, "items": {"$ref": "#/$defs/t"}}}})
    )
    assert takes(grammar, "[[],[[]],[[],[[]]]]")
    assert not takes(grammar, "[[],[[],[[],[]]]]")


def test_what_is_taken_back_is_not_held_against_a_text() -> None:
    grammar = byte_compiler().compile(JsonSchema({**UNIQUE, "items": {"type": "string"}}))
    matcher = grammar.matcher()
    for byte in b'["a","a':
        matcher.accept(byte)
    assert ord('"') not in allowed(matcher)
    twin = matcher.fork()
    matcher.rollback(3)
    for byte in b"]":
        matcher.accept(byte)
    assert matcher.accepting
    twin.accept(ord("b"))
    assert ord('"') in allowed(twin)
    with pytest.raises(ValueError, match="does not allow"):
        matcher.accept(ord("x"))


def test_inside_a_grammar_it_is_refused() -> None:
    with pytest.raises(GrammarUnsupported) as caught:
        byte_compiler().compile(Lark('start: %json {"uniqueItems": true}'))
    assert caught.value.keyword == "uniqueItems"
