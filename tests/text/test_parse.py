"""Answers read as they stream: known texts of every family, and laws that hold for any text cut in any way."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from effort import examples, some
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvilt.errors import ParamError
from kvilt.text.parse import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Piece,
    Reasoning,
    argument_schemas,
    merged,
    parser_for,
    parser_named,
    parser_names,
)

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "get-it"}},
]


def read(name: str, text: str | Sequence[str], prompt: str | None = None) -> list[Piece]:
    reader = parser_named(name).new(TOOLS, prompt)
    pieces = [piece for part in text for piece in reader.feed(part)]
    return merged([*pieces, *reader.finish()])


def call(index: int, name: str, arguments: str = "{}", whole: bool = True) -> list[Piece]:
    return [CallStart(index, name), CallArguments(index, arguments), CallEnd(index, whole)]


ONE = '{"name": "f", "arguments": {"a": 1, "b": "x}]"}}'
GIVEN = '{"a": 1, "b": "x}]"}'
V3 = (
    f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{GIVEN}\n```<｜tool▁call▁end｜>\n"
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get-it\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
BEHIND = "<｜tool▁call▁begin｜>get-it<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
V31 = f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{GIVEN}<｜tool▁call▁end｜>{BEHIND}"
TAGS = "<parameter=a>\n1\n</parameter>\n<parameter=b>\n2 </b>\n\n</parameter>\n<parameter=c>\n[True]\n</parameter>"
GLM = (
    "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n"
    "<arg_key>c</arg_key>\n<arg_value>[true]</arg_value>\n</tool_call>"
)
KEYED = "<tool_call>f\n<arg_key>{}</arg_key><arg_value>{}</arg_value>"
ANALYSIS, TURN = "<|channel|>analysis<|message|>", "<|start|>assistant"
TO_WHO = "<|channel|>commentary to=functions.who"
DSML = """<｜DSML｜function_calls>
<｜DSML｜invoke name="f">
<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>
<｜DSML｜parameter name="b" string="true">2 </b>
</｜DSML｜parameter>
<｜DSML｜parameter name="c">[true]</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="get-it">
</｜DSML｜invoke>
</｜DSML｜function_calls>"""
DSML_CALLS: list[Piece] = [*call(0, "f", '{"a": 1, "b": "2 </b>\\n", "c": [true]}'), *call(1, "get-it")]
DSML_REST = '<｜DSML｜invoke name="who">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
KNOWN: list[tuple[str, str, list[Piece]]] = [
    ("hermes", f"Sure.\n<tool_call>\n{ONE}\n</tool_call>", [Content("Sure."), *call(0, "f", GIVEN)]),
    (
        "hermes",
        f"<tool_call>{ONE}</tool_call>\n<tool_call>{ONE}</tool_call>",
        [*call(0, "f", GIVEN), *call(1, "f", GIVEN)],
    ),
    ("hermes", '<tool_call>{"name": "get-it"}</tool_call>\nDone.', [*call(0, "get-it"), Content("Done.")]),
    ("hermes", '<tool_call>{"arguments": {"a": 2}, "id": 7, "name": "f"}', call(0, "f", '{"a": 2}')),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 3}"}</tool_call>', call(0, "f", '{"a": 3}')),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"b": "1\n2"}}</tool_call>', call(0, "f", '{"b": "1\\n2"}')),
    (
        "hermes",
        f"<tool_call>\n<function=f>\n{TAGS}\n</function>\n</tool_call>",
        call(0, "f", '{"a": 1, "b": "2 </b>\\n", "c": "[True]"}'),
    ),
    ("hermes", "<tool_call>\n<function=get-it>\n</function>\n</tool_call>", call(0, "get-it")),
    ("hermes", "<tool_call><function=who></function>", [Content("<tool_call><function=who></function>")]),
    (
        "hermes",
        "<tool_call><function=f><parameter=c>None</parameter><parameter=b>half",
        [*call(0, "f", '{"c": null', False), Content("<parameter=b>half")],
    ),
    ("hermes", "I say <tool_call> and </tool_call>.", [Content("I say <tool_call> and </tool_call>.")]),
    ("qwen3", "<think>\nHm.\n</think>\n\nYes. ", [Reasoning("Hm."), Content("Yes. ")]),
    ("qwen3", "<think>\n\n</think>\n\nYes", [Content("Yes")]),
    ("qwen3", f"<think>a</think>\n<tool_call>{ONE}</tool_call>", [Reasoning("a"), *call(0, "f", GIVEN)]),
    ("qwen3", "No <think> here", [Content("No <think> here")]),
    ("qwen3", "<think>never ends <", [Reasoning("never ends <")]),
    ("smollm3", f"<think>\n</think>\n<tool_call>\n{ONE}\n</tool_call>", call(0, "f", GIVEN)),
    ("deepseek_r1", "thought\n</think>\n\nanswer", [Reasoning("thought"), Content("answer")]),
    ("magistral", "[THINK]t[/THINK]x", [Reasoning("t"), Content("x")]),
    ("llama3", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', call(0, "f", '{"a": 1}')),
    (
        "llama3",
        '{"name": "f", "parameters": {}}; {"type": "function", "name": "get-it", "parameters": {}}',
        [*call(0, "f"), *call(1, "get-it")],
    ),
    ("llama3", '{"city": "Rome", "name": "f"}', [Content('{"city": "Rome", "name": "f"}')]),
    ("llama3", 'It is {"name": "f", "parameters": {}}', [Content('It is {"name": "f", "parameters": {}}')]),
    ("pythonic", "[f(a=1, b='x'), get-it()]", [*call(0, "f", '{"a": 1, "b": "x"}'), *call(1, "get-it")]),
    ("pythonic", '[f(-2, "y")]', call(0, "f", '{"a": -2, "b": "y"}')),
    (
        "pythonic",
        "[f(b=[True, None, (1, 2.5e1), {'k': '\\u00e9\\''}])]",
        call(0, "f", '{"b": [true, null, [1, 25.0], {"k": "é\'"}]}'),
    ),
    ("pythonic", "[1] says so", [Content("[1] says so")]),
    ("pythonic", "[f(a=os.system('x'))]", [Content("[f(a=os.system('x'))]")]),
    ("mistral", f"[TOOL_CALLS][{ONE}, {ONE}]", [*call(0, "f", GIVEN), *call(1, "f", GIVEN)]),
    ("mistral", f"[TOOL_CALLS] [{ONE}]", call(0, "f", GIVEN)),
    (
        "mistral",
        'Ok[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]get-it[CALL_ID]9[ARGS]{}',
        [Content("Ok"), *call(0, "f", '{"a": 1}'), *call(1, "get-it")],
    ),
    ("mistral", f"[{ONE}]", call(0, "f", GIVEN)),
    ("mistral", "[TOOL_CALLS]nobody[ARGS]{}", [Content("[TOOL_CALLS]nobody[ARGS]{}")]),
    (
        "gemma",
        "Ok:\n```tool_code\nprint(f(a=1))\nget-it()\n```\n",
        [Content("Ok:"), *call(0, "f", '{"a": 1}'), *call(1, "get-it")],
    ),
    ("gemma", "```tool_code\nimport os\n```", [Content("```tool_code\nimport os\n```")]),
    ("gemma", f"```json\n{ONE}\n```", call(0, "f", GIVEN)),
    ("gemma", '```json\n{"a": 1}\n```', [Content('```json\n{"a": 1}\n```')]),
    ("phi4", f"<|tool_call|>[{ONE}]<|/tool_call|>", call(0, "f", GIVEN)),
    ("phi4", f"functools[{ONE}]", call(0, "f", GIVEN)),
    ("granite", f"<|tool_call|>[{ONE}]", call(0, "f", GIVEN)),
    ("granite", f"Ok <tool_call>[{ONE}]</tool_call>", [Content("Ok"), *call(0, "f", GIVEN)]),
    (
        "cohere",
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[\n    "
        '{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}},\n    '
        '{"tool_call_id": "1", "tool_name": "get-it", "parameters": {}}\n]<|END_ACTION|>',
        [Reasoning("Hm."), *call(0, "f", '{"a": 1}'), *call(1, "get-it")],
    ),
    ("cohere", 'Action: ```json\n[{"tool_name": "f", "parameters": {"a": 1}}]\n```', call(0, "f", '{"a": 1}')),
    ("cohere", "<|START_ACTION|>[no call]", [Content("<|START_ACTION|>[no call]")]),
    (
        "olmo3",
        "Sure.\n<function_calls>\nf(a=1, b='x')\nget-it()\n</function_calls>",
        [Content("Sure."), *call(0, "f", '{"a": 1, "b": "x"}'), *call(1, "get-it")],
    ),
    ("lfm2", "<|tool_call_start|>[f(a=1)]<|tool_call_end|>Ok", [*call(0, "f", '{"a": 1}'), Content("Ok")]),
    ("deepseek", f"Ok.\n{V3}", [Content("Ok."), *call(0, "f", GIVEN), *call(1, "get-it")]),
    ("deepseek", V31, [*call(0, "f", GIVEN), *call(1, "get-it")]),
    ("deepseek", V31.replace("get-it", "who"), [*call(0, "f", GIVEN), Content(BEHIND.replace("get-it", "who"))]),
    ("hermes", "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", call(0, "f", '{"a": 1}')),
    ("hermes", "<function=who></function>", [Content("<function=who></function>")]),
    ("pythonic", "[f(a=1, b=x)] y", [*call(0, "f", '{"a": 1', False), Content("b=x)] y")]),
    (
        "glm45",
        f"<think>t</think>\nOk\n{GLM}\n<tool_call>get-it\n</tool_call>",
        [Reasoning("t"), Content("Ok"), *call(0, "f", '{"a": 1, "b": "2", "c": [true]}'), *call(1, "get-it")],
    ),
    ("glm45", GLM.replace("\n", ""), call(0, "f", '{"a": 1, "b": "2", "c": [true]}')),
    ("glm45", GLM.replace(">f\n", ">who\n"), [Content(GLM.replace(">f\n", ">who\n"))]),
    (
        "glm45",
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>oh",
        [*call(0, "f", '{"a": 1', False), Content("oh")],
    ),
    ("glm45", f"<tool_call>{ONE}</tool_call>", call(0, "f", GIVEN)),
    ("glm4", f"f\n{GIVEN}", call(0, "f", GIVEN)),
    ("glm4", f"f\n{GIVEN}<|assistant|>get-it\n{{}}", [*call(0, "f", GIVEN), *call(1, "get-it")]),
    ("glm4", "f is a function\n{}", [Content("f is a function\n{}")]),
    ("glm4", "f\nis a function", [Content("f\nis a function")]),
    ("glm4", "I call\nf\n{}", [Content("I call\nf\n{}")]),
    ("glm4", "who\n{}", [Content("who\n{}")]),
    ("deepseek_v32", f"<think>t</think>Ok.\n\n{DSML}", [Reasoning("t"), Content("Ok."), *DSML_CALLS]),
    ("deepseek_v4", DSML.replace("function_calls", "tool_calls"), DSML_CALLS),
    ("deepseek_v32", DSML.replace("get-it", "who"), [DSML_CALLS[0], *DSML_CALLS[1:3], Content(DSML_REST)]),
    (
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="false">1'
        "</｜DSML｜parameter>oh",
        [*call(0, "f", '{"a": 1', False), Content("oh")],
    ),
    ("deepseek_v32", "I say <｜DSML｜function_calls>.", [Content("I say <｜DSML｜function_calls>.")]),
    (
        "kimi_k2",
        f"Ok<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{GIVEN}"
        "<|tool_call_end|><|tool_call_begin|>functions.get-it:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        [Content("Ok"), *call(0, "f", GIVEN), *call(1, "get-it")],
    ),
    (
        "gemma4",
        '<|channel>thought\nHm.<channel|>Ok<|tool_call>call:f{a:1,b:<|"|>x}\n"]<|"|>,c:[true,{d:null,"e":2.5}]}<tool_call|>',
        [
            Reasoning("Hm."),
            Content("Ok"),
            *call(0, "f", '{"a": 1, "b": "x}\\n\\"]", "c": [true, {"d": null, "e": 2.5}]}'),
        ],
    ),
    (
        "gemma4",
        "<|tool_call>call:get-it{}<tool_call|><|tool_call>call:f{b:word two,a: -1 }<tool_call|>",
        [*call(0, "get-it"), *call(1, "f", '{"b": "word two", "a": -1}')],
    ),
    (
        "gemma4",
        "<start_function_call>call:f{b:<escape>x<escape>,c:[]}<end_function_call>",
        call(0, "f", '{"b": "x", "c": []}'),
    ),
    ("gemma4", "<|tool_call>call:who{}<tool_call|>", [Content("<|tool_call>call:who{}<tool_call|>")]),
    ("gemma4", "<|tool_call>call:f{a:1]", [*call(0, "f", '{"a": ', False), Content("1]")]),
    ("harmony", "Plain. ", [Content("Plain. ")]),
    ("harmony", f"[{ONE}]", call(0, "f", GIVEN)),
    (
        "harmony",
        f"{ANALYSIS}Hm.<|end|>{TURN}<|channel|>final<|message|> Yes.\n<|return|>",
        [Reasoning("Hm."), Content(" Yes.\n")],
    ),
    (
        "harmony",
        f"{ANALYSIS}Hm.<|end|>{TURN}<|channel|>commentary<|message|>I look.<|end|>{TURN}"
        f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{GIVEN}<|call|>",
        [Reasoning("Hm."), Content("I look."), *call(0, "f", GIVEN)],
    ),
    ("harmony", f" to=functions.f<|channel|>commentary json<|message|>{GIVEN}", call(0, "f", GIVEN)),
    (
        "harmony",
        f"{TURN} to=functions.get-it<|channel|>analysis<|message|><|call|>{TURN}{ANALYSIS}x<|start|>",
        [*call(0, "get-it"), Reasoning("x"), Content("<|start|>")],
    ),
    (
        "harmony",
        f"{TO_WHO}<|message|>{{}}<|call|>{TURN}<|channel|>final<|message|>ok",
        [Content(f"{TO_WHO}<|message|>{{}}<|call|>ok")],
    ),
    (
        "harmony",
        '<|channel|>commentary to=functions.f<|message|>{"a": 1x<|call|>',
        [*call(0, "f", '{"a": 1', False), Content("x")],
    ),
    (
        "harmony",
        "<|channel|>commentary to=functions.f<|message|>no",
        [Content("<|channel|>commentary to=functions.f<|message|>no")],
    ),
    ("harmony", "<|channel|>odd<|message|>x<|end|>", [Content("<|channel|>odd<|message|>x<|end|>")]),
    ("json", f" {ONE}\n", call(0, "f", GIVEN)),
    ("json", '{"name": "f"}', [Content('{"name": "f"}')]),
    ("none", ONE, [Content(ONE)]),
]


@pytest.mark.parametrize(("name", "text", "expected"), KNOWN)
def test_known_texts_whole_and_character_by_character(name: str, text: str, expected: list[Piece]) -> None:
    assert read(name, [text]) == expected
    assert read(name, list(text)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Before arguments begin, a call that goes wrong was none.
        ('<tool_call>{"name": "who", "arguments": {}}</tool_call>', None),
        ('<tool_call>{"name": f}</tool_call>', None),
        ('<tool_call>{"name": "f", "arguments": 3}</tool_call>', None),
        ('<tool_call>{"arguments": {}}</tool_call>', None),
        ('  <tool_call>\n{"name": "f", "arg', None),
        ('<tool_call>{"name": "f", "name": "f"}', None),
        ("a <tool_cal", None),
        # Later it is a call that is not whole, and what follows is content.
        ('<tool_call>{"name": "f", "arguments": {"a": 1x}} y', [*call(0, "f", '{"a": 1', False), Content("x}} y")]),
        ('<tool_call>{"name": "f", "arguments": {"a": [', call(0, "f", '{"a": [', False)),
        # A brace or marker that is missing at the end harms nobody.
        ('<tool_call>{"name": "f", "arguments": {}', call(0, "f")),
        ('<tool_call>{"name": "f", "arguments": {}} \n', call(0, "f")),
    ],
)
def test_calls_that_go_wrong(text: str, expected: list[Piece] | None) -> None:
    assert read("hermes", list(text)) == ([Content(text)] if expected is None else expected)


def test_a_second_call_that_goes_wrong_leaves_the_first() -> None:
    text = f'[TOOL_CALLS][{ONE}, {{"name": "who", "arguments": {{}}}}] x'
    assert read("mistral", list(text)) == [*call(0, "f", GIVEN), Content('{"name": "who", "arguments": {}}] x')]


def test_arguments_come_as_they_are_written() -> None:
    reader = parser_named("hermes").new(TOOLS)
    assert reader.feed('<tool_call>{"name": "f", "arguments": ') == []
    assert reader.feed('{"b": "no') == [CallStart(0, "f"), CallArguments(0, '{"b": "no')]
    assert reader.feed('w"') == [CallArguments(0, 'w"')]
    assert reader.feed("}") == [CallArguments(0, "}"), CallEnd(0)]


def test_content_waits_only_for_blanks_and_what_may_become_a_marker() -> None:
    reader = parser_named("hermes").new(TOOLS)
    assert reader.feed("Yes. ") == [Content("Yes.")]
    assert reader.feed("<tool") == []
    assert reader.feed("box>") == [Content(" <toolbox>")]
    assert parser_named("hermes").new().feed("a <tool_call> ") == [Content("a <tool_call> ")]


def test_the_prompt_tells_whether_reasoning_is_open() -> None:
    assert read("qwen3", ["a</think>b"], "<assistant>\n<think>\n") == [Reasoning("a"), Content("b")]
    assert read("qwen3", ["a</think>b"], "<assistant>\n<think>\n\n</think>\n\n") == [Content("a</think>b")]
    assert read("deepseek_r1", ["a</think>b"], "<assistant>") == [Content("a</think>b")]
    assert read("gemma4", ["a<channel|>b"], "<|turn>model\n<|channel>thought\n") == [Reasoning("a"), Content("b")]
    assert read("gemma4", ["b"], "<|turn>model\n<|channel>thought\n<channel|>") == [Content("b")]


# Texts made of what parsers look for, so that they get deep into every state.
SCRAPS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
    *("<function=f>", "<function=", "<parameter=a>", "<parameter=c>", "</parameter>", "</function>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "function"),
    *("```tool_code\n", "```json\n", "```", "<|tool_call|>", "<|/tool_call|>", "functools"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|tool_call>", "call:f{", '<|"|>', "<tool_call|>"),
    *("<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "a:", "b:"),
    *('{"name": "f", "arguments": ', '{"name": "f"', '"arguments": {', '"parameters": {"a": 1}', '"name": "get-it"'),
    *('"name": "who"', "f(", "a=1", "print(", ")", '"x', '{"a": 1}', "{}", "}}", "f", "word", "true", "nul", "None"),
    *"{}[],:\"'\\1-.e \n;<é",
    "\\u00",
]
texts = st.lists(st.sampled_from(SCRAPS), max_size=24).map("".join) | st.text(max_size=40)
names = st.sampled_from(parser_names())


def cut(text: str, places: Sequence[int]) -> list[str]:
    at = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(at)]


@settings(max_examples=examples(400))
@given(name=names, text=texts, places=st.lists(st.integers(0, 200), max_size=8))
@example("mistral", "[T", [1])
def test_any_cut_gives_the_same_pieces(name: str, text: str, places: list[int]) -> None:
    assert read(name, cut(text, places)) == read(name, [text])


@settings(max_examples=examples(400))
@given(name=names, text=texts)
@example("gemma", "```tool_code\nf()\nprint()```")
def test_nothing_is_lost_or_said_twice(name: str, text: str) -> None:
    """Content stands in the text in its order; only beside calls and reasoning is something left out."""
    parser = parser_named(name)
    at, marked = 0, parser.thinking is not None
    for piece in read(name, list(text)):
        match piece:
            case Content(said) | Reasoning(said):
                start = text.find(said, at)
                assert start >= at and (start == at or marked), (piece, at)
                at, marked = start + len(said), isinstance(piece, Reasoning)
            case _:
                marked = True
    assert marked or at == len(text)


@settings(max_examples=examples(400))
@given(name=names, text=texts)
def test_calls_are_well_formed_whatever_is_read(name: str, text: str) -> None:
    fragments: dict[int, str] = {}
    open_call: int | None = None
    for piece in read(name, list(text)):
        match piece:
            case CallStart(index, tool):
                assert open_call is None and index == len(fragments) and tool in ("f", "get-it")
                fragments[index], open_call = "", index
            case CallArguments(index, fragment):
                assert index == open_call
                fragments[index] += fragment
            case CallEnd(index, whole):
                assert index == open_call
                assert not whole or isinstance(json.loads(fragments[index]), dict)
                open_call = None
            case Content(said) | Reasoning(said):
                assert open_call is None and said
    assert open_call is None


decimals = st.floats(-1e6, 1e6).map(lambda x: round(x, 3))
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | decimals | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
keywords = st.dictionaries(st.sampled_from(["a", "b", "c_1"]), values, max_size=3)


def as_json(name: str, arguments: dict[str, Any], key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def as_python(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def as_gemma(value: Any) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            return "{" + ",".join(f"{as_gemma(key)}:{as_gemma(inner)}" for key, inner in value.items()) + "}"
        case list():
            return "[" + ",".join(map(as_gemma, value)) + "]"
        case _:
            return json.dumps(value)


WRITERS = ["hermes", "qwen3", "llama3", "mistral", "phi4", "gemma", "lfm2", "pythonic", "json"]
WRITERS += ["kimi_k2", "gemma4", "harmony"]


def written(parser: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    json_calls = [as_json(*each) for each in calls]
    python_calls = [as_python(*each) for each in calls]
    match parser:
        case "hermes" | "qwen3":
            return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in json_calls)
        case "llama3":
            return "; ".join(as_json(*each, "parameters") for each in calls)
        case "mistral":
            return f"[TOOL_CALLS][{', '.join(json_calls)}]"
        case "phi4":
            return f"<|tool_call|>[{', '.join(json_calls)}]<|/tool_call|>"
        case "gemma":
            return "```tool_code\n" + "\n".join(python_calls) + "\n```"
        case "lfm2":
            return f"<|tool_call_start|>[{', '.join(python_calls)}]<|tool_call_end|>"
        case "pythonic":
            return f"[{', '.join(python_calls)}]"
        case "kimi_k2":
            heads = [f"<|tool_call_begin|>functions.{name}:{i}" for i, (name, _) in enumerate(calls)]
            bodies = [json.dumps(arguments, ensure_ascii=False) for _, arguments in calls]
            each = zip(heads, bodies, strict=True)
            made = "".join(f"{head}<|tool_call_argument_begin|>{body}<|tool_call_end|>" for head, body in each)
            return f"<|tool_calls_section_begin|>{made}<|tool_calls_section_end|>"
        case "gemma4":
            return "".join(f"<|tool_call>call:{name}{as_gemma(arguments)}<tool_call|>" for name, arguments in calls)
        case "harmony":
            to = [
                (f"{TURN}<|channel|>commentary to=functions.{name} <|constrain|>json", given) for name, given in calls
            ]
            return "".join(f"{head}<|message|>{json.dumps(given, ensure_ascii=False)}<|call|>" for head, given in to)
        case _:
            return f"[{', '.join(json_calls)}]"


@settings(max_examples=examples(300))
@given(
    name=st.sampled_from(WRITERS),
    calls=st.lists(st.tuples(st.sampled_from(["f", "get-it"]), keywords), min_size=1, max_size=3),
    places=st.lists(st.integers(0, 300), max_size=5),
)
def test_what_families_write_comes_back(name: str, calls: list[tuple[str, dict[str, Any]]], places: list[int]) -> None:
    pieces = read(name, cut(written(name, calls), places))
    assert [piece.name for piece in pieces if isinstance(piece, CallStart)] == [called for called, _ in calls]
    given_arguments = [json.loads(piece.text) for piece in pieces if isinstance(piece, CallArguments)]
    assert given_arguments == [arguments for _, arguments in calls]
    assert len(pieces) == 3 * len(calls)


@settings(max_examples=examples(200))
@given(
    b=st.text(max_size=12) | st.sampled_from(["1", "null", "<b>", "a\n\n", "</parameter", "{}"]),
    c=values.filter(lambda value: not isinstance(value, str)),
    places=st.lists(st.integers(0, 120), max_size=5),
)
def test_tags_give_strings_and_other_values_back(b: str, c: Any, places: list[int]) -> None:
    given_values = {"b": b, "c": json.dumps(c, ensure_ascii=False)}
    tags = "\n".join(f"<parameter={key}>\n{value}\n</parameter>" for key, value in given_values.items())
    text = f"<tool_call>\n<function=f>\n{tags}\n</function>\n</tool_call>"
    keyed = "\n".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>" for key, value in given_values.items()
    )
    for name, said in (("hermes", text), ("glm45", f"<tool_call>f\n{keyed}\n</tool_call>")):
        start, arguments, end = read(name, cut(said, places))
        assert (start, end) == (CallStart(0, "f"), CallEnd(0))
        assert isinstance(arguments, CallArguments) and json.loads(arguments.text) == {"b": b, "c": c}


SAID = "ŷ"  # no marker holds it
HARMONY = [
    *(ANALYSIS, TURN, TO_WHO, "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", " to="),
    *("<|channel|>final<|message|>", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>", "assistant"),
    *('{"a": 1}', "{}", '{"a": "', "final", "functions.f", SAID, SAID, " ", "\n", "<|", "[", '[{"name": "f", "argum'),
]


@settings(max_examples=examples(600))
@given(
    text=st.lists(st.sampled_from(HARMONY), max_size=16).map("".join),
    places=st.lists(st.integers(0, 200), max_size=8),
)
def test_any_cut_of_channels_gives_the_same_and_loses_nothing(text: str, places: list[int]) -> None:
    pieces = read("harmony", cut(text, places))
    assert pieces == read("harmony", [text])
    said = "".join(getattr(piece, "text", "") for piece in pieces)
    assert said.count(SAID) == text.count(SAID)
    ends = [piece for piece in pieces if isinstance(piece, CallEnd)]
    assert len(ends) == sum(isinstance(piece, CallStart) for piece in pieces)


def test_the_prompt_tells_which_message_is_open() -> None:
    assert read("harmony", ["a<|end|>"], f"{TURN}{ANALYSIS}") == [Reasoning("a")]
    assert read("harmony", ["a<|return|>"], f"{TURN}<|channel|>final<|message|>b") == [Content("a")]
    assert read("harmony", [f"{ANALYSIS}a"], f"<|start|>user<|message|>b<|end|>{TURN}") == [Reasoning("a")]


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("glm45", [KEYED.format("a", 1), "<arg_key>b</arg_key><arg_value>x</arg_value>", "</tool_call>"]),
        ("pythonic", ["[f(a=1,", " b='x',", ")]"]),
        ("lfm2", ["<|tool_call_start|>[f(a=1,", " b='x',", ")]<|tool_call_end|>"]),
        ("gemma4", ['<|tool_call>call:f{a:1,', 'b:<|"|>x<|"|>', "}<tool_call|>"]),
        ("harmony", ['<|channel|>commentary to=functions.f<|message|>{"a": 1', ', "b": "x"', "}<|call|>"]),
        ("kimi_k2", ['<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1', ', "b": "x"', "}"]),
        ("hermes", ["<tool_call><function=f><parameter=a>1</parameter>", "<parameter=b>x</parameter>", "</function>"]),
    ],
)  # fmt: skip
def test_arguments_are_passed_on_one_by_one(name: str, pieces: list[str]) -> None:
    reader = parser_named(name).new(TOOLS)
    first, second, third = (reader.feed(piece) for piece in pieces)
    assert first == [CallStart(0, "f"), CallArguments(0, '{"a": 1')]
    assert second == [CallArguments(0, ', "b": "x"')]
    assert third == [CallArguments(0, "}"), CallEnd(0)]
    assert reader.finish() == []


SCRAPS = [
    "<tool_call>", "<tool_call>{", '{"name": "f", "arguments": ', "[f(", "[TOOL_CALLS]", "[", "<", "</think", " ", "`",
    "```tool_code\n", "<tool_call>[" + ONE, "f(a=[", "\\", '"', "functools", "<|tool_call|>[{", "1", "print(",
]  # fmt: skip


@pytest.mark.parametrize("name", parser_names())
@pytest.mark.parametrize("scrap", some(SCRAPS, 5))
def test_work_grows_with_the_text_and_not_faster(name: str, scrap: str) -> None:
    """Counted, not timed: each character is looked at a few times whatever came before it."""
    for head in ("", "<think>", "[f(a=", '<tool_call>{"name": "f", "arguments": {"a": "'):
        reader = parser_named(name).new(TOOLS)
        text = head + scrap * 100
        for char in text:
            reader.feed(char)
        reader.finish()
        assert reader.work <= 4 * len(text) + 64


def test_deep_nesting_is_read_without_recursion() -> None:
    deep = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"
    assert read("hermes", [f'<tool_call>{{"name": "f", "arguments": {deep}}}</tool_call>']) == call(0, "f", deep)
    python = "[f(a=" + "[" * 100_000 + "]" * 100_000 + ")]"
    assert read("pythonic", [python]) == [Content(python)]


TEMPLATES = [
    ("x <tool_call> y", None, "hermes", "<tool_call>", False),
    ("{{ '[TOOL_CALLS]' }}", None, "mistral", "[TOOL_CALLS]", False),
    ("<|tool|>..<|/tool|>", None, "phi4", "<|/tool|>", False),
    ("Environment: ipython", None, "llama3", "ipython", False),
    ("[func_name1(params)]", None, "pythonic", "func_name1", False),
    ("<start_of_turn>model", None, "gemma", "<start_of_turn>", False),
    ("<|tool_list_start|>", None, "lfm2", "<|tool_list_start|>", False),
    ("<｜tool▁calls▁begin｜>", None, "deepseek", "<｜tool▁calls▁begin｜>", False),
    ("<tool_call>{{ f }}<arg_key>", None, "glm45", "<arg_key>", False),
    ("[gMASK]<sop><|observation|>", None, "glm4", "<|observation|>", False),
    ("<｜DSML｜function_calls>", None, "deepseek_v32", "｜DSML｜", False),
    ("<|tool_calls_section_begin|>", None, "kimi_k2", "<|tool_calls_section_begin|>", False),
    ("<|turn>model\n<|tool_call>call:", None, "gemma4", "<|tool_call>", False),
    ("<start_of_turn><start_function_call>", None, "gemma4", "<start_function_call>", False),
    ("<|start|>assistant<|channel|>final<|message|>", None, "harmony", "channel analysis", False),
    ("<|im_start|>", "gpt_oss", "harmony", "gpt_oss", False),
    ("<|im_start|>", "gemma3", "gemma", "gemma3", False),
    ("<|im_start|>", "qwen2", "hermes", "qwen2", False),
    ("<|im_start|>", "ernie4_5_moe", "hermes", "ernie", False),
    ("<|im_start|>", "granite", "granite", "granite", False),
    ("<|START_ACTION|>", None, "cohere", "<|START_ACTION|>", False),
    ("<|im_start|>", "cohere", "cohere", "cohere", False),
    ("<function_calls>", None, "olmo3", "<function_calls>", False),
    ("<|im_start|>", "deepseek3", "deepseek", "deepseek3", False),
    ("<|im_start|>", "glm4_moe", "glm45", "glm4_moe", False),
    ("<|im_start|>", "glm4", "glm4", "glm4", False),
    (None, None, "json", "neither", False),
    ("{% if add_generation_prompt %}<a><think>\n{% endif %}<tool_call>", None, "hermes", "opens it", True),
    ("{% if add_generation_prompt %}<a><think>\n\n</think>\n\n{% endif %}", None, "json", "'<think>'", False),
]


@pytest.mark.parametrize(("template", "family", "name", "why", "opened"), TEMPLATES)
def test_parsers_are_chosen_by_template_and_say_why(
    template: str | None, family: str | None, name: str, why: str, opened: bool
) -> None:
    parser = parser_for(template, family)
    assert parser.name == name and why in parser.reason
    assert parser.opens_thinking(None) is opened


def test_markers_are_those_that_may_be_special_tokens() -> None:
    assert parser_named("qwen3").markers == ("<tool_call>", "</tool_call>", "<think>", "</think>")
    assert parser_named("llama3").markers == ("<|python_tag|>",)
    assert "[ARGS]" in parser_named("mistral").markers
    assert {"<|channel|>", "<|message|>", "<|end|>", "<|call|>"} <= {*parser_named("harmony").markers}
    assert {"<|channel>", "<channel|>", '<|"|>', "<|tool_call>"} <= {*parser_named("gemma4").markers}


def test_unknown_names_are_refused_with_those_there_are() -> None:
    with pytest.raises(ParamError, match="hermes"):
        parser_named("nobody")


@pytest.mark.parametrize(
    ("tools", "place"),
    [
        ([{"type": "function"}], r"tools\[0\]"),
        ([TOOLS[0], {"function": {"name": 3}}], r"tools\[1\]"),
        ([TOOLS[0], TOOLS[0]], "two tools"),
        ([{"name": "f", "parameters": [1]}], r"tools\[0\].parameters"),
        ([{"name": "f", "parameters": {"type": "string"}}], "type object"),
    ],
)
def test_broken_tools_are_refused_by_place(tools: list[Any], place: str) -> None:
    with pytest.raises(ParamError, match=place):
        parser_named("hermes").new(tools)


def test_parameters_that_are_no_json_are_refused() -> None:
    with pytest.raises(ParamError, match="'f'"):
        argument_schemas([{"name": "f", "parameters": {"maximum": float("nan")}}])
