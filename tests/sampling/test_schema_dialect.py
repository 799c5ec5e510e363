"""Schemas as they are found: of any draft, with keywords that only their authors know, conditions and negations."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from grammars import byte_compiler, takes, takes_value
from jsonschema import Draft4Validator, Draft7Validator, Draft202012Validator
from jsonschema.protocols import Validator

from kvilt.errors import GrammarError, GrammarTooLarge
from kvilt.sampling.constraint import JsonSchema, Regex
from kvilt.sampling.grammar import Grammar
from kvilt.sampling.schema_check import checked
from kvilt.sampling.schema_rewrite import other_than

DRAFT_4, DRAFT_7 = "http://json-schema.org/draft-04/schema#", "http://json-schema.org/draft-07/schema"
NEWEST = "https://json-schema.org/draft/2020-12/schema"
VALUES: list[Any] = [None, True, False, 0, 1, 5, 5.5, "", "a", "ab", "b", [], [1], ["a", 1], [1, 1, 1]]
VALUES += [dict(zip("abc", each, strict=False)) for n in range(4) for each in itertools.product((1, "x"), repeat=n)]
VALUES += [{"c": 1}, {"b": "x", "c": 1}, {"kind": "a", "x": 1}, {"kind": "b"}, {"kind": "a"}, {"x": 1}]


def compiled(schema: Any, **options: Any) -> Grammar:
    return byte_compiler().compile(JsonSchema(schema, **options))


DIALECTS: list[tuple[type[Validator], dict[str, Any]]] = [
    (Draft4Validator, {"$schema": DRAFT_4, "minimum": 1, "exclusiveMinimum": True, "type": "number"}),
    (Draft4Validator, {"$schema": DRAFT_4, "maximum": 5, "exclusiveMaximum": False, "type": "number"}),
    (Draft4Validator, {"$schema": DRAFT_4, "const": 1, "type": "number"}),
    (Draft7Validator, {"$schema": DRAFT_7, "items": [{"type": "string"}], "additionalItems": False}),
    (Draft7Validator, {"$schema": DRAFT_7, "items": [{"type": "string"}], "additionalItems": {"type": "integer"}}),
    (Draft7Validator, {"$schema": DRAFT_7, "items": {"type": "integer"}, "additionalItems": False}),
    (Draft7Validator, {"$schema": DRAFT_7, "prefixItems": [{"type": "string"}]}),
    (Draft7Validator, {"$schema": DRAFT_7, "dependencies": {"a": ["b"], "c": {"required": ["a"]}}}),
    (
        Draft7Validator,
        {
            "$schema": DRAFT_7,
            "items": {"$ref": "#/definitions/n", "minimum": 9},
            "definitions": {"n": {"type": "integer"}},
        },
    ),
    (
        Draft7Validator,
        {"$schema": DRAFT_7, "items": {"$ref": "#n"}, "definitions": {"x": {"$id": "#n", "type": "integer"}}},
    ),
    (Draft202012Validator, {"$schema": NEWEST, "dependentRequired": {"a": ["b", "c"]}}),
    (Draft202012Validator, {"dependentSchemas": {"a": {"properties": {"b": {"type": "integer"}}}, "c": False}}),
    (Draft202012Validator, {"required": ["a"], "dependentRequired": {"a": ["b"]}}),
    (Draft202012Validator, {"not": {"type": ["object", "number"]}}),
    (Draft202012Validator, {"not": {"enum": ["a", "ab", None, True, 5]}}),
    (Draft202012Validator, {"not": {"required": ["a", "b"]}}),
    (Draft202012Validator, {"not": {"anyOf": [{"required": ["a"]}, {"type": "array"}]}}),
    (Draft202012Validator, {"not": {"not": {"type": "string"}}}),
    (Draft202012Validator, {"not": {"minimum": 5}, "type": "number"}),
    (Draft202012Validator, {"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {"required": ["c"]}}),
    (
        Draft202012Validator,
        {
            "type": "object",
            "properties": {"kind": {"enum": ["a", "b"]}, "x": {"type": "integer"}},
            "if": {"properties": {"kind": {"const": "a"}}, "required": ["kind"]},
            "then": {"required": ["x"]},
        },
    ),
    (Draft202012Validator, {"if": {"type": "string"}, "else": {"type": "null"}}),
    (Draft202012Validator, {"if": {"type": "string"}}),
    (Draft202012Validator, {"then": {"type": "null"}}),
    (Draft202012Validator, {"oneOf": [{"required": ["a"]}, {"required": ["b"]}, {"required": ["c"]}]}),
    (Draft202012Validator, {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}}),
    (Draft202012Validator, {"propertyNames": {"pattern": "^[ab]"}}),
    (Draft202012Validator, {"properties": {"a": {}}, "unevaluatedProperties": {"type": "integer"}}),
    (Draft202012Validator, {"prefixItems": [{}], "unevaluatedItems": False}),
    (Draft202012Validator, {"contains": {"const": 9}, "minContains": 0}),
    (Draft202012Validator, {"maxContains": 0}),
    (Draft202012Validator, {"uniqueItems": True, "items": {"enum": ["a", "ab"]}, "minItems": 1}),
]


@pytest.mark.parametrize(
    ("judge", "schema"), DIALECTS, ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else ""
)
def test_a_draft_means_what_it_says(judge: type[Validator], schema: dict[str, Any]) -> None:
    valid = [value for value in VALUES if judge(schema).is_valid(value)]
    assert len(valid) > 0, "this schema shows nothing"
    grammar = compiled(schema)
    for value in VALUES:
        assert takes_value(grammar, value) == (value in valid and _same(value, valid)), value


def _same(value: Any, values: list[Any]) -> bool:
    """Whether a value is among others, 1 and true being different."""
    return json.dumps(value) in map(json.dumps, values)


def test_forms_of_earlier_drafts_are_read_where_no_draft_is_named() -> None:
    grammar = compiled({"items": [{"type": "null"}], "additionalItems": False, "minItems": 1})
    assert takes(grammar, "[null]") and not takes(grammar, "[null,1]")
    assert not takes(compiled({"type": "number", "minimum": 1, "exclusiveMinimum": True}), "1")


def test_a_reference_into_a_list_of_items_is_found() -> None:
    schema = {"$schema": DRAFT_7, "items": [{"type": "null"}, {"$ref": "#/items/0"}], "minItems": 2}
    assert takes(compiled(schema), "[null,null]") and not takes(compiled(schema), "[null,1]")


def test_a_schema_inside_may_be_of_another_draft() -> None:
    inside = {"$schema": DRAFT_4, "$id": "urn:x", "minimum": 1, "exclusiveMinimum": True, "type": "number"}
    grammar = compiled({"$schema": NEWEST, "type": "array", "items": inside})
    assert takes(grammar, "[2]") and not takes(grammar, "[1]")


def test_what_has_no_effect_is_listed() -> None:
    schema = {
        "type": "object",
        "properties": {
            "path": {"type": "string", "format": "path", "x-order": 1, "description": "d"},
            "size": {"type": "integer", "x-order": 2, "nullable": True},
        },
        "x-order": 0,
    }
    assert takes(compiled(schema), '{"path":"a","size":1}')
    assert compiled(schema).warnings == (
        "the keyword 'x-order' is not known and has no effect at #",
        "the format 'path' is not enforced at #/properties/path",
        "the keyword 'nullable' is not known and has no effect at #/properties/size",
    )
    many = {"properties": {f"p{i}": {f"x-{i}": 1} for i in range(50)}}
    assert len(compiled(many).warnings) == 21 and compiled(many).warnings[-1] == "and 30 more"
    beside = {"$schema": DRAFT_7, "$ref": "#/definitions/a", "type": "null", "title": "t", "definitions": {"a": {}}}
    assert compiled(beside).warnings == ("type beside $ref means nothing in draft-07 at #",)
    assert byte_compiler().compile(Regex("a")).warnings == ()


def test_closed_objects_have_only_the_properties_that_are_named() -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            "inner": {"properties": {"x": {}}},
            "open": {"properties": {"y": {}}, "additionalProperties": True},
            "any": {"type": "object"},
        },
    }
    for text, closed in (
        ('{"z":1}', False),
        ('{"inner":{"z":1}}', False),
        ('{"open":{"z":1}}', True),
        ('{"any":{"z":1}}', True),
    ):
        assert takes(compiled(schema), text)
        assert takes(compiled(schema, close_objects=True), text) == closed, text
    joined = {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}
    assert takes(compiled(joined, close_objects=True), '{"a":1,"b":2}')


def test_conditions_inside_each_other_are_bounded() -> None:
    """Each of them writes its condition twice."""
    schema: Any = {"required": ["a"]}
    for _ in range(4):
        schema = {"if": schema, "then": {"required": ["b"]}}
    checked(json.dumps(schema))
    for _ in range(20):
        schema = {"if": schema, "then": {"required": ["b"]}}
    with pytest.raises(GrammarTooLarge, match="of if and not inside each other"):
        checked(json.dumps(schema))


@pytest.mark.parametrize("words", [["a"], ["a", "ab", ""], ["]^-\\", "-"], ["äö", "a.c", "a|c"]])
def test_texts_other_than_some(words: list[str]) -> None:
    pattern = re.compile(other_than(words))
    for text in ["", "a", "ab", "abc", "b", "]^-\\", "]^-", "-", "--", "äö", "ä", "a.c", "abc", "a|c", "x\ny"]:
        assert bool(pattern.fullmatch(text)) == (text not in words), text


def test_a_negation_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(GrammarError, match="nothing satisfies"):
        compiled({"not": {}})
