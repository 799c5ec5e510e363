"""What kvilt itself does with a constraint before the library sees it takes linear time and bounded memory."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import pytest

from kvilt.errors import GrammarError, GrammarTooLarge
from kvilt.sampling import schema_finite
from kvilt.sampling.constraint import MAX_TEXT_BYTES, Constraint, JsonSchema, Lark, Regex
from kvilt.sampling.grammar import library_grammar
from kvilt.sampling.lark_check import checked_lark
from kvilt.sampling.schema_check import MAX_WRITTEN, checked
from kvilt.sampling.schema_source import named


def cost_s(constraint: Constraint) -> float:
    """The least CPU time of three runs, refused or not."""
    runs = []
    for _ in range(3):
        began = time.thread_time()
        with suppress(GrammarError):
            library_grammar(constraint)
        runs.append(time.thread_time() - began)
    return min(runs)


SIZE = 16_000
LARKS = {
    "string of quotes": 'start: "' + '\\"' * (SIZE // 2),
    "pattern of slashes": "start: /" + "\\/" * (SIZE // 2),
    "strings of one escape": "start: " + '"\\' * (SIZE // 2),
    "patterns of one escape": "start: " + "/\\" * (SIZE // 2),
    "quotes": "start: " + '"' * SIZE + "a",
    "open tokens": "start: " + "<a" * (SIZE // 2),
    "one long token": "start: <" + "a" * SIZE,
    "options without a sign": "start: " + "stop " * (SIZE // 5),
    "one option and blanks": "start: stop" + " " * SIZE,
}


@pytest.mark.parametrize("name", LARKS)
def test_no_lark_text_takes_much_longer_than_a_plain_one(name: str) -> None:
    """Looking for the end of each string again took a thousand times as long."""
    plain = Lark("start: " + '"a" ' * (SIZE // 4))
    assert cost_s(Lark(LARKS[name])) < 20 * cost_s(plain)


@pytest.mark.parametrize(
    ("text", "what"), [('start: "a\n', "string"), ("start: /a", "pattern"), ('start: "\\"', "string")]
)
def test_a_string_without_an_end_is_refused_by_its_place(text: str, what: str) -> None:
    with pytest.raises(GrammarError, match=f"the {what} that begins at character 7 has no end"):
        checked_lark(text)


def test_many_schemas_in_a_lark_text_are_bounded_together() -> None:
    with pytest.raises(GrammarTooLarge, match="schemas need more than"):
        checked_lark("start: " + '%json {"format": "uri-reference"} ' * 2_000)


def test_a_long_pattern_is_read_no_further_than_it_may_be_long() -> None:
    assert cost_s(Regex("a" * MAX_TEXT_BYTES)) < 4 * cost_s(Regex("a" * 10_000))
    with pytest.raises(GrammarTooLarge, match="10001 characters long"):
        library_grammar(Regex("a" * 10_001))
    assert library_grammar(Regex("(((a)))" * 10_000)).text


def test_bounds_are_compared_without_a_look_at_each_pair() -> None:
    def schema(lower: str) -> JsonSchema:
        return JsonSchema({"allOf": [{"anyOf": [{lower: i, "maximum": i + 5} for i in range(250)]} for _ in range(15)]})

    assert cost_s(schema("exclusiveMinimum")) < 6 * cost_s(schema("minimum"))


FLOODS: list[Any] = [
    {"anyOf": [{"anyOf": [{"format": "uri-reference"}] * 100}] * 20},
    {"oneOf": [{"$ref": "#/$defs/a"}] * 100, "$defs": {"a": {"enum": ["x" * 100_000]}}},
    {"oneOf": [{"$ref": "#/$defs/a"}] * 400, "$defs": {"a": {"pattern": "\\S" * 1_000}}},
]


@pytest.mark.parametrize("schema", FLOODS, ids=["formats", "values", "patterns"])
def test_a_schema_that_becomes_far_longer_than_it_was_is_refused(schema: Any) -> None:
    with pytest.raises(GrammarTooLarge, match=f"more than {MAX_WRITTEN} characters"):
        checked(JsonSchema(schema).text)


@pytest.mark.parametrize(
    "schema",
    [
        {"$id": "http://a/" + "b/" * 2_000},
        {"$ref": "#/" + "a/" * 2_000},
        {"$id": "http://a/" + "b/" * 800, "items": {"$id": "c/" * 800}},
    ],
    ids=["id", "ref", "joined"],
)
def test_long_uris_are_refused(schema: Any) -> None:
    """They are joined at each schema inside."""
    with pytest.raises(GrammarTooLarge, match="a URI may have at most 2048 characters"):
        checked(JsonSchema(schema).text)


def test_a_place_with_long_names_is_cut_while_it_is_written() -> None:
    assert named(("properties", "a" * 10**6)) == f"json_schema at #/properties/{'a' * 84}..."
    assert named(("items",) * 3) == "json_schema at #/items/items/items"


def test_whether_values_end_is_looked_for_in_bounded_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a chain that is known from its end, each look at all of it finds one more."""
    looked: list[object] = []
    own = schema_finite._ends
    monkeypatch.setattr(schema_finite, "_ends", lambda *given: looked.append(1) or own(*given))
    monkeypatch.setattr(schema_finite, "_WORK", 2_000)
    links = {
        f"a{i:04}": {"type": "array", "minItems": 1, "items": {"$ref": f"#/$defs/a{i + 1:04}"}} for i in range(300)
    }
    chain = {f"x{i:04}": {"$ref": f"#/$defs/a{i:04}"} for i in range(300)}
    root = {"type": "object", "properties": chain, "required": list(chain), "$defs": {**links, "a0300": {}}}
    checked(JsonSchema(root).text)
    assert 0 < len(looked) < 2_000 + 1_000
