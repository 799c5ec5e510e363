"""Grammars of answers that must call a tool: what they let a model write is read back as calls and nothing else."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from grammars import byte_compiler, random_text, takes

from kvilt.errors import GrammarError, GrammarUnsupported, ParamError
from kvilt.sampling.constraint import Lark
from kvilt.sampling.grammar import Compiler, Grammar
from kvilt.text.parse import CallArguments, CallStart, Content, Piece, Reasoning, merged, parser_named

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
PARAMETERS = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/point"}, "unit": {"enum": ["C", "F"]}},
    "required": ["at"],
    "additionalProperties": False,
    "$defs": {"point": POINT},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "time-now"}},
]
CALLERS = [
    "hermes",
    "qwen3",
    "smollm3",
    "deepseek",
    "deepseek_r1",
    "magistral",
    "llama3",
    "pythonic",
    "mistral",
    "gemma",
    "phi4",
    "lfm2",
    "json",
    "glm45",
    "glm4",
    "deepseek_v32",
    "kimi_k2",
    "gemma4",
    "harmony",
]


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return byte_compiler()


def compiled(compiler: Compiler, name: str, names: list[str] | None, parallel: bool, prompt: str | None) -> Grammar:
    grammar = parser_named(name).tool_grammar(TOOLS, names, parallel, prompt)
    assert grammar is not None
    return compiler.compile(Lark(grammar))


def read(name: str, text: str, prompt: str | None) -> list[Piece]:
    reader = parser_named(name).new(TOOLS, prompt)
    return merged([*reader.feed(text), *reader.finish()])


def called(pieces: list[Piece]) -> list[str]:
    return [piece.name for piece in pieces if isinstance(piece, CallStart)]


@pytest.mark.parametrize("name", CALLERS)
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("names", [None, ["weather"]])
def test_what_a_grammar_lets_through_is_a_call(
    compiler: Compiler, name: str, names: list[str] | None, parallel: bool
) -> None:
    grammar = compiled(compiler, name, names, parallel, "")
    dice = random.Random(name)
    drawn = [text for _ in range(6) if (text := random_text(grammar, dice)) is not None]
    assert drawn
    for text in drawn:
        pieces = read(name, text, "")
        assert not any(isinstance(piece, Content) for piece in pieces), text
        assert called(pieces) and set(called(pieces)) <= set(names or ["weather", "time-now"])
        assert parallel or len(called(pieces)) == 1
        for piece in pieces:
            if isinstance(piece, CallArguments):
                arguments = json.loads(piece.text)
                assert arguments == {} or isinstance(arguments["at"]["x"], int)


@pytest.mark.parametrize("name", CALLERS)
def test_parallel_calls_are_as_many_as_a_model_likes(compiler: Compiler, name: str) -> None:
    grammar = compiled(compiler, name, ["time-now"], True, "")
    before, between, behind = parser_named(name).calls.forced
    call = json.dumps({"name": "time-now", parser_named(name).calls.arguments_key: {}})
    text = before + between.join([call] * 3) + behind
    assert takes(grammar, text)
    assert called(read(name, text, "")) == ["time-now"] * 3
    alone = compiled(compiler, name, ["time-now"], False, "")
    assert not takes(alone, text)


def test_reasoning_that_the_prompt_opened_comes_to_its_end_first(compiler: Compiler) -> None:
    call = '<tool_call>\n{"name": "time-now", "arguments": {}}\n</tool_call>'
    opened = compiled(compiler, "qwen3", None, False, "<think>\n")
    assert takes(opened, f"a < </thin\n</think>\n\n{call}")
    assert not takes(opened, call)
    assert not takes(opened, f"a</think>b</think>\n\n{call}")
    assert read("qwen3", f"a\n</think>\n\n{call}", "<think>\n")[0] == Reasoning("a")
    own = compiled(compiler, "qwen3", None, False, "")
    assert takes(own, call) and takes(own, f"<think>\na\n</think>\n\n{call}")
    assert not takes(own, f"a</think>{call}")


@pytest.mark.parametrize(
    ("parameters", "error", "words"),
    [
        ({"type": "object", "properties": {"a": {"type": "strnig"}}}, GrammarError, "type"),
        (
            {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)"}}},
            GrammarUnsupported,
            "pattern",
        ),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}, GrammarError, "pattern"),
        ({"type": "object", "$ref": "http://example.com/x"}, GrammarUnsupported, "ref"),
    ],
)
def test_bad_schemas_are_refused_when_the_grammar_is_compiled(
    compiler: Compiler, parameters: dict[str, Any], error: type[GrammarError], words: str
) -> None:
    grammar = parser_named("hermes").tool_grammar([{"name": "f", "parameters": parameters}], None, False)
    assert grammar is not None
    with pytest.raises(error, match=words):
        compiler.compile(Lark(grammar))


def test_a_tool_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ParamError, match="'nobody'"):
        parser_named("hermes").tool_grammar(TOOLS, ["nobody"], False)


def test_there_is_no_grammar_where_nothing_can_be_called() -> None:
    assert parser_named("hermes").tool_grammar([], None, True) is None
    assert parser_named("none").tool_grammar(TOOLS, None, True) is None


@pytest.mark.parametrize("odd", ['say "hi"', "a\\b", "é\n", "x#//y"])
def test_odd_names_are_written_and_read_back(compiler: Compiler, odd: str) -> None:
    tools = [{"name": odd}]
    grammar = parser_named("json").tool_grammar(tools, None, False)
    assert grammar is not None
    text = random_text(compiler.compile(Lark(grammar)), random.Random(0))
    assert text is not None
    assert called(parser_named("json").new(tools).feed(text)) == [odd]
