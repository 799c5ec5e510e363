"""JSON schemas: random ones against the jsonschema package in both directions, and refusals by name."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from effort import examples
from grammars import Validator, byte_compiler, random_text, takes, takes_value
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvilt.errors import GrammarError, GrammarTooLarge, GrammarUnsupported
from kvilt.sampling.constraint import JsonObject, JsonSchema
from kvilt.sampling.grammar import Compiler, Grammar
from kvilt.sampling.schema_check import checked

TYPES = ["null", "boolean", "integer", "number", "string", "array", "object"]
KEYS = ["a", "b", "c", "ab"]
PATTERNS = ["^a", "b$", "^[ab]+$", "a|b", "^.{2}$", "c", "^(a|bc)*$", "[^a]"]
LOW, HIGH = [0, 1, -2, 0.5, -1.25, 3, -0.37, 100], [0, 1, 5, 9.5, 2.25, 12, -0.4, 123.45]

compiler = byte_compiler()


def compiled(schema: Any) -> Grammar:
    return compiler.compile(JsonSchema(schema))


scalars = st.sampled_from(
    [0, 1, 2, -1, 3.5, 0.5, -0.5, -1.25, 10, 7, 99.99, True, False, None, "", "a", "b", "ab", "abc"]
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=6,
)


def pick(choices: list[Any]) -> st.SearchStrategy[Any]:
    return st.sampled_from(choices)


def keywords(inner: st.SearchStrategy[Any]) -> dict[str, st.SearchStrategy[Any]]:
    """What each keyword may hold."""
    return {
        "type": pick(TYPES) | st.lists(pick(TYPES), min_size=1, max_size=3, unique=True),
        "minimum": pick(LOW),
        "maximum": pick(HIGH),
        "exclusiveMinimum": pick(LOW),
        "exclusiveMaximum": pick(HIGH),
        "multipleOf": pick([1, 2, 3, 0.5, 0.1, 0.01, 2.5]),
        "minLength": st.integers(0, 3),
        "maxLength": st.integers(0, 3),
        "pattern": pick(PATTERNS),
        "items": inner,
        "prefixItems": st.lists(inner, min_size=1, max_size=2),
        "minItems": st.integers(0, 3),
        "maxItems": st.integers(0, 3),
        "properties": st.dictionaries(pick(KEYS), inner, max_size=3),
        "required": st.lists(pick(KEYS), max_size=2, unique=True),
        "additionalProperties": inner,
        "patternProperties": st.dictionaries(pick(["^a", "b$", "^c"]), inner, max_size=2),
        "minProperties": st.integers(0, 2),
        "maxProperties": st.integers(0, 3),
        "enum": st.lists(values, min_size=1, max_size=4),
        "const": values,
        "allOf": st.lists(inner, min_size=1, max_size=2),
        "anyOf": st.lists(inner, min_size=1, max_size=3),
        "oneOf": st.lists(inner, min_size=1, max_size=3),
        "$ref": pick(["#/$defs/x", "#/$defs/y"]),
    }


def said_otherwise(inner: st.SearchStrategy[Any]) -> dict[str, st.SearchStrategy[Any]]:
    """Keywords that are rewritten with those above."""
    words = pick(["a", "b", "ab", "", True, 1, 2.5, None])
    simple = st.one_of(
        st.builds(lambda value: {"const": value}, words),
        st.builds(lambda values: {"enum": values}, st.lists(words, min_size=1, max_size=3)),
        st.builds(lambda names: {"required": names}, st.lists(pick(KEYS), max_size=2, unique=True)),
        st.builds(lambda name, value: {"properties": {name: {"const": value}}}, pick(KEYS), words),
        st.builds(lambda name: {"type": name}, pick(TYPES)),
        st.builds(lambda name, bound: {name: bound}, pick(["minimum", "exclusiveMaximum"]), pick(LOW)),
        st.builds(lambda name, count: {name: count}, pick(["minLength", "maxItems"]), st.integers(0, 2)),
    )
    either = st.one_of(simple, inner)
    return {
        "not": either | st.builds(lambda parts: {"allOf": parts}, st.lists(simple, min_size=1, max_size=2)),
        "if": either,
        "then": either,
        "else": either,
        "oneOf": st.lists(simple, min_size=1, max_size=3),
        "dependentRequired": st.dictionaries(pick(KEYS), st.lists(pick(KEYS), max_size=2, unique=True), max_size=2),
        "dependentSchemas": st.dictionaries(pick(KEYS), either, max_size=2),
        "propertyNames": pick([True, {"pattern": "^a"}, {"enum": ["a", "b"]}, {"type": "string"}, {"maxLength": 1}]),
        "unevaluatedProperties": inner,
        "unevaluatedItems": inner,
        "contains": inner,
        "minContains": st.integers(0, 1),
        "uniqueItems": st.booleans(),
        "items": pick([{"enum": ["a", "b", "c"]}, {"type": "boolean"}, {"type": "string", "enum": ["a", True]}])
        | inner,
        "unknown": values,
    }


@st.composite
def objects_of(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    """A few keywords in some order."""
    known = keywords(inner)
    if draw(st.booleans()):
        known |= said_otherwise(inner)
    names = draw(st.lists(pick(list(known)), max_size=5, unique=True))
    return {name: draw(known[name]) for name in names}


schemas = st.recursive(st.booleans() | objects_of(st.booleans()), objects_of, max_leaves=5)
documents = st.builds(lambda root, x, y: {**root, "$defs": {"x": x, "y": y}}, objects_of(schemas), schemas, schemas)


@settings(max_examples=examples(500), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(schema=documents, instances=st.lists(values, max_size=8), seed=st.integers(0, 2**32))
def test_a_schema_takes_exactly_what_jsonschema_finds_valid(schema: Any, instances: list[Any], seed: int) -> None:
    judge = Validator(schema)
    try:
        grammar = compiled(schema)
    except (GrammarUnsupported, GrammarTooLarge):
        return
    except GrammarError as error:
        assert "itself" in str(error) or not any(map(judge.is_valid, instances)), "it is said that nothing satisfies it"
        return
    for value in instances:
        assert takes_value(grammar, value) == judge.is_valid(value), value
    dice = random.Random(seed)
    for _ in range(3):
        # The items of few values that differ may be used up, other than those of an enum.
        if (text := random_text(grammar, dice, dead_ends="uniqueItems" in json.dumps(schema))) is not None:
            assert judge.is_valid(json.loads(text)), text


@settings(max_examples=examples(300))
@given(
    low=st.none() | st.tuples(st.booleans(), st.decimals(-30, 30, places=2)),
    high=st.none() | st.tuples(st.booleans(), st.decimals(-30, 30, places=2)),
    integer=st.booleans(),
    steps=st.lists(st.tuples(st.booleans(), st.sampled_from([0, 0.01, -0.01, 0.001, 1, -1, 0.5])), max_size=8),
)
def test_bounds_are_exact(low: Any, high: Any, integer: bool, steps: list[Any]) -> None:
    schema: dict[str, Any] = {"type": "integer" if integer else "number"}
    for end, name in ((low, "inimum"), (high, "aximum")):
        if end is not None:
            prefix = "exclusiveM" if end[0] else "m"
            schema[prefix + name] = float(end[1])
    judge = Validator(schema)
    near = [round(float((low if side else high or low or (0, 0))[1]) + step, 3) for side, step in steps if low]
    try:
        grammar = compiled(schema)
    except GrammarUnsupported:
        return
    except GrammarError:
        assert not any(map(judge.is_valid, near))
        return
    for value in [*near, 0, -0.0, 1, -1]:
        assert takes_value(grammar, value) == judge.is_valid(value), value


def test_property_names_cannot_be_spelled_around_their_schemas() -> None:
    grammar = compiled({"properties": {"a": {"type": "integer"}, "b\n": {"type": "integer"}, "\x01": {"const": 1}}})
    assert takes(grammar, '{"a":1,"b\\n":2,"\\u0001":1}')
    for text in ('{"\\u0061":"x"}', '{"b\\u000a":"x"}', '{"\\u0001":2}', '{"a":1,"a":2}', '{"\\/":1}'):
        assert not takes(grammar, text), text


def test_the_position_of_keywords_does_not_change_their_meaning() -> None:
    """The library reads keywords on both sides of an anyOf apart, and moves keys when it takes its options out."""
    schema = {"patternProperties": {"^a": {}}, "anyOf": [{}], "additionalProperties": False}
    for order in (list(schema), list(schema)[::-1]):
        grammar = compiled({name: schema[name] for name in order})
        assert takes(grammar, '{"ab":1}') and not takes(grammar, '{"b":1}')


def test_json_is_written_as_printers_write_it() -> None:
    grammar = compiler.compile(JsonObject())
    value = {"a": [1, {"b": "x\ny"}], "c": None}
    for text in (json.dumps(value), json.dumps(value, indent=2), json.dumps(value, separators=(",", ":"))):
        assert takes(grammar, text)
    for text in (' {"a":1}', '{"a":1} ', '{"a":  1}', '{\n\n"a":1}', "[1]", "1", '{"a":"\x7f"}', '{"a":"\\u0001"}'):
        assert not takes(grammar, text), text


def test_properties_come_in_the_order_of_the_schema() -> None:
    grammar = compiled({"properties": {"b": {}, "a": {}}, "required": ["c"], "additionalProperties": {"type": "null"}})
    assert takes(grammar, '{"b":1,"a":2,"c":null,"d":null}')
    assert not takes(grammar, '{"a":1,"b":2,"c":null}')


DRAFT_7 = "http://json-schema.org/draft-07/schema#"
UNSUPPORTED = [
    ("contains", {"contains": {}}),
    ("not", {"not": {"pattern": "a"}}),
    ("not", {"not": {"type": "integer"}}),
    ("not", {"not": {"const": [1]}}),
    ("if", {"if": {"pattern": "a"}, "then": {"maxLength": 3}}),
    ("propertyNames", {"propertyNames": {"maxLength": 3, "pattern": "a"}}),
    ("propertyNames", {"propertyNames": {"pattern": "^a"}, "properties": {"a": {}}}),
    *[(name, {name: False, "allOf": [{"type": "null"}]}) for name in ("unevaluatedItems", "unevaluatedProperties")],
    ("$dynamicRef", {"$dynamicRef": "#x"}),
    ("contains", {"x-guidance": {"lenient": True}, "contains": {}}),
    ("$ref", {"$ref": "http://example.com/schema.json"}),
    ("$ref", {"$ref": "file:///etc/passwd"}),
    ("$ref", {"$ref": "#/$defs/absent"}),
    ("$ref", {"prefixItems": [{"$ref": "#/$defs/x"}], "$defs": {"x": False}}),
    ("$ref", {"$ref": "#/examples/0", "examples": [{}]}),
    ("$schema", {"$schema": "http://json-schema.org/draft-03/schema#"}),
    ("$schema", {"$schema": "https://example.com/meta"}),
    ("$id", {"$id": "http://x.y/z#part"}),
    ("$schema", {"$schema": 5}),
    ("$schema", {"items": {"$schema": "urn:x"}}),
    ("oneOf", {"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}),
    ("patternProperties", {"patternProperties": {"a": {}, "b": {}}}),
    ("patternProperties", {"patternProperties": {"[ab]": {}, "[a-b]": {}}}),
    ("minProperties", {"minProperties": 2}),
    ("minProperties", {"properties": {"a": {}, "b": {}}, "minProperties": 1}),
    ("multipleOf", {"multipleOf": 0.25}),
    ("exclusiveMinimum", {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}),
    ("exclusiveMaximum", {"allOf": [{"exclusiveMaximum": -1}, {"minimum": -1.5}]}),
    ("control characters", {"const": "a\x00"}),
    ("control characters", {"enum": [{"\x7f": 1}]}),
    ("control characters", {"pattern": "^\\x01"}),
    ("lookahead", {"pattern": "(?=a)"}),
]


@pytest.mark.parametrize(("keyword", "schema"), UNSUPPORTED, ids=lambda value: str(value)[:40])
def test_what_is_not_enforced_is_refused_by_name(keyword: str, schema: Any) -> None:
    placed = '"$' in json.dumps(schema)  # what it says depends on where it stands
    for document in (schema, schema if placed else {"properties": {"deep": {"items": schema}}}):
        with pytest.raises(GrammarUnsupported) as caught:
            compiled(document)
        assert caught.value.keyword == keyword
        assert "json_schema" in str(caught.value)


BROKEN = [
    "{",
    "[]",
    "null",
    "1",
    '"object"',
    "false",
    '{"a": 1, "a": 2}',
    '{"minimum": NaN}',
    '{"const": "\\ud800"}',
    '{"type": "text"}',
    '{"type": []}',
    '{"enum": []}',
    '{"enum": "a"}',
    '{"anyOf": []}',
    '{"allOf": {}}',
    '{"properties": []}',
    '{"properties": {"a": 1}}',
    '{"items": 1}',
    '{"$schema": "https://json-schema.org/draft/2020-12/schema", "items": [true]}',
    '{"not": true}',
    '{"not": 1}',
    '{"if": 1}',
    '{"dependentRequired": 1}',
    '{"dependentRequired": {"a": [1]}}',
    '{"dependentSchemas": {"a": 1}}',
    '{"propertyNames": 1}',
    '{"required": "a"}',
    '{"required": [1]}',
    '{"minLength": -1}',
    '{"minLength": 1.5}',
    '{"minLength": true}',
    '{"maximum": "1"}',
    '{"multipleOf": 0}',
    '{"multipleOf": -1}',
    '{"pattern": "("}',
    '{"pattern": 1}',
    '{"format": 1}',
    '{"uniqueItems": 1}',
    '{"$ref": 1}',
    '{"$ref": "#"}',
    '{"allOf": [{"$ref": "#"}]}',
    '{"type": "string", "pattern": "^a$", "minLength": 3}',
    '{"type": "integer", "minimum": 0.2, "maximum": 0.8}',
    '{"type": "array", "items": {"$ref": "#"}, "minItems": 1}',
    '{"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}',
]


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_schema_and_one_that_nothing_satisfies_are_refused(text: str) -> None:
    with pytest.raises(GrammarError) as caught:
        compiled(text)
    assert not isinstance(caught.value, GrammarUnsupported | GrammarTooLarge)
    assert len(str(caught.value)) < 400


LARGE = {
    "deep": "{" + '"items":{' * 200 + "}" * 201,
    "deeper than any parser": '{"const":' + "[" * 50_000 + "]" * 50_000 + "}",
    "values": json.dumps({"enum": list(range(5_000))}),
    "properties": json.dumps({"properties": {str(i): {} for i in range(2_000)}}),
    "required": json.dumps({"required": [str(i) for i in range(2_000)]}),
    "branches": json.dumps({"anyOf": [{"const": i} for i in range(600)]}),
    "patterns": json.dumps({"patternProperties": {f"^{i}_": {} for i in range(100)}}),
    "minItems": '{"minItems": 1000000000}',
    "maxLength": '{"maxLength": 1e12}',
    "minimum": '{"minimum": 1e30}',
    "digits": '{"minimum": 0.1234567890123456789}',
    "infinity": '{"maximum": 1e999}',
    "exponents": '{"maximum": 1e99999999999999999999}',
    "small exponents": '{"maximum": 1e-99999999999999999999}',
    "decimals": '{"maximum": 1e-20}',
    "multiples": '{"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}',
    "repetitions": '{"pattern": "(a{1000}){1000}"}',
    "products": json.dumps({"allOf": [{"anyOf": [{"properties": {f"{s}{i}": {}}} for s in "ab"]} for i in range(40)]}),
    "copies": json.dumps(
        {
            "$ref": "#/$defs/0",
            "$defs": {str(i): {"oneOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(60)} | {"60": {}},
        }
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_schema_that_would_cost_too_much_is_refused(name: str) -> None:
    with pytest.raises(GrammarTooLarge):
        compiled(LARGE[name])


def test_a_long_chain_of_references_does_not_end_the_process() -> None:
    """The library follows references by recursion; on a usual stack this many would overflow it."""
    chain = {str(i): {"type": "array", "items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(3_000)}
    grammar = compiled({"$ref": "#/$defs/0", "$defs": {**chain, "3000": {"type": "null"}}})
    assert takes(grammar, "[[[]]]")


def test_references_find_their_schemas_by_pointer_anchor_and_id() -> None:
    schema = {
        "$id": "http://example.com/root",
        "$defs": {
            "a/b~c%": {"type": "integer"},
            "anchored": {"$anchor": "here", "type": "null"},
            "inner": {"$id": "inner", "$defs": {"x": {"const": "x"}}, "type": "array", "items": {"$ref": "#/$defs/x"}},
        },
        "properties": {
            "pointer": {"$ref": "#/$defs/a~1b~0c%25"},
            "anchor": {"$ref": "#here"},
            "id": {"$ref": "inner"},
            "both": {"$ref": "http://example.com/inner#/$defs/x"},
            "self": {"$ref": "#"},
        },
        "additionalProperties": False,
    }
    grammar = compiled(schema)
    assert takes(grammar, '{"pointer":1,"anchor":null,"id":["x"],"both":"x","self":{"pointer":2}}')
    for text in ('{"pointer":"1"}', '{"anchor":1}', '{"id":["y"]}', '{"both":"y"}', '{"self":{"pointer":""}}'):
        assert not takes(grammar, text), text


def test_oneof_compares_the_schemas_that_references_name() -> None:
    kinds = {kind: {"properties": {"kind": {"const": kind}}, "required": ["kind"], "type": "object"} for kind in "ab"}
    branches = [{"$ref": f"#/$defs/{kind}", "title": kind} for kind in kinds]
    grammar = compiled(
        {"oneOf": [*branches, {"type": "null"}], "$defs": kinds, "discriminator": {"propertyName": "kind"}}
    )
    assert takes(grammar, '{"kind":"a"}') and takes(grammar, "null") and not takes(grammar, '{"kind":"c"}')


def test_definitions_that_nobody_uses_are_not_read() -> None:
    assert takes(compiled({"type": "null", "$defs": {"odd": {"not": {"minItems": "x"}}}}), "null")


def test_annotations_change_nothing() -> None:
    plain: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
    noted = {
        **plain,
        "title": "t",
        "description": "d",
        "default": {"a": 1},
        "examples": [1],
        "deprecated": True,
        "readOnly": True,
        "$comment": "c",
        "contentSchema": {"not": {}},
    }
    assert checked(json.dumps(noted)) == checked(json.dumps(plain))


def test_limits_of_the_library_are_reported_as_size() -> None:
    from kvilt.sampling.grammar import GrammarLimits

    small = byte_compiler(limits=GrammarLimits(symbols=20))
    assert isinstance(small, Compiler)
    with pytest.raises(GrammarTooLarge):
        small.compile(JsonSchema({"properties": {str(i): {} for i in range(50)}}))
